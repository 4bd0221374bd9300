//! Device memory while rails fail and return. The rails reach it, or its bytes travel in messages,
//! or only some of the rails reach it.

use fishplate_core::engine::Engine;
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::mem::Region;
use fishplate_core::rail::sim::Dials;
use fishplate_core::rail::sim::schedule::{self, Event, Schedule};

use super::rig::{SMALL, match_memory};
use super::schedule::{Ends, all_return};
use super::support::devices::{self, Memory, Traffic};
use super::support::fleet::{self, End, Node};
use super::support::oracle;
use super::support::scope::Scope;
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

const RAILS: usize = 4;

/// Maximum number of turns. A longer run counts as hung.
const TURNS: u64 = 200_000;

/// The device memory of each node.
struct Regions(Vec<[Region; 2]>);

impl Memory for Regions {
    fn peek(&self, node: usize, region: usize, at: u64, len: usize) -> Vec<u8> {
        peek(&self.0[node][region], at as usize, len)
    }

    fn poke(&self, node: usize, region: usize, at: u64, bytes: &[u8]) {
        poke(&self.0[node][region], at as usize, bytes);
    }
}

#[derive(Debug, Default)]
struct Totals {
    issued: u64,
    failed: u64,
    reposted: u64,
    returned: u64,
}

fn run(seed: u64, totals: &mut Totals) {
    let _scope = Scope::new();
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9));
    let nodes = 2 + random.below(2) as u16;
    let count = 2 + random.below(RAILS as u64 - 1) as u16;
    let closes = random.below(4) == 0;
    let config = oracle::config(&mut random, seed);
    let matching = MatchConfig { pieces: 1 + random.below(4) as u8, ..SMALL };
    let dials = Dials { repeats: random.below(2) == 0, ..Dials::WILD };
    // The rails that do not reach device memory.
    let apart = [0, 0b1, u16::MAX, u16::MAX][random.below(4) as usize];
    let delay = random.below(4) as u32;
    let sim = fleet::fabric(nodes, count, 512, dials, seed);
    let size = devices::size(nodes.into());
    let wrap = |rail: u16, end: End| {
        let mut end = Veiled::new(end);
        (end.apart, end.delay) = (apart >> rail & 1 != 0, delay);
        end
    };
    let mut fleet: Vec<Node<_, RAILS>> = fleet::lasting(
        sim,
        nodes,
        count,
        closes,
        config,
        size,
        wrap,
        |engine: &mut Engine<'static, Veiled<End>, RAILS>| {
            let streams = nodes as usize * config.contexts as usize;
            engine.attach_matching(matching, match_memory(matching, streams, 8)).unwrap();
        },
    );
    let regions: Vec<_> = (0..nodes).map(|_| [device_region(size), device_region(size)]).collect();
    let ids = regions.iter().zip(&mut fleet);
    let ids = ids.map(|(both, node)| both.map(|region| node.engine.register(region).unwrap())).collect();
    let pace = [4, 12][random.below(2) as usize];
    let longest = if apart == 0 { u64::MAX } else { matching.eager.into() };
    let memory = (Regions(regions), ids);
    let mut traffic = Traffic::new(&mut fleet, memory, (config.contexts, longest, pace), seed);
    let scope = schedule::Scope { nodes, rails: count, own: true, closes, stalls: true };
    let mut schedule = Schedule::drawn(sim, scope, seed, leak(Event::EMPTY, 256));
    let busy = 200 + random.below(100) * pace;
    let heals = random.below(4) != 0;
    let mut over = None;
    for turn in 0.. {
        let stats = || fleet.iter().map(|node| node.engine.stats()).collect::<Vec<_>>();
        assert!(turn < TURNS, "seed {seed}: no end: {}; {:?}", traffic.open(), stats());
        if turn < busy {
            schedule.turn(turn, &mut Ends(&mut fleet, count));
        } else if turn == busy && heals {
            schedule.heal_all(turn, &mut Ends(&mut fleet, count));
        }
        traffic.turn(&mut fleet, turn < busy, &mut random);
        for me in (0..nodes).filter(|&me| schedule.is_awake(me, turn)) {
            fleet[me as usize].engine.progress();
        }
        if turn < busy || !traffic.is_over() {
            continue;
        }
        // Continues until no traffic can land late any more.
        if turn >= *over.get_or_insert(turn) + schedule.late() / (nodes as u64 * count as u64) {
            break;
        }
    }
    traffic.end(&fleet);
    for node in &fleet {
        let errors = node.peers.iter().map(|&peer| node.engine.peer_error(peer));
        errors.for_each(|error| assert_eq!(error, Ok(None), "seed {seed}"));
        let stats = node.engine.stats();
        totals.failed += stats.rails_failed;
        totals.reposted += stats.reposted;
        totals.returned += stats.rails_returned;
    }
    totals.issued += traffic.issued;
    if heals {
        all_return(&schedule, &mut fleet, count, None, seed);
    }
}

#[test]
fn device_memory_has_every_byte_once_and_in_order_while_rails_fail() {
    let (mut totals, seeds) = (Totals::default(), seeds(8));
    for &seed in &seeds {
        run(seed, &mut totals);
    }
    println!("{} seeds: {totals:?}", seeds.len());
    let Totals { issued, failed, reposted, returned } = totals;
    assert!(seeds.len() < 8 || issued >= 1000 && failed.min(reposted).min(returned) >= 10, "{totals:?}");
}
