//! Accepts transfers, and selects the path of each. A rejected transfer changes nothing. Nothing
//! here blocks or allocates. Calls the driver only to queue copies, one mark per used stream, and
//! the word that reports a write.

use fishplate_core::error::{PeerError, PostError, Violation};
use fishplate_core::mem::{Peer, copy_to_window};
use fishplate_core::rail::{Local, Posted, Remote};
use fishplate_core::sync::host::Host;

use super::GpuRail;
use super::Way;
use super::bounce::{Job, JobKind};
use super::memory::{Reach, is_device};
use super::post_error;
use super::queue::{Op, OpKind, Owner, Place, code};
use super::wait_object::Ends;
use crate::done::{Status, word};
use crate::within;
use crate::{Device, DevicePtr, ImportId};
use fishplate_core::error::CompleteError;

#[derive(Clone, Copy)]
enum Far {
    /// Device address, host address if it has one, and the import that keeps the memory open.
    Near(DevicePtr, Option<*mut u8>, Option<ImportId>),
    Relay,
}

#[derive(Clone, Copy)]
struct Transfer {
    peer: Peer,
    way: Way,
    len: u64,
    data: Option<u32>,
    cx: u64,
    local: Option<u32>,
}

impl<D: Device, H: Host> GpuRail<D, H> {
    /// Starts a transfer with at least one end in device memory.
    ///
    /// # Safety
    /// The contract of `Rail::post_write` or `Rail::post_read` applies, according to `way`.
    pub(super) unsafe fn post(
        &mut self,
        peer: Peer,
        way: Way,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let known = self.peers.get(usize::from(peer.0)).and_then(Option::as_deref);
        if known.is_none_or(|known| known.down) || !self.inner.is_up(peer) {
            return Err(PostError::PeerDown);
        }
        let max = self.caps.max_rma;
        if local.len > max {
            return Err(PostError::TooLong { len: local.len, max });
        }
        let len = local.len as u64;
        let far = self.far(peer, remote, len)?;
        let (addr, slot) = (local.ptr.as_ptr(), self.local_of(local.desc));
        let (near, view) = match slot.map(|slot| &self.locals[slot as usize]) {
            Some(known) => {
                let place = known.place(addr as u64, len).ok_or(PostError::BadKey)?;
                let view =
                    if is_host_desc(local.desc) { Some(addr) } else { known.view(addr as u64) };
                (Place::Device(place), view)
            }
            // The descriptor belongs to a deregistered device region, so its address is invalid.
            None if !is_host_desc(local.desc) => return Err(PostError::BadKey),
            None => (Place::Host(addr), Some(addr)),
        };
        let transfer = Transfer { peer, way, len, data, cx, local: slot };
        match (far, near, view) {
            (Far::Near(_, Some(there), import), _, Some(here))
                if len <= self.config.mapped_store || len == 0 =>
            {
                // SAFETY: `far` has checked the remote range against the import, and the processor
                // has it mapped. `place` has checked the local range, or the caller guarantees it.
                unsafe { self.store(&transfer, here, there, import) }
            }
            (Far::Near(ptr, _, import), Place::Device(here), _) if len > 0 => {
                // SAFETY: `far` and `place` have checked both ranges, and the device can access
                // them. The caller keeps the local range valid until the operation completes.
                unsafe { self.queue(&transfer, here, ptr, import) }
            }
            (Far::Near(..), Place::Device(_), _) => self.tell_only(&transfer),
            _ => self.relay(&transfer, near, remote),
        }
    }

