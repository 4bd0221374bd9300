//! Helpers for the tests of this layer. They run one test body in threads or under the model
//! checker, and provide a futex made of a lock, and repeatable random numbers.

use super::{
    host::{Host, Woken},
    primitive::{AtomicU32, Ordering},
};

#[cfg(fishplate_loom)]
pub use self::models::*;
#[cfg(not(fishplate_loom))]
pub use self::{random::Random, threads::*};

#[cfg(not(fishplate_loom))]
mod random;

/// Plain threads. A scenario runs several times, with enough rounds to expose races.
#[cfg(not(fishplate_loom))]
mod threads {
    extern crate std;

    pub use std::{
        sync::{Condvar, Mutex},
        thread,
    };

    /// Returns the rounds to run: `threaded` here, `modelled` under loom.
    pub const fn rounds(_modelled: u64, threaded: u64) -> u64 {
        threaded
    }

    /// Runs a scenario ten times.
    pub fn model(scenario: impl Fn() + Send + Sync + 'static) {
        for _ in 0..10 {
            scenario();
        }
    }
}

/// The model checker. It runs a scenario once per interleaving, within a bound on preemptions.
#[cfg(fishplate_loom)]
mod models {
    extern crate std;

    pub use loom::{
        sync::{Condvar, Mutex},
        thread,
    };

    /// Returns the number of rounds for this checker.
    pub const fn rounds(modelled: u64, _threaded: u64) -> u64 {
        modelled
    }

    /// Runs a scenario with at most three preemptions, or `LOOM_MAX_PREEMPTIONS` if set.
    pub fn model(scenario: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound.get_or_insert(3);
        builder.check(scenario);
    }
}

/// A host with a futex made of a lock and a condition variable, which loom can model. Sleeps have
/// no deadline, so a lost wake-up hangs, and the model checker reports a deadlock.
#[derive(Debug)]
pub struct LockHost {
    bucket: Mutex<()>,
    woken: Condvar,
}

impl LockHost {
    pub fn new() -> Self {
        Self { bucket: Mutex::new(()), woken: Condvar::new() }
    }
}

impl Host for LockHost {
    fn now_ns(&self) -> u64 {
        0
    }

    fn yield_now(&self) {
        thread::yield_now();
    }

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) -> Woken {
        self.wait_two([(word, expected), (word, expected)], timeout_ns)
    }

    fn wait_two(&self, words: [(&AtomicU32, u32); 2], _timeout_ns: u64) -> Woken {
        let bucket = self.bucket.lock().unwrap();
        // Relaxed: the lock orders the comparison against the wake-up call, as in the kernel.
        if words.iter().all(|(word, expected)| word.load(Ordering::Relaxed) == *expected) {
            drop(self.woken.wait(bucket).unwrap());
        }
        Woken::Called
    }

    fn wake(&self, _word: &AtomicU32) -> u32 {
        drop(self.bucket.lock().unwrap());
        self.woken.notify_all();
        0
    }
}
