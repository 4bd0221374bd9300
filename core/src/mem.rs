//! How memory, peers and rails are named.
//!
//! Memory crosses package borders as a [`Region`]. What a peer can write is never a Rust reference:
//! it is an [`Untrusted`] view, or atomics, or raw copies. Nothing here blocks or allocates.

mod copy;

pub use copy::{copy_bytes, copy_message, copy_to_window};

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

/// Slots of a table whose memory may come as zeros from the allocator,
/// which does not touch it before it is used.
///
/// # Safety
/// A value all of whose bytes are zero is valid.
pub unsafe trait Zeroable: Copy {}

/// One rail of an engine, by position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RailId(pub u8);

/// A peer's slot in the engine's tables: the number that rails use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer(pub u16);

/// A peer as the program names it. The generation distinguishes it from an earlier peer in its
/// slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId {
    pub(crate) index: u16,
    pub(crate) generation: u16,
}

impl PeerId {
    /// The slot, as rails number it.
    pub fn peer(self) -> Peer {
        Peer(self.index)
    }

    /// As a number, for languages without types.
    pub const fn to_raw(self) -> u32 {
        (self.generation as u32) << 16 | self.index as u32
    }

    /// The reverse. A number that was never given names no peer.
    pub const fn from_raw(raw: u32) -> PeerId {
        PeerId { index: raw as u16, generation: (raw >> 16) as u16 }
    }
}

/// What kind of memory a [`Region`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegionKind {
    /// Memory of this process alone.
    Private,
    /// In a shared segment: the segment's number, in its owner's count, and the offset, in bytes.
    Shared {
        /// Number of the segment within the process that made it.
        segment: u32,
        /// First byte of the region within the segment.
        offset: u64,
    },
    /// In the segment that this process shares with one peer. Only that peer can import it.
    Common {
        /// The peer.
        peer: Peer,
        /// First byte of the region within the segment.
        offset: u64,
    },
    /// Memory of a device, named by an address that the processor must not touch. Only rails move
    /// it: nothing of it rides in a message, it holds no signal, and no atomic is carried out in
    /// it.
    Device {
        /// Which device, as this process counts them.
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

// SAFETY: what `Region::new` was promised holds for every thread of the process.
unsafe impl Send for Region {}
// SAFETY: a region only describes where memory is; reading that from two threads is harmless.
unsafe impl Sync for Region {}

impl Region {
    /// Describes memory.
    ///
    /// # Safety
    /// `ptr` is valid for reads and writes of `len` bytes for as long as the region is registered
    /// anywhere, or imported by a peer that reaches it by the kernel (by its device, if it is
    /// [`RegionKind::Device`]), and meanwhile this process touches those bytes only through
    /// atomics, raw pointers or the engine: peers write them at any time. They are ordinary cached
    /// memory, unless they are a device's: a signal does not order what was written before it
    /// through a write-combining mapping.
    pub unsafe fn new(ptr: NonNull<u8>, len: usize, kind: RegionKind) -> Self {
        Region { ptr, len, kind, native_atomics: false }
    }

    /// The same memory, with atomics that one rail of its owner executes ([`Rail::post_atomic`]).
    /// They are not atomic with respect to the processor's, so the engine refuses those: signals,
    /// injects, waits, and atomics of peers that this rail does not reach. Puts, gets and tagged
    /// messages work as elsewhere. The owner may load a word; it must not change one that peers
    /// use.
    ///
    /// [`Rail::post_atomic`]: crate::rail::Rail::post_atomic
    pub fn with_native_atomics(self) -> Self {
        Region { native_atomics: true, ..self }
    }

    /// Whether a rail executes the atomics.
    pub fn has_native_atomics(&self) -> bool {
        self.native_atomics
    }

    /// First byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Private, shared, or a device's.
    pub fn kind(&self) -> RegionKind {
        self.kind
    }
}

/// Bytes of this process that are not registered, for two-sided messages. No peer can name them: a
/// rail copies them into and out of messages, or the kernel copies them by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: what `Span::new` was promised holds for every thread of the process.
unsafe impl Send for Span {}
// SAFETY: a span only describes where memory is; reading that from two threads is harmless.
unsafe impl Sync for Span {}

impl Span {
    /// Describes memory. Needs no alignment.
    ///
    /// # Safety
    /// `ptr` is valid for `len` bytes, in any thread, from each call that takes the span until the
    /// send or receive which that call began has ended: for reads, unchanged, where it is sent; for
    /// reads and writes, and touched by nothing else, where it is received into. Dropping the
    /// engine ends every send and receive.
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Span { ptr, len }
    }

    /// First byte.
    pub const fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Size in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Defines the name of a region: its slot in a table and the generation of that, in one number, so
/// that an address is two numbers, which calls hand over in registers.
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

            /// As a number, for languages without types.
            #[inline(always)]
            pub const fn to_raw(self) -> u64 {
                self.0
            }

            /// The reverse. A number that was never given names no region.
            #[inline(always)]
            pub const fn from_raw(raw: u64) -> Self {
                $id(raw)
            }

            /// The place `offset` bytes into the region.
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
    /// Registered memory of this process, by number.
    LocalId,
    LocalAddr
);
region_id!(
    /// Imported memory of a peer, by number.
    RemoteId,
    RemoteAddr
);

/// A place in registered memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAddr {
    /// The region.
    pub region: LocalId,
    /// Bytes from its start.
    pub offset: u64,
}

/// A place in imported memory of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// The region.
    pub region: RemoteId,
    /// Bytes from its start.
    pub offset: u64,
}

/// Bytes that a peer may be writing meanwhile: copy them out once, then check the copy.
#[derive(Clone, Copy, Debug)]
pub struct Untrusted<'a> {
    ptr: *const u8,
    len: usize,
    bytes: PhantomData<&'a [u8]>,
}

impl<'a> Untrusted<'a> {
    /// A view of memory that a peer can write.
    ///
    /// # Safety
    /// `ptr` is readable for `len` bytes during `'a`.
    #[inline(always)]
    pub unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Untrusted { ptr, len, bytes: PhantomData }
    }

    /// A view of memory that no thread is writing.
    #[inline(always)]
    pub fn from_slice(bytes: &'a [u8]) -> Self {
        Untrusted { ptr: bytes.as_ptr(), len: bytes.len(), bytes: PhantomData }
    }

    /// Size in bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the first bytes out, as many as both sides have, and returns how many that was.
    #[inline(always)]
    pub fn copy_out(&self, into: &mut [u8]) -> usize {
        let n = self.len.min(into.len());
        // SAFETY: `n` is within both; `into` is exclusive, so the two do not overlap. A raw copy
        // does not require that the source stays unchanged.
        unsafe { copy_bytes(self.ptr, into.as_mut_ptr(), n) };
        n
    }

    /// The first byte as it is now, or 0 of an empty view.
    #[inline(always)]
    pub fn first(&self) -> u8 {
        // SAFETY: not empty, and readable as `new` requires;
        // volatile, as it may change at any time.
        if self.len == 0 { 0 } else { unsafe { self.ptr.read_volatile() } }
    }

    /// Splits the view after `n` bytes, or `None` when it is shorter.
    #[inline(always)]
    pub fn split_at(self, n: usize) -> Option<(Self, Self)> {
        if n > self.len {
            return None;
        }
        // SAFETY: `n <= len`, so both parts lie inside the bytes that `new` was promised.
        unsafe { Some((Self::new(self.ptr, n), Self::new(self.ptr.add(n), self.len - n))) }
    }

    /// First byte.
    #[inline(always)]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }
}
