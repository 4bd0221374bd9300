//! The done channel: words by which the origin of a write tells its target that all of it has
//! landed, without a message and, where the device can store words, without a processor. Neither
//! end blocks, allocates, locks or makes a system call.
//!
//! Every write that announces itself takes the next *ticket* of its direction. A ticket's word lies
//! on a line of its own, in the segment of the origin, at the ticket's number modulo the number of
//! words. So writes that end in another order than they began are told as they end, and the failure
//! of one says nothing about the next.
//!
//! | bits of a word | what |
//! |---|---|
//! | 34..64 | the ticket, modulo 2^30 |
//! | 32..34 | 1: the write has landed; 2: it failed. Never 0, so fresh memory holds no word |
//! | 0..32 | the completion word of the write |
//!
//! Tickets are credits: the origin takes no more than the target has consumed, in order, plus the
//! number of words. Both count absolutely, in 64 bits, and neither believes the other: a cursor
//! that moves back or too far is *corrupt*, a word with another ticket is none.
//!
//! | edge         | release store | acquire load | carries |
//! |--------------|---|---|---|
//! | `done.word`  | [`tell`] or `write_word` | [`Receiver::poll`] | the bytes of the write |
//! | `done.freed` | [`Receiver::poll`] | [`Sender::reserve`] | permission to overwrite words |

use std::mem::offset_of;

use static_assertions::{assert_impl_all, assert_not_impl_any, const_assert_eq};

use super::primitive::{AtomicU64, edge};

/// A word, alone on its line and on the one that the processor fetches with it.
#[repr(C, align(128))]
pub(crate) struct Line {
    pub(crate) word: AtomicU64,
}

const_assert_eq!(size_of::<Line>(), 128);
const_assert_eq!(align_of::<Line>(), 128);
const_assert_eq!(offset_of!(Line, word), 0);

/// How a write ended, as far as its target is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// All of it has landed.
    Landed = 1,
    /// It failed; what is there is not what was to be.
    Failed = 2,
}

const SEQUENCE: u32 = 34;
const STATUS: u32 = 32;

/// Words beyond the next that one poll of a receiver looks at:
/// it finds overtakers within a few polls.
const PROBES: u64 = 4;

/// The word of a ticket.
#[inline(always)]
pub(crate) fn word(ticket: u64, status: Status, data: u32) -> u64 {
    ticket << SEQUENCE | (status as u64) << STATUS | u64::from(data)
}

/// The other end wrote what no correct end writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// The end of the origin.
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

/// The end of the target.
#[derive(Debug)]
pub(crate) struct Receiver {
    words: *const Line,
    count: u64,
    /// The first ticket whose word was not seen.
    base: u64,
    /// The cursor as last stored.
    told: u64,
    cursor: *const AtomicU64,
    /// Bit i: the word at place i was seen before its turn.
    early: Box<[u64]>,
    /// Where the next search for such begins, counted from `base`.
    probe: u64,
}

// SAFETY: the memory behind the pointers belongs to no thread;
// there is one end of each kind, as their makers were promised.
unsafe impl Send for Sender {}
// SAFETY: as above.
unsafe impl Send for Receiver {}
assert_impl_all!(Sender: Send);
assert_not_impl_any!(Sender: Sync, Clone);
assert_not_impl_any!(Receiver: Sync, Clone);

impl Sender {
    /// Over `count` words, a power of two, all zero or of tickets before `start`.
    ///
    /// # Safety
    /// Words and cursor stay mapped while this is used, aligned for their types; nobody else here
    /// stores words.
    pub(crate) unsafe fn new(words: *const Line, count: u32, cursor: *const AtomicU64, start: u64) -> Self {
        Sender { words, count: count.into(), next: start, freed: start, cursor }
    }

    /// The ticket that [`take`](Sender::take) gives next, if the target has consumed enough.
    #[inline(always)]
    pub(crate) fn reserve(&mut self) -> Result<Option<u64>, Corrupt> {
        if self.next.wrapping_sub(self.freed) >= self.count {
            self.refresh()?;
        }
        Ok((self.next.wrapping_sub(self.freed) < self.count).then_some(self.next))
    }

    #[cold]
    fn refresh(&mut self) -> Result<(), Corrupt> {
        // SAFETY: mapped and aligned, as `new` was promised.
        // Acquire, edge `done.freed`: the target looks no more at the words that it has consumed.
        let freed = unsafe { &*self.cursor }.load(edge!("done.freed.load", Acquire));
        // A correct cursor lies between its last value and our position, modulo 2^64.
        if freed.wrapping_sub(self.freed) > self.next.wrapping_sub(self.freed) {
            return Err(Corrupt);
        }
        self.freed = freed;
        Ok(())
    }

    /// Takes the ticket that was reserved: its word must be stored some day.
    #[inline(always)]
    pub(crate) fn take(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Where the word of a ticket lies, in bytes from the first.
    #[inline(always)]
    pub(crate) fn offset(&self, ticket: u64) -> u64 {
        (ticket & (self.count - 1)) * size_of::<Line>() as u64
    }

    /// Stores the word of a ticket that was taken.
    #[inline(always)]
    pub(crate) fn store(&self, ticket: u64, status: Status, data: u32) {
        // SAFETY: the masked place lies among the words, which are mapped as `new` was promised.
        let line = unsafe { &*self.words.add((ticket & (self.count - 1)) as usize) };
        tell(&line.word, word(ticket, status, data));
    }
}

/// Stores a word: for the sender, and for a device that is this processor.
#[inline(always)]
pub(crate) fn tell(word: &AtomicU64, value: u64) {
    // Release, edge `done.word`: whoever sees the word sees the bytes, which this thread has copied
    // or was told of by the device.
    word.store(value, edge!("done.word.store", Release));
}

impl Receiver {
    /// As [`Sender::new`]; the words are the peer's, the cursor is ours.
    ///
    /// # Safety
    /// As for [`Sender::new`].
    pub(crate) unsafe fn new(words: *const Line, count: u32, cursor: *const AtomicU64, start: u64) -> Self {
        let early = vec![0; count.div_ceil(64) as usize].into_boxed_slice();
        Receiver { words, count: count.into(), base: start, told: start, cursor, early, probe: 1 }
    }

    /// Hands over what has ended, at most `budget` of it, and returns how much that was, and
    /// whether the origin was told of room.
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
        // The cursor is a line that the origin reads: it is told a quarter of the words at a time.
        let tell = self.base.wrapping_sub(self.told) >= (self.count / 4).max(1);
        if tell {
            self.told = self.base;
            // SAFETY: mapped and aligned, as `new` was promised.
            // Release, edge `done.freed`.
            unsafe { &*self.cursor }.store(self.base, edge!("done.freed.store", Release));
        }
        Ok((count, tell))
    }

    /// The word of a ticket, loaded once, if it is there.
    #[inline(always)]
    fn look(&self, ticket: u64) -> Result<Option<(Status, u32)>, Corrupt> {
        // SAFETY: the masked place lies among the words, which are mapped as `new` was promised.
        // The peer writes them at any time; here they are only loaded, as atomics.
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

// The model checker compiles this file again, among the models, where its tests do not belong.
#[cfg(all(test, not(fishplate_loom)))]
mod tests;
