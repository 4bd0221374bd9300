# shellcheck shell=bash Sourced by jobs.sh: Functions for a Slurm cluster of only this host, without
# systemd and control groups. Needs root, because only root may start job steps of other users.
#
# slurm_up FOLDER: starts the cluster, with all state in FOLDER, and exports SLURM_CONF. Fails if
# the node does not become idle.
slurm_up() {
    local folder=$1 host tries
    host=$(hostname -s)
    mkdir "$folder" "$folder/state" "$folder/spool"
    # munged refuses a folder that others can write to or cannot enter.
    chmod 755 "$(dirname "$folder")" "$folder"
    head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 400 "$folder/munge.key"
    munged --force --foreground --key-file="$folder/munge.key" --socket="$folder/munge.sock" \
        --num-threads=1 \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" \
        --seed-file="$folder/munge.seed" >/dev/null 2>&1 &
    slurm_daemons=($!)
    cat >"$folder/slurm.conf" <<END
ClusterName=fishplate
SlurmctldHost=$host(127.0.0.1)
AuthInfo=socket=$folder/munge.sock
SlurmUser=root
SlurmctldPort=$2
SlurmdPort=$(($2 + 1))
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
    export SLURM_CONF=$folder/slurm.conf
    for ((tries = 0; tries < 100; tries++)); do [ -S "$folder/munge.sock" ] &&
        break; sleep 0.1; done
    slurmctld -D >/dev/null 2>&1 &
    slurm_daemons+=($!)
    slurmd -D >/dev/null 2>&1 &
    slurm_daemons+=($!)
    for ((tries = 0; tries < 100; tries++)); do
        sinfo --noheader --format %T 2>/dev/null | grep -q idle && return
        sleep 0.2
    done
    tail -n 5 "$folder"/slurm*.log >&2
    slurm_down
    return 1
}

# slurm_down: stops the daemons. Job steps that still run survive. A slurmd that waits for a step
# which has just ended ignores the first signal.
slurm_down() {
    local tries
    kill "${slurm_daemons[@]}" 2>/dev/null
    for ((tries = 0; tries < 50; tries++)); do
        kill -0 "${slurm_daemons[@]}" 2>/dev/null || break
        sleep 0.2
    done
    kill -KILL "${slurm_daemons[@]}" 2>/dev/null
    wait "${slurm_daemons[@]}" 2>/dev/null
    unset SLURM_CONF slurm_daemons
}
