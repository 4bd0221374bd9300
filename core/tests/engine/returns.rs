//! Rails whose fence cuts off all peers: which peers and rails fail.

use fishplate_core::engine::{Config, Notice, Signal};
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::rail::sim::Dials;

use super::support::tap::{Tap, shared};
use super::support::*;

/// Maximum number of polls after a cut in which traffic of the link may still land.
const LATE: u32 = 2000;

/// The fences at each node, as rail and peer.
type Fences = Vec<Vec<(usize, Peer)>>;

/// Runs four nodes over rails whose fence cuts off all peers. Cuts all links of the listed nodes on
/// the listed rails. Returns the fences, and for each node which other nodes have failed.
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
            assert_eq!(reasons, [Ok(None); 2], "seed {seed}: {from} to {to} lost a rail for nothing");
        }
    }
    (fences, lost)
}

#[test]
fn a_process_that_ends_takes_no_rail_from_others() {
    for seed in seeds(20) {
        // First one node loses all its links. Then two nodes lose theirs. The losses of the two
        // nodes are detected first on different rails.
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
