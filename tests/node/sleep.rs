//! Tests the events that end the sleep of a node with libfabric rails.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::node::{Builder, Fabric};
use fishplate::{Cmp, Notice, Signal};

use super::gpu::device;
use super::{SOON, Way, two, ways};

const ROUNDS: u64 = 11;

/// A delay longer than the first phase of a wait. In that phase sleeps may be short.
const LATE: Duration = Duration::from_millis(70);

/// Limit of the median wake-up time. Without wake-ups, sleeps last 10 ms, and half of the arrivals
/// would wait for 5 ms or more.
const WOKEN: Duration = Duration::from_millis(2);

/// Number of attempts. Other load delays some attempts. A missing wake-up delays all attempts.
const ATTEMPTS: usize = 6;

/// Checks that the median wake-up is fast.
#[track_caller]
fn wake_each_other(way: Way, change: impl Fn(Builder) -> Builder + Sync) {
    let attempt = || {
        let median = signal_in_turn(way, &change);
        println!("{way:?}: woken after {median:?} in the median");
        median
    };
    let late: Vec<_> =
        (0..ATTEMPTS).map(|_| attempt()).take_while(|median| *median >= WOKEN).collect();
    assert!(late.len() < ATTEMPTS, "{way:?}: {late:?}");
}

/// Two nodes signal each other in turn. Each pauses before it signals, so that the other is asleep.
/// Returns the median wake-up time of the slower node.
fn signal_in_turn(way: Way, change: impl Fn(Builder) -> Builder + Sync) -> Duration {
    let sent = Mutex::new(Instant::now());
    let took = [const { Mutex::new(vec![]) }; 2];
    two(way, change, |mut side| {
        let inbox = side.node.alloc(64).unwrap();
        let handle = side.node.handle(inbox).unwrap();
        let handle = side.exchange(&handle);
        let there = side.node.import(side.peer, handle).unwrap();
        side.exchange(&[]);
        for n in 1..=2 * ROUNDS {
            if n % 2 == side.rank as u64 {
                thread::sleep(LATE);
                *sent.lock().unwrap() = Instant::now();
                side.node.signal(Signal::set(there.at(0), n), Notice::Silent).unwrap();
                side.node.quiet(side.peer, SOON).unwrap();
            } else {
                side.node.wait(inbox.at(0), Cmp::Eq, n, Some(side.peer), SOON).unwrap();
                took[side.rank].lock().unwrap().push(sent.lock().unwrap().elapsed());
            }
        }
        side.exchange(&[]);
        side.node.close(SOON).unwrap();
    });
    let medians = took.map(|took| {
        let mut took = took.into_inner().unwrap();
        took.sort();
        took[took.len() / 2]
    });
    println!("{way:?}: {medians:?}");
    medians[0].max(medians[1])
}

fn network() -> impl Iterator<Item = Way> {
    ways().into_iter().filter(|way| *way != Way::SharedMemory)
}

#[test]
fn arrivals_over_libfabric_end_a_sleep() {
    for way in network() {
        wake_each_other(way, |builder| builder);
    }
}

#[test]
fn arrivals_in_shared_memory_end_the_sleep_of_a_node_with_libfabric_rails() {
    for way in network() {
        wake_each_other(way, |builder| builder.shared_memory(true));
    }
}

#[test]
fn arrivals_end_the_sleep_of_a_node_with_a_device() {
    for way in network() {
        wake_each_other(way, |builder| builder.gpu(device()));
        wake_each_other(way, |builder| builder.gpu(device()).shared_memory(true));
    }
}

#[test]
fn a_node_that_sleeps_on_descriptors_and_one_that_does_not_wake_each_other() {
    for way in network() {
        let one = AtomicBool::new(false);
        wake_each_other(way, |builder| match one.fetch_xor(true, Ordering::Relaxed) {
            true => builder.shared_memory(true),
            false => builder.shared_memory(true).fabric(Fabric::Off),
        });
    }
}
