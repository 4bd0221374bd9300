//! A model of random operations by several contexts and peers over any rails. Each stream has its
//! own words, so the model is a sequence of states per stream. The observed words must match one of
//! these states, not earlier than the last match. The data of all earlier writes must have landed.

use fishplate_core::engine::{Config, ContextId, Issued, Notice, RailPolicy, Signal};
use fishplate_core::error::OpError;
use fishplate_core::op::{Amo, AmoOp, Completion, Outcome, SignalOp};

use super::*;

pub const OPS: [AmoOp; 9] = [
    AmoOp::Set,
    AmoOp::Add,
    AmoOp::Inc,
    AmoOp::And,
    AmoOp::Or,
    AmoOp::Xor,
    AmoOp::Swap,
    AmoOp::CompareSwap,
    AmoOp::Fetch,
];

/// Returns the new value of an atomic's word, as the model computes it.
pub fn model(amo: &Amo, old: u64) -> u64 {
    let mask = if amo.width == 8 { u64::MAX } else { (1 << (8 * amo.width)) - 1 };
    let (x, c) = (amo.operand & mask, amo.compare & mask);
    mask & match amo.op {
        AmoOp::Set | AmoOp::Swap => x,
        AmoOp::Add => old.wrapping_add(x),
        AmoOp::Inc => old.wrapping_add(1),
        AmoOp::And => old & x,
        AmoOp::Or => old | x,
        AmoOp::Xor => old ^ x,
        AmoOp::CompareSwap if old == c => x,
        AmoOp::CompareSwap | AmoOp::Fetch => old,
    }
}

/// Bytes of a stream's part of each region. A part contains words, data slots and constant data to
/// read.
const PART: u64 = 1024;
const WORDS: usize = 5;
const SLOTS: u64 = 12;
const SLOT: u64 = 64;
const SLOTS_AT: u64 = 64;
const SOURCE: u64 = 128 * SLOT;
const CONSTANT_AT: u64 = SLOTS_AT + SLOTS * SLOT;

/// A signal word, and a word for atomics of each width, 8 bytes apart.
type Words = [u64; WORDS];

/// The model of one stream.
struct Model {
    context: ContextId,
    to: usize,
    part: u64,
    /// Offset of the stream's part of the origin's source region.
    from: u64,
    /// For each ordered operation: the words afterwards, and the number of writes issued before it.
    states: Vec<(Words, usize)>,
    seen: usize,
    /// Writes in issue order, as slot, byte and length.
    writes: Vec<(u64, u8, usize)>,
    /// Number of fences so far, and the number of fences at the last write to each slot. `None` if
    /// the slot was never written.
    fences: u32,
    written: [Option<u32>; SLOTS as usize],
    ops: u64,
    /// Tags of open operations, with the expected value of a fetch.
    waiting: Vec<(u64, Option<u64>)>,
    quiet: bool,
    /// True if the stream issues no more operations and waits for all earlier operations.
    ends: bool,
}

fn words<R: Rail, const RAILS: usize>(node: &fleet::Node<R, RAILS>, part: u64) -> Words {
    let ptr =
        node.engine.local_ptr(node.target.at(part), size_of::<Words>()).unwrap().cast::<Words>();
    // SAFETY: `local_ptr` checked the range, and one thread drives all engines of a test.
    unsafe { ptr.as_ptr().read_unaligned() }
}

