//! Memory that can be unmapped, so that a later access faults.

use std::ptr::{self, NonNull};

use fishplate_core::mem::{Region, RegionKind};
use fishplate_shm::Segment;

/// Bytes of every region here: one page.
pub const SIZE: usize = 4096;

/// Words of 64 bits in it.
pub const WORDS: usize = SIZE / 8;

/// Memory to register.
pub enum Memory {
    /// A page between two inaccessible ones.
    Page(NonNull<u8>),
    /// Shared memory, unmapped when it has no user left.
    Segment(Segment),
    /// Device memory that the processor can access. It is freed with its rail.
    Device(NonNull<u8>, RegionKind),
}

fn map(at: *mut libc::c_void, len: usize, protection: i32, flags: i32) -> NonNull<u8> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: an address that the kernel chooses, or pages of ours that are unmapped.
    let at = unsafe { libc::mmap(at, len, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    NonNull::new(at.cast()).unwrap()
}

impl Memory {
    pub fn page() -> Memory {
        let whole = map(ptr::null_mut(), 3 * SIZE, libc::PROT_NONE, 0);
        let page = whole.as_ptr().wrapping_add(SIZE);
        // SAFETY: the page in the middle, which is not used yet.
        assert_eq!(unsafe { libc::mprotect(page.cast(), SIZE, libc::PROT_READ | libc::PROT_WRITE) }, 0);
        Memory::Page(NonNull::new(page).unwrap())
    }

    pub fn segment() -> Memory {
        Memory::Segment(Segment::create(SIZE).unwrap())
    }

    pub fn region(&self) -> Region {
        let region = |at, kind| {
            // SAFETY: unmapped only once the engine says that it is not in use, or has been
            // dropped; words are accessed through raw pointers only.
            unsafe { Region::new(at, SIZE, kind) }
        };
        match self {
            Memory::Page(at) => region(*at, RegionKind::Private),
            // SAFETY: as above.
            Memory::Segment(segment) => unsafe { segment.region(0, SIZE) }.unwrap(),
            Memory::Device(at, kind) => region(*at, *kind),
        }
    }

    fn at(&self) -> *mut u64 {
        match self {
            Memory::Page(at) | Memory::Device(at, _) => at.as_ptr().cast(),
            Memory::Segment(segment) => segment.ptr().as_ptr().cast(),
        }
    }

    pub fn fill(&self, word: u64) {
        for n in 0..WORDS {
            // SAFETY: inside the memory, which this value keeps mapped.
            unsafe { self.at().add(n).write_volatile(word) };
        }
    }

    pub fn words(&self) -> impl Iterator<Item = u64> {
        // SAFETY: as above.
        (0..WORDS).map(|n| unsafe { self.at().add(n).read_volatile() })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Page(at) = self {
            // The address range stays reserved: nothing is ever mapped there again.
            map(at.as_ptr().cast(), SIZE, libc::PROT_NONE, libc::MAP_FIXED);
        }
    }
}
