#!/usr/bin/env bash
# Runs the tests of devices, and of nodes with devices, over the drivers of NVIDIA and AMD GPUs,
# with two processes. Then runs the tool's measurements, and verifies every payload. Without a GPU
# the script prints SKIPPED and the reasons.
#
# usage: tests/gpu.sh [--figures]; --figures also measures a release build at every size, direct and
# relayed, and stores the rows as JSON in FIGURES (default: gpu-figures.jsonl in the target folder).
# benches/results/uccl-mi325x.jsonl has the figures of the transport that this design started from.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
target=${CARGO_TARGET_DIR:-target}
figures=${1:-}
status=0 tested=0

log=$(mktemp)
trap 'rm "$log"' EXIT

# gpus API: tests the devices of a driver, if it has any
gpus() {
    local api=$1 why test path
    timeout 600 cargo test --locked --quiet --workspace --test device "$api" -- --show-output \
        >"$log" 2>&1
    local result=$?
    if why=$(grep -m 1 -o "SKIPPED on_$api::copies_arrive_whole: .*" "$log"); then
        echo "SKIPPED the suite on a GPU: ${why#*: }"
        return
    fi
    tested=1
    grep -E '^test |^SKIPPED|^test result' "$log"
    if [ "$result" != 0 ]; then
        status=1
        tail -n 60 "$log"
    fi

    for module in gpu:: lent::; do
        FISHPLATE_TEST_GPU=$api timeout 600 cargo test --locked --quiet --workspace --test node \
            "$module" \
            >"$log" 2>&1 && echo "ok nodes, $module" && continue
        status=1
        echo "FAILED nodes, $module"
        tail -n 60 "$log"
    done

    cargo build --locked --quiet --workspace --bin fishplate || exit
    for test in put-signal put get tag; do
        for path in direct relay; do
            timeout 120 "$target/debug/fishplate" perf "$test" --transport gpu --device "$api:0" \
                --ipc-path "$path" \
                -s 8,5K,300K,4M -n 100 --region 4M --check --format json >"$log" 2>&1 &&
                echo "ok perf $test, $path" && continue
            status=1
            echo "FAILED perf $test, $path"
            tail -n 20 "$log"
        done
    done

    [ "$figures" = --figures ] || return
    cargo build --locked --quiet --release || exit
    local rows=${FIGURES:-$target/gpu-figures.jsonl}
    for test in put-signal put "put --bidirectional" get tag; do
        for path in direct relay; do
            # Direct copies fail where they would take another path.
            # shellcheck disable=SC2086 # a test may have an option
            timeout 600 "$target/release/fishplate" perf $test --transport gpu \
                --device "$api:0" --ipc-path "$path" -b 1K -e 256M -f 4 --region 256M \
                --format json >"$log" || status=1
            cat "$log" >>"$rows"
            jq -r '[.test, .ipc_path, (if .bidirectional then "both" else "one" end), .size,
                .lat_ns.p50, .bytes_per_s] | @tsv' "$log" 2>/dev/null || cat "$log"
        done
    done
    echo "rows: $rows"
}
gpus cuda
gpus hip
[ "$tested" = 1 ] || exit 77
exit "$status"
