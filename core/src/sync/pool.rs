//! A pool of fixed slots: one owner takes slots, and any thread releases them. Nothing here blocks,
//! allocates or makes a system call. Only the heap form (feature `alloc`) allocates: at setup, and
//! on request when the pool is full.
//!
//! One thread at a time owns the [`Pool`] and creates values in it. A value with one holder is
//! accessed through its [`Lease`], a value with several holders through [`Shared`] handles. Either
//! may move to any thread. The owner returns a slot to its own list without atomics
//! ([`Pool::release`]). Every other thread returns a slot with one compare-and-swap when it drops
//! the handle, or several slots with one ([`Batch`]). When its own list is empty, the owner takes
//! all slots returned meanwhile with one swap.
//!
//! # Why there is no ABA problem
//!
//! Releasing threads only push, and never follow a link. The owner always takes the whole list. So
//! an equal head means the same list, whatever happened in between. The head needs no tag and no
//! double-width comparison.
//!
//! # Layout
//!
//! The owner's words are in its [`Pool`]. The words that other threads write are in the [`Header`].
//! Each group has its own 128-byte lines. The number of slots is a power of two up to 65,536, and
//! the size of each is a multiple of 64 bytes. A slot contains its generation, its number of
//! holders, the link of its list, its own number and its value. Links are checked numbers rather
//! than addresses, so a corrupted list makes the pool smaller but never leads outside it. Unused
//! slots are taken last, so slots that are never needed stay untouched.
//!
//! # Edges
//!
//! | edge         | release | acquire | carries |
//! |--------------|---|---|---|
//! | `pool.freed` | head, by a pusher | head, by [`Pool::create`] | the slot and its link |
//! | `pool.refs`  | count, by earlier holders | count, by the last | their uses of the value |
//! | `pool.id`    | state, by [`Shared::into_id`] | state, by [`Pool::redeem`] | the value |
//! | `pool.keep`  | count, by earlier holders | count, by the last | their uses of the slots |
//! | `pool.claim` | (`pool.keep`) | count, by [`Slab::claim`] | the slots, to a new owner |
//!
//! Each push replaces the head by one read-modify-write. So the owner's swap, which reads the last
//! push, acquires from all of them.
//!
//! # Closing
//!
//! Values may outlive their pool. Closing or dropping the pool overwrites the head with "closed".
//! From then on a release decrements a reference count instead of pushing. The owner's reference
//! counts for more than all slots together. One subtraction replaces it by the number of slots in
//! use, so the order of decrements does not matter. The last reference ends the slab: the heap form
//! is freed, and for borrowed memory [`Reclaim`] is called, if the creator passed one.

use core::{
    cell::{Cell, UnsafeCell},
    error::Error,
    fmt,
    marker::PhantomData,
    mem::MaybeUninit,
    ptr::NonNull,
};

use crossbeam_utils::CachePadded;

use super::primitive::{AtomicU32, AtomicU64, Ordering, Watch, const_new, edge, filled};

mod batch;
mod block;
#[cfg(feature = "alloc")]
mod heap;
mod lease;
mod list;
mod owner;
#[cfg(test)]
mod races;
#[cfg(test)]
mod tests;

pub use batch::Batch;
pub use block::Block;
pub(crate) use lease::RawShared;
pub use lease::{Lease, Shared};
use list::EMPTY;
pub use list::FreeList;
pub use owner::{Counts, CreateError, Full, Pool};

/// The default number of slots.
pub const DEFAULT_CAPACITY: usize = 64;

/// The maximum number of slots of a pool: slot numbers have 16 bits.
pub const MAX_CAPACITY: usize = 1 << 16;

/// Value of the head once the owner has closed the pool.
const CLOSED: u32 = u32::MAX;

/// The owner's share of the reference count, which exceeds the number of slots.
const OWNER: u64 = 1 << 32;

/// The lowest bit of [`Slot::state`]. It is set while the slot's current generation has an id.
const ID_OUT: u64 = 1;
/// The increment of the generation in [`Slot::state`] and in an id. The 16 bits below it hold the
/// flag or the index.
const GENERATION: u64 = 1 << 16;

/// The fields that releasing threads write, on one 128-byte line (on x86-64 and aarch64).
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    line: CachePadded<Line>,
    watch: Watch,
}

#[derive(Debug)]
#[repr(C)]
struct Line {
    /// Link of the last released slot, or [`CLOSED`].
    head: AtomicU32,
    capacity: AtomicU32,
    /// The reference count of the slab: [`OWNER`] while it has an owner. After closing, one per
    /// slot in use.
    keeps: AtomicU64,
    reclaim: Cell<Option<Reclaim>>,
}

/// A function that the last holder of a closed pool calls. The pool never accesses its memory after
/// this call.
#[derive(Clone, Copy, Debug)]
pub struct Reclaim {
    call: unsafe fn(*mut ()),
    data: *mut (),
}

