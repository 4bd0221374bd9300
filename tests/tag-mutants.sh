#!/usr/bin/env bash
# Plants one bug after another in a copy of the matcher, and checks that a test fails each time
# (see mutants.sh).
#
# usage: tests/tag-mutants.sh [name...] (default: all of them; about two minutes on two cores)
set -u
cd "$(dirname "$0")/.." || exit
source tests/mutants.sh

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

under=core/src/engine/tag suite=tag chosen=() first=()
limit_s=60 # the tests take some seconds
failure='^test \(.*\) \.\.\. FAILED'
plant tag-mutants "the matcher" "$@"
