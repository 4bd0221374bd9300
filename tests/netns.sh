# shellcheck shell=bash Sourced after need.sh, by scripts that need two hosts. The hosts are two
# network namespaces, "$here" and "$there", joined by pairs of interfaces named rail0, rail1, and so
# on.
#
# Pair P has the addresses 10.NET.P.1 here and 10.NET.P.2 there. The names of namespaces contain the
# shell's process id, so several scripts may run at once.

export here=fpa$$ there=fpb$$

# hosts PAIRS NET: creates both namespaces and PAIRS pairs; prints the reason if that fails
hosts() {
    local pair end
    [ "$(id -u)" = 0 ] || { echo "namespaces need root"; return 1; }
    need ip iproute2 >&2 || { echo "no ip, and iproute2 could not be installed"; return 1; }
    for end in "$here" "$there"; do
        ip netns add "$end" 2>&1 && ip -n "$end" link set lo up || return
    done
    for ((pair = 0; pair < $1; pair++)); do
        ip -n "$here" link add "rail$pair" type veth peer name "rail$pair" netns "$there" 2>&1 ||
            return
        ip -n "$here" addr add "10.$2.$pair.1/24" dev "rail$pair"
        ip -n "$there" addr add "10.$2.$pair.2/24" dev "rail$pair"
        for end in "$here" "$there"; do ip -n "$end" link set "rail$pair" up; done
    done
    links_up "$1"
}

# links_up PAIRS: waits until all links are up, because a node ignores interfaces that are down when
# it opens
links_up() {
    local end
    for end in "$here" "$there"; do
        for _ in {1..100}; do
            [ "$(ip -n "$end" -o link show type veth | grep -c 'state UP')" = "$1" ] && break
            sleep 0.05
        done
    done
}

# no_hosts: removes the namespaces, if they exist
no_hosts() {
    ip netns del "$here" 2>/dev/null
    ip netns del "$there" 2>/dev/null
    return 0
}
