#!/usr/bin/env bash
# Runs every model of the lock-free code under loom, then again with each ordering weakened in turn, and demands that
# the models notice. A model is a test in a module named `races`; an edge is whatever the source names by `edge!` or
# `edge_fence!`, so none can be forgotten.
#
# usage: tests/loom-edges.sh [edge...]     (default: all of them)
set -u
cd "$(dirname "$0")/.."

export RUSTFLAGS="${RUSTFLAGS:-} --cfg fishplate_loom"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
# Loom runs each thread of a model on a small stack, which the frames of unoptimized code overflow.
export CARGO_PROFILE_TEST_OPT_LEVEL=1
export RUST_BACKTRACE=0
export LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-3}"
limit_s=120 # for one run of all models: a few seconds on an idle machine

binary=$(cargo test --package fishplate-core --lib --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*fishplate_core-[^"]*\)".*/\1/p' | tail -n 1)
[ -n "$binary" ] || { echo "the models did not build"; exit 1; }

models() { # models [edge]: runs all models, with this edge weakened
    FISHPLATE_WEAKEN="${1:-}" timeout "$limit_s" "$binary" races:: --test-threads=2 >"$log" 2>&1
} 2>/dev/null # where the shell would announce that a model aborted: loom fails some twice over, once while unwinding

log=$(mktemp)
trap 'rm -f "$log"' EXIT
began=$SECONDS
if ! models || grep -q '^running 0 tests' "$log"; then
    cat "$log"
    echo "FAILED    the models as they stand"
    exit 1
fi
echo "ok        $(sed -n 's/^running \([0-9]*\) tests*/\1/p' "$log") models as they stand, $((SECONDS - began)) s"

edges=${*:-$(grep -rhoE 'edge(_fence)?!\("[^"]+"' core/src | cut -d'"' -f2 | sort -u)}
survived=0
for edge in $edges; do
    began=$SECONDS
    models "$edge"
    case $? in # 101 and 134: a test failed, or aborted
        0) echo "SURVIVED  $edge: no model fails without it"; survived=1 ;;
        124) echo "TIMEOUT   $edge: no model failed within $limit_s s"; survived=1 ;;
        *) echo "caught    $edge, by $(grep -c 'FAILED$\|non-unwinding panic' "$log") complaints, $((SECONDS - began)) s" ;;
    esac
done
exit $survived
