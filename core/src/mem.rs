//! Identifiers and views of memory, peers and rails.
//!
//! Memory passes between packages as a [`Region`]. Memory that a peer can write is never a Rust
//! reference. It is accessed through an [`Untrusted`] view, atomics or raw copies. Nothing here
//! blocks or allocates.

mod copy;

pub use copy::{copy_bytes, copy_message, copy_to_window, order_window};

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// Marks types for which zeroed memory is a valid value. A table of such values may come zeroed
/// from the allocator, and its memory stays untouched until used.
///
/// # Safety
/// A value with all bytes zero is valid.
pub unsafe trait Zeroable: Copy {}

/// A rail of an engine, by its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RailId(pub u8);

/// A peer's slot in the engine's tables, which is the number that rails use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer(pub u16);

/// A peer as the program names it. The generation distinguishes the peer from an earlier peer in
/// the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId {
    pub(crate) index: u16,
    pub(crate) generation: u16,
}

impl PeerId {
    /// Returns the slot, which is the number that rails use.
    pub fn peer(self) -> Peer {
        Peer(self.index)
    }

    /// Returns the id as a number, for C and other languages.
    pub const fn to_raw(self) -> u32 {
        (self.generation as u32) << 16 | self.index as u32
    }

    /// Converts a number back to an id. A number that `to_raw` never returned names no peer.
    pub const fn from_raw(raw: u32) -> PeerId {
        PeerId { index: raw as u16, generation: (raw >> 16) as u16 }
    }
}

/// The kind of memory of a [`Region`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionKind {
    /// Memory that only this process maps. Peers reach it through rails.
    Private,
    /// Memory in a shared segment that this process owns.
    Shared {
        /// The owner's number for the segment.
        segment: u32,
        /// Offset of the region in the segment, in bytes.
        offset: u64,
    },
    /// Memory in a segment that this process shares with one peer. Only that peer can import it.
    Common {
        /// The peer that shares the segment.
        peer: Peer,
        /// Offset of the region in the segment, in bytes.
        offset: u64,
    },
    /// Memory of a device, at an address that the processor must not access. Only rails copy such
    /// memory. Signals and atomics on it are slower, because a rail copies the word out and back.
    Device {
        /// The device's number in this process.
        ordinal: u32,
    },
}

/// A range of memory that may be registered with an engine.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    ptr: NonNull<u8>,
    len: usize,
    kind: RegionKind,
    native_atomics: bool,
}

// SAFETY: the guarantees of `Region::new` hold for every thread of the process.
unsafe impl Send for Region {}
// SAFETY: a region only describes memory, and two threads may read the description at once.
unsafe impl Sync for Region {}

impl Region {
    /// Describes memory.
    ///
    /// # Safety
    /// `ptr` is valid for reads and writes of `len` bytes while the region is registered. It also
    /// stays valid while a peer imports the region and accesses it through the kernel or, for
    /// [`RegionKind::Device`], through its device. In that time this process accesses the bytes
    /// only through atomics, raw pointers or the engine, because peers may write them at any time.
    /// Unless it is device memory, the memory is ordinary cached memory: a signal does not order
    /// earlier writes through a write-combining mapping.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, kind: RegionKind) -> Self {
        Region { ptr, len, kind, native_atomics: false }
    }

    /// Returns the same memory, with atomics that one rail of its owner executes
    /// ([`Rail::post_atomic`]). They are not atomic with respect to the processor. So the engine
    /// refuses operations that need the processor's atomics: signals, injects, waits, and atomics
    /// of peers that this rail does not reach. Puts, gets and tagged messages work as usual. The
    /// owner may load a word, but must not change a word that peers use.
    ///
    /// [`Rail::post_atomic`]: crate::rail::Rail::post_atomic
    pub fn with_native_atomics(self) -> Self {
        Region { native_atomics: true, ..self }
    }

    /// Returns whether a rail executes the atomics on this memory.
    pub fn has_native_atomics(&self) -> bool {
        self.native_atomics
    }

    /// Returns a pointer to the first byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the kind of memory.
    pub fn kind(&self) -> RegionKind {
        self.kind
    }
}

/// Unregistered memory of this process, for two-sided messages. Peers cannot name it. Its bytes are
/// copied into and out of messages, or the kernel copies them by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the guarantees of `Span::new` hold for every thread of the process.
unsafe impl Send for Span {}
// SAFETY: a span only describes memory, and two threads may read the description at once.
unsafe impl Sync for Span {}

