//! The owner's side of a pool: takes slots, releases them without atomics, and closes the pool.
//! Never blocks or allocates. One thread at a time uses it.

use core::{error::Error, fmt, marker::PhantomData, mem, ptr::NonNull};

use crossbeam_utils::CachePadded;
use static_assertions::{assert_impl_all, assert_not_impl_any};

use super::{
    AttachError, CLOSED, EMPTY, FreeList, GENERATION, Header, ID_OUT, Id, Lease, MAX_CAPACITY,
    NotSync, OWNER, Reclaim, Shared, Slot, StaleId,
};
use crate::sync::primitive::{Ordering, edge};

/// Creates values in slots. Dropping the pool closes it; values in use stay valid.
///
/// Using a closed pool does not compile:
///
/// ```compile_fail,E0382
/// let slab = fishplate_core::sync::pool::Slab::<u64>::new();
/// let mut pool = slab.claim().unwrap();
/// pool.close();
/// pool.create(1);
/// ```
///
/// Sharing a pool between threads does not compile either:
///
/// ```compile_fail,E0277
/// let slab = fishplate_core::sync::pool::Slab::<u64>::new();
/// let pool = slab.claim().unwrap();
/// std::thread::scope(|scope| { scope.spawn(|| pool.counts()); });
/// ```
#[derive(Debug)]
pub struct Pool<'m, T> {
    own: CachePadded<Own<T>>,
    memory: PhantomData<&'m ()>,
    kind: NotSync,
}

#[derive(Debug)]
struct Own<T> {
    /// Slots that the owner released, or took from the list of other threads.
    free: FreeList,
    capacity: u32,
    slots: NonNull<Slot<T>>,
    header: NonNull<Header>,
    counts: Counts,
}

