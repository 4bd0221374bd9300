# shellcheck shell=bash Sourced by scripts. Runs checks in the background, beside other checks.

# beside FILE COMMAND...: starts a command in the background, at the lowest priority, and writes its
# output to the file
beside() {
    beside_log=$1
    shift
    set -m # a process group of its own
    { renice -n 19 -p "$BASHPID" >/dev/null; "$@"; } >"$beside_log" 2>&1 </dev/null &
    beside_pid=$!
    set +m
}

# beside_done: waits for the command, prints its output, and returns its status
beside_done() {
    local status=0
    wait "$beside_pid" || status=$?
    beside_pid=
    cat "$beside_log"
    return $status
}

# beside_end: kills the command's processes if it still runs; for a trap on EXIT
beside_end() {
    [ -z "${beside_pid:-}" ] || kill -- "-$beside_pid" 2>/dev/null
}
