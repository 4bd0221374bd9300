//! Receive and bounce buffers. They are allocated once and never move, because providers write to
//! them.

use alloc::boxed::Box;
use alloc::vec;
use core::ptr::{self, NonNull};

pub(super) struct Slab {
    pub bytes: NonNull<u8>,
    pub len: usize,
    stride: usize,
    kept: bool,
}

// SAFETY: the slab owns its memory, which any thread may access.
unsafe impl Send for Slab {}

impl Slab {
    pub fn new(count: usize, size: usize) -> Slab {
        let stride = size.next_multiple_of(64);
        let len = count * stride;
        Slab {
            bytes: NonNull::from(Box::leak(vec![0u8; len].into_boxed_slice())).cast(),
            len,
            stride,
            kept: false,
        }
    }

    /// Leaks the memory, because the provider may still use it.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    #[inline(always)]
    pub fn at(&self, index: usize) -> *mut u8 {
        debug_assert!(index * self.stride < self.len);
        self.bytes.as_ptr().wrapping_add(index * self.stride)
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        // SAFETY: `new` leaked this allocation of `len` bytes. The endpoint is closed, so the
        // provider does not write to it.
        unsafe { drop(Box::from_raw(ptr::slice_from_raw_parts_mut(self.bytes.as_ptr(), self.len))) }
    }
}
