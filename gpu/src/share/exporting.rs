//! What the owner of memory does: registers, publishes, and takes back.

use std::time::Instant;

use fishplate_core::mem::Peer;
use fishplate_shm::extension::Line;

use super::importing::fault;

use super::{Links, Sharing, board};
use crate::error::{AllocId, ExportError};
use crate::export::{Exports, Registration};
use crate::import::{Fault, ImportError};
use crate::publish::{Binding, Found, PublishError};
use crate::revoke::RevokeError;
use crate::wire::{self, Ask};
use crate::{Device, DeviceError, DevicePtr};

/// Exports of which nothing is registered that are taken back at once, to make room.
const RECLAIMED: usize = 32;

/// What is published, and whether anything had to be said for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where the buffer is.
    pub binding: Binding,
    /// Whether the peer was told; it knew already otherwise.
    pub told: bool,
}

/// Why a peer was not told. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TellError {
    /// The version cannot be.
    Publish(PublishError),
    /// The range is not registered, or its allocation is being revoked.
    Export(ExportError),
    /// The peer cannot be told.
    Peer(ImportError),
}

impl<D: Device> Sharing<D> {
    /// Registers a range of this device's memory. One driver call or two if its allocation is
    /// exported already, of virtual memory for each physical segment of it. Memory found to have
    /// been freed and taken again is taken back from its importers, and what is outgrown; when
    /// there is no room for another export, so are some allocations of which no range is registered
    /// any more.
    pub fn register<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        ptr: DevicePtr,
        len: u64,
    ) -> Result<Registration, ExportError> {
        let mut registered = self.exports.register(&mut self.device, ptr, len);
        if let Err(ExportError::Full(_) | ExportError::Device(DeviceError::Exhausted)) = registered {
            for alloc in self.exports.idle(RECLAIMED) {
                self.revoke(links, alloc)?;
            }
            registered = self.exports.register(&mut self.device, ptr, len);
        }
        self.revoke_superseded(links);
        registered
    }

    /// Takes a registration back. Peers may still have the allocation open:
    /// [`revoke`](Sharing::revoke) it before it is freed.
    pub fn deregister(&mut self, registration: &Registration) -> bool {
        self.exports.deregister(registration)
    }

    /// Asks the driver whether the memory is still what was registered; if not it is taken back
    /// from its importers. One or two driver calls for each physical segment, for callers who do
    /// not trust whoever frees memory.
    pub fn verify<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        registration: &Registration,
    ) -> Result<(), ExportError> {
        let verified = self.exports.verify(&mut self.device, registration.alloc);
        self.revoke_superseded(links);
        verified
    }

    pub(super) fn revoke_superseded<L: Links + ?Sized>(&mut self, links: &mut L) {
        for alloc in self.exports.take_superseded() {
            self.take_back(links, alloc);
        }
    }

    /// Tells a peer where a buffer is, unless it knows. The version is the user's, or one of our
    /// own: greater than all before it. The handle of the allocation goes before the first version
    /// that lies in it, so the peer can open it without asking.
    ///
    /// # Errors
    /// See [`TellError`]. Where the link has no room for now, the peer is not told, and may ask.
    pub fn publish<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        version: Option<u64>,
        at: &Registration,
    ) -> Result<Published, TellError> {
        if !self.exports.holds(at) {
            return Err(TellError::Export(ExportError::Unknown(at.alloc)));
        }
        let gone = TellError::Peer(fault(peer, Some(at.alloc), Fault::PeerGone));
        let mut line = links.line(peer).ok_or(gone)?;
        if line.ended().is_some() {
            return Err(gone);
        }
        let (binding, new) = self.publications.publish(buffer, version, at).map_err(TellError::Publish)?;
        let told = board(&mut line).told.get(&buffer) != Some(&Some(binding));
        // Known from here on: who is not told of it may ask.
        let room = !told || line.has_room();
        if told && room {
            tell(&self.exports, &self.device, &mut line, buffer, binding);
        }
        if new {
            self.serve_queries(links, buffer);
        }
        if !room {
            return Err(TellError::Peer(fault(peer, Some(at.alloc), Fault::Again)));
        }
        Ok(Published { binding, told })
    }

    /// Takes a buffer back from all who were told of it.
    pub fn unpublish<L: Links + ?Sized>(&mut self, links: &mut L, buffer: u64) -> bool {
        for number in 0..links.bound() {
            if let Some(mut line) = links.line(Peer(number))
                && board(&mut line).told.remove(&buffer).is_some()
            {
                line.tell(wire::unpublish(buffer), None);
            }
        }
        self.publications.unpublish(buffer)
    }

    fn serve_queries<L: Links + ?Sized>(&mut self, links: &mut L, buffer: u64) {
        for number in 0..links.bound() {
            if let Some(mut line) = links.line(Peer(number))
                && board(&mut line).queries.iter().any(|(wanted, _)| *wanted == buffer)
            {
                self.answer_queries(&mut line);
            }
        }
    }

    pub(super) fn answer_queries(&mut self, line: &mut Line<'_>) {
        for (buffer, wanted) in std::mem::take(&mut board(line).queries) {
            match self.publications.look(buffer, wanted) {
                Found::Here(binding) => {
                    tell(&self.exports, &self.device, line, buffer, binding);
                }
                Found::NotYet => board(line).queries.push((buffer, wanted)),
                Found::Gone => line.tell(wire::refuse(Ask::Buffer(buffer, wanted)), None),
            }
        }
    }

    /// Begins to take an allocation back from all who may have it open. It must not be freed before
    /// [`awaited`](Sharing::awaited) names nobody any more. Beginning again what has begun changes
    /// nothing.
    pub fn revoke<L: Links + ?Sized>(&mut self, links: &mut L, alloc: AllocId) -> Result<(), ExportError> {
        if self.exports.retire(alloc)? {
            self.take_back(links, alloc);
        }
        Ok(())
    }

    fn take_back<L: Links + ?Sized>(&mut self, links: &mut L, alloc: AllocId) {
        self.publications.forget(alloc);
        let mut awaited = Vec::new();
        for number in 0..links.bound() {
            let peer = Peer(number);
            let Some(mut line) = links.line(peer) else { continue };
            for told in board(&mut line).told.values_mut() {
                *told = told.filter(|binding| binding.alloc != alloc);
            }
            if line.ended().is_none() && board(&mut line).given.contains(&alloc) {
                awaited.push((peer, line.incarnation()));
            }
        }
        let peers: Vec<Peer> = awaited.iter().map(|(peer, _)| *peer).collect();
        let sequence = self.revocations.begin(alloc, awaited);
        for peer in peers {
            if let Some(mut line) = links.line(peer) {
                line.tell(wire::revoke(sequence, alloc), None);
            }
        }
        self.settle();
    }

    /// Gives an allocation to peers again whose revocation is not over.
    pub fn call_off(&mut self, alloc: AllocId) -> Result<(), ExportError> {
        self.exports.resume(alloc)?;
        self.revocations.call_off(alloc);
        Ok(())
    }

    /// The peers that may still have an allocation open which is being revoked.
    pub fn awaited(&self, alloc: AllocId) -> impl Iterator<Item = Peer> {
        self.revocations.awaited(alloc)
    }

    /// Takes an allocation back and waits until nobody has it open: then it may be freed.
    pub fn revoke_and_wait<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        alloc: AllocId,
        deadline: Instant,
    ) -> Result<(), RevokeError> {
        self.revoke(links, alloc)?;
        loop {
            self.turn(links);
            let mut awaited = self.awaited(alloc);
            let Some(peer) = awaited.next() else { return Ok(()) };
            let peers = 1 + awaited.count();
            if !self.sleep(links, deadline) {
                return Err(RevokeError::Deadline { alloc, peer, peers });
            }
        }
    }

    pub(super) fn settle(&mut self) {
        for alloc in self.revocations.take_done() {
            self.exports.remove(alloc);
        }
    }
}

/// Gives a peer the handle of an allocation, unless it has it or may not. Whether it may.
pub(super) fn give<D: Device>(exports: &Exports, device: &D, line: &mut Line<'_>, alloc: AllocId) -> bool {
    let Some((size, handle)) = exports.handle(alloc) else { return false };
    let uuid = device.caps().uuid;
    board(line).given.insert(alloc);
    if board(line).home {
        line.tell(wire::export(alloc, size, &uuid, None), None);
    } else {
        line.tell(wire::export(alloc, size, &uuid, Some(&handle)), Some(handle));
    }
    true
}

/// Tells a peer where a buffer is, after the handle of its allocation if it was never given that.
fn tell<D: Device>(exports: &Exports, device: &D, line: &mut Line<'_>, buffer: u64, binding: Binding) {
    if !board(line).given.contains(&binding.alloc) && !give(exports, device, line, binding.alloc) {
        return;
    }
    line.tell(wire::publish(buffer, &binding), None);
    let told = board(line).told.entry(buffer).or_default();
    // An older version may have been asked for.
    if told.is_none_or(|told| told.version < binding.version) {
        *told = Some(binding);
    }
}
