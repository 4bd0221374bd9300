//! Order: signals and atomics are applied in issue order, each once all earlier operations have
//! landed.

use fishplate_core::engine::{Config, ContextId, Notice, Signal};
use fishplate_core::mem::RemoteId;
use fishplate_core::op::SignalOp;
use fishplate_core::rail::Rail;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::support::tap::{Event, Shared, Tap, shared, tap};
use super::support::*;

type Network = Loopback<64>;

pub fn set(region: RemoteId, offset: u64, value: u64) -> Signal {
    Signal { at: region.at(offset), op: SignalOp::Set, value }
}

pub fn add(region: RemoteId, offset: u64, value: u64) -> Signal {
    Signal { at: region.at(offset), op: SignalOp::Add, value }
}

/// Withholds the events that `which` selects, and returns the list that collects them.
pub fn hold(
    control: &Shared,
    mut which: impl FnMut(&Event) -> bool + 'static,
) -> std::rc::Rc<std::cell::RefCell<Vec<Event>>> {
    let held = std::rc::Rc::new(std::cell::RefCell::new(vec![]));
    let list = held.clone();
    control.borrow_mut().edit = Some(Box::new(move |_, event| {
        if which(&event) {
            list.borrow_mut().push(event);
            return vec![];
        }
        vec![event]
    }));
    held
}

fn tapped(config: Config) -> (Shared, Own<Tap<Network>, 1>) {
    let control = shared();
    let own = own(config, tap(Loopback::new(), &control), 4096);
    (control, own)
}

#[test]
fn i4_a_signal_waits_for_earlier_numbers() {
    for first_sequence in STARTS {
        let (control, mut own) = tapped(Config { first_sequence, ..Config::DEFAULT });
        for round in 0..8u64 {
            let held = hold(&control, |event| matches!(event, Event::Landed(..)));
            own.engine.put(CX, own.source.at(0), 16, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.signal(CX, set(own.remote, 0, round + 1), Notice::Silent).unwrap();
            passes(&mut own.engine, 40);
            assert_eq!(
                word(&own.engine, own.target.at(0)),
                round,
                "from {first_sequence:#x}: applied before its write"
            );
            control.borrow_mut().edit = None;
            control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
            own.engine.progress();
            assert_eq!(word(&own.engine, own.target.at(0)), round + 1, "from {first_sequence:#x}");
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    }
}

#[test]
fn i4_a_put_signal_waits_for_each_of_its_own_writes() {
    let config = Config { eager: 0, stripe_threshold: 8, stripe_chunk: 8, ..Config::DEFAULT };
    for late in 0..4 {
        let control = shared();
        let rails: [_; 2] = std::array::from_fn(|i| Tap::new(Network::new(), i, &control));
        let mut own = own(config, rails, 4096);
        let mut count = 0;
        let held = hold(&control, move |event| {
            count += matches!(event, Event::Landed(..)) as i32;
            matches!(event, Event::Landed(..)) && count == late + 1
        });
        own.engine
            .put_signal(
                CX,
                own.source.at(0),
                32,
                own.remote.at(64),
                set(own.remote, 0, 1),
                Notice::Silent,
            )
            .unwrap();
        passes(&mut own.engine, 40);
        assert_eq!(held.borrow().len(), 1);
        assert_eq!(word(&own.engine, own.target.at(0)), 0, "applied without write {late}");
        control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        passes(&mut own.engine, 2);
        assert_eq!(word(&own.engine, own.target.at(0)), 1);
    }
}

#[test]
fn i5_arrivals_may_come_in_any_order() {
    let orders: Vec<Vec<usize>> = permutations(5);
    for first_sequence in STARTS {
        for order in &orders {
            let (control, mut own) =
                tapped(Config { first_sequence, window: 8, ..Config::DEFAULT });
            let held = hold(&control, |_| true);
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
            own.engine.signal(CX, add(own.remote, 0, 10), Notice::Silent).unwrap();
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(72), Notice::Silent).unwrap();
            own.engine.signal(CX, set(own.remote, 0, 3), Notice::Silent).unwrap();
            own.engine.progress();
            control.borrow_mut().edit = None;
            let events = held.borrow().clone();
            assert_eq!(events.len(), 5);
            let mut here = [false; 5];
            for &next in order {
                here[next] = true;
                control.borrow_mut().inject.push_back(events[next].clone());
                passes(&mut own.engine, 3);
                let reached = here.iter().position(|here| !here).unwrap_or(5);
                let want = [0, 0, 1, 11, 11, 3][reached];
                assert_eq!(
                    word(&own.engine, own.target.at(0)),
                    want,
                    "from {first_sequence:#x} in order {order:?}"
                );
            }
            own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        }
    }
}

pub fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![vec![]];
    }
    let mut all = vec![];
    for shorter in permutations(n - 1) {
        for at in 0..n {
            let mut longer = shorter.clone();
            longer.insert(at, n - 1);
            all.push(longer);
        }
    }
    all
}

