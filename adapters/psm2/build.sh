#!/usr/bin/env bash
# Builds `libpsm2.so.2`, and the library that programs preload with it, into a folder:
#     [PROFILE=release] build.sh FOLDER
set -euo pipefail
folder=$(realpath -m "${1:?name a folder}")
cd "$(dirname "$0")"
profile=${PROFILE:-release}
case $profile in dev) built=debug ;; *) built=$profile ;; esac

cargo build --locked --quiet --profile "$profile" --package fishplate-psm2 --package fishplate-hfi1
target=$(cargo metadata --locked --no-deps --format-version 1 |
    sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
install -d "$folder"
# Gives the exported symbols the version that programs were linked against.
"${CC:-cc}" -shared -o "$folder/libpsm2.so.2" -Wl,-soname,libpsm2.so.2 \
    -Wl,--version-script=psm2.map \
    -Wl,--whole-archive "$target/$built/libfishplate_psm2.a" -Wl,--no-whole-archive \
    -Wl,--gc-sections \
    -Wl,-z,defs -Wl,-z,relro,-z,now -lgcc_s -lpthread -ldl -lm -lc
install -m 755 "$target/$built/libfishplate_hfi1.so" "$folder/"
