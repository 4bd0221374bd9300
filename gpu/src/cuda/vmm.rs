//! Virtual memory, which consists of one or more adjacent physical segments. A mapping keeps its
//! memory alive, so handles are released immediately.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};

use super::CudaDevice;
use super::driver::{self, Driver, check};
use super::memory::Held;
use crate::{DeviceError, DevicePtr, Unshared};

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl CudaDevice {
    fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device }
    }

    /// Allocates virtual memory in physical segments of `each` bytes. The last segment holds the
    /// rest.
    pub(super) fn create_virtual(
        &self,
        size: u64,
        each: u64,
        shared: bool,
    ) -> Result<Held, DeviceError> {
        let asked = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: if shared { DESCRIPTOR } else { CUmemAllocationHandleType(0) },
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: self.driver.virtual_for_nics(self.device).into(),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut granule = 0;
        // SAFETY: the result is written to a local variable, and the properties are complete.
        check(unsafe {
            (self.driver.cuMemGetAllocationGranularity)(&raw mut granule, &raw const asked, minimum)
        })?;
        let whole = |size: u64| size.max(1).checked_next_multiple_of(granule.max(1) as u64);
        let (size, each) = whole(size).zip(whole(each)).ok_or(DeviceError::Exhausted)?;
        let mut parts = Parts { driver: self.driver, parts: vec![] };
        let mut left = size;
        while left > 0 {
            let size = each.min(left);
            let mut handle = 0;
            // SAFETY: the result is written to a local variable, and the properties are complete.
            check(unsafe {
                (self.driver.cuMemCreate)(&raw mut handle, size as usize, &raw const asked, 0)
            })?;
            parts.parts.push((handle, size));
            left -= size;
        }
        self.map(&parts)
    }

    /// Maps physical segments at adjacent addresses that the driver chooses. On an error nothing
    /// stays mapped.
    fn map(&self, memory: &Parts) -> Result<Held, DeviceError> {
        let segments: Vec<u64> = memory.parts.iter().map(|(_, size)| *size).collect();
        let size = segments.iter().try_fold(0u64, |sum, size| sum.checked_add(*size));
        let size =
            size.and_then(|size| usize::try_from(size).ok()).ok_or(DeviceError::Exhausted)?;
        let mut base = 0;
        // SAFETY: the result is written to a local variable.
        check(unsafe { (self.driver.cuMemAddressReserve)(&raw mut base, size, 0, 0, 0) })?;
        let mut mapped = Held { base: DevicePtr(base), segments: vec![] };
        let mut at = base;
        let all = memory.parts.iter().try_for_each(|&(handle, size)| {
            // SAFETY: the address range was reserved above, and `memory` owns the handle.
            check(unsafe { (self.driver.cuMemMap)(at, size as usize, 0, handle, 0) })?;
            mapped.segments.push(size);
            at += size;
            Ok(())
        });
        let allowed = all.and_then(|()| {
            let read_write = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            let access = CUmemAccessDesc { location: self.location(), flags: read_write };
            // SAFETY: the whole range was mapped above, and the count of access descriptions is 1.
            check(unsafe { (self.driver.cuMemSetAccess)(base, size, &raw const access, 1) })
        });
        if let Err(error) = allowed {
            // SAFETY: the range was reserved above, and nothing uses it yet.
            let _ = unsafe { self.unmap_reserved(&mapped, size) };
            return Err(error);
        }
        Ok(mapped)
    }

    /// Unmaps virtual memory.
    ///
    /// # Safety
    /// This module mapped the memory, and it is not used any more.
    pub(super) unsafe fn unmap_virtual(&self, mapped: &Held) -> Result<(), DeviceError> {
        let size = mapped.virtual_size() as usize;
        // SAFETY: the caller guarantees that the memory is unused. `map` reserved `size` bytes, the
        // sum of the segments.
        unsafe { self.unmap_reserved(mapped, size) }
    }

    /// Unmaps each segment and frees the address range. Attempts every step, and returns the first
    /// error.
    ///
    /// # Safety
    /// This module reserved `size` bytes for the mapping, which is not used any more.
    unsafe fn unmap_reserved(&self, mapped: &Held, size: usize) -> Result<(), DeviceError> {
        let (mut at, mut result) = (mapped.base.0, Ok(()));
        for &segment in &mapped.segments {
            // SAFETY: the caller guarantees that nothing uses the memory. `segments` lists exactly
            // the mapped segments.
            result = result.and(check(unsafe { (self.driver.cuMemUnmap)(at, segment as usize) }));
            at += segment;
        }
        // SAFETY: the caller guarantees that this range was reserved. Its segments were unmapped
        // above.
        result.and(check(unsafe { (self.driver.cuMemAddressFree)(mapped.base.0, size) }))
    }

    pub(super) fn export_virtual(&self, base: DevicePtr) -> Result<OwnedFd, DeviceError> {
        let mut handle = 0;
        // SAFETY: the result is written to a local variable. The driver only looks up the address.
        let code = unsafe {
            (self.driver.cuMemRetainAllocationHandle)(
                &raw mut handle,
                base.0 as usize as *mut c_void,
            )
        };
        if code == driver::INVALID_VALUE {
            return Err(DeviceError::NotDeviceMemory);
        }
        check(code)?;
        let mut fd = -1;
        // SAFETY: the result is written to a local variable, and the handle is valid.
        let code = unsafe {
            let place = (&raw mut fd).cast();
            (self.driver.cuMemExportToShareableHandle)(place, handle, DESCRIPTOR, 0)
        };
        // SAFETY: the call above retained the handle for us, and this call releases it once.
        unsafe { (self.driver.cuMemRelease)(handle) };
        match code {
            // The memory was created without this handle type.
            driver::INVALID_VALUE | driver::NOT_SUPPORTED => {
                Err(DeviceError::NotExportable(Unshared::NoHandleType))
            }
            code => {
                check(code)?;
                // SAFETY: the driver returned this new descriptor, so nothing else owns it.
                Ok(unsafe { OwnedFd::from_raw_fd(fd) })
            }
        }
    }

    pub(super) fn import_virtual(
        &self,
        segments: &[(BorrowedFd<'_>, u64)],
        size: u64,
    ) -> Result<Held, DeviceError> {
        let all = segments.iter().try_fold(0u64, |sum, (_, size)| sum.checked_add(*size));
        if all != Some(size) || segments.is_empty() || segments.iter().any(|(_, size)| *size == 0) {
            return Err(DeviceError::BadHandle);
        }
        let mut parts = Parts { driver: self.driver, parts: vec![] };
        for (fd, size) in segments {
            let mut handle = 0;
            // The driver expects the descriptor by value in a pointer argument.
            let by_value = fd.as_raw_fd() as usize as *mut c_void;
            // SAFETY: the result is written to a local variable, and the descriptor is open. The
            // driver checks the file behind the descriptor.
            let code = unsafe {
                (self.driver.cuMemImportFromShareableHandle)(&raw mut handle, by_value, DESCRIPTOR)
            };
            if code != 0 {
                return Err(driver::open_error(code));
            }
            parts.parts.push((handle, *size));
        }
        self.map(&parts).map_err(|error| match error {
            // The given size differs from the physical segment's size.
            DeviceError::Driver(code) if code == driver::INVALID_VALUE as i32 => {
                DeviceError::BadHandle
            }
            error => error,
        })
    }
}

struct Parts {
    driver: &'static Driver,
    parts: Vec<(CUmemGenericAllocationHandle, u64)>,
}

impl Drop for Parts {
    fn drop(&mut self) {
        for (handle, _) in &self.parts {
            // SAFETY: this value owns the handle, and releases it once.
            unsafe { (self.driver.cuMemRelease)(*handle) };
        }
    }
}
