#!/usr/bin/env bash
# Tests the C library as packagers install it: its header in C11 and C++17, its symbols, the
# examples as two and four processes, and misuse by programs. Runs everything under Valgrind's
# memcheck too.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh

for pair in "gcc gcc" "g++ g++" "valgrind valgrind" "pkg-config pkg-config"; do
    need ${pair% *} ${pair#* } || { echo "SKIPPED the C library: ${pair% *} is missing and cannot be installed"; exit 77; }
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

DESTDIR=$place/root PREFIX=/usr PROFILE=dev "$c/install.sh" || { echo "FAILED to build or install the library"; exit 1; }
export PKG_CONFIG_PATH=$place/root/usr/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$place/root
export LD_LIBRARY_PATH=$place/root/usr/lib
read -ra flags < <(PKG_CONFIG_ALLOW_SYSTEM_CFLAGS=1 PKG_CONFIG_ALLOW_SYSTEM_LIBS=1 pkg-config --cflags --libs fishplate)
warnings=(-Wall -Wextra -pedantic -Werror -O1 -g)

for source in "$c"/tests/*.c "$c"/examples/*.c; do
    name=$(basename "$source" .c)
    say "$name.c in C11" gcc -std=c11 -D_GNU_SOURCE "${warnings[@]}" "$source" "${flags[@]}" -lpthread -o "$place/$name"
done
# The example in docs/c.md. Its `swap` stands for any way to exchange bytes.
{
    echo '#include <fishplate.h>'
    echo 'size_t swap (const void *ours, size_t len, void *theirs);'
    echo 'void page (void);'
    echo 'void page (void) {'
    sed -n '/^```c$/,/^```$/{ /^```/!p }' docs/c.md
    echo '}'
} >"$place/page.c"
say "the example in docs/c.md" gcc -std=c11 "${warnings[@]}" -c "$place/page.c" -I"$c/include" -o "$place/page.o"
say "the header in C++17" g++ -std=c++17 "${warnings[@]}" -x c++ "$c/tests/layout.c" "${flags[@]}" -o "$place/layout++"
say "the static library" gcc -std=c11 "${warnings[@]}" "$c/tests/layout.c" -I"$c/include" "$place/root/usr/lib/libfishplate.a" -lpthread -ldl -lm -o "$place/static"
say "the version of header and library" "$place/layout"
say "the same, linked statically" "$place/static"

export place
# The library exports exactly the symbols of the list, at most 40 functions.
export c
symbols() {
    nm -D --defined-only "$place/root/usr/lib/libfishplate.so.0" | awk '{ print $3 }' | sort | diff "$c/tests/symbols.txt" - &&
        [ "$(wc -l <"$c/tests/symbols.txt")" -le 40 ] &&
        sed 's|/\*.*||' "$c/include/fishplate.h" | grep -o 'fp_[a-z_]* (' | tr -d ' (' | sort -u | diff "$c/tests/symbols.txt" -
}
export -f symbols
say "40 symbols, those of the header" bash -c symbols
say "SONAME" grep -q 'libfishplate\.so\.0\]' <(readelf -d "$place/root/usr/lib/libfishplate.so")

# put_signal COMMAND...: runs two processes; the second one dies
put_signal() {
    local folder status=0
    folder=$(mktemp -d -p "$place")
    "$@" "$place/put_signal" 1 "$folder" >"$folder/out" &
    "$@" "$place/put_signal" 0 "$folder" || status=1
    wait $! && [ $status = 0 ] && grep -qx "hello world" "$folder/out"
}

# events COMMAND...: runs two processes in epoll loops; the second one dies
events() {
    local folder status=0
    folder=$(mktemp -d -p "$place")
    "$@" "$place/events" 1 "$folder" &
    "$@" "$place/events" 0 "$folder" >"$folder/out" || status=1
    wait $! && [ $status = 0 ] && grep -q '^100 messages, the peer is gone: ' "$folder/out"
}

# tagged COMMAND...: runs four processes in a ring
tagged() {
    local folder rank pids=() status=0
    folder=$(mktemp -d -p "$place")
    for rank in 0 1 2 3; do
        "$@" "$place/tagged" $rank 4 "$folder" >>"$folder/out" &
        pids+=($!)
    done
    for rank in "${pids[@]}"; do wait "$rank" || status=1; done
    [ $status = 0 ] && [ "$(grep -c ': 6$' "$folder/out")" = 4 ]
}

export -f put_signal events tagged
memcheck="valgrind --quiet --error-exitcode=9 --leak-check=no --fair-sched=yes"
say "put_signal as two processes, one of which dies" bash -c put_signal
say "tagged as four processes" bash -c tagged
say "events as two processes, one of which dies" bash -c events
say "events.c has at most 80 lines" test "$(wc -l <"$c/examples/events.c")" -le 80
for seed in 1 2 3; do
    say "misuse, seed $seed" "$place/misuse" $seed
done
say "put_signal under memcheck" bash -c "put_signal $memcheck"
say "events under memcheck" bash -c "events $memcheck"
say "misuse under memcheck" $memcheck "$place/misuse" 4
exit $failed
