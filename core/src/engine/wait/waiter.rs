//! What a wait needs: the [`Waiter`], when to ask whether peers live, and the loop over whatever a
//! wait drives.

use core::cell::Cell;

use crate::engine::Engine;
use crate::rail::Rail;
use crate::sync::event::{EventCount, Park};
use crate::sync::host::{Host, Woken};
use crate::sync::spin::{Counts, Idle, Policy, Turn, Waited, wait_until};

/// Turns between two looks at the clock for the peers' sake.
const TURNS: u32 = 1024;

/// How often a busy waiter asks whether its peers live, in nanoseconds. A parked one asks whenever
/// it wakes.
const CHECK_NS: u64 = 10_000_000;

/// How a thread waits: its host, what it sleeps on, and the state of its spinning. One per thread.
pub struct Waiter<'w, H: Host, P: Park = Asleep> {
    host: &'w H,
    event: &'w P,
    wakes: bool,
    naps: bool,
    idle: Idle,
    pulse: Pulse,
}

/// When to ask whether the peers live: after every sleep, and now and then while busy.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pulse {
    turns: u32,
    checked_ns: u64,
}

impl Pulse {
    /// Whether it is time, on a turn that does or does not follow a sleep.
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

/// What a waiter sleeps on that never sleeps.
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
    /// Spins as `policy` says, then sleeps on `event`, which the rail rings: see the contract of
    /// [`Rail`].
    pub fn new(host: &'w H, event: &'w P, policy: Policy) -> Self {
        Waiter { host, event, wakes: true, naps: false, idle: Idle::new(policy), pulse: Pulse::default() }
    }

    /// Sleeps also while something is left to do that no event announces, such as a post that a
    /// rail refuses: for a policy whose sleeps are short.
    pub fn napping(self) -> Self {
        Waiter { naps: true, ..self }
    }

    /// What was counted so far.
    pub fn counts(&self) -> Counts {
        self.idle.counts()
    }

    /// Says whether there are more threads to run than processors to run them.
    pub fn set_oversubscribed(&mut self, oversubscribed: bool) {
        self.idle.set_oversubscribed(oversubscribed);
    }

    /// The host.
    pub fn host(&self) -> &'w H {
        self.host
    }
}

impl<'w, H: Host> Waiter<'w, H, Asleep> {
    /// Never sleeps: for rails that cannot wake anybody. Yields when a wait gets long, which
    /// `Waiter::new` with [`Policy::EXCLUSIVE`] does not: for threads that own their processor.
    pub fn awake(host: &'w H, never: &'w Asleep) -> Self {
        Waiter { wakes: false, ..Waiter::new(host, never, Policy::LOW_LATENCY) }
    }
}

impl Asleep {
    /// Nothing to sleep on.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Asleep(EventCount::new())
    }
}

/// Notes that a sleep took place.
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
        let woken = self.event.park(host, timeout_ns, work);
        self.slept.set(woken.is_some());
        woken
    }
}

/// What a wait drives.
pub(crate) trait Drive {
    /// One pass. Returns how many events came in.
    fn pass(&mut self) -> u32;

    /// Asks whether the peers live.
    fn check(&mut self);

    /// Whether something is left to do that no event announces.
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

/// Drives until `ready` returns something. `None`: the deadline expired.
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
