//! Sleeping and waking on real futexes. With either barrier no wake-up is lost between threads or
//! processes. A sleeping thread uses no processor time. Notifying an awake thread makes no system
//! call.

use std::{
    hint,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use crate::asleep::{this_thread, until_asleep};
use crate::support::{Child, Mapping, Random, rounds, seed};
use fishplate_core::sync::{
    event::{Channels, EventCount, Park},
    host::{Host, Woken},
    spin::{Counts, Idle, Policy, Turn, Waited, wait_until},
};
use fishplate_sys::{LinuxHost, clock};

/// A timeout long enough that a test reaches it only after a lost wake-up.
const SECOND_NS: u64 = 1_000_000_000;

/// One direction of a ping-pong: a counter, and the event on which the other side sleeps.
#[repr(C)]
#[derive(Default)]
struct Lane {
    event: EventCount,
    sent: AtomicU64,
}

/// Answers `rounds` times. Random delays between the steps, from none to some microseconds and
/// sometimes a yield, make each side meet the other in every state. Returns false after a lost
/// wake-up.
fn play(
    host: &LinuxHost,
    idle: &mut Idle,
    [mine, theirs]: [&Lane; 2],
    serves: bool,
    rounds: u64,
    random: &mut Random,
) -> bool {
    // Half of the delays are zero, because most races happen without a delay.
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

/// Makes one thread announce its sleep at the moment when another publishes work, in many rounds.
/// Both start together, and one of them first pauses for a random time. A missing barrier shows
/// here.
fn meet(name: &str, make_host: fn() -> LinuxHost, usual_rounds: u64) {
    let rounds = rounds(usual_rounds);
    let seed = seed(name);
    let (host, lane, start) =
        (make_host(), Lane::default(), [AtomicU64::new(0), AtomicU64::new(0)]);
    let both_start = |me: usize, round: u64, random: &mut Random| {
        start[me].store(round, Ordering::SeqCst);
        let mut probes = 0u32;
        while start[1 - me].load(Ordering::SeqCst) < round {
            hint::spin_loop();
            probes += 1;
            if probes.is_multiple_of(4096) {
                thread::yield_now();
            }
        }
        for _ in 0..random.below(24) {
            hint::black_box(());
        }
    };
    let (slept, lost) = thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let (mut slept, mut random) = (0u64, Random::new(seed));
            for round in 1..=rounds {
                both_start(0, round, &mut random);
                let arrived = || lane.sent.load(Ordering::Acquire) >= round;
                while !arrived() {
                    match lane.event.park(&host, SECOND_NS, arrived) {
                        Some(Woken::Deadline) if arrived() => {
                            // One failure is enough, so let the notifier finish alone.
                            start[0].store(u64::MAX, Ordering::SeqCst);
                            return (slept, Some(round));
                        }
                        Some(Woken::Deadline) => {}
                        Some(Woken::Called) => slept += 1,
                        None => {}
                    }
                }
            }
            (slept, None)
        });
        let mut random = Random::new(!seed);
        for round in 1..=rounds {
            both_start(1, round, &mut random);
            lane.sent.store(round, Ordering::Release);
            lane.event.notify(&host);
        }
        sleeper.join().unwrap()
    });
    eprintln!("{name}: {rounds} meetings, {slept} sleeps, a wake-up lost in round {lost:?}");
    assert_eq!(lost, None, "a wake-up was lost");
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
            let whole = play(
                &host,
                &mut idle,
                ends,
                serves,
                rounds,
                &mut Random::new(seed ^ u64::from(serves)),
            );
            (whole, idle.counts())
        })
    };
    let [(first, counts), (second, other)] =
        [run(true), run(false)].map(|side| side.join().unwrap());
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
fn no_wake_up_is_lost_when_sleeper_and_notifier_meet_with_membarrier() {
    meet("meeting, membarrier", LinuxHost::private, 50_000);
}

#[test]
fn no_wake_up_is_lost_when_sleeper_and_notifier_meet_with_fences() {
    meet("meeting, fences", || LinuxHost::private().without_membarrier(), 50_000);
}

#[test]
fn no_wake_up_is_lost_on_shared_futexes() {
    ping_pong("shared", || LinuxHost::shared().peer_uses_membarrier(true), 0, 30_000);
}

