# What the compare-*.sh scripts share: interleaved runs of ours and of theirs over shared memory on the same two processors, kept as
# series, of which medians and ratios are printed. Sourced from the project's root, with `rounds` set.
#
#   CPUS=2,3  processors (default 0,1)
#
# Installs ucx-utils and jq (packages) when they are missing. Leave the machine alone meanwhile: with other load the ratios mean
# nothing. floor_ns is the ping-pong of two bare atomics between the same processors, in the same runs.
source tests/need.sh

cpus=${CPUS:-0,1}
port=$((20000 + RANDOM % 20000))

need ucx_perftest ucx-utils
need jq jq
cargo build --release --locked --quiet
fishplate=${CARGO_TARGET_DIR:-target}/release/fishplate
results=$(mktemp -d)
trap 'rm -rf "$results"; [ -z "$(jobs -p)" ] || kill $(jobs -p) 2>/dev/null' EXIT
export UCX_WARN_UNUSED_ENV_VARS=n

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

# fabric SIZE COUNT NAME BANDWIDTH_NAME: libfabric's shm by fi_pingpong, where that is installed: ns, and MB/s if a name is given
fabric() {
    command -v fi_pingpong >/dev/null || return 0
    local size=$1 count=$2 name=$3 bandwidth=${4:-} server row
    taskset -c "${cpus#*,}" fi_pingpong -p shm -e rdm -S "$size" -I "$count" >/dev/null 2>&1 &
    server=$!
    sleep 0.3
    row=$(timeout 60 taskset -c "${cpus%,*}" fi_pingpong -p shm -e rdm -S "$size" -I "$count" localhost 2>/dev/null | tail -n 1) || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    keep "$name" "$(awk 'NF { print $7 * 1000 }' <<<"$row")"
    [ -z "$bandwidth" ] || keep "$bandwidth" "$(awk 'NF { print $6 }' <<<"$row")"
}

# mpi COMPILER SOURCE RUNNER...: a program for two ranks, built once and run; nothing where the compiler is not installed
mpi() {
    local compiler=$1 source=$2 program
    shift 2
    program=$results/$(basename "$source" .c).$compiler
    command -v "$compiler" >/dev/null || return 0
    [ -x "$program" ] || "$compiler" -O3 -o "$program" "$source" 2>/dev/null || return 0
    taskset -c "$cpus" timeout 120 "${@//PROGRAM/$program}" 2>/dev/null || true
}

# The runners of both, with the way over shared memory that each has.
openmpi=(mpirun.openmpi --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl self,vader -n 2)
mpich=(mpirun.mpich -n 2)

median() { sort -g "$results/$1" | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

# line TITLE OURS THEIRS: a ratio above 1 is ours ahead
line() {
    [ -s "$results/$3" ] || { printf '%-52s SKIPPED: not installed\n' "$1"; return 0; }
    local a b
    a=$(median "$2") b=$(median "$3")
    awk -v t="$1" -v a="$a" -v b="$b" -v lower="$([[ $2 == *.lat ]] && echo 1 || echo 0)" \
        'BEGIN { r = lower ? b / a : a / b; printf "%-52s %10.1f %10.1f %7.2f %s\n", t, a, b, r, r < 1 ? "behind" : "" }'
}

# What every table begins with. Sets `floor`.
heading() {
    floor=$(median floor)
    printf '\n%s; processors %s; %s rounds, medians; floor_ns %.1f (%.1f to %.1f)\n' "$(ucx_info -v | head -n 1)" "$cpus" "$rounds" \
        "$floor" "$(sort -g "$results/floor" | head -n 1)" "$(sort -g "$results/floor" | tail -n 1)"
}

# columns: over the lines
columns() { printf '%-52s %10s %10s %7s\n' '' ours theirs 'ahead x'; }
