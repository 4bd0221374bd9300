//! The eventcount on which the owner of a rail with a device sleeps. Neither a word that a device
//! stores nor the completion of a copy wakes it. While such events are possible, the owner sleeps
//! in naps. Each nap is twice as long as the last, up to a limit, and after any event the next nap
//! is short again. Long waits therefore cost little, and an event is delayed by at most about the
//! time already waited.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
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
    /// Number of sources of events that do not wake the owner: peers with done words, and the
    /// device while it copies.
    silent: AtomicU32,
    nap: AtomicU64,
    longest: u64,
}

impl Pace {
    pub(super) fn new(longest: Duration) -> Self {
        let longest = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX).max(FIRST);
        Pace { silent: AtomicU32::new(0), nap: AtomicU64::new(FIRST), longest }
    }

    pub(super) fn expect(&self, silent: u32) {
        // Relaxed: only the thread that owns the rail uses this, and handing the rail over orders
        // the accesses.
        self.silent.store(silent, Ordering::Relaxed);
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
        if self.silent.load(Ordering::Relaxed) == 0 {
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
        match work() {
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
        pace.expect(1);
        let naps: Vec<_> = (0..5).map(|_| pace.nap().unwrap()).collect();
        assert_eq!(naps, [20_000, 40_000, 80_000, 90_000, 90_000]);
        pace.found();
        assert_eq!(pace.nap(), Some(20_000));
        pace.expect(0);
        assert_eq!(pace.nap(), None);
    }

    #[test]
    fn naps_without_a_limit_are_as_long_as_can_be_counted() {
        let pace = Pace::new(Duration::MAX);
        pace.expect(1);
        assert_eq!((0..100).map(|_| pace.nap().unwrap()).max(), Some(u64::MAX));
    }
}
