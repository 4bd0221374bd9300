//! The failure of a peer fails only operations to that peer, and a reused slot shows nothing of the
//! failed peer.

use fishplate_core::engine::{Config, ContextId, Notice};
use fishplate_core::error::{AttachError, CompleteError, OpError, PeerError, PostError, WaitError};
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::{Amo, AmoOp, Fault, Outcome};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;
use fishplate_core::rail::{Caps, Rail};

use super::order::{add, hold, set};
use super::support::tap::{Event, Tap, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

const INC: Amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };

#[test]
fn a_dead_peer_fails_only_operations_to_it() {
    for seed in seeds(60) {
        let config = Config { contexts: 2, window: 4, ..Config::DEFAULT };
        let (sim, mut nodes) = fleet::plain::<2>(3, Dials::WILD, config, 8192, seed);
        let mut random = Random(seed);
        let mut tokens = vec![];
        let node = &mut nodes[0];
        for n in 0..12u64 {
            let cx = ContextId((n % 2) as u8);
            let (from, to) = (node.source.at(0), node.remotes[1].at(64));
            tokens.push(pending(match random.below(4) {
                0 => node.engine.put(cx, from, 200, to, Notice::Report(n)),
                1 => node.engine.put_signal(
                    cx,
                    from,
                    700,
                    to,
                    set(node.remotes[1], 0, n),
                    Notice::Report(n),
                ),
                2 => node.engine.get(cx, from, 100, to, Notice::Report(n)),
                _ => node.engine.fetch(cx, node.remotes[1].at(8), INC, n),
            }));
        }
        for _ in 0..random.below(40) {
            fleet::turn(&mut nodes);
        }
        sim.kill(1);
        let mut ends = 0;
        fleet::turn_until(&mut nodes, "ends", |nodes| {
            while let Some(done) = nodes[0].engine.next_completion() {
                ends += 1;
                let died = Fault::Peer(PeerError::Died);
                let down = matches!(
                    done.outcome,
                    Outcome::Failed(Fault::Rail(_, CompleteError::PeerDown))
                ) || matches!(done.outcome, Outcome::Failed(f) if f == died);
                let rail = matches!(done.outcome, Outcome::Unknown(_));
                assert!(done.outcome == Outcome::Done || down || rail, "seed {seed}: {done:?}");
            }
            ends == 12
        });
        for token in tokens {
            assert_eq!(nodes[0].engine.test(token), Err(OpError::StaleToken));
        }
        let dead = nodes[0].peers[1];
        fleet::turn_until(&mut nodes, "the news", |nodes| {
            nodes[0].engine.peer_error(dead) != Ok(None)
        });
        let why = nodes[0].engine.peer_error(dead).unwrap().unwrap();
        assert!(matches!(why, PeerError::Died | PeerError::Rail(_)), "seed {seed}: {why:?}");
        let node = &mut nodes[0];
        assert_eq!(
            node.engine.signal(CX, set(node.remotes[1], 0, 1), Notice::Silent),
            Err(OpError::PeerFailed(why))
        );
        assert_eq!(node.engine.fence(CX, dead), Err(OpError::PeerFailed(why)));
        assert_eq!(
            node.engine.quiet(CX, dead, &mut waiter(), SOON),
            Err(WaitError::PeerFailed(dead, why))
        );
        // The third node is unaffected.
        for n in 0..20 {
            let node = &mut nodes[0];
            node.engine.signal(CX, add(node.remotes[2], 0, 1), Notice::Silent).unwrap();
            let alive = node.peers[2];
            fleet::turn_until(&mut nodes, "others", |nodes| {
                nodes[0].engine.is_quiet(CX, alive) == Ok(true)
            });
            assert_eq!(word(&nodes[2].engine, nodes[2].target.at(0)), n + 1, "seed {seed}");
        }
    }
}