#[test]
fn no_wake_up_is_lost_between_processes() {
    for peer_uses_membarrier in [false, true] {
        let mapping = Mapping::new(4096);
        // SAFETY: both offsets are aligned and inside the mapping. Zeroed memory is a valid lane,
        // and both processes use only atomics.
        let lanes = unsafe { [mapping.at::<Lane>(0).as_ref(), mapping.at::<Lane>(2048).as_ref()] };
        let rounds = rounds(20_000);
        let seed = seed("processes");
        let side = |lanes, serves: bool| {
            // The host is created after the fork, because membarrier registration belongs to the
            // process.
            let host = LinuxHost::shared().peer_uses_membarrier(peer_uses_membarrier);
            let mut idle = Idle::new(policy_that_parks(0));
            let whole = play(
                &host,
                &mut idle,
                lanes,
                serves,
                rounds,
                &mut Random::new(seed ^ u64::from(serves)),
            );
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
    // SAFETY: offset 0 is aligned and inside the mapping. Zeroed memory is a valid eventcount.
    let event: &EventCount = unsafe { mapping.at(0).as_ref() };
    let child = Child::run(|| {
        event.park(&LinuxHost::shared(), 30 * SECOND_NS, || false) == Some(Woken::Called)
    });
    let host = LinuxHost::shared();
    while !event.notify(&host) {
        thread::yield_now();
    }
    assert!(child.succeeded());
}

#[test]
fn a_sleeper_on_two_eventcounts_is_woken_from_another_process() {
    let mapping = Mapping::new(4096);
    // SAFETY: offset 0 is aligned and inside the mapping. Zeroed memory is a valid pair of
    // eventcounts.
    let channels: &Channels = unsafe { mapping.at(0).as_ref() };
    let [send, recv] = [&channels.send, &channels.recv[0]];
    for event in [send, recv] {
        let began = clock::monotonic_ns();
        let child = Child::run(|| {
            [send, recv].park(&LinuxHost::shared(), 30 * SECOND_NS, || false) == Some(Woken::Called)
        });
        let host = LinuxHost::shared();
        until_asleep(child.id());
        while !event.notify(&host) {
            thread::yield_now();
        }
        assert!(child.succeeded());
        assert!(clock::monotonic_ns() - began < 10 * SECOND_NS, "slept through it");
    }
}

#[test]
fn a_private_wake_up_does_not_reach_a_shared_sleeper() {
    // Shows why `LinuxHost::shared` exists: with the private flag, the same notification wakes
    // nobody.
    let mapping = Mapping::new(4096);
    // SAFETY: offset 0 is aligned and inside the mapping. Zeroed memory is a valid eventcount.
    let event: &EventCount = unsafe { mapping.at(0).as_ref() };
    let (sleeps, sleeping) = mpsc::channel();
    let sleeper = thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            let began = clock::monotonic_ns();
            sleeps.send(this_thread()).unwrap();
            let woken = event.park(&LinuxHost::shared(), 2 * SECOND_NS, || false);
            (woken, clock::monotonic_ns() - began)
        });
        until_asleep(sleeping.recv().unwrap());
        event.notify(&LinuxHost::private());
        sleeper.join().unwrap()
    });
    // The word did change, so the result is `Called` rather than `Deadline`. But the time had to
    // pass.
    assert_eq!(sleeper.0, Some(Woken::Called));
    assert!(sleeper.1 >= 2 * SECOND_NS);
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
        // A park lasts 50 ms, or longer if other threads use the processor.
        assert!(counts.parks >= 5);
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
            let began = clock::monotonic_ns();
            let (sleeps, sleeping) = mpsc::channel();
            thread::scope(|scope| {
                let sleeper = scope.spawn(|| {
                    sleeps.send(this_thread()).unwrap();
                    both.park(&host, 30 * SECOND_NS, || false)
                });
                until_asleep(sleeping.recv().unwrap());
                while !event.notify(&host) {
                    thread::yield_now();
                }
                assert_eq!(sleeper.join().unwrap(), Some(Woken::Called), "{name}");
            });
            assert!(clock::monotonic_ns() - began < 10 * SECOND_NS, "{name}: slept through it");
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
