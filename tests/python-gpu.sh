#!/usr/bin/env bash
# Tests device memory of the Python wheel on a machine with an NVIDIA GPU: two processes push torch
# tensors to each other, and cupy kernels poll words that signals set. Prints a table that compares
# the speed with torch's CUDA IPC. Builds the wheel unless WHEEL is given. Installs the wheel into a
# temporary folder, without a network. On a machine without a GPU or torch the script prints SKIPPED
# and the reason.
#
# usage: tests/python-gpu.sh [WHEEL]
set -uo pipefail
cd "$(dirname "$0")/.." || exit
tests=bindings/python/tests
why=$(python3 -c 'import torch; torch.cuda.is_available() or print("torch finds no GPU")' 2>&1) &&
    [ -z "$why" ] ||
    { echo "SKIPPED the Python wheel on a GPU: ${why##*$'\n'}"; exit 77; }
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
wheel=${1:-}
if [ -z "$wheel" ]; then
    command -v maturin >/dev/null || { echo "SKIPPED the Python wheel on a GPU: maturin is missing"
        exit 77; }
    maturin build --quiet --locked --release --manifest-path bindings/python/Cargo.toml \
        --out "$place/wheels" || exit
    wheel=$(ls "$place"/wheels/*.whl)
fi
python3 -m pip install --quiet --no-index --no-deps --target "$place/here" "$wheel" || exit
export PYTHONPATH=$place/here PYTHONUNBUFFERED=1
status=0
timeout --kill-after=2 70 python3 $tests/gpu.py || status=1
if python3 -c 'import pytest' 2>/dev/null; then
    timeout --kill-after=2 60 python3 -m pytest -p no:cacheprovider -q -rs \
        --rootdir bindings/python $tests/test_devices.py ||
        status=1
else
    echo "SKIPPED tests of device memory over its driver: pytest is missing"
fi
exit $status
