//! Nodes close while rails fail and return, with device memory that no rail reaches: puts and gets
//! of it travel in messages, messages are copied to it, and messages match late or never.

use std::collections::BTreeMap;

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::{Config, ContextId, Engine, Issued, Notice, RailPolicy};
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{LocalAddr, LocalId, PeerId, RailId, Region, RemoteId};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::sim::Dials;

use super::devices::import_into;
use super::rig::{EXACT, SMALL, match_memory, tag};
use super::support::fleet::{self, End, Node};
use super::support::scope::Scope;
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

const CLOSED: Fault = Fault::Peer(PeerError::Closed);

/// Maximum number of turns. A longer run counts as hung.
const TURNS: u64 = 40_000;

/// Maximum number of operations and of receives of a node.
const MOST: u64 = 40;

/// Bytes of each operation's place. A node has a place for each of its own operations, each receive
/// and each put of the peer, in host memory and in device memory.
const PLACE: u64 = 2048;
const SIZE: usize = (4 * MOST * PLACE) as usize;

/// The first place of each use.
const SOURCES: u64 = 0;
const RECEIVES: u64 = MOST;
const PUTS: u64 = 2 * MOST;
const GETS: u64 = 3 * MOST;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Put,
    Get,
    Eager,
    Synchronous,
    Long,
}

/// An operation: its length, and whether its local memory is device memory.
#[derive(Clone, Copy, Debug)]
struct Op {
    kind: Kind,
    len: usize,
    device: bool,
}

/// One side of the run.
#[derive(Default)]
struct Side {
    ops: Vec<Op>,
    ends: BTreeMap<u64, Outcome>,
    /// For each receive, whether it is into device memory.
    receives: Vec<bool>,
    /// The received messages, and the messages whose receive failed, by tag.
    taken: BTreeMap<u64, u64>,
    missed: Vec<u64>,
    unsure: Vec<u64>,
    ended: u64,
    /// The contents of the buffers of failed gets and receives when they ended: place, whether it
    /// is device memory, and bytes.
    left: Vec<(u64, bool, Vec<u8>)>,
}

struct Run<const RAILS: usize> {
    fleet: Vec<Node<Veiled<End>, RAILS>>,
    regions: [Region; 2],
    ids: [LocalId; 2],
    theirs: [RemoteId; 2],
    sides: [Side; 2],
    /// Whether a copy to a device fails, and with it the peer, or the program removes the peer.
    broken: bool,
    contexts: u16,
    removed: bool,
    what: String,
}

/// Returns the bytes of operation `n` of a node.
fn bytes(node: usize, n: u64, len: usize) -> Vec<u8> {
    let mut random = Random(n * 2 + node as u64 + 1);
    (0..len).map(|_| random.next() as u8 | 1).collect()
}

