//! Owns the heap memory of an engine, allocated once. Memory for a peer's messages is not touched
//! before the peer sends any. So a silent peer costs memory for its state, but not for its windows.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use fishplate_core::engine::protocol::{
    Account, BlockSlot, HeaderSlot, MatchConfig, MatchMemory, RecvSlot, SHORT,
};
use fishplate_core::engine::tag::{MatcherMemory, PostedSlot, UnexpectedSlot};
use fishplate_core::engine::{
    Config, Engine, EngineMemory, FailoverMemory, FailoverPeer, FailoverStream, LocalSlot, Pairing,
    Parked, PeerSlot, PendingSlot, RAILS_MAX, RailStats, RemoteSlot, SentSlot, Stream,
};
use fishplate_core::error::AttachError;
use fishplate_core::mem::Zeroable;
use fishplate_core::rail::{Rail, Rails};

/// The sizes of an engine's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of peers.
    pub peers: u16,
    /// Maximum number of registered regions.
    pub locals: u16,
    /// Maximum number of imported regions.
    pub remotes: u16,
    /// Maximum number of operations in flight.
    pub operations: u32,
}

impl Limits {
    /// 64 peers, 64 local and 256 remote regions, 1024 operations.
    pub const DEFAULT: Limits = Limits { peers: 64, locals: 64, remotes: 256, operations: 1024 };

    /// The largest values with which a node opens. The tables of operations are allocated at once.
    pub const MAX: Limits =
        Limits { peers: u16::MAX, locals: u16::MAX, remotes: u16::MAX, operations: 1 << 20 };
}

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Owns the memory that an [`Engine`] borrows. Allocates in [`Storage::new`] and never again.
pub struct Storage<const RAILS: usize> {
    peers: Vec<PeerSlot>,
    pairings: Zeros<Pairing>,
    streams: Zeros<Stream>,
    parked: Box<[MaybeUninit<Parked>]>,
    bitmap: Vec<u64>,
    locals: Vec<LocalSlot<RAILS>>,
    remotes: Zeros<RemoteSlot<RAILS>>,
    pending: Vec<PendingSlot>,
}

impl<const RAILS: usize> Storage<RAILS> {
    /// Allocates the memory for an engine with this configuration.
    pub fn new(config: &Config, limits: Limits) -> Self {
        let streams = usize::from(limits.peers) * usize::from(config.contexts);
        Storage {
            peers: vec![PeerSlot::EMPTY; limits.peers.into()],
            pairings: Zeros::new(limits.peers.into()),
            streams: Zeros::new(streams),
            parked: Box::new_uninit_slice(streams * config.window as usize),
            bitmap: vec![0; config.bitmap_words(streams)],
            locals: vec![LocalSlot::EMPTY; limits.locals.into()],
            remotes: Zeros::new(limits.remotes.into()),
            pending: vec![PendingSlot::EMPTY; limits.operations as usize],
        }
    }

    /// Lends the memory, for [`Engine::new_in`].
    pub fn memory(&mut self) -> EngineMemory<'_, RAILS> {
        EngineMemory {
            peers: &mut self.peers,
            pairings: self.pairings.slots(),
            streams: self.streams.slots(),
            parked: &mut self.parked,
            bitmap: &mut self.bitmap,
            locals: &mut self.locals,
            remotes: self.remotes.slots(),
            pending: &mut self.pending,
        }
    }

    /// Creates an engine over `rails` in this memory.
    ///
    /// # Errors
    /// The same as [`Engine::new`]. Also [`AttachError::Config`] if `config` needs more memory than
    /// the configuration given to `new`.
    pub fn engine<R: Rail>(
        &mut self,
        config: Config,
        rails: impl Into<Rails<R, RAILS>>,
    ) -> Result<Engine<'_, R, RAILS>, AttachError> {
        Engine::new(config, rails, self.memory())
    }
}

/// Maximum number of unexpected messages with a hash bucket for each message. With more messages, a
/// lookup takes longer than constant time.
const HASHED: usize = 1 << 14;

/// Maximum number of messages that share a hash bucket, if there are more than [`HASHED`] messages.
const SHARED: usize = 16;

/// Zeroed slots. Their pages stay untouched until they are used. They are allocated as bytes,
/// because with a larger alignment the allocator would write the zeros.
struct Zeros<T> {
    bytes: Vec<u8>,
    count: usize,
    slots: PhantomData<T>,
}

impl<T: Zeroable> Zeros<T> {
    fn new(count: usize) -> Self {
        let len = count.saturating_mul(size_of::<T>()).saturating_add(align_of::<T>());
        Zeros { bytes: vec![0; len], count, slots: PhantomData }
    }

    fn slots(&mut self) -> &mut [T] {
        // SAFETY: each slot is all zeros, which is a valid `T`, or holds a `T` that was stored
        // there.
        let (_, slots, _) = unsafe { self.bytes.align_to_mut() };
        &mut slots[..self.count]
    }
}

