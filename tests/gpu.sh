#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the tests of a device over its real driver, with two processes. Elsewhere it says so, and why.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

log=$(mktemp)
trap 'rm "$log"' EXIT
timeout 600 cargo test --locked --quiet -p fishplate-shm --features cuda --test device cuda -- --show-output >"$log" 2>&1
status=$?
if why=$(grep -m 1 -o 'SKIPPED on_cuda::copies_arrive_whole: .*' "$log"); then
    echo "SKIPPED the suite on a GPU: ${why#*: }"
    exit 77
fi
grep -E '^test |^SKIPPED|^test result' "$log"
[ "$status" = 0 ] || tail -n 60 "$log"
exit "$status"
