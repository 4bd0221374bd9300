//! The eventcount on which the owner of a rail with a device sleeps. Before a sleep, the rail makes
//! its device ring when a copy ends ([`GpuRail::set_bell`](crate::GpuRail::set_bell)).
//!
//! A word that the device of a peer stores does not wake the owner, unless the peer makes progress:
//! then the peer notifies. While such words are possible, or copies that do not ring, the owner
//! sleeps in naps. Each nap is twice as long as the last, up to a limit, and after any event the
//! next nap is short again. Long waits therefore cost little, and an event is delayed by at most
//! about the time already waited.
//!
//! A device that is lost does not ring. So while copies are to ring, a sleep lasts at most
//! [`CHECK`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use fishplate_core::sync::event::{EventCount, Park};
use fishplate_core::sync::host::{Host, Woken};
use fishplate_shm::WaitObject;

/// Duration of the first nap, in nanoseconds.
const FIRST: u64 = 20_000;

/// Longest sleep while copies are to ring, in nanoseconds.
pub(super) const CHECK: u64 = 100_000_000;

/// What ends a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Ends {
    /// Every event.
    All,
    /// Every event, unless the device is lost.
    Rings,
    /// Not every event, so the sleep is a nap.
    Some,
}

/// The state that the rail shares with its wait object. Only the thread that owns the rail accesses
/// it. It is atomic because the wait object may outlive the rail. Relaxed suffices for all
/// accesses, because handing the rail to another thread orders them.
#[derive(Debug)]
pub(super) struct Pace {
    /// Whether the owner is making its last check for work before a sleep.
    last: AtomicBool,
    /// The [`Ends`] of the coming sleep.
    ends: AtomicU8,
    nap: AtomicU64,
    longest: u64,
}

impl Pace {
    pub(super) fn new(longest: Duration) -> Self {
        let longest = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX).max(FIRST);
        let (last, ends) = (AtomicBool::new(false), AtomicU8::new(Ends::All as u8));
        Pace { last, ends, nap: AtomicU64::new(FIRST), longest }
    }

    /// Returns whether the owner sleeps if this poll finds nothing.
    #[inline(always)]
    pub(super) fn is_ending(&self) -> bool {
        self.last.load(Ordering::Relaxed)
    }

    /// Sets what ends the coming sleep.
    pub(super) fn set_ends(&self, ends: Ends) {
        self.ends.store(ends as u8, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn found(&self) {
        self.nap.store(FIRST, Ordering::Relaxed);
    }

    /// Returns the maximum duration of the coming sleep in nanoseconds. If that sleep is a nap,
    /// doubles the duration of the next nap.
    fn longest(&self) -> u64 {
        match self.ends.load(Ordering::Relaxed) {
            ends if ends == Ends::All as u8 => return u64::MAX,
            ends if ends == Ends::Rings as u8 => return CHECK,
            _ => {}
        }
        let nap = self.nap.load(Ordering::Relaxed);
        self.nap.store(nap.saturating_mul(2).min(self.longest), Ordering::Relaxed);
        nap
    }
}

/// The eventcount on which the owner of a [`GpuRail`](crate::GpuRail) sleeps. This is a handle:
/// clones share the eventcount, and it may outlive the rail.
#[derive(Clone, Debug)]
pub struct GpuWaitObject {
    pub(super) wait_object: WaitObject,
    pub(super) pace: Arc<Pace>,
}

impl GpuWaitObject {
    /// Returns the eventcount, for owners that also sleep on other events.
    pub fn event(&self) -> &EventCount {
        &self.wait_object
    }

    /// Makes the last check for work before a sleep of at most `timeout_ns`. Returns the maximum
    /// length of the sleep in nanoseconds, or `None` if `work` returns true. `work` polls the rail.
    pub fn look(&self, timeout_ns: u64, work: impl FnOnce() -> bool) -> Option<u64> {
        // If `work` does not poll the rail, the sleep is a nap.
        self.pace.set_ends(Ends::Some);
        self.pace.last.store(true, Ordering::Relaxed);
        let found = work();
        self.pace.last.store(false, Ordering::Relaxed);
        if found { None } else { Some(self.pace.longest().min(timeout_ns)) }
    }
}

impl Park for GpuWaitObject {
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        let mut longest_ns = None;
        let armed = self.event().prepare(host).recheck(|| {
            longest_ns = self.look(timeout_ns, work);
            longest_ns.is_none()
        })?;
        Some(armed.commit(host, longest_ns?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn naps_grow_to_their_limit_begin_anew_with_every_find_and_are_none_where_everything_rings() {
        let pace = Pace::new(Duration::from_micros(90));
        assert_eq!(pace.longest(), u64::MAX);
        pace.set_ends(Ends::Some);
        let naps = [0; 5].map(|_| pace.longest());
        assert_eq!(naps, [20_000, 40_000, 80_000, 90_000, 90_000]);
        pace.found();
        assert_eq!(pace.longest(), 20_000);
        pace.set_ends(Ends::Rings);
        assert_eq!(pace.longest(), CHECK);
        pace.set_ends(Ends::All);
        assert_eq!(pace.longest(), u64::MAX);
    }

    #[test]
    fn naps_without_a_limit_are_as_long_as_can_be_counted() {
        let pace = Pace::new(Duration::MAX);
        pace.set_ends(Ends::Some);
        assert_eq!((0..100).map(|_| pace.longest()).max(), Some(u64::MAX));
    }
}