#[test]
fn a_down_peer_fails_unposted_operations_as_quiescent() {
    let control = shared();
    let mut own = own(Config { window: 1, ..Config::DEFAULT }, tap(Network::new(), &control), 4096);
    control.borrow_mut().mute = true;
    let tokens: Vec<_> = (0..3)
        .map(|n| pending(own.engine.signal(CX, set(own.remote, 0, 1), Notice::Report(n))))
        .collect();
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    let why = PeerError::Rail(RailId(0));
    control.borrow_mut().inject.push_back(Event::Down(own.peer.peer(), why));
    own.engine.progress();
    let outcomes: Vec<_> =
        tokens.iter().map(|&token| own.engine.test(token).unwrap().unwrap().outcome).collect();
    let fault = Fault::Peer(why);
    assert_eq!(outcomes, [Outcome::Unknown(fault), Outcome::Failed(fault), Outcome::Failed(fault)]);
    assert_eq!(
        own.engine.quiet_all(CX, &mut own.waiter, SOON),
        Err(WaitError::PeerFailed(own.peer, why))
    );
}

/// Connecting succeeds for a peer that is not attached to the rail. The first error names the rail.
#[test]
fn a_peer_that_is_not_attached_to_its_rail_is_reported_as_such() {
    let sim = fleet::fabric(2, 1, 64, Dials::CALM, 1);
    let mut engine = engine(Config::DEFAULT, [sim.endpoint(0, 0)]);
    let target = engine.register(region(64)).unwrap();
    let mut handle = [0; 512];
    let len = engine.export(target, &mut handle).unwrap();
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 1).unwrap();
    assert_eq!(engine.import(peer, &handle[..len]), Err(AttachError::Unattached(RailId(0))));
    engine.progress();
    assert_eq!(engine.peer_error(peer), Ok(Some(PeerError::Unattached(RailId(0)))));
}

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

/// Issues an operation. Its post stays incomplete and unacknowledged. Then injects `events`. The
/// closure receives the peer and the context word of the post. Returns the outcome of the
/// operation.
fn outcome<R: Rail>(rail: R, verb: Verb, events: impl Fn(Peer, u64) -> Vec<Event>) -> Outcome {
    const ACK: u8 = 5;
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(rail, &control), 4096);
    let held = hold(&control, |event| match event {
        Event::Done(..) => true,
        Event::Message(_, bytes) => bytes[0] == ACK,
        _ => false,
    });
    let to = if verb == Verb::Atomic { words(&mut own).1 } else { own.remote };
    let (at, to) = (own.source.at(0), to.at(64));
    let token = pending(match verb {
        Verb::Read => own.engine.get(CX, at, 300, to, Notice::Report(1)),
        Verb::Write => own.engine.put(CX, at, 300, to, Notice::Report(1)),
        _ => own.engine.fetch(CX, to, INC, 1),
    });
    passes(&mut own.engine, 60);
    let posted = control.borrow().posts.iter().find(|post| post.verb == verb).map(|post| post.cx);
    let cx = posted.unwrap_or_else(|| panic!("{verb:?}: {:?}", control.borrow().posts));
    assert!(held.borrow().contains(&Event::Done(cx, Ok(()))), "{verb:?}: {held:?}");
    control.borrow_mut().inject.extend(events(own.peer.peer(), cx));
    own.engine.progress();
    own.engine.test(token).unwrap().expect("ended").outcome
}

/// Like [`outcome`], over a rail that completes each post later, or that executes atomics.
fn outcome_of(verb: Verb, events: impl Fn(Peer, u64) -> Vec<Event>) -> Outcome {
    let later = Faults { hold: 1000, ..Faults::NONE };
    match verb {
        Verb::Atomic => outcome(Network::new().with_native_atomics(), verb, events),
        _ => outcome(Faulty::<_, 32>::new(Network::new(), later, 1), verb, events),
    }
}

