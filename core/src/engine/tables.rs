//! The memory of a small engine with one context, in one value: for a static, the stack or a test.
//! Never allocates.

use core::mem::MaybeUninit;

use super::{EngineMemory, LocalSlot, Pairing, Parked, PeerSlot, PendingSlot, RemoteSlot, Stream};

/// Words of bitmap per stream: enough for windows up to 512.
const WORDS: usize = 16;

/// Memory for `PEERS` peers, one context, a window of `WINDOW` (at most 512), `REGIONS` regions of
/// each kind and `OPS` operations in flight.
#[derive(Debug)]
pub struct Tables<
    const RAILS: usize,
    const PEERS: usize,
    const WINDOW: usize,
    const REGIONS: usize,
    const OPS: usize,
> {
    peers: [PeerSlot; PEERS],
    pairings: [Pairing; PEERS],
    streams: [Stream; PEERS],
    parked: [[MaybeUninit<Parked>; WINDOW]; PEERS],
    bitmap: [[u64; WORDS]; PEERS],
    locals: [LocalSlot<RAILS>; REGIONS],
    remotes: [RemoteSlot<RAILS>; REGIONS],
    pending: [PendingSlot; OPS],
}

impl<
    const RAILS: usize,
    const PEERS: usize,
    const WINDOW: usize,
    const REGIONS: usize,
    const OPS: usize,
> Tables<RAILS, PEERS, WINDOW, REGIONS, OPS>
{
    /// Creates empty tables.
    pub const fn new() -> Self {
        Tables {
            peers: [PeerSlot::EMPTY; PEERS],
            pairings: [Pairing::ALIKE; PEERS],
            streams: [Stream::EMPTY; PEERS],
            parked: [[Parked::EMPTY; WINDOW]; PEERS],
            bitmap: [[0; WORDS]; PEERS],
            locals: [LocalSlot::EMPTY; REGIONS],
            remotes: [RemoteSlot::EMPTY; REGIONS],
            pending: [PendingSlot::EMPTY; OPS],
        }
    }

    /// Lends the tables to an engine.
    pub fn memory(&mut self) -> EngineMemory<'_, RAILS> {
        EngineMemory {
            peers: &mut self.peers,
            pairings: &mut self.pairings,
            streams: &mut self.streams,
            parked: self.parked.as_flattened_mut(),
            bitmap: self.bitmap.as_flattened_mut(),
            locals: &mut self.locals,
            remotes: &mut self.remotes,
            pending: &mut self.pending,
        }
    }
}

impl<
    const RAILS: usize,
    const PEERS: usize,
    const WINDOW: usize,
    const REGIONS: usize,
    const OPS: usize,
> Default for Tables<RAILS, PEERS, WINDOW, REGIONS, OPS>
{
    fn default() -> Self {
        Self::new()
    }
}
