#!/usr/bin/env bash
# Measures two rails of unequal speed together, and compares the result with each rail alone. Two
# processes run in two network namespaces. Two veth pairs, shaped by tbf, join the namespaces. The
# transport is libfabric's tcp with default settings.
#
#   benches/slow-rails.sh [RATIO...]   10: second rail is 10 times slower (default 1 3 10 100 1000);
#                                      20%: equal speed, but it loses 20 of 100 packets (whole
#                                      percents only)
#
#   FAST=400          Mbit/s of the faster rail
#   SECONDS_EACH=10   how long a run would take on the faster rail alone
#   VERBS="put-signal put tag-bw"  SIZES="64K 1M"  PATIENCE=60
#   BURST=6kb         bytes that tbf passes at once after a pause
#   FISHPLATE=...     the binary; by default it is built, optimised
#
# The slower rail is measured alone if its speed is at least an eighth of the faster rail's.
# Otherwise its figure is that of the faster rail, scaled. A long burst makes a slow rail look fast:
# after a pause, it passes as many bytes at once. The rate of put-signals is the sum of both
# directions. 0 MB/s means that the run failed, for example because PATIENCE (60) seconds were too
# short. If both rails together fail, the tool's last message is printed. Other load makes the
# latencies of put-signal meaningless. Needs root, iproute2, jq and libfabric. Prints SKIPPED and
# exits with 77 if namespaces are not permitted. Always removes the namespaces at the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh

fast=${FAST:-400} seconds=${SECONDS_EACH:-10} burst=${BURST:-6kb} \
    verbs=${VERBS:-put-signal put tag-bw} sizes=${SIZES:-64K 1M}
[ $# -gt 0 ] || set -- 1 3 10 100 1000

skip() {
    echo "SKIPPED slow-rails: $*"
    exit 77
}

[ "$(id -u)" = 0 ] || skip "namespaces need root"
for tool in ip tc; do
    need "$tool" iproute2 || skip "no $tool, and iproute2 could not be installed"
done
need jq jq || skip "no jq, and it could not be installed"
nft=""
if [[ "$*" == *%* ]]; then
    need nft nftables || skip "no nft, and it could not be installed"
    nft=nft
fi

program=${FISHPLATE:-}
if [ -z "$program" ]; then
    cargo build --release --locked --bin fishplate >&2 || exit 1
    program=${CARGO_TARGET_DIR:-target}/release/fishplate
fi

here=fps$$ there=fpt$$
work=$(mktemp -d)
# shellcheck disable=SC2317  # called by the trap
down() {
    local pids
    pids=$(jobs -p)
    # shellcheck disable=SC2086  # several words
    [ -z "$pids" ] || kill -9 $pids 2>/dev/null
    wait 2>/dev/null
    ip netns del "$here" 2>/dev/null
    ip netns del "$there" 2>/dev/null
    rm -rf "$work"
}
trap down EXIT
trap 'exit 130' INT TERM

for name in "$here" "$there"; do
    ip netns add "$name" 2>"$work/why" || skip "$(cat "$work/why")"
    ip -n "$name" link set lo up
done
# The third link is for the bootstrap.
for rail in 0 1 2; do
    ip -n "$here" link add "rail$rail" type veth peer name "rail$rail" netns "$there" \
        2>"$work/why" ||
        skip "$(cat "$work/why")"
    ip -n "$here" addr add "10.96.$rail.1/24" dev "rail$rail"
    ip -n "$there" addr add "10.96.$rail.2/24" dev "rail$rail"
    for end in "$here" "$there"; do ip -n "$end" link set "rail$rail" up; done
done

for end in "$here" "$there"; do
    for rail in 0 1 2; do
        for _ in {1..100}; do
            ip -n "$end" link show "rail$rail" | grep -q 'state UP' && break
            sleep 0.05
        done
    done
done

# shape RAIL KBIT [LOSS]: shapes both directions of a rail. LOSS of 100 packets are lost at random.
shape() {
    local end
    for end in "$here" "$there"; do
        tc -n "$end" qdisc del dev "rail$1" root 2>/dev/null
        tc -n "$end" qdisc add dev "rail$1" root handle 1: tbf rate "$2kbit" \
            burst "$burst" latency 100ms \
            2>"$work/why" || skip "no tbf: $(cat "$work/why")"
        # A packet of several segments would be lost as one.
        ip -n "$end" link set "rail$1" gso_max_segs "$([ -n "${3:-}" ] && echo 1 || echo 65535)"
        [ -z "$nft" ] || ip netns exec "$end" nft flush ruleset
        [ -z "${3:-}" ] || ip netns exec "$end" nft "table inet loss { chain arrivals {
            type filter hook input priority 0;
            iifname rail$1 numgen random mod 100 < $3 drop; }; }" \
            2>"$work/why" || skip "no loss of packets: $(cat "$work/why")"
    done
}

