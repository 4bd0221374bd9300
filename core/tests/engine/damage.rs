//! Damaged, repeated, lost and forged traffic causes no panic and does not affect other peers. Half
//! of the runs use failover.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::{Amo, AmoOp};
use fishplate_core::rail::sim::Dials;

use super::order::add;
use super::support::damage::damage;
use super::support::tap::{Tap, shared};
use super::support::*;

const SIZE: usize = 4096;

/// Damages the traffic from one node to another, on a faulty fabric of three nodes. Returns the
/// number of operations that were posted again.
fn run(seed: u64) -> u64 {
    let control = shared();
    let config = Config {
        window: 8,
        contexts: 2,
        first_sequence: STARTS[seed as usize % 4],
        ..Config::DEFAULT
    };
    let sim = fleet::fabric(3, 2, 64, Dials::WILD, seed);
    let mut random = Random(seed);
    let keeps = seed.is_multiple_of(2);
    let wrap = |node, rail, end| {
        let control = if node == 0 { control.clone() } else { shared() };
        Tap::new(end, rail as usize, &control)
    };
    let mut nodes = fleet::prepared::<_, 2>(sim, 3, config, SIZE, wrap, |engine| {
        if keeps {
            engine.attach_failover(failover(&config, 3)).unwrap();
        }
    });
    // Rail 0 between two nodes may fail. The nodes then continue without it.
    let mut fails = vec![];
    for ends in [(0, 1), (1, 0), (0, 2), (2, 0)] {
        if keeps && random.below(2) == 0 {
            fails.push((random.below(60), ends));
        }
    }
    let edit = damage(Peer(1), 2 + seed % 30, config.first_sequence, seed);
    control.borrow_mut().edit = Some(edit);
    let inc = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    let mut sent = 0u64;
    for n in 0..60u64 {
        for &(_, (me, to)) in fails.iter().filter(|fails| fails.0 == n) {
            let peer = nodes[me].peers[to];
            // The call is refused if the rail or the peer has already failed.
            let _ = nodes[me].engine.disable_rail(peer, RailId(0));
        }
        // The bad node sends to its victim, the victim to the bad node, and the third node to the
        // victim.
        for (me, to) in [(1, 0), (0, 1), (2, 0)] {
            let node = &mut nodes[me];
            let context = fishplate_core::engine::ContextId((n % 2) as u8);
            let region = node.remotes[to];
            let at = if me == 2 { 2048 } else { 0 };
            let done = match n % 4 {
                0 => node
                    .engine
                    .put(context, node.source.at(0), 200, region.at(at + 64), Notice::Silent)
                    .is_ok(),
                1 => node.engine.fetch(context, region.at(at + 8), inc, n).is_ok(),
                2 => node
                    .engine
                    .put_signal(
                        context,
                        node.source.at(0),
                        40,
                        region.at(at + 64),
                        add(region, at, 1),
                        Notice::Silent,
                    )
                    .is_ok(),
                _ => node.engine.signal(context, add(region, at, 1), Notice::Silent).is_ok(),
            };
            sent += (me == 2 && done && n % 4 >= 2) as u64;
            node.engine.progress();
            while node.engine.next_completion().is_some() {}
        }
        fleet::turn(&mut nodes);
    }
    let victim = nodes[2].peers[0];
    let contexts = [0, 1].map(fishplate_core::engine::ContextId);
    fleet::turn_until(&mut nodes, &format!("seed {seed}: the third node"), |nodes| {
        contexts.iter().all(|&context| nodes[2].engine.is_quiet(context, victim) == Ok(true))
    });
    // A flipped bit may send a signal to another word of the same region. So only the third node's
    // count is exact, and only if no damage hit its word. Other memory is unchanged.
    for node in &nodes[1..] {
        let source = read(&node.engine, node.source.at(0), SIZE);
        assert!(source.iter().all(|&b| b == 0), "seed {seed}: a source was written");
    }
    assert_eq!(nodes[0].engine.peer_error(nodes[0].peers[2]), Ok(None), "seed {seed}");
    assert_eq!(nodes[2].engine.peer_error(victim), Ok(None), "seed {seed}");
    assert!(
        word(&nodes[0].engine, nodes[0].target.at(2048)) >= sent
            || nodes[0].engine.stats().arrived > 0
    );
    nodes.iter().map(|node| node.engine.stats().reposted).sum()
}

#[test]
fn damaged_repeated_and_lost_traffic_never_panics_or_reaches_others() {
    let seeds = seeds(400);
    let reposted: u64 = seeds.iter().map(|&seed| run(seed)).sum();
    assert!(reposted > 0 || seeds.len() < 100);
}
