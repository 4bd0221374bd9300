//! Completion: one of three outcomes, once per operation, and only for a valid token.

use std::collections::BTreeMap;

use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::error::{CompleteError, OpError, PeerError, PostError, Stuck, WaitError};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Amo, AmoOp, Completion, Fault, Outcome};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

use super::order::{add, hold, set};
use super::support::tap::{Event, Shared, Tap, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

const ADD: Amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };

/// Delays every post until a poll, so that each post is pending.
const LATER: Faults = Faults { hold: 1000, ..Faults::NONE };

fn slow() -> (Shared, Own<Tap<Faulty<Network>>, 1>) {
    let control = shared();
    let own = own(Config::DEFAULT, tap(Faulty::new(Network::new(), LATER, 1), &control), 4096);
    (control, own)
}

#[test]
fn every_reported_operation_completes_once_and_no_silent_one() {
    for seed in seeds(60) {
        let rails: [_; 3] = std::array::from_fn(|i| {
            Faulty::<_, 16>::new(Loopback::<16>::new(), Faults::DISORDER, seed * 3 + i as u64)
        });
        let config = Config { window: 16, ..Config::DEFAULT };
        let mut own = own(config, rails, 4096);
        let mut random = Random(seed);
        let (mut ends, mut tokens, mut reported) = (BTreeMap::new(), vec![], 0);
        let end = |ends: &mut BTreeMap<u64, usize>, done: Completion| {
            assert_eq!(done.outcome, Outcome::Done, "seed {seed}");
            *ends.entry(done.tag).or_default() += 1;
        };
        for tag in 0..200u64 {
            let notice = if random.below(3) == 0 { Notice::Silent } else { Notice::Report(tag) };
            let (from, to) = (own.source.at(0), own.remote.at(64));
            let e = &mut own.engine;
            let kind = random.below(6);
            // A fetch always reports.
            let notice = if kind == 5 { Notice::Report(tag) } else { notice };
            let issued = match kind {
                0 => e.put(CX, from, random.below(100) as usize, to, notice),
                1 => e.get(CX, from, random.below(100) as usize, to, notice),
                2 => e.put_signal(
                    CX,
                    from,
                    random.below(300) as usize,
                    to,
                    set(own.remote, 8, 1),
                    notice,
                ),
                3 => e.signal(CX, add(own.remote, 8, 1), notice),
                4 => e.amo(CX, own.remote.at(16), ADD, notice),
                _ => e.fetch(CX, own.remote.at(16), ADD, tag),
            };
            match issued {
                Ok(Issued::Pending(token)) => tokens.push((token, notice)),
                Ok(Issued::Done { .. }) => panic!("nothing is mapped"),
                Err(error) => {
                    assert_eq!(error, OpError::Again);
                    continue;
                }
            }
            reported += (notice != Notice::Silent) as usize;
            e.progress();
            if random.below(2) == 0 {
                while let Some(done) = e.next_completion() {
                    end(&mut ends, done);
                }
            } else if let Some(&(token, notice)) =
                tokens.get(random.below(tokens.len() as u64) as usize)
            {
                match e.test(token) {
                    Ok(Some(done)) => {
                        assert_eq!((done.token, Notice::Report(done.tag)), (token, notice));
                        end(&mut ends, done);
                        assert_eq!(
                            e.test(token),
                            Err(OpError::StaleToken),
                            "seed {seed}: taken twice"
                        );
                    }
                    Ok(None) => {}
                    Err(error) => assert_eq!(error, OpError::StaleToken),
                }
            }
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        while let Some(done) = own.engine.next_completion() {
            end(&mut ends, done);
        }
        assert!(ends.values().all(|&n| n == 1), "seed {seed}: {ends:?}");
        assert_eq!(ends.len(), reported, "seed {seed}");
        for (token, _) in tokens {
            assert_eq!(own.engine.test(token), Err(OpError::StaleToken));
        }
    }
}

#[test]
fn stale_silent_and_foreign_tokens_are_errors() {
    let mut a = own(Config::DEFAULT, [Network::new()], 4096);
    let mut b = own(Config::DEFAULT, [Network::new()], 4096);
    let silent = pending(a.engine.signal(CX, set(a.remote, 0, 1), Notice::Silent));
    assert_eq!(a.engine.test(silent), Err(OpError::StaleToken));
    let token = pending(a.engine.signal(CX, set(a.remote, 0, 2), Notice::Report(1)));
    assert_eq!(b.engine.test(token), Err(OpError::StaleToken), "of another engine");
    assert_eq!(b.engine.wait(token, &mut b.waiter, SOON), Err(WaitError::Op(OpError::StaleToken)));
    assert_eq!(a.engine.test(token), Ok(None));
    a.engine.wait(token, &mut a.waiter, SOON).unwrap();
    assert_eq!(a.engine.test(token), Err(OpError::StaleToken));
    assert_eq!(a.engine.wait(token, &mut a.waiter, SOON), Err(WaitError::Op(OpError::StaleToken)));
    // The slot is reused. The old token stays stale.
    for _ in 0..10 {
        let next = pending(a.engine.signal(CX, set(a.remote, 0, 2), Notice::Report(1)));
        assert_ne!(next, token);
        assert_eq!(a.engine.test(token), Err(OpError::StaleToken));
        a.engine.wait(next, &mut a.waiter, SOON).unwrap();
    }
}

#[test]
fn a_full_pool_returns_again_and_changes_nothing() {
    let config = Config::DEFAULT;
    let mut engine =
        fishplate_core::engine::Engine::new(config, [Network::new()], memory(&config, 1, 3))
            .unwrap();
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 1).unwrap();
    let target = engine.register(region(64)).unwrap();
    let remote = import(&mut engine, peer, target);
    let tokens: Vec<_> =
        (0..3).map(|n| pending(engine.signal(CX, add(remote, 0, 1), Notice::Report(n)))).collect();
    let before = engine.stats();
    assert_eq!(engine.signal(CX, add(remote, 0, 1), Notice::Report(9)), Err(OpError::Again));
    assert_eq!(
        engine.put(CX, target.at(0), 8, remote.at(8), Notice::Report(9)),
        Err(OpError::Again)
    );
    assert_eq!(engine.get(CX, target.at(0), 8, remote.at(8), Notice::Silent), Err(OpError::Again));
    assert_eq!(engine.fetch(CX, remote.at(8), ADD, 1), Err(OpError::Again));
    assert_eq!(engine.stats(), before);
    passes(&mut engine, 50);
    // Completed operations keep their slots until they are taken. A silent operation with one post
    // needs no slot.
    assert_eq!(engine.signal(CX, add(remote, 0, 1), Notice::Report(9)), Err(OpError::Again));
    assert!(engine.signal(CX, add(remote, 0, 1), Notice::Silent).is_ok());
    assert!(engine.inject(CX, &[1; 8], remote.at(8)).is_ok());
    let got: Vec<_> = std::iter::from_fn(|| engine.next_completion()).collect();
    assert_eq!(got.iter().map(|done| done.token).collect::<Vec<_>>(), tokens, "oldest first");
    passes(&mut engine, 50);
    assert_eq!(word(&engine, target.at(0)), 4);
    assert!(engine.signal(CX, add(remote, 0, 1), Notice::Report(9)).is_ok());
    passes(&mut engine, 50);
    assert_eq!(word(&engine, target.at(0)), 5);
}

