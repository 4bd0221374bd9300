//! The buffer for completions. It is allocated once and accessed through a raw pointer, so an entry
//! stays readable while its handler borrows the rail mutably.

use alloc::boxed::Box;
use core::ptr::NonNull;
use core::slice;

use super::BATCH;
use crate::fabric::cq::{self, Entry};

/// Aligned so that the first entry lies in one cache line. Most polls read at most one.
#[repr(align(64))]
struct Entries {
    entries: [Entry; BATCH],
}

pub(super) struct Batch(NonNull<Entry>);

impl Batch {
    pub fn new() -> Batch {
        let batch = Box::leak(Box::new(Entries { entries: [cq::EMPTY; BATCH] }));
        Batch(NonNull::from(&mut batch.entries).cast())
    }

    #[inline(always)]
    pub fn first(&self) -> *const Entry {
        self.0.as_ptr()
    }

    #[inline(always)]
    pub fn room(&mut self, count: usize) -> &mut [Entry] {
        // SAFETY: the allocation has `BATCH` entries and lives as long as `self`, which is borrowed
        // mutably.
        unsafe { slice::from_raw_parts_mut(self.0.as_ptr(), count.min(BATCH)) }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        // SAFETY: `new` leaked this box, and nothing uses it after the drop.
        drop(unsafe { Box::from_raw(self.0.as_ptr().cast::<Entries>()) });
    }
}
