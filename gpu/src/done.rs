//! The done channel: when a whole write has landed, its origin stores a word that the target polls.
//! If the write is a single copy, a device that can store words stores the word itself. Neither end
//! blocks, allocates, locks or makes a system call.
//!
//! Every reported write takes the next *ticket* of its direction. The ticket's word is in the
//! origin's segment. Its index is the ticket modulo the number of words. Each word has its own
//! cache line, so writes may complete out of order, and a failed write does not affect the next.
//!
//! | bits of a word | what |
//! |---|---|
//! | 34..64 | the ticket, modulo 2^30 |
//! | 32..34 | 1: the write has landed; 2: it failed. Never 0, so fresh memory holds no word |
//! | 0..32 | the completion word of the write |
//!
//! Tickets are also credits: the origin may be ahead of the target's cursor by at most the number
//! of words. The target advances its cursor in ticket order. Both ends count in absolute 64-bit
//! numbers, and neither trusts the other. A cursor that moves back or too far is *corrupt*. A word
//! with another ticket is ignored.
//!
//! | edge         | release store | acquire load | carries |
//! |--------------|---|---|---|
//! | `done.word`  | [`tell`] or `write_word` | [`Receiver::poll`] | the bytes of the write |
//! | `done.freed` | [`Receiver::poll`] | [`Sender::reserve`] | permission to overwrite words |

use std::mem::offset_of;

use static_assertions::{assert_impl_all, assert_not_impl_any, const_assert_eq};

use super::primitive::{AtomicU64, edge};

/// A word on its own pair of cache lines, because the processor prefetches lines in pairs.
#[repr(C, align(128))]
pub(crate) struct Line {
    pub(crate) word: AtomicU64,
}

const_assert_eq!(size_of::<Line>(), 128);
const_assert_eq!(align_of::<Line>(), 128);
const_assert_eq!(offset_of!(Line, word), 0);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Landed = 1,
    /// The contents of the target memory are undefined.
    Failed = 2,
}

const SEQUENCE: u32 = 34;
const STATUS: u32 = 32;

/// Number of words after `base` that one poll checks, to find writes that completed out of order.
const PROBES: u64 = 4;

