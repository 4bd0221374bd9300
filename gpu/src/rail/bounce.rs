//! Transfers through bounce slots. One end cuts a transfer into pieces, and the other end assembles
//! them. Nothing here blocks or allocates, and each pass does bounded work per peer.
//!
//! A peer's request is checked against the registrations before anything is copied. If the region
//! is not registered, the transfer fails with `EFAULT`, because the region may have been
//! deregistered meanwhile. A range outside a registered region, an unexpected reply, or a reply
//! that is too long violates the protocol.

mod fill;
mod take;

use std::collections::VecDeque;

use fishplate_core::error::CompleteError;
use fishplate_core::mem::Peer;
use fishplate_core::rail::RailKey;
use fishplate_core::sync::host::Host;

use super::queue::{OpKind, Place};
use super::{GpuConfig, GpuRail};
use crate::Device;
use crate::pair::{Layout, PairSegment};
use crate::relay::{Incoming, Outgoing, Piece};

#[derive(Clone, Copy, Debug)]
pub(super) enum JobKind {
    /// Sends the pieces of one of our writes.
    Write { op: u32, key: RailKey, data: Option<u32> },
    /// Sends the request for one of our reads.
    Ask { op: u32, key: RailKey, id: u64 },
    /// Sends the pieces of the reply to a peer's read. `id` is the peer's id of the read, and
    /// `from` the start of the bytes.
    Reply { id: u64, key: RailKey, from: u64 },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) kind: JobKind,
    pub(super) source: Place,
    pub(super) offset: u64,
    pub(super) done: u64,
    pub(super) len: u64,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    number: u64,
    piece: Piece,
    /// `None` for a reply.
    op: Option<u32>,
    filled: bool,
}

#[derive(Clone, Copy, Debug)]
struct Taken {
    number: u64,
    /// For the last piece of a write: its first piece's sequence number, and its completion word.
    last: Option<(u64, Option<u32>)>,
    /// For a piece of our read: the operation, and the number of bytes.
    read: Option<(u32, u64)>,
}

#[derive(Debug)]
pub(super) struct Relay {
    out: Outgoing,
    input: Incoming,
    jobs: VecDeque<Job>,
    most_jobs: usize,
    /// Replies to the peer's reads. They take turns with `jobs`, which may have to wait for
    /// replies.
    replies: VecDeque<Job>,
    replied: bool,
    /// Number of our requested reads with incomplete replies.
    asked: usize,
    sent: Box<[Option<Sent>]>,
    /// A copy into the slot has an unknown outcome, so the slot carries only failed pieces.
    spoiled: Box<[bool]>,
    taken: Box<[Option<Taken>]>,
    chunk: u32,
    /// Sequence number of the first piece of the write that is arriving.
    write_began: Option<u64>,
    /// Sequence number of the last piece that failed at this end.
    failed: Option<u64>,
}

// SAFETY: the pointers refer to shared mappings and to memory of operations, which are not tied to
// a thread. They stay valid until the operation completes.
unsafe impl Send for Relay {}

impl Relay {
    /// Creates both directions over the two segments of a link.
    ///
    /// # Safety
    /// The segments stay mapped while the value exists, and no other `Relay` uses them.
    pub(super) unsafe fn new(
        mine: &PairSegment,
        theirs: &PairSegment,
        layout: Layout,
        config: &GpuConfig,
    ) -> Self {
        let slots = layout.slots as usize;
        let most_jobs = usize::from(config.ops);
        Relay {
            // SAFETY: both segments have this layout. The caller guarantees their lifetime, and
            // that this is the only relay.
            out: unsafe { Outgoing::new(mine.descriptors(), theirs.acks(), layout.slots) },
            // SAFETY: both segments have this layout. The caller guarantees their lifetime, and
            // that this is the only relay.
            input: unsafe { Incoming::new(theirs.descriptors(), mine.acks(), layout.slots) },
            jobs: VecDeque::with_capacity(most_jobs),
            most_jobs,
            replies: VecDeque::with_capacity(slots),
            replied: false,
            asked: 0,
            sent: vec![None; slots].into_boxed_slice(),
            spoiled: vec![false; slots].into_boxed_slice(),
            taken: vec![None; slots].into_boxed_slice(),
            chunk: layout.chunk,
            write_began: None,
            failed: None,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.jobs.len() < self.most_jobs
    }

    #[cfg(test)]
    pub(super) fn in_flight(&self) -> usize {
        self.sent.iter().flatten().count()
    }

    pub(super) fn push(&mut self, job: Job) {
        self.jobs.push_back(job);
    }

    /// Returns the job that sends the next piece. Holds back a read while there is already one
    /// unanswered read per slot.
    fn job(&self) -> Option<Job> {
        let ready =
            |job: &&Job| !matches!(job.kind, JobKind::Ask { .. }) || self.asked < self.sent.len();
        let (own, reply) = (self.jobs.front().filter(ready), self.replies.front());
        match self.replied {
            true => own.or(reply).copied(),
            false => reply.or(own).copied(),
        }
    }

    fn queue(&mut self, kind: JobKind) -> &mut VecDeque<Job> {
        match kind {
            JobKind::Reply { .. } => &mut self.replies,
            _ => &mut self.jobs,
        }
    }
}

impl<D: Device, H: Host> GpuRail<D, H> {
    fn relay_of(&mut self, peer: Peer) -> Option<&mut Relay> {
        self.shared(peer)?.relay.as_mut()
    }

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

    /// Fails all operations that wait for a peer's answer. Copies of the device continue.
    #[cold]
    pub(super) fn drop_pieces(&mut self, peer: Peer) {
        let Some(relay) = self.relay_of(peer) else { return };
        let (jobs, slots) = (std::mem::take(&mut relay.jobs), relay.sent.len() as u32);
        relay.replies.clear();
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
            let Some(sent) = &relay.sent[slot as usize] else { continue };
            if sent.filled {
                if let Some(op) = sent.op.and_then(|op| self.ops.get_mut(op)) {
                    op.error.get_or_insert(CompleteError::PeerDown);
                }
                self.slot_over(peer, slot, 0);
            }
        }
        // After the peer acknowledges the request of a read, no slot refers to the read.
        for index in 0..self.config.ops.into() {
            if let Some(op) = self.ops.get_mut(index)
                && op.peer == peer
                && matches!(op.kind, OpKind::Read { left: 1.., .. })
            {
                op.error.get_or_insert(CompleteError::PeerDown);
                self.settle(index);
            }
        }
    }
}

fn errno(code: i32) -> u16 {
    u16::try_from(code).ok().filter(|code| *code != 0).unwrap_or(libc::EIO as u16)
}
