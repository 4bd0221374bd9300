//! Hash tables of groups. A group has all entries with one key, oldest first. Only its leader, the
//! oldest entry, is in the chain of a bucket. So a look-up visits one entry per key and finds the
//! oldest.
//!
//! The members of a group form a ring in which the youngest precedes the leader. Insertion and
//! removal take constant time and never walk a group.
//!
//! An entry can be in several tables over the same buckets. A *node* names an entry in one table:
//! the entry's number shifted left by `BITS`, with the table in the low bits.

use super::super::list::{Links, NONE};

/// Flag in `chain.prev`: the leader is the first of its chain, and the other bits are the bucket.
const HEAD: u32 = 1 << 31;
/// The value of `chain.prev` for an entry that is not a leader.
const MEMBER: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub(super) struct GroupLinks {
    /// For a leader, the next and previous nodes in the chain of its bucket.
    pub chain: Links,
    pub ring: Links,
}

impl GroupLinks {
    pub(super) const NONE: GroupLinks =
        GroupLinks { chain: Links { next: NONE, prev: MEMBER }, ring: Links::NONE };

    pub(super) fn leads(&self) -> bool {
        self.chain.prev != MEMBER
    }
}

pub(super) trait Grouped {
    fn group(&self, table: usize) -> &GroupLinks;
    fn group_mut(&mut self, table: usize) -> &mut GroupLinks;
}

/// The heads of the chains. Their number is a power of two.
pub(super) struct Buckets<'m, const BITS: u32> {
    heads: &'m mut [u32],
}

impl<'m, const BITS: u32> Buckets<'m, BITS> {
    /// The tables use the largest power of two of `heads`, which must not be empty.
    pub(super) fn new(heads: &'m mut [u32]) -> Self {
        let len = 1 << heads.len().min(HEAD as usize - 1).ilog2();
        let heads = &mut heads[..len];
        heads.fill(NONE);
        Buckets { heads }
    }

    pub(super) fn heads(&self) -> &[u32] {
        self.heads
    }

    #[inline(always)]
    fn node(entry: u32, table: usize) -> u32 {
        entry << BITS | table as u32
    }

    #[inline(always)]
    pub(super) fn entry(node: u32) -> (u32, usize) {
        (node >> BITS, (node & ((1 << BITS) - 1)) as usize)
    }

    /// Returns [`NONE`] if `same` accepts no group. Also returns how many entries the search
    /// passed.
    #[inline(always)]
    pub(super) fn find<T: Grouped>(
        &self,
        entries: &[T],
        hash: u32,
        table: usize,
        same: impl Fn(&T) -> bool,
    ) -> (u32, u32) {
        let mut node = self.heads[hash as usize & (self.heads.len() - 1)];
        let mut passed = 0;
        while node != NONE {
            let (entry, of) = Self::entry(node);
            let leader = &entries[entry as usize];
            if of == table && same(leader) {
                return (entry, passed);
            }
            node = leader.group(of).chain.next;
            passed += 1;
        }
        (NONE, passed)
    }

    /// Adds an entry, the youngest in `table`. The entry joins the group that `same` accepts, or
    /// starts a new group.
    #[inline(always)]
    pub(super) fn insert<T: Grouped>(
        &mut self,
        entries: &mut [T],
        hash: u32,
        entry: u32,
        table: usize,
        same: impl Fn(&T) -> bool,
    ) {
        let (leader, _) = self.find(entries, hash, table, same);
        if leader != NONE {
            let youngest = entries[leader as usize].group(table).ring.prev;
            entries[youngest as usize].group_mut(table).ring.next = entry;
            entries[leader as usize].group_mut(table).ring.prev = entry;
            *entries[entry as usize].group_mut(table) =
                GroupLinks { ring: Links { next: leader, prev: youngest }, ..GroupLinks::NONE };
            return;
        }
        let bucket = hash as usize & (self.heads.len() - 1);
        let node = Self::node(entry, table);
        let second = self.heads[bucket];
        self.heads[bucket] = node;
        *entries[entry as usize].group_mut(table) = GroupLinks {
            chain: Links { next: second, prev: HEAD | bucket as u32 },
            ring: Links { next: entry, prev: entry },
        };
        if second != NONE {
            let (second, of) = Self::entry(second);
            entries[second as usize].group_mut(of).chain.prev = node;
        }
    }

    /// If the entry was the leader, the next oldest entry becomes the leader.
    #[inline(always)]
    pub(super) fn remove<T: Grouped>(&mut self, entries: &mut [T], entry: u32, table: usize) {
        let GroupLinks { chain, ring } = *entries[entry as usize].group(table);
        entries[ring.prev as usize].group_mut(table).ring.next = ring.next;
        entries[ring.next as usize].group_mut(table).ring.prev = ring.prev;
        if chain.prev == MEMBER {
            return;
        }
        // The node that replaces this node in the chain: its successor in the group, or the next
        // group.
        let (forward, back) = if ring.next == entry {
            (chain.next, chain.prev)
        } else {
            entries[ring.next as usize].group_mut(table).chain = chain;
            let heir = Self::node(ring.next, table);
            (heir, heir)
        };
        if chain.prev & HEAD != 0 {
            self.heads[(chain.prev & !HEAD) as usize] = forward;
        } else {
            let (before, of) = Self::entry(chain.prev);
            entries[before as usize].group_mut(of).chain.next = forward;
        }
        if chain.next != NONE {
            let (after, of) = Self::entry(chain.next);
            entries[after as usize].group_mut(of).chain.prev = back;
        }
    }
}
