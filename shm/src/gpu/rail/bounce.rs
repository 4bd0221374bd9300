//! Transfers through bounce slots: cut into pieces here, put together at the other end; several pieces are under way at once, so that
//! one end copies into a slot while the other copies out of the one before. Nothing here blocks or allocates; each pass does a
//! bounded amount for each peer, so none waits for another.
//!
//! What a peer asks for is checked against what is registered here before anything is copied. A region that is not registered, or no
//! longer, ends the transfer with `EFAULT`: it may have been taken back meanwhile. A range outside of a region that *is* registered,
//! a reply to nothing, or one with more bytes than were asked for, breaks the protocol.

use std::collections::VecDeque;

use fishplate_core::error::{CompleteError, PeerError, Violation};
use fishplate_core::mem::{Peer, copy_bytes};
use fishplate_core::rail::RailKey;
use fishplate_core::sync::host::Host;

use super::memory::is_device;
use super::queue::{Kind, Owner, Place};
use super::{GpuConfig, GpuRail};
use crate::gpu::Device;
use crate::gpu::pair::{Board, Layout};
use crate::gpu::relay::{Incoming, Outgoing, Piece, What};
use crate::staged::within;

/// What a job is for.
#[derive(Clone, Copy, Debug)]
pub(super) enum JobKind {
    /// Pieces of a write of ours.
    Write { op: u32, key: RailKey, data: Option<u32> },
    /// A read of ours is to be asked for.
    Ask { op: u32, key: RailKey, id: u64 },
    /// Pieces of what the peer reads: the number of the piece that asked, and the peer's name of the read.
    Reply { number: u64, id: u64, local: Option<u32> },
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

// SAFETY: the addresses in here belong to no thread: they are lent until an operation has ended, or registered.
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

/// Memory here that a peer names.
enum Named {
    /// It, and the registration if the device needs it.
    At(Place, Option<u32>),
    /// It is not registered, or no longer.
    Nothing,
    /// The range does not lie inside it.
    Outside,
}

impl<D: Device, H: Host> GpuRail<D, H> {
    fn relay_of(&mut self, peer: Peer) -> Option<&mut Relay> {
        self.shared(peer)?.relay.as_mut()
    }

    /// Fills slots while there are jobs and free slots.
    pub(super) fn pump(&mut self, peer: Peer) {
        loop {
            let Some(known) = self.peers.get_mut(usize::from(peer.0)).and_then(Option::as_deref_mut) else {
                return;
            };
            let life = known.life;
            let Some(shared) = known.shared.as_mut() else { return };
            let (mine, mine_at) = (shared.mine, shared.mine_at);
            let Some(relay) = shared.relay.as_mut() else { return };
            let Some(&job) = relay.jobs.front() else { return };
            let (number, slot) = relay.out.turn();
            if relay.sent[slot as usize].is_some() {
                return;
            }
            let left = job.len - job.done;
            let len = left.min(relay.chunk.into()) as u32;
            let last = u64::from(len) == left;
            let at = job.offset + job.done;
            let (piece, op, answers, local) = match job.kind {
                JobKind::Write { op, key, data } => {
                    let data = data.filter(|_| last);
                    (Piece { what: What::Write { key, last, data }, offset: at, len }, Some(op), None, None)
                }
                JobKind::Ask { op, key, id } => {
                    let what = What::Read { key, want: job.len, id };
                    (Piece { what, offset: job.offset, len: 0 }, Some(op), None, None)
                }
                JobKind::Reply { number, id, local } => {
                    let answers = last.then_some(number);
                    (Piece { what: What::Reply { id }, offset: job.done, len }, None, answers, local)
                }
            };
            let mut sent = Sent { number, piece, op, answers, filled: false, local };
            match job.source.at(job.done) {
                Place::Device(from) if piece.len > 0 => {
                    if self.streams.room() == 0 {
                        return;
                    }
                    let Some(base) = mine_at else { return };
                    let (stream, to) = (self.streams.idle(), base.at(mine.bounce_at(slot)));
                    // SAFETY: the source is registered, and lent until the operation ends, or checked when it was asked for; the
                    // slot is free, and pinned.
                    let queued =
                        unsafe { self.sharing.device_mut().copy(stream, to, from, u64::from(piece.len)) };
                    if let Err(error) = queued {
                        self.break_off(peer, job, super::queue::code(error));
                        continue;
                    }
                    let owner = Owner::Filling { peer, life, number };
                    self.streams.mark(self.sharing.device_mut(), stream, owner);
                    if let Some(known) = self.peer(peer) {
                        known.pieces += 1;
                    }
                    if let Some(slot) = local {
                        self.locals[slot as usize].uses += 1;
                    }
                }
                Place::Host(from) if piece.len > 0 => {
                    // SAFETY: as above, for the processor; the slot is ours until it is filled.
                    unsafe { copy_bytes(from, mine.bounce(slot), piece.len as usize) };
                    sent.filled = true;
                }
                _ => sent.filled = true,
            }
            if let Some(op) = op.and_then(|op| self.ops.get_mut(op)) {
                op.parts += u32::from(!matches!(job.kind, JobKind::Ask { .. }));
                op.unposted = !last && !matches!(job.kind, JobKind::Ask { .. });
            }
            let Some(relay) = self.relay_of(peer) else { return };
            relay.out.take();
            relay.sent[slot as usize] = Some(sent);
            if last || matches!(job.kind, JobKind::Ask { .. }) {
                relay.jobs.pop_front();
            } else if let Some(job) = relay.jobs.front_mut() {
                job.done += u64::from(piece.len);
            }
            if sent.filled {
                self.send(peer, slot);
            }
        }
    }