#[test]
fn i7_contexts_and_peers_are_independent_streams() {
    let control = shared();
    let config = Config { contexts: 3, ..Config::DEFAULT };
    let mut own = own(config, tap(Network::new(), &control), 4096);
    let second = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(second, 1).unwrap();
    let other = import(&mut own.engine, second, own.target);
    // Only the first write of context 0 to the first peer is late.
    let held = hold(&control, |event| matches!(event, Event::Landed(..)));
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    own.engine.progress();
    control.borrow_mut().edit = None;
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    own.engine.signal(ContextId(1), set(own.remote, 8, 2), Notice::Silent).unwrap();
    own.engine.signal(ContextId(2), set(own.remote, 16, 3), Notice::Silent).unwrap();
    own.engine.signal(CX, set(other, 24, 4), Notice::Silent).unwrap();
    passes(&mut own.engine, 5);
    let words: Vec<u64> = (0..4).map(|n| word(&own.engine, own.target.at(n * 8))).collect();
    assert_eq!(words, [0, 2, 3, 4]);
    own.engine.quiet(ContextId(1), own.peer, &mut own.waiter, SOON).unwrap();
    own.engine.quiet(CX, second, &mut own.waiter, SOON).unwrap();
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(word(&own.engine, own.target.at(0)), 1);
}

/// Sends put-signals of all lengths to the engine itself. When a signal is visible, so is its data.
fn data_is_there_with_its_signal<R: Rail, const RAILS: usize>(
    config: Config,
    rails: [R; RAILS],
    seed: u64,
) {
    let mut own = own(config, rails, 4096);
    let mut random = Random(seed);
    for i in 0..30u64 {
        let len = random.below(300) as usize;
        let at = random.below(256);
        own.engine
            .quiet(CX, own.peer, &mut own.waiter, u64::MAX)
            .unwrap_or_else(|e| panic!("seed {seed}: {e:?}"));
        let bytes = vec![i as u8 + 1; len];
        write(&own.engine, own.source.at(0), &bytes);
        let signal = set(own.remote, 2048, i + 1);
        own.engine
            .put_signal(CX, own.source.at(0), len, own.remote.at(at), signal, Notice::Silent)
            .unwrap();
        let mut turns = 0;
        while word(&own.engine, own.target.at(2048)) != i + 1 {
            own.engine.progress();
            turns += 1;
            assert!(turns < 100_000, "seed {seed}: {:?}", own.engine.stats());
        }
        assert_eq!(
            read(&own.engine, own.target.at(at), len),
            bytes,
            "seed {seed}, {RAILS} rails, put-signal {i}"
        );
    }
}

#[test]
fn e2_a_signal_never_overtakes_its_data_on_another_rail() {
    for seed in seeds(60) {
        let config = Config {
            window: 1 << (seed % 6),
            batch: 1 + (seed % 3) as u32 * 8,
            eager: [0, 192][seed as usize % 2],
            stripe_threshold: 64,
            stripe_chunk: 24,
            first_sequence: STARTS[seed as usize % 4],
            policy: [
                fishplate_core::engine::RailPolicy::LeastOutstanding,
                fishplate_core::engine::RailPolicy::RoundRobin,
                fishplate_core::engine::RailPolicy::Fixed,
            ][seed as usize % 3],
            ..Config::DEFAULT
        };
        let faulty = |i: usize| {
            Faulty::<_, 16>::new(Loopback::<16>::new(), Faults::DISORDER, seed * 4 + i as u64)
        };
        data_is_there_with_its_signal(config, std::array::from_fn::<_, 1, _>(faulty), seed);
        data_is_there_with_its_signal(config, std::array::from_fn::<_, 2, _>(faulty), seed);
        data_is_there_with_its_signal(config, std::array::from_fn::<_, 3, _>(faulty), seed);
        data_is_there_with_its_signal(config, std::array::from_fn::<_, 4, _>(faulty), seed);
        data_is_there_with_its_signal(config, [Loopback::<4>::new()], seed);
    }
}

