//! Orderly closing: accepted operations are applied once, and a close is not mistaken for a
//! failure.

use std::cell::RefCell;
use std::rc::Rc;

use fishplate_core::engine::{Config, Notice, Signal};
use fishplate_core::error::{
    AttachError, Missing, OpError, PeerError, PostError, Unfinished, Violation, WaitError,
};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Cmp, Outcome, SignalOp};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;
use fishplate_core::rail::{Caps, Rail};

use super::support::fleet::{self, fabric, fleet, turn, turn_until};
use super::support::goodbye::{self, add};
use super::support::tap::{Event, Shared, Tap, shared, tap};
use super::support::*;

const SIZE: usize = 4096;

const CLOSED: OpError = OpError::PeerFailed(PeerError::Closed);

fn settings(seed: u64) -> (Config, Dials) {
    let config = Config {
        contexts: [1, 1, 3][seed as usize % 3],
        window: [1, 4, 16, 128][(seed / 3) as usize % 4],
        eager: [0, 192][(seed / 5) as usize % 2],
        first_sequence: STARTS[(seed / 7) as usize % 4],
        ..Config::DEFAULT
    };
    let dials = match seed % 5 {
        0 => Dials { ordered: true, ..Dials::WILD },
        1 => Dials { max_delay: 400, ..Dials::WILD },
        2 => Dials::CALM,
        _ => Dials::WILD,
    };
    (config, dials)
}

#[test]
fn shutdown_in_any_order_applies_everything_and_reports_no_death() {
    let mut applied = 0;
    for seed in seeds(2000) {
        let (config, dials) = settings(seed);
        let nodes = 2 + (seed / 11) as u16 % 2;
        applied += match seed % 4 {
            0 => {
                let sim = fabric(nodes, 2, 96, dials, seed);
                let faulty = |_, _, end| Faulty::<_, 16>::new(end, Faults::DISORDER, seed);
                goodbye::run(
                    seed,
                    fleet::<_, 2>(sim, nodes, config, SIZE, faulty),
                    config.contexts,
                    |me| sim.kill(me as u16),
                )
            }
            1 => {
                let sim = fabric(nodes, 2, 96, dials, seed);
                goodbye::run(
                    seed,
                    fleet::<_, 2>(sim, nodes, config, SIZE, |_, _, end| end),
                    config.contexts,
                    |me| sim.kill(me as u16),
                )
            }
            _ => {
                let sim = fabric(nodes, 1, 96, dials, seed);
                goodbye::run(
                    seed,
                    fleet::<_, 1>(sim, nodes, config, SIZE, |_, _, end| end),
                    config.contexts,
                    |me| sim.kill(me as u16),
                )
            }
        };
    }
    assert!(applied >= 20 * seeds(2000).len() as u64, "{applied}");
}

/// Returns an engine that is its own peer. Its tapped rail does not separate attachments.
fn alone(config: Config) -> (Shared, Own<Tap<Loopback<64>>, 1>) {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| Caps { fresh: false, inject: 0, ..caps });
    let mut own = own(config, tap(Loopback::new(), &control), SIZE);
    meet(&mut own);
    (control, own)
}

fn meet<R: Rail>(own: &mut Own<R, 1>) {
    let peer = own.peer;
    pass_until(&mut own.engine, "it connects to itself", |engine| {
        engine.has_answered(peer) == Ok(true)
    });
}

/// Issues two of each operation. Returns the sum that they add to the first word.
fn operations<R: Rail>(own: &mut Own<R, 1>) -> u64 {
    let (e, remote, from) = (&mut own.engine, own.remote, own.source.at(0));
    let signal = Signal { at: remote.at(0), op: SignalOp::Add, value: 1 };
    for n in 0..2 {
        e.put(CX, from, 64, remote.at(1024), Notice::Silent).unwrap();
        e.put_signal(CX, from, 300, remote.at(2048), signal, Notice::Silent).unwrap();
        e.put_signal(CX, from, 16, remote.at(512), signal, Notice::Report(n)).unwrap();
        e.signal(CX, signal, Notice::Silent).unwrap();
        e.fetch(CX, remote.at(0), add(0), n).unwrap();
        while e.inject(CX, &[9; 100], remote.at(3072)) == Err(OpError::Again) {
            e.progress();
        }
        e.get(CX, own.source.at(2048), 300, remote.at(1024), Notice::Silent).unwrap();
    }
    8
}