#[test]
fn a_post_without_a_number_that_fails_is_over_where_its_rail_says_so() {
    let (refused, down, unknown) =
        (CompleteError::Failed(-5), CompleteError::PeerDown, CompleteError::Unknown(-6));
    for (verb, error, over) in [
        (Verb::Read, refused, true),
        (Verb::Read, down, true),
        (Verb::Read, unknown, false),
        (Verb::Atomic, refused, true),
        // The atomic may have been executed.
        (Verb::Atomic, down, false),
        (Verb::Atomic, unknown, false),
    ] {
        let fault = Fault::Rail(RailId(0), error);
        let want = if over { Outcome::Failed(fault) } else { Outcome::Unknown(fault) };
        let outcome = outcome_of(verb, |_, cx| vec![Event::Done(cx, Err(error))]);
        assert_eq!(outcome, want, "{verb:?}, {error:?}");
    }
}

#[test]
fn what_was_in_flight_to_a_peer_is_over_if_that_has_died_and_perhaps_not_if_it_was_lost() {
    for verb in [Verb::Write, Verb::Atomic] {
        for (why, over) in [(PeerError::Died, true), (PeerError::Lost, false)] {
            let down = |peer, cx| {
                vec![Event::Down(peer, why), Event::Done(cx, Err(CompleteError::PeerDown))]
            };
            let fault = Fault::Peer(why);
            let want = if over { Outcome::Failed(fault) } else { Outcome::Unknown(fault) };
            assert_eq!(outcome_of(verb, down), want, "{verb:?}, {why:?}");
        }
    }
}

#[test]
fn an_atomic_that_its_rail_has_executed_is_done_though_the_peer_fails_in_the_same_poll() {
    for why in [PeerError::Died, PeerError::Lost] {
        let events = |peer, cx| vec![Event::Done(cx, Ok(())), Event::Down(peer, why)];
        assert_eq!(outcome_of(Verb::Atomic, events), Outcome::Done, "{why:?}");
    }
}

#[test]
fn e15_a_failed_numbered_post_fails_the_peer() {
    for verb in [Verb::Write, Verb::Message] {
        let control = shared();
        let later = Faulty::<_, 32>::new(
            Network::new(),
            Faults { hold: 1000, fail: 1000, ..Faults::NONE },
            1,
        );
        let mut own = own(Config::DEFAULT, tap(later, &control), 4096);
        let len = if verb == Verb::Write { 300 } else { 0 };
        let signal = set(own.remote, 0, 1);
        let token = pending(own.engine.put_signal(
            CX,
            own.source.at(0),
            len,
            own.remote.at(64),
            signal,
            Notice::Report(1),
        ));
        let done = own.engine.wait(token, &mut own.waiter, SOON).unwrap();
        assert!(matches!(done.outcome, Outcome::Unknown(Fault::Rail(..))), "{done:?}");
        assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Rail(RailId(0)))));
        assert_eq!(word(&own.engine, own.target.at(0)), 0);
    }
}

#[test]
fn a_write_whose_last_pieces_are_refused_completes() {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| Caps { max_rma: 8, ..caps });
    let mut own = own(Config { window: 1, ..Config::DEFAULT }, tap(Network::new(), &control), 4096);
    let issued = own.engine.put(CX, own.source.at(0), 16, own.remote.at(64), Notice::Report(3));
    let token = pending(issued);
    control.borrow_mut().refuse =
        Some(Box::new(|post| (post.verb == Verb::Write).then_some(PostError::BadKey)));
    let done = own.engine.wait(token, &mut own.waiter, 100_000).unwrap();
    assert_eq!(done.outcome, Outcome::Failed(Fault::Post(RailId(0), PostError::BadKey)));
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(true));
}

