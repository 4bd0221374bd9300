//! Acknowledgements: each reports a cumulative count, in time and never ahead of the applied
//! operations. Every sequence number is acknowledged.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{OpError, PostError};
use fishplate_core::mem::Peer;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::order::{add, hold, set};
use super::support::tap::{Event, Post, Shared, Verb, shared, tap};
use super::support::*;

type Network = Loopback<64>;

const ACK: u8 = 5;

fn ack_of(bytes: &[u8]) -> u32 {
    u32::from_le_bytes(bytes[8..12].try_into().unwrap())
}

fn is_ack(event: &Event) -> bool {
    matches!(event, Event::Message(_, bytes) if bytes[0] == ACK)
}

fn acks(control: &Shared) -> Vec<Post> {
    let control = control.borrow();
    control
        .posts
        .iter()
        .filter(|post| post.verb == Verb::Message && post.bytes[0] == ACK)
        .cloned()
        .collect()
}

#[test]
fn i2_every_number_is_credited_and_the_window_never_closes() {
    for window in [1u32, 2, 4, 8, 128] {
        for batch in [1, 32] {
            let config =
                Config { window, batch, first_sequence: (1 << 20) - 300, ..Config::DEFAULT };
            let mut own = own(config, [Loopback::<16>::new()], 4096);
            for n in 0..3000u64 {
                let mut tries = 0;
                while own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent)
                    == Err(OpError::Again)
                {
                    own.engine.progress();
                    tries += 1;
                    assert!(
                        tries < 10_000,
                        "window {window}: never reopened after {n}: {:?}",
                        own.engine.stats()
                    );
                }
            }
            own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
            let stats = own.engine.stats();
            assert_eq!((stats.posted, stats.arrived, stats.duplicates), (3000, 3000, 0));
        }
    }
}

#[test]
fn i1_at_most_a_window_is_in_flight() {
    for window in [1u32, 2, 8] {
        let control = shared();
        let config = Config { window, ..Config::DEFAULT };
        let mut own = own(config, tap(Network::new(), &control), 4096);
        control.borrow_mut().mute = true;
        for _ in 0..20 {
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
            own.engine.progress();
        }
        assert_eq!(own.engine.stats().posted, window as u64);
        control.borrow_mut().mute = false;
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        assert_eq!(own.engine.stats().posted, 40);
    }
}

#[test]
fn i3_nothing_beyond_a_hole_is_acknowledged() {
    for first_sequence in STARTS {
        let control = shared();
        let config = Config { first_sequence, window: 8, ack_age: 1, ..Config::DEFAULT };
        let mut own = own(config, tap(Network::new(), &control), 4096);
        let mut first = true;
        let held = hold(&control, move |event| {
            let hold = first && matches!(event, Event::Landed(..));
            first &= !hold;
            hold
        });
        for _ in 0..4 {
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.signal(CX, add(own.remote, 0, 1), Notice::Silent).unwrap();
        }
        assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
        passes(&mut own.engine, 50);
        let start = first_sequence as u32;
        for post in control.borrow().posts.iter().filter(|post| post.verb == Verb::Message) {
            assert_eq!(ack_of(&post.bytes), start, "acknowledged beyond the hole");
        }
        control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        let last = control
            .borrow()
            .posts
            .iter()
            .filter(|post| post.verb == Verb::Message)
            .map(|p| ack_of(&p.bytes))
            .next_back();
        assert_eq!(last, Some(first_sequence.wrapping_add(8) as u32));
    }
}

#[test]
fn e4_runs_of_puts_shorter_than_half_a_window_are_credited_too() {
    for window in [2u32, 4, 8, 64] {
        let config = Config { window, ack_age: u32::MAX, ..Config::DEFAULT };
        let mut own = own(config, [Loopback::<64>::new()], 4096);
        for round in 0..1000u64 {
            for _ in 0..round % 7 {
                while own
                    .engine
                    .put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent)
                    .is_err()
                {
                    own.engine.progress();
                }
            }
            own.engine.signal(CX, set(own.remote, 0, round + 1), Notice::Silent).unwrap();
            let mut turns = 0;
            while word(&own.engine, own.target.at(0)) != round + 1 {
                own.engine.progress();
                turns += 1;
                assert!(turns < 1000, "window {window} stalled in round {round}");
            }
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    }
}

