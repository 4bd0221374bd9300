//! Pools on the heap, and lone values on the heap when a pool is full. This is the only file of the
//! crate that allocates, and it needs feature `alloc`.

extern crate alloc;

use core::{mem::MaybeUninit, ptr::NonNull};

use alloc::{boxed::Box, vec::Vec};

use super::{AttachError, Header, Lease, OWNER, Pool, Reclaim, Slot};
use crate::sync::primitive::Ordering;

struct HeapSlab<T> {
    header: Header,
    slots: Box<[Slot<T>]>,
}

impl<T> HeapSlab<T> {
    /// Frees a slab.
    ///
    /// # Safety
    /// `slab` came from `Box::into_raw` of a slab of this type. It holds no values, and nothing
    /// else uses it.
    unsafe fn free(slab: *mut ()) {
        // SAFETY: our caller guarantees a boxed slab of this type without other users.
        drop(unsafe { Box::from_raw(slab.cast::<Self>()) });
    }
}

impl<T: 'static> Pool<'static, T> {
    /// Creates a pool on the heap. Allocates all its memory now. The last holder frees the memory,
    /// once the pool is closed and every slot is released.
    ///
    /// # Errors
    ///
    /// [`AttachError::Capacity`] unless `capacity` is a power of two from 1 to 65,536.
    pub fn on_heap(capacity: usize) -> Result<Self, AttachError> {
        let count = Self::checked(capacity)?;
        let slots: Vec<_> = (0..capacity).map(|_| Slot::<T>::new()).collect();
        let slab = Box::into_raw(Box::new(HeapSlab {
            header: Header::new(),
            slots: slots.into_boxed_slice(),
        }));
        let reclaim = Reclaim { call: HeapSlab::<T>::free, data: slab.cast() };
        // SAFETY: the slab was just created, so nothing else uses it until this function returns
        // the pool. Only `reclaim` frees the slab, on any thread, after all slots are released. A
        // value is dropped before its slot is released.
        unsafe {
            let (header, slots) = (NonNull::from(&(*slab).header), NonNull::from(&*(*slab).slots));
            header.as_ref().line.keeps.store(OWNER, Ordering::Relaxed);
            Ok(Self::from_raw(header, slots.cast(), count, Some(reclaim)))
        }
    }
}

impl<'m, T> Pool<'m, T> {
    /// Like [`create`](Self::create), but if every slot is in use, creates a lone value on the
    /// heap. Such a value has no id, and is counted as [`overflow`](super::Counts::overflow).
    pub fn create_or_spill(&mut self, value: T) -> Lease<'m, T> {
        self.create(value).unwrap_or_else(|full| self.spill(full.0))
    }

    #[cold]
    #[inline(never)]
    fn spill(&mut self, value: T) -> Lease<'m, T> {
        self.counts_mut().overflow += 1;
        let mut slot = Box::new(Slot::new());
        *slot.body.get_mut() = MaybeUninit::new(value);
        // SAFETY: the slot was just boxed with a value, and no other code knows it.
        unsafe { Lease::from_raw(NonNull::from(Box::leak(slot)), None) }
    }
}

/// Frees a slot that `spill` created.
///
/// # Safety
/// `spill` created the slot. Its value is dropped, and nothing uses the slot any more.
pub(super) unsafe fn free_alone<T>(slot: NonNull<Slot<T>>) {
    // SAFETY: our caller guarantees that `spill` boxed the slot and that nothing uses it any more.
    drop(unsafe { Box::from_raw(slot.as_ptr()) });
}
