#!/usr/bin/env bash
# Tests two real rails over libfabric's tcp: two network namespaces on this machine, joined by two
# veth pairs of limited speed. Checks that
#
#   - two equal rails carry at least 1.9 times the data of one; with speeds of 3:1, two rails carry
#     at least 0.9 of the sum of both;
#   - after a cable was pulled and put back, two equal rails carry 1.9 times the data of one again;
#   - while one rail is slow, none of a million put-signals is misordered;
#   - if the only interface goes down, or a peer is killed, both ends fail within the deadline, with
#     errors that name peer and rail. (With another interface the run continues: failover-netns.sh.)
#
#   tests/fabric-netns.sh [--short] [FISHPLATE]
#
# --short: fewer put-signals, and a cable is pulled at one end only. FISHPLATE: the binary; by
# default it is built, optimised. Needs root, iproute2 and libfabric. Prints SKIPPED and exits with
# 77 if namespaces are not permitted. Always removes the namespaces at the end.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/netns.sh

count=1000000 patience=3600 pulls=2
[ "${1:-}" = --short ] && { count=50000 patience=600 pulls=1; shift; }
program=${1:-}

skip() {
    echo "SKIPPED fabric-netns: $*"
    exit 77
}

need tc iproute2 || skip "no tc, and iproute2 could not be installed"

if [ -z "$program" ]; then
    cargo build --release --locked --bin fishplate >&2 || exit 1
    program=${CARGO_TARGET_DIR:-target}/release/fishplate
fi
program=$(readlink -f "$program")
[ -x "$program" ] || { echo "no such program: $program"; exit 1; }

work=$(mktemp -d)
# shellcheck disable=SC2317  # called by the trap
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

hosts 2 99 >"$work/why" || skip "$(cat "$work/why")"

# shape RAIL MBIT: sets the speed of both directions
shape() {
    local end
    for end in "$here" "$there"; do
        ip netns exec "$end" tc qdisc replace dev "rail$1" root tbf rate "$2mbit" burst 256kb \
            latency 100ms \
            2>"$work/why" || skip "no tbf: $(cat "$work/why")"
    done
}

port=7000
options=(--transport fabric --provider tcp)

# listen INTERFACES ARGUMENTS...: starts the answering side in the background
listen() {
    local interfaces=$1
    shift
    port=$((port + 1))
    ip netns exec "$there" "$program" perf "$@" "${options[@]}" --interface "$interfaces" \
        --listen "10.99.0.2:$port" >"$work/there" 2>&1 &
    listener=$!
}

# connect INTERFACES ARGUMENTS...: runs the measuring side; writes rows to $work/rows
connect() {
    local interfaces=$1
    shift
    ip netns exec "$here" "$program" perf "$@" "${options[@]}" --interface "$interfaces" \
        --connect "10.99.0.2:$port" --format json >"$work/rows" 2>"$work/here"
}

failed=0
# check DESCRIPTION CONDITION...: prints whether a condition holds
check() {
    local what=$1
    shift
    if "$@"; then
        echo "ok      $what"
    else
        echo "FAILED  $what"
        sed 's/^/        | /' "$work/here" "$work/there" 2>/dev/null | head -20
        failed=1
    fi
}

# field NAME: prints this field of every row
field() {
    sed -n "s/.*\"$1\":\([0-9.eE+-]*\).*/\1/p" "$work/rows"
}

# run INTERFACES ARGUMENTS...: runs both sides
run() {
    local interfaces=$1 rails status=0
    shift
    rails=$(tr ',' '\n' <<<"$interfaces" | wc -l)
    listen "$interfaces" "$@" --rails "$rails"
    connect "$interfaces" "$@" --rails "$rails" || status=$?
    wait "$listener" || status=$?
    return "$status"
}

# speed INTERFACES: measures puts of 1 MiB, and stores megabytes per second in $mb. The window is
# half the run, because the faster rail idles at the end of each window.
speed() {
    mb=0
    if run "$1" put -s 1M -n 512 -w 0 --window 256 -T 120; then
        mb=$(field bytes_per_s | awk '{ printf "%.1f", $1 / 1e6 }')
    else
        check "puts over $1" false
    fi
}

# ratio A B: prints A / B, or 0 if B is 0
ratio() {
    awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", (b > 0 ? a / b : 0) }'
}

at_least() {
    awk -v a="$1" -v b="$2" 'BEGIN { exit !(a >= b) }'
}

# together LEAST: compares rails 0 and 1 together with the sum of their separate speeds. Other load
# can only slow a run, so the best of three attempts counts.
together() {
    local alone0 alone1 sum attempt
    for attempt in 1 2 3; do
        speed rail0
        alone0=$mb
        speed rail1
        alone1=$mb
        speed rail0,rail1
        sum=$(awk -v a="$alone0" -v b="$alone1" 'BEGIN { print a + b }')
        echo "#   alone $alone0 and $alone1 MB/s, together $mb MB/s: $(ratio "$mb" \
            "$sum") of the sum, $(ratio "$mb" "$alone0") times the first"
        at_least "$(ratio "$mb" "$sum")" "$1" && return
    done
    return 1
}

shape 0 400
shape 1 400
echo "# rails of 400 and 400 Mbit/s"
check "two equal rails carry 1.9 times what one carries" together 0.95

# bytes RAILS...: prints the bytes that this end has sent on the rails
bytes() {
    local rail
    for rail in "$@"; do
        ip netns exec "$here" cat "/sys/class/net/rail$rail/statistics/tx_bytes"
    done | awk '{ sum += $1 } END { printf "%.0f", sum }'
}

