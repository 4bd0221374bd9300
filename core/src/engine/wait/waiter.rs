//! The parts of a wait: the [`Waiter`], the schedule of liveness checks, and the loop that makes
//! progress.

use core::cell::Cell;

use crate::engine::Engine;
use crate::probe::probe;
use crate::rail::Rail;
use crate::sync::event::{EventCount, Park};
use crate::sync::host::{Host, Woken};
use crate::sync::spin::{Counts, Idle, Policy, Turn, Waited, wait_until};

/// Number of turns between two reads of the clock for liveness checks.
const TURNS: u32 = 1024;

/// Interval between liveness checks of a busy waiter, in nanoseconds. A parked waiter checks
/// whenever it wakes.
const CHECK_NS: u64 = 10_000_000;

/// How a thread waits: its host, its parker, and the state of its spinning. Use one per thread.
pub struct Waiter<'w, H: Host, P: Park = Asleep> {
    host: &'w H,
    event: &'w P,
    wakes: bool,
    naps: bool,
    idle: Idle,
    pulse: Pulse,
}

/// Schedules liveness checks: after every sleep, and every [`CHECK_NS`] while busy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pulse {
    turns: u32,
    checked_ns: u64,
}

impl Pulse {
    #[inline(always)]
    pub(crate) fn due<H: Host>(&mut self, host: &H, slept: bool) -> bool {
        self.turns = self.turns.wrapping_add(1);
        if !slept && self.turns & (TURNS - 1) != 0 {
            return false;
        }
        let now = host.now_ns();
        let due = slept || now.wrapping_sub(self.checked_ns) >= CHECK_NS;
        if due {
            self.checked_ns = now;
        }
        due
    }
}

/// A parker that never parks: the waiter spins, and yields in long waits.
pub struct Asleep(EventCount);

impl Park for Asleep {
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        self.0.park(host, timeout_ns, work)
    }
}

impl<'w, H: Host, P: Park> Waiter<'w, H, P> {
    /// Creates a waiter that spins according to `policy`, then sleeps on `event`. The rail must
    /// notify `event`, as the contract of [`Rail`] requires.
    pub fn new(host: &'w H, event: &'w P, policy: Policy) -> Self {
        Waiter {
            host,
            event,
            wakes: true,
            naps: false,
            idle: Idle::new(policy),
            pulse: Pulse::default(),
        }
    }

    /// Allows the waiter to sleep while work is left that no event announces, such as a refused
    /// post. Use a policy with short sleeps.
    pub fn napping(self) -> Self {
        Waiter { naps: true, ..self }
    }

    /// Returns the counters so far.
    pub fn counts(&self) -> Counts {
        self.idle.counts()
    }

    /// Sets whether there are more runnable threads than processors.
    pub fn set_oversubscribed(&mut self, oversubscribed: bool) {
        self.idle.set_oversubscribed(oversubscribed);
    }

    /// Returns the host.
    pub fn host(&self) -> &'w H {
        self.host
    }
}

impl<'w, H: Host> Waiter<'w, H, Asleep> {
    /// Creates a waiter that never sleeps, for rails that cannot wake a sleeper. The waiter yields
    /// in long waits. Threads that own their processor should use `Waiter::new` with
    /// [`Policy::EXCLUSIVE`], which does not yield.
    pub fn awake(host: &'w H, never: &'w Asleep) -> Self {
        Waiter { wakes: false, ..Waiter::new(host, never, Policy::LOW_LATENCY) }
    }
}

impl Asleep {
    /// Creates the parker.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Asleep(EventCount::new())
    }
}

pub(crate) struct Noted<'a, P: ?Sized> {
    pub event: &'a P,
    pub slept: &'a Cell<bool>,
}

impl<P: Park + ?Sized> Park for Noted<'_, P> {
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        probe!("stall_begin", timeout_ns, 0u64);
        let woken = self.event.park(host, timeout_ns, work);
        probe!("stall_end", woken.is_some(), 0u64);
        self.slept.set(woken.is_some());
        woken
    }
}

pub(crate) trait Drive {
    /// Makes one pass. Returns the number of events handled.
    fn pass(&mut self) -> u32;

    fn check(&mut self);

    fn is_due(&self) -> bool;
}

impl<R: Rail, const RAILS: usize> Drive for Engine<'_, R, RAILS> {
    #[inline(always)]
    fn pass(&mut self) -> u32 {
        self.progress()
    }

    fn check(&mut self) {
        self.check_peers();
    }

    #[inline(always)]
    fn is_due(&self) -> bool {
        self.has_due()
    }
}

#[inline(always)]
pub(crate) fn block<D: Drive, H: Host, P: Park, T>(
    driven: &mut D,
    waiter: &mut Waiter<'_, H, P>,
    deadline_ns: u64,
    mut ready: impl FnMut(&mut D) -> Option<T>,
) -> Option<T> {
    let Waiter { host, event, wakes, naps, idle, pulse } = waiter;
    let slept = Cell::new(false);
    let mut found = None;
    let turn = || {
        let events = driven.pass();
        found = ready(driven);
        if found.is_some() {
            return Turn::Ready;
        }
        if pulse.due(*host, slept.replace(false)) {
            driven.check();
            found = ready(driven);
            if found.is_some() {
                return Turn::Ready;
            }
        }
        match events != 0 || (driven.is_due() && !*naps) {
            true => Turn::Busy,
            false if *wakes => Turn::Nothing,
            false => Turn::Unnotified,
        }
    };
    match wait_until(*host, idle, &Noted { event: *event, slept: &slept }, deadline_ns, turn) {
        Waited::Ready => found,
        Waited::Expired => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::host::SpinHost;

    #[test]
    fn a_busy_waiter_reads_the_clock_in_few_turns_and_a_woken_one_at_once() {
        // The clock of the host advances by 1 whenever it is read.
        let (host, mut pulse) = (SpinHost::new(1), Pulse::default());
        let before = host.now_ns();
        let due = (0..8 * TURNS).filter(|_| pulse.due(&host, false)).count();
        assert_eq!((due, host.now_ns() - before), (0, 8 + 1));
        assert!(pulse.due(&host, true));
        // The waiter checks again once the interval has passed.
        let (slow, mut pulse) = (SpinHost::new(CHECK_NS), Pulse::default());
        assert_eq!((0..8 * TURNS).filter(|_| pulse.due(&slow, false)).count(), 8);
    }
}
