#!/usr/bin/env bash
# Builds the C libraries and installs them with their header and fishplate.pc:
#     [DESTDIR=...] [PREFIX=/usr/local] [LIBDIR=PREFIX/lib] [PROFILE=release] install.sh
set -euo pipefail
# Relative folders are those of the caller.
prefix=$(realpath -ms "${PREFIX:-/usr/local}")
libdir=$(realpath -ms "${LIBDIR:-$prefix/lib}")
root=${DESTDIR:+$(realpath -ms "$DESTDIR")}
cd "$(dirname "$0")"
profile=${PROFILE:-release}
case $profile in dev) folder=debug ;; *) folder=$profile ;; esac

cargo build --locked --quiet --profile "$profile" --package fishplate-c
target=$(cargo metadata --locked --no-deps --format-version 1 |
    sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)

install -d "$root$libdir/pkgconfig" "$root$prefix/include"
install -m 644 include/fishplate.h "$root$prefix/include/"
# Adds symbol versions, because a library that Rust links has none.
"${CC:-cc}" -shared -o "$root$libdir/libfishplate.so.$version" -Wl,-soname,libfishplate.so.0 \
    -Wl,--version-script=fishplate.map -Wl,--whole-archive "$target/$folder/libfishplate_c.a" \
    -Wl,--no-whole-archive -Wl,--gc-sections -Wl,-z,defs -Wl,-z,relro,-z,now -lgcc_s -lpthread \
    -ldl -lm -lc
install -m 644 "$target/$folder/libfishplate_c.a" "$root$libdir/libfishplate.a"
ln -sf "libfishplate.so.$version" "$root$libdir/libfishplate.so.0"
ln -sf libfishplate.so.0 "$root$libdir/libfishplate.so"
sed "s|@PREFIX@|$prefix|; s|@LIBDIR@|$libdir|; s|@VERSION@|$version|" fishplate.pc.in \
    >"$root$libdir/pkgconfig/fishplate.pc"
