#!/usr/bin/env bash
# Tests libpsm2.so.2: its symbols and layouts against Debian's headers, wrong calls, and a killed
# peer. Then runs stock Open MPI over the library, with our own program and mpi4py's tests. The
# library's counters show whether a job really ran over it.
#
#   tests/psm2.sh [--long]
#
# --long: also 3 and 8 ranks, hpcc, 100 killed peers, and more messages. The short run takes two
# minutes.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/netns.sh

long=false
[ "${1:-}" != --long ] || long=true
skip() {
    echo "SKIPPED libpsm2: $*"
    exit 77
}
need gcc gcc || skip "no C compiler, and it could not be installed"
need readelf binutils || skip "no readelf, and it could not be installed"
need fi_info libfabric-bin || skip "libfabric could not be installed"
need_file /usr/include/psm2_mq.h libpsm2-dev ||
    skip "the package libpsm2-dev could not be installed"

work=$(mktemp -d)
# shellcheck disable=SC2317  # called by trap
down() {
    no_hosts
    rm -r "$work"
}
trap down EXIT
failed=0
tests=$PWD/adapters/psm2/tests
cache=${CARGO_TARGET_DIR:-$PWD/target}/psm2
PROFILE=${PROFILE:-dev} adapters/psm2/build.sh "$work/lib" || { echo "FAILED to build libpsm2.so.2"
    exit 1; }
library=$work/lib/libpsm2.so.2
export LD_LIBRARY_PATH=$work/lib work

# say NAME COMMAND...: runs a check, and prints its result on one line
say() {
    local name=$1 status=0
    shift
    timeout --kill-after=5 "${limit:-120}" "$@" >"$work/log" 2>&1 </dev/null || status=$?
    if [ $status = 0 ]; then
        echo "ok $name"
    else
        failed=1
        echo "FAILED $name (status $status)"
        tail -n 40 "$work/log"
    fi
}

names() {
    nm -D --defined-only "$work/lib/libpsm2.so.2" | awk '{ print $3 }' | sort | diff "$1" -
}
export -f names
say "symbols, with their version" bash -c "names $tests/symbols.txt"
say "SONAME" grep -q 'libpsm2\.so\.2\]' <(readelf -d "$library")
say "the preload exports glob alone" [ "$(nm -D --defined-only "$work/lib/libfishplate_hfi1.so" |
    awk '{ print $3 }')" = glob ]
for name in layout misuse requests peek stats vanish killed late am flood random stuck; do
    say "$name.c" gcc -std=gnu11 -Wall -Wextra -Werror -O1 -g "$tests/$name.c" "$library" -pthread \
        -o "$work/$name"
done
say "Debian's libfabric loads with it" env LD_PRELOAD="$library" LD_BIND_NOW=1 fi_info -l
say "wrong calls" "$work/misuse"
say "all 13 statistics" "$work/stats"
say "passes of loops that take completed requests" "$work/peek"
say "closes beside a process that is late to close" "$work/late"
operations=100000
$long && operations=1000000
limit=600 say "$operations random operations against a model" "$work/random" $operations
tail -n 2 "$work/log"
say "active messages" "$work/am" 20000
tail -n 1 "$work/log"
say "active messages: two floods" "$work/flood" 20000
say "active messages to a killed peer" "$work/stuck" dies
# Messages of 8000 bytes fill 512 MiB, which takes long on a busy machine.
for bytes in 8 100 8000; do
    limit=600 say "an error where messages of $bytes bytes fill all memory" \
        env FISHPLATE_PSM2_UNEXPECTED=10000 FISHPLATE_PSM2_PATIENCE=2 "$work/stuck" crowds $bytes
done
limit=600 say "no error while the program waits for a third endpoint" \
    env FISHPLATE_PSM2_UNEXPECTED=10000 FISHPLATE_PSM2_PATIENCE=2 "$work/stuck" third 8
limit=600 say "an error while it waits for a third endpoint that never sends" \
    env FISHPLATE_PSM2_UNEXPECTED=10000 FISHPLATE_PSM2_PATIENCE=1 "$work/stuck" cycle 8
# Runs `fi_pingpong` over libfabric's psm2 provider. fi_pingpong verifies the data. The client finds
# the server by TCP.
pingpong() {
    local port=$((20000 + $$ % 20000)) pair=(fi_pingpong -p psm2 -e rdm -m tagged -c)
    export LD_PRELOAD=$work/lib/libfishplate_hfi1.so FISHPLATE_PSM2_STATS=1
    "${pair[@]}" -B $port &
    for _ in {1..200}; do
        [ -z "$(ss -Hltn "sport = :$port")" ] || break
        sleep 0.05
    done
    "${pair[@]}" -P $port 127.0.0.1 && wait $! &&
        [ "$(grep -cE '^fishplate-psm2 .*: sent [1-9]' "$work/log")" = 2 ] &&
        [ "$(grep -cE '^1m +10 +=10 ' "$work/log")" = 2 ]
}
export -f pingpong
if need ss iproute2; then
    say "fi_pingpong over libfabric's provider" bash -c pingpong
else
    echo "SKIPPED fi_pingpong over libpsm2: iproute2 could not be installed"
