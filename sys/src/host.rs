//! Implements the core's [`Host`] on Linux. Only its two waits block, until a wake-up or a timeout.
//!
//! # The asymmetric barrier
//!
//! If `membarrier(2)` works, the sleeper makes every processor run a barrier. On its side of the
//! race (described in [`event`](fishplate_core::sync::event)), the notifier then needs only a
//! compiler fence. This is sound only under two conditions:
//!
//! 1. *this* process, the notifier's, is registered, so that the sleeper's barrier reaches it
//!    ([`LinuxHost::is_registered`]);
//! 2. every sleeper that this process notifies calls membarrier
//!    ([`LinuxHost::sleeper_uses_membarrier`]).
//!
//! Within one process both conditions hold or fail together, so [`LinuxHost::private`] needs no
//! answer from a peer. Between processes each side sends its answer in a handshake. A host uses the
//! full fence until it knows that the peer sleeps with membarrier
//! ([`LinuxHost::peer_uses_membarrier`]).
//!
//! | host                                  | sleeper's barrier         | notifier's barrier |
//! |---------------------------------------|---------------------------|--------------------|
//! | `private()`, registered               | membarrier, this process  | compiler fence     |
//! | `shared()`                            | membarrier, every process | `fence(SeqCst)`    |
//! | `shared().peer_uses_membarrier(true)` | membarrier, every process | compiler fence     |
//! | either, if registration fails         | `fence(SeqCst)`           | `fence(SeqCst)`    |
//!
//! A forked child must create its own host, because registration is a property of the process.

use core::sync::atomic::compiler_fence;

use fishplate_core::sync::{
    host::{Host, Woken, notifier_fence, sleeper_fence},
    primitive::{AtomicBool, AtomicU32, Ordering},
};

use crate::{
    clock,
    errno::Errno,
    futex::{self, Scope},
    membarrier,
};

/// Implements [`Host`] with Linux system calls.
#[derive(Debug)]
pub struct LinuxHost {
    scope: Scope,
    /// Whether this process is registered for membarrier, and so calls it before it sleeps.
    registered: bool,
    /// Whether the notifier's barrier may be a compiler fence.
    elides: bool,
    /// Whether the kernel has `futex_waitv`. True until a call fails.
    has_waitv: AtomicBool,
}

const SLICE_NS: u64 = 1_000_000;

impl LinuxHost {
    /// Creates a host for eventcounts that only threads of this process use.
    pub fn private() -> Self {
        let registered = membarrier::register(Scope::Private).is_ok();
        Self {
            scope: Scope::Private,
            registered,
            elides: registered,
            has_waitv: AtomicBool::new(true),
        }
    }

    /// Creates a host for eventcounts in memory shared between processes. Notifications use the
    /// full fence until [`peer_uses_membarrier`](Self::peer_uses_membarrier).
    pub fn shared() -> Self {
        let registered = membarrier::register(Scope::Shared).is_ok();
        Self { scope: Scope::Shared, registered, elides: false, has_waitv: AtomicBool::new(true) }
    }

    /// Makes this host use full fences on both sides. Its sleepers then do not call membarrier, so
    /// every thread that shares an eventcount with this host must use full fences too.
    #[must_use]
    pub fn without_membarrier(self) -> Self {
        Self { registered: false, elides: false, ..self }
    }

    /// Makes this host act as if the kernel had no `futex_waitv` (before Linux 5.16). A wait on two
    /// words then sleeps on the first for a millisecond at a time, and checks the second between
    /// sleeps.
    #[must_use]
    pub fn without_waitv(self) -> Self {
        Self { has_waitv: AtomicBool::new(false), ..self }
    }

    /// Tells this host whether *every* sleeper that it notifies calls membarrier. If so, and if
    /// this process is registered, notifications elide the fence.
    ///
    /// A peer that gives a wrong answer loses only its own wake-ups: it sleeps until its deadline.
    #[must_use]
    pub fn peer_uses_membarrier(self, does: bool) -> Self {
        Self { elides: does && self.registered, ..self }
    }

    /// Returns whether this process is registered for membarrier, so that a peer's call reaches it.
    pub fn is_registered(&self) -> bool {
        self.registered
    }

    /// Returns whether threads that sleep through this host call membarrier. Send the answer to the
    /// peer.
    pub fn sleeper_uses_membarrier(&self) -> bool {
        self.registered
    }

    /// Returns whether a notification through this host elides the full fence.
    pub fn elides_fence(&self) -> bool {
        self.elides
    }

    /// Returns whether waits on two words sleep on both at once.
    pub fn has_waitv(&self) -> bool {
        // Relaxed: the flag states a fact about the kernel and publishes no data.
        self.has_waitv.load(Ordering::Relaxed)
    }

    #[cold]
    fn wait_in_slices(
        &self,
        [(a, a_expected), (b, b_expected)]: [(&AtomicU32, u32); 2],
        timeout_ns: u64,
    ) -> Woken {
        let until = clock::monotonic_ns().saturating_add(timeout_ns);
        loop {
            // Relaxed, like the kernel's own comparison: the waiter looks for work after it
            // returns.
            if b.load(Ordering::Relaxed) != b_expected {
                return Woken::Called;
            }
            let left_ns = until.saturating_sub(clock::monotonic_ns());
            if left_ns == 0 {
                return Woken::Deadline;
            }
            if self.wait(a, a_expected, left_ns.min(SLICE_NS)) == Woken::Called {
                return Woken::Called;
            }
        }
    }
}

fn woken(result: Result<(), Errno>) -> Woken {
    match result {
        Err(Errno::ETIMEDOUT) => Woken::Deadline,
        _ => Woken::Called,
    }
}

impl Host for LinuxHost {
    #[inline]
    fn now_ns(&self) -> u64 {
        clock::monotonic_ns()
    }

    #[doc(alias = "sched_yield")]
    fn yield_now(&self) {
        // SAFETY: the call has no arguments. On Linux it does not fail.
        unsafe { libc::sched_yield() };
    }

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) -> Woken {
        woken(futex::wait(self.scope, word, expected, timeout_ns))
    }

    fn wait_two(&self, words: [(&AtomicU32, u32); 2], timeout_ns: u64) -> Woken {
        if self.has_waitv() {
            match futex::wait_two(self.scope, words, timeout_ns) {
                Err(Errno::ENOSYS) => self.has_waitv.store(false, Ordering::Relaxed),
                result => return woken(result),
            }
        }
        self.wait_in_slices(words, timeout_ns)
    }

    fn wake(&self, word: &AtomicU32) -> u32 {
        futex::wake(self.scope, word)
    }

    fn sleeper_barrier(&self) {
        // Partner: the compiler fence or full fence in `notifier_barrier`. Membarrier pairs with
        // either fence, and also runs a full barrier on this processor. If the kernel rejects
        // membarrier, this fence suffices for notifiers that use a full fence. With other notifiers
        // the sleeper wakes at its deadline.
        if !self.registered || membarrier::all(self.scope).is_err() {
            sleeper_fence();
        }
    }

    #[inline(always)]
    fn notifier_barrier(&self) {
        if self.elides {
            // Partner: membarrier in `sleeper_barrier`. This fence orders the store and the load
            // for the compiler. The sleeper's membarrier orders them for the processor.
            compiler_fence(Ordering::SeqCst);
        } else {
            // Partner: `sleeper_barrier`, whichever of its two barriers runs.
            notifier_fence();
        }
    }
}
