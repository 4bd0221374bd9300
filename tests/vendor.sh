#!/usr/bin/env bash
# Vendoring: each package builds when it is copied out of this tree with its dependencies, and cargo
# can package it.
set -euo pipefail
cd "$(dirname "$0")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
export CARGO_TARGET_DIR=$copy/target

# vendored PACKAGE FOLDER...: the first folder's package builds beside the others
vendored() {
    local package=$1
    rm -rf "$copy/vendor"
    mkdir "$copy/vendor"
    shift
    cp -r --parents "$@" "$copy/vendor"
    # The tested versions, so that none is looked up.
    cp Cargo.lock "$copy/vendor/$1"
    cargo build --quiet --all-features --manifest-path "$copy/vendor/$1/Cargo.toml"
    echo "builds out of the tree: $package"
}

vendored fishplate-core core
# Their tests name fishplate-sys, and cargo needs all packages that tests name.
vendored fishplate-shm shm core sys
vendored fishplate-sys sys core
vendored fishplate-gpu gpu shm core sys
vendored fishplate-testing tests/testing sys core

# Every package builds from its cargo package, over the other packages. All dependencies are
# downloaded by now.
cargo package --workspace --exclude fishplate-fake-cuda --quiet --allow-dirty --offline
for package in fishplate-core fishplate-sys fishplate-shm fishplate-gpu fishplate fishplate-tool fishplate-testing fishplate-c fishplate-python fishplate-psm2 fishplate-hfi1 fishplate-nixl; do
    cargo package --quiet --no-verify --allow-dirty --list --package "$package" >"$copy/files"
    for file in README.md LICENSE-MIT LICENSE-APACHE; do
        grep -qx "$file" "$copy/files" || { echo "FAILED: $package is packaged without $file"; exit 1; }
    done
    echo "packages: $package, $(wc -l <"$copy/files") files"
done
