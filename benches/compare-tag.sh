#!/usr/bin/env bash
# Compares our tagged messages with UCX's over shared memory (posix and cma), interleaved on the
# same two processors. Prints medians per placement, and their ratio. Runs Open MPI and MPICH too if
# their compilers are installed.
#
#   benches/compare-tag.sh [ROUNDS]        5 rounds by default, about two minutes
#   CPUS=2,3        processors (default 0,1)
#   SIZES="8 4096"  payloads of the latency and bandwidth parts
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5}
sizes=${SIZES:-8 4096 65536 1048576}
source benches/compare-common.sh
export UCX_TLS=posix,cma

# rank NAME COMPILER RUNNER...: runs ping-pong and message rate of 8 bytes with an MPI, if its
# compiler is installed
rank() {
    local name=$1 compiler=$2
    shift 2
    command -v "$compiler" >/dev/null || return 0
    in_place mpi "$compiler" benches/tag-mpi.c "$@" PROGRAM
    [ -n "$row" ] || return 0
    keep "$name.lat" "${row% *}"
    keep "$name.rate" "${row#* }"
}

# iters BYTES: prints the number of iterations that move 1 GiB, between 500 and half a million
iters() { local n=$((1073741824 / $1)); echo $((n > 500000 ? 500000 : n < 500 ? 500 : n)); }

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    for size in $sizes; do
        n=$(iters "$size")
        ours .lat_ns.p50 "tag.$size.lat" tag -s "$size" -n "$n"
        theirs 2 1000 "ucp.$size.lat" -t tag_lat -s "$size" -n "$n"
        ours '.bytes_per_s / 1e6' "tag.bw.$size" tag-bw -s "$size" --window 64 -n "$n"
        # ucx_perftest prints MiB/s as MB/s.
        theirs 6 1.048576 "ucp.bw.$size" -t tag_bw -s "$size" -n "$n"
    done
    ours '.msgs_per_s / 1e6' tag.rate tag-bw -s 8 --window 64 -n 3000000
    theirs 8 1e-6 ucp.rate -t tag_bw -s 8 -n 3000000
    rank ompi mpicc.openmpi "${openmpi[@]}"
    rank mpich mpicc.mpich "${mpich[@]}"
done

heading
floors "tag ${sizes%% *} B, half round trip" "tag.${sizes%% *}.lat"
columns
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
