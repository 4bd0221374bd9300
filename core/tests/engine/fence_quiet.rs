//! A fence orders operations without waiting, an idle quiet makes no call into a rail, and an
//! expired wait names the reason.

use fishplate_core::engine::{Config, ContextId, Notice};
use fishplate_core::error::{Awaited, Stuck, WaitError};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Amo, AmoOp, Cmp};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::order::{add, hold, set};
use super::support::tap::{Event, Tap, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

const LATER: Faults = Faults { hold: 1000, ..Faults::NONE };

#[test]
fn writes_after_a_fence_never_land_before_earlier_ones() {
    for seed in seeds(150) {
        let config =
            Config { window: 16, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let (_, mut nodes) = fleet::plain::<3>(2, Dials::WILD, config, 8192, seed);
        let mut random = Random(seed);
        let eager = Config::DEFAULT.eager as usize;
        for round in 0..6u64 {
            let place = round * 512;
            let len = [8, 100, eager + 1][random.below(3) as usize];
            let node = &mut nodes[0];
            for step in 0..4u8 {
                let from = node.source.at(round * 2048 % 6144 + step as u64 * 512);
                write(&node.engine, from, &vec![step + 1 + round as u8 * 4; len]);
                let (to, word) = (node.remotes[1].at(place), node.remotes[1]);
                match random.below(3) {
                    0 => drop(node.engine.put(CX, from, len, to, Notice::Silent).unwrap()),
                    1 => drop(
                        node.engine
                            .put_signal(CX, from, len, to, set(word, 8000, 1), Notice::Silent)
                            .unwrap(),
                    ),
                    _ => {
                        // An operation between fence and write must not cancel the fence.
                        node.engine.signal(CX, set(word, 8000, 2), Notice::Silent).unwrap();
                        node.engine
                            .get(CX, node.source.at(8000), 8, word.at(8008), Notice::Silent)
                            .unwrap();
                        node.engine.put(CX, from, len, to, Notice::Silent).unwrap();
                    }
                }
                node.engine.fence(CX, node.peers[1]).unwrap();
            }
            let (me, want) = (nodes[0].peers[1], 4 + round as u8 * 4);
            let mut last = vec![0u8; len];
            fleet::turn_until(&mut nodes, "quiet", |nodes| {
                let now = read(&nodes[1].engine, nodes[1].target.at(place), len);
                assert!(
                    now.iter().zip(&last).all(|(now, last)| now >= last),
                    "seed {seed}: an earlier write landed later"
                );
                last = now;
                nodes[0].engine.is_quiet(CX, me) == Ok(true)
            });
            assert_eq!(last, vec![want; len], "seed {seed}");
        }
    }
}

#[test]
fn i4_signals_and_atomics_do_not_wait_for_a_fence() {
    let control = shared();
    let disorder = Faulty::<_, 32>::new(Network::new(), LATER, 1);
    let mut own = own(Config::DEFAULT, tap(disorder, &control), 4096);
    let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    own.engine.fence(CX, own.peer).unwrap();
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    own.engine.amo(CX, own.remote.at(8), amo, Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 3, "posted without a pass");
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 3, "the write waits");
    assert_eq!(own.engine.inject(CX, &[], own.remote.at(64)), Ok(()));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(control.borrow().posts.iter().filter(|post| post.verb == Verb::Write).count(), 2);
}

#[test]
fn a_fence_delays_nothing_on_an_ordered_rail_or_without_traffic() {
    let control = shared();
    let sim = fleet::fabric(1, 1, 32, Dials::CALM, 1);
    let mut nodes = fleet::fleet::<_, 1>(sim, 1, Config::DEFAULT, 4096, |_, rail, end| {
        Tap::new(end, rail as usize, &control)
    });
    control.borrow_mut().posts.clear();
    let node = &mut nodes[0];
    node.engine.put(CX, node.source.at(0), 8, node.remotes[0].at(64), Notice::Silent).unwrap();
    node.engine.fence(CX, node.peers[0]).unwrap();
    node.engine.put(CX, node.source.at(0), 8, node.remotes[0].at(64), Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 2);
    let control = shared();
    let mut idle = own(
        Config::DEFAULT,
        tap(Faulty::<_, 32>::new(Network::new(), Faults::NONE, 1), &control),
        4096,
    );
    idle.engine.fence(CX, idle.peer).unwrap();
    idle.engine.put(CX, idle.source.at(0), 8, idle.remote.at(64), Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 1);
}

#[test]
fn a_fence_delays_writes_but_not_messages() {
    // This rail copies a write at its post, but delivers a message at the next poll.
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    write(&own.engine, own.source.at(0), &[1; 16]);
    let (from, signal) = (own.source.at(0), set(own.remote, 0, 1));
    let at = |own: &Own<_, 1>, offset| read(&own.engine, own.target.at(offset), 8);
    own.engine.put_signal(CX, from, 8, own.remote.at(64), signal, Notice::Silent).unwrap();
    own.engine.fence(CX, own.peer).unwrap();
    own.engine.put_signal(CX, from, 8, own.remote.at(72), signal, Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 2, "two messages, both posted at once");
    own.engine.put(CX, from, 8, own.remote.at(80), Notice::Silent).unwrap();
    assert_eq!([64, 72, 80].map(|offset| at(&own, offset)), [[0; 8]; 3]);
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!([64, 72, 80].map(|offset| at(&own, offset)), [[1; 8]; 3]);
    // The write has consumed the fence.
    let before = control.borrow().posts.len();
    own.engine.put_signal(CX, from, 8, own.remote.at(64), signal, Notice::Silent).unwrap();
    own.engine.put(CX, from, 8, own.remote.at(80), Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), before + 2);
}

