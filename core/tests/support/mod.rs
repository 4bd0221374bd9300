//! Helpers for the engine tests: engines with leaked memory, regions, a host and random numbers.
//!
//! - [`tap`]: a rail that observes and changes traffic;
//! - [`damage`]: a faulty peer;
//! - [`veil`]: a rail with memory that the processor cannot access;
//! - [`devices`]: traffic between host memory and memory of a [`veil`];
//! - [`fleet`]: several engines on a simulated fabric;
//! - [`goodbye`]: engines that shut down;
//! - [`lives`]: engines that reattach repeatedly;
//! - [`oracle`]: a model of operations;
//! - [`scope`]: the memory of long runs.
#![allow(dead_code, reason = "each test file uses its part of this")]

pub mod damage;
pub mod devices;
pub mod fleet;
pub mod goodbye;
pub mod lives;
pub mod oracle;
pub mod scope;
pub mod tap;
pub mod veil;

use std::mem::MaybeUninit;
use std::ptr::NonNull;

use fishplate_core::engine::{
    Asleep, Config, ContextId, Engine, EngineMemory, FailoverMemory, FailoverStream, Issued,
    LocalSlot, Pairing, Parked, PeerSlot, PendingSlot, RAILS_MAX, RailStats, RemoteSlot, SentSlot,
    Stream, Waiter,
};
use fishplate_core::error::OpError;
use fishplate_core::mem::{LocalAddr, LocalId, PeerId, Region, RegionKind, RemoteId};
use fishplate_core::op::{Outcome, Token};
use fishplate_core::rail::Rail;
use fishplate_core::sync::host::SpinHost;

pub use scope::leak;

pub const CX: ContextId = ContextId(0);

/// A distant deadline in the time of [`SpinHost`], a clock that counts calls. It leaves time for
/// millions of turns.
pub const SOON: u64 = 50_000_000;

/// Returns leaked memory for the tables of an engine.
pub fn memory<const RAILS: usize>(
    config: &Config,
    peers: usize,
    ops: usize,
) -> EngineMemory<'static, RAILS> {
    let streams = peers * config.contexts as usize;
    EngineMemory {
        peers: leak(PeerSlot::EMPTY, peers),
        pairings: leak(Pairing::ALIKE, peers),
        streams: leak(Stream::EMPTY, streams),
        parked: leak(Parked::EMPTY, streams * config.window as usize),
        bitmap: leak(0, config.bitmap_words(streams)),
        locals: leak(LocalSlot::EMPTY, 8),
        remotes: leak(RemoteSlot::EMPTY, 16),
        pending: leak(PendingSlot::EMPTY, ops),
    }
}

pub fn engine<R: Rail, const RAILS: usize>(
    config: Config,
    rails: [R; RAILS],
) -> Engine<'static, R, RAILS> {
    Engine::new(config, rails, memory(&config, 4, 256)).unwrap()
}

/// Returns leaked memory for failover.
pub fn failover(config: &Config, peers: usize) -> FailoverMemory<'static> {
    let streams = peers * config.contexts as usize;
    FailoverMemory {
        peers: leak(MaybeUninit::uninit(), peers),
        streams: leak(FailoverStream::EMPTY, streams),
        sent: leak(SentSlot::EMPTY, streams * config.window as usize),
        rails: leak(RailStats::default(), RAILS_MAX),
    }
}

/// Returns a region of zeroed memory that is never freed.
pub fn region(len: usize) -> Region {
    let words = leak(0u64, len.div_ceil(8));
    // SAFETY: the memory is leaked, so it is always valid. Only the helpers below and the engine
    // access it.
    unsafe {
        Region::new(NonNull::new(words.as_mut_ptr().cast()).unwrap(), len, RegionKind::Private)
    }
}

pub fn host() -> &'static SpinHost {
    Box::leak(Box::new(SpinHost::new(1)))
}

pub fn waiter() -> Waiter<'static, SpinHost, Asleep> {
    Waiter::awake(host(), Box::leak(Box::new(Asleep::new())))
}

/// An engine that is its own peer.
pub struct Own<R: Rail, const RAILS: usize> {
    pub engine: Engine<'static, R, RAILS>,
    pub peer: PeerId,
    pub waiter: Waiter<'static, SpinHost, Asleep>,
    pub source: LocalId,
    pub target: LocalId,
    pub remote: RemoteId,
}

