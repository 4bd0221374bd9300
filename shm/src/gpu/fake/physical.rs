//! Virtual memory in its parts, as `cuMemCreate` and its kin have them: memory without addresses, and addresses without memory.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::FakeProcess;
use super::behaviour::{Call, Kind};
use super::calls::INVALID_VALUE;
use super::memory::Memory;
use super::space::What;
use crate::gpu::{DeviceError, DevicePtr, Unshared};

/// Memory without addresses.
#[derive(Clone, Debug)]
pub struct FakePhysical {
    memory: Arc<Memory>,
    /// `None` for that of another process.
    kind: Option<Kind>,
}

impl FakePhysical {
    /// A descriptor of it.
    ///
    /// # Errors
    /// [`DeviceError::NotExportable`], [`DeviceError::Exhausted`] without descriptors.
    pub fn export(&self) -> Result<OwnedFd, DeviceError> {
        match self.kind {
            Some(Kind::Virtual) => self.memory.fd().try_clone().map_err(|_| DeviceError::Exhausted),
            _ => Err(DeviceError::NotExportable(Unshared::NoHandleType)),
        }
    }
}

impl FakeProcess {
    /// Makes memory. It is counted when it is mapped.
    ///
    /// # Errors
    /// As [`FakeProcess::alloc`].
    pub fn create(&self, ordinal: u32, kind: Kind, size: u64) -> Result<FakePhysical, DeviceError> {
        let mut state = self.driver.state();
        let device = state.machine_device(self.place, ordinal)?;
        let (memory, _) = state.create(self.place, device, kind, size)?;
        Ok(FakePhysical { memory, kind: Some(kind) })
    }

    /// Takes memory of another process by its descriptor, which stays the caller's.
    ///
    /// # Errors
    /// [`DeviceError::BadHandle`], [`DeviceError::SameProcess`].
    pub fn import(&self, fd: BorrowedFd<'_>) -> Result<FakePhysical, DeviceError> {
        let memory = self.driver.state().import(self.place, fd)?;
        Ok(FakePhysical { memory, kind: None })
    }

    /// The memory at an address.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] if there is none.
    pub fn physical(&self, ptr: DevicePtr) -> Result<FakePhysical, DeviceError> {
        let state = self.driver.state();
        let (_, range) = state.processes[self.place].space.find(ptr, 0)?;
        match &range.what {
            What::Own { kind, memory, .. } => {
                Ok(FakePhysical { memory: Arc::clone(memory), kind: Some(*kind) })
            }
            What::Opened { memory, .. } => Ok(FakePhysical { memory: Arc::clone(memory), kind: None }),
            What::Pinned { .. } => Err(DeviceError::NotDeviceMemory),
        }
    }

    /// Takes addresses, aligned as virtual memory is.
    pub fn reserve(&self, size: u64) -> DevicePtr {
        let mut state = self.driver.state();
        let granule = state.behaviour.granule;
        state.processes[self.place].space.reserve(size, (granule, 0))
    }

    /// Gives addresses back.
    pub fn release(&self, base: DevicePtr, size: u64) {
        self.driver.state().processes[self.place].space.release(base, size);
    }

    /// Maps memory at addresses that were reserved. Own memory counts as taken, that of another process as opened: [`FakeProcess::free`]
    /// and [`FakeProcess::close`] unmap it.
    ///
    /// # Errors
    /// The driver's code for an invalid value unless the size is that of the memory; as [`FakeProcess::alloc`] and
    /// [`FakeProcess::open_descriptor`].
    pub fn map(
        &self,
        ordinal: u32,
        base: DevicePtr,
        size: u64,
        physical: &FakePhysical,
    ) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        let call = if physical.kind.is_some() { Call::Alloc } else { Call::Open };
        let device = state.begin(self.place, ordinal, call)?;
        let memory = Arc::clone(&physical.memory);
        if memory.size() != size || state.processes[self.place].space.at(base).is_some() {
            return Err(INVALID_VALUE);
        }
        let Some(kind) = physical.kind else {
            return state.open(self.place, ordinal, device, memory, Some(base)).map(|_| ());
        };
        state.devices[device as usize].used += size;
        let process = &mut state.processes[self.place];
        let what = What::Own { kind, memory, buffer: process.buffer() };
        process.counts.allocs += 1;
        process.space.map_at(base, size, true, ordinal, what);
        Ok(())
    }
}
