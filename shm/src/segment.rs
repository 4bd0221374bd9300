//! Sealed anonymous memory that processes can share. Slow path only: the calls belong to the setup,
//! may allocate, and make system calls. No call waits for another process.
//!
//! A segment is a memfd. It has no name, so a killed process leaves nothing behind, and only
//! processes that receive the descriptor can open it. Its pages are allocated at creation, so that
//! a lack of memory is an error now, not a signal later. Its size is sealed, so that no peer can
//! truncate it and cause SIGBUS. An attaching process checks three things before the first access:
//! the seals, the agreed size, and that every page is present. Only ordinary anonymous files
//! (tmpfs) are accepted: a hole punched later into huge pages causes SIGBUS, while a hole in
//! ordinary pages reads as zeros.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, MutexGuard, Weak};

use crate::error::SegmentError;
use crate::per_process::PerProcess;
use crate::room;
use fishplate_core::mem::{Region, RegionKind};
use fishplate_core::sync::primitive::{AtomicU32, Ordering};
use static_assertions::assert_impl_all;

pub(crate) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Seals that fix the size and forbid further seals.
const FIXED: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The accesses that a mapping allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Allows loads only. A store faults.
    Read,
    /// Allows loads and stores.
    Write,
}

impl Access {
    fn protection(self) -> i32 {
        match self {
            Access::Read => libc::PROT_READ,
            Access::Write => libc::PROT_READ | libc::PROT_WRITE,
        }
    }
}

/// Largest memory, in bytes, that [`Mapping::quickly`] maps with all pages in advance.
const POPULATED: usize = 1 << 20;

/// Mapped memory of a descriptor. Dropping it unmaps the memory.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping holds an address and a length. The address is valid in every thread, and the
// type never accesses the bytes.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference only the address and the length can be read.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a descriptor.
    pub fn new(fd: BorrowedFd<'_>, len: usize, access: Access) -> Result<Self, SegmentError> {
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: without MAP_FIXED the kernel chooses a free range, so this replaces no memory of
        // ours.
        let at = unsafe {
            libc::mmap(ptr::null_mut(), len, access.protection(), flags, fd.as_raw_fd(), 0)
        };
        Self::own(at, len)
    }

    /// Maps like [`new`](Mapping::new), but maps the pages of large memory only when they are
    /// accessed. Mapping all pages at once takes half a millisecond per MiB.
    pub fn quickly(fd: BorrowedFd<'_>, len: usize, access: Access) -> Result<Self, SegmentError> {
        if len <= POPULATED {
            return Self::new(fd, len, access);
        }
        // SAFETY: without MAP_FIXED the kernel chooses a free range, so this replaces no memory of
        // ours.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                access.protection(),
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        Self::own(at, len)
    }

    /// Maps `head + ring` bytes, and directly behind them the last `ring` bytes again. So every
    /// range that starts in the ring, and is no longer than the ring, is contiguous.
    pub(crate) fn twice(
        fd: BorrowedFd<'_>,
        head: usize,
        ring: usize,
        access: Access,
    ) -> Result<Self, SegmentError> {
        let len = head + 2 * ring;
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: without MAP_FIXED the kernel chooses a free range, so this replaces no memory of
        // ours.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_NONE, reserve, -1, 0) };
        let whole = Self::own(at, len)?;
        for (place, offset, len) in [(0, 0, head + ring), (head + ring, head, ring)] {
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE | libc::MAP_FIXED;
            // SAFETY: the part lies inside the range reserved above, which `whole` owns and nothing
            // uses yet.
            let part = unsafe {
                let at = whole.ptr.as_ptr().add(place).cast();
                libc::mmap(
                    at,
                    len,
                    access.protection(),
                    flags,
                    fd.as_raw_fd(),
                    offset as libc::off_t,
                )
            };
            if part == libc::MAP_FAILED {
                return Err(SegmentError::System(errno()));
            }
        }
        Ok(whole)
    }

    fn own(at: *mut libc::c_void, len: usize) -> Result<Self, SegmentError> {
        if at == libc::MAP_FAILED {
            return Err(SegmentError::System(errno()));
        }
        let ptr = NonNull::new(at.cast()).ok_or(SegmentError::System(libc::ENOMEM))?;
        Ok(Mapping { ptr, len })
    }

    /// Returns the address of the first byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the size in bytes.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `self` owns exactly this range. Pointers into it are valid only while the mapping
        // exists.
        unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// Creates a memfd of `len` bytes with all its pages allocated, not sealed yet.