fn refused<R: Rail>(own: &mut Own<R, 1>) {
    let refused = |error: Option<OpError>| error == Some(CLOSED);
    let (e, remote, from) = (&mut own.engine, own.remote, own.source.at(0));
    let signal = Signal { at: remote.at(0), op: SignalOp::Add, value: 1 };
    for notice in [Notice::Silent, Notice::Report(1)] {
        for len in [0, 64, 300] {
            assert!(refused(e.put(CX, from, len, remote.at(0), notice).err()));
            assert!(refused(e.put_signal(CX, from, len, remote.at(1024), signal, notice).err()));
            assert!(refused(e.get(CX, from, len, remote.at(0), notice).err()));
        }
        assert!(refused(e.signal(CX, signal, notice).err()));
        assert!(refused(e.amo(CX, remote.at(8), add(0), notice).err()));
    }
    assert!(refused(e.fetch(CX, remote.at(8), add(0), 1).err()));
    for len in [0, 8, 100] {
        assert!(refused(e.inject(CX, &vec![1; len], remote.at(0)).err()));
    }
    assert_eq!(e.fence(CX, own.peer), Err(CLOSED));
    let mut handle = [0; 512];
    let len = e.export(own.target, &mut handle).unwrap();
    assert_eq!(e.import(own.peer, &handle[..len]), Err(AttachError::UnknownPeer));
}

fn to_oneself<R: Rail>(mut own: Own<R, 1>) {
    let mut adds = operations(&mut own);
    adds += operations(&mut own);
    own.engine.close_peer(own.peer).unwrap();
    assert_eq!(own.engine.has_left(own.peer), Ok(false));
    refused(&mut own);
    own.engine.close_peer(own.peer).unwrap();
    assert_eq!(own.engine.shutdown(&mut own.waiter, SOON), Ok(()));
    assert_eq!(word(&own.engine, own.target.at(0)), adds);
    while let Some(end) = own.engine.next_completion() {
        assert_eq!(end.outcome, Outcome::Done);
    }
    assert_eq!(own.engine.has_left(own.peer), Ok(true));
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Closed)));
    refused(&mut own);
    assert_eq!(own.engine.close_peer(own.peer), Err(OpError::PeerFailed(PeerError::Closed)));
    assert_eq!(own.engine.shutdown(&mut own.waiter, 0), Ok(()), "nothing is left to close");
    // The slot is free for another peer, so the old id is unknown.
    own.engine.remove_peer(own.peer).unwrap();
    assert_eq!(own.engine.has_left(own.peer), Err(AttachError::UnknownPeer));
    own.peer = own.engine.reserve_peer().unwrap();
    assert_eq!(own.engine.close_peer(own.peer), Err(OpError::UnknownPeer));
    own.engine.connect_peer(own.peer, 1).unwrap();
    own.remote = import(&mut own.engine, own.peer, own.target);
    meet(&mut own);
    adds += operations(&mut own);
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(word(&own.engine, own.target.at(0)), adds);
}

#[test]
fn an_engine_that_is_its_own_peer_shuts_down_over_every_loopback() {
    let config = Config { window: 8, ..Config::DEFAULT };
    to_oneself(own(config, [Loopback::<64>::new()], SIZE));
    to_oneself(own(config, [Loopback::<64>::new().with_native_atomics()], SIZE));
    to_oneself(own(config, [Loopback::<64>::mapped()], SIZE));
    to_oneself(alone(config).1);
    for seed in seeds(50) {
        to_oneself(own(
            config,
            [Faulty::<_, 16>::new(Loopback::<64>::new(), Faults::DISORDER, seed)],
            SIZE,
        ));
    }
}

