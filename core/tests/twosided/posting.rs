//! A receive takes the fast path only if it resembles the previous receive. These tests post
//! receives of every other kind after a receive of the fast path.

use fishplate_core::engine::Notice;
use fishplate_core::engine::protocol::{Cancelled, Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::error::{OpError, PeerError, Violation};
use fishplate_core::mem::{LocalAddr, PeerId, RailId, Untrusted};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::veil::{Veiled, device_region, peek};
use super::support::*;

type Rig = Own1<Veiled<Loopback<64>>, 1>;

/// Returns an engine over a rail with device memory, and a second peer of the engine.
fn rig() -> (Rig, PeerId) {
    let mut own = own1(Default::default(), SMALL, [Veiled::new(Loopback::new())]);
    let other = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(other, 1).unwrap();
    (own, other)
}

/// Posts a receive and cancels it, so that the next receive may take the fast path.
fn prime(own: &mut Rig, source: Option<PeerId>, ignore: Tag) {
    let request =
        own.engine.recv(source, tag(0xdead), ignore, Some((own.into.at(0), 8)), 0).unwrap();
    assert_eq!(own.engine.cancel(request), Ok(Cancelled::Removed));
    assert_eq!(own.engine.test_recv(request).unwrap().unwrap().outcome, Received::Cancelled);
}

/// Checks that no receive is open and that every slot is free.
fn all_free(own: &mut Rig) {
    let into = Some((own.into.at(0), 8));
    let all: Vec<_> = (0..RECEIVES)
        .map(|n| {
            own.engine
                .recv(None, tag(1 << 40), EXACT, into, n as u64)
                .unwrap_or_else(|e| panic!("{n}: {e:?}"))
        })
        .collect();
    for request in all {
        assert_eq!(own.engine.cancel(request), Ok(Cancelled::Removed));
        own.engine.test_recv(request).unwrap().unwrap();
    }
}

fn post(
    own: &mut Rig,
    source: Option<PeerId>,
    ignore: Tag,
    into: LocalAddr,
) -> Result<(), OpError> {
    own.engine.recv(source, tag(1), ignore, Some((into, 8)), 0).map(drop)
}

fn send(own: &mut Rig, to: PeerId, tag: Tag) {
    own.engine.send(CX, to, tag, Payload::Bytes(&[7; 8]), Notice::Silent).unwrap();
    passes(&mut own.engine, 2);
}

#[test]
fn directed_and_any_source_receives_alternate() {
    let (mut own, other) = rig();
    let me = own.me;
    for (before, source) in
        [(None, None), (None, Some(me)), (Some(me), None), (Some(me), Some(other))]
    {
        prime(&mut own, before, EXACT);
        let into = Some((own.into.at(0), 8));
        let request = own.engine.recv(source, tag(1), EXACT, into, 0).unwrap();
        // Both peers send. If the receive names a source, that peer sends second. Otherwise `other`
        // sends before `me`.
        let senders = if source == Some(other) { [me, other] } else { [other, me] };
        senders.into_iter().for_each(|from| send(&mut own, from, tag(1)));
        let status = own.finish(request);
        assert_eq!(
            status.envelope.unwrap().source,
            source.unwrap_or(other),
            "{before:?} then {source:?}"
        );
        // The message of the other peer is still unmatched.
        let left = own.engine.mprobe(None, tag(1), EXACT).unwrap().expect("the other");
        own.engine.discard(left).unwrap();
        passes(&mut own.engine, 5);
    }
    all_free(&mut own);
}

#[test]
fn a_receive_with_another_mask() {
    let (mut own, _) = rig();
    let me = own.me;
    let low = tag(0xff);
    for (before, ignore) in
        [(EXACT, low), (low, EXACT), (Tag::new(0, 1), low), (low, Tag::new(0, 1))]
    {
        prime(&mut own, Some(me), before);
        let into = Some((own.into.at(0), 8));
        let request = own.engine.recv(Some(me), Tag::new(0x100, 2), ignore, into, 0).unwrap();
        let tags = [Tag::new(0x101, 2), Tag::new(0x100, 3), Tag::new(0x100, 2)];
        let accepted = |tag: &Tag| (*tag ^ Tag::new(0x100, 2)) & !ignore == Tag::ZERO;
        tags.iter().for_each(|&tag| send(&mut own, me, tag));
        let status = own.finish(request);
        assert_eq!(
            Some(&status.envelope.unwrap().tag),
            tags.iter().find(|tag| accepted(tag)),
            "{ignore:?} after {before:?}"
        );
        while let Some(left) = own.engine.mprobe(None, tag(0), ANY).unwrap() {
            own.engine.discard(left).unwrap();
        }
        passes(&mut own.engine, 5);
    }
    all_free(&mut own);
}

#[test]
fn a_receive_with_a_waiting_message() {
    let (mut own, _) = rig();
    let me = own.me;
    prime(&mut own, Some(me), EXACT);
    send(&mut own, me, tag(2));
    send(&mut own, me, tag(1));
    for n in [1, 2] {
        let request = own.recv(n, EXACT, 0, 8);
        check(
            &own.engine.test_recv(request).unwrap().expect("it was there"),
            Received::Ok,
            n,
            8,
            8,
        );
    }
    all_free(&mut own);
}

#[test]
fn a_receive_without_a_free_slot() {
    let (mut own, _) = rig();
    let (me, into) = (own.me, own.into.at(0));
    prime(&mut own, Some(me), EXACT);
    for _ in 1..RECEIVES {
        assert_eq!(post(&mut own, Some(me), EXACT, into), Ok(()));
    }
    let last = own.recv(1, EXACT, 0, 8);
    assert_eq!(post(&mut own, Some(me), EXACT, into), Err(OpError::Again));
    // A completed receive keeps its slot until its status is taken.
    assert_eq!(own.engine.cancel(last), Ok(Cancelled::Removed));
    assert_eq!(post(&mut own, Some(me), EXACT, into), Err(OpError::Again));
    assert_eq!(own.engine.next_recv().unwrap().request, last);
    // The other receives are unchanged, and each completes once.
    for _ in 1..RECEIVES {
        send(&mut own, me, tag(1));
        assert_eq!(own.engine.next_recv().expect("one for each message").outcome, Received::Ok);
        passes(&mut own.engine, 20);
    }
    assert_eq!((own.engine.next_recv(), own.engine.probe(None, tag(0), ANY)), (None, Ok(None)));
    all_free(&mut own);
}

#[test]
fn a_receive_from_a_missing_peer() {
    let (mut own, other) = rig();
    let into = own.into.at(0);
    let reserved = own.engine.reserve_peer().unwrap();
    prime(&mut own, Some(other), EXACT);
    assert_eq!(
        post(&mut own, Some(reserved), EXACT, into),
        Err(OpError::UnknownPeer),
        "never connected"
    );
    // The peer acknowledges a number that was never sent.
    let mut ack = [0u8; 16];
    (ack[0], ack[11]) = (5, 0x40);
    // SAFETY: the test only posts one message, which completes at once and so uses no context word.
    let rail = unsafe { own.engine.rail_unchecked(RailId(0)) }.unwrap();
    rail.post_message(other.peer(), &ack, Untrusted::from_slice(&[]), 0).unwrap();
    passes(&mut own.engine, 3);
    let failed = OpError::PeerFailed(PeerError::Protocol(Violation::Ack));
    assert_eq!(post(&mut own, Some(other), EXACT, into), Err(failed));
    own.engine.remove_peer(other).unwrap();
    assert_eq!(post(&mut own, Some(other), EXACT, into), Err(OpError::UnknownPeer), "removed");
    let again = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(again, 1).unwrap();
    assert_eq!(
        post(&mut own, Some(other), EXACT, into),
        Err(OpError::UnknownPeer),
        "its place is another's"
    );
    all_free(&mut own);
}

#[test]
fn a_receive_into_invalid_memory() {
    let (mut own, _) = rig();
    let me = own.me;
    prime(&mut own, Some(me), EXACT);
    let gone = own.engine.register(region(64)).unwrap();
    own.engine.deregister(gone).unwrap();
    assert_eq!(post(&mut own, Some(me), EXACT, gone.at(0)), Err(OpError::UnknownRegion));
    let end = own.into.at(SIZE as u64 - 7);
    let beyond = OpError::OutOfBounds { offset: SIZE as u64 - 7, len: 8, size: SIZE as u64 };
    assert_eq!(post(&mut own, Some(me), EXACT, end), Err(beyond));
    all_free(&mut own);
}

#[test]
fn a_receive_into_device_memory() {
    let (mut own, _) = rig();
    let me = own.me;
    let memory = device_region(64);
    let device = own.engine.register(memory).unwrap();
    prime(&mut own, Some(me), EXACT);
    let request = own.engine.recv(Some(me), tag(1), EXACT, Some((device.at(8), 8)), 0).unwrap();
    send(&mut own, me, tag(1));
    check(&own.finish(request), Received::Ok, 1, 8, 8);
    assert_eq!(peek(&memory, 0, 24), [[0; 8], [7; 8], [0; 8]].concat());
    all_free(&mut own);
}