    /// A piece is in its slot: the peer is told.
    fn send(&mut self, peer: Peer, slot: u32) {
        let Some(relay) = self.relay_of(peer) else { return };
        let Some(sent) = &mut relay.sent[slot as usize] else { return };
        sent.filled = true;
        let sent = *sent;
        relay.out.fill(sent.number, &sent.piece);
        if let Some(number) = sent.answers {
            relay.replies -= 1;
            relay.input.answer(number, 0);
        }
        self.inner.mark_due(peer);
    }

    /// A job cannot go on.
    #[cold]
    fn break_off(&mut self, peer: Peer, job: Job, code: i32) {
        let Some(relay) = self.relay_of(peer) else { return };
        relay.jobs.pop_front();
        match job.kind {
            JobKind::Reply { number, .. } => {
                relay.replies -= 1;
                relay.input.answer(number, errno(code));
                self.inner.mark_due(peer);
            }
            JobKind::Write { op, .. } | JobKind::Ask { op, .. } => {
                if let Some(op) = self.ops.get_mut(op) {
                    op.unposted = false;
                    op.error.get_or_insert(CompleteError::Failed(code));
                }
                self.settle(op);
            }
        }
    }

    /// The device has copied a piece into its slot, or says that it cannot tell.
    pub(super) fn filled(&mut self, peer: Peer, number: u64, error: Option<CompleteError>) {
        let Some(relay) = self.relay_of(peer) else { return };
        let slot = (number & (relay.sent.len() as u64 - 1)) as u32;
        let Some(sent) = relay.sent[slot as usize].filter(|sent| sent.number == number) else { return };
        if let Some(local) = sent.local {
            self.locals[local as usize].uses -= 1;
        }
        if let Some(why) = error
            && let Some(index) = sent.op
            && let Some(op) = self.ops.get_mut(index)
        {
            op.error.get_or_insert(why);
        }
        let down = self.peer(peer).is_none_or(|known| known.down);
        match down {
            // Nobody will take it out.
            true => self.slot_over(peer, slot, 0),
            // Of a piece that failed too: the slots are used in turn. Whoever reads it was told of the failure, or is by the end.
            false => self.send(peer, slot),
        }
    }

    /// A slot is free again.
    fn slot_over(&mut self, peer: Peer, slot: u32, code: u16) {
        let Some(relay) = self.relay_of(peer) else { return };
        let Some(sent) = relay.sent[slot as usize].take() else { return };
        let Some(index) = sent.op else { return };
        if let Some(op) = self.ops.get_mut(index) {
            op.parts = op.parts.saturating_sub(1);
            if code != 0 {
                op.error.get_or_insert(CompleteError::Failed(code.into()));
            }
        }
        self.settle(index);
    }

    /// Looks which of our pieces have been taken out, fills slots again, and takes pieces of the peer out. Returns whether anything moved.
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

