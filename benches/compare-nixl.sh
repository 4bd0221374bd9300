#!/usr/bin/env bash
# Compares our plugin in stock NIXL with the wheel's own UCX backend, in turns on the same two
# processors: two processes, host memory, WRITE and READ. Prints medians over the rounds in
# microseconds. tests/nixl.sh installs the wheel.
#
#   benches/compare-nixl.sh [ROUNDS]       3 rounds by default, about five minutes
#   CPUS=2,3  processors (default: the first two)
#   ROWS=FILE  keeps the figures of each round in this file
#
# "ours" is our plugin over shared memory alone, and "ours-auto" with default parameters.
# "default" is UCX with default settings. "best" is UCX with posix, cma and self and without error
# handling, so it does not detect a peer's death. "tcp" compares UCX over only tcp with our plugin
# without shared memory.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3}
target=$(realpath "${CARGO_TARGET_DIR:-target}")
python=$target/nixl/venv/bin/python
[ -x "$python" ] || { echo "run tests/nixl.sh first: it installs the wheel"; exit 1; }
results=$(mktemp -d)
rows=$(realpath -m "${ROWS:-/dev/null}")
trap 'rm -r "$results"' EXIT
adapters/nixl/build.sh "$results/lib"

# run NAME [VARIABLE=VALUE...] BACKEND [PARAM...]: runs a pair once, and keeps its figures
run() {
    local name=$1
    shift
    env "$@" >>"$results/$name" || echo "$name failed" >&2
}
pair="$python benches/nixl-pair.py"
for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    # shellcheck disable=SC2086  # several words
    {
        run ours NIXL_PLUGIN_DIR="$results/lib" $pair FISHPLATE fabric=off
        run ours-auto NIXL_PLUGIN_DIR="$results/lib" $pair FISHPLATE
        run best UCX_TLS=posix,cma,self $pair UCX ucx_error_handling_mode=none
        run default $pair UCX
        run ours-tcp NIXL_PLUGIN_DIR="$results/lib" $pair FISHPLATE shared_memory=no providers=tcp
        run tcp UCX_TLS=tcp $pair UCX
    }
done
"$python" benches/nixl-table.py "$results" ours ours-auto best default ours-tcp tcp
(cd "$results" && grep -H "^{" ours ours-auto best default ours-tcp tcp |
    sed 's/^\([a-z-]*\):{/{"backend": "\1", /') >"$rows"
