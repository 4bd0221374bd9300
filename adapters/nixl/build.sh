#!/usr/bin/env bash
# Builds libplugin_FISHPLATE.so into a folder:
#     [PROFILE=release] [CXX=g++] [CXXFLAGS=...] build.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?name a folder}")
cd "$(dirname "$0")"
profile=${PROFILE:-release}
case $profile in dev) built=debug ;; *) built=$profile ;; esac

cargo build --locked --quiet --profile "$profile" --package fishplate-nixl
metadata=$(cargo metadata --locked --no-deps --format-version 1)
target=$(sed 's/.*"target_directory":"\([^"]*\)".*/\1/' <<<"$metadata")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
install -d "$folder"
# shellcheck disable=SC2086  # several flags
"${CXX:-g++}" -std=c++20 -O2 -g1 -Wall -Wextra -Werror -Wno-invalid-offsetof -fPIC \
    -fvisibility=hidden \
    -DFISHPLATE_VERSION="\"$version\"" ${CXXFLAGS:-} \
    -shared -o "$folder/libplugin_FISHPLATE.so" -Wl,-soname,libplugin_FISHPLATE.so \
    plugin/plugin.cpp plugin/probe.cpp -Wl,--version-script=plugin/plugin.map \
    "$target/$built/libfishplate_nixl.a" -Wl,--gc-sections -Wl,-z,defs \
    -Wl,-z,relro,-z,now,-z,nodelete \
    -lgcc_s -lpthread -ldl -lm -lc
