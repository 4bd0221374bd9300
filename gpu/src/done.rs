//! The done channel: the origin of a write stores a word that tells the target that the whole write
//! has landed. That takes no message and, where the device can store words, no processor. Neither
//! end blocks, allocates, locks or makes a system call.
//!
//! Every reported write takes the next *ticket* of its direction. The ticket's word has a cache
//! line of its own in the origin's segment, at the ticket's number modulo the number of words. So
//! writes that complete out of order are reported as they complete, and a failed write does not
//! affect the next.
//!
//! | bits of a word | what |
//! |---|---|
//! | 34..64 | the ticket, modulo 2^30 |
//! | 32..34 | 1: the write has landed; 2: it failed. Never 0, so fresh memory holds no word |
//! | 0..32 | the completion word of the write |
//!
//! Tickets are credits: the origin takes at most as many as the target has consumed, in order, plus
//! the number of words. Both ends count in absolute 64-bit numbers, and neither trusts the other. A
//! cursor that moves back or too far is *corrupt*; a word with another ticket is ignored.
//!
//! | edge         | release store | acquire load | carries |
//! |--------------|---|---|---|
//! | `done.word`  | [`tell`] or `write_word` | [`Receiver::poll`] | the bytes of the write |
//! | `done.freed` | [`Receiver::poll`] | [`Sender::reserve`] | permission to overwrite words |

use std::mem::offset_of;

use static_assertions::{assert_impl_all, assert_not_impl_any, const_assert_eq};

use super::primitive::{AtomicU64, edge};

/// A word. It has its own cache line, and its own pair of lines for the adjacent-line prefetcher.
#[repr(C, align(128))]
pub(crate) struct Line {
    pub(crate) word: AtomicU64,
}

const_assert_eq!(size_of::<Line>(), 128);
const_assert_eq!(align_of::<Line>(), 128);
const_assert_eq!(offset_of!(Line, word), 0);

/// The outcome of a write, as reported to its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// All of it has landed.
    Landed = 1,
    /// It failed; the target memory is undefined.
    Failed = 2,
}

const SEQUENCE: u32 = 34;
const STATUS: u32 = 32;

/// Words after the next one that one poll probes, to find writes that overtook others within a few
/// polls.
const PROBES: u64 = 4;

/// Encodes the word of a ticket.
#[inline(always)]
pub(crate) fn word(ticket: u64, status: Status, data: u32) -> u64 {
    ticket << SEQUENCE | (status as u64) << STATUS | u64::from(data)
}

/// The other end wrote something that no correct end writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// The origin's end.
#[derive(Debug)]
pub(crate) struct Sender {
    words: *const Line,
    count: u64,
    /// The next ticket.
    next: u64,
    /// The target's cursor as last loaded.
    freed: u64,
    cursor: *const AtomicU64,
}

/// The target's end.
#[derive(Debug)]
pub(crate) struct Receiver {
    words: *const Line,
    count: u64,
    /// The first ticket whose word has not been seen.
    base: u64,
    /// The cursor as last stored.
    told: u64,
    cursor: *const AtomicU64,
    /// Bit i: the word at index i was seen out of order.
    early: Box<[u64]>,
    /// Where the next probe begins, relative to `base`.
    probe: u64,
}

// SAFETY: the memory behind the pointers belongs to no thread, and `new` requires that there is one
// end of each kind.
unsafe impl Send for Sender {}
// SAFETY: as above.
unsafe impl Send for Receiver {}
assert_impl_all!(Sender: Send);
assert_not_impl_any!(Sender: Sync, Clone);
assert_not_impl_any!(Receiver: Sync, Clone);

impl Sender {
    /// Creates an end over `count` words, a power of two, that are zero or hold tickets before
    /// `start`.
    ///
    /// # Safety
    /// Words and cursor stay mapped while this is used, aligned for their types. No other end in
    /// this process stores words.
    pub(crate) unsafe fn new(words: *const Line, count: u32, cursor: *const AtomicU64, start: u64) -> Self {
        Sender { words, count: count.into(), next: start, freed: start, cursor }
    }

