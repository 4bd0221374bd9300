//! The lock of an endpoint. Most programs make all calls from one thread. So the thread that takes
//! a lock first becomes its owner, and takes it without an atomic exchange. An exchange would wait
//! for all earlier stores of the thread.
//!
//! The owner stores `inside`, then loads `state`. Any other thread exchanges `state`, calls
//! `membarrier(2)`, then waits until the owner is not inside. The barrier orders the owner's store
//! before its load, so at least one of the two threads sees the other. A lock that other threads
//! take often loses its owner. From then on every thread uses an exchange, and no thread a barrier.
//!
//! | edge          | store                           | load                | carries   |
//! |---------------|---------------------------------|---------------------|-----------|
//! | `lock.state`  | `Release`, by all but the owner | `enter`, `exchange` | the value |
//! | `lock.inside` | `Release`, by the owner         | `owner_is_out`      | the value |
//!
//! A thread that finds the lock taken spins, then yields, then sleeps for short periods, because no
//! thread wakes it. Waiting threads get the lock in no particular order. A panic under the lock
//! poisons it.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::thread;

use super::primitive::{AtomicU8, AtomicU32, AtomicU64, Ordering, edge};
use super::system;

/// Values of `state`. `FREE` and `TAKEN` are also the values of `inside`. A lock that has lost its
/// owner is `OPEN` instead of `FREE`, so that its last owner does not enter it.
const FREE: u8 = 0;
const TAKEN: u8 = 1;
const POISONED: u8 = 2;
const OPEN: u8 = 3;

/// Values of `owner` before the first call, and when the lock has lost its owner.
const UNDECIDED: u64 = 0;
const NOBODY: u64 = u64::MAX;

const OTHERS: u32 = 64;

/// All 0 before the first call.
pub(crate) struct Words {
    /// Whether a thread other than the owner has the lock, or the lock is poisoned.
    pub state: AtomicU8,
    /// Whether the owner has the lock.
    pub inside: AtomicU8,
    /// The number of the owner thread. Once it is set, only a thread that has the lock may change
    /// it, and only to `NOBODY`.
    pub owner: AtomicU64,
    pub others: AtomicU32,
}

#[repr(align(64))]
pub(crate) struct Lock<T> {
    words: Words,
    value: UnsafeCell<T>,
}

// SAFETY: only the thread that holds the lock refers to the value.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    pub const fn new(words: Words, value: T) -> Self {
        Lock { words, value: UnsafeCell::new(value) }
    }

    /// Takes the lock if this thread is its owner, and no other thread has it.
    #[inline(always)]
    pub fn own(&self) -> Option<Held<'_, T>> {
        let me = system::me();
        // Relaxed: `enter` checks that the lock has not lost this owner.
        let owns = self.words.owner.load(Ordering::Relaxed) == me && self.enter();
        owns.then(|| self.held((&self.words.inside, FREE)))
    }

    /// Returns `None` if the lock is poisoned.
    #[inline]
    pub fn lock(&self) -> Option<Held<'_, T>> {
        if let Some(held) = self.own() {
            return Some(held);
        }
        Some(self.held(self.lock_slow(system::me(), true)?))
    }

    /// Waits for the lock like [`lock`](Self::lock), but never makes the lock lose its owner. For
    /// threads of this library.
    #[cold]
    pub fn lock_aside(&self) -> Option<Held<'_, T>> {
        Some(self.held(self.lock_slow(system::me(), false)?))
    }

    #[inline(always)]
    fn held<'a>(&'a self, (taken, free): (&'a AtomicU8, u8)) -> Held<'a, T> {
        Held {
            // SAFETY: the address of a field is not null.
            value: unsafe { NonNull::new_unchecked(self.value.get()) },
            release: Release { taken, free, state: &self.words.state },
            exclusive: PhantomData,
        }
    }

    /// Takes the lock for its owner. Returns `false` if another thread has the lock, or if the lock
    /// has lost its owner.
    #[inline(always)]
    fn enter(&self) -> bool {
        // Relaxed: publishes nothing.
        self.words.inside.store(TAKEN, Ordering::Relaxed);
        // Pairs with `heavy_barrier` in `owner_is_out`. Orders the store of `inside` before the
        // load of `state`.
        system::light_barrier();
        // Acquire, edge `lock.state`: makes the writes of the last other holder visible here.
        if self.words.state.load(edge!("lock.state.load", Acquire)) == FREE {
            return true;
        }
        // Release: this store replaces the store that published the owner's writes under the lock.
        // It is not an edge, because the full fence of `light_barrier` in the models would publish
        // those writes too.
        self.words.inside.store(FREE, Ordering::Release);
        false
    }

    /// Returns the word that [`Release`] stores to, and its value.
    #[cold]
    #[inline(never)]
    fn lock_slow(&self, me: u64, counts: bool) -> Option<(&AtomicU8, u8)> {
        let mut wait = Wait(0);
        loop {
            // Relaxed: `enter` and the exchange order the accesses.
            let owns = self.words.owner.load(Ordering::Relaxed) == me;
            match self.words.state.load(Ordering::Relaxed) {
                POISONED => return None,
                // The owner never exchanges `state`. It stores `inside` only while `state` is free,
                // because a thread that has taken `state` waits until the owner is not inside.
                FREE if owns && self.enter() => return Some((&self.words.inside, FREE)),
                FREE if !owns && self.exchange(FREE) => break,
                OPEN if self.exchange(OPEN) => return Some((&self.words.state, OPEN)),
                _ => wait.once(),
            }
        }
        // Relaxed: this thread has the lock. `Release` publishes the new owner.
        let keeps_owner = match self.words.owner.load(Ordering::Relaxed) {
            UNDECIDED => {
                let registered = system::register();
                if registered {
                    self.words.owner.store(me, Ordering::Relaxed);
                }
                registered
            }
            _ if !self.owner_is_out() => return None,
            _ => !counts || self.words.others.fetch_add(1, Ordering::Relaxed) < OTHERS,
        };
        if keeps_owner {
            return Some((&self.words.state, FREE));
        }
        self.words.owner.store(NOBODY, Ordering::Relaxed);
        Some((&self.words.state, OPEN))
    }

    fn exchange(&self, free: u8) -> bool {
        // Acquire, edge `lock.state`: makes the writes of the last holder other than the owner
        // visible here.
        let taken = edge!("lock.state.exchange", Acquire);
        self.words.state.compare_exchange(free, TAKEN, taken, Ordering::Relaxed).is_ok()
    }

    /// Waits until the owner is not inside, after this thread has taken `state`. Returns `false` if
    /// the lock is poisoned. Poisons the lock if the kernel refuses the barrier.
    fn owner_is_out(&self) -> bool {
        // Pairs with `light_barrier` in `enter`. Orders the exchange of `state` before the load of
        // `inside`.
        if !system::heavy_barrier() {
            self.words.state.store(POISONED, Ordering::Relaxed);
            return false;
        }
        let mut wait = Wait(0);
        // Acquire, edge `lock.inside`: makes the owner's writes visible here.
        while self.words.inside.load(edge!("lock.inside.load", Acquire)) == TAKEN {
            if self.words.state.load(Ordering::Relaxed) == POISONED {
                return false;
            }
            wait.once();
        }
        true
    }
}

