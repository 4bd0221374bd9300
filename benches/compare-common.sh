# Functions of the compare-*.sh scripts. The scripts interleave our runs and runs of another
# library, over shared memory on the same two processors. They collect the results of each test in a
# series, and print medians and ratios. Sourced from the project's root, with `rounds` set.
#
#   CPUS=2,3  processors (default 0,1)
#
# Installs ucx-utils and jq (packages) when they are missing. Needs an idle machine: with other load
# the ratios mean nothing. floor_ns is the ping-pong of two bare atomics between the same
# processors, in the same runs.
source tests/need.sh

cpus=${CPUS:-0,1}

need ucx_perftest ucx-utils
need jq jq
cargo build --release --locked --quiet
fishplate=${CARGO_TARGET_DIR:-target}/release/fishplate
results=$(mktemp -d)
trap 'rm -rf "$results"; [ -z "$(jobs -p)" ] || kill $(jobs -p) 2>/dev/null' EXIT
export UCX_WARN_UNUSED_ENV_VARS=n

# Two processors of a virtual machine may share a cache in one minute and not in the next, which
# affects every figure. So each result is stored with its placement, near or far, as seen from the
# floor. If the placement changes during a run, the run is repeated. Only results with the same
# placement are compared.
near_ns=100

# placement FLOOR_NS: prints near, far or moved
placement() { awk -v f="$1" -v near="$near_ns" \
    'BEGIN { print f == "" ? "moved" : f < near ? "near" : "far" }'; }

# Prints the current placement.
look() {
    placement "$("$fishplate" perf put-signal --transport shm -s 8 -n 2000 --region 1M \
        --pin "$cpus" --format json 2>/dev/null |
        jq -r '.floor_ns // empty')"
}

# in_place COMMAND...: sets `row` to the output of the command and `place` to its placement, which
# is `moved` if the placement changed during each of four runs
in_place() {
    local before=$(look) after
    for _ in 1 2 3 4; do
        row=$("$@")
        after=$(look)
        place=$before
        [ "$before" != "$after" ] || return 0
        before=$after
    done
    place=moved
}

# keep NAME VALUE: appends a value to a series, for the placement `place`
keep() {
    [ "$place" != moved ] || return 0
    [ -n "$2" ] || { echo "$1: no value" >&2; exit 1; }
    echo "$2" >>"$results/$1.$place"
}

# ours FIELD NAME ARGUMENTS...: runs `fishplate perf`, and keeps FIELD (jq) of its row
ours() {
    local field=$1 name=$2 floor
    shift 2
    in_place "$fishplate" perf "$@" --transport shm --pin "$cpus" --format json
    floor=$(jq -r '.floor_ns // empty' <<<"$row")
    # Drop the result if the floor of the run shows another placement.
    [ "$(placement "$floor")" = "$place" ] || place=moved
    keep "$name" "$(jq -r "$field" <<<"$row")"
    keep floor "$floor"
}

# theirs COLUMN FACTOR NAME ARGUMENTS...: runs server and client of ucx_perftest, and keeps a column
# of the last CSV line
theirs() {
    local column=$1 factor=$2 name=$3
    shift 3
    in_place ucx "$@"
    keep "$name" "$(awk -F, -v c="$column" -v f="$factor" 'NF { print $c * f }' <<<"$row")"
}

# ucx ARGUMENTS...: runs ucx_perftest, and prints its last CSV line
ucx() {
    local row='' server port=$((20000 + RANDOM % 20000))
    ucx_perftest -p $port -c "${cpus#*,}" "$@" >/dev/null 2>&1 &
    server=$!
    for _ in {1..40}; do
        sleep 0.05
        row=$(ucx_perftest -p $port -c "${cpus%,*}" -v "$@" localhost 2>/dev/null |
            grep -E '^ *[0-9]+,' | tail -n 1) && break
    done
    wait "$server" || true
    echo "$row"
}

