//! The lock of an endpoint. Most programs make all calls from one thread. So the thread that takes
//! a lock first becomes its owner, and takes it without an atomic exchange. An exchange would wait
//! for all earlier stores of the thread.
//!
//! The owner stores `inside`, then loads `state`. Any other thread exchanges `state`, calls
//! `membarrier(2)`, then waits until the owner is not inside. The barrier orders the owner's store
//! before its load, so at least one of the two threads sees the other. A lock that other threads
//! take often loses its owner. From then on every thread uses an exchange, and no thread a barrier.
//!
//! A thread that finds the lock taken spins, then yields, then sleeps for short periods, because no
//! thread wakes it. Waiting threads get the lock in no particular order. A panic under the lock
//! poisons it.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering, compiler_fence};
use std::thread;
use std::time::Duration;

use fishplate::sys::{futex::Scope, membarrier};

/// Values of `state`. `FREE` and `TAKEN` are also the values of `inside`.
const FREE: u8 = 0;
const TAKEN: u8 = 1;
const POISONED: u8 = 2;

/// Values of `owner` before the first call, and when the lock has lost its owner.
const UNDECIDED: usize = 0;
const NOBODY: usize = usize::MAX;

/// Number of times that other threads take a lock before it loses its owner.
const OTHERS: u32 = 64;

/// Number of checks of a taken lock before the first yield, and before the first sleep.
const SPINS: u32 = 100;
const YIELDED: u32 = 200;
const SLEEP: Duration = Duration::from_micros(50);

/// A value under a lock.
#[repr(align(64))]
pub(crate) struct Lock<T> {
    /// Whether a thread other than the owner has the lock, or the lock is poisoned.
    state: AtomicU8,
    /// Whether the owner has the lock.
    inside: AtomicU8,
    /// The owner's `pthread_self`. Once set, only a thread that has the lock changes it, to
    /// `NOBODY`.
    owner: AtomicUsize,
    /// How often other threads have taken the lock.
    others: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only the thread that holds the lock refers to the value.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Lock {
            state: AtomicU8::new(FREE),
            inside: AtomicU8::new(FREE),
            owner: AtomicUsize::new(UNDECIDED),
            others: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock. Returns `None` if it is poisoned.
    #[inline(always)]
    pub fn lock(&self) -> Option<Held<'_, T>> {
        let me = me();
        // Relaxed: `enter` checks again.
        if self.owner.load(Ordering::Relaxed) == me && self.enter(me) {
            return self.held(&self.inside);
        }
        self.lock_slow(me, true)
    }

    /// Waits for the lock like [`lock`](Self::lock), but never makes the lock lose its owner. For
    /// threads of this library.
    #[cold]
    pub fn lock_aside(&self) -> Option<Held<'_, T>> {
        self.lock_slow(me(), false)
    }

    #[inline(always)]
    fn held<'a>(&'a self, taken: &'a AtomicU8) -> Option<Held<'a, T>> {
        let value = NonNull::new(self.value.get())?;
        Some(Held { value, release: Release { taken, state: &self.state }, exclusive: PhantomData })
    }

    /// Takes the lock for its owner. Returns false if another thread has the lock, or if the lock
    /// has lost its owner.
    #[inline(always)]
    fn enter(&self, me: usize) -> bool {
        // Relaxed: publishes nothing.
        self.inside.store(TAKEN, Ordering::Relaxed);
        // Pairs with the membarrier in `owner_is_out`. This orders the store and the load for the
        // compiler, and the other thread's barrier orders them for the processor.
        compiler_fence(Ordering::SeqCst);
        // Acquire: pairs with the release store of `Release`, so this thread sees what the last
        // other holder has written, and whether it has removed the owner.
        if self.state.load(Ordering::Acquire) == FREE && self.owner.load(Ordering::Relaxed) == me {
            return true;
        }
        self.inside.store(FREE, Ordering::Release);
        false
    }

    #[cold]
    #[inline(never)]
    fn lock_slow(&self, me: usize, counts: bool) -> Option<Held<'_, T>> {
        let mut wait = Wait(0);
        loop {
            if self.owner.load(Ordering::Relaxed) == me && self.enter(me) {
                return self.held(&self.inside);
            }
            // Relaxed: the exchange below orders the accesses.
            match self.state.load(Ordering::Relaxed) {
                POISONED => return None,
                // The owner never exchanges `state`.
                FREE if self.owner.load(Ordering::Relaxed) != me && self.exchange() => break,
                _ => wait.once(),
            }
        }
        match self.owner.load(Ordering::Relaxed) {
            UNDECIDED => {
                let registered = membarrier::register(Scope::Private).is_ok();
                self.owner.store(if registered { me } else { NOBODY }, Ordering::Relaxed);
            }
            NOBODY => {}
            _ => {
                if !self.owner_is_out() {
                    return None;
                }
                // Relaxed: this thread has the lock. `Release` publishes the new owner.
                if counts && self.others.fetch_add(1, Ordering::Relaxed) >= OTHERS {
                    self.owner.store(NOBODY, Ordering::Relaxed);
                }
            }
        }
        self.held(&self.state)
    }

    fn exchange(&self) -> bool {
        // Acquire: pairs with the release store of `Release`, so this thread sees what the last
        // holder has written.
        self.state.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Waits until the owner is not inside, after this thread has taken `state`. Returns false if
    /// the lock is poisoned. Poisons the lock if the kernel refuses the barrier.
    fn owner_is_out(&self) -> bool {
        if membarrier::all(Scope::Private).is_err() {
            self.state.store(POISONED, Ordering::Relaxed);
            return false;
        }
        let mut wait = Wait(0);
        // Acquire: pairs with the release store of the owner, so this thread sees what the owner
        // has written.
        while self.inside.load(Ordering::Acquire) == TAKEN {
            if self.state.load(Ordering::Relaxed) == POISONED {
                return false;
            }
            wait.once();
        }
        true
    }
}

