//! Releases slots in batches, for threads that drop many values of the same pool: one
//! compare-and-swap for up to [`Batch::LIMIT`] slots. Never blocks or allocates.

use core::{marker::PhantomData, ptr::NonNull};

use super::{EMPTY, Header, Lease, NotSync, Shared, Slot};
use crate::sync::primitive::Ordering;

/// Free slots of one pool that are not released yet. Dropping the batch releases them.
#[derive(Debug)]
pub struct Batch<'m, T> {
    header: Option<NonNull<Header>>,
    /// Link of the slot added last, which is first in the list.
    first: u32,
    /// The slot added first, which is last in the list.
    last: NonNull<Slot<T>>,
    count: u32,
    memory: PhantomData<(&'m (), T)>,
    kind: NotSync,
}

// SAFETY: a batch holds no values, only free slots, which any thread may release.
unsafe impl<T: Send> Send for Batch<'_, T> {}

impl<'m, T> Batch<'m, T> {
    /// Maximum number of slots in a batch.
    pub const LIMIT: u32 = 32;

    /// Creates an empty batch, which may be used with any pool.
    pub const fn new() -> Self {
        Self {
            header: None,
            first: EMPTY,
            last: NonNull::dangling(),
            count: 0,
            memory: PhantomData,
            kind: PhantomData,
        }
    }

    /// Drops a value and adds its slot to the batch. If the batch is full, or has slots of another
    /// pool, releases the batch first.
    #[inline]
    pub fn release(&mut self, lease: Lease<'m, T>) {
        let Some(header) = lease.header() else { return drop(lease) };
        if self.header != Some(header) || self.count == Self::LIMIT {
            self.flush();
            self.header = Some(header);
        }
        let vacant = Vacant { slot: lease.vacate(), batch: self };
        // SAFETY: `vacate` consumed the lease, which was the only access to the value. If dropping
        // the value panics, the guard still releases the slot.
        unsafe { (*vacant.slot.as_ref().body.get()).assume_init_drop() };
    }

    /// Drops one holder of a value. The last holder drops the value and adds its slot to the batch.
    #[inline]
    pub fn release_shared(&mut self, shared: Shared<'m, T>) {
        if let Some(lease) = shared.let_go() {
            self.release(lease);
        }
    }

    /// Releases all slots of the batch with one compare-and-swap.
    #[inline]
    pub fn flush(&mut self) {
        let Some(header) = self.header.take() else { return };
        if self.count == 0 {
            return;
        }
        // SAFETY: the batch alone holds the slots `first` to `last`. A held slot stays in place.
        unsafe { Header::give_back(header, self.first, &self.last.as_ref().next, self.count) };
        self.count = 0;
    }
}

impl<T> Default for Batch<'_, T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for Batch<'_, T> {
    fn drop(&mut self) {
        self.flush();
    }
}

struct Vacant<'b, 'm, T> {
    slot: NonNull<Slot<T>>,
    batch: &'b mut Batch<'m, T>,
}

impl<T> Drop for Vacant<'_, '_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the slot is held, so it stays in place.
        let slot = unsafe { self.slot.as_ref() };
        // Relaxed: releasing the batch publishes the link.
        if self.batch.count == 0 {
            self.batch.last = self.slot;
        } else {
            slot.next.store(self.batch.first, Ordering::Relaxed);
        }
        self.batch.first = slot.link.get();
        self.batch.count += 1;
    }
}
