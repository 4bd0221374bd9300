//! Registered and imported memory. All but the lookups are slow paths: they call the driver, and an
//! import may wait until its deadline.
//!
//! | bits of a key | what                                                                       |
//! |---------------|----------------------------------------------------------------------------|
//! | 60..64        | 4: device memory; others: see [`ShmRail`](fishplate_shm::ShmRail)          |
//! | 32..60        | version of the registration: keys of earlier registrations are refused     |
//! | 0..32         | id of the allocation                                                       |
//!
//! The key's base is the offset of the region in the allocation.

use std::ptr::NonNull;
use std::time::Instant;

use fishplate_core::error::AttachError;
use fishplate_core::mem::{Peer, Region, RegionKind};
use fishplate_core::rail::{Local, Rail, RailKey, Remote};
use fishplate_core::sync::host::Host;

use super::queue::{Op, OpKind};
use super::{GpuRail, Refused, Shared};
use crate::within;
use crate::{
    AllocId, Device, DeviceError, DevicePtr, ExportError, Fault, ImportError, ImportId,
    Registration, Wanted,
};

const DEVICE: u64 = 4;

const DEVICE_DESC: u64 = 1 << 63;

/// Returns whether a key of [`register`](Rail::register) names device memory.
#[inline(always)]
pub fn is_device(key: RailKey) -> bool {
    key.key >> 60 == DEVICE
}

#[inline(always)]
pub(super) fn is_host(local: &Local, remote: &Remote) -> bool {
    !is_device(remote.key) && local.desc & DEVICE_DESC == 0
}

#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Nothing,
    /// Device memory, and its host mapping if it has one.
    Device(Registration, Option<NonNull<u8>>),
    Pinned(DevicePtr),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Registered {
    pub(super) key: RailKey,
    pub(super) ptr: u64,
    pub(super) len: u64,
    pub(super) what: What,
    /// Number of registrations that share this entry.
    times: u32,
    pub(super) uses: u32,
    generation: u32,
}

// SAFETY: the addresses refer to registered memory, which is not tied to a thread.
unsafe impl Send for Registered {}

impl Registered {
    pub(super) const EMPTY: Self = Registered {
        key: RailKey { key: 0, base: 0 },
        ptr: 0,
        len: 0,
        what: What::Nothing,
        times: 0,
        uses: 0,
        generation: 0,
    };

    pub(super) fn is_free(&self) -> bool {
        matches!(self.what, What::Nothing)
    }

    pub(super) fn place(&self, addr: u64, len: u64) -> Option<DevicePtr> {
        let delta = addr.checked_sub(self.ptr).filter(|&delta| within(delta, len, self.len))?;
        match self.what {
            What::Nothing => None,
            What::Device(..) => Some(DevicePtr(addr)),
            What::Pinned(at) => Some(at.at(delta)),
        }
    }

