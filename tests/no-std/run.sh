#!/usr/bin/env bash
# Builds and runs the program without std, and checks that no allocator is linked.
set -euo pipefail
cd "$(dirname "$0")"
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --release --locked
program=$target/release/fishplate-no-std
if nm --undefined-only "$program" | grep -E ' (malloc|calloc|realloc|free)(@|$)'; then
    echo "an allocator is linked"
    exit 1
fi
"$program"
echo "ran without std and allocator: exit 0, $(size "$program" |
    awk 'NR == 2 { print $1 }') bytes of code"
