//! The sending half. A slot is free after the peer has answered.

use fishplate_core::error::{CompleteError, Violation};
use fishplate_core::mem::{Peer, copy_bytes};
use fishplate_core::sync::host::Host;

use super::super::GpuRail;
use super::super::queue::{Bounced, Owner, Place, code};
use super::take::Named;
use super::{Job, JobKind, Sent};
use crate::Device;
use crate::relay::{Piece, What};

impl<D: Device, H: Host> GpuRail<D, H> {
    pub(in super::super) fn pump(&mut self, peer: Peer) {
        loop {
            let Some(known) =
                self.peers.get_mut(usize::from(peer.0)).and_then(Option::as_deref_mut)
            else {
                return;
            };
            let life = known.life;
            let Some(shared) = known.shared.as_mut() else { return };
            let (mine, mine_at) = (shared.mine, shared.mine_at);
            let Some(relay) = shared.relay.as_mut() else { return };
            let Some(job) = relay.job() else { return };
            let (number, slot) = relay.out.turn();
            if relay.sent[slot as usize].is_some() {
                return;
            }
            let left = job.len - job.done;
            let len = left.min(relay.chunk.into()) as u32;
            let last = u64::from(len) == left;
            let at = job.offset + job.done;
            // An abandoned transfer has no bytes left.
            let broken = len == 0 && job.done > 0;
            let failed = relay.spoiled[slot as usize] || broken;
            let (piece, op) = match job.kind {
                JobKind::Write { op, key, data } => {
                    let data = data.filter(|_| last);
                    (
                        Piece { what: What::Write { key, last, data }, offset: at, len, failed },
                        Some(op),
                    )
                }
                JobKind::Ask { op, key, id } => {
                    let what = What::Read { key, want: job.len, id };
                    (Piece { what, offset: job.offset, len: 0, failed: false }, Some(op))
                }
                JobKind::Reply { id, .. } => {
                    // An abandoned reply has no bytes left.
                    let failed = failed || len == 0;
                    (Piece { what: What::Reply { id, last }, offset: job.done, len, failed }, None)
                }
            };
            let (source, local) = match job.kind {
                // Looks up the region for every piece, because it may be deregistered at any time.
                JobKind::Reply { key, from, .. } if len > 0 => {
                    let Named::At(source, local) =
                        self.named(peer, key, from + job.done, len.into())
                    else {
                        self.break_off(peer, job, libc::EFAULT);
                        continue;
                    };
                    (source, local)
                }
                _ => (job.source.at(job.done), None),
            };
            let mut sent = Sent { number, piece, op, filled: false };
            match source {
                Place::Device(from) if piece.len > 0 && !piece.failed => {
                    if self.streams.room() == 0 {
                        return;
                    }
                    let Some(base) = mine_at else {
                        self.break_off(peer, job, libc::ENOTSUP);
                        continue;
                    };
                    let (stream, to) = (self.streams.idle(), base.at(mine.bounce_at(slot)));
                    // SAFETY: the source is valid until the operation completes, or `named` has
                    // just checked it. The slot is free, because `sent` has no entry for it, and
                    // its segment is pinned.
                    let queued = unsafe {
                        self.sharing.driver().copy(stream, to, from, u64::from(piece.len))
                    };
                    if let Err(error) = queued {
                        self.break_off(peer, job, code(error));
                        continue;
                    }
                    let owner = Owner::Filling(Bounced { peer, life, number, op, local });
                    self.streams.add(self.sharing.driver(), stream, owner);
                    if let Some(known) = self.peer(peer) {
                        known.pieces += 1;
                    }
                    if let Some(slot) = local {
                        self.locals[slot as usize].uses += 1;
                    }
                }
                Place::Host(from) if piece.len > 0 && !piece.failed => {
                    // SAFETY: the source is valid until the operation completes, or `named` has
                    // just checked it. The slot is free, because `sent` has no entry for it.
                    unsafe { copy_bytes(from, mine.bounce(slot), piece.len as usize) };
                    sent.filled = true;
                }
                _ => sent.filled = true,
            }
            if let Some(op) = op.and_then(|op| self.ops.get_mut(op)) {
                op.parts += u32::from(!matches!(job.kind, JobKind::Ask { .. }));
                op.unposted = !last && !matches!(job.kind, JobKind::Ask { .. });
                if piece.failed {
                    op.error.get_or_insert(CompleteError::Failed(libc::EIO));
                }
            }
            let Some(relay) = self.relay_of(peer) else { return };
            relay.out.take();
            relay.sent[slot as usize] = Some(sent);
            relay.asked += usize::from(matches!(job.kind, JobKind::Ask { .. }));
            relay.replied = matches!(job.kind, JobKind::Reply { .. });
            let queue = relay.queue(job.kind);
            if last || matches!(job.kind, JobKind::Ask { .. }) {
                queue.pop_front();
            } else if let Some(job) = queue.front_mut() {
                job.done += u64::from(piece.len);
            }
            if sent.filled {
                self.send(peer, slot);
            }
        }
    }

