//! Regions: registered memory of this process, and imported memory of peers. Slow paths that
//! allocate nothing; a rail may map memory. After an error nothing has changed, unless the error
//! says otherwise.

use core::ptr::NonNull;

use crate::error::{AttachError, OpError, Use};
use crate::mem::{
    LocalAddr, LocalId, Peer, PeerId, RailId, Region, RegionKind, RemoteAddr, RemoteId,
};
use crate::rail::{Local, Rail, RailKey};

use super::stream::{MESSAGES, WRITES};
use super::table::{self, Access, Handle, LocalSlot, NO_RAIL, RemoteSlot};
use super::{Engine, State};

/// Either [`Rail::import`] or [`Rail::try_import`].
pub(super) type Import<R> =
    fn(&mut R, Peer, RailKey, u64) -> Result<Option<NonNull<u8>>, AttachError>;
/// Deregisters a region on every rail, even after one of them returned `Kept`.
fn deregister_on<R: Rail, const RAILS: usize>(
    rails: &mut [R],
    keys: [RailKey; RAILS],
) -> Result<(), AttachError> {
    let each = rails.iter_mut().zip(keys).map(|(rail, key)| rail.deregister(key));
    each.fold(Ok(()), Result::and)
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Registers memory. Peers name the memory by its [handle](Self::export), and operations of
    /// this engine by the returned id. Slow path.
    ///
    /// # Errors
    /// [`AttachError::Unsupported`] in these cases:
    ///
    /// - native atomics, with [failover](Self::attach_failover) attached;
    /// - native atomics in device memory;
    /// - native atomics, if no rail executes them.
    pub fn register(&mut self, region: Region) -> Result<LocalId, AttachError> {
        table::check_region(&region)?;
        let id = table::free_local(self.state.locals, self.state.config.owner)?;
        let (on_device, atomics) =
            (matches!(region.kind(), RegionKind::Device { .. }), region.has_native_atomics());
        let (len, device) = match on_device || atomics {
            true => (0, region.len() as u64),
            false => (region.len() as u64, 0),
        };
        if atomics && (self.state.failover.is_some() || on_device) {
            return Err(AttachError::Unsupported);
        }
        let mut slot = LocalSlot { ptr: region.ptr().as_ptr(), len, device, ..LocalSlot::EMPTY };
        if atomics {
            let rail = self.rails.iter().position(|rail| !rail.caps().native_atomics.is_empty());
            slot.native = rail.ok_or(AttachError::Unsupported)? as u8;
        }
        if let RegionKind::Common { peer, .. } = region.kind() {
            slot.common = peer.0;
        }
        for i in 0..self.rails.len() {
            match self.rails[i].register(&region) {
                Ok((key, desc)) => (slot.keys[i], slot.desc[i]) = (key, desc),
                Err(error) => {
                    return Err(deregister_on(&mut self.rails[..i], slot.keys)
                        .err()
                        .unwrap_or(error));
                }
            }
        }
        slot.generation = id.generation();
        self.state.devices += (device != 0) as u32;
        self.state.locals[id.index()] = slot;
        Ok(id)
    }

    /// Deregisters memory. Later messages that name it are rejected, which fails their sender. If a
    /// get [travels in messages](Self::is_carried), only this get fails. Peers that have mapped the
    /// memory must have stopped using it. Slow path: scans all operations, receives and imports.
    ///
    /// # Errors
    /// [`AttachError::InUse`] names what still uses the memory; the region stays registered. After
    /// [`AttachError::Kept`] the region is deregistered, but its memory must never be freed.
    pub fn deregister(&mut self, region: LocalId) -> Result<(), AttachError> {
        let slot = *self.state.local_slot(region).ok_or(AttachError::UnknownRegion)?;
        while let Some(idle) =
            self.state.remotes.iter().position(|remote| remote.is_idle() && slot.holds(remote))
        {
            self.release_slot(idle);
        }
        if let Some(by) = self.use_of(region.index() as u16, &slot) {
            return Err(AttachError::InUse(by));
        }
        let (keys, device) = (slot.keys, slot.device != 0);
        self.state.devices -= device as u32;
        let deregistered = deregister_on(&mut self.rails, keys);
        self.state.locals[region.index()] =
            LocalSlot { generation: region.generation().wrapping_add(1), ..LocalSlot::EMPTY };
        deregistered
    }

    /// Writes the handle that peers import to reach a region. Returns the length of the handle, at
    /// most [`HANDLE_MAX`](super::HANDLE_MAX) bytes.
    ///
    /// # Errors
    /// [`AttachError::BufferTooShort`] if the handle does not fit; nothing was written.
    pub fn export(&self, region: LocalId, into: &mut [u8]) -> Result<usize, AttachError> {
        let slot = self.state.local_slot(region).ok_or(AttachError::UnknownRegion)?;
        let theirs = (region.index() as u16, region.generation() as u16);
        let access = match slot.native {
            NO_RAIL if slot.device != 0 => Access::Device(self.state.pieces()),
            NO_RAIL => Access::Plain,
            rail => Access::Native(rail),
        };
        Handle { theirs, len: slot.len + slot.device, access, keys: slot.keys }
            .encode(self.rails.len(), into)
    }

    fn use_of(&mut self, index: u16, slot: &LocalSlot<RAILS>) -> Option<Use> {
        let State { pending, protocol, remotes, .. } = &self.state;
        if pending.slots.iter().any(|op| op.uses_local(index)) || self.may_repost(Some(index), None)
        {
            return Some(Use::Operations);
        }
        if protocol
            .as_ref()
            .is_some_and(|protocol| protocol.requests.slots.iter().any(|r| r.uses(index)))
        {
            return Some(Use::Receives);
        }
        if remotes.iter().any(|remote| slot.holds(remote)) {
            return Some(Use::Import);
        }
        let (ptr, len) = (NonNull::new(slot.ptr)?, (slot.len + slot.device) as usize);
        let touching = self.rails.iter_mut().zip(slot.desc).position(|(rail, desc)| {
            let memory = Local { ptr, len, desc };
            rail.touches(memory)
        });
        touching.map(|rail| Use::Posts(RailId(rail as u8)))
    }

    /// Makes a peer's region reachable by its exported handle. Slow path: a rail may map memory.
    ///
    /// If no rail reaches device memory, its bytes [travel in messages](Self::is_carried). With
    /// failover they do so unless all rails reach it, because any rail may have to take over. The
    /// owner of the memory needs [`MatchConfig::pieces`](super::protocol::MatchConfig::pieces), and
    /// this engine needs matching.
    ///
    /// # Errors
    /// - [`AttachError::Full`]: the table holds only imports by the user and imports that are being
    ///   read.
    /// - [`AttachError::Unattached`]: the peer is connected, but not attached to one of its rails.
    pub fn import(&mut self, peer: PeerId, handle: &[u8]) -> Result<RemoteId, AttachError> {
        let slot = self.state.peer_mut(peer).ok_or(AttachError::UnknownPeer)?;
        slot.usable().map_err(|_| AttachError::UnknownPeer)?;
        let rails = self.state.joined_rails(peer.index);
        let handle =
            Handle::<RAILS>::decode(handle, &self.state.pairings[peer.index as usize], rails)?;
        self.import_evicting(peer, handle, R::import)
    }

    /// Imports a region. If a table is full, evicts an import that was made to read messages and
    /// that can be repeated.
    pub(super) fn import_evicting(
        &mut self,
        peer: PeerId,
        handle: Handle<RAILS>,
        import: Import<R>,
    ) -> Result<RemoteId, AttachError> {
        loop {
            match self.import_handle(peer, handle, import) {
                Err(full @ AttachError::Full(_)) => {
                    let idle = self.state.remotes.iter().position(RemoteSlot::is_idle);
                    self.release_slot(idle.ok_or(full)?);
                }
                imported => return imported,
            }
        }
    }

    fn import_handle(
        &mut self,
        peer: PeerId,
        handle: Handle<RAILS>,
        import: Import<R>,
    ) -> Result<RemoteId, AttachError> {
        let slot = self.state.peer_mut(peer).ok_or(AttachError::UnknownPeer)?;
        if !slot.state.is_up() {
            return Err(AttachError::UnknownPeer);
        }
        // Import on rails that are out of use too, because they may return.
        let (in_use, rails) = (slot.rails, self.state.joined_rails(peer.index));
        let id = table::free_remote(self.state.remotes, self.state.config.owner)?;
        let plain = handle.access == Access::Plain;
        let (len, device) = if plain { (handle.len, 0) } else { (0, handle.len) };
        let native = match handle.access {
            Access::Native(_) if self.state.failover.is_some() => {
                return Err(AttachError::Unsupported);
            }
            Access::Native(rail) => rail,
            Access::Plain | Access::Device(_) => NO_RAIL,
        };
        let pieces = if let Access::Device(pieces) = handle.access { pieces } else { 0 };
        let mut remote = RemoteSlot {
            len,
            device,
            pieces,
            on_device: matches!(handle.access, Access::Device(_)),
            taken: true,
            peer: peer.index,
            generation: id.generation(),
            theirs: handle.theirs,
            rail: in_use.trailing_zeros() as u8,
            native,
            keys: handle.keys,
            ..RemoteSlot::EMPTY
        };
        let mut unable = 0;
        let carries = pieces != 0 && self.state.can_carry(peer.index);
        let kept = self.state.kept_peer(peer.index).is_some();
        for i in (0..self.rails.len()).filter(|i| rails & (1 << i) != 0) {
            let (imported, error) =
                match import(&mut self.rails[i], peer.peer(), handle.keys[i], handle.len) {
                    Err(AttachError::Unsupported)
                        if !plain && (carries || !kept && (unable | 1 << i) != rails) =>
                    {
                        unable |= 1 << i;
                        continue;
                    }
                    // The peer chooses where the region begins, and only the offset of a word is
                    // checked for alignment.
                    Ok(Some(mapped)) if !mapped.as_ptr().addr().is_multiple_of(8) && plain => {
                        (i + 1, AttachError::Misaligned)
                    }
                    Ok(Some(mapped)) if remote.mapped.is_null() && plain => {
                        (remote.mapped, remote.rail) = (mapped.as_ptr(), i as u8);
                        continue;
                    }
                    Ok(_) => continue,
                    Err(AttachError::UnknownPeer) => (i, AttachError::Unattached(RailId(i as u8))),
                    Err(error) => (i, error),
                };
            for j in (0..imported).filter(|j| rails & !unable & (1 << j) != 0) {
                self.rails[j].release(peer.peer(), handle.keys[j]);
            }
            return Err(error);
        }
        remote.carried = unable == rails || kept && unable != 0;
        for context in 0..if pieces != 0 { self.state.config.contexts } else { 0 } {
            let stream = self.state.stream_of(context as u8, peer.index);
            // Pieces wait for the device at the target, so even rails that keep order do not order
            // them with later data.
            self.state.streams[stream as usize].holds |= WRITES | MESSAGES;
        }
        self.state.remotes[id.index()] = remote;
        Ok(id)
    }

    /// Releases an imported region. Slow path: scans all operations.
    ///
    /// # Errors
    /// [`AttachError::InUse`] while operations on the region are not fully posted.
    pub fn release(&mut self, region: RemoteId) -> Result<(), AttachError> {
        match self.state.remotes.get(region.index()) {
            Some(slot) if slot.generation == region.generation() && slot.taken => {}
            _ => return Err(AttachError::UnknownRegion),
        }
        let index = region.index() as u16;
        let uses = self.state.pending.slots.iter().any(|op| op.uses_remote(index));
        if uses || self.may_repost(None, Some(index)) {
            return Err(AttachError::InUse(Use::Operations));
        }
        self.release_slot(region.index());
        Ok(())
    }

    pub(super) fn release_slot(&mut self, index: usize) {
        let slot = self.state.remotes[index];
        let rails = self.state.joined_rails(slot.peer);
        for i in (0..self.rails.len()).filter(|i| rails & (1 << i) != 0) {
            if slot.keys[i] != RailKey::ELSEWHERE {
                self.rails[i].release(Peer(slot.peer), slot.keys[i]);
            }
        }
        self.state.remotes[index] =
            RemoteSlot { generation: slot.generation.wrapping_add(1), ..RemoteSlot::EMPTY };
    }

    /// Returns where imported memory of a peer is mapped in this process. Returns `None` if no rail
    /// maps it, or if the range does not lie in an imported region. The memory stays mapped until
    /// the region is released or its peer is removed. The peer may access the memory at any time:
    /// use only atomics and raw copies.
    #[doc(alias = "shmem_ptr")]
    pub fn remote_ptr(&self, at: RemoteAddr, len: usize) -> Option<NonNull<u8>> {
        let slot = self.state.remotes.get(at.region.index())?;
        let end = at.offset.checked_add(len as u64)?;
        let known = slot.generation == at.region.generation() && end <= slot.len;
        let start = NonNull::new(slot.mapped).filter(|_| known)?;
        NonNull::new(start.as_ptr().wrapping_add(at.offset as usize))
    }

    /// Returns whether the bytes of an imported region travel in messages through host memory. They
    /// do if no rail reaches the region, or with failover, unless all rails reach it. `false` if
    /// the region is unknown.
    pub fn is_carried(&self, region: RemoteId) -> bool {
        let slot = self.state.remotes.get(region.index());
        slot.is_some_and(|slot| {
            slot.taken && slot.generation == region.generation() && slot.carried
        })
    }

    /// Returns a pointer to `addr` in a registered region. Peers may write the memory at any time:
    /// use atomics or raw copies. With [native atomics](Region::with_native_atomics), use only
    /// loads.
    ///
    /// # Errors
    /// The region is unknown, does not hold `len` bytes there, or is device memory.
    #[inline]
    pub fn local_ptr(&self, addr: LocalAddr, len: usize) -> Result<NonNull<u8>, OpError> {
        match table::resolve_local(self.state.locals, addr, len as u64) {
            Err(OpError::NativeAtomics) => {
                table::locate(self.state.locals, addr, len as u64).map(|(place, _)| place)
            }
            resolved => resolved,
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    fn local_slot(&self, region: LocalId) -> Option<&LocalSlot<RAILS>> {
        let slot = self.locals.get(region.index())?;
        (slot.generation == region.generation() && !slot.ptr.is_null()).then_some(slot)
    }
}
