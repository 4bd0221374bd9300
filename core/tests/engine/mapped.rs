//! Mapped memory: operations behave as on other memory, complete at once, and never overtake
//! operations in flight.

use std::ptr::NonNull;

use fishplate_core::engine::{Config, HANDLE_MAX, Issued, Notice};
use fishplate_core::error::{AttachError, OpError, PeerError};
use fishplate_core::mem::{Region, RegionKind};
use fishplate_core::op::{Amo, AmoOp, SignalOp};
use fishplate_core::rail::loopback::Loopback;

use super::order::{add, hold, set};
use super::support::oracle::{OPS, model};
use super::support::tap::{Event, shared, tap};
use super::support::*;

type Network = Loopback<64>;

const DONE: Result<Issued, OpError> = Ok(Issued::Done { value: 0 });

#[test]
fn mapped_operations_complete_on_return_without_posts() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::mapped(), &control), 4096);
    write(&own.engine, own.source.at(0), b"at once");
    assert_eq!(own.engine.put(CX, own.source.at(0), 7, own.remote.at(64), Notice::Report(1)), DONE);
    assert_eq!(read(&own.engine, own.target.at(64), 7), b"at once");
    let signal = add(own.remote, 0, 3);
    assert_eq!(
        own.engine.put_signal(
            CX,
            own.source.at(0),
            300,
            own.remote.at(1000),
            signal,
            Notice::Report(1)
        ),
        DONE
    );
    assert_eq!(own.engine.signal(CX, set(own.remote, 8, 9), Notice::Report(1)), DONE);
    own.engine.inject(CX, b"copied", own.remote.at(128)).unwrap();
    assert_eq!(
        own.engine.get(CX, own.source.at(512), 6, own.remote.at(128), Notice::Report(1)),
        DONE
    );
    assert_eq!(read(&own.engine, own.source.at(512), 6), b"copied");
    own.engine.fence(CX, own.peer).unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, 0).unwrap();
    assert_eq!((word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))), (3, 9));
    assert_eq!(own.engine.next_completion(), None);
    assert!(control.borrow().posts.is_empty() && control.borrow().polls == 0);
}

#[test]
fn atomics_are_the_same_as_by_message() {
    let mut own = own(Config::DEFAULT, [Network::mapped()], 4096);
    let (mut random, mut words) = (Random(3), [0u64; 4]);
    for _ in 0..300 {
        let n = random.below(4) as usize;
        let op = OPS[random.below(9) as usize];
        let compare = if random.below(2) == 0 { words[n] } else { random.next() };
        let amo = Amo { op, width: 1 << n, operand: random.next(), compare };
        let at = own.remote.at(n as u64 * 16);
        let want = words[n];
        match random.below(2) {
            0 => assert_eq!(own.engine.fetch(CX, at, amo, 1), Ok(Issued::Done { value: want })),
            _ => assert_eq!(own.engine.amo(CX, at, amo, Notice::Silent), DONE),
        }
        words[n] = model(&amo, want);
        assert_eq!(word(&own.engine, own.target.at(n as u64 * 16)), words[n]);
        assert_eq!(word(&own.engine, own.target.at(n as u64 * 16 + 8)), 0);
    }
}

/// Returns a region that [`Loopback::mapped_where_shared`] maps.
fn shared_region(len: usize) -> Region {
    let words = Box::leak(vec![0u64; len.div_ceil(8)].into_boxed_slice());
    let kind = RegionKind::Shared { segment: 0, offset: 0 };
    // SAFETY: the memory is leaked, and only the helpers and the engine access it.
    unsafe { Region::new(NonNull::new(words.as_mut_ptr().cast()).unwrap(), len, kind) }
}

