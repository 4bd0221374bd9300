#!/usr/bin/env bash
# Tests the device backends over a fake libcuda.so and libamdhip64.so, without a GPU: their
# functions, how the library is found and loaded, and memory shared by two processes. Runs with
# several modes of the fake driver. Also checks the errors if the driver is missing or unusable.
#
# usage: tests/cuda-fake.sh [cuda|hip] (default: both)
set -uo pipefail
cd "$(dirname "$0")/.." || exit
case ${1:-} in
    cuda) api=cuda driver=CUDA library=libcuda first=cuInit ;;
    hip) api=hip driver=HIP library=libamdhip64 first=hipDriverGetVersion ;;
    *) "$0" cuda; cuda=$?; "$0" hip && exit "$cuda"; exit 1 ;;
esac
target=${CARGO_TARGET_DIR:-target}
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
failed=0

# say NAME COMMAND...: runs a check, and prints its result on one line
say() {
    local name=$1
    shift
    if "$@" >"$place/log" 2>&1; then
        echo "ok $api: $name"
    else
        failed=1
        echo "FAILED $api: $name"
        tail -n 40 "$place/log"
    fi
}

# These packages have the same features in `cargo test --workspace`, so nothing is built twice.
cargo build --locked --quiet -p fishplate-fake-cuda -p fishplate --lib &&
    cargo build --locked --quiet --workspace --bin fishplate || exit