#[test]
fn a_rail_that_permanently_refuses_acks_or_replies_loses_the_peer() {
    for kind in [4u8, 5] {
        let control = shared();
        let mut own =
            own(Config { ack_age: 1, ..Config::DEFAULT }, tap(Network::new(), &control), 4096);
        control.borrow_mut().refuse = Some(Box::new(move |post| {
            (post.verb == Verb::Message && post.bytes[0] == kind).then_some(PostError::Provider(-9))
        }));
        own.engine.fetch(CX, own.remote.at(0), INC, 1).unwrap();
        own.engine.signal(CX, set(own.remote, 8, 1), Notice::Silent).unwrap();
        let end = own.engine.quiet(CX, own.peer, &mut own.waiter, SOON);
        assert_eq!(
            end,
            Err(WaitError::PeerFailed(own.peer, PeerError::Rail(RailId(0)))),
            "kind {kind}"
        );
        assert!(own.engine.stats().failed < 10, "tried again and again: {:?}", own.engine.stats());
    }
}

#[test]
fn a_control_message_that_fails_loses_the_peer() {
    let control = shared();
    let later = Faulty::<_, 32>::new(Network::new(), Faults { hold: 1000, ..Faults::NONE }, 1);
    let mut own = own(Config { ack_age: 1, ..Config::DEFAULT }, tap(later, &control), 4096);
    control.borrow_mut().edit = Some(Box::new(|_, event| match event {
        Event::Done(cx, _) if cx >> 63 == 1 => {
            vec![Event::Done(cx, Err(CompleteError::Failed(-5)))]
        }
        event => vec![event],
    }));
    own.engine.signal(CX, set(own.remote, 8, 1), Notice::Silent).unwrap();
    passes(&mut own.engine, 40);
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Rail(RailId(0)))));
}

#[test]
fn a_post_to_a_down_peer_fails_the_peer() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    control.borrow_mut().refuse = Some(Box::new(|_| Some(PostError::PeerDown)));
    let why = PeerError::Rail(RailId(0));
    let fault = Fault::Peer(why);
    let put =
        pending(own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Report(1)));
    assert_eq!(
        own.engine.test(put).unwrap().unwrap().outcome,
        Outcome::Failed(fault),
        "nothing was posted"
    );
    assert_eq!(own.engine.inject(CX, &[1], own.remote.at(64)), Err(OpError::PeerFailed(why)));
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(why)));
}

#[test]
fn an_inject_to_a_down_peer_changes_nothing() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    control.borrow_mut().refuse = Some(Box::new(|_| Some(PostError::PeerDown)));
    let why = PeerError::Rail(RailId(0));
    assert_eq!(own.engine.inject(CX, &[1], own.remote.at(64)), Err(OpError::PeerFailed(why)));
    own.engine.remove_peer(own.peer).unwrap();
    control.borrow_mut().refuse = None;
    let fresh = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(fresh, 1).unwrap();
    let next = import(&mut own.engine, fresh, own.target);
    own.engine.signal(CX, set(next, 0, 1), Notice::Silent).unwrap();
    own.engine.quiet_all(CX, &mut own.waiter, SOON).unwrap();
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

