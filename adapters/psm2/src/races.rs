//! Loom models of the lock. They compile `lock.rs` over loom's atomics. `tests/loom-edges.sh` runs
//! the models unchanged, and with each ordering weakened in turn.
//!
//! `membarrier` makes every thread run a full barrier, at whatever point that thread has reached.
//! Loom cannot do that, so both halves of the barrier are full fences here. Only the owner runs the
//! light half, so two light halves never order each other. Loom checks the accesses to the value.

use fishplate::core::sync::primitive::modelled as primitive;

#[path = "lock.rs"]
#[allow(dead_code, reason = "the models use a part of it")]
mod lock;

use std::cell::Cell;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use lock::{Lock, Words};
use primitive::{AtomicU8, AtomicU32, AtomicU64};

mod system {
    use super::primitive::{Ordering, edge, fence};
    use super::*;

    loom::thread_local! {
        pub static ME: Cell<u64> = Cell::new(1);
        pub static REGISTERS: Cell<bool> = Cell::new(true);
    }

    pub fn me() -> u64 {
        ME.with(Cell::get)
    }

    pub fn register() -> bool {
        REGISTERS.with(Cell::get)
    }

    pub fn light_barrier() {
        barrier(edge!("lock.barrier.light", SeqCst));
    }

    pub fn heavy_barrier() -> bool {
        barrier(edge!("lock.barrier.heavy", SeqCst));
        true
    }

    /// A weakened barrier does nothing.
    fn barrier(order: Ordering) {
        if order != Ordering::Relaxed {
            fence(order);
        }
    }

    pub fn pause(_: u32) {
        thread::yield_now();
    }
}

type Shared = Arc<Lock<UnsafeCell<u64>>>;

/// `others` is the initial count of times that other threads have taken the lock.
fn new(others: u32) -> Shared {
    let [state, inside] = [0; 2].map(AtomicU8::new);
    let words = Words { state, inside, owner: AtomicU64::new(0), others: AtomicU32::new(others) };
    let lock = Arc::new(Lock::new(words, UnsafeCell::new(0)));
    count(&lock, false);
    lock
}

fn count(lock: &Shared, aside: bool) {
    let held = if aside { lock.lock_aside() } else { lock.lock() };
    // SAFETY: loom fails the test if another thread accesses the value at the same time.
    held.unwrap().with_mut(|value| unsafe { *value += 1 });
}

fn count_in(me: u64, lock: &Shared, rounds: u32, aside: bool) -> thread::JoinHandle<()> {
    let lock = lock.clone();
    thread::spawn(move || {
        system::ME.with(|number| number.set(me));
        (0..rounds).for_each(|_| count(&lock, aside));
    })
}

fn check(lock: &Shared, sum: u64) {
    // SAFETY: loom fails the test if another thread accesses the value at the same time.
    lock.lock().unwrap().with(|value| assert_eq!(unsafe { *value }, sum));
}

fn model(scenario: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(3);
    builder.check(scenario);
}

#[test]
fn the_owner_and_another_thread_exclude_each_other() {
    model(|| {
        let lock = new(0);
        let other = count_in(2, &lock, 1, true);
        (0..2).for_each(|_| count(&lock, false));
        other.join().unwrap();
        check(&lock, 4);
    });
}

#[test]
fn two_threads_exclude_each_other_without_an_owner() {
    model(|| {
        system::REGISTERS.with(|registers| registers.set(false));
        let lock = new(0);
        let other = count_in(2, &lock, 2, false);
        count(&lock, false);
        other.join().unwrap();
        check(&lock, 4);
    });
}

#[test]
fn an_owner_that_another_thread_removes_excludes_it() {
    model(|| {
        // The lock loses its owner when another thread takes it.
        let lock = new(1000);
        let other = count_in(2, &lock, 2, false);
        count(&lock, false);
        other.join().unwrap();
        check(&lock, 4);
    });
}
