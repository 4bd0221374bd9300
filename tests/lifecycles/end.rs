//! One end: an engine in memory of its own, and the regions registered with it.

use fishplate::{Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::{Claimed, MatchConfig, Request};
use fishplate_core::engine::{Config, Engine};
use fishplate_core::mem::{LocalId, PeerId, RemoteId};
use fishplate_core::rail::Rail;

use super::memory::Memory;

/// Small, so that everything runs out.
pub const CONFIG: Config = Config { window: 8, eager: 64, ..Config::DEFAULT };
const MATCHING: MatchConfig =
    MatchConfig { eager: 96, credits: 3, headers: 4, shared_credits: 7, shared_headers: 7, seed: 3 };
const LIMITS: Limits = Limits { peers: 3, locals: 12, remotes: 7, operations: 24 };
const RECEIVES: usize = 8;

/// What a region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Peers write its own word there, and nothing else.
    Target,
    /// Holds the word of one target, and is sent and put from. Nobody writes there.
    Source,
    /// Receives and gets end there.
    Scratch,
}

pub struct Registered {
    pub id: LocalId,
    pub role: Role,
    /// Of a target its own, of a source that of its target.
    pub word: u64,
    pub memory: Memory,
}

impl Registered {
    /// Says what must not be in it.
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

/// A region of an end, imported by another or by the same.
#[derive(Clone, Copy)]
pub struct Imported {
    pub id: RemoteId,
    pub word: u64,
}

pub struct End<R: Rail> {
    engine: Option<Engine<'static, R, 1>>,
    storage: *mut (Storage<1>, MatchStorage<1>),
    pub regions: Vec<Registered>,
    pub imports: Vec<Imported>,
    /// Which peer each end is.
    pub peers: Vec<Option<PeerId>>,
    /// Names that were good once.
    pub old_locals: Vec<LocalId>,
    pub old_remotes: Vec<RemoteId>,
    pub old_peers: Vec<PeerId>,
    pub requests: Vec<Request>,
    pub claimed: Vec<Claimed>,
}

impl<R: Rail> End<R> {
    pub fn new(rail: R, ends: usize) -> Self {
        let streams = LIMITS.peers as usize;
        let storage = (Storage::new(&CONFIG, LIMITS), MatchStorage::new(&MATCHING, streams, RECEIVES, 2));
        let storage = Box::into_raw(Box::new(storage));
        // SAFETY: just made; it is freed behind the engine.
        let (tables, matching) = unsafe { &mut *storage };
        let mut engine = tables.engine(CONFIG, [rail]).unwrap();
        engine.attach_matching(MATCHING, matching.memory()).unwrap();
        End {
            engine: Some(engine),
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

    pub fn engine(&mut self) -> &mut Engine<'static, R, 1> {
        self.engine.as_mut().expect("there until it is dropped")
    }
}

impl<R: Rail> Drop for End<R> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.regions.iter().for_each(Registered::check);
        }
        // What a device had goes with its rail.
        self.regions.retain(|region| !matches!(region.memory, Memory::Device(..)));
        drop(self.engine.take());
        // SAFETY: made by `new`, and borrowed by the engine alone, which is gone.
        drop(unsafe { Box::from_raw(self.storage) });
    }
}
