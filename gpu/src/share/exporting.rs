//! The owner's side: registers, publishes and revokes memory.

use std::time::Instant;

use fishplate_core::mem::Peer;
use fishplate_shm::extension::Line;

use super::importing::fault;

use super::{Links, Sharing, record};
use crate::error::{AllocId, ExportError};
use crate::export::{Exports, Registration};
use crate::import::{Fault, ImportError};
use crate::publish::{Binding, Found, PublishError};
use crate::revoke::RevokeError;
use crate::wire::{self, Ask};
use crate::{Device, DeviceError, DevicePtr};

/// Number of exports without registrations that are revoked together to make room.
const RECLAIMED: usize = 32;

/// The result of publishing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// The version, and the buffer's location in it.
    pub binding: Binding,
    /// Whether a packet was sent. If not, the peer already knew this version.
    pub told: bool,
}

/// Why a version was not published to a peer. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TellError {
    /// The version is invalid.
    Publish(PublishError),
    /// The range is not registered, or its allocation is being revoked.
    Export(ExportError),
    /// The peer cannot be reached.
    Peer(ImportError),
}

impl<D: Device> Sharing<D> {
    /// Registers a range of this device's memory. If its allocation is exported already, this makes
    /// one or two driver calls per physical segment. Revokes superseded and outgrown exports. At
    /// the limit of exports, also revokes some exports that have no registrations.
    pub fn register<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        ptr: DevicePtr,
        len: u64,
    ) -> Result<Registration, ExportError> {
        let mut registered = self.exports.register(&mut self.device, ptr, len);
        if let Err(ExportError::Full(_) | ExportError::Device(DeviceError::Exhausted)) = registered
        {
            for alloc in self.exports.idle(RECLAIMED) {
                self.revoke(links, alloc)?;
            }
            registered = self.exports.register(&mut self.device, ptr, len);
        }
        self.revoke_superseded(links);
        registered
    }

    /// Deregisters a range. Peers may still have its allocation open, so
    /// [`revoke`](Sharing::revoke) the allocation before freeing it.
    pub fn deregister(&mut self, registration: &Registration) -> bool {
        self.exports.deregister(registration)
    }

    /// Checks with the driver that the registered memory is unchanged. If not, revokes it. Makes
    /// one or two driver calls per physical segment. For callers that do not control when memory is
    /// freed.
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

    /// Publishes a buffer's location to a peer, unless the peer already knows it. The caller may
    /// choose the version. Otherwise the version is automatic. It is greater than all versions of
    /// the buffer since the last [`unpublish`](Sharing::unpublish). Before the first version in an
    /// allocation, sends the allocation's handle, so that the peer can open it without a request.
    ///
    /// # Errors
    /// See [`TellError`]. If the link has no room, nothing is sent. The peer may then request the
    /// version.
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
        let (binding, new) =
            self.publications.publish(buffer, version, at).map_err(TellError::Publish)?;
        let told = record(&mut line).told.get(&buffer) != Some(&Some(binding));
        // The version is now published. If it is not sent, the peer may request it.
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

    /// Withdraws a buffer from all peers that know it.
    pub fn unpublish<L: Links + ?Sized>(&mut self, links: &mut L, buffer: u64) -> bool {
        for number in 0..links.bound() {
            if let Some(mut line) = links.line(Peer(number))
                && record(&mut line).told.remove(&buffer).is_some()
            {
                line.tell(wire::unpublish(buffer), None);
            }
        }
        self.publications.unpublish(buffer)
    }

    fn serve_queries<L: Links + ?Sized>(&mut self, links: &mut L, buffer: u64) {
        for number in 0..links.bound() {
            if let Some(mut line) = links.line(Peer(number))
                && record(&mut line).queries.iter().any(|(wanted, _)| *wanted == buffer)
            {
                self.answer_queries(&mut line);
            }
        }
    }

    pub(super) fn answer_queries(&mut self, line: &mut Line<'_>) {
        for (buffer, wanted) in std::mem::take(&mut record(line).queries) {
            match self.publications.look(buffer, wanted) {
                Found::Here(binding) => {
                    tell(&self.exports, &self.device, line, buffer, binding);
                }
                Found::NotYet => record(line).queries.push((buffer, wanted)),
                Found::Gone => line.tell(wire::refuse(Ask::Buffer(buffer, wanted)), None),
            }
        }
    }

    /// Starts to revoke an allocation from all peers that may have it open. Do not free the
    /// allocation before [`awaited`](Sharing::awaited) is empty. Repeated calls change nothing.
    pub fn revoke<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        alloc: AllocId,
    ) -> Result<(), ExportError> {
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
            for told in record(&mut line).told.values_mut() {
                *told = told.filter(|binding| binding.alloc != alloc);
            }
            if line.ended().is_none() && record(&mut line).given.contains(&alloc) {
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

    /// Cancels a pending revocation.
    pub fn call_off(&mut self, alloc: AllocId) -> Result<(), ExportError> {
        self.exports.resume(alloc)?;
        self.revocations.call_off(alloc);
        Ok(())
    }

    /// Returns the peers that may still have an allocation open while it is being revoked.
    pub fn awaited(&self, alloc: AllocId) -> impl Iterator<Item = Peer> {
        self.revocations.awaited(alloc)
    }

    /// Revokes an allocation and waits until no peer has it open. After success the caller may free
    /// it.
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

/// Sends a peer the handle of an allocation, unless the peer already has it. Returns whether the
/// peer may have the allocation.
pub(super) fn give<D: Device>(
    exports: &Exports,
    device: &D,
    line: &mut Line<'_>,
    alloc: AllocId,
) -> bool {
    let Some((size, handle)) = exports.handle(alloc) else { return false };
    let uuid = device.caps().uuid;
    record(line).given.insert(alloc);
    if record(line).home {
        line.tell(wire::export(alloc, size, &uuid, None), None);
    } else {
        line.tell(wire::export(alloc, size, &uuid, Some(&handle)), Some(handle));
    }
    true
}

/// Sends a peer the location of a buffer, preceded by the handle of its allocation if needed.
fn tell<D: Device>(
    exports: &Exports,
    device: &D,
    line: &mut Line<'_>,
    buffer: u64,
    binding: Binding,
) {
    if !record(line).given.contains(&binding.alloc) && !give(exports, device, line, binding.alloc) {
        return;
    }
    line.tell(wire::publish(buffer, &binding), None);
    let told = record(line).told.entry(buffer).or_default();
    // The peer may have requested an older version.
    if told.is_none_or(|told| told.version < binding.version) {
        *told = Some(binding);
    }
}