#[test]
fn a_fence_holds_only_its_own_context_and_peer() {
    let control = shared();
    let config = Config { contexts: 2, ..Config::DEFAULT };
    let mut own = own(config, tap(Faulty::<_, 32>::new(Network::new(), LATER, 1), &control), 4096);
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    own.engine.fence(CX, own.peer).unwrap();
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    own.engine.put(ContextId(1), own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 2);
    own.engine.quiet_all(CX, &mut own.waiter, SOON).unwrap();
    own.engine.quiet_all(ContextId(1), &mut own.waiter, SOON).unwrap();
    assert_eq!(control.borrow().posts.iter().filter(|post| post.verb == Verb::Write).count(), 3);
}

#[test]
fn an_inject_behind_a_fence_is_refused_and_the_fence_stands() {
    let control = shared();
    let sim = fleet::fabric(1, 1, 32, Dials { ordered: false, ..Dials::CALM }, 1);
    let mut nodes = fleet::fleet::<_, 1>(sim, 1, Config::DEFAULT, 4096, |_, rail, end| {
        Tap::new(end, rail as usize, &control)
    });
    control.borrow_mut().posts.clear();
    let node = &mut nodes[0];
    node.engine.put(CX, node.source.at(0), 8, node.remotes[0].at(64), Notice::Silent).unwrap();
    node.engine.fence(CX, node.peers[0]).unwrap();
    assert_eq!(
        node.engine.inject(CX, &[1; 8], node.remotes[0].at(64)),
        Err(fishplate_core::error::OpError::Again)
    );
    node.engine.put(CX, node.source.at(0), 8, node.remotes[0].at(64), Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 1, "the fence was lost");
    node.engine.quiet(CX, node.peers[0], &mut waiter(), SOON).unwrap();
    node.engine.inject(CX, &[1; 8], node.remotes[0].at(64)).unwrap();
    node.engine.quiet(CX, node.peers[0], &mut waiter(), SOON).unwrap();
    assert_eq!(read(&node.engine, node.target.at(64), 8), [1; 8]);
}

#[test]
fn e19_an_idle_quiet_makes_no_call_into_a_rail() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    let before = (control.borrow().polls, control.borrow().flushes, control.borrow().posts.len());
    for _ in 0..10 {
        own.engine.quiet(CX, own.peer, &mut own.waiter, 0).unwrap();
        own.engine.quiet_all(CX, &mut own.waiter, 0).unwrap();
        assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(true));
        own.engine.fence(CX, own.peer).unwrap();
    }
    assert_eq!(
        (control.borrow().polls, control.borrow().flushes, control.borrow().posts.len()),
        before
    );
}

#[test]
fn quiet_means_applied() {
    for seed in seeds(60) {
        let rails: [_; 2] = std::array::from_fn(|i| {
            Faulty::<_, 16>::new(Loopback::<16>::new(), Faults::DISORDER, seed * 2 + i as u64)
        });
        let mut own = own(Config { window: 8, ..Config::DEFAULT }, rails, 4096);
        let mut random = Random(seed);
        for round in 1..20u64 {
            for n in 0..random.below(12) {
                let from = own.source.at(n * 64);
                write(&own.engine, from, &[round as u8; 64]);
                own.engine.put(CX, from, 64, own.remote.at(n * 64), Notice::Silent).unwrap();
            }
            own.engine.signal(CX, set(own.remote, 2048, round), Notice::Silent).unwrap();
            own.engine
                .get(CX, own.source.at(2048), 8, own.remote.at(3000), Notice::Silent)
                .unwrap();
            let count = own.engine.stats();
            own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
            assert!(own.engine.stats().posted >= count.posted);
            assert_eq!(word(&own.engine, own.target.at(2048)), round, "seed {seed}");
            assert_eq!(own.engine.stats().posted, own.engine.stats().arrived, "seed {seed}");
        }
    }
}

