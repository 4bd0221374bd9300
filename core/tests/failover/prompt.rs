//! How long operations wait after a rail was reported dead, in simulated time.

use fishplate_core::engine::{Config, Notice, Signal};
use fishplate_core::mem::RailId;
use fishplate_core::rail::sim::Dials;

use super::support::fleet::{self, End, Node};
use super::support::scope::Scope;
use super::support::tap::{NOW, Tap, shared};
use super::support::{CX, word};

/// The time of a poll of the fabric, and the delays of a message in polls: up to a millisecond.
const POLL_NS: u64 = 10_000;
const DIALS: Dials = Dials { min_delay: 10, max_delay: 100, ..Dials::CALM };

/// Time from the report of a rail's death to the end of all operations that waited.
const LIMIT_NS: u64 = 100_000_000;

type Fleet = Vec<Node<Tap<End, true>, 4>>;

struct Case {
    rails: u16,
    nodes: u16,
    closes: bool,
    /// Whether the links are cut from node 0 to node 1, and in the other direction.
    ways: [bool; 2],
    /// Whether nodes other than 0 and 1 stand still.
    silent: bool,
}

fn put(fleet: &mut Fleet, count: u64) {
    for (me, node) in fleet[..2].iter_mut().enumerate() {
        let (from, to) = (node.source.at(0), node.remotes[1 - me]);
        let signal = Signal::add(to.at(0), 1);
        for n in 0..count {
            node.engine
                .put_signal(CX, from, 64, to.at(64 * n + 64), signal, Notice::Silent)
                .unwrap();
        }
    }
}

/// Cuts all links but one between nodes 0 and 1 while operations are in flight. Returns the time
/// from the report of the last cut to the end of all operations.
fn stall(case: &Case, seed: u64) -> u64 {
    let _scope = Scope::new();
    NOW.set(1);
    let (control, &Case { rails, nodes, .. }) = (shared(), case);
    let sim = fleet::fabric(nodes, rails, 1024, DIALS, seed);
    let wrap = |rail: u16, end: End| Tap::timed(end, rail.into(), &control);
    let mut fleet: Fleet =
        fleet::lasting(sim, nodes, rails, case.closes, Config::DEFAULT, 4096, wrap, |_| ());
    let awake = if case.silent { 2 } else { nodes as usize };
    let (mut turns, mut looked) = (0, 0);
    let mut turn = |fleet: &mut Fleet| {
        turns += 1;
        NOW.set(NOW.get() + POLL_NS);
        fleet[..awake].iter_mut().for_each(|node| _ = node.engine.progress());
        if NOW.get() - looked >= 10_000_000 {
            looked = NOW.get();
            fleet[..awake].iter_mut().for_each(|node| node.engine.check_peers());
        }
        assert!(turns < 1 << 18, "no end");
    };
    put(&mut fleet, 16);
    (0..30 + seed % 50).for_each(|_| turn(&mut fleet));
    put(&mut fleet, 16);
    turn(&mut fleet);
    for rail in 1..rails {
        for (me, cut) in (0..2).zip(case.ways) {
            if cut {
                sim.cut(me, 1 - me, rail, 0).unwrap();
            }
        }
    }
    put(&mut fleet, 16);
    let down = |fleet: &Fleet| {
        let of = |me: usize| {
            let Node { engine, peers, .. } = &fleet[me];
            (0..rails as u8)
                .filter(|&rail| engine.rail_error(peers[1 - me], RailId(rail)) != Ok(None))
                .count()
        };
        of(0).max(of(1))
    };
    let (mut seen, mut reported) = (0, NOW.get());
    let is_over = |fleet: &mut Fleet| {
        (0..2).all(|me| {
            let Node { engine, peers, target, .. } = &mut fleet[me];
            engine.is_quiet(CX, peers[1 - me]) == Ok(true) && word(engine, target.at(0)) == 48
        })
    };
    while !is_over(&mut fleet) {
        turn(&mut fleet);
        if down(&fleet) > seen {
            (seen, reported) = (down(&fleet), NOW.get());
        }
    }
    assert!(fleet[..2].iter().any(|node| node.engine.stats().reposted != 0), "nothing waited");
    NOW.get() - reported
}

#[test]
fn waiting_operations_end_within_100_ms_after_a_rail_is_reported_dead() {
    let ways = [[true, true], [true, false], [false, true]];
    for (rails, nodes, closes, silent) in [
        (2, 2, false, false),
        (4, 2, false, false),
        (2, 2, true, false),
        (4, 2, true, false),
        (2, 4, true, false),
        (2, 3, true, true),
    ] {
        for ways in ways {
            let case = Case { rails, nodes, closes, ways, silent };
            let longest = (1..=4).map(|seed| stall(&case, seed)).max().unwrap_or(0);
            let what = format!("{rails} rails, {nodes} nodes, {closes}, {silent}, {ways:?}");
            println!("{what}: {} us", longest / 1000);
            assert!(longest <= LIMIT_NS, "{what}: {longest} ns");
        }
    }
}
