//! Two engines that repeatedly attach each other while puts, signals, fetches and messages are in
//! flight. Either one engine reattaches, or both do: one after the other, or at the same time.
//!
//! Each attachment of a node has its own words and slots at the other node. Operation `n` fills a
//! slot and then adds 1 to the attachment's word. So if a word has the value `n`, then `n`
//! operations were applied in order and all their slots must be filled. If an operation takes
//! effect in a later attachment, a word is ahead of its slots.

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Config, Engine, Notice, Signal};
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{LocalId, PeerId, RemoteId};
use fishplate_core::op::{Amo, AmoOp, Outcome, SignalOp};
use fishplate_core::rail::Rail;

use super::*;

/// Number of attachments of a node, operations and messages of an attachment, and bytes of a slot.
const LIVES: u64 = 24;
const OPS: u64 = 24;
const SENDS: u64 = 60;
const SLOT: u64 = 96;

/// The layout of an attachment's part of the target: the word of its signals, the word of its
/// fetches, and its slots.
const PART: u64 = 16 + OPS * SLOT;
const SIZE: usize = (LIVES * PART) as usize;

/// A function that attaches one node's rails to the rails of the other node, as `peer`.
pub type Attach<R, const RAILS: usize> = dyn Fn(&mut Engine<'static, R, RAILS>, usize, PeerId);

struct Node<R: Rail, const RAILS: usize> {
    engine: Engine<'static, R, RAILS>,
    source: LocalId,
    target: LocalId,
    peer: Option<PeerId>,
    remote: Option<RemoteId>,
    /// The index of the current attachment, and the counts of its operations, fetches and messages
    /// so far.
    life: u64,
    ops: u64,
    fetches: u64,
    sends: u64,
    /// The attachment of the peer that sent the last message, and one bit for each of its messages
    /// that arrived.
    heard: (u64, u64),
    /// For each attachment of the peer, the number of signals applied up to the last check.
    applied: [u64; LIVES as usize],
    renewed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Number of arrivals of an earlier attachment.
    pub stale: u64,
    /// Number of times that a peer failed because it had reattached.
    pub renewed: u64,
    pub applied: u64,
}

fn fill(life: u64, op: u64) -> Vec<u8> {
    (0..SLOT).map(|at| (life * 31 + op * 7 + at) as u8 | 1).collect()
}

impl<R: Rail, const RAILS: usize> Node<R, RAILS> {
    fn attach(&mut self, me: usize, handle: &[u8], attach: &Attach<R, RAILS>) {
        let peer = self.engine.reserve_peer().unwrap();
        attach(&mut self.engine, me, peer);
        self.engine.connect_peer(peer, ((1u32 << RAILS) - 1) as u16).unwrap();
        self.remote = Some(self.engine.import(peer, handle).unwrap());
        self.peer = Some(peer);
        self.life += 1;
        (self.ops, self.fetches, self.sends) = (0, 0, 0);
    }

    fn detach(&mut self) {
        if let Some(peer) = self.peer.take() {
            self.remote = None;
            self.engine.remove_peer(peer).unwrap();
        }
    }

    /// Issues a random operation, if the engine has room.
    fn issue(&mut self, random: &mut Random) {
        let (Some(peer), Some(remote)) = (self.peer, self.remote) else { return };
        let part = self.life * PART;
        let fine = |error: OpError| match error {
            OpError::Again | OpError::PeerFailed(PeerError::Reattached) => {}
            error => panic!("{error:?}"),
        };
        match random.below(6) {
            0..3 if self.ops < OPS => {
                let at = 16 + self.ops * SLOT;
                let len = [8, SLOT as usize][random.below(2) as usize];
                write(&self.engine, self.source.at(part + at), &fill(self.life, self.ops));
                let add = Signal { at: remote.at(part), op: SignalOp::Add, value: 1 };
                let from = self.source.at(part + at);
                // First puts the rest of the slot, then sends the signal with the remaining data.
                let (e, to) = (&mut self.engine, remote.at(part + at));
                if len != SLOT as usize {
                    let rest = (from.region.at(from.offset + 8), remote.at(part + at + 8));
                    match e.put(CX, rest.0, SLOT as usize - 8, rest.1, Notice::Silent) {
                        Ok(_) => {}
                        Err(error) => return fine(error),
                    }
                }
                match e.put_signal(CX, from, len, to, add, Notice::Silent) {
                    Ok(_) => self.ops += 1,
                    Err(error) => fine(error),
                }
            }
            3 => {
                let inc = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
                let tag = self.life << 32 | self.fetches;
                match self.engine.fetch(CX, remote.at(part + 8), inc, tag) {
                    Ok(_) => self.fetches += 1,
                    Err(error) => fine(error),
                }
            }
            _ if self.engine.has_matching() && self.sends < SENDS => {
                let (lo, long) = (self.life << 32 | self.sends, random.below(3) == 0);
                let payload = match long {
                    true => Payload::Region(self.source.at(0), 600),
                    false => Payload::Bytes(&[7; 8]),
                };
                match self.engine.send(CX, peer, Tag::from(lo), payload, Notice::Silent) {
                    Ok(_) => self.sends += 1,
                    Err(error) => fine(error),
                }
            }
            _ => {}
        }
    }

    /// Makes a pass, and checks the memory that it may have changed. `peer_life` is the peer's
    /// attachment.
    fn pass(&mut self, seed: u64, peer_life: u64) {
        self.engine.progress();
        while let Some(done) = self.engine.next_completion() {
            let (life, n) = (done.tag >> 32, done.tag & 0xffff_ffff);
            assert!(
                done.outcome != Outcome::Done || done.value == n,
                "seed {seed}: fetch {n} of life {life}"
            );
        }
        while let Some(status) = self.engine.next_recv() {
            let Some(envelope) = status.envelope.filter(|_| status.outcome == Received::Ok) else {
                continue;
            };
            let (life, n) = (envelope.tag.lo >> 32, envelope.tag.lo & 0xffff_ffff);
            assert!(
                life >= self.heard.0 && life <= peer_life,
                "seed {seed}: a message of life {life}"
            );
            let before = if life == self.heard.0 { self.heard.1 } else { 0 };
            assert!(before & 1 << n == 0, "seed {seed}: message {n} of life {life} twice");
            self.heard = (life, before | 1 << n);
        }
        if self.engine.has_matching() {
            while self
                .engine
                .recv(None, Tag::ZERO, Tag::ALL, Some((self.source.at(0), 600)), 0)
                .is_ok()
            {}
        }
        for life in 1..=peer_life {
            let part = life * PART;
            let applied = word(&self.engine, self.target.at(part));
            let before = std::mem::replace(&mut self.applied[life as usize], applied);
            assert!(
                before <= applied && applied <= OPS,
                "seed {seed}: {applied} signals of life {life}"
            );
            for op in before..applied {
                let slot = read(&self.engine, self.target.at(part + 16 + op * SLOT), SLOT as usize);
                assert!(
                    slot == fill(life, op),
                    "seed {seed}: signal {op} of life {life} before its data"
                );
            }
        }
        if let Some(peer) = self.peer {
            match self.engine.peer_error(peer).unwrap() {
                None => {}
                Some(PeerError::Reattached) => {
                    self.renewed += 1;
                    self.detach();
                }
                Some(why) => panic!("seed {seed}: {why:?}"),
            }
        }
    }
}

/// Runs two nodes over these rails. `attach` attaches the rails to each other. `prepare` enables
/// matching.
pub fn run<R: Rail, const RAILS: usize>(
    seed: u64,
    config: Config,
    prepare: impl Fn(&mut Engine<'static, R, RAILS>),
    rails: [[R; RAILS]; 2],
    attach: &Attach<R, RAILS>,
) -> Seen {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9));
    let mut me = 0;
    let mut nodes = rails.map(|rails| {
        me += 1;
        let config = Config { seed: seed ^ me << 40, ..config };
        let mut engine = Engine::new(config, rails, memory(&config, 2, 64)).unwrap();
        prepare(&mut engine);
        let (source, target) = (engine.register(region(SIZE)), engine.register(region(SIZE)));
        Node {
            engine,
            source: source.unwrap(),
            target: target.unwrap(),
            peer: None,
            remote: None,
            life: 0,
            ops: 0,
            fetches: 0,
            sends: 0,
            heard: (0, 0),
            applied: [0; LIVES as usize],
            renewed: 0,
        }
    });
    let handles = nodes.each_ref().map(|node| {
        let mut handle = [0; 512];
        let len = node.engine.export(node.target, &mut handle).unwrap();
        handle[..len].to_vec()
    });
    let step = |nodes: &mut [Node<R, RAILS>; 2], at: usize| {
        let peer_life = nodes[1 - at].life;
        nodes[at].pass(seed, peer_life);
        if nodes[at].peer.is_none() && nodes[at].life + 2 < LIVES {
            nodes[at].attach(at, &handles[1 - at], attach);
        }
    };
    // One node alone makes passes for a while, so that the other falls behind.
    for _ in 0..160 {
        let at = random.below(2) as usize;
        for _ in 0..random.below(30) {
            nodes[at].issue(&mut random);
            step(&mut nodes, at);
        }
        let both = random.below(2) == 0;
        if random.below(12) == 0 && nodes[0].life.max(nodes[1].life) + 8 < LIVES {
            for at in if both { 0..2 } else { at..at + 1 } {
                nodes[at].detach();
                nodes[at].attach(at, &handles[1 - at], attach);
            }
        }
    }
    // Finally both nodes reattach, and all operations must arrive.
    for at in 0..2 {
        nodes[at].detach();
        nodes[at].attach(at, &handles[1 - at], attach);
    }
    let mut turns = 0;
    while (0..2).any(|at| {
        let (to, from) = (&nodes[1 - at], &nodes[at]);
        from.ops < OPS || word(&to.engine, to.target.at(from.life * PART)) < OPS
    }) {
        turns += 1;
        assert!(
            turns < 2_000_000,
            "seed {seed}: not complete: {:?}",
            nodes.map(|node| node.engine.stats())
        );
        for at in 0..2 {
            nodes[at].issue(&mut random);
            step(&mut nodes, at);
        }
    }
    nodes.iter().fold(Seen::default(), |seen, node| {
        let stats = node.engine.stats();
        Seen {
            stale: seen.stale + stats.stale,
            renewed: seen.renewed + node.renewed,
            applied: seen.applied + stats.applied,
        }
    })
}
