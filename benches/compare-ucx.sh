#!/usr/bin/env bash
# Compares our puts and put-signals with UCX (and libfabric's shm provider, if fi_pingpong is
# installed) over shared memory, interleaved on the same two processors. Prints medians and their
# ratio.
#
#   benches/compare-ucx.sh [ROUNDS]        5 rounds by default, about two minutes
#   CPUS=2,3  processors (default 0,1)     SIZES="8 4096"  payloads of the bandwidth part
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5}
sizes=${SIZES:-8 64 512 4096 32768 262144 1048576 4194304}
source benches/compare-common.sh
export UCX_TLS=posix

# iters BYTES: prints the number of iterations that move 2 GiB, between 500 and 2 million
iters() { local n=$((2147483648 / $1)); echo $((n > 2000000 ? 2000000 : n < 500 ? 500 : n)); }

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    ours .lat_ns.p50 put_signal.lat put-signal -s 8 -n 500000
    theirs 2 1000 ucp_put.lat -t ucp_put_lat -s 8 -n 500000
    ours .lat_ns.p50 put_signal.lat put-signal -s 8 -n 500000
    theirs 2 1000 tag.lat -t tag_lat -s 8 -n 500000
    ours .lat_ns.p50 put_signal.lat put-signal -s 8 -n 500000
    theirs 2 1000 uct_put.lat -t put_lat -x posix -d memory -D short -s 8 -n 500000
    fabric 8 10000 fabric.lat
    ours '.msgs_per_s / 1e6' put.rate put -s 8 --window 64 -n 5000000
    theirs 8 1e-6 ucp_put.rate -t ucp_put_bw -s 8 -n 5000000
    ours '.msgs_per_s / 1e6' signal.rate signal-rate -n 5000000
    theirs 8 1e-6 uct_put.rate -t put_bw -x posix -d memory -D short -s 8 -n 5000000
    for size in $sizes; do
        ours '.bytes_per_s / 1e6' "put.bw.$size" put -s "$size" --window 64 -n "$(iters "$size")"
        # ucx_perftest prints MiB/s as MB/s.
        theirs 6 1.048576 "ucp_put.bw.$size" -t ucp_put_bw -s "$size" -n "$(iters "$size")"
    done
done

heading
floors 'put-signal 8 B, half round trip' put_signal.lat
columns
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