#[test]
fn a_deadline_names_the_peer_the_rail_and_the_hole() {
    for first_sequence in STARTS {
        let control = shared();
        let config = Config { first_sequence, ..Config::DEFAULT };
        let rails: [_; 2] = std::array::from_fn(|i| {
            Tap::new(Faulty::<_, 32>::new(Network::new(), LATER, 1), i, &control)
        });
        let mut own = own(config, rails, 4096);
        let second = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(second, 0b10).unwrap();
        let other = import(&mut own.engine, second, own.target);
        for _ in 0..3 {
            own.engine.signal(CX, add(other, 0, 1), Notice::Silent).unwrap();
        }
        own.engine.quiet(CX, second, &mut own.waiter, SOON).unwrap();
        let hole = first_sequence.wrapping_add(3);
        control.borrow_mut().mute = true;
        // Posts to the first peer are outstanding on rail 0, and posts to the second peer on rail
        // 1.
        own.engine.get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Silent).unwrap();
        own.engine.get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Silent).unwrap();
        let late = pending(own.engine.signal(CX, add(other, 0, 1), Notice::Report(1)));
        let soon =
            |own: &Own<_, 2>| fishplate_core::sync::host::Host::now_ns(own.waiter.host()) + 20_000;
        let want = WaitError::Deadline(Stuck {
            peer: Some(second),
            rail: Some(RailId(1)),
            hole: Some(hole),
            ..Stuck::default()
        });
        let deadline = soon(&own);
        assert_eq!(own.engine.quiet(CX, second, &mut own.waiter, deadline), Err(want));
        let deadline = soon(&own);
        assert_eq!(own.engine.wait(late, &mut own.waiter, deadline), Err(want));
        // The operation is still in flight, and completes once the rail reports again.
        control.borrow_mut().mute = false;
        own.engine.wait(late, &mut own.waiter, u64::MAX).unwrap();
        own.engine.quiet_all(CX, &mut own.waiter, u64::MAX).unwrap();
        assert_eq!(word(&own.engine, own.target.at(0)), 4);
    }
}

#[test]
fn a_missing_acknowledgement_names_no_rail() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    let _held = hold(&control, |event| matches!(event, Event::Landed(..)));
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    let want = Stuck { peer: Some(own.peer), hole: Some(0), ..Stuck::default() };
    assert_eq!(
        own.engine.quiet(CX, own.peer, &mut own.waiter, 20_000),
        Err(WaitError::Deadline(want))
    );
    // The error of a signal wait names the first missing sequence number. It also names the rail,
    // because the engine has only one.
    let want = Stuck { awaits: Awaited::Signal, rail: Some(RailId(0)), ..want };
    let end = own.engine.wait_signal(
        own.target.at(0),
        Cmp::Ge,
        1,
        Some(own.peer),
        &mut own.waiter,
        60_000,
    );
    assert_eq!(end, Err(WaitError::Deadline(want)));
}

#[test]
fn a_signal_wait_names_the_peer_it_waits_for() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    let second = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(second, 1).unwrap();
    // The first peer's stream has a hole. The wait is for the second peer. That peer's stream has
    // no hole.
    let _held = hold(&control, |event| matches!(event, Event::Landed(..)));
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    passes(&mut own.engine, 5);
    let end =
        own.engine.wait_signal(own.target.at(0), Cmp::Ge, 1, Some(second), &mut own.waiter, 20_000);
    let want = Stuck {
        awaits: Awaited::Signal,
        peer: Some(second),
        rail: Some(RailId(0)),
        hole: Some(0),
        ..Stuck::default()
    };
    assert_eq!(end, Err(WaitError::Deadline(want)));
}

#[test]
fn a_signal_wait_ends_with_its_peer_and_compares_as_asked() {
    let mut own = own(Config::DEFAULT, [Network::new()], 4096);
    own.engine.signal(CX, set(own.remote, 0, 5), Notice::Silent).unwrap();
    for (cmp, value, holds) in [
        (Cmp::Eq, 5, true),
        (Cmp::Ne, 5, false),
        (Cmp::Ge, 5, true),
        (Cmp::Gt, 5, false),
        (Cmp::Le, 5, true),
        (Cmp::Lt, 5, false),
        (Cmp::Ne, 4, true),
        (Cmp::Gt, 4, true),
        (Cmp::Lt, 6, true),
    ] {
        let deadline = if holds { u64::MAX } else { 1 };
        let end =
            own.engine.wait_signal(own.target.at(0), cmp, value, None, &mut own.waiter, deadline);
        assert_eq!(end.is_ok(), holds, "{cmp:?} {value}: {end:?}");
    }
    let gone = own.peer;
    own.engine.remove_peer(gone).unwrap();
    let end =
        own.engine.wait_signal(own.target.at(8), Cmp::Eq, 1, Some(gone), &mut own.waiter, u64::MAX);
    assert_eq!(end, Err(fishplate_core::error::OpError::UnknownPeer.into()));
    assert_eq!(
        own.engine.wait_signal(own.target.at(0), Cmp::Eq, 5, Some(gone), &mut own.waiter, u64::MAX),
        Ok(5),
        "what is there is there"
    );
}
