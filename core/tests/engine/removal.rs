//! A peer can be removed during traffic. All its operations end, its ids become stale, and the next
//! peer in its slot sees nothing of it.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{AttachError, CompleteError, OpError, PeerError};
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::order::{add, hold, set};
use super::support::tap::{Event, Tap, shared, tap};
use super::support::*;

type Network = Loopback<64>;

#[test]
fn ids_and_regions_of_a_removed_peer_are_stale_and_its_slot_is_reused() {
    let mut own =
        own(Config { first_sequence: (1 << 20) - 3, ..Config::DEFAULT }, [Network::new()], 4096);
    for round in 0..20u64 {
        let (old, region) = (own.peer, own.remote);
        for n in 0..round % 5 {
            own.engine.signal(CX, add(own.remote, 0, n), Notice::Silent).unwrap();
        }
        let left =
            pending(own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Report(3)));
        own.engine.remove_peer(old).unwrap();
        let done = own.engine.wait(left, &mut own.waiter, SOON).unwrap();
        assert_eq!(done.outcome, Outcome::Unknown(Fault::Peer(PeerError::Removed)));
        assert_eq!(own.engine.remove_peer(old), Err(AttachError::UnknownPeer));
        assert_eq!(own.engine.peer_error(old), Err(AttachError::UnknownPeer));
        assert_eq!(own.engine.fence(CX, old), Err(OpError::UnknownPeer));
        assert_eq!(
            own.engine.quiet(CX, old, &mut own.waiter, SOON),
            Err(OpError::UnknownPeer.into())
        );
        assert_eq!(own.engine.is_quiet(CX, old), Err(OpError::UnknownPeer));
        assert_eq!(own.engine.connect_peer(old, 1), Err(AttachError::UnknownPeer));
        let fresh = own.engine.reserve_peer().unwrap();
        assert_eq!(fresh.peer(), old.peer(), "the slot is used again");
        assert_ne!(fresh, old);
        own.engine.connect_peer(fresh, 1).unwrap();
        let next = import(&mut own.engine, fresh, own.target);
        assert_eq!(
            own.engine.signal(CX, set(region, 0, 1), Notice::Silent),
            Err(OpError::UnknownRegion)
        );
        (own.peer, own.remote) = (fresh, next);
        own.engine.signal(CX, set(next, 0, round), Notice::Silent).unwrap();
        own.engine.quiet(CX, fresh, &mut own.waiter, SOON).unwrap();
        assert_eq!(word(&own.engine, own.target.at(0)), round);
    }
}

/// The peer is this engine itself. So operations held by the rail land even after the peer's
/// removal.
#[test]
fn operations_to_a_removed_living_peer_have_an_unknown_outcome() {
    for (why, numbered) in [
        (None, true),
        (Some(PeerError::Lost), true),
        (Some(PeerError::Rail(RailId(0))), true),
        (Some(PeerError::Died), false),
        (Some(PeerError::Closed), false),
    ] {
        let control = shared();
        let mut own =
            own(Config { window: 1, ..Config::DEFAULT }, tap(Network::new(), &control), 4096);
        control.borrow_mut().mute = true;
        let (signal, from) = (set(own.remote, 0, 1), own.source.at(0));
        let sent = pending(own.engine.put_signal(
            CX,
            from,
            8,
            own.remote.at(64),
            signal,
            Notice::Report(0),
        ));
        let waiting = pending(own.engine.signal(CX, set(own.remote, 8, 1), Notice::Report(1)));
        let read = pending(own.engine.get(CX, from, 8, own.remote.at(64), Notice::Report(2)));
        match why {
            None => own.engine.remove_peer(own.peer).unwrap(),
            Some(why) => control.borrow_mut().inject.push_back(Event::Down(own.peer.peer(), why)),
        }
        control.borrow_mut().mute = false;
        passes(&mut own.engine, 3);
        let fault = Fault::Peer(why.unwrap_or(PeerError::Removed));
        let mut outcome = |token| own.engine.test(token).unwrap().unwrap().outcome;
        let want = if numbered { Outcome::Unknown(fault) } else { Outcome::Failed(fault) };
        assert_eq!(outcome(sent), want);
        assert_eq!(
            [outcome(waiting), outcome(read)],
            [Outcome::Failed(fault); 2],
            "of these nothing was sent"
        );
    }
}

