//! The producer's side of a ring. Never blocks or allocates; one thread at a time owns it.

use core::{error::Error, fmt, marker::PhantomData, mem::MaybeUninit, ptr::NonNull, slice};

use static_assertions::{assert_impl_all, assert_not_impl_any};

use super::{
    AttachError, Header,
    memory::{Private, RingMemory, Shared, Span},
};
use crate::sync::primitive::{Ordering, edge};

/// Fills slots of the ring.
#[derive(Debug)]
pub struct Producer<'m, T, M: RingMemory = Private> {
    header: &'m Header,
    slots: Span<'m, T>,
    /// Number of values published. This copy is authoritative; `header.tail` is the published copy.
    tail: u64,
    /// The tail at which the ring is full: the last loaded head plus the capacity.
    limit: u64,
    /// Maximum number of values that a valid head leaves in the ring. Zero after the consumer has
    /// stored an impossible head. Every later load of the head then finds the ring full, at no
    /// cost to the fast path.
    believed: u64,
    kind: PhantomData<M>,
}

assert_impl_all!(Producer<'static, u64>: Send);
assert_not_impl_any!(Producer<'static, u64>: Sync, Clone);

// SAFETY: the handle is the only producer (`split` makes one, and `from_raw` requires it). The
// slots that it writes belong to it until edge `filled` hands them over. `T: Send` lets the values
// move to the consumer's thread.
unsafe impl<T: Send, M: RingMemory> Send for Producer<'_, T, M> {}

impl<'m, T: Copy> Producer<'m, T, Shared> {
    /// Attaches to the producer's side of a ring in memory that another process may write.
    ///
    /// Continues from the tail in the header. A zeroed header is a new ring.
    ///
    /// # Errors
    ///
    /// [`AttachError`] if `capacity` is not a power of two or a pointer is not aligned.
    ///
    /// # Safety
    ///
    /// For all of `'m`, `header` and `capacity` slots from `slots` on stay mapped for reading and
    /// writing. No other `Producer` of this ring exists. Nothing in this process makes a reference
    /// to the slots, or writes to them. Every bit pattern is a valid `T`, because the peer may
    /// write any bits.
    pub unsafe fn from_raw(
        header: NonNull<Header>,
        slots: NonNull<T>,
        capacity: usize,
    ) -> Result<Self, AttachError> {
        let slots = Span::of_raw(header, slots, capacity)?;
        // SAFETY: our caller guarantees that the header stays mapped for `'m`, and `of_raw` checked
        // its alignment. A header consists of atomics, so a peer's writes are no data race.
        let header = unsafe { header.as_ref() };
        // Relaxed: only producers write the tail, and the hand-over of the ring from an earlier
        // producer already synchronizes with its writes.
        let tail = header.tail.load(Ordering::Relaxed);
        Ok(Self::new(header, slots, tail))
    }
}

impl<'m, T: Copy, M: RingMemory> Producer<'m, T, M> {
    pub(super) fn new(header: &'m Header, slots: Span<'m, T>, tail: u64) -> Self {
        // `limit` equals `tail`, so the first push loads the head.
        Self { header, slots, tail, limit: tail, believed: slots.capacity(), kind: PhantomData }
    }

    /// Pushes one value.
    ///
    /// # Errors
    ///
    /// [`Full`], with the value, if no slot is free. The consumer may free a slot at any time.
    #[inline(always)]
    pub fn push(&mut self, value: T) -> Result<(), Full<T>> {
        if self.tail == self.limit && self.look() == 0 {
            return Err(Full(value));
        }
        self.header.watch.write(self.slots.index(self.tail));
        // SAFETY: `limit` is beyond `tail`, so at most capacity - 1 slots are filled, and the
        // consumer has released this slot (edge `freed`). `&mut self` on the only producer excludes
        // a second writer.
        unsafe { M::write(self.slots.slot(self.tail), value) };
        self.advance(1);
        Ok(())
    }

    /// Pushes values in order, until the ring is full or all are pushed, and publishes them
    /// together. Returns the number of values pushed.
    #[inline]
    pub fn push_slice(&mut self, values: &[T]) -> usize {
        let len = values.len().min(self.free_for(values.len()));
        let [(a, a_len), (b, b_len)] = self.slots.run(self.tail, len);
        self.watch(len);
        // SAFETY: both runs are inside the slots. They were found free above, so the consumer does
        // not read them until edge `filled`. Together they are as long as `values[..len]`, which
        // does not overlap the slots.
        unsafe {
            M::copy(values.as_ptr(), a.as_ptr(), a_len);
            M::copy(values.as_ptr().add(a_len), b.as_ptr(), b_len);
        }
        self.advance(len as u64);
        len
    }

    /// Reserves `len` free slots, to be filled in place and published together. Returns `None` if
    /// fewer are free. Dropping the result releases the slots.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Option<Reserved<'_, 'm, T, M>> {
        (self.free_for(len) >= len).then_some(Reserved { ring: self, len })
    }

    /// Loads the consumer's counter and returns the number of free slots. At least this many stay
    /// free until the next push.
    #[inline]
    pub fn free(&mut self) -> usize {
        self.look() as usize
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> usize {
        self.slots.capacity() as usize
    }

    /// Returns the number of values ever published, modulo 2^64.
    pub fn published(&self) -> u64 {
        self.tail
    }

    /// Returns whether the consumer's counter had an impossible value. The ring stays full then.
    pub fn is_corrupt(&self) -> bool {
        self.believed == 0
    }

    /// Returns the known number of free slots. Loads the head again only if fewer than `wanted` are
    /// known.
    #[inline(always)]
    fn free_for(&mut self, wanted: usize) -> usize {
        let known = self.limit.wrapping_sub(self.tail) as usize;
        if known < wanted { self.look() as usize } else { known }
    }

    /// Loads the consumer's counter. Returns the number of free slots.
    #[inline(always)]
    fn look(&mut self) -> u64 {
        // Acquire, edge `freed`: pairs with the store in `Consumer::advance`. The consumer copied
        // the values below this head out before it stored the head, so their slots may be
        // overwritten.
        let head = self.header.head.load(edge!("ring.freed.load", Acquire));
        let used = self.tail.wrapping_sub(head);
        if used > self.believed {
            return self.distrust();
        }
        self.limit = head.wrapping_add(self.believed);
        self.believed - used
    }

    #[cold]
    #[inline(never)]
    fn distrust(&mut self) -> u64 {
        self.believed = 0;
        self.limit = self.tail;
        0
    }

    /// The caller has found the slot free.
    #[inline(always)]
    fn place(&mut self, at: usize, value: T) {
        let count = self.tail.wrapping_add(at as u64);
        self.header.watch.write(self.slots.index(count));
        // SAFETY: the slot is inside the span, which this process may write. The caller found it
        // free, so the consumer does not read it until edge `filled`.
        unsafe { M::write(self.slots.slot(count), value) };
    }

    #[inline(always)]
    fn watch(&self, len: usize) {
        for at in 0..len as u64 {
            self.header.watch.write(self.slots.index(self.tail.wrapping_add(at)));
        }
    }

    #[inline(always)]
    fn advance(&mut self, len: u64) {
        self.tail = self.tail.wrapping_add(len);
        // Release, edge `filled`: pairs with the load in `Consumer::look`. Publishes the contents
        // of the slots below this tail.
        self.header.tail.store(self.tail, edge!("ring.filled.store", Release));
    }
}

/// Free slots reserved by [`Producer::reserve`].
#[derive(Debug)]
#[must_use = "dropping it releases the reserved slots without publishing them"]
pub struct Reserved<'a, 'm, T, M: RingMemory = Private> {
    ring: &'a mut Producer<'m, T, M>,
    len: usize,
}

impl<T: Copy> Reserved<'_, '_, T, Private> {
    /// Returns the slots in order, as two slices: up to the end of the memory, and the rest from
    /// its start.
    #[inline]
    pub fn slices(&mut self) -> (&mut [MaybeUninit<T>], &mut [MaybeUninit<T>]) {
        let [(a, a_len), (b, b_len)] = self.parts();
        // SAFETY: the two runs are inside the slots and do not overlap. They are free, so the
        // consumer does not read them while `self` is borrowed. `MaybeUninit<T>` has the layout of
        // `T`.
        unsafe {
            (
                slice::from_raw_parts_mut(a.as_ptr().cast(), a_len),
                slice::from_raw_parts_mut(b.as_ptr().cast(), b_len),
            )
        }
    }
}

impl<T: Copy, M: RingMemory> Reserved<'_, '_, T, M> {
    /// Returns the number of reserved slots.
    #[expect(
        clippy::len_without_is_empty,
        reason = "nothing needs to know whether a reservation is empty"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the slots in order, as two pairs (first, number): up to the end of the memory, and
    /// the rest from its start. If the memory is [`Shared`], write the slots with raw copies and
    /// make no references.
    #[inline]
    pub fn parts(&mut self) -> [(NonNull<T>, usize); 2] {
        self.ring.slots.run(self.ring.tail, self.len)
    }

    /// Fills each slot `i` with `value(i)`, and publishes all slots.
    #[inline]
    pub fn fill(self, mut value: impl FnMut(usize) -> T) {
        for at in 0..self.len {
            self.ring.place(at, value(at));
        }
        self.ring.advance(self.len as u64);
    }

    /// Publishes the first `len` slots, or all slots if there are fewer. Releases the rest.
    ///
    /// # Safety
    ///
    /// Each of these slots holds a valid `T`.
    #[inline]
    pub unsafe fn publish(self, len: usize) {
        let len = len.min(self.len);
        self.ring.watch(len);
        self.ring.advance(len as u64);
    }
}

/// The error if the ring is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

impl<T> fmt::Display for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ring is full; try again once the consumer has popped a value")
    }
}

impl<T: fmt::Debug> Error for Full<T> {}
