#!/usr/bin/env bash
# Runs the tests on a Debian or Ubuntu machine with Rust (rustup): the cargo tests of every package,
# the parts below, and the instruction budgets. proofs.sh, loom-edges.sh, the scripts of mutants and
# sanitize.sh run separately. Missing packages are installed by name, and each installation is
# announced.
#
# The last line counts the tests. target/test.log has the full output.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/beside.sh

log=target/test.log
mkdir -p target
passed=0 failed=0 skipped=0

# part NAME COMMAND...: runs a part, and prints how long it took. A part passes, fails, or is
# skipped (status 77).
part() {
    local name=$1 status=0 begun=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" || status=$?
    echo "-- $((SECONDS - begun)) s"
    case $status in
        0) passed=$((passed + 1)) ;;
        77) skipped=$((skipped + 1)) ;;
        *) failed=$((failed + 1)); echo "FAILED $name (status $status)" ;;
    esac
}

command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs"
    exit 1; }
need fi_info libfabric-bin ||
    echo "libfabric is missing and cannot be installed: what needs it says SKIPPED"
need_file /usr/include/rdma/fabric.h libfabric-dev ||
    echo "libfabric's headers are missing and cannot be installed: what compares with them says SKIPPED"
need ucx_info ucx-utils ||
    echo "UCX is missing and cannot be installed: what compares with it says SKIPPED"
need valgrind valgrind ||
    echo "valgrind is missing and cannot be installed: no instructions are counted"
need cc gcc || { echo "no C compiler to link with, and none could be installed"; exit 1; }

printf '== cargo test --workspace\n'
# Each test prints ok or FAILED. Of the output of passing tests, only SKIPPED lines are shown.
RUST_BACKTRACE=${RUST_BACKTRACE:-0} timeout --kill-after=10 1500 \
    cargo test --workspace --locked --no-fail-fast -- --show-output </dev/null 2>&1 | tee "$log" |
    awk '/^successes:$/ { quiet = 1 } /^(failures:|test result:.*)$/ { quiet = 0 }
        !quiet || /^SKIPPED/'
status=${PIPESTATUS[0]}
read -r passed failed skipped < <(awk '
    # The format: test result: ok. 12 passed; 0 failed; 1 ignored; ...
    /^test result:/ { passed += $4; failed += $6; skipped += $8 }
    /^SKIPPED/ { skipped++; passed-- }
    END { print passed + 0, failed + 0, skipped + 0 }' "$log")
# The build failed, the time limit expired, or a test program died. The test results do not count
# these.
if [ "$status" != 0 ] && [ "$failed" = 0 ]; then
    failed=1
    echo "FAILED cargo test (status $status)"
fi

# untimed: the parts that measure no time
untimed() {
    passed=0 failed=0 skipped=0
    part "packages out of the tree" tests/vendor.sh
    part "instruction budgets" benches/budgets.sh
    echo "$passed $failed $skipped" >target/beside.counts
}
rm -f target/beside.counts
trap beside_end EXIT
printf '\n== packages out of the tree, instruction budgets: they run beside the parts that follow\n'
beside target/beside.log untimed
part "no_std, no main, no allocator" tests/no-std/run.sh
part "libfabric's layout, by the official binding" tests/fabric-oracle.sh
part "CUDA and HIP over a driver without a GPU" tests/cuda-fake.sh
part "CUDA and HIP on a GPU" tests/gpu.sh
part "two rails between two network namespaces" tests/fabric-netns.sh \
    --short "${CARGO_TARGET_DIR:-target}/debug/fishplate"
part "the C library" tests/c.sh
part "the Python wheel" tests/python.sh
part "MPI programs over libpsm2.so.2" tests/psm2.sh
part "stock NIXL over its plugin" tests/nixl.sh
part "stock NIXL on a GPU" tests/nixl-gpu.sh
part "nodes on two hosts" tests/node-netns.sh \
    "${CARGO_TARGET_DIR:-target}/debug/examples/all_to_all"
part "jobs of several processes" tests/jobs.sh 10 \
    "${CARGO_TARGET_DIR:-target}"/debug/{examples/all_to_all,fishplate}
part "tracing probes" tests/probes.sh
part "nodes whose cables are pulled" tests/failover-netns.sh \
    "${CARGO_TARGET_DIR:-target}/debug/examples/outlive"
beside_done
read -r p f s <target/beside.counts || { p=0 f=1 s=0; echo "FAILED: the last parts did not end"; }

passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
printf '\n%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" = 0 ]
