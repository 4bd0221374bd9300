//! Runs random histories of two nodes. The nodes connect in any order, exchange data, disconnect
//! with operations in flight, and connect again, with the same addresses or new ones. Both nodes
//! run in one thread, so the seed determines everything.
//!
//! `FISHPLATE_SEED=n` runs the history with that seed over each kind of rail, `FISHPLATE_SEEDS=n`
//! runs n histories.

#[path = "../../core/tests/support/mod.rs"]
#[allow(unused, reason = "this uses its random numbers and seeds alone")]
mod behaviour;

use std::time::{Duration, Instant};

use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{AttachError, OpError, WaitError};
use fishplate::node::{Error, Fabric, Gpu, Memory, Remote};
use fishplate::{Limits, Node, Notice, PeerId, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::{SOON, fake};
use behaviour::{Random, seeds};

/// Size of each region in bytes. The first word is for signals, the second for atomics.
const SIZE: usize = 64 << 10;

/// Offset of the payloads.
const PAYLOAD: u64 = 64;

struct End {
    node: Node,
    memory: Memory,
    /// The other node as a peer, and its imported memory.
    peer: PeerId,
    theirs: Remote,
}

struct Life {
    random: Random,
    /// The fake provider. `None` if the nodes use shared memory.
    fake: Option<Fake>,
    /// A node that never answers. An end that connects to this node keeps dialling, even while it
    /// connects to the other end.
    silent: Node,
    word: u64,
    lost_in_flight: u32,
}

/// An unconnected end.
struct Alone {
    node: Node,
    memory: Memory,
}

impl Life {
    fn open(&mut self, rank: usize) -> Alone {
        let limits = Limits { operations: 16, locals: 8, remotes: 2, peers: 2 };
        let builder = match &self.fake {
            Some(provider) => fake(provider, [&["cxi0"][..], &["cxi1", "cxi2"]][rank]),
            None => super::builder().fabric(Fabric::Off),
        };
        // Nodes with devices exchange more messages when they connect.
        let builder = if self.random.below(2) == 0 { builder } else { builder.gpu(Gpu::StandIn) };
        let mut node = builder.limits(limits).patience(Duration::ZERO).open().unwrap();
        if self.random.below(2) == 0 {
            _ = node.connect(self.silent.address());
        }
        let memory = node.alloc(SIZE).unwrap();
        Alone { node, memory }
    }

    fn some_passes(&mut self, ends: &mut [Alone; 2]) {
        for _ in 0..self.random.below(3) * 5000 {
            ends[self.random.below(2) as usize].node.progress();
        }
    }

    /// Connects both ends, in random order. Each end imports the other's memory.
    fn meet(&mut self, mut ends: [Alone; 2]) -> [End; 2] {
        let mut peers = [None; 2];
        let first = self.random.below(2) as usize;
        for rank in [first, 1 - first] {
            let theirs = ends[1 - rank].node.address().to_vec();
            self.some_passes(&mut ends);
            let peer = ends[rank].node.connect(&theirs).unwrap();
            assert_eq!(ends[rank].node.connect(&theirs), Ok(peer));
            peers[rank] = Some(peer);
        }
        let peers = peers.map(|peer| peer.expect("both have connected"));
        let there = |rank: usize, ends: &[Alone; 2]| {
            let reach = ends[rank].node.reach(peers[rank]).unwrap();
            reach.shared_memory || reach.fabric == 1
        };
        let deadline = Instant::now() + SOON;
        while !(there(0, &ends) && there(1, &ends)) {
            assert!(Instant::now() < deadline, "they do not connect");
            ends.iter_mut().for_each(|end| _ = end.node.progress());
        }
        let handles = [0, 1].map(|rank| ends[rank].node.handle(ends[rank].memory).unwrap());
        let mut rank = 0;
        ends.map(|Alone { mut node, memory }| {
            node.store(memory.at(0), 0).unwrap();
            node.store(memory.at(8), 0).unwrap();
            let theirs = node.import(peers[rank], &handles[1 - rank]).unwrap();
            rank += 1;
            End { node, memory, peer: peers[rank - 1], theirs }
        })
    }

    /// Runs one operation of one end, and checks the effect at the other end.
    fn step(&mut self, ends: &mut [End; 2]) {
        let from = self.random.below(2) as usize;
        let len = [0, 8, 3000, 20_000][self.random.below(4) as usize];
        self.word += 1;
        let word = self.word;
        let bytes: Vec<u8> = (0..len).map(|at| (at as u64 * 7 + word) as u8).collect();
        match self.random.below(4) {
            0 => {
                let theirs = ends[from].theirs;
                let signal = Signal::set(theirs.at(0), word);
                // A byte slice is sent in pieces. A refused call may have sent some pieces already.
                eventually(ends, |ends| {
                    ends[from].node.put_signal(
                        &bytes[..],
                        theirs.at(PAYLOAD),
                        signal,
                        Notice::Silent,
                    )
                });
                let seen = |ends: &mut [End; 2]| {
                    let End { node, memory, .. } = &ends[1 - from];
                    (node.load(memory.at(0)) == Ok(word)).then_some(()).ok_or(OpError::Again)
                };
                eventually(ends, seen);
                let mut got = vec![0; len];
                let End { node, memory, .. } = &ends[1 - from];
                node.read(memory.at(PAYLOAD), &mut got).unwrap();
                assert_eq!(got, bytes);
            }
            1 => {
                let into = ends[1 - from].memory.slice(PAYLOAD as usize..);
                let peer = ends[1 - from].peer;
                let request =
                    ends[1 - from].node.post_recv(Some(peer), word, Tag::ZERO, into, word).unwrap();
                let to = ends[from].peer;
                eventually(ends, |ends| {
                    match ends[from].node.send(to, word, &bytes[..], Notice::Silent) {
                        Err(Error::Op(error)) => Err(error),
                        Err(Error::Full { .. }) => Err(OpError::Again),
                        sent => Ok(sent.unwrap()),
                    }
                });
                let status = eventually(ends, |ends| {
                    ends[1 - from].node.test_recv(request).unwrap().ok_or(OpError::Again)
                });
                assert_eq!(
                    (status.outcome, status.delivered, status.word),
                    (Received::Ok, len as u64, word)
                );
            }
            2 => {
                let End { node, memory, theirs, .. } = &mut ends[from];
                let (theirs, memory) = (*theirs, *memory);
                node.write(memory.at(PAYLOAD), &bytes).unwrap();
                let notice = Notice::Report(word);
                let source = memory.slice(PAYLOAD as usize..PAYLOAD as usize + len);
                eventually(ends, |ends| ends[from].node.put(source, theirs.at(PAYLOAD), notice));
                let peer = ends[from].peer;
                eventually(ends, |ends| match ends[from].node.quiet(peer, Duration::ZERO) {
                    Err(Error::Wait(WaitError::Deadline(_))) => Err(OpError::Again),
                    quiet => {
                        quiet.unwrap();
                        Ok(())
                    }
                });
                while ends[from].node.next_completion().is_some() {}
                let mut got = vec![0; len];
                let End { node, memory, .. } = &ends[1 - from];
                node.read(memory.at(PAYLOAD), &mut got).unwrap();
                assert_eq!(got, bytes);
            }
            _ => {
                // The operation is executed once, even if the wait expires.
                let at = ends[from].theirs.at(8);
                let before = ends_word(&ends[1 - from]);
                match ends[from].node.fetch_add(at, 1, Duration::ZERO) {
                    Ok(value) => assert_eq!(value, before),
                    Err(Error::Wait(WaitError::Deadline(_))) => {}
                    other => panic!("{other:?}"),
                }
                eventually(ends, |ends| {
                    (ends_word(&ends[1 - from]) == before + 1).then_some(()).ok_or(OpError::Again)
                });
            }
        }
    }

    /// Starts operations without waiting for them.
    fn leave_in_flight(&mut self, ends: &mut [End; 2]) {
        for _ in 0..self.random.below(12) {
            let End { node, memory, peer, theirs } = &mut ends[self.random.below(2) as usize];
            let issued = match self.random.below(5) {
                0 => node.send(*peer, 1, memory.slice(..30_000), Notice::Report(1)).map(drop),
                1 => node.send(*peer, 1, &[1; 20_000], Notice::Silent).map(drop),
                2 => node.post_recv(None, 7, Tag::ZERO, memory.slice(..), 1).map(drop),
                3 => node
                    .put(memory.slice(..50_000), theirs.at(64), Notice::Report(1))
                    .map(drop)
                    .map_err(Error::Op),
                _ => node.recv(Some(*peer), 9, Tag::ZERO, &mut [0; 64], Duration::ZERO).map(drop),
            };
            self.lost_in_flight += u32::from(issued.is_ok());
        }
    }

    /// Both ends disconnect, or one is replaced by a new node.
    fn part(&mut self, ends: [End; 2]) -> [Alone; 2] {
        let first = self.random.below(2) as usize;
        let how = self.random.below(3);
        let mut ends = ends.map(Some);
        let mut alone = [None, None];
        for rank in [first, 1 - first] {
            let mut end = ends[rank].take().expect("each disconnects once");
            if how == 0 && rank == first {
                drop(end);
                alone[rank] = Some(self.open(rank));
            } else if how == 1 && rank == first {
                // The other end makes no progress, so `close` gets no answer.
                _ = end.node.close(Duration::ZERO);
                alone[rank] = Some(self.open(rank));
            } else {
                end.node.disconnect(end.peer).unwrap();
                assert!(end.node.put(b"gone", end.theirs.at(0), Notice::Silent).is_err());
                assert!(end.node.release(end.theirs).is_err(), "it went with its peer");
                // Operations in flight have completed; receives from any peer are still posted.
                while end.node.next_completion().is_some() {}
                while end.node.next_recv().is_some() {}
                let memory = end.node.alloc(SIZE).unwrap();
                match end.node.free(end.memory) {
                    Ok(()) | Err(Error::Attach(AttachError::InUse(_))) => {}
                    other => panic!("{other:?}"),
                }
                alone[rank] = Some(Alone { node: end.node, memory });
            }
            for other in ends.iter_mut().flatten() {
                for _ in 0..self.random.below(3) * 700 {
                    other.node.progress();
                }
            }
        }
        alone.map(|end| end.expect("both have disconnected"))
    }
}

fn ends_word(end: &End) -> u64 {
    end.node.load(end.memory.at(8)).unwrap()
}

/// Makes progress at both ends until the attempt succeeds.
fn eventually<T>(
    ends: &mut [End; 2],
    mut attempt: impl FnMut(&mut [End; 2]) -> Result<T, OpError>,
) -> T {
    let deadline = Instant::now() + SOON;
    loop {
        match attempt(ends) {
            Ok(done) => return done,
            Err(OpError::Again) => {}
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < deadline, "not done in time");
        ends.iter_mut().for_each(|end| _ = end.node.progress());
    }
}

fn live(seed: u64, fake: Option<Fake>) -> u32 {
    println!(
        "life: seed {seed}, over {}",
        if fake.is_some() { "a provider" } else { "shared memory" }
    );
    let silent = super::builder().fabric(Fabric::Off).open().unwrap();
    let mut life = Life { random: Random(seed), fake, silent, word: seed << 20, lost_in_flight: 0 };
    let mut alone = [life.open(0), life.open(1)];
    for _ in 0..1 + life.random.below(3) {
        let mut ends = life.meet(alone);
        for _ in 0..life.random.below(12) {
            life.step(&mut ends);
        }
        life.leave_in_flight(&mut ends);
        alone = life.part(ends);
    }
    life.lost_in_flight
}

#[test]
fn nodes_reconnect_with_operations_in_flight_over_shared_memory() {
    let lost: u32 = seeds(150).into_iter().map(|seed| live(seed, None)).sum();
    assert!(lost > 0 || std::env::var_os("FISHPLATE_SEED").is_some());
}

#[test]
fn nodes_reconnect_with_operations_in_flight_over_a_provider() {
    let lost: u32 =
        seeds(150).into_iter().map(|seed| live(seed, Some(Fake::new(Persona::cxi(), seed)))).sum();
    assert!(lost > 0 || std::env::var_os("FISHPLATE_SEED").is_some());
}
