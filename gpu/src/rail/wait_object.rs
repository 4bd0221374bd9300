//! The eventcount on which the owner of a rail with a device sleeps. Before a sleep, the rail makes
//! its device ring when a copy ends ([`GpuRail::set_bell`](crate::GpuRail::set_bell)).
//!
//! A word that the device of a peer stores does not wake the owner, unless the peer makes progress:
//! then the peer notifies. While such words are possible, or copies that do not ring, the owner
//! sleeps in naps. Each nap is twice as long as the last, up to a limit, and after any event the
//! next nap is short again. Long waits therefore cost little, and an event is delayed by at most
//! about the time already waited.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fishplate_core::sync::event::{EventCount, Park};
use fishplate_core::sync::host::{Host, Woken};
use fishplate_shm::WaitObject;

/// Duration of the first nap, in nanoseconds.
const FIRST: u64 = 20_000;

/// The state that the rail shares with its wait object. Only the owner's thread accesses it. It is
/// atomic because the wait object may outlive the rail.
#[derive(Debug)]
pub(super) struct Pace {
    /// Whether the owner makes its last check for work before a sleep.
    ends: AtomicBool,
    /// Whether the coming sleep is a nap, because some events would not end it.
    naps: AtomicBool,
    nap: AtomicU64,
    longest: u64,
}

impl Pace {
    pub(super) fn new(longest: Duration) -> Self {
        let longest = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX).max(FIRST);
        let [ends, naps] = [const { AtomicBool::new(false) }; 2];
        Pace { ends, naps, nap: AtomicU64::new(FIRST), longest }
    }

    /// Returns whether the owner sleeps if this poll finds nothing.
    #[inline(always)]
    pub(super) fn is_ending(&self) -> bool {
        // Relaxed: only the thread that owns the rail uses this, and handing the rail over orders
        // the accesses.
        self.ends.load(Ordering::Relaxed)
    }

    /// Sets whether the coming sleep is a nap.
    pub(super) fn set_naps(&self, naps: bool) {
        // Relaxed: only the thread that owns the rail uses this, and handing the rail over orders
        // the accesses.
        self.naps.store(naps, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(super) fn found(&self) {
        // Relaxed: only the thread that owns the rail uses this, and handing the rail over orders
        // the accesses.
        self.nap.store(FIRST, Ordering::Relaxed);
    }

    /// Returns the duration of the next nap in nanoseconds, and doubles the duration for the nap
    /// after it. Returns `None` if every event wakes the owner.
    fn nap(&self) -> Option<u64> {
        // Relaxed: only the thread that owns the rail uses this, and handing the rail over orders
        // the accesses.
        if !self.naps.load(Ordering::Relaxed) {
            return None;
        }
        let nap = self.nap.load(Ordering::Relaxed);
        self.nap.store(nap.saturating_mul(2).min(self.longest), Ordering::Relaxed);
        Some(nap)
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
        self.pace.set_naps(true);
        // Relaxed: only the thread that owns the rail uses this, and handing the rail over orders
        // the accesses.
        self.pace.ends.store(true, Ordering::Relaxed);
        let found = work();
        self.pace.ends.store(false, Ordering::Relaxed);
        match found {
            true => None,
            false => Some(self.pace.nap().map_or(timeout_ns, |nap| nap.min(timeout_ns))),
        }
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
        assert_eq!(pace.nap(), None);
        pace.set_naps(true);
        let naps: Vec<_> = (0..5).map(|_| pace.nap().unwrap()).collect();
        assert_eq!(naps, [20_000, 40_000, 80_000, 90_000, 90_000]);
        pace.found();
        assert_eq!(pace.nap(), Some(20_000));
        pace.set_naps(false);
        assert_eq!(pace.nap(), None);
    }

    #[test]
    fn naps_without_a_limit_are_as_long_as_can_be_counted() {
        let pace = Pace::new(Duration::MAX);
        pace.set_naps(true);
        assert_eq!((0..100).map(|_| pace.nap().unwrap()).max(), Some(u64::MAX));
    }
}
