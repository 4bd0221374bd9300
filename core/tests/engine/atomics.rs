//! Atomics: every operation at every width is executed once and in order, by message or by the
//! rail.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{AttachError, CompleteError, OpError, PeerError, PostError};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Amo, AmoOp, AmoSet, Fault, Outcome};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::{Caps, Order, Rail};

use super::order::{add, hold, set};
use super::support::oracle::{OPS, model};
use super::support::tap::{Event, Shared, Tap, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

/// Returns rails that execute atomics and preserve no order.
fn native<const DEPTH: usize, const RAILS: usize>(
    control: &Shared,
) -> [Tap<Loopback<DEPTH>>; RAILS] {
    control.borrow_mut().caps = Some(|caps| Caps { order: Order::None, ..caps });
    std::array::from_fn(|rail| Tap::new(Loopback::new().with_native_atomics(), rail, control))
}

fn every_operation<R: Rail, const RAILS: usize>(rails: [R; RAILS]) {
    let native = !rails[0].caps().native_atomics.is_empty();
    let mut own = own(Config { window: 8, ..Config::DEFAULT }, rails, 4096);
    if native {
        (own.target, own.remote) = words(&mut own);
    }
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
                    let near =
                        read(&own.engine, own.target.at(fetch as u64 * 64 + n as u64 * 16), 24);
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
    every_operation(native::<64, 1>(&shared()));
    every_operation(native::<64, 3>(&shared()));
    every_operation_in_disorder::<1>();
    every_operation_in_disorder::<2>();
    every_operation_in_disorder::<4>();
}

fn every_operation_in_disorder<const RAILS: usize>() {
    let faulty = |i: usize| Faulty::<_, 16>::new(Network::new(), Faults::DISORDER, 7 + i as u64);
    every_operation(std::array::from_fn::<_, RAILS, _>(faulty));
}

#[test]
fn an_atomic_is_ordered_between_signals() {
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
        assert_eq!(
            (word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))),
            (0, 0)
        );
        control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        let done = own.engine.wait(amo, &mut own.waiter, SOON).unwrap();
        assert_eq!(done.value, fetch as u64);
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        assert_eq!(
            (word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))),
            (101, 1)
        );
    }
}

/// The program may run the next pass much later, so the fetch must not need another pass.
#[test]
fn a_fetch_completes_in_the_pass_that_reads_its_reply() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::new(), &control), 4096);
    for n in 0..5u64 {
        let held =
            hold(&control, |event| matches!(event, Event::Message(_, bytes) if bytes[0] == 4));
        let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
        let token = pending(own.engine.fetch(CX, own.remote.at(0), amo, n));
        passes(&mut own.engine, 100);
        assert_eq!((held.borrow().len(), own.engine.test(token).unwrap()), (1, None));
        control.borrow_mut().edit = None;
        control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        own.engine.progress();
        let done = own.engine.test(token).unwrap().expect("no completion after one pass");
        assert_eq!((done.outcome, done.value), (Outcome::Done, n));
    }
}

#[test]
fn a_fetch_is_executed_once_even_if_its_reply_finds_no_room() {
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
        let values = [first, second]
            .map(|token| own.engine.wait(token, &mut own.waiter, SOON).unwrap().value);
        assert_eq!(values, [6 * n, 6 * n + 3]);
    }
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(
        (word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))),
        (120, 20)
    );
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

