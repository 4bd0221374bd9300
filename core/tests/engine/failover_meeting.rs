//! Two engines connect over several rails while some rails fail. One engine or both engines have
//! failover.

use fishplate_core::engine::{Config, Engine, Joint, Notice, Signal};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{LocalId, Peer, PeerId, RailId, RemoteId};
use fishplate_core::op::Outcome;
use fishplate_core::rail::sim::{Dials, Sim};

use super::support::fleet::End;
use super::support::tap::{Event, Tap, shared};
use super::support::*;

struct Side<const RAILS: usize> {
    engine: Engine<'static, End, RAILS>,
    peer: PeerId,
    source: LocalId,
    target: LocalId,
    remote: Option<RemoteId>,
    /// Number of operations posted before the connection, and their outcomes.
    ops: u64,
    done: u64,
    failed: u64,
}

impl<const RAILS: usize> Side<RAILS> {
    fn new(sim: &'static Sim<'static>, node: u16, keeps: bool, ops: u64, config: Config) -> Self {
        let config = Config { seed: node.into(), ..config };
        let rails = std::array::from_fn(|rail| {
            let mut end = sim.endpoint(node, rail as u16);
            end.attach(Peer(0), 1 - node).unwrap();
            end
        });
        let mut engine = engine::<_, RAILS>(config, rails);
        if keeps {
            engine.attach_failover(failover(&config, 4)).unwrap();
        }
        let peer = engine.reserve_peer().unwrap();
        let source = engine.register(region(512)).unwrap();
        let target = engine.register(region(512)).unwrap();
        Side { engine, peer, source, target, remote: None, ops, done: 0, failed: 0 }
    }

    /// Connects, and posts operations that wait until both engines have connected.
    fn connect(&mut self, handle: &[u8]) {
        self.engine.connect_peer(self.peer, (1 << RAILS) - 1).unwrap();
        let remote = self.engine.import(self.peer, handle).unwrap();
        self.remote = Some(remote);
        for n in 0..self.ops {
            let add = Signal::add(remote.at(0), 1);
            let to = remote.at(8 + 8 * n);
            self.engine.put_signal(CX, self.source.at(0), 8, to, add, Notice::Report(n)).unwrap();
        }
    }

    fn pass(&mut self) {
        self.engine.progress();
        while let Some(done) = self.engine.next_completion() {
            match done.outcome {
                Outcome::Done => self.done += 1,
                _ => self.failed += 1,
            }
        }
    }
}

/// What happened to the connections of all runs.
#[derive(Debug, Default)]
struct Met {
    /// Number of rails that failed.
    failed: u64,
    /// Number of engines that failed their peer.
    given_up: u64,
}

fn meets<const RAILS: usize>(seed: u64, keeps: [bool; 2], cuts: bool, all: &mut Met) {
    let mut random = Random(seed ^ 0x3ee7);
    let dials = if random.below(4) == 0 { Dials::CALM } else { Dials::WILD };
    let sim = fleet::fabric(2, RAILS as u16, 64, dials, seed);
    let (batch, ack_age) =
        ([1, 32][random.below(2) as usize], [4, u32::MAX][random.below(2) as usize]);
    let (config, ops) = (Config { batch, ack_age, ..Config::DEFAULT }, 1 + random.below(6));
    let mut sides: [Side<RAILS>; 2] =
        [0, 1].map(|n| Side::new(sim, n, keeps[n as usize], ops, config));
    let handles = [0, 1].map(|n: usize| {
        let mut handle = [0; 512];
        let len = sides[n].engine.export(sides[n].target, &mut handle).unwrap();
        handle[..len].to_vec()
    });
    let starts = [0, random.below(40)];
    let spared = random.below(RAILS as u64) as u16;
    let mut plan: Vec<(u64, u16, u16, u64)> = vec![];
    for rail in (0..RAILS as u16).filter(|&rail| cuts && rail != spared) {
        plan.push((random.below(80), rail, random.below(2) as u16, random.below(3)));
    }
    let settled = |side: &Side<RAILS>| side.done + side.failed == ops;
    let mut turns = 0u64;
    let lasts = keeps == [true; 2];
    // Runs long enough that both engines learn of every cut. If an engine failed its peer before
    // the peer connected, the peer waits for ever.
    let waits = lasts || !cuts;
    while turns < 1500 || (waits && !sides.iter().all(settled)) {
        assert!(
            turns < 100_000,
            "seed {seed}: no end; {:?}",
            sides.each_ref().map(|s| s.engine.stats())
        );
        for &(_, rail, from, how) in plan.iter().filter(|cut| cut.0 == turns) {
            if how < 2 {
                sim.cut(from, 1 - from, rail, 300).unwrap();
            }
            if how == 1 {
                sim.cut(1 - from, from, rail, 300).unwrap();
            }
            let side = &mut sides[from as usize];
            if how == 2 && side.engine.disable_rail(side.peer, RailId(rail as u8)).is_err() {
                // The rail could not be disabled: the engine is not connected yet, or has no
                // failover.
                sim.cut(from, 1 - from, rail, 300).unwrap();
            }
        }
        for n in 0..2 {
            if turns == starts[n] {
                sides[n].connect(&handles[1 - n]);
            }
            if turns >= starts[n] {
                sides[n].pass();
            }
        }
        turns += 1;
    }
    for (n, side) in sides.iter().enumerate() {
        let error = side.engine.peer_error(side.peer).unwrap();
        assert!(!matches!(error, Some(PeerError::Protocol(_))), "seed {seed}, node {n}: {error:?}");
        if waits {
            let (there, stats) = (&sides[1 - n], side.engine.stats());
            assert_eq!((error, side.done), (None, ops), "seed {seed}, node {n}: {stats:?}");
            assert_eq!(word(&there.engine, there.target.at(0)), ops, "seed {seed}, node {n}");
            assert_eq!(side.engine.has_failover(side.peer), Ok(lasts), "seed {seed}, node {n}");
        } else {
            // An engine can lose a rail only before it learns that the other engine has no
            // failover.
            let lost = side.engine.stats().rails_failed != 0;
            assert!(
                !lost || side.engine.has_answered(side.peer) == Ok(false),
                "seed {seed}, node {n}"
            );
            all.given_up += u64::from(error.is_some());
        }
        all.failed += side.engine.stats().rails_failed;
    }
}

