//! Rails that fail and return: which peers and rails fail, and how soon a rail is used again.

use fishplate_core::engine::{Config, Notice, Signal};
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::rail::sim::Dials;

use super::support::tap::{Tap, Verb, shared};
use super::support::*;

/// Maximum delay of traffic that still lands after a cut, in polls.
const LATE: u32 = 2000;

/// For each node, its fences: pairs of rail and peer.
type Fences = Vec<Vec<(usize, Peer)>>;

/// Runs four nodes over rails with fences that cut off all peers. Cuts every link of each listed
/// (node, rail). Returns each node's fences, and which peers have failed at each node.
fn isolated(cuts: &[(u16, u16)], seed: u64) -> (Fences, Vec<Vec<bool>>) {
    const NODES: u16 = 4;
    let config = Config { seed, ..Config::DEFAULT };
    let sim = fleet::fabric(NODES, 2, 512, Dials::WILD, seed);
    let controls: Vec<_> = (0..NODES).map(|_| shared()).collect();
    let mut fleet: Vec<fleet::Node<Tap<fleet::End>, 2>> = fleet::prepared(
        sim,
        NODES,
        config,
        4096,
        |node, rail, end| Tap::new(end.with_closing_fence(), rail.into(), &controls[node as usize]),
        |engine| engine.attach_failover(failover(&config, NODES.into())).unwrap(),
    );
    for turn in 0..6000 {
        for &(node, rail) in cuts.iter().filter(|_| turn == 0) {
            sim.unplug(node, rail, LATE).unwrap();
        }
        fleet::turn(&mut fleet);
        for (from, node) in fleet.iter_mut().enumerate() {
            let to = turn % NODES as usize;
            let at = node.remotes[to].at(8 * from as u64);
            _ = node.engine.signal(CX, Signal::add(at, 1), Notice::Silent);
        }
    }
    let fences = controls.iter().map(|control| control.borrow().fences.clone()).collect();
    let failed = |node: &fleet::Node<Tap<fleet::End>, 2>| {
        node.peers.iter().map(|&peer| node.engine.peer_error(peer) != Ok(None)).collect()
    };
    let lost = fleet.iter().map(failed).collect();
    for (from, node) in fleet.iter().enumerate().take(2) {
        for (to, &peer) in node.peers.iter().enumerate().take(2) {
            let reasons = [0, 1].map(|rail| node.engine.rail_error(peer, RailId(rail)));
            assert_eq!(
                reasons,
                [Ok(None); 2],
                "seed {seed}: {from} to {to} lost a rail for nothing"
            );
        }
    }
    (fences, lost)
}

#[test]
fn a_process_that_ends_takes_no_rail_from_others() {
    for seed in seeds(20) {
        // First one node loses all its links. Then two nodes lose all theirs. The first node's loss
        // is detected first on rail 0, the second node's on rail 1.
        for gone in [&[(2, 0), (2, 1)][..], &[(2, 0), (3, 1), (2, 1), (3, 0)]] {
            let (fences, lost) = isolated(gone, seed);
            let last = if gone.len() > 2 { 3 } else { 2 };
            for node in 0..2 {
                assert_eq!(fences[node], [], "seed {seed}: node {node} fenced");
                let others: Vec<_> = (0..4).map(|other| (2..=last).contains(&other)).collect();
                assert_eq!(lost[node], others, "seed {seed}: node {node}");
            }
        }
    }
}

#[test]
fn a_rail_is_fenced_once_the_peer_was_heard_over_another() {
    let (fences, lost) = isolated(&[(2, 0)], 1);
    for (node, fences) in fences.iter().enumerate().filter(|(node, _)| *node != 2) {
        // The first fence also cuts off the other peers of the rail, so their fences follow.
        assert_eq!(fences.first(), Some(&(0, Peer(2))), "{node}: {fences:?}");
        assert!(fences.iter().all(|fence| fence.0 == 0), "{node}: {fences:?}");
    }
    assert!(lost.iter().flatten().all(|lost| !lost), "{lost:?}");
}

/// Makes a rail slow, cuts it while long puts are outstanding, then heals it at full speed. Returns
/// the number of puts that each rail carries afterwards: of 8 puts one at a time, and of 256 puts
/// with 8 outstanding.
fn after_return(seed: u64, closing: bool) -> [[usize; 2]; 2] {
    const LONG: usize = 64 << 10;
    let config = Config { seed, ..Config::DEFAULT };
    let dials = Dials { min_delay: 4, max_delay: 12, rate: 800, ..Dials::CALM };
    let sim = fleet::fabric(2, 2, 512, dials, seed);
    let control = shared();
    let mut nodes: Vec<fleet::Node<Tap<fleet::End>, 2>> = fleet::prepared(
        sim,
        2,
        config,
        LONG,
        |node, rail, end| {
            let end = if closing { end.with_closing_fence() } else { end };
            Tap::new(
                end,
                rail.into(),
                if node == 0 { &control } else { Box::leak(Box::new(shared())) },
            )
        },
        |engine| engine.attach_failover(failover(&config, 2)).unwrap(),
    );
    let (mut issued, mut done) = (0, 0);
    let mut put = |nodes: &mut [fleet::Node<Tap<fleet::End>, 2>], until: u64, depth: u64| {
        let node = &mut nodes[0];
        let (from, to) = (node.source.at(0), node.remotes[1].at(0));
        while issued < until.min(done + depth)
            && node.engine.put(CX, from, LONG, to, Notice::Report(issued)).is_ok()
        {
            issued += 1;
        }
        done += std::iter::from_fn(|| node.engine.next_completion()).count() as u64;
        done
    };
    for turn in 0..22_000 {
        match turn {
            300 => sim.set_dials(0, Dials { rate: 80, ..dials }),
            20_000 => sim.unplug(0, 0, 0).unwrap(),
            _ => {}
        }
        put(&mut nodes, u64::MAX, 8);
        fleet::turn(&mut nodes);
    }
    sim.set_dials(0, dials);
    sim.plug(0, 0).unwrap();
    fleet::turn_until(&mut nodes, "the rail has returned", |nodes| {
        put(nodes, 0, 0);
        nodes.iter_mut().enumerate().all(|(at, node)| {
            let reason = node.engine.rail_error(node.peers[1 - at], RailId(0));
            let quiet = node.engine.is_quiet(CX, node.peers[1 - at]) == Ok(true);
            node.engine.stats().rails_returned != 0 && reason == Ok(None) && quiet
        })
    });
    [(1, 8), (8, 256)].map(|(depth, count)| {
        control.borrow_mut().posts.clear();
        let last = put(&mut nodes, 0, 0) + count;
        fleet::turn_until(&mut nodes, "all puts are done", |nodes| put(nodes, last, depth) == last);
        let posts = &control.borrow().posts;
        let written =
            |rail| posts.iter().filter(move |post| post.verb == Verb::Write && post.rail == rail);
        [0, 1].map(|rail| written(rail).count())
    })
}

#[test]
fn a_rail_that_returns_is_used_at_once() {
    for seed in seeds(3) {
        for closing in [false, true] {
            let got @ [single, many] = after_return(seed, closing);
            assert!(single[0] >= 1 && many[0] >= 256 / 3, "seed {seed}, {closing}: {got:?}");
        }
    }
}