pub fn create(len: usize) -> Result<OwnedFd, SegmentError> {
    let size = libc::off_t::try_from(len).map_err(|_| SegmentError::Length)?;
    if size == 0 {
        return Err(SegmentError::Length);
    }
    // Without these checks, the kernel could send a signal instead of an error.
    room::check_file(len)?;
    room::check_room(len)?;
    // SAFETY: the name is a C string literal.
    let fd = unsafe {
        libc::memfd_create(c"fishplate".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING)
    };
    if fd < 0 {
        return Err(SegmentError::System(errno()));
    }
    // SAFETY: `memfd_create` returned this new descriptor, so nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    loop {
        // SAFETY: the call takes no pointers, and the descriptor is ours.
        if unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, size) } == 0 {
            return Ok(fd);
        }
        match errno() {
            libc::EINTR => {}
            code => return Err(SegmentError::System(code)),
        }
    }
}

/// Fixes the size of a memfd, and forbids further seals.
pub fn seal(fd: BorrowedFd<'_>) -> Result<(), SegmentError> {
    add_seals(fd, FIXED)
}

/// Fixes the size of a memfd, and forbids further seals and new writable mappings. A process that
/// receives the descriptor can then only read. Existing writable mappings remain.
pub(crate) fn seal_against_writers(fd: BorrowedFd<'_>) -> Result<(), SegmentError> {
    add_seals(fd, FIXED | libc::F_SEAL_FUTURE_WRITE)
}

fn add_seals(fd: BorrowedFd<'_>, seals: i32) -> Result<(), SegmentError> {
    // SAFETY: the call takes no pointers, and the descriptor stays open while it is borrowed.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(SegmentError::System(errno()));
    }
    Ok(())
}

/// Returns the seals of a descriptor, or an error if it is not sealable memory. Never blocks, for
/// any kind of descriptor.
fn seals(fd: BorrowedFd<'_>) -> Result<i32, SegmentError> {
    // SAFETY: the call takes no pointers, and the descriptor stays open while it is borrowed.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 { Err(SegmentError::Unsealed) } else { Ok(seals) }
}

fn stat(fd: BorrowedFd<'_>) -> Result<libc::stat, SegmentError> {
    // SAFETY: `stat` consists of integers, so zero bytes are a valid value.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is a local structure of the type that the call fills.
    match unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } {
        0 => Ok(stat),
        _ => Err(SegmentError::System(errno())),
    }
}

/// Returns the size, in bytes, of a descriptor that is memory, sealed or not. Never blocks.
pub fn memory_size(fd: BorrowedFd<'_>) -> Result<u64, SegmentError> {
    seals(fd)?;
    u64::try_from(stat(fd)?.st_size).map_err(|_| SegmentError::Length)
}

/// The larger of size and allocated pages, in bytes. Pages can lie beyond the end of the file.
pub(crate) fn memory_held(fd: BorrowedFd<'_>) -> Result<u64, SegmentError> {
    let size = memory_size(fd)?;
    Ok(size.max(pages(&stat(fd)?)))
}

/// Size of the allocated pages, in bytes. A block (`st_blocks`) has 512 bytes, whatever the page
/// size.
fn pages(stat: &libc::stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512)
}

/// Size of a huge page in bytes: the memory that one page of page table entries maps.
fn huge_page() -> u64 {
    // SAFETY: the call takes no pointer.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE as u64);
    page * (page / 8)
}

/// Checks that a peer's descriptor is safe to map. It must be sealed and have ordinary pages, the
/// agreed size, and all pages allocated. Pages beyond the end of the file are refused, because
/// freeing them could take long. Never blocks, for any kind of descriptor.
pub fn verify(fd: BorrowedFd<'_>, expected: u64) -> Result<usize, SegmentError> {
    let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    if seals(fd)? & needed != needed {
        return Err(SegmentError::Unsealed);
    }
    // SAFETY: `statfs` consists of integers, so zero bytes are a valid value.
    let mut system: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `system` is a local structure of the type that the call fills.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), &mut system) } != 0 {
        return Err(SegmentError::System(errno()));
    }
    if system.f_type != libc::TMPFS_MAGIC {
        return Err(SegmentError::Pages);
    }
    // Reads the size after the seals, because a sealed size cannot change.
    let stat = stat(fd)?;
    let actual = u64::try_from(stat.st_size).map_err(|_| SegmentError::Length)?;
    if actual != expected {
        return Err(SegmentError::Size { actual, expected });
    }
    let held = pages(&stat);
    if held < actual {
        return Err(SegmentError::Sparse);
    }
    // The kernel may have allocated a huge page at the end of the file.
    if held > actual.next_multiple_of(huge_page()) {
        return Err(SegmentError::Size { actual: held, expected });
    }
    match usize::try_from(actual) {
        Ok(len) if len > 0 && len <= isize::MAX as usize => Ok(len),
        _ => Err(SegmentError::Length),
    }
}

