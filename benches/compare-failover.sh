#!/usr/bin/env bash
# Compares what a cut cable and a slow rail do to a stream of messages under Fishplate, UCX and
# libfabric's tcp. Two processes run in two network namespaces, joined by two veth pairs of the same
# speed. During the run, rail 1 is cut or slowed down, and later restored. Every 200 ms the script
# counts the bytes sent by the interfaces, so that all programs are measured alike.
#
#   benches/compare-failover.sh [cut] [slow]    both by default; about 5 minutes
#
#   RATE=400          Mbit/s of each rail
#   SLOW=4            Mbit/s of rail 1 while it is slow
#   PHASE=15          seconds of each of the three phases: before, during, after
#   SIZE=1048576      bytes of a message
#   TRANSPORTS=...    which of: fishplate UCX libfabric
#   RESULTS=...       a file for one JSON object per run, with all samples
#   FISHPLATE=...     the binary; by default it is built, optimised
#
# Fishplate runs perf tag-bw, UCX ucx_perftest -t tag_bw with UCX_TLS=tcp and both interfaces.
# libfabric's tcp uses one interface per endpoint: fi_pingpong uses rail 1 only, and is idle half of
# the time. `stall` is the longest time with a rate below 2 % of the rate before the change. Rates
# include protocol headers and retransmissions. Needs root, iproute2 and jq. Leaves UCX or libfabric
# out if ucx-utils or libfabric-bin is missing. Prints SKIPPED and exits with 77 if namespaces are
# not permitted. Always removes the namespaces at the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/netns.sh

rate=${RATE:-400} slow=${SLOW:-4} phase=${PHASE:-15} size=${SIZE:-1048576}
[ $# -gt 0 ] || set -- cut slow

skip() {
    echo "SKIPPED compare-failover: $*"
    exit 77
}

need jq jq || skip "no jq, and it could not be installed"
need ucx_perftest ucx-utils || echo "no ucx_perftest, and it could not be installed" >&2
need fi_pingpong libfabric-bin || echo "no fi_pingpong, and it could not be installed" >&2
program=${FISHPLATE:-}
if [ -z "$program" ]; then
    cargo build --release --locked --bin fishplate >&2 || exit 1
    program=${CARGO_TARGET_DIR:-target}/release/fishplate
fi
program=$(readlink -f "$program")
results=${RESULTS:-/dev/null}
: >"$results" || exit

work=$(mktemp -d)
pids=()
# shellcheck disable=SC2317  # called by the trap
down() {
    [ ${#pids[@]} = 0 ] || kill -9 "${pids[@]}" 2>/dev/null
    wait 2>/dev/null
    no_hosts
    rm -rf "$work"
}
trap down EXIT
trap 'exit 130' INT TERM

# The third pair is for the bootstrap, and stays up.
hosts 3 98 >"$work/why" || skip "$(cat "$work/why")"

# shape RAIL MBIT: limits both directions of a rail
shape() {
    local end
    for end in "$here" "$there"; do
        tc -n "$end" qdisc replace dev "rail$1" root handle 1: tbf rate "$2mbit" burst 256kb \
            latency 100ms 2>"$work/why" || skip "no tbf: $(cat "$work/why")"
    done
}

trouble() { case $1 in
    cut) ip -n "$here" link set rail1 down ;;
    slow) shape 1 "$slow" ;;
esac; }

remedy() { case $1 in
    cut) ip -n "$here" link set rail1 up ;;
    slow) shape 1 "$rate" ;;
esac; }

# start SIDE COMMAND...: runs a command in a namespace, as process SIDE
start() {
    local side=$1 netns=$here
    shift
    [ "$side" = 0 ] || netns=$there
    ip netns exec "$netns" "$@" >"$work/out.$side" 2>"$work/err.$side" &
    pids+=($!)
}

port=7900
# both TRANSPORT: starts the receiver, then the sender
both() {
    local fabric=(--transport fabric --provider tcp --interface rail0,rail1 --rails 2 -D 10m -T 20m)
    local ucx=(env UCX_TLS=tcp UCX_NET_DEVICES=rail0,rail1 ucx_perftest -t tag_bw -s "$size" \
        -n 100000000)
    local ping=(env FI_TCP_IFACE=rail1 fi_pingpong -p tcp -e msg -S "$size" -I 100000000)
    port=$((port + 1)) pids=()
    case $1 in
        fishplate) start 1 "$program" perf tag-bw "${fabric[@]}" -s "$size" \
            --listen "10.98.2.2:$port" ;;
        UCX) start 1 "${ucx[@]}" -p "$port" ;;
        libfabric) start 1 "${ping[@]}" -B "$port" ;;
    esac
    sleep 3
    case $1 in
        fishplate) start 0 "$program" perf tag-bw "${fabric[@]}" -s "$size" \
            --connect "10.98.2.2:$port" ;;
        UCX) start 0 "${ucx[@]}" -p "$port" 10.98.2.2 ;;
        libfabric) start 0 "${ping[@]}" -P "$port" 10.98.1.2 ;;
    esac
}

