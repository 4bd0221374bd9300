//! The two ends of a lane, over cells and a cursor that lie anywhere: the models run this file over
//! loom's atomics. See the [lane](super) for the format and the edges.

use static_assertions::assert_not_impl_any;

use super::primitive::{AtomicU64, Ordering, edge};

/// Size of a cell, in bytes.
pub(crate) const CELL: usize = 64;

/// Where the payload begins in a record, in bytes.
pub(crate) const PAYLOAD: usize = 16;

/// How many cells a record with a payload of `len` bytes takes.
#[inline(always)]
pub(crate) const fn cells_for(len: usize) -> u64 {
    (PAYLOAD + len).div_ceil(CELL) as u64
}

/// The stamp of a position.
#[inline(always)]
pub(super) fn stamp(position: u64) -> u64 {
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
    pub(super) at: u64,
    /// The consumer's cursor as last loaded.
    pub(super) freed: u64,
    /// The cells from `at` up to here hold no valid stamp. Always beyond `at`, and never beyond
    /// what `freed` allows.
    pub(super) claimed: u64,
    cursor: *const AtomicU64,
}

/// The end that reads.
#[derive(Debug)]
pub(crate) struct Consumer {
    cells: *const u8,
    mask: u64,
    /// Position of the next record.
    pub(super) at: u64,
    /// Our cursor as last stored.
    pub(super) told: u64,
    cursor: *const AtomicU64,
}

/// The place of a lane's next record. Polling it touches no other memory. Valid until the consumer
/// advances.
#[derive(Debug)]
pub(crate) struct Watch {
    place: *const AtomicU64,
    stamp: u64,
}

// SAFETY: the memory behind the pointers belongs to no thread; `new` was promised that there is one
// of each.
unsafe impl Send for Producer {}
// SAFETY: as above; whoever looks promises that the lane is mapped.
unsafe impl Send for Watch {}
// SAFETY: as above.
unsafe impl Send for Consumer {}
assert_not_impl_any!(Producer: Sync, Clone);
assert_not_impl_any!(Consumer: Sync, Clone);

/// Fewest cells that the producer claims. Half as many make messages of 8 bytes a little slower;
/// twice as many gain nothing.
pub(super) const CLAIMED: u64 = 8;

/// Prefetch distance of the consumer, in cells. Beyond the cells claimed behind a short record,
/// which the producer would have to claim again. A constant, so that the address does not depend on
/// records in between.
const READ_AHEAD: u64 = CLAIMED + 1;

/// Most cells of one record that are prefetched before it is copied: those of a 4 KiB payload.
const READ_AT_ONCE: u64 = 65;

impl Producer {
    /// Over `cells` cells, a power of two, and the cursor of their consumer.
    ///
    /// # Safety
    /// While this is used both stay mapped, the cells twice in a row and writable, and there is no
    /// other producer.
    pub(super) unsafe fn new(first: *mut u8, cells: u32, cursor: *const AtomicU64, start: u64) -> Self {
        let mask = u64::from(cells) - 1;
        Producer { cells: first, mask, at: start, freed: start, claimed: start.wrapping_add(1), cursor }
    }