#[test]
fn an_ack_is_sent_at_half_a_window_on_request_or_by_age() {
    let start = |ack_age| {
        let control = shared();
        let config = Config { window: 8, ack_age, ..Config::DEFAULT };
        (own(config, tap(Network::new(), &control), 4096), control)
    };
    let put = |own: &mut Own<_, 1>| {
        own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    };
    let (mut half, control) = start(u32::MAX);
    for n in 1..=4 {
        assert!(acks(&control).is_empty(), "before half a window: {n}");
        put(&mut half);
        passes(&mut half.engine, 30);
    }
    assert_eq!(acks(&control).len(), 1);
    assert_eq!(ack_of(&acks(&control)[0].bytes), 4);

    let (mut asked, control) = start(u32::MAX);
    put(&mut asked);
    passes(&mut asked.engine, 30);
    assert!(acks(&control).is_empty());
    asked.engine.quiet(CX, asked.peer, &mut asked.waiter, SOON).unwrap();
    assert_eq!(acks(&control).len(), 1, "to oneself, the request carries the answer");

    let (mut aged, control) = start(10);
    put(&mut aged);
    passes(&mut aged.engine, 9);
    assert!(acks(&control).is_empty(), "too early");
    passes(&mut aged.engine, 4);
    assert_eq!(acks(&control).len(), 1, "by age");
    passes(&mut aged.engine, 100);
    assert_eq!(acks(&control).len(), 1, "once");
    assert_eq!(aged.engine.is_quiet(CX, aged.peer), Ok(true));
}

#[test]
fn acks_ride_on_reverse_traffic() {
    let (_, mut nodes) = fleet::plain::<1>(2, Dials::CALM, Config::DEFAULT, 4096, 1);
    for round in 1..=200u64 {
        for me in 0..2 {
            let node = &mut nodes[me];
            node.engine.signal(CX, set(node.remotes[1 - me], 0, round), Notice::Silent).unwrap();
            fleet::turn_until(&mut nodes, "ping", |nodes| {
                word(&nodes[1 - me].engine, nodes[1 - me].target.at(0)) == round
            });
        }
    }
    for node in &nodes {
        assert!(node.engine.stats().acks_alone <= 2, "{:?}", node.engine.stats());
    }
}

