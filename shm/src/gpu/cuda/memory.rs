//! Memory of a device: taken, told apart by its attributes, exported and opened by handles of 64 bytes, and memory of the processor that
//! the device may use. Virtual memory is in `vmm`.

use std::ffi::c_void;
use std::ptr::NonNull;

use cudarc::driver::sys::{self, CUipcMemHandle, CUpointer_attribute as Attribute};

use super::driver::{self, check};
use super::{CudaDevice, REMEMBERED};
use crate::gpu::{Allocation, DeviceError, DevicePtr, Handle, LEGACY_HANDLE, Share, Unshared};

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaMemory {
    /// `cuMemAlloc`: by a handle of 64 bytes. Small ones share a block of 2 MiB, all of which whoever opens one of them can touch: take
    /// at least that much where peers are not trusted with each other's data.
    Legacy,
    /// `cuMemCreate` with descriptors, in multiples of the driver's granularity.
    Virtual,
    /// `cuMemCreate` without a type of handle.
    VirtualUnshared,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemAllocManaged`.
    Managed,
}

/// Memory that was taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owned {
    pub base: DevicePtr,
    pub size: u64,
    pub kind: CudaMemory,
}

/// Memory of another process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opened {
    pub base: DevicePtr,
    /// Size of virtual memory; `None` for what a handle of 64 bytes has opened.
    pub reserved: Option<u64>,
}

/// Memory of the processor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned {
    ptr: NonNull<u8>,
    len: u64,
    seen: DevicePtr,
}

impl Pinned {
    /// Where the processor has the bytes that the device sees there.
    pub fn view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        let offset = ptr.0.checked_sub(self.seen.0)?;
        let inside = offset <= self.len && len <= self.len - offset;
        // SAFETY: within the memory that was pinned, which stays mapped until it is unpinned.
        inside.then(|| unsafe { self.ptr.add(offset as usize) })
    }
}

/// Puts the driver's flag by that name, which is the only one it accepts.
const LAZY_ENABLE_PEER_ACCESS: u32 = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

/// `CU_MEMORYTYPE_HOST`; 0 is what is none of the driver's.
const TYPE_HOST: u32 = 1;

impl CudaDevice {
    /// Takes memory of a kind. Slow path.
    ///
    /// # Errors
    /// As [`Device::alloc`](crate::gpu::Device::alloc).
    pub fn alloc_as(&mut self, kind: CudaMemory, size: u64) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let bytes = usize::try_from(size).map_err(|_| DeviceError::Exhausted)?;
        let mut base = 0;
        let size = match kind {
            CudaMemory::Virtual | CudaMemory::VirtualUnshared => {
                let (at, size) = self.create_virtual(size, kind == CudaMemory::Virtual)?;
                base = at.0;
                size
            }
            CudaMemory::Legacy => {
                // SAFETY: a place for the result.
                check(unsafe { (self.driver.cuMemAlloc_v2)(&raw mut base, bytes) })?;
                size
            }
            CudaMemory::Pool => {
                let stream = self.stream(0)?;
                // SAFETY: a place for the result; the stream lives as long as this does.
                check(unsafe { (self.driver.cuMemAllocAsync)(&raw mut base, bytes, stream) })?;
                // SAFETY: as above. The memory is there for every stream afterwards.
                check(unsafe { (self.driver.cuStreamSynchronize)(stream) })?;
                size
            }
            CudaMemory::Managed => {
                let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
                // SAFETY: a place for the result.
                check(unsafe { (self.driver.cuMemAllocManaged)(&raw mut base, bytes, global) })?;
                size
            }
        };
        let base = DevicePtr(base);
        self.owned.push(Owned { base, size, kind });
        Ok(base)
    }

    /// # Safety
    /// Nothing queued uses it, and no peer has it open.
    pub(super) unsafe fn free_owned(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.owned.iter().position(|owned| owned.base == base);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: taken by `alloc_as`, and given back once; the rest is our caller's promise.
        unsafe { self.give_back(&self.owned[at]) }?;
        self.owned.swap_remove(at);
        Ok(())
    }

    /// # Safety
    /// As for [`free_owned`](Self::free_owned); it is not used again.
    unsafe fn give_back(&self, owned: &Owned) -> Result<(), DeviceError> {
        match owned.kind {
            CudaMemory::Virtual | CudaMemory::VirtualUnshared => {
                // SAFETY: mapped by `create_virtual` with that size, and not used any more.
                unsafe { self.unmap_virtual(owned.base, owned.size) }
            }
            // SAFETY: not used any more; `cuMemFree` takes all kinds but virtual memory.
            _ => check(unsafe { (self.driver.cuMemFree_v2)(owned.base.0) }),
        }
    }

    pub(super) fn attributes(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        let _entered = self.enter()?;
        let (mut memory_type, mut managed, mut legacy) = (0u32, 0u32, 0u32);
        let (mut buffer, mut base, mut size, mut handles, mut pool) = (0u64, 0u64, 0u64, 0u64, 0u64);
        let mut names = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        ];
        let mut places: [*mut c_void; 8] = [
            (&raw mut memory_type).cast(),
            (&raw mut managed).cast(),
            (&raw mut legacy).cast(),
            (&raw mut buffer).cast(),
            (&raw mut base).cast(),
            (&raw mut size).cast(),
            (&raw mut handles).cast(),
            (&raw mut pool).cast(),
        ];
        // SAFETY: as many places as names, and each is at least as large as its attribute and holds zero, so that one that the driver
        // writes with fewer bytes (a truth value) is right as well.
        let code = unsafe {
            let count = names.len() as u32;
            (self.driver.cuPointerGetAttributes)(count, names.as_mut_ptr(), places.as_mut_ptr(), ptr.0)
        };
        match code {
            0 => {}
            driver::INVALID_VALUE => return Err(DeviceError::NotDeviceMemory),
            code => check(code)?,
        }
        if memory_type == 0 || size == 0 {
            return Err(DeviceError::NotDeviceMemory);
        }
        let descriptor: u64 =
            sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0.into();
        let share = match () {
            () if managed != 0 => Share::Never(Unshared::Managed),
            () if memory_type == TYPE_HOST => Share::Never(Unshared::Host),
            () if pool != 0 => Share::Never(Unshared::Pool),
            () if legacy != 0 => Share::Legacy,
            () if handles & descriptor != 0 => Share::Descriptor,
            () => Share::Never(Unshared::NoHandleType),
        };
        Ok(Allocation { base: DevicePtr(base), size, buffer, share })
    }

    pub(super) fn export_allocation(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        let _entered = self.enter()?;
        match allocation.share {
            Share::Never(why) => Err(DeviceError::NotExportable(why)),
            Share::Descriptor => self.export_virtual(allocation.base).map(Handle::Descriptor),
            Share::Legacy => {
                let mut handle = CUipcMemHandle { reserved: [0; LEGACY_HANDLE] };
                // SAFETY: a place for the result.
                let code = unsafe { (self.driver.cuIpcGetMemHandle)(&raw mut handle, allocation.base.0) };
                if code == driver::INVALID_VALUE {
                    return Err(DeviceError::NotDeviceMemory);
                }
                check(code)?;
                let bytes = handle.reserved.map(|byte| byte as u8);
                if !self.exported.contains(&bytes) {
                    self.exported.truncate(REMEMBERED - 1);
                    self.exported.push_front(bytes);
                }
                Ok(Handle::Legacy(bytes))
            }
        }
    }

    /// # Safety
    /// As for [`Device::open`](crate::gpu::Device::open).
    pub(super) unsafe fn open_handle(
        &mut self,
        handle: &Handle,
        size: u64,
    ) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let (base, reserved) = match handle {
            Handle::Descriptor(fd) => (self.import_virtual(fd, size)?, Some(size)),
            Handle::Legacy(bytes) if self.exported.contains(bytes) => return Err(DeviceError::SameProcess),
            Handle::Legacy(bytes) => {
                let mut base = 0;
                let handle = CUipcMemHandle { reserved: bytes.map(|byte| byte as _) };
                // SAFETY: a place for the result; garbage is refused by the driver.
                let code = unsafe {
                    (self.driver.cuIpcOpenMemHandle_v2)(&raw mut base, handle, LAZY_ENABLE_PEER_ACCESS)
                };
                if code != 0 {
                    return Err(driver::open_error(code));
                }
                (DevicePtr(base), None)
            }
        };
        self.opened.push(Opened { base, reserved });
        Ok(base)
    }

    /// # Safety
    /// Nothing queued uses it.
    pub(super) unsafe fn close_opened(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.opened.iter().position(|opened| opened.base == base);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: opened by `open_handle`, and closed once; the rest is our caller's promise.
        unsafe { self.close_one(&self.opened[at]) }?;
        self.opened.swap_remove(at);
        Ok(())
    }

    /// # Safety
    /// As for [`close_opened`](Self::close_opened); it is not used again.
    unsafe fn close_one(&self, opened: &Opened) -> Result<(), DeviceError> {
        match opened.reserved {
            // SAFETY: mapped by `import_virtual` with that size, and not used any more.
            Some(size) => unsafe { self.unmap_virtual(opened.base, size) },
            // SAFETY: opened by the driver, and not used any more.
            None => check(unsafe { (self.driver.cuIpcCloseMemHandle)(opened.base.0) }),
        }
    }

    /// # Safety
    /// The bytes stay mapped until they are unregistered.
    pub(super) unsafe fn register(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let host: *mut c_void = ptr.as_ptr().cast();
        // SAFETY: mapped, by our caller's promise.
        check(unsafe { (self.driver.cuMemHostRegister_v2)(host, len, flags) })?;
        let mut seen = 0;
        // SAFETY: a place for the result, and memory that was registered just now.
        let told = check(unsafe { (self.driver.cuMemHostGetDevicePointer_v2)(&raw mut seen, host, 0) });
        if let Err(error) = told {
            // SAFETY: registered above, and not used.
            unsafe { (self.driver.cuMemHostUnregister)(host) };
            return Err(error);
        }
        let pinned = Pinned { ptr, len: len as u64, seen: DevicePtr(seen) };
        self.pinned.push(pinned);
        Ok(pinned.seen)
    }

    /// # Safety
    /// Nothing queued uses it.
    pub(super) unsafe fn unregister(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.pinned.iter().position(|pinned| pinned.ptr == ptr);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: registered by `register`, and unregistered once.
        check(unsafe { (self.driver.cuMemHostUnregister)(ptr.as_ptr().cast()) })?;
        self.pinned.swap_remove(at);
        Ok(())
    }

    /// Gives back everything that was not, when nothing is queued any more. Errors are of no use to anybody.
    pub(super) fn give_all_back(&mut self) {
        for pinned in std::mem::take(&mut self.pinned) {
            // SAFETY: registered by `register`; whoever pinned it keeps it mapped until it is unpinned, which is now.
            unsafe { (self.driver.cuMemHostUnregister)(pinned.ptr.as_ptr().cast()) };
        }
        for opened in std::mem::take(&mut self.opened) {
            // SAFETY: opened by `open_handle`; the streams have ended.
            let _ = unsafe { self.close_one(&opened) };
        }
        for owned in std::mem::take(&mut self.owned) {
            // SAFETY: taken by `alloc_as`; the streams have ended.
            let _ = unsafe { self.give_back(&owned) };
        }
    }
}
