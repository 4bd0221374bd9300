//! Keeps a forked child from dropping what belongs to its parent.

use std::mem::{self, ManuallyDrop};
use std::ops::{Deref, DerefMut};
use std::process;

/// A value that only the process that created it drops. In a forked child, dropping it does
/// nothing: a drop could close connections that both processes share, or join threads that only the
/// parent has.
pub(super) struct OfProcess<T> {
    value: ManuallyDrop<T>,
    creator: u32,
}

impl<T> OfProcess<T> {
    pub fn new(value: T) -> Self {
        OfProcess { value: ManuallyDrop::new(value), creator: process::id() }
    }

    pub fn into_inner(mut self) -> T {
        // SAFETY: `forget` keeps `drop` from using the value again.
        let value = unsafe { ManuallyDrop::take(&mut self.value) };
        mem::forget(self);
        value
    }
}

impl<T: Default> Default for OfProcess<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Deref for OfProcess<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for OfProcess<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.creator == process::id() {
            // SAFETY: `drop` runs once, and nothing uses the value after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