    #[inline]
    fn far(&mut self, peer: Peer, remote: Remote, len: u64) -> Result<Far, PostError> {
        let locals = &self.locals;
        let known = self.peers.get_mut(usize::from(peer.0)).and_then(Option::as_deref_mut);
        let known = known.ok_or(PostError::PeerDown)?;
        if !is_device(remote.key) {
            if !known.own {
                return Ok(Far::Relay);
            }
            // This is our own host memory, which must be pinned so that the device can access it.
            let slot = self.local_by_key(remote.key).ok_or(PostError::Unsupported)?;
            let local = &self.locals[slot as usize];
            let at = local.ptr.checked_add(remote.offset).ok_or(PostError::BadKey)?;
            let place = local.place(at, len).ok_or(PostError::BadKey)?;
            return Ok(Far::Near(place, Some(at as *mut u8), None));
        }
        let hinted = known.imports.get(known.hint).is_some_and(|import| import.key == remote.key);
        if !hinted {
            let found = known.imports.iter().position(|import| import.key == remote.key);
            known.hint = found.ok_or(PostError::BadKey)?;
        }
        let import = known.imports.get(known.hint).ok_or(PostError::BadKey)?;
        if !within(remote.offset, len, import.len) {
            return Err(PostError::BadKey);
        }
        Ok(match import.reach {
            Reach::Open { id, ptr, view } => {
                let view = view.map(|view| view.as_ptr().wrapping_add(remote.offset as usize));
                Far::Near(ptr.at(remote.offset), view, Some(id))
            }
            Reach::Own { slot } => {
                let local = locals.get(slot as usize).ok_or(PostError::BadKey)?;
                let at = local.ptr + remote.offset;
                let place = local.place(at, len).ok_or(PostError::BadKey)?;
                Far::Near(place, local.view(at), None)
            }
            Reach::Relay => Far::Relay,
        })
    }

    /// Returns the ticket if the report is a done word.
    #[inline]
    fn can_tell(&mut self, peer: Peer) -> Result<Option<u64>, PostError> {
        let known = self.peers.get_mut(usize::from(peer.0)).and_then(Option::as_deref_mut);
        let shared = known.and_then(|known| known.shared.as_mut());
        let Some((sender, _)) = shared.and_then(|shared| shared.done.as_mut()) else {
            return self.inner.can_land(peer).map(|()| None);
        };
        match sender.reserve() {
            Ok(Some(ticket)) => Ok(Some(ticket)),
            Ok(None) => Err(PostError::Again),
            Err(_) => {
                self.inner.quarantine(peer, PeerError::Protocol(Violation::Counter));
                Err(PostError::PeerDown)
            }
        }
    }

    fn take_ticket(&mut self, peer: Peer) {
        if let Some((sender, _)) = self.shared(peer).and_then(|shared| shared.done.as_mut()) {
            sender.take();
        }
    }

    /// Reports a landed write to its target. `can_tell` has reserved the done word or record.
    fn tell_at_once(
        &mut self,
        peer: Peer,
        ticket: Option<u64>,
        data: u32,
    ) -> Result<(), PostError> {
        match ticket {
            Some(ticket) => {
                self.take_ticket(peer);
                if let Some((sender, _)) = self.shared(peer).and_then(|shared| shared.done.as_mut())
                {
                    sender.store(ticket, Status::Landed, data);
                }
                self.inner.mark_due(peer);
                self.stats.told.0 += 1;
            }
            None => {
                self.inner.land(peer, data)?;
                self.stats.told.1 += 1;
            }
        }
        Ok(())
    }

    #[cold]
    fn tell_only(&mut self, transfer: &Transfer) -> Result<Posted, PostError> {
        if let Some(data) = transfer.data {
            let ticket = self.can_tell(transfer.peer)?;
            self.tell_at_once(transfer.peer, ticket, data)?;
        }
        Ok(Posted::Done)
    }