impl Model {
    fn issue<R: Rail, const RAILS: usize>(
        &mut self,
        node: &mut fleet::Node<R, RAILS>,
        random: &mut Random,
    ) {
        let remote = node.remotes[self.to];
        let tag = (self.part << 32) | (self.to as u64) << 16 | self.ops;
        let notice = if random.below(2) == 0 { Notice::Silent } else { Notice::Report(tag) };
        let last = self.states.last().unwrap().0;
        let e = &mut node.engine;
        let fill = |len: u64, ops: u64| (ops as u8 | 1, len as usize);
        let slot = random.below(SLOTS);
        // Writes land in any order, so a slot is written again only after a fence.
        let free = self.written[slot as usize].is_none_or(|fences| fences < self.fences);
        let (byte, len) = fill(1 + random.below(SLOT), self.ops);
        let from = node.source.at(self.from + self.ops * SLOT);
        let to = remote.at(self.part + SLOTS_AT + slot * SLOT);
        let kind = random.below(10);
        if kind < 4 && free {
            write(e, from, &vec![byte; len]);
        }
        let signal_op = if random.below(2) == 0 { SignalOp::Set } else { SignalOp::Add };
        let signal = Signal { at: remote.at(self.part), op: signal_op, value: random.next() };
        let mut after = last;
        let mut fetched = None;
        let (mut wrote, mut ordered) = (false, false);
        let result = match kind {
            0 | 1 if free => {
                wrote = true;
                e.put(self.context, from, len, to, notice)
            }
            2 if free => {
                (wrote, ordered) = (true, true);
                e.put_signal(self.context, from, len, to, signal, notice)
            }
            3 if free => {
                wrote = true;
                e.inject(self.context, &vec![byte; len], to).map(|()| Issued::Done { value: 0 })
            }
            0..=3 => {
                ordered = true;
                e.put_signal(self.context, from, 0, to, signal, notice)
            }
            4 => {
                ordered = true;
                e.signal(self.context, signal, notice)
            }
            5..=7 => {
                let n = random.below(4) as usize;
                let op = OPS[random.below(9) as usize];
                let compare = if random.below(2) == 0 { last[n + 1] } else { random.next() };
                let amo = Amo { op, width: 1 << n, operand: random.next(), compare };
                let at = remote.at(self.part + (n as u64 + 1) * 8);
                after[n + 1] = model(&amo, last[n + 1]);
                if kind == 5 {
                    e.amo(self.context, at, amo, notice)
                } else {
                    fetched = Some(last[n + 1]);
                    e.fetch(self.context, at, amo, tag)
                }
            }
            8 => {
                let constant = remote.at(self.part + CONSTANT_AT);
                e.get(self.context, node.source.at(self.from + SOURCE - 8), 8, constant, notice)
            }
            _ => {
                let peer = node.peers[self.to];
                if random.below(4) == 0 {
                    self.quiet = true;
                } else {
                    e.fence(self.context, peer).unwrap();
                    self.fences += 1;
                }
                return;
            }
        };
        match result {
            Err(error) => return assert_eq!(error, OpError::Again),
            Ok(Issued::Done { .. }) => {}
            Ok(Issued::Pending(_)) => {
                if fetched.is_some() || notice != Notice::Silent {
                    self.waiting.push((tag, fetched));
                }
            }
        }
        self.ops += 1;
        if wrote {
            self.writes.push((slot, byte, len));
            self.written[slot as usize] = Some(self.fences);
        }
        if ordered {
            after[0] = match signal.op {
                SignalOp::Set => signal.value,
                SignalOp::Add => last[0].wrapping_add(signal.value),
            };
        }
        if after != last || ordered {
            self.states.push((after, self.writes.len()));
        }
    }

    /// Checks that the target's words never go backwards, and that the data written before has
    /// landed.
    fn check<R: Rail, const RAILS: usize>(&mut self, nodes: &[fleet::Node<R, RAILS>], seed: u64) {
        let target = &nodes[self.to];
        let now = words(target, self.part);
        if now == self.states[self.seen].0 {
            return;
        }
        let ahead = self.states[self.seen..].iter().position(|(state, _)| *state == now);
        let Some(ahead) = ahead else {
            panic!(
                "seed {seed}: {now:x?} is no state of stream {:#x} from {} on: {:x?}",
                self.part, self.seen, self.states
            );
        };
        self.seen += ahead;
        self.check_data(target, self.states[self.seen].1, seed);
    }

