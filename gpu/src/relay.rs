//! Bounce slots carry the pieces of a transfer that no device can copy directly: one end copies a
//! piece in, the other end copies it out. Several pieces may be in flight at once. Neither end
//! blocks, allocates, locks or makes a system call.
//!
//! The number of slots per direction is a power of two. Slots are used in rotation: piece n uses
//! slot n modulo the number of slots. The sender writes the bytes into the slot, and their meaning
//! into the slot's *descriptor*, both in its own segment. The receiver answers each piece with an
//! *acknowledgement* in its own segment, which frees the slot and reports the piece's outcome. A
//! read is requested by a piece without bytes. Like other pieces, it is acknowledged immediately:
//! slots are used in order, so a slot that waited for the reply would block the replies behind it.
//! Each end has at most one read in flight per slot.
//!
//! | edge            | release store        | acquire load         | carries                      |
//! |-----------------|----------------------|----------------------|------------------------------|
//! | `relay.filled`  | [`Outgoing::fill`]   | [`Incoming::next`]   | the descriptor and the slot  |
//! | `relay.emptied` | [`Incoming::answer`] | [`Outgoing::answer`] | permission to overwrite both |
//!
//! The receiver copies a descriptor out once. It does not trust the contents, which the rail
//! checks.

use fishplate_core::engine::fuzzing::{number, put};
use fishplate_core::rail::RailKey;
use static_assertions::const_assert_eq;

use super::done::Line;
use super::primitive::{AtomicU64, Ordering, edge};

/// The description of a piece, on its own cache line.
#[repr(C, align(128))]
pub(crate) struct Descriptor {
    /// Sequence number plus one. 0 in fresh memory.
    pub(super) stamp: AtomicU64,
    pub(super) words: [AtomicU64; 6],
}

const_assert_eq!(size_of::<Descriptor>(), 128);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// The last piece carries the completion word, if any.
    Write { key: RailKey, last: bool, data: Option<u32> },
    Read {
        key: RailKey,
        want: u64,
        /// Repeated by each reply.
        id: u64,
    },
    /// If the reply fails, its last piece is marked as failed and has no bytes.
    Reply { id: u64, last: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) what: What,
    /// Offset of the bytes in the region. For a reply, the offset in the read.
    pub(crate) offset: u64,
    /// Number of bytes in the slot.
    pub(crate) len: u32,
    /// Whether the copy into the slot failed. If so, the bytes in the slot are invalid.
    pub(crate) failed: bool,
}

const WRITE: u64 = 1;
const READ: u64 = 2;
const REPLY: u64 = 3;
const LAST: u64 = 1 << 8;
const DATA: u64 = 1 << 9;
const FAILED: u64 = 1 << 10;

impl Piece {
    fn encode(&self) -> [u64; 6] {
        let len = u64::from(self.len) << 32 | if self.failed { FAILED } else { 0 };
        match self.what {
            What::Write { key, last, data } => {
                let flags = if last { LAST } else { 0 } | if data.is_some() { DATA } else { 0 };
                [WRITE | flags | len, key.key, key.base, self.offset, data.unwrap_or(0).into(), 0]
            }
            What::Read { key, want, id } => [READ | len, key.key, key.base, self.offset, id, want],
            What::Reply { id, last } => {
                [REPLY | if last { LAST } else { 0 } | len, 0, 0, self.offset, id, 0]
            }
        }
    }

    fn decode(words: [u64; 6]) -> Option<Self> {
        let [head, key, base, offset, id, want] = words;
        let key = RailKey { key, base };
        let failed = head & FAILED != 0;
        let what = match (head & 0xff, head >> 8 & 0xff_ffff & !(FAILED >> 8)) {
            (WRITE, flags @ 0..=3) => {
                let data = (flags & 2 != 0).then_some(id as u32);
                What::Write { key, last: flags & 1 != 0, data }
            }
            (READ, 0) if !failed => What::Read { key, want, id },
            (REPLY, flags @ 0..=1) => What::Reply { id, last: flags != 0 },
            _ => return None,
        };
        Some(Piece { what, offset, len: (head >> 32) as u32, failed })
    }
}