/// Permanent refusals of whole and split operations of every kind fail only those operations. Each
/// completes once with a correct outcome, and no slot leaks.
#[test]
fn permanently_refused_operations_complete_once_with_a_true_outcome() {
    const OPS: u64 = 200;
    const LIMIT: u64 = 300_000;
    for seed in seeds(60) {
        let control = shared();
        let mut random = Random(seed ^ 0xbad);
        let rails: [_; 2] = std::array::from_fn(|i| {
            let disordered =
                Faulty::<_, 32>::new(Network::new(), Faults::DISORDER, seed * 2 + i as u64);
            Tap::new(disordered, i, &control)
        });
        let config = Config {
            window: 16,
            eager: [0, 64][seed as usize % 2],
            stripe_threshold: 256,
            stripe_chunk: 100,
            ..Config::DEFAULT
        };
        let mut own = own(config, rails, 1 << 16);
        control.borrow_mut().refuse = Some(Box::new(move |post| {
            let needed = post.verb == Verb::Message && matches!(post.bytes[0], 4 | 5);
            let error =
                [PostError::BadKey, PostError::Provider(-9), PostError::Unsupported][post.len % 3];
            (!needed && random.below(6) == 0).then_some(error)
        }));
        let mut random = Random(seed);
        let (mut open, mut words) = (vec![false; OPS as usize], [0u64; 2]);
        let take = |own: &mut Own<_, 2>, open: &mut Vec<bool>, words: &mut [u64; 2]| {
            while let Some(end) = own.engine.next_completion() {
                let (n, kind) = ((end.tag >> 8) as usize, end.tag & 0xff);
                assert!(std::mem::take(&mut open[n]), "seed {seed}: {n} twice");
                let done = u64::from(end.outcome == Outcome::Done);
                match kind {
                    1 | 2 => words[0] += done,
                    3 => words[1] += done,
                    _ => {}
                }
            }
        };
        for n in 0..OPS {
            let kind = random.below(5);
            let silent = random.below(3) == 0;
            let notice = if silent { Notice::Silent } else { Notice::Report(n << 8 | kind) };
            let len = [8, 64, 200, 300, 1000][random.below(5) as usize];
            let (from, to) = (own.source.at(0), own.remote.at(4096));
            // Reported and silent operations use separate words.
            let at = if silent { 16 } else { 0 };
            if random.below(5) == 0 {
                own.engine.fence(CX, own.peer).unwrap();
            }
            let issued = match kind {
                0 => own.engine.put(CX, from, len, to, notice),
                1 => own.engine.put_signal(CX, from, len, to, add(own.remote, at, 1), notice),
                2 => own.engine.signal(CX, add(own.remote, at, 1), notice),
                3 if silent => own.engine.amo(CX, own.remote.at(at + 8), INC, notice),
                3 => own.engine.fetch(CX, own.remote.at(at + 8), INC, n << 8 | kind),
                _ => own.engine.get(CX, from, len, to, notice),
            };
            match issued {
                Ok(issued) => {
                    assert!(matches!(issued, fishplate_core::engine::Issued::Pending(_)));
                    open[n as usize] = !silent;
                }
                Err(error) => assert_eq!(error, OpError::Again, "seed {seed}"),
            }
            match own.engine.inject(CX, &[7; 8], own.remote.at(2048)) {
                Ok(()) | Err(OpError::Again | OpError::Rail(..)) => {}
                Err(error) => panic!("seed {seed}: {error:?}"),
            }
            passes(&mut own.engine, random.below(3) as u32);
            take(&mut own, &mut open, &mut words);
            if random.below(40) == 0 {
                match own.engine.quiet(CX, own.peer, &mut own.waiter, LIMIT) {
                    Ok(()) | Err(WaitError::Failed(_)) => {}
                    Err(error) => panic!("seed {seed}: {error:?}"),
                }
            }
        }
        let end = own.engine.quiet(CX, own.peer, &mut own.waiter, LIMIT);
        assert!(matches!(end, Ok(()) | Err(WaitError::Failed(_))), "seed {seed}: {end:?}");
        take(&mut own, &mut open, &mut words);
        assert!(open.iter().all(|open| !open), "seed {seed}: {open:?}");
        assert_eq!(own.engine.peer_error(own.peer), Ok(None), "seed {seed}");
        // A successful operation was executed once. A failed operation was not started, because no
        // message was lost.
        for (at, total) in [(0, words[0]), (8, words[1])] {
            assert_eq!(word(&own.engine, own.target.at(at)), total, "seed {seed}");
        }
        control.borrow_mut().refuse = None;
        own.engine.quiet(CX, own.peer, &mut own.waiter, LIMIT).unwrap();
        let mut slots = 0;
        while own
            .engine
            .get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Report(slots))
            .is_ok()
        {
            slots += 1;
        }
        assert_eq!(slots, 256, "seed {seed}");
    }
}