impl<const RAILS: usize> Run<RAILS> {
    fn new(
        seed: u64,
        random: &mut Random,
    ) -> (&'static fishplate_core::rail::sim::Sim<'static>, Self) {
        let sim = fleet::fabric(2, RAILS as u16, 512, Dials::WILD, seed);
        let delay = random.below(4) as u32;
        let wrap = |_, end| {
            let mut end = Veiled::new(end);
            (end.apart, end.delay, end.most) = (true, delay, 256);
            end
        };
        let matching = MatchConfig { pieces: 4, ..SMALL };
        let window = [1, 2, 4, 16][random.below(4) as usize];
        // Whether a fence closes the whole endpoint.
        let closes = RAILS > 1 && random.below(4) == 0;
        let contexts = 1 + random.below(3) as u16;
        let config = Config { window, contexts, policy: RailPolicy::RoundRobin, ..Config::DEFAULT };
        let attach = |engine: &mut Engine<'static, Veiled<End>, RAILS>| {
            let streams = 2 * config.contexts as usize;
            engine.attach_matching(matching, match_memory(matching, streams, 8)).unwrap();
        };
        let mut fleet = fleet::lasting(sim, 2, RAILS as u16, closes, config, SIZE, wrap, attach);
        let regions = [(); 2].map(|()| device_region(SIZE));
        let ids = [0, 1].map(|at| fleet[at].engine.register(regions[at]).unwrap());
        let theirs = [0, 1].map(|at| import_into(&mut fleet, at, ids[1 - at]));
        // The sources of gets: the peer's place of the same number.
        for (node, region) in regions.iter().enumerate() {
            for n in 0..MOST {
                poke(region, ((SOURCES + n) * PLACE) as usize, &bytes(node, n, PLACE as usize));
            }
        }
        let what = format!(
            "seed {seed}, window {window}, contexts {contexts}, delay {delay}, closing {closes}"
        );
        (
            sim,
            Run {
                fleet,
                regions,
                ids,
                theirs,
                sides: Default::default(),
                broken: false,
                contexts,
                removed: false,
                what,
            },
        )
    }

    fn peer(&self, node: usize) -> PeerId {
        self.fleet[node].peers[1 - node]
    }

    /// Returns a place in the host memory or in the device memory of a node.
    fn at(&self, node: usize, place: u64, device: bool) -> LocalAddr {
        let id = if device { self.ids[node] } else { self.fleet[node].target };
        id.at(place * PLACE)
    }

    fn look(&self, node: usize, place: u64, device: bool, len: usize) -> Vec<u8> {
        match device {
            true => peek(&self.regions[node], (place * PLACE) as usize, len),
            false => read(&self.fleet[node].engine, self.at(node, place, false), len),
        }
    }

    fn issue(&mut self, node: usize, random: &mut Random) {
        let n = self.sides[node].ops.len() as u64;
        if n == MOST {
            return;
        }
        let kinds = [Kind::Put, Kind::Get, Kind::Eager, Kind::Synchronous, Kind::Long];
        let (kind, device) = (kinds[random.below(5) as usize], random.below(2) == 0);
        let len = match kind {
            Kind::Put | Kind::Get => 1 + random.below(700) as usize,
            Kind::Long => 129 + random.below(1500) as usize,
            _ => 1 + random.below(100) as usize,
        };
        let (from, to, notice) = (self.peer(node), self.theirs[node], Notice::Report(n));
        let place = SOURCES + n;
        let device = device && kind != Kind::Long;
        let local = self.at(node, if kind == Kind::Get { GETS + n } else { place }, device);
        if kind != Kind::Get {
            let wanted = bytes(node, n, len);
            match device {
                true => poke(&self.regions[node], (place * PLACE) as usize, &wanted),
                false => write(&self.fleet[node].engine, local, &wanted),
            }
        }
        let copy = bytes(node, n, len);
        // A payload in no region is pulled in chunks if the peer has no room.
        let payload = match kind {
            Kind::Eager | Kind::Synchronous if !device && n.is_multiple_of(2) => {
                Payload::Bytes(&copy)
            }
            _ => Payload::Region(local, len),
        };
        let engine = &mut self.fleet[node].engine;
        let context = ContextId(random.below(self.contexts.into()) as u8);
        let issued = match kind {
            Kind::Put => engine.put(context, local, len, to.at((PUTS + n) * PLACE), notice),
            Kind::Get => engine.get(context, local, len, to.at(place * PLACE), notice),
            Kind::Synchronous => engine.send_sync(context, from, tag(n), payload, notice),
            Kind::Eager | Kind::Long => engine.send(context, from, tag(n), payload, notice),
        };
        match issued {
            Ok(issued) => {
                self.sides[node].ops.push(Op { kind, len, device });
                if let Issued::Done { .. } = issued {
                    self.sides[node].ends.insert(n, Outcome::Done);
                }
            }
            Err(OpError::Again | OpError::PeerFailed(PeerError::Closed)) => {}
            Err(_) if self.broken => {}
            Err(error) => panic!("{}: {kind:?} is refused as {error:?}", self.what),
        }
    }

    fn receive(&mut self, node: usize, random: &mut Random) {
        let n = self.sides[node].receives.len() as u64;
        if n == MOST {
            return;
        }
        let device = random.below(2) == 0;
        let source = [None, Some(self.peer(node))][random.below(2) as usize];
        let into = self.at(node, RECEIVES + n, device);
        let any = fishplate_core::engine::tag::Tag::ALL;
        match self.fleet[node].engine.recv(source, EXACT, any, Some((into, PLACE as usize)), n) {
            Ok(_) => self.sides[node].receives.push(device),
            Err(OpError::Again | OpError::PeerFailed(PeerError::Closed)) => {}
            Err(_) if self.broken => {}
            Err(error) => panic!("{}: a receive is refused as {error:?}", self.what),
        }
    }

    fn remove(&mut self) {
        for node in 0..2 {
            let peer = self.peer(node);
            self.fleet[node].engine.remove_peer(peer).unwrap();
        }
        self.removed = true;
    }

    /// Takes the completions of a node, and checks the bytes of each.
    fn reap(&mut self, node: usize) {
        let what = self.what.clone();
        while let Some(end) = self.fleet[node].engine.next_completion() {
            let Op { kind, len, device } = self.sides[node].ops[end.tag as usize];
            let before = self.sides[node].ends.insert(end.tag, end.outcome);
            assert_eq!(before, None, "{what}: {kind:?} {} of {node} ends twice", end.tag);
            match (kind, end.outcome) {
                (Kind::Put, Outcome::Done) => assert!(
                    self.look(1 - node, PUTS + end.tag, true, len) == bytes(node, end.tag, len),
                    "{what}: put {} of {node} is done and not there",
                    end.tag
                ),
                (Kind::Get, Outcome::Done) => assert!(
                    self.look(node, GETS + end.tag, device, len) == bytes(1 - node, end.tag, len),
                    "{what}: get {} of {node} is done and not there",
                    end.tag
                ),
                (_, Outcome::Done)
                | (Kind::Long, Outcome::Failed(CLOSED))
                | (Kind::Synchronous, Outcome::Failed(CLOSED) | Outcome::Unknown(CLOSED))
                | (Kind::Eager, Outcome::Failed(CLOSED)) => {}
                (Kind::Get, Outcome::Failed(_)) if self.broken => {
                    let bytes = self.look(node, GETS + end.tag, device, len);
                    self.sides[node].left.push((GETS + end.tag, device, bytes));
                }
                _ if self.broken => {}
                (kind, outcome) => panic!("{what}: {kind:?} {} of {node}: {outcome:?}", end.tag),
            }
        }
        while let Some(status) = self.fleet[node].engine.next_recv() {
            self.sides[node].ended += 1;
            let tag = status.envelope.map(|envelope| envelope.tag.lo);
            match status.outcome {
                Received::Ok => {
                    let (n, len) = (tag.unwrap(), status.delivered as usize);
                    let device = self.sides[node].receives[status.word as usize];
                    let got = self.look(node, RECEIVES + status.word, device, len);
                    assert!(got == bytes(1 - node, n, len), "{what}: message {n} to {node}");
                    assert_eq!(len, self.sides[1 - node].ops[n as usize].len, "{what}");
                    let twice = self.sides[node].taken.insert(n, status.word);
                    assert_eq!(twice, None, "{what}: message {n} to {node} is received twice");
                }
                Received::Failed(CLOSED) => self.sides[node].missed.extend(tag),
                Received::Failed(_) if self.broken => {
                    let device = self.sides[node].receives[status.word as usize];
                    let bytes = self.look(node, RECEIVES + status.word, device, PLACE as usize);
                    self.sides[node].left.push((RECEIVES + status.word, device, bytes));
                    self.sides[node].missed.extend(tag);
                }
                // The device has the message, or may have it.
                Received::Unknown(_) if self.broken => self.sides[node].unsure.extend(tag),
                outcome => panic!("{what}: receive {} of {node}: {outcome:?}", status.word),
            }
        }
        if self.removed {
            return;
        }
        match self.fleet[node].engine.peer_error(self.peer(node)).unwrap() {
            None | Some(PeerError::Closed) => {}
            // The peer does not learn of this, so its program removes this node too.
            Some(_) if self.broken => {
                self.remove();
            }
            error => panic!("{what}: {node}: {error:?}"),
        }
    }

    /// Checks that both ends agree about each message, and that everything has ended.
    fn check(&self) {
        let what = &self.what;
        for (node, side) in self.sides.iter().enumerate() {
            let there = &self.sides[1 - node];
            for (place, device, bytes) in &side.left {
                let now = self.look(node, *place, *device, bytes.len());
                assert!(now == *bytes, "{what}: place {place} of {node} is written after its end");
            }
            for (n, op) in (0..).zip(&side.ops) {
                let Some(&end) = side.ends.get(&n) else { panic!("{what}: {node} {n} {op:?}") };
                let taken = there.taken.contains_key(&n);
                let unsure = there.unsure.contains(&n);
                match (op.kind, end) {
                    (Kind::Synchronous | Kind::Long, Outcome::Done) if !self.removed => {
                        assert!(taken || unsure, "{what}: message {n} of {node} is done, but lost")
                    }
                    (_, Outcome::Failed(_)) => {
                        assert!(!taken, "{what}: message {n} of {node} has failed and is received")
                    }
                    _ => {}
                }
            }
        }
    }
}