fn all(seed: u64, keeps: [bool; 2], cuts: bool, met: &mut Met) {
    match seed % 3 {
        0 => meets::<2>(seed, keeps, cuts, met),
        1 => meets::<3>(seed, keeps, cuts, met),
        _ => meets::<4>(seed, keeps, cuts, met),
    }
}

#[test]
fn a_rail_that_fails_during_the_connection_loses_nothing() {
    let mut met = Met::default();
    let seeds = seeds(1000);
    for &seed in &seeds {
        all(seed, [true; 2], true, &mut met);
    }
    println!("{met:?}");
    assert!(met.failed >= seeds.len() as u64 / 2, "{met:?}");
}

#[test]
fn without_failover_at_both_ends_the_first_failed_rail_fails_the_peer() {
    let mut met = Met::default();
    let seeds = seeds(1000);
    for &seed in &seeds {
        let keeps = [seed % 2 == 0, seed % 2 == 1];
        all(seed, keeps, false, &mut met);
        all(seed, keeps, true, &mut met);
    }
    println!("{met:?}");
    assert!(met.given_up >= seeds.len() as u64 / 2, "{met:?}");
}

/// With failover at both ends, any rail may have to take over a message, so the shortest limit
/// applies. Otherwise the longest limit applies.
#[test]
fn rails_with_different_limits_carry_what_all_of_them_or_one_of_them_accepts() {
    for keeps in [[true, true], [true, false], [false, true]] {
        let sim = fleet::fabric(2, 2, 64, Dials::CALM, 1);
        let mut sides =
            [0, 1].map(|n| Side::<2>::new(sim, n, keeps[n as usize], 0, Config::DEFAULT));
        for Side { engine, peer, .. } in &mut sides {
            let joint = |rail, max_message| Joint { ours: RailId(rail), theirs: rail, max_message };
            engine.join_peer(*peer, &[joint(0, 160), joint(1, 200)], None).unwrap();
        }
        (0..100).for_each(|_| sides.iter_mut().for_each(Side::pass));
        for Side { engine, peer, .. } in &sides {
            let lasts = keeps == [true; 2];
            assert_eq!(engine.has_failover(*peer), Ok(lasts), "{keeps:?}");
            // Without failover, an inject is one message. With failover, it fits the record that is
            // kept for it.
            let most = if lasts { 64 } else { 200 - 48 };
            assert_eq!(engine.inject_max(*peer), most, "{keeps:?}");
        }
    }
}

#[test]
fn a_hello_that_was_lost_with_its_rail_is_answered_again() {
    for seed in seeds(20) {
        let sim = fleet::fabric(2, 2, 64, Dials::CALM, seed);
        let controls = [shared(), shared()];
        let mut ends = [0, 1].map(|node: u16| {
            let config = Config { seed: node.into(), ..Config::DEFAULT };
            let rails = std::array::from_fn(|rail| {
                let mut end = sim.endpoint(node, rail as u16);
                end.attach(Peer(0), 1 - node).unwrap();
                Tap::new(end, rail, &controls[node as usize])
            });
            let mut engine = engine::<_, 2>(config, rails);
            engine.attach_failover(failover(&config, 4)).unwrap();
            let peer = engine.reserve_peer().unwrap();
            engine.connect_peer(peer, 0b11).unwrap();
            (engine, peer)
        });
        // Drops the messages that node 1 receives over its first rail, until that rail has failed.
        let drop_first = |rail, event| match (rail, &event) {
            (0, Event::Message(..)) => vec![],
            _ => vec![event],
        };
        controls[1].borrow_mut().edit = Some(Box::new(drop_first));
        for turn in 0..20_000 {
            if turn == 200 {
                let mut control = controls[1].borrow_mut();
                control.edit = None;
                control.inject.push_back(Event::Down(Peer(0), PeerError::Lost));
            }
            ends.iter_mut().for_each(|(engine, _)| _ = engine.progress());
        }
        for (node, (engine, peer)) in ends.iter().enumerate() {
            assert_eq!(engine.has_answered(*peer), Ok(true), "seed {seed}: node {node} waits");
        }
    }
}
