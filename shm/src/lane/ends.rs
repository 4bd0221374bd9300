//! The two ends of a lane, generic over the memory of cells and cursor. The loom models compile
//! this file over loom's atomics. [`lane`](super) describes the format and the edges.

use static_assertions::assert_not_impl_any;

use super::primitive::{AtomicU64, Ordering, edge};

pub(crate) const CELL: usize = 64;

pub(crate) const PAYLOAD: usize = 16;

#[inline(always)]
pub(crate) const fn cells_for(len: usize) -> u64 {
    (PAYLOAD + len).div_ceil(CELL) as u64
}

#[inline(always)]
pub(super) fn stamp(position: u64) -> u64 {
    position << 1 | 1
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Full,
    /// A value that no correct consumer stores.
    Corrupt,
}

#[derive(Debug)]
pub(crate) struct Producer {
    cells: *mut u8,
    mask: u64,
    pub(super) at: u64,
    /// Last value loaded from the consumer's cursor.
    pub(super) freed: u64,
    /// No cell from `at` to just before this position holds a valid stamp. Always beyond `at`, and
    /// never beyond the free cells.
    pub(super) claimed: u64,
    cursor: *const AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Consumer {
    cells: *const u8,
    mask: u64,
    pub(super) at: u64,
    /// The cell of position `at`. Kept, because most polls find no record.
    here: *const u8,
    /// Last value stored in the cursor.
    pub(super) told: u64,
    cursor: *const AtomicU64,
}

/// Polling it touches no memory but the next record. Valid until the consumer advances.
#[derive(Debug)]
pub(crate) struct Watch {
    place: *const AtomicU64,
    stamp: u64,
}

// SAFETY: the pointers refer to a shared mapping, which is not tied to a thread. The caller of
// `new` guarantees that there is one producer, and the type is not `Clone`.
unsafe impl Send for Producer {}
// SAFETY: the pointer refers to a shared mapping, which is not tied to a thread. `has_come` only
// loads atomically.
unsafe impl Send for Watch {}
// SAFETY: the pointers refer to a shared mapping, which is not tied to a thread. The caller of
// `new` guarantees that there is one consumer, and the type is not `Clone`.
unsafe impl Send for Consumer {}
assert_not_impl_any!(Producer: Sync, Clone);
assert_not_impl_any!(Consumer: Sync, Clone);

/// Minimum number of cells that the producer claims. With 4 cells, 8-byte messages are a little
/// slower. 16 cells gain nothing.
pub(super) const CLAIMED: u64 = 8;

/// Prefetch distance of the consumer, in cells. It lies just beyond the cells claimed behind a
/// short record, because the producer would have to claim prefetched cells again. It is constant,
/// so that the address does not depend on the records in between.
const READ_AHEAD: u64 = CLAIMED + 1;

/// Maximum number of cells of a record that are prefetched before the copy: enough for a 4 KiB
/// payload.
const READ_AT_ONCE: u64 = 65;

impl Producer {
    /// `cells` is a power of two. `cursor` is the consumer's.
    ///
    /// # Safety
    /// While the producer is used, the cells stay mapped for writing, in two adjacent mappings, and
    /// the cursor stays mapped. There is no other producer.
    pub(super) unsafe fn new(
        first: *mut u8,
        cells: u32,
        cursor: *const AtomicU64,
        start: u64,
    ) -> Self {
        let mask = u64::from(cells) - 1;
        Producer {
            cells: first,
            mask,
            at: start,
            freed: start,
            claimed: start.wrapping_add(1),
            cursor,
        }
    }

    /// Returns the record's first byte. The payload begins at byte 16.
    #[inline(always)]
    pub(crate) fn reserve(&mut self, cells: u64) -> Result<*mut u8, Refused> {
        // Requires one cell more, because `publish` may clear the stamp of the cell behind the
        // record.
        if self.at.wrapping_sub(self.freed) + cells > self.mask {
            self.refresh(cells)?;
        }
        Ok(self.cell(self.at))
    }

