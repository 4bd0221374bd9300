#!/usr/bin/env bash
# Compares tag matching with UCX, Open MPI ob1 and MPICH: all engines do the same work, in turns.
# Prints one table of medians in nanoseconds per unit. A unit is a receive and its message.
#
#   benches/compare-match.sh [TURNS]       3 turns by default, some minutes
#   DEPTHS="0 1 64"  depths (default 0 1 16 256 4096 16384)
#   ROWS=file        keeps the rows, one JSON object per line
#
# Installs ucx-utils, libopenmpi-dev and libmpich-dev (packages) where they are missing. UCX runs
# inside the tool. Each MPI library runs in its own process (match-mpi.c), because a process can
# load only one. The MPI libraries run only the workloads that MPI can express. Needs an idle
# machine.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/need.sh

turns=${1:-3}
depths=${DEPTHS:-0 1 16 256 4096 16384}
need jq jq
need ucx_info ucx-utils || echo "UCX is missing and cannot be installed"
need_file "/usr/lib/*/openmpi/include/mpi.h" libopenmpi-dev ||
    echo "Open MPI is missing and cannot be installed"
need_file "/usr/include/*/mpich/mpi.h" libmpich-dev ||
    echo "MPICH is missing and cannot be installed"
cargo build --release --locked --quiet
fishplate=${CARGO_TARGET_DIR:-target}/release/fishplate
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rows=${ROWS:-$work/rows}
: >"$rows"

engines=ours,list
command -v ucx_info >/dev/null && engines+=,ucx
for mpi in openmpi mpich; do
    if command -v mpicc.$mpi >/dev/null; then
        mpicc.$mpi -O2 -o "$work/$mpi" benches/match-mpi.c || echo "mpicc.$mpi cannot compile" >&2
    fi
done

# Runs without a launcher. Selects PML ob1 with BTL self, and allows root.
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for turn in $(seq "$turns"); do
    echo "turn $turn of $turns" >&2
    timeout 900 "$fishplate" perf match --engines $engines \
        --workloads P1,P2,P3,P4,P5,P6,P7,P9,P10,P11,U1,U2,U3,U4,C1 --depths "${depths// /,}" \
        --rounds 3 --format json >>"$rows"
    for mpi in openmpi mpich; do
        [ ! -x "$work/$mpi" ] || timeout 300 "$work/$mpi" $mpi 20000 $depths >>"$rows" ||
            echo "$mpi failed" >&2
    done
done

ucx_info -v 2>/dev/null | head -n 1 || true
jq -rs '
    def median: sort | .[length / 2 | floor];
    def show: if . == null then "-" elif . < 1000 then "\(. * 10 | round / 10) ns"
        else "\(. / 10 | round / 100) us" end;
    [group_by([.workload, .depth])[] | {workload: .[0].workload, depth: .[0].depth,
        ns: (group_by(.engine)
            | map({key: .[0].engine, value: (map(.ns_per_op) | median)}) | from_entries)}]
    | sort_by([.workload[0:1], (.workload[1:] | tonumber), .depth])[]
    | [.workload, .depth] + (.ns | [.ours, .list, .ucx, .openmpi, .mpich] | map(show))
    | @tsv' "$rows" |
    awk -F'\t' 'BEGIN { printf "%-9s %6s %12s %12s %12s %12s %12s\n", "workload", "depth",
            "ours", "list", "ucx", "openmpi", "mpich" }
        { printf "%-9s %6s %12s %12s %12s %12s %12s\n", $1, $2, $3, $4, $5, $6, $7 }'
