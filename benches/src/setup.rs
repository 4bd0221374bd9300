//! Memory of the engines in benchmarks. It is leaked, and its set-up is not counted.

use std::ptr::NonNull;

use fishplate_core::engine::{
    Config, EngineMemory, LocalSlot, Pairing, Parked, PeerSlot, PendingSlot, RemoteSlot, Stream,
};
use fishplate_core::mem::{Region, RegionKind};

pub fn leak<T: Clone>(value: T, len: usize) -> &'static mut [T] {
    Box::leak(vec![value; len].into_boxed_slice())
}

/// Returns tables for one peer, one region per side, and `operations` operations.
pub fn memory(config: &Config, operations: usize) -> EngineMemory<'static, 1> {
    EngineMemory {
        peers: leak(PeerSlot::EMPTY, 1),
        pairings: leak(Pairing::ALIKE, 1),
        streams: leak(Stream::EMPTY, 1),
        parked: leak(Parked::EMPTY, config.window as usize),
        bitmap: leak(0, config.bitmap_words(1)),
        locals: leak(LocalSlot::EMPTY, 1),
        remotes: leak(RemoteSlot::EMPTY, 1),
        pending: leak(PendingSlot::EMPTY, operations),
    }
}

pub fn region() -> Region {
    let words = leak(0u64, 64);
    // SAFETY: the words are leaked, so they stay valid. From here on only the engine and atomics
    // access them.
    unsafe { Region::new(NonNull::from(&mut words[0]).cast(), 512, RegionKind::Private) }
}