#[inline(always)]
pub(crate) fn word(ticket: u64, status: Status, data: u32) -> u64 {
    ticket << SEQUENCE | (status as u64) << STATUS | u64::from(data)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

#[derive(Debug)]
pub(crate) struct Sender {
    words: *const Line,
    count: u64,
    next: u64,
    freed: u64,
    cursor: *const AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Receiver {
    words: *const Line,
    count: u64,
    /// All tickets before this one have been reported.
    base: u64,
    told: u64,
    cursor: *const AtomicU64,
    /// Bit i: whether the word at index i was seen out of order.
    early: Box<[u64]>,
    probe: u64,
}

// SAFETY: the pointers refer to a shared mapping, which is not tied to a thread. `new` requires
// that there is one sender, and the type is not `Clone`.
unsafe impl Send for Sender {}
// SAFETY: the pointers refer to a shared mapping, which is not tied to a thread. `new` requires
// that there is one receiver, and the type is not `Clone`.
unsafe impl Send for Receiver {}
assert_impl_all!(Sender: Send);
assert_not_impl_any!(Sender: Sync, Clone);
assert_not_impl_any!(Receiver: Sync, Clone);

impl Sender {
    /// `count` is a power of two. The words are zero or hold tickets before `start`.
    ///
    /// # Safety
    /// Words and cursor are aligned, and stay mapped while the sender is used. There is no other
    /// sender for these words in this process.
    pub(crate) unsafe fn new(
        words: *const Line,
        count: u32,
        cursor: *const AtomicU64,
        start: u64,
    ) -> Self {
        Sender { words, count: count.into(), next: start, freed: start, cursor }
    }

    /// Returns the ticket that the next [`take`](Sender::take) takes, or `None` if no word is free.
    #[inline(always)]
    pub(crate) fn reserve(&mut self) -> Result<Option<u64>, Corrupt> {
        if self.next.wrapping_sub(self.freed) >= self.count {
            self.refresh()?;
        }
        Ok((self.next.wrapping_sub(self.freed) < self.count).then_some(self.next))
    }

    #[cold]
    fn refresh(&mut self) -> Result<(), Corrupt> {
        // SAFETY: `new` requires that the cursor is mapped and aligned. Acquire, edge `done.freed`:
        // the target does not read the consumed words again.
        let freed = unsafe { &*self.cursor }.load(edge!("done.freed.load", Acquire));
        // A correct cursor lies between its last value and our position. The subtraction is modulo
        // 2^64.
        if freed.wrapping_sub(self.freed) > self.next.wrapping_sub(self.freed) {
            return Err(Corrupt);
        }
        self.freed = freed;
        Ok(())
    }

    /// Takes the ticket that `reserve` returned. The caller must store the ticket's word
    /// eventually.
    #[inline(always)]
    pub(crate) fn take(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    #[inline(always)]
    pub(crate) fn offset(&self, ticket: u64) -> u64 {
        (ticket & (self.count - 1)) * size_of::<Line>() as u64
    }

    #[inline(always)]
    pub(crate) fn store(&self, ticket: u64, status: Status, data: u32) {
        // SAFETY: the masked index is less than `count`, and `new` requires that the words are
        // mapped.
        let line = unsafe { &*self.words.add((ticket & (self.count - 1)) as usize) };
        tell(&line.word, word(ticket, status, data));
    }
}

#[inline(always)]
pub(crate) fn tell(word: &AtomicU64, value: u64) {
    // Release, edge `done.word`: a thread that sees the word also sees the bytes. This thread
    // copied them, or the device reported the copy as complete.
    word.store(value, edge!("done.word.store", Release));
}

impl Receiver {
    /// `count` is a power of two. The words are the peer's, the cursor is ours.
    ///
    /// # Safety
    /// Words and cursor are aligned, and stay mapped while the receiver is used. There is no other
    /// receiver for these words.
    pub(crate) unsafe fn new(
        words: *const Line,
        count: u32,
        cursor: *const AtomicU64,
        start: u64,
    ) -> Self {
        let early = vec![0; count.div_ceil(64) as usize].into_boxed_slice();
        Receiver { words, count: count.into(), base: start, told: start, cursor, early, probe: 1 }
    }

    /// Reports up to `budget` writes. Returns the number of reported writes, and whether this call
    /// stored the cursor.
    #[inline]
    pub(crate) fn poll(
        &mut self,
        budget: u32,
        mut ended: impl FnMut(Status, u32),
    ) -> Result<(u32, bool), Corrupt> {
        let mut count = 0;
        while count < budget {
            let place = self.base & (self.count - 1);
            let (group, bit) = ((place / 64) as usize, 1u64 << (place % 64));
            if self.early[group] & bit != 0 {
                self.early[group] &= !bit;
            } else if let Some((status, data)) = self.look(self.base)? {
                ended(status, data);
                count += 1;
            } else {
                break;
            }
            self.base = self.base.wrapping_add(1);
        }
        for _ in 0..PROBES.min(self.count - 1) {
            if count >= budget {
                break;
            }
            let ticket = self.base.wrapping_add(self.probe);
            self.probe = if self.probe + 1 >= self.count { 1 } else { self.probe + 1 };
            let place = ticket & (self.count - 1);
            let (group, bit) = ((place / 64) as usize, 1u64 << (place % 64));
            if self.early[group] & bit == 0
                && let Some((status, data)) = self.look(ticket)?
            {
                self.early[group] |= bit;
                ended(status, data);
                count += 1;
            }
        }
        // A store takes the cursor's cache line from the origin. So the cursor is stored once per
        // quarter of the words.
        let tell = self.base.wrapping_sub(self.told) >= (self.count / 4).max(1);
        if tell {
            self.told = self.base;
            // SAFETY: `new` requires that the cursor is mapped and aligned. Release, edge
            // `done.freed`: we do not read the consumed words again.
            unsafe { &*self.cursor }.store(self.base, edge!("done.freed.store", Release));
        }
        Ok((count, tell))
    }

    /// Loads the word of a ticket, once. Returns its contents, or `None` if it has not been stored.
    #[inline(always)]
    fn look(&self, ticket: u64) -> Result<Option<(Status, u32)>, Corrupt> {
        // SAFETY: the masked index is less than `count`, and `new` requires that the words are
        // mapped. The peer may write a word at any time, so it is loaded as an atomic.
        let line = unsafe { &*self.words.add((ticket & (self.count - 1)) as usize) };
        // Acquire, edge `done.word`: makes the bytes of the write visible.
        let word = line.word.load(edge!("done.word.load", Acquire));
        if word >> STATUS == 0 || word >> SEQUENCE != ticket & (u64::MAX >> SEQUENCE) {
            return Ok(None);
        }
        match word >> STATUS & 3 {
            1 => Ok(Some((Status::Landed, word as u32))),
            2 => Ok(Some((Status::Failed, word as u32))),
            _ => Err(Corrupt),
        }
    }
}

// The loom models compile this file too, but not its unit tests.
#[cfg(all(test, not(fishplate_loom)))]
mod tests;
