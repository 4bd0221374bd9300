//! The rails of one engine, up to a limit fixed at compile time. Nothing here allocates or blocks.

use core::mem::MaybeUninit;
use core::ops::{Deref, DerefMut};
use core::ptr::addr_of_mut;
use core::{fmt, ptr, slice};

/// An owned list of at most `MAX` rails, in the order of insertion. Drops the last rail first,
/// because it may use memory of earlier rails.
pub struct Rails<R, const MAX: usize> {
    /// The first `len` slots are initialized.
    slots: MaybeUninit<[R; MAX]>,
    len: usize,
}

impl<R, const MAX: usize> Rails<R, MAX> {
    /// Creates an empty list.
    pub const fn new() -> Self {
        Rails { slots: MaybeUninit::uninit(), len: 0 }
    }

    /// Appends a rail.
    ///
    /// # Errors
    /// Returns the rail if the list already has `MAX` rails.
    pub fn push(&mut self, rail: R) -> Result<(), R> {
        if self.len == MAX {
            return Err(rail);
        }
        // SAFETY: `len < MAX`, so the slot is inside the array. It is uninitialized, so nothing
        // needs to be dropped.
        unsafe { self.slots.as_mut_ptr().cast::<R>().add(self.len).write(rail) };
        self.len += 1;
        Ok(())
    }
}

impl<R, const MAX: usize> Deref for Rails<R, MAX> {
    type Target = [R];

    fn deref(&self) -> &[R] {
        // SAFETY: `push` or `from` initialized the first `len` slots, and only `drop` takes the
        // rails out.
        unsafe { slice::from_raw_parts(self.slots.as_ptr().cast(), self.len) }
    }
}

impl<R, const MAX: usize> DerefMut for Rails<R, MAX> {
    fn deref_mut(&mut self) -> &mut [R] {
        // SAFETY: `push` or `from` initialized the first `len` slots, and only `drop` takes the
        // rails out.
        unsafe { slice::from_raw_parts_mut(self.slots.as_mut_ptr().cast(), self.len) }
    }
}

impl<R, const MAX: usize> Drop for Rails<R, MAX> {
    fn drop(&mut self) {
        for rail in self.iter_mut().rev() {
            // SAFETY: the rail is initialized, and it is not used after this drop.
            unsafe { ptr::drop_in_place(rail) }
        }
    }
}

impl<R, const MAX: usize> Default for Rails<R, MAX> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R, const N: usize> From<[R; N]> for Rails<R, N> {
    fn from(rails: [R; N]) -> Self {
        Rails { slots: MaybeUninit::new(rails), len: N }
    }
}

impl<R: fmt::Debug, const MAX: usize> fmt::Debug for Rails<R, MAX> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A list with at least one rail. If `MAX` is 1, the compiler knows that there is exactly one.
#[repr(transparent)]
pub(crate) struct SomeRails<R, const MAX: usize>(Rails<R, MAX>);

impl<R, const MAX: usize> SomeRails<R, MAX> {
    /// Creates an empty list in `place`, which counts as initialized once the list has a rail.
    pub(crate) fn begin(place: &mut MaybeUninit<Self>) -> &mut Rails<R, MAX> {
        let rails = place.as_mut_ptr().cast::<Rails<R, MAX>>();
        // SAFETY: `SomeRails` has the layout of its only field. No slot of an empty list is
        // initialized, so the length initializes the list.
        unsafe {
            addr_of_mut!((*rails).len).write(0);
            &mut *rails
        }
    }

    /// Returns the first rail, without a bounds check.
    #[inline(always)]
    pub(crate) fn first_mut(&mut self) -> &mut R {
        // SAFETY: the list is not empty, so its first slot is initialized.
        unsafe { &mut *self.0.slots.as_mut_ptr().cast() }
    }

    #[inline(always)]
    fn count(&self) -> usize {
        if MAX == 1 { 1 } else { self.0.len }
    }
}

impl<R, const MAX: usize> Deref for SomeRails<R, MAX> {
    type Target = [R];

    #[inline(always)]
    fn deref(&self) -> &[R] {
        // SAFETY: `Rails` keeps its first `len` slots initialized. If `MAX` is 1, `len` is 1 too,
        // because the list is not empty.
        unsafe { slice::from_raw_parts(self.0.slots.as_ptr().cast(), self.count()) }
    }
}

impl<R, const MAX: usize> DerefMut for SomeRails<R, MAX> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [R] {
        // SAFETY: `Rails` keeps its first `len` slots initialized. If `MAX` is 1, `len` is 1 too,
        // because the list is not empty.
        unsafe { slice::from_raw_parts_mut(self.0.slots.as_mut_ptr().cast(), self.count()) }
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    /// A rail that counts drops. When it is dropped, it records its own number.
    struct Counted<'c>(u8, &'c Cell<(u32, u8)>);

    impl Drop for Counted<'_> {
        fn drop(&mut self) {
            self.1.set((self.1.get().0 + 1, self.0));
        }
    }

    #[test]
    fn what_is_pushed_is_there_in_order_and_dropped_once() {
        let drops = Cell::new((0, 0));
        let mut rails = Rails::<_, 3>::new();
        assert!(rails.is_empty());
        for n in 0..3 {
            assert!(rails.push(Counted(n, &drops)).is_ok());
            assert_eq!(rails.len(), n as usize + 1);
        }
        let Err(Counted(3, _)) = rails.push(Counted(3, &drops)) else {
            panic!("a fourth of three")
        };
        assert_eq!(drops.get().0, 1);
        assert!(rails.iter().map(|rail| rail.0).eq(0..3));
        rails[1].0 = 9;
        let mut place = MaybeUninit::uninit();
        *SomeRails::begin(&mut place) = rails;
        // SAFETY: the list has three rails.
        let mut rails = unsafe { place.assume_init() };
        assert_eq!((rails[1].0, rails.len(), drops.get().0), (9, 3, 1));
        rails.first_mut().0 = 8;
        assert_eq!(rails[0].0, 8);
        drop(rails);
        assert_eq!(drops.get().0, 4);
    }

    #[test]
    fn an_array_is_a_full_list_and_a_part_of_one_drops_that_part() {
        let drops = Cell::new((0, 0));
        let full = Rails::from([0, 1].map(|n| Counted(n, &drops)));
        assert_eq!((full.len(), drops.get().0), (2, 0));
        let mut part = Rails::<_, 16>::new();
        for n in 0..5 {
            assert!(part.push(Counted(n, &drops)).is_ok());
        }
        drop(full);
        assert_eq!(drops.get(), (2, 0), "the first goes last");
        drop(part);
        assert_eq!(drops.get(), (7, 0));
        let mut place = MaybeUninit::uninit();
        *SomeRails::begin(&mut place) = Rails::from([7u8]);
        // SAFETY: the list has one rail.
        let one = unsafe { place.assume_init() };
        assert_eq!(*one, [7]);
    }
}