pub(crate) fn sample_piece(seed: u64, into: &mut [u8]) -> usize {
    let [a, b, c] = [1, 2, 3].map(|n| number(seed, n));
    let key = RailKey { key: b, base: c };
    let what = match a % 3 {
        0 => What::Write { key, last: a & 8 != 0, data: (a & 16 != 0).then_some(b as u32) },
        1 => What::Read { key, want: a, id: b },
        _ => What::Reply { id: b, last: a & 8 != 0 },
    };
    let words = Piece { what, offset: c, len: (a >> 32) as u32, failed: a & 32 != 0 && a % 3 != 1 }
        .encode();
    put(into, words.map(u64::to_le_bytes).as_flattened())
}

/// Decodes a piece and encodes it again, for [`fuzzing`](crate::fuzzing). Decoding ignores words
/// that a kind of piece does not use. So a round trip preserves only the first word and the decoded
/// piece.
pub(crate) fn read_piece(input: &[u8], again: &mut [u8]) -> Option<usize> {
    let bytes: &[u8; 48] = input.try_into().ok()?;
    let (words, []) = bytes.as_chunks::<8>() else { return None };
    let piece = Piece::decode(core::array::from_fn(|at| u64::from_le_bytes(words[at])))?;
    assert_eq!(Piece::decode(piece.encode()), Some(piece));
    Some(put(again, &piece.encode()[0].to_le_bytes()))
}

/// Number of bits of an acknowledgement that hold the outcome.
const CODE: u32 = 16;

#[derive(Debug)]
pub(crate) struct Outgoing {
    descriptors: *const Descriptor,
    acks: *const Line,
    slots: u32,
    next: u64,
}

#[derive(Debug)]
pub(crate) struct Incoming {
    descriptors: *const Descriptor,
    acks: *const Line,
    slots: u32,
    expected: u64,
}

// SAFETY: the pointers refer to a shared mapping, which is not tied to a thread. `new` requires
// that no other `Outgoing` in this process uses these slots.
unsafe impl Send for Outgoing {}
// SAFETY: the pointers refer to a shared mapping, which is not tied to a thread. `new` requires
// that no other `Incoming` in this process uses these slots.
unsafe impl Send for Incoming {}

impl Outgoing {
    /// `slots` is a power of two. The descriptors are ours, and the acknowledgements are the
    /// peer's.
    ///
    /// # Safety
    /// Descriptors and acknowledgements are aligned, and stay mapped while this end is used. No
    /// other end in this process fills these slots.
    pub(crate) unsafe fn new(
        descriptors: *const Descriptor,
        acks: *const Line,
        slots: u32,
    ) -> Self {
        Outgoing { descriptors, acks, slots, next: 0 }
    }

    pub(crate) fn turn(&self) -> (u64, u32) {
        (self.next, (self.next & u64::from(self.slots - 1)) as u32)
    }

    /// Takes the next slot. The caller has checked that it is free.
    pub(crate) fn take(&mut self) {
        self.next = self.next.wrapping_add(1);
    }

    /// Publishes a piece after its bytes are in the slot.
    pub(crate) fn fill(&self, number: u64, piece: &Piece) {
        // SAFETY: the masked index is less than `slots`, and `new` requires that the descriptors
        // are mapped.
        let descriptor =
            unsafe { &*self.descriptors.add((number & u64::from(self.slots - 1)) as usize) };
        for (word, value) in descriptor.words.iter().zip(piece.encode()) {
            // Relaxed: the stamp below publishes the words, by edge `relay.filled`.
            word.store(value, Ordering::Relaxed);
        }
        // Release, edge `relay.filled`: publishes the descriptor and the slot.
        descriptor.stamp.store(number.wrapping_add(1), edge!("relay.filled.store", Release));
    }

