#!/usr/bin/env bash
# Runs every loom model of memory shared between threads or processes. Then repeats them with each
# ordering weakened in turn, and checks that a model fails each time. A model is a test in a module
# named `races`. The script finds the orderings by their `edge!` or `edge_fence!` in the source, so
# it tests all of them. It weakens each half of an AcqRel separately: NAME/acquire, NAME/release.
#
# usage: tests/loom-edges.sh [edge...] (default: all of them)
set -u
cd "$(dirname "$0")/.."

export RUSTFLAGS="${RUSTFLAGS:-} --cfg fishplate_loom"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/loom"
# Loom runs each thread of a model on a small stack, which unoptimized code overflows.
export CARGO_PROFILE_TEST_OPT_LEVEL=1
export RUST_BACKTRACE=0 CARGO_PROFILE_TEST_DEBUG=0 CARGO_PROFILE_DEV_DEBUG=0
export LOOM_MAX_PREEMPTIONS="${LOOM_MAX_PREEMPTIONS:-3}"
limit_s=120 # of processor time for one run of all models, which take a few seconds

folder() { # folder PACKAGE
    case $1 in psm2) echo adapters/psm2 ;; *) echo "$1" ;; esac
}

build() { # build PACKAGE: where the test binary of its library is
    cargo test --package "fishplate-$1" --lib --no-run --message-format=json |
        sed -n 's/.*"executable":"\([^"]*fishplate_'"$1"'-[^"]*\)".*/\1/p' | tail -n 1
}

# models PACKAGE [EDGE]: runs the package's models. If EDGE is given, weakens it, and ends when a
# model fails. Status 152 (SIGXCPU): the time limit expired.
models() {
    local binary="binary_$1" pid
    # Emptied here: the loop below must not read the failure of an earlier run.
    : >"$log"
    (
        ulimit -S -t $limit_s
        FISHPLATE_WEAKEN="${2:-}" exec "${!binary}" races:: --test-threads=2 >>"$log" 2>&1
    ) &
    pid=$!
    while kill -0 $pid; do
        if [ -n "${2:-}" ] && grep -q "$failure" "$log"; then
            kill -9 $pid
        else
            sleep 0.1
        fi
    done
    wait $pid
} 2>/dev/null # where the shell would announce that a model was killed or aborted

edges() { # edges PACKAGE: those that its source names
    find "$(folder "$1")/src" -name '*.rs' -exec cat {} + | tr '\n' ' ' |
        grep -oE '\bedge(_fence)?!\( *"[^"]+", *[A-Za-z]+' | sed 's/.*( *"\(.*\)", *\(.*\)/\1 \2/' |
        sort -u |
        while read -r name order; do
            echo "$name"
            [ "$order" != AcqRel ] || printf '%s\n' "$name/acquire" "$name/release"
        done
}

# Loom fails some models a second time while unwinding, which aborts.
failure='FAILED$\|panicked at'
log=$(mktemp)
trap 'rm -f "$log"' EXIT
survived=0 tried=0
for package in core shm gpu sys psm2; do
    named=$(edges "$package")
    [ -n "$named" ] || echo "ok        no edges in $package"
    [ $# = 0 ] || named=$(printf '%s\n' "$@" | grep -xF "$named")
    [ -n "$named" ] || continue
    declare "binary_$package=$(build "$package")"
    binary="binary_$package"
    [ -n "${!binary}" ] || { echo "the models of $package did not build"; exit 1; }
    began=$SECONDS
    if ! models "$package" || grep -q '^running 0 tests' "$log"; then
        cat "$log"
        echo "FAILED    the models of $package as they stand"
        exit 1
    fi
    echo "ok        $(sed -n 's/^running \([0-9]*\) tests*/\1/p' \
        "$log") models of $package as they stand, $((SECONDS - began)) s"
    for edge in $named; do
        began=$SECONDS tried=$((tried + 1))
        models "$package" "$edge"
        case $? in # 101, 134 and 137: a test failed, aborted, or was killed after it had failed
            0) echo "SURVIVED  $edge: no model fails without it"; survived=1 ;;
            152) echo "TIMEOUT   $edge: no model failed within $limit_s s"; survived=1 ;;
            *)
                if model=$(grep "$failure" "$log" | grep -m 1 -oE '[a-z_:]*races::[a-z_:]*'); then
                    echo "caught    $edge, by $model, $((SECONDS - began)) s"
                else
                    cat "$log"
                    echo "FAILED    $edge: the models did not run" && survived=1
                fi
                ;;
        esac
    done
done
[ "$tried" -gt 0 ] || { echo "no such edge: $*"; exit 1; }
exit $survived
