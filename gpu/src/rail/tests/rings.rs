//! Tests that the end of a copy ends the sleep of the rail's owner. Time advances only by the calls
//! of a test, so a sleep that nothing ends is seen as such.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::Bell;
use crate::rail::wait_object::CHECK;

/// Maximum number of steps for which a test sleeps.
const LONG: u32 = 1_000_000;

/// Without done words, peers notify of everything.
fn without_words() -> GpuConfig {
    GpuConfig { done_channel: false, ..small() }
}

fn late() -> Behaviour {
    Behaviour { late: 10_000, ..Behaviour::LATE }
}

fn with_bell(rail: &mut FakeRail) -> Arc<AtomicU32> {
    let rung = Arc::new(AtomicU32::new(0));
    let counts = Arc::clone(&rung);
    rail.set_bell(Bell::new(move || _ = counts.fetch_add(1, Ordering::Relaxed)));
    rung
}

/// What ended an attempt to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sleep {
    /// There was work, or nothing to wait for.
    None,
    /// The bell.
    Rung,
    /// The sleep would have been a nap of this length.
    Nap(u64),
}

impl Pair {
    /// Polls one end, and lets its owner sleep if there is nothing to do.
    fn sleep(&mut self, end: usize, rung: &AtomicU32) -> Sleep {
        let before = rung.load(Ordering::Relaxed);
        let (rail, seen) = (&mut self.rails[end], &mut self.seen[end]);
        let wait_object = rail.wait_object();
        match wait_object.look(u64::MAX, || rail.poll(8, seen) != 0) {
            None => return Sleep::None,
            // Everything that the device does not do is for the peer to do, who would notify.
            Some(u64::MAX) if rail.streams.out() == 0 && !rail.copies.is_pending() => {
                return Sleep::None;
            }
            Some(CHECK) => {}
            Some(nap) => return Sleep::Nap(nap),
        }
        for _ in 0..LONG {
            if rung.load(Ordering::Relaxed) != before {
                return Sleep::Rung;
            }
            self.driver.advance(1);
        }
        panic!("nothing ends the sleep: {:?}", self.seen);
    }
}

#[test]
fn the_end_of_a_copy_rings_the_owner_once() {
    for len in [100, 512, 5000, 50_000] {
        let mut pair = Pair::new(late(), without_words(), len as u64);
        let rung = with_bell(&mut pair.rails[0]);
        pair.write(0, 0, len, Some(7), 1);
        // Ends of copies that polls have found, less rings.
        let (mut sleeps, mut found) = (0, 0);
        while pair.ended(1).is_none() {
            let out = pair.rails[0].streams.out();
            let slept = pair.sleep(0, &rung);
            if let Sleep::Nap(nap) = slept {
                panic!("{len} bytes: a nap of {nap} ns");
            }
            pair.rails[0].poll(8, &mut pair.seen[0]);
            found += out - pair.rails[0].streams.out();
            if slept == Sleep::Rung {
                assert!(found > 0, "{len} bytes: a ring before the end of its copy");
                (sleeps, found) = (sleeps + 1, found - 1);
            }
        }
        assert!(sleeps > 0, "{len} bytes");
        assert!(rung.load(Ordering::Relaxed) <= 4, "{len} bytes: once per mark");
        pair.until("the write is reported", |pair| !pair.seen[1].landed.is_empty());
        pair.check();
    }
}

#[test]
fn pieces_in_bounce_slots_ring_at_both_ends() {
    let mut pair = Pair::apart(late(), without_words(), 3);
    let rung = [0, 1].map(|end| with_bell(&mut pair.rails[end]));
    pair.write(0, 0, 30_000, Some(7), 1);
    pair.read(40_000, 0, 20_000, 2);
    let mut rings = 0;
    while pair.ended(1).is_none() || pair.ended(2).is_none() {
        for (end, rung) in rung.iter().enumerate() {
            match pair.sleep(end, rung) {
                Sleep::Nap(nap) => panic!("a nap of {nap} ns"),
                slept => rings += u32::from(slept == Sleep::Rung),
            }
        }
    }
    assert!(rings > 1, "{rings}");
    pair.check();
}

#[test]
fn copies_of_carried_pieces_ring() {
    let mut pair = Pair::new(late(), without_words(), 5);
    let rung = with_bell(&mut pair.rails[0]);
    let (mut copy, mut into) = (0, [0; 1000]);
    poke(&pair.rails[0], &pair.memory[0], 0, &bytes(5, 1000));
    let from = pair.memory[0].local(0, 1000);
    // SAFETY: the memory is registered.
    let mut fetch =
        |pair: &mut Pair| unsafe { pair.rails[0].fetch_device(from, &mut into, &mut copy) };
    assert_eq!(fetch(&mut pair), Err(PostError::Again));
    assert_eq!(pair.sleep(0, &rung), Sleep::Rung);
    assert_eq!(fetch(&mut pair), Ok(()));
    assert!(!pair.rails[0].is_working());
    assert_eq!(into[..], bytes(5, 1000));
    pair.check();
}