assert_impl_all!(Pool<'static, u64>: Send);
assert_not_impl_any!(Pool<'static, u64>: Sync, Clone);

// SAFETY: a pool holds no values, only free slots, which any thread may use. Values created here
// may be dropped on other threads, so `T: Send` is required.
unsafe impl<T: Send> Send for Pool<'_, T> {}

/// The counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of slots taken.
    pub allocs: u64,
    /// Number of slots that the owner released.
    pub local_frees: u64,
    /// Number of slots that other threads released and the owner has collected.
    pub remote_frees: u64,
    /// How often the owner collected slots that other threads released.
    pub drains: u64,
    /// Length of the longest list collected at once.
    pub max_chain: u64,
    /// How often no slot was free.
    pub full: u64,
    /// Number of lone values created on the heap because the pool was full. No other counter
    /// includes them.
    pub overflow: u64,
    /// Maximum number of slots in use at once, including released slots that the owner has not
    /// collected.
    pub high_water: u64,
}

impl<'m, T> Pool<'m, T> {
    /// Creates a pool over borrowed memory. The borrow lasts as long as values are in use. All
    /// slots start free. The last holder calls `reclaim`, once the pool is closed and every slot is
    /// released.
    ///
    /// # Errors
    ///
    /// [`AttachError::Capacity`] unless the number of slots is a power of two from 1 to 65,536.
    pub fn new(
        header: &'m mut Header,
        slots: &'m mut [Slot<T>],
        reclaim: Option<Reclaim>,
    ) -> Result<Self, AttachError> {
        let capacity = Self::checked(slots.len())?;
        // Relaxed: the memory is borrowed exclusively.
        header.line.keeps.store(OWNER, Ordering::Relaxed);
        // SAFETY: header and slots are borrowed mutably for `'m`, so nothing else uses them. Values
        // of an earlier pool in this memory can only have been leaked; otherwise the earlier borrow
        // would not have ended.
        Ok(unsafe {
            Self::from_raw(NonNull::from(header), NonNull::from(slots).cast(), capacity, reclaim)
        })
    }

    pub(super) fn checked(slots: usize) -> Result<u32, AttachError> {
        match slots.is_power_of_two() && slots <= MAX_CAPACITY {
            true => Ok(slots as u32),
            false => Err(AttachError::Capacity { slots }),
        }
    }

    /// Creates a pool with all slots free, regardless of their contents.
    ///
    /// # Safety
    ///
    /// Header and slots stay in place until the last reference is dropped. There are `capacity`
    /// slots, a power of two. The caller is the only user of the memory, and owns the header's
    /// [`OWNER`] reference. Any thread may call `reclaim`.
    pub(super) unsafe fn from_raw(
        header: NonNull<Header>,
        slots: NonNull<Slot<T>>,
        capacity: u32,
        reclaim: Option<Reclaim>,
    ) -> Self {
        // SAFETY: our caller guarantees that the header stays in place.
        let line = unsafe { &header.as_ref().line };
        // All relaxed: the caller is the only user of the memory, and each value is published by
        // its own edge.
        line.head.store(EMPTY, Ordering::Relaxed);
        line.capacity.store(capacity, Ordering::Relaxed);
        line.reclaim.set(reclaim);
        for index in 0..capacity {
            // SAFETY: `index` is below the number of slots.
            let slot = unsafe { slots.add(index as usize).as_ref() };
            slot.link.set(index + 1);
            let state = slot.state.load(Ordering::Relaxed);
            if state & ID_OUT != 0 {
                slot.state.store(redeemed(state), Ordering::Relaxed);
            }
        }
        let own = Own { free: FreeList::new(), capacity, slots, header, counts: Counts::default() };
        Self { own: CachePadded::new(own), memory: PhantomData, kind: PhantomData }
    }

    /// Puts a value into a free slot.
    ///
    /// # Errors
    ///
    /// [`Full`], with the value, if every slot is in use. The next call finds the slots that other
    /// threads have released meanwhile.
    #[inline(always)]
    pub fn create(&mut self, value: T) -> Result<Lease<'m, T>, Full<T>> {
        match self.take() {
            Some(index) => Ok(self.lease(self.slot(index), value)),
            None => Err(Full(value)),
        }
    }

    /// Creates a value in a free slot, in place if the compiler can. If `make` fails or panics, the
    /// slot is released.
    ///
    /// # Errors
    ///
    /// [`CreateError::Full`] if every slot is in use; `make` is not called then.
    /// [`CreateError::Refused`] with the error of `make`.
    #[inline]
    pub fn create_with<E>(
        &mut self,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<Lease<'m, T>, CreateError<E>> {
        let index = self.take().ok_or(CreateError::Full)?;
        let taken = Taken { slot: self.slot(index), pool: self };
        match make() {
            Ok(value) => {
                let lease = taken.pool.lease(taken.slot, value);
                mem::forget(taken);
                Ok(lease)
            }
            Err(error) => Err(CreateError::Refused(error)),
        }
    }

    /// Drops a value and releases its slot without atomics. The slot of another pool's value is
    /// returned to that pool.
    #[inline(always)]
    pub fn release(&mut self, lease: Lease<'m, T>) {
        if lease.header() != Some(self.own.header) {
            return drop(lease);
        }
        let taken = Taken { slot: lease.vacate(), pool: self };
        // SAFETY: `vacate` consumed the lease, which was the only access to the value. If dropping
        // the value panics, the guard still releases the slot.
        unsafe { (*taken.slot.as_ref().body.get()).assume_init_drop() };
    }

    /// Drops one holder of a value. The last holder drops the value and releases its slot.
    #[inline]
    pub fn release_shared(&mut self, shared: Shared<'m, T>) {
        if let Some(lease) = shared.let_go() {
            self.release(lease);
        }
    }

    /// Redeems an id: invalidates it, and returns its holder.
    ///
    /// # Errors
    ///
    /// [`StaleId`] if the id was already redeemed, or never existed.
    pub fn redeem(&mut self, id: Id) -> Result<Shared<'m, T>, StaleId> {
        let (slot, state) = self.find(id)?;
        // SAFETY: `find` checked that the slot belongs to this pool, which keeps it in place.
        let out = unsafe { slot.as_ref() };
        // Acquire, edge `pool.id`: pairs with the exchange in `Shared::into_id`, perhaps on another
        // thread.
        match out.state.compare_exchange(
            state,
            redeemed(state),
            edge!("pool.id.in", Acquire),
            Ordering::Relaxed,
        ) {
            // SAFETY: the id counted as a holder of the slot. The exchange made it stale, so this
            // handle replaces it.
            Ok(_) => Ok(unsafe { Shared::from_raw(slot, Some(self.own.header)) }),
            Err(_) => Err(StaleId),
        }
    }

    /// Returns the value of an id.
    ///
    /// # Errors
    ///
    /// [`StaleId`], as for [`redeem`](Self::redeem). An id that another thread passed without
    /// memory ordering may look stale at first.
    pub fn get(&mut self, id: Id) -> Result<&T, StaleId> {
        let (slot, state) = self.find(id)?;
        // SAFETY: `find` checked that the slot belongs to this pool, which keeps it in place.
        let out = unsafe { slot.as_ref() };
        // Acquire, edge `pool.id`: pairs with the exchange in `Shared::into_id`, perhaps on another
        // thread.
        if out.state.load(edge!("pool.id.get", Acquire)) != state {
            return Err(StaleId);
        }
        self.header().watch_read(out.link.get());
        // SAFETY: the id is valid, so it holds the slot, which contains a value. Redeeming the id
        // takes `&mut self`, so it cannot happen during this borrow. Holders of a value with an id
        // have only shared access.
        Ok(unsafe { (*out.body.get()).assume_init_ref() })
    }

    /// Calls `ready` with the value of an id, and redeems the id if `ready` returns `Some`.
    /// Otherwise the id stays valid.
    ///
    /// # Errors
    ///
    /// The errors of [`get`](Self::get).
    pub fn redeem_if<R>(
        &mut self,
        id: Id,
        ready: impl FnOnce(&T) -> Option<R>,
    ) -> Result<Option<(Shared<'m, T>, R)>, StaleId> {
        match ready(self.get(id)?) {
            Some(found) => Ok(Some((self.redeem(id)?, found))),
            None => Ok(None),
        }
    }

    /// Redeems an id and drops its holder.
    ///
    /// # Errors
    ///
    /// [`StaleId`], as for [`redeem`](Self::redeem), and if the id was already released.
    pub fn release_id(&mut self, id: Id) -> Result<(), StaleId> {
        let shared = self.redeem(id)?;
        self.release_shared(shared);
        Ok(())
    }

    /// Returns whether the value's slot belongs to this pool. A value on the heap belongs to none.
    pub fn owns(&self, shared: &Shared<'_, T>) -> bool {
        shared.header() == Some(self.own.header)
    }

    /// Closes the pool, as dropping it does. Values in use stay valid, and the last of them frees
    /// the slab.
    pub fn close(self) {}

    /// Returns the counters.
    pub fn counts(&self) -> Counts {
        Counts { high_water: self.own.free.used().into(), ..self.own.counts }
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> usize {
        self.own.capacity as usize
    }

    /// Returns the number of slots in use, including released slots that the owner has not
    /// collected.
    pub fn outstanding(&self) -> u64 {
        let Counts { allocs, local_frees, remote_frees, .. } = self.own.counts;
        allocs.saturating_sub(local_frees + remote_frees)
    }

    #[cfg(feature = "alloc")]
    pub(super) fn counts_mut(&mut self) -> &mut Counts {
        &mut self.own.counts
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the pool owns the `OWNER` reference, which keeps the slab alive.
        unsafe { self.own.header.as_ref() }
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> NonNull<Slot<T>> {
        // SAFETY: every caller checked that the index is below the capacity.
        unsafe { self.own.slots.add(index as usize) }
    }

    fn find(&self, id: Id) -> Result<(NonNull<Slot<T>>, u64), StaleId> {
        let index = id.0 & (GENERATION - 1);
        if index >= self.own.capacity.into() {
            return Err(StaleId);
        }
        Ok((self.slot(index as u32), (id.0 & !(GENERATION - 1)) | ID_OUT))
    }

    #[inline(always)]
    fn take(&mut self) -> Option<u32> {
        let mut index = self.own.free.head_index();
        // One comparison detects both an empty list and a corrupted link.
        if index >= self.own.capacity {
            index = self.refill()?;
        }
        // SAFETY: the index is below the capacity, and the owner keeps the slots alive. Relaxed:
        // the owner wrote the link, or acquired it with the list.
        let next = unsafe { self.slot(index).as_ref() }.next.load(Ordering::Relaxed);
        self.own.free.set_head(next);
        self.own.counts.allocs += 1;
        Some(index)
    }

    #[inline(always)]
    fn lease(&self, slot: NonNull<Slot<T>>, value: T) -> Lease<'m, T> {
        // SAFETY: the owner keeps the slot in place. The slot was taken from the list and is not in
        // use yet, so nothing else accesses it.
        unsafe {
            self.header().watch_write(slot.as_ref().link.get());
            (*slot.as_ref().body.get()).write(value);
            Lease::from_raw(slot, Some(self.own.header))
        }
    }

    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> Option<u32> {
        // Relaxed: this load only avoids a write to the cache line while the list is empty.
        if self.header().line.head.load(Ordering::Relaxed) != EMPTY {
            // Acquire, edge `pool.freed`: pairs with the pushes in `Header::give_back`.
            let first = self.header().line.head.swap(EMPTY, edge!("pool.freed.take", Acquire));
            let taken = self.length(first);
            let counts = &mut self.own.counts;
            counts.remote_frees += taken;
            counts.drains += 1;
            counts.max_chain = counts.max_chain.max(taken);
            if taken != 0 {
                return Some(first - 1);
            }
        }
        let own = &mut *self.own;
        let Some(index) = own.free.take_fresh(own.capacity as usize) else {
            own.counts.full += 1;
            return None;
        };
        // SAFETY: the index is below the capacity. Relaxed: only the owner accesses an unused slot.
        // The link may have any value from an earlier pool.
        unsafe { self.slot(index).as_ref() }.next.store(EMPTY, Ordering::Relaxed);
        Some(index)
    }

    /// Counts the slots of a list that the owner has taken. Follows at most as many links as there
    /// are slots.
    fn length(&self, mut link: u32) -> u64 {
        let mut length = 0;
        while link.wrapping_sub(1) < self.own.capacity && length < self.own.capacity.into() {
            // SAFETY: the link was just checked to lie inside the slots. Relaxed: the owner
            // acquired the link with the list's head.
            link = unsafe { self.slot(link - 1).as_ref() }.next.load(Ordering::Relaxed);
            length += 1;
        }
        length
    }
}

