//! A lane: records of any length from one producer to one consumer, through memory that the producer alone can write.
//! Neither end blocks, allocates, locks or makes a system call; each end belongs to one thread.
//!
//! A record lies in 1 to n contiguous cells of 64 bytes. Its first cell begins with a *stamp*, derived from the
//! record's absolute position, and the stamp is stored last: a consumer that waits for the next record looks at
//! the very line that the record comes in, so a short record costs one line transfer, where a ring with a shared tail
//! costs two. The cells are mapped twice in a row, so a record that starts in the last cell simply goes on.
//!
//! | byte of the first cell | what                                                                            |
//! |------------------------|---------------------------------------------------------------------------------|
//! | 0..8                   | stamp: twice the position, plus one. Never 0, so fresh memory holds no record    |
//! | 8..16                  | header: the kind in the low half, a value that depends on it in the high half    |
//! | 16..64                 | payload, going on in the cells that follow                                      |
//!
//! # Stale stamps
//!
//! A cell that was in the middle of a record holds payload where a stamp would be, and payload can be anything. So the cell
//! *behind* a record, where the consumer will look next, is cleared of a stamp that it happens to hold before the record becomes
//! visible. That cell must not be in use, which is why a lane of n cells holds n - 1.
//!
//! # Claimed cells
//!
//! A line that the consumer has read has to be taken back from it before it can be written, and stores wait for that in the order of
//! the program: a record that needs one such line, with a few dozen stores elsewhere before the next, waits a whole transfer, whether
//! the line was prefetched for writing or not. Lines that are stored to in a row are asked for together (`bare-stream` in
//! `benches/` shows both). So [`Producer::publish`], once for several short records, clears the stamps of the next free cells in one go,
//! behind the record; those that follow find their lines, and clean cells behind them, in place.
//!
//! Behind a long record it claims as many cells as that took: the next, if it is as long, is copied to lines that are in place, which is
//! what most of a copy waits for (`bare-lane`). In a stream it waits for them here instead.
//!
//! # Edges
//!
//! | edge         | release store          | acquire load            | carries                                   |
//! |--------------|------------------------|-------------------------|-------------------------------------------|
//! | `lane.stamp` | [`Producer::publish`]  | [`Consumer::header`]    | the record, and that the next cell is clean |
//! | `lane.freed` | [`Consumer::advance`]  | [`Producer::reserve`]   | permission to overwrite cells             |
//! | `lane.magic` | [`LaneMemory::create`] | [`LaneMemory::attach`]  | the rest of the segment's header          |
//!
//! # Segment
//!
//! Each end makes the segment of its *outgoing* lane and seals it against other writers; it also keeps in it the
//! cursor of its *incoming* lane, so that neither end ever writes into the other's segment. Positions are absolute, never
//! reset, and wrap at 2^64. Sizes are constants agreed in the handshake, never read from the segment.
//!
//! The consumer trusts nothing: a stamp only says "look here", the header is loaded once and checked, the payload is
//! copied out once. The producer trusts the consumer's cursor only as far as it moves forward and not past the end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use fishplate_core::mem::copy_message;
use fishplate_core::sync::primitive::{AtomicU64, Ordering};
use static_assertions::{assert_impl_all, assert_not_impl_any, const_assert_eq};

use crate::foreign::Foreign;
use crate::handshake::Nonce;
use crate::packet::{MAGIC, VERSION};
use crate::segment::{self, Access, Mapping, PAGE, SegmentError};

/// Size of a cell, in bytes.
pub(crate) const CELL: usize = 64;

/// Where the payload begins in a record, in bytes.
pub(crate) const PAYLOAD: usize = 16;

/// How many cells a record with a payload of `len` bytes takes.
#[inline(always)]
pub(crate) const fn cells_for(len: usize) -> u64 {
    (PAYLOAD + len).div_ceil(CELL) as u64
}

/// The longest message that a lane always accepts once it has been emptied, in bytes, wherever in its first cell or with the second it
/// begins.
///
/// A consumer holds back up to a quarter of the lane before it says that it is free, and one cell stays unused.
pub(crate) const fn max_message(cells: u32) -> usize {
    (cells as usize / 4 * 3 - 1) * CELL
}

/// The head of a lane's segment: 256 bytes in the first page; the cells begin with the second.
#[repr(C, align(128))]
struct Header {
    magic: AtomicU64,
    /// Version, cell size in bytes, number of cells.
    sizes: AtomicU64,
    /// Nonce of the end that made the segment.
    maker: [AtomicU64; 2],
    /// Nonce of the end that it was made for.
    guest: [AtomicU64; 2],
    freed: Cursor,
}

