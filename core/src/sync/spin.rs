//! How long to spin before sleeping, and the loop that every waiting thread runs.
//!
//! Nothing here allocates. [`wait_until`] blocks at most until its deadline. [`Idle`] never blocks.
//!
//! A wait has up to four phases, and starts again with the first phase whenever it finds work:
//!
//! | phase | looks for work after each | reads the clock | until |
//! |-------|---|---|---|
//! | probe | pause | never | [`Policy::probes`] pauses |
//! | spin  | pause | each [`Policy::batch`] | twice the usual wait, within two bounds |
//! | yield | `sched_yield` | each time | [`Policy::yields`], if oversubscribed |
//! | park  | sleep on an eventcount | each time | notified, or [`Policy::park_ns`] |
//!
//! A wait must not sleep if the policy does not park, or if nothing would wake the thread. Such a
//! wait keeps spinning. After [`Policy::yield_after_ns`], each batch of pauses ends with a
//! `sched_yield`, because the awaited thread may need this processor.
//!
//! "The usual wait" is a moving average. The spin phase is skipped while it rarely pays: when fewer
//! than [`Policy::min_hits`] of the last 64 waits ended before the yield phase. Every sixteenth
//! wait spins anyway, to notice a change. The spin phase is also skipped when there are more
//! threads than processors, because the awaited thread may need this processor. All numbers are
//! integers, and nothing divides.

use super::{
    event::EventCount,
    host::{Host, Woken},
};

#[cfg(test)]
mod tests;
mod wait;

pub use wait::{Turn, Waited, wait_until};

/// The parameters of a wait. Start from a preset, and adjust it by measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Number of pauses before the first reading of the clock.
    pub probes: u32,
    /// Number of pauses between two readings of the clock while spinning.
    pub batch: u32,
    /// Minimum length of the spin phase, in nanoseconds.
    pub min_spin_ns: u32,
    /// Maximum length of the spin phase, in nanoseconds. Zero means no spin phase.
    pub max_spin_ns: u32,
    /// Minimum number of the last 64 waits that ended while spinning. With fewer, the spin phase is
    /// skipped.
    pub min_hits: u32,
    /// Number of yields before parking, if oversubscribed.
    pub yields: u32,
    /// Maximum length of a sleep, in nanoseconds. It bounds the delay if a notifier is killed
    /// before its wake-up call, and the time until a sleeper notices that a peer has died.
    pub park_ns: u64,
    /// Whether a wait may park. If not, its last phase continues until there is work.
    pub parks: bool,
    /// How long a wait that must not sleep spins before it yields between batches, in nanoseconds.
    /// `u32::MAX` means that it never yields.
    pub yield_after_ns: u32,
}

impl Policy {
    /// Never parks and never yields, for a thread that owns its processor.
    pub const EXCLUSIVE: Self = Self { yield_after_ns: u32::MAX, ..Self::LOW_LATENCY };

    /// Never parks. Yields once it has spun for 20 microseconds.
    pub const LOW_LATENCY: Self = Self { parks: false, ..Self::BALANCED };

    /// Spins for 2 to 20 microseconds, then parks.
    pub const BALANCED: Self = Self {
        probes: 64,
        batch: 16,
        min_spin_ns: 2_000,
        max_spin_ns: 20_000,
        min_hits: 16,
        yields: 8,
        park_ns: 50_000_000,
        parks: true,
        yield_after_ns: 20_000,
    };

    /// Parks at once.
    pub const EFFICIENT: Self =
        Self { probes: 0, min_spin_ns: 0, max_spin_ns: 0, yields: 0, ..Self::BALANCED };
}

/// Counters of one thread's waits. Only that thread may read them; copy them for other threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of pauses.
    pub spins: u64,
    /// Number of yields.
    pub yields: u64,
    /// Number of sleeps.
    pub parks: u64,
    /// Number of sleeps that ended before their deadline without work.
    pub spurious: u64,
    /// Number of sleeps that ended at their deadline.
    pub deadline_wakes: u64,
    /// Number of sleeps that ended at their deadline although there was work: a lost wake-up, or
    /// work published at that very moment. Stays near zero in a healthy program.
    pub deadline_with_work: u64,
    /// Number of wake-up calls made through [`Idle::notify`].
    pub wake_syscalls: u64,
}

/// The next step before checking for work again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Pause the processor for a moment.
    Pause,
    /// Let another thread run.
    Yield,
    /// Sleep on an eventcount.
    Park,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Probe,
    Spin,
    Yield,
    Park,
}

/// The state of one thread's waits, driven by [`wait_until`].
#[derive(Clone, Debug)]
pub struct Idle {
    policy: Policy,
    oversubscribed: bool,
    phase: Phase,
    pauses: u32,
    yields: u32,
    /// Times of this wait: the end of its probe phase, its last clock reading, and the end of its
    /// spin phase.
    since_ns: u64,
    seen_ns: u64,
    spin_until_ns: u64,
    /// Moving average of past waits, each capped at `max_spin_ns`.
    usual_ns: u32,
    /// One bit per wait, the latest lowest. A bit is set if the wait ended before the yield phase.
    hits: u64,
    waits: u32,
    counts: Counts,
}

/// Every sixteenth wait spins, even if spinning has not paid lately.
const EXPLORE_MASK: u32 = 15;

