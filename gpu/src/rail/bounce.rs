//! Transfers through bounce slots: cut into pieces here, put together at the other end; several
//! pieces are under way at once, so that one end copies into a slot while the other copies out of
//! the one before. Nothing here blocks or allocates; each pass does a bounded amount for each peer,
//! so none waits for another.
//!
//! What a peer asks for is checked against what is registered here before anything is copied. A
//! region that is not registered, or no longer, ends the transfer with `EFAULT`: it may have been
//! taken back meanwhile. A range outside of a region that *is* registered, a reply to nothing, or
//! one with more bytes than were asked for, breaks the protocol.
//!
//! `fill` is what goes into our slots, `take` what comes out of the peer's.

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
use crate::pair::{Board, Layout};
use crate::relay::{Incoming, Outgoing, Piece};

/// What a job is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum JobKind {
    /// Pieces of a write of ours.
    Write { op: u32, key: RailKey, data: Option<u32> },
    /// A read of ours is to be asked for.
    Ask { op: u32, key: RailKey, id: u64 },
    /// Pieces of what the peer reads:
    /// the number of the piece that asked, the peer's name of the read, and where it begins.
    Reply { number: u64, id: u64, key: RailKey, from: u64 },
}

/// A transfer that is being cut into pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) kind: JobKind,
    pub(super) source: Place,
    pub(super) offset: u64,
    pub(super) done: u64,
    pub(super) len: u64,
}

/// A slot of ours in use.
#[derive(Clone, Copy, Debug)]
struct Sent {
    number: u64,
    piece: Piece,
    /// The operation that it is a part of; none of a reply.
    op: Option<u32>,
    /// The piece that asked, when this is the last of the reply.
    answers: Option<u64>,
    /// Whether its bytes are in the slot.
    filled: bool,
    /// The registration that it is copied from, of a reply.
    local: Option<u32>,
}

/// A slot of the peer that the device is copying out of.
#[derive(Clone, Copy, Debug)]
struct Taken {
    number: u64,
    /// First piece of the write that this is the last of, and its word; or nothing.
    last: Option<(u64, Option<u32>)>,
    /// The read of ours that it belongs to, and its bytes.
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
    /// First piece of the write that is arriving.
    write_began: Option<u64>,
    /// The last piece of a write that failed.
    failed: Option<u64>,
}

// SAFETY: its addresses belong to no thread: they are lent until an operation ends, or registered.
unsafe impl Send for Relay {}

impl Relay {
    /// Over the two segments of a link.
    ///
    /// # Safety
    /// They stay mapped while this is used, and there is one of it.
    pub(super) unsafe fn new(mine: &Board, theirs: &Board, layout: Layout, config: &GpuConfig) -> Self {
        let slots = layout.slots as usize;
        let most_jobs = usize::from(config.ops);
        Relay {
            // SAFETY: both boards have the layout's places; the rest is handed on to our caller.
            out: unsafe { Outgoing::new(mine.descriptors(), theirs.acks(), layout.slots) },
            // SAFETY: likewise.
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

    /// Slots of ours in use.
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

    /// Looks which of our pieces have been taken out, fills slots again, and takes pieces of the
    /// peer out. Returns whether anything moved.
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

    /// Forgets a peer: ends what waits for its answer. The device's copies go on until they end.
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
            // Its last piece answers nobody.
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

/// A code that fits an acknowledgement and is not 0.
fn errno(code: i32) -> u16 {
    u16::try_from(code).ok().filter(|code| *code != 0).unwrap_or(libc::EIO as u16)
}
