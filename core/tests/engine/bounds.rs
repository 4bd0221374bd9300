//! Bounds: small windows, queues and pools never deadlock. A pass handles at most one batch of
//! events, and no call recurses.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::OpError;
use fishplate_core::op::{Amo, AmoOp};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;

use super::order::{add, hold, set};
use super::support::tap::{Event, Tap, shared, tap};
use super::support::*;

/// Issues `count` operations of all kinds. Repeats an operation while the engine has no room for
/// it.
fn traffic<R: Rail, const RAILS: usize>(own: &mut Own<R, RAILS>, count: u64, seed: u64) {
    let mut random = Random(seed);
    let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    let (mut signals, mut incs) = (0, 0);
    for n in 0..count {
        let (from, to) = (own.source.at(0), own.remote.at(64));
        for tries in 0.. {
            assert!(tries < 100_000, "stuck at {n}: {:?}", own.engine.stats());
            let e = &mut own.engine;
            let result = match n % 6 {
                0 => e.put(CX, from, 300, to, Notice::Silent).map(drop),
                1 => e
                    .put_signal(
                        CX,
                        from,
                        random.below(400) as usize,
                        to,
                        add(own.remote, 0, 1),
                        Notice::Silent,
                    )
                    .map(drop),
                2 => e.fetch(CX, own.remote.at(8), amo, n).map(drop),
                3 => e.get(CX, from, 64, to, Notice::Silent).map(drop),
                4 => e.inject(CX, &[7; 24], own.remote.at(1024)),
                _ => e.amo(CX, own.remote.at(8), amo, Notice::Silent).map(drop),
            };
            match result {
                Ok(()) => break,
                Err(error) => assert_eq!(error, OpError::Again),
            }
            e.progress();
            while e.next_completion().is_some() {}
        }
        signals += (n % 6 == 1) as u64;
        incs += matches!(n % 6, 2 | 5) as u64;
    }
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(
        (word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))),
        (signals, incs)
    );
}

fn small<const RAILS: usize>() {
    for window in [1, 2, 4, 8] {
        for batch in [1, 2, 32] {
            let config = Config {
                window,
                batch,
                stripe_threshold: 100,
                stripe_chunk: 40,
                first_sequence: u64::MAX - 20,
                ..Config::DEFAULT
            };
            let mut own = own(config, [const { Loopback::<4>::new() }; RAILS], 4096);
            traffic(&mut own, 120, window as u64);
        }
    }
}

#[test]
fn i9_the_smallest_rails_windows_and_batches_work() {
    small::<1>();
    small::<2>();
    small::<3>();
    small::<4>();
}

#[test]
fn i9_a_pool_of_one_operation_works() {
    let config = Config { window: 1, batch: 1, ..Config::DEFAULT };
    let mut engine =
        fishplate_core::engine::Engine::new(config, [Loopback::<4>::new()], memory(&config, 1, 1))
            .unwrap();
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 1).unwrap();
    let source = engine.register(region(4096)).unwrap();
    let target = engine.register(region(4096)).unwrap();
    let remote = import(&mut engine, peer, target);
    traffic(&mut Own { engine, peer, waiter: waiter(), source, target, remote }, 60, 1);
}

#[test]
fn i10_a_poll_gets_a_batch_as_budget_and_e7_nothing_recurses() {
    for batch in [1, 3, 32] {
        let control = shared();
        let rails: [_; 3] = std::array::from_fn(|i| Tap::new(Loopback::<8>::new(), i, &control));
        let config = Config {
            batch,
            window: 16,
            stripe_threshold: 100,
            stripe_chunk: 40,
            ..Config::DEFAULT
        };
        traffic(&mut own(config, rails, 4096), 300, batch as u64);
        // The tap asserts that nothing is posted from inside a report.
        assert_eq!(control.borrow().budget, batch);
        assert!(control.borrow().reported <= batch && control.borrow().reported > 0);
    }
}

