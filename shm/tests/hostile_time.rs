//! Tests that no call on the progress path takes long, whatever a peer sends, withholds or passes
//! as a descriptor. Meanwhile honest peers must make progress.
//!
//! The victim is an engine over [`ShmRail`](fishplate_shm::ShmRail) in this process. The honest
//! peer and the hostile peer are separate processes. The hostile process plays one [trick](tricks)
//! and then waits until it is killed. Meanwhile the victim accesses the hostile process's memory. A
//! trick counts as slow if it delays a call in most attempts.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use fishplate_core::error::PeerError;
use fishplate_shm::ShmConfig;

#[allow(dead_code, reason = "these tricks tell nothing but that they were played")]
#[path = "hostile_time/forks.rs"]
mod forks;
#[path = "hostile_time/meter.rs"]
mod meter;
#[path = "support/raw.rs"]
mod raw;
#[path = "hostile_time/strangers.rs"]
mod strangers;
mod support;
#[path = "hostile_time/tricks.rs"]
mod tricks;
#[path = "hostile_time/victim.rs"]
mod victim;

use forks::Forks;
use meter::{LIMIT, Meter, repeat};
use raw::Raw;
use strangers::{STRANGERS, handshakes, strangers};
use support::*;
use tricks::{End, MEMORY, played};
use victim::{Victim, echo};

fn config() -> ShmConfig {
    ShmConfig { timeout: Duration::from_millis(500), ..ShmConfig::default() }
}

/// Connects to the victim, as any process may.
fn connected(address: &OsStr) -> Raw {
    let socket = raw::knock(address.to_str().unwrap(), libc::SOCK_CLOEXEC);
    Raw::new(socket.expect("the victim listens"), &config())
}

/// The entry point of the child processes. Does nothing in the parent.
#[test]
fn child() {
    let Some((role, address)) = role() else { return };
    if role == "honest" {
        return echo(&address);
    }
    if let Some((_, play)) = handshakes().into_iter().find(|(name, _)| *name == role) {
        return play(connected(&address));
    }
    if role == STRANGERS.0 {
        return strangers(&address);
    }
    let trick = |at: usize, address: &OsStr| {
        let mut raw = connected(address);
        tricks::lend(&mut raw);
        (tricks::all().nth(at).unwrap().2)(&mut raw);
        played();
        // Keeps the connection open.
        std::mem::forget(raw);
    };
    if role != forks::ROLE {
        trick(tricks::all().position(|(name, ..)| *name == role).unwrap(), &address);
        return wait_for_the_end();
    }
    forks::serve(|order| trick(order[0].into(), OsStr::from_bytes(&order[1..])));
}

/// Waits until the victim hangs up or kills this process.
fn wait_for_the_end() {
    // SAFETY: the buffer is a local byte. Descriptor 0 is the connection to the victim.
    unsafe { libc::read(0, [0u8; 1].as_mut_ptr().cast(), 1) };
}

/// Like [`alone`], but closes descriptors in threads, as real programs do, because a close may
/// block.
fn alone_with_a_closer() -> MutexGuard<'static, ()> {
    let alone = alone();
    fishplate_shm::set_closer(|| drop(std::thread::spawn(fishplate_shm::close_aside)));
    alone
}

/// Lets hostile processes play all tricks except the first `skipped`. Checks the victim's error
/// after each trick, and that no call takes too long.
fn play(config: ShmConfig, skipped: usize) {
    let _alone = alone_with_a_closer();
    let (mut victim, _honest) = Victim::new(config);
    let wanted = std::env::var("FISHPLATE_TRICK").unwrap_or_default();
    let mut hostile = Forks::begin();
    let mut too_long = Vec::new();
    let chosen =
        tricks::all().enumerate().skip(skipped).filter(|(_, trick)| trick.0.contains(&wanted));
    for (at, (name, end, _)) in chosen {
        let before = held();
        let longest = repeat(|| {
            let (why, took) = victim.suffers(&mut hostile, at);
            nothing_left(before, name);
            let as_said = match end {
                End::Blamed => matches!(why, Some(PeerError::Protocol(_))),
                End::Gone => matches!(why, Some(PeerError::Died | PeerError::Closed)),
                End::Harmless => why.is_none(),
                End::Either => matches!(why, None | Some(PeerError::Protocol(_))),
                End::Unreachable => matches!(why, None | Some(PeerError::Rail(_))),
            };
            assert!(as_said, "{name}: {why:?}, not {end:?}");
            took
        });
        println!("{:>9.3} ms in {:<12} {name}", longest.0.as_secs_f64() * 1e3, longest.1);
        if longest.0 > LIMIT {
            too_long.push((name, longest));
        }
    }
    assert!(MEMORY.len() >= 40);
    assert!(too_long.is_empty(), "longer than {LIMIT:?}: {too_long:#?}");
}

#[test]
fn no_trick_delays_progress() {
    play(config(), 0);
}

#[test]
fn no_trick_delays_progress_with_staging() {
    // Packets do not depend on staging, so this test skips their tricks.
    play(ShmConfig { force_staging: true, ..config() }, tricks::PACKETS.len());
}

#[test]
fn a_planted_wait_is_detected_and_load_is_not() {
    let _alone = alone_with_a_closer();
    let mut meter = Meter::new();
    meter.call("sleeps", || std::thread::sleep(Duration::from_millis(20)));
    assert!(meter.longest.0 > LIMIT && meter.longest.1 == "sleeps", "{:?}", meter.longest);
    let mut meter = Meter::new();
    meter.call("works", || (0..100_000_000u64).fold(1, |x, n| std::hint::black_box(x ^ n)));
    assert!(meter.longest.0 > LIMIT, "{:?}", meter.longest);
    // Starts four threads per processor, so that each thread waits for a processor much longer than
    // it runs.
    let end = Instant::now() + Duration::from_millis(300);
    let count = 4 * std::thread::available_parallelism().unwrap().get();
    let busy: Vec<_> =
        (0..count).map(|_| std::thread::spawn(move || while Instant::now() < end {})).collect();
    let mut shortest = Duration::MAX;
    for _ in 0..10 {
        let mut meter = Meter::new();
        meter.call("computes", || (0..100_000u64).fold(1, |x, n| std::hint::black_box(x ^ n)));
        shortest = shortest.min(meter.longest.0);
    }
    busy.into_iter().for_each(|thread| thread.join().unwrap());
    assert!(shortest <= LIMIT, "{shortest:?}");
    // Eight attempts: a trick counts as slow if it delays seven, but not if it delays the first
    // five.
    let slow_if = |slow: fn(u32) -> bool| {
        let mut n = 0;
        repeat(|| {
            n += 1;
            (if slow(n) { 2 * LIMIT } else { LIMIT }, "")
        })
    };
    assert!(slow_if(|n| n % 8 != 1).0 > LIMIT && slow_if(|n| n < 6).0 <= LIMIT);
}
