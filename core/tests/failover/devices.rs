//! Device memory while rails fail and return. All rails reach the memory, or only some, or none. If
//! none does, the bytes travel in messages.

use std::ptr::NonNull;

use fishplate_core::engine::protocol::{MatchConfig, Payload};
use fishplate_core::engine::{Config, Engine, Notice, RailPolicy};
use fishplate_core::error::{PeerError, PostError};
use fishplate_core::mem::{LocalId, RailId, Region, RemoteId, Span};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::Rail;
use fishplate_core::rail::sim::schedule::{self, Event, Schedule};
use fishplate_core::rail::sim::{Dials, Sim};

use super::rig::{EXACT, SMALL, match_memory, tag};
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

/// The two device regions of each node.
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
    // A bit for each rail that does not reach device memory.
    let apart = [0, 0b1, u16::MAX, u16::MAX][random.below(4) as usize];
    let delay = random.below(4) as u32;
    // The rails have different message limits. The shortest has room for three keys.
    let most: [usize; RAILS] =
        std::array::from_fn(|_| [256, 256, 160, 128][random.below(4) as usize]);
    let sim = fleet::fabric(nodes, count, 512, dials, seed);
    let size = devices::size(nodes.into());
    let wrap = |rail: u16, end: End| {
        let mut end = Veiled::new(end);
        (end.apart, end.delay, end.most) = (apart >> rail & 1 != 0, delay, most[rail as usize]);
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
    let ids =
        ids.map(|(both, node)| both.map(|region| node.engine.register(region).unwrap())).collect();
    let pace = [4, 12][random.below(2) as usize];
    let memory = (Regions(regions), ids);
    let mut traffic = Traffic::new(&mut fleet, memory, (config.contexts, pace), seed);
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
        // Continues until all late traffic must have landed.
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

/// Two nodes with device memory that no rail reaches. Each node imports the other's memory.
struct Two<const RAILS: usize> {
    sim: &'static Sim<'static>,
    fleet: Vec<Node<Veiled<End>, RAILS>>,
    regions: [Region; 2],
    ids: [LocalId; 2],
    theirs: [RemoteId; 2],
}

/// Connects two such nodes over rails with these message limits.
fn carried<const RAILS: usize>(
    seed: u64,
    dials: Dials,
    delay: u32,
    window: u32,
    most: [usize; RAILS],
) -> Two<RAILS> {
    let sim = fleet::fabric(2, RAILS as u16, 512, dials, seed);
    let wrap = |rail, end| {
        let mut end = Veiled::new(end);
        (end.apart, end.delay, end.most) = (true, delay, most[rail as usize]);
        end
    };
    let matching = MatchConfig { pieces: 4, ..SMALL };
    let config = Config { window, policy: RailPolicy::RoundRobin, ..Config::DEFAULT };
    let attach = |engine: &mut Engine<'static, Veiled<End>, RAILS>| {
        engine.attach_matching(matching, match_memory(matching, 2, 8)).unwrap();
    };
    let mut fleet = fleet::lasting(sim, 2, RAILS as u16, false, config, 4096, wrap, attach);
    let regions = [(); 2].map(|()| device_region(4096));
    let ids = [0, 1].map(|at| fleet[at].engine.register(regions[at]).unwrap());
    let theirs = [0, 1].map(|at| import_into(&mut fleet, at, ids[1 - at]));
    Two { sim, fleet, regions, ids, theirs }
}

/// Imports the other node's region at node `node`.
pub fn import_into<R: Rail, const RAILS: usize>(
    fleet: &mut [Node<R, RAILS>],
    node: usize,
    region: LocalId,
) -> RemoteId {
    let mut handle = [0; 512];
    let len = fleet[1 - node].engine.export(region, &mut handle).unwrap();
    let peer = fleet[node].peers[1 - node];
    fleet[node].engine.import(peer, &handle[..len]).unwrap()
}

