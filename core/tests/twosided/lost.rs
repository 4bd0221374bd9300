//! The memory of a lost peer's messages is freed exactly once, whatever their state. Later peers
//! have the same credits, and see no state of earlier peers.

use std::cell::RefCell;
use std::rc::Rc;

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{OpError, PeerError, PostError, Violation};
use fishplate_core::mem::{PeerId, RailId, Untrusted};
use fishplate_core::op::Fault;
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::tap::{Event, Post, Verb, shared, tap};
use super::support::*;

/// Number of streams of an engine in these tests.
const PEERS: u32 = 4;

/// Connects another peer, which is this engine too.
fn another<R: Rail>(own: &mut Own1<R, 1>) -> PeerId {
    let peer = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(peer, 1).unwrap();
    peer
}

fn send_to<R: Rail>(own: &mut Own1<R, 1>, to: PeerId, n: u64) {
    own.engine.send(CX, to, tag(n), Payload::Bytes(&n.to_le_bytes()), Notice::Silent).unwrap();
    passes(&mut own.engine, 2);
}

/// Fails a peer: delivers its acknowledgement of a number that was never sent.
fn fail<R: Rail>(own: &mut Own1<R, 1>, peer: PeerId) {
    let mut ack = [0u8; 16];
    ack[0] = 5;
    ack[8..12].copy_from_slice(&0x4000_0000u32.to_le_bytes());
    // SAFETY: the test only posts one message, which completes at once and so uses no context word.
    let rail = unsafe { own.engine.rail_unchecked(RailId(0)) }.unwrap();
    rail.post_message(peer.peer(), &ack, Untrusted::from_slice(&[]), 0).unwrap();
    passes(&mut own.engine, 3);
    assert_eq!(own.engine.peer_error(peer), Ok(Some(PeerError::Protocol(Violation::Ack))));
}

#[test]
fn claimed_messages_of_a_removed_sender_take_no_room() {
    let mut own = loopback(SMALL);
    let room = SMALL.unexpected(PEERS as usize);
    let mut claimed = vec![];
    // Claims more messages than all streams together have credits for, a few from each of many
    // successive peers.
    while claimed.len() <= room {
        let peer = another(&mut own);
        for n in 0..u64::from(SMALL.credits) {
            send_to(&mut own, peer, n);
            assert_eq!(own.engine.peer_error(peer), Ok(None), "after {} claimed", claimed.len());
            claimed
                .push(own.engine.mprobe(Some(peer), tag(n), EXACT).unwrap().expect("it has come"));
        }
        own.engine.remove_peer(peer).unwrap();
    }
    for message in claimed {
        assert_eq!(own.engine.mrecv(message, None, 0), Err(OpError::StaleToken));
    }
    assert_eq!(own.engine.next_recv(), None);
}

#[test]
fn a_header_of_a_lost_peer_held_by_a_receive_is_freed_once() {
    let control = shared();
    // A pass handles one entry of the list. So if an entry finds no room, later entries stay in the
    // list.
    let config = Config { batch: 1, ..Config::DEFAULT };
    let mut own = own1(config, SMALL, tap(Loopback::<64>::new(), &control));
    control.borrow_mut().unreadable = true;
    let (honest, lost) = (own.me, another(&mut own));
    control.borrow_mut().refuse = Some(Box::new(|post: &Post| {
        (post.verb == Verb::Message && post.bytes[0] == 20).then_some(PostError::Again)
    }));
    let send = |own: &mut Own1<_, 1>, to, n: u64| {
        write(&own.engine, own.out.at(n * 600), &pattern(n, 600));
        own.engine
            .send(CX, to, tag(n), Payload::Region(own.out.at(n * 600), 600), Notice::Silent)
            .unwrap();
        passes(&mut own.engine, 20);
    };
    // The receive of the lost peer's message is behind another receive, which cannot request its
    // payload.
    let first = own.recv(1, EXACT, 600, 600);
    send(&mut own, honest, 1);
    send(&mut own, lost, 2);
    fail(&mut own, lost);
    let into = Some((own.into.at(1200), 600));
    let second = own.engine.recv(None, tag(2), EXACT, into, 2).unwrap();
    own.engine.remove_peer(lost).unwrap();
    control.borrow_mut().refuse = None;
    let status = own.finish(second);
    assert!(matches!(status.outcome, Received::Failed(_)), "{status:?}");
    check(&own.finish(first), Received::Ok, 1, 600, 600);
    // Uses all the header room at once, for different messages.
    passes(&mut own.engine, 20);
    for n in 3..3 + u64::from(SMALL.headers) {
        send(&mut own, honest, n);
    }
    for n in (3..3 + u64::from(SMALL.headers)).rev() {
        let request = own.recv(n, EXACT, n * 600, 600);
        check(&own.finish(request), Received::Ok, n, 600, 600);
        assert_eq!(own.bytes(n * 600, 600), pattern(n, 600), "message {n}");
    }
}

