//! The buffer that completions are read into. It is allocated once and reached by a raw pointer, so
//! that an entry stays readable while the rail is mutably borrowed to handle it.

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
        // SAFETY: as many as were allocated, and lent by `self` alone.
        unsafe { slice::from_raw_parts_mut(self.0.as_ptr(), count.min(BATCH)) }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: as it was leaked.
        drop(unsafe { Box::from_raw(self.0.as_ptr().cast::<[Entry; BATCH]>()) });
    }
}
