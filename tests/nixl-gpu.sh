#!/usr/bin/env bash
# Tests the NIXL plugin with memory of an NVIDIA GPU: two processes move random lists between device
# memory and host memory, and check every byte and every notification. On a machine without a GPU
# the script prints SKIPPED and the reason. tests/nixl.sh runs the same lists over a fake driver.
#
# usage: tests/nixl-gpu.sh [--figures]
#
# --figures also prints a table that compares our plugin with UCX PLUGIN=FOLDER the folder of
# libplugin_FISHPLATE.so; by default the script builds it PYTHON=PATH a Python that has the NIXL
# wheel and numpy, and tests tensors if it has PyTorch;
#                  by default that of tests/nixl.sh
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-$(realpath -m "${CARGO_TARGET_DIR:-target}")/nixl/venv/bin/python}
skip() {
    echo "SKIPPED NIXL on a GPU: $*"
    exit 77
}
count='import ctypes as c; n = c.c_int(); l = c.CDLL("libcuda.so.1"); l.cuInit(0); l.cuDeviceGetCount(c.byref(n)); assert n.value'
"$python" -c "import numpy" 2>/dev/null ||
    skip "$python has no numpy; run tests/nixl.sh or set PYTHON"
"$python" -c "$count" 2>/dev/null || skip "no usable CUDA driver, or no device"
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
if [ -z "${PLUGIN:-}" ]; then
    PLUGIN=$work/lib
    adapters/nixl/build.sh "$PLUGIN" || { echo "FAILED to build libplugin_FISHPLATE.so"; exit 1; }
fi
export PYTHONDONTWRITEBYTECODE=1
failed=0

# lists KINDS: runs two processes that move lists between memory of these kinds
lists() {
    local folder pids=() status=0 name
    folder=$(mktemp -d -p "$work")
    for name in p1 p2; do
        NIXL_PLUGIN_DIR=$PLUGIN FISHPLATE_NIXL_PARAMS="fabric=off" FISHPLATE_NIXL_KINDS=$1 \
            timeout --kill-after=2 45 "$python" adapters/nixl/tests/transfers.py "$folder" $name \
            p1,p2 "${LISTS:-150}" "$seed" \
            >"$folder/log-$name" 2>&1 &
        pids+=($!)
    done
    for name in "${pids[@]}"; do wait "$name" || status=$?; done
    if [ $status = 0 ]; then
        echo "ok $2 (seed $seed)"
    else
        failed=1
        echo "FAILED $2 (status $status, seed $seed)"
        tail -n 20 "$folder"/log-*
    fi
}
seed=${FISHPLATE_SEED:-$RANDOM}
lists DRAM,VRAM "lists between device and host memory"
if "$python" -c "import torch" 2>/dev/null; then
    FISHPLATE_NIXL_TORCH=yes lists VRAM "lists between tensors of PyTorch"
fi

if [ "${1:-}" = --figures ]; then
    # run NAME [VARIABLE=VALUE...] BACKEND [PARAM...]: runs nixl-pair.py once, and appends its
    # figures to file NAME
    run() {
        local name=$1
        shift
        timeout --kill-after=2 20 env MEMORY=VRAM "$@" >>"$work/$name" 2>"$work/log" && return
        [ "$name" != ours ] || failed=1
        echo "no figures of $name:" && tail -n 3 "$work/log"
    }
    pair="$python benches/nixl-pair.py"
    # shellcheck disable=SC2086  # several words
    for _ in $(seq "${ROUNDS:-1}"); do
        run ours NIXL_PLUGIN_DIR="$PLUGIN" $pair FISHPLATE fabric=off
        run default $pair UCX
        run best UCX_TLS=cuda_ipc,cuda_copy,posix,cma,self $pair UCX ucx_error_handling_mode=none
    done
    "$python" benches/nixl-table.py "$work" ours default best
fi
exit $failed
