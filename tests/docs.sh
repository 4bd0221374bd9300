#!/usr/bin/env bash
# usage: tests/docs.sh Writes the documentation of all packages, without warnings, and checks that
# no page shows a link as literal brackets. rustdoc silently drops a link into a package without
# pages, and cargo documents packages in parallel. So this script writes the documentation twice.
# The second time cargo writes one package at a time, because it first removes the old pages of a
# package.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
pages() { cargo doc --workspace --no-deps --document-private-items --locked --quiet "$@"; }
# The flags differ between the runs, so that cargo writes the pages again.
RUSTDOCFLAGS="--cap-lints warn" pages && RUSTDOCFLAGS="-D warnings" pages -j1 || exit
dropped=$(grep -rlE '\[(<code>|fishplate)' "${CARGO_TARGET_DIR:-target}/doc" --include='*.html' \
    --exclude-dir=src)
[ -z "$dropped" ] || { echo "these pages show a link as literal brackets:"; echo "$dropped"
    exit 1; }
