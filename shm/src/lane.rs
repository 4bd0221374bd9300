//! A lane carries records of any length from one producer to one consumer, through memory that only
//! the producer can write. Neither end blocks, allocates, locks or makes a system call; each end
//! belongs to one thread.
//!
//! A record occupies contiguous cells of 64 bytes. Its first cell begins with a *stamp*, which is
//! derived from the record's absolute position and stored last. A consumer that waits for the next
//! record polls the cache line that the record arrives in. So a short record costs one line
//! transfer; a ring with a shared tail costs two. The cells are mapped twice in a row, so a record
//! may wrap.
//!
//! | byte of the first cell | what |
//! |---|---|
//! | 0..8 | stamp: twice the position, plus one. Never 0, so fresh memory holds no record |
//! | 8..16 | header: the kind in the low half, a value that depends on it in the high half |
//! | 16..64 | payload, going on in the cells that follow |
//! | 16..64 | payload, which continues in the following cells |
//! # Stale stamps
//!
//! A cell in the middle of a record holds payload where a stamp would be, and that payload may
//! equal a valid stamp. The consumer looks at the cell *behind* the record next. So the producer
//! clears a valid stamp from that cell before it publishes the record. The cell must be free for
//! this, so a lane of n cells holds n - 1.
//!
//! # Claimed cells
//!
//! A line that the consumer has read must be invalidated there before the producer can write it,
//! and stores retire in program order. So a record that needs one such line stalls for a whole
//! transfer, even if the line was prefetched for writing. Adjacent stores to several lines overlap
//! their transfers (`bare-stream` in `benches/` shows both). So [`Producer::publish`] clears the
//! stamps of several free cells behind a record at once, which *claims* them. Later records find
//! their lines owned, and the cells behind them clean.
//!
//! After a long record the producer claims as many cells as the record took, because a copy mostly
//! waits for its lines (`bare-lane`). This helps streams of long records too: 4 to 16 KiB take a
//! tenth to a third less time.
//!
//! # Edges
//!
//! | edge         | release store          | acquire load           | carries                     |
//! |--------------|------------------------|------------------------|-----------------------------|
//! | `lane.stamp` | [`Producer::publish`]  | [`Consumer::header`]   | the record; next cell clean |
//! | `lane.freed` | [`Consumer::advance`]  | [`Producer::reserve`]  | the cells to overwrite      |
//! | `lane.magic` | [`LaneMemory::create`] | [`LaneMemory::attach`] | the segment's header        |
//!
//! # Segment
//!
//! Each end creates the segment of its *outgoing* lane and seals it against other writers. That
//! segment also holds the cursor of its *incoming* lane, so neither end writes to the other's
//! segment. Positions are absolute, never reset, and wrap at 2^64. Sizes are agreed in the
//! handshake, and never read from the segment.
//!
//! The consumer trusts nothing: a stamp only tells it to look, the header is loaded once and
//! checked, and the payload is copied once. The producer accepts the consumer's cursor only if it
//! moves forward and not past the end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fishplate_core::mem::copy_message;
use fishplate_core::sync::primitive::{self, Ordering};
use static_assertions::assert_impl_all;

use crate::error::SegmentError;
use crate::foreign::Foreign;
use crate::packet::{MAGIC, Nonce, VERSION};
use crate::segment::{self, Access, Mapping, PAGE};

mod ends;
mod header;
#[cfg(all(test, fishplate_loom))]
mod races;
#[cfg(test)]
mod tests;

pub(crate) use ends::{CELL, Consumer, PAYLOAD, Producer, Refused, Watch, cells_for};
use header::Header;

/// Returns the longest message, in bytes, that always fits into an empty lane, wherever it begins.
///
/// A consumer holds back up to a quarter of the lane before it frees it, and one cell stays unused.
pub(crate) const fn max_message(cells: u32) -> usize {
    (cells as usize / 4 * 3 - 1) * CELL
}

/// Offset of the first cell in the segment, in bytes.
const CELLS: usize = PAGE;

/// The segment of one lane, mapped.
#[derive(Debug)]
pub(crate) struct LaneMemory {
    mapping: Mapping,
    fd: OwnedFd,
    cells: u32,
}

assert_impl_all!(LaneMemory: Send, Sync);

