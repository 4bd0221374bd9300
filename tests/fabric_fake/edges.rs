//! Tests edge cases of ordering and connecting over a provider: fetches after quiets, many senders,
//! failed posts, missing keys, unattached senders, and closing during traffic.

use fishplate::bootstrap::{BootstrapError, Card, RailCard};
use fishplate::topology::Mismatch;
use fishplate_core::engine::{Config, HANDLE_MAX, Notice, RailPolicy, Signal};
use fishplate_core::error::AttachError;
use fishplate_core::mem::{Peer, RailId, Untrusted};
use fishplate_core::op::{AmoOp, SignalOp};
use fishplate_core::rail::Rail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::fleet::{Node, turn, turn_until};
use crate::behaviour::{STARTS, seeds, word};
use crate::engines::join;
use crate::fixture::{Checked, rail};
use crate::two::{CX, Two, amo, efa};

#[test]
fn e1_streams_work_across_every_wrap() {
    for first_sequence in STARTS {
        let mut two = efa::<4>(Config { window: 16, first_sequence, ..Config::DEFAULT }, 1);
        for n in 1..=100 {
            two.put(0, 500, 64);
            two.signal(0, SignalOp::Set, n);
        }
        two.quiet();
        assert_eq!(two.word(0), 100, "from {first_sequence:#x}");
    }
}

#[test]
fn e2_a_signal_never_overtakes_its_data_on_another_rail() {
    for seed in seeds(10) {
        let slow = Persona { jitter: 50, ..Persona::efa_direct() };
        let config = Config { policy: RailPolicy::RoundRobin, ..Config::DEFAULT };
        let mut two = Two::<4>::new("efa-direct", slow, config, seed);
        for n in 1..30u64 {
            let bytes = two.fill(700, n);
            two.put_signal(0, 700, 64, 0, n);
            turn_until(&mut two.nodes, "the signal", |nodes| {
                word(&nodes[1].engine, nodes[1].target.at(0)) == n
            });
            assert_eq!(two.there(64, 700), bytes, "seed {seed}, put-signal {n}");
            two.quiet();
        }
    }
}

#[test]
fn e8_two_saturating_peers_both_progress() {
    let mut two = efa::<2>(Config { window: 32, ..Config::DEFAULT }, 8);
    let mut sent = [0u64; 2];
    turn_until(&mut two.nodes, "both sides", |nodes| {
        for me in 0..2 {
            let Node { engine, source, remotes, .. } = &mut nodes[me];
            while sent[me] < 2000 {
                let signal = Signal { at: remotes[1 - me].at(0), op: SignalOp::Add, value: 1 };
                let (from, to) = (source.at(0), remotes[1 - me].at(64));
                if engine.put_signal(CX, from, 1000, to, signal, Notice::Silent).is_err() {
                    break;
                }
                sent[me] += 1;
            }
        }
        (0..2).all(|me| word(&nodes[me].engine, nodes[me].target.at(0)) == 2000)
    });
}

#[test]
fn e10_a_fetch_after_a_quiet_sees_the_put_before_it() {
    let mut two = efa::<4>(Config::DEFAULT, 10);
    for n in 1..50u64 {
        crate::behaviour::write(&two.nodes[0].engine, two.nodes[0].source.at(0), &n.to_ne_bytes());
        two.put(0, 8, 8);
        two.quiet();
        assert_eq!(two.fetch(8, amo(AmoOp::Fetch, 8, 0, 0)), n);
    }
}

#[test]
fn e11_many_senders_do_not_overrun_an_unprotected_queue() {
    let persona = Persona::efa_direct();
    assert!(!persona.protects_queue);
    let fake = Checked(Fake::new(persona.clone(), 11));
    let mut nodes = join::<1>(&fake.0, ("efa-direct", &persona), 11, 8, Config::DEFAULT, 4096);
    // All other nodes write to node 0, which does not poll.
    for _ in 0..500 {
        for node in &mut nodes[1..] {
            let _ =
                node.engine.put(CX, node.source.at(0), 64, node.remotes[0].at(0), Notice::Silent);
            node.engine.progress();
        }
    }
    turn_until(&mut nodes, "all writes", |nodes| {
        nodes[1..].iter_mut().all(|node| node.engine.is_quiet(CX, node.peers[0]).unwrap())
    });
}

#[test]
fn e12_send_completions_and_arrivals_in_one_queue_are_distinguished() {
    let mut two = efa::<2>(Config::DEFAULT, 12);
    for n in 0..200u64 {
        // The reply arrives in the same queue as the completions of requests.
        assert_eq!(two.fetch(8, amo(AmoOp::Add, 8, 1, 0)), n);
    }
}