# fabric SIZE COUNT NAME BANDWIDTH_NAME: runs fi_pingpong over libfabric's shm if it is installed;
# keeps the latency in ns as NAME, and the rate in MB/s as BANDWIDTH_NAME if given
fabric() {
    command -v fi_pingpong >/dev/null || return 0
    in_place pingpong "$1" "$2"
    keep "$3" "$(awk 'NF { print $7 * 1000 }' <<<"$row")"
    [ -z "${4:-}" ] || keep "$4" "$(awk 'NF { print $6 }' <<<"$row")"
}

# pingpong SIZE COUNT: runs fi_pingpong, and prints its last line
pingpong() {
    local server
    taskset -c "${cpus#*,}" fi_pingpong -p shm -e rdm -S "$1" -I "$2" >/dev/null 2>&1 &
    server=$!
    sleep 0.3
    timeout 60 taskset -c "${cpus%,*}" fi_pingpong -p shm -e rdm -S "$1" -I "$2" localhost \
        2>/dev/null | tail -n 1 || true
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
}

# mpi COMPILER SOURCE RUNNER...: builds a program for two ranks once, and runs it; does nothing if
# the compiler is missing
mpi() {
    local compiler=$1 source=$2 program
    shift 2
    program=$results/$(basename "$source" .c).$compiler
    [ -x "$program" ] || "$compiler" -O3 -o "$program" "$source" 2>/dev/null || return 0
    taskset -c "$cpus" timeout 120 "${@//PROGRAM/$program}" 2>/dev/null || true
}

# The launchers and their options for shared memory.
openmpi=(mpirun.openmpi --allow-run-as-root --oversubscribe --mca pml ob1 --mca btl self,vader -n 2)
mpich=(mpirun.mpich -n 2)

# median NAME.PLACE: prints the median of a series
median() { sort -g "$results/$1" |
    awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }

# both_in OURS THEIRS: prints the placements in which both have results
both_in() {
    local place
    for place in near far; do
        if [ -s "$results/$1.$place" ] && [ -s "$results/$2.$place" ]; then echo "$place"; fi
    done
}

# line TITLE OURS THEIRS: prints one line per placement; a ratio above 1 means that ours is faster
line() {
    local place
    if ! compgen -G "$results/$3.*" >/dev/null; then
        printf '%-52s SKIPPED: not installed\n' "$1"
    elif [ -z "$(both_in "$2" "$3")" ]; then
        printf '%-52s never in one placement\n' "$1"
    fi
    for place in $(both_in "$2" "$3"); do
        awk -v t="$1" -v p="$place" -v a="$(median "$2.$place")" -v b="$(median "$3.$place")" \
            -v lower="$([[ $2 == *.lat ]] && echo 1 || echo 0)" \
            'BEGIN { r = lower ? b / a : a / b; printf "%-52s %-4s %10.1f %10.1f %7.2f %s\n", t, p, a, b, r, r < 1 ? "behind" : "" }'
    done
}

heading() {
    local place
    printf '\n%s; processors %s; %s rounds, medians\n' "$(ucx_info -v | head -n 1)" "$cpus" \
        "$rounds"
    for place in $(both_in floor floor); do
        printf '%s: floor %.1f ns (%.1f to %.1f)\n' "$place" "$(median "floor.$place")" \
            "$(sort -g "$results/floor.$place" | head -n 1)" "$(sort -g "$results/floor.$place" |
            tail -n 1)"
    done
}

# floors TITLE NAME: prints a latency as a multiple of the floor, per placement
floors() {
    local place
    for place in $(both_in "$2" floor); do
        awk -v t="$1" -v p="$place" -v a="$(median "$2.$place")" -v f="$(median "floor.$place")" \
            'BEGIN { printf "%s, %s: %.2f x floor\n", t, p, a / f }'
    done
}

# columns: prints the column titles
columns() { printf '%-52s %-4s %10s %10s %7s\n' '' '' ours theirs 'ahead x'; }
