#!/usr/bin/env bash
# Tests vendoring: checks that the libraries compile when they are copied out of this tree with
# their dependencies, and that all packages build from their cargo packages.
set -euo pipefail
cd "$(dirname "$0")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
export CARGO_TARGET_DIR=$copy/target CARGO_PROFILE_DEV_DEBUG=0

# vendored PACKAGE FOLDER...: copies the folders, and compiles the package in the first folder
vendored() {
    local package=$1
    rm -rf "$copy/vendor"
    mkdir "$copy/vendor"
    shift
    cp -r --parents "$@" "$copy/vendor"
    # Uses the locked versions of all dependencies, so that cargo need not look up versions.
    cp Cargo.lock "$copy/vendor/$1"
    cargo check --quiet --all-features --manifest-path "$copy/vendor/$1/Cargo.toml"
    echo "compiles out of the tree: $package"
}

vendored fishplate-core core
# The tests of these packages name fishplate-sys, and cargo needs the packages that tests name.
vendored fishplate-shm shm core sys
vendored fishplate-sys sys core
vendored fishplate-gpu gpu shm core sys
vendored fishplate-testing tests/testing sys core

# Creates a project as docs/vendoring.md describes: with the files of that page's table, the page's
# lines for Cargo.toml, and the program in the README.
row=$(grep '^| `Node`' docs/vendoring.md | cut -d'|' -f3 | tr -d '`,')
mkdir -p "$copy/project/vendor/fishplate" "$copy/project/src"
# shellcheck disable=SC2086
cp -r --parents $row "$copy/project/vendor/fishplate"
cp Cargo.lock "$copy/project"
{
    printf '[package]\nname = "first"\nedition = "2024"\n'
    sed -n '0,/^```$/{ /^```toml/,/^```$/{ /^```/!p } }' docs/vendoring.md
} >"$copy/project/Cargo.toml"
sed -n '/^```rust/,/^```$/{ /^```/!p }' README.md >"$copy/project/src/main.rs"
cargo build --quiet --manifest-path "$copy/project/Cargo.toml"
echo "builds as the page on vendoring says: fishplate"

# Builds every package except the fake driver from the cargo packages. Works offline, because all
# dependencies are downloaded by now.
cargo package --workspace --exclude fishplate-fake-cuda --quiet --allow-dirty --offline
for package in fishplate-core fishplate-sys fishplate-shm fishplate-gpu fishplate fishplate-tool \
    fishplate-testing fishplate-c fishplate-python fishplate-psm2 fishplate-hfi1 fishplate-nixl; do
    cargo package --quiet --no-verify --allow-dirty --list --package "$package" >"$copy/files"
    for file in README.md LICENSE-MIT LICENSE-APACHE; do
        grep -qx "$file" "$copy/files" || { echo "FAILED: $package is packaged without $file"
            exit 1; }
    done
    echo "packages: $package, $(wc -l <"$copy/files") files"
done
