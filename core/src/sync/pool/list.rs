//! The free list of a table. The slot released last is taken first, and unused slots are taken
//! last. One owner uses the list without atomics; it never blocks or allocates. A
//! [`Pool`](super::Pool) uses it for its own slots, and so does every table with slots that only
//! its owner releases.
//!
//! The list runs through the slots themselves. Each slot has a word for the link of the next slot,
//! and the table reads and writes that word. A link is an index plus one, and 0 ends the list, so
//! zeroed memory is an empty list. Each link is checked when it is followed. A corrupted link makes
//! the table smaller, but never leads outside it.

pub(super) const EMPTY: u32 = 0;

/// The free slots of a table, by index.
#[derive(Clone, Debug, Default)]
pub struct FreeList {
    head: u32,
    /// Number of slots that were ever used. Slots from this index on are free and in no list.
    fresh: u32,
}

impl FreeList {
    /// Creates the list of a table with only unused slots.
    pub const fn new() -> Self {
        Self { head: EMPTY, fresh: 0 }
    }

    /// Takes a slot of a table with `len` slots. `link` reads the link in a slot, or returns `None`
    /// if the table has no such slot.
    #[inline(always)]
    pub fn take(&mut self, len: usize, link: impl FnOnce(u32) -> Option<u32>) -> Option<u32> {
        // The table's bounds check also detects the end of the list.
        let index = self.head_index();
        match link(index) {
            None => self.take_fresh(len),
            Some(link) => {
                self.set_head(link);
                Some(index)
            }
        }
    }

    /// Returns the index of the slot released last. At the end of the list, or after a corrupted
    /// link, returns an index that no table has.
    #[inline(always)]
    pub(crate) fn head_index(&self) -> u32 {
        self.head.wrapping_sub(1)
    }

    #[inline(always)]
    pub(crate) fn set_head(&mut self, link: u32) {
        self.head = link;
    }

    #[cold]
    pub(super) fn take_fresh(&mut self, len: usize) -> Option<u32> {
        self.head = EMPTY;
        let index = self.fresh;
        ((index as usize) < len).then(|| {
            self.fresh += 1;
            index
        })
    }

    /// Returns the slot that [`take`](Self::take) would take from a table with `len` slots.
    #[inline(always)]
    pub fn first(&self, len: usize) -> Option<u32> {
        let index = self.head_index();
        if (index as usize) < len { Some(index) } else { self.first_fresh(len) }
    }

    #[cold]
    fn first_fresh(&self, len: usize) -> Option<u32> {
        ((self.fresh as usize) < len).then_some(self.fresh)
    }

    /// `index` is what [`first`](Self::first) has just returned, and `link` is the link in that
    /// slot.
    #[inline(always)]
    pub(crate) fn take_first(&mut self, len: usize, index: u32, link: u32) {
        match index == self.head_index() {
            true => self.set_head(link),
            false => _ = self.take_fresh(len),
        }
    }

    /// Releases a slot. The caller must write the returned link into the slot.
    #[inline(always)]
    #[must_use = "write the returned link into the slot"]
    pub fn give(&mut self, index: u32) -> u32 {
        core::mem::replace(&mut self.head, index + 1)
    }

    /// Returns the number of slots that were ever used.
    #[inline]
    pub fn used(&self) -> u32 {
        self.fresh
    }
}

#[cfg(all(test, not(fishplate_loom)))]
mod tests {
    extern crate std;

    use std::{vec, vec::Vec};

    use super::*;
    use crate::sync::testing::Random;

    fn link(links: &[u32]) -> impl FnOnce(u32) -> Option<u32> {
        move |index| links.get(index as usize).copied()
    }

    #[test]
    fn the_place_given_back_last_is_taken_next_and_those_never_used_come_last() {
        let mut random = Random::new("free places");
        for len in [0usize, 1, 3, 8] {
            // The link of an unused slot may have any value.
            let (mut list, mut links) = (FreeList::new(), vec![0xdead_beef; len]);
            let (mut out, mut free, mut used) = (Vec::new(), Vec::new(), 0);
            for _ in 0..10_000 {
                if random.within(0..2) == 0 && !out.is_empty() {
                    let index: u32 = out.swap_remove(random.within(0..out.len()));
                    links[index as usize] = list.give(index);
                    free.push(index);
                    continue;
                }
                let want = free.pop().or((used < len as u32).then_some(used));
                used += u32::from(want == Some(used));
                assert_eq!(list.first(len), want);
                assert_eq!(list.take(len, link(&links)), want);
                assert_eq!(list.used(), used);
                out.extend(want);
            }
        }
    }

    #[test]
    fn links_that_somebody_overwrote_lead_nowhere() {
        for garbage in [5, 6, 1 << 16, u32::MAX] {
            let (mut list, mut links) = (FreeList::new(), [0; 4]);
            let taken: Vec<_> = std::iter::from_fn(|| list.take(4, link(&links))).collect();
            assert_eq!(taken, [0, 1, 2, 3]);
            for index in [0, 1] {
                links[index as usize] = list.give(index);
            }
            links[1] = garbage;
            assert_eq!(list.take(4, link(&links)), Some(1));
            assert_eq!(list.first(4), None);
            assert_eq!(list.take(4, link(&links)), None);
            links[1] = list.give(1);
            assert_eq!(list.take(4, link(&links)), Some(1), "{garbage}");
        }
    }
}
