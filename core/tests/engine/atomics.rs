//! Atomics: every operation at every width, once, in order, by message or by the rail itself.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::PostError;
use fishplate_core::op::{Amo, AmoOp, Outcome};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::{Caps, Order, Rail};

use super::order::{add, hold, set};
use super::support::oracle::{OPS, model};
use super::support::tap::{Event, Shared, Tap, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

/// A rail that executes atomics and says that it orders everything, which is what the engine asks
/// of one that it hands them to.
fn native<const DEPTH: usize>(control: &Shared) -> [Tap<Loopback<DEPTH>>; 1] {
    control.borrow_mut().caps = Some(|caps| Caps { order: Order::All, ..caps });
    tap(Loopback::new().with_native_atomics(), control)
}

fn every_operation<R: Rail, const RAILS: usize>(rails: [R; RAILS]) {
    let mut own = own(Config { window: 8, ..Config::DEFAULT }, rails, 4096);
    let mut random = Random(RAILS as u64);
    let mut words = [[0u64; 4]; 2];
    for round in 0..3 {
        for op in OPS {
            for (n, width) in [1u8, 2, 4, 8].into_iter().enumerate() {
                for fetch in [false, true] {
                    let old = &mut words[fetch as usize][n];
                    let compare = if random.below(2) == 0 { *old } else { random.next() };
                    let amo = Amo { op, width, operand: random.next(), compare };
                    let at = own.remote.at(fetch as u64 * 64 + n as u64 * 16 + 8);
                    let token = pending(match fetch {
                        true => own.engine.fetch(CX, at, amo, round),
                        false => own.engine.amo(CX, at, amo, Notice::Report(round)),
                    });
                    let done = own.engine.wait(token, &mut own.waiter, SOON).unwrap();
                    assert_eq!(done.outcome, Outcome::Done);
                    assert_eq!(done.value, if fetch { *old } else { 0 }, "{amo:?}");
                    *old = model(&amo, *old);
                    let near = read(&own.engine, own.target.at(fetch as u64 * 64 + n as u64 * 16), 24);
                    let mut want = [0; 24];
                    want[8..16].copy_from_slice(&old.to_le_bytes());
                    assert_eq!(near[..16], want[..16], "{amo:?}");
                }
            }
        }
    }
}

#[test]
fn every_operation_at_every_width_fetching_or_not() {
    every_operation([Network::new()]);
    every_operation(native::<64>(&shared()));
    every_operation_in_disorder::<1>();
    every_operation_in_disorder::<2>();
    every_operation_in_disorder::<4>();
}

fn every_operation_in_disorder<const RAILS: usize>() {
    let faulty = |i: usize| Faulty::<_, 16>::new(Network::new(), Faults::DISORDER, 7 + i as u64);
    every_operation(std::array::from_fn::<_, RAILS, _>(faulty));
}

#[test]
fn an_atomic_keeps_its_place_between_signals() {
    for fetch in [false, true] {
        let control = shared();
        let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
        let held = hold(&control, |event| matches!(event, Event::Landed(..)));
        let double = Amo { op: AmoOp::Add, width: 8, operand: 100, compare: 0 };
        own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
        own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
        let amo = match fetch {
            true => pending(own.engine.fetch(CX, own.remote.at(0), double, 1)),
            false => pending(own.engine.amo(CX, own.remote.at(0), double, Notice::Report(1))),
        };
        own.engine.signal(CX, set(own.remote, 8, 1), Notice::Silent).unwrap();
        passes(&mut own.engine, 40);
        assert_eq!((word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))), (0, 0));
        control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        let done = own.engine.wait(amo, &mut own.waiter, SOON).unwrap();
        assert_eq!(done.value, fetch as u64);
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        assert_eq!((word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))), (101, 1));
    }
}

#[test]
fn a_fetch_is_executed_once_although_its_reply_finds_no_room() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    let mut refusals = 0;
    control.borrow_mut().refuse = Some(Box::new(move |post| {
        let reply = post.verb == Verb::Message && post.bytes[0] == 4;
        refusals += reply as u32;
        (reply && refusals % 8 != 0).then_some(PostError::Again)
    }));
    for n in 0..20u64 {
        let amo = Amo { op: AmoOp::Add, width: 8, operand: 3, compare: 0 };
        let first = pending(own.engine.fetch(CX, own.remote.at(0), amo, n));
        let second = pending(own.engine.fetch(CX, own.remote.at(0), amo, n));
        own.engine.signal(CX, add(own.remote, 8, 1), Notice::Silent).unwrap();
        let values =
            [first, second].map(|token| own.engine.wait(token, &mut own.waiter, SOON).unwrap().value);
        assert_eq!(values, [6 * n, 6 * n + 3]);
    }
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!((word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))), (120, 20));
}