    #[cold]
    #[inline(never)]
    fn refresh(&mut self, cells: u64) -> Result<(), Refused> {
        // SAFETY: the caller of `new` guarantees that the cursor stays mapped. Acquire, edge
        // `lane.freed`: the consumer has finished reading the cells that we are about to overwrite.
        let freed = unsafe { &*self.cursor }.load(edge!("lane.freed.load", Acquire));
        // A correct cursor lies between its last value and our position. The subtraction is modulo
        // 2^64.
        if freed.wrapping_sub(self.freed) > self.at.wrapping_sub(self.freed) {
            return Err(Refused::Corrupt);
        }
        self.freed = freed;
        if self.at.wrapping_sub(freed) + cells > self.mask { Err(Refused::Full) } else { Ok(()) }
    }

    /// Call it after the payload is written.
    ///
    /// # Safety
    /// The last `reserve` was for `cells` cells and succeeded, and its record has not been
    /// published.
    #[inline(always)]
    pub(crate) unsafe fn publish(&mut self, cells: u64, header: u64) {
        let next = self.at.wrapping_add(cells);
        if !self.has_claimed(next) {
            self.clean(next);
        }
        // SAFETY: `reserve` reserved the cell for us, and `cell` stays within the ring. Stamp and
        // header are accessed only as atomics while both sides can reach them.
        unsafe {
            let first = self.cell(self.at);
            // Relaxed: the stamp below publishes the header, by edge `lane.stamp`.
            (*first.add(8).cast::<AtomicU64>()).store(header, Ordering::Relaxed);
            // Release, edge `lane.stamp`: publishes the record, and the clean cell behind it.
            (*first.cast::<AtomicU64>()).store(stamp(self.at), edge!("lane.stamp.store", Release));
        }
        self.at = next;
        // Claims one cell ahead, so that short records need not check the cell behind them.
        if !self.has_claimed(next.wrapping_add(1)) {
            self.claim(cells);
        }
    }

    /// A claimed cell holds no valid stamp.
    #[inline(always)]
    pub(super) fn has_claimed(&self, position: u64) -> bool {
        // The positions are less than a lane apart, so the sign of the difference says which is
        // ahead.
        (position.wrapping_sub(self.claimed) as i64) < 0
    }

