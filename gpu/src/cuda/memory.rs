//! Allocates, classifies and pins memory, and exports and imports it by 64-byte handles. Virtual
//! memory is in `vmm`.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use cudarc::driver::sys::{self, CUipcMemHandle, CUpointer_attribute as Attribute};

use super::driver::{self, check};
use super::{CudaDevice, REMEMBERED};
use crate::{Allocation, DeviceError, DevicePtr, Handle, LEGACY_HANDLE, Share, Unshared};

/// Kinds of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaMemory {
    /// Memory of `cuMemAlloc`, exported by a handle of 64 bytes. Small allocations share a block of
    /// 2 MiB, and a peer that opens one of them can access the whole block. Allocate at least 2 MiB
    /// if peers must not see each other's data.
    Legacy,
    /// Memory of `cuMemCreate`, exported by descriptors, in multiples of the driver's granularity.
    Virtual,
    /// Memory of `cuMemCreate` in adjacent physical segments of this many bytes, like the growing
    /// pools of frameworks.
    Segments(u64),
    /// Memory of `cuMemCreate` without a handle type, so it cannot be exported.
    VirtualUnshared,
    /// Memory of `cuMemAllocAsync`.
    Pool,
    /// Memory of `cuMemAllocManaged`.
    Managed,
}

#[derive(Debug)]
pub(super) struct Held {
    pub base: DevicePtr,
    /// Sizes of the physical segments of virtual memory. Empty for other memory.
    pub segments: Vec<u64>,
}

impl Held {
    pub fn virtual_size(&self) -> u64 {
        self.segments.iter().sum()
    }
}

/// Host memory that is registered with the driver, at the device address `seen`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pinned {
    ptr: NonNull<u8>,
    len: u64,
    seen: DevicePtr,
}

impl Pinned {
    pub fn view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        let offset = ptr.0.checked_sub(self.seen.0)?;
        let inside = offset <= self.len && len <= self.len - offset;
        // SAFETY: the range lies inside the pinned memory, which stays mapped until it is unpinned.
        inside.then(|| unsafe { self.ptr.add(offset as usize) })
    }
}

/// The only flag that the driver accepts for opening a handle.
const LAZY_ENABLE_PEER_ACCESS: u32 = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;

/// `CU_MEMORYTYPE_HOST`. The driver returns 0 for memory that it does not know.
const TYPE_HOST: u32 = 1;