/// Owns the memory that an engine borrows for tagged messages. Allocates in [`MatchStorage::new`]
/// and never again.
pub struct MatchStorage<const RAILS: usize> {
    posted: Vec<PostedSlot>,
    unexpected: Zeros<UnexpectedSlot>,
    buckets: Vec<u32>,
    receives: Vec<RecvSlot>,
    accounts: Zeros<Account>,
    blocks: Zeros<BlockSlot>,
    block_bytes: Vec<u8>,
    short_bytes: Vec<u8>,
    headers: Zeros<HeaderSlot<RAILS>>,
    outgoing: Zeros<BlockSlot>,
    outgoing_bytes: Vec<u8>,
}

impl<const RAILS: usize> MatchStorage<RAILS> {
    /// Allocates memory for `streams` (peers times contexts), `receives` posted at once, and
    /// `outgoing` payloads from slices that wait to be posted.
    pub fn new(config: &MatchConfig, streams: usize, receives: usize, outgoing: usize) -> Self {
        let unexpected = config.unexpected(streams);
        let hashed = unexpected.min(HASHED).max(unexpected / SHARED);
        let (blocks, shorts) = (config.blocks(streams), config.shared_shorts as usize);
        MatchStorage {
            posted: vec![PostedSlot::EMPTY; receives],
            unexpected: Zeros::new(unexpected),
            buckets: vec![0; MatcherMemory::buckets(receives, hashed)],
            receives: vec![RecvSlot::EMPTY; receives],
            accounts: Zeros::new(streams),
            blocks: Zeros::new(blocks + shorts),
            block_bytes: vec![0; blocks * config.block()],
            short_bytes: vec![0; shorts * SHORT],
            headers: Zeros::new(config.waiting(streams)),
            outgoing: Zeros::new(outgoing),
            outgoing_bytes: vec![0; outgoing * config.block()],
        }
    }

    /// Lends the memory, for [`Engine::attach_matching`].
    pub fn memory(&mut self) -> MatchMemory<'_, RAILS> {
        MatchMemory {
            matcher: MatcherMemory {
                posted: &mut self.posted,
                unexpected: self.unexpected.slots(),
                buckets: &mut self.buckets,
            },
            receives: &mut self.receives,
            accounts: self.accounts.slots(),
            blocks: self.blocks.slots(),
            block_bytes: &mut self.block_bytes,
            short_bytes: &mut self.short_bytes,
            headers: self.headers.slots(),
            outgoing: self.outgoing.slots(),
            outgoing_bytes: &mut self.outgoing_bytes,
        }
    }
}

/// Owns the memory that an engine borrows for failover. Allocates in [`FailoverStorage::new`] and
/// never again.
///
/// Each sequence number of a window needs about 180 bytes. A window of 128 needs 23 KiB for each
/// peer and context. This memory is not touched before the engine sends to the peer.
pub struct FailoverStorage {
    peers: Box<[MaybeUninit<FailoverPeer>]>,
    streams: Zeros<FailoverStream>,
    sent: Zeros<SentSlot>,
    rails: Box<[RailStats]>,
}

impl FailoverStorage {
    /// Allocates the memory for an engine with this configuration.
    pub fn new(config: &Config, limits: Limits) -> Self {
        let streams = usize::from(limits.peers) * usize::from(config.contexts);
        FailoverStorage {
            peers: Box::new_uninit_slice(limits.peers.into()),
            streams: Zeros::new(streams),
            sent: Zeros::new(streams * config.window as usize),
            rails: Box::new([RailStats::default(); RAILS_MAX]),
        }
    }

    /// Lends the memory, for [`Engine::attach_failover`].
    pub fn memory(&mut self) -> FailoverMemory<'_> {
        let FailoverStorage { peers, streams, sent, rails } = self;
        FailoverMemory { peers, streams: streams.slots(), sent: sent.slots(), rails }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fishplate_core::rail::loopback::Loopback;

    #[test]
    fn memory_is_reusable_and_refused_if_too_small() {
        let config = Config { window: 8, ..Config::DEFAULT };
        let mut storage = Storage::<2>::new(&config, Limits { peers: 2, ..Limits::DEFAULT });
        let rails = || [Loopback::<16>::new(), Loopback::<16>::new()];
        for _ in 0..2 {
            let mut engine = storage.engine(config, rails()).unwrap();
            assert!(engine.reserve_peer().is_ok() && engine.reserve_peer().is_ok());
            assert_eq!(engine.reserve_peer(), Err(AttachError::Full("memory.peers")));
        }
        let larger = Config { window: 16, ..config };
        assert!(matches!(storage.engine(larger, rails()), Err(AttachError::Memory { .. })));
    }
}
