//! Transfers through bounce slots. One end cuts a transfer into pieces, the other assembles them.
//! Several pieces are in flight at once, so that one end fills a slot while the other empties the
//! previous one. Does not block or allocate. Each pass does bounded work per peer, so no peer
//! delays another.
//!
//! A peer's request is checked against the registrations before anything is copied. If the region
//! is not registered, the transfer fails with `EFAULT`, because it may have been deregistered
//! meanwhile. A range outside a registered region, an unexpected reply, or a reply that is too long
//! violates the protocol.
//!
//! `fill` copies into our slots, `take` out of the peer's.

mod fill;
mod take;

use std::collections::VecDeque;

use fishplate_core::error::CompleteError;
use fishplate_core::mem::Peer;
use fishplate_core::rail::RailKey;
use fishplate_core::sync::host::Host;

use super::queue::Place;
use super::{GpuConfig, GpuRail};
use crate::Device;
use crate::pair::{Layout, PairSegment};
use crate::relay::{Incoming, Outgoing, Piece};

/// The kind of a job.
#[derive(Clone, Copy, Debug)]
pub(super) enum JobKind {
    /// Pieces of a write of ours.
    Write { op: u32, key: RailKey, data: Option<u32> },
    /// The request for one of our reads.
    Ask { op: u32, key: RailKey, id: u64 },
    /// Pieces that answer a peer's read: the number of the requesting piece, the peer's id of the
    /// read, and the start of the bytes.
    Reply { number: u64, id: u64, key: RailKey, from: u64 },
}

/// A transfer being cut into pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) kind: JobKind,
    pub(super) source: Place,
    pub(super) offset: u64,
    pub(super) done: u64,
    pub(super) len: u64,
}

/// One of our slots in use.
#[derive(Clone, Copy, Debug)]
struct Sent {
    number: u64,
    piece: Piece,
    /// The operation that it belongs to; none for a reply.
    op: Option<u32>,
    /// The requesting piece, if this is the last of the reply.
    answers: Option<u64>,
    /// Whether the slot is filled.
    filled: bool,
    /// For a reply, the registration that it is copied from.
    local: Option<u32>,
}

/// A peer's slot that the device is copying out of.
#[derive(Clone, Copy, Debug)]
struct Taken {
    number: u64,
    /// For the last piece of a write, its first piece and its word.
    last: Option<(u64, Option<u32>)>,
    /// For a piece of our read, the read and the piece's bytes.
    read: Option<(u32, u64)>,
    local: Option<u32>,
}

/// Both directions of one link.
#[derive(Debug)]
pub(super) struct Relay {
    out: Outgoing,
    input: Incoming,
    jobs: VecDeque<Job>,
    most_jobs: usize,
    replies: usize,
    sent: Box<[Option<Sent>]>,
    taken: Box<[Option<Taken>]>,
    chunk: u32,
    /// First piece of the arriving write.
    write_began: Option<u64>,
    /// Last piece of a failed write.
    failed: Option<u64>,
}

// SAFETY: its addresses belong to no thread. They stay valid until an operation completes, or are
// registered.
unsafe impl Send for Relay {}

impl Relay {
    /// Creates both directions over the two segments of a link.
    ///
    /// # Safety
    /// The segments stay mapped while this exists, and no other one uses them.
    pub(super) unsafe fn new(
        mine: &PairSegment,
        theirs: &PairSegment,
        layout: Layout,
        config: &GpuConfig,
    ) -> Self {
        let slots = layout.slots as usize;
        let most_jobs = usize::from(config.ops);
        Relay {
            // SAFETY: both segments have this layout; our caller guarantees the rest.
            out: unsafe { Outgoing::new(mine.descriptors(), theirs.acks(), layout.slots) },
            // SAFETY: both segments have this layout; our caller guarantees the rest.
            input: unsafe { Incoming::new(theirs.descriptors(), mine.acks(), layout.slots) },
            jobs: VecDeque::with_capacity(most_jobs + slots),
            most_jobs,
            replies: 0,
            sent: vec![None; slots].into_boxed_slice(),
            taken: vec![None; slots].into_boxed_slice(),
            chunk: layout.chunk,
            write_began: None,
            failed: None,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.jobs.len() < self.most_jobs
    }

    /// Number of our slots in use.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> usize {
        self.sent.iter().flatten().count()
    }

    pub(super) fn push(&mut self, job: Job) {
        self.jobs.push_back(job);
    }
}

impl<D: Device, H: Host> GpuRail<D, H> {
    fn relay_of(&mut self, peer: Peer) -> Option<&mut Relay> {
        self.shared(peer)?.relay.as_mut()
    }

    /// Checks which of our pieces the peer has taken, refills slots, and takes the peer's pieces.
    /// Returns whether there was anything to do.
    pub(super) fn bounce(&mut self, peer: Peer) -> bool {
        let Some(relay) = self.relay_of(peer) else { return false };
        let mut moved = false;
        let slots = relay.sent.len() as u32;
        for slot in 0..slots {
            let Some(relay) = self.relay_of(peer) else { return moved };
            let Some(sent) = relay.sent[slot as usize].filter(|sent| sent.filled) else { continue };
            if let Some(code) = relay.out.answer(sent.number) {
                self.slot_over(peer, slot, code);
                moved = true;
            }
        }
        self.pump(peer);
        for _ in 0..slots {
            if self.streams.room() == 0 || !self.take_piece(peer) {
                break;
            }
            moved = true;
        }
        moved
    }

    /// Fails everything that waits for a peer's answer. Copies of the device continue.
    pub(super) fn drop_pieces(&mut self, peer: Peer) {
        let Some(relay) = self.relay_of(peer) else { return };
        let (jobs, slots) = (std::mem::take(&mut relay.jobs), relay.sent.len() as u32);
        relay.replies = 0;
        for job in jobs {
            if let JobKind::Write { op, .. } | JobKind::Ask { op, .. } = job.kind {
                if let Some(known) = self.ops.get_mut(op) {
                    known.unposted = false;
                    known.parts -= u32::from(matches!(job.kind, JobKind::Ask { .. }));
                    known.error.get_or_insert(CompleteError::PeerDown);
                }
                self.settle(op);
            }
        }
        for slot in 0..slots {
            let Some(relay) = self.relay_of(peer) else { return };
            let Some(sent) = &mut relay.sent[slot as usize] else { continue };
            // The peer's last piece needs no answer.
            sent.answers = None;
            if sent.filled {
                if let Some(op) = sent.op.and_then(|op| self.ops.get_mut(op)) {
                    op.error.get_or_insert(CompleteError::PeerDown);
                }
                self.slot_over(peer, slot, 0);
            }
        }
    }
}

/// Maps a code to a nonzero one that fits an acknowledgement.
fn errno(code: i32) -> u16 {
    u16::try_from(code).ok().filter(|code| *code != 0).unwrap_or(libc::EIO as u16)
}