/// A slot: 24 bytes of bookkeeping, then the value.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot<T> {
    /// The generation, in 48 bits from bit 16 on, and [`ID_OUT`].
    state: AtomicU64,
    /// Number of [`Shared`] handles and ids, or 0 while a [`Lease`] holds the slot.
    holders: AtomicU64,
    next: AtomicU32,
    /// The slot's own link, written at setup and only read afterwards. [`EMPTY`] for a lone slot on
    /// the heap.
    link: Cell<u32>,
    body: UnsafeCell<MaybeUninit<T>>,
}

#[cfg(all(not(fishplate_loom), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod layout {
    use super::{Block, Header, Pool, Slot};
    use core::mem::{align_of, offset_of, size_of};
    use static_assertions::const_assert_eq;

    const_assert_eq!(size_of::<Header>(), 128);
    const_assert_eq!(align_of::<Header>(), 128);
    const_assert_eq!(align_of::<Pool<'static, u64>>(), 128);
    const_assert_eq!(offset_of!(Slot<u64>, body), 24);
    const_assert_eq!(size_of::<Slot<Block<40>>>(), 64);
    const_assert_eq!(size_of::<Slot<Block<104>>>(), 128);
    const_assert_eq!(size_of::<Slot<Block<232>>>(), 256);
}

impl Header {
    const_new! {
        /// Creates a header that no pool uses yet.
        pub fn new() -> Self {
            Self {
                line: CachePadded::new(Line {
                    head: AtomicU32::new(EMPTY),
                    capacity: AtomicU32::new(0),
                    keeps: AtomicU64::new(0),
                    reclaim: Cell::new(None),
                }),
                watch: Watch::new(),
            }
        }
    }

    #[inline(always)]
    fn watch_read(&self, link: u32) {
        self.watch.read(link as usize - 1);
    }

    /// Called also when the slot is passed to a thread that may write it.
    #[inline(always)]
    fn watch_write(&self, link: u32) {
        self.watch.write(link as usize - 1);
    }