/// At any time the applied operations are a prefix of the issued ones, whatever the rails delay.
#[test]
fn native_atomics_are_ordered() {
    for seed in seeds(60) {
        let control = shared();
        let config =
            Config { window: 4, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let mut own = own(config, native::<16, 2>(&control), 4096);
        let (here, there) = words(&mut own);
        let held = hold(&control, {
            let mut random = Random(!seed);
            move |_| random.below(2) == 0
        });
        let mut random = Random(seed);
        // The number of signals and of atomics issued so far, and both counts before each
        // operation.
        let (mut issued, mut prefixes) = ((0, 0), vec![(0, 0)]);
        let add = |operand| Amo { op: AmoOp::Add, width: 8, operand, compare: 0 };
        let mut tokens = vec![];
        for n in 0..100u64 {
            match random.below(4) {
                0 => {
                    own.engine
                        .signal(CX, set(own.remote, 0, issued.0 + 1), Notice::Silent)
                        .unwrap();
                    issued.0 += 1;
                }
                1 => {
                    own.engine
                        .put(CX, own.source.at(0), 16, own.remote.at(64), Notice::Silent)
                        .unwrap();
                }
                2 => {
                    own.engine.amo(CX, there.at(0), add(1), Notice::Silent).unwrap();
                    issued.1 += 1;
                }
                _ => {
                    tokens.push((pending(own.engine.fetch(CX, there.at(0), add(1), n)), issued.1));
                    issued.1 += 1;
                }
            }
            prefixes.push(issued);
            for _ in 0..random.below(4) {
                own.engine.progress();
                let applied = (word(&own.engine, own.target.at(0)), word(&own.engine, here.at(0)));
                assert!(prefixes.contains(&applied), "seed {seed}: {applied:?} of {prefixes:?}");
            }
            control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        }
        control.borrow_mut().edit = None;
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        let applied = (word(&own.engine, own.target.at(0)), word(&own.engine, here.at(0)));
        assert_eq!(applied, issued, "seed {seed}");
        for (token, want) in tokens {
            let done = own.engine.wait(token, &mut own.waiter, SOON).unwrap();
            assert_eq!((done.outcome, done.value), (Outcome::Done, want), "seed {seed}");
        }
        let posts = &control.borrow().posts;
        assert_eq!(posts.iter().filter(|post| post.verb == Verb::Atomic).count() as u64, issued.1);
    }
}

#[test]
fn nothing_later_is_posted_before_a_native_atomic_has_completed() {
    let control = shared();
    let mut own = own(Config::DEFAULT, native::<64, 1>(&control), 4096);
    let (_, there) = words(&mut own);
    let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    let held = hold(&control, |event| matches!(event, Event::Done(..)));
    let token = pending(own.engine.fetch(CX, there.at(0), amo, 1));
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    own.engine.amo(CX, there.at(0), amo, Notice::Silent).unwrap();
    passes(&mut own.engine, 40);
    let verbs =
        |control: &Shared| control.borrow().posts.iter().map(|post| post.verb).collect::<Vec<_>>();
    assert_eq!(
        verbs(&control).iter().filter(|&&verb| verb != Verb::Message).count(),
        1,
        "the atomic alone"
    );
    assert_eq!(word(&own.engine, own.target.at(0)), 0);
    assert_eq!(own.engine.test(token), Ok(None));
    // The later atomic has not been posted, and the stream is not quiet.
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    control.borrow_mut().edit = None;
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(own.engine.test(token).unwrap().map(|done| done.value), Some(0));
    assert_eq!(word(&own.engine, own.target.at(0)), 1);
    assert_eq!(verbs(&control).iter().filter(|&&verb| verb == Verb::Atomic).count(), 2);
}

#[test]
fn what_is_not_a_native_atomic_is_refused_in_such_a_region() {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| {
        let some = AmoSet::of(|op, width| op == AmoOp::Add && width == 8);
        Caps { native_atomics: some, ..caps }
    });
    let mut own = own(Config::DEFAULT, tap(Network::new().with_native_atomics(), &control), 4096);
    let (here, there) = words(&mut own);
    let refused = Err(OpError::NativeAtomics);
    assert_eq!(own.engine.signal(CX, set(there, 0, 1), Notice::Silent), refused);
    let signal = add(there, 8, 1);
    let put =
        own.engine.put_signal(CX, own.source.at(0), 8, own.remote.at(0), signal, Notice::Silent);
    assert_eq!(put, refused);
    assert_eq!(own.engine.inject(CX, &[1], there.at(0)), Err(OpError::NativeAtomics));
    for (op, width) in [(AmoOp::Add, 4), (AmoOp::Inc, 8), (AmoOp::Fetch, 8)] {
        let amo = Amo { op, width, operand: 1, compare: 0 };
        let refused = Err(OpError::Rail(RailId(0), PostError::Unsupported));
        assert_eq!(own.engine.amo(CX, there.at(0), amo, Notice::Silent), refused);
        assert_eq!(own.engine.fetch(CX, there.at(0), amo, 0), refused);
    }
    let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
    let misaligned = Err(OpError::Misaligned { offset: 4, width: 8 });
    assert_eq!(own.engine.amo(CX, there.at(4), amo, Notice::Silent), misaligned);
    let outside = Err(OpError::OutOfBounds { offset: 256, len: 8, size: 256 });
    assert_eq!(own.engine.amo(CX, there.at(256), amo, Notice::Silent), outside);
    assert_eq!(control.borrow().posts.len(), 0, "nothing of that was posted");
    // Puts and gets still work in this region.
    write(&own.engine, own.source.at(0), &[7; 64]);
    own.engine.put(CX, own.source.at(0), 64, there.at(64), Notice::Silent).unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(read(&own.engine, here.at(64), 64), [7; 64]);
    own.engine.put(CX, here.at(64), 64, own.remote.at(0), Notice::Silent).unwrap();
    let get = pending(own.engine.get(CX, own.source.at(64), 64, there.at(64), Notice::Report(0)));
    own.engine.wait(get, &mut own.waiter, SOON).unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(read(&own.engine, own.target.at(0), 64), [7; 64]);
    assert_eq!(read(&own.engine, own.source.at(64), 64), [7; 64]);
    // Registration fails if no rail executes atomics.
    control.borrow_mut().caps = Some(|caps| Caps { native_atomics: AmoSet::NONE, ..caps });
    let refused = own.engine.register(region(64).with_native_atomics());
    assert_eq!(refused, Err(AttachError::Unsupported));
}

#[test]
fn a_native_atomic_that_fails_or_whose_peer_fails_says_so() {
    for gone in [false, true] {
        let control = shared();
        let mut own = own(Config::DEFAULT, native::<64, 1>(&control), 4096);
        let (_, there) = words(&mut own);
        let held = hold(&control, |event| matches!(event, Event::Done(..)));
        let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
        let token = pending(own.engine.fetch(CX, there.at(0), amo, 1));
        passes(&mut own.engine, 4);
        let events = held.borrow_mut().drain(..).collect::<Vec<_>>();
        let failed = events.into_iter().map(|event| match event {
            Event::Done(cx, _) => Event::Done(cx, Err(CompleteError::Failed(5))),
            other => other,
        });
        control.borrow_mut().edit = None;
        if gone {
            control.borrow_mut().inject.push_back(Event::Down(own.peer.peer(), PeerError::Lost));
        }
        control.borrow_mut().inject.extend(failed);
        let mut end = None;
        pass_until(&mut own.engine, "the end", |engine| {
            end = engine.test(token).unwrap();
            end.is_some()
        });
        let outcome = end.unwrap().outcome;
        match gone {
            true => assert!(matches!(outcome, Outcome::Unknown(Fault::Peer(_))), "{outcome:?}"),
            false => {
                let fault = Fault::Rail(RailId(0), CompleteError::Failed(5));
                assert_eq!(outcome, Outcome::Failed(fault));
                // The stream continues after the failed atomic.
                own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
                own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
            }
        }
    }
}