impl Idle {
    /// Creates the state of a thread that has not waited yet.
    pub const fn new(policy: Policy) -> Self {
        Self {
            policy,
            oversubscribed: false,
            phase: Phase::Probe,
            pauses: policy.probes,
            yields: policy.yields,
            since_ns: 0,
            seen_ns: 0,
            spin_until_ns: 0,
            usual_ns: 0,
            hits: u64::MAX,
            waits: 0,
            counts: Counts {
                spins: 0,
                yields: 0,
                parks: 0,
                spurious: 0,
                deadline_wakes: 0,
                deadline_with_work: 0,
                wake_syscalls: 0,
            },
        }
    }

    /// Returns the next step while there is no work. Call [`found`](Idle::found) when there is
    /// work.
    #[inline(always)]
    pub fn step<H: Host + ?Sized>(&mut self, host: &H) -> Step {
        if self.pauses != 0 {
            self.pauses -= 1;
            self.counts.spins += 1;
            return Step::Pause;
        }
        self.next(host)
    }

    /// Like [`step`](Idle::step), but never returns [`Step::Park`]. For work that arrives without a
    /// wake-up call.
    #[inline(always)]
    pub fn step_awake<H: Host + ?Sized>(&mut self, host: &H) -> Step {
        match self.step(host) {
            Step::Park if self.oversubscribed => {
                self.counts.yields += 1;
                Step::Yield
            }
            Step::Park => self.spin_on(),
            step => step,
        }
    }

    /// Ends the wait because there is work, and updates the averages. Nearly free outside a wait.
    #[inline]
    pub fn found(&mut self) {
        if self.phase == Phase::Probe && self.pauses == self.policy.probes {
            return;
        }
        // Uses the last clock reading: the gain from a new reading would not justify its cost.
        let lasted_ns = match self.phase {
            Phase::Probe => 0,
            Phase::Spin | Phase::Yield => {
                self.seen_ns.wrapping_sub(self.since_ns).min(self.policy.max_spin_ns.into()) as u32
            }
            Phase::Park => self.policy.max_spin_ns,
        };
        self.usual_ns = self.usual_ns - (self.usual_ns >> 3) + (lasted_ns >> 3);
        self.hits = self.hits << 1 | u64::from(matches!(self.phase, Phase::Probe | Phase::Spin));
        self.waits = self.waits.wrapping_add(1);
        self.phase = Phase::Probe;
        self.pauses = self.policy.probes;
        self.yields = self.policy.yields;
        self.seen_ns = 0;
    }

    /// Notifies `event`, and counts the wake-up call if one is made. Returns whether a call was
    /// made.
    #[inline(always)]
    pub fn notify<H: Host + ?Sized>(&mut self, host: &H, event: &EventCount) -> bool {
        let woke = event.notify(host);
        self.counts.wake_syscalls += u64::from(woke);
        woke
    }

    /// Sets whether there are more runnable threads than processors.
    pub fn set_oversubscribed(&mut self, oversubscribed: bool) {
        self.oversubscribed = oversubscribed;
    }

    /// Returns the policy in use.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the counters so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the last clock reading of this wait, or zero if there is none.
    #[inline(always)]
    pub fn seen_ns(&self) -> u64 {
        self.seen_ns
    }

    /// Records how a sleep ended, and whether work was found after it.
    pub fn woke(&mut self, woken: Woken, work: bool) {
        self.counts.parks += 1;
        match woken {
            Woken::Called => self.counts.spurious += u64::from(!work),
            Woken::Deadline => {
                self.counts.deadline_wakes += 1;
                self.counts.deadline_with_work += u64::from(work);
            }
        }
    }

    #[inline(never)]
    fn next<H: Host + ?Sized>(&mut self, host: &H) -> Step {
        let now = host.now_ns();
        self.seen_ns = now;
        if self.phase == Phase::Probe {
            self.since_ns = now;
            self.spin_until_ns = now.wrapping_add(self.budget_ns().into());
            self.phase =
                if self.oversubscribed || !self.spin_pays() { Phase::Yield } else { Phase::Spin };
        }
        if self.phase == Phase::Spin {
            if !self.policy.parks {
                return self.spin_on();
            }
            if now < self.spin_until_ns {
                return self.pause();
            }
            self.phase = Phase::Yield;
        }
        if self.phase == Phase::Yield {
            if self.oversubscribed && (self.yields != 0 || !self.policy.parks) {
                self.yields = self.yields.saturating_sub(1);
                self.counts.yields += 1;
                return Step::Yield;
            }
            if !self.policy.parks {
                return self.spin_on();
            }
            self.phase = Phase::Park;
        }
        Step::Park
    }

    fn pause(&mut self) -> Step {
        self.pauses = self.policy.batch.saturating_sub(1);
        self.counts.spins += 1;
        Step::Pause
    }

    /// Yields if this wait has spun for long. The caller has just read the clock.
    fn spin_on(&mut self) -> Step {
        let spun_ns = self.seen_ns.wrapping_sub(self.since_ns);
        if self.policy.yield_after_ns == u32::MAX || spun_ns < self.policy.yield_after_ns.into() {
            return self.pause();
        }
        self.pauses = self.policy.batch.saturating_sub(1);
        self.counts.yields += 1;
        Step::Yield
    }

    fn budget_ns(&self) -> u32 {
        self.usual_ns.saturating_mul(2).max(self.policy.min_spin_ns).min(self.policy.max_spin_ns)
    }

    fn spin_pays(&self) -> bool {
        self.hits.count_ones() >= self.policy.min_hits || self.waits & EXPLORE_MASK == 0
    }
}