fi
say "40,000 requests" "$work/requests" 40000
$long && say "1,048,576 requests, and one more" "$work/requests" all
rounds=5
$long && rounds=100
limit=600 say "$rounds peers killed while they are connected" "$work/vanish" $rounds
tail -n 1 "$work/log"
limit=600 say "$rounds killed peers" "$work/killed" $rounds
tail -n 1 "$work/log"

# Creates two hosts, joined by two rails of libfabric.
if hosts 2 77 >"$work/why"; then
    two_hosts=true
    limit=600 say "2 killed peers on two hosts" "$work/killed" 2 "$here" "$there"
    tail -n 1 "$work/log"
else
    two_hosts=false
    echo "SKIPPED libpsm2 on two hosts: $(cat "$work/why")"
fi

need mpirun.openmpi openmpi-bin &&
    need_file "/usr/lib/*/openmpi/include/mpi.h" libopenmpi-dev ||
    { echo "SKIPPED MPI over libpsm2: Open MPI could not be installed"; exit $failed; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

# job RANKS PROGRAM...: runs a program, and checks our counters to see that each rank ran over our
# library. Each rank writes its own output file, because mpirun cuts lines. A rank also records its
# exit status there, because mpirun kills the other ranks as soon as one exits with 1.
job() {
    local ranks=$1
    shift
    rm -f "$work"/rank.*
    # shellcheck disable=SC2016  # the rank's own shell expands it
    mpirun.openmpi -n "$ranks" --mca pml cm --mca mtl psm2 -x LD_LIBRARY_PATH \
        -x LD_PRELOAD="$work/lib/libfishplate_hfi1.so" \
        -x FISHPLATE_PSM2_STATS=1 sh \
        -c 'exec >"$work/rank.$OMPI_COMM_WORLD_RANK" 2>&1; "$@"; echo "ended with $?"' - "$@"
    cat "$work"/rank.*
    [ "$(grep -lE '^fishplate-psm2 .*: sent [1-9]' "$work"/rank.* | wc -l)" = "$ranks" ]
}
# ended RANKS HOW: checks that this many ranks exited with this status
ended() {
    [ "$(grep -lE "^ended with $2\$" "$work"/rank.* | wc -l)" = "$1" ]
}
export -f job ended

say "the MPI program" mpicc.openmpi -Wall -Wextra -Werror -O1 "$tests/mpi.c" -o "$work/mpi"
# program RANKS REVERSED: runs our MPI program
program() {
    job "$1" "$work/mpi" "$2" && ended "$1" 0 &&
        [ "$(grep -c "^rank . of $1 is done" "$work/log")" = "$1" ]
}
# Sends more short messages than the receiver has room for, before the first receive. Checks the
# error.
crowded() {
    export FISHPLATE_PSM2_UNEXPECTED=10000 FISHPLATE_PSM2_PATIENCE=2
    ! program 2 100000 &&
        grep -q 'set FISHPLATE_PSM2_UNEXPECTED to a number above 10000' "$work/log"
}
export -f program crowded
say "2 ranks: ring, all to all, 300000 messages in reverse" bash -c "program 2 300000"
grep "in reverse" "$work/log"
say "an error where messages in reverse exceed the limit" bash -c crowded
say "4 ranks" bash -c "program 4 1000"
say "the program with threads" mpicc.openmpi -Wall -Wextra -Werror -O1 "$tests/threads.c" -pthread \
    -o "$work/threads"
threads() {
    job "$1" "$work/threads" && ended "$1" 0 &&
        [ "$(grep -c "^rank . of $1 is done" "$work/log")" = "$1" ]
}
export -f threads
for ranks in 2 3; do say "$ranks ranks of 4 threads" bash -c "threads $ranks"; done

# mpirun starts processes on the other host with this script: "agent HOST COMMAND".
cat >"$work/agent" <<'AGENT'
#!/usr/bin/env bash
while [[ ${1:-} == -* ]]; do shift; done
shift
exec nsenter --net="/run/netns/$there" unshare -u sh -c "hostname there; $*"
AGENT
chmod +x "$work/agent"
# Two ranks on each host: shared memory within a host, two rails of tcp between hosts.
network() {
    nsenter --net="/run/netns/$here" unshare -u bash -c 'hostname here; "$@"' - \
        mpirun.openmpi --host 10.77.0.1:2,10.77.0.2:2 -n 4 --mca plm_rsh_agent "$work/agent" \
        --mca oob_tcp_if_include 10.77.0.0/24 --mca pml cm --mca mtl psm2 -x LD_LIBRARY_PATH \
        -x LD_PRELOAD="$work/lib/libfishplate_hfi1.so" -x FISHPLATE_PSM2_STATS=1 "$work/mpi" 1000 \
        "$@"
    [ "$(grep -cE '^fishplate-psm2 0a4d.*: sent [1-9]' "$work/log")" = 4 ] &&
        [ "$(grep -c "^rank . of 4 is done" "$work/log")" = 4 ]
}
# Runs on two hosts while the cable of one rail is pulled. The other rail also carries mpirun's own
# messages.
pulled() {
    network "$work/exchange" &
    local job=$!
    until [ -e "$work/exchange" ]; do kill -0 $job || return; sleep 0.05; done
    # The rail has carried a part of the payloads.
    [ "$(ip netns exec "$here" cat /sys/class/net/rail1/statistics/tx_bytes)" -gt 1000000 ] ||
        return
    ip -n "$here" link set rail1 down && touch "$work/exchange.end"
    wait $job && [ -e "$work/exchange.more" ]
}
export -f network pulled
if $two_hosts; then
    say "4 ranks on two hosts" bash -c network
    limit=300 say "4 ranks on two hosts, and a cable is pulled" bash -c pulled
    ip -n "$here" link set rail1 up
fi
$long && limit=600 say "8 ranks, 2000000 messages in reverse" bash -c "program 8 2000000" &&
    grep "in reverse" "$work/log"

# NetPIPE verifies the data of 32 lengths, and of lengths slightly below and above. hpcc verifies
# its results.
pipe() {
    job 2 NPopenmpi -i -u 300000 -n 2 -o "$work/pipe" && ended 2 0 &&
        [ "$(grep -ac 'Integrity check passed' "$work/rank.0")" -gt 30 ]
}
# challenge RANKS: runs hpcc
challenge() {
    mkdir "$work/hpcc.$1" && cd "$work/hpcc.$1" || return
    # Sets a matrix of 200, on a grid of one row.
    sed -E "s/^[0-9]+( +)Ns/200\1Ns/; s/^[0-9]+( +)Ps/1\1Ps/; s/^[0-9]+( +)Qs/$1\1Qs/" \
        /usr/share/doc/hpcc/examples/_hpccinf.txt >hpccinf.txt
    job "$1" hpcc && ended "$1" 0 && grep -E 'PASSED|Success=1' hpccoutf.txt &&
        ! grep -E 'FAILED|Success=0|ERROR' hpccoutf.txt
}
export -f pipe challenge
if need NPopenmpi netpipe-openmpi; then
    say "NetPIPE, with its check" bash -c pipe
else
    echo "SKIPPED NetPIPE over libpsm2: netpipe-openmpi could not be installed"
fi
if $long && need_file /usr/share/doc/hpcc/examples/_hpccinf.txt hpcc; then
    for ranks in 2 4; do limit=900 say "hpcc, $ranks ranks" bash -c "challenge $ranks"; done
elif $long; then
    echo "SKIPPED hpcc over libpsm2: hpcc could not be installed"
fi

# Finds mpi4py's own tests, in the version of the installed package.
need_file /usr/lib/python3/dist-packages/mpi4py/MPI.*.so python3-mpi4py ||
    { echo "SKIPPED mpi4py over libpsm2: python3-mpi4py could not be installed"; exit $failed; }
version=$(/usr/bin/python3 -c 'import mpi4py; print(mpi4py.__version__)')
source=$cache/mpi4py-$version
if [ ! -d "$source/test" ]; then
    mkdir -p "$cache"
    need pip3 python3-pip && timeout 120 pip3 download --quiet --no-deps --no-binary :all: \
        --dest "$cache" "mpi4py==$version" >/dev/null 2>"$work/log" </dev/null
    tar -C "$cache" -xf "$source.tar.gz" ||
        { echo "SKIPPED mpi4py over libpsm2: its tests are not to be had from PyPI"
        tail -n 3 "$work/log"; exit $failed; }
fi
# suite RANKS: runs mpi4py's tests. Fails if a test fails, unless that test also fails over the real
# library. Leaves out tests of other parts than messages: files, windows, spawned programs, pickles.
suite() {
    # shellcheck disable=SC2086  # several words
    job "$1" /usr/bin/python3 "$source/test/runtests.py" -q --no-threads $2 -e spawn -e io -e rma \
        -e win -e cco_vec -e test_pickle &&
        ended "$1" "[01]" &&
        [ "$(grep -alE '^Ran [0-9]{3,4} tests' "$work"/rank.* | wc -l)" = "$1" ] &&
        ! grep -ahE '^(ERROR|FAIL): ' "$work"/rank.* | grep -v testTestSomeRecv
}
export -f suite
export source
# mpi4py RANKS WHAT: runs the suite. Skips it on a busy machine, where the ranks would often wait
# for a processor and take too long.
mpi4py() {
    local busy
    busy=$(awk -v most="$(($(nproc) * 2))" '{ print ($1 > most) }' /proc/loadavg)
    if [ "$busy" = 1 ] && ! $long; then
        echo "SKIPPED mpi4py over libpsm2, $1 ranks: too much runs beside it ($(cut -d' ' \
            -f1 /proc/loadavg))"
        return
    fi
    limit=900 say "mpi4py $version, $1 ranks" bash -c "suite $1 '$2'"
    grep -aE '^Ran ' "$work/log"
}
if $long; then
    for ranks in 2 3 4 8; do mpi4py $ranks ""; done
else
    mpi4py 2 ""
    mpi4py 4 "-i p2p"
fi
say "nothing is left in /dev/shm" bash -c '! ls /dev/shm | grep -i "fishplate\|psm2"'
exit $failed
