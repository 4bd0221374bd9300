//! Rails that fail and return: every operation happens once, in order, and what has returned is
//! used.

use fishplate_core::engine::{Config, Notice, Signal};
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::{Amo, AmoOp, Outcome};
use fishplate_core::rail::sim::Dials;

use super::support::cuts::{Flaps, LATE};
use super::support::tap::{Tap, shared};
use super::support::*;

/// Operations of a stream that are not complete.
const AHEAD: u64 = 8;
const SLOTS: u64 = 2 * AHEAD;
const SLOT: u64 = 256;

/// What one node does to another: signals with data, and additions.
struct Line {
    from: usize,
    to: usize,
    put: u64,
    done: u64,
    added: u64,
    seen: u64,
    adding: bool,
}

impl Line {
    /// Where its part of a target begins.
    fn part(&self) -> u64 {
        self.from as u64 * (16 + SLOTS * SLOT)
    }

    fn issue<R: fishplate_core::rail::Rail, const RAILS: usize>(
        &mut self,
        node: &mut fleet::Node<R, RAILS>,
        random: &mut Random,
    ) {
        let (remote, part) = (node.remotes[self.to], self.part());
        let tag = |kind: u64| (self.to as u64) << 8 | kind;
        if self.put - self.done < AHEAD && random.below(2) == 0 {
            let n = self.put + 1;
            let place = self.to as u64 * SLOTS * SLOT + n % SLOTS * SLOT;
            let len = 1 + random.below(SLOT) as usize;
            write(&node.engine, node.source.at(place), &vec![n as u8; SLOT as usize]);
            let (from, to) = (node.source.at(place), remote.at(part + 16 + n % SLOTS * SLOT));
            let signal = Signal::set(remote.at(part), n);
            if node.engine.put_signal(CX, from, len, to, signal, Notice::Report(tag(0))).is_ok() {
                self.put = n;
            }
        }
        if !self.adding && random.below(4) == 0 {
            let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
            self.adding = node.engine.fetch(CX, remote.at(part + 8), amo, tag(1)).is_ok();
        }
    }

    /// The signal that the target sees announces the data of its number, and none before it is
    /// missing.
    fn check<R: fishplate_core::rail::Rail, const RAILS: usize>(
        &mut self,
        target: &fleet::Node<R, RAILS>,
        seed: u64,
    ) {
        let now = word(&target.engine, target.target.at(self.part()));
        assert!(now >= self.seen && now <= self.put, "seed {seed}: {now} after {}", self.seen);
        self.seen = now;
        if now != 0 {
            let at = target.target.at(self.part() + 16 + now % SLOTS * SLOT);
            assert_eq!(read(&target.engine, at, 1), [now as u8], "seed {seed}: data of {now}");
        }
    }
}

/// Returns how many rails returned, and how many messages of earlier epochs were dropped.
fn run<const RAILS: usize>(seed: u64) -> (u64, u64) {
    let mut random = Random(!seed);
    let dials = if random.below(8) == 0 { Dials::CALM } else { Dials::WILD };
    let nodes = 2 + (seed % 2) as usize;
    let config = Config {
        window: [4, 16, 64, 1024][random.below(4) as usize],
        batch: [1, 2, 8, 32][random.below(4) as usize],
        eager: [0, 32, 192][random.below(3) as usize],
        stripe_threshold: [64, 1 << 20][random.below(2) as usize],
        stripe_chunk: 60,
        ack_age: [0, 4, 1000][random.below(3) as usize],
        first_sequence: STARTS[random.below(4) as usize],
        seed,
        ..Config::DEFAULT
    };
    let size = nodes * (16 + SLOTS * SLOT) as usize;
    let sim = fleet::fabric(nodes as u16, RAILS as u16, 512, dials, seed);
    let mut fleet = fleet::lasting::<RAILS>(sim, nodes as u16, config, size, |_| ());
    let mut flaps = Flaps::new(sim, RAILS as u16, [5, 20, 60][random.below(3) as usize], seed);
    let pairs = (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to)));
    let line = |(from, to)| Line { from, to, put: 0, done: 0, added: 0, seen: 0, adding: false };
    let mut lines: Vec<Line> = pairs.map(line).collect();
    let (busy, mut idle) = (1500, 0);
    for turn in 0.. {
        let over = lines.iter().all(|line| line.done == line.put && !line.adding);
        if turn >= busy && over {
            // What is late may land now, and must not.
            idle += 1;
            if idle > LATE {
                break;
            }
        }
        let stats = || fleet.iter().map(|node| node.engine.stats()).collect::<Vec<_>>();
        assert!(turn < 400_000, "seed {seed}: no end; {:?}", stats());
        if turn < busy {
            flaps.turn(&mut fleet);
            lines.iter_mut().for_each(|line| line.issue(&mut fleet[line.from], &mut random));
        }
        for me in 0..nodes {
            fleet[me].engine.progress();
            while let Some(done) = fleet[me].engine.next_completion() {
                assert_eq!(done.outcome, Outcome::Done, "seed {seed}");
                let to = (done.tag >> 8) as usize;
                let line = &mut lines[me * nodes + to];
                if done.tag & 1 == 0 {
                    line.done += 1;
                } else {
                    assert_eq!(done.value, line.added, "seed {seed}: an addition was lost or repeated");
                    line.added += 1;
                    line.adding = false;
                }
            }
        }
        lines.iter_mut().for_each(|line| line.check(&fleet[line.to], seed));
    }
    for line in &lines {
        let target = &fleet[line.to];
        assert_eq!(line.seen, line.put, "seed {seed}");
        assert_eq!(word(&target.engine, target.target.at(line.part() + 8)), line.added, "seed {seed}");
    }
    flaps.end(&mut fleet, seed);
    for node in &fleet {
        node.peers.iter().for_each(|&peer| assert_eq!(node.engine.peer_error(peer), Ok(None), "seed {seed}"));
    }
    let stats: Vec<_> = fleet.iter().map(|node| node.engine.stats()).collect();
    (stats.iter().map(|stats| stats.rails_returned).sum(), stats.iter().map(|stats| stats.stale).sum())
}

#[test]
fn streams_are_whole_while_rails_fail_and_return() {
    let seeds = seeds(100);
    let (mut returned, mut stale) = (0, 0);
    for &seed in &seeds {
        let (back, old) = match seed % 3 {
            0 => run::<2>(seed),
            1 => run::<3>(seed),
            _ => run::<4>(seed),
        };
        (returned, stale) = (returned + back, stale + old);
    }
    println!("{} seeds: {returned} rails returned, {stale} messages of earlier epochs", seeds.len());
    assert!(returned >= 5 * seeds.len() as u64, "{returned}");
}

/// The fences at each node: the rail and the peer.
type Fences = Vec<Vec<(usize, Peer)>>;

/// Four nodes over rails whose fence costs all peers; the links of these nodes to all others are
/// cut, one rail after the other. Returns the fences, and for each node which others have failed.
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
        // One that is gone; and two, each seen first on another rail.
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
        // The first fence cuts off the other peers of the rail too, so theirs follow.
        assert_eq!(fences.first(), Some(&(0, Peer(2))), "{node}: {fences:?}");
        assert!(fences.iter().all(|fence| fence.0 == 0), "{node}: {fences:?}");
    }
    assert!(lost.iter().flatten().all(|lost| !lost), "{lost:?}");
}
