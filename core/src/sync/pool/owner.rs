//! The owner's side: takes slots, releases them without atomics, and closes the pool. Never blocks
//! or allocates; used by one thread at a time.

use core::{error::Error, fmt, marker::PhantomData, mem, ptr::NonNull};

use crossbeam_utils::CachePadded;
use static_assertions::{assert_impl_all, assert_not_impl_any};

use super::{
    AttachError, CLOSED, EMPTY, FreeList, GENERATION, Header, ID_OUT, Id, Lease, MAX_CAPACITY, NotSync,
    OWNER, Reclaim, Shared, Slot, StaleId,
};
use crate::sync::primitive::{Ordering, edge};

/// Creates values in slots. Dropping it closes the pool; values in use stay valid.
///
/// Using it after it was closed does not compile:
///
/// ```compile_fail,E0382
/// let slab = fishplate_core::sync::pool::Slab::<u64>::new();
/// let mut pool = slab.claim().unwrap();
/// pool.close();
/// pool.create(1);
/// ```
///
/// Nor does sharing it between threads:
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

/// The owner's cache line.
#[derive(Debug)]
struct Own<T> {
    /// Slots released by the owner, or collected from others.
    free: FreeList,
    capacity: u32,
    slots: NonNull<Slot<T>>,
    header: NonNull<Header>,
    counts: Counts,
}

