#!/usr/bin/env bash
# Runs the unit tests of every package under AddressSanitizer or ThreadSanitizer. Under
# AddressSanitizer also runs the lifecycles of engines and nodes, device memory behind NICs, and the
# C library: its examples, the data that its calls move, and misuse, and a few random calls of the
# Python package. `python` makes more of those. Needs a nightly toolchain; std is not instrumented.
#
#   tests/sanitize.sh address|thread|python
#
# ThreadSanitizer does not support fences. That causes no false reports, because the eventcount's
# fences order only atomics. ThreadSanitizer checks that plain memory is handed over by a release
# and an acquire of the same word, as in the rings.
set -euo pipefail
cd "$(dirname "$0")/.."

host=x86_64-unknown-linux-gnu
toolchain=$(rustup toolchain list 2>/dev/null | awk '/^nightly/ { print $1; exit }')
[ -n "$toolchain" ] ||
    { echo "SKIPPED $1 sanitizer: no nightly toolchain (rustup toolchain install nightly)"
    exit 77; }
[ "$(uname -m)" = x86_64 ] || { echo "SKIPPED $1 sanitizer: not an x86-64 machine"; exit 77; }

case $1 in
    address)
        flags="-Zsanitizer=address" programs=(--test lifecycles)
        # Agents over tcp: libfabric 1.17 leaks memory per endpoint.
        skips=(--skip on_descriptors --skip notified_it_or_left --skip adjacent_descriptors \
            --skip released_in_flight --skip a_broken_connection_is_opened)
        ;;
    thread) flags="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" programs=() skips=() ;;
    python) flags="-Zsanitizer=address" ;;
    *) echo "usage: $0 address|thread|python"; exit 2 ;;
esac
build=${1/python/address}
export RUSTFLAGS=$flags CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/sanitize-$build \
    RUST_BACKTRACE=0
export ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp
# python_calls CALLS: makes random calls of the Python package
python_calls() {
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "SKIPPED random calls from Python: no Python 3.11"; return; }
    cargo "+$toolchain" build --package fishplate-python --locked --target $host
    local package way ways=(shm)
    package=$(mktemp -d)
    cp -r bindings/python/python/fishplate "$package"
    cp "$CARGO_TARGET_DIR/$host/debug/libfishplate_python.so" \
        "$package/fishplate/_native.abi3.so"
    if [[ $(ldconfig -p) == *libfabric.so.1* ]]; then
        ways+=(tcp)
    else
        echo "SKIPPED calls over tcp: libfabric is missing"
    fi
    # Turns off leak detection, because the interpreter leaks. Python's own allocator would hide
    # errors.
    for way in "${ways[@]}"; do
        LD_PRELOAD=$(gcc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
            PYTHONMALLOC=malloc PYTHONPATH=$package \
            python3 bindings/python/tests/test_fuzz.py "$1" $$ "$way"
    done
    rm -r "$package"
}
if [ "$1" = python ]; then
    python_calls 20000
    exit
fi
# One test loads UCX for comparison. UCX replaces malloc and mmap, which sanitizers do not support.
cargo "+$toolchain" test --workspace --lib --bins "${programs[@]}" --locked --no-fail-fast \
    --target $host -- --skip as_in_ucx "${skips[@]}"
if [ "$1" = address ]; then
    # The engines of these tests live as long as the process.
    ASAN_OPTIONS=detect_leaks=0 cargo "+$toolchain" test --test fabric_fake --locked \
        --target $host -- devices::
    # Nodes that connect, exchange data, disconnect with traffic outstanding, and connect again.
    FISHPLATE_SEEDS=${FISHPLATE_SEEDS:-60} cargo "+$toolchain" test --test node --locked \
        --target $host -- lives::
    # Runs wrong and random calls of C programs. libfabric 1.17 leaks memory of each endpoint.
    cargo "+$toolchain" rustc --package fishplate-c --lib --crate-type staticlib --locked \
        --target $host
    place=$(mktemp -d)
    trap 'rm -r "$place"' EXIT
    for program in tests/{misuse,distant,data} examples/{put_signal,events,tagged}; do
        gcc -std=c11 -D_GNU_SOURCE -g -fsanitize=address "bindings/c/$program.c" \
            -Ibindings/c/include \
            "$CARGO_TARGET_DIR/$host/debug/libfishplate_c.a" -lpthread -ldl -lm \
            -o "$place/${program#*/}"
    done
    echo leak:libfabric.so >"$place/lsan.supp"
    export LSAN_OPTIONS=suppressions=$place/lsan.supp:print_suppressions=0
    for seed in 1 2 3 4 5 6 7 8; do "$place/misuse" $seed; done
    "$place/data"
    if [[ $(ldconfig -p) == *libfabric.so.1* ]]; then
        for seed in 1 2 3 4; do "$place/distant" $seed; done
    else
        echo "SKIPPED calls over tcp: libfabric is missing"
    fi
    source bindings/c/tests/examples.sh
    for example in put_signal events tagged; do $example; done
    python_calls 2000
fi
