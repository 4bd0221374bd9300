//! Tests peers on other hosts that cannot be attached, that come and go, or that are hard to reach.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use fishplate::core::engine::tag::Tag;
use fishplate::core::error::PeerError;
use fishplate::node::Error;
use fishplate::{Cmp, Limits, Notice};
use fishplate_testing::fabric::{Fake, Persona};

use super::SOON;
use super::distant::{LIMITS, connect, has_message, on, send, until};

#[test]
fn a_peer_that_cannot_be_attached_is_reported_by_each_call_that_names_it() {
    let provider = Fake::new(Persona::tcp(), 41);
    let open = || on(&provider, "tcp").open().unwrap();
    let (mut a, b) = (open(), open());
    let mut address = b.address().to_vec();
    // The provider refuses its address of the first rail.
    address[86] = 0;
    let inbox = a.alloc(8).unwrap();
    for call in 0..5 {
        let peer = a.connect(&address).unwrap();
        let failed = match call {
            0 => a.probe(Some(peer), 7, Tag::ZERO).err(),
            1 => a.mprobe(Some(peer), 7, Tag::ZERO).err(),
            2 => a.wait(inbox.at(0), Cmp::Eq, 1, Some(peer), SOON).err(),
            3 => a.send(peer, 7, b"x", Notice::Silent).err(),
            _ => a.recv(Some(peer), 7, Tag::ZERO, &mut [0; 8], SOON).err(),
        };
        assert!(matches!(failed, Some(Error::Attach(_))), "{call}: {failed:?}");
        assert_eq!(a.peer_error(peer).err(), failed);
        assert_eq!(a.quiet(peer, SOON).err(), failed);
        a.disconnect(peer).unwrap();
    }
}

#[test]
fn a_peer_learns_that_it_was_connected_again_after_many_others_have_gone() {
    let provider = Fake::new(Persona::tcp(), 51);
    let open = || on(&provider, "tcp").limits(Limits { peers: 2, ..LIMITS }).open().unwrap();
    let [mut a, mut b] = [open(), open()];
    let [_, to_b] = connect(&mut b, &mut a);
    for _ in 0..5 {
        let mut guest = open();
        let [to_a, to_guest] = connect(&mut guest, &mut a);
        send(&mut guest, to_a, 7, &mut a);
        until([&mut guest, &mut a], |[_, a]| has_message(a, to_guest, 7));
        a.disconnect(to_guest).unwrap();
    }
    send(&mut a, to_b, 8, &mut b);
    let to_a = b.connect(a.address()).unwrap();
    until([&mut a, &mut b], |[_, b]| has_message(b, to_a, 8));
    // Nothing is on its way that would call.
    for _ in 0..5000 {
        a.progress();
        b.progress();
    }
    a.disconnect(to_b).unwrap();
    a.connect(b.address()).unwrap();
    until([&mut a, &mut b], |[_, b]| b.peer_error(to_a) != Ok(None));
    assert_eq!(b.peer_error(to_a), Ok(Some(PeerError::Reattached)));
}

#[test]
fn two_peers_meet_although_one_rail_is_silent_from_the_start() {
    for interface in ["eth0", "eth1"] {
        let provider = Fake::new(Persona::tcp(), 61);
        let (mut a, mut b, to_b, to_a) = loop {
            let open = || on(&provider, "tcp").open().unwrap();
            let [mut a, mut b] = [open(), open()];
            let [to_b, to_a] = connect(&mut a, &mut b);
            // Otherwise the cut ends both pairs of rails.
            if a.rail_pairs(to_b).unwrap().iter().all(|pair| pair.ours == pair.theirs) {
                break (a, b, to_b, to_a);
            }
        };
        provider.cut(interface);
        let both = AtomicUsize::new(2);
        thread::scope(|scope| {
            for (node, to) in [(&mut a, to_b), (&mut b, to_a)] {
                let both = &both;
                scope.spawn(move || {
                    let sent = node.send(to, 7, b"first", Notice::Silent);
                    both.fetch_sub(1, Ordering::Relaxed);
                    while both.load(Ordering::Relaxed) != 0 {
                        node.progress();
                    }
                    sent.unwrap();
                });
            }
        });
    }
}
