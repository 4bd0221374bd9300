//! Memory that is unmapped after its use, so that a later access faults.

use std::ptr::{self, NonNull};

use fishplate_core::mem::{Region, RegionKind};
use fishplate_shm::Segment;

/// Size of every region in bytes: one page.
pub const SIZE: usize = 4096;

/// Number of 64-bit words in a region.
pub const WORDS: usize = SIZE / 8;

/// Memory to register.
pub enum Memory {
    /// A page between two inaccessible pages.
    Page(NonNull<u8>),
    /// Shared memory. Unmapped when its last user drops it.
    Segment(Segment),
    /// Device memory that the processor can access. Freed with its rail.
    Device(NonNull<u8>, RegionKind),
}

fn map(at: *mut libc::c_void, len: usize, protection: i32, flags: i32) -> NonNull<u8> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the kernel chooses the address, or `at` is our own range, and its pages may be
    // replaced.
    let at = unsafe { libc::mmap(at, len, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    NonNull::new(at.cast()).unwrap()
}

impl Memory {
    pub fn page() -> Memory {
        let whole = map(ptr::null_mut(), 3 * SIZE, libc::PROT_NONE, 0);
        let page = whole.as_ptr().wrapping_add(SIZE);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the page is the middle one of the new mapping, which is not used yet.
        assert_eq!(unsafe { libc::mprotect(page.cast(), SIZE, access) }, 0);
        Memory::Page(NonNull::new(page).unwrap())
    }

    pub fn segment() -> Memory {
        Memory::Segment(Segment::create(SIZE).unwrap())
    }

    pub fn region(&self) -> Region {
        let region = |at, kind| {
            // SAFETY: the memory is unmapped only when the engine no longer uses it or was dropped.
            // Its words are accessed through raw pointers only.
            unsafe { Region::new(at, SIZE, kind) }
        };
        match self {
            Memory::Page(at) => region(*at, RegionKind::Private),
            // SAFETY: the segment is dropped only when the engine no longer uses it or was dropped.
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
            // SAFETY: `n < WORDS`, and this value keeps the memory mapped.
            unsafe { self.at().add(n).write_volatile(word) };
        }
    }

    pub fn words(&self) -> impl Iterator<Item = u64> {
        // SAFETY: `n < WORDS`, and this value keeps the memory mapped.
        (0..WORDS).map(|n| unsafe { self.at().add(n).read_volatile() })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Page(at) = self {
            // Keeps the address range reserved, so that nothing else is mapped there.
            map(at.as_ptr().cast(), SIZE, libc::PROT_NONE, libc::MAP_FIXED);
        }
    }
}
