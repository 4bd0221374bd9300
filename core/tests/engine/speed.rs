//! The combined throughput of rails with different speeds, on a simulated fabric, with the default
//! configuration.

use std::cell::Cell;
use std::rc::Rc;

use fishplate_core::engine::{Config, ContextId, Notice, RailPolicy, Signal};
use fishplate_core::error::PostError;
use fishplate_core::mem::Peer;
use fishplate_core::rail::Rail;
use fishplate_core::rail::sim::{Dials, Sim};

use super::support::fleet::{End, Node, fabric, fleet, turn_until};
use super::support::tap::{Event, NOW, Post, Tap, Verb, shared};

const PUT: usize = 1 << 20;
const PUTS: u64 = 256;

/// Returns the bytes per poll that two rails with these rates carry together.
fn together(rates: [u32; 2], policy: RailPolicy, dials: Dials) -> f64 {
    let config = Config { policy, ..Config::DEFAULT };
    let sim = fabric(2, 2, 1024, dials, 7);
    for (rail, rate) in rates.into_iter().enumerate() {
        sim.set_dials(rail as u16, Dials { rate, ..dials });
    }
    let mut nodes = fleet::<_, 2>(sim, 2, config, PUT, |_, _, end| end);
    let (mut issued, mut done) = (0, 0);
    let begun = sim.now();
    turn_until(&mut nodes, "all puts are done", |nodes| {
        let node = &mut nodes[0];
        while issued < PUTS && issued < done + 16 {
            let (from, to) = (node.source.at(0), node.remotes[1].at(0));
            node.engine.put(ContextId(0), from, PUT, to, Notice::Report(issued)).unwrap();
            issued += 1;
        }
        while node.engine.next_completion().is_some() {
            done += 1;
        }
        done == PUTS
    });
    (PUTS * PUT as u64) as f64 / (sim.now() - begun) as f64
}

fn set_rates(sim: &Sim<'_>, rates: [u32; 2]) {
    for (rail, rate) in rates.into_iter().enumerate() {
        sim.set_dials(rail as u16, Dials { rate, ..QUICK });
    }
}

/// Returns the bytes per poll of put-signals of `len` bytes, which complete in order, with at most
/// `depth` in flight. After half of the bytes the rates become `change`, if it is given.
fn in_order(rates: [u32; 2], change: Option<[u32; 2]>, len: usize, depth: u64, total: u64) -> f64 {
    let sim = fabric(2, 2, 1024, QUICK, 7);
    set_rates(sim, rates);
    carry(
        sim,
        fleet::<_, 2>(sim, 2, Config::DEFAULT, PUT, |_, _, end| end),
        change,
        len,
        depth,
        total,
    )
}

/// Like [`in_order`], over the given nodes: sends from node 0 to node 1. A poll of the fabric takes
/// a microsecond of the time of timed taps.
fn carry<R: Rail>(
    sim: &Sim<'_>,
    mut nodes: Vec<Node<R, 2>>,
    change: Option<[u32; 2]>,
    len: usize,
    depth: u64,
    total: u64,
) -> f64 {
    let (mut issued, mut done) = (0, 0);
    let (mut begun, count) = (sim.now(), total / len as u64);
    turn_until(&mut nodes, "all put-signals are done", |nodes| {
        NOW.set(1 + sim.now() * 1000);
        let node = &mut nodes[0];
        while issued < count && issued < done + depth {
            let (from, to) = (node.source.at(0), node.remotes[1].at(8));
            let signal = Signal::add(node.remotes[1].at(0), 1);
            let notice = Notice::Report(issued);
            match node.engine.put_signal(ContextId(0), from, len - 8, to, signal, notice) {
                Ok(_) => issued += 1,
                Err(_) => break,
            }
        }
        while node.engine.next_completion().is_some() {
            done += 1;
            if let Some(rates) = change
                && done == count / 2
            {
                set_rates(sim, rates);
                begun = sim.now();
            }
        }
        done == count
    });
    let bytes = if change.is_some() { total / 2 } else { total };
    bytes as f64 / (sim.now() - begun) as f64
}

#[test]
fn put_signals_are_not_held_up_by_a_rail_that_is_slow_from_the_start() {
    for (slower, least) in [(1, 0.9), (3, 0.9), (10, 0.9), (100, 0.9), (1000, 0.85)] {
        for len in [64 << 10, PUT] {
            let rates = [8000, 8000 / slower];
            let sum = (rates[0] + rates[1]) as f64;
            let got = in_order(rates, None, len, 64, 1 << 30);
            println!("1:{slower}, {len} bytes: {:.3} of the sum", got / sum);
            assert!(got >= least * sum, "1:{slower}, {len} bytes: {:.3} of the sum", got / sum);
        }
    }
}

