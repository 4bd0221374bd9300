//! Processes that connect and never become peers. None delays a listener or the progress of others,
//! however many descriptors they pass.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use fishplate_core::mem::RailId;
use fishplate_shm::{HandshakeError, Listener, Profile};

use crate::meter::{LIMIT, Meter, Took, repeat};
use crate::raw::{self, Raw};
use crate::support::*;
use crate::tricks::{self, played};
use crate::victim::{ROUNDS, Victim, begin};
use crate::{alone_with_a_closer, config, connected, wait_for_the_end};

/// The role of the process that connects many strangers, and the number of strangers.
pub const STRANGERS: (&str, usize) = ("strangers", 20);

/// Connects to the victim many times, each time as another stranger. Each connection leaves 16
/// descriptors that block when they are closed.
pub fn strangers(address: &OsStr) {
    // Raises the descriptor limit, because this process has inherited the victim's low limit.
    std::mem::forget(Limited::to(2048));
    for n in 0..STRANGERS.1 {
        let all: [OwnedFd; 16] = std::array::from_fn(|_| tricks::lingering());
        let raw = connected(address);
        assert!(raw.send(&raw::packet(raw::BLOB, &[]), &all.each_ref()));
        // Half of the strangers stay connected.
        if n % 2 == 0 {
            std::mem::forget(raw);
        }
    }
    played();
    wait_for_the_end();
}

/// The name of a trick, and the function that plays it.
type Approach = (&'static str, fn(Raw));

/// Returns the tricks that replace a handshake.
pub fn handshakes() -> [Approach; 5] {
    [
        ("a socket that lingers instead of a Hello", |raw| {
            raw.send(&raw::packet(raw::BLOB, &[]), &[&tricks::lingering()]);
            wait_for_the_end();
        }),
        ("a socket that lingers with the Hello", |raw| {
            let hello = raw.recv();
            raw.send(&hello, &[&tricks::lingering()]);
            wait_for_the_end();
        }),
        ("sockets that linger in the Offer", |mut raw| {
            raw.hello([7; 16]);
            let both = [&tricks::lingering(), &tricks::lingering()];
            raw.send(&raw::packet(raw::OFFER, &raw.theirs), &both);
            wait_for_the_end();
        }),
        ("sockets that linger behind noise", |raw| {
            raw.send(&[0xee; 10], &[]);
            raw.send(&[], &[&tricks::lingering()]);
            raw.send(&[0xee; 10], &[&tricks::lingering()]);
            played();
            wait_for_the_end();
        }),
        ("a Ready from nobody", |mut raw| {
            raw.hello([7; 16]);
            raw.offer();
            raw.send(&raw::packet(raw::READY, &[0; 16]), &[]);
            wait_for_the_end();
        }),
    ]
}

/// Polls a listener until it refuses a client. Returns the longest call.
fn refuses(listener: &Listener, profile: &Profile, name: &str) -> Took {
    let (mut meter, end) = (Meter::new(), soon());
    loop {
        let met = meter.call("accept", || listener.accept(profile, Instant::now()));
        assert!(matches!(met, Err(HandshakeError::Deadline)), "{name}: {met:?}");
        let refused = listener.refused();
        assert!(Instant::now() < end, "{name}: not refused");
        match refused.first() {
            None => std::thread::yield_now(),
            Some((_, HandshakeError::Deadline)) => panic!("{name}: {refused:?}"),
            Some(_) => return meter.longest,
        }
    }
}

#[test]
fn no_trick_in_a_handshake_delays_a_listener() {
    let _alone = alone_with_a_closer();
    let rail = rail(config());
    let (profile, address) = (rail.profile(), name());
    let listener = Listener::bind(&address).unwrap();
    for (name, _) in handshakes() {
        let before = held();
        let longest = repeat(|| {
            let _hostile = begin(name, &address);
            refuses(&listener, &profile, name)
        });
        assert!(longest.0 <= LIMIT, "{name}: {longest:?}");
        nothing_left(before, name);
    }
}

#[test]
fn unaccepted_descriptors_do_not_delay_a_hang_up() {
    let _alone = alone_with_a_closer();
    let address = name();
    let listener = Listener::bind(&address).unwrap();
    let mut hostile = begin("sockets that linger behind noise", &address);
    while !hostile.has_played() {
        std::thread::yield_now();
    }
    let began = Instant::now();
    drop(listener);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

#[test]
fn strangers_leave_few_descriptors_and_do_not_delay_progress() {
    let _alone = alone();
    // Closes nothing, like a closer with only blocked threads.
    fishplate_shm::set_closer(|| {});
    let longest = repeat(|| {
        let (mut victim, _honest) = Victim::new(config());
        let limited = Limited::to(64);
        let before = held().0;
        victim.meter = Meter::new();
        let first = begin(STRANGERS.0, &victim.address);
        victim.accepts(|_| held().0 == before + 1 + STRANGERS.1);
        let honest = begin("honest", &victim.address);
        victim.accepts(|links| links.len() == 1);
        drop(honest);

        // The strangers accepted so far use half of the 64 descriptors. Others wait in the backlog.
        let mut second = begin(STRANGERS.0, &victim.address);
        while !second.has_played() {
            std::thread::yield_now();
        }
        let mut calls = 0;
        victim.accepts(|_| {
            calls += 1;
            calls > 1000
        });
        assert_eq!(held().0, before + 2 + 32);
        drop((first, second));
        fishplate_shm::close_aside();
        let honest = begin("honest", &victim.address);
        victim.accepts(|links| links.len() == 1);
        drop((honest, limited));
        fishplate_shm::close_aside();
        assert_eq!(held().0, before);
        victim.meter.longest
    });
    assert!(longest.0 <= LIMIT, "{longest:?}");
}

#[test]
fn without_free_descriptors_progress_does_not_wait() {
    let _alone = alone_with_a_closer();
    let longest = repeat(|| {
        let (mut victim, _honest) = Victim::new(config());
        let mut hostile = begin("a socket that lingers as a segment", &victim.address);
        let link = victim.listener.accept(&victim.profile, soon()).unwrap();
        let peer = victim.engine.reserve_peer().unwrap();
        victim.engine.rail_mut(RailId(0)).unwrap().attach(peer.peer(), link).unwrap();
        victim.engine.connect_peer(peer, 1).unwrap();
        while !hostile.has_played() {
            std::thread::yield_now();
        }
        victim.meter = Meter::new();
        // Lowers the limit to the lowest free descriptor, so that no descriptor can be opened.
        let lowest = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
        let limited = Limited::to(lowest.as_raw_fd() as u64);
        drop(lowest);
        let rounds = victim.rounds + ROUNDS;
        while victim.rounds < rounds {
            victim.turn();
        }
        assert_eq!(victim.engine.peer_error(peer), Ok(None), "its packet is still in the socket");
        drop(limited);
        let end = soon();
        while victim.engine.peer_error(peer) == Ok(None) {
            assert!(Instant::now() < end);
            victim.turn();
        }
        let Victim { engine, meter, .. } = &mut victim;
        meter.call("remove_peer", || engine.remove_peer(peer)).unwrap();
        victim.meter.longest
    });
    assert!(longest.0 <= LIMIT, "{longest:?}");
}
