//! Device memory: allocation, classification by attributes, export and import by handles of 64
//! bytes; and pinned processor memory. Virtual memory is in `vmm`.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use cudarc::driver::sys::{self, CUipcMemHandle, CUpointer_attribute as Attribute};

use fishplate_shm::extension::PAGE;

use super::driver::{self, check};
use super::{CudaDevice, REMEMBERED};
use crate::{Allocation, DeviceError, DevicePtr, Handle, LEGACY_HANDLE, Share, Unshared};

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaMemory {
    /// `cuMemAlloc`, exported by a handle of 64 bytes. Small allocations share a block of 2 MiB,
    /// and a peer that opens one can access the whole block. Allocate at least 2 MiB if peers must
    /// not see each other's data.
    Legacy,
    /// `cuMemCreate`, exported by descriptors, in multiples of the driver's granularity.
    Virtual,
    /// The same in adjacent physical segments of this many bytes, as growing framework pools use
    /// it.
    Segments(u64),
    /// `cuMemCreate` without a handle type.
    VirtualUnshared,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemAllocManaged`.
    Managed,
}

/// Allocated memory, or memory of another process.
#[derive(Debug)]
pub(super) struct Held {
    pub base: DevicePtr,
    /// Sizes of the physical segments of virtual memory; empty for other memory.
    pub segments: Vec<u64>,
}

/// Pinned processor memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned {
    ptr: NonNull<u8>,
    len: u64,
    seen: DevicePtr,
}

impl Pinned {
    /// Returns the host address of bytes that the device sees at `ptr`.
    pub fn view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        let offset = ptr.0.checked_sub(self.seen.0)?;
        let inside = offset <= self.len && len <= self.len - offset;
        // SAFETY: inside the pinned memory, which stays mapped until it is unpinned.
        inside.then(|| unsafe { self.ptr.add(offset as usize) })
    }
}

/// The driver's flag of that name, the only one that it accepts.
const LAZY_ENABLE_PEER_ACCESS: u32 = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

/// `CU_MEMORYTYPE_HOST`. 0 means that the driver does not know the memory.
const TYPE_HOST: u32 = 1;

impl CudaDevice {
    /// Allocates memory of a kind. Slow path.
    ///
    /// # Errors
    /// As [`Device::alloc`](crate::Device::alloc).
    pub fn alloc_as(&mut self, kind: CudaMemory, size: u64) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let bytes = usize::try_from(size).map_err(|_| DeviceError::Exhausted)?;
        let mut base = 0;
        match kind {
            CudaMemory::Virtual | CudaMemory::VirtualUnshared | CudaMemory::Segments(_) => {
                let each = if let CudaMemory::Segments(each) = kind { each } else { size };
                let taken = self.create_virtual(size, each, kind != CudaMemory::VirtualUnshared)?;
                let base = taken.base;
                self.owned.push(taken);
                return Ok(base);
            }
            CudaMemory::Legacy => {
                // SAFETY: the result is writable.
                check(unsafe { (self.driver.cuMemAlloc_v2)(&raw mut base, bytes) })?;
            }
            CudaMemory::Pool => {
                let stream = self.stream(0)?;
                // SAFETY: the result is writable; the stream lives as long as `self`.
                check(unsafe { (self.driver.cuMemAllocAsync)(&raw mut base, bytes, stream) })?;
                // SAFETY: the stream lives as long as `self`. Afterwards the memory is valid on
                // every stream.
                check(unsafe { (self.driver.cuStreamSynchronize)(stream) })?;
            }
            CudaMemory::Managed => {
                let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
                // SAFETY: the result is writable.
                check(unsafe { (self.driver.cuMemAllocManaged)(&raw mut base, bytes, global) })?;
            }
        }
        let base = DevicePtr(base);
        self.owned.push(Held { base, segments: vec![] });
        Ok(base)
    }

    /// # Safety
    /// No queued work uses it, and no peer has it open.
    pub(super) unsafe fn free_owned(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.owned.iter().position(|owned| owned.base == base);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: allocated by `alloc_as`, and freed once; the caller guarantees the rest.
        unsafe { self.give_back(&self.owned[at]) }?;
        self.owned.swap_remove(at);
        Ok(())
    }

    /// # Safety
    /// As for [`free_owned`](Self::free_owned), and it is not used again.
    unsafe fn give_back(&self, owned: &Held) -> Result<(), DeviceError> {
        match owned.segments.is_empty() {
            // SAFETY: not used any more; `cuMemFree` frees every kind except virtual memory.
            true => check(unsafe { (self.driver.cuMemFree_v2)(owned.base.0) }),
            // SAFETY: mapped by `create_virtual`, and not used any more.
            false => unsafe { self.unmap_virtual(owned) },
        }
    }

    /// The driver accepts whole host pages only.
    pub(super) fn dmabuf_of(&self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        let page = PAGE as u64;
        let base = ptr.0 - ptr.0 % page;
        let end = ptr.0.checked_add(len)?.checked_next_multiple_of(page)?;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut fd: c_int = -1;
        let _entered = self.enter().ok()?;
        // SAFETY: the result is writable; the driver rejects addresses that are not device memory.
        let code = unsafe {
            let place = (&raw mut fd).cast();
            (self.driver.cuMemGetHandleForAddressRange)(place, base, (end - base) as usize, kind, 0)
        };
        check(code).ok().filter(|()| fd >= 0)?;
        // SAFETY: that call created the descriptor for us.
        Some((unsafe { OwnedFd::from_raw_fd(fd) }, ptr.0 - base))
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
        // SAFETY: as many results as attributes. Each is at least as large as its attribute and
        // zeroed, so an attribute that the driver writes with fewer bytes, such as a flag, reads
        // correctly.
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
        // For virtual memory, which may consist of adjacent segments, start and size describe the
        // reserved range. Memory opened from a 64-byte handle also reports a handle type, but
        // cannot be exported.
        let by_handle = |held: &Held| held.base.0 == base && held.segments.is_empty();
        let reservation = match share {
            Share::Never(Unshared::NoHandleType) if self.opened.iter().any(by_handle) => None,
            Share::Descriptor | Share::Never(Unshared::NoHandleType) => Some(DevicePtr(base)),
            _ => None,
        };
        if reservation.is_some() {
            (base, size) = self.segment_at(ptr)?;
        }
        Ok(Allocation { base: DevicePtr(base), size, buffer, share, reservation })
    }

    /// Returns the physical segment at an address: first address and size.
    fn segment_at(&self, ptr: DevicePtr) -> Result<(u64, u64), DeviceError> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: both results are writable.
        match unsafe { (self.driver.cuMemGetAddressRange_v2)(&raw mut base, &raw mut size, ptr.0) } {
            // The address is reserved, but nothing is mapped there.
            driver::INVALID_VALUE | driver::NOT_FOUND => Err(DeviceError::NotDeviceMemory),
            code => check(code).map(|()| (base, size as u64)),
        }
    }

    pub(super) fn export_allocation(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        let _entered = self.enter()?;
        match allocation.share {
            Share::Never(why) => Err(DeviceError::NotExportable(why)),
            Share::Descriptor => self.export_virtual(allocation.base).map(Handle::Descriptor),
            Share::Legacy => {
                let mut handle = CUipcMemHandle { reserved: [0; LEGACY_HANDLE] };
                // SAFETY: the result is writable.
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
    /// As for [`Device::open`](crate::Device::open).
    pub(super) unsafe fn open_handle(
        &mut self,
        handle: &Handle,
        size: u64,
    ) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let opened = match handle {
            Handle::Descriptor(fd) => self.import_virtual(&[(fd.as_fd(), size)], size)?,
            Handle::Segments(segments) => {
                let segments: Vec<_> = segments.iter().map(|(fd, size)| (fd.as_fd(), *size)).collect();
                self.import_virtual(&segments, size)?
            }
            Handle::Legacy(bytes) if self.exported.contains(bytes) => return Err(DeviceError::SameProcess),
            Handle::Legacy(bytes) => {
                let mut base = 0;
                let handle = CUipcMemHandle { reserved: bytes.map(|byte| byte as _) };
                // SAFETY: the result is writable; the driver rejects garbage.
                let code = unsafe {
                    (self.driver.cuIpcOpenMemHandle_v2)(&raw mut base, handle, LAZY_ENABLE_PEER_ACCESS)
                };
                if code != 0 {
                    return Err(driver::open_error(code));
                }
                Held { base: DevicePtr(base), segments: vec![] }
            }
        };
        let base = opened.base;
        self.opened.push(opened);
        Ok(base)
    }

    /// # Safety
    /// No queued work uses it.
    pub(super) unsafe fn close_opened(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.opened.iter().position(|opened| opened.base == base);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: opened by `open_handle`, and closed once; the caller guarantees the rest.
        unsafe { self.close_one(&self.opened[at]) }?;
        self.opened.swap_remove(at);
        Ok(())
    }

    /// # Safety
    /// As for [`close_opened`](Self::close_opened), and it is not used again.
    unsafe fn close_one(&self, opened: &Held) -> Result<(), DeviceError> {
        match opened.segments.is_empty() {
            // SAFETY: opened by the driver, and not used any more.
            true => check(unsafe { (self.driver.cuIpcCloseMemHandle)(opened.base.0) }),
            // SAFETY: mapped by `import_virtual`, and not used any more.
            false => unsafe { self.unmap_virtual(opened) },
        }
    }

    /// # Safety
    /// The bytes stay mapped until they are unregistered.
    pub(super) unsafe fn register(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let host: *mut c_void = ptr.as_ptr().cast();
        // SAFETY: the caller guarantees that the bytes are mapped.
        check(unsafe { (self.driver.cuMemHostRegister_v2)(host, len, flags) })?;
        let mut seen = 0;
        // SAFETY: the result is writable, and the memory was registered just before.
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
    /// No queued work uses it.
    pub(super) unsafe fn unregister(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.pinned.iter().position(|pinned| pinned.ptr == ptr);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: registered by `register`, and unregistered once.
        check(unsafe { (self.driver.cuMemHostUnregister)(ptr.as_ptr().cast()) })?;
        self.pinned.swap_remove(at);
        Ok(())
    }

    /// Frees everything that is left, once no work is queued. Ignores errors: the caller is a drop.
    pub(super) fn give_all_back(&mut self) {
        for pinned in std::mem::take(&mut self.pinned) {
            // SAFETY: registered by `register`; the caller of `pin` keeps it mapped until it is
            // unpinned, here.
            unsafe { (self.driver.cuMemHostUnregister)(pinned.ptr.as_ptr().cast()) };
        }
        for opened in std::mem::take(&mut self.opened) {
            // SAFETY: opened by `open_handle`; the streams have finished.
            let _ = unsafe { self.close_one(&opened) };
        }
        for owned in std::mem::take(&mut self.owned) {
            // SAFETY: allocated by `alloc_as`; the streams have finished.
            let _ = unsafe { self.give_back(&owned) };
        }
    }
}
