#!/usr/bin/env bash
# Tests libplugin_FISHPLATE.so in stock NIXL: agents of the wheel from PyPI load it and move data.
# Prints SKIPPED if the wheel cannot be installed.
#
#   tests/nixl.sh [--long]
#
# --long: more transfers, more killed peers.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/netns.sh

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
    { python3 -m venv "$venv" || { need_file "/usr/share/python-wheels/*" python3-venv &&
        python3 -m venv "$venv"; }; } >/dev/null 2>&1 ||
        skip "no virtual environment of Python could be made"
    timeout 300 "$venv/bin/pip" install --quiet --no-deps "$wheel" numpy 2>"$target/nixl/pip.log" ||
        skip "the wheel $wheel could not be installed: $(tail -n 1 "$target/nixl/pip.log")"
fi

work=$(mktemp -d)
# shellcheck disable=SC2317  # called by trap
down() {
    no_hosts
    rm -r "$work"
}
trap down EXIT
failed=0
tests=$PWD/adapters/nixl/tests
PROFILE=${PROFILE:-dev} adapters/nixl/build.sh "$work/lib" ||
    { echo "FAILED to build libplugin_FISHPLATE.so"; exit 1; }
export NIXL_PLUGIN_DIR=$work/lib PYTHONDONTWRITEBYTECODE=1 python tests work
export seed=${FISHPLATE_SEED:-$RANDOM}

# say NAME COMMAND...: runs a check, and prints its result on one line
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

