//! Records of the numbers in flight and of the replies to fetching atomics, for failover.

use crate::error::Violation;
use crate::mem::{Peer, Untrusted, Zeroable};
use crate::rail::Rail;
use crate::sync::seq::Seq;

use super::super::list::NONE;
use super::super::pending::OpKind;
use super::super::wire::{Body, NO_TOKEN, Place};
use super::super::{Engine, State};
use super::{Asks, Failover};

/// Longest payload that is copied into the record, in bytes. Injects to a peer with failover are at
/// most this long. A longer payload stays in its source.
pub(in super::super) const COPY: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Carried {
    By(u8),
    Arrived,
    /// The number was lost on this rail, and must be posted again.
    Lost(u8),
}

/// What was posted under a number. Except in an `Answer`, `op` is the slot of its operation. The
/// slot stays in use until the number is acknowledged.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
pub(in super::super) enum Sent {
    Nothing,
    Write {
        op: u32,
        len: u32,
        local: *mut u8,
        offset: u64,
    },
    /// A message of a one-sided operation. If `local` is null, the payload is in the record.
    Message {
        op: u32,
        len: u32,
        body: Body,
        local: *const u8,
    },
    Tagged {
        op: u32,
    },
    /// An answer of the two-sided protocol. If the answer carries a part of a send's payload, `of`
    /// is that send, otherwise [`NONE`].
    Answer {
        kind: u8,
        op: u8,
        of: u32,
        len: u32,
        words: [u64; 2],
        last: Option<u64>,
        local: *const u8,
    },
    Get {
        op: u32,
        piece: u32,
        at: Place,
        len: u64,
        into: u64,
    },
    Got {
        at: Place,
        len: u32,
        last: bool,
        token: u64,
        into: u64,
    },
}

/// The record of one number in the window of a stream. `reply` and `again` belong to the peer's
/// numbers, and the other fields to ours.
#[derive(Clone, Copy, Debug)]
pub struct SentSlot {
    pub(super) what: Sent,
    pub(super) carried: Carried,
    /// Whether the reply to the fetching atomic with this number may be lost and must be requested.
    pub(super) ask: bool,
    pub(super) bytes: [u8; COPY],
    /// The old value of the peer's fetching atomic with this number.
    pub(super) reply: u64,
    /// The token of a reply that must be sent again, or [`NO_TOKEN`].
    pub(super) again: u64,
}

// SAFETY: the pointers name registered memory or the engine's own blocks. `Region::new` requires
// that any thread may access registered memory. The blocks are accessed only through the engine.
unsafe impl Send for SentSlot {}

// SAFETY: zeroed memory is a valid value. Because of their `repr(u8)`, the first variant of either
// enum is 0: `Nothing` has no fields, and the field of `By` is a number. All other fields are
// numbers and a flag.
unsafe impl Zeroable for SentSlot {}

impl SentSlot {
    /// An unused record. A record of zeros is unused too.
    pub const EMPTY: SentSlot = SentSlot {
        what: Sent::Nothing,
        carried: Carried::Arrived,
        ask: false,
        bytes: [0; COPY],
        reply: 0,
        again: NO_TOKEN,
    };
}

pub(super) fn clear(slots: &mut [SentSlot]) {
    let used = |slot: &&mut SentSlot| {
        !matches!(slot.what, Sent::Nothing) || slot.again != NO_TOKEN || slot.reply != 0
    };
    slots.iter_mut().filter(used).for_each(|slot| *slot = SentSlot::EMPTY);
}

