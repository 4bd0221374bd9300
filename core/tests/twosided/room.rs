//! Tests the room for unexpected messages: a stream that needs more takes shared room, and returns
//! it later.

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::PeerId;
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet;
use super::support::tap::{Event, shared, tap};
use super::support::*;

/// Limits with little room for each stream and much shared room.
const SHARED: MatchConfig =
    MatchConfig { credits: 2, headers: 2, shared_credits: 600, shared_headers: 120, ..SMALL };

/// Sends unmatched messages to a peer, with tags from `first` on, until no room is left. Returns
/// the number of messages sent.
fn fill<R: Rail, const RAILS: usize>(own: &mut Own1<R, RAILS>, to: PeerId, first: u64) -> u64 {
    let (mut n, mut refused) = (first, 0);
    while refused < 1000 {
        let at = own.out.at(n % 4096 * 8);
        write(&own.engine, at, &n.to_le_bytes());
        match own.engine.send(CX, to, tag(n), Payload::Region(at, 8), Notice::Silent) {
            Ok(Issued::Done { .. } | Issued::Pending(_)) => (n, refused) = (n + 1, 0),
            Err(OpError::Again) => {
                refused += 1;
                own.engine.progress();
            }
            Err(error) => panic!("{error:?}"),
        }
    }
    n - first
}

/// Receives `count` messages with tags from `first` on, newest first.
fn drain<R: Rail, const RAILS: usize>(
    own: &mut Own1<R, RAILS>,
    from: PeerId,
    first: u64,
    count: u64,
) {
    for n in (first..first + count).rev() {
        let into = Some((own.into.at(0), 8));
        let request = own.engine.recv(Some(from), tag(n), EXACT, into, n).unwrap();
        check(&own.finish(request), Received::Ok, n, 8, 8);
        assert_eq!(word(&own.engine, own.into.at(0)), n);
    }
}

fn most(config: &MatchConfig) -> u64 {
    u64::from(
        grown(config.credits, config.shared_credits) + grown(config.headers, config.shared_headers),
    )
}

#[test]
fn a_stream_s_room_grows_to_hundreds_of_messages() {
    let mut own = loopback(SHARED);
    let me = own.me;
    let sent = fill(&mut own, me, 0);
    assert_eq!(sent, most(&SHARED), "as far as doubling goes");
    assert!(sent > 500);
    drain(&mut own, me, 0, sent);
    // The stream has as much room as before.
    assert_eq!(fill(&mut own, me, 0), sent);
    drain(&mut own, me, 0, sent);
}

#[test]
fn a_greedy_peer_leaves_others_their_own_room() {
    let mut own = loopback(SHARED);
    let greedy = own.me;
    let mut next = || {
        let peer = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(peer, 1).unwrap();
        peer
    };
    let (modest, patient) = (next(), next());
    let all = fill(&mut own, greedy, 0);
    assert_eq!(all, most(&SHARED));
    // The greedy stream leaves shared room that is less than its next request.
    let left = |each: u32, shared: u32| shared - (grown(each, shared) - each);
    let rest = MatchConfig {
        shared_credits: left(SHARED.credits, SHARED.shared_credits),
        shared_headers: left(SHARED.headers, SHARED.shared_headers),
        ..SHARED
    };
    let second = fill(&mut own, modest, 10_000);
    assert_eq!(second, most(&rest));
    let third = fill(&mut own, patient, 20_000);
    assert!(third >= u64::from(SHARED.credits + SHARED.headers), "{third}");
    drain(&mut own, modest, 10_000, second);
    drain(&mut own, patient, 20_000, third);
    for peer in [greedy, modest, patient] {
        own.engine.remove_peer(peer).unwrap();
    }
    let peer = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(peer, 1).unwrap();
    let again = fill(&mut own, peer, 0);
    assert_eq!(again, all, "everything came back");
    drain(&mut own, peer, 0, again);
}

/// Number of shared blocks for short messages.
const SHORTS: u32 = 1000;

#[test]
fn short_messages_have_room_beyond_the_credits() {
    let config = MatchConfig { shared_shorts: SHORTS, ..SMALL };
    let most = u64::from(SMALL.credits + SMALL.headers + SHORTS);
    let mut own = loopback(config);
    for _ in 0..3 {
        let me = own.me;
        let sent = fill(&mut own, me, 0);
        assert_eq!(sent, most);
        // Longer messages cannot use the blocks for short messages.
        let longer =
            own.engine.send(CX, me, tag(7), Payload::Region(own.out.at(0), 65), Notice::Silent);
        assert_eq!(longer, Err(OpError::Again));
        drain(&mut own, me, 0, sent);
    }
    // Removing a peer frees its room, whether that room holds messages or is unused.
    for sent in [most, most / 2, 40] {
        let me = own.me;
        for n in 0..sent {
            while own.engine.send(CX, me, tag(n), Payload::Bytes(&[7; 8]), Notice::Silent).is_err()
            {
                own.engine.progress();
            }
        }
        passes(&mut own.engine, 30);
        own.engine.remove_peer(me).unwrap();
        own.me = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(own.me, 1).unwrap();
    }
    let me = own.me;
    assert_eq!(fill(&mut own, me, 0), most);
    drain(&mut own, me, 0, most);
}