    /// Publishes a piece after its bytes are in the slot.
    fn send(&mut self, peer: Peer, slot: u32) {
        let Some(relay) = self.relay_of(peer) else { return };
        let Some(sent) = &mut relay.sent[slot as usize] else { return };
        sent.filled = true;
        let sent = *sent;
        relay.out.fill(sent.number, &sent.piece);
        self.inner.mark_due(peer);
    }

    /// Abandons a job. Reports the error code to the operation. For a reply, leaves one piece to
    /// send: the last piece, marked as failed.
    #[cold]
    fn break_off(&mut self, peer: Peer, job: Job, code: i32) {
        let Some(relay) = self.relay_of(peer) else { return };
        match job.kind {
            JobKind::Reply { .. } => {
                if let Some(reply) = relay.replies.front_mut() {
                    reply.len = reply.done;
                }
            }
            JobKind::Write { op: index, .. } | JobKind::Ask { op: index, .. } => {
                let begun = job.done > 0;
                match relay.jobs.front_mut() {
                    // The peer has received pieces, so it needs a last piece.
                    Some(write) if begun => write.len = write.done,
                    _ => _ = relay.jobs.pop_front(),
                }
                if let Some(op) = self.ops.get_mut(index) {
                    op.unposted = begun;
                    op.error.get_or_insert(CompleteError::Failed(code));
                }
                self.settle(index);
            }
        }
    }

    /// Handles the completion of a device copy into a slot. `error` is set if the copy's outcome is
    /// unknown.
    pub(in super::super) fn filled(
        &mut self,
        peer: Peer,
        number: u64,
        error: Option<CompleteError>,
    ) {
        let Some(relay) = self.relay_of(peer) else { return };
        let slot = (number & (relay.sent.len() as u64 - 1)) as u32;
        let Some(sent) = relay.sent[slot as usize].as_mut().filter(|sent| sent.number == number)
        else {
            return;
        };
        if error.is_some() {
            // The copy may still happen, so the peer must not read this piece, or a later piece in
            // this slot.
            sent.piece.failed = true;
            relay.spoiled[slot as usize] = true;
        }
        let sent = *sent;
        if let Some(why) = error
            && let Some(index) = sent.op
            && let Some(op) = self.ops.get_mut(index)
        {
            // An unknown outcome outweighs a failure: a copy may still use the memory.
            if op.error.is_none() || matches!(why, CompleteError::Unknown(_)) {
                op.error = Some(why);
            }
        }
        let down = self.peer(peer).is_none_or(|known| known.down);
        match down {
            true => self.slot_over(peer, slot, 0),
            // Failed pieces are sent too, because slots are used in order.
            false => self.send(peer, slot),
        }
    }

    /// Frees a slot. `code` is the peer's answer: 0, or an errno.
    pub(super) fn slot_over(&mut self, peer: Peer, slot: u32, code: u16) {
        let Some(relay) = self.relay_of(peer) else { return };
        let Some(sent) = relay.sent[slot as usize].take() else { return };
        if code != 0 && matches!(sent.piece.what, What::Read { .. }) {
            // The peer refused the read, and sends no reply.
            match relay.asked.checked_sub(1) {
                Some(asked) => relay.asked = asked,
                None => _ = self.blame(peer, Violation::Reply),
            }
        }
        let Some(index) = sent.op else { return };
        if let Some(op) = self.ops.get_mut(index) {
            op.parts = op.parts.saturating_sub(1);
            if code != 0 {
                op.error.get_or_insert(CompleteError::Failed(code.into()));
            }
        }
        self.settle(index);
    }
}