    /// Releases the linked list of `count` slots from `first` to `last`. Their values are already
    /// dropped.
    ///
    /// # Safety
    /// The caller holds these slots, which belong to this pool, and does not use them again.
    #[inline]
    unsafe fn give_back(this: NonNull<Self>, first: u32, last: &AtomicU32, count: u32) {
        // SAFETY: a held slot keeps the slab and its header alive. The caller holds its slots until
        // the exchange below succeeds.
        let header = unsafe { this.as_ref() };
        // Relaxed: the exchange compares the value again, and the value is never followed.
        let mut head = header.line.head.load(Ordering::Relaxed);
        while head != CLOSED {
            // Relaxed: the exchange publishes the link.
            last.store(head, Ordering::Relaxed);
            // Release, edge `pool.freed`: pairs with the swaps in `Pool::refill` and `Pool::drop`.
            // A thread that takes the list observes the links in it, and may overwrite the slots.
            let pushed = header.line.head.compare_exchange_weak(
                head,
                first,
                edge!("pool.freed.push", Release),
                Ordering::Relaxed,
            );
            match pushed {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
        // SAFETY: closing left one reference for each slot in use, and the caller's `count` slots
        // are in use.
        unsafe { Self::let_go(this, count.into()) };
    }

    /// Drops `count` references to the slab.
    ///
    /// # Safety
    /// The caller owns these references, and uses neither header nor slots afterwards.
    #[cold]
    #[inline(never)]
    unsafe fn let_go(this: NonNull<Self>, count: u64) {
        // SAFETY: the caller's references keep the slab alive until the subtraction below.
        let header = unsafe { this.as_ref() };
        // Read both before the subtraction, after which the memory may be freed.
        let (reclaim, capacity) =
            (header.line.reclaim.get(), header.line.capacity.load(Ordering::Relaxed));
        // Release, edge `pool.keep`: pairs with the load below, and with the exchange in
        // `Slab::claim`.
        let keeps = header.line.keeps.fetch_sub(count, edge!("pool.keep.drop", Release));
        if keeps != count {
            return;
        }
        let Some(reclaim) = reclaim else { return };
        // Acquire, edge `pool.keep`: the last holder observes all uses of the slots before it frees
        // them.
        header.line.keeps.load(edge!("pool.keep.last", Acquire));
        for link in 1..=capacity {
            header.watch_write(link);
        }
        // SAFETY: the creator of the pool passed `reclaim` for this slab, and the last reference to
        // it is gone.
        unsafe { (reclaim.call)(reclaim.data) };
    }
}

impl Default for Header {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: only an owner with exclusive access to the header writes `reclaim` (`Pool::new`,
// `Slab::claim`). Afterwards it is only read, and any thread may call it. All other fields are
// atomics.
unsafe impl Sync for Header {}
// SAFETY: the header owns nothing tied to a thread: its fields are atomics and `reclaim`.
unsafe impl Send for Header {}

impl Reclaim {
    /// Creates a function that calls `call(data)` on the thread that drops the last reference.
    pub fn new(call: fn(*mut ()), data: *mut ()) -> Self {
        Self { call, data }
    }
}

impl<T> Slot<T> {
    const_new! {
        /// Creates a slot without a value.
        pub fn new() -> Self {
            Self::starting_at(0)
        }
    }

    const_new! {
        /// Creates a slot with a 48-bit generation that starts at `generation`.
        pub fn starting_at(generation: u64) -> Self {
            Self {
                state: AtomicU64::new(generation.wrapping_mul(GENERATION)),
                holders: AtomicU64::new(0),
                next: AtomicU32::new(EMPTY),
                link: Cell::new(EMPTY),
                body: UnsafeCell::new(MaybeUninit::uninit()),
            }
        }
    }
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// A number for a value, for programs that cannot hold a [`Shared`]. It consists of the slot's
/// index in 16 bits and its generation in 48 bits. An id counts as one holder. Once redeemed, it is
/// stale until the slot has had 2^48 more ids. An id does not identify its pool: another pool may
/// use the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id(u64);

impl Id {
    /// Returns the id as a number, for a user's handle.
    pub fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the index of the id's slot, even if the id is stale.
    pub fn index(self) -> u16 {
        self.0 as u16
    }

    /// Converts a number back to an id. Any value is allowed: an invalid id is rejected as
    /// [`StaleId`].
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// The id was already redeemed, or never existed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleId;

impl fmt::Display for StaleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stale id: already redeemed, or never issued")
    }
}

impl Error for StaleId {}

/// Header and slots in one value, for a static or a stack. `N` is checked at compile time:
///
/// ```compile_fail,E0080
/// let slab = fishplate_core::sync::pool::Slab::<u64, 48>::new();
/// ```
///
/// ```
/// use fishplate_core::sync::pool::Slab;
///
/// static SLAB: Slab<u64> = Slab::new();
/// let mut pool = SLAB.claim()?;
/// let a = pool.create(7).unwrap();
/// assert_eq!(*a, 7);
/// pool.release(a);
/// # Ok::<(), fishplate_core::sync::pool::AttachError>(())
/// ```
#[repr(C)]
#[derive(Debug)]
pub struct Slab<T, const N: usize = DEFAULT_CAPACITY> {
    header: Header,
    slots: [Slot<T>; N],
}

// SAFETY: the only shared use is `claim`, which succeeds for one thread at a time. Handles that
// move values between threads require `T: Send` themselves.
unsafe impl<T: Send, const N: usize> Sync for Slab<T, N> {}

impl<T, const N: usize> Slab<T, N> {
    const CAPACITY: () =
        assert!(N.is_power_of_two() && N <= MAX_CAPACITY, "a pool's capacity is a power of two");

    const_new! {
        /// Creates memory for a pool.
        pub fn new() -> Self {
            let () = Self::CAPACITY;
            Self { header: Header::new(), slots: filled!(Slot::new(); N) }
        }
    }

    /// Creates a pool in this slab.
    ///
    /// # Errors
    ///
    /// [`AttachError::Claimed`] while the slab has a pool, or a slot of an earlier pool is in use.
    pub fn claim(&self) -> Result<Pool<'_, T>, AttachError> {
        // Acquire, edge `pool.claim`: pairs with the last holder's `pool.keep.drop`. The new owner
        // observes all uses of the slots.
        let keeps = &self.header.line.keeps;
        if keeps
            .compare_exchange(0, OWNER, edge!("pool.claim", Acquire), Ordering::Relaxed)
            .is_err()
        {
            return Err(AttachError::Claimed);
        }
        // SAFETY: header and slots belong together and live as long as `self` is borrowed. The
        // exchange made this caller their only user, because all earlier users have dropped their
        // references.
        Ok(unsafe {
            Pool::from_raw(
                NonNull::from(&self.header),
                NonNull::from(&self.slots).cast(),
                N as u32,
                None,
            )
        })
    }
}

impl<T, const N: usize> Default for Slab<T, N> {
    fn default() -> Self {
        Self::new()
    }
}

/// Why a pool could not be created over the given memory. Nothing was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError {
    /// The number of slots is not a power of two from 1 to 65,536.
    Capacity {
        /// The given number of slots.
        slots: usize,
    },
    /// The slab has a pool, or values of an earlier pool are still in use.
    Claimed,
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Capacity { slots } => {
                write!(
                    f,
                    "invalid pool size: {slots} slots; use a power of two from 1 to {MAX_CAPACITY}"
                )
            }
            Self::Claimed => {
                f.write_str("the slab is in use; drop its pool and all its values first")
            }
        }
    }
}

impl Error for AttachError {}

type NotSync = PhantomData<Cell<()>>;