#[test]
fn e2_a_signal_never_overtakes_its_data_between_two_nodes() {
    for seed in seeds(150) {
        let config =
            Config { window: 32, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let (_, mut nodes) = fleet::plain::<4>(2, Dials::WILD, config, 8192, seed);
        let (mut sent, mut seen) = (0u64, 0u64);
        fleet::turn_until(&mut nodes, "50 put-signals", |nodes| {
            if sent < 50 {
                let a = &mut nodes[0];
                write(&a.engine, a.source.at(sent * 100), &[sent as u8 + 1; 100]);
                let signal = set(a.remotes[1], 8000, sent + 1);
                let (from, to) = (a.source.at(sent * 100), a.remotes[1].at(sent * 100));
                sent +=
                    a.engine.put_signal(CX, from, 100, to, signal, Notice::Silent).is_ok() as u64;
            }
            let b = &nodes[1];
            let now = word(&b.engine, b.target.at(8000));
            assert!(now >= seen, "seed {seed}: went back");
            while seen < now {
                let data = read(&b.engine, b.target.at(seen * 100), 100);
                assert_eq!(
                    data,
                    [seen as u8 + 1; 100],
                    "seed {seed}: signal {seen} before its data"
                );
                seen += 1;
            }
            seen == 50
        });
    }
}

#[test]
fn e3_a_put_signal_has_any_number_of_segments() {
    for window in [1, 2, 4, 8, 64] {
        for rails in 1..=2 {
            let config = Config {
                window,
                eager: 16,
                stripe_threshold: 17,
                stripe_chunk: 8,
                ..Config::DEFAULT
            };
            for len in [0usize, 1, 15, 16, 17, 24, 25, 200, 1000] {
                macro_rules! run {
                    ($n:literal) => {{
                        let faulty = |i| {
                            Faulty::<_, 16>::new(
                                Loopback::<16>::new(),
                                Faults::DISORDER,
                                i as u64 + len as u64,
                            )
                        };
                        let mut own = own(config, std::array::from_fn::<_, $n, _>(faulty), 4096);
                        let bytes: Vec<u8> = (0..len).map(|n| n as u8 ^ 0x5a).collect();
                        write(&own.engine, own.source.at(0), &bytes);
                        let signal = add(own.remote, 2048, 1);
                        let issued = own.engine.put_signal(
                            CX,
                            own.source.at(0),
                            len,
                            own.remote.at(0),
                            signal,
                            Notice::Report(9),
                        );
                        let done = own.engine.wait(pending(issued), &mut own.waiter, SOON).unwrap();
                        assert_eq!(
                            (done.tag, done.outcome),
                            (9, fishplate_core::op::Outcome::Done)
                        );
                        assert_eq!(
                            read(&own.engine, own.target.at(0), len),
                            bytes,
                            "window {window}, {len} bytes"
                        );
                        assert_eq!(word(&own.engine, own.target.at(2048)), 1);
                        assert_eq!(
                            read(&own.engine, own.target.at(len as u64), 8),
                            [0; 8],
                            "written too much"
                        );
                    }};
                }
                if rails == 1 { run!(1) } else { run!(2) }
            }
        }
    }
}

#[test]
fn e1_streams_work_across_every_wrap() {
    for first_sequence in STARTS {
        for window in [1, 2, 4, 8, 128] {
            let config = Config { first_sequence, window, batch: 3, ..Config::DEFAULT };
            let mut own = own(config, [Loopback::<16>::new()], 4096);
            let mut sum = 0;
            for n in 0..300u64 {
                loop {
                    match own.engine.signal(CX, add(own.remote, 0, n), Notice::Silent) {
                        Ok(_) => break,
                        Err(_) => drop(own.engine.progress()),
                    }
                }
                sum += n;
            }
            own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
            assert_eq!(
                word(&own.engine, own.target.at(0)),
                sum,
                "from {first_sequence:#x}, window {window}"
            );
        }
    }
}

#[test]
fn i6_numbers_are_consecutive_across_the_wrap() {
    for first_sequence in STARTS {
        let (control, mut own) = tapped(Config { first_sequence, window: 4, ..Config::DEFAULT });
        let mut random = Random(first_sequence);
        // A refused post must not consume a sequence number.
        control.borrow_mut().refuse = Some(Box::new(move |_| {
            (random.below(3) == 0).then_some(fishplate_core::error::PostError::Again)
        }));
        for _ in 0..40 {
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.progress();
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        let words: Vec<u32> = control.borrow().posts.iter().filter_map(|post| post.data).collect();
        let want: Vec<u32> = (0..40).map(|n| sequence(first_sequence.wrapping_add(n), 4)).collect();
        assert_eq!(words, want);
    }
}