impl Span {
    /// Describes memory, which needs no alignment.
    ///
    /// # Safety
    /// From each call that takes the span until the completion of its send or receive, `ptr` is
    /// valid for `len` bytes in any thread. For a send the bytes are readable and do not change.
    /// For a receive they are readable and writable, and nothing else accesses them. Dropping the
    /// engine completes every send and receive.
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Span { ptr, len }
    }

    /// Returns a pointer to the first byte.
    pub const fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the size in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the span has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Slot and generation are in one number. An address is then two numbers, which calls pass in
/// registers.
macro_rules! region_id {
    ($(#[$doc:meta])* $id:ident, $addr:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $id(u64);

        impl $id {
            #[inline(always)]
            pub(crate) const fn new(index: u32, generation: u32) -> Self {
                $id((generation as u64) << 32 | index as u64)
            }

            #[inline(always)]
            pub(crate) const fn index(self) -> usize {
                self.0 as u32 as usize
            }

            #[inline(always)]
            pub(crate) const fn generation(self) -> u32 {
                (self.0 >> 32) as u32
            }

            /// Returns the id as a number, for C and other languages.
            #[inline(always)]
            pub const fn to_raw(self) -> u64 {
                self.0
            }

            /// Converts a number back to an id. A number that `to_raw` never returned names no
            /// region.
            #[inline(always)]
            pub const fn from_raw(raw: u64) -> Self {
                $id(raw)
            }

            /// Returns the address `offset` bytes into the region.
            #[inline(always)]
            pub const fn at(self, offset: u64) -> $addr {
                $addr { region: self, offset }
            }
        }

        impl fmt::Debug for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} {}.{}", stringify!($id), self.index(), self.generation())
            }
        }
    };
}

region_id!(
    /// The id of registered memory of this process.
    LocalId,
    LocalAddr
);
region_id!(
    /// The id of imported memory of a peer.
    RemoteId,
    RemoteAddr
);

/// An address in registered memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAddr {
    /// The region.
    pub region: LocalId,
    /// Offset from the start of the region, in bytes.
    pub offset: u64,
}

/// An address in imported memory of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// The region.
    pub region: RemoteId,
    /// Offset from the start of the region, in bytes.
    pub offset: u64,
}

/// Bytes that a peer may be writing. Copy them out once, then check the copy.
#[derive(Clone, Copy, Debug)]
pub struct Untrusted<'a> {
    ptr: *const u8,
    len: usize,
    bytes: PhantomData<&'a [u8]>,
}

impl<'a> Untrusted<'a> {
    /// Creates a view of memory that a peer can write.
    ///
    /// # Safety
    /// `ptr` is readable for `len` bytes during `'a`.
    #[inline(always)]
    pub unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Untrusted { ptr, len, bytes: PhantomData }
    }

    /// Creates a view of memory that no thread is writing.
    #[inline(always)]
    pub fn from_slice(bytes: &'a [u8]) -> Self {
        Untrusted { ptr: bytes.as_ptr(), len: bytes.len(), bytes: PhantomData }
    }

    /// Returns the size in bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the view has no bytes.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first bytes into `into`, until the view ends or `into` is full. Returns the
    /// number of bytes copied.
    #[inline(always)]
    pub fn copy_out(&self, into: &mut [u8]) -> usize {
        let n = self.len.min(into.len());
        // SAFETY: `n` is within both lengths. `into` is borrowed mutably, so the two do not
        // overlap. A raw copy tolerates a source that changes meanwhile.
        unsafe { copy_bytes(self.ptr, into.as_mut_ptr(), n) };
        n
    }

    /// Returns the current first byte, or 0 for an empty view.
    #[inline(always)]
    pub fn first(&self) -> u8 {
        // SAFETY: the view is not empty, and its creator guaranteed readable bytes. The read is
        // volatile, because the byte may change at any time.
        if self.len == 0 { 0 } else { unsafe { self.ptr.read_volatile() } }
    }

    /// Splits the view after `n` bytes. Returns `None` if the view is shorter.
    #[inline(always)]
    pub fn split_at(self, n: usize) -> Option<(Self, Self)> {
        if n > self.len {
            return None;
        }
        // SAFETY: `n <= len`, so both parts are inside the bytes that the creator guaranteed to be
        // readable.
        unsafe { Some((Self::new(self.ptr, n), Self::new(self.ptr.add(n), self.len - n))) }
    }

    /// Returns a pointer to the first byte.
    #[inline(always)]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }
}
