//! Handles to a value: [`Lease`] for its only holder, [`Shared`] for one of several holders. A
//! handle may move to any thread, outlive the pool, and be dropped anywhere. Dropping the last
//! handle returns the slot with one compare-and-swap.

use core::{
    fmt,
    marker::PhantomData,
    mem,
    ops::{Deref, DerefMut},
    ptr::NonNull,
};

use static_assertions::{assert_impl_all, assert_not_impl_any};

use super::{EMPTY, GENERATION, Header, ID_OUT, Id, Slot};
use crate::sync::primitive::{Ordering, edge};

/// The only holder of a value.
#[must_use = "dropping it drops the value"]
pub struct Lease<'m, T> {
    slot: NonNull<Slot<T>>,
    /// The pool's header, or `None` for a lone slot on the heap.
    header: Option<NonNull<Header>>,
    memory: PhantomData<(&'m (), T)>,
}

/// One of the holders of a value.
#[must_use = "dropping it may drop the value"]
pub struct Shared<'m, T> {
    slot: NonNull<Slot<T>>,
    header: Option<NonNull<Header>>,
    memory: PhantomData<(&'m (), T)>,
}

assert_impl_all!(Lease<'static, core::cell::Cell<u8>>: Send);
assert_impl_all!(Shared<'static, u8>: Send, Sync);
assert_not_impl_any!(Lease<'static, u8>: Clone);
assert_not_impl_any!(Shared<'static, core::cell::Cell<u8>>: Send, Sync);
assert_not_impl_any!(Lease<'static, *const u8>: Send, Sync);

// SAFETY: a lease is the value's only holder, so it may move wherever the value may.
unsafe impl<T: Send> Send for Lease<'_, T> {}
// SAFETY: a shared reference to a lease gives only shared access to the value.
unsafe impl<T: Sync> Sync for Lease<'_, T> {}
// SAFETY: several threads share access, and the last holder drops the value on its thread.
unsafe impl<T: Send + Sync> Send for Shared<'_, T> {}
// SAFETY: a reference can be cloned into an owned handle, so the conditions of `Send` apply.
unsafe impl<T: Send + Sync> Sync for Shared<'_, T> {}

impl<'m, T> Lease<'m, T> {
    /// Creates the only handle to a value.
    ///
    /// # Safety
    /// The slot holds a value, and the caller is its only holder. With a header, the slot belongs
    /// to that pool, and its slab lives for `'m` or until the slot is released. Without a header,
    /// the slot is a lone slot on the heap.
    #[inline(always)]
    pub(super) unsafe fn from_raw(slot: NonNull<Slot<T>>, header: Option<NonNull<Header>>) -> Self {
        Self { slot, header, memory: PhantomData }
    }

    /// Converts the lease to a handle that can be cloned.
    #[inline]
    pub fn share(self) -> Shared<'m, T> {
        // Relaxed: this is the only holder, and passing a clone to another thread has its own edge.
        self.slot().holders.store(1, Ordering::Relaxed);
        let (slot, header) = (self.slot, self.header);
        mem::forget(self);
        // SAFETY: the count is 1, and this handle is that holder.
        unsafe { Shared::from_raw(slot, header) }
    }

    /// Shares the value and clones the handle, without an atomic addition.
    #[inline]
    pub fn share_twice(self) -> [Shared<'m, T>; 2] {
        // Relaxed: this is the only holder, and passing a clone to another thread has its own edge.
        self.slot().holders.store(2, Ordering::Relaxed);
        let (slot, header) = (self.slot, self.header);
        mem::forget(self);
        // SAFETY: the count is 2, and these handles are the two holders.
        [(); 2].map(|()| unsafe { Shared::from_raw(slot, header) })
    }

    #[inline(always)]
    pub(super) fn header(&self) -> Option<NonNull<Header>> {
        self.header
    }

    #[inline(always)]
    pub(super) fn vacate(self) -> NonNull<Slot<T>> {
        self.watch_write();
        let slot = self.slot;
        mem::forget(self);
        slot
    }

    #[inline(always)]
    fn slot(&self) -> &Slot<T> {
        // SAFETY: a lease holds its slot, and a held slot stays in place.
        unsafe { self.slot.as_ref() }
    }

    #[inline(always)]
    fn watch_write(&self) {
        if let Some(header) = self.header {
            // SAFETY: a held slot keeps the slab alive. The link was written at setup.
            unsafe { header.as_ref() }.watch_write(self.slot().link.get());
        }
    }
}

impl<T> Drop for Lease<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.watch_write();
        let back = Back { slot: self.slot, header: self.header };
        // SAFETY: this is the only holder, and it is being dropped. If dropping the value panics,
        // the guard still releases the slot.
        unsafe { (*back.slot.as_ref().body.get()).assume_init_drop() };
    }
}

struct Back<T> {
    slot: NonNull<Slot<T>>,
    header: Option<NonNull<Header>>,
}

impl<T> Drop for Back<T> {
    #[inline(always)]
    fn drop(&mut self) {
        let Some(header) = self.header else { return free_alone(self.slot) };
        // SAFETY: the slot is held until it is released below, so it stays in place.
        let slot = unsafe { self.slot.as_ref() };
        // SAFETY: this is the slot's only holder, and does not use the slot again. The link was
        // written at setup.
        unsafe { Header::give_back(header, slot.link.get(), &slot.next, 1) };
    }
}

#[cold]
#[inline(never)]
fn free_alone<T>(slot: NonNull<Slot<T>>) {
    #[cfg(feature = "alloc")]
    // SAFETY: a slot without a header was boxed by `spill`. Its value is already dropped.
    unsafe {
        super::heap::free_alone(slot);
    }
    #[cfg(not(feature = "alloc"))]
    let _ = slot;
}

impl<T> Deref for Lease<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: a lease's slot holds a value, and only this handle accesses it.
        unsafe { (*self.slot().body.get()).assume_init_ref() }
    }
}

