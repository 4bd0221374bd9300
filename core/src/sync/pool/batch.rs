//! Releases slots in batches, for threads that end many values of the same pool: one
//! compare-and-swap for up to [`Batch::LIMIT`] slots. Never blocks or allocates.

use core::{marker::PhantomData, ptr::NonNull};

use super::{EMPTY, Header, Lease, NotSync, Shared, Slot};
use crate::sync::primitive::Ordering;

/// Free slots of one pool that are not released yet. Dropping it releases them.
#[derive(Debug)]
pub struct Batch<'m, T> {
    header: Option<NonNull<Header>>,
    /// Link of the slot that was added last, which is first in the list.
    first: u32,
    /// The slot that was added first.
    last: NonNull<Slot<T>>,
    count: u32,
    memory: PhantomData<(&'m (), T)>,
    kind: NotSync,
}

// SAFETY: holds no values, only free slots, which any thread may release.
unsafe impl<T: Send> Send for Batch<'_, T> {}

impl<'m, T> Batch<'m, T> {
    /// Most slots in a batch.
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

    /// Ends a value and adds its slot to the batch. A full batch, or one of another pool, is
    /// released first.
    #[inline]
    pub fn release(&mut self, lease: Lease<'m, T>) {
        let Some(header) = lease.header() else { return drop(lease) };
        if self.header != Some(header) || self.count == Self::LIMIT {
            self.flush();
            self.header = Some(header);
        }
        let vacant = Vacant { slot: lease.vacate(), batch: self };
        // SAFETY: `vacate` gave up the only access to the value. If its drop panics, the guard
        // releases the slot.
        unsafe { (*vacant.slot.as_ref().body.get()).assume_init_drop() };
    }

    /// [`release`](Self::release) for one of several holders: ends the value if this was the last.
    #[inline]
    pub fn release_shared(&mut self, shared: Shared<'m, T>) {
        if let Some(lease) = shared.let_go() {
            self.release(lease);
        }
    }

    /// Releases all slots of the batch: one compare-and-swap, or none if it is empty.
    #[inline]
    pub fn flush(&mut self) {
        let Some(header) = self.header.take() else { return };
        if self.count == 0 {
            return;
        }
        // SAFETY: `last` is in use, so it stays in place. The slots `first` to `last` belong to
        // this batch alone.
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

/// A slot whose value ends. Dropping it puts the slot into the batch.
struct Vacant<'b, 'm, T> {
    slot: NonNull<Slot<T>>,
    batch: &'b mut Batch<'m, T>,
}

impl<T> Drop for Vacant<'_, '_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the slot is in use, so it stays in place.
        let slot = unsafe { self.slot.as_ref() };
        // Relaxed: published when the batch is released.
        if self.batch.count == 0 {
            self.batch.last = self.slot;
        } else {
            slot.next.store(self.batch.first, Ordering::Relaxed);
        }
        self.batch.first = slot.link.get();
        self.batch.count += 1;
    }
}
