#!/usr/bin/env bash
# Tests the C library as packagers install it: its header and examples in C11 and C++17, its
# symbols, its ABI, the examples as two and four processes, the data that other calls move, and
# misuse. Also runs the examples and the tests of wrong calls under Valgrind's memcheck.
# AddressSanitizer covers only the programs here; tests/sanitize.sh also covers the library. BLESS=1
# accepts a changed ABI.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh

for pair in "gcc gcc" "g++ g++" "valgrind valgrind" "pkg-config pkg-config"; do
    need ${pair% *} ${pair#* } ||
        { echo "SKIPPED the C library: ${pair% *} is missing and cannot be installed"; exit 77; }
done
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
failed=0
c=$PWD/bindings/c

# say NAME COMMAND...: runs a check, and prints its result on one line
say() {
    local name=$1
    shift
    if timeout 120 "$@" >"$place/log" 2>&1 </dev/null; then
        echo "ok $name"
    else
        failed=1
        echo "FAILED $name"
        tail -n 40 "$place/log"
    fi
}

DESTDIR=$place/root PREFIX=/usr PROFILE=dev "$c/install.sh" ||
    { echo "FAILED to build or install the library"; exit 1; }
export PKG_CONFIG_PATH=$place/root/usr/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$place/root
export LD_LIBRARY_PATH=$place/root/usr/lib
read -ra flags < <(PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1 pkg-config \
    --cflags --libs fishplate)
warnings=(-Wall -Wextra -pedantic -Werror -O1 -g)

for source in "$c"/tests/*.c "$c"/examples/*.c; do
    name=$(basename "$source" .c)
    say "$name.c in C11" gcc -std=c11 -D_GNU_SOURCE "${warnings[@]}" "$source" "${flags[@]}" \
        -lpthread -o "$place/$name"
    say "$name.c under AddressSanitizer" gcc -std=c11 -D_GNU_SOURCE -fsanitize=address,undefined \
        "${warnings[@]}" "$source" "${flags[@]}" -lpthread -o "$place/asan-$name"
done
for source in "$c"/examples/*.c; do
    name=$(basename "$source" .c)
    say "$name.c in C++17" g++ -std=c++17 "${warnings[@]}" -x c++ "$source" "${flags[@]}" \
        -o "$place/cxx-$name"
done
# Compiles the example in docs/c.md. The example's `swap` stands for any way to exchange bytes.
{
    printf '#include <%s>\n' fishplate.h string.h
    echo 'size_t swap (const void *ours, size_t len, void *theirs);'
    echo 'void page (void);'
    echo 'void page (void) {'
    sed -n '/^```c$/,/^```$/{ /^```/!p }' docs/c.md
    echo '}'
} >"$place/page.c"
say "the example in docs/c.md" gcc -std=c11 "${warnings[@]}" -c "$place/page.c" -I"$c/include" \
    -o "$place/page.o"
say "the header in C++17" g++ -std=c++17 "${warnings[@]}" -x c++ "$c/tests/layout.c" "${flags[@]}" \
    -o "$place/layout++"
say "the static library" gcc -std=c11 "${warnings[@]}" "$c/tests/layout.c" \
    -I"$c/include" "$place/root/usr/lib/libfishplate.a" -lpthread -ldl -lm -o "$place/static"
say "the version of header and library" "$place/layout"
say "the same, linked statically" "$place/static"

export place
# Checks that the library exports exactly the listed symbols, at most 40 functions, all of one
# version.
export c
symbols() {
    nm -D --defined-only "$place/root/usr/lib/libfishplate.so.0" | awk '$2 != "A" { print $3 }' |
        sort |
        diff <(sed 's/$/@@FISHPLATE_0/' "$c/tests/symbols.txt") - &&
        [ "$(wc -l <"$c/tests/symbols.txt")" -le 40 ] &&
        sed 's|/\*.*||' "$c/include/fishplate.h" | grep -o 'fp_[a-z_]* (' | tr -d ' (' | sort -u |
        diff "$c/tests/symbols.txt" - &&
        readelf --dyn-syms --wide "$place/put_signal" | grep -q ' UND fp_put_signal@FISHPLATE_0'
}
export -f symbols
say "40 symbols, those of the header, with a version" bash -c symbols

# Compares the function signatures of the header with the library's. src/layout.rs and
# tests/layout.c check the sizes of the structures.
signatures() {
    diff <(
        gcc -E -P "$c/include/fishplate.h" | tr '\n' ' ' |
            grep -o '[a-z0-9_ ]*[ *]fp_[a-z_]* ([^;{}]*);' |
            # name(types)->type, without the names of parameters; then pointers and types of Rust
            sed -E 's/\(void\)/()/; s/ ?[a-z_0-9]+([,)])/\1/g
                s/^ *(.*[ *])(fp_[a-z_]*) (\(.*\));$/\2\3->\1/
                s/const ([a-z_0-9]+) \*/*const \1/g; s/([a-z_0-9]+) \*\*/*mut,*mut,\1/g
                s/([a-z_0-9]+) \*/*mut \1/g; s/mut,/mut /g; s/\<(uint32_t|fp_peer)\>/u32/g
                s/\<(uint64_t|fp_(mem|remote|token|request))\>/u64/g
                s/\<int64_t\>/i64/g; s/\<size_t\>/usize/g; s/\<(int|void|char)\>/c_\1/g
                s/fp_(node|options|tag|message|completion|stats)(_t)?([,) ]|$)/Fp\u\1\3/g
                s/ +//g' | sort
    ) <(
        cat "$c"/src/*.rs | tr '\n' ' ' | grep -oE 'extern "C" fn fp_[a-z_]*\([^)]*\) -> [^{]*' |
            sed -E 's/extern "C" fn //; s/[a-z_0-9]+: //g; s/,? *\)/)/; s/ +//g' | sort
    )
}
export -f signatures
say "the header's functions have the types of the library's" bash -c signatures

# Compares the ABI of the header's functions with the ABI of the last release.
abi() {
    {
        echo '#include <fishplate.h>'
        gcc -E -P "$c/include/fishplate.h" | tr '\n' ' ' |
            grep -o '[a-z0-9_ ]*[ *]fp_[a-z_]* ([^;{}]*);' |
            sed 's/);$/) { __builtin_trap (); }/'
    } >"$place/abi.c"
    gcc -g -std=c11 -shared -fPIC -I"$c/include" "$place/abi.c" -o "$place/abi.so" || return 1
    [ "$(nm -D --defined-only "$place/abi.so" | wc -l)" = "$(wc -l <"$c/tests/symbols.txt")" ] ||
        return 1
    [ -z "${BLESS:-}" ] ||
        abidw --no-corpus-path --no-comp-dir-path --short-locs "$place/abi.so" \
        >"$c/tests/fishplate.abi" || return 1
    abidiff "$c/tests/fishplate.abi" "$place/abi.so"
}
export -f abi
if [ "$(uname -m)" = x86_64 ] && need abidiff abigail-tools; then
    say "the ABI is that of tests/fishplate.abi" bash -c abi
else
    echo "SKIPPED the ABI: not an x86-64 machine, or abidiff is missing and cannot be installed"
fi
say "SONAME" grep -q 'libfishplate\.so\.0\]' <(readelf -d "$place/root/usr/lib/libfishplate.so")

source bindings/c/tests/examples.sh
export -f put_signal events tagged
memcheck="valgrind --quiet --error-exitcode=9 --leak-check=no --fair-sched=yes"
# Programs under a sanitizer see the library's allocations too, but not its accesses. libfabric 1.17
# leaks memory of each endpoint.
echo leak:libfabric.so >"$place/lsan.supp"
export LSAN_OPTIONS=suppressions=$place/lsan.supp:print_suppressions=0
for kind in "" cxx- asan-; do
    export kind
    say "${kind}put_signal as two processes, one of which dies" bash -c put_signal
    say "${kind}tagged as four processes" bash -c tagged
    say "${kind}events as two processes, one of which dies" bash -c events
done
unset kind

# mpi LAUNCHER...: runs the MPI program as four processes
mpi() { [ "$("$@" "$place/mpi" | grep -c 'of 4: the sum is 6$')" = 4 ]; }
export -f mpi
# with_mpi COMPILER PACKAGE HEADER ITS_PACKAGE LAUNCHER...
with_mpi() {
    local compiler=$1 package=$2 header=$3 development=$4
    shift 4
    need "$compiler" "$package" && need "$1" "$package" && need_file "$header" "$development" ||
        { echo "SKIPPED $1: it is missing and cannot be installed"; return; }
    say "the MPI program with $compiler" "$compiler" -std=c11 "${warnings[@]}" \
        "$c/examples/mpi/all_to_all.c" "${flags[@]}" -o "$place/mpi"
    say "the MPI program under $1" bash -c 'mpi "$@"' - "$@"
}
with_mpi mpicc.mpich mpich '/usr/include/*/mpich/mpi.h' libmpich-dev mpiexec.hydra -n 4
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
with_mpi mpicc.openmpi openmpi-bin '/usr/lib/*/openmpi/include/mpi.h' libopenmpi-dev \
    mpirun.openmpi -n 4 --oversubscribe
say "the data of calls between two processes" "$place/data"
say "the same under AddressSanitizer" "$place/asan-data"
if [[ $(ldconfig -p) == *libfabric.so.1* ]]; then
    say "the same over tcp, without shared memory" "$place/data" tcp
    for seed in 1 2 3; do
        say "peers that are attached at first use, seed $seed" "$place/distant" $seed
        say "the same under AddressSanitizer" "$place/asan-distant" $seed
    done
else
    echo "SKIPPED calls over tcp: libfabric is missing"
fi
for seed in 1 2 3; do
    say "misuse, seed $seed" "$place/misuse" $seed
    say "misuse under AddressSanitizer, seed $seed" "$place/asan-misuse" $seed
done
say "put_signal under memcheck" bash -c "put_signal $memcheck"
say "events under memcheck" bash -c "events $memcheck"
say "tagged under memcheck" bash -c "tagged $memcheck"
say "misuse under memcheck" $memcheck "$place/misuse" 4
say "data under memcheck" $memcheck "$place/data"
# libfabric 1.20 compares memory that it allocated and has not written.
cat >"$place/memcheck.supp" <<'END'
{
   libfabric
   Memcheck:Cond
   obj:*/libfabric.so.1*
   obj:*/libfabric.so.1*
   obj:*/libfabric.so.1*
   ...
}
END
if [[ $(ldconfig -p) == *libfabric.so.1* ]]; then
    say "peers that are attached at first use, under memcheck" \
        $memcheck --suppressions="$place/memcheck.supp" "$place/distant" 1
fi
exit $failed