#[test]
fn an_expired_deadline_names_the_peer_and_what_is_missing() {
    let config = Config { window: 8, ..Config::DEFAULT };
    let (_, mut nodes) = fleet::plain::<1>(4, Dials::CALM, config, SIZE, 1);
    // Node 1 makes no progress, but has received everything. Nodes 2 and 3 have received nothing.
    let [first, _, _, last] = &mut nodes[..] else { unreachable!() };
    let mut waiter = waiter();
    let signal = |node| Signal { at: node, op: SignalOp::Add, value: 1 };
    first.engine.signal(CX, signal(first.remotes[2].at(0)), Notice::Silent).unwrap();
    let late = first.engine.shutdown(&mut waiter, 10_000).unwrap_err();
    assert_eq!(late, Unfinished { peer: first.peers[2], peers: 3, missing: Missing::Operations });
    // The last node answers during its passes. Its program need not call `shutdown`.
    let (first_peer, last_peer) = (last.peers[0], first.peers[3]);
    for _ in 0..2000 {
        last.engine.progress();
        first.engine.progress();
    }
    assert_eq!(last.engine.has_left(first_peer), Ok(true));
    assert_eq!(first.engine.has_left(last_peer), Ok(true));
    let late = first.engine.shutdown(&mut waiter, 20_000).unwrap_err();
    assert_eq!(late, Unfinished { peer: first.peers[2], peers: 2, missing: Missing::Operations });
    let [first, _, third, _] = &mut nodes[..] else { unreachable!() };
    for _ in 0..2000 {
        third.engine.progress();
        first.engine.progress();
    }
    let late = first.engine.shutdown(&mut waiter, 30_000).unwrap_err();
    assert_eq!(late, Unfinished { peer: first.peers[1], peers: 1, missing: Missing::Bye });
    turn_until(&mut nodes, "all have left", |nodes| {
        nodes[0].engine.shutdown(&mut waiter, 0).is_ok()
    });
    assert_eq!(word(&nodes[2].engine, nodes[2].target.at(0)), 1);
}

#[test]
fn a_killed_peer_does_not_delay_a_shutdown() {
    for seed in seeds(300) {
        let mut random = Random(seed);
        let (sim, mut nodes) = fleet::plain::<1>(3, Dials::WILD, settings(seed).0, SIZE, seed);
        for node in &mut nodes {
            let signal = Signal { at: node.remotes[1].at(0), op: SignalOp::Add, value: 1 };
            node.engine.signal(CX, signal, Notice::Silent).unwrap();
            for &peer in &node.peers {
                node.engine.close_peer(peer).unwrap();
            }
        }
        for _ in 0..random.below(200) {
            turn(&mut nodes);
        }
        sim.kill(1);
        turn_until(&mut nodes, "the living have left", |nodes| {
            [0, 2]
                .iter()
                .all(|&n| nodes[n].peers.iter().all(|&p| nodes[n].engine.has_left(p) == Ok(true)))
        });
        for node in [&nodes[0], &nodes[2]] {
            for other in [0, 2] {
                assert_eq!(node.engine.peer_error(node.peers[other]), Ok(Some(PeerError::Closed)));
            }
        }
    }
}

#[test]
fn an_unanswered_peer_is_closed_once_it_has_answered() {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| Caps { fresh: false, ..caps });
    let mut own = own(Config::DEFAULT, tap(Loopback::<64>::new(), &control), SIZE);
    let adds = operations_queued(&mut own);
    control.borrow_mut().mute = true;
    own.engine.close_peer(own.peer).unwrap();
    refused(&mut own);
    let late = own.engine.shutdown(&mut own.waiter, 10_000).unwrap_err();
    assert_eq!(late, Unfinished { peer: own.peer, peers: 1, missing: Missing::Operations });
    assert_eq!(own.engine.has_answered(own.peer), Ok(false));
    assert!(own.engine.missing(None).unanswered);
    control.borrow_mut().mute = false;
    assert_eq!(own.engine.shutdown(&mut own.waiter, SOON), Ok(()));
    assert_eq!(word(&own.engine, own.target.at(0)), adds);
}

