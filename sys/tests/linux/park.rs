//! Sleeping and waking on real futexes: nothing is lost between threads or between processes, whichever barrier is
//! used; sleeping costs no processor time; a thread that is awake is notified without a system call.

use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::support::{Child, Mapping, Random, rounds, seed};
use fishplate_core::sync::{
    event::{EventCount, Park},
    host::{Host, Woken},
    spin::{Counts, Idle, Policy, Turn, Waited, wait_until},
};
use fishplate_sys::{LinuxHost, clock};

/// Long enough that only a lost wake-up is noticed by it.
const SECOND_NS: u64 = 1_000_000_000;

/// One direction of a ping-pong: how many were sent, and what the other side sleeps on.
#[repr(C)]
#[derive(Default)]
struct Lane {
    event: EventCount,
    sent: AtomicU64,
}

/// Answers `rounds` times. Between its steps it dawdles for random moments, from nothing to some microseconds, and
/// now and then gives up the processor, so that each side is met in every state. Returns false after a lost wake-up.
fn play(
    host: &LinuxHost,
    idle: &mut Idle,
    [mine, theirs]: [&Lane; 2],
    serves: bool,
    rounds: u64,
    random: &mut Random,
) -> bool {
    // Half of the time no delay at all: that is where the races are.
    fn dawdle(host: &LinuxHost, random: &mut Random) {
        for _ in 0..random.below(2) * random.below(200) {
            hint::spin_loop();
        }
        if random.below(512) == 0 {
            host.yield_now();
        }
    }
    let serve = |idle: &mut Idle, round: u64| {
        theirs.sent.store(round, Ordering::Release);
        idle.notify(host, &theirs.event);
    };
    for round in 1..=rounds {
        if serves {
            dawdle(host, random);
            serve(idle, round);
        }
        let arrived = || Turn::ready(mine.sent.load(Ordering::Acquire) >= round);
        if wait_until(host, idle, &mine.event, clock::monotonic_ns() + 30 * SECOND_NS, arrived)
            != Waited::Ready
        {
            return false;
        }
        if !serves {
            dawdle(host, random);
            serve(idle, round);
        }
    }
    idle.counts().deadline_with_work == 0
}

fn policy_that_parks(spin_ns: u32) -> Policy {
    Policy {
        max_spin_ns: spin_ns,
        min_spin_ns: spin_ns,
        park_ns: 2 * SECOND_NS,
        min_hits: 0,
        ..Policy::EFFICIENT
    }
}

fn ping_pong(name: &str, make_host: fn() -> LinuxHost, spin_ns: u32, usual_rounds: u64) {
    let rounds = rounds(usual_rounds);
    let seed = seed(name);
    let lanes = Arc::new([Lane::default(), Lane::default()]);
    let host = Arc::new(make_host());
    let began = clock::monotonic_ns();
    let run = |serves: bool| {
        let (lanes, host) = (lanes.clone(), host.clone());
        thread::spawn(move || {
            let mut idle = Idle::new(policy_that_parks(spin_ns));
            let [a, b] = &*lanes;
            let ends = if serves { [a, b] } else { [b, a] };
            let whole =
                play(&host, &mut idle, ends, serves, rounds, &mut Random::new(seed ^ u64::from(serves)));
            (whole, idle.counts())
        })
    };
    let [(first, counts), (second, other)] = [run(true), run(false)].map(|side| side.join().unwrap());
    let took_ms = (clock::monotonic_ns() - began) / 1_000_000;
    eprintln!("{name}: {rounds} round trips in {took_ms} ms\n  {counts:?}\n  {other:?}");
    assert!(first && second, "a wake-up was lost");
    assert!(counts.parks > 0 && other.parks > 0, "nobody slept, so nothing was tested");
}

#[test]
fn no_wake_up_is_lost_with_membarrier() {
    if !LinuxHost::private().elides_fence() {
        eprintln!("SKIPPED: this kernel refuses membarrier(2)");
        return;
    }
    ping_pong("membarrier", LinuxHost::private, 0, 100_000);
}

#[test]
fn no_wake_up_is_lost_with_fences() {
    ping_pong("fences", || LinuxHost::private().without_membarrier(), 0, 50_000);
}

#[test]
fn no_wake_up_is_lost_when_spinning_ends_about_when_work_arrives() {
    ping_pong("spinning", LinuxHost::private, 5_000, 100_000);
}

#[test]
fn no_wake_up_is_lost_on_shared_futexes() {
    ping_pong("shared", || LinuxHost::shared().peer_uses_membarrier(true), 0, 30_000);
}