    /// Checks that the first `count` writes have landed. Later writes to the same slots may have
    /// landed too.
    fn check_data<R: Rail, const RAILS: usize>(
        &self,
        target: &fleet::Node<R, RAILS>,
        count: usize,
        seed: u64,
    ) {
        for slot in 0..SLOTS {
            let mut done = self.writes[..count].iter().rev().filter(|write| write.0 == slot);
            let Some(&(_, byte, len)) = done.next() else { continue };
            let later: Vec<_> =
                self.writes[count..].iter().filter(|write| write.0 == slot).collect();
            let bytes =
                read(&target.engine, target.target.at(self.part + SLOTS_AT + slot * SLOT), len);
            for (at, now) in bytes.into_iter().enumerate() {
                let fine = now == byte || later.iter().any(|(_, b, l)| at < *l && now == *b);
                assert!(
                    fine,
                    "seed {seed}: stream {:#x} slot {slot} has {now}, not {byte}",
                    self.part
                );
            }
        }
    }
}

/// The streams of all contexts of a fleet to all nodes.
pub struct Streams {
    streams: Vec<(usize, Model)>,
    /// A stream issues an operation in one of `pace` turns.
    pace: u64,
    seed: u64,
    /// The node that has died, if any. Streams from and to that node may have any outcome.
    dead: Option<usize>,
}

impl Streams {
    /// Returns the size of each node's two regions, in bytes.
    pub fn size(nodes: usize, config: &Config) -> usize {
        nodes * config.contexts as usize * (PART * 9) as usize
    }

    pub fn new<R: Rail, const RAILS: usize>(
        fleet: &[fleet::Node<R, RAILS>],
        config: &Config,
        pace: u64,
    ) -> Streams {
        let (nodes, contexts) = (fleet.len(), config.contexts as usize);
        for node in fleet {
            for part in 0..(nodes * contexts) as u64 {
                write(&node.engine, node.target.at(part * PART + CONSTANT_AT), b"constant");
            }
        }
        let mut streams = vec![];
        for me in 0..nodes {
            for to in 0..nodes {
                for context in 0..contexts as u8 {
                    let part = (me * contexts + context as usize) as u64 * PART;
                    streams.push((
                        me,
                        Model {
                            context: ContextId(context),
                            to,
                            part,
                            from: (context as u64 * nodes as u64 + to as u64) * SOURCE,
                            states: vec![([0; WORDS], 0)],
                            seen: 0,
                            writes: vec![],
                            fences: 0,
                            written: [None; SLOTS as usize],
                            ops: 0,
                            waiting: vec![],
                            quiet: false,
                            ends: false,
                        },
                    ));
                }
            }
        }
        Streams { streams, pace, seed: config.seed, dead: None }
    }

    pub fn dies(&mut self, node: usize) {
        self.dead = Some(node);
        self.streams.retain(|(me, _)| *me != node);
        self.streams.iter_mut().filter(|(_, s)| s.to == node).for_each(|(_, s)| s.quiet = false);
    }

    /// Returns the streams between living nodes.
    fn living(&self) -> impl Iterator<Item = &Model> {
        self.streams.iter().map(|(_, stream)| stream).filter(|stream| self.dead != Some(stream.to))
    }

    /// Issues operations at random. If `issues` is false, issues only quiets.
    pub fn turn<R: Rail, const RAILS: usize>(
        &mut self,
        fleet: &mut [fleet::Node<R, RAILS>],
        issues: bool,
        random: &mut Random,
    ) {
        let (seed, dead) = (self.seed, self.dead);
        for (me, stream) in self.streams.iter_mut().filter(|(_, stream)| dead != Some(stream.to)) {
            let node = &mut fleet[*me];
            if stream.quiet {
                let quiet = node.engine.is_quiet(stream.context, node.peers[stream.to]).unwrap();
                if quiet {
                    stream.quiet = false;
                    stream.fences += 1;
                    let target = &fleet[stream.to];
                    let last = *stream.states.last().unwrap();
                    assert_eq!(
                        words(target, stream.part),
                        last.0,
                        "seed {seed}: quiet returned before everything was applied"
                    );
                    stream.check_data(target, stream.writes.len(), seed);
                    stream.seen = stream.states.len() - 1;
                }
            } else if issues && stream.ops < 120 && random.below(self.pace) == 0 {
                stream.issue(node, random);
            } else if !issues && !stream.ends {
                (stream.quiet, stream.ends) = (true, true);
            }
        }
    }

