#!/usr/bin/env bash
# Compares the sweep's direct path in Python with the same calls in Rust (comparisons/push.rs). The
# path puts data into a tensor of the peer, then signals. Both programs are release builds of this
# working copy. Prints the median time of one push, and the ratio of the bandwidths.
#
# usage: benches/compare-python.sh [BYTES [ROUNDS]]; by default 1 GiB and 7 rounds
#
#   CPUS=2,3  processors (default 0,1)
set -euo pipefail
cd "$(dirname "$0")/.."
bytes=${1:-1073741824} rounds=${2:-7} cpus=${CPUS:-0,1} turns=12
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT

cargo build --release --locked --quiet --manifest-path benches/Cargo.toml --example push
push=${CARGO_TARGET_DIR:-benches/target}/release/examples/push
python3 -m venv "$place/venv"
export PATH=$place/venv/bin:$PATH
pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2'
maturin build --quiet --locked --release --manifest-path bindings/python/Cargo.toml \
    --out "$place/wheels"
pip install --quiet --disable-pip-version-check "$place"/wheels/*.whl

# pair COMMAND...: runs two processes, each on its own processor; prints the output of both
pair() {
    local status=0
    taskset -c "${cpus%,*}" "$@" &
    taskset -c "${cpus#*,}" "$@" || status=1
    wait $! && return $status
}
next() { echo "127.0.0.1:$((20000 + RANDOM % 20000))"; }
rust() { pair "$push" "$(next)" "$bytes" $turns >>"$place/rust"; }
python() {
    pair python3 -m fishplate.sweep "$(next)" --sizes "$bytes" --path direct -n $turns |
        sed -n 's/.*"p50": \([0-9]*\).*/\1/p' >>"$place/python"
}

for ((round = 0; round < rounds; round++)); do
    if ((round % 2)); then python && rust; else rust && python; fi
done
median() { sort -n "$1" | sed -n "$(((rounds + 1) / 2))p"; }
paste "$place/rust" "$place/python" |
    awk '{ printf "round %d: Rust %.1f ms, Python %.1f ms\n", NR, $1 / 1e6, $2 / 1e6 }'
awk -v r="$(median "$place/rust")" -v p="$(median "$place/python")" -v b="$bytes" \
    'BEGIN { printf "medians: Rust %.2f GB/s, Python %.2f GB/s, ratio %.3f\n", b / r, b / p, r / p }'
