//! A lane carries records of any length from one producer to one consumer, through memory that only
//! the producer can write. Neither end blocks, allocates, locks or makes a system call. Each end
//! belongs to one thread.
//!
//! A record occupies contiguous cells of 64 bytes. Its first cell begins with a *stamp*, which is
//! derived from the record's absolute position and stored last. A consumer that waits for the next
//! record polls the cache line in which the record arrives. So a short record costs one line
//! transfer, whereas a ring with a shared tail costs two. The ring of cells is mapped twice, in
//! adjacent mappings, so a record that wraps is contiguous.
//!
//! | byte of the first cell | what |
//! |---|---|
//! | 0..8 | stamp: twice the position, plus one. Never 0, so fresh memory holds no record |
//! | 8..16 | header: the kind in the low half, a value that depends on it in the high half |
//! | 16..64 | payload, which continues in the following cells |
//!
//! # Stale stamps
//!
//! The later cells of a record hold payload where a stamp would be, and that payload may equal a
//! valid stamp. After a record the consumer checks the stamp of the *next* cell. So before the
//! producer publishes a record, it clears a valid stamp from the cell behind the record. That cell
//! must be free, so a lane of n cells holds at most n - 1.
//!
//! # Claimed cells
//!
//! The producer can write a line only after the consumer's cached copy is invalidated, and stores
//! become visible in program order. So a record that needs one such line stalls for a whole
//! transfer, even if the line was prefetched for writing. Adjacent stores to several lines overlap
//! their transfers (`bare-stream` in `benches/` shows both). So [`Producer::publish`] clears the
//! stamps of several free cells behind a record at once. This *claims* the cells: later records
//! find their lines in the producer's cache, and the cell behind each record already clean.
//!
//! After a long record the producer claims as many cells as the record took, because a copy mostly
//! waits for its lines (`bare-lane`). Streams of 4 to 16 KiB records then take a tenth to a third
//! less time.
//!
//! # Edges
//!
//! | edge         | release                | acquire                  | carries                   |
//! |--------------|------------------------|--------------------------|---------------------------|
//! | `lane.stamp` | [`Producer::publish`]  | [`Consumer::header`]     | record, clean next cell   |
//! | `lane.freed` | [`Consumer::advance`]  | [`Producer::reserve`]    | permission to overwrite   |
//! | `lane.magic` | [`LaneMemory::create`] | [`LaneMemory::attach`]   | the segment's header      |
//! | `lane.gone`  | [`LaneMemory::leave`]  | [`LaneMemory::is_there`] | that the creator has left |
//!
//! # Segment
//!
//! Each end creates the segment of its *outgoing* lane and seals it against other writers. The
//! segment also holds the cursor of that end's *incoming* lane. So neither end writes to the
//! other's segment. Positions are absolute, are never reset, and wrap at 2^64. The handshake fixes
//! the sizes, which are never read from the segment.
//!
//! The consumer does not trust any byte of the lane. A stamp only means that a record may be there.
//! The header is loaded once and checked, and the payload is copied once. The producer accepts the
//! consumer's cursor only if it moves forward and not past the producer's position.

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

/// Returns the maximum length, in bytes, of a message that fits into an empty lane at any position.
///
/// The consumer may delay freeing up to a quarter of the lane, and one cell stays unused.
pub(crate) const fn max_message(cells: u32) -> usize {
    (cells as usize / 4 * 3 - 1) * CELL
}

/// Offset of the first cell in the segment, in bytes.
const CELLS: usize = PAGE;

#[derive(Debug)]
pub(crate) struct LaneMemory {
    mapping: Mapping,
    fd: OwnedFd,
    cells: u32,
}

assert_impl_all!(LaneMemory: Send, Sync);

impl LaneMemory {
    pub(crate) fn create(cells: u32, maker: Nonce, guest: Nonce) -> Result<Self, SegmentError> {
        let ring = cells as usize * CELL;
        let fd = segment::create(CELLS + ring)?;
        let mapping = Mapping::twice(fd.as_fd(), CELLS, ring, Access::Write)?;
        let memory = LaneMemory { mapping, fd, cells };
        memory.header().complete(MAGIC, sizes(cells), words(maker), words(guest));
        segment::seal_against_writers(memory.fd.as_fd())?;
        Ok(memory)
    }

    /// Checks the segment of our incoming lane, and maps it read-only.
    pub(crate) fn attach(
        fd: Foreign,
        cells: u32,
        maker: Nonce,
        guest: Nonce,
    ) -> Result<Self, SegmentError> {
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

    /// Tells the other end that this process has left, before its program may reuse the memory of a
    /// send. For the segment of the outgoing lane, which is mapped writable.
    pub(crate) fn leave(&self) {
        self.header().leave();
    }

    /// Returns whether the creator of the segment had not left when this thread read the memory of
    /// its sends.
    pub(crate) fn is_there(&self) -> bool {
        self.header().is_there(MAGIC)
    }

    fn header(&self) -> &Header {
        // SAFETY: `self` owns the mapping, so its first page stays mapped while the reference
        // lives. It is page-aligned, and any bytes are valid for a header of atomics. We only load
        // from a read-only mapping.
        unsafe { self.mapping.ptr().cast::<Header>().as_ref() }
    }

    fn first_cell(&self) -> *mut u8 {
        // SAFETY: `Mapping::twice` mapped more than `CELLS` bytes, so the first cell lies inside
        // the mapping.
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

#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) outgoing: LaneMemory,
    pub(crate) incoming: LaneMemory,
}

impl Pair {
    /// Both ends begin at position `start`.
    ///
    /// # Safety
    /// The caller calls this once, and uses both ends only while the pair exists, which may be
    /// moved.
    pub(crate) unsafe fn open(&self, start: u64) -> (Producer, Consumer) {
        // SAFETY: the caller keeps the pair as long as the ends. It calls this once, so there is no
        // other producer or consumer. `create` mapped `outgoing` writable.
        unsafe { ends(&self.outgoing, &self.incoming, start) }
    }
}

/// Returns the producer of `outgoing` and the consumer of `incoming`. Each segment holds the cursor
/// of the other lane. If both arguments are the same segment, the ends belong to one lane.
///
/// # Safety
/// The caller uses both ends only while the segments exist. `outgoing` is mapped writable and has
/// no other producer in this process, and `incoming` has no other consumer.
pub(crate) unsafe fn ends(
    outgoing: &LaneMemory,
    incoming: &LaneMemory,
    start: u64,
) -> (Producer, Consumer) {
    let cursors = [incoming, outgoing].map(|memory| &raw const memory.header().freed.0);
    // SAFETY: `create` or `attach` mapped `cells` cells in two adjacent mappings, and a header with
    // a cursor. The caller guarantees their lifetime, and that these are the only ends.
    let (producer, consumer) = unsafe {
        (
            Producer::new(outgoing.first_cell(), outgoing.cells, cursors[0], start),
            Consumer::new(incoming.first_cell(), incoming.cells, cursors[1], start),
        )
    };
    // Relaxed: the packets of the handshake order this store before any use of the lane.
    outgoing.header().freed.0.store(start, Ordering::Relaxed);
    (producer, consumer)
}

/// Copies word by word if the length is a multiple of 8, because the caller has just stored the
/// header in words. The processor cannot forward such stores to a wider load. That load would wait
/// until all earlier stores, including those to the lane, have reached the cache.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap.
#[inline(always)]
pub(crate) unsafe fn copy_words(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller guarantees `len` readable bytes at `from` and `len` writable bytes at
    // `to`, and every access is inside them. The loads and stores need no alignment.
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