#[test]
fn an_abandoned_copy_delays_no_sleep_after_it_has_ended() {
    let mut pair = Pair::new(late(), without_words(), 6);
    let rung = with_bell(&mut pair.rails[0]);
    let (mut copy, from) = (0, pair.memory[0].local(0, 100));
    // SAFETY: the memory is registered.
    let fetched = unsafe { pair.rails[0].fetch_device(from, &mut [0; 100], &mut copy) };
    assert_eq!(fetched, Err(PostError::Again));
    let slept = [0; 3].map(|_| pair.sleep(0, &rung));
    assert_eq!(slept, [Sleep::Rung, Sleep::Nap(20_000), Sleep::None]);
    assert!(!pair.rails[0].is_working());
    pair.check();
}

#[test]
fn the_owner_naps_while_copies_do_not_ring() {
    // No bell, and a driver that refuses to ring.
    for bell in [false, true] {
        let mut pair = Pair::new(late(), without_words(), 7);
        let rung = if bell { with_bell(&mut pair.rails[0]) } else { Arc::default() };
        pair.write(0, 0, 100, None, 1);
        process(&pair.rails[0]).fail(Call::Ring, 0, DeviceError::Driver(801));
        assert_eq!(pair.sleep(0, &rung), Sleep::Nap(20_000));
        pair.until("the write ends", |pair| pair.ended(1).is_some());
        pair.check();
    }
    // A bell, but done words of a peer, which do not ring.
    let mut pair = Pair::new(late(), small(), 8);
    let rung = with_bell(&mut pair.rails[0]);
    assert_eq!(pair.sleep(0, &rung), Sleep::Nap(20_000));
    pair.check();
}

#[test]
fn the_owner_naps_if_a_copy_begins_after_the_last_poll() {
    for carried in [false, true] {
        let mut pair = Pair::new(late(), without_words(), 11);
        let rung = with_bell(&mut pair.rails[0]);
        let wait_object = pair.rails[0].wait_object();
        let (mut copy, mut into) = (0, [0; 100]);
        let (from, to) = (pair.memory[0].local(0, 100), pair.memory[1].remote(0));
        let mut look = |pair: &mut Pair, begins: bool| {
            let (rail, seen) = (&mut pair.rails[0], &mut pair.seen[0]);
            wait_object.look(u64::MAX, || {
                let found = rail.poll(8, seen);
                // SAFETY: the memory is registered, and outlives the pair.
                unsafe {
                    if carried {
                        let fetched = rail.fetch_device(from, &mut into, &mut copy);
                        assert_eq!(fetched, Err(PostError::Again));
                    } else if begins {
                        rail.post_write(PEER, from, to, None, 1).unwrap();
                    }
                }
                found != 0
            })
        };
        assert_eq!(look(&mut pair, true), Some(20_000));
        // A second sleep does not make the same copy ring again.
        for _ in 0..2 {
            assert_eq!((look(&mut pair, false), rung.load(Ordering::Relaxed)), (Some(CHECK), 0));
        }
        pair.driver.drain();
        assert_eq!(rung.load(Ordering::Relaxed), 1);
        pair.poll();
        pair.check();
    }
}

#[test]
fn a_lost_device_does_not_ring() {
    /// The device keeps its reference for ever. This one keeps that from being told as a leak.
    static BELL: OnceLock<Bell> = OnceLock::new();
    static RUNG: AtomicU32 = AtomicU32::new(0);
    let bell = BELL.get_or_init(|| Bell::new(|| _ = RUNG.fetch_add(1, Ordering::Relaxed)));
    let mut pair = Pair::new(late(), without_words(), 9);
    pair.rails[0].set_bell(bell.clone());
    pair.write(0, 0, 100, None, 1);
    let (rail, seen) = (&mut pair.rails[0], &mut pair.seen[0]);
    let wait_object = rail.wait_object();
    assert_eq!(wait_object.look(u64::MAX, || rail.poll(8, seen) != 0), Some(CHECK));
    pair.driver.lose(0);
    pair.driver.advance(100_000);
    assert_eq!(RUNG.load(Ordering::Relaxed), 0);
    pair.until("the write ends", |pair| pair.ended(1).is_some());
}