#[test]
fn late_completions_of_a_removed_peer_do_not_affect_its_successor() {
    for result in [
        Ok(()),
        Err(CompleteError::PeerDown),
        Err(CompleteError::Failed(-5)),
        Err(CompleteError::Unknown(-6)),
    ] {
        let control = shared();
        let later = Faulty::<_, 32>::new(Network::new(), Faults { hold: 1000, ..Faults::NONE }, 1);
        let mut own =
            own(Config { window: 8, ack_age: 1, ..Config::DEFAULT }, tap(later, &control), 4096);
        let held = hold(&control, |event| matches!(event, Event::Done(..)));
        let get =
            pending(own.engine.get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Report(1)));
        own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
        own.engine.put(CX, own.source.at(0), 300, own.remote.at(64), Notice::Silent).unwrap();
        // The held completions include acknowledgements, which belong to no operation.
        passes(&mut own.engine, 60);
        assert!(
            held.borrow().iter().any(|event| matches!(event, Event::Done(cx, _) if cx >> 63 == 1))
        );
        own.engine.remove_peer(own.peer).unwrap();
        let fresh = own.engine.reserve_peer().unwrap();
        assert_eq!(fresh.peer(), own.peer.peer());
        own.engine.connect_peer(fresh, 1).unwrap();
        let next = import(&mut own.engine, fresh, own.target);
        own.engine.signal(CX, add(next, 8, 1), Notice::Silent).unwrap();
        assert_eq!(own.engine.test(get), Ok(None), "its post is not over");
        control.borrow_mut().edit = None;
        let late: Vec<Event> = held.borrow_mut().drain(..).collect();
        for event in late {
            let Event::Done(cx, _) = event else { continue };
            control.borrow_mut().inject.push_back(Event::Done(cx, result));
        }
        passes(&mut own.engine, 10);
        assert_eq!(own.engine.peer_error(fresh), Ok(None), "{result:?}");
        assert!(own.engine.test(get).unwrap().is_some());
        own.engine.quiet(CX, fresh, &mut own.waiter, SOON).unwrap();
        assert_eq!(word(&own.engine, own.target.at(8)), 1);
    }
}

#[test]
fn e20_peers_can_be_removed_during_traffic() {
    for seed in seeds(60) {
        let config =
            Config { window: 8, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let (_, mut nodes) = fleet::plain::<2>(3, Dials::WILD, config, 8192, seed);
        let mut random = Random(seed);
        for n in 0..60u64 {
            for node in &mut nodes {
                for to in 0..3 {
                    let signal = add(node.remotes[to], 0, 1);
                    let (from, place) = (node.source.at(0), node.remotes[to].at(64));
                    let len = random.below(400) as usize;
                    let _ = node.engine.put_signal(CX, from, len, place, signal, Notice::Report(n));
                }
            }
            fleet::turn(&mut nodes);
        }
        for node in &mut nodes {
            for &peer in &node.peers {
                node.engine.remove_peer(peer).unwrap();
            }
        }
        // All accepted operations complete.
        let mut ends = [0; 3];
        for _ in 0..2000 {
            for (node, ends) in nodes.iter_mut().zip(&mut ends) {
                node.engine.progress();
                while node.engine.next_completion().is_some() {
                    *ends += 1;
                }
            }
        }
        assert!(ends.iter().all(|&n| n >= 8), "seed {seed}: {ends:?}");
        for node in &mut nodes {
            assert_eq!(node.engine.quiet_all(CX, &mut waiter(), SOON), Ok(()), "seed {seed}");
        }
    }
}

#[test]
fn a_reserved_peer_is_detached_too() {
    let control = shared();
    let config = Config::DEFAULT;
    let mut engine = engine(config, [Tap::new(Network::new(), 0, &control)]);
    let peer = engine.reserve_peer().unwrap();
    assert_eq!(peer.peer(), Peer(0));
    engine.remove_peer(peer).unwrap();
    assert_eq!(control.borrow().detached, [Peer(0)]);
}

#[test]
fn parked_messages_of_a_removed_peer_are_dropped() {
    for first_sequence in STARTS {
        let control = shared();
        let mut own = own(
            Config { window: 8, first_sequence, ..Config::DEFAULT },
            tap(Network::new(), &control),
            4096,
        );
        for round in 0..4u64 {
            // Numbers 1 and 2 wait for number 0. In even rounds number 0 never lands.
            let held = hold(&control, |event| matches!(event, Event::Landed(..)));
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.signal(CX, add(own.remote, 0, 1), Notice::Silent).unwrap();
            own.engine.signal(CX, add(own.remote, 8, 1), Notice::Silent).unwrap();
            passes(&mut own.engine, 10);
            assert_eq!(word(&own.engine, own.target.at(8)), round / 2);
            control.borrow_mut().edit = None;
            if round % 2 == 1 {
                control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
                own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
                assert_eq!(word(&own.engine, own.target.at(8)), round / 2 + 1);
            }
            own.engine.remove_peer(own.peer).unwrap();
            own.peer = own.engine.reserve_peer().unwrap();
            own.engine.connect_peer(own.peer, 1).unwrap();
            own.remote = import(&mut own.engine, own.peer, own.target);
        }
    }
}