/// Issues operations. The engine queues them until the peer has answered its Hello.
fn operations_queued<R: Rail>(own: &mut Own<R, 1>) -> u64 {
    for _ in 0..5 {
        let signal = Signal { at: own.remote.at(0), op: SignalOp::Add, value: 1 };
        own.engine
            .put_signal(CX, own.source.at(0), 300, own.remote.at(64), signal, Notice::Silent)
            .unwrap();
    }
    5
}

/// Returns the upper bits of a word: the epoch, above the sequence number, for a window of 128.
fn stamp(control: &Shared) -> u32 {
    let control = control.borrow();
    let hello = control.posts.iter().find(|post| post.bytes.first() == Some(&7));
    hello
        .map_or(0, |post| u32::from_le_bytes(post.bytes[4..8].try_into().unwrap()) << 9 & 0xff_ffff)
}

fn byes(control: &Shared) -> Vec<Vec<u8>> {
    let posts = &control.borrow().posts;
    posts
        .iter()
        .filter(|post| post.bytes.first() == Some(&8))
        .map(|post| post.bytes.clone())
        .collect()
}

#[test]
fn a_bye_of_an_earlier_attachment_is_dropped_and_counted() {
    let (control, mut own) = alone(Config { contexts: 2, ..Config::DEFAULT });
    own.engine.shutdown(&mut own.waiter, SOON).unwrap();
    let old = byes(&control);
    assert_eq!(old.iter().map(|bye| (bye.len(), bye[1])).collect::<Vec<_>>(), [(28, 0), (28, 1)]);
    own.engine.remove_peer(own.peer).unwrap();
    own.peer = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(own.peer, 1).unwrap();
    own.remote = import(&mut own.engine, own.peer, own.target);
    // Injects the old Byes both before and after the new attachment is connected.
    for round in 1..3 {
        for bye in &old {
            control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), bye.clone()));
        }
        passes(&mut own.engine, 1);
        meet(&mut own);
        assert_eq!(own.engine.stats().stale, round * 2);
        assert_eq!(own.engine.peer_error(own.peer), Ok(None));
    }
    operations(&mut own);
    assert_eq!(own.engine.shutdown(&mut own.waiter, SOON), Ok(()));
}

#[test]
fn a_bye_acknowledges_and_ends_waits_for_its_sender() {
    let (control, mut own) = alone(Config { ack_age: u32::MAX, ..Config::DEFAULT });
    let heard = Rc::new(RefCell::new(vec![]));
    let notes = heard.clone();
    control.borrow_mut().edit = Some(Box::new(move |_, event| match &event {
        // Drops separate acknowledgements, so that only Byes report what has arrived.
        Event::Message(_, bytes) if bytes[0] == 5 => vec![],
        Event::Message(_, bytes) if bytes[0] == 8 => {
            notes.borrow_mut().push(event);
            vec![]
        }
        _ => vec![event],
    }));
    let signal = Signal { at: own.remote.at(0), op: SignalOp::Add, value: 1 };
    own.engine.signal(CX, signal, Notice::Report(3)).unwrap();
    passes(&mut own.engine, 50);
    assert_eq!(own.engine.next_completion(), None);
    // Injects the Bye that the other end of this stream would send.
    let mut bye: Vec<u8> = [8, stamp(&control), 1, 0].map(u32::to_le_bytes).as_flattened().to_vec();
    bye.extend([1u64.to_le_bytes().as_slice(), &[0; 4]].concat());
    control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), bye.clone()));
    passes(&mut own.engine, 1);
    assert_eq!(
        own.engine.next_completion().map(|end| (end.tag, end.outcome)),
        Some((3, Outcome::Done))
    );
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Closed)));
    let end =
        own.engine.wait_signal(own.target.at(0), Cmp::Eq, 9, Some(own.peer), &mut own.waiter, SOON);
    assert_eq!(end, Err(WaitError::PeerFailed(own.peer, PeerError::Closed)));
    passes(&mut own.engine, 2000);
    assert_eq!(own.engine.has_left(own.peer), Ok(true));
    // The engine sends the same Bye.
    assert_eq!(byes(&control), [bye]);
}

