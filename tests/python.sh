#!/usr/bin/env bash
# Tests the Python wheel as users install it: maturin builds the wheel, pip installs it into a new
# environment, and pytest runs there with two and four processes. Then runs the examples as two
# processes.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh

need python3 python3 ||
    { echo "SKIPPED the Python wheel: python3 is missing and cannot be installed"; exit 77; }
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "SKIPPED the Python wheel: $(python3 --version) is older than 3.11"; exit 77; }
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
failed=0
package=$PWD/bindings/python

# say NAME COMMAND...: runs a check, and prints its result on one line
say() {
    local name=$1
    shift
    if timeout --kill-after=10 900 "$@" >"$place/log" 2>&1 </dev/null; then
        echo "ok $name"
    else
        failed=1
        echo "FAILED $name"
        tail -n 60 "$place/log"
    fi
}

python3 -m venv "$place/venv" 2>/dev/null ||
    { fetch_package venv python3-venv && python3 -m venv "$place/venv"; } ||
    { echo "SKIPPED the Python wheel: python3 makes no environments"; exit 77; }
export PATH=$place/venv/bin:$PATH
pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2' pytest numpy mypy >"$place/log" \
    2>&1 ||
    { echo "SKIPPED the Python wheel: pip cannot install maturin, pytest, numpy and mypy"
    tail -n 3 "$place/log"; exit 77; }

say "the wheel is built" maturin build --quiet --locked --profile dev \
    --manifest-path "$package/Cargo.toml" --out "$place/wheels"
say "one wheel for Python 3.11 and later" bash -c "ls $place/wheels/fishplate-*-cp311-abi3-*.whl"
[ $failed = 0 ] || exit 1
say "the wheel is installed" pip install --quiet --disable-pip-version-check "$place"/wheels/*.whl
say "its licences and stubs are inside" \
    bash -c "for file in LICENSE-MIT LICENSE-APACHE py.typed _native.pyi; do
    python3 -m zipfile -l $place/wheels/*.whl | grep -q /\$file || exit 1; done"

# pytest's log has ok, FAILED or SKIPPED for each test.
cd "$place" || exit
timeout --kill-after=10 1500 python3 -m pytest -p no:cacheprovider -rs -q --rootdir "$package" \
    "$package/tests" \
    --ignore "$package/tests/test_devices.py" >"$place/log" 2>&1 </dev/null
status=$?
grep -o 'SKIPPED .*: .*' "$place/log" | sort -u
if [ $status = 0 ]; then
    echo "ok pytest: $(tail -n 1 "$place/log")"
else
    failed=1
    echo "FAILED pytest (status $status)"
    tail -n 100 "$place/log"
fi

# Tests device memory over a fake driver, without a GPU. tests/python-gpu.sh uses a GPU.
cd "$package/../.." || exit
mkdir "$place/fake"
say "the driver without a GPU is built" \
    cargo build --locked --quiet -p fishplate-fake-cuda -p fishplate --lib
cp "${CARGO_TARGET_DIR:-target}/debug/libfishplate_fake_cuda.so" "$place/fake/libcuda.so"
# devices MODE: runs the tests of device memory over the fake driver; fails if a test is skipped or
# memory is misused
devices() {
    rm -f "$place/report"
    env LD_LIBRARY_PATH="$place/fake" FAKE_CUDA="$1" FAKE_CUDA_REPORT="$place/report" \
        python3 -m pytest \
        -p no:cacheprovider -rs -q --rootdir "$package" "$package/tests/test_devices.py" \
        >"$place/seen" 2>&1
    local status=$?
    cat "$place/seen" "$place/report"
    [ $status = 0 ] && ! grep SKIPPED "$place/seen" && ! grep -v ' violations \[\]$' "$place/report"
}
export -f devices
export place package
for mode in "" late,segments flush,nowords; do
    say "device memory over a fake driver${mode:+: $mode}" bash -c 'devices "$0"' "$mode"
done

# Type-checks the examples in the documentation pages. Declares the names that the pages leave
# undefined.
cd "$package/../.." || exit
code() { sed -n '/^```python$/,/^```$/{ /^```/!p }' "$1"; }
{
    echo 'from typing import Any'
    echo 'import fishplate'
    echo 'from fishplate.direct import Inlet, Outlet'
    echo 'async def page(array: bytes, buffer: bytearray, tensor: memoryview, torch: Any) -> None:'
    code docs/python.md | sed 's/^/    /'
} >"$place/page.py"
code "$package/README.md" >"$place/readme.py"
say "the examples in docs/python.md and the README" mypy --strict "$place/page.py" \
    "$place/readme.py"
cd "$place" || exit

cat >"$place/nics.py" <<'END'
import os
import time
import fishplate
def rails(**settings):
    with fishplate.Node(fabric="required", providers=["tcp"], max_rails=1, **settings) as node:
        return node.rails()
assert rails(local_rank=0) == rails() == [("tcp", "link0")], rails()
assert rails(local_rank=1) == [("tcp", "link1")]
os.environ["LOCAL_RANK"] = "1"
assert fishplate.Job.from_env().local_rank == 1
assert rails() == [("tcp", "link1")] and rails(local_rank=2) == [("tcp", "link0")]
# A rail that fails and returns has another address.
two = dict(fabric=2, providers=["tcp"], shared_memory=False, worker=True, timeout=10.0)
with fishplate.Node(**two) as a, fishplate.Node(**two) as b:
    to_b, before = a.connect(b.address), a.address
    b.connect(a.address)
    a.send(to_b, 1, b"x")
    a.quiet(to_b)
    os.system("ip link set link0 down && sleep 0.1 && ip link set link0 up")
    end = time.monotonic() + 20
    while a.address == before:
        assert time.monotonic() < end
END
# Runs a command in a namespace with two interfaces, which /sys shows.
cat >"$place/links.sh" <<'END'
mount -t sysfs sysfs /sys && ip link set lo up || exit 77
sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
for at in 0 1; do
    ip link add link$at type veth peer name other$at || exit 77
    ip addr add 10.97.$at.1/24 dev link$at && ip link set other$at up && ip link set link$at up ||
        exit
done
for _ in {1..100}; do
    [ "$(cat /sys/class/net/link?/operstate)" = $'up\nup' ] && break
    sleep 0.05
done
exec "$@"
END
if ldconfig -p | grep 'libfabric\.so\.1' >/dev/null && need ip iproute2 &&
    unshare --mount --net bash "$place/links.sh" true 2>/dev/null; then
    say "NICs of processes on one host, and a rail that fails" \
        unshare --mount --net bash "$place/links.sh" python3 "$place/nics.py"
else
    echo "SKIPPED NICs of processes on one host: no libfabric or no namespaces"
fi

# two EXAMPLE: runs an example as two processes
two() {
    local port status=0
    port=$(python3 \
        -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
    python3 "$1" "127.0.0.1:$port" &
    python3 "$1" "127.0.0.1:$port" || status=1
    wait $! || status=1
    return $status
}
export -f two
for example in "$package"/examples/*.py; do
    say "$(basename "$example") as two processes" bash -c 'two "$0"' "$example"
    # Prints the figures of the example latency.py.
    grep 'one way\|the call' "$place/log"
done
exit $failed