/// Each piece fits the rails that are left. The pieces of an answer add up to the requested length.
#[test]
fn carried_memory_survives_rails_whose_limits_differ() {
    const LEN: usize = 1000;
    let orders = [[256, 128, 160], [128, 256, 160], [160, 128, 256], [256, 256, 128]];
    for seed in seeds(12) {
        let most = orders[seed as usize % 4];
        let mut two = carried(seed, Dials::WILD, seed as u32 % 3, 16, most);
        let mut random = Random(seed);
        // The nodes number the rails differently, so the two ends of a link have different limits.
        // The shorter limit applies.
        for round in 0..6 {
            let data: Vec<u8> = (0..4 * LEN).map(|_| random.next() as u8).collect();
            for node in 0..2 {
                // Fills the source of the put and of the get, at offsets 0 and 2 `LEN`.
                poke(&two.regions[node], 0, &data[node * LEN..][..LEN]);
                poke(&two.regions[node], 2 * LEN, &data[(2 + node) * LEN..][..LEN]);
                let (own, theirs) = (two.ids[node], two.theirs[node]);
                let engine = &mut two.fleet[node].engine;
                let at = LEN as u64;
                engine.put(CX, own.at(0), LEN, theirs.at(at), Notice::Report(1)).unwrap();
                engine.get(CX, own.at(3 * at), LEN, theirs.at(2 * at), Notice::Report(2)).unwrap();
            }
            let rail = random.below(3) as u16;
            let (pull, plug) = (random.below(60), 60 + random.below(200));
            let (mut open, mut turn) = (4, 0);
            fleet::turn_until(&mut two.fleet, &format!("seed {seed}, round {round}"), |fleet| {
                if turn == pull {
                    two.sim.unplug(0, rail, 30).unwrap();
                } else if turn == plug {
                    two.sim.plug(0, rail).unwrap();
                }
                turn += 1;
                for node in fleet {
                    while let Some(end) = node.engine.next_completion() {
                        assert_eq!(end.outcome, Outcome::Done, "seed {seed}, round {round}");
                        open -= 1;
                    }
                }
                open == 0 && turn > plug
            });
            for node in 0..2 {
                let put = peek(&two.regions[1 - node], LEN, LEN) == data[node * LEN..][..LEN];
                let got = peek(&two.regions[node], 3 * LEN, LEN) == data[(3 - node) * LEN..][..LEN];
                assert!(put && got, "seed {seed}, round {round}: {put}, {got}");
            }
            // The rail returns before the next round or during the next round.
            (0..random.below(2) * 3000).for_each(|_| fleet::turn(&mut two.fleet));
        }
    }
}

#[test]
fn a_get_of_carried_memory_completes_while_its_owner_closes() {
    for seed in seeds(100) {
        let Two { mut fleet, regions, theirs: [theirs, _], .. } =
            carried(seed, Dials::WILD, 1, 16, [256; 2]);
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

/// Answers to gets have sequence numbers, so something is always in flight. With a window of one,
/// answers and operations use the window in turn.
#[test]
fn operations_and_fences_end_while_the_peer_keeps_getting_carried_memory() {
    let cases = [(16, true), (16, false), (2, true), (2, false), (1, false)];
    for (seed, (window, inject)) in
        seeds(4).into_iter().flat_map(|seed| cases.map(|case| (seed, case)))
    {
        let dials = Dials { min_delay: 20, max_delay: 40, ..Dials::CALM };
        let Two { mut fleet, theirs: [theirs, _], .. } = carried(seed, dials, 0, window, [256; 2]);
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
            let engine = &mut fleet[1].engine;
            match inject {
                true => engine.inject(CX, &[2; 8], to).is_ok(),
                false => engine.is_quiet(CX, two).unwrap(),
            }
        });
        assert!(ended, "seed {seed}, window {window}, {inject}");
        let put = fleet[1].engine.next_completion().map(|end| end.outcome);
        assert_eq!(put, (!inject).then_some(Outcome::Done), "seed {seed}, window {window}");
    }
}

/// Node 1 answers gets, sends long messages in chunks, and puts. Node 0 gets, answers messages, and
/// puts. Each could fill a window.
#[test]
fn gets_messages_and_puts_share_a_window() {
    /// Maximum number of open operations of each kind.
    const OPEN: usize = 8;
    for window in [1, 2, 4, 16] {
        let Two { mut fleet, theirs: [theirs, _], .. } =
            carried(1, Dials::CALM, 0, window, [256; 2]);
        let [one, two] = [fleet[0].peers[1], fleet[1].peers[0]];
        let into = leak(0, 2048);
        // SAFETY: the memory is leaked, and only receives write it.
        let into = unsafe { Span::new(NonNull::from_mut(into).cast(), 2048) };
        let (mut issued, mut ended) = ([0; 4], [0; 4]);
        for _ in 0..2000 {
            for kind in 0..4 {
                let Node { engine, source, target, remotes, .. } = &mut fleet[[0, 1, 1, 0][kind]];
                let (from, notice) = (source.at(0), Notice::Report(kind as u64));
                while issued[kind] < ended[kind] + OPEN
                    && match kind {
                        0 => engine.get(CX, target.at(0), 4096, theirs.at(0), notice),
                        1 => engine.send(CX, two, tag(0), Payload::Region(from, 2048), notice),
                        2 => engine.put(CX, from, 8, remotes[0].at(0), notice),
                        _ => engine.put(CX, from, 8, remotes[1].at(0), notice),
                    }
                    .is_ok()
                {
                    issued[kind] += 1;
                }
            }
            while fleet[0].engine.recv(Some(one), tag(0), EXACT, into, 0).is_ok() {}
            fleet::turn(&mut fleet);
            while fleet[0].engine.next_recv().is_some() {}
            for node in &mut fleet {
                while let Some(end) = node.engine.next_completion() {
                    assert_eq!(end.outcome, Outcome::Done);
                    ended[end.tag as usize] += 1;
                }
            }
        }
        println!("window {window}: {ended:?}");
        let least = if window == 1 { 5 } else { 40 };
        assert!(ended.iter().all(|&count| count >= least), "window {window}: {ended:?}");
    }
}

