//! Virtual memory in two parts, as in `cuMemCreate`: memory without addresses, and addresses
//! without memory.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::FakeProcess;
use super::behaviour::{Call, MemoryKind, Violation};
use super::calls::INVALID_VALUE;
use super::memory::FakeMemory;
use super::space::{Keeper, What};
use crate::{DeviceError, DevicePtr, Unshared};

/// Physical memory without an address.
#[derive(Clone, Debug)]
pub struct FakePhysical {
    memory: Arc<FakeMemory>,
    kind: Option<MemoryKind>,
}

impl FakePhysical {
    /// Exports the memory as a descriptor.
    ///
    /// # Errors
    /// [`DeviceError::NotExportable`], or [`DeviceError::Exhausted`] if no descriptors are free.
    pub fn export(&self) -> Result<OwnedFd, DeviceError> {
        match self.kind {
            Some(MemoryKind::Virtual) => {
                self.memory.fd().try_clone().map_err(|_| DeviceError::Exhausted)
            }
            _ => Err(DeviceError::NotExportable(Unshared::NoHandleType)),
        }
    }
}

impl FakeProcess {
    /// Creates physical memory. It counts as allocated when it is mapped.
    ///
    /// # Errors
    /// The errors of [`FakeProcess::alloc`].
    pub fn create(
        &self,
        ordinal: u32,
        kind: MemoryKind,
        size: u64,
    ) -> Result<FakePhysical, DeviceError> {
        let mut state = self.driver.state();
        let device = state.machine_device(self.place, ordinal)?;
        let (memory, _) = state.create(self.place, device, kind, size)?;
        Ok(FakePhysical { memory, kind: Some(kind) })
    }

    /// Imports memory of another process by its descriptor. The caller keeps the descriptor.
    ///
    /// # Errors
    /// [`DeviceError::BadHandle`] or [`DeviceError::SameProcess`].
    pub fn import(&self, fd: BorrowedFd<'_>) -> Result<FakePhysical, DeviceError> {
        let memory = self.driver.state().import(self.place, fd)?;
        Ok(FakePhysical { memory, kind: None })
    }

    /// Returns the memory mapped at an address.
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
            What::Opened { memory, .. } => {
                Ok(FakePhysical { memory: Arc::clone(memory), kind: None })
            }
            What::Pinned { .. } => Err(DeviceError::NotDeviceMemory),
        }
    }

    /// Reserves addresses with the alignment of virtual memory.
    pub fn reserve(&self, size: u64) -> DevicePtr {
        self.reserve_for(size, Keeper::Caller)
    }

    /// Reserves the given addresses, which must have been released before.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] if the addresses are not free.
    pub fn reserve_at(&self, base: DevicePtr, size: u64) -> Result<(), DeviceError> {
        let process = &mut self.driver.state().processes[self.place];
        if !process.space.reserve_at(base, size) {
            return Err(DeviceError::Exhausted);
        }
        process.counts.reserves += 1;
        Ok(())
    }

    fn reserve_for(&self, size: u64, keeper: Keeper) -> DevicePtr {
        let mut state = self.driver.state();
        let granule = state.behaviour.granule;
        let process = &mut state.processes[self.place];
        process.counts.reserves += 1;
        process.space.reserve(size, granule, keeper)
    }

    /// Releases reserved addresses.
    ///
    /// # Errors
    /// The driver's code for an invalid value, unless the range is exactly one reservation and
    /// nothing is mapped in it.
    pub fn release(&self, base: DevicePtr, size: u64) -> Result<(), DeviceError> {
        let mut state = self.driver.state();
        if !state.processes[self.place].space.release(base, size) {
            state.violations.push(Violation::NotTaken);
            return Err(INVALID_VALUE);
        }
        state.processes[self.place].counts.releases += 1;
        Ok(())
    }

    /// Returns the start and size of the reservation that contains an address. The reservation may
    /// be without memory. Not a driver call.
    pub fn reservation(&self, ptr: DevicePtr) -> Option<(DevicePtr, u64)> {
        self.driver.state().processes[self.place].space.reservation(ptr)
    }

    /// Maps memory at reserved addresses. Memory of this process counts as allocated, memory of
    /// another process as opened. [`FakeProcess::free`] and [`FakeProcess::close`] unmap it.
    ///
    /// # Errors
    /// The driver's code for an invalid value if `size` is not the size of the memory. Otherwise
    /// the errors of [`FakeProcess::alloc`] and [`FakeProcess::open_descriptor`].
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
        let reservation = state.processes[self.place].space.vacant(base, size);
        if memory.size() != size || reservation.is_none() {
            return Err(INVALID_VALUE);
        }
        let Some(kind) = physical.kind else {
            return state.open(self.place, ordinal, device, memory, Some(base)).map(|_| ());
        };
        state.devices[device as usize].used += size;
        let process = &mut state.processes[self.place];
        let what = What::Own { kind, memory, buffer: process.buffer() };
        process.counts.allocs += 1;
        process.space.map_at(base, size, reservation, ordinal, what);
        Ok(())
    }

    /// Allocates adjacent segments. The last segment has the remaining size.
    pub(super) fn alloc_segments(&self, ordinal: u32, size: u64) -> Result<DevicePtr, DeviceError> {
        let (granule, segment) = {
            let behaviour = self.driver.state().behaviour;
            (behaviour.granule, behaviour.segment.max(behaviour.granule))
        };
        let size =
            size.checked_next_multiple_of(granule).filter(|&size| size > 0).ok_or(INVALID_VALUE)?;
        let base = self.reserve_for(size, Keeper::Free);
        let mut at = 0;
        while at < size {
            let len = segment.min(size - at);
            let made = self.create(ordinal, MemoryKind::Virtual, len);
            if let Err(error) = made.and_then(|made| self.map(ordinal, base.at(at), len, &made)) {
                let _ = self.free(ordinal, base);
                return Err(error);
            }
            at += len;
        }
        Ok(base)
    }

    /// Opens physical segments of another process at adjacent addresses. The caller keeps the
    /// descriptors.
    ///
    /// # Errors
    /// The errors of [`FakeProcess::open_descriptor`]. On an error no segment stays open.
    pub fn open_segments(
        &self,
        ordinal: u32,
        segments: &[(BorrowedFd<'_>, u64)],
    ) -> Result<DevicePtr, DeviceError> {
        let size = segments.iter().try_fold(0u64, |sum, (_, size)| sum.checked_add(*size));
        let size = size.filter(|size| *size > 0).ok_or(DeviceError::BadHandle)?;
        let physical =
            segments.iter().map(|(fd, _)| self.import(*fd)).collect::<Result<Vec<_>, _>>()?;
        let base = self.reserve_for(size, Keeper::Close);
        let mut at = base;
        for (physical, (_, size)) in physical.iter().zip(segments) {
            if let Err(error) = self.map(ordinal, at, *size, physical) {
                let _ = self.close(ordinal, base);
                return Err(if error == INVALID_VALUE { DeviceError::BadHandle } else { error });
            }
            at = at.at(*size);
        }
        Ok(base)
    }

    pub(super) fn kept(&self, base: DevicePtr, keeper: Keeper) -> Option<u64> {
        let state = self.driver.state();
        let (size, kept) = state.processes[self.place].space.reserved(base)?;
        (kept == keeper).then_some(size)
    }

    pub(super) fn take_apart(
        &self,
        base: DevicePtr,
        size: u64,
        take: impl Fn(DevicePtr) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        loop {
            let next = self.driver.state().processes[self.place].space.first_in(base);
            match next {
                Some(segment) => take(segment)?,
                None => return self.release(base, size),
            }
        }
    }
}