    /// `None` unless it is device memory with a host mapping.
    pub(super) fn view(&self, addr: u64) -> Option<*mut u8> {
        match self.what {
            What::Device(_, view) => {
                view.map(|view| view.as_ptr().wrapping_add((addr - self.ptr) as usize))
            }
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Reach {
    /// The memory is open in this process.
    Open { id: ImportId, ptr: DevicePtr, view: Option<NonNull<u8>> },
    /// The memory is our own. `slot` is its registration.
    Own { slot: u32 },
    /// The memory is reached only through bounce slots.
    Relay,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Imported {
    pub(super) key: RailKey,
    pub(super) len: u64,
    pub(super) reach: Reach,
    uses: u32,
}

// SAFETY: the addresses refer to imported memory, which is not tied to a thread.
unsafe impl Send for Imported {}

impl<D: Device, H: Host> GpuRail<D, H> {
    pub(super) fn register_region(
        &mut self,
        region: &Region,
    ) -> Result<(RailKey, u64), AttachError> {
        let RegionKind::Device { ordinal } = region.kind() else {
            return self.register_host(region);
        };
        let (ptr, len) = (DevicePtr(region.ptr().as_ptr() as u64), region.len() as u64);
        if len == 0 || ptr.0.checked_add(len).is_none() {
            return Err(AttachError::BadRange);
        }
        if ordinal != self.device.ordinal {
            self.why = Some(Refused::Export(DeviceError::NoDevice(self.device.ordinal + 1).into()));
            return Err(AttachError::Unsupported);
        }
        let free = self.free_local()?;
        let registered = self.sharing.register(&mut self.inner, ptr, len);
        let registration = registered.map_err(|error| self.export_refused(error))?;
        let alloc = registration.alloc.key();
        if alloc > u64::from(u32::MAX) {
            self.sharing.deregister(&registration);
            return Err(AttachError::Full("gpu: allocation ids; restart the process"));
        }
        let version = registration.version & ((1 << 28) - 1);
        let key = RailKey { key: DEVICE << 60 | version << 32 | alloc, base: registration.offset };
        // A repeated registration of the same range shares the entry.
        if let Some(slot) =
            self.locals.iter().position(|known| !known.is_free() && known.key == key)
        {
            self.locals[slot].times += 1;
            return Ok((key, self.desc(slot)));
        }
        let view = self.sharing.device().host_view(ptr, len);
        self.enter_local(free, key, ptr.0, len, What::Device(registration, view));
        for peer in 0..self.peers.len() as u16 {
            self.publish(Peer(peer), free);
        }
        Ok((key, self.desc(free)))
    }

    fn register_host(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let (key, _) = self.inner.register(region)?;
        let Some(slot) =
            self.free_local().ok().filter(|_| self.config.pin_regions && self.lost.is_none())
        else {
            return Ok((key, 0));
        };
        // SAFETY: the caller keeps registered memory mapped until it is deregistered, which unpins
        // it.
        match unsafe { self.sharing.driver().pin(region.ptr(), region.len()) } {
            Ok(at) => {
                let (ptr, len) = (region.ptr().as_ptr() as u64, region.len() as u64);
                self.enter_local(slot, key, ptr, len, What::Pinned(at));
                Ok((key, self.desc(slot)))
            }
            // The memory is already pinned or cannot be pinned, so its transfers use bounce slots.
            Err(_) => Ok((key, 0)),
        }
    }

    fn free_local(&self) -> Result<usize, AttachError> {
        let free = self.locals.iter().position(|slot| slot.is_free() && slot.uses == 0);
        free.ok_or(AttachError::Full("GpuConfig::max_regions"))
    }

    fn enter_local(&mut self, slot: usize, key: RailKey, ptr: u64, len: u64, what: What) {
        let generation = self.locals[slot].generation;
        self.locals[slot] = Registered { key, ptr, len, what, times: 1, uses: 0, generation };
    }

    fn desc(&self, slot: usize) -> u64 {
        let local = &self.locals[slot];
        let device = if matches!(local.what, What::Device(..)) { DEVICE_DESC } else { 0 };
        device | u64::from(local.generation & 0x7fff_ffff) << 32 | (slot as u64 + 1)
    }

    #[inline(always)]
    pub(super) fn local_of(&self, desc: u64) -> Option<u32> {
        let slot = (desc as u32).wrapping_sub(1);
        let local = self.locals.get(slot as usize)?;
        (u64::from(local.generation & 0x7fff_ffff) == desc >> 32 & 0x7fff_ffff && !local.is_free())
            .then_some(slot)
    }

    pub(super) fn local_by_key(&self, key: RailKey) -> Option<u32> {
        self.locals
            .iter()
            .position(|local| !local.is_free() && local.key == key)
            .map(|slot| slot as u32)
    }

    pub(super) fn publish_to(&mut self, peer: Peer) {
        for slot in 0..self.locals.len() {
            self.publish(peer, slot);
        }
    }

    /// Sends a peer the handle of a region, so that the peer need not request it.
    fn publish(&mut self, peer: Peer, slot: usize) {
        let Registered { key, what: What::Device(registration, _), .. } = self.locals[slot] else {
            return;
        };
        if self.peers[usize::from(peer.0)].as_ref().is_some_and(|peer| !peer.own && peer.device) {
            // If this fails, the peer requests the handle when needed.
            let _ = self.sharing.publish(&mut self.inner, peer, key.key, None, &registration);
        }
    }

    pub(super) fn deregister_key(&mut self, key: RailKey) -> Result<(), AttachError> {
        if !is_device(key) {
            self.inner.deregister(key)?;
        }
        let Some(slot) = self.local_by_key(key) else { return Ok(()) };
        let slot = slot as usize;
        if let What::Device(registration, _) = self.locals[slot].what {
            self.sharing.deregister(&registration);
        }
        self.locals[slot].times -= 1;
        if self.locals[slot].times > 0 {
            return Ok(());
        }
        for peer in self.peers.iter_mut().flatten().filter(|peer| peer.own) {
            peer.imports.retain(|import| import.key != key);
        }
        if is_device(key) {
            self.sharing.unpublish(&mut self.inner, key.key);
        }
        let deadline = Instant::now() + self.config.timeout;
        while self.locals[slot].uses > 0 && Instant::now() < deadline && self.step_device() {}
        // If the device may still access the region, its memory must stay valid.
        self.stage.look(self.sharing.driver());
        let (ptr, len) = (self.locals[slot].ptr, self.locals[slot].len as usize);
        let used = self.locals[slot].uses > 0 || self.is_unsure() || self.is_copying(ptr, len);
        match self.unpin_local(slot) {
            Ok(()) if used => Err(AttachError::Kept(libc::EBUSY)),
            Ok(()) => Ok(()),
            Err(_) => Err(AttachError::Kept(libc::EIO)),
        }
    }

    pub(super) fn touches_memory(&mut self, memory: Local) -> bool {
        self.stage.look(self.sharing.driver());
        let copying = self.is_copying(memory.ptr.as_ptr() as u64, memory.len);
        let unsure = self.is_unsure();
        let used = |local: &Registered| {
            let ptr = std::ptr::without_provenance(local.ptr as usize);
            let used = local.uses > 0 || unsure && !local.is_free();
            used && memory.overlaps(ptr, local.len as usize)
        };
        // Finds operations without a count in `uses` or in an import. They use unpinned host
        // memory, or remote memory of this process.
        let uncounted = |op: &Op| match op.kind {
            OpKind::Direct => op.import.is_none(),
            _ => op.local.is_none() && memory.desc & DEVICE_DESC == 0,
        };
        copying
            || self.inner.touches(memory)
            || self.locals.iter().any(used)
            || self.ops.iter().any(uncounted)
    }

    /// Removes a region. Memory that the device may still access stays pinned.
    pub(super) fn unpin_local(&mut self, slot: usize) -> Result<(), DeviceError> {
        let unsure = self.is_unsure();
        let local = &mut self.locals[slot];
        let mut unpinned = Ok(());
        if let What::Pinned(_) = local.what
            && local.uses == 0
            && !unsure
            && let Some(ptr) = NonNull::new(local.ptr as *mut u8)
        {
            // SAFETY: `uses` is 0 and no outcome is unknown, so no work of the device accesses the
            // memory.
            unpinned = unsafe { self.sharing.driver().unpin(ptr) };
        }
        let local = &mut self.locals[slot];
        local.what = What::Nothing;
        local.generation = local.generation.wrapping_add(1);
        unpinned
    }

    /// Without a deadline it does not wait for the peer's handle.
    pub(super) fn import_device(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
        deadline: Option<Instant>,
    ) -> Result<(), AttachError> {
        let alloc =
            AllocId::from_key(key.key & u64::from(u32::MAX)).ok_or(AttachError::BadHandle)?;
        if len == 0 || key.base.checked_add(len).is_none() {
            return Err(AttachError::BadRange);
        }
        let most = usize::from(self.config.max_regions);
        let known = self.peer(peer).ok_or(AttachError::UnknownPeer)?;
        if known.down {
            return Err(AttachError::UnknownPeer);
        }
        if !known.device {
            return Err(AttachError::Unsupported);
        }
        if let Some(import) = known.imports.iter_mut().find(|import| import.key == key) {
            if import.len != len {
                return Err(AttachError::BadHandle);
            }
            import.uses += 1;
            return Ok(());
        }
        if known.imports.len() >= most {
            return Err(AttachError::Full("GpuConfig::max_regions, imports of one peer"));
        }
        let own = known.own;
        let relays = known.shared.as_ref().is_some_and(|shared| shared.relay.is_some());
        let reach = if own {
            let slot = self.local_by_key(key).ok_or(AttachError::UnknownRegion)?;
            if len > self.locals[slot as usize].len {
                return Err(AttachError::BadRange);
            }
            Reach::Own { slot }
        } else if self.config.force_relay && relays {
            Reach::Relay
        } else {
            // The peer has sent the offset and length of the region under this key. The import
            // covers only that part of the allocation.
            let (links, wanted) = (&mut self.inner, Wanted::Latest);
            let found = match deadline {
                Some(deadline) => {
                    self.sharing.prefetch(links, peer, key.key, wanted, deadline).map(Some)
                }
                None => self.sharing.try_prefetch(links, peer, key.key, wanted),
            };
            let late = ImportError { peer, alloc: Some(alloc), why: Fault::Deadline };
            match found.and_then(|found| found.ok_or(late)) {
                Ok((token, imported)) => {
                    let known = token.binding();
                    if (known.alloc, known.offset) != (alloc, key.base) || len > known.len {
                        self.sharing.release(imported.id);
                        let range = Fault::OutOfBounds { offset: key.base, len, size: known.len };
                        let error = ImportError { peer, alloc: Some(alloc), why: range };
                        return Err(self.import_refused(error));
                    }
                    let view = self.sharing.device().host_view(imported.ptr, len);
                    Reach::Open { id: imported.id, ptr: imported.ptr, view }
                }
                Err(ImportError { why: Fault::Device(DeviceError::NoPeerAccess), .. })
                    if relays =>
                {
                    Reach::Relay
                }
                Err(error) => return Err(self.import_refused(error)),
            }
        };
        if let Some(known) = self.peer(peer) {
            known.imports.push(Imported { key, len, reach, uses: 1 });
        }
        Ok(())
    }

    pub(super) fn release_device(&mut self, peer: Peer, key: RailKey) {
        let Some(known) = self.peer(peer) else { return };
        let Some(place) = known.imports.iter().position(|import| import.key == key) else { return };
        known.imports[place].uses -= 1;
        if known.imports[place].uses > 0 {
            return;
        }
        let import = known.imports.swap_remove(place);
        if let Reach::Open { id, .. } = import.reach {
            self.sharing.release(id);
        }
    }

    pub(super) fn registered(&self, at: DevicePtr, len: usize) -> Option<Local> {
        let holds = |known: &Registered| {
            matches!(known.what, What::Device(..)) && known.place(at.0, len as u64).is_some()
        };
        let slot = self.locals.iter().position(holds)?;
        Some(Local { ptr: NonNull::new(at.0 as *mut u8)?, len, desc: self.desc(slot) })
    }

    fn export_refused(&mut self, error: ExportError) -> AttachError {
        self.why = Some(Refused::Export(error));
        match error {
            ExportError::BadRange { .. } => AttachError::BadRange,
            ExportError::Full(_) => AttachError::Full("gpu: exports; revoke an allocation"),
            ExportError::Segments { .. } => {
                AttachError::Full("gpu: segments of one region; register it in parts")
            }
            ExportError::Device(
                DeviceError::NotExportable(_)
                | DeviceError::NotDeviceMemory
                | DeviceError::OtherDevice { .. },
            ) => AttachError::Unsupported,
            ExportError::Device(error) => AttachError::System(super::queue::code(error)),
            ExportError::Revoking(_) | ExportError::Unknown(_) => AttachError::UnknownRegion,
        }
    }

    fn import_refused(&mut self, error: ImportError) -> AttachError {
        self.why = Some(Refused::Import(error));
        match error.why {
            Fault::PeerGone => AttachError::UnknownPeer,
            Fault::Deadline => AttachError::Unheard,
            Fault::NotExported
            | Fault::Revoked
            | Fault::Incarnation
            | Fault::Gone
            | Fault::Stale => AttachError::UnknownRegion,
            Fault::OutOfBounds { .. } => AttachError::BadRange,
            Fault::Full | Fault::Again | Fault::Busy => AttachError::Full("GpuConfig::imports"),
            Fault::Size { .. }
            | Fault::Device(DeviceError::BadHandle | DeviceError::SameProcess) => {
                AttachError::BadHandle
            }
            Fault::Device(DeviceError::NoPeerAccess) => AttachError::Unsupported,
            Fault::Device(error) => AttachError::System(super::queue::code(error)),
        }
    }
}

impl Shared {
    pub(super) fn is_pinned(&self) -> bool {
        self.mine_at.is_some() && self.theirs_at.is_some()
    }
}