tests=$(cargo test --locked --quiet --workspace --test device --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p') || exit
nodes=$(cargo test --locked --quiet --workspace --test node --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p') || exit
mkdir "$place/fake" "$place/old" "$place/none"
cp "$target/debug/libfishplate_fake_cuda.so" "$place/fake/$library.so"

# suite MODE: runs the device tests over the fake driver; no test may be skipped, and no memory
# leaked or misused
suite() {
    rm -f "$place/report"
    env LD_LIBRARY_PATH="$place/fake" FAKE_CUDA="$1" FAKE_CUDA_REPORT="$place/report" \
        timeout 120 "$tests" "$api" --nocapture || return
    ! env LD_LIBRARY_PATH="$place/fake" timeout 120 "$tests" "$api" --show-output | grep SKIPPED ||
        return
    # The report has a line for the test process, and lines for two child processes for each of two
    # kinds of memory.
    cat "$place/report"
    [ "$(wc -l <"$place/report")" -ge 5 ] && ! grep -v 'held 0 violations \[\]$' "$place/report" ||
        return
    [[ $1 != flush* ]] || grep -q 'flushes [1-9]' "$place/report"
}
for mode in "" late late,differ,reopen flush,nowords,devices=1; do
    say "the suite over a fake driver${mode:+: $mode}" suite "$mode"
done

# before: runs the suite over a HIP that does not export virtual memory
before() {
    env LD_LIBRARY_PATH="$place/fake" FAKE_CUDA=hip=60241134 timeout 120 "$tests" on_hip:: \
        hip_calls --show-output >"$place/seen" ||
        return
    cat "$place/seen"
    ! grep SKIPPED "$place/seen"
}
[ "$api" = cuda ] || say "the suite over HIP 6.2" before

# node MODE: runs the tests of nodes with devices over the fake driver, which does not notice killed
# processes
node() {
    local over=(env "LD_LIBRARY_PATH=$place/fake" "FAKE_CUDA=$1" "FISHPLATE_TEST_GPU=$api" \
        timeout 120 "$nodes")
    "${over[@]}" gpu::processes::a_killed_process || return
    rm -f "$place/report"
    FAKE_CUDA_REPORT="$place/report" "${over[@]}" gpu:: --skip a_killed_process || return
    # The report has a line for the test process, and one for each of four child processes. A
    # dropped node keeps memory allocated while a peer has it open.
    cat "$place/report"
    [ "$(wc -l <"$place/report")" -eq 5 ] && ! grep -v ' violations \[\]$' "$place/report"
    # Imported memory is freed. This skips the tests of a peer that makes no calls.
    FAKE_CUDA_REPORT="$place/report" "${over[@]}" lent:: --skip makes_no_call || return
    tail -n 1 "$place/report" | grep -q 'held 0 violations \[\]$' || return
    # Device memory over NICs, with both nodes in one process.
    FAKE_CUDA_REPORT="$place/report" "${over[@]}" nics:: || return
    tail -n 1 "$place/report" | grep -q 'held 0 violations \[\]$'
}
for mode in "" late,differ,reopen flush,nowords,devices=1; do
    say "nodes over a fake driver${mode:+: $mode}" node "$mode"
done

# example: runs two processes of the device example
example() {
    local port=$((20000 + RANDOM % 10000))
    while (: <>/dev/tcp/127.0.0.1/$port) 2>/dev/null; do port=$((port + 1)); done
    local at=127.0.0.1:$port
    local over=(env "LD_LIBRARY_PATH=$place/fake" timeout 60 "$target/debug/examples/device" "$at" \
        "$api:0")
    "${over[@]}" >"$place/first" &
    "${over[@]}" >"$place/second" && wait $! || return
    cat "$place/first" "$place/second"
    [ "$(cat "$place/first" "$place/second" |
        grep -c "524288 of 1048576 bytes are the other's")" = 2 ]
}
cargo build --locked --quiet --example device && say "the example over a fake driver" example

# info: checks that the tool lists the devices of the fake driver
info() {
    env LD_LIBRARY_PATH="$place/fake" FAKE_CUDA=devices=3 "$target/debug/fishplate" info \
        -v >"$place/seen" || return
    grep '^gpu' "$place/seen"
    grep -q '^gpu.usable  *usable$' "$place/seen" &&
        grep -q "^gpu.devices.$api:2.reaches  *$api:0, $api:1, $api:2\$" "$place/seen"
}
say "what the tool tells of it" info

# perf MODE OPTIONS...: runs two processes over the fake driver; verifies every payload, and fails
# if memory is leaked or misused
perf() {
    local mode=$1 test
    shift
    rm -f "$place/report"
    for test in put-signal "put --window 4" get tag; do
        # shellcheck disable=SC2086 # a test may have an option
        env LD_LIBRARY_PATH="$place/fake" FAKE_CUDA="$mode" FAKE_CUDA_REPORT="$place/report" \
            timeout 120 "$target/debug/fishplate" perf $test --transport gpu \
            --device "$api:0,$api:1" "$@" \
            -s 8,5K,300K -n 40 -w 4 --region 1M --check --pin none || return
    done
    cat "$place/report"
    [ "$(wc -l <"$place/report")" = 8 ] && ! grep -v 'held 0 violations \[\]$' "$place/report"
}
for path in direct relay; do
    say "perf over it, $path" perf "" --ipc-path "$path"
    say "perf over it, $path: late" perf late --ipc-path "$path"
done

say "perf between devices that do not reach each other" perf apart --ipc-path auto

# bounced: checks that copies that must be direct fail where they would take another path
bounced() {
    env LD_LIBRARY_PATH="$place/fake" FAKE_CUDA=apart timeout 60 "$target/debug/fishplate" perf \
        put --transport gpu --device "$api:0,$api:1" --ipc-path direct -s 5K -n 40 --region 1M \
        --pin none >"$place/seen" 2>&1
    local status=$?
    cat "$place/seen"
    [ "$status" = 1 ] && grep -q "copies of 5120 bytes went through bounce slots" "$place/seen"
}
say "direct copies between devices that do not reach each other" bounced

# HIP does not report which segments were reserved together.
if [ "$api" = cuda ]; then
    say "perf over memory in physical segments" perf segments --ipc-path direct
    say "perf over memory in physical segments: late" perf late,segments --ipc-path direct
fi

# fails MODE TEXT: checks that after a driver error the tool prints this text and exits, without a
# panic
fails() {
    env LD_LIBRARY_PATH="$place/fake" FAKE_CUDA="$1" timeout 60 "$target/debug/fishplate" perf put \
        --transport gpu \
        --device "$api:0" --region 1M -n 1 --pin none >"$place/seen" 2>&1
    local status=$?
    cat "$place/seen"
    # Status 2 means that there is no such device.
    { [ "$status" = 1 ] || [ "$status" = 2 ]; } && grep -qF -e "$2" "$place/seen" &&
        ! grep -q panicked "$place/seen"
}
say "a device that is lost" fails fail=Alloc:0:700 \
    "the device is lost (driver code 700); restart the process"
say "a device without memory" fails fail=Alloc:0:2 "choose a smaller --region"
say "a code that is newer than the program" fails fail=Alloc:0:7777 \
    "the driver call failed with code 7777"
# cut: if the third segment of a peer's memory cannot be opened, the first two are closed
cut() {
    rm -f "$place/report"
    FAKE_CUDA_REPORT="$place/report" fails segments,fail=Open:2:2 "cannot open the memory of the" ||
        return
    # Either process may fail first. The first process waits until the second has told why.
    cat "$place/report"
    # A process may leave exported memory allocated, because the peer may have it open.
    grep -q 'opens 2 closes 2 ' "$place/report" && ! grep -v ' violations \[\]$' "$place/report"
}
[ "$api" = hip ] || say "a segment that does not open" cut
say "no devices" fails devices=0 \
    "--device $api:0: no such device: the number of devices in this process is 0"

# none: checks the error if the loader finds no driver. A machine with a driver cannot test this,
# because the loader's cache contains the driver.
none() {
    env LD_LIBRARY_PATH="$place/none" timeout 60 "$tests" "$api" --show-output >"$place/seen" \
        2>&1 || return
    cat "$place/seen"
    grep -q "SKIPPED on_$api::copies_arrive_whole: no $driver driver: $library is not on this machine" "$place/seen"
}
if [[ $(ldconfig -p 2>/dev/null) == *"$library.so"* ]]; then
    echo "SKIPPED no driver: this machine has one"
else
    say "no driver" none
fi

# old: checks the error if the library lacks required functions
old() {
    env LD_LIBRARY_PATH="$place/old" timeout 60 "$tests" "$api" --show-output >"$place/seen" 2>&1 ||
        return
    cat "$place/seen"
    why="no usable $driver driver: $library lacks $first"
    grep -q "SKIPPED on_$api::copies_arrive_whole: $why" "$place/seen"
}
echo 'int something;' | cc -shared -fPIC -x c - -o "$place/old/$library.so" &&
    say "a driver that is too old" old

exit "$failed"