#[test]
fn repeated_and_stale_acks_change_nothing() {
    for first_sequence in STARTS {
        let control = shared();
        let config = Config { window: 8, ack_age: 0, first_sequence, ..Config::DEFAULT };
        let mut own = own(config, tap(Network::new(), &control), 4096);
        let mut old: Vec<Event> = vec![];
        control.borrow_mut().edit = Some(Box::new(move |_, event| {
            let mut events = vec![event.clone()];
            if is_ack(&event) {
                old.push(event.clone());
                events.push(event);
                events.extend(old.iter().rev().take(5).cloned());
            }
            events
        }));
        for n in 0..200 {
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.signal(CX, add(own.remote, 0, 1), Notice::Silent).unwrap();
            if n % 5 == 0 {
                own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
            }
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        assert_eq!(own.engine.peer_error(own.peer), Ok(None));
        assert_eq!(word(&own.engine, own.target.at(0)), 200);
    }
}

#[test]
fn a_lost_unsolicited_ack_is_recovered() {
    let control = shared();
    let config = Config { window: 8, ack_age: 4, ..Config::DEFAULT };
    let mut own = own(config, tap(Network::new(), &control), 4096);
    let lost = hold(&control, is_ack);
    own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
    passes(&mut own.engine, 20);
    assert_eq!(lost.borrow().len(), 1);
    control.borrow_mut().edit = None;
    own.engine.signal(CX, set(own.remote, 0, 1), Notice::Silent).unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
}

#[test]
fn i12_again_changes_nothing() {
    for seed in seeds(40) {
        let control = shared();
        let config =
            Config { window: 8, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let mut own = own(config, tap(Network::new(), &control), 4096);
        let mut random = Random(seed);
        control.borrow_mut().refuse =
            Some(Box::new(move |_| (random.below(2) == 0).then_some(PostError::Again)));
        for n in 0..60u64 {
            write(&own.engine, own.source.at(n * 8), &(n + 1).to_le_bytes());
            let signal = add(own.remote, 0, 1);
            let (from, to) = (own.source.at(n * 8), own.remote.at(64 + n * 8));
            own.engine.put_signal(CX, from, 8, to, signal, Notice::Silent).unwrap();
            own.engine.put(CX, from, 8, own.remote.at(1024 + n * 8), Notice::Silent).unwrap();
            own.engine.progress();
        }
        own.engine
            .quiet(CX, own.peer, &mut own.waiter, SOON)
            .unwrap_or_else(|e| panic!("seed {seed}: {e:?}"));
        let stats = own.engine.stats();
        assert_eq!((stats.posted, stats.arrived, stats.duplicates), (120, 120, 0), "seed {seed}");
        assert!(stats.refused > 10, "seed {seed}: {stats:?}");
        assert_eq!(word(&own.engine, own.target.at(0)), 60, "seed {seed}");
        for n in 0..60 {
            assert_eq!(word(&own.engine, own.target.at(64 + n * 8)), n + 1, "seed {seed}");
            assert_eq!(word(&own.engine, own.target.at(1024 + n * 8)), n + 1, "seed {seed}");
        }
    }
}

#[test]
fn e8_two_saturating_nodes_both_progress() {
    for seed in seeds(25) {
        let config = Config { window: 8, ..Config::DEFAULT };
        let sim = fleet::fabric(2, 2, 8, Dials::WILD, seed);
        let mut nodes = fleet::fleet::<_, 2>(sim, 2, config, 4096, |_, _, end| end);
        let mut sent = [0u64; 2];
        fleet::turn_until(&mut nodes, "mutual saturation", |nodes| {
            for me in 0..2 {
                let node = &mut nodes[me];
                while sent[me] < 150
                    && node
                        .engine
                        .signal(CX, add(node.remotes[1 - me], 0, 1), Notice::Silent)
                        .is_ok()
                {
                    sent[me] += 1;
                }
            }
            (0..2).all(|me| word(&nodes[me].engine, nodes[me].target.at(0)) == 150)
                && (0..2)
                    .all(|me| nodes[me].engine.is_quiet(CX, nodes[me].peers[1 - me]) == Ok(true))
        });
    }
}

#[test]
fn e5_withheld_acks_of_one_peer_do_not_block_others() {
    let control = shared();
    let sim = fleet::fabric(3, 1, 64, Dials::CALM, 1);
    let mut nodes = fleet::fleet::<_, 1>(
        sim,
        3,
        Config { window: 4, ..Config::DEFAULT },
        4096,
        |node, rail, end| {
            let control = if node == 0 { control.clone() } else { shared() };
            tap::Tap::new(end, rail as usize, &control)
        },
    );
    // Node 0 receives no message from node 1.
    let _held = hold(&control, |event| matches!(event, Event::Message(Peer(1), _)));
    let node = &mut nodes[0];
    for _ in 0..20 {
        node.engine.signal(CX, add(node.remotes[1], 0, 1), Notice::Silent).unwrap();
    }
    for n in 0..30u64 {
        let node = &mut nodes[0];
        node.engine.signal(CX, set(node.remotes[2], 0, n + 1), Notice::Silent).unwrap();
        let node = &mut nodes[1];
        node.engine.signal(CX, set(node.remotes[2], 8, n + 1), Notice::Silent).unwrap();
        let node = &mut nodes[2];
        node.engine.signal(CX, set(node.remotes[0], 0, n + 1), Notice::Silent).unwrap();
        fleet::turn_until(&mut nodes, "others", |nodes| {
            (0..3).all(|me| {
                nodes[me].engine.is_quiet(CX, nodes[me].peers[if me == 2 { 0 } else { 2 }])
                    == Ok(true)
            })
        });
    }
    let silent = nodes[0].peers[1];
    assert_eq!(nodes[0].engine.is_quiet(CX, silent), Ok(false));
    assert_eq!(word(&nodes[1].engine, nodes[1].target.at(0)), 4, "a window full");
}

#[test]
fn an_ack_request_is_answered_once_its_number_is_applied() {
    let config = Config { window: 8, ack_age: u32::MAX, ..Config::DEFAULT };
    let (_, mut nodes) = fleet::plain::<1>(2, Dials::CALM, config, 4096, 1);
    let to = nodes[0].peers[1];
    for n in 1..50u64 {
        let node = &mut nodes[0];
        node.engine.signal(CX, set(node.remotes[1], 0, n), Notice::Silent).unwrap();
        assert_eq!(node.engine.is_quiet(CX, to), Ok(false));
        for _ in 0..6 {
            fleet::turn(&mut nodes);
        }
        assert_eq!(nodes[0].engine.is_quiet(CX, to), Ok(true), "request {n}");
        assert_eq!(nodes[1].engine.stats().acks_alone, n);
    }
}