struct Wait(u32);

impl Wait {
    fn once(&mut self) {
        system::pause(self.0);
        self.0 = self.0.saturating_add(1);
    }
}

pub(crate) struct Held<'a, T> {
    value: NonNull<T>,
    release: Release<'a>,
    exclusive: PhantomData<&'a mut T>,
}

impl<'a, T> Held<'a, T> {
    /// Releases the lock as dropping does, but does not ask whether the thread is panicking. Call
    /// this where a call returns, and never while a value is dropped.
    #[inline(always)]
    pub fn release(self) {
        self.release.free();
        std::mem::forget(self);
    }

    /// Runs `step`, then [releases](Self::release) the lock.
    #[inline(always)]
    pub fn run<U>(mut self, step: impl FnOnce(&mut T) -> U) -> U {
        let result = step(&mut self);
        self.release();
        result
    }

    /// Keeps the lock for a part of the value. Releases the lock if `part` returns `None`.
    #[inline(always)]
    pub fn narrow<U>(mut self, part: impl FnOnce(&mut T) -> Option<&mut U>) -> Option<Held<'a, U>> {
        let Some(part) = part(&mut self) else {
            self.release();
            return None;
        };
        let value = NonNull::from(part);
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

struct Release<'a> {
    /// `inside` if the owner has the lock, else `state`.
    taken: &'a AtomicU8,
    /// The value of `taken` once the lock is free.
    free: u8,
    state: &'a AtomicU8,
}

impl Release<'_> {
    #[inline(always)]
    fn free(&self) {
        // Release, edges `lock.inside` and `lock.state`: publishes the value to the next holder.
        self.taken.store(self.free, edge!("lock.freed.store", Release));
    }
}

impl Drop for Release<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        match thread::panicking() {
            false => self.free(),
            // Relaxed: no thread uses the value any more.
            true => self.state.store(POISONED, Ordering::Relaxed),
        }
    }
}

#[cfg(all(test, not(fishplate_loom)))]
mod tests {
    use super::*;

    fn new<T>(value: T) -> Lock<T> {
        let [state, inside] = [0; 2].map(AtomicU8::new);
        Lock::new(
            Words { state, inside, owner: AtomicU64::new(0), others: AtomicU32::new(0) },
            value,
        )
    }

    #[test]
    fn threads_exclude_each_other() {
        const ROUNDS: u64 = 20_000;
        let lock = new((0u64, 0u64));
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
        let lock = new([0u64; 2]);
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
        assert_eq!(lock.words.owner.load(Ordering::Relaxed), system::me());
        // Another thread of the program makes the lock lose its owner. Threads still exclude each
        // other.
        thread::scope(|scope| scope.spawn(|| (0..200).for_each(|_| count(lock.lock()))).join())
            .unwrap();
        assert_eq!(lock.words.owner.load(Ordering::Relaxed), NOBODY);
        count(lock.lock());
        assert_eq!(lock.lock().unwrap()[0], own + aside + 201);
    }

    #[test]
    fn a_part_keeps_the_lock_and_none_releases_it() {
        let lock = new(Some(5));
        drop(lock.lock());
        let mut part = lock.lock().unwrap().narrow(Option::as_mut).unwrap();
        *part += 1;
        assert_eq!(lock.words.inside.load(Ordering::Relaxed), TAKEN);
        drop(part);
        assert_eq!(lock.words.inside.load(Ordering::Relaxed), FREE);
        assert!(lock.lock().unwrap().narrow(|_| None::<&mut i32>).is_none());
        let held = lock.lock().unwrap();
        assert_eq!(lock.words.inside.load(Ordering::Relaxed), TAKEN);
        held.release();
        assert_eq!(lock.words.inside.load(Ordering::Relaxed), FREE);
        assert_eq!(lock.lock().unwrap().take(), Some(6));
    }

    #[test]
    fn a_panic_poisons_it() {
        // The thread that panics is the owner, or a different thread.
        for own in [true, false] {
            let lock = new(());
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