#[test]
fn a_peer_that_sent_a_bye_counts_as_closed_whatever_the_rail_reports() {
    for why in [PeerError::Died, PeerError::Lost, PeerError::Closed, PeerError::Rail(RailId(0))] {
        for says in [true, false] {
            let (control, mut own) = alone(Config::DEFAULT);
            // The engine's answer is never sent.
            control.borrow_mut().refuse =
                Some(Box::new(|post| (post.bytes.first() == Some(&8)).then_some(PostError::Again)));
            own.engine.close_peer(own.peer).unwrap();
            passes(&mut own.engine, 5);
            let mut bye = [8, stamp(&control)].map(u32::to_le_bytes).as_flattened().to_vec();
            bye.resize(28, 0);
            if says {
                control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), bye));
            }
            control.borrow_mut().inject.push_back(Event::Down(own.peer.peer(), why));
            passes(&mut own.engine, 2);
            let want = if says { PeerError::Closed } else { why };
            assert_eq!(own.engine.peer_error(own.peer), Ok(Some(want)));
            assert_eq!(own.engine.has_left(own.peer), Ok(true));
            assert_eq!(own.engine.shutdown(&mut own.waiter, 0), Ok(()));
        }
    }
}

#[test]
fn an_invalid_bye_fails_its_peer() {
    for (what, context, op, [ack, fins], end, len, violation) in [
        ("an end ahead", 0, 0, [0, 0], 1, 28, Violation::Sequence),
        ("an end far behind", 0, 0, [0, 0], u64::MAX, 28, Violation::Sequence),
        ("a cursor ahead", 0, 0, [1, 0], 0, 28, Violation::Ack),
        ("Fins that were never owed", 0, 0, [0, 1], 0, 28, Violation::Reply),
        ("cut short", 0, 0, [0, 0], 0, 27, Violation::Length),
        ("a head alone", 0, 0, [0, 0], 0, 16, Violation::Length),
        ("with more", 0, 0, [0, 0], 0, 29, Violation::Length),
        ("another form", 0, 1, [0, 0], 0, 28, Violation::Kind),
        ("context 2 of 2", 2, 0, [0, 0], 0, 28, Violation::Context),
    ] {
        for fresh in [true, false] {
            let (control, mut own) = match fresh {
                true => {
                    let control = shared();
                    let config = Config { contexts: 2, ..Config::DEFAULT };
                    let own = own(config, tap(Loopback::new(), &control), SIZE);
                    (control, own)
                }
                false => alone(Config { contexts: 2, ..Config::DEFAULT }),
            };
            let word = stamp(&control) | u32::from(context) << 24;
            let mut bytes = vec![8, context, op, 0];
            bytes.extend([word, ack, 0].map(u32::to_le_bytes).as_flattened());
            bytes.extend(end.to_le_bytes());
            bytes.extend(u32::to_le_bytes(fins));
            bytes.resize(len, 0);
            control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), bytes));
            passes(&mut own.engine, 3);
            let why = Some(PeerError::Protocol(violation));
            assert_eq!(own.engine.peer_error(own.peer), Ok(why), "{what}, fresh: {fresh}");
            assert_eq!(own.engine.shutdown(&mut own.waiter, 0), Ok(()), "{what}");
        }
    }
}

#[test]
fn a_repeated_bye_changes_nothing() {
    let (control, mut own) = alone(Config::DEFAULT);
    control.borrow_mut().edit = Some(Box::new(|_, event| match &event {
        Event::Message(_, bytes) if bytes[0] == 8 => vec![event; 5],
        _ => vec![event],
    }));
    let adds = operations(&mut own);
    assert_eq!(own.engine.shutdown(&mut own.waiter, SOON), Ok(()));
    passes(&mut own.engine, 20);
    assert_eq!(word(&own.engine, own.target.at(0)), adds);
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Closed)));
    assert_eq!(byes(&control).len(), 1);
}