impl<T> Drop for Pool<'_, T> {
    fn drop(&mut self) {
        // Acquire, edge `pool.freed`: pairs with the pushes in `Header::give_back`, so `length`
        // observes the links.
        let back = self.header().line.head.swap(CLOSED, edge!("pool.closed.swap", Acquire));
        let back = self.length(back);
        // A slot that is in use now was in use when the head was closed, so its release decrements
        // the count.
        let out = self.outstanding().saturating_sub(back);
        // SAFETY: the owner drops its `OWNER` reference, except for one reference per slot in use.
        // It uses neither header nor slots again.
        unsafe { Header::let_go(self.own.header, OWNER - out) };
    }
}

/// Returns the next state of a slot after its id has become stale: the next generation, without an
/// id.
fn redeemed(state: u64) -> u64 {
    (state & !ID_OUT).wrapping_add(GENERATION)
}

/// A guard for a slot that is neither free nor in use. Puts the slot into the owner's list when
/// dropped.
struct Taken<'p, 'm, T> {
    pool: &'p mut Pool<'m, T>,
    slot: NonNull<Slot<T>>,
}

impl<T> Drop for Taken<'_, '_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: the slot belongs to this pool, which keeps it in place.
        let slot = unsafe { self.slot.as_ref() };
        let own = &mut *self.pool.own;
        let next = own.free.give(slot.link.get() - 1);
        // Relaxed: only the owner reads the link.
        slot.next.store(next, Ordering::Relaxed);
        own.counts.local_frees += 1;
    }
}

/// The error if every slot is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

impl<T> fmt::Display for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pool is full; release a value first")
    }
}

impl<T: fmt::Debug> Error for Full<T> {}

/// Why no value was created. No slot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateError<E> {
    /// Every slot is in use.
    Full,
    /// The function that makes the value failed with this error.
    Refused(E),
}

impl<E: fmt::Display> fmt::Display for CreateError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the pool is full; release a value first"),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl<E: Error> Error for CreateError<E> {}
