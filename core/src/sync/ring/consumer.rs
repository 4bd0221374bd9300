//! The consumer's side of a ring. Never blocks or allocates; one thread at a time owns it.

use core::{marker::PhantomData, ptr::NonNull, slice};

use static_assertions::{assert_impl_all, assert_not_impl_any};

use super::{
    AttachError, Header,
    memory::{Private, RingMemory, Shared, Span},
};
use crate::sync::primitive::{Ordering, edge};

/// Takes values out of the ring.
#[derive(Debug)]
pub struct Consumer<'m, T, M: RingMemory = Private> {
    header: &'m Header,
    slots: Span<'m, T>,
    /// Number of values released. This copy is authoritative; `header.head` is the published copy.
    head: u64,
    /// The tail at the last load. The ring holds values up to here.
    seen: u64,
    /// Maximum number of values that a valid tail leaves in the ring. Zero after the producer has
    /// stored an impossible tail, so that the ring stays empty.
    believed: u64,
    kind: PhantomData<M>,
}

assert_impl_all!(Consumer<'static, u64>: Send);
assert_not_impl_any!(Consumer<'static, u64>: Sync, Clone);

// SAFETY: the handle is the only consumer (`split` makes one, and `from_raw` requires it). It reads
// only slots that edge `filled` has handed over. `T: Send` lets the values move from the producer's
// thread.
unsafe impl<T: Send, M: RingMemory> Send for Consumer<'_, T, M> {}

impl<'m, T: Copy> Consumer<'m, T, Shared> {
    /// Attaches to the consumer's side of a ring in memory that another process may write.
    ///
    /// Continues from the head in the header. A zeroed header is a new ring.
    ///
    /// # Errors
    ///
    /// [`AttachError`] if `capacity` is not a power of two or a pointer is not aligned.
    ///
    /// # Safety
    ///
    /// For all of `'m`, `header` and `capacity` slots from `slots` on stay mapped for reading and
    /// writing, and hold initialized memory (a fresh mapping does). No other `Consumer` of this
    /// ring exists. Nothing in this process makes a reference to the slots. Every bit pattern is a
    /// valid `T`, because the peer may write any bits.
    pub unsafe fn from_raw(
        header: NonNull<Header>,
        slots: NonNull<T>,
        capacity: usize,
    ) -> Result<Self, AttachError> {
        let slots = Span::of_raw(header, slots, capacity)?;
        // SAFETY: our caller guarantees that the header stays mapped for `'m`, and `of_raw` checked
        // its alignment. A header consists of atomics, so a peer's writes are no data race.
        let header = unsafe { header.as_ref() };
        // Relaxed: only consumers write the head, and the hand-over of the ring from an earlier
        // consumer already synchronizes with its writes.
        let head = header.head.load(Ordering::Relaxed);
        Ok(Self::new(header, slots, head))
    }
}

impl<'m, T: Copy, M: RingMemory> Consumer<'m, T, M> {
    pub(super) fn new(header: &'m Header, slots: Span<'m, T>, head: u64) -> Self {
        // `seen` equals `head`, so the first pop loads the tail.
        Self { header, slots, head, seen: head, believed: slots.capacity(), kind: PhantomData }
    }

    /// Takes the oldest value. Returns `None` if the ring is empty; the producer may fill a slot at
    /// any time.
    #[inline(always)]
    pub fn pop(&mut self) -> Option<T> {
        if self.head == self.seen && self.look() == 0 {
            return None;
        }
        let value = self.value(0);
        self.advance(1);
        Some(value)
    }

    /// Returns a copy of the oldest value, which stays in the ring.
    #[inline(always)]
    pub fn peek(&mut self) -> Option<T> {
        if self.head == self.seen && self.look() == 0 {
            return None;
        }
        Some(self.value(0))
    }

    /// Takes up to `into.len()` values, and releases their slots at once. Returns the number of
    /// values.
    #[inline]
    pub fn pop_slice(&mut self, into: &mut [T]) -> usize {
        let len = into.len().min(self.filled_for(into.len()));
        let [(a, a_len), (b, b_len)] = self.slots.run(self.head, len);
        self.watch(len);
        // SAFETY: both runs are inside the slots. They were found filled above (edge `filled`), and
        // stay so until edge `freed`. A hostile peer may overwrite them, but then every bit
        // pattern is valid. Together they are as long as `into[..len]`, which does not overlap the
        // slots.
        unsafe {
            M::copy(a.as_ptr(), into.as_mut_ptr(), a_len);
            M::copy(b.as_ptr(), into.as_mut_ptr().add(a_len), b_len);
        }
        self.advance(len as u64);
        len
    }

    /// Lends up to `max` of the oldest values, to be read in place and released together. Returns
    /// `None` if the ring is empty. Dropping the result leaves the values in the ring.
    #[inline]
    pub fn filled(&mut self, max: usize) -> Option<Filled<'_, 'm, T, M>> {
        let len = max.min(self.filled_for(max));
        (len != 0).then_some(Filled { ring: self, len })
    }

    /// Loads the producer's counter and returns the number of values. At least this many values
    /// stay until the next pop.
    #[inline]
    pub fn len(&mut self) -> usize {
        self.look() as usize
    }

    /// Returns whether the ring is empty. Loads the producer's counter only if no value is known.
    #[inline(always)]
    pub fn is_empty(&mut self) -> bool {
        self.head == self.seen && self.look() == 0
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> usize {
        self.slots.capacity() as usize
    }

    /// Returns the number of values ever released, modulo 2^64.
    pub fn released(&self) -> u64 {
        self.head
    }

    /// Returns whether the producer's counter had an impossible value. The ring stays empty then.
    pub fn is_corrupt(&self) -> bool {
        self.believed == 0
    }

    /// Returns the known number of values. Loads the tail again only if fewer than `wanted` are
    /// known.
    #[inline(always)]
    fn filled_for(&mut self, wanted: usize) -> usize {
        let known = self.seen.wrapping_sub(self.head) as usize;
        if known < wanted { self.look() as usize } else { known }
    }

    /// Loads the producer's counter. Returns the number of values in the ring.
    #[inline(always)]
    fn look(&mut self) -> u64 {
        // Acquire, edge `filled`: pairs with the store in `Producer::advance`. From here on the
        // contents of the slots below this tail are visible.
        let tail = self.header.tail.load(edge!("ring.filled.load", Acquire));
        let filled = tail.wrapping_sub(self.head);
        if filled > self.believed {
            return self.distrust();
        }
        self.seen = tail;
        filled
    }

    #[cold]
    #[inline(never)]
    fn distrust(&mut self) -> u64 {
        self.believed = 0;
        self.seen = self.head;
        0
    }

    /// The caller has found the slot filled.
    #[inline(always)]
    fn value(&self, at: usize) -> T {
        let count = self.head.wrapping_add(at as u64);
        self.header.watch.read(self.slots.index(count));
        // SAFETY: the caller found this slot below the tail. So the producer has filled it (edge
        // `filled`), and does not write it until edge `freed`. A hostile peer of a shared ring
        // may still write it. In that case the copy is volatile, and `from_raw` requires that any
        // bits are a valid `T`.
        unsafe { M::read(self.slots.slot(count)) }
    }

    #[inline(always)]
    fn watch(&self, len: usize) {
        for at in 0..len as u64 {
            self.header.watch.read(self.slots.index(self.head.wrapping_add(at)));
        }
    }

    #[inline(always)]
    fn advance(&mut self, len: u64) {
        self.head = self.head.wrapping_add(len);
        // Release, edge `freed`: pairs with the load in `Producer::look`. Orders the copies out of
        // these slots before any overwrite by a producer that sees this head.
        self.header.head.store(self.head, edge!("ring.freed.store", Release));
    }
}

/// Values lent in place by [`Consumer::filled`].
#[derive(Debug)]
#[must_use = "values that are not released stay in the ring"]
pub struct Filled<'a, 'm, T, M: RingMemory = Private> {
    ring: &'a mut Consumer<'m, T, M>,
    len: usize,
}

impl<T: Copy> Filled<'_, '_, T, Private> {
    /// Returns the values in order, as two slices: up to the end of the memory, and the rest from
    /// its start.
    #[inline]
    pub fn slices(&self) -> (&[T], &[T]) {
        let [(a, a_len), (b, b_len)] = self.parts();
        // SAFETY: both runs are inside the slots and filled (edge `filled`). The producer belongs
        // to this process, and does not write the slots until `release`, which consumes `self`.
        unsafe {
            (slice::from_raw_parts(a.as_ptr(), a_len), slice::from_raw_parts(b.as_ptr(), b_len))
        }
    }
}

impl<T: Copy, M: RingMemory> Filled<'_, '_, T, M> {
    /// Returns the number of lent values, which is at least one.
    #[expect(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns a copy of the value at index `at`, counted from the oldest.
    #[inline]
    pub fn get(&self, at: usize) -> Option<T> {
        (at < self.len).then(|| self.ring.value(at))
    }

    /// Returns copies of the values, oldest first.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = T> {
        (0..self.len).map(|at| self.ring.value(at))
    }

    /// Returns the values in order, as two pairs (first, number): up to the end of the memory, and
    /// the rest from its start. If the memory is [`Shared`], read the values with raw copies and
    /// make no references.
    #[inline]
    pub fn parts(&self) -> [(NonNull<T>, usize); 2] {
        self.ring.slots.run(self.ring.head, self.len)
    }

    /// Releases the slots of the `len` oldest values, or of all values if there are fewer.
    #[inline]
    pub fn release(self, len: usize) {
        let len = len.min(self.len);
        self.ring.watch(len);
        self.ring.advance(len as u64);
    }
}