#[test]
fn i10_a_pass_applies_at_most_a_batch_of_a_stream() {
    for batch in [1u32, 2, 5] {
        let control = shared();
        let mut own =
            own(Config { batch, ..Config::DEFAULT }, tap(Loopback::<64>::new(), &control), 4096);
        let held = hold(&control, |event| matches!(event, Event::Landed(..)));
        own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
        for _ in 0..30 {
            own.engine.signal(CX, add(own.remote, 0, 1), Notice::Silent).unwrap();
        }
        passes(&mut own.engine, 60);
        assert_eq!(own.engine.stats().applied, 0);
        control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        let (mut before, mut count) = (0, 0);
        while before < 30 {
            own.engine.progress();
            let now = own.engine.stats().applied;
            assert!(now - before <= batch as u64, "{} in one pass of {batch}", now - before);
            before = now;
            count += 1;
            assert!(count < 100, "parked messages were examined again");
        }
    }
}

#[test]
fn i10_one_busy_stream_does_not_starve_another() {
    let config = Config { batch: 1, contexts: 4, window: 8, ..Config::DEFAULT };
    let mut own = own(config, [Loopback::<4>::new()], 4096);
    let context = fishplate_core::engine::ContextId;
    let mut done = [0u64; 4];
    for turn in 0..4000u32 {
        for n in (0..4).map(|i| ((turn + i) % 4) as u8) {
            done[n as usize] += own
                .engine
                .signal(context(n), add(own.remote, n as u64 * 8, 1), Notice::Silent)
                .is_ok() as u64;
        }
        own.engine.progress();
    }
    let words: Vec<u64> = (0..4).map(|n| word(&own.engine, own.target.at(n * 8))).collect();
    assert!(words.iter().all(|&n| n > 100), "{words:?} of {done:?}");
}

#[test]
fn a_put_in_many_pieces_is_posted_over_several_passes() {
    let control = shared();
    let config = Config { batch: 4, stripe_threshold: 8, stripe_chunk: 8, ..Config::DEFAULT };
    let rails: [_; 2] = std::array::from_fn(|i| Tap::new(Loopback::<64>::new(), i, &control));
    let mut own = own(config, rails, 4096);
    own.engine.put(CX, own.source.at(0), 400, own.remote.at(64), Notice::Silent).unwrap();
    assert_eq!(control.borrow().posts.len(), 4, "a batch at once");
    for n in 2..6 {
        own.engine.progress();
        assert_eq!(control.borrow().posts.iter().filter(|post| post.data.is_some()).count(), 4 * n);
    }
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(control.borrow().posts.iter().filter(|post| post.data.is_some()).count(), 50);
    assert!(
        control.borrow().posts.iter().any(|p| p.rail == 0)
            && control.borrow().posts.iter().any(|p| p.rail == 1)
    );
}

#[test]
fn e6_a_parked_message_is_a_copy() {
    // The tap frees the bytes of each message after reporting it. 60 messages wait for one write.
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Loopback::<64>::new(), &control), 4096);
    let held = hold(&control, |event| matches!(event, Event::Landed(..)));
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    for n in 0..60 {
        own.engine.signal(CX, set(own.remote, 256 + n * 8, n + 1), Notice::Silent).unwrap();
        own.engine.progress();
    }
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    for n in 0..60 {
        assert_eq!(word(&own.engine, own.target.at(256 + n * 8)), n + 1);
    }
}

#[test]
fn an_inject_without_room_changes_nothing() {
    let control = shared();
    let rails: [_; 2] = std::array::from_fn(|i| Tap::new(Loopback::<64>::new(), i, &control));
    let config = Config { window: 2, stripe_threshold: 16, stripe_chunk: 8, ..Config::DEFAULT };
    let mut own = own(config, rails, 4096);
    control.borrow_mut().mute = true;
    own.engine.inject(CX, &[1; 64], own.remote.at(0)).unwrap();
    own.engine.inject(CX, &[2; 64], own.remote.at(64)).unwrap();
    let before = own.engine.stats();
    for _ in 0..5 {
        assert_eq!(own.engine.inject(CX, &[3; 64], own.remote.at(128)), Err(OpError::Again));
    }
    assert_eq!(own.engine.stats(), before);
    control.borrow_mut().mute = false;
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(read(&own.engine, own.target.at(0), 64), [1; 64]);
    assert_eq!(read(&own.engine, own.target.at(64), 64), [2; 64]);
    assert_eq!(read(&own.engine, own.target.at(128), 64), [0; 64]);
    own.engine.inject(CX, &[3; 64], own.remote.at(128)).unwrap();
    assert!(own.engine.inject(CX, &[4; 64], own.remote.at(4033)).is_err());
}
