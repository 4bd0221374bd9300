#!/usr/bin/env bash
# usage: tests/docs.sh
# Writes the documentation of all packages, without warnings, and checks that no page shows a link
# as literal brackets. rustdoc silently drops a link into a package that has no pages at that
# moment, and cargo documents packages in parallel. So the documentation is written twice. The
# second time cargo writes one package at a time, because it removes the old pages of a package
# first.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
pages() { cargo doc --workspace --no-deps --document-private-items --locked --quiet "$@"; }
# Other flags make cargo write the pages again.
RUSTDOCFLAGS="--cap-lints warn" pages && RUSTDOCFLAGS="-D warnings" pages -j1 || exit
dropped=$(grep -rlE '\[(<code>|fishplate)' "${CARGO_TARGET_DIR:-target}/doc" --include='*.html' \
    --exclude-dir=src)
[ -z "$dropped" ] || { echo "these pages show a link as literal brackets:"; echo "$dropped"
    exit 1; }
