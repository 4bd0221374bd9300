//! Processor memory as a device: a stand-in for a GPU in tests, and on machines without one.
//!
//! An allocation is an anonymous file of fixed size, which this process maps. Its handle is the
//! descriptor, and device addresses are host addresses. The thread that queues a copy makes the
//! copy at once, so every mark is reached. [`Device::copy`], [`Device::write_word`],
//! [`Device::mark`] and [`Device::reached`] make no system call, do not allocate and do not wait.
//! All other methods are slow paths.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fishplate_core::mem::copy_bytes;
use fishplate_shm::SegmentError;
use fishplate_shm::extension::{self, Access, Mapping, PAGE};

use super::done::tell;
use super::export::is_used_at_home;
use super::{
    Allocation, Bell, Device, DeviceCaps, DeviceError, DevicePtr, Handle, Mark, Share, Unshared,
    Uuid,
};

/// The UUID of processor memory, the same on every machine. Handles never arrive from another
/// machine.
pub(crate) const UUID: Uuid = *b"processor memory";

type Identity = (u64, u64);

/// The files that this process allocated, through any device. The process does not open handles to
/// them.
static MADE: Mutex<BTreeSet<Identity>> = Mutex::new(BTreeSet::new());

fn made() -> MutexGuard<'static, BTreeSet<Identity>> {
    // Ignores poisoning, because a panic under this lock does not leave the set inconsistent.
    MADE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn identity(fd: BorrowedFd<'_>) -> Result<Identity, DeviceError> {
    // SAFETY: `stat` consists of integers, so zero bytes are a valid value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is a local structure of the type that the call fills.
    match unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } {
        0 => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(DeviceError::Driver(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))),
    }
}

impl From<SegmentError> for DeviceError {
    fn from(error: SegmentError) -> Self {
        match error {
            SegmentError::System(libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE)
            | SegmentError::Length
            | SegmentError::Room { .. }
            | SegmentError::FileSize { .. } => DeviceError::Exhausted,
            SegmentError::System(code) => DeviceError::Driver(code),
            _ => DeviceError::BadHandle,
        }
    }
}

#[derive(Debug)]
struct Made {
    mapping: Mapping,
    fd: OwnedFd,
    identity: Identity,
    buffer: u64,
}

impl Drop for Made {
    fn drop(&mut self) {
        made().remove(&self.identity);
    }
}

#[derive(Debug)]
struct Opened {
    mapping: Mapping,
    buffer: u64,
}

fn buffer() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: the id only needs to be unique.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Processor memory, shared by descriptors.
#[derive(Debug, Default)]
pub struct HostDevice {
    allocations: BTreeMap<DevicePtr, Made>,
    opened: BTreeMap<DevicePtr, Opened>,
    pinned: BTreeMap<DevicePtr, usize>,
}

fn rest(ranges: Option<(&DevicePtr, usize)>, ptr: DevicePtr) -> Option<u64> {
    let (base, size) = ranges?;
    (size as u64).checked_sub(ptr.0 - base.0).filter(|rest| *rest > 0)
}

impl HostDevice {
    /// Creates a device without memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of allocations and of opened allocations.
    pub fn held(&self) -> (usize, usize) {
        (self.allocations.len(), self.opened.len())
    }
}

impl Drop for HostDevice {
    /// Frees all allocations. Memory that importers in this process still use stays mapped until
    /// the process exits.
    fn drop(&mut self) {
        for (base, made) in std::mem::take(&mut self.allocations) {
            if is_used_at_home(base) {
                std::mem::forget(made);
            }
        }
    }
}

// SAFETY: an address lies in a mapping of the whole file. `allocations` or `opened` keeps the
// mapping until it is freed or closed. Copies finish before `copy` returns, so every mark is
// reached.
unsafe impl Device for HostDevice {
    fn caps(&self) -> DeviceCaps {
        DeviceCaps {
            uuid: UUID,
            ordinal: 0,
            streams: 4,
            marks: u32::MAX,
            write_word: true,
            must_flush: false,
        }
    }

    fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        let len = usize::try_from(size).ok().and_then(|size| size.checked_next_multiple_of(PAGE));
        let len = len.filter(|len| *len > 0).ok_or(DeviceError::Exhausted)?;
        let fd = extension::create(len)?;
        let mapping = Mapping::new(fd.as_fd(), len, Access::Write)?;
        extension::seal(fd.as_fd())?;
        let identity = identity(fd.as_fd())?;
        made().insert(identity);
        let base = DevicePtr(mapping.ptr().as_ptr() as u64);
        self.allocations.insert(base, Made { mapping, fd, identity, buffer: buffer() });
        Ok(base)
    }

    unsafe fn free(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        self.allocations.remove(&base).map(drop).ok_or(DeviceError::NotDeviceMemory)
    }

    fn keep(&mut self, base: DevicePtr) {
        std::mem::forget(self.allocations.remove(&base));
    }

    fn allocation(&self, ptr: DevicePtr) -> Result<Allocation, DeviceError> {
        let own = self.allocations.range(..=ptr).next_back();
        if let Some((base, made)) =
            own.filter(|(base, made)| ptr.0 - base.0 < made.mapping.len() as u64)
        {
            let size = made.mapping.len() as u64;
            let share = Share::Descriptor;
            return Ok(Allocation {
                base: *base,
                size,
                buffer: made.buffer,
                share,
                reservation: None,
            });
        }
        let opened = self.opened.range(..=ptr).next_back();
        let opened = opened.filter(|(base, opened)| ptr.0 - base.0 < opened.mapping.len() as u64);
        let (base, opened) = opened.ok_or(DeviceError::NotDeviceMemory)?;
        let (size, share) = (opened.mapping.len() as u64, Share::Never(Unshared::NoHandleType));
        Ok(Allocation { base: *base, size, buffer: opened.buffer, share, reservation: None })
    }

    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        let made =
            self.allocations.get(&allocation.base).filter(|made| made.buffer == allocation.buffer);
        let fd = made.ok_or(DeviceError::NotDeviceMemory)?.fd.try_clone();
        let code = |error: std::io::Error| SegmentError::System(error.raw_os_error().unwrap_or(0));
        Ok(Handle::Descriptor(fd.map_err(code)?))
    }

    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError> {
        let Handle::Descriptor(fd) = handle else { return Err(DeviceError::BadHandle) };
        // `verify` accepts only a sealed file of this size with all its pages, so accesses through
        // the mapping cannot fault.
        let len = extension::verify(fd.as_fd(), size)?;
        if made().contains(&identity(fd.as_fd())?) {
            return Err(DeviceError::SameProcess);
        }
        let mapping = Mapping::quickly(fd.as_fd(), len, Access::Write)?;
        let base = DevicePtr(mapping.ptr().as_ptr() as u64);
        self.opened.insert(base, Opened { mapping, buffer: buffer() });
        Ok(base)
    }

    unsafe fn close(&mut self, base: DevicePtr) -> Result<(), DeviceError> {
        let opened = self.opened.remove(&base).ok_or(DeviceError::NotDeviceMemory)?;
        extension::unmap(opened.mapping);
        Ok(())
    }

    fn reaches(&self, uuid: &Uuid) -> bool {
        *uuid == UUID
    }

    unsafe fn pin(&mut self, ptr: NonNull<u8>, len: usize) -> Result<DevicePtr, DeviceError> {
        let at = DevicePtr(ptr.as_ptr() as u64);
        self.pinned.insert(at, len);
        Ok(at)
    }

    unsafe fn unpin(&mut self, ptr: NonNull<u8>) -> Result<(), DeviceError> {
        let at = DevicePtr(ptr.as_ptr() as u64);
        self.pinned.remove(&at).map(drop).ok_or(DeviceError::NotDeviceMemory)
    }

    fn host_view(&self, ptr: DevicePtr, len: u64) -> Option<NonNull<u8>> {
        let known = [
            self.allocations
                .range(..=ptr)
                .next_back()
                .map(|(base, made)| (base, made.mapping.len())),
            self.opened
                .range(..=ptr)
                .next_back()
                .map(|(base, opened)| (base, opened.mapping.len())),
            self.pinned.range(..=ptr).next_back().map(|(base, len)| (base, *len)),
        ];
        let inside =
            known.into_iter().any(|range| rest(range, ptr).is_some_and(|rest| len <= rest));
        NonNull::new(ptr.0 as *mut u8).filter(|_| inside)
    }

    #[inline]
    unsafe fn copy(
        &mut self,
        _: u8,
        to: DevicePtr,
        from: DevicePtr,
        len: u64,
    ) -> Result<(), DeviceError> {
        // SAFETY: device addresses are host addresses, and the caller guarantees that both ranges
        // are mapped.
        unsafe { copy_bytes(from.0 as *const u8, to.0 as *mut u8, len as usize) };
        Ok(())
    }

    #[inline]
    unsafe fn write_word(&mut self, _: u8, word: DevicePtr, value: u64) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that the word is mapped and aligned to 8. The word is
        // accessed only as an atomic.
        let word = unsafe { AtomicU64::from_ptr(word.0 as *mut u64) };
        tell(word, value);
        Ok(())
    }

    #[inline]
    fn mark(&mut self, _: u8) -> Result<Mark, DeviceError> {
        Ok(Mark(0))
    }

    #[inline]
    fn reached(&mut self, _: Mark) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn ring(&mut self, _: u8, _: Mark, bell: &Bell) -> Result<(), DeviceError> {
        bell.ring();
        Ok(())
    }

    fn dmabuf(&mut self, _ptr: DevicePtr, _len: u64) -> Option<(OwnedFd, u64)> {
        None
    }

    fn flush_remote_writes(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
