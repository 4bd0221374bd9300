//! The slots of a ring: where they lie, and how they are read and written.
//!
//! Memory of this process alone is plain memory: copies are ordinary and slices may be lent. A
//! mapping that another process can write at any moment is an allegation: it is copied out once, by
//! volatile accesses, and no reference to it is ever made. The two kinds are types, so lending a
//! slice of a shared mapping does not compile.

use core::{
    marker::PhantomData,
    mem::{MaybeUninit, align_of},
    ptr::NonNull,
};

use super::{AttachError, Header};

/// Memory that only this process writes. The kind [`split`](super::split) gives.
#[derive(Clone, Copy, Debug)]
pub enum Private {}

/// Memory that another process may write at any moment. The kind `from_raw` gives.
#[derive(Clone, Copy, Debug)]
pub enum Shared {}

/// How slots are copied: [`Private`] or [`Shared`].
pub trait RingMemory: sealed::Copies {}

impl RingMemory for Private {}
impl RingMemory for Shared {}

mod sealed {
    /// The two copies, kept out of the public interface.
    pub trait Copies {
        /// Copies a value out.
        ///
        /// # Safety
        /// `from` is valid for reads of a `T`, aligned, and what lies there is a valid `T`.
        unsafe fn read<T: Copy>(from: *const T) -> T;

        /// Copies a value in.
        ///
        /// # Safety
        /// `to` is valid for writes of a `T` and aligned.
        unsafe fn write<T: Copy>(to: *mut T, value: T);

        /// Copies `len` values from one place to another.
        ///
        /// # Safety
        /// As for `read` from each of the `len` places from `from` on and `write` to each from `to`
        /// on. The two do not overlap.
        #[inline]
        unsafe fn copy<T: Copy>(from: *const T, to: *mut T, len: usize) {
            for at in 0..len {
                // SAFETY: the caller's promise, for the place `at`.
                unsafe { Self::write(to.add(at), Self::read(from.add(at))) };
            }
        }
    }
}

impl sealed::Copies for Private {
    #[inline(always)]
    unsafe fn read<T: Copy>(from: *const T) -> T {
        // SAFETY: as this function requires.
        unsafe { from.read() }
    }

    #[inline(always)]
    unsafe fn write<T: Copy>(to: *mut T, value: T) {
        // SAFETY: as this function requires.
        unsafe { to.write(value) }
    }

    #[inline(always)]
    unsafe fn copy<T: Copy>(from: *const T, to: *mut T, len: usize) {
        // SAFETY: as this function requires.
        unsafe { to.copy_from_nonoverlapping(from, len) }
    }
}

// Volatile: the compiler may not read a value twice and so see a change made after the check.
impl sealed::Copies for Shared {
    #[inline(always)]
    unsafe fn read<T: Copy>(from: *const T) -> T {
        // SAFETY: as this function requires.
        unsafe { from.read_volatile() }
    }

    #[inline(always)]
    unsafe fn write<T: Copy>(to: *mut T, value: T) {
        // SAFETY: as this function requires.
        unsafe { to.write_volatile(value) }
    }
}

/// The slots of one ring: where the first lies, and their number as a mask.
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
    /// Over a slice borrowed for as long as the ring lives.
    pub(super) fn of_slice(slots: &'m mut [MaybeUninit<T>]) -> Result<Self, AttachError> {
        Self::checked(NonNull::from(&mut *slots).cast(), slots.len())
    }

    /// Over `capacity` slots from `first` on, with a header of which only the alignment is checked.
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

    /// Number of slots.
    #[inline(always)]
    pub(super) fn capacity(&self) -> u64 {
        self.mask + 1
    }

    /// Index of the slot that `count` falls on.
    #[inline(always)]
    pub(super) fn index(&self, count: u64) -> usize {
        (count & self.mask) as usize
    }

    /// The slot that `count` falls on. Inside the span for every `count`.
    #[inline(always)]
    pub(super) fn slot(&self, count: u64) -> *mut T {
        // SAFETY: the index is at most `mask`, and `mask + 1` slots lie from `first` on, in one
        // object (`of_slice`: the slice; `of_raw`: its caller's promise).
        unsafe { self.first.as_ptr().add(self.index(count)) }
    }

    /// The run of `len <= capacity` slots from `count` on:
    /// the part up to the end of the memory, and the rest from its start.
    #[inline]
    pub(super) fn run(&self, count: u64, len: usize) -> [(NonNull<T>, usize); 2] {
        let index = self.index(count);
        let before_end = len.min(self.capacity() as usize - index);
        // SAFETY: `index` is inside the span, as in `slot`.
        let start = unsafe { self.first.add(index) };
        [(start, before_end), (self.first, len - before_end)]
    }
}
