#!/usr/bin/env bash
# Tagged messages of ours beside UCX's over shared memory (posix and cma), interleaved on the same two processors: ours, theirs,
# ours, theirs, ... Medians, and their ratio. Open MPI and MPICH are run beside them where their compilers are installed.
#
#   benches/compare-tag.sh [ROUNDS]        5 rounds by default, about three minutes
#   CPUS=2,3  processors (default 0,1)     SIZES="8 4096"  payloads of the latency and bandwidth parts
#
# Installs ucx-utils (package) when ucx_perftest is missing. Leave the machine alone meanwhile: with other load the
# ratios mean nothing. floor_ns is the ping-pong of two bare atomics between the same processors, in the same runs.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/need.sh

rounds=${1:-5}
cpus=${CPUS:-0,1}
sizes=${SIZES:-8 4096 65536 1048576}
port=$((20000 + RANDOM % 20000))

need ucx_perftest ucx-utils
need jq jq
cargo build --release --locked --quiet
fishplate=${CARGO_TARGET_DIR:-target}/release/fishplate
results=$(mktemp -d)
trap 'rm -rf "$results"; [ -z "$(jobs -p)" ] || kill $(jobs -p) 2>/dev/null' EXIT
export UCX_TLS=posix,cma UCX_WARN_UNUSED_ENV_VARS=n

# keep NAME VALUE: one more value of a series
keep() {
    [ -n "$2" ] || { echo "$1: no value" >&2; exit 1; }
    echo "$2" >>"$results/$1"
}

# ours FIELD NAME ARGUMENTS...: one row of `fishplate perf`, of which FIELD (jq) is kept
ours() {
    local field=$1 name=$2 row
    shift 2
    row=$("$fishplate" perf "$@" --transport shm --pin "$cpus" --format json)
    keep "$name" "$(jq -r "$field" <<<"$row")"
    keep floor "$(jq -r '.floor_ns // empty' <<<"$row")"
}

# theirs COLUMN FACTOR NAME ARGUMENTS...: server and client of ucx_perftest; a column of its last CSV line is kept
theirs() {
    local column=$1 factor=$2 name=$3 row='' server
    shift 3
    port=$((port + 1))
    ucx_perftest -p $port -c "${cpus#*,}" "$@" >/dev/null 2>&1 &
    server=$!
    for _ in {1..40}; do
        sleep 0.05
        row=$(ucx_perftest -p $port -c "${cpus%,*}" -v "$@" localhost 2>/dev/null | grep -E '^ *[0-9]+,' | tail -n 1) && break
    done
    wait "$server" || true
    keep "$name" "$(awk -F, -v c="$column" -v f="$factor" 'NF { print $c * f }' <<<"$row")"
}

# mpi NAME COMPILER RUNNER...: ping-pong and rate of 8 bytes of an MPI, where its compiler is there
mpi() {
    local name=$1 compiler=$2 row
    shift 2
    command -v "$compiler" >/dev/null || return 0
    [ -x "$results/$name" ] || "$compiler" -O3 -o "$results/$name" benches/tag-mpi.c 2>/dev/null || return 0
    row=$(taskset -c "$cpus" timeout 60 "$@" -n 2 "$results/$name" 2>/dev/null) || return 0
    keep "$name.lat" "${row% *}"
    keep "$name.rate" "${row#* }"
}

# Iterations that move 1 GiB, between 500 and half a million.
iters() { local n=$((1073741824 / $1)); echo $((n > 500000 ? 500000 : n < 500 ? 500 : n)); }

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    for size in $sizes; do
        n=$(iters "$size")
        ours .lat_ns.p50 "tag.$size.lat" tag -s "$size" -n "$n"
        theirs 2 1000 "ucp.$size.lat" -t tag_lat -s "$size" -n "$n"
        ours '.bytes_per_s / 1e6' "tag.bw.$size" tag-bw -s "$size" --window 64 -n "$n"
        # MB there are MiB.
        theirs 6 1.048576 "ucp.bw.$size" -t tag_bw -s "$size" -n "$n"
    done
    ours '.msgs_per_s / 1e6' tag.rate tag-bw -s 8 --window 64 -n 3000000
    theirs 8 1e-6 ucp.rate -t tag_bw -s 8 -n 3000000
    mpi ompi mpicc.openmpi mpirun.openmpi --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl self,vader
    mpi mpich mpicc.mpich mpirun.mpich
done

median() { sort -g "$results/$1" | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

# line TITLE OURS THEIRS: a ratio above 1 is ours ahead
line() {
    [ -s "$results/$3" ] || { printf '%-52s SKIPPED: not installed\n' "$1"; return 0; }
    local a b
    a=$(median "$2") b=$(median "$3")
    awk -v t="$1" -v a="$a" -v b="$b" -v lower="$([[ $2 == *.lat ]] && echo 1 || echo 0)" \
        'BEGIN { r = lower ? b / a : a / b; printf "%-52s %10.1f %10.1f %7.2f %s\n", t, a, b, r, r < 1 ? "behind" : "" }'
}

floor=$(median floor)
printf '\n%s; processors %s; %s rounds, medians; floor_ns %.1f (%.1f to %.1f)\n' "$(ucx_info -v | head -n 1)" "$cpus" "$rounds" \
    "$floor" "$(sort -g "$results/floor" | head -n 1)" "$(sort -g "$results/floor" | tail -n 1)"
first=${sizes%% *}
awk -v s="$first" -v a="$(median "tag.$first.lat")" -v f="$floor" 'BEGIN { printf "tag %s B, half round trip: %.2f x floor\n", s, a / f }'
printf '%-52s %10s %10s %7s\n' '' ours theirs 'ahead x'
for size in $sizes; do
    line "latency $size B, ns: tag / tag_lat" "tag.$size.lat" "ucp.$size.lat"
done
line 'latency 8 B, ns: tag / Open MPI vader' "tag.8.lat" ompi.lat
line 'latency 8 B, ns: tag / MPICH' "tag.8.lat" mpich.lat
line 'rate 8 B, M/s: tag-bw / tag_bw' tag.rate ucp.rate
line 'rate 8 B, M/s: tag-bw / Open MPI vader' tag.rate ompi.rate
line 'rate 8 B, M/s: tag-bw / MPICH' tag.rate mpich.rate
for size in $sizes; do
    line "bandwidth $size B, MB/s: tag-bw / tag_bw" "tag.bw.$size" "ucp.bw.$size"
done