    /// Reserves room for a record of `cells` cells and returns its first byte. The payload begins
    /// at byte 16.
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
        // SAFETY: `new` was promised that the segment is mapped while this is used. Acquire, edge
        // `lane.freed`: the consumer's reads of what we are about to overwrite are over.
        let freed = unsafe { &*self.cursor }.load(edge!("lane.freed.load", Acquire));
        // A correct cursor lies between its last value and our position; the subtraction is modulo
        // 2^64.
        if freed.wrapping_sub(self.freed) > self.at.wrapping_sub(self.freed) {
            return Err(Refused::Corrupt);
        }
        self.freed = freed;
        if self.at.wrapping_sub(freed) + cells > self.mask { Err(Refused::Full) } else { Ok(()) }
    }

    /// Publishes the record that [`reserve`](Producer::reserve) returned, once its payload is
    /// written.
    ///
    /// # Safety
    /// The last `reserve` was for this many cells and succeeded, and its record has not been
    /// published.
    #[inline(always)]
    pub(crate) unsafe fn publish(&mut self, cells: u64, header: u64) {
        let next = self.at.wrapping_add(cells);
        if !self.has_claimed(next) {
            self.clean(next);
        }
        // SAFETY: the cell lies in the ring and is reserved for us; stamps are only ever accessed
        // as atomics while both sides may reach them.
        unsafe {
            let first = self.cell(self.at);
            // Relaxed: edge `lane.stamp` carries it.
            (*first.add(8).cast::<AtomicU64>()).store(header, Ordering::Relaxed);
            // Release, edge `lane.stamp`: whoever sees this stamp sees the record, and a clean cell
            // behind it.
            (*first.cast::<AtomicU64>()).store(stamp(self.at), edge!("lane.stamp.store", Release));
        }
        self.at = next;
        // One cell early, so that short records need not check the cell behind them.
        if !self.has_claimed(next.wrapping_add(1)) {
            self.claim(cells);
        }
    }

    /// Whether a cell at or beyond our position is claimed, so that it holds no stamp.
    #[inline(always)]
    pub(super) fn has_claimed(&self, position: u64) -> bool {
        // Within a lane of each other, so the sign tells which is ahead.
        (position.wrapping_sub(self.claimed) as i64) < 0
    }

    /// Clears the stamp of `position` from a free cell, if it is there. Stores only then, because a
    /// store would wait for the line.
    #[inline(always)]
    fn clean(&mut self, position: u64) {
        // SAFETY: the cell lies in the ring and is reserved for us: see `reserve`. Relaxed: ours is
        // the only store there, and edge `lane.stamp` carries it.
        unsafe {
            let cell = &*self.cell(position).cast::<AtomicU64>();
            if cell.load(Ordering::Relaxed) == stamp(position) {
                cell.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Claims the cells behind a record of so many cells that was published last, as far as they
    /// are free: as many as a record of that length takes, up to a quarter of the lane, and
    /// [`CLAIMED`] at least.
    ///
    /// Out of line: it runs once for several short records, and inlined it would save registers for
    /// each.
    #[inline(never)]
    fn claim(&mut self, cells: u64) {
        // Counted from our position: a record may end beyond the claimed cells.
        let claimed = if self.has_claimed(self.at) { self.claimed.wrapping_sub(self.at) } else { 0 };
        let free = self.freed.wrapping_add(self.mask + 1).wrapping_sub(self.at);
        let goal = free.min(1 + cells.min(self.mask / 4).max(CLAIMED));
        for ahead in claimed..goal {
            // SAFETY: the cell lies in the ring, and the consumer gave it back: fewer cells than
            // there are lie from `freed` to it. Relaxed: ours is the only store there, and edge
            // `lane.stamp` of the records that follow carries it.
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
    /// Over `cells` cells, a power of two, and our cursor.
    ///
    /// # Safety
    /// While this is used both stay mapped, the cells twice in a row, and there is no other
    /// consumer.
    pub(super) unsafe fn new(first: *const u8, cells: u32, cursor: *const AtomicU64, start: u64) -> Self {
        Consumer { cells: first, mask: u64::from(cells) - 1, at: start, told: start, cursor }
    }

    /// The header of the next record, if there is one. Load it once per record; its contents are
    /// untrusted.
    #[inline(always)]
    pub(crate) fn header(&self) -> Option<u64> {
        // SAFETY: the cell lies in the ring, which `new` was promised is mapped; the peer writes it
        // at any time, and both words are only ever loaded as atomics here.
        unsafe {
            let first = self.record();
            // Acquire, edge `lane.stamp`.
            if (*first.cast::<AtomicU64>()).load(edge!("lane.stamp.load", Acquire)) != stamp(self.at) {
                return None;
            }
            // Relaxed: edge `lane.stamp` carries it.
            Some((*first.add(8).cast::<AtomicU64>()).load(Ordering::Relaxed))
        }
    }

    /// Where to look for the next record.
    pub(crate) fn watch(&self) -> Watch {
        Watch { place: self.record().cast(), stamp: stamp(self.at) }
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

    /// Prefetches a cell ahead of the next record, so that transfers overlap when several records
    /// have arrived.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        let place = (self.at.wrapping_add(READ_AHEAD) & self.mask) as usize * CELL;
        prefetch_read(self.cells.wrapping_add(place));
    }

    /// Prefetches the lines of the next record while its head is handled.
    #[inline(always)]
    pub(crate) fn prefetch_record(&self, cells: u64) {
        for ahead in 1..cells.min(READ_AT_ONCE) {
            prefetch_read(self.record().wrapping_add(ahead as usize * CELL));
        }
    }

    /// Advances to the next record. Returns whether the freed cells were published, which a
    /// producer may wait for.
    #[inline(always)]
    pub(crate) fn advance(&mut self, cells: u64) -> bool {
        self.at = self.at.wrapping_add(cells);
        // The producer reads this line, so the cursor is stored only every quarter of the lane.
        if self.at.wrapping_sub(self.told) <= self.mask / 4 {
            return false;
        }
        self.told = self.at;
        // SAFETY: `new` was promised that our segment is mapped.
        // Release, edge `lane.freed`: our reads of these cells are over.
        unsafe { &*self.cursor }.store(self.at, edge!("lane.freed.store", Release));
        true
    }
}

impl Watch {
    /// Whether the record has arrived.
    ///
    /// # Safety
    /// The lane is mapped.
    #[inline(always)]
    pub(crate) unsafe fn has_come(&self) -> bool {
        // SAFETY: our caller's promise; the word is only ever accessed as an atomic. Relaxed: who
        // reads the record looks at its header first, which is edge `lane.stamp`.
        unsafe { &*self.place }.load(Ordering::Relaxed) == self.stamp
    }
}

/// Prefetches a line for reading.
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
