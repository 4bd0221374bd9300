//! An eventcount: one thread sleeps until another announces work. If the thread is awake, a
//! notification costs one barrier, one load and one branch, and writes nothing. Nothing here
//! allocates. Only the sleeps block, such as [`Armed::commit`], and only until their deadline.
//!
//! Any number of threads may notify, and one thread sleeps. Two sleepers on one word are sound, but
//! either may withdraw the other's announcement. The other thread then sleeps until its deadline.
//! The word may lie in memory shared between processes, and zeroed memory is a valid eventcount. A
//! peer that writes arbitrary values there causes at worst a spurious wake-up, or a sleep until the
//! deadline.
//!
//! # The race
//!
//! | sleeper | notifier |
//! |---|---|
//! | 1. word = sleeping  ([`EventCount::prepare`]) | 1. publishes work (a ring's tail, a flag) |
//! | 2. full barrier | 2. full barrier |
//! | 3. looks for work  ([`Prepared::recheck`]) | 3. looks at the word ([`EventCount::notify`]) |
//! | 4. sleeps while word == sleeping | 4. if sleeping: word = awake, wake-up call |
//!
//! Each side stores, then loads what the other side stored. Without a full barrier in between, a
//! processor may execute the load before the store is visible. Then the sleeper finds no work, the
//! notifier finds no sleeper, and the work waits for the deadline. With both barriers at least one
//! side sees the other's store. If both do, the sleeper finds its work and withdraws the
//! announcement, and the notifier makes a needless system call. The barriers are
//! [`Host::sleeper_barrier`] and [`Host::notifier_barrier`], edges `event.sleeper.fence` and
//! `event.notifier.fence`.
//!
//! Every access to the word itself is relaxed: the barriers order it against the work, and the work
//! has its own edge. Between steps 3 and 4 of the sleeper a notifier may change the word. The sleep
//! then ends at once, because the kernel compares the word under the lock that the wake-up call
//! takes.
//!
//! A thread that also waits for descriptors sleeps only on those ([`EventCount::park_elsewhere`]).
//! The word says so, and a notifier then makes one of the descriptors readable
//! ([`EventCount::notify_with`]). A descriptor that became readable before the sleep ends the sleep
//! at once, so step 4 needs no comparison.
//!
//! If a notifier is killed between changing the word and the wake-up call, the sleeper sleeps until
//! its deadline. So every sleep has a deadline.

use super::{
    host::{Host, Woken},
    primitive::{AtomicU32, Ordering, const_new, filled},
};

mod listeners;
#[cfg(test)]
mod races;
#[cfg(test)]
mod tests;

pub use listeners::{Listeners, Listening};

/// Value of the word while its owner is awake, and looks for work without a notification.
const AWAKE: u32 = 0;
/// Value of the word while its owner sleeps on it, or is about to.
const SLEEPING: u32 = 1;
/// Value of the word while its owner sleeps on a descriptor, or is about to.
const ELSEWHERE: u32 = 2;

/// A word on which one thread sleeps. It occupies 128 bytes, so that it shares no cache line.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct EventCount {
    word: AtomicU32,
}

/// The eventcounts of a worker and its queues, one per direction and sleeper. Work in one direction
/// does not wake the sleeper of the other direction. `send` is at byte 0, followed by each `recv`
/// at a distance of 128 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct Channels<const QUEUES: usize = 1> {
    /// The worker sleeps on this eventcount. A queue notifies it when it submits a command.
    pub send: EventCount,
    /// One eventcount per queue, on which the queue's thread sleeps. The worker notifies this
    /// eventcount when a command completes.
    pub recv: [EventCount; QUEUES],
}

/// One queue's share of its worker's [`Channels`].
#[derive(Clone, Copy, Debug)]
pub struct Channel<'e> {
    pub(crate) send: &'e EventCount,
    pub(crate) recv: &'e EventCount,
}

#[cfg(not(fishplate_loom))]
mod layout {
    use super::{Channels, EventCount};
    use core::mem::{align_of, offset_of, size_of};
    use static_assertions::const_assert_eq;

    const_assert_eq!(size_of::<EventCount>(), 128);
    const_assert_eq!(align_of::<EventCount>(), 128);
    const_assert_eq!(offset_of!(EventCount, word), 0);
    const_assert_eq!(size_of::<Channels>(), 256);
    const_assert_eq!(size_of::<Channels<3>>(), 512);
    const_assert_eq!(offset_of!(Channels, send), 0);
    const_assert_eq!(offset_of!(Channels, recv), 128);
}

impl<const QUEUES: usize> Channels<QUEUES> {
    const_new! {
        /// Creates eventcounts on which no thread sleeps.
        pub fn new() -> Self {
            Self { send: EventCount::new(), recv: filled!(EventCount::new(); QUEUES) }
        }
    }