#[test]
fn a_direct_operation_never_overtakes_numbered_ones_of_its_stream() {
    for seed in seeds(100) {
        let control = shared();
        let config =
            Config { window: 4, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let mut own = own(config, tap(Loopback::<16>::mapped_where_shared(), &control), 4096);
        let mapped = own.engine.register(shared_region(4096)).unwrap();
        let direct = import(&mut own.engine, own.peer, mapped);
        assert_eq!(own.engine.signal(CX, set(direct, 0, 0), Notice::Silent), DONE);
        let mut random = Random(seed);
        let (mut state, mut issued) = (vec![0u64], 0u64);
        for _ in 0..200 {
            issued += 1;
            let (from, value) = (own.source.at(0), issued);
            let e = &mut own.engine;
            // The data of a step is in unmapped memory. The step's number is in mapped or unmapped
            // memory.
            let done = match random.below(5) {
                0 => {
                    let place = own.remote.at(64 + issued * 8);
                    write(e, own.source.at(issued * 8), &issued.to_le_bytes());
                    e.put(CX, own.source.at(issued * 8), 8, place, Notice::Silent)
                }
                1 => {
                    write(e, own.source.at(issued * 8), &issued.to_le_bytes());
                    let place = own.remote.at(64 + issued * 8);
                    e.put_signal(
                        CX,
                        own.source.at(issued * 8),
                        8,
                        place,
                        set(direct, 0, value),
                        Notice::Silent,
                    )
                }
                2 => e.signal(CX, set(direct, 0, value), Notice::Silent),
                3 => {
                    let amo = Amo { op: AmoOp::Set, width: 8, operand: value, compare: 0 };
                    e.amo(CX, direct.at(0), amo, Notice::Silent)
                }
                _ => e.put(CX, from, 8, direct.at(512), Notice::Silent),
            };
            assert!(done.is_ok(), "seed {seed}: {done:?}");
            state.push(value);
            if random.below(3) == 0 {
                e.progress();
            }
            // The visible step was issued before, and does not decrease.
            let now = word(e, mapped.at(0));
            assert!(now <= issued && now >= *state.first().unwrap(), "seed {seed}");
            if state[0] != now {
                state.retain(|&step| step >= now);
            }
            // All data put up to the visible step has landed.
            for step in 1..=now {
                let data = word(e, own.target.at(64 + step * 8));
                let was_put = word(e, own.source.at(step * 8)) == step;
                assert!(
                    !was_put || data == step,
                    "seed {seed}: step {now} is seen, the data of {step} is not"
                );
            }
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    }
}

#[test]
fn a_signal_on_mapped_memory_waits_for_a_write_that_has_not_landed() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::mapped_where_shared(), &control), 4096);
    let mapped = own.engine.register(shared_region(4096)).unwrap();
    let direct = import(&mut own.engine, own.peer, mapped);
    let held = hold(&control, |event| matches!(event, Event::Landed(..)));
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    let signal = fishplate_core::engine::Signal { at: direct.at(0), op: SignalOp::Set, value: 1 };
    pending(own.engine.signal(CX, signal, Notice::Silent));
    let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    let fetch = pending(own.engine.fetch(CX, direct.at(0), amo, 1));
    pending(own.engine.put_signal(
        CX,
        own.source.at(0),
        8,
        direct.at(64),
        set(direct, 8, 1),
        Notice::Silent,
    ));
    passes(&mut own.engine, 40);
    assert_eq!((word(&own.engine, mapped.at(0)), word(&own.engine, mapped.at(8))), (0, 0));
    control.borrow_mut().edit = None;
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    assert_eq!(own.engine.wait(fetch, &mut own.waiter, SOON).unwrap().value, 1);
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!((word(&own.engine, mapped.at(0)), word(&own.engine, mapped.at(8))), (2, 1));
    assert_eq!(
        own.engine.signal(CX, set(direct, 16, 1), Notice::Silent),
        DONE,
        "and then it is direct again"
    );
}

#[test]
fn memory_of_a_failed_or_removed_peer_is_not_accessed() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::mapped(), &control), 4096);
    control.borrow_mut().inject.push_back(Event::Down(own.peer.peer(), PeerError::Died));
    own.engine.progress();
    let amo = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    let failed = OpError::PeerFailed(PeerError::Died);
    let all = |own: &mut Own<_, 1>, want: OpError| {
        let (from, to) = (own.source.at(0), own.remote.at(64));
        assert_eq!(own.engine.put(CX, from, 8, to, Notice::Silent), Err(want));
        assert_eq!(own.engine.get(CX, from, 8, to, Notice::Silent), Err(want));
        assert_eq!(
            own.engine.put_signal(CX, from, 8, to, set(own.remote, 0, 1), Notice::Silent),
            Err(want)
        );
        assert_eq!(own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent), Err(want));
        assert_eq!(own.engine.inject(CX, &[1; 8], to), Err(want));
        assert_eq!(own.engine.amo(CX, to, amo, Notice::Silent), Err(want));
        assert_eq!(own.engine.fetch(CX, to, amo, 1), Err(want));
    };
    all(&mut own, failed);
    own.engine.remove_peer(own.peer).unwrap();
    all(&mut own, OpError::UnknownRegion);
    assert!(read(&own.engine, own.target.at(0), 4096).iter().all(|&b| b == 0));
}

#[test]
fn misaligned_mapped_memory_of_a_peer_is_not_imported() {
    let control = shared();
    let mut own = own(Config::DEFAULT, tap(Network::mapped(), &control), 4096);
    let mut handle = [0; HANDLE_MAX];
    let len = own.engine.export(own.target, &mut handle).unwrap();
    for (shift, want) in
        [(4, Some(AttachError::Misaligned)), (1, Some(AttachError::Misaligned)), (8, None)]
    {
        control.borrow_mut().shift = shift;
        let before = control.borrow().imported;
        let imported = own.engine.import(own.peer, &handle[..len]);
        assert_eq!(imported.err(), want, "{shift}");
        assert_eq!(control.borrow().imported - before, want.is_none() as i32, "{shift}");
        if let Ok(region) = imported {
            assert_eq!(own.engine.signal(CX, add(region, 0, 1), Notice::Silent), DONE);
        }
    }
    assert_eq!(word(&own.engine, own.target.at(8)), 1);
}
