//! Bytes that processes share, in a memfd. The first page holds the memory's owner and state.
//!
//! The state makes several real processes act as one driver. It counts how many processes have the
//! memory open, and records whether the memory was freed. Programs see only the bytes after the
//! first page.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fishplate_shm::extension::{self, Access, Mapping, PAGE};

use crate::{DeviceError, Uuid};

const MAGIC: u64 = u64::from_le_bytes(*b"fakevram");

pub(super) const MAGIC_HANDLE: u64 = u64::from_le_bytes(*b"fakeipc1");

pub(super) const POISON: u8 = 0xDB;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub pid: u64,
    /// Distinguishes a process from an earlier process with the same process ID.
    pub start: u64,
}

#[repr(C)]
struct Header {
    magic: AtomicU64,
    id: AtomicU64,
    size: AtomicU64,
    pid: AtomicU64,
    start: AtomicU64,
    uuid: [AtomicU64; 2],
    state: AtomicU32,
    opens: AtomicU32,
}

const LIVES: u32 = 0;
const FREED: u32 = 1;
const ORPHAN: u32 = 2;

pub(super) struct FakeMemory {
    mapping: Mapping,
    fd: OwnedFd,
    size: u64,
}

impl fmt::Debug for FakeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeMemory").field("id", &self.id()).field("size", &self.size).finish()
    }
}

impl FakeMemory {
    pub fn create(
        size: u64,
        id: u64,
        owner: Owner,
        uuid: &Uuid,
    ) -> Result<FakeMemory, DeviceError> {
        let len = usize::try_from(size).ok().and_then(|size| size.checked_next_multiple_of(PAGE));
        let len = len.and_then(|len| len.checked_add(PAGE)).ok_or(DeviceError::Exhausted)?;
        let made = extension::create(len).and_then(|fd| {
            let mapping = Mapping::new(fd.as_fd(), len, Access::Write)?;
            extension::seal(fd.as_fd())?;
            Ok((fd, mapping))
        });
        let (fd, mapping) = made.map_err(|_| DeviceError::Exhausted)?;
        let memory = FakeMemory { mapping, fd, size };
        let header = memory.header();
        header.id.store(id, Ordering::SeqCst);
        header.size.store(size, Ordering::SeqCst);
        header.pid.store(owner.pid, Ordering::SeqCst);
        header.start.store(owner.start, Ordering::SeqCst);
        for (half, bytes) in header.uuid.iter().zip(uuid.chunks_exact(8)) {
            half.store(u64::from_le_bytes(bytes.try_into().unwrap_or_default()), Ordering::SeqCst);
        }
        header.magic.store(MAGIC, Ordering::SeqCst);
        Ok(memory)
    }

    /// Maps memory of another process. Rejects files that no fake driver has made.
    pub fn attach(fd: OwnedFd) -> Result<FakeMemory, DeviceError> {
        let actual = extension::memory_size(fd.as_fd()).map_err(|_| DeviceError::BadHandle)?;
        if actual <= PAGE as u64 {
            return Err(DeviceError::BadHandle);
        }
        let len = extension::verify(fd.as_fd(), actual).map_err(|_| DeviceError::BadHandle)?;
        let mapping =
            Mapping::new(fd.as_fd(), len, Access::Write).map_err(|_| DeviceError::Exhausted)?;
        let mut memory = FakeMemory { mapping, fd, size: 0 };
        let size = memory.header().size.load(Ordering::SeqCst);
        if memory.header().magic.load(Ordering::SeqCst) != MAGIC || size > (len - PAGE) as u64 {
            return Err(DeviceError::BadHandle);
        }
        memory.size = size;
        Ok(memory)
    }

    fn header(&self) -> &Header {
        // SAFETY: the page-aligned mapping begins with a page for the header, and lives as long as
        // `self`. The header consists of atomics, so any bytes are valid.
        unsafe { self.mapping.ptr().cast::<Header>().as_ref() }
    }

    pub fn data(&self) -> *mut u8 {
        // SAFETY: the mapping is longer than one page.
        unsafe { self.mapping.ptr().as_ptr().add(PAGE) }
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub fn size(&self) -> u64 {
        self.size
    }

    pub fn id(&self) -> u64 {
        self.header().id.load(Ordering::SeqCst)
    }

    pub fn owner(&self) -> Owner {
        let header = self.header();
        Owner { pid: header.pid.load(Ordering::SeqCst), start: header.start.load(Ordering::SeqCst) }
    }

    pub fn uuid(&self) -> Uuid {
        let mut uuid = [0; 16];
        for (bytes, half) in uuid.chunks_exact_mut(8).zip(&self.header().uuid) {
            bytes.copy_from_slice(&half.load(Ordering::SeqCst).to_le_bytes());
        }
        uuid
    }

    pub fn lives(&self) -> bool {
        self.header().state.load(Ordering::SeqCst) == LIVES
    }

    pub fn is_orphan(&self) -> bool {
        self.header().state.load(Ordering::SeqCst) == ORPHAN
    }

    pub fn orphan(&self) {
        self.header().state.store(ORPHAN, Ordering::SeqCst);
    }

    /// Returns how many processes still had the memory open.
    pub fn free(&self, poison: bool) -> u32 {
        self.header().state.store(FREED, Ordering::SeqCst);
        if poison {
            // SAFETY: `size` bytes follow the header page. A process that still has them open is
            // meant to see the poison.
            unsafe { self.data().write_bytes(POISON, self.size as usize) };
        }
        self.header().opens.load(Ordering::SeqCst)
    }

    pub fn opened(&self) {
        self.header().opens.fetch_add(1, Ordering::SeqCst);
    }

    pub fn closed(&self) {
        self.header().opens.fetch_sub(1, Ordering::SeqCst);
    }
}