    /// 0 or an errno; `None` until the receiver has answered.
    pub(crate) fn answer(&self, number: u64) -> Option<u16> {
        // SAFETY: the masked index is less than `slots`, and `new` requires that the
        // acknowledgements are mapped. The peer may write them at any time, so they are loaded as
        // atomics.
        let ack = unsafe { &*self.acks.add((number & u64::from(self.slots - 1)) as usize) };
        // Acquire, edge `relay.emptied`: the receiver does not read the slot again.
        let word = ack.word.load(edge!("relay.emptied.load", Acquire));
        (word >> CODE == number.wrapping_add(1) & (u64::MAX >> CODE)).then_some(word as u16)
    }
}

impl Incoming {
    /// `slots` is a power of two. The descriptors are the peer's, and the acknowledgements are
    /// ours.
    ///
    /// # Safety
    /// Descriptors and acknowledgements are aligned, and stay mapped while this end is used. No
    /// other end in this process empties these slots.
    pub(crate) unsafe fn new(
        descriptors: *const Descriptor,
        acks: *const Line,
        slots: u32,
    ) -> Self {
        Incoming { descriptors, acks, slots, expected: 0 }
    }

    /// Returns the sequence number, slot and contents of the next piece, or `None` if no piece has
    /// arrived. The contents are `None` if they are corrupt.
    pub(crate) fn next(&mut self) -> Option<(u64, u32, Option<Piece>)> {
        let number = self.expected;
        let slot = (number & u64::from(self.slots - 1)) as u32;
        // SAFETY: the masked index is less than `slots`, and `new` requires that the descriptors
        // are mapped. The peer may write them at any time, so they are loaded as atomics.
        let descriptor = unsafe { &*self.descriptors.add(slot as usize) };
        // Acquire, edge `relay.filled`: makes the descriptor and the slot visible.
        if descriptor.stamp.load(edge!("relay.filled.load", Acquire)) != number.wrapping_add(1) {
            return None;
        }
        self.expected = number.wrapping_add(1);
        // Relaxed: the acquire load of the stamp ordered these loads. Each word is loaded once.
        let words = descriptor.words.each_ref().map(|word| word.load(Ordering::Relaxed));
        Some((number, slot, Piece::decode(words)))
    }

    /// Answers a piece with its outcome. The caller does not read the slot after this.
    pub(crate) fn answer(&self, number: u64, code: u16) {
        // SAFETY: the masked index is less than `slots`, and `new` requires that the
        // acknowledgements are mapped.
        let ack = unsafe { &*self.acks.add((number & u64::from(self.slots - 1)) as usize) };
        // Release, edge `relay.emptied`: our reads of the slot come before the answer.
        ack.word.store(
            number.wrapping_add(1) << CODE | u64::from(code),
            edge!("relay.emptied.store", Release),
        );
    }
}

// The loom models compile this file too, but not its unit tests.
#[cfg(all(test, not(fishplate_loom)))]
mod tests {
    use super::*;

    #[test]
    fn pieces_survive_a_round_trip_and_garbage_is_rejected() {
        let key = RailKey { key: u64::MAX, base: 1 << 40 };
        for what in [
            What::Write { key, last: true, data: Some(7) },
            What::Write { key, last: false, data: None },
            What::Write { key, last: false, data: Some(0) },
            What::Read { key, want: 1 << 33, id: 5 },
            What::Reply { id: u64::MAX, last: false },
            What::Reply { id: 1, last: true },
        ] {
            let piece = Piece { what, offset: 1 << 50, len: u32::MAX, failed: false };
            assert_eq!(Piece::decode(piece.encode()), Some(piece));
            let failed = Piece { failed: true, ..piece };
            let valid = !matches!(what, What::Read { .. });
            assert_eq!(Piece::decode(failed.encode()), valid.then_some(failed));
        }
        for head in [0, 4, 255, WRITE | 8 << 8, READ | LAST, REPLY | DATA, WRITE | 1 << 31] {
            assert_eq!(Piece::decode([head, 0, 0, 0, 0, 0]), None, "{head:#x}");
        }
    }
}