/// How far the maker of the segment has consumed its incoming lane: 128 bytes, alone on its line and on the one that
/// the processor fetches with it.
#[repr(C, align(128))]
struct Cursor(AtomicU64);

const_assert_eq!(size_of::<Header>(), 256);
const_assert_eq!(memoffset::offset_of!(Header, magic), 0);
const_assert_eq!(memoffset::offset_of!(Header, sizes), 8);
const_assert_eq!(memoffset::offset_of!(Header, maker), 16);
const_assert_eq!(memoffset::offset_of!(Header, guest), 32);
const_assert_eq!(memoffset::offset_of!(Header, freed), 128);

/// Where the cells begin in the segment, in bytes.
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
    /// Makes the segment of our outgoing lane.
    pub(crate) fn create(cells: u32, maker: Nonce, guest: Nonce) -> Result<Self, SegmentError> {
        let ring = cells as usize * CELL;
        let fd = segment::create(CELLS + ring)?;
        let mapping = Mapping::twice(fd.as_fd(), CELLS, ring, Access::Write)?;
        let memory = LaneMemory { mapping, fd, cells };
        let header = memory.header();
        // Relaxed: edge `lane.magic` below carries these.
        header.sizes.store(sizes(cells), Ordering::Relaxed);
        for (cell, words) in [(&header.maker, words(maker)), (&header.guest, words(guest))] {
            cell[0].store(words[0], Ordering::Relaxed);
            cell[1].store(words[1], Ordering::Relaxed);
        }
        // Release, edge `lane.magic`: whoever sees the magic sees a complete header.
        header.magic.store(MAGIC, Ordering::Release);
        segment::seal_against_writers(memory.fd.as_fd())?;
        Ok(memory)
    }

    /// Maps the segment of our incoming lane, read-only, after checking everything about it.
    pub(crate) fn attach(fd: Foreign, cells: u32, maker: Nonce, guest: Nonce) -> Result<Self, SegmentError> {
        let ring = cells as usize * CELL;
        let fd = fd.into_memory((CELLS + ring) as u64)?;
        let mapping = Mapping::twice(fd.as_fd(), CELLS, ring, Access::Read)?;
        let memory = LaneMemory { mapping, fd, cells };
        let header = memory.header();
        // Acquire, edge `lane.magic`. The loads behind it are relaxed.
        let complete = header.magic.load(Ordering::Acquire) == MAGIC
            && header.sizes.load(Ordering::Relaxed) == sizes(cells)
            && [&header.maker, &header.guest]
                .map(|words| words.each_ref().map(|word| word.load(Ordering::Relaxed)))
                == [words(maker), words(guest)];
        if complete { Ok(memory) } else { Err(SegmentError::Foreign) }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn header(&self) -> &Header {
        // SAFETY: the first page is mapped as long as `self` lives, page-aligned, and consists of atomics only, for
        // which every value is valid. On a read-only mapping they are only loaded.
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
    /// Made here.
    pub(crate) outgoing: LaneMemory,
    /// Made by the peer.
    pub(crate) incoming: LaneMemory,
}

impl Pair {
    /// Both cursors, at position `start`.
    ///
    /// # Safety
    /// They are used only while the pair, wherever it is moved to, lives, and this is called once.
    pub(crate) unsafe fn open(&self, start: u64) -> (Producer, Consumer) {
        // SAFETY: handed on to our caller.
        unsafe { ends(&self.outgoing, &self.incoming, start) }
    }
}

/// The producer of `outgoing` and the consumer of `incoming`, each of whose segments holds the cursor of the other lane.
/// With one segment for both: the two ends of one lane.
///
/// # Safety
/// They are used only while both segments live; `outgoing` is mapped writable and has no other producer here, `incoming`
/// no other consumer.
pub(crate) unsafe fn ends(outgoing: &LaneMemory, incoming: &LaneMemory, start: u64) -> (Producer, Consumer) {
    let producer = Producer {
        cells: outgoing.first_cell(),
        mask: u64::from(outgoing.cells) - 1,
        at: start,
        freed: start,
        claimed: start.wrapping_add(1),
        cursor: &raw const incoming.header().freed.0,
    };
    let consumer = Consumer {
        cells: incoming.first_cell(),
        mask: u64::from(incoming.cells) - 1,
        at: start,
        told: start,
        cursor: &raw const outgoing.header().freed.0,
    };
    // Relaxed: the handshake, still to be finished, orders it before any use.
    outgoing.header().freed.0.store(start, Ordering::Relaxed);
    (producer, consumer)
}

/// The stamp of a position.
#[inline(always)]
fn stamp(position: u64) -> u64 {
    position << 1 | 1
}

/// Why a record could not be reserved. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// No room for now.
    Full,
    /// The consumer's cursor is not one that a correct consumer can have written.
    Corrupt,
}