/// Identifies this thread. Another thread has the same number only if it begins after this one has
/// ended.
#[inline(always)]
fn me() -> usize {
    // SAFETY: the call has no preconditions.
    unsafe { libc::pthread_self() as usize }
}

/// Number of times that a thread has waited for the lock.
struct Wait(u32);

impl Wait {
    fn once(&mut self) {
        match self.0 {
            0..SPINS => std::hint::spin_loop(),
            SPINS..YIELDED => thread::yield_now(),
            _ => thread::sleep(SLEEP),
        }
        self.0 = self.0.saturating_add(1);
    }
}

/// The value, or a part of it, while this thread holds the lock.
pub(crate) struct Held<'a, T> {
    value: NonNull<T>,
    release: Release<'a>,
    exclusive: PhantomData<&'a mut T>,
}

impl<'a, T> Held<'a, T> {
    /// Keeps the lock for a part of the value. Releases the lock if `part` returns `None`.
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
struct Release<'a> {
    /// `inside` if the owner has the lock, else `state`.
    taken: &'a AtomicU8,
    state: &'a AtomicU8,
}

impl Drop for Release<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release: pairs with the acquire load or exchange of the next holder.
        match thread::panicking() {
            false => self.taken.store(FREE, Ordering::Release),
            true => self.state.store(POISONED, Ordering::Release),
        }
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

    #[repr(align(64))]
    struct Line(AtomicU32);

    /// The owner and a thread of the library take the lock at the same time.
    #[test]
    fn the_owner_and_a_thread_aside_exclude_each_other() {
        let lock = Lock::new([0u64; 2]);
        let done = AtomicU8::new(0);
        let count = |held: Option<Held<'_, [u64; 2]>>| {
            let mut pair = held.unwrap();
            pair[0] += 1;
            (0..20).for_each(|_| std::hint::spin_loop());
            assert_eq!(pair[0], std::hint::black_box(pair[1]) + 1);
            pair[1] += 1;
        };
        // Stores to lines that the other thread has written delay the owner's store of `inside`.
        let lines: [Line; 16] = std::array::from_fn(|_| Line(AtomicU32::new(0)));
        let store = || lines.iter().for_each(|line| line.0.store(1, Ordering::Relaxed));
        let (mut own, mut aside) = (1, 0);
        count(lock.lock());
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                let rounds = 100_000;
                for _ in 0..rounds {
                    store();
                    count(lock.lock_aside());
                }
                done.store(1, Ordering::Relaxed);
                rounds
            });
            while done.load(Ordering::Relaxed) == 0 {
                store();
                count(lock.lock());
                own += 1;
            }
            aside = other.join().unwrap();
        });
        assert_eq!(*lock.lock().unwrap(), [own + aside; 2]);
        assert_eq!(lock.owner.load(Ordering::Relaxed), me());
        // A thread of the program makes the lock lose its owner. The lock still provides mutual
        // exclusion.
        thread::scope(|scope| scope.spawn(|| (0..200).for_each(|_| count(lock.lock()))).join()).unwrap();
        assert_eq!(lock.owner.load(Ordering::Relaxed), NOBODY);
        count(lock.lock());
        assert_eq!(lock.lock().unwrap()[0], own + aside + 201);
    }

    #[test]
    fn a_part_keeps_the_lock_and_none_releases_it() {
        let lock = Lock::new(Some(5));
        drop(lock.lock());
        let mut part = lock.lock().unwrap().narrow(Option::as_mut).unwrap();
        *part += 1;
        assert_eq!(lock.inside.load(Ordering::Relaxed), TAKEN);
        drop(part);
        assert_eq!(lock.inside.load(Ordering::Relaxed), FREE);
        assert!(lock.lock().unwrap().narrow(|_| None::<&mut i32>).is_none());
        assert_eq!(lock.lock().unwrap().take(), Some(6));
    }

    #[test]
    fn a_panic_poisons_it() {
        // The thread that panics is the owner, or a different thread.
        for own in [true, false] {
            let lock = Lock::new(());
            if !own {
                drop(lock.lock());
            }
            let panics = || {
                drop(lock.lock());
                let _held = lock.lock();
                panic!("under the lock");
            };
            assert!(thread::scope(|scope| scope.spawn(panics).join()).is_err());
            assert!(lock.lock().is_none() && lock.lock_aside().is_none());
        }
    }
}
