//! The interface of the core to its host: a clock, a way to yield the processor, and a futex.
//!
//! The core names no operating system. `fishplate-sys` implements [`Host`] on Linux. A program
//! without an operating system uses [`SpinHost`], which counts time in calls and never sleeps. Any
//! thread may call any method.

use core::hint;

use super::primitive::{AtomicU32, AtomicU64, Ordering, const_new, edge_fence};

/// Why [`Host::wait`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// A wake-up, a changed value or a signal ended the sleep: check again.
    Called,
    /// The timeout expired.
    Deadline,
}

/// The host provides time in nanoseconds, yielding, and sleeping on a word of memory.
///
/// The two barriers are the two halves of one store-then-load race (Dekker). A sleeper announces
/// its sleep, then checks for work. A notifier publishes work, then checks for sleepers. Each half
/// needs a full barrier between its store and its load. The defaults are `fence(SeqCst)` on both
/// sides. If the sleeping side can make *every* processor execute a barrier (Linux
/// `membarrier(2)`), the host may reduce the notifier's half to a compiler fence.
pub trait Host {
    /// Returns monotonic time in nanoseconds. Makes no system call on Linux (vDSO).
    fn now_ns(&self) -> u64;

    /// Yields the processor to another runnable thread. One system call.
    fn yield_now(&self);

    /// Sleeps while `*word == expected`, for at most `timeout_ns`. Returns at once if the value
    /// differs. May return early without a reason. Makes one system call.
    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) -> Woken;

    /// Like [`wait`](Host::wait), on two words: sleeps while both have their expected values.
    fn wait_two(&self, words: [(&AtomicU32, u32); 2], timeout_ns: u64) -> Woken;

    /// Wakes every thread of any process that sleeps on `word`. Returns the number of threads.
    /// Makes one system call.
    fn wake(&self, word: &AtomicU32) -> u32;

    /// Executes the sleeper's half of the race, between its announcement and its check for work.
    /// Slow path.
    fn sleeper_barrier(&self) {
        sleeper_fence();
    }

    /// Executes the notifier's half of the race, between publishing work and checking for sleepers.
    /// Hot path.
    #[inline(always)]
    fn notifier_barrier(&self) {
        notifier_fence();
    }
}

/// Executes a full fence as the sleeper's half. This is the default of [`Host::sleeper_barrier`].
#[inline(always)]
pub fn sleeper_fence() {
    // Pairs with `notifier_fence`. Orders the announcement before the check for work.
    edge_fence!("event.sleeper.fence", SeqCst);
}

/// Executes a full fence as the notifier's half. This is the default of [`Host::notifier_barrier`].
#[inline(always)]
pub fn notifier_fence() {
    // Pairs with `sleeper_fence`, or with `membarrier(2)`. Orders the publication of the work
    // before the check for sleepers.
    edge_fence!("event.notifier.fence", SeqCst);
}

/// A host for programs without an operating system. It never blocks and never sleeps.
///
/// The clock advances by a fixed step at each reading and at each sleep. So every wait that reads
/// the clock ends, and equal calls give equal times. [`wait`](Host::wait) pauses for a moment and
/// returns [`Woken::Called`], which a waiter must expect anyway. [`wake`](Host::wake) does nothing.
#[derive(Debug)]
pub struct SpinHost {
    now_ns: AtomicU64,
    step_ns: u64,
}

/// Processor pauses in one [`SpinHost::wait`](Host::wait).
const PAUSES_PER_WAIT: u32 = 64;

impl SpinHost {
    const_new! {
        /// Creates a host. Its clock starts at zero and advances by `step_ns` per call.
        pub fn new(step_ns: u64) -> Self {
            Self { now_ns: AtomicU64::new(0), step_ns }
        }
    }
}

impl Host for SpinHost {
    fn now_ns(&self) -> u64 {
        // Relaxed: the counter publishes nothing.
        self.now_ns.fetch_add(self.step_ns, Ordering::Relaxed).wrapping_add(self.step_ns)
    }

    fn yield_now(&self) {
        hint::spin_loop();
    }

    fn wait(&self, word: &AtomicU32, expected: u32, _timeout_ns: u64) -> Woken {
        for _ in 0..PAUSES_PER_WAIT {
            // Relaxed, like the kernel's own comparison: the waiter checks for work afterwards.
            if word.load(Ordering::Relaxed) != expected {
                break;
            }
            hint::spin_loop();
        }
        self.now_ns();
        Woken::Called
    }

    fn wait_two(&self, words: [(&AtomicU32, u32); 2], timeout_ns: u64) -> Woken {
        let [(a, a_expected), (b, b_expected)] = words;
        // Relaxed, like the kernel's own comparison: the waiter checks for work afterwards.
        if b.load(Ordering::Relaxed) != b_expected {
            return Woken::Called;
        }
        self.wait(a, a_expected, timeout_ns)
    }

    fn wake(&self, _word: &AtomicU32) -> u32 {
        0
    }
}