#[test]
fn e14_a_target_that_only_polls_executes_operations() {
    for (name, persona) in
        [("cxi", Persona::cxi()), ("psm3", Persona::psm3()), ("efa", Persona::efa())]
    {
        let mut two = Two::<2>::new(name, persona, Config::DEFAULT, 14);
        let bytes = two.fill(50_000, 14);
        two.put(0, 50_000, 0);
        for _ in 0..500 {
            two.nodes[0].engine.progress();
        }
        let peer = two.nodes[0].peers[1];
        assert_eq!(
            two.nodes[0].engine.is_quiet(CX, peer),
            Ok(false),
            "{name}: the target makes no progress"
        );
        two.quiet();
        assert_eq!(two.there(0, 50_000), bytes, "{name}");
    }
}

#[test]
fn e15_a_failed_numbered_post_fails_the_peer() {
    let mut two = efa::<2>(Config::DEFAULT, 15);
    two.fake.0.fail(0, libc::EIO, 1, b"");
    two.put(0, 4096, 0);
    let peer = two.nodes[0].peers[1];
    turn_until(&mut two.nodes, "the failure", |nodes| nodes[0].engine.peer_error(peer) != Ok(None));
}

#[test]
fn e16_a_process_reaches_itself() {
    for (name, persona) in Persona::all() {
        let mut two = Two::<2>::new(name, persona, Config::DEFAULT, 16);
        let node = &mut two.nodes[0];
        let signal = Signal { at: node.remotes[0].at(0), op: SignalOp::Set, value: 9 };
        node.engine
            .put_signal(CX, node.source.at(0), 5000, node.remotes[0].at(64), signal, Notice::Silent)
            .unwrap();
        turn_until(&mut two.nodes, name, |nodes| {
            word(&nodes[0].engine, nodes[0].target.at(0)) == 9
        });
    }
}

#[test]
fn e17_an_import_needs_the_keys_of_all_common_rails() {
    let card = |rails: usize, mbit: u32| {
        let rail = |at: usize| RailCard {
            provider: "efa".into(),
            interface: format!("rdmap{at}"),
            fabric: "efa".into(),
            address: vec![at as u8 + 1; 32],
            mbit,
        };
        Card::new(&Config::DEFAULT, 0, (0..rails).map(rail).collect())
    };
    let refused = card(2, 100).agree(&card(3, 100)).unwrap_err();
    assert_eq!(refused, BootstrapError::Rails(Mismatch::Rails { theirs: 3, ours: 2 }));
    let uneven = card(2, 100).agree(&card(2, 400)).unwrap();
    assert_eq!(uneven.pairing.uneven.len(), 2, "differing speeds are reported");
    let mut handle = [0; HANDLE_MAX];
    let two = efa::<2>(Config::DEFAULT, 17);
    let len = two.nodes[0].engine.export(two.nodes[0].target, &mut handle).unwrap();
    let mut three = efa::<3>(Config::DEFAULT, 18);
    let peer = three.nodes[0].peers[1];
    let refused = three.nodes[0].engine.import(peer, &handle[..len]);
    assert_eq!(refused, Err(AttachError::BadHandle));
}

#[test]
fn e18_arrivals_from_unattached_senders_are_dropped_and_counted() {
    let mut two = efa::<1>(Config::DEFAULT, 18);
    let mut stranger = rail(&two.fake.0, "efa-direct", "rdmap0-rdm", 99);
    let target = two.nodes[1].engine.rail(RailId(0)).unwrap();
    stranger.attach(Peer(0), &target.address().unwrap()).unwrap();
    for n in 0..100 {
        let _ = stranger.post_message(Peer(0), b"hello", Untrusted::from_slice(&[n; 40]), 0);
    }
    let before = two.nodes[1].engine.stats().arrived;
    for _ in 0..500 {
        turn(&mut two.nodes);
    }
    assert_eq!(two.nodes[1].engine.stats().arrived, before);
    assert!(two.nodes[1].engine.rail(RailId(0)).unwrap().stats().strangers > 0);
    two.signal(0, SignalOp::Set, 4);
    two.quiet();
    assert_eq!(two.word(0), 4, "attached peers are served as before");
    drop(stranger);
}

#[test]
fn e20_rails_are_closed_during_traffic() {
    for seed in seeds(10) {
        for (name, persona) in Persona::all() {
            let mut two = Two::<2>::new(name, persona, Config::DEFAULT, seed);
            for n in 0..20 {
                let node = &mut two.nodes[0];
                let (from, to) = (node.source.at(n * 2000), node.remotes[1].at(0));
                let _ = node.engine.put(CX, from, 2000, to, Notice::Silent);
                if n % 3 == 0 {
                    turn(&mut two.nodes);
                }
            }
            // Drops the target and then the origin, without waiting.
            drop(two.nodes.pop());
            for _ in 0..20 {
                two.nodes[0].engine.progress();
            }
            let Two { nodes, fake } = two;
            drop(nodes);
            assert_eq!(fake.0.open_objects(), 0, "{name}, seed {seed}");
        }
    }
}