    /// Returns the channel of one queue. Use each index for one queue only.
    ///
    /// # Panics
    /// If `index` is not below `QUEUES`.
    pub fn queue(&self, index: usize) -> Channel<'_> {
        Channel { send: &self.send, recv: &self.recv[index] }
    }
}

impl<const QUEUES: usize> Default for Channels<QUEUES> {
    fn default() -> Self {
        Self::new()
    }
}

impl EventCount {
    const_new! {
        /// Creates an eventcount on which no thread sleeps.
        pub fn new() -> Self {
            Self { word: AtomicU32::new(AWAKE) }
        }
    }

    /// Announces work. Call this *after* publishing the work. Returns whether a wake-up call was
    /// made.
    #[inline(always)]
    pub fn notify<H: Host + ?Sized>(&self, host: &H) -> bool {
        self.notify_with(host, || {})
    }

    /// Like [`notify`](Self::notify), for an owner that may [sleep
    /// elsewhere](Self::park_elsewhere). If the owner does, calls `elsewhere`, which must make a
    /// descriptor of that sleep readable.
    #[inline(always)]
    pub fn notify_with<H: Host + ?Sized>(&self, host: &H, elsewhere: impl FnOnce()) -> bool {
        // The notifier's half of the race. Without this barrier, the load below may execute before
        // the published work is visible. Then the sleeper could announce its sleep, find no work
        // and sleep, while this thread sees it awake.
        host.notifier_barrier();
        // Relaxed: the barrier orders this load after the publication of the work.
        if self.word.load(Ordering::Relaxed) == AWAKE {
            return false;
        }
        self.wake(host, elsewhere)
    }

    #[cold]
    #[inline(never)]
    fn wake<H: Host + ?Sized>(&self, host: &H, elsewhere: impl FnOnce()) -> bool {
        // If there are several notifiers, only the notifier that changes the word makes the call.
        // Relaxed: the work has its own edge, and the word only has to differ when the kernel
        // compares it.
        match self.word.swap(AWAKE, Ordering::Relaxed) {
            AWAKE => return false,
            ELSEWHERE => elsewhere(),
            _ => _ = host.wake(&self.word),
        }
        true
    }

    /// Returns whether the owner has announced a sleep that no notifier has ended. Only the owner
    /// calls this. If it returns false, the coming sleep ends at once, so the owner may postpone
    /// work until after that sleep.
    #[inline(always)]
    pub fn is_announced(&self) -> bool {
        // Relaxed: the owner reads its own store, or a notifier's change of the word.
        self.word.load(Ordering::Relaxed) != AWAKE
    }

    /// Announces that this thread is about to sleep. Check for work next, with
    /// [`Prepared::recheck`].
    pub fn prepare<H: Host + ?Sized>(&self, host: &H) -> Prepared<'_> {
        let announced = self.announce(SLEEPING);
        // The sleeper's half of the race. Without this barrier, the check for work may execute
        // before the announcement is visible. Then a notifier could publish its work after the
        // check, and still see this thread awake.
        host.sleeper_barrier();
        Prepared { announced }
    }

    /// Announces that this thread is about to sleep on both `a` and `b`. A notification of either
    /// wakes it.
    pub fn prepare_two<'e, H: Host + ?Sized>(
        a: &'e Self,
        b: &'e Self,
        host: &H,
    ) -> PreparedTwo<'e> {
        let announced = [a.announce(SLEEPING), b.announce(SLEEPING)];
        // One barrier orders both announcements, as in `prepare`.
        host.sleeper_barrier();
        PreparedTwo { announced }
    }

    /// Runs all three phases of a sleep on a descriptor. A notification of one of `events` makes
    /// the descriptor readable ([`notify_with`](Self::notify_with)). If `work` returns true,
    /// returns `None` without calling `sleep`. [`Woken::Deadline`] has the same meaning as for
    /// [`Armed::commit`].
    pub fn park_elsewhere<H: Host + ?Sized, const N: usize>(
        events: [&Self; N],
        host: &H,
        work: impl FnOnce() -> bool,
        sleep: impl FnOnce() -> Woken,
    ) -> Option<Woken> {
        if !Self::arm_elsewhere(events, host, work) {
            return None;
        }
        let woken = sleep();
        let stood = events.map(|event| Announced { event }.withdraw());
        Some(if stood.contains(&false) { Woken::Called } else { woken })
    }

    /// Runs the first two phases of a sleep on a descriptor. The owner then waits on the descriptor
    /// itself, for example with `poll(2)`. A notifier of one of `events` then makes the descriptor
    /// readable, once. If `work` returns true, withdraws the announcements and returns `false`. An
    /// announcement that remains while the owner is awake costs only one needless call of the next
    /// notifier.
    pub fn arm_elsewhere<H: Host + ?Sized, const N: usize>(
        events: [&Self; N],
        host: &H,
        work: impl FnOnce() -> bool,
    ) -> bool {
        let announced = events.map(|event| event.announce(ELSEWHERE));
        // The barrier orders all announcements, as in `prepare`.
        host.sleeper_barrier();
        let nothing = !work();
        if nothing {
            // The announcements stay until a notifier or the next sleep changes the words.
            announced.into_iter().for_each(core::mem::forget);
        }
        nothing
    }

    fn announce(&self, how: u32) -> Announced<'_> {
        // Relaxed: the barrier that follows orders this store before the check for work.
        self.word.store(how, Ordering::Relaxed);
        Announced { event: self }
    }
}

