//! Tests the phases of a wait step by step, on a clock set by the tests, and the loop on faulty
//! hosts.

#![cfg(not(fishplate_loom))]

extern crate std;

use core::cell::{Cell, RefCell};
use std::{vec, vec::Vec};

use super::*;
use crate::sync::{host::SpinHost, primitive::AtomicU32};

/// A host with a clock that moves only on request, and sleeps that end on request.
#[derive(Default)]
struct Scripted {
    now_ns: Cell<u64>,
    /// The clock advances by this much at each reading.
    tick_ns: Cell<u64>,
    clock_reads: Cell<u64>,
    slept: RefCell<Vec<u64>>,
    ends: Cell<Option<Woken>>,
}

impl Host for Scripted {
    fn now_ns(&self) -> u64 {
        self.clock_reads.set(self.clock_reads.get() + 1);
        self.now_ns.set(self.now_ns.get() + self.tick_ns.get());
        self.now_ns.get()
    }

    fn yield_now(&self) {}

    fn wait(&self, _word: &AtomicU32, _expected: u32, timeout_ns: u64) -> Woken {
        self.slept.borrow_mut().push(timeout_ns);
        let woken = self.ends.get().unwrap_or(Woken::Deadline);
        if woken == Woken::Deadline {
            self.now_ns.set(self.now_ns.get() + timeout_ns);
        }
        woken
    }

    fn wait_two(&self, [first, _]: [(&AtomicU32, u32); 2], timeout_ns: u64) -> Woken {
        self.wait(first.0, first.1, timeout_ns)
    }

    fn wake(&self, _word: &AtomicU32) -> u32 {
        0
    }
}

fn steps(idle: &mut Idle, host: &Scripted, of: Step) -> u32 {
    let mut taken = 0;
    while idle.step(host) == of {
        taken += 1;
        assert!(taken < 1_000_000, "no end of {of:?}");
    }
    taken
}

/// Makes one wait end in the park phase.
fn miss(idle: &mut Idle, host: &Scripted) {
    while idle.step(host) != Step::Park {}
    idle.found();
}

#[test]
fn the_probe_phase_does_not_read_the_clock() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    for _ in 0..Policy::BALANCED.probes {
        assert_eq!(idle.step(&host), Step::Pause);
    }
    assert_eq!(host.clock_reads.get(), 0);
    idle.step(&host);
    assert_eq!(host.clock_reads.get(), 1);
}

#[test]
fn the_spin_phase_reads_the_clock_once_a_batch_and_ends_by_it() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    host.tick_ns.set(500);
    // No wait has been averaged yet, so the spin phase has its minimum length: the fifth clock
    // reading is past 2000 ns.
    assert_eq!(steps(&mut idle, &host, Step::Pause), 64 + 4 * 16);
    assert_eq!(host.clock_reads.get(), 5);
    assert_eq!(idle.counts().spins, 64 + 4 * 16);
}

#[test]
fn the_budget_follows_the_usual_wait_within_its_bounds() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    for (wait_ns, budget_ns) in
        [(0, 2_000), (4_000, 8_000), (15_000, 20_000), (500, 2_000), (1_000_000, 20_000)]
    {
        for _ in 0..100 {
            for _ in 0..65 {
                idle.step(&host);
            }
            host.now_ns.set(host.now_ns.get() + wait_ns);
            idle.pauses = 0;
            idle.step(&host);
            idle.found();
        }
        assert!(
            idle.budget_ns().abs_diff(budget_ns) <= budget_ns / 50,
            "{wait_ns}: {}",
            idle.budget_ns()
        );
    }
}

#[test]
fn spinning_stops_when_it_does_not_pay_and_comes_back_when_it_does() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    host.tick_ns.set(1_000);
    for _ in 0..64 {
        miss(&mut idle, &host);
    }
    // Fifteen of sixteen waits park directly after the probes.
    let spinning = |idle: &mut Idle| {
        (0..16)
            .filter(|_| {
                let pauses = steps(idle, &host, Step::Pause);
                idle.found();
                pauses > 64
            })
            .count()
    };
    assert_eq!(spinning(&mut idle), 1);
    for _ in 0..16 {
        idle.step(&host);
        idle.found();
    }
    assert!(steps(&mut idle, &host, Step::Pause) > 64);
}

#[test]
fn threads_without_a_processor_each_yield_before_they_park() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    idle.set_oversubscribed(true);
    assert_eq!(steps(&mut idle, &host, Step::Pause), 64);
    // The step that ended the pauses was already the first yield.
    assert_eq!(steps(&mut idle, &host, Step::Yield), 7);
    assert_eq!(idle.counts().yields, 8);
    assert_eq!(idle.step(&host), Step::Park);
}

#[test]
fn low_latency_never_parks() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::LOW_LATENCY));
    host.tick_ns.set(1_000_000);
    assert!((0..10_000).all(|_| idle.step(&host) != Step::Park));
    idle.found();
    idle.set_oversubscribed(true);
    assert!((0..10_000).all(|_| idle.step(&host) != Step::Park));
    assert!(idle.counts().yields > 9_000);
}

#[test]
fn efficient_parks_at_once_and_goes_on_parking() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::EFFICIENT));
    assert!((0..100).all(|_| idle.step(&host) == Step::Park));
    idle.found();
    assert_eq!(idle.step(&host), Step::Park);
    assert_eq!(idle.counts().spins, 0);
}

/// Runs a wait that must not sleep. Returns the number of pauses before each of its first yields.
fn pauses_before_yields<const N: usize>(policy: Policy, tick_ns: u64) -> [u32; N] {
    let (host, mut idle) = (Scripted::default(), Idle::new(policy));
    host.tick_ns.set(tick_ns);
    core::array::from_fn(|_| {
        let mut pauses = 0;
        while idle.step_awake(&host) == Step::Pause {
            pauses += 1;
            assert!(pauses < 1_000_000, "no yield");
        }
        pauses
    })
}