#[test]
fn no_wake_up_is_lost_between_processes() {
    for peer_uses_membarrier in [false, true] {
        let mapping = Mapping::new(4096);
        // SAFETY: zeroed memory is a lane, inside the mapping and aligned; both processes use it through atomics.
        let lanes = unsafe { [mapping.at::<Lane>(0).as_ref(), mapping.at::<Lane>(2048).as_ref()] };
        let rounds = rounds(20_000);
        let seed = seed("processes");
        let side = |lanes, serves: bool| {
            // Made after the fork: registration is a property of the process.
            let host = LinuxHost::shared().peer_uses_membarrier(peer_uses_membarrier);
            let mut idle = Idle::new(policy_that_parks(0));
            let whole =
                play(&host, &mut idle, lanes, serves, rounds, &mut Random::new(seed ^ u64::from(serves)));
            (whole, idle.counts())
        };
        let child = Child::run(|| side([lanes[1], lanes[0]], false).0);
        let (whole, counts) = side(lanes, true);
        assert!(child.succeeded() && whole, "a wake-up was lost");
        assert!(counts.parks > 0 && counts.wake_syscalls > 0, "nobody slept: {counts:?}");
    }
}

#[test]
fn a_sleeper_in_another_process_is_woken() {
    let mapping = Mapping::new(4096);
    // SAFETY: zeroed memory is an eventcount, inside the mapping and aligned.
    let event: &EventCount = unsafe { mapping.at(0).as_ref() };
    let child =
        Child::run(|| event.park(&LinuxHost::shared(), 30 * SECOND_NS, || false) == Some(Woken::Called));
    let host = LinuxHost::shared();
    while !event.notify(&host) {
        thread::yield_now();
    }
    assert!(child.succeeded());
}

#[test]
fn a_private_wake_up_does_not_reach_a_shared_sleeper() {
    // Why `LinuxHost::shared` exists: the same call with the private flag wakes nobody.
    let mapping = Mapping::new(4096);
    // SAFETY: as above.
    let event: &EventCount = unsafe { mapping.at(0).as_ref() };
    let sleeper = thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let began = clock::monotonic_ns();
            let woken = event.park(&LinuxHost::shared(), SECOND_NS / 2, || false);
            (woken, clock::monotonic_ns() - began)
        });
        thread::sleep(Duration::from_millis(100));
        event.notify(&LinuxHost::private());
        sleeper.join().unwrap()
    });
    // The word did change, hence not `Deadline`; but the time had to pass.
    assert_eq!(sleeper.0, Some(Woken::Called));
    assert!(sleeper.1 >= SECOND_NS / 2);
}

#[test]
fn a_parked_thread_uses_no_processor() {
    let host = LinuxHost::private();
    let (event, done) = (EventCount::new(), AtomicBool::new(false));
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let mut idle = Idle::new(Policy::BALANCED);
            let before_ns = clock::thread_cpu_ns().unwrap();
            let is_done = || Turn::ready(done.load(Ordering::Acquire));
            let waited = wait_until(&host, &mut idle, &event, u64::MAX, is_done);
            assert_eq!(waited, Waited::Ready);
            (clock::thread_cpu_ns().unwrap() - before_ns, idle.counts())
        });
        thread::sleep(Duration::from_secs(2));
        done.store(true, Ordering::Release);
        event.notify(&host);
        let (cpu_ns, counts) = sleeper.join().unwrap();
        eprintln!("{} us of processor time in 2 s: {counts:?}", cpu_ns / 1000);
        assert!(cpu_ns < 20_000_000, "{cpu_ns} ns");
        assert!(counts.parks >= 15);
    });
}

#[test]
fn a_thread_that_is_awake_is_notified_without_a_call() {
    let host = LinuxHost::private();
    let (event, mut idle) = (EventCount::new(), Idle::new(Policy::BALANCED));
    for _ in 0..1_000_000 {
        idle.notify(&host, &event);
    }
    assert_eq!(idle.counts(), Counts::default());
}

#[test]
fn a_sleep_on_two_eventcounts_ends_by_either_or_by_the_deadline() {
    for (name, make_host) in [
        ("waitv", LinuxHost::private as fn() -> LinuxHost),
        ("waitv, shared", LinuxHost::shared),
        ("slices", || LinuxHost::private().without_waitv()),
    ] {
        let host = make_host();
        let events = [EventCount::new(), EventCount::new()];
        let both = [&events[0], &events[1]];
        for event in both {
            thread::scope(|scope| {
                let sleeper = scope.spawn(|| both.park(&host, 30 * SECOND_NS, || false));
                while !event.notify(&host) {
                    thread::yield_now();
                }
                assert_eq!(sleeper.join().unwrap(), Some(Woken::Called), "{name}");
            });
        }
        let began = clock::monotonic_ns();
        let mut woken = Woken::Called;
        // A signal may end a sleep early.
        while woken == Woken::Called {
            woken = both.park(&host, 20_000_000, || false).unwrap();
        }
        assert!(clock::monotonic_ns() - began >= 20_000_000, "{name}");
        eprintln!("{name}: on both words at once: {}", host.has_waitv());
    }
}
