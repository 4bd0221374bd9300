//! The receiving half: checks, copies and answers the peer's pieces.

use fishplate_core::error::{CompleteError, PeerError, Violation};
use fishplate_core::mem::{Peer, copy_bytes};
use fishplate_core::rail::RailKey;
use fishplate_core::sync::host::Host;

use super::super::GpuRail;
use super::super::memory::is_device;
use super::super::queue::{Bounced, OpKind, Owner, Place, code};
use super::{Job, JobKind, Taken, errno};
use crate::Device;
use crate::relay::What;
use crate::within;

pub(super) enum Named {
    /// The memory, and its registration if the device accesses it.
    At(Place, Option<u32>),
    /// The memory is not registered, or no longer registered.
    Nothing,
    Outside,
}

impl<D: Device, H: Host> GpuRail<D, H> {
    /// Takes the next piece of a peer. Returns false if there is none, or if it is invalid.
    pub(super) fn take_piece(&mut self, peer: Peer) -> bool {
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
                let taken = Taken { number, last: last.then_some((began, data)), read: None };
                match self.named(peer, key, piece.offset, piece.len.into()) {
                    Named::Outside => return self.blame(peer, Violation::Bounds),
                    Named::Nothing => self.taken_out(peer, taken, Err(libc::EFAULT)),
                    Named::At(..) if piece.failed => self.taken_out(peer, taken, Err(libc::EIO)),
                    Named::At(to, local) => {
                        self.take_out(peer, slot, piece.len, to, taken, local);
                    }
                }
            }
            What::Read { key, want, id } => {
                if piece.len != 0 || want == 0 {
                    return self.blame(peer, Violation::Length);
                }
                if relay.replies.len() >= relay.sent.len() {
                    return self.blame(peer, Violation::Credit);
                }
                match self.named(peer, key, piece.offset, want) {
                    Named::Outside => return self.blame(peer, Violation::Bounds),
                    Named::Nothing => self.answer(peer, number, libc::EFAULT),
                    Named::At(source, _) => {
                        let kind = JobKind::Reply { id, key, from: piece.offset };
                        let Some(relay) = self.relay_of(peer) else { return false };
                        relay.replies.push_back(Job {
                            kind,
                            source,
                            offset: 0,
                            done: 0,
                            len: want,
                        });
                        self.answer(peer, number, 0);
                        self.pump(peer);
                    }
                }
            }
            What::Reply { id, last } => {
                if last {
                    let Some(asked) = relay.asked.checked_sub(1) else {
                        return self.blame(peer, Violation::Reply);
                    };
                    relay.asked = asked;
                }
                let life = self.peer(peer).map_or(0, |known| known.life);
                let Some(index) = self.ops.find(id) else {
                    if !self.ops.was(id) {
                        return self.blame(peer, Violation::Reply);
                    }
                    // The read completed or was cancelled while this piece was in flight.
                    self.answer(peer, number, 0);
                    return true;
                };
                let Some(op) =
                    self.ops.get_mut(index).filter(|op| op.peer == peer && op.life == life)
                else {
                    return self.blame(peer, Violation::Reply);
                };
                let OpKind::Read { left, len, into } = &mut op.kind else {
                    return self.blame(peer, Violation::Reply);
                };
                let bytes = u64::from(piece.len);
                if piece.failed && last && bytes == 0 {
                    op.error.get_or_insert(CompleteError::Failed(libc::EFAULT));
                    self.answer(peer, number, 0);
                    self.settle(index);
                    return true;
                }
                if bytes == 0
                    || bytes > *left
                    || last != (bytes == *left)
                    || !within(piece.offset, bytes, *len)
                {
                    return self.blame(peer, Violation::Bounds);
                }
                *left -= bytes;
                let to = into.at(piece.offset);
                op.parts += 1;
                let taken = Taken { number, last: None, read: Some((index, bytes)) };
                match piece.failed {
                    true => self.taken_out(peer, taken, Err(libc::EIO)),
                    false => self.take_out(peer, slot, piece.len, to, taken, None),
                }
            }
        }
        true
    }

    /// Copies the bytes of a peer's slot to their target. `local` is the target's registration.
    fn take_out(
        &mut self,
        peer: Peer,
        slot: u32,
        len: u32,
        to: Place,
        taken: Taken,
        local: Option<u32>,
    ) {
        let Some(known) = self.peers.get_mut(usize::from(peer.0)).and_then(Option::as_deref_mut)
        else {
            return;
        };
        let life = known.life;
        let Some(shared) = known.shared.as_mut() else { return };
        let (theirs, theirs_at) = (shared.theirs, shared.theirs_at);
        let to = match to {
            _ if len == 0 => return self.taken_out(peer, taken, Ok(())),
            Place::Host(to) => {
                // SAFETY: `named` has checked the target, or it belongs to a read in flight. The
                // slot is mapped, and `len` is at most its size. The peer may change the bytes at
                // any time, so this is a raw copy.
                unsafe { copy_bytes(theirs.bounce(slot), to, len as usize) };
                return self.taken_out(peer, taken, Ok(()));
            }
            Place::Device(to) => to,
        };
        let Some(base) = theirs_at else { return self.taken_out(peer, taken, Err(libc::ENOTSUP)) };
        // All pieces from a peer use the same stream, so their copies complete in order. So a write
        // has landed when its last piece has landed.
        let stream = (peer.0 % u16::from(self.streams.count())) as u8;
        let from = base.at(theirs.bounce_at(slot));
        // SAFETY: `named` has checked the target, or it belongs to a read in flight. The slot's
        // segment is pinned for the device, and `len` is at most the slot's size.
        match unsafe { self.sharing.driver().copy(stream, to, from, len.into()) } {
            Ok(()) => {
                known.pieces += 1;
                if let Some(relay) = shared.relay.as_mut() {
                    relay.taken[slot as usize] = Some(taken);
                }
                let (number, op) = (taken.number, taken.read.map(|(op, _)| op));
                let owner = Owner::Emptying(Bounced { peer, life, number, op, local });
                self.streams.add(self.sharing.driver(), stream, owner);
                if let Some(slot) = local {
                    self.locals[slot as usize].uses += 1;
                }
            }
            Err(error) => self.taken_out(peer, taken, Err(code(error))),
        }
    }

    /// Handles the completion of a device copy out of a slot. `error` is set if the copy's outcome
    /// is unknown.
    pub(in super::super) fn emptied(
        &mut self,
        peer: Peer,
        number: u64,
        error: Option<CompleteError>,
    ) {
        let Some(relay) = self.relay_of(peer) else { return };
        let slot = (number & (relay.taken.len() as u64 - 1)) as usize;
        let Some(taken) = relay.taken[slot].filter(|taken| taken.number == number) else { return };
        relay.taken[slot] = None;
        let result = match error {
            None => Ok(()),
            Some(CompleteError::Failed(code) | CompleteError::Unknown(code)) => Err(code),
            Some(_) => Err(libc::EIO),
        };
        if let (Some(error), Some((index, _))) = (error, taken.read)
            && let Some(op) = self.ops.get_mut(index)
            && (op.error.is_none() || matches!(error, CompleteError::Unknown(_)))
        {
            // An unknown outcome outweighs a failure: the copy may still use the memory.
            op.error = Some(error);
        }
        self.taken_out(peer, taken, result);
    }

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
            // A write has landed only if none of its pieces failed.
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

    pub(super) fn named(&self, peer: Peer, key: RailKey, offset: u64, len: u64) -> Named {
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
            Some((ptr, _)) => {
                Named::At(Place::Host(ptr.as_ptr().wrapping_add(offset as usize)), None)
            }
            None => Named::Nothing,
        }
    }

    #[cold]
    pub(super) fn blame(&mut self, peer: Peer, violation: Violation) -> bool {
        self.inner.quarantine(peer, PeerError::Protocol(violation));
        if let Some(known) = self.peer(peer) {
            known.down = true;
        }
        self.fallen.push(peer);
        false
    }
}
