#!/usr/bin/env bash
# Ours beside UCX (and libfabric's shm provider, where fi_pingpong is installed) over shared memory, interleaved on
# the same two processors: ours, theirs, ours, theirs, ... Medians, and their ratio.
#
#   benches/compare-ucx.sh [ROUNDS]        5 rounds by default, about two minutes
#   CPUS=2,3  processors (default 0,1)     SIZES="8 4096"  payloads of the bandwidth part
#
# Installs ucx-utils (package) when ucx_perftest is missing. Leave the machine alone meanwhile: with other load the
# ratios mean nothing. floor_ns is the ping-pong of two bare atomics between the same processors, in the same runs.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/need.sh

rounds=${1:-5}
cpus=${CPUS:-0,1}
sizes=${SIZES:-8 64 512 4096 32768 262144 1048576 4194304}
port=$((20000 + RANDOM % 20000))

need ucx_perftest ucx-utils
need jq jq
cargo build --release --locked --quiet
fishplate=${CARGO_TARGET_DIR:-target}/release/fishplate
results=$(mktemp -d)
trap 'rm -rf "$results"; [ -z "$(jobs -p)" ] || kill $(jobs -p) 2>/dev/null' EXIT
export UCX_TLS=posix UCX_WARN_UNUSED_ENV_VARS=n

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

fabric() {
    local server row
    taskset -c "${cpus#*,}" fi_pingpong -p shm -e rdm -S 8 -I 10000 >/dev/null 2>&1 &
    server=$!
    sleep 0.3
    row=$(timeout 30 taskset -c "${cpus%,*}" fi_pingpong -p shm -e rdm -S 8 -I 10000 localhost 2>/dev/null | tail -n 1) || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    keep fabric.lat "$(awk 'NF { print $7 * 1000 }' <<<"$row")"
}

# Iterations that move 2 GiB, between 500 and 2 million.
iters() { local n=$((2147483648 / $1)); echo $((n > 2000000 ? 2000000 : n < 500 ? 500 : n)); }

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    ours .lat_ns.p50 put_signal.lat put-signal -s 8 -n 500000
    theirs 2 1000 ucp_put.lat -t ucp_put_lat -s 8 -n 500000
    ours .lat_ns.p50 put_signal.lat put-signal -s 8 -n 500000
    theirs 2 1000 tag.lat -t tag_lat -s 8 -n 500000
    ours .lat_ns.p50 put_signal.lat put-signal -s 8 -n 500000
    theirs 2 1000 uct_put.lat -t put_lat -x posix -d memory -D short -s 8 -n 500000
    if command -v fi_pingpong >/dev/null; then fabric; fi
    ours '.msgs_per_s / 1e6' put.rate put -s 8 --window 64 -n 5000000
    theirs 8 1e-6 ucp_put.rate -t ucp_put_bw -s 8 -n 5000000
    ours '.msgs_per_s / 1e6' signal.rate signal-rate -n 5000000
    theirs 8 1e-6 uct_put.rate -t put_bw -x posix -d memory -D short -s 8 -n 5000000
    for size in $sizes; do
        ours '.bytes_per_s / 1e6' "put.bw.$size" put -s "$size" --window 64 -n "$(iters "$size")"
        # MB there are MiB.
        theirs 6 1.048576 "ucp_put.bw.$size" -t ucp_put_bw -s "$size" -n "$(iters "$size")"
    done
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
awk -v a="$(median put_signal.lat)" -v f="$floor" 'BEGIN { printf "put-signal 8 B, half round trip: %.2f x floor\n", a / f }'
printf '%-52s %10s %10s %7s\n' '' ours theirs 'ahead x'
line 'latency 8 B, ns: put-signal / ucp_put_lat' put_signal.lat ucp_put.lat
line 'latency 8 B, ns: put-signal / tag_lat' put_signal.lat tag.lat
line 'latency 8 B, ns: put-signal / uct put_lat short' put_signal.lat uct_put.lat
line 'latency 8 B, ns: put-signal / fi_pingpong shm' put_signal.lat fabric.lat
line 'rate 8 B, M/s: put / ucp_put_bw' put.rate ucp_put.rate
line 'rate 8 B, M/s: put / uct put_bw short' put.rate uct_put.rate
line 'rate 8 B, M/s: signal-rate / uct put_bw short' signal.rate uct_put.rate
for size in $sizes; do
    line "bandwidth $size B, MB/s: put / ucp_put_bw" "put.bw.$size" "ucp_put.bw.$size"
done
