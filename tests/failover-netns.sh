#!/usr/bin/env bash
# Pulls cables while two nodes communicate (tests/programs/outlive.rs). Two processes run in two
# network namespaces, joined by two veth pairs, with libfabric's tcp on both. Every put-signal,
# message and addition is checked: none may be lost, duplicated or misordered. Rails must be used
# again once their cables are plugged in, so the last tenth of the rounds uses both rails.
#
#   tests/failover-netns.sh [EXAMPLE [ROUNDS]]
#
# EXAMPLE: the built example; by default it is built, optimised. Needs root, iproute2 and libfabric.
# Prints SKIPPED and exits with 77 if namespaces are not permitted. Always removes the namespaces at
# the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/netns.sh

skip() {
    echo "SKIPPED failover-netns: $*"
    exit 77
}

need fi_info libfabric-bin || skip "no libfabric, and it could not be installed"

program=${1:-} rounds=${2:-3000}
if [ -z "$program" ]; then
    cargo build --release --locked --package fishplate --example outlive >&2 || exit 1
    program=${CARGO_TARGET_DIR:-target}/release/examples/outlive
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

# The third pair is for the bootstrap, and stays up.
hosts 3 97 >"$work/why" || skip "$(cat "$work/why")"

port=7300 failed=0

# reached TENTHS: waits until a process has completed this many tenths of the rounds
reached() {
    for _ in {1..1200}; do
        grep -q "round $((rounds * $1 / 10))\$" "$work/out.0" && return 0
        [ -n "$(jobs -rp)" ] || return 1
        sleep 0.05
    done
    return 1
}

# sent: prints the bytes that process `here` has sent on each rail
sent() {
    ip netns exec "$here" cat /sys/class/net/rail{0,1}/statistics/tx_bytes
}

# job NAME FAILED RETURNED [back]: runs both processes, and `events` meanwhile. FAILED and RETURNED
# are patterns for the number of rails that fail and return at each end. With `back` all rails must
# return, and the last rounds must use both.
job() {
    local pids=() pid status=0 side before=() after=() use=""
    port=$((port + 1))
    rm -f "$work"/out.*
    for side in 0 1; do
        local netns=$here
        [ $side = 0 ] || netns=$there
        # shellcheck disable=SC2086  # a word or none
        timeout --kill-after=5 $((240 + rounds / 100)) \
            ip netns exec "$netns" "$program" "10.97.2.1:$port" "$rounds" rail0,rail1 ${4:-} \
            >"$work/out.$side" 2>&1 &
        pids+=($!)
    done
    events || status=1
    if [ -n "${4:-}" ]; then
        reached 9 || status=1
        mapfile -t before < <(sent)
    fi
    for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
    if [ -n "${4:-}" ]; then
        mapfile -t after < <(sent)
        use=$((after[0] - before[0])) both=$((after[1] - before[1]))
        # Each rail must carry at least a tenth of the other's traffic.
        [ $((10 * use)) -ge $both ] && [ $((10 * both)) -ge $use ] || status=2
        use="        | last rounds: $use bytes on rail 0, $both on rail 1"
    fi
    if [ $status = 0 ] &&
        [ "$(cat "$work"/out.* | grep -c "$rounds rounds, $2 rails failed, $3 returned")" = 2 \
        ]; then
        echo "ok      $1"
        [ -z "$use" ] || echo "$use"
        grep -h "rails failed\|out of use" "$work"/out.* | sed 's/^/        | /'
    else
        echo "FAILED  $1 (status $status)"
        [ -z "$use" ] || echo "$use"
        sed 's/^/        | /' "$work"/out.*
        failed=1
    fi
    for rail in 0 1; do
        for end in "$here" "$there"; do
            tc -n "$end" qdisc del dev "rail$rail" root 2>/dev/null
            ip -n "$end" link set "rail$rail" up
        done
    done
    links_up 3
}

events() { :; }
job "no cable is pulled" 0 0
events() { reached 2 && ip -n "$here" link set rail0 down; }
job "the cable of rail 0 is pulled" 1 0
events() { reached 2 && ip -n "$there" link set rail1 down; }
job "the cable of rail 1 is pulled at the other end" 1 0
events() {
    reached 2 && ip -n "$here" link set rail0 down && reached 3 &&
        ip -n "$here" link set rail0 up &&
        reached 6 && ip -n "$there" link set rail1 down && reached 7 &&
        ip -n "$there" link set rail1 up
}
job "both cables are pulled and put back, one after the other" "[2-9]" "[2-9]" back
# Without the address, no new endpoint can be opened.
events() {
    reached 2 && ip -n "$here" addr del 10.97.0.1/24 dev rail0 &&
        ip -n "$here" link set rail0 down &&
        reached 4 && ip -n "$here" link set rail0 up &&
        ip -n "$here" addr add 10.97.0.1/24 dev rail0
}
job "an interface loses its address and gets it back" "[1-9]" "[1-9]" back
exit $failed