# flows RAIL: waits until this end sends data on a rail
flows() {
    local before
    before=$(bytes "$1")
    for _ in {1..300}; do
        [ $(($(bytes "$1") - before)) -ge 4000000 ] && return
        sleep 0.1
    done
    return 1
}

# flow: prints the megabytes per second that this end sends on both rails
flow() {
    local before begun
    before=$(bytes 0 1) begun=$(date +%s%N)
    sleep 2
    awk -v bytes=$(($(bytes 0 1) - before)) -v ns=$(($(date +%s%N) - begun)) \
        'BEGIN { printf "%.1f", bytes / ns * 1e3 }'
}

# heals END: during one run, pulls the cable of rail 1 at an end, puts it back, and compares the
# speeds. Other load can only slow the rails, so the best of five attempts counts.
heals() {
    local status=1 connector alone both attempt
    listen rail0,rail1 put -s 1M -n 1e11 --window 256 --rails 2 -T 600
    connect rail0,rail1 put -s 1M -n 1e11 --window 256 --rails 2 -T 600 &
    connector=$!
    flows 1
    ip -n "$1" link set rail1 down
    sleep 1
    alone=$(flow)
    ip -n "$1" link set rail1 up
    if flows 1; then
        for attempt in 1 2 3 4 5; do
            both=$(flow)
            echo "#   one rail $alone MB/s, both again $both MB/s: $(ratio "$both" "$alone")"
            at_least "$(ratio "$both" "$alone")" 1.9 && status=0 && break
        done
    fi
    # This end then fails. Suppress the shell's message about the killed process.
    { kill -9 "$listener"; wait "$connector" "$listener"; } 2>/dev/null
    return $status
}

ends=("$there" "$here")
for end in "${ends[@]:0:pulls}"; do
    check "a cable is pulled and put back: both rails carry 1.9 times what one carries" heals "$end"
done

shape 0 600
shape 1 200
echo "# rails of 600 and 200 Mbit/s"
check "two rails of 3:1 carry 0.9 of their sum" together 0.9

shape 0 1000
shape 1 20
# Sizes on both sides of each protocol limit, and the share of each in percent. A payload may wait
# on the slow rail while its signal arrives on the fast one.
done=0 wrong=0 disorder=0
for share in "8 40" "200 31" "1000 20" "8K 9" "300K 1"; do
    read -r size percent <<<"$share"
    n=$((count * percent / 100))
    [ "$size" = 300K ] && n=$((count / 2000))
    run rail0,rail1 put-signal -s "$size" -n "$n" -w 10 --check -T "$patience" ||
        wrong=$((wrong + 1))
    done=$((done + $(field checked)))
    wrong=$((wrong + $(field errors) + $(field signals_misordered)))
    disorder=$((disorder + $(field arrivals_out_of_order)))
done
echo "# one rail slow: $done put-signals checked, $disorder arrivals out of order below, $wrong wrong or misordered"
check "no put-signal is misordered while one rail is slow" [ "$wrong" = 0 ]
check "as many as were asked for were checked" [ "$done" -ge "$count" ]

# sent: prints the packets that this end has sent over both rails
sent() {
    ip netns exec "$here" cat /proc/net/dev | awk '/rail[01]:/ { sum += $11 } END { print sum + 0 }'
}

# lost_within SECONDS INTERFACES COMMAND...: starts an endless run, executes the command, and checks
# that both sides fail within SECONDS
lost_within() {
    local limit=$1 interfaces=$2 begun status=0 connector before rails
    shift 2
    rails=$(tr ',' '\n' <<<"$interfaces" | wc -l)
    before=$(sent)
    listen "$interfaces" put-signal -n 1e11 --rails "$rails" -T 600
    connect "$interfaces" put-signal -n 1e11 --rails "$rails" -T 600 &
    connector=$!
    # Wait until traffic flows.
    for _ in {1..300}; do
        [ $(($(sent) - before)) -ge 1000 ] && break
        sleep 0.1
    done
    begun=$(date +%s%N)
    "$@"
    # Suppress the shell's message about the killed process.
    { wait "$connector" && status=1; wait "$listener" && status=1; } 2>/dev/null
    took=$((($(date +%s%N) - begun) / 1000000))
    [ "$status" = 0 ] && [ "$took" -le $((limit * 1000)) ]
}

# told FILE PATTERN...: checks that every pattern occurs in the file
told() {
    local file=$1 pattern
    shift
    for pattern in "$@"; do grep -q -- "$pattern" "$work/$file" || return 1; done
}

shape 0 400
shape 1 400
for rail in 1 0; do
    cut() { ip -n "$here" link set "rail$rail" down; }
    check "interface rail$rail down: both ends fail within 10 s" lost_within 10 "rail$rail" cut
    echo "# noticed at both ends after $took ms: $(tail -1 "$work/here")"
    check "interface rail$rail down: this end names peer and rail" told here "10.99.0.2:$port" \
        "tcp on rail$rail"
    check "interface rail$rail down: that end names peer and rail" told there "10.99.0.1:" \
        "tcp on rail$rail"
    ip -n "$here" link set "rail$rail" up
    sleep 1
done

slay() { kill -9 "$listener"; }
check "peer killed: this end fails within 10 s" lost_within 10 rail0,rail1 slay
echo "# noticed after $took ms: $(tail -1 "$work/here")"
check "peer killed: this end names peer and rails" told here "10.99.0.2:$port" "tcp on rail0" \
    "tcp on rail1"

exit "$failed"
