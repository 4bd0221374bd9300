#!/usr/bin/env bash
# libplugin_FISHPLATE.so in stock NIXL: agents of the wheel from PyPI load it and move data. Says
# SKIPPED where the wheel cannot be installed.
#
#   tests/nixl.sh [--long]
#
# --long: more transfers, more killed peers.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh

long=false
[ "${1:-}" != --long ] || long=true
skip() {
    echo "SKIPPED NIXL: $*"
    exit 77
}
wheel=nixl-cu12==1.5.1
target=$(realpath "${CARGO_TARGET_DIR:-target}")
venv=$target/nixl/venv
need g++ g++ || skip "no C++ compiler, and it could not be installed"
need python3 python3 || skip "no Python, and it could not be installed"
python=$venv/bin/python
if ! "$python" -c "import nixl_cu12, numpy" 2>/dev/null; then
    { python3 -m venv "$venv" || { need_file "/usr/share/python-wheels/*" python3-venv && python3 -m venv "$venv"; }; } >/dev/null 2>&1 ||
        skip "no virtual environment of Python could be made"
    timeout 300 "$venv/bin/pip" install --quiet --no-deps "$wheel" numpy 2>"$target/nixl/pip.log" ||
        skip "the wheel $wheel could not be installed: $(tail -n 1 "$target/nixl/pip.log")"
fi

work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
failed=0
tests=$PWD/adapters/nixl/tests
PROFILE=${PROFILE:-dev} adapters/nixl/build.sh "$work/lib" || { echo "FAILED to build libplugin_FISHPLATE.so"; exit 1; }
export NIXL_PLUGIN_DIR=$work/lib PYTHONDONTWRITEBYTECODE=1 python tests work
seed=${FISHPLATE_SEED:-$RANDOM}

# say NAME COMMAND...: one line for one check
say() {
    local name=$1 status=0
    shift
    timeout --kill-after=5 "${limit:-180}" "$@" >"$work/log" 2>&1 </dev/null || status=$?
    if [ $status = 0 ]; then
        echo "ok $name"
    else
        failed=1
        echo "FAILED $name (status $status)"
        tail -n 40 "$work/log"
    fi
}

# transfers PROCESSES COUNT SEED [PARAMS]: each process moves COUNT lists
transfers() {
    local names pids=() status=0 folder
    names=$(seq -f p%g -s, "$1")
    folder=$(mktemp -d -p "$work")
    export FISHPLATE_NIXL_PARAMS=${4:-fabric=off}
    for name in ${names//,/ }; do
        "$python" "$tests/transfers.py" "$folder" "$name" "$names" "$2" "$3" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    return $status
}
export -f transfers

symbols() {
    nm -D --defined-only "$work/lib/libplugin_FISHPLATE.so" | awk '{ print $3 }' | sort | diff <(printf 'nixl_plugin_%s\n' fini init) -
}
export -f symbols
say "two functions are exported" bash -c symbols
lists=100
$long && lists=5000
limit=1800 say "2 processes, $lists lists each, seed $seed" bash -c "transfers 2 $lists $seed"
limit=1800 say "4 processes, $((lists / 2)) lists each" bash -c "transfers 4 $((lists / 2)) $seed"
exit $failed
