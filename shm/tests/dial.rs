//! Handshakes that a listener starts itself, without waiting.

use std::ffi::OsString;
use std::thread;
use std::time::{Duration, Instant};

use fishplate_shm::{HandshakeError, Link, Listener, Profile, ShmConfig};

#[path = "support/raw.rs"]
mod raw;
mod support;
use raw::{Raw, RawListener, knock, listen};
use support::*;

fn config(id: u64) -> ShmConfig {
    ShmConfig { lane_cells: 64, max_message: 1024, id, ..ShmConfig::default() }
}

/// A listener, and the profile for its handshakes.
struct Party {
    profile: Profile,
    name: String,
    listener: Listener,
}

impl Party {
    fn new(id: u64) -> Party {
        let name = name();
        let listener = Listener::bind(&name).unwrap();
        Party { profile: rail(config(id)).profile(), name, listener }
    }

    fn dial(&self, address: &str) -> Result<(), HandshakeError> {
        self.listener.dial(address, &self.profile)
    }

    /// Polls once. Checks that the call did not wait.
    #[track_caller]
    fn look(&self) -> Option<Link> {
        let begun = Instant::now();
        let link = self.listener.accept(&self.profile, begun);
        assert!(begun.elapsed() < Duration::from_secs(2), "waited {:?}", begun.elapsed());
        match link {
            Ok(link) => Some(link),
            Err(HandshakeError::Deadline) => None,
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Polls until a dial has failed.
    fn fails(&self) -> Vec<(OsString, HandshakeError)> {
        let end = soon();
        loop {
            assert!(self.look().is_none());
            let failed = self.listener.failed();
            if !failed.is_empty() || Instant::now() > end {
                return failed;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn dials_raw(&self, name: &str, listener: &RawListener) -> Raw {
        self.dial(name).unwrap();
        assert!(self.look().is_none());
        Raw::new(listener.accept(), &config(0))
    }
}

/// Each party dials all earlier parties, while all parties accept. No party waits for another.
#[test]
fn all_dial_each_other_at_once() {
    let _alone = alone();
    let parties: Vec<_> = (0..6).map(|id| Party::new(1000 + id)).collect();
    thread::scope(|scope| {
        for (at, party) in parties.iter().enumerate() {
            let others = &parties;
            scope.spawn(move || {
                for other in &others[..at] {
                    party.dial(&other.name).unwrap();
                }
                let (mut met, end) = (Vec::new(), soon());
                while met.len() + 1 < others.len() {
                    match party.look() {
                        Some(link) => met.push(link.peer_id()),
                        None => assert!(Instant::now() < end, "{at} met {met:?} only"),
                    }
                    thread::yield_now();
                }
                met.sort();
                let rest = (0..others.len()).filter(|other| *other != at);
                assert_eq!(met, rest.map(|other| 1000 + other as u64).collect::<Vec<_>>());
                assert_eq!((party.listener.failed(), party.listener.refused()), (vec![], vec![]));
            });
        }
    });
}

#[test]
fn one_process_dials_128_at_once() {
    let _alone = alone();
    let hub = Party::new(u64::MAX);
    let others: Vec<_> = (0..128).map(Party::new).collect();
    let before = held();
    for other in &others {
        hub.dial(&other.name).unwrap();
    }
    let (mut here, mut there, end) = (Vec::new(), Vec::new(), soon());
    while here.len() < others.len() || there.len() < others.len() {
        assert!(Instant::now() < end, "{} and {}", here.len(), there.len());
        here.extend(hub.look());
        there.extend(others.iter().filter_map(Party::look));
    }
    let mut ids: Vec<_> = here.iter().map(Link::peer_id).collect();
    ids.sort();
    assert_eq!(ids, (0..128).collect::<Vec<_>>());
    assert!(there.iter().all(|link| link.peer_id() == u64::MAX));
    drop((here, there));
    nothing_left(before, "dials");
}

#[test]
fn dialling_without_a_listener_fails_at_once() {
    let _alone = alone();
    let party = Party::new(1);
    let system = |code| Err(HandshakeError::System(code));
    assert_eq!(party.dial(&name()), system(libc::ECONNREFUSED));
    let path = std::env::temp_dir().join(format!("fishplate-nobody-{}.sock", std::process::id()));
    assert_eq!(party.listener.dial(&path, &party.profile), system(libc::ENOENT));
    assert_eq!(party.dial(""), Err(HandshakeError::Address));
    let full = name();
    let _full = listen(&full);
    let _waiting: Vec<_> = std::iter::from_fn(|| knock(&full, libc::SOCK_NONBLOCK)).collect();
    assert_eq!(party.dial(&full), system(libc::EAGAIN));
    assert!(party.look().is_none() && party.listener.failed().is_empty());
}

#[test]
fn a_silent_listener_delays_no_other_and_fails_at_its_deadline() {
    let _alone = alone();
    let (party, other) = (Party::new(1), Party::new(2));
    let silent = name();
    let raw = listen(&silent);
    let begun = Instant::now();
    party.dial(&silent).unwrap();
    other.dial(&party.name).unwrap();
    let (mut here, mut there) = (None, None);
    while here.is_none() || there.is_none() {
        here = here.or_else(|| party.look());
        there = there.or_else(|| other.look());
    }
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!((here.unwrap().peer_id(), there.unwrap().peer_id()), (2, 1));
    let waits = party.listener.accept(&party.profile, begun + Duration::from_millis(5500));
    assert_eq!(waits.map(drop), Err(HandshakeError::Deadline));
    assert_eq!(party.listener.failed(), [(silent.clone().into(), HandshakeError::Deadline)]);
    // If a peer hangs up, the failure is reported at once.
    let begun = Instant::now();
    drop(raw.accept());
    party.dial(&silent).unwrap();
    drop(raw.accept());
    assert_eq!(party.fails(), [(silent.clone().into(), HandshakeError::HungUp)]);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    // A dial fails if the listener's next accept uses another profile.
    let elsewhere = rail(config(3));
    party.listener.dial(&silent, &elsewhere.profile()).unwrap();
    assert!(party.look().is_none());
    assert_eq!(party.listener.failed(), [(silent.into(), HandshakeError::Deadline)]);
}

#[test]
fn a_peer_that_stalls_halfway_never_delays_a_poll() {
    let _alone = alone();
    let party = Party::new(1);
    let name = name();
    let listener = listen(&name);
    for dialled in [false, true] {
        for steps in 0..3 {
            let mut raw = match dialled {
                false => Raw::new(knock(&party.name, 0).unwrap(), &config(0)),
                true => party.dials_raw(&name, &listener),
            };
            assert!(party.look().is_none());
            if steps > 0 {
                raw.hello([7; 16]);
                assert!(party.look().is_none());
            }
            if steps > 1 {
                raw.send_offer();
            }
            (0..100).for_each(|_| assert!(party.look().is_none(), "{dialled} {steps}"));
            drop(raw);
            // Polls until the listener notices that the peer has hung up.
            let end = soon();
            let ended = || party.listener.refused().len() + party.listener.failed().len() > 0;
            while !ended() {
                assert!(party.look().is_none() && Instant::now() < end);
            }
        }
    }
}

#[test]
fn other_clients_do_not_end_a_dialled_handshake() {
    let _alone = alone();
    let party = Party::new(1);
    let name = name();
    let listener = listen(&name);
    let mut raw = party.dials_raw(&name, &listener);
    let mut strangers = Vec::new();
    for _ in 0..20 {
        strangers.extend((0..16).map(|_| knock(&party.name, 0).unwrap()));
        assert!(party.look().is_none());
    }
    assert!(party.listener.refused().len() == 8, "other clients displace each other");
    assert_eq!(party.listener.failed(), []);
    thread::scope(|scope| {
        let here = scope.spawn(|| party.listener.accept(&party.profile, soon()));
        raw.hello([7; 16]);
        raw.offer();
        raw.ready();
        assert_eq!(here.join().unwrap().map(|link| link.nonces()[1]), Ok([7; 16]));
    });
}

#[test]
fn an_old_version_is_refused_in_both_directions() {
    let _alone = alone();
    let party = Party::new(1);
    let name = name();
    let listener = listen(&name);
    let old = |mut raw: Raw| {
        let mut hello = raw.answer([7; 16]);
        hello[8..10].copy_from_slice(&2u16.to_ne_bytes());
        raw.send(&hello, &[]);
        raw
    };
    let why = HandshakeError::Version { theirs: 2, ours: raw::VERSION };
    let _dialled = old(party.dials_raw(&name, &listener));
    assert_eq!(party.fails(), [(name.into(), why)]);
    let connected = Raw::new(knock(&party.name, 0).unwrap(), &config(0));
    assert!(party.look().is_none());
    let _connected = old(connected);
    assert!(party.look().is_none());
    assert_eq!(party.listener.refused().pop().map(|(_, error)| error), Some(why));
}