#[derive(Debug, Default)]
struct Totals {
    done: u64,
    failed: u64,
    taken: u64,
    reposted: u64,
}

fn run<const RAILS: usize>(seed: u64, broken: bool, totals: &mut Totals) {
    let _scope = Scope::new();
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let (sim, mut run) = Run::<RAILS>::new(seed, &mut random);
    run.broken = broken;
    let breaks = (random.below(300), random.below(2) as usize);
    let pace = [1, 2, 6][random.below(3) as usize];
    let closes = [0, 1].map(|_| random.below(40 * pace + 100));
    let quits = [0, 1].map(|_| random.below(500));
    // The last rail never fails.
    let flaps: Vec<[u64; 2]> = (1..RAILS)
        .map(|_| {
            let at = random.below(60 * pace + 50);
            [at, at + 20 + random.below(600)]
        })
        .collect();
    let (cuts, mut turn) = (random.below(2) == 0, 0);
    loop {
        assert!(
            turn < TURNS,
            "{}: no end; closes {closes:?}, flaps {flaps:?}, cuts {cuts}",
            run.what
        );
        for (rail, &[pull, plug]) in flaps.iter().enumerate() {
            let (node, rail, late) = ((seed % 2) as u16, rail as u16, 30);
            // The link is cut in one direction, or an endpoint is unplugged.
            match cuts {
                true if turn == pull => sim.cut(node, 1 - node, rail, late).unwrap(),
                true if turn == plug => sim.heal(node, 1 - node, rail).unwrap(),
                false if turn == pull => sim.unplug(node, rail, late).unwrap(),
                false if turn == plug => sim.plug(node, rail).unwrap(),
                _ => {}
            }
        }
        for node in 0..2 {
            if turn < 400 && random.below(pace) == 0 {
                run.issue(node, &mut random);
            }
            if turn < quits[node] && random.below(2 * pace) == 0 {
                run.receive(node, &mut random);
            }
            if broken && breaks == (turn, node) {
                match seed % 8 {
                    0..4 => run.fleet[node].engine.rail_mut(RailId(0)).unwrap().late = 1,
                    _ if !run.removed => run.remove(),
                    _ => {}
                }
            }
            if random.below(100) == 0 {
                let full = random.below(100) as u32;
                run.fleet[node].engine.rail_mut(RailId(0)).unwrap().full = full;
            }
            if turn == closes[node] {
                let peer = run.peer(node);
                let closed = run.fleet[node].engine.close_peer(peer);
                let closed = matches!(closed, Ok(()) | Err(OpError::PeerFailed(PeerError::Closed)));
                assert!(closed || broken);
            }
        }
        fleet::turn(&mut run.fleet);
        (0..2).for_each(|node| run.reap(node));
        turn += 1;
        let left = |node: usize| run.fleet[node].engine.has_left(run.peer(node)) == Ok(true);
        if turn > 1200 && (run.removed || left(0) && left(1)) {
            break;
        }
    }
    // Copies to a device may go on, and late traffic lands nowhere.
    for _ in 0..3000 {
        fleet::turn(&mut run.fleet);
        (0..2).for_each(|node| run.reap(node));
    }
    run.check();
    for side in &run.sides {
        let done = side.ends.values().filter(|end| **end == Outcome::Done).count();
        totals.done += done as u64;
        totals.failed += (side.ends.len() - done) as u64;
        totals.taken += side.taken.len() as u64;
    }
    totals.reposted += run.fleet.iter().map(|node| node.engine.stats().reposted).sum::<u64>();
}

fn run_all(count: u64, broken: bool) {
    let (mut totals, seeds) = (Totals::default(), seeds(count));
    for &seed in &seeds {
        match seed % 4 {
            0 => run::<3>(seed, broken, &mut totals),
            1 => run::<1>(seed, broken, &mut totals),
            _ => run::<2>(seed, broken, &mut totals),
        }
    }
    println!("{totals:?}");
    let Totals { done, failed, taken, reposted } = totals;
    let all = done.min(failed).min(taken).min(reposted) > 0;
    assert!(all || (seeds.len() as u64) < count, "{totals:?}");
}

#[test]
fn every_operation_ends_once_and_truly_when_nodes_close_while_rails_fail() {
    run_all(60, false);
}

#[test]
fn every_operation_ends_once_when_a_device_fails_or_the_peer_is_removed() {
    run_all(60, true);
}