pub fn own<R: Rail, const RAILS: usize>(
    config: Config,
    rails: [R; RAILS],
    size: usize,
) -> Own<R, RAILS> {
    let mut engine = engine(config, rails);
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, ((1u32 << RAILS) - 1) as u16).unwrap();
    let source = engine.register(region(size)).unwrap();
    let target = engine.register(region(size)).unwrap();
    let remote = import(&mut engine, peer, target);
    Own { engine, peer, waiter: waiter(), source, target, remote }
}

/// Exports a region of an engine and imports it into the same engine.
pub fn import<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'static, R, RAILS>,
    peer: PeerId,
    region: LocalId,
) -> RemoteId {
    let mut handle = [0; 512];
    let len = engine.export(region, &mut handle).unwrap();
    engine.import(peer, &handle[..len]).unwrap()
}

/// Registers a region with native atomics, and imports the region into the same engine.
pub fn words<R: Rail, const RAILS: usize>(own: &mut Own<R, RAILS>) -> (LocalId, RemoteId) {
    let words = own.engine.register(region(256).with_native_atomics()).unwrap();
    (words, import(&mut own.engine, own.peer, words))
}

pub fn read<R: Rail, const RAILS: usize>(
    engine: &Engine<'_, R, RAILS>,
    at: LocalAddr,
    len: usize,
) -> Vec<u8> {
    let ptr = engine.local_ptr(at, len).unwrap();
    let mut bytes = vec![0; len];
    // SAFETY: `local_ptr` checked the range, and the buffer has the same length.
    unsafe { std::ptr::copy(ptr.as_ptr(), bytes.as_mut_ptr(), len) };
    bytes
}

pub fn write<R: Rail, const RAILS: usize>(
    engine: &Engine<'_, R, RAILS>,
    at: LocalAddr,
    bytes: &[u8],
) {
    let ptr = engine.local_ptr(at, bytes.len()).unwrap();
    // SAFETY: `local_ptr` checked the range of the target.
    unsafe { std::ptr::copy(bytes.as_ptr(), ptr.as_ptr(), bytes.len()) };
}

/// Reads a 64-bit word of registered memory.
pub fn word<R: Rail, const RAILS: usize>(engine: &Engine<'_, R, RAILS>, at: LocalAddr) -> u64 {
    let ptr = engine.local_ptr(at, 8).unwrap().cast::<u64>();
    // SAFETY: `local_ptr` checked the range, and one thread drives all engines of a test.
    unsafe { ptr.as_ptr().read_unaligned() }
}

/// Makes passes until `ready` returns true. Panics with the state if that takes too long.
pub fn pass_until<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'static, R, RAILS>,
    what: &str,
    mut ready: impl FnMut(&mut Engine<'static, R, RAILS>) -> bool,
) {
    for _ in 0..100_000 {
        if ready(engine) {
            return;
        }
        engine.progress();
    }
    panic!("{what}: not after 100000 passes; {:?}", engine.stats());
}

pub fn passes<R: Rail, const RAILS: usize>(engine: &mut Engine<'static, R, RAILS>, count: u32) {
    for _ in 0..count {
        engine.progress();
    }
}

/// Returns the token of an operation that must be in flight.
pub fn pending(issued: Result<Issued, OpError>) -> Token {
    match issued {
        Ok(Issued::Pending(token)) => token,
        other => panic!("not pending: {other:?}"),
    }
}

/// Makes passes until the operation has succeeded.
pub fn done<R: Rail, const RAILS: usize>(
    engine: &mut Engine<'static, R, RAILS>,
    issued: Issued,
    what: &str,
) {
    let Issued::Pending(token) = issued else { return };
    let mut end = None;
    pass_until(engine, what, |e| {
        end = e.test(token).unwrap();
        end.is_some()
    });
    assert_eq!(end.unwrap().outcome, Outcome::Done, "{what}");
}

/// First sequence numbers to test: zero, and a value just before each wrap.
pub const STARTS: [u64; 4] = [0, (1 << 20) - 5, (1 << 32) - 5, u64::MAX - 5];

/// Returns the low bits of `seq` that a completion word carries with this window.
pub fn sequence(seq: u64, window: u32) -> u32 {
    seq as u32 & ((4 * window).max(512) - 1)
}

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Returns the seeds of a randomised test: the seed in `FISHPLATE_SEED`, or `FISHPLATE_SEEDS`
/// seeds, by default `count`. The tests print the seed when they fail.
pub fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("FISHPLATE_SEED") {
        Ok(seed) => vec![seed.parse().expect("FISHPLATE_SEED is a number")],
        Err(_) => {
            let count = std::env::var("FISHPLATE_SEEDS")
                .map_or(count, |n| n.parse().expect("FISHPLATE_SEEDS is a number"));
            (1..=count).collect()
        }
    }
}