impl Failover<'_> {
    pub(super) fn of(&mut self, stream: u32) -> &mut [SentSlot] {
        let window = self.window as usize;
        &mut self.sent[stream as usize * window..(stream as usize + 1) * window]
    }

    pub(super) fn at(&mut self, stream: u32, seq: Seq) -> &mut SentSlot {
        let index = seq.0 as usize & (self.window as usize - 1);
        &mut self.of(stream)[index]
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Returns whether an operation in flight may be posted again from a registered region, or to
    /// an imported region. Slow path: looks at every number in flight.
    pub(in super::super) fn may_repost(&self, local: Option<u16>, remote: Option<u16>) -> bool {
        let Some(failover) = &self.state.failover else { return false };
        let window = failover.window as usize;
        let slots = &self.state.pending.slots;
        self.state
            .streams
            .iter()
            .enumerate()
            .filter(|(stream, s)| s.live && self.state.is_kept(*stream as u32))
            .any(|(stream, s)| {
                (0..s.in_flight()).any(|n| {
                    let at = s.acked.plus(n).0 as usize & (window - 1);
                    let op = |op: u32| slots.get(op as usize);
                    let (from, to) = match failover.sent[stream * window + at].what {
                        Sent::Write { op: index, .. } => {
                            (op(index).map(|op| op.local_region), op(index).map(|op| op.remote))
                        }
                        Sent::Message { op: index, local, .. } if !local.is_null() => {
                            (op(index).map(|op| op.local_region), None)
                        }
                        Sent::Tagged { op: index } | Sent::Answer { of: index, .. } => {
                            (op(index).map(|op| op.local_region), None)
                        }
                        _ => (None, None),
                    };
                    (local.is_some() && from == local) || (remote.is_some() && to == remote)
                })
            })
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Records what was posted under the next number, on the rail of the last post. If the message
    /// carries a part of a send's payload, the number counts as an outstanding post of the send
    /// until [`not_again`](Self::not_again).
    #[cold]
    pub(in super::super) fn keep(&mut self, stream: u32, what: Sent, copy: Untrusted<'_>) {
        let (seq, rail) = (self.streams[stream as usize].next, self.took);
        let Some(failover) = &mut self.failover else { return };
        let slot = failover.at(stream, seq);
        (slot.what, slot.carried, slot.ask) = (what, Carried::By(rail), false);
        copy.copy_out(&mut slot.bytes);
        let resuming = &mut failover.streams[stream as usize];
        match what {
            Sent::Got { .. } => resuming.pieces += 1,
            Sent::Answer { of, .. } => {
                resuming.answered += 1;
                if let Some(send) = self.pending.slots.get_mut(of as usize) {
                    send.posts += 1;
                }
            }
            _ => {}
        }
    }

    /// Answers leave room in the window for operations.
    #[cold]
    pub(in super::super) fn may_answer(&mut self, stream: u32) -> bool {
        let (window, in_flight) = (self.config.window, self.streams[stream as usize].in_flight());
        let Some(failover) = &mut self.failover else { return true };
        let answered = failover.streams[stream as usize].answered;
        let may = in_flight < window.into() && answered < (window / 2).max(1);
        if !may {
            failover.refused = true;
            self.ask(stream);
        }
        may
    }

    /// Drops the records of a stream's numbers below `upto`, which are never posted again.
    /// Completes sends that have waited only for this.
    #[cold]
    pub(in super::super) fn not_again(&mut self, stream: u32, upto: Seq) {
        let first = self.streams[stream as usize].acked;
        for n in 0..upto.since(first) {
            let Some(failover) = &mut self.failover else { return };
            let slot = failover.at(stream, first.plus(n));
            match slot.what {
                Sent::Got { .. } => {
                    slot.what = Sent::Nothing;
                    failover.streams[stream as usize].pieces -= 1;
                }
                Sent::Answer { of, .. } => {
                    slot.what = Sent::Nothing;
                    failover.streams[stream as usize].answered -= 1;
                    if let Some(send) = self.pending.slots.get_mut(of as usize) {
                        send.posts -= 1;
                        self.end_if_over(of);
                    }
                }
                _ => {}
            }
        }
    }

    /// Returns the number of data messages in flight on a stream. Slow path: looks at every number
    /// in flight.
    #[cold]
    pub(in super::super) fn data_in_flight(&self, stream: u32) -> u32 {
        let s = &self.streams[stream as usize];
        let (first, count) = (s.acked, s.in_flight());
        let Some(failover) = &self.failover else { return 0 };
        let window = failover.window as usize;
        let slots = &failover.sent[stream as usize * window..(stream as usize + 1) * window];
        let slot = |n| &slots[first.plus(n).0 as usize & (window - 1)];
        let is_data =
            |slot: &SentSlot| matches!(slot.what, Sent::Message { body: Body::Data { .. }, .. });
        (0..count).filter(|&n| is_data(slot(n))).count() as u32
    }

    /// Handles the arrival of all numbers below `cursor` at the peer. Returns a cursor: operations
    /// with lower numbers may complete.
    #[cold]
    pub(in super::super) fn kept_arrived(&mut self, stream: u32, cursor: Seq) -> Seq {
        let cursor = self.hold_back(stream, cursor);
        self.not_again(stream, cursor);
        cursor
    }

    /// Stops the cursor before an atomic with a missing reply, so that the target keeps the fetched
    /// value.
    fn hold_back(&mut self, stream: u32, cursor: Seq) -> Seq {
        let Some(failover) = &mut self.failover else { return cursor };
        let heard = &mut failover.streams[stream as usize].heard;
        if heard.is_before(cursor) {
            *heard = cursor;
        }
        let mut index = self.streams[stream as usize].ops.head;
        while index != NONE {
            let slot = &self.pending.slots[index as usize];
            if !slot.posted || cursor.is_before(slot.end) {
                break;
            }
            if slot.fetch && slot.kind == OpKind::Message {
                return Seq(slot.end.0.wrapping_sub(1));
            }
            index = slot.links.next;
        }
        cursor
    }

    /// Applies the acknowledgements that a missing reply held back.
    #[cold]
    pub(in super::super) fn let_go(&mut self, stream: u32) {
        let Some(failover) = &mut self.failover else { return };
        let heard = failover.streams[stream as usize].heard;
        // An earlier message carried this cursor and passed the check, so it is no violation.
        let _ = self.acknowledged_up_to(stream, heard);
    }

    #[cold]
    pub(in super::super) fn keep_reply(&mut self, stream: u32, value: u64) {
        let seq = self.streams[stream as usize].window.expected();
        if let Some(failover) = &mut self.failover {
            failover.at(stream, seq).reply = value;
        }
    }

    #[cold]
    pub(in super::super) fn asked_again(
        &mut self,
        peer: Peer,
        asks: &Asks,
    ) -> Result<(), Violation> {
        let Some(stream) = self.arrival_stream(peer, asks.context, asks.word)? else {
            return Ok(());
        };
        if self.kept_peer(peer.0).is_none() {
            return Err(Violation::Kind);
        }
        self.acknowledged(stream, asks.ack)?;
        let expected = self.streams[stream as usize].window.expected();
        let Some(failover) = &mut self.failover else { return Ok(()) };
        // An atomic that was not applied yet is answered when it is applied. An atomic older than a
        // window was answered, so the request is out of date.
        if (1..=failover.window as u64).contains(&expected.since(asks.number)) {
            failover.at(stream, asks.number).again = asks.token;
            failover.streams[stream as usize].answers = true;
            self.ask(stream);
        }
        Ok(())
    }
}
