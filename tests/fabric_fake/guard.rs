//! How a guard classifies a lost peer: whether the peer's process has died, or the rail has failed.

use std::thread;
use std::time::{Duration, Instant};

use fishplate::bootstrap::{Card, Listener, RailCard, Wire, connect};
use fishplate::guard::Guard;
use fishplate_core::engine::Config;
use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::{Peer, RailId, Untrusted};
use fishplate_core::rail::{Rail, Sink};
use fishplate_sys::fabric::FabricRail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::fixture::{Checked, rail};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Creates the two ends of a connection.
fn wires() -> (Wire, Wire) {
    let rail = RailCard {
        provider: "efa".into(),
        interface: "x".into(),
        fabric: "efa".into(),
        address: vec![1],
        mbit: 0,
    };
    let [card, other_card] = [(); 2].map(|()| Card::new(&Config::DEFAULT, 0, vec![rail.clone()]));
    let mut listener = Listener::bind("127.0.0.1:0").unwrap();
    let at = format!("127.0.0.1:{}", listener.port().unwrap());
    thread::scope(|scope| {
        let other = scope.spawn(|| connect(&at, &other_card, soon()).unwrap().0);
        let here = listener.accept(&card, soon()).unwrap().0;
        (here, other.join().unwrap())
    })
}

#[derive(Default)]
pub struct Down(Vec<(Peer, PeerError)>);

impl Sink for Down {
    fn done(&mut self, _: u64, _: Result<(), CompleteError>) {}
    fn landed(&mut self, _: Peer, _: u32) {}
    fn message(&mut self, _: Peer, _: Untrusted<'_>) {}
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.0.push((peer, why));
    }
}

/// Creates a guarded rail with id 2, and the rail of a peer. The guard watches the peer's process
/// through `wire`.
fn guarded(fake: &Fake, wire: &Wire) -> (Guard<FabricRail>, FabricRail) {
    let [mut here, there] = [1, 2].map(|seed| rail(fake, "efa-direct", "rdmap0-rdm", seed));
    here.attach(Peer(4), &there.address().unwrap()).unwrap();
    let mut guard = Guard::new(here, RailId(2), None);
    guard.watch(Peer(4), Some(wire.lifeline().unwrap()));
    (guard, there)
}

fn lost(guard: &mut Guard<FabricRail>, seen: &mut Down) {
    let deadline = soon();
    while seen.0.is_empty() {
        guard.poll(8, seen);
        guard.check_peers(seen);
        assert!(Instant::now() < deadline, "no peer is lost");
    }
    for _ in 0..100 {
        guard.poll(8, seen);
        guard.check_peers(seen);
    }
}

#[test]
fn a_closed_lifeline_is_reported_as_died() {
    let fake = Checked(Fake::new(Persona::efa_direct(), 1));
    let (here, there) = wires();
    let (mut guard, _peer) = guarded(&fake.0, &here);
    let mut seen = Down::default();
    for _ in 0..100 {
        guard.poll(8, &mut seen);
        guard.check_peers(&mut seen);
    }
    assert_eq!(seen.0, [], "no peer is lost");
    drop(there);
    lost(&mut guard, &mut seen);
    assert_eq!(seen.0, [(Peer(4), PeerError::Died)], "and is reported once");
}

#[test]
fn a_lost_peer_with_an_open_lifeline_is_a_rail_failure() {
    for alive in [true, false] {
        let fake = Checked(Fake::new(Persona::efa_direct(), 1));
        let (here, there) = wires();
        let (mut guard, peer) = guarded(&fake.0, &here);
        fake.0.kill(&peer.address().unwrap());
        let held = alive.then_some(there);
        let body = [0; 500];
        let mut seen = Down::default();
        while guard.post_message(Peer(4), b"hello", Untrusted::from_slice(&body), 1).is_err() {
            guard.poll(8, &mut seen);
        }
        lost(&mut guard, &mut seen);
        let why = if alive { PeerError::Rail(RailId(2)) } else { PeerError::Died };
        assert_eq!(seen.0.first(), Some(&(Peer(4), why)));
        drop(held);
    }
}