impl LaneMemory {
    /// Creates the segment of our outgoing lane.
    pub(crate) fn create(cells: u32, maker: Nonce, guest: Nonce) -> Result<Self, SegmentError> {
        let ring = cells as usize * CELL;
        let fd = segment::create(CELLS + ring)?;
        let mapping = Mapping::twice(fd.as_fd(), CELLS, ring, Access::Write)?;
        let memory = LaneMemory { mapping, fd, cells };
        memory.header().complete(MAGIC, sizes(cells), words(maker), words(guest));
        segment::seal_against_writers(memory.fd.as_fd())?;
        Ok(memory)
    }

    /// Maps the segment of our incoming lane, read-only, after all checks.
    pub(crate) fn attach(fd: Foreign, cells: u32, maker: Nonce, guest: Nonce) -> Result<Self, SegmentError> {
        let ring = cells as usize * CELL;
        let fd = fd.into_memory((CELLS + ring) as u64)?;
        let mapping = Mapping::twice(fd.as_fd(), CELLS, ring, Access::Read)?;
        let memory = LaneMemory { mapping, fd, cells };
        let complete = memory.header().is(MAGIC, sizes(cells), words(maker), words(guest));
        if complete { Ok(memory) } else { Err(SegmentError::Foreign) }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn header(&self) -> &Header {
        // SAFETY: the first page stays mapped while `self` exists. It is page-aligned and consists
        // of atomics, which may have any value. On a read-only mapping they are only loaded.
        unsafe { self.mapping.ptr().cast::<Header>().as_ref() }
    }

    fn first_cell(&self) -> *mut u8 {
        // SAFETY: the mapping is longer than its first page.
        unsafe { self.mapping.ptr().as_ptr().add(CELLS) }
    }
}

fn sizes(cells: u32) -> u64 {
    u64::from(VERSION) << 48 | (CELL as u64) << 32 | u64::from(cells)
}

fn words(nonce: Nonce) -> [u64; 2] {
    let bits = u128::from_ne_bytes(nonce);
    [bits as u64, (bits >> 64) as u64]
}

/// The two segments between two ends.
#[derive(Debug)]
pub(crate) struct Pair {
    /// Created here.
    pub(crate) outgoing: LaneMemory,
    /// Created by the peer.
    pub(crate) incoming: LaneMemory,
}

impl Pair {
    /// Returns the producer and the consumer, both at position `start`.
    ///
    /// # Safety
    /// Called once. Both are used only while the pair exists, even if it has moved.
    pub(crate) unsafe fn open(&self, start: u64) -> (Producer, Consumer) {
        // SAFETY: our caller guarantees that the segments outlive the ends, and that there are no
        // others.
        unsafe { ends(&self.outgoing, &self.incoming, start) }
    }
}

/// Returns the producer of `outgoing` and the consumer of `incoming`. Each segment holds the cursor
/// of the other lane. With the same segment for both, they are the two ends of one lane.
///
/// # Safety
/// Both are used only while the segments exist. `outgoing` is mapped writable and has no other
/// producer here, and `incoming` has no other consumer.
pub(crate) unsafe fn ends(outgoing: &LaneMemory, incoming: &LaneMemory, start: u64) -> (Producer, Consumer) {
    let cursors = [incoming, outgoing].map(|memory| &raw const memory.header().freed.0);
    // SAFETY: each segment has its stated number of cells, mapped twice in a row, and a cursor. Our
    // caller guarantees the rest.
    let (producer, consumer) = unsafe {
        (
            Producer::new(outgoing.first_cell(), outgoing.cells, cursors[0], start),
            Consumer::new(incoming.first_cell(), incoming.cells, cursors[1], start),
        )
    };
    // Relaxed: the rest of the handshake orders it before any use.
    outgoing.header().freed.0.store(start, Ordering::Relaxed);
    (producer, consumer)
}

/// Copies the header of a message, word by word if its length allows, just as it was written. A
/// wider load than the stores before it would wait until all earlier stores, including those to the
/// lane, have reached the cache.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap.
#[inline(always)]
pub(crate) unsafe fn copy_words(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: each access lies within `len` bytes, and accesses may be unaligned.
    unsafe {
        if !len.is_multiple_of(8) {
            return copy_message(from, to, len);
        }
        for at in (0..len).step_by(8) {
            let word = from.add(at).cast::<u64>().read_unaligned();
            to.add(at).cast::<u64>().write_unaligned(word);
        }
    }
}
