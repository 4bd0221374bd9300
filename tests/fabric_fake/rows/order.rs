//! Tests features 8 to 16 and 28 to 30: signals, atomics, and their completion.

use fishplate_core::engine::{Config, Issued, Notice, RailPolicy, Signal};
use fishplate_core::error::OpError;
use fishplate_core::op::{AmoOp, Outcome, SignalOp};
use fishplate_testing::fabric::Persona;

use crate::behaviour::fleet::{turn, turn_until};
use crate::behaviour::oracle::{OPS, model};
use crate::behaviour::{read, seeds, word, write};
use crate::two::{CX, Two, amo, efa};

fn put_signals(name: &str, persona: Persona) {
    for seed in seeds(4) {
        let mut two = Two::<2>::new(name, persona.clone(), Config::DEFAULT, seed);
        for value in 1..100u64 {
            let len = [0, 1, 100, 200, 3000, 200_000][value as usize % 6];
            let bytes = two.fill(len, value);
            two.put_signal(0, len, 64, 0, value);
            turn_until(&mut two.nodes, "the signal", |nodes| {
                word(&nodes[1].engine, nodes[1].target.at(0)) == value
            });
            assert_eq!(
                two.there(64, len),
                bytes,
                "{name}, seed {seed}: the signal came before its {len} bytes"
            );
            two.quiet();
        }
    }
}

#[test]
fn row_08_put_signal_on_a_network_in_order() {
    put_signals("verbs;ofi_rxm", Persona::verbs_rxm());
}

#[test]
fn row_08_put_signal_on_a_network_without_order() {
    put_signals("efa-direct", Persona::efa_direct());
}

#[test]
fn row_09_signals_alone_set_and_add() {
    let mut two = efa::<2>(Config::DEFAULT, 9);
    for n in 1..200 {
        two.signal(0, SignalOp::Set, n);
        two.signal(8, SignalOp::Add, n);
    }
    two.quiet();
    assert_eq!((two.word(0), two.word(8)), (199, 199 * 200 / 2));
}

#[test]
fn row_10_signals_come_in_order_across_rails_after_earlier_puts() {
    for seed in seeds(6) {
        let mut two = efa::<4>(Config { policy: RailPolicy::RoundRobin, ..Config::DEFAULT }, seed);
        let (mut issued, mut last) = (0, 0);
        two.fill(8 * 400, seed);
        while last < 400 {
            if issued < 400 {
                let n = issued + 1;
                write(&two.nodes[0].engine, two.nodes[0].source.at(issued * 8), &n.to_ne_bytes());
                two.put(issued * 8, 8, 64 + issued * 8);
                two.signal(0, SignalOp::Set, n);
                issued = n;
            }
            turn(&mut two.nodes);
            let now = two.word(0);
            assert!(now >= last, "seed {seed}: {now} after {last}");
            for n in last..now {
                assert_eq!(
                    two.word(64 + n * 8),
                    n + 1,
                    "seed {seed}: the signal came before its put"
                );
            }
            last = now;
        }
        assert!(
            two.nodes[1].engine.stats().arrivals_out_of_order > 0,
            "seed {seed}: the network kept order, so nothing was tested"
        );
    }
}

fn atomics(name: &str, persona: Persona, ops: &[AmoOp], widths: &[u8]) {
    let mut two = Two::<2>::new(name, persona, Config::DEFAULT, 11);
    for &op in ops {
        for &width in widths {
            let mask = u64::MAX >> (64 - 8 * u32::from(width));
            let amo = amo(op, width, 0x1234_5678_9abc_def7, 0x0f0f_0f0f_0f0f_0f0f);
            let before = 0x0f0f_0f0f_0f0f_0f0fu64;
            write(&two.nodes[1].engine, two.nodes[1].target.at(0), &before.to_ne_bytes());
            assert_eq!(two.fetch(0, amo), before & mask, "{name}: {op:?} of {width}");
            let want = model(&amo, before & mask) & mask;
            assert_eq!(two.word(0) & mask, want, "{name}: {op:?} of {width}");
            assert_eq!(
                two.word(0) & !mask,
                before & !mask,
                "{name}: {op:?} of {width} and no more"
            );
        }
    }
}

#[test]
fn row_11_atomics_and_their_fetching_forms() {
    atomics("efa-direct", Persona::efa_direct(), &OPS, &[8]);
    atomics("verbs;ofi_rxm", Persona::verbs_rxm(), &OPS, &[8]);
}