    /// Copies a transfer with the processor.
    ///
    /// # Safety
    /// While `import` is open, `len` bytes are valid at both addresses, for reads and writes
    /// according to `way`.
    unsafe fn store(
        &mut self,
        transfer: &Transfer,
        here: *mut u8,
        there: *mut u8,
        import: Option<ImportId>,
    ) -> Result<Posted, PostError> {
        let ticket = match transfer.data {
            Some(_) => Some(self.can_tell(transfer.peer)?),
            None => None,
        };
        let (from, to) = match transfer.way {
            Way::Put => (here, there),
            Way::Get => (there, here),
        };
        // Only this thread closes imports, so checking once before the copy is enough.
        if import.is_some_and(|id| !self.sharing.imports().is_open(id)) {
            return Err(self.is_closed(transfer.peer));
        }
        // SAFETY: the caller guarantees that both ranges are valid, and the import is open. The
        // ranges may overlap if a rail is its own peer, which `copy_to_window` permits.
        unsafe { copy_to_window(from, to, transfer.len as usize) };
        self.stats.stored += 1;
        if let (Some(ticket), Some(data)) = (ticket, transfer.data) {
            self.tell_at_once(transfer.peer, ticket, data)?;
        }
        Ok(Posted::Done)
    }

    /// Queues a transfer on the device.
    ///
    /// # Safety
    /// `len` bytes are valid at both addresses until the operation completes, for reads and writes
    /// according to `way`.
    unsafe fn queue(
        &mut self,
        transfer: &Transfer,
        here: DevicePtr,
        there: DevicePtr,
        import: Option<ImportId>,
    ) -> Result<Posted, PostError> {
        let Transfer { peer, way, len, data, cx, local } = *transfer;
        if let Some(code) = self.lost {
            return Err(PostError::Provider(code));
        }
        let pieces = len.div_ceil(self.config.chunk);
        let spread = pieces.min(u64::from(self.streams.count())) as u8;
        if !self.ops.has_room() || self.streams.room() < u32::from(spread) || self.is_owed() {
            return Err(PostError::Again);
        }
        let ticket = match data {
            Some(_) => self.can_tell(peer)?,
            None => None,
        };
        if import.is_some_and(|id| self.sharing.imports_mut().begin(id).is_err()) {
            return Err(self.is_closed(peer));
        }
        let (to, from) = match way {
            Way::Put => (there, here),
            Way::Get => (here, there),
        };
        let first = self.streams.idle();
        let (mut done, mut used, mut error) = (0, 0u8, None);
        while done < len {
            let piece = self.config.chunk.min(len - done);
            let turn = (done / self.config.chunk % u64::from(spread)) as u8;
            let stream = (first + turn) % self.streams.count();
            // SAFETY: the caller guarantees that both ranges are valid, and this piece lies inside
            // them.
            match unsafe { self.sharing.driver().copy(stream, to.at(done), from.at(done), piece) } {
                Ok(()) => used = used.max(turn + 1),
                Err(refused) if done == 0 => {
                    // Nothing was queued, so the transfer ends here.
                    if let Some(id) = import {
                        self.sharing.imports_mut().end(id);
                    }
                    return Err(post_error(refused));
                }
                Err(refused) => {
                    error = Some(CompleteError::Failed(code(refused)));
                    break;
                }
            }
            done += piece;
        }
        if ticket.is_some() {
            self.take_ticket(peer);
        }
        let word_queued = match (ticket, data, error) {
            (Some(ticket), Some(data), None) if used == 1 => {
                self.queue_word(peer, first, ticket, data)
            }
            _ => false,
        };
        if let Some(slot) = local {
            self.locals[slot as usize].uses += 1;
        }
        let life = self.peer(peer).map_or(0, |peer| peer.life);
        let op = Op {
            cx,
            peer,
            life,
            kind: OpKind::Direct,
            import,
            local,
            parts: used.into(),
            unposted: false,
            error,
            data,
            ticket,
            word_queued,
            reported: false,
        };
        let Some(index) = self.begin(op) else { return Err(PostError::Again) };
        for turn in 0..used {
            let stream = (first + turn) % self.streams.count();
            self.streams.add(self.sharing.driver(), stream, Owner::Op(index));
        }
        self.stats.direct += 1;
        Ok(Posted::Pending)
    }

