#!/usr/bin/env bash
# Tests four processes on two "hosts": two network namespaces joined by four veth pairs. Every
# process writes, signals, adds and sends to every other process (tests/programs/all_to_all.rs). The
# transport is shared memory on the same host, and 1, 2 or 4 rails of libfabric's tcp between the
# hosts. The two hosts may have different numbers of rails. All data is checked.
#
#   tests/node-netns.sh [EXAMPLE]
#
# EXAMPLE: the built example; by default it is built, optimised. Needs root, iproute2 and libfabric.
# Prints SKIPPED and exits with 77 if namespaces are not permitted. Always removes the namespaces at
# the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/netns.sh

skip() {
    echo "SKIPPED node-netns: $*"
    exit 77
}

need fi_info libfabric-bin || skip "no libfabric, and it could not be installed"

program=${1:-}
if [ -z "$program" ]; then
    cargo build --release --locked --package fishplate --example all_to_all >&2 || exit 1
    program=${CARGO_TARGET_DIR:-target}/release/examples/all_to_all
fi
program=$(readlink -f "$program")
[ -x "$program" ] || { echo "no such program: $program"; exit 1; }

work=$(mktemp -d)
# shellcheck disable=SC2317  # called by trap
down() {
    local pids
    pids=$(jobs -p)
    # shellcheck disable=SC2086  # several words
    [ -z "$pids" ] || kill -9 $pids 2>/dev/null
    wait 2>/dev/null
    no_hosts
    rm -rf "$work"
}
trap down EXIT
trap 'exit 130' INT TERM

hosts 4 98 >"$work/why" || skip "$(cat "$work/why")"

port=7200 failed=0

# job OURS THEIRS JOINED: runs two processes on each side with these interfaces; checks that JOINED
# rails connect the sides
job() {
    local pids=() pid status=0 side
    port=$((port + 1))
    rm -f "$work"/out.*
    for side in 0 1 2 3; do
        local netns=$here interfaces=$1
        [ $((side % 2)) = 0 ] || netns=$there interfaces=$2
        FISHPLATE_RENDEZVOUS=tcp://10.98.0.1:$port FISHPLATE_SIZE=4 \
            timeout --kill-after=5 120 ip netns exec "$netns" "$program" 100 60 "$interfaces" \
            >"$work/out.$side" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
    # On its own host each process reaches itself and one other process. On the other host it
    # reaches two processes, over JOINED rails each.
    if [ $status = 0 ] &&
        [ "$(grep -c "2 near, $((2 * $3)) rails to others" "$work"/out.* | grep -c ':1$')" = 4 ] &&
        [ "$(cat "$work"/out.* | grep -c 'counted 400')" = 1 ]; then
        echo "ok      $1 to $2: $3 rails joined"
    else
        echo "FAILED  $1 to $2 (status $status)"
        sed 's/^/        | /' "$work"/out.*
        failed=1
    fi
}

job rail0 rail0 1
job rail0,rail1 rail0,rail1 2
job rail0 rail0,rail1 1
job rail1,rail0 rail0,rail1,rail2,rail3 2
job rail0,rail1,rail2,rail3 rail3,rail2,rail1,rail0 4
job rail0,rail1,rail2,rail3 rail0 1
exit $failed