#[test]
fn a_search_for_messages_of_a_failed_peer_returns_at_once() {
    let mut own = loopback(SMALL);
    let peer = another(&mut own);
    send_to(&mut own, peer, 1);
    fail(&mut own, peer);
    let gone = OpError::PeerFailed(PeerError::Protocol(Violation::Ack));
    // Messages that have arrived can be found. No further message arrives.
    assert_eq!(own.engine.probe(Some(peer), tag(1), EXACT).unwrap().unwrap().len, 8);
    assert_eq!(own.engine.probe(Some(peer), tag(2), EXACT), Err(gone));
    assert_eq!(own.engine.mprobe(Some(peer), tag(2), EXACT), Err(gone));
    assert_eq!(own.engine.probe(None, tag(2), EXACT), Ok(None));
    assert!(own.engine.mprobe(Some(peer), tag(1), EXACT).unwrap().is_some());
    assert_eq!(own.engine.mprobe(Some(peer), tag(1), EXACT), Err(gone));
}

/// The messages are parked behind a missing one. That one arrives in the same pass as the peer's
/// failure.
#[test]
fn messages_that_arrived_in_order_before_their_peer_failed_are_received() {
    let control = shared();
    let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
    control.borrow_mut().unreadable = true;
    let peer = another(&mut own);
    let any = own.engine.recv(None, tag(2), EXACT, Some((own.into.at(0), 8)), 2).unwrap();
    let held = Rc::new(RefCell::new(None));
    let first = Rc::clone(&held);
    control.borrow_mut().edit = Some(Box::new(move |_, event| match &event {
        Event::Message(_, bytes) if bytes[0] >= 16 && first.borrow().is_none() => {
            *first.borrow_mut() = Some(event);
            vec![]
        }
        _ => vec![event],
    }));
    for n in 1..=3 {
        send_to(&mut own, peer, n);
    }
    // This message takes only a header. Its payload stays with the sender.
    write(&own.engine, own.out.at(0), &pattern(4, 600));
    own.engine.send(CX, peer, tag(4), Payload::Region(own.out.at(0), 600), Notice::Silent).unwrap();
    passes(&mut own.engine, 3);
    assert_eq!(own.engine.probe(None, tag(3), EXACT), Ok(None));
    let mut control = control.borrow_mut();
    control.edit = None;
    control.inject.push_back(held.take().expect("the first message"));
    control.inject.push_back(Event::Down(peer.peer(), PeerError::Died));
    drop(control);
    passes(&mut own.engine, 3);
    assert_eq!(own.engine.peer_error(peer), Ok(Some(PeerError::Died)));
    check(&own.finish(any), Received::Ok, 2, 8, 8);
    for n in [3, 1] {
        let into = Some((own.into.at(8 * n), 8));
        let request = own.engine.recv(Some(peer), tag(n), EXACT, into, n).unwrap();
        check(&own.finish(request), Received::Ok, n, 8, 8);
        assert_eq!(own.bytes(8 * n, 8), n.to_le_bytes());
    }
    let request = own.engine.recv(None, tag(4), EXACT, Some((own.into.at(0), 600)), 4).unwrap();
    let status = own.finish(request);
    assert_eq!(status.outcome, Received::Failed(Fault::Peer(PeerError::Died)));
    own.engine.remove_peer(peer).unwrap();
    passes(&mut own.engine, 1);
    assert!(!own.engine.has_due());
}
