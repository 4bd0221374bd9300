//! Memory of the processor as a device: what lets processes of one machine use each other's memory
//! the way a GPU's is used, and what every test without a GPU runs on.
//!
//! An allocation is an anonymous file of fixed size, mapped here; its handle is the descriptor. A
//! place is its address. Copies are made at once by the thread that queues them, so all that was
//! queued has ended, and every mark is reached. [`Device::copy`], [`Device::write_word`],
//! [`Device::mark`] and [`Device::reached`] make no system call, allocate nothing and wait for
//! nothing; everything else is slow path.

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
use super::{Allocation, Device, DeviceCaps, DeviceError, DevicePtr, Handle, Mark, Share, Unshared, Uuid};

/// Names the memory of the processors of this machine: no handle of another gets here.
pub(crate) const UUID: Uuid = *b"processor memory";

/// Device and inode of a file.
type Identity = (u64, u64);

/// The files of this process's allocations, of any device: their handles are not opened here.
static MADE: Mutex<BTreeSet<Identity>> = Mutex::new(BTreeSet::new());

fn made() -> MutexGuard<'static, BTreeSet<Identity>> {
    // No panic between lock and unlock leaves the set half changed.
    MADE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn identity(fd: BorrowedFd<'_>) -> Result<Identity, DeviceError> {
    // SAFETY: all zeroes is a value of `stat`, a structure of plain numbers.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is ours and of the type that the call fills.
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

/// The next buffer id.
fn buffer() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only the number's being unique matters.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Memory of the processor, shared by descriptors.
#[derive(Debug, Default)]
pub struct HostDevice {
    /// What was allocated here, by first byte.
    allocations: BTreeMap<DevicePtr, Made>,
    /// What peers allocated and is open here, by first byte.
    opened: BTreeMap<DevicePtr, Opened>,
    /// What is pinned: first byte and size.
    pinned: BTreeMap<DevicePtr, usize>,
}

/// How many bytes there are from a place on, in the range that it lies in.
fn rest(ranges: Option<(&DevicePtr, usize)>, ptr: DevicePtr) -> Option<u64> {
    let (base, size) = ranges?;
    (size as u64).checked_sub(ptr.0 - base.0).filter(|rest| *rest > 0)
}

impl HostDevice {
    /// A device without memory yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What is allocated and what is open, in pieces.
    pub fn held(&self) -> (usize, usize) {
        (self.allocations.len(), self.opened.len())
    }
}

impl Drop for HostDevice {
    /// Frees what was allocated. What importers in this process still use stays mapped until the
    /// process ends.
    fn drop(&mut self) {
        for (base, made) in std::mem::take(&mut self.allocations) {
            if is_used_at_home(base) {
                std::mem::forget(made);
            }
        }
    }
}

// SAFETY: memory is a mapping of its whole file, kept in `allocations` or `opened` until it is
// freed or closed. Copies end before `copy` returns, so every mark is reached.
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
        if let Some((base, made)) = own.filter(|(base, made)| ptr.0 - base.0 < made.mapping.len() as u64) {
            let size = made.mapping.len() as u64;
            let share = Share::Descriptor;
            return Ok(Allocation { base: *base, size, buffer: made.buffer, share, reservation: None });
        }
        let opened = self.opened.range(..=ptr).next_back();
        let opened = opened.filter(|(base, opened)| ptr.0 - base.0 < opened.mapping.len() as u64);
        let (base, opened) = opened.ok_or(DeviceError::NotDeviceMemory)?;
        let (size, share) = (opened.mapping.len() as u64, Share::Never(Unshared::NoHandleType));
        Ok(Allocation { base: *base, size, buffer: opened.buffer, share, reservation: None })
    }

    fn export(&mut self, allocation: &Allocation) -> Result<Handle, DeviceError> {
        let made = self.allocations.get(&allocation.base).filter(|made| made.buffer == allocation.buffer);
        let fd = made.ok_or(DeviceError::NotDeviceMemory)?.fd.try_clone();
        let code = |error: std::io::Error| SegmentError::System(error.raw_os_error().unwrap_or(0));
        Ok(Handle::Descriptor(fd.map_err(code)?))
    }

    unsafe fn open(&mut self, handle: &Handle, size: u64) -> Result<DevicePtr, DeviceError> {
        let Handle::Descriptor(fd) = handle else { return Err(DeviceError::BadHandle) };
        // Sealed, of that size, and with all its pages: no access through the mapping can fault.
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
            self.allocations.range(..=ptr).next_back().map(|(base, made)| (base, made.mapping.len())),
            self.opened.range(..=ptr).next_back().map(|(base, opened)| (base, opened.mapping.len())),
            self.pinned.range(..=ptr).next_back().map(|(base, len)| (base, *len)),
        ];
        let inside = known.into_iter().any(|range| rest(range, ptr).is_some_and(|rest| len <= rest));
        NonNull::new(ptr.0 as *mut u8).filter(|_| inside)
    }

    #[inline]
    unsafe fn copy(&mut self, _: u8, to: DevicePtr, from: DevicePtr, len: u64) -> Result<(), DeviceError> {
        // SAFETY: places are addresses, and both ranges are mapped here: handed on to our caller.
        unsafe { copy_bytes(from.0 as *const u8, to.0 as *mut u8, len as usize) };
        Ok(())
    }

    #[inline]
    unsafe fn write_word(&mut self, _: u8, word: DevicePtr, value: u64) -> Result<(), DeviceError> {
        // SAFETY: mapped, a multiple of 8,
        // and only accessed as an atomic meanwhile: our caller's promise.
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

    fn dmabuf(&mut self, _ptr: DevicePtr, _len: u64) -> Option<(OwnedFd, u64)> {
        None
    }

    fn flush_remote_writes(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