impl<T> DerefMut for Lease<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        self.watch_write();
        // SAFETY: a lease's slot holds a value. Only this handle accesses it, and it is borrowed
        // mutably.
        unsafe { (*self.slot().body.get()).assume_init_mut() }
    }
}

impl<'m, T> Shared<'m, T> {
    /// Creates a handle for one of the counted holders.
    ///
    /// # Safety
    /// The slot holds a value, and this handle is one of the holders counted in the slot. The
    /// header must satisfy the conditions of [`Lease::from_raw`].
    #[inline(always)]
    pub(super) unsafe fn from_raw(slot: NonNull<Slot<T>>, header: Option<NonNull<Header>>) -> Self {
        Self { slot, header, memory: PhantomData }
    }

    /// Returns whether both handles hold the same value.
    pub fn is_same(&self, other: &Self) -> bool {
        self.slot == other.slot
    }

    /// Returns the slot's index in its pool, or `None` for a lone value on the heap.
    #[inline]
    pub fn index(&self) -> Option<u16> {
        self.slot().link.get().checked_sub(1).map(|index| index as u16)
    }

    /// The holder leaks unless the raw form is opened again.
    #[inline]
    pub(crate) fn into_raw(self) -> RawShared<'m, T> {
        let raw = RawShared { slot: self.slot, header: self.header, memory: PhantomData };
        mem::forget(self);
        raw
    }

    /// Returns the lease if there is no other holder, otherwise this handle.
    #[inline]
    pub fn into_lease(self) -> Result<Lease<'m, T>, Self> {
        // Acquire, edge `pool.refs`: pairs with the decrements of former holders. No new holder can
        // appear, because only a holder can clone and this is the only holder.
        if self.slot().holders.load(edge!("pool.refs.alone", Acquire)) != 1 {
            return Err(self);
        }
        let lease = Lease { slot: self.slot, header: self.header, memory: PhantomData };
        mem::forget(self);
        Ok(lease)
    }

    /// Converts this holder to a number that [`Pool::redeem`](super::Pool::redeem) converts back.
    ///
    /// # Errors
    ///
    /// Returns the handle if the value already has an id, or if it is a lone value on the heap.
    pub fn into_id(self) -> Result<Id, Self>
    where
        T: Sync,
    {
        // Relaxed: the exchange compares the state again.
        let (state, link) = (self.slot().state.load(Ordering::Relaxed), self.slot().link.get());
        if link == EMPTY || state & ID_OUT != 0 {
            return Err(self);
        }
        // Release, edge `pool.id`: publishes the value to `Pool::redeem` and `Pool::get`.
        let out = edge!("pool.id.out", Release);
        match self.slot().state.compare_exchange(state, state | ID_OUT, out, Ordering::Relaxed) {
            Ok(_) => {
                mem::forget(self);
                Ok(Id((state & !(GENERATION - 1)) | u64::from(link - 1)))
            }
            Err(_) => Err(self),
        }
    }

    #[inline]
    pub(super) fn let_go(self) -> Option<Lease<'m, T>> {
        let alone = self.is_last();
        let (slot, header) = (self.slot, self.header);
        mem::forget(self);
        alone.then(|| Lease { slot, header, memory: PhantomData })
    }

    #[inline(always)]
    pub(super) fn header(&self) -> Option<NonNull<Header>> {
        self.header
    }

    #[inline]
    fn is_last(&self) -> bool {
        // Release, edge `pool.refs`: pairs with the load below, by the last holder.
        if self.slot().holders.fetch_sub(1, edge!("pool.refs.drop", Release)) != 1 {
            return false;
        }
        // Acquire, edge `pool.refs`: the last holder observes all uses of the value before it drops
        // the value.
        self.slot().holders.load(edge!("pool.refs.last", Acquire));
        true
    }

    #[inline(always)]
    fn slot(&self) -> &Slot<T> {
        // SAFETY: this handle holds its slot, and a held slot stays in place.
        unsafe { self.slot.as_ref() }
    }
}