/// An object on which a thread can sleep: one [`EventCount`], or an array of two. A notification of
/// either wakes the thread.
pub trait Park {
    /// Runs all three phases: announces, checks for work, sleeps for at most `timeout_ns`. If
    /// `work` returns true, returns `None` without sleeping.
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken>;
}

impl Park for EventCount {
    #[inline]
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        Some(self.prepare(host).recheck(work)?.commit(host, timeout_ns))
    }
}

impl Park for [&EventCount; 2] {
    #[inline]
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        let [a, b] = *self;
        Some(EventCount::prepare_two(a, b, host).recheck(work)?.commit(host, timeout_ns))
    }
}

impl Default for EventCount {
    fn default() -> Self {
        Self::new()
    }
}

/// An announcement on one word. Withdraws the announcement when dropped.
#[derive(Debug)]
struct Announced<'e> {
    event: &'e EventCount,
}

impl Announced<'_> {
    /// Returns whether no notifier had seen the announcement.
    fn withdraw(&self) -> bool {
        // Relaxed: a notifier that still reads "sleeping" makes a needless call. A notifier that
        // reads "awake" has published its work for a thread that is about to check for work.
        self.event.word.swap(AWAKE, Ordering::Relaxed) != AWAKE
    }
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.withdraw();
    }
}

/// An announced sleep.
#[derive(Debug)]
#[must_use = "dropping it withdraws the announcement"]
pub struct Prepared<'e> {
    announced: Announced<'e>,
}

impl<'e> Prepared<'e> {
    /// Checks for work again. If `work` returns true, withdraws the announcement and returns
    /// `None`.
    #[inline]
    pub fn recheck(self, work: impl FnOnce() -> bool) -> Option<Armed<'e>> {
        if work() { None } else { Some(Armed { announced: self.announced }) }
    }
}

/// An announced sleep after a check that found no work.
#[derive(Debug)]
#[must_use = "dropping it withdraws the announcement"]
pub struct Armed<'e> {
    announced: Announced<'e>,
}

impl Armed<'_> {
    /// Sleeps until a notification, for at most `timeout_ns`. May return early without a reason.
    /// Check for work after every return.
    ///
    /// Returns [`Woken::Deadline`] only if the time has passed and no notifier has seen the
    /// announcement. Work found after [`Woken::Deadline`] was published at that very moment, or its
    /// wake-up was lost.
    pub fn commit<H: Host + ?Sized>(self, host: &H, timeout_ns: u64) -> Woken {
        let woken = host.wait(&self.announced.event.word, SLEEPING, timeout_ns);
        if self.announced.withdraw() { woken } else { Woken::Called }
    }
}

/// A sleep announced on two eventcounts.
#[derive(Debug)]
#[must_use = "dropping it withdraws both announcements"]
pub struct PreparedTwo<'e> {
    announced: [Announced<'e>; 2],
}

impl<'e> PreparedTwo<'e> {
    /// Checks for both kinds of work again. If `work` returns true, withdraws both announcements
    /// and returns `None`.
    #[inline]
    pub fn recheck(self, work: impl FnOnce() -> bool) -> Option<ArmedTwo<'e>> {
        if work() { None } else { Some(ArmedTwo { announced: self.announced }) }
    }
}

/// A sleep announced on two eventcounts, after a check that found no work.
#[derive(Debug)]
#[must_use = "dropping it withdraws both announcements"]
pub struct ArmedTwo<'e> {
    announced: [Announced<'e>; 2],
}

impl ArmedTwo<'_> {
    /// Sleeps until a notification of either eventcount, for at most `timeout_ns`. Otherwise like
    /// [`Armed::commit`].
    pub fn commit<H: Host + ?Sized>(self, host: &H, timeout_ns: u64) -> Woken {
        let [a, b] = &self.announced;
        let woken =
            host.wait_two([(&a.event.word, SLEEPING), (&b.event.word, SLEEPING)], timeout_ns);
        // Withdraws both announcements before testing either result.
        let (a, b) = (a.withdraw(), b.withdraw());
        if a && b { woken } else { Woken::Called }
    }
}
