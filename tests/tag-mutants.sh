#!/usr/bin/env bash
# Plants one bug after another in a copy of the matcher, and checks that a test fails each time. A
# mutant is a line of the table below: name, file under core/src/engine/tag, expression,
# replacement. The expression must occur exactly once in the file; otherwise the run fails, and the
# line must be adapted to the code.
#
# usage: tests/tag-mutants.sh [name...] (default: all of them; about two minutes on two cores)
set -u
cd "$(dirname "$0")/.." || exit

mutants() {
    cat <<'TABLE'
prune-by-youngest      | posted.rs     | if shape.indexed == 0 { shape.min_seq | if true { shape.min_seq
last-shape-wins        | posted.rs     | if leader != NONE && self.slots[leader as usize].seq < best { | if leader != NONE {
sequence-of-32-bits    | posted.rs     | && self.slots[leader as usize].seq < best { | && (self.slots[leader as usize].seq as u32) < best as u32 {
sequence-of-63-bits    | posted.rs     | && self.slots[leader as usize].seq < best { | && (self.slots[leader as usize].seq << 1) < best << 1 {
newest-first           | posted.rs     | let head = self.order.head; | let head = self.order.tail;
no-shape-compare       | posted.rs     | slot.shape == number && slot.key == masked; | slot.key == masked;
no-shape-compare-post  | posted.rs     | slot.shape == number && slot.key == key | slot.key == key
overflow-never-stops   | posted.rs     | if slot.seq >= best { break; } | {}
unhashed-first         | posted.rs     | if index == NONE { | if true {
generation-of-receive  | posted.rs     | .filter(|slot| slot.seq as u32 == id.generation) | .filter(|slot| slot.seq as u32 == id.generation \|\| slot.waits())
generation-of-message  | unexpected.rs | (slot.seq as u32 == id.generation && slot.state != State::Free) | (slot.state != State::Free)
tail-not-updated       | group.rs      | entries[leader as usize].group_mut(table).ring.prev = entry; | 
tail-lost-by-heir      | group.rs      | entries[ring.next as usize].group_mut(table).ring.prev = ring.prev; | if chain.prev == MEMBER { entries[ring.next as usize].group_mut(table).ring.prev = ring.prev; }
no-table-compare       | group.rs      | of == table && same(leader) | same(leader)
chain-back-not-updated | group.rs      | entries[after as usize].group_mut(of).chain.prev = back; | let _ = (after, of, back);
mask-on-one-side       | key.rs        | ((self.lo ^ other.lo) & mask.lo) | ((self.lo & mask.lo) ^ other.lo)
third-word-ignored     | key.rs        | ((self.hi ^ other.hi) & mask.hi) | ((self.hi ^ other.hi) & (mask.hi >> 32 << 32))
source-ignored-by-mask | key.rs        | ((self.hi ^ other.hi) & mask.hi) | ((self.hi ^ other.hi) & if mask.lo == u64::MAX { mask.hi } else { mask.hi as u32 as u64 })
key-not-masked         | posted.rs     | let masked = key.under(shape.mask); | let masked = key;
cursor-not-moved       | index.rs      | if at != start { | if false {
cursor-lost            | index.rs      | self.set_cursor(cursor_of.trailing_zeros() as usize, next); | self.set_cursor(cursor_of.trailing_zeros() as usize, NONE);
evicted-but-linked     | index.rs      | self.buckets.remove(self.slots, at, number); | 
caught-up-for-ever     | index.rs      | index.cursor = at; | 
index-of-another-shape | shape.rs      | (shape.mask, shape.walks) = (mask, 0); | shape.mask = mask; shape.index = 0;
TABLE
}

copy=${CARGO_TARGET_DIR:-target}/tag-mutants
mkdir -p "$copy/tree" && copy=$(cd "$copy" && pwd)
rm -rf "$copy/tree" && mkdir "$copy/tree"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$copy/tree" || exit
# Each mutant changes one file, so incremental builds are faster.
export CARGO_TARGET_DIR=$copy/target CARGO_INCREMENTAL=1 CARGO_PROFILE_TEST_DEBUG=0 RUST_BACKTRACE=0
limit_s=60 # of processor time for one run of the tests, which take some seconds
log=$copy/log

# Builds and runs the tests of the matcher, until one fails. Status 1: the build failed. 2: a test
# failed, or the time limit expired, because some mutants loop for ever.
tests() {
    local binary pid
    binary=$(cd "$copy/tree" &&
        cargo test --quiet --locked --package fishplate-core --test tag --no-run \
        --message-format=json-render-diagnostics 2>"$log" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    [ -n "$binary" ] || return 1
    (ulimit -t $limit_s; exec "$binary" >"$log" 2>&1) &
    pid=$!
    while kill -0 $pid && ! grep -q '\.\.\. FAILED$' "$log"; do
        sleep 0.1; done
    kill -9 $pid
    wait $pid && return 0 || return 2
} 2>/dev/null # where bash reports the kill

tests || { cat "$log"; echo "FAILED    the matcher as it stands"; exit 1; }
echo "ok        the matcher as it stands"

survived=0 known=0
while IFS='~' read -r name file from to; do
    [ $# = 0 ] || [[ " $* " = *" $name "* ]] || continue
    known=$((known + 1))
    source=$copy/tree/core/src/engine/tag/$file
    cp "$source" "$copy/original"
    # A space in an expression matches any white space.
    if ! from=$from to=$to perl -0pi -e '
        my $from = join("\\s+", map { quotemeta } split(/\s+/, $ENV{from}));
        my $count = () = /$from/g;
        die "found $count times\n" if $count != 1;
        s/$from/$ENV{to}/' "$source" 2>"$log"; then
        echo "STALE     $name: $(cat "$log")"
        survived=1
    else
        touch "$source"
        began=$SECONDS
        tests
        case $? in
            0) echo "SURVIVED  $name: no test fails"; survived=1 ;;
            1) echo "STALE     $name: does not compile"; grep -m 3 '^error' "$log"; survived=1 ;;
            *)
                by=$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' "$log" | head -n 1)
                echo "caught    $name, by ${by:-a loop that does not end}, $((SECONDS - began)) s"
                ;;
        esac
    fi
    cp "$copy/original" "$source"
    touch "$source"
done < <(mutants | sed -E 's/([^\\]) +\| /\1~/g; s/ +\|$/~/; s/ +\| *$/~/; s/\\\|/|/g')
[ "$known" -gt 0 ] || { echo "no such mutant: $*"; exit 1; }
exit $survived
