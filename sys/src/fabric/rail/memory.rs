//! The memory of a rail: registers regions with the provider, and records the regions of peers that
//! posts are checked against. Slow paths.

use alloc::sync::Arc;
use core::ptr::NonNull;

use fishplate_core::error::AttachError;
use fishplate_core::mem::{Peer, Region, RegionKind};
use fishplate_core::rail::RailKey;

use super::FabricRail;
use crate::fabric::domain::Domain;
use crate::fabric::error::{CallError, Code};
use crate::fabric::mr::MemoryRegion;
use crate::fabric::raw::*;

pub(super) struct Registered {
    pub(super) key: u64,
    pub(super) ptr: NonNull<u8>,
    pub(super) len: usize,
    pub(super) ordinal: Option<u32>,
    pub(super) memory: MemoryRegion,
}

impl FabricRail {
    pub(super) fn add_region(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let (ptr, len) = (region.ptr(), region.len());
        if len == 0 || (ptr.as_ptr() as usize).checked_add(len).is_none() {
            return Err(AttachError::BadRange);
        }
        let ordinal = match region.kind() {
            RegionKind::Private | RegionKind::Shared { .. } | RegionKind::Common { .. } => None,
            RegionKind::Device { ordinal } => Some(ordinal),
            _ => return Err(AttachError::Unsupported),
        };
        if self.regions.len() == self.config.max_regions as usize {
            return Err(AttachError::Full("FabricConfig::max_regions"));
        }
        let system = |error: CallError| AttachError::System(error.code.0);
        let (domain, key) = (Arc::clone(&self.domain), self.fresh_key());
        let mut memory = self.register_in(&domain, (ptr, len), ordinal, key)?;
        let mode = self.offer.info.domain().mr_mode;
        if mode & FI_MR_ENDPOINT != 0 {
            // SAFETY: `FabricRail::drop` drops the registrations before the endpoint.
            unsafe { memory.bind(&self.endpoint) }.map_err(system)?;
        }
        let base = if mode & FI_MR_VIRT_ADDR != 0 { ptr.as_ptr() as u64 } else { 0 };
        let key = memory.key();
        // The rail may replace its domain, which would invalidate the descriptor. The affected
        // provider needs none.
        let desc = if self.frees_reads_twice { 0 } else { memory.desc() as u64 };
        let start = ptr.as_ptr().addr();
        if let Some(reached) = self.device.as_mut().filter(|_| ordinal.is_some()) {
            reached.add(key, start..start + len);
        }
        self.regions.push(Registered { key, ptr, len, ordinal, memory });
        Ok((RailKey { key, base }, desc))
    }

    pub(super) fn register_in(
        &mut self,
        domain: &Arc<Domain>,
        (ptr, len): (NonNull<u8>, usize),
        ordinal: Option<u32>,
        key: u64,
    ) -> Result<MemoryRegion, AttachError> {
        let access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        match ordinal {
            Some(ordinal) => self.register_device(domain, (ptr, len), ordinal, access, key),
            // SAFETY: the creator of a `Region` guarantees that its memory stays valid while
            // registered and may be written at any time.
            None => unsafe { MemoryRegion::register(domain, ptr, len, access, key) }
                .map_err(|error| AttachError::System(error.code.0)),
        }
    }

    pub(super) fn remove_region(&mut self, key: RailKey) -> Result<(), AttachError> {
        let Some(at) = self.regions.iter().position(|region| region.key == key.key) else {
            return Ok(());
        };
        let copying = self.device.as_mut().is_some_and(|reached| reached.remove(key.key));
        self.regions.swap_remove(at).memory.close().map_err(|(memory, error)| {
            self.keep_memory(memory, error.code);
            AttachError::Kept(error.code.0)
        })?;
        if copying { Err(AttachError::Kept(libc::EBUSY)) } else { Ok(()) }
    }

    /// Keeps a registration that the provider did not close.
    pub(super) fn keep_memory(&mut self, memory: MemoryRegion, code: Code) {
        self.stats.kept += 1;
        self.note_error(code);
        self.kept.push(memory);
    }

    pub(super) fn fresh_key(&mut self) -> u64 {
        let key = self.next_key;
        self.next_key = self.next_key.wrapping_add(1);
        match self.key_bits {
            64.. => key,
            bits => key & ((1 << bits) - 1),
        }
    }

    pub(super) fn add_import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<(), AttachError> {
        if !self.peers.slots.get(peer.0 as usize).is_some_and(|slot| slot.attached) {
            return Err(AttachError::UnknownPeer);
        }
        if key.key == FI_KEY_NOTAVAIL
            || len > isize::MAX as u64
            || key.base.checked_add(len).is_none()
        {
            return Err(AttachError::BadHandle);
        }
        match self.imports.insert(peer.0, key.key, len) {
            true => Ok(()),
            false => Err(AttachError::Full("FabricConfig::max_imports")),
        }
    }
}