#[test]
fn silent_operations_are_open_until_acknowledged_and_posted() {
    let (control, mut own) = slow();
    for n in 0..3 {
        pending(own.engine.put(CX, own.source.at(0), 8, own.remote.at(8 * n), Notice::Silent));
    }
    let write = control.borrow().posts[0].cx;
    let held = hold(&control, move |event| matches!(event, Event::Done(cx, _) if *cx == write));
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    passes(&mut own.engine, 100);
    assert_eq!(held.borrow().len(), 3, "acknowledged, but the buffers are still in use");
    for left in (0..3).rev() {
        assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
        let stuck = own.engine.quiet(CX, own.peer, &mut own.waiter, 0).unwrap_err();
        assert!(
            matches!(stuck, WaitError::Deadline(Stuck { rail: Some(_), hole: None, .. })),
            "{stuck:?}"
        );
        let one = held.borrow_mut().pop().unwrap();
        let mut open = control.borrow_mut();
        let hold = open.edit.take();
        open.inject.push_back(one);
        drop(open);
        own.engine.progress();
        control.borrow_mut().edit = hold;
        assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(left == 0), "{left} left");
    }
}

#[test]
fn an_operation_completes_after_all_its_posts() {
    let (control, mut own) = slow();
    let held = hold(&control, |event| matches!(event, Event::Done(..)));
    let put =
        pending(own.engine.put(CX, own.source.at(0), 32, own.remote.at(64), Notice::Report(1)));
    let get =
        pending(own.engine.get(CX, own.source.at(64), 32, own.remote.at(64), Notice::Report(2)));
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    passes(&mut own.engine, 100);
    assert_eq!(
        (own.engine.test(put), own.engine.test(get)),
        (Ok(None), Ok(None)),
        "the buffers are still in use"
    );
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    control.borrow_mut().edit = None;
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    for token in [put, get] {
        assert_eq!(own.engine.wait(token, &mut own.waiter, SOON).unwrap().outcome, Outcome::Done);
    }
}

