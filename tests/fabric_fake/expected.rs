//! Rails that expect peers which they have not attached, with every persona.

use std::time::{Duration, Instant};

use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::{Rail, Sink};
use fishplate_sys::fabric::FabricRail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::fixture::{Checked, rail};

#[derive(Default)]
struct Seen {
    messages: Vec<u16>,
    calls: u32,
}

impl Sink for Seen {
    fn done(&mut self, _: u64, _: Result<(), CompleteError>) {}
    fn landed(&mut self, _: Peer, _: u32) {}
    fn message(&mut self, peer: Peer, _: Untrusted<'_>) {
        self.messages.push(peer.0);
    }
    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        panic!("peer {} is down: {why:?}", peer.0);
    }
    fn called(&mut self) {
        self.calls += 1;
    }
}

/// Posts a message, and polls both rails until `heard`.
fn talk(
    [from, to]: [&mut FabricRail; 2],
    peer: Peer,
    seen: &mut Seen,
    heard: impl Fn(&Seen, &FabricRail) -> bool,
) {
    let end = Instant::now() + Duration::from_secs(20);
    let mut posted = false;
    while !posted || !heard(seen, to) {
        if !posted {
            match from.post_message(peer, b"bytes", Untrusted::from_slice(&[]), 1) {
                Err(PostError::Again) => {}
                result => posted = result.is_ok(),
            }
        }
        from.poll(8, &mut Seen::default());
        to.poll(8, seen);
        assert!(Instant::now() < end, "nothing arrived");
    }
}

#[test]
fn an_expected_peer_calls_until_it_is_attached_and_a_stranger_is_only_counted() {
    for (seed, (name, persona)) in Persona::all().into_iter().enumerate() {
        let interface = persona.interfaces[0];
        let network = Checked(Fake::new(persona, seed as u64));
        let [mut a, mut b, mut stranger] =
            [0, 1, 2].map(|at| rail(&network.0, name, interface, 10 * seed as u64 + at));
        let (at_a, at_b) = (b.address().unwrap(), a.address().unwrap());
        a.attach(Peer(5), &at_a).unwrap();
        stranger.attach(Peer(5), &at_a).unwrap();
        b.expect(Peer(9), &at_b).unwrap();
        for peer in [8, 9] {
            assert!(b.expect(Peer(peer), &at_b).is_err(), "{name}: the same signature or number");
            assert!(b.attach(Peer(peer), &at_b).is_err(), "{name}: the same signature or number");
        }
        let mut seen = Seen::default();
        talk([&mut stranger, &mut b], Peer(5), &mut seen, |_, b| b.stats().strangers == 1);
        assert_eq!((seen.calls, b.next_caller()), (0, None), "{name}");
        for call in 1..=2 {
            talk([&mut a, &mut b], Peer(5), &mut seen, |seen, _| seen.calls == call);
            assert_eq!([b.next_caller(), b.next_caller()], [Some(Peer(9)), None], "{name}");
        }
        assert_eq!((seen.messages.len(), b.stats().strangers), (0, 1), "{name}");
        b.attach_expected(Peer(9)).unwrap();
        assert_eq!(b.attach_expected(Peer(9)), Err(AttachError::UnknownPeer));
        talk([&mut a, &mut b], Peer(5), &mut seen, |seen, _| seen.messages == [9]);
        let mut back = Seen::default();
        talk([&mut b, &mut a], Peer(9), &mut back, |back, _| back.messages == [5]);
        // A peer that is detached is a stranger, whether it was attached or not.
        b.detach(Peer(9));
        b.expect(Peer(9), &at_b).unwrap();
        b.detach(Peer(9));
        talk([&mut a, &mut b], Peer(5), &mut seen, |_, b| b.stats().strangers == 2);
        assert_eq!((seen.calls, b.next_caller()), (2, None), "{name}");
    }
}