# transfers PROCESSES COUNT SEED [PARAMS [OTHER]]: runs processes that move COUNT lists each; with
# OTHER, every second process is on the other host
transfers() {
    local names pids=() status=0 folder starter number=0
    names=$(seq -f p%g -s, "$1")
    folder=$(mktemp -d -p "$work")
    export FISHPLATE_NIXL_PARAMS=${4:-fabric=off}
    for name in ${names//,/ }; do
        starter=()
        if [ -n "${5:-}" ]; then
            starter=(ip netns exec "$here")
            [ $((number++ % 2)) = 0 ] || starter[3]=$there
        fi
        "${starter[@]}" $python "$tests/transfers.py" "$folder" "$name" "$names" "$2" "$3" &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    return $status
}
export -f transfers

symbols() {
    nm -D --defined-only "$work/lib/libplugin_FISHPLATE.so" | awk '{ print $3 }' | sort |
        diff <(printf 'nixl_plugin_%s\n' fini init) -
}
export -f symbols
say "two functions are exported" bash -c symbols
say "engine.cpp" g++ -std=c++20 -Wall -Wextra -Werror -Wno-invalid-offsetof -O1 \
    -g "$tests/engine.cpp" -o "$work/engine"
say "each status and wrong calls, two agents in one process" "$work/engine" \
    "$work/lib/libplugin_FISHPLATE.so"
# stub WORDS NAME: an installation of NIXL whose only backend has a table of WORDS words; none if 0
stub() {
    local folder=$work/$2
    mkdir -p "$folder/plugins"
    "${CC:-gcc}" -shared -fPIC -x c /dev/null -o "$folder/libnixl.so" || return
    [ "$1" = 0 ] || "${CC:-gcc}" -shared -fPIC -x c - -o "$folder/plugins/libplugin_UCX.so" \
        <<<"void *_ZTV17nixlBackendEngine[$1];"
}
# refuses NAME TEXT: in this installation the plugin creates no agent, and says why
refuses() {
    local text
    text=$(LD_PRELOAD=$work/$1/libnixl.so "$work/engine" "$work/lib/libplugin_FISHPLATE.so" \
        refused 2>&1) || return
    grep "$2" <<<"$text"
}
layouts() {
    stub 30 more && stub 0 none && stub 29 same || return
    refuses more "have 28 virtual functions, not 27" &&
        refuses none "cannot read the class layout from any backend" || return
    # Creates agents in an installation with the right table.
    ! refuses same .
}
export -f stub refuses layouts
say "other layouts are refused with a message" bash -c layouts
tcp="shared_memory=no providers=tcp"
# shellcheck disable=SC2086  # several words
if need fi_info libfabric-bin; then
    say "the same over tcp" "$work/engine" "$work/lib/libplugin_FISHPLATE.so" $tcp
else
    echo "SKIPPED NIXL over tcp: no libfabric, and it could not be installed"
fi
say "errors through the wheel" $python "$tests/wheel.py"
say "the example" $python adapters/nixl/examples/write.py
lists=100 rounds=5
$long && lists=5000 rounds=50
limit=1800 say "2 processes, $lists lists each, seed $seed" bash -c "transfers 2 $lists $seed"
limit=1800 say "4 processes, $((lists / 2)) lists each" bash -c "transfers 4 $((lists / 2)) $seed"
# killed [PARAMS]: kills agents during transfers
killed() {
    local starter=()
    [ -z "${1:-}" ] || starter=(ip netns exec "$there")
    FISHPLATE_NIXL_PARAMS=${1:-fabric=off} "${starter[@]/$there/$here}" $python "$tests/killed.py" \
        "$(mktemp -d -p "$work")" "$rounds" "${starter[@]}"
}
export -f killed
export rounds
limit=900 say "$rounds killed peers" bash -c killed
tail -n 1 "$work/log"
if need fi_info libfabric-bin && hosts 2 78 >"$work/why"; then
    rails="fabric=2 providers=tcp interfaces=rail0,rail1"
    limit=1800 say "2 processes on two hosts, two rails, $lists lists each" env RAILS=rail0,rail1 \
        bash -c "transfers 2 $lists $seed '$rails' other"
    limit=1800 say "4 processes on two hosts, $((lists / 2)) lists each" \
        bash -c "transfers 4 $((lists / 2)) $seed '$rails' other"
    pull="ip -n $here link set rail0 down" back="ip -n $here link set rail0 up"
    limit=1800 say "2 processes on two hosts, a cable pulled and put back" env PULL="$pull" \
        PUT_BACK="$back" bash -c "transfers 2 $lists $seed '$rails' other"
    limit=900 say "$rounds killed peers on another host" bash -c "killed '$rails'"
    tail -n 1 "$work/log"
    if $long; then
        limit=900 say "$rounds killed peers on both hosts" env MIXED=yes bash -c "killed '$rails'"
        tail -n 1 "$work/log"
    fi
else
    echo "SKIPPED NIXL on two hosts: $(cat "$work/why" 2>/dev/null || echo no libfabric)"
fi
# devices MODE COUNT PARAMS [OTHER]: device memory and host memory, over a driver without a GPU
devices() {
    export FAKE_CUDA=$1 FAKE_CUDA_REPORT=$work/report LD_LIBRARY_PATH=$work/fake \
        FISHPLATE_NIXL_KINDS=DRAM,VRAM
    rm -f "$FAKE_CUDA_REPORT"
    transfers 2 "$2" "$seed" "$3" ${4:-} || return
    # One line per process.
    cat "$FAKE_CUDA_REPORT"
    [ "$(grep -c 'violations \[\]$' "$FAKE_CUDA_REPORT")" = 2 ]
}
# killed_devices: kills agents during transfers of device memory
killed_devices() {
    LD_LIBRARY_PATH=$work/fake FISHPLATE_NIXL_KINDS=VRAM killed
}
export -f devices killed_devices
if [ -e /dev/nvidiactl ]; then
    echo "SKIPPED NIXL over a fake CUDA driver: this machine has a driver; tests/nixl-gpu.sh uses it"
elif cargo build --locked --quiet -p fishplate-fake-cuda -p fishplate --lib &&
    mkdir "$work/fake"; then
    cp "$target/debug/libfishplate_fake_cuda.so" "$work/fake/libcuda.so"
    ln -s libcuda.so "$work/fake/libcuda.so.1"
    for mode in "" late,segments late,differ,reopen flush,nowords,devices=1; do
        say "device memory over a fake driver${mode:+: $mode}" \
            bash -c "devices '$mode' $((lists / 3)) fabric=off"
    done
    ! need fi_info libfabric-bin ||
        say "device memory over tcp" bash -c "devices late $((lists / 3)) '$tcp'"
    [ -z "${rails:-}" ] ||
        limit=1800 say "device memory on two hosts, a cable pulled and put back" env PULL="$pull" \
        PUT_BACK="$back" bash -c "devices late $((lists / 3)) '$rails' other"
    limit=900 say "$rounds killed peers with device memory" bash -c killed_devices
else
    failed=1
    echo "FAILED to build the fake CUDA driver"
fi
# Runs the C++ half under AddressSanitizer, which also checks the Rust half's allocations: first
# alone, then in the wheel without leak checks, because Python leaks.
asan=$("${CXX:-g++}" -print-file-name=libasan.so)
if [ -e "$asan" ]; then
    flags="-fsanitize=address -fno-omit-frame-pointer"
    say "built with AddressSanitizer" env CXXFLAGS="$flags" PROFILE="${PROFILE:-dev}" \
        adapters/nixl/build.sh "$work/asan"
    say "engine.cpp with it" g++ -std=c++20 -Wno-invalid-offsetof -O1 -g $flags \
        "$tests/engine.cpp" -o "$work/engine-asan"
    say "each status, under AddressSanitizer" "$work/engine-asan" \
        "$work/asan/libplugin_FISHPLATE.so"
    # libfabric leaks its own descriptions.
    echo leak:libfabric.so >"$work/leaks"
    # shellcheck disable=SC2086  # several words
    ! need fi_info libfabric-bin ||
        say "the same over tcp" env LSAN_OPTIONS=suppressions="$work/leaks" "$work/engine-asan" \
        "$work/asan/libplugin_FISHPLATE.so" $tcp
    export NIXL_PLUGIN_DIR=$work/asan ASAN_OPTIONS=detect_leaks=0
    rounds=3
    preload="env LD_PRELOAD=$asan:$("${CXX:-g++}" -print-file-name=libstdc++.so.6)"
    python="$preload $python"
    say "2 processes, under AddressSanitizer" bash -c "transfers 2 $((lists / 5)) $seed"
    say "$rounds killed peers, under AddressSanitizer" bash -c killed
else
    echo "SKIPPED NIXL under AddressSanitizer: the compiler has no libasan.so"
fi
say "nothing is left in /dev/shm" bash -c '! ls /dev/shm | grep -i "fishplate\|nixl"'
exit $failed
