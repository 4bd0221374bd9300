//! Memory between two inaccessible pages. An access to those pages ends the test with SIGSEGV.
#![allow(dead_code, reason = "not every test that includes this uses all of it")]

use std::ptr::{self, NonNull};

use fishplate_core::mem::{Region, RegionKind};

/// Memory that ends at an inaccessible page. Another inaccessible page precedes its first page.
pub struct Fence {
    base: *mut u8,
    mapped: usize,
    page: usize,
    len: usize,
}

// SAFETY: this value owns the pages.
unsafe impl Send for Fence {}

impl Fence {
    pub fn new(len: usize) -> Fence {
        // SAFETY: the call takes only a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let inner = len.div_ceil(page).max(1) * page;
        let mapped = inner + 2 * page;
        // SAFETY: creates a new mapping, and makes its inner pages accessible.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let base = libc::mmap(ptr::null_mut(), mapped, libc::PROT_NONE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            let base = base.cast::<u8>();
            let open = libc::PROT_READ | libc::PROT_WRITE;
            assert_eq!(libc::mprotect(base.add(page).cast(), inner, open), 0);
            Fence { base, mapped, page, len }
        }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the result lies inside the mapping, because `len` bytes fit in front of the last
        // page.
        unsafe { self.base.add(self.mapped - self.page - self.len) }
    }

    /// Returns all bytes. An inaccessible page follows them.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the bytes are accessible, owned by this value, and borrowed with it.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }

    /// Copies `bytes` so that they end at the inaccessible page.
    pub fn end(&mut self, bytes: &[u8]) -> &[u8] {
        let skip = self.len - bytes.len();
        let place = &mut self.bytes()[skip..];
        place.copy_from_slice(bytes);
        place
    }

    /// Copies `bytes` so that they start right after the inaccessible page.
    pub fn front(&mut self, bytes: &[u8]) -> &[u8] {
        assert!(bytes.len() <= self.len);
        // SAFETY: the accessible pages start here and hold `len` bytes. This value owns them, and
        // they are borrowed with it.
        let place =
            unsafe { std::slice::from_raw_parts_mut(self.base.add(self.page), bytes.len()) };
        place.copy_from_slice(bytes);
        place
    }

    /// Returns the bytes as a region to register.
    ///
    /// # Safety
    /// The region is deregistered and no longer used before this value is dropped.
    pub unsafe fn region(&mut self) -> Region {
        let ptr = NonNull::new(self.start()).expect("not null");
        // SAFETY: the bytes are accessible and owned by this value, which the caller keeps alive.
        unsafe { Region::new(ptr, self.len, RegionKind::Private) }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // SAFETY: `new` mapped the pages, and they are unmapped once.
        unsafe { libc::munmap(self.base.cast(), self.mapped) };
    }
}