/// Sealed shared memory of this process. A process that imports a region of a segment can read and
/// write the whole segment.
///
/// Clones are handles to the same memory. Dropping the last handle unmaps the memory. A
/// [`ShmRail`](crate::ShmRail) holds a handle while a region of the segment is registered.
#[derive(Clone, Debug)]
pub struct Segment {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    number: u32,
    fd: OwnedFd,
    mapping: Mapping,
}

assert_impl_all!(Segment: Send, Sync);

static NEXT: AtomicU32 = AtomicU32::new(0);

/// This process's segments, by number. A region stores only the number.
static SEGMENTS: PerProcess<(u32, Weak<Inner>)> = PerProcess::new();

fn segments() -> MutexGuard<'static, VecDeque<(u32, Weak<Inner>)>> {
    SEGMENTS.lock()
}

impl Segment {
    /// Creates a segment of `len` zero bytes, rounded up to whole pages.
    pub fn create(len: usize) -> Result<Self, SegmentError> {
        let len = len.checked_next_multiple_of(PAGE).ok_or(SegmentError::Length)?;
        let fd = create(len)?;
        let mapping = Mapping::new(fd.as_fd(), len, Access::Write)?;
        seal(fd.as_fd())?;
        // Relaxed: the number only needs to be unique.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let segment = Segment { inner: Arc::new(Inner { number, fd, mapping }) };
        segment.enter();
        Ok(segment)
    }

    /// Adds the segment to the list of this process, unless it is there. A forked child has a list
    /// of its own.
    fn enter(&self) {
        let mut known = segments();
        known.retain(|(_, segment)| segment.strong_count() > 0);
        if known.iter().all(|(number, _)| *number != self.inner.number) {
            known.push_back((self.inner.number, Arc::downgrade(&self.inner)));
        }
    }

    pub(crate) fn find(number: u32) -> Option<Self> {
        let known = segments();
        let (_, segment) = known.iter().find(|(n, _)| *n == number)?;
        segment.upgrade().map(|inner| Segment { inner })
    }

    /// Returns the segment's number, which is unique within this process.
    pub fn number(&self) -> u32 {
        self.inner.number
    }

    /// Returns the address of the first byte. Peers may write to the memory at any time, so use
    /// atomics and raw copies only.
    pub fn ptr(&self) -> NonNull<u8> {
        self.inner.mapping.ptr()
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.inner.mapping.len()
    }

    /// Returns false: a segment has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the region of `len` bytes at `offset`, ready to be registered.
    ///
    /// # Safety
    /// The contract of [`Region::new`] applies. The memory lives as long as a handle of the
    /// segment.
    pub unsafe fn region(&self, offset: usize, len: usize) -> Result<Region, SegmentError> {
        self.enter();
        let kind = RegionKind::Shared { segment: self.inner.number, offset: offset as u64 };
        // SAFETY: the caller upholds the contract of `Region::new`, which is all that `cut`
        // requires.
        unsafe { cut(&self.inner.mapping, offset, len, kind) }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.inner.fd.as_fd()
    }
}

/// Returns the region of `len` bytes at `offset` of a mapping.
///
/// # Safety
/// The contract of [`Region::new`] applies.
pub(crate) unsafe fn cut(
    mapping: &Mapping,
    offset: usize,
    len: usize,
    kind: RegionKind,
) -> Result<Region, SegmentError> {
    match offset.checked_add(len) {
        Some(end) if end <= mapping.len() => {}
        _ => return Err(SegmentError::Range),
    }
    // SAFETY: `offset + len <= mapping.len()` was checked above. The caller upholds the rest of the
    // contract of `Region::new`.
    Ok(unsafe { Region::new(mapping.ptr().add(offset), len, kind) })
}

/// The unit of sizes, in bytes: the page size of x86-64. On machines with larger pages, the kernel
/// rounds mappings up.
pub const PAGE: usize = 4096;

#[cfg(test)]
mod tests;
