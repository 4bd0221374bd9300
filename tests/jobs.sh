#!/usr/bin/env bash
# Tests jobs of four processes under launchers: mpiexec.hydra (PMI-1), Open MPI's mpirun (PMIx),
# srun (with PMIx, with PMI-2's descriptor, with neither) and torchrun. Other jobs set only the
# variables of a launcher, or use no launcher and meet by tcp:// or file://. Every process writes,
# signals, adds and sends to every other process, and all data is checked
# (tests/programs/all_to_all.rs).
# Also tests failing jobs: a missing rank, a wrong cookie, and ranks killed at random. Finally runs
# `fishplate perf job` under each launcher, in every pattern.
#
#   tests/jobs.sh [KILLS or --long [EXAMPLE TOOL]]
#
# KILLS: number of killed ranks, by default 10, with --long 100. Above 10, as many under each
# launcher too. EXAMPLE and TOOL: the built example and tool; by default they are built, optimised.
# Prints SKIPPED for launchers that cannot be installed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh

source tests/slurm.sh

kills=${1:-10} program=${2:-} tool=${3:-}
if [ -z "$program" ] || [ -z "$tool" ]; then
    cargo build --release --locked --package fishplate --example all_to_all >&2 || exit 1
    cargo build --release --locked --package fishplate-tool >&2 || exit 1
    program=${CARGO_TARGET_DIR:-target}/release/examples/all_to_all
    tool=${CARGO_TARGET_DIR:-target}/release/fishplate
fi
[ "$kills" != --long ] || kills=100
program=$(readlink -f "$program") tool=$(readlink -f "$tool")
[ -x "$program" ] && [ -x "$tool" ] || { echo "no such program: $program or $tool"; exit 1; }

work=$(mktemp -d)
# Unique copies of the programs, so that leftover processes of this run can be recognized.
cp "$program" "$work/all_to_all" && program=$work/all_to_all
cp "$tool" "$work/fishplate" && tool=$work/fishplate
# shellcheck disable=SC2317  # called by trap
down() {
    local pids
    pids=$(jobs -p)
    # shellcheck disable=SC2086  # several words
    [ -z "$pids" ] || kill -9 $pids 2>/dev/null
    left >/dev/null || left | xargs kill -9
    [ -z "${SLURM_CONF:-}" ] || slurm_down
    wait 2>/dev/null
    rm -rf "$work"
}
trap down EXIT
trap 'exit 130' INT TERM

