#!/usr/bin/env bash
# Checks instruction budgets: runs every path under Valgrind's Callgrind, and fails if a path
# exceeds its limit in src/lib.rs. Options are those of `cargo bench`: `--features probes` counts
# with the static tracing probes. Installs valgrind (package) and the benchmark runner (cargo
# install, into target/tools) when they are missing.
set -euo pipefail
cd "$(dirname "$0")"
source ../tests/need.sh

runner=$(sed -n 's/.*package = "gungraun", version = "=\(.*\)".*/\1/p' Cargo.toml)
tools=$PWD/target/tools
export PATH=$tools/bin:$PATH

need valgrind valgrind ||
    { echo "SKIPPED instruction budgets: valgrind is missing and cannot be installed"; exit 77; }
if [ "$(gungraun-runner --version 2>/dev/null | awk '{print $2}')" != "$runner" ]; then
    echo "gungraun-runner $runner is missing: cargo install into $tools"
    # Unoptimized: it only starts Valgrind and reads its output.
    CARGO_PROFILE_DEV_DEBUG=0 CARGO_TARGET_DIR=$tools/build cargo install --quiet --debug --locked \
        --version "$runner" --root "$tools" gungraun-runner
    rm -rf "$tools/build"
fi

rows=$(mktemp)
trap 'rm -f "$rows"' EXIT
# `cargo bench` fails if a path exceeds its limit. Print the table even then, because it names the
# path.
status=0
cargo bench --quiet --locked --no-fail-fast --benches "$@" -- --output-format=json >"$rows" \
    2>"$rows.err" || status=$?
"${CARGO_TARGET_DIR:-target}/release/budget-table" <"$rows" || status=1
[ "$status" = 0 ] || cat "$rows.err"
rm -f "$rows.err"
exit "$status"