#[test]
fn i8_an_operation_completes_after_its_acknowledgement() {
    let (control, mut own) = slow();
    let held = hold(&control, |event| matches!(event, Event::Landed(..)));
    let put =
        pending(own.engine.put(CX, own.source.at(0), 32, own.remote.at(64), Notice::Report(1)));
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    passes(&mut own.engine, 100);
    assert_eq!(own.engine.test(put), Ok(None));
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    assert_eq!(own.engine.wait(put, &mut own.waiter, SOON).unwrap().outcome, Outcome::Done);
}

#[test]
fn e9_a_fetch_completes_with_its_reply() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    let held = hold(&control, |event| matches!(event, Event::Message(_, bytes) if bytes[0] == 4));
    let fetch = pending(own.engine.fetch(CX, own.remote.at(0), ADD, 7));
    pass_until(&mut own.engine, "the reply", |_| held.borrow().len() == 1);
    // A later signal's acknowledgement also acknowledges the atomic.
    let later = pending(own.engine.signal(CX, set(own.remote, 8, 1), Notice::Report(8)));
    own.engine.wait(later, &mut own.waiter, SOON).unwrap();
    assert_eq!(own.engine.test(fetch), Ok(None), "acknowledged, but the value is not here");
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    control.borrow_mut().edit = None;
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    let done = own.engine.wait(fetch, &mut own.waiter, SOON).unwrap();
    assert_eq!((done.value, done.tag, done.outcome), (0, 7, Outcome::Done));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
}

#[test]
fn a_failed_read_affects_no_other_operation() {
    for (result, want) in [
        (
            CompleteError::Failed(-5),
            Outcome::Failed(Fault::Rail(RailId(0), CompleteError::Failed(-5))),
        ),
        (
            CompleteError::Unknown(-6),
            Outcome::Unknown(Fault::Rail(RailId(0), CompleteError::Unknown(-6))),
        ),
    ] {
        let (control, mut own) = slow();
        control.borrow_mut().edit = Some(Box::new(move |_, event| match event {
            Event::Done(cx, _) => vec![Event::Done(cx, Err(result))],
            event => vec![event],
        }));
        let get =
            pending(own.engine.get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Report(3)));
        assert_eq!(own.engine.wait(get, &mut own.waiter, SOON).unwrap().outcome, want);
        control.borrow_mut().edit = None;
        assert_eq!(own.engine.peer_error(own.peer), Ok(None));
        own.engine.signal(CX, set(own.remote, 0, 5), Notice::Silent).unwrap();
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        assert_eq!(word(&own.engine, own.target.at(0)), 5);
    }
}

