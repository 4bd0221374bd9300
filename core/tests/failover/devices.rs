//! Device memory while rails fail and return. The rails reach it, or its bytes travel in messages,
//! or only some of the rails reach it.

use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{Region, RemoteId};
use fishplate_core::op::Outcome;
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

/// Two nodes with device memory that no rail reaches, and node 0's import of node 1's memory.
fn carried(seed: u64, dials: Dials, delay: u32) -> (Vec<Node<Veiled<End>, 2>>, [Region; 2], RemoteId) {
    let sim = fleet::fabric(2, 2, 512, dials, seed);
    let wrap = |_, end| {
        let mut end = Veiled::new(end);
        (end.apart, end.delay) = (true, delay);
        end
    };
    let matching = MatchConfig { pieces: 4, ..SMALL };
    let config = Config { window: 16, ..Config::DEFAULT };
    let attach = |engine: &mut Engine<'static, Veiled<End>, 2>| {
        engine.attach_matching(matching, match_memory(matching, 2, 8)).unwrap();
    };
    let mut fleet = fleet::lasting(sim, 2, 2, false, config, 4096, wrap, attach);
    let regions = [(); 2].map(|()| device_region(4096));
    let ids = [0, 1].map(|at| fleet[at].engine.register(regions[at]).unwrap());
    let mut handle = [0; 512];
    let len = fleet[1].engine.export(ids[1], &mut handle).unwrap();
    let peer = fleet[0].peers[1];
    let theirs = fleet[0].engine.import(peer, &handle[..len]).unwrap();
    (fleet, regions, theirs)
}

#[test]
fn a_get_of_carried_memory_completes_while_its_owner_closes() {
    for seed in seeds(100) {
        let (mut fleet, regions, theirs) = carried(seed, Dials::WILD, 1);
        let data: Vec<u8> = (0..4096_u32).map(|at| (at * 7 + seed as u32) as u8).collect();
        poke(&regions[1], 0, &data);
        let (one, two) = (fleet[0].peers[1], fleet[1].peers[0]);
        let into = fleet[0].source.at(0);
        fleet[0].engine.get(CX, into, 4096, theirs.at(0), Notice::Report(1)).unwrap();
        (0..seed % 40).for_each(|_| fleet::turn(&mut fleet));
        fleet[1].engine.close_peer(two).unwrap();
        let mut end = None;
        fleet::turn_until(&mut fleet, "both have closed", |fleet| {
            end = end.or(fleet[0].engine.next_completion());
            let errors = [fleet[0].engine.peer_error(one), fleet[1].engine.peer_error(two)];
            errors.iter().all(|error| *error != Ok(None))
        });
        let errors = [fleet[0].engine.peer_error(one), fleet[1].engine.peer_error(two)];
        assert_eq!(errors, [Ok(Some(PeerError::Closed)); 2], "seed {seed}");
        assert_eq!(end.map(|end| end.outcome), Some(Outcome::Done), "seed {seed}");
        assert!(read(&fleet[0].engine, into, 4096) == data, "seed {seed}");
    }
}

/// Answers to gets have numbers, so something is in flight all the time.
#[test]
fn a_fence_ends_while_the_peer_keeps_getting_carried_memory() {
    for (seed, inject) in seeds(20).into_iter().flat_map(|seed| [(seed, false), (seed, true)]) {
        let (mut fleet, _, theirs) = carried(seed, Dials { min_delay: 20, max_delay: 40, ..Dials::CALM }, 0);
        let (two, to) = (fleet[1].peers[0], fleet[1].remotes[0].at(0));
        let from = fleet[1].source.at(0);
        let engine = &mut fleet[1].engine;
        engine.inject(CX, &[1; 8], to).unwrap();
        engine.fence(CX, two).unwrap();
        if !inject {
            engine.put(CX, from, 512, to, Notice::Report(1)).unwrap();
        }
        let mut open = 0;
        let ended = (0..2000).any(|_| {
            while open < 4 {
                let into = fleet[0].source.at(0);
                fleet[0].engine.get(CX, into, 4096, theirs.at(0), Notice::Report(2)).unwrap();
                open += 1;
            }
            fleet::turn(&mut fleet);
            while let Some(end) = fleet[0].engine.next_completion() {
                assert_eq!(end.outcome, Outcome::Done);
                open -= 1;
            }
            match inject {
                true => fleet[1].engine.inject(CX, &[2; 8], to).is_ok(),
                false => fleet[1].engine.next_completion().is_some(),
            }
        });
        assert!(ended, "seed {seed}, {inject}");
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