#[test]
fn one_way_traffic_needs_few_acknowledgements_and_little_room() {
    const EACH: u64 = 66;
    let config = Config { window: 1024, ack_age: u32::MAX, ..Config::DEFAULT };
    let mut fleet = tagged_fleet::<1>(2, Dials::CALM, config, SHARED, 3);
    let mut alone = vec![];
    for _ in 0..20 {
        let before = fleet[1].engine.stats().acks_alone;
        for n in 0..EACH {
            let into = Some((fleet[1].target.at(0), 8));
            let request = fleet[1].engine.recv(None, tag(n), EXACT, into, n).unwrap();
            let to = fleet[0].peers[1];
            fleet::turn_until(&mut fleet, "room for a message", |fleet| {
                let bytes = n.to_le_bytes();
                fleet[0].engine.send(CX, to, tag(n), Payload::Bytes(&bytes), Notice::Silent).is_ok()
            });
            fleet::turn_until(&mut fleet, "a message", |fleet| {
                fleet[1].engine.test_recv(request).unwrap().is_some()
            });
        }
        alone.push(fleet[1].engine.stats().acks_alone - before);
    }
    // In the first round, the receiver returns credits after 2, 3, 5, 9 and 17 messages. Later it
    // returns them after every 33 messages, half of 64 plus one.
    assert_eq!(alone[0], 5, "{alone:?}");
    assert_eq!(alone[10..].iter().sum::<u64>(), 20, "{alone:?}");
    assert_eq!(fleet[1].engine.matching_stats().kept, 0);
}

#[test]
fn a_late_room_message_does_not_shrink_room() {
    let control = shared();
    let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
    let from = own.me.peer();
    // Forges a grant: the header, then the number of credits and the number of headers.
    for (credits, headers) in [(6u64, 5u64), (1, 1)] {
        let mut bytes = vec![22, 0, 0, 0];
        bytes.resize(16, 0);
        bytes.extend(credits.to_le_bytes());
        bytes.extend(headers.to_le_bytes());
        control.borrow_mut().inject.push_back(Event::Message(from, bytes));
    }
    passes(&mut own.engine, 3);
    // The receiver is this engine too. It has granted 4 credits and 4 headers.
    control.borrow_mut().edit = Some(Box::new(|_, event| match event {
        Event::Message(..) => vec![],
        event => vec![event],
    }));
    let me = own.me;
    assert_eq!(fill(&mut own, me, 0), 11);
}

#[test]
fn credits_of_received_messages_return_without_traffic_the_other_way() {
    let mut fleet = tagged_fleet::<1>(2, Dials::CALM, Config::DEFAULT, SMALL, 5);
    let to = fleet[0].peers[1];
    let most = u64::from(SMALL.credits);
    for n in 0..most {
        fleet[0].engine.send(CX, to, tag(n), Payload::Bytes(&[1; 8]), Notice::Silent).unwrap();
    }
    fleet::turn_until(&mut fleet, "all are kept", |fleet| {
        fleet[1].engine.matching_stats().kept == most
            && fleet[0].engine.is_quiet(CX, to) == Ok(true)
    });
    // Only messages received from here on return credits.
    for n in 0..most {
        let into = Some((fleet[1].target.at(0), 8));
        let request = fleet[1].engine.recv(None, tag(n), EXACT, into, n).unwrap();
        check(&fleet[1].engine.test_recv(request).unwrap().unwrap(), Received::Ok, n, 8, 8);
    }
    // Waits longer than an acknowledgement waits for a message to carry it.
    let mut turns = 0;
    fleet::turn_until(&mut fleet, "some turns", |_| {
        turns += 1;
        turns > 1000
    });
    fleet[0].engine.send(CX, to, tag(99), Payload::Bytes(&[1; 8]), Notice::Silent).unwrap();
    assert_eq!(fleet[0].engine.matching_stats().credits_exhausted, 0);
}

#[test]
fn a_sender_hears_of_its_grown_room_without_traffic_the_other_way() {
    let config = Config { ack_age: u32::MAX, ..Config::DEFAULT };
    let mut fleet = tagged_fleet::<1>(2, Dials::CALM, config, SHARED, 7);
    let to = fleet[0].peers[1];
    for n in 0..60 {
        fleet[0].engine.send(CX, to, tag(n), Payload::Bytes(&[1; 8]), Notice::Silent).unwrap();
        let mut turns = 0;
        fleet::turn_until(&mut fleet, "some turns", |_| {
            turns += 1;
            turns > 100
        });
        assert_eq!(fleet[1].engine.matching_stats().kept, n + 1);
    }
    assert_eq!(fleet[0].engine.matching_stats().credits_exhausted, 0);
}

#[test]
fn without_shared_room_a_stream_keeps_its_initial_room() {
    for (credits, headers) in [(0, 1), (1, 1), (4, 4), (7, 3)] {
        let mut own = own1(
            Config::DEFAULT,
            MatchConfig { credits, headers, ..SMALL },
            [Loopback::<64>::new()],
        );
        let me = own.me;
        assert_eq!(fill(&mut own, me, 0), u64::from(credits + headers));
        drain(&mut own, me, 0, u64::from(credits + headers));
    }
}
