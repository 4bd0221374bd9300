//! The buffer for completions. It is allocated once and accessed through a raw pointer, so that an
//! entry stays readable while the rail is mutably borrowed to handle it.

use alloc::boxed::Box;
use core::ptr::NonNull;
use core::slice;

use super::BATCH;
use crate::fabric::cq::{self, Entry};

pub(super) struct Batch(NonNull<Entry>);

impl Batch {
    pub fn new() -> Batch {
        Batch(NonNull::from(Box::leak(Box::new([cq::EMPTY; BATCH]))).cast())
    }

    /// Pointer to the first of [`BATCH`] entries.
    #[inline(always)]
    pub fn first(&self) -> *const Entry {
        self.0.as_ptr()
    }

    /// The first `count` entries, at most [`BATCH`].
    #[inline(always)]
    pub fn room(&mut self, count: usize) -> &mut [Entry] {
        // SAFETY: at most as many as were allocated, and borrowed from `self`.
        unsafe { slice::from_raw_parts_mut(self.0.as_ptr(), count.min(BATCH)) }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: the pointer and length of the leaked allocation.
        drop(unsafe { Box::from_raw(self.0.as_ptr().cast::<[Entry; BATCH]>()) });
    }
}
