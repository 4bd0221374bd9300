//! The core's [`Host`] over Linux. Only its two waits block, until woken or timed out.
//!
//! # The asymmetric barrier
//!
//! Where `membarrier(2)` works, the sleeper makes every processor run a barrier, and the notifier's
//! half of the race (see [`event`](fishplate_core::sync::event)) is a compiler fence. That is sound
//! only if both hold:
//!
//! 1. *this* process, the notifier's, is registered, so that the sleeper's barrier reaches it
//!    ([`LinuxHost::is_registered`]);
//! 2. every sleeper that this process notifies calls membarrier
//!    ([`LinuxHost::sleeper_uses_membarrier`]).
//!
//! Within a process both have the same answer, so [`LinuxHost::private`] decides alone. Between
//! processes each side sends its answer in a handshake. A host keeps the full fence until it knows
//! that the peer sleeps with membarrier ([`LinuxHost::peer_uses_membarrier`]).
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

/// Linux as the core's [`Host`].
#[derive(Debug)]
pub struct LinuxHost {
    scope: Scope,
    /// Whether this process is registered, and so sleeps with membarrier.
    registered: bool,
    /// Whether the notifier's half may be a compiler fence.
    elides: bool,
    /// Whether the kernel has `futex_waitv`; true until a call fails.
    has_waitv: AtomicBool,
}

/// The longest sleep on one of two words, on kernels that cannot sleep on both.
const SLICE_NS: u64 = 1_000_000;

impl LinuxHost {
    /// A host for eventcounts that only threads of this process use.
    pub fn private() -> Self {
        let registered = membarrier::register(Scope::Private).is_ok();
        Self { scope: Scope::Private, registered, elides: registered, has_waitv: AtomicBool::new(true) }
    }

    /// A host for eventcounts in memory shared between processes. Keeps the full fence until
    /// [`peer_uses_membarrier`](Self::peer_uses_membarrier).
    pub fn shared() -> Self {
        let registered = membarrier::register(Scope::Shared).is_ok();
        Self { scope: Scope::Shared, registered, elides: false, has_waitv: AtomicBool::new(true) }
    }

    /// Changes this host to full fences on both sides. Then every thread that shares an eventcount
    /// must use such a host, because its sleepers do not reach a notifier without a fence.
    #[must_use]
    pub fn without_membarrier(self) -> Self {
        Self { registered: false, elides: false, ..self }
    }

    /// Changes this host to act as if the kernel had no `futex_waitv` (before Linux 5.16): waits on
    /// two words sleep on the first for a millisecond at a time, and check the second in between.
    #[must_use]
    pub fn without_waitv(self) -> Self {
        Self { has_waitv: AtomicBool::new(false), ..self }
    }

    /// Tells this host whether *every* sleeper that it will notify calls membarrier. Then it elides
    /// the fence, if this process is registered.
    ///
    /// A peer that lies costs its own wake-ups: it sleeps until its deadline.
    #[must_use]
    pub fn peer_uses_membarrier(self, does: bool) -> Self {
        Self { elides: does && self.registered, ..self }
    }

    /// Returns whether this process is registered, so that a peer's membarrier reaches it.
    pub fn is_registered(&self) -> bool {
        self.registered
    }

    /// Returns whether threads that sleep through this host call membarrier. Send this to the peer.
    pub fn sleeper_uses_membarrier(&self) -> bool {
        self.registered
    }

    /// Returns whether a notification through this host needs no full fence.
    pub fn elides_fence(&self) -> bool {
        self.elides
    }

    /// Returns whether waits on two words sleep on both at once.
    pub fn has_waitv(&self) -> bool {
        // Relaxed: a fact about the kernel, which publishes no data.
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
            // Relaxed, like the kernel's own comparison: the waiter looks for work afterwards.
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
        // Partner: a compiler fence or a full one in `notifier_barrier`; membarrier is enough for
        // both. It runs a full barrier on this processor too. If the kernel refuses it, the fence
        // is enough for notifiers that fence; others are covered by the deadline.
        if !self.registered || membarrier::all(self.scope).is_err() {
            sleeper_fence();
        }
    }

    #[inline(always)]
    fn notifier_barrier(&self) {
        if self.elides {
            // Partner: membarrier in `sleeper_barrier`. This fence orders store and load for the
            // compiler; the sleeper's membarrier orders them for the processor.
            compiler_fence(Ordering::SeqCst);
        } else {
            // Pairs with either barrier of the sleeper.
            notifier_fence();
        }
    }
}