#[test]
fn a_permanently_refused_post_fails_only_its_operation() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    control.borrow_mut().refuse =
        Some(Box::new(|post| (post.verb == Verb::Write).then_some(PostError::Provider(-77))));
    let put = pending(own.engine.put(CX, own.source.at(0), 8, own.remote.at(0), Notice::Report(1)));
    let signal = set(own.remote, 64, 9);
    let both = pending(own.engine.put_signal(
        CX,
        own.source.at(0),
        300,
        own.remote.at(0),
        signal,
        Notice::Report(2),
    ));
    let fault = Fault::Post(RailId(0), PostError::Provider(-77));
    for token in [put, both] {
        assert_eq!(
            own.engine.wait(token, &mut own.waiter, SOON).unwrap().outcome,
            Outcome::Failed(fault)
        );
    }
    assert_eq!(
        own.engine.inject(CX, &[1], own.remote.at(0)),
        Err(OpError::Rail(RailId(0), PostError::Provider(-77)))
    );
    control.borrow_mut().refuse = None;
    own.engine.signal(CX, set(own.remote, 72, 5), Notice::Silent).unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(word(&own.engine, own.target.at(64)), 0, "the signal of a failed put was sent");
    assert_eq!(word(&own.engine, own.target.at(72)), 5, "the stream goes on without a hole");
}

#[test]
fn quiet_counts_silent_failures_once() {
    let control = shared();
    let mut own =
        own(Config { contexts: 2, ..Config::DEFAULT }, tap(Network::new(), &control), 4096);
    control.borrow_mut().refuse =
        Some(Box::new(|post| (post.verb == Verb::Read).then_some(PostError::Provider(-7))));
    for _ in 0..3 {
        own.engine.get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Silent).unwrap();
    }
    own.engine.get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Report(1)).unwrap();
    let other = fishplate_core::engine::ContextId(1);
    assert_eq!(
        own.engine.quiet(other, own.peer, &mut own.waiter, SOON),
        Ok(()),
        "not of that context"
    );
    assert_eq!(own.engine.quiet(CX, own.peer, &mut own.waiter, SOON), Err(WaitError::Failed(3)));
    assert_eq!(own.engine.quiet(CX, own.peer, &mut own.waiter, SOON), Ok(()));
    own.engine.get(CX, own.source.at(0), 8, own.remote.at(0), Notice::Silent).unwrap();
    assert_eq!(own.engine.quiet_all(CX, &mut own.waiter, SOON), Err(WaitError::Failed(1)));
    assert_eq!(own.engine.quiet_all(CX, &mut own.waiter, SOON), Ok(()));
}

#[test]
fn a_failed_numbered_post_breaks_the_stream_with_unknown_outcome() {
    let (control, mut own) = slow();
    control.borrow_mut().edit = Some(Box::new(|_, event| match event {
        // Fails all posts of operations. Posts of acknowledgements belong to no operation, and
        // succeed.
        Event::Done(cx, _) if cx >> 63 == 0 => {
            vec![Event::Done(cx, Err(CompleteError::Failed(-5)))]
        }
        event => vec![event],
    }));
    let put =
        pending(own.engine.put(CX, own.source.at(0), 300, own.remote.at(64), Notice::Report(1)));
    let fault = Fault::Rail(RailId(0), CompleteError::Failed(-5));
    let done = own.engine.wait(put, &mut own.waiter, SOON).unwrap();
    assert_eq!(done.outcome, Outcome::Unknown(fault));
    let why = PeerError::Rail(RailId(0));
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(why)));
    assert_eq!(
        own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent),
        Err(OpError::PeerFailed(why))
    );
    assert_eq!(
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON),
        Err(WaitError::PeerFailed(own.peer, why))
    );
}

#[test]
fn an_empty_operation_completes_at_once_and_in_order() {
    let mut own = own(Config::DEFAULT, [Network::new()], 4096);
    let put =
        pending(own.engine.put(CX, own.source.at(0), 0, own.remote.at(4096), Notice::Report(1)));
    let get =
        pending(own.engine.get(CX, own.source.at(4096), 0, own.remote.at(0), Notice::Report(2)));
    own.engine.inject(CX, &[], own.remote.at(4096)).unwrap();
    for token in [put, get] {
        assert_eq!(own.engine.test(token).unwrap().unwrap().outcome, Outcome::Done);
    }
    assert_eq!(own.engine.stats().posted, 0);
    let signal = set(own.remote, 0, 1);
    own.engine
        .put_signal(CX, own.source.at(0), 0, own.remote.at(4096), signal, Notice::Silent)
        .unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(word(&own.engine, own.target.at(0)), 1);
}
