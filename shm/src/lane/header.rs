//! The header of a lane's segment. Nothing here blocks or allocates. [`lane`](super) describes the
//! edges.

use std::mem::offset_of;

use static_assertions::const_assert_eq;

use super::primitive::{AtomicU64, Ordering, edge, edge_fence};

/// 256 bytes in the first page. The creator stores the magic number last, and clears it when it
/// leaves.
#[repr(C, align(128))]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    /// Version, cell size in bytes, and number of cells.
    pub(super) sizes: AtomicU64,
    /// Nonce of the end that created the segment.
    pub(super) maker: [AtomicU64; 2],
    /// Nonce of the other end.
    pub(super) guest: [AtomicU64; 2],
    pub(super) freed: Cursor,
}

/// The creator has consumed all earlier cells of its incoming lane. Aligned to 128 bytes, so that
/// nothing else is in its cache line, or in the adjacent line that the processor prefetches.
#[repr(C, align(128))]
pub(super) struct Cursor(pub(super) AtomicU64);

const_assert_eq!(size_of::<Header>(), 256);
const_assert_eq!(offset_of!(Header, magic), 0);
const_assert_eq!(offset_of!(Header, sizes), 8);
const_assert_eq!(offset_of!(Header, maker), 16);
const_assert_eq!(offset_of!(Header, guest), 32);
const_assert_eq!(offset_of!(Header, freed), 128);

impl Header {
    pub(super) fn complete(&self, magic: u64, sizes: u64, maker: [u64; 2], guest: [u64; 2]) {
        // Relaxed: the store of the magic number publishes these values, by edge `lane.magic`.
        self.sizes.store(sizes, Ordering::Relaxed);
        for (cell, words) in [(&self.maker, maker), (&self.guest, guest)] {
            cell[0].store(words[0], Ordering::Relaxed);
            cell[1].store(words[1], Ordering::Relaxed);
        }
        // Release, edge `lane.magic`: publishes the complete header.
        self.magic.store(magic, edge!("lane.magic.store", Release));
    }

    pub(super) fn is(&self, magic: u64, sizes: u64, maker: [u64; 2], guest: [u64; 2]) -> bool {
        // Acquire, edge `lane.magic`: orders the relaxed loads below after this load.
        self.magic.load(edge!("lane.magic.load", Acquire)) == magic
            && self.sizes.load(Ordering::Relaxed) == sizes
            && [&self.maker, &self.guest]
                .map(|words| words.each_ref().map(|word| word.load(Ordering::Relaxed)))
                == [maker, guest]
    }

    /// The creator calls this when it detaches or fails the other end, before its program may reuse
    /// the memory of a send.
    pub(super) fn leave(&self) {
        // Relaxed: the fence orders this store.
        self.magic.store(0, Ordering::Relaxed);
        // SeqCst, edge `lane.gone`: orders the store before the program's next writes to the memory
        // of its sends, even before non-temporal stores.
        edge_fence!("lane.gone.store", SeqCst);
    }

    /// Returns whether the creator had not left when this thread read the memory of its sends.
    pub(super) fn is_there(&self, magic: u64) -> bool {
        // Acquire, edge `lane.gone`: orders the reads of that memory before the load.
        edge_fence!("lane.gone.load", Acquire);
        // Relaxed: the fence orders this load.
        self.magic.load(Ordering::Relaxed) == magic
    }
}
