# shellcheck shell=bash Sourced by the other scripts. Functions that find a command or a file. If it
# is missing, they install a Debian package, and say so.

# need COMMAND PACKAGE: fails if the command is missing and cannot be installed
need() {
    command -v "$1" >/dev/null && return
    fetch_package "$1" "$2"
    command -v "$1" >/dev/null
}

# need_file PATTERN PACKAGE: like `need`, for a file; PATTERN is a path or a glob
need_file() {
    compgen -G "$1" >/dev/null && return
    fetch_package "$1" "$2"
    compgen -G "$1" >/dev/null
}

fetch_package() {
    echo "$1 is missing: installing the package $2"
    local as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    {
        { [ -n "${APT_UPDATED:-}" ] || "${as_root[@]}" apt-get update -qq; } && APT_UPDATED=1 &&
            "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
            --no-install-recommends "$2" >/dev/null
    } </dev/null
}
