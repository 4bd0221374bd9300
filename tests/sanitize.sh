#!/usr/bin/env bash
# The unit tests of every package under AddressSanitizer or ThreadSanitizer, and under the former
# the lifecycles and memory of devices behind NICs: tests/sanitize.sh address|thread. Needs a
# nightly toolchain; std stays as shipped, without instrumentation.
#
# ThreadSanitizer does not understand fences. The eventcount's do not need it to: they order atomics
# only. What it checks is that plain memory is handed over by an acquire and a release on the same
# word, as the rings do.
set -euo pipefail
cd "$(dirname "$0")/.."

host=x86_64-unknown-linux-gnu
toolchain=$(rustup toolchain list 2>/dev/null | awk '/^nightly/ { print $1; exit }')
[ -n "$toolchain" ] || { echo "SKIPPED $1 sanitizer: no nightly toolchain (rustup toolchain install nightly)"; exit 77; }
[ "$(uname -m)" = x86_64 ] || { echo "SKIPPED $1 sanitizer: not an x86-64 machine"; exit 77; }

case $1 in
    address)
        flags="-Zsanitizer=address" programs=(--test lifecycles)
        # Nodes over tcp: libfabric 1.17 forgets to free what it notes of each endpoint.
        skips=(--skip on_descriptors --skip has_rung_or_left)
        ;;
    thread) flags="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" programs=() skips=() ;;
    *) echo "usage: $0 address|thread"; exit 2 ;;
esac
export RUSTFLAGS=$flags CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/sanitize-$1 RUST_BACKTRACE=0
export ASAN_OPTIONS=detect_leaks=1 TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp
# UCX, loaded by one test to compare with, rewrites malloc and mmap: no sanitizer survives that.
cargo "+$toolchain" test --workspace --lib --bins "${programs[@]}" --locked --no-fail-fast --target $host -- --skip as_in_ucx "${skips[@]}"
if [ "$1" = address ]; then
    # Its engines live as long as the process.
    ASAN_OPTIONS=detect_leaks=0 cargo "+$toolchain" test --test fabric_fake --locked --target $host -- devices::
fi