#[test]
fn one_put_signal_at_a_time_uses_all_rails_if_all_are_slow() {
    for (rates, least) in [([32, 32], 0.9), ([32, 10], 0.85), ([8000, 8000], 0.0)] {
        let (sim, control) = (fabric(2, 2, 1024, QUICK, 7), shared());
        set_rates(sim, rates);
        NOW.set(1);
        let tap = |_, rail: u16, end| Tap::timed(end, usize::from(rail), &control);
        let nodes = fleet::<_, 2>(sim, 2, Config::DEFAULT, PUT, tap);
        let sum = (rates[0] + rates[1]) as f64;
        let got = carry(sim, nodes, None, 64 << 10, 1, 16 << 20);
        println!("{rates:?}: {:.3} of the sum", got / sum);
        assert!(got >= least * sum, "{rates:?}: {:.3} of the sum", got / sum);
        // A signal follows the writes of its put-signal.
        let posts = &control.borrow().posts;
        let longest = posts.iter().rev().take(50).map(|post| post.len).max();
        assert_eq!(longest > Some(32 << 10), rates[0] == 8000, "{rates:?}: {longest:?}");
    }
}

#[test]
fn rails_that_change_their_speed_are_found_out() {
    for (before, after, least) in [
        ([8000, 80], [8000, 8000], 0.75),
        ([8000, 2000], [2000, 8000], 0.9),
        // The rail that becomes slow still has outstanding posts, which block the window once.
        ([80, 8000], [8000, 80], 0.4),
    ] {
        let sum = (after[0] + after[1]) as f64;
        let got = in_order(before, Some(after), 64 << 10, 64, 1 << 30);
        println!("{before:?}, then {after:?}: {:.3} of the sum", got / sum);
        assert!(got >= least * sum, "{before:?}, then {after:?}: {:.3} of the sum", got / sum);
    }
}

const QUICK: Dials = Dials { min_delay: 4, max_delay: 12, ..Dials::CALM };

#[test]
fn two_unequal_rails_carry_nine_tenths_of_their_sum() {
    for rates in [[6144, 2048], [2048, 6144], [4096, 4096], [7168, 1024]] {
        for ordered in [true, false] {
            let sum = (rates[0] + rates[1]) as f64;
            let got = together(rates, RailPolicy::LeastOutstanding, Dials { ordered, ..QUICK });
            println!("{rates:?}: {:.3} of the sum", got / sum);
            assert!(got >= 0.9 * sum, "{rates:?}: {:.3} of the sum", got / sum);
        }
    }
}

#[test]
fn with_round_robin_the_slower_rail_sets_the_pace() {
    // For comparison: round robin is slower than the policies above.
    let got = together([6144, 2048], RailPolicy::RoundRobin, QUICK);
    assert!(got < 0.6 * 8192.0, "{:.3} of the sum", got / 8192.0);
}

/// Creates a fleet over rails that accept at most `depth` posts at a time. If `refuses` returns
/// true for a post, the rails refuse it too.
fn shallow(
    sim: &'static Sim<'static>,
    nodes: u16,
    depth: u32,
    refuses: fn(&Post) -> bool,
) -> Vec<Node<Tap<End>, 2>> {
    fleet(sim, nodes, Config::DEFAULT, PUT, |_, rail, end| {
        let control = shared();
        let posts = Rc::new(Cell::new(0));
        let ended = posts.clone();
        control.borrow_mut().refuse = Some(Box::new(move |post| {
            if posts.get() == depth || refuses(post) {
                return Some(PostError::Again);
            }
            posts.set(posts.get() + 1);
            None
        }));
        control.borrow_mut().edit = Some(Box::new(move |_, event| {
            if let Event::Done(..) = event {
                ended.set(ended.get() - 1);
            }
            vec![event]
        }));
        Tap::new(end, rail.into(), &control)
    })
}

#[test]
fn posts_wait_for_a_fast_rail_that_is_full() {
    for len in [64 << 10, PUT] {
        let (rates, sum) = ([8000, 80], 8080.0);
        let sim = fabric(2, 2, 1024, QUICK, 7);
        set_rates(sim, rates);
        let got = carry(sim, shallow(sim, 2, 16, |_| false), None, len, 64, 1 << 28);
        println!("{len} bytes: {:.3} of the sum", got / sum);
        assert!(got >= 0.9 * sum, "{len} bytes: {:.3} of the sum", got / sum);
    }
}

#[test]
fn posts_do_not_wait_for_a_rail_that_takes_none_from_their_peer() {
    // The fast rail accepts puts to peer 2, but refuses all puts to peer 1.
    let sim = fabric(3, 2, 1024, QUICK, 7);
    set_rates(sim, [8000, 400]);
    let refuses = |post: &Post| (post.rail, post.peer, post.verb) == (0, Peer(1), Verb::Write);
    let mut nodes = shallow(sim, 3, 6, refuses);
    let (mut issued, mut done) = ([0u64; 3], [0u64; 3]);
    let begun = sim.now();
    turn_until(&mut nodes, "peer 1 has got 200 puts", |nodes| {
        let node = &mut nodes[0];
        for peer in [1, 2] {
            while issued[peer] < done[peer] + 32 {
                let (from, to) = (node.source.at(0), node.remotes[peer].at(0));
                node.engine
                    .put(ContextId(0), from, 64 << 10, to, Notice::Report(peer as u64))
                    .unwrap();
                issued[peer] += 1;
            }
        }
        while let Some(completion) = node.engine.next_completion() {
            done[completion.tag as usize] += 1;
        }
        done[1] >= 200
    });
    // The wait takes 10,000 passes of 6 polls each. A put takes 164 polls.
    let took = sim.now() - begun;
    assert!(took < 150_000, "{took} polls");
}