assert_impl_all!(Pool<'static, u64>: Send);
assert_not_impl_any!(Pool<'static, u64>: Sync, Clone);

// SAFETY: a pool holds no values, only free slots, which any thread may use. `T: Send`, because
// values created here may be dropped on other threads.
unsafe impl<T: Send> Send for Pool<'_, T> {}

/// The counters of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Slots taken.
    pub allocs: u64,
    /// Slots that the owner released.
    pub local_frees: u64,
    /// Slots that others released, as far as the owner has collected them.
    pub remote_frees: u64,
    /// Times that the owner collected the slots that others released.
    pub drains: u64,
    /// The longest list collected at once.
    pub max_chain: u64,
    /// Times that no slot was free.
    pub full: u64,
    /// Lone values created on the heap instead. No other counter includes them.
    pub overflow: u64,
    /// The most slots in use at once, including those released by others and not collected yet.
    pub high_water: u64,
}

impl<'m, T> Pool<'m, T> {
    /// Creates a pool over memory that is borrowed for as long as values are in use. All slots
    /// start free. `reclaim` is called once the pool is closed and every slot is released.
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
        // SAFETY: both are borrowed exclusively for `'m`, so nothing else uses them. Values of an
        // earlier pool in this memory can only have been leaked, because otherwise its borrow would
        // not have ended.
        Ok(unsafe { Self::from_raw(NonNull::from(header), NonNull::from(slots).cast(), capacity, reclaim) })
    }

    /// Checks the number of slots.
    pub(super) fn checked(slots: usize) -> Result<u32, AttachError> {
        match slots.is_power_of_two() && slots <= MAX_CAPACITY {
            true => Ok(slots as u32),
            false => Err(AttachError::Capacity { slots }),
        }
    }

    /// Creates a pool whose slots are all free, whatever they contain.
    ///
    /// # Safety
    ///
    /// Header and `capacity` slots, a power of two, stay in place until the last reference is
    /// dropped. The caller is their only user, and has the owner's reference of the header. Any
    /// thread may call `reclaim`.
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
    /// [`Full`], with the value, if every slot is in use. The next call finds slots that others
    /// have released since.
    #[inline(always)]
    pub fn create(&mut self, value: T) -> Result<Lease<'m, T>, Full<T>> {
        match self.take() {
            Some(index) => Ok(self.lease(self.slot(index), value)),
            None => Err(Full(value)),
        }
    }

    /// Creates a value in a free slot, in place if the compiler can. If `make` fails or panics, the
    /// slot is freed.
    ///
    /// # Errors
    ///
    /// [`CreateError::Full`] if every slot is in use; then `make` was not called.
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

    /// Ends a value and frees its slot without atomics. A value of another pool returns to its own
    /// pool.
    #[inline(always)]
    pub fn release(&mut self, lease: Lease<'m, T>) {
        if lease.header() != Some(self.own.header) {
            return drop(lease);
        }
        let taken = Taken { slot: lease.vacate(), pool: self };
        // SAFETY: `vacate` gave up the only access to the value. If its drop panics, the guard
        // still releases the slot.
        unsafe { (*taken.slot.as_ref().body.get()).assume_init_drop() };
    }

    /// [`release`](Self::release) for one of several holders: ends the value if this was the last.
    #[inline]
    pub fn release_shared(&mut self, shared: Shared<'m, T>) {
        if let Some(lease) = shared.let_go() {
            self.release(lease);
        }
    }

    /// Ends an id, and returns its holder.
    ///
    /// # Errors
    ///
    /// [`StaleId`] if it was redeemed before, or never existed.
    pub fn redeem(&mut self, id: Id) -> Result<Shared<'m, T>, StaleId> {
        let (slot, state) = self.find(id)?;
        // SAFETY: `find` has checked the slot.
        let out = unsafe { slot.as_ref() };
        // Acquire, edge `pool.id`: pairs with `Shared::into_id`, perhaps on another thread.
        match out.state.compare_exchange(
            state,
            redeemed(state),
            edge!("pool.id.in", Acquire),
            Ordering::Relaxed,
        ) {
            // SAFETY: the id was the slot's holder, and is stale now.
            Ok(_) => Ok(unsafe { Shared::from_raw(slot, Some(self.own.header)) }),
            Err(_) => Err(StaleId),
        }
    }

    /// Returns the value of an id.
    ///
    /// # Errors
    ///
    /// The same as for [`redeem`](Self::redeem). An id that another thread passed without memory
    /// ordering may look stale at first.
    pub fn get(&mut self, id: Id) -> Result<&T, StaleId> {
        let (slot, state) = self.find(id)?;
        // SAFETY: `find` has checked the slot.
        let out = unsafe { slot.as_ref() };
        // Acquire, edge `pool.id`, as in `redeem`.
        if out.state.load(edge!("pool.id.get", Acquire)) != state {
            return Err(StaleId);
        }
        self.header().watch_read(out.link.get());
        // SAFETY: the id is valid, so the slot has a value. It keeps its holder until the id is
        // redeemed, which takes `&mut self`. Holders of a value with an id have only shared access.
        Ok(unsafe { (*out.body.get()).assume_init_ref() })
    }

    /// Looks at the value of an id, and redeems the id if `ready` returns something. `None`: the id
    /// is still valid.
    ///
    /// # Errors
    ///
    /// As for [`get`](Self::get).
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

    /// Ends an id and releases its holder.
    ///
    /// # Errors
    ///
    /// The same as for [`redeem`](Self::redeem): releasing an id a second time is [`StaleId`].
    pub fn release_id(&mut self, id: Id) -> Result<(), StaleId> {
        let shared = self.redeem(id)?;
        self.release_shared(shared);
        Ok(())
    }

    /// Returns whether the value is in this pool.
    pub fn owns(&self, shared: &Shared<'_, T>) -> bool {
        shared.header() == Some(self.own.header)
    }

    /// Closes the pool, as dropping it does. Values in use stay valid, and the last one frees the
    /// slab.
    pub fn close(self) {}

    /// Returns the counters.
    pub fn counts(&self) -> Counts {
        Counts { high_water: self.own.free.used().into(), ..self.own.counts }
    }

    /// Returns the number of slots.
    pub fn capacity(&self) -> usize {
        self.own.capacity as usize
    }

    /// Returns the slots in use, including those released by others and not collected yet.
    pub fn outstanding(&self) -> u64 {
        let Counts { allocs, local_frees, remote_frees, .. } = self.own.counts;
        allocs.saturating_sub(local_frees + remote_frees)
    }

    #[cfg(feature = "alloc")]
    pub(super) fn counts_mut(&mut self) -> &mut Counts {
        &mut self.own.counts
    }

    pub(super) fn header(&self) -> &Header {
        // SAFETY: the owner keeps the slab alive.
        unsafe { self.own.header.as_ref() }
    }

    /// Returns the slot with this index.
    #[inline(always)]
    fn slot(&self, index: u32) -> NonNull<Slot<T>> {
        // SAFETY: every caller has checked that the index is below the capacity.
        unsafe { self.own.slots.add(index as usize) }
    }

    /// Returns the slot of an id, and its state while that id is valid.
    fn find(&self, id: Id) -> Result<(NonNull<Slot<T>>, u64), StaleId> {
        let index = id.0 & (GENERATION - 1);
        if index >= self.own.capacity.into() {
            return Err(StaleId);
        }
        Ok((self.slot(index as u32), (id.0 & !(GENERATION - 1)) | ID_OUT))
    }

    /// Takes a free slot. Returns its index, so that the caller tests the list and not a pointer.
    #[inline(always)]
    fn take(&mut self) -> Option<u32> {
        let mut index = self.own.free.head_index();
        // One comparison detects both the empty list and a corrupted link.
        if index >= self.own.capacity {
            index = self.refill()?;
        }
        // SAFETY: inside the slots, which the owner keeps alive. Relaxed: the owner wrote it, or
        // acquired its list.
        let next = unsafe { self.slot(index).as_ref() }.next.load(Ordering::Relaxed);
        self.own.free.set_head(next);
        self.own.counts.allocs += 1;
        Some(index)
    }

    #[inline(always)]
    fn lease(&self, slot: NonNull<Slot<T>>, value: T) -> Lease<'m, T> {
        // SAFETY: the owner keeps the slot in place, and it is free: taken from the list, and not
        // in use yet.
        unsafe {
            self.header().watch_write(slot.as_ref().link.get());
            (*slot.as_ref().body.get()).write(value);
            Lease::from_raw(slot, Some(self.own.header))
        }
    }

    /// Finds a free slot when the owner's list is empty: one that others have released, or an
    /// unused one.
    #[cold]
    #[inline(never)]
    fn refill(&mut self) -> Option<u32> {
        // Relaxed: only avoids touching the cache line while the list is empty.
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
        // SAFETY: below the capacity. Relaxed: an unused slot belongs to the owner alone. Its word
        // may hold anything from an earlier pool.
        unsafe { self.slot(index).as_ref() }.next.store(EMPTY, Ordering::Relaxed);
        Some(index)
    }

    /// Counts the slots of a list that the owner has taken. Takes at most as many steps as there
    /// are slots.
    fn length(&self, mut link: u32) -> u64 {
        let mut length = 0;
        while link.wrapping_sub(1) < self.own.capacity && length < self.own.capacity.into() {
            // SAFETY: inside the slots, as just checked. Relaxed: acquired with the list's head.
            link = unsafe { self.slot(link - 1).as_ref() }.next.load(Ordering::Relaxed);
            length += 1;
        }
        length
    }
}