    /// Takes the next piece of a peer in, if there is one.
    fn take_piece(&mut self, peer: Peer) -> bool {
        let Some(relay) = self.relay_of(peer) else { return false };
        let Some((number, slot, piece)) = relay.input.next() else { return false };
        let (chunk, busy) = (relay.chunk, relay.taken[slot as usize].is_some());
        let Some(piece) = piece else { return self.blame(peer, Violation::Kind) };
        if piece.len > chunk {
            return self.blame(peer, Violation::Length);
        }
        if busy {
            return self.blame(peer, Violation::Sequence);
        }
        match piece.what {
            What::Write { key, last, data } => {
                let began = *relay.write_began.get_or_insert(number);
                if last {
                    relay.write_began = None;
                }
                let taken = Taken { number, last: last.then_some((began, data)), read: None, local: None };
                match self.named(peer, key, piece.offset, piece.len.into()) {
                    Named::Outside => return self.blame(peer, Violation::Bounds),
                    Named::Nothing => self.taken_out(peer, taken, Err(libc::EFAULT)),
                    Named::At(to, local) => {
                        self.take_out(peer, slot, piece.len, to, Taken { local, ..taken });
                    }
                }
            }
            What::Read { key, want, id } => {
                if piece.len != 0 || want == 0 {
                    return self.blame(peer, Violation::Length);
                }
                if relay.replies >= relay.sent.len() {
                    return self.blame(peer, Violation::Credit);
                }
                match self.named(peer, key, piece.offset, want) {
                    Named::Outside => return self.blame(peer, Violation::Bounds),
                    Named::Nothing => self.answer(peer, number, libc::EFAULT),
                    Named::At(source, local) => {
                        let Some(relay) = self.relay_of(peer) else { return false };
                        relay.replies += 1;
                        let kind = JobKind::Reply { number, id, local };
                        relay.push(Job { kind, source, offset: 0, done: 0, len: want });
                        self.pump(peer);
                    }
                }
            }
            What::Reply { id } => {
                let life = self.peer(peer).map_or(0, |known| known.life);
                let Some(index) = self.ops.find(id) else { return self.blame(peer, Violation::Reply) };
                let Some(op) = self.ops.get_mut(index).filter(|op| op.peer == peer && op.life == life) else {
                    return self.blame(peer, Violation::Reply);
                };
                let Kind::Read { left, len, into } = &mut op.kind else {
                    return self.blame(peer, Violation::Reply);
                };
                let bytes = u64::from(piece.len);
                if bytes == 0 || bytes > *left || !within(piece.offset, bytes, *len) {
                    return self.blame(peer, Violation::Bounds);
                }
                *left -= bytes;
                let to = into.at(piece.offset);
                op.parts += 1;
                let taken = Taken { number, last: None, read: Some((index, bytes)), local: None };
                self.take_out(peer, slot, piece.len, to, taken);
            }
        }
        true
    }

    /// Moves the bytes of a slot of the peer to where they belong.
    fn take_out(&mut self, peer: Peer, slot: u32, len: u32, to: Place, taken: Taken) {
        let Some(known) = self.peers.get_mut(usize::from(peer.0)).and_then(Option::as_deref_mut) else {
            return;
        };
        let life = known.life;
        let Some(shared) = known.shared.as_mut() else { return };
        let (theirs, theirs_at) = (shared.theirs, shared.theirs_at);
        let to = match to {
            _ if len == 0 => return self.taken_out(peer, taken, Ok(())),
            Place::Host(to) => {
                // SAFETY: the target was checked against what is registered, or lent with a read; the slot is mapped and holds `len`
                // bytes. The peer may be changing them: a raw copy makes no claim that they hold still.
                unsafe { copy_bytes(theirs.bounce(slot), to, len as usize) };
                return self.taken_out(peer, taken, Ok(()));
            }
            Place::Device(to) => to,
        };
        let Some(base) = theirs_at else { return self.taken_out(peer, taken, Err(libc::ENOTSUP)) };
        // One stream for each peer: its pieces end in order, so the last of a write ends when all have.
        let stream = (peer.0 % u16::from(self.streams.count())) as u8;
        let from = base.at(theirs.bounce_at(slot));
        // SAFETY: as above, for the device, which has the slot pinned.
        match unsafe { self.sharing.device_mut().copy(stream, to, from, len.into()) } {
            Ok(()) => {
                known.pieces += 1;
                if let Some(relay) = shared.relay.as_mut() {
                    relay.taken[slot as usize] = Some(taken);
                }
                let owner = Owner::Emptying { peer, life, number: taken.number };
                self.streams.mark(self.sharing.device_mut(), stream, owner);
                if let Some(slot) = taken.local {
                    self.locals[slot as usize].uses += 1;
                }
            }
            Err(error) => self.taken_out(peer, taken, Err(super::queue::code(error))),
        }
    }

