//! The slots of a ring: their location, and how they are read and written.
//!
//! Memory that only this process writes is plain memory: copies are ordinary, and slices may be
//! lent. A mapping that another process can write at any time is not trusted. Each value is copied
//! out once by a volatile access, and no reference is made. The two kinds are types, so lending a
//! slice of a shared mapping does not compile.

use core::{
    marker::PhantomData,
    mem::{MaybeUninit, align_of},
    ptr::NonNull,
};

use super::{AttachError, Header};

/// Memory that only this process writes. [`split`](super::split) returns this kind.
#[derive(Clone, Copy, Debug)]
pub enum Private {}

/// Memory that another process may write at any time. `from_raw` returns this kind.
#[derive(Clone, Copy, Debug)]
pub enum Shared {}

/// How the slots of a ring are copied: as [`Private`] or as [`Shared`] memory.
pub trait RingMemory: sealed::Copies {}

impl RingMemory for Private {}
impl RingMemory for Shared {}

mod sealed {
    /// The copy operations, hidden from the public interface.
    pub trait Copies {
        /// Copies a value out.
        ///
        /// # Safety
        /// `from` is valid for reads of a `T`, aligned, and holds a valid `T`.
        unsafe fn read<T: Copy>(from: *const T) -> T;

        /// Copies a value in.
        ///
        /// # Safety
        /// `to` is valid for writes of a `T` and aligned.
        unsafe fn write<T: Copy>(to: *mut T, value: T);

        /// Copies `len` values from one array to another.
        ///
        /// # Safety
        /// Each of the `len` slots from `from` on fulfils the conditions of `read`, and each of the
        /// `len` slots from `to` on fulfils the conditions of `write`. The two arrays do not
        /// overlap.
        #[inline]
        unsafe fn copy<T: Copy>(from: *const T, to: *mut T, len: usize) {
            for at in 0..len {
                // SAFETY: our caller guarantees the conditions for each of the `len` slots.
                unsafe { Self::write(to.add(at), Self::read(from.add(at))) };
            }
        }
    }
}

impl sealed::Copies for Private {
    #[inline(always)]
    unsafe fn read<T: Copy>(from: *const T) -> T {
        // SAFETY: our caller guarantees that `from` is readable, aligned and holds a valid `T`.
        unsafe { from.read() }
    }

    #[inline(always)]
    unsafe fn write<T: Copy>(to: *mut T, value: T) {
        // SAFETY: our caller guarantees that `to` is writable and aligned.
        unsafe { to.write(value) }
    }

    #[inline(always)]
    unsafe fn copy<T: Copy>(from: *const T, to: *mut T, len: usize) {
        // SAFETY: our caller guarantees valid slots that do not overlap.
        unsafe { to.copy_from_nonoverlapping(from, len) }
    }
}

// Volatile: the compiler must not read a value twice, because a peer may change it between a check
// and its use.
impl sealed::Copies for Shared {
    #[inline(always)]
    unsafe fn read<T: Copy>(from: *const T) -> T {
        // SAFETY: our caller guarantees that `from` is readable, aligned and holds a valid `T`.
        unsafe { from.read_volatile() }
    }

    #[inline(always)]
    unsafe fn write<T: Copy>(to: *mut T, value: T) {
        // SAFETY: our caller guarantees that `to` is writable and aligned.
        unsafe { to.write_volatile(value) }
    }
}

/// The slots of one ring, as a pointer to the first slot and an index mask.
#[derive(Debug)]
pub(super) struct Span<'m, T> {
    first: NonNull<T>,
    mask: u64,
    memory: PhantomData<&'m mut [MaybeUninit<T>]>,
}

impl<T> Clone for Span<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Span<'_, T> {}

impl<'m, T: Copy> Span<'m, T> {
    pub(super) fn of_slice(slots: &'m mut [MaybeUninit<T>]) -> Result<Self, AttachError> {
        Self::checked(NonNull::from(&mut *slots).cast(), slots.len())
    }

    /// Wraps `capacity` slots from `first` on. Also checks the alignment of the header.
    pub(super) fn of_raw(
        header: NonNull<Header>,
        first: NonNull<T>,
        capacity: usize,
    ) -> Result<Self, AttachError> {
        if !header.as_ptr().addr().is_multiple_of(align_of::<Header>()) || !first.is_aligned() {
            return Err(AttachError::Misaligned);
        }
        Self::checked(first, capacity)
    }

    fn checked(first: NonNull<T>, slots: usize) -> Result<Self, AttachError> {
        if !slots.is_power_of_two() {
            return Err(AttachError::Capacity { slots });
        }
        Ok(Self { first, mask: slots as u64 - 1, memory: PhantomData })
    }

    #[inline(always)]
    pub(super) fn capacity(&self) -> u64 {
        self.mask + 1
    }

    #[inline(always)]
    pub(super) fn index(&self, count: u64) -> usize {
        (count & self.mask) as usize
    }

    /// Every counter value selects a slot inside the span.
    #[inline(always)]
    pub(super) fn slot(&self, count: u64) -> *mut T {
        // SAFETY: the index is at most `mask`, and there are `mask + 1` slots from `first` on. They
        // lie in one object: the slice of `of_slice`, or the memory that the caller of `of_raw`
        // guarantees.
        unsafe { self.first.as_ptr().add(self.index(count)) }
    }

    /// Returns two parts: up to the end of the memory, and the rest from its start.
    #[inline]
    pub(super) fn run(&self, count: u64, len: usize) -> [(NonNull<T>, usize); 2] {
        let index = self.index(count);
        let before_end = len.min(self.capacity() as usize - index);
        // SAFETY: `index` is at most `mask`, and there are `mask + 1` slots from `first` on.
        let start = unsafe { self.first.add(index) };
        [(start, before_end), (self.first, len - before_end)]
    }
}