    /// Returns the ticket that [`take`](Sender::take) takes next, if the target has consumed
    /// enough.
    #[inline(always)]
    pub(crate) fn reserve(&mut self) -> Result<Option<u64>, Corrupt> {
        if self.next.wrapping_sub(self.freed) >= self.count {
            self.refresh()?;
        }
        Ok((self.next.wrapping_sub(self.freed) < self.count).then_some(self.next))
    }

    #[cold]
    fn refresh(&mut self) -> Result<(), Corrupt> {
        // SAFETY: mapped and aligned, as `new` requires. Acquire, edge `done.freed`: the target
        // does not read the words that it has consumed again.
        let freed = unsafe { &*self.cursor }.load(edge!("done.freed.load", Acquire));
        // A correct cursor lies between its last value and our position, modulo 2^64.
        if freed.wrapping_sub(self.freed) > self.next.wrapping_sub(self.freed) {
            return Err(Corrupt);
        }
        self.freed = freed;
        Ok(())
    }

    /// Takes the reserved ticket. Its word must be stored eventually.
    #[inline(always)]
    pub(crate) fn take(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Returns the offset of a ticket's word, in bytes from the first word.
    #[inline(always)]
    pub(crate) fn offset(&self, ticket: u64) -> u64 {
        (ticket & (self.count - 1)) * size_of::<Line>() as u64
    }

    /// Stores the word of a taken ticket.
    #[inline(always)]
    pub(crate) fn store(&self, ticket: u64, status: Status, data: u32) {
        // SAFETY: the masked index is among the words, mapped as `new` requires.
        let line = unsafe { &*self.words.add((ticket & (self.count - 1)) as usize) };
        tell(&line.word, word(ticket, status, data));
    }
}

/// Stores a word, for the sender or for a device that is this processor.
#[inline(always)]
pub(crate) fn tell(word: &AtomicU64, value: u64) {
    // Release, edge `done.word`: a thread that sees the word sees the bytes, which this thread
    // copied or the device reported as copied.
    word.store(value, edge!("done.word.store", Release));
}

impl Receiver {
    /// Like [`Sender::new`], but the words are the peer's and the cursor is ours.
    ///
    /// # Safety
    /// As for [`Sender::new`].
    pub(crate) unsafe fn new(words: *const Line, count: u32, cursor: *const AtomicU64, start: u64) -> Self {
        let early = vec![0; count.div_ceil(64) as usize].into_boxed_slice();
        Receiver { words, count: count.into(), base: start, told: start, cursor, early, probe: 1 }
    }

    /// Reports at most `budget` writes. Returns how many, and whether the cursor was stored for the
    /// origin.
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
        // The origin reads the cursor's line, so store it only once per quarter of the words.
        let tell = self.base.wrapping_sub(self.told) >= (self.count / 4).max(1);
        if tell {
            self.told = self.base;
            // SAFETY: mapped and aligned, as `new` requires. Release, edge `done.freed`.
            unsafe { &*self.cursor }.store(self.base, edge!("done.freed.store", Release));
        }
        Ok((count, tell))
    }

    /// Loads the word of a ticket, once. Returns its contents if it has been stored.
    #[inline(always)]
    fn look(&self, ticket: u64) -> Result<Option<(Status, u32)>, Corrupt> {
        // SAFETY: the masked index is among the words, mapped as `new` requires. The peer may write
        // them at any time; this process only loads them, as atomics.
        let line = unsafe { &*self.words.add((ticket & (self.count - 1)) as usize) };
        // Acquire, edge `done.word`.
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

// The loom models compile this file a second time, where its unit tests do not belong.
#[cfg(all(test, not(fishplate_loom)))]
mod tests;
