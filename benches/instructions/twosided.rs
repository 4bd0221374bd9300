//! Instruction counts of tagged messages: sending one, receiving one that is expected, and a round
//! of both.
//!
//! Arrivals are the recorded messages of another engine, replayed from a [`Tape`]. A receive is
//! counted from its post to its status.

// The attribute macros refer to this crate as `gungraun`.
extern crate iai_callgrind as gungraun;

use std::hint::black_box;

use fishplate_benches::REPEATS;
use fishplate_benches::setup::{leak, memory, region};
use fishplate_benches::tape::Tape;
use fishplate_core::engine::protocol::{
    Account, BlockSlot, HeaderSlot, MatchConfig, MatchMemory, Payload, Received, RecvSlot,
};
use fishplate_core::engine::tag::{MatcherMemory, PostedSlot, Tag, UnexpectedSlot};
use fishplate_core::engine::{Config, ContextId, Engine, Notice};
use fishplate_core::mem::{LocalId, PeerId, RailId};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use iai_callgrind::{library_benchmark, library_benchmark_group, main};

mod budget;
use budget::budget;

/// Size of the window, larger than the number of messages of any benchmark.
const WINDOW: usize = 2048;
const CONTEXT: ContextId = ContextId(0);
const MATCHING: MatchConfig = MatchConfig {
    eager: 192,
    credits: 2048,
    headers: 1,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 7,
};
const RECEIVES: usize = 64;

/// An engine with tag matching, one peer and a region.
struct Side<R: Rail + 'static> {
    engine: Engine<'static, R, 1>,
    peer: PeerId,
    region: LocalId,
}

/// Creates an engine on `rail` with one peer: another engine of this kind, or the engine itself.
fn side<R: Rail>(rail: R) -> &'static mut Side<R> {
    // One arrival per pass, so that each receive includes one whole pass.
    let config = Config { window: WINDOW as u32, batch: 1, ..Config::DEFAULT };
    let mut engine = Engine::new(config, [rail], memory(&config, 8)).unwrap();
    let (blocks, unexpected) = (MATCHING.credits as usize, MATCHING.unexpected(1));
    let matching = MatchMemory {
        matcher: MatcherMemory {
            posted: leak(PostedSlot::EMPTY, RECEIVES),
            unexpected: leak(UnexpectedSlot::EMPTY, unexpected),
            buckets: leak(0, MatcherMemory::buckets(RECEIVES, unexpected)),
        },
        receives: leak(RecvSlot::EMPTY, RECEIVES),
        accounts: leak(Account::EMPTY, 1),
        blocks: leak(BlockSlot::EMPTY, blocks),
        block_bytes: leak(0, blocks * MATCHING.block()),
        short_bytes: &mut [],
        headers: leak(HeaderSlot::EMPTY, 1),
        outgoing: leak(BlockSlot::EMPTY, 1),
        outgoing_bytes: leak(0, MATCHING.block()),
    };
    engine.attach_matching(MATCHING, matching).unwrap();
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 1).unwrap();
    let region = engine.register(region()).unwrap();
    Box::leak(Box::new(Side { engine, peer, region }))
}

impl<R: Rail> Side<R> {
    fn send(&mut self) {
        let payload = Payload::Bytes(&[7; 8]);
        self.engine.send(CONTEXT, self.peer, Tag::from(3), payload, Notice::Silent).unwrap();
    }

    /// Posts a receive, makes one pass, and takes the status.
    fn receive(&mut self) {
        let into = Some((self.region.at(0), 8));
        let request = self.engine.recv(Some(self.peer), Tag::from(3), Tag::ZERO, into, 0).unwrap();
        self.engine.progress();
        let status = self.engine.test_recv(request).unwrap().unwrap();
        assert_eq!(status.outcome, Received::Ok);
    }
}

#[library_benchmark(config = budget("tagged_send"))]
#[bench::run(side(Tape::playing(vec![])))]
fn tagged_send(side: &'static mut Side<Tape>) {
    for _ in 0..REPEATS {
        black_box(&mut *side).send();
    }
}

/// Creates a receiver to which one message arrives per pass.
fn receiver() -> &'static mut Side<Tape> {
    let sender = side(Tape::recording());
    for _ in 0..REPEATS {
        sender.send();
    }
    let sent = sender.engine.rail_mut(RailId(0)).unwrap().take();
    side(Tape::playing(sent))
}

#[library_benchmark(config = budget("tagged_receive"))]
#[bench::run(receiver())]
fn tagged_receive(side: &'static mut Side<Tape>) {
    for _ in 0..REPEATS {
        black_box(&mut *side).receive();
    }
}

type Network = Loopback<256>;

#[library_benchmark(config = budget("tagged_round"))]
#[bench::run(side(Network::new()))]
fn tagged_round(side: &'static mut Side<Network>) {
    for _ in 0..REPEATS {
        let side = black_box(&mut *side);
        side.send();
        side.receive();
    }
}

library_benchmark_group!(name = twosided, benchmarks = [tagged_send, tagged_receive, tagged_round]);

main!(library_benchmark_groups = twosided);
