//! Memory between two pages that nobody may touch: what is read or written beyond it ends the test
//! with SIGSEGV.
#![allow(dead_code, reason = "not every test that includes this uses all of it")]

use std::ptr::{self, NonNull};

use fishplate_core::mem::{Region, RegionKind};

/// Bytes that end where a forbidden page begins, in pages behind another forbidden page.
pub struct Fence {
    base: *mut u8,
    mapped: usize,
    page: usize,
    len: usize,
}

// SAFETY: the pages belong to this value alone.
unsafe impl Send for Fence {}

impl Fence {
    /// Room for `len` bytes, all zero.
    pub fn new(len: usize) -> Fence {
        // SAFETY: takes a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let inner = len.div_ceil(page).max(1) * page;
        let mapped = inner + 2 * page;
        // SAFETY: fresh pages, of which the inner ones are opened; all are ours.
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
        // SAFETY: within the mapping: the last page is forbidden, and in front of it there is room.
        unsafe { self.base.add(self.mapped - self.page - self.len) }
    }

    /// All bytes; behind them is the forbidden page.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: open, ours, and borrowed by this value's borrow.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.len) }
    }

    /// `bytes`, which are no more than there is room for, with the forbidden page behind them.
    pub fn end(&mut self, bytes: &[u8]) -> &[u8] {
        let skip = self.len - bytes.len();
        let place = &mut self.bytes()[skip..];
        place.copy_from_slice(bytes);
        place
    }

    /// `bytes` with a forbidden page in front of them.
    pub fn front(&mut self, bytes: &[u8]) -> &[u8] {
        assert!(bytes.len() <= self.len);
        // SAFETY: the open pages begin here and hold `len` bytes; ours, and borrowed by this
        // value's borrow.
        let place = unsafe { std::slice::from_raw_parts_mut(self.base.add(self.page), bytes.len()) };
        place.copy_from_slice(bytes);
        place
    }

    /// The bytes as memory to be registered.
    ///
    /// # Safety
    /// The region is deregistered, and nobody uses it any more, before this value is dropped.
    pub unsafe fn region(&mut self) -> Region {
        let ptr = NonNull::new(self.start()).expect("not null");
        // SAFETY: open and ours; it stays by our caller's promise.
        unsafe { Region::new(ptr, self.len, RegionKind::Private) }
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and unmapped once.
        unsafe { libc::munmap(self.base.cast(), self.mapped) };
    }
}
