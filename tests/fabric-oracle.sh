#!/usr/bin/env bash
# Compares our declarations of libfabric's structures with the official binding (ofi-libfabric-sys),
# built against the headers of libfabric 2. The binding does not accept Debian 12's headers of 1.17.
# So the script unpacks the headers of Debian trixie's libfabric-dev into a separate directory,
# without installing the package. Installs pkg-config, libclang and libfabric1 if they are missing.
# Exits with 77 if something is unavailable. Usage: tests/fabric-oracle.sh [DIRECTORY]. Keeps the
# directory for later runs.
set -eu
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
place=${1:-${TMPDIR:-/tmp}/fishplate-fabric-oracle}
mkdir -p "$place"
skip() { echo "SKIPPED fabric-oracle: $1"; exit 77; }

source "$here/need.sh"
for tool in apt-get dpkg-deb; do
    command -v "$tool" >/dev/null || skip "no $tool"
done
need pkg-config pkg-config || skip "no pkg-config, and it could not be installed"
# libclang also needs its own compiler headers, but often only the library is installed.
need_file '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' libclang-dev ||
    skip "no libclang-dev, and it could not be installed"
need_file '/usr/lib/*/libfabric.so.1' libfabric1 ||
    skip "no libfabric.so.1, and libfabric1 could not be installed"
installed=$(compgen -G '/usr/lib/*/libfabric.so.1' | head -n 1)

if ! ls "$place"/libfabric-dev_2*.deb >/dev/null 2>&1; then
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -e "$keyring" ] || skip "no $keyring to trust trixie's packages by"
    apt=$place/apt
    mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/etc"
    echo "deb [signed-by=$keyring] http://deb.debian.org/debian trixie main" \
        >"$apt/etc/sources.list"
    aside() {
        apt-get -q -o Dir::State="$apt/state" -o Dir::Cache="$apt/cache" \
            -o Dir::Etc::sourcelist="$apt/etc/sources.list" \
            -o Dir::Etc::sourceparts=/dev/null -o Dir::State::status=/var/lib/dpkg/status \
            -o APT::Sandbox::User=root "$@"
    }
    { aside update && (cd "$place" && aside download libfabric-dev); } >"$place/apt.log" 2>&1 ||
        skip "cannot fetch trixie's libfabric-dev: $(tail -n 1 "$place/apt.log")"
fi

root=$place/trixie
rm -rf "$root"
dpkg-deb -x "$place"/libfabric-dev_2*.deb "$root"
config=$(find "$root" -name libfabric.pc)
sed -i "s|^prefix=.*|prefix=$root/usr|" "$config"
library=$(find "$root" -name libfabric.so)
ln -sf "$installed" "$library"

export PKG_CONFIG_PATH="$(dirname "$config")"
CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$place/target}" cargo run --quiet --features oracle \
    --manifest-path "$here/fabric-oracle/Cargo.toml"
# Compares the same sizes and offsets with a C program that uses these headers.
cd "$here/.."
FISHPLATE_FABRIC_INCLUDE="$root/usr/include" cargo test --quiet --workspace --test layout -- \
    --nocapture
