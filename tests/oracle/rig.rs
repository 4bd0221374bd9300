//! Two engines in one process over a rail of their own, driven by one thread, and the memory of both.

use std::ptr::NonNull;

use fishplate::{Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Asleep, Config, ContextId, Engine, HANDLE_MAX, Waiter};
use fishplate_core::mem::{LocalId, PeerId, Region, RegionKind, RemoteId};
use fishplate_core::rail::Rail;
use fishplate_core::sync::host::SpinHost;

pub const CX: ContextId = ContextId(0);

/// Bytes of each region.
pub const SIZE: usize = 256 << 10;

/// Small, so that windows and credits run out.
pub const CONFIG: Config = Config { window: 16, ..Config::DEFAULT };
const MATCHING: MatchConfig = MatchConfig { eager: 128, credits: 4, headers: 8, seed: 3 };
const LIMITS: Limits = Limits { peers: 1, locals: 4, remotes: 8, operations: 48 };

fn leak<T>(value: T) -> &'static mut T {
    Box::leak(Box::new(value))
}

/// Zeroed private memory that is never freed.
pub fn private() -> Region {
    let words = leak(vec![0u64; SIZE / 8]);
    // SAFETY: leaked, and touched through raw copies and the engines alone.
    unsafe { Region::new(NonNull::from(&mut words[0]).cast(), SIZE, RegionKind::Private) }
}

/// One engine with one peer.
pub struct End<R: Rail, const RAILS: usize> {
    pub engine: Engine<'static, R, RAILS>,
    pub peer: PeerId,
}

impl<R: Rail, const RAILS: usize> End<R, RAILS> {
    /// An engine over rails that have the other end attached as peer 0.
    fn new(config: Config, rails: [R; RAILS]) -> Self {
        let mut engine = leak(Storage::new(&config, LIMITS)).engine(config, rails).unwrap();
        engine.attach_matching(MATCHING, leak(MatchStorage::new(&MATCHING, 1, 32, 8)).memory()).unwrap();
        let peer = engine.reserve_peer().unwrap();
        assert_eq!(peer.peer().0, 0);
        engine.connect_peer(peer, ((1u32 << RAILS) - 1) as u16).unwrap();
        End { engine, peer }
    }
}

/// A region of the target: where it lies, its name there, and its name at the origin.
#[derive(Clone, Copy)]
pub struct Target {
    pub base: NonNull<u8>,
    pub local: LocalId,
    pub remote: RemoteId,
}

/// The origin `a`, the target `b`, and their memory.
pub struct Pair<R: Rail, const RAILS: usize> {
    pub a: End<R, RAILS>,
    pub b: End<R, RAILS>,
    pub source: NonNull<u8>,
    pub from: LocalId,
    pub targets: [Target; 2],
    pub waiter: Waiter<'static, SpinHost, Asleep>,
}

impl<R: Rail, const RAILS: usize> Pair<R, RAILS> {
    pub fn new(config: Config, [near, far]: [[R; RAILS]; 2], regions: [Region; 2]) -> Self {
        let (mut a, mut b) = (End::new(config, near), End::new(config, far));
        let region = private();
        let (source, from) = (region.ptr(), a.engine.register(region).unwrap());
        let targets = regions.map(|region| {
            let base = region.ptr();
            let local = b.engine.register(region).unwrap();
            let mut handle = [0; HANDLE_MAX];
            let len = b.engine.export(local, &mut handle).unwrap();
            let remote = a.engine.import(a.peer, &handle[..len]).unwrap();
            Target { base, local, remote }
        });
        let waiter = Waiter::awake(leak(SpinHost::new(1)), leak(Asleep::new()));
        Pair { a, b, source, from, targets, waiter }
    }
}