/// The end that writes.
#[derive(Debug)]
pub(crate) struct Producer {
    cells: *mut u8,
    mask: u64,
    /// Position of the next record.
    at: u64,
    /// The consumer's cursor as last loaded.
    freed: u64,
    /// The cells from `at` to below here hold no stamp that the consumer could be waiting for. Always beyond `at`, and never beyond what
    /// `freed` allows.
    claimed: u64,
    cursor: *const AtomicU64,
}

/// The end that reads.
#[derive(Debug)]
pub(crate) struct Consumer {
    cells: *const u8,
    mask: u64,
    /// Position of the next record.
    at: u64,
    /// Our cursor as last stored.
    told: u64,
    cursor: *const AtomicU64,
}

// SAFETY: the memory behind the pointers belongs to no thread; `ends` was promised that there is one of each.
unsafe impl Send for Producer {}
// SAFETY: as above.
unsafe impl Send for Consumer {}
assert_not_impl_any!(Producer: Sync, Clone);
assert_not_impl_any!(Consumer: Sync, Clone);

/// How many cells the producer claims at least. With half as many, messages of 8 bytes come a little slower, with twice as many no
/// faster.
const CLAIMED: u64 = 8;

/// How many cells before it is needed a line is asked for to be read: beyond those that are claimed behind a short record and may not be
/// written yet, which would have to be claimed again. A constant, so that the address is known before the record in between has arrived.
const READ_AHEAD: u64 = CLAIMED + 1;

/// How many cells of one record are asked for before it is copied: what a payload of 4 KiB takes.
const READ_AT_ONCE: u64 = 65;

impl Producer {
    /// Finds room for a record of so many cells and returns its first byte. The payload goes to 16 and up.
    #[inline(always)]
    pub(crate) fn reserve(&mut self, cells: u64) -> Result<*mut u8, Refused> {
        // One cell more than the record: `publish` may clear the stamp of the one behind it.
        if self.at.wrapping_sub(self.freed) + cells > self.mask {
            self.refresh(cells)?;
        }
        Ok(self.cell(self.at))
    }

    #[cold]
    #[inline(never)]
    fn refresh(&mut self, cells: u64) -> Result<(), Refused> {
        // SAFETY: `ends` was promised that the segment is mapped while this is used.
        // Acquire, edge `lane.freed`: the consumer's reads of what we are about to overwrite are over.
        let freed = unsafe { &*self.cursor }.load(Ordering::Acquire);
        // A correct cursor lies between its last value and our position; the subtraction is modulo 2^64.
        if freed.wrapping_sub(self.freed) > self.at.wrapping_sub(self.freed) {
            return Err(Refused::Corrupt);
        }
        self.freed = freed;
        if self.at.wrapping_sub(freed) + cells > self.mask { Err(Refused::Full) } else { Ok(()) }
    }

    /// Makes the record visible whose payload has been written to what [`reserve`](Producer::reserve) returned.
    ///
    /// # Safety
    /// The last `reserve` was for this many cells and succeeded, and its record has not been published.
    #[inline(always)]
    pub(crate) unsafe fn publish(&mut self, cells: u64, header: u64) {
        let next = self.at.wrapping_add(cells);
        if !self.has_claimed(next) {
            self.clean(next);
        }
        // SAFETY: the cell lies in the ring and is reserved for us; stamps are only ever accessed as atomics while both sides may reach
        // them.
        unsafe {
            let first = self.cell(self.at);
            // Relaxed: edge `lane.stamp` carries it.
            (*first.add(8).cast::<AtomicU64>()).store(header, Ordering::Relaxed);
            // Release, edge `lane.stamp`: whoever sees this stamp sees the record, and a clean cell behind it.
            (*first.cast::<AtomicU64>()).store(stamp(self.at), Ordering::Release);
        }
        self.at = next;
        // One ahead of when it has to be, so that no short record has to look at the cell behind it.
        if !self.has_claimed(next.wrapping_add(1)) {
            self.claim(cells);
        }
    }

    /// Whether a cell at or beyond our position holds no stamp, for certain.
    #[inline(always)]
    fn has_claimed(&self, position: u64) -> bool {
        // Within a lane of each other, so the sign tells which is ahead.
        (position.wrapping_sub(self.claimed) as i64) < 0
    }

