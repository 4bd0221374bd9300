//! The lock of an endpoint. Taking a free one costs one atomic exchange, and releasing it a store:
//! most calls are short, and most programs make them from one thread.
//!
//! A thread that finds the lock taken spins, then yields, then sleeps for short periods, because no
//! thread wakes it. Waiting threads get the lock in no particular order. A panic under the lock
//! poisons it.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

const FREE: u8 = 0;
const TAKEN: u8 = 1;
const POISONED: u8 = 2;

/// Number of checks of a taken lock before the first yield, and of yields before the first sleep.
const SPINS: u32 = 100;
const YIELDS: u32 = 100;
const SLEEP: Duration = Duration::from_micros(50);

/// A value under a lock.
pub(crate) struct Lock<T> {
    state: AtomicU8,
    value: UnsafeCell<T>,
}

// SAFETY: only the thread that holds the lock refers to the value.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Lock { state: AtomicU8::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Waits for the lock. `None`: it is poisoned.
    #[inline]
    pub fn lock(&self) -> Option<Held<'_, T>> {
        if !self.try_take() && !self.wait() {
            return None;
        }
        let value = NonNull::new(self.value.get())?;
        Some(Held { value, release: Release(&self.state), exclusive: PhantomData })
    }

    #[inline(always)]
    fn try_take(&self) -> bool {
        // Acquire: pairs with the release store of `Release`, so this thread sees what the last
        // holder has written.
        self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Waits until it is taken for this thread (`true`) or poisoned.
    #[cold]
    fn wait(&self) -> bool {
        for look in 0u32.. {
            // Relaxed: `try_take` orders.
            match self.state.load(Ordering::Relaxed) {
                FREE if self.try_take() => return true,
                POISONED => return false,
                _ if look < SPINS => std::hint::spin_loop(),
                _ if look < SPINS + YIELDS => thread::yield_now(),
                _ => thread::sleep(SLEEP),
            }
        }
        false
    }
}

/// The value, or a part of it, while this thread holds the lock.
pub(crate) struct Held<'a, T> {
    value: NonNull<T>,
    release: Release<'a>,
    exclusive: PhantomData<&'a mut T>,
}

impl<'a, T> Held<'a, T> {
    /// Keeps the lock for a part of the value. `None` releases it.
    #[inline]
    pub fn narrow<U>(mut self, part: impl FnOnce(&mut T) -> Option<&mut U>) -> Option<Held<'a, U>> {
        let value = NonNull::from(part(&mut self)?);
        Some(Held { value, release: self.release, exclusive: PhantomData })
    }
}

impl<T> std::ops::Deref for Held<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the value lives as long as its lock, which this thread holds, and `self` is
        // borrowed for as long as the reference.
        unsafe { self.value.as_ref() }
    }
}

impl<T> std::ops::DerefMut for Held<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; `self` is borrowed exclusively.
        unsafe { self.value.as_mut() }
    }
}

/// Releases the lock when it is dropped.
struct Release<'a>(&'a AtomicU8);

impl Drop for Release<'_> {
    #[inline]
    fn drop(&mut self) {
        let next = if thread::panicking() { POISONED } else { FREE };
        // Release: pairs with `Lock::try_take`.
        self.0.store(next, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_exclude_each_other() {
        const ROUNDS: u64 = 20_000;
        let lock = Lock::new((0u64, 0u64));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..ROUNDS {
                        let mut pair = lock.lock().unwrap();
                        pair.0 += 1;
                        assert_eq!(pair.0, pair.1 + 1);
                        pair.1 += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock().unwrap(), (4 * ROUNDS, 4 * ROUNDS));
    }

    #[test]
    fn a_part_keeps_the_lock_and_none_releases_it() {
        let lock = Lock::new(Some(5));
        let mut part = lock.lock().unwrap().narrow(Option::as_mut).unwrap();
        *part += 1;
        assert!(!lock.try_take());
        drop(part);
        assert!(lock.lock().unwrap().narrow(|_| None::<&mut i32>).is_none());
        assert_eq!(lock.lock().unwrap().take(), Some(6));
    }

    #[test]
    fn a_panic_poisons_it() {
        let lock = Lock::new(());
        let panics = || {
            let _held = lock.lock();
            panic!("under the lock");
        };
        assert!(thread::scope(|scope| scope.spawn(panics).join()).is_err());
        assert!(lock.lock().is_none());
    }
}
