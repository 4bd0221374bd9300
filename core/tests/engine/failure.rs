//! The failure of a peer fails only operations to that peer. Each has the outcome that is known: it
//! is done, failed and quiescent, or unknown.

use fishplate_core::engine::{Config, ContextId, Notice};
use fishplate_core::error::{AttachError, CompleteError, OpError, PeerError, PostError, WaitError};
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::{Amo, AmoOp, Fault, Outcome};
use fishplate_core::rail::Rail;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::order::{add, hold, set};
use super::support::tap::{Event, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

pub const INC: Amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };

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