    /// Makes sure that a free cell does not hold the stamp of `position`. It is stored to only if it does: whoever publishes would wait
    /// for its line.
    #[inline(always)]
    fn clean(&mut self, position: u64) {
        // SAFETY: the cell lies in the ring and is reserved for us: see `reserve`. Relaxed: ours is the only store there, and edge
        // `lane.stamp` carries it.
        unsafe {
            let cell = &*self.cell(position).cast::<AtomicU64>();
            if cell.load(Ordering::Relaxed) == stamp(position) {
                cell.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Claims the cells behind a record of so many cells that was published last, as far as they are free: as many as a record of that
    /// length takes, up to a quarter of the lane, and [`CLAIMED`] at least.
    ///
    /// Out of line: called once for several short records, its registers would be saved for each.
    #[inline(never)]
    fn claim(&mut self, cells: u64) {
        // From our position on: a record longer than what was claimed ends beyond it.
        let claimed = if self.has_claimed(self.at) { self.claimed.wrapping_sub(self.at) } else { 0 };
        let free = self.freed.wrapping_add(self.mask + 1).wrapping_sub(self.at);
        let goal = free.min(1 + cells.min(self.mask / 4).max(CLAIMED));
        for ahead in claimed..goal {
            // SAFETY: the cell lies in the ring, and the consumer gave it back: fewer cells than there are lie from `freed` to it.
            // Relaxed: ours is the only store there, and edge `lane.stamp` of the records that follow carries it.
            unsafe {
                let cell = &*self.cell(self.at.wrapping_add(ahead)).cast::<AtomicU64>();
                cell.store(0, Ordering::Relaxed);
            }
        }
        self.claimed = self.at.wrapping_add(goal);
    }

    /// Position of the next record.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    #[inline(always)]
    fn cell(&self, position: u64) -> *mut u8 {
        // SAFETY: the masked position is below the number of cells, all of which are mapped.
        unsafe { self.cells.add((position & self.mask) as usize * CELL) }
    }
}

impl Consumer {
    /// The header of the next record, if there is one. Load it once per record, and believe nothing in it.
    #[inline(always)]
    pub(crate) fn header(&self) -> Option<u64> {
        // SAFETY: the cell lies in the ring, which `ends` was promised is mapped; the peer writes it at any time, and
        // both words are only ever loaded as atomics here.
        unsafe {
            let first = self.record();
            // Acquire, edge `lane.stamp`.
            if (*first.cast::<AtomicU64>()).load(Ordering::Acquire) != stamp(self.at) {
                return None;
            }
            // Relaxed: edge `lane.stamp` carries it.
            Some((*first.add(8).cast::<AtomicU64>()).load(Ordering::Relaxed))
        }
    }

    /// First byte of the next record: readable for a whole lane from there.
    #[inline(always)]
    pub(crate) fn record(&self) -> *const u8 {
        // SAFETY: the masked position is below the number of cells, all of which are mapped.
        unsafe { self.cells.add((self.at & self.mask) as usize * CELL) }
    }

    /// The most cells that a record can have.
    #[inline(always)]
    pub(crate) fn most(&self) -> u64 {
        self.mask
    }

    /// Begins to fetch a cell ahead of the next record: where several have come, the transfer of one line goes on while another is
    /// looked at.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        let place = (self.at.wrapping_add(READ_AHEAD) & self.mask) as usize * CELL;
        prefetch_read(self.cells.wrapping_add(place));
    }

    /// Begins to fetch the lines of the next record, of so many cells, so that they come while its head is looked at.
    #[inline(always)]
    pub(crate) fn prefetch_record(&self, cells: u64) {
        for ahead in 1..cells.min(READ_AT_ONCE) {
            prefetch_read(self.record().wrapping_add(ahead as usize * CELL));
        }
    }

    /// Goes on to the record behind. Returns whether the producer was told of the room, and may have waited for it.
    #[inline(always)]
    pub(crate) fn advance(&mut self, cells: u64) -> bool {
        self.at = self.at.wrapping_add(cells);
        // The cursor is a line that the producer reads: it is told a quarter of the lane at a time.
        if self.at.wrapping_sub(self.told) <= self.mask / 4 {
            return false;
        }
        self.told = self.at;
        // SAFETY: `ends` was promised that our segment is mapped.
        // Release, edge `lane.freed`: our reads of these cells are over.
        unsafe { &*self.cursor }.store(self.at, Ordering::Release);
        true
    }
}

/// Asks for a line to be read. A hint, which touches nothing.
#[inline(always)]
fn prefetch_read(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect that can be seen, whatever the address.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Copies the head of a message: whole words where it consists of them, as it was written. Loaded in a greater width than it was
/// stored in, it would have to wait until every store before it is in the cache, those to the lane included.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and they do not overlap.
#[inline(always)]
pub(crate) unsafe fn copy_words(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: each access lies within `len` bytes; nothing has to be aligned.
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

#[cfg(test)]
mod tests;
