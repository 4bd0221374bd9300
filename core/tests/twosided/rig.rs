//! Engines that exchange tagged messages: an engine that is its own peer, or a fleet on a simulated
//! fabric.

use fishplate_core::engine::protocol::{
    Account, BlockSlot, HeaderSlot, MatchConfig, MatchMemory, Payload, Received, RecvSlot, Request,
    SHORT, Status,
};
use fishplate_core::engine::tag::{MatcherMemory, PostedSlot, Tag, UnexpectedSlot};
use fishplate_core::engine::{Config, Engine, Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalId, PeerId};
use fishplate_core::rail::Rail;
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::support::fleet::{self, Node};
use super::support::*;

/// Small limits, which are soon reached.
pub const SMALL: MatchConfig = MatchConfig {
    eager: 128,
    credits: 4,
    headers: 4,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 7,
};

/// Like [`SMALL`], with blocks for three pieces of device memory.
pub const CARRYING: MatchConfig = MatchConfig { pieces: 3, ..SMALL };

/// Returns the final room of a stream that begins with `each` and doubles its room while the shared
/// room allows.
pub fn grown(each: u32, mut shared: u32) -> u32 {
    let mut has = each;
    while has != 0 && has <= shared {
        shared -= has;
        has *= 2;
    }
    has
}

/// Maximum number of open receives in these tests.
pub const RECEIVES: usize = 64;

/// Returns leaked matching memory for this many streams.
pub fn match_memory<const RAILS: usize>(
    config: MatchConfig,
    streams: usize,
    outgoing: usize,
) -> MatchMemory<'static, RAILS> {
    let unexpected = config.unexpected(streams);
    let blocks = config.blocks(streams);
    MatchMemory {
        matcher: MatcherMemory {
            posted: leak(PostedSlot::EMPTY, RECEIVES),
            unexpected: leak(UnexpectedSlot::EMPTY, unexpected),
            buckets: leak(0, MatcherMemory::buckets(RECEIVES, unexpected)),
        },
        receives: leak(RecvSlot::EMPTY, RECEIVES),
        accounts: leak(Account::EMPTY, streams),
        blocks: leak(BlockSlot::EMPTY, blocks + config.shared_shorts as usize),
        block_bytes: leak(0, blocks * config.block()),
        short_bytes: leak(0, config.shared_shorts as usize * SHORT),
        headers: leak(HeaderSlot::EMPTY, config.waiting(streams)),
        outgoing: leak(BlockSlot::EMPTY, outgoing),
        outgoing_bytes: leak(0, outgoing * config.block()),
    }
}

/// An engine that is its own peer.
pub struct Own1<R: Rail, const RAILS: usize> {
    pub engine: Engine<'static, R, RAILS>,
    pub me: PeerId,
    /// The region that sends use, and the region that receives use.
    pub out: LocalId,
    pub into: LocalId,
}

/// Length of each region in these tests, in bytes.
pub const SIZE: usize = 1 << 16;

pub fn own1<R: Rail, const RAILS: usize>(
    config: Config,
    matching: MatchConfig,
    rails: [R; RAILS],
) -> Own1<R, RAILS> {
    let mut own = own(config, rails, SIZE);
    own.engine
        .attach_matching(matching, match_memory(matching, 4 * config.contexts as usize, 4))
        .unwrap();
    Own1 { engine: own.engine, me: own.peer, out: own.source, into: own.target }
}

/// Like [`loopback`], for a matched queue with this number of requests.
pub fn queue(requests: usize, matching: MatchConfig) -> Own1<Loopback<64>, 1> {
    let mut own = own(Config::DEFAULT, [Loopback::new()], SIZE);
    let mut memory = match_memory(matching, 4 * Config::DEFAULT.contexts as usize, 4);
    memory.receives = leak(RecvSlot::EMPTY, requests);
    own.engine.attach_matching(matching, memory).unwrap();
    Own1 { engine: own.engine, me: own.peer, out: own.source, into: own.target }
}

pub fn loopback(matching: MatchConfig) -> Own1<Loopback<64>, 1> {
    own1(Config::DEFAULT, matching, [Loopback::new()])
}

pub fn faulty(matching: MatchConfig, seed: u64) -> Own1<Faulty<Loopback<32>, 16>, 2> {
    let rail = |n| Faulty::new(Loopback::new(), Faults::DISORDER, seed + n);
    own1(Config { window: 16, ..Config::DEFAULT }, matching, [rail(0), rail(1000)])
}

/// Creates a fleet with tag matching at all nodes.
pub fn tagged_fleet<const RAILS: usize>(
    nodes: u16,
    dials: Dials,
    config: Config,
    matching: MatchConfig,
    seed: u64,
) -> Vec<Node<fleet::End, RAILS>> {
    let mut fleet = fleet::crossed::<RAILS>(nodes, dials, config, SIZE, seed);
    for node in &mut fleet {
        let streams = nodes as usize * config.contexts as usize;
        node.engine.attach_matching(matching, match_memory(matching, streams, 4)).unwrap();
    }
    fleet
}

pub fn tag(lo: u64) -> Tag {
    Tag::from(lo)
}

/// `EXACT` ignores no bit of a tag, and `ANY` ignores all bits.
pub const EXACT: Tag = Tag::ZERO;
pub const ANY: Tag = Tag::ALL;

impl<R: Rail, const RAILS: usize> Own1<R, RAILS> {
    /// Posts a receive of up to `len` bytes at `at`.
    pub fn recv(&mut self, lo: u64, ignore: Tag, at: u64, len: usize) -> Request {
        self.engine.recv(Some(self.me), tag(lo), ignore, Some((self.into.at(at), len)), lo).unwrap()
    }

    pub fn send(&mut self, lo: u64, bytes: &[u8]) -> Result<Issued, OpError> {
        self.engine.send(CX, self.me, tag(lo), Payload::Bytes(bytes), Notice::Silent)
    }

    /// Sends `len` bytes of the source region, filled with the pattern of their offset.
    pub fn send_region(
        &mut self,
        lo: u64,
        at: u64,
        len: usize,
        sync: bool,
    ) -> Result<Issued, OpError> {
        write(&self.engine, self.out.at(at), &pattern(at, len));
        let payload = Payload::Region(self.out.at(at), len);
        match sync {
            true => self.engine.send_sync(CX, self.me, tag(lo), payload, Notice::Report(lo)),
            false => self.engine.send(CX, self.me, tag(lo), payload, Notice::Report(lo)),
        }
    }

    /// Makes passes until a receive completes.
    pub fn finish(&mut self, request: Request) -> Status {
        let mut status = None;
        pass_until(&mut self.engine, "receive", |engine| {
            status = engine.test_recv(request).unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    pub fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        read(&self.engine, self.into.at(at), len)
    }
}

/// Returns bytes that depend on their offset.
pub fn pattern(at: u64, len: usize) -> Vec<u8> {
    (at..at + len as u64).map(|n| (n.wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

pub fn check(status: &Status, outcome: Received, tag_lo: u64, len: u64, delivered: u64) {
    let envelope = status.envelope.expect("matched");
    assert_eq!(
        (status.outcome, envelope.tag.lo, envelope.len, status.delivered),
        (outcome, tag_lo, len, delivered)
    );
}
