//! The header of a lane's segment: a magic number, the nonces of both ends, and the cursor of the
//! other lane. The magic number is stored last.

use std::mem::offset_of;

use static_assertions::const_assert_eq;

use super::primitive::{AtomicU64, Ordering, edge};

/// The header of a lane's segment: 256 bytes in the first page. The cells begin in the second page.
#[repr(C, align(128))]
pub(super) struct Header {
    pub(super) magic: AtomicU64,
    /// The version, the cell size in bytes, and the number of cells.
    pub(super) sizes: AtomicU64,
    /// Nonce of the end that created the segment.
    pub(super) maker: [AtomicU64; 2],
    /// Nonce of the other end.
    pub(super) guest: [AtomicU64; 2],
    pub(super) freed: Cursor,
}

/// The position of the segment's creator in its incoming lane: all earlier cells are consumed.
/// Aligned to 128 bytes, so that nothing else is in its cache line, or in the adjacent line that
/// the processor prefetches.
#[repr(C, align(128))]
pub(super) struct Cursor(pub(super) AtomicU64);

const_assert_eq!(size_of::<Header>(), 256);
const_assert_eq!(offset_of!(Header, magic), 0);
const_assert_eq!(offset_of!(Header, sizes), 8);
const_assert_eq!(offset_of!(Header, maker), 16);
const_assert_eq!(offset_of!(Header, guest), 32);
const_assert_eq!(offset_of!(Header, freed), 128);

impl Header {
    /// Fills in a new header.
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

    /// Returns whether the header was completed with these values.
    pub(super) fn is(&self, magic: u64, sizes: u64, maker: [u64; 2], guest: [u64; 2]) -> bool {
        // Acquire, edge `lane.magic`: orders the relaxed loads below after this load.
        self.magic.load(edge!("lane.magic.load", Acquire)) == magic
            && self.sizes.load(Ordering::Relaxed) == sizes
            && [&self.maker, &self.guest]
                .map(|words| words.each_ref().map(|word| word.load(Ordering::Relaxed)))
                == [maker, guest]
    }
}
