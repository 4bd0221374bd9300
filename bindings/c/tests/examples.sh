# shellcheck shell=bash Sourced. Functions that run the C examples built in folder `place`. The
# programs' names begin with `kind`.

# put_signal COMMAND...: runs two processes; the second exits without closing its node
put_signal() {
    local folder status=0
    folder=$(mktemp -d -p "$place")
    "$@" "$place/${kind:-}put_signal" 1 "$folder" >"$folder/out" &
    "$@" "$place/${kind:-}put_signal" 0 "$folder" || status=1
    wait $! && [ $status = 0 ] && grep -qx "hello world" "$folder/out"
}

# events COMMAND...: runs two processes in epoll loops; the second exits without closing its node
events() {
    local folder status=0
    folder=$(mktemp -d -p "$place")
    "$@" "$place/${kind:-}events" 1 "$folder" &
    "$@" "$place/${kind:-}events" 0 "$folder" >"$folder/out" || status=1
    wait $! && [ $status = 0 ] && grep -q '^100 messages, the peer is gone: ' "$folder/out"
}

# tagged COMMAND...: runs four processes in a ring
tagged() {
    local folder rank pids=() status=0
    folder=$(mktemp -d -p "$place")
    for rank in 0 1 2 3; do
        "$@" "$place/${kind:-}tagged" $rank 4 "$folder" >>"$folder/out" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank" || status=1; done
    [ $status = 0 ] && [ "$(grep -c ': 6$' "$folder/out")" = 4 ]
}