calc() { awk "BEGIN { printf \"$1\", $2 }"; }

port=7600
# run INTERFACES VERB SIZE COUNT: prints the row of the measuring side, nothing if it failed
run() {
    local options=(--transport fabric --provider tcp --interface "$1" \
        --rails "$(tr ',' '\n' <<<"$1" | wc -l)")
    options+=(-s "$3" -n "$4" -T ${PATIENCE:-60} --format json)
    port=$((port + 1))
    timeout -k 5 200 ip netns exec "$there" "$program" perf "$2" "${options[@]}" \
        --listen "10.96.2.2:$port" \
        >/dev/null 2>"$work/there" &
    local listener=$!
    timeout -k 5 200 ip netns exec "$here" "$program" perf "$2" "${options[@]}" \
        --connect "10.96.2.2:$port" \
        2>"$work/here"
    wait "$listener" || cat "$work/here" "$work/there" >&2
}

# bytes SIZE: prints a size with a suffix as a number of bytes
bytes() { numfmt --from=iec "$1"; }

# rate ROW prints MB/s; latency ROW prints the median in microseconds
rate() { jq -rs '(.[0].bytes_per_s // 0) / 1e6 | . * 10 | round / 10' <<<"$1"; }
latency() { jq -rs '(.[0].lat_ns.p50 // 0) / 1e3 | round' <<<"$1"; }

row='%6s %-10s %4s %8s %8s %8s %6s %9s %9s %6s\n'
# shellcheck disable=SC2059  # the format is a variable
printf "$row" rails verb size fast slow both ratio "p50 fast" "p50 both" ratio
for ratio in "$@"; do
    loss=""
    case $ratio in
        *%) loss=${ratio%\%} kbit=$((fast * 1000)) ;;
        *) kbit=$((fast * 1000 / ratio)) ;;
    esac
    shape 0 $((fast * 1000))
    shape 1 "$kbit" "$loss"
    for verb in $verbs; do
        for size in $sizes; do
            count=$(calc %d "$seconds * $fast * 125000 / $(bytes "$size")")
            one=$(run rail0 "$verb" "$size" "$count")
            alone=$(rate "$one")
            if [ -n "$loss" ]; then
                other=0
            elif [ $((kbit * 8)) -ge $((fast * 1000)) ]; then
                other=$(rate "$(run rail1 "$verb" "$size" $((count * kbit / fast / 1000)))")
            else
                other=$(calc %.1f "$alone * $kbit / $fast / 1000")
            fi
            two=$(run rail0,rail1 "$verb" "$size" "$count")
            [ -n "$two" ] || tail -1 "$work/here" >&2
            both=$(rate "$two")
            # shellcheck disable=SC2059
            printf "$row" "$ratio" "$verb" "$size" "$alone" "$other" "$both" \
                "$(calc %.2f "$both / ($alone + $other + 1e-9)")" "$(latency "$one")" \
                "$(latency "$two")" \
                "$(calc %.2f "$(latency "$two") / ($(latency "$one") + 1e-9)")"
        done
    done
done