    /// Stores nothing unless it is the valid stamp of `position`, because a store would wait for
    /// the cache line.
    #[inline(always)]
    fn clean(&mut self, position: u64) {
        // SAFETY: `cell` stays within the ring, and `reserve` left this cell free for us. Relaxed:
        // only we store to this cell, and edge `lane.stamp` publishes the store.
        unsafe {
            let cell = &*self.cell(position).cast::<AtomicU64>();
            if cell.load(Ordering::Relaxed) == stamp(position) {
                cell.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Claims free cells behind the record of `cells` cells that was just published. Claims `cells`
    /// cells, but at least [`CLAIMED`] and at most a quarter of the lane.
    ///
    /// Not inlined, because it runs only once for several short records. If it were inlined, every
    /// record would have to save registers.
    #[inline(never)]
    fn claim(&mut self, cells: u64) {
        // Counted from our position, because a record may end beyond the claimed cells.
        let claimed =
            if self.has_claimed(self.at) { self.claimed.wrapping_sub(self.at) } else { 0 };
        let free = self.freed.wrapping_add(self.mask + 1).wrapping_sub(self.at);
        let goal = free.min(1 + cells.min(self.mask / 4).max(CLAIMED));
        for ahead in claimed..goal {
            // SAFETY: `cell` stays within the ring, and this cell is free: it is less than a lane
            // beyond `freed`. Relaxed: only we store to this cell, and edge `lane.stamp` of the
            // following records publishes the store.
            unsafe {
                let cell = &*self.cell(self.at.wrapping_add(ahead)).cast::<AtomicU64>();
                cell.store(0, Ordering::Relaxed);
            }
        }
        self.claimed = self.at.wrapping_add(goal);
    }

    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    #[inline(always)]
    fn cell(&self, position: u64) -> *mut u8 {
        // SAFETY: the masked position is less than the number of cells, and the caller of `new`
        // keeps all cells mapped.
        unsafe { self.cells.add((position & self.mask) as usize * CELL) }
    }
}

impl Consumer {
    /// `cells` is a power of two. `cursor` is ours to store.
    ///
    /// # Safety
    /// While the consumer is used, the cells stay mapped, in two adjacent mappings, and the cursor
    /// stays mapped for writing. There is no other consumer.
    pub(super) unsafe fn new(
        first: *const u8,
        cells: u32,
        cursor: *const AtomicU64,
        start: u64,
    ) -> Self {
        let mask = u64::from(cells) - 1;
        let mut consumer =
            Consumer { cells: first, mask, at: start, here: first, told: start, cursor };
        consumer.here = consumer.cell(start);
        consumer
    }

    #[inline(always)]
    fn cell(&self, position: u64) -> *const u8 {
        // SAFETY: the masked position is less than the number of cells, and the caller of `new`
        // keeps all cells mapped.
        unsafe { self.cells.add((position & self.mask) as usize * CELL) }
    }

    /// `None` if the record has not arrived. The peer can change the header at any time, so load it
    /// once per record and check it.
    #[inline(always)]
    pub(crate) fn header(&self) -> Option<u64> {
        // SAFETY: `record` stays within the ring, and the caller of `new` keeps the ring mapped.
        // The peer may write the cell at any time, so both words are loaded as atomics.
        unsafe {
            let first = self.record();
            // Acquire, edge `lane.stamp`: makes the record and its header visible.
            if (*first.cast::<AtomicU64>()).load(edge!("lane.stamp.load", Acquire))
                != stamp(self.at)
            {
                return None;
            }
            // Relaxed: the acquire load of the stamp orders this load.
            Some((*first.add(8).cast::<AtomicU64>()).load(Ordering::Relaxed))
        }
    }

    pub(crate) fn watch(&self) -> Watch {
        Watch { place: self.record().cast(), stamp: stamp(self.at) }
    }

    /// A whole lane is readable from this byte on.
    #[inline(always)]
    pub(crate) fn record(&self) -> *const u8 {
        self.here
    }

    #[inline(always)]
    pub(crate) fn most(&self) -> u64 {
        self.mask
    }

    /// Prefetches the cell [`READ_AHEAD`] cells beyond the start of the next record, so that the
    /// transfers of several records overlap.
    #[inline(always)]
    pub(crate) fn prefetch(&self) {
        let place = (self.at.wrapping_add(READ_AHEAD) & self.mask) as usize * CELL;
        prefetch_read(self.cells.wrapping_add(place));
    }

    #[inline(always)]
    pub(crate) fn prefetch_record(&self, cells: u64) {
        for ahead in 1..cells.min(READ_AT_ONCE) {
            prefetch_read(self.record().wrapping_add(ahead as usize * CELL));
        }
    }

    /// Advances past a record. Returns whether this call published the freed cells. If so, a
    /// waiting producer must be notified.
    #[inline(always)]
    pub(crate) fn advance(&mut self, cells: u64) -> bool {
        self.at = self.at.wrapping_add(cells);
        self.here = self.cell(self.at);
        // A store takes the cursor's cache line from the producer. So the cursor is stored once per
        // quarter of the lane.
        if self.at.wrapping_sub(self.told) <= self.mask / 4 {
            return false;
        }
        self.told = self.at;
        // SAFETY: the caller of `new` guarantees that the cursor stays mapped writable. Release,
        // edge `lane.freed`: we have finished reading these cells.
        unsafe { &*self.cursor }.store(self.at, edge!("lane.freed.store", Release));
        true
    }
}

impl Watch {
    /// Returns whether the record has arrived.
    ///
    /// # Safety
    /// The lane is mapped.
    #[inline(always)]
    pub(crate) unsafe fn has_come(&self) -> bool {
        // SAFETY: the caller guarantees that the lane is mapped, and the stamp is accessed only as
        // an atomic. Relaxed: before anything reads the record, `header` loads the stamp again with
        // edge `lane.stamp`.
        unsafe { &*self.place }.load(Ordering::Relaxed) == self.stamp
    }
}

#[inline(always)]
fn prefetch_read(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault, at any address.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