impl<T> Drop for Pool<'_, T> {
    /// Closes the pool.
    fn drop(&mut self) {
        // Acquire, edge `pool.freed`, for the links walked next.
        let back = self.header().line.head.swap(CLOSED, edge!("pool.closed.swap", Acquire));
        let back = self.length(back);
        // A slot in use now was in use when the head was closed, so its release decrements the
        // count.
        let out = self.outstanding().saturating_sub(back);
        // SAFETY: the owner's references, less those that it leaves to slots in use. It uses
        // neither header nor slots again.
        unsafe { Header::let_go(self.own.header, OWNER - out) };
    }
}

/// Returns the state of a slot after its id became stale: the next generation, without an id.
fn redeemed(state: u64) -> u64 {
    (state & !ID_OUT).wrapping_add(GENERATION)
}

/// A slot that is neither free nor in use. Dropping it releases the slot to the owner's list.
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
        // Relaxed: only the owner reads it.
        slot.next.store(next, Ordering::Relaxed);
        own.counts.local_frees += 1;
    }
}

/// Every slot is in use. Carries the value that found no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full<T>(pub T);

impl<T> fmt::Display for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the pool is full")
    }
}

impl<T: fmt::Debug> Error for Full<T> {}

/// Why a value was not created. No slot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CreateError<E> {
    /// Every slot is in use.
    Full,
    /// Making it failed.
    Refused(E),
}

impl<E: fmt::Display> fmt::Display for CreateError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the pool is full"),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl<E: Error> Error for CreateError<E> {}
