//! Virtual memory: created with or without descriptors, mapped, exported and imported. A mapping keeps its memory, so that no handle of
//! it is kept.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};

use super::CudaDevice;
use super::driver::{self, check};
use crate::gpu::{DeviceError, DevicePtr, Unshared};

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

impl CudaDevice {
    fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device }
    }

    /// Takes virtual memory, and tells how large it is.
    pub(super) fn create_virtual(&self, size: u64, shared: bool) -> Result<(DevicePtr, u64), DeviceError> {
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
        // SAFETY: a place for the result, and a whole request.
        check(unsafe {
            (self.driver.cuMemGetAllocationGranularity)(&raw mut granule, &raw const asked, minimum)
        })?;
        let size = size.max(1).checked_next_multiple_of(granule.max(1) as u64);
        let size = size.ok_or(DeviceError::Exhausted)?;
        let mut handle = 0;
        // SAFETY: as above.
        check(unsafe { (self.driver.cuMemCreate)(&raw mut handle, size as usize, &raw const asked, 0) })?;
        Ok((self.map_and_release(handle, size)?, size))
    }

    /// Maps memory where the driver likes, and gives its handle back, also on errors.
    fn map_and_release(
        &self,
        handle: CUmemGenericAllocationHandle,
        size: u64,
    ) -> Result<DevicePtr, DeviceError> {
        let mapped = self.map(handle, size as usize);
        // SAFETY: ours, and given back once; a mapping keeps the memory.
        unsafe { (self.driver.cuMemRelease)(handle) };
        mapped
    }

    fn map(&self, handle: CUmemGenericAllocationHandle, size: usize) -> Result<DevicePtr, DeviceError> {
        let mut base = 0;
        // SAFETY: a place for the result.
        check(unsafe { (self.driver.cuMemAddressReserve)(&raw mut base, size, 0, 0, 0) })?;
        // SAFETY: addresses that were reserved just now, and a handle that is good.
        let mapped = check(unsafe { (self.driver.cuMemMap)(base, size, 0, handle, 0) });
        let allowed = mapped.and_then(|()| {
            let read_write = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            let access = CUmemAccessDesc { location: self.location(), flags: read_write };
            // SAFETY: mapped just now; one description.
            check(unsafe { (self.driver.cuMemSetAccess)(base, size, &raw const access, 1) }).inspect_err(
                |_| {
                    // SAFETY: mapped above, and not used.
                    unsafe { (self.driver.cuMemUnmap)(base, size) };
                },
            )
        });
        if let Err(error) = allowed {
            // SAFETY: reserved above, and nothing is mapped there.
            unsafe { (self.driver.cuMemAddressFree)(base, size) };
            return Err(error);
        }
        Ok(DevicePtr(base))
    }

    /// # Safety
    /// Mapped by this module with that size, and not used any more.
    pub(super) unsafe fn unmap_virtual(&self, base: DevicePtr, size: u64) -> Result<(), DeviceError> {
        // SAFETY: our caller's promise.
        unsafe {
            check((self.driver.cuMemUnmap)(base.0, size as usize))?;
            check((self.driver.cuMemAddressFree)(base.0, size as usize))
        }
    }

    pub(super) fn export_virtual(&self, base: DevicePtr) -> Result<OwnedFd, DeviceError> {
        let mut handle = 0;
        // SAFETY: a place for the result. The address is only looked up.
        let code = unsafe {
            (self.driver.cuMemRetainAllocationHandle)(&raw mut handle, base.0 as usize as *mut c_void)
        };
        if code == driver::INVALID_VALUE {
            return Err(DeviceError::NotDeviceMemory);
        }
        check(code)?;
        let mut fd = -1;
        // SAFETY: a place for a descriptor, and a handle that is good.
        let code = unsafe {
            let place = (&raw mut fd).cast();
            (self.driver.cuMemExportToShareableHandle)(place, handle, DESCRIPTOR, 0)
        };
        // SAFETY: ours, and given back once.
        unsafe { (self.driver.cuMemRelease)(handle) };
        match code {
            // The type was not among those that it was created with.
            driver::INVALID_VALUE | driver::NOT_SUPPORTED => {
                Err(DeviceError::NotExportable(Unshared::NoHandleType))
            }
            code => {
                check(code)?;
                // SAFETY: just opened by the driver, and nobody else's.
                Ok(unsafe { OwnedFd::from_raw_fd(fd) })
            }
        }
    }

    pub(super) fn import_virtual(&self, fd: &OwnedFd, size: u64) -> Result<DevicePtr, DeviceError> {
        let size_known = usize::try_from(size).ok().filter(|&size| size > 0);
        size_known.ok_or(DeviceError::BadHandle)?;
        let mut handle = 0;
        // By value, in the place of a pointer.
        let by_value = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: a place for the result, and a descriptor that is open; what it is of, the driver checks.
        let code =
            unsafe { (self.driver.cuMemImportFromShareableHandle)(&raw mut handle, by_value, DESCRIPTOR) };
        if code != 0 {
            return Err(driver::open_error(code));
        }
        self.map_and_release(handle, size).map_err(|error| match error {
            // Another size than that of the memory.
            DeviceError::Driver(code) if code == driver::INVALID_VALUE as i32 => DeviceError::BadHandle,
            error => error,
        })
    }
}