/// The owner deregisters memory while it answers gets of it, and then overwrites that memory.
#[test]
fn carried_gets_of_memory_that_is_gone_fail_alone_while_rails_fail() {
    const LEN: usize = 1000;
    let (mut refused, seeds) = (0, seeds(24));
    for &seed in &seeds {
        let mut random = Random(seed);
        let window = [1, 4, 16][seed as usize % 3];
        let mut two = carried(seed, Dials::WILD, seed as u32 % 4, window, [256; 2]);
        let data: Vec<u8> = (0..4096).map(|_| random.next() as u8 | 1).collect();
        poke(&two.regions[1], 0, &data);
        let (pull, gone) = (random.below(100), random.below(150));
        let device = |n: u64| n.is_multiple_of(2);
        for n in 0..4 {
            let Node { engine, source, .. } = &mut two.fleet[0];
            let own = if device(n) { two.ids[0] } else { *source };
            let at = n * LEN as u64;
            engine.get(CX, own.at(at), LEN, two.theirs[0].at(at), Notice::Report(n)).unwrap();
        }
        let found = |node: &Node<_, 2>, region: &Region, n: u64| match device(n) {
            true => peek(region, n as usize * LEN, LEN),
            false => read(&node.engine, node.source.at(n * LEN as u64), LEN),
        };
        let (mut ends, mut turn) = (vec![], 0);
        fleet::turn_until(&mut two.fleet, &format!("seed {seed}: gets"), |fleet| {
            if turn == pull {
                two.sim.unplug(0, (seed % 2) as u16, 30).unwrap();
            }
            if turn == gone {
                fleet[1].engine.deregister(two.ids[1]).unwrap();
                poke(&two.regions[1], 0, &[0; 4096]);
            }
            turn += 1;
            while let Some(end) = fleet[0].engine.next_completion() {
                let n = end.tag;
                let bytes = found(&fleet[0], &two.regions[0], n);
                match end.outcome {
                    Outcome::Done => {
                        assert!(bytes == data[n as usize * LEN..][..LEN], "seed {seed}: {n}")
                    }
                    end => {
                        let why = Fault::Post(RailId(0), PostError::BadKey);
                        assert_eq!(
                            (end, turn > gone),
                            (Outcome::Failed(why), true),
                            "seed {seed}: {n}"
                        );
                        refused += 1;
                    }
                }
                ends.push((n, bytes));
            }
            ends.len() == 4 && turn > gone
        });
        two.sim.plug(0, (seed % 2) as u16).unwrap();
        (0..2000).for_each(|_| fleet::turn(&mut two.fleet));
        for (n, bytes) in ends {
            let now = found(&two.fleet[0], &two.regions[0], n);
            assert!(now == bytes, "seed {seed}: get {n} was written after its end");
        }
        // Both nodes continue to work.
        poke(&two.regions[1], 0, &data);
        let again = two.fleet[1].engine.register(two.regions[1]).unwrap();
        let theirs = import_into(&mut two.fleet, 0, again);
        let Node { engine, source, .. } = &mut two.fleet[0];
        engine.get(CX, source.at(0), 4096, theirs.at(0), Notice::Report(9)).unwrap();
        let mut end = None;
        fleet::turn_until(&mut two.fleet, &format!("seed {seed}: one more get"), |fleet| {
            end = fleet[0].engine.next_completion();
            end.is_some()
        });
        assert_eq!(end.map(|end| end.outcome), Some(Outcome::Done), "seed {seed}");
        assert!(read(&two.fleet[0].engine, two.fleet[0].source.at(0), 4096) == data, "seed {seed}");
        assert_eq!(two.fleet[1].engine.peer_error(two.fleet[1].peers[0]), Ok(None), "seed {seed}");
    }
    println!("{refused} of {} gets refused", 4 * seeds.len());
    assert!(seeds.len() < 24 || refused >= 24, "{refused}");
}

#[test]
fn device_memory_has_every_byte_once_and_in_order_while_rails_fail() {
    let (mut totals, seeds) = (Totals::default(), seeds(8));
    for &seed in &seeds {
        run(seed, &mut totals);
    }
    println!("{} seeds: {totals:?}", seeds.len());
    let Totals { issued, failed, reposted, returned } = totals;
    assert!(
        seeds.len() < 8 || issued >= 1000 && failed.min(reposted).min(returned) >= 10,
        "{totals:?}"
    );
}