# sample: prints the time in ms and the bytes that each rail has sent
sample() {
    local now=${EPOCHREALTIME/./}
    printf '[%d,%s]\n' $((now / 1000)) \
        "$(ip netns exec "$here" cat /sys/class/net/rail{0,1}/statistics/tx_bytes | paste -sd,)"
}

# flows: waits until the stream uses rail 1, and then one more second
flows() {
    local begun sent=0
    begun=$(cut -d, -f3 <<<"$(sample)")
    for _ in {1..200}; do
        sent=$(cut -d, -f3 <<<"$(sample)")
        ((${sent%]} - ${begun%]} < 5000000)) || { sleep 1; return 0; }
        sleep 0.2
    done
    return 1
}

# watch SECONDS PHASE: samples for SECONDS, into the file of this phase
watch() {
    local until=$((${EPOCHREALTIME/./} + $1 * 1000000))
    while ((${EPOCHREALTIME/./} < until)); do
        sample >>"$work/$2"
        sleep 0.2
    done
}

# figures: reads a run's samples as [[before], [during], [after]]; prints the run's rates and stall
figures() {
    jq -c --arg transport "$1" --arg trouble "$2" --arg ended "$3" '
        def total: .[1] + .[2];
        def rate: if length < 2 then 0 else
            (last | total) - (first | total) | . / 1e3 end;
        def ms: if length < 2 then 1 else last[0] - first[0] end;
        def mbs: (rate / ms * 10 | round) / 10;
        (.[0] | rate / ms) as $usual
        | (flatten(1)) as $all
        | ([range(1; $all | length) | {ms: ($all[.][0] - $all[. - 1][0]),
            kb: ((($all[.] | total) - ($all[. - 1] | total)) / 1e3)}]
          | reduce .[] as $step ({now: 0, most: 0};
              .now = (if $step.kb < 0.02 * $usual * $step.ms then .now + $step.ms else 0 end)
              | .most = ([.most, .now] | max)) | .most) as $stall
        | {transport: $transport, trouble: $trouble, before_mb_s: (.[0] | mbs),
           during_mb_s: (.[1] | mbs), after_mb_s: (.[2] | mbs),
           stall_s: ($stall / 100 | round / 10), ended: $ended, samples: .}'
}

row='%-6s %-10s %8s %8s %8s %8s  %s\n'
# shellcheck disable=SC2059  # the format is a variable
printf "$row" rail1 transport before during after "stall s" "how it ended"
for trouble in "$@"; do
    for transport in ${TRANSPORTS:-fishplate UCX libfabric}; do
        case $transport in
            UCX) command -v ucx_perftest >/dev/null || continue ;;
            libfabric) command -v fi_pingpong >/dev/null || continue ;;
        esac
        remedy cut && shape 0 "$rate" && shape 1 "$rate" && links_up 3
        rm -f "$work"/{out,err}.* "$work"/{before,during,after}
        both "$transport"
        flows || echo "$transport: nothing was sent within 40 s" >&2
        watch "$phase" before
        trouble "$trouble"
        watch "$phase" during
        remedy "$trouble"
        watch "$phase" after
        ended="still running"
        for side in 0 1; do
            kill -0 "${pids[$side]}" 2>/dev/null && continue
            wait "${pids[$side]}"
            ended="status $?: $(cat "$work"/{err,out}.$side | grep -v '^[+|]\|^$' | tail -n 1 |
                cut -c 1-150)"
            break
        done
        kill -9 "${pids[@]}" 2>/dev/null
        wait "${pids[@]}" 2>/dev/null
        run=$(for name in before during after; do jq -s . "$work/$name"; done | jq -cs . |
            figures "$transport" "$trouble" "$ended")
        echo "$run" >>"$results"
        # shellcheck disable=SC2059
        jq -r '[.trouble, .transport, .before_mb_s, .during_mb_s, .after_mb_s, .stall_s, .ended]
            | .[]' <<<"$run" |
            { mapfile -t cells; printf "$row" "${cells[@]}"; }
    done
done