#[test]
fn row_12_increments_are_supported() {
    atomics("efa-direct", Persona::efa_direct(), &[AmoOp::Inc], &[4, 8]);
    let mut two = efa::<2>(Config::DEFAULT, 12);
    for n in 0..100 {
        assert_eq!(two.fetch(0, amo(AmoOp::Inc, 8, 0, 0)), n);
    }
}

#[test]
fn row_13_atomics_of_every_width() {
    atomics("efa-direct", Persona::efa_direct(), &OPS, &[1, 2, 4, 8]);
    atomics("cxi", Persona::cxi(), &OPS, &[1, 2, 4, 8]);
}

#[test]
fn row_14_a_fetch_returns_its_value_and_a_completion() {
    let mut two = efa::<2>(Config::DEFAULT, 14);
    let issued = two
        .issue(|node| node.engine.fetch(CX, node.remotes[1].at(0), amo(AmoOp::Add, 8, 5, 0), 77));
    let Issued::Pending(token) = issued else { panic!("{issued:?}") };
    let mut flag = None;
    turn_until(&mut two.nodes, "the reply", |nodes| {
        flag = nodes[0].engine.test(token).unwrap();
        flag.is_some()
    });
    let completion = flag.unwrap();
    assert_eq!((completion.tag, completion.value, completion.outcome), (77, 0, Outcome::Done));
    assert_eq!(two.word(0), 5);
}

#[test]
fn row_15_quiet_means_applied_and_a_fence_orders_writes() {
    for seed in seeds(4) {
        let mut two = efa::<4>(Config::DEFAULT, seed);
        for n in 1..50u64 {
            write(&two.nodes[0].engine, two.nodes[0].source.at(0), &[n as u8; 64]);
            two.put(0, 64, 0);
            let peer = two.nodes[0].peers[1];
            two.nodes[0].engine.fence(CX, peer).unwrap();
            two.put(0, 64, 128);
            turn_until(&mut two.nodes, "the second write", |nodes| {
                read(&nodes[1].engine, nodes[1].target.at(128), 1) == [n as u8]
            });
            assert_eq!(two.there(0, 64), [n as u8; 64], "seed {seed}: the first landed before");
            two.quiet();
            assert_eq!(two.there(128, 64), [n as u8; 64], "seed {seed}");
        }
    }
}

#[test]
fn row_16_an_idle_quiet_makes_no_call_into_the_provider() {
    let mut two = efa::<4>(Config::DEFAULT, 16);
    two.put(0, 4096, 0);
    two.quiet();
    let before = two.fake.0.counts();
    for _ in 0..1000 {
        let peer = two.nodes[0].peers[1];
        assert_eq!(two.nodes[0].engine.is_quiet(CX, peer), Ok(true));
    }
    assert_eq!(two.fake.0.counts(), before);
}

#[test]
fn row_28_a_put_signal_of_no_bytes() {
    let mut two = efa::<2>(Config::DEFAULT, 28);
    two.put_signal(0, 0, 64, 0, 5);
    two.quiet();
    assert_eq!(two.word(0), 5);
}

#[test]
fn row_29_the_target_executes_atomics_that_the_network_lacks() {
    let calm = Persona { mr_mode: 0, ..Persona::cxi().calm() };
    let mut two = Two::<1>::new("cxi", calm, Config::DEFAULT, 29);
    two.signal(0, SignalOp::Set, 3);
    for _ in 0..1000 {
        two.nodes[0].engine.progress();
    }
    assert_eq!(two.word(0), 0, "not before the target makes progress");
    two.quiet();
    assert_eq!(two.word(0), 3);
}

#[test]
fn row_30_another_thread_can_deliver_the_signals() {
    let Two { mut nodes, fake } = efa::<2>(Config::DEFAULT, 30);
    let mut target = nodes.pop().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        let deliverer = scope.spawn(move || {
            while !stop.load(std::sync::atomic::Ordering::Acquire) {
                target.engine.progress();
            }
            word(&target.engine, target.target.at(0))
        });
        let node = &mut nodes[0];
        for value in 1..=200 {
            let signal = Signal { at: node.remotes[1].at(0), op: SignalOp::Set, value };
            while node.engine.signal(CX, signal, Notice::Silent) == Err(OpError::Again) {
                node.engine.progress();
            }
        }
        while !node.engine.is_quiet(CX, node.peers[1]).unwrap() {
            node.engine.progress();
        }
        stop.store(true, std::sync::atomic::Ordering::Release);
        assert_eq!(deliverer.join().unwrap(), 200);
    });
    drop((nodes, fake));
}