#[test]
fn a_wait_that_may_not_sleep_yields_after_a_bounded_time_and_then_once_a_batch() {
    let Policy { probes, batch, yield_after_ns, .. } = Policy::LOW_LATENCY;
    // A batch takes 1 µs, and the time starts at the first clock reading.
    let first = probes + batch * (yield_after_ns / 1_000);
    for policy in [Policy::LOW_LATENCY, Policy::BALANCED] {
        assert_eq!(
            pauses_before_yields(policy, 1_000),
            [first, batch - 1, batch - 1],
            "{policy:?}"
        );
    }
}

#[test]
fn a_wait_that_is_short_or_told_not_to_never_yields() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::LOW_LATENCY));
    host.tick_ns.set(1_000);
    let Policy { probes, batch, yield_after_ns, .. } = Policy::LOW_LATENCY;
    for _ in 0..100 {
        let steps = probes + batch * (yield_after_ns / 1_000);
        assert!((0..steps).all(|_| idle.step(&host) == Step::Pause));
        idle.found();
    }
    let mut idle = Idle::new(Policy::EXCLUSIVE);
    host.tick_ns.set(10_000_000);
    assert!((0..10_000).all(|_| idle.step_awake(&host) == Step::Pause));
    assert_eq!(idle.counts().yields, 0);
}

#[test]
fn what_gives_no_wake_up_is_never_slept_on() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    host.tick_ns.set(1_000_000);
    assert!((0..10_000).all(|_| idle.step_awake(&host) != Step::Park));
    // A yielding wait does not read the clock more often.
    assert!(host.clock_reads.get() < 10_000 / 15);
}

#[test]
fn a_ready_turn_costs_no_clock_and_no_step() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    assert_eq!(wait_until(&host, &mut idle, &EventCount::new(), 0, || Turn::Ready), Waited::Ready);
    assert_eq!((host.clock_reads.get(), idle.counts()), (0, Counts::default()));
}

#[test]
fn a_wait_sleeps_to_its_deadline_and_not_beyond() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::EFFICIENT));
    let waited = wait_until(&host, &mut idle, &EventCount::new(), 120_000_000, || Turn::Nothing);
    assert_eq!(waited, Waited::Expired);
    assert_eq!(*host.slept.borrow(), vec![50_000_000, 50_000_000, 20_000_000]);
    assert_eq!(idle.counts(), Counts { parks: 3, deadline_wakes: 3, ..Counts::default() });
}

#[test]
fn a_turn_that_is_always_busy_still_meets_the_deadline() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::BALANCED));
    host.tick_ns.set(1);
    assert_eq!(
        wait_until(&host, &mut idle, &EventCount::new(), 10, || Turn::Busy),
        Waited::Expired
    );
    let mut turns = 0;
    let now_and_then = || {
        turns += 1;
        if turns % 2 == 0 { Turn::Busy } else { Turn::Nothing }
    };
    assert_eq!(wait_until(&host, &mut idle, &EventCount::new(), 20, now_and_then), Waited::Expired);
}

#[test]
fn work_found_by_the_look_before_sleeping_is_not_lost() {
    let (host, mut idle, event) =
        (Scripted::default(), Idle::new(Policy::EFFICIENT), EventCount::new());
    // The second turn runs between the announcement and the sleep.
    let mut turns = 0;
    let second = || {
        turns += 1;
        Turn::ready(turns == 2)
    };
    assert_eq!(wait_until(&host, &mut idle, &event, u64::MAX, second), Waited::Ready);
    assert!(host.slept.borrow().is_empty());
    assert!(!event.notify(&host), "the announcement was not taken back");
}

#[test]
fn every_kind_of_waking_is_counted() {
    let (host, mut idle) = (Scripted::default(), Idle::new(Policy::EFFICIENT));
    host.ends.set(Some(Woken::Called));
    // The turns: first check, recheck, check after a spurious wake-up, recheck, check that finds
    // work.
    let ready_at = |turn| {
        let mut turns = 0;
        move || {
            turns += 1;
            Turn::ready(turns == turn)
        }
    };
    assert_eq!(
        wait_until(&host, &mut idle, &EventCount::new(), u64::MAX, ready_at(5)),
        Waited::Ready
    );
    assert_eq!(idle.counts(), Counts { parks: 2, spurious: 1, ..Counts::default() });
    host.ends.set(Some(Woken::Deadline));
    assert_eq!(
        wait_until(&host, &mut idle, &EventCount::new(), u64::MAX, ready_at(5)),
        Waited::Ready
    );
    let lost = Counts {
        parks: 4,
        spurious: 1,
        deadline_wakes: 2,
        deadline_with_work: 1,
        ..Counts::default()
    };
    assert_eq!(idle.counts(), lost);
}

#[test]
fn a_wait_on_a_machine_without_a_clock_comes_to_its_end() {
    let host = SpinHost::new(1_000);
    for policy in [Policy::EXCLUSIVE, Policy::LOW_LATENCY, Policy::BALANCED, Policy::EFFICIENT] {
        let mut idle = Idle::new(policy);
        let deadline_ns = host.now_ns() + 1_000_000;
        assert_eq!(
            wait_until(&host, &mut idle, &EventCount::new(), deadline_ns, || Turn::Nothing),
            Waited::Expired
        );
        assert!(host.now_ns() >= deadline_ns);
        assert_eq!(idle.counts().deadline_wakes, 0);
    }
}