impl CudaDevice {
    /// Allocates memory of the given kind. Slow path.
    ///
    /// # Errors
    /// Fails like [`Device::alloc`](crate::Device::alloc).
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
                // SAFETY: the result is written to a local variable.
                check(unsafe { (self.driver.cuMemAlloc_v2)(&raw mut base, bytes) })?;
            }
            CudaMemory::Pool => {
                let stream = self.stream(0)?;
                // SAFETY: the result is written to a local variable. The stream lives as long as
                // `self`.
                check(unsafe { (self.driver.cuMemAllocAsync)(&raw mut base, bytes, stream) })?;
                // SAFETY: the stream lives as long as `self`. After this call the memory is valid
                // on every stream.
                check(unsafe { (self.driver.cuStreamSynchronize)(stream) })?;
            }
            CudaMemory::Managed => {
                let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL as u32;
                // SAFETY: the result is written to a local variable.
                check(unsafe { (self.driver.cuMemAllocManaged)(&raw mut base, bytes, global) })?;
            }
        }
        let base = DevicePtr(base);
        self.owned.push(Held { base, segments: vec![] });
        Ok(base)
    }

    /// Frees memory that `alloc_as` allocated.
    ///
    /// # Safety
    /// No queued work uses the memory, and no peer has it open.
    pub(super) unsafe fn free_owned(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.owned.iter().position(|owned| owned.base == base);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: `alloc_as` allocated the memory, and its entry is removed below, so it is freed
        // once. The caller guarantees that nothing uses it.
        unsafe { self.give_back(&self.owned[at]) }?;
        self.owned.swap_remove(at);
        Ok(())
    }

    /// Frees memory with the driver call for its kind.
    ///
    /// # Safety
    /// No queued work uses the memory, no peer has it open, and it is not used again.
    unsafe fn give_back(&self, owned: &Held) -> Result<(), DeviceError> {
        match owned.segments.is_empty() {
            // SAFETY: the caller no longer uses the memory. `cuMemFree` frees every kind except
            // virtual memory.
            true => check(unsafe { (self.driver.cuMemFree_v2)(owned.base.0) }),
            // SAFETY: `create_virtual` mapped the memory, and the caller no longer uses it.
            false => unsafe { self.unmap_virtual(owned) },
        }
    }

    /// Covers whole host pages, because the driver accepts nothing else. Also returns the offset of
    /// the bytes.
    pub(super) fn dmabuf_of(&self, ptr: DevicePtr, len: u64) -> Option<(OwnedFd, u64)> {
        // SAFETY: the call takes no pointer.
        let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
        let (base, whole) = whole_pages(ptr.0, len, page)?;
        let kind = sys::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let mut fd: c_int = -1;
        let _entered = self.enter().ok()?;
        // SAFETY: the result is written to a local variable. The driver rejects addresses that are
        // not device memory.
        let code = unsafe {
            let place = (&raw mut fd).cast();
            (self.driver.cuMemGetHandleForAddressRange)(place, base, whole as usize, kind, 0)
        };
        check(code).ok().filter(|()| fd >= 0)?;
        // SAFETY: the call above returned this new descriptor, so nothing else owns it.
        Some((unsafe { OwnedFd::from_raw_fd(fd) }, ptr.0 - base))
    }

    pub(super) fn attributes(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        let _entered = self.enter()?;
        let (mut memory_type, mut managed, mut legacy) = (0u32, 0u32, 0u32);
        let (mut buffer, mut base, mut size, mut handles, mut pool) =
            (0u64, 0u64, 0u64, 0u64, 0u64);
        let mut owner: c_int = 0;
        let mut names = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            Attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        ];
        let mut places: [*mut c_void; 9] = [
            (&raw mut memory_type).cast(),
            (&raw mut managed).cast(),
            (&raw mut legacy).cast(),
            (&raw mut buffer).cast(),
            (&raw mut base).cast(),
            (&raw mut size).cast(),
            (&raw mut handles).cast(),
            (&raw mut pool).cast(),
            (&raw mut owner).cast(),
        ];
        // SAFETY: there is one result per attribute. Each result is zeroed and at least as large as
        // its attribute. So an attribute that the driver writes with fewer bytes, such as a flag,
        // reads correctly.
        let code = unsafe {
            let count = names.len() as u32;
            (self.driver.cuPointerGetAttributes)(
                count,
                names.as_mut_ptr(),
                places.as_mut_ptr(),
                ptr.0,
            )
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
        // The driver reports that memory opened from a 64-byte handle can be exported, but
        // exporting it fails.
        let by_handle = |held: &Held| held.base.0 == base && held.segments.is_empty();
        let opened = self.opened.iter().any(by_handle);
        let share = match () {
            () if managed != 0 => Share::Never(Unshared::Managed),
            () if memory_type == TYPE_HOST => Share::Never(Unshared::Host),
            () if pool != 0 => Share::Never(Unshared::Pool),
            () if opened => Share::Never(Unshared::NoHandleType),
            () if legacy != 0 => Share::Legacy,
            () if handles & descriptor != 0 => Share::Descriptor,
            () => Share::Never(Unshared::NoHandleType),
        };
        let around = |held: &&Held| ptr >= held.base && ptr.0 - held.base.0 < held.virtual_size();
        let mut reservation = None;
        if !opened && matches!(share, Share::Descriptor | Share::Never(Unshared::NoHandleType)) {
            // Virtual memory may consist of adjacent segments. Here CUDA's start and size describe
            // the reserved range. HIP does not report that range, but this device knows its own.
            let own = self.owned.iter().chain(&self.opened).find(around);
            reservation = Some(own.map_or(DevicePtr(base), |held| held.base));
            (base, size) = self.segment_at(ptr)?;
        }
        // Memory that this device has opened may belong to another device.
        let exportable = matches!(share, Share::Legacy | Share::Descriptor);
        if exportable && owner != self.device && !self.opened.iter().any(|held| around(&held)) {
            return Err(DeviceError::OtherDevice { owner: owner as u32, asked: self.caps.ordinal });
        }
        Ok(Allocation { base: DevicePtr(base), size, buffer, share, reservation })
    }

    fn segment_at(&self, ptr: DevicePtr) -> Result<(u64, u64), DeviceError> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: both results are written to local variables.
        match unsafe { (self.driver.cuMemGetAddressRange_v2)(&raw mut base, &raw mut size, ptr.0) }
        {
            driver::INVALID_VALUE | driver::NOT_FOUND => Err(DeviceError::NotDeviceMemory),
            code => check(code).map(|()| (base, size as u64)),
        }
    }

    pub(super) fn export_allocation(
        &mut self,
        allocation: &Allocation,
    ) -> Result<Handle, DeviceError> {
        let _entered = self.enter()?;
        match allocation.share {
            Share::Never(why) => Err(DeviceError::NotExportable(why)),
            Share::Descriptor => self.export_virtual(allocation.base).map(Handle::Descriptor),
            Share::Legacy => {
                let mut handle = CUipcMemHandle { reserved: [0; LEGACY_HANDLE] };
                // SAFETY: the result is written to a local variable.
                let code =
                    unsafe { (self.driver.cuIpcGetMemHandle)(&raw mut handle, allocation.base.0) };
                if code == driver::INVALID_VALUE || code == driver::INVALID_DEVICE_POINTER {
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

    /// Opens memory of another process.
    ///
    /// # Safety
    /// The contract of [`Device::open`](crate::Device::open) applies.
    pub(super) unsafe fn open_handle(
        &mut self,
        handle: &Handle,
        size: u64,
    ) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let opened = match handle {
            Handle::Descriptor(fd) => self.import_virtual(&[(fd.as_fd(), size)], size)?,
            Handle::Segments(segments) => {
                let segments: Vec<_> =
                    segments.iter().map(|(fd, size)| (fd.as_fd(), *size)).collect();
                self.import_virtual(&segments, size)?
            }
            Handle::Legacy(bytes) if self.exported.contains(bytes) => {
                return Err(DeviceError::SameProcess);
            }
            Handle::Legacy(bytes) => {
                let mut base = 0;
                let handle = CUipcMemHandle { reserved: bytes.map(|byte| byte as _) };
                // SAFETY: the result is written to a local variable. The driver rejects invalid
                // handles.
                let code = unsafe {
                    (self.driver.cuIpcOpenMemHandle_v2)(
                        &raw mut base,
                        handle,
                        LAZY_ENABLE_PEER_ACCESS,
                    )
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

    /// Closes memory that `open_handle` opened.
    ///
    /// # Safety
    /// No queued work uses the memory.
    pub(super) unsafe fn close_opened(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.opened.iter().position(|opened| opened.base == base);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: `open_handle` opened the memory, and its entry is removed below, so it is closed
        // once. The caller guarantees that nothing uses it.
        unsafe { self.close_one(&self.opened[at]) }?;
        self.opened.swap_remove(at);
        Ok(())
    }

    /// Closes opened memory with the driver call for its kind.
    ///
    /// # Safety
    /// No queued work uses the memory, and it is not used again.
    unsafe fn close_one(&self, opened: &Held) -> Result<(), DeviceError> {
        match opened.segments.is_empty() {
            // SAFETY: the driver opened the memory from a handle, and the caller no longer uses it.
            true => check(unsafe { (self.driver.cuIpcCloseMemHandle)(opened.base.0) }),
            // SAFETY: `import_virtual` mapped the memory, and the caller no longer uses it.
            false => unsafe { self.unmap_virtual(opened) },
        }
    }

    /// Pins processor memory, and returns its device address.
    ///
    /// # Safety
    /// The bytes stay mapped until they are unregistered.
    pub(super) unsafe fn register(
        &mut self,
        ptr: NonNull<u8>,
        len: usize,
    ) -> Result<DevicePtr, DeviceError> {
        let _entered = self.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        let host: *mut c_void = ptr.as_ptr().cast();
        // SAFETY: the caller guarantees that the bytes are mapped.
        check(unsafe { (self.driver.cuMemHostRegister_v2)(host, len, flags) })?;
        let mut seen = 0;
        // SAFETY: the result is written to a local variable. The memory was registered just above.
        let told =
            check(unsafe { (self.driver.cuMemHostGetDevicePointer_v2)(&raw mut seen, host, 0) });
        if let Err(error) = told {
            // SAFETY: the memory was registered above, and nothing uses it yet.
            unsafe { (self.driver.cuMemHostUnregister)(host) };
            return Err(error);
        }
        let pinned = Pinned { ptr, len: len as u64, seen: DevicePtr(seen) };
        self.pinned.push(pinned);
        Ok(pinned.seen)
    }

    /// Unpins memory that `register` pinned.
    ///
    /// # Safety
    /// No queued work uses the memory.
    pub(super) unsafe fn unregister(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        let _entered = self.enter()?;
        let at = self.pinned.iter().position(|pinned| pinned.ptr == ptr);
        let at = at.ok_or(DeviceError::NotDeviceMemory)?;
        // SAFETY: `register` registered the memory, and its entry is removed below, so it is
        // unregistered once.
        check(unsafe { (self.driver.cuMemHostUnregister)(ptr.as_ptr().cast()) })?;
        self.pinned.swap_remove(at);
        Ok(())
    }

    /// Releases all remaining memory. The caller has waited for all queued work. Ignores errors,
    /// because only drop calls this.
    pub(super) fn give_all_back(&mut self) {
        for pinned in std::mem::take(&mut self.pinned) {
            // SAFETY: `register` registered the memory. The caller of `pin` keeps it mapped until
            // it is unpinned, which happens here.
            unsafe { (self.driver.cuMemHostUnregister)(pinned.ptr.as_ptr().cast()) };
        }
        for opened in std::mem::take(&mut self.opened) {
            // SAFETY: the device opened the memory, and its streams have finished.
            let _ = unsafe { self.close_one(&opened) };
        }
        for owned in std::mem::take(&mut self.owned) {
            // SAFETY: `alloc_as` allocated the memory, and the streams have finished.
            let _ = unsafe { self.give_back(&owned) };
        }
    }
}

/// Returns the start and length of the pages that contain a range.
fn whole_pages(ptr: u64, len: u64, page: u64) -> Option<(u64, u64)> {
    let base = ptr - ptr.checked_rem(page)?;
    let end = ptr.checked_add(len)?.checked_next_multiple_of(page)?;
    Some((base, end - base))
}

#[cfg(test)]
mod tests {
    use super::whole_pages;

    #[test]
    fn a_dmabuf_covers_whole_pages_of_every_size() {
        let at = 0x7f00_0001_2100;
        assert_eq!(whole_pages(at, 0x1000, 1 << 12), Some((0x7f00_0001_2000, 0x2000)));
        assert_eq!(whole_pages(at, 0x1000, 1 << 16), Some((0x7f00_0001_0000, 1 << 16)));
        assert_eq!(whole_pages(u64::MAX - 10, 5, 1 << 16), None);
    }
}
