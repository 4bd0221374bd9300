#!/usr/bin/env bash
# Compares stock Open MPI over our libpsm2.so.2, over ob1 with vader, and over UCX, in turns on the
# same two processors. Prints medians over the rounds; the figure of a round is the best of many
# short batches.
#
#   benches/compare-mpi.sh [ROUNDS]   5 rounds by default, about two minutes
#   BEFORE=FOLDER   a folder that adapters/psm2/build.sh filled earlier, compared as well
#   RANKS="2 4"     2: latency, rate and bandwidth; 4: allreduce
#   LONGEST=8       only messages of up to so many bytes; 8 takes 5 seconds per round
#
# Needs an idle machine.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/need.sh
rounds=${1:-5}
need mpirun.openmpi openmpi-bin &&
    need_file "/usr/lib/*/openmpi/include/mpi.h" libopenmpi-dev ||
    { echo "SKIPPED: Open MPI could not be installed"; exit 77; }

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
adapters/psm2/build.sh "$work/lib"
mpicc.openmpi -O3 -Wall -Wextra benches/mpi-speed.c -o "$work/program" -lm

# over NAME RANKS: runs once over a transport, and appends each printed value to its series
over() {
    local library=$work/lib transport
    [ "$1" != before ] || library=$BEFORE
    case $1 in
    vader) transport=(--mca pml ob1 --mca btl self,vader) ;;
    ucx) transport=(--mca pml ucx --mca opal_common_ucx_tls any --mca opal_common_ucx_devices any \
        -x UCX_TLS=self,posix,cma) ;;
    *) transport=(--mca pml cm --mca mtl psm2 -x LD_LIBRARY_PATH="$library" \
        -x LD_PRELOAD="$library/libfishplate_hfi1.so") ;;
    esac
    timeout 300 mpirun.openmpi -n "$2" --bind-to "$([ "$2" = 2 ] && echo core || echo none)" \
        "${transport[@]}" "$work/program" ${LONGEST:+"$LONGEST"} \
        </dev/null 2>"$work/errors" >"$work/row" ||
        { echo "$1 failed:" >&2; tail -n 5 "$work/errors" >&2; exit 1; }
    while read -r name value; do
        echo "$value" >>"$work/$name.$1"
        grep -qx "$name" "$work/names" 2>/dev/null || echo "$name" >>"$work/names"
    done <"$work/row"
}

transports=(ours ${BEFORE:+before} vader ucx)
for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    for ranks in ${RANKS:-2 4}; do
        for transport in "${transports[@]}"; do over "$transport" "$ranks"; done
    done
done

median() { sort -g "$1" |
    awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'; }
printf '%-20s' "lat, allreduce: us"
printf '%12s' "${transports[@]}"
printf '\n%s\n' "rate: M/s; bw: MB/s"
while read -r name; do
    printf '%-20s' "$name"
    for transport in "${transports[@]}"; do
        printf '%12.2f' "$(median "$work/$name.$transport")"; done
    printf '\n'
done <"$work/names"