#[test]
fn a_fetch_reads_what_the_stream_wrote_before_it() {
    for seed in seeds(60) {
        let rails: [_; 3] = std::array::from_fn(|i| {
            Faulty::<_, 16>::new(Loopback::<16>::new(), Faults::DISORDER, seed * 3 + i as u64)
        });
        let mut own = own(Config { window: 8, ..Config::DEFAULT }, rails, 4096);
        let fetch = Amo { op: AmoOp::Fetch, width: 8, operand: 0, compare: 0 };
        let tokens: Vec<_> = (0..20u64)
            .map(|n| {
                own.engine.signal(CX, set(own.remote, 0, n + 1), Notice::Silent).unwrap();
                let token = pending(own.engine.fetch(CX, own.remote.at(0), fetch, n));
                own.engine.signal(CX, set(own.remote, 0, 1000), Notice::Silent).unwrap();
                token
            })
            .collect();
        for (n, token) in tokens.into_iter().enumerate() {
            let done = own.engine.wait(token, &mut own.waiter, SOON).unwrap();
            assert_eq!(done.value, n as u64 + 1, "seed {seed}");
        }
    }
}

#[test]
fn native_atomics_keep_their_place_in_the_order() {
    for seed in seeds(60) {
        let control = shared();
        let config = Config { window: 4, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let mut own = own(config, native::<16>(&control), 4096);
        let mut random = Random(seed);
        let mut tokens = vec![];
        let mut value = 0u64;
        for n in 0..100u64 {
            let amo = Amo { op: OPS[random.below(9) as usize], width: 8, operand: n * 3 + 1, compare: value };
            match random.below(4) {
                0 => {
                    own.engine.signal(CX, add(own.remote, 0, n), Notice::Silent).unwrap();
                    value = value.wrapping_add(n);
                }
                1 => {
                    own.engine.put(CX, own.source.at(0), 16, own.remote.at(64), Notice::Silent).unwrap();
                }
                2 => {
                    own.engine.amo(CX, own.remote.at(0), amo, Notice::Silent).unwrap();
                    value = model(&amo, value);
                }
                _ => {
                    tokens.push((pending(own.engine.fetch(CX, own.remote.at(0), amo, n)), value));
                    value = model(&amo, value);
                }
            }
            if random.below(3) == 0 {
                own.engine.progress();
            }
            if random.below(6) == 0 {
                own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
                assert_eq!(word(&own.engine, own.target.at(0)), value, "seed {seed}");
            }
        }
        for (token, want) in tokens {
            let done = own.engine.wait(token, &mut own.waiter, SOON).unwrap();
            assert_eq!(done.value, want, "seed {seed}");
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        assert_eq!(word(&own.engine, own.target.at(0)), value, "seed {seed}");
        assert!(
            control.borrow().posts.iter().any(|post| post.verb == Verb::Atomic),
            "seed {seed}: none was native"
        );
    }
}

#[test]
fn an_atomic_that_the_rail_does_not_have_goes_as_a_message() {
    let control = shared();
    let mut own = own(Config::DEFAULT, native::<64>(&control), 4096);
    control.borrow_mut().refuse =
        Some(Box::new(|post| (post.verb == Verb::Atomic && post.len < 4).then_some(PostError::Unsupported)));
    for width in [1u8, 2, 4, 8] {
        let amo = Amo { op: AmoOp::Add, width, operand: 5, compare: 0 };
        for n in 0..3 {
            let token = pending(own.engine.fetch(CX, own.remote.at(width as u64 * 8), amo, 0));
            let done = own.engine.wait(token, &mut own.waiter, SOON).unwrap();
            assert_eq!((done.outcome, done.value), (Outcome::Done, 5 * n), "{width} bytes");
        }
    }
    let control = control.borrow();
    assert!(control.posts.iter().all(|post| post.verb != Verb::Atomic || post.len >= 4));
    assert!(control.posts.iter().any(|post| post.verb == Verb::Atomic));
}