/// A [`Shared`] in a `Copy` form that fits a ring.
pub(crate) struct RawShared<'m, T> {
    slot: NonNull<Slot<T>>,
    header: Option<NonNull<Header>>,
    memory: PhantomData<(&'m (), T)>,
}

impl<T> Clone for RawShared<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for RawShared<'_, T> {}

// SAFETY: this is a `Shared` in another form, and the same conditions apply.
unsafe impl<T: Send + Sync> Send for RawShared<'_, T> {}

impl<'m, T> RawShared<'m, T> {
    /// Converts this form back to a handle.
    ///
    /// # Safety
    /// Each value of [`Shared::into_raw`] is opened only once.
    #[inline(always)]
    pub(crate) unsafe fn open(self) -> Shared<'m, T> {
        // SAFETY: `into_raw` kept the count of this holder, and our caller guarantees that `open`
        // is called once.
        unsafe { Shared::from_raw(self.slot, self.header) }
    }
}

impl<T> Clone for Shared<'_, T> {
    #[inline]
    fn clone(&self) -> Self {
        // Relaxed: this holder keeps the count above zero meanwhile. A 64-bit count does not
        // overflow.
        self.slot().holders.fetch_add(1, Ordering::Relaxed);
        Self { slot: self.slot, header: self.header, memory: PhantomData }
    }
}

impl<T> Drop for Shared<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.is_last() {
            drop(Lease { slot: self.slot, header: self.header, memory: PhantomData });
        }
    }
}

impl<T> Deref for Shared<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        if let Some(header) = self.header {
            // SAFETY: a held slot keeps the slab alive. The link was written at setup.
            unsafe { header.as_ref() }.watch_read(self.slot().link.get());
        }
        // SAFETY: a slot with a holder contains a value. All holders have only shared access to the
        // value.
        unsafe { (*self.slot().body.get()).assume_init_ref() }
    }
}

impl<T: fmt::Debug> fmt::Debug for Lease<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&**self).finish()
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Shared").field(&**self).finish()
    }
}