    /// Returns why a peer's memory is no longer open: the peer failed, or revoked the memory.
    #[cold]
    fn is_closed(&mut self, peer: Peer) -> PostError {
        match self.inner.line(peer).is_none_or(|line| line.ended().is_some()) {
            true => PostError::PeerDown,
            false => PostError::BadKey,
        }
    }

    /// Queues the store of a write's done word behind the write's only copy, if the device supports
    /// that. Returns whether the store was queued.
    fn queue_word(&mut self, peer: Peer, stream: u8, ticket: u64, data: u32) -> bool {
        if !self.device.write_word {
            return false;
        }
        let known = self.peers.get(usize::from(peer.0)).and_then(Option::as_deref);
        let Some(shared) = known.and_then(|known| known.shared.as_ref()) else { return false };
        let (Some(at), Some((sender, _))) = (shared.mine_at, shared.done.as_ref()) else {
            return false;
        };
        let place = at.at(shared.mine.words_at() + sender.offset(ticket));
        let value = word(ticket, Status::Landed, data);
        // SAFETY: the word is inside our segment and aligned to 8. The segment stays pinned until
        // the device has finished.
        unsafe { self.sharing.driver().write_word(stream, place, value) }.is_ok()
    }

    fn relay(
        &mut self,
        transfer: &Transfer,
        near: Place,
        remote: Remote,
    ) -> Result<Posted, PostError> {
        let Transfer { peer, way, len, data, cx, local } = *transfer;
        if let (Some(code), Place::Device(_)) = (self.lost, near) {
            return Err(PostError::Provider(code));
        }
        if len == 0 && way == Way::Get {
            return Ok(Posted::Done);
        }
        let full = !self.ops.has_room() || self.is_owed();
        let shared = self.shared(peer).ok_or(PostError::Unsupported)?;
        let pinned = shared.is_pinned();
        let relay = shared.relay.as_mut().ok_or(PostError::Unsupported)?;
        if matches!(near, Place::Device(_)) && !pinned {
            return Err(PostError::Unsupported);
        }
        if full || !relay.has_room() {
            return Err(PostError::Again);
        }
        let life = self.peer(peer).map_or(0, |peer| peer.life);
        let (kind, parts) = match way {
            Way::Put => (OpKind::Written, 0),
            Way::Get => (OpKind::Read { left: len, len, into: near }, 1),
        };
        let op = Op {
            cx,
            peer,
            life,
            kind,
            import: None,
            local,
            parts,
            unposted: true,
            error: None,
            data: None,
            ticket: None,
            word_queued: false,
            reported: false,
        };
        let Some(index) = self.begin(op) else { return Err(PostError::Again) };
        let id = self.ops.id(index);
        if let Some(slot) = local {
            self.locals[slot as usize].uses += 1;
        }
        let kind = match way {
            Way::Put => JobKind::Write { op: index, key: remote.key, data },
            Way::Get => JobKind::Ask { op: index, key: remote.key, id },
        };
        if let Some(relay) = self.shared(peer).and_then(|shared| shared.relay.as_mut()) {
            relay.push(Job { kind, source: near, offset: remote.offset, done: 0, len });
        }
        self.stats.relayed += 1;
        self.pump(peer);
        Ok(Posted::Pending)
    }

    fn begin(&mut self, op: Op) -> Option<u32> {
        // The last poll before a sleep makes copies ring. A copy that begins after that poll does
        // not ring, so that sleep must be a nap.
        self.pace.set_ends(Ends::Some);
        self.ops.insert(op)
    }

    /// Returns whether the queue of completions is full. If so, new transfers are refused.
    fn is_owed(&self) -> bool {
        self.ended.len() >= usize::from(self.config.ops)
    }
}

#[inline(always)]
fn is_host_desc(desc: u64) -> bool {
    desc >> 63 == 0
}