    /// The device has copied a piece out of its slot, or says that it cannot tell.
    pub(super) fn emptied(&mut self, peer: Peer, number: u64, error: Option<CompleteError>) {
        let Some(relay) = self.relay_of(peer) else { return };
        let slot = (number & (relay.taken.len() as u64 - 1)) as usize;
        let Some(taken) = relay.taken[slot].filter(|taken| taken.number == number) else { return };
        relay.taken[slot] = None;
        if let Some(local) = taken.local {
            self.locals[local as usize].uses -= 1;
        }
        let result = match error {
            None => Ok(()),
            Some(CompleteError::Failed(code) | CompleteError::Unknown(code)) => Err(code),
            Some(_) => Err(libc::EIO),
        };
        if let (Some(error), Some((index, _))) = (error, taken.read)
            && let Some(op) = self.ops.get_mut(index)
        {
            op.error.get_or_insert(error);
        }
        self.taken_out(peer, taken, result);
    }

    /// A piece of the peer is out of its slot, or never will be.
    fn taken_out(&mut self, peer: Peer, taken: Taken, result: Result<(), i32>) {
        let mut result = result;
        if let Some((index, _)) = taken.read {
            if let Some(op) = self.ops.get_mut(index) {
                op.parts = op.parts.saturating_sub(1);
                if let Err(code) = result {
                    op.error.get_or_insert(CompleteError::Failed(code));
                }
            }
            self.answer(peer, taken.number, result.err().unwrap_or(0));
            return self.settle(index);
        }
        let Some(relay) = self.relay_of(peer) else { return };
        if result.is_err() {
            relay.failed = relay.failed.max(Some(taken.number));
        }
        if let Some((began, data)) = taken.last {
            // A write of which a piece failed has not landed.
            if relay.failed.is_some_and(|failed| failed >= began) {
                result = result.and(Err(libc::EIO));
            }
            if let (Ok(()), Some(data)) = (result, data) {
                self.landed.push_back((peer, data));
            }
        }
        self.answer(peer, taken.number, result.err().unwrap_or(0));
    }

    fn answer(&mut self, peer: Peer, number: u64, code: i32) {
        if let Some(relay) = self.relay_of(peer) {
            let code = if code == 0 { 0 } else { errno(code) };
            relay.input.answer(number, code);
            self.inner.mark_due(peer);
        }
    }

    /// Memory of this process that a peer names.
    fn named(&self, peer: Peer, key: RailKey, offset: u64, len: u64) -> Named {
        if is_device(key) {
            let Some(slot) = self.local_by_key(key) else { return Named::Nothing };
            let local = &self.locals[slot as usize];
            if !within(offset, len, local.len) {
                return Named::Outside;
            }
            return match local.place(local.ptr + offset, len) {
                Some(place) => Named::At(Place::Device(place), Some(slot)),
                None => Named::Nothing,
            };
        }
        match self.inner.registered(key.key, peer) {
            Some((_, size)) if !within(offset, len, size) => Named::Outside,
            Some((ptr, _)) => Named::At(Place::Host(ptr.as_ptr().wrapping_add(offset as usize)), None),
            None => Named::Nothing,
        }
    }

    /// A peer did what no correct peer does.
    #[cold]
    fn blame(&mut self, peer: Peer, violation: Violation) -> bool {
        self.inner.quarantine(peer, PeerError::Protocol(violation));
        if let Some(known) = self.peer(peer) {
            known.down = true;
        }
        self.fallen.push(peer);
        false
    }

    /// A peer is gone: what it will not answer any more is over. What the device is copying goes on until it has ended.
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
