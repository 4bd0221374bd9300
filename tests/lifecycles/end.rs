//! One side of a test: an engine with its own memory and regions.

use fishplate::{FailoverStorage, Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::{Claimed, MatchConfig, Request};
use fishplate_core::engine::{Config, Engine};
use fishplate_core::mem::{LocalId, PeerId, RemoteId};
use fishplate_core::rail::Rail;

use super::memory::Memory;
use super::users::{Kind, User};

/// Settings with small limits, so that programs reach all limits.
pub const CONFIG: Config = Config { window: 8, eager: 64, ..Config::DEFAULT };
const MATCHING: MatchConfig = MatchConfig {
    eager: 96,
    credits: 3,
    headers: 4,
    shared_credits: 7,
    shared_headers: 7,
    shared_shorts: 0,
    pieces: 0,
    seed: 3,
};
const LIMITS: Limits = Limits { peers: 3, locals: 12, remotes: 7, operations: 24 };
const RECEIVES: usize = 8;

/// The use of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Peers write only one value to the region: its own word.
    Target,
    /// Never written. Contains the word of one target, and is the source of sends and puts.
    Source,
    /// The destination of receives and gets.
    Scratch,
}

pub struct Registered {
    pub id: LocalId,
    pub role: Role,
    /// The unique value that peers write to this target. For a source, the value of its target.
    pub word: u64,
    pub memory: Memory,
}

impl Registered {
    /// Checks that the region contains no other value than its role allows.
    pub fn check(&self) {
        for found in self.memory.words() {
            let foreign = match self.role {
                Role::Target => found != 0 && found != self.word,
                Role::Source => found != self.word,
                Role::Scratch => false,
            };
            assert!(!foreign, "{:#x} in a {:?} of {:#x}", found, self.role, self.word);
        }
    }
}

/// A target that this end has imported from the other end, or from itself.
#[derive(Clone, Copy)]
pub struct Imported {
    pub id: RemoteId,
    pub word: u64,
}

pub struct End<R: Rail, const RAILS: usize> {
    pub engine: Option<Engine<'static, R, RAILS>>,
    pub user: User,
    storage: *mut Own<RAILS>,
    pub regions: Vec<Registered>,
    pub imports: Vec<Imported>,
    /// The peer id of each end, if attached.
    pub peers: Vec<Option<PeerId>>,
    /// Invalid ids, for calls that must fail.
    pub old_locals: Vec<LocalId>,
    pub old_remotes: Vec<RemoteId>,
    pub old_peers: Vec<PeerId>,
    pub requests: Vec<Request>,
    pub claimed: Vec<Claimed>,
}

/// The memory that the engine borrows: tables, matching and failover.
type Own<const RAILS: usize> = (Storage<RAILS>, MatchStorage<RAILS>, FailoverStorage);

impl<R: Rail, const RAILS: usize> End<R, RAILS> {
    pub fn new(rails: [R; RAILS], ends: usize, failover: bool, kind: Kind) -> Self {
        let streams = LIMITS.peers as usize;
        let matching = MatchStorage::new(&MATCHING, streams, RECEIVES, 2);
        let storage =
            (Storage::new(&CONFIG, LIMITS), matching, FailoverStorage::new(&CONFIG, LIMITS));
        let storage = Box::into_raw(Box::new(storage));
        // SAFETY: `storage` was just allocated. `drop` frees it after the engine.
        let (tables, matching, sent) = unsafe { &mut *storage };
        let mut engine = tables.engine(CONFIG, rails).unwrap();
        if failover {
            engine.attach_failover(sent.memory()).unwrap();
        }
        engine.attach_matching(MATCHING, matching.memory()).unwrap();
        End {
            engine: Some(engine),
            user: User::new(kind),
            storage,
            regions: vec![],
            imports: vec![],
            peers: vec![None; ends],
            old_locals: vec![],
            old_remotes: vec![],
            old_peers: vec![],
            requests: vec![],
            claimed: vec![],
        }
    }

    pub fn engine(&mut self) -> &mut Engine<'static, R, RAILS> {
        self.engine.as_mut().expect("there until it is dropped")
    }
}

impl<R: Rail, const RAILS: usize> Drop for End<R, RAILS> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.regions.iter().for_each(Registered::check);
        }
        // Forgets device memory, which is freed with its rail.
        self.regions.retain(|region| !matches!(region.memory, Memory::Device(..)));
        drop(self.engine.take());
        // SAFETY: `new` allocated `storage`, and its only borrower, the engine, has been dropped.
        drop(unsafe { Box::from_raw(self.storage) });
    }
}
