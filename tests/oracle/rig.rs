//! Two connected engines in one process, driven by one thread, and their memory.

use std::ptr::NonNull;

use fishplate::shm::Segment;
use fishplate::{Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Asleep, Config, ContextId, Engine, HANDLE_MAX, Waiter};
use fishplate_core::mem::{LocalId, PeerId, Region, RegionKind, RemoteId};
use fishplate_core::rail::Rail;
use fishplate_core::sync::host::SpinHost;

pub const CX: ContextId = ContextId(0);

/// Size of each region in bytes.
pub const SIZE: usize = 512 << 10;

/// Settings with small limits, so that windows and credits run out.
pub const CONFIG: Config = Config { window: 16, ..Config::DEFAULT };
const MATCHING: MatchConfig = MatchConfig {
    eager: 128,
    credits: 4,
    headers: 8,
    shared_credits: 30,
    shared_headers: 30,
    shared_shorts: 0,
    pieces: 0,
    seed: 3,
};
const LIMITS: Limits = Limits { peers: 1, locals: 4, remotes: 8, operations: 48 };

/// Memory that one pair at a time borrows: the tables of both engines, private memory, and parts of
/// a waiter.
pub struct Room<const RAILS: usize> {
    tables: [(Storage<RAILS>, MatchStorage<RAILS>); 2],
    memory: [Vec<u64>; 3],
    host: SpinHost,
    never: Asleep,
}

impl<const RAILS: usize> Room<RAILS> {
    /// Allocates zeroed memory for a pair with limits up to [`CONFIG`].
    pub fn new() -> Self {
        let tables = || (Storage::new(&CONFIG, LIMITS), MatchStorage::new(&MATCHING, 1, 32, 8));
        Room {
            tables: [tables(), tables()],
            memory: [(); 3].map(|()| vec![0; SIZE / 8]),
            host: SpinHost::new(1),
            never: Asleep::new(),
        }
    }
}

fn private(words: &mut [u64]) -> Region {
    // SAFETY: the words live while the pair borrows them. They are accessed only by raw copies and
    // by the engines.
    unsafe { Region::new(NonNull::from(&mut words[0]).cast(), SIZE, RegionKind::Private) }
}

/// One engine with one peer.
pub struct End<'m, R: Rail, const RAILS: usize> {
    pub engine: Engine<'m, R, RAILS>,
    pub peer: PeerId,
}

impl<'m, R: Rail, const RAILS: usize> End<'m, R, RAILS> {
    /// Creates an engine over `rails`. Its peer 0 is the other end.
    fn new(
        config: Config,
        rails: [R; RAILS],
        (storage, matching): &'m mut (Storage<RAILS>, MatchStorage<RAILS>),
    ) -> Self {
        let mut engine = storage.engine(config, rails).unwrap();
        engine.attach_matching(MATCHING, matching.memory()).unwrap();
        let peer = engine.reserve_peer().unwrap();
        assert_eq!(peer.peer().0, 0);
        engine.connect_peer(peer, ((1u32 << RAILS) - 1) as u16).unwrap();
        End { engine, peer }
    }
}

/// A region of the target: its address, its id at the target, and its id at the origin.
#[derive(Clone, Copy)]
pub struct Target {
    pub base: NonNull<u8>,
    pub local: LocalId,
    pub remote: RemoteId,
}

/// The origin `a`, the target `b`, and their memory.
pub struct Pair<'m, R: Rail, const RAILS: usize> {
    pub a: End<'m, R, RAILS>,
    pub b: End<'m, R, RAILS>,
    pub source: NonNull<u8>,
    pub from: LocalId,
    pub targets: [Target; 2],
    pub waiter: Waiter<'m, SpinHost, Asleep>,
    /// The segment of the second target region. Dropped after the engines.
    _segment: Option<Segment>,
}

impl<'m, R: Rail, const RAILS: usize> Pair<'m, R, RAILS> {
    /// Creates a pair over rails that are attached to each other. The second region of the target
    /// is in `segment`, if it is given.
    pub fn new(
        room: &'m mut Room<RAILS>,
        config: Config,
        [near, far]: [[R; RAILS]; 2],
        segment: Option<Segment>,
    ) -> Self {
        let Room { tables: [first, second], memory: [source, one, other], host, never } = room;
        let (mut a, mut b) = (End::new(config, near, first), End::new(config, far, second));
        let shared = segment.as_ref().map(|segment| {
            // SAFETY: the pair drops the segment after its engines.
            unsafe { segment.region(0, SIZE) }.unwrap()
        });
        let regions = [private(one), shared.unwrap_or_else(|| private(other))];
        let region = private(source);
        let (source, from) = (region.ptr(), a.engine.register(region).unwrap());
        let targets = regions.map(|region| {
            let base = region.ptr();
            let local = b.engine.register(region).unwrap();
            let mut handle = [0; HANDLE_MAX];
            let len = b.engine.export(local, &mut handle).unwrap();
            let remote = a.engine.import(a.peer, &handle[..len]).unwrap();
            Target { base, local, remote }
        });
        let waiter = Waiter::awake(host, never);
        Pair { a, b, source, from, targets, waiter, _segment: segment }
    }
}