# left: prints the processes of this run; fails if it finds some
left() {
    local exe found=1
    for exe in /proc/[0-9]*/exe; do
        # Starts no process for each one that it looks at: a loaded machine has many.
        [ "$exe" -ef "$program" ] || [ "$exe" -ef "$tool" ] || continue
        found=0
        exe=${exe#/proc/}
        echo "${exe%/exe}"
    done
    return $((1 - found))
}

failed=0
# say NAME COMMAND...: runs a check, and prints its result on one line
say() {
    local name=$1
    shift
    rm -f "$work"/out*
    if "$@"; then
        echo "ok      $name"
    else
        failed=1
        echo "FAILED  $name"
        sed 's/^/        | /' "$work"/out* 2>/dev/null
    fi
}

# good: checks that all four processes have reached the others, and that rank 0 has counted all
# rounds
good() {
    [ "$(cat "$work"/out* | grep -c '4 near, 0 rails to others')" = 4 ] &&
        [ "$(cat "$work"/out* | grep -c 'rank 0: .* counted 400')" = 1 ]
}

# numbered: checks that the four processes know their numbers on this host
numbered() {
    [ "$(cat "$work"/out* | grep -o ' local rank [0-3],' | sort -u | wc -l)" = 4 ]
}

# four VARIABLE=VALUE...: runs four processes with these variables; replaces %r by the rank
four() {
    local rank pids=() pid status=0
    for rank in 0 1 2 3; do
        env "${@//%r/$rank}" timeout --kill-after=5 120 "$program" 100 60 >"$work/out$rank" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    [ $status = 0 ] && good
}

# launched COMMAND...: runs four processes under a launcher, each with its own output file
launched() {
    # shellcheck disable=SC2016  # for the inner shell
    timeout --kill-after=5 120 "$@" \
        bash -c 'exec "$0" 100 60 >"$1$PMI_RANK$OMPI_COMM_WORLD_RANK" 2>&1' \
        "$program" "$work/out" >"$work/out-launcher" 2>&1 </dev/null && good && numbered
}

# four_by_srun MPI VARIABLE=VALUE...: runs four processes under srun with these variables
four_by_srun() {
    local mpi=$1
    shift
    timeout --kill-after=5 120 env "$@" srun --mpi="$mpi" --overcommit --output="$work/out%t" -n 4 \
        "$program" 100 60 \
        >"$work/out-launcher" 2>&1 </dev/null && good && numbered
}

four_numbered() { four "$@" && numbered; }

open_mpi=(env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun.openmpi -n 4 \
    --oversubscribe)
hydra=(mpiexec.hydra -n 4)
launchers=()
if need mpiexec.hydra mpich; then
    launchers+=(hydra)
    say "mpiexec.hydra" launched "${hydra[@]}"
else
    echo "SKIPPED mpiexec.hydra: it is missing and cannot be installed"
fi
if need mpirun.openmpi openmpi-bin; then
    launchers+=(open_mpi)
    say "mpirun of Open MPI" launched "${open_mpi[@]}"
else
    echo "SKIPPED mpirun of Open MPI: it is missing and cannot be installed"
fi

# Sets `port` to a new port for the next job. torchrun's store uses the port below it.
port=$((20000 + $$ % 9000))
next() {
    port=$((port + 2))
    while (: <>/dev/tcp/127.0.0.1/$port || : <>/dev/tcp/127.0.0.1/$((port - 1))) 2>/dev/null; do
        port=$((port + 2))
    done
}
meet=$work/meet
mkdir "$meet"
next
say "tcp://, ranks as they come" four FISHPLATE_SIZE=4 FISHPLATE_RENDEZVOUS=tcp://127.0.0.1:$port
next
say "tcp://, ranks and a cookie given" four FISHPLATE_RANK=%r FISHPLATE_SIZE=4 \
    FISHPLATE_COOKIE=swordfish \
    FISHPLATE_RENDEZVOUS=tcp://127.0.0.1:$port
say "file://, ranks as they come" four FISHPLATE_SIZE=4 "FISHPLATE_RENDEZVOUS=file://$meet"
say "file://, ranks given" four FISHPLATE_RANK=%r FISHPLATE_SIZE=4 \
    "FISHPLATE_RENDEZVOUS=file://$meet"
next
say "torchrun's variables" four_numbered RANK=%r WORLD_SIZE=4 LOCAL_RANK=%r MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=$port
say "Slurm's variables" four_numbered SLURM_PROCID=%r SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 \
    SLURM_LOCALID=%r "FISHPLATE_RENDEZVOUS=file://$meet"

patterns=pairs,one-to-many,many-to-one,all-to-all,ring
# measured COMMAND...: runs four ranks of the tool under a launcher; rank 0 must write a row for
# each pattern
measured() {
    timeout --kill-after=5 120 "$@" "$tool" perf job --pattern $patterns --check --json -n 200 \
        >"$work/out" 2>&1 </dev/null &&
        [ "$(grep -c '"ranks":4.*"errors":0' "$work/out")" = 5 ]
}

# by_hand VARIABLE=VALUE...: runs four ranks of the tool with these variables; replaces %r by the
# rank
by_hand() {
    local rank pids=() pid status=0
    for rank in 1 2 3 0; do
        env "${@//%r/$rank}" timeout --kill-after=5 120 "$tool" perf job --pattern $patterns \
            --check --json -n 200 \
            >"$work/out$rank" 2>&1 &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do wait "$pid" || status=1; done
    [ $status = 0 ] && [ "$(cat "$work"/out* | grep -c '"ranks":4.*"errors":0')" = 5 ]
}

for launcher in ${launchers[@]+"${launchers[@]}"}; do
    declare -n command=$launcher
    say "fishplate perf job under ${command[*]}" measured "${command[@]}"
done
next
say "fishplate perf job, torchrun's variables" by_hand RANK=%r WORLD_SIZE=4 LOCAL_RANK=%r \
    MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=$port
say "fishplate perf job, plain variables" by_hand FISHPLATE_SIZE=4 \
    "FISHPLATE_RENDEZVOUS=file://$meet"
if command -v torchrun >/dev/null; then
    # The last two options change nothing for these ranks. Without them torch 1.13 fails with Python
    # 3.11.
    say "fishplate perf job under torchrun" measured torchrun --no_python --nproc_per_node 4 \
        -r 9:1 -t 9:1
else
    echo "SKIPPED fishplate perf job under torchrun: it is missing"
fi
next
if [ "$(id -u)" != 0 ]; then
    echo "SKIPPED srun: only root can start a cluster"
elif ! need srun slurm-wlm || ! command -v slurmctld slurmd munged >/dev/null; then
    echo "SKIPPED srun: it is missing and cannot be installed"
elif ! slurm_up "$work/slurm" $((port + 10000)); then
    echo "SKIPPED srun: no cluster of this host alone"
else
    for mpi in none pmix pmi2; do
        variables=()
        [ $mpi != none ] || variables=("FISHPLATE_RENDEZVOUS=file://$meet")
        say "fishplate perf job under srun --mpi=$mpi" measured \
            env ${variables[@]+"${variables[@]}"} srun --mpi=$mpi --overcommit -n 4
        say "srun --mpi=$mpi" four_by_srun $mpi ${variables[@]+"${variables[@]}"}
    done
    slurm_down
fi

# missing: starts ranks 0, 1 and 3 of four; checks that the error of each names rank 2
missing() {
    local rank pids=()
    for rank in 0 1 3; do
        FISHPLATE_RANK=$rank FISHPLATE_SIZE=4 FISHPLATE_RENDEZVOUS=file://$meet \
            timeout --kill-after=5 60 "$program" 100 4 >"$work/out$rank" 2>&1 &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank"; [ $? = 1 ] || return 1; done
    [ "$(cat "$work"/out* | grep -c 'rank 2 did not come within 4s')" = 3 ]
}
say "a missing rank is named by those who wait" missing

# missing_under TEXT COMMAND...: runs a launcher's job without rank 2; checks that a waiting rank
# prints TEXT, and that the launcher ends the job
missing_under() {
    local text=$1
    shift
    # shellcheck disable=SC2016  # for the inner shell
    timeout --kill-after=5 60 "$@" bash -c 'rank=$PMI_RANK$OMPI_COMM_WORLD_RANK
        [ "$rank" != 2 ] || exec sleep 30
        exec "$0" 100 3 >"$1$rank" 2>&1' "$program" "$work/out" >"$work/out-launcher" 2>&1 \
        </dev/null
    [ $? != 124 ] && grep -q "$text" "$work"/out[0-9]
}
for launcher in ${launchers[@]+"${launchers[@]}"}; do
    declare -n command=$launcher
    # PMI-1 does not tell which rank is missing at its barrier.
    text='rank 2 did not come within 3s'
    [ "$launcher" != hydra ] || text="not all 4 ranks reached PMI's barrier"
    say "a missing rank under ${command[*]}: $text" missing_under "$text" "${command[@]}"
done

# cookie: checks that a process with a wrong cookie is refused, and that the job continues
cookie() {
    local place=tcp://127.0.0.1:$port pids=() rank
    for rank in 0 1; do
        FISHPLATE_RANK=$rank FISHPLATE_SIZE=3 FISHPLATE_COOKIE=right FISHPLATE_RENDEZVOUS=$place \
            timeout --kill-after=5 120 "$program" 100 60 >"$work/out$rank" 2>&1 &
        pids+=($!)
    done
    FISHPLATE_RANK=2 FISHPLATE_SIZE=3 FISHPLATE_COOKIE=wrong FISHPLATE_RENDEZVOUS=$place \
        timeout --kill-after=5 60 "$program" 100 5 >"$work/out-wrong" 2>&1 && return 1
    FISHPLATE_RANK=2 FISHPLATE_SIZE=3 FISHPLATE_COOKIE=right FISHPLATE_RENDEZVOUS=$place \
        timeout --kill-after=5 120 "$program" 100 60 >"$work/out2" 2>&1 || return 1
    for rank in "${pids[@]}"; do wait "$rank" || return 1; done
    grep -q 'no job with this cookie listens there' "$work/out-wrong" &&
        grep -q 'counted 300' "$work/out0"
}
next
say "a wrong cookie is refused" cookie

RANDOM=${FISHPLATE_SEED:-$$}
echo "seed ${FISHPLATE_SEED:-$$}"
# ended PID...: checks that these processes exit within the job's timeout plus a margin
ended() {
    local pid tries
    for pid; do
        for ((tries = 0; tries < 600; tries++)); do
            kill -0 "$pid" 2>/dev/null || continue 2
            sleep 0.1
        done
        echo "process $pid hangs" >>"$work/out-hangs"
        return 1
    done
}

# clean: checks that no process of this run is left and that the folder is empty; waits a while,
# because a launcher needs time to kill
clean() {
    local tries
    for ((tries = 0; tries < 200; tries++)); do
        left >/dev/null && break
        sleep 0.1
    done
    left >>"$work/out-left" && [ -z "$(ls -A "$meet")" ]
}

# killed VICTIM DELAY VARIABLE=VALUE...: kills one of four processes; checks that the others exit
# with status 1, and that each error names a rank if ranks were assigned
killed() {
    local victim=$1 delay=$2 rank status pids=()
    shift 2
    for rank in 0 1 2 3; do
        env "${@//%r/$rank}" "$program" 100000 10 >"$work/out$rank" 2>&1 &
        pids+=($!)
    done
    sleep "$delay"
    kill -9 "${pids[$victim]}"
    ended "${pids[@]}" || return 1
    for rank in 0 1 2 3; do
        wait "${pids[$rank]}" 2>/dev/null
        status=$?
        if [ $rank = "$victim" ]; then
            [ $status = 137 ] || return 1
        else
            # If rank 0 dies while ranks are assigned, a process that comes later waits alone.
            [ $status = 1 ] &&
                grep -qE 'rank [0-3]|[1-3] process(es)? did not come' "$work/out$rank" || return 1
        fi
    done
    clean
}
for ((n = 0; n < kills; n++)); do
    victim=$((RANDOM % 4)) delay=0.$((RANDOM % 10))$((RANDOM % 10))
    place=file://$meet
    next
    ((n / 2 % 2)) && place=tcp://127.0.0.1:$port
    variables=(FISHPLATE_SIZE=4 "FISHPLATE_RENDEZVOUS=$place")
    ((n % 2)) && variables+=(FISHPLATE_RANK=%r)
    say "process $victim killed after $delay s, $place" killed "$victim" "$delay" "${variables[@]}"
done

# killed_of_tool: kills one of four ranks that the tool started, or the tool; checks that all others
# exit
killed_of_tool() {
    local tries victim
    "$tool" perf job -N 4 -n 1e12 -T 60 >"$work/out" 2>&1 </dev/null &
    for ((tries = 0; tries < 200; tries++)); do
        [ "$(left | wc -l)" = 4 ] && break
        sleep 0.1
    done
    sleep 0.$((RANDOM % 10))$((RANDOM % 10))
    victim=$(left | sed -n "$((RANDOM % 4 + 1))p")
    kill -9 "$victim"
    ended $! && clean
}
for ((n = 0; n < kills; n++)); do
    say "a rank of fishplate perf job killed, $((n + 1))" killed_of_tool
done

# killed_under COMMAND...: kills one process of a launcher's job; checks that the launcher ends the
# others
killed_under() {
    local victim tries
    "$@" "$program" 100000 10 >"$work/out" 2>&1 </dev/null &
    for ((tries = 0; tries < 200; tries++)); do
        [ "$(left | wc -l)" = 4 ] && break
        sleep 0.1
    done
    sleep 0.$((RANDOM % 10))
    victim=$(left | sed -n "$((RANDOM % 4 + 1))p")
    kill -9 "$victim"
    ended $! && clean
}
under=1
((kills <= 10)) || under=$kills
for launcher in ${launchers[@]+"${launchers[@]}"}; do
    declare -n command=$launcher
    for ((n = 0; n < under; n++)); do
        say "a process killed under $launcher, $((n + 1))" killed_under "${command[@]}"
    done
done
# Checks /dev/shm. Segments have no names, and the names of sockets disappear with their process.
nothing_remains() {
    find /dev/shm -maxdepth 1 -name '*fishplate*' >"$work/out"
    [ ! -s "$work/out" ]
}
say "nothing is left in /dev/shm" nothing_remains
exit $failed
