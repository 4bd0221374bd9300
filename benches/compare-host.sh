#!/usr/bin/env bash
# Compares our put-signals and puts between two processes of one host, 1 KiB to 64 MiB, with other
# libraries. These are UCX (posix, and posix with cma), libfabric's shm provider (fi_pingpong) and
# Open MPI's vader. Runs are interleaved. Prints medians and their ratio.
#
#   benches/compare-host.sh [ROUNDS]       3 rounds by default, about six minutes
#   CPUS=2,3  processors (default 0,1)     SIZES="4096 65536"
#
# fi_pingpong and our MPI program measure messages, not puts: a ping-pong, and windows of 8 sends.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3}
sizes=${SIZES:-1024 4096 16384 65536 262144 1048576 4194304 16777216 67108864}
source benches/compare-common.sh

# iters BYTES: prints the number of iterations that move 1 GiB, between 32 and 200,000
iters() { local n=$((1073741824 / $1)); echo $((n > 200000 ? 200000 : n < 32 ? 32 : n)); }

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    for size in $sizes; do
        n=$(iters "$size") room=$((2 * size + 65536))
        ours .lat_ns.p50 "put.$size.lat" put-signal -s "$size" -n "$n" --region $room
        for tls in posix posix,cma; do
            UCX_TLS=$tls theirs 2 1000 "$tls.$size.lat" -t ucp_put_lat -s "$size" -n "$n"
        done
        fabric "$size" "$n" "fabric.$size.lat" "fabric.bw.$size"
        ours '.bytes_per_s / 1e6' "put.bw.$size" put -s "$size" --window 64 -n "$n" --region $room
        for tls in posix posix,cma; do
            # ucx_perftest prints MiB/s as MB/s.
            UCX_TLS=$tls theirs 6 1.048576 "$tls.bw.$size" -t ucp_put_bw -s "$size" -n "$n"
        done
        if command -v mpicc.openmpi >/dev/null; then in_place mpi mpicc.openmpi benches/host-mpi.c \
            "${openmpi[@]}" PROGRAM "$size" "$n"; else row=; fi
        if [ -n "$row" ]; then keep "ompi.$size.lat" "${row% *}" &&
            keep "ompi.bw.$size" "${row#* }"; fi
    done
done

heading
columns
for size in $sizes; do
    line "latency $size B, ns: put-signal / UCX posix" "put.$size.lat" "posix.$size.lat"
    line "latency $size B, ns: put-signal / UCX posix,cma" "put.$size.lat" "posix,cma.$size.lat"
    line "latency $size B, ns: put-signal / libfabric shm" "put.$size.lat" "fabric.$size.lat"
    line "latency $size B, ns: put-signal / Open MPI" "put.$size.lat" "ompi.$size.lat"
done
for size in $sizes; do
    line "bandwidth $size B, MB/s: put / UCX posix" "put.bw.$size" "posix.bw.$size"
    line "bandwidth $size B, MB/s: put / UCX posix,cma" "put.bw.$size" "posix,cma.bw.$size"
    line "bandwidth $size B, MB/s: put / libfabric shm" "put.bw.$size" "fabric.bw.$size"
    line "bandwidth $size B, MB/s: put / Open MPI" "put.bw.$size" "ompi.bw.$size"
done