    /// Checks a completion of node `me`.
    pub fn completed(&mut self, me: usize, done: &Completion) {
        let (seed, dead) = (self.seed, self.dead);
        // A completion does not name its target, so search all streams of the origin.
        let found =
            self.streams.iter_mut().filter(|(node, _)| *node == me).find_map(|(_, stream)| {
                let lost = dead == Some(stream.to);
                let at = stream.waiting.iter().position(|&(tag, value)| {
                    let right = value.is_none_or(|value| value == done.value);
                    tag == done.tag && (lost || done.outcome == Outcome::Done && right)
                })?;
                Some(stream.waiting.remove(at))
            });
        assert!(found.is_some(), "seed {seed}: {done:?} was unexpected");
    }

    /// Checks the visible state of a node's memory.
    pub fn check<R: Rail, const RAILS: usize>(
        &mut self,
        fleet: &[fleet::Node<R, RAILS>],
        to: usize,
    ) {
        for (_, stream) in self.streams.iter_mut().filter(|(_, stream)| stream.to == to) {
            stream.check(fleet, self.seed);
        }
    }

    /// True if every operation is complete and applied.
    pub fn is_over(&self) -> bool {
        self.streams.iter().all(|(_, s)| s.waiting.is_empty())
            && self.living().all(|s| s.ends && !s.quiet)
    }

    /// Checks all memory. Nothing may be in flight.
    pub fn end<R: Rail, const RAILS: usize>(&self, fleet: &[fleet::Node<R, RAILS>]) {
        for stream in self.living() {
            let (target, seed) = (&fleet[stream.to], self.seed);
            assert_eq!(words(target, stream.part), stream.states.last().unwrap().0, "seed {seed}");
            stream.check_data(target, stream.writes.len(), seed);
        }
    }
}

pub fn config(random: &mut Random, seed: u64) -> Config {
    Config {
        contexts: 2,
        window: [1, 2, 4, 8, 16, 64][random.below(6) as usize],
        batch: [1, 2, 8, 32][random.below(4) as usize],
        eager: [0, 32, 192][random.below(3) as usize],
        stripe_threshold: [16, 1 << 20][random.below(2) as usize],
        stripe_chunk: 8 + random.below(24),
        policy: [RailPolicy::LeastOutstanding, RailPolicy::RoundRobin, RailPolicy::Fixed]
            [random.below(3) as usize],
        ack_age: [0, 4, 1000][random.below(3) as usize],
        first_sequence: STARTS[random.below(4) as usize].wrapping_sub(random.below(40)),
        seed,
        owner: seed as u16,
    }
}

/// Runs random operations for at most `turns` turns. `make` creates the fleet: number of nodes,
/// configuration, size of the regions.
pub fn run<R: Rail, const RAILS: usize>(
    seed: u64,
    turns: u64,
    make: impl FnOnce(u16, Config, usize) -> Vec<fleet::Node<R, RAILS>>,
) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9));
    let nodes = 2 + (seed % 2) as usize;
    let config = config(&mut random, seed);
    let mut fleet = make(nodes as u16, config, Streams::size(nodes, &config));
    let mut streams = Streams::new(&fleet, &config, 2);
    let issue_until = 60 + random.below(60);
    for turn in 0.. {
        let stats = || fleet.iter().map(|n| n.engine.stats()).collect::<Vec<_>>();
        assert!(turn < turns, "seed {seed}: not complete; {:?}", stats());
        streams.turn(&mut fleet, turn < issue_until, &mut random);
        for me in 0..nodes {
            fleet[me].engine.progress();
            while let Some(done) = fleet[me].engine.next_completion() {
                streams.completed(me, &done);
            }
            streams.check(&fleet, me);
        }
        if turn > issue_until && streams.is_over() {
            break;
        }
    }
    streams.end(&fleet);
    for node in &fleet {
        node.peers
            .iter()
            .for_each(|&peer| assert_eq!(node.engine.peer_error(peer), Ok(None), "seed {seed}"));
    }
}
