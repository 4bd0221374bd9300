//! The values that a rail and its owner exchange.

use core::ptr::NonNull;

#[cfg(doc)]
use super::{Rail, Sink};
#[cfg(doc)]
use crate::error::PostError;
#[cfg(doc)]
use crate::mem::Region;
use crate::op::AmoSet;

/// How much of the posting order to one peer a rail keeps. Each level includes the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// The rail preserves no order.
    None,
    /// Messages and completion words are reported in posting order. The bytes of a write may land
    /// before messages that were posted earlier are reported, as in memory that the origin has
    /// mapped.
    Reports,
    /// The bytes of a write also land only after everything posted earlier.
    All,
}

/// The capabilities of a rail. They never change once the rail exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Maximum length of a message in bytes. At least 256. The engine's headers take at most 48
    /// bytes of a message. Headers of tagged messages take at most 72 bytes, plus 16 bytes for each
    /// rail to the peer.
    pub max_message: usize,
    /// Maximum length of a single write or read, in bytes. At least 256.
    pub max_rma: usize,
    /// Maximum length of a write that the rail copies before the post returns, in bytes. Such a
    /// write may be [`Posted::Pending`]. Does not apply to sources in device memory.
    pub inject: usize,
    /// Number of bytes of remote completion data in a write: 4 or 8. The engine uses 4.
    pub data_bytes: u8,
    /// How much of the posting order to one peer the rail preserves.
    pub order: Order,
    /// The atomics that [`Rail::post_atomic`] executes. The engine uses them for regions [with
    /// native atomics](Region::with_native_atomics).
    pub native_atomics: AmoSet,
    /// Upper bound of the outstanding posts to one peer. Posts may return [`PostError::Again`]
    /// earlier.
    pub depth: u32,
    /// Whether both sides separate the attachments of a peer: a post of one attachment is never
    /// reported in a later attachment. The engine relies on this and adds no check.
    pub fresh: bool,
    /// Whether the rail can [fence](Rail::fence) a peer that is alive. If so, the engine may fence
    /// a rail that delivers nothing for some time.
    pub fences: bool,
}

/// Whether a post has already completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The post is complete. The local memory may be reused, and [`Sink::done`] is not called.
    Done,
    /// [`Sink::done`] will report the completion.
    Pending,
}

/// Maximum length of the address that [`Rail::reopen`] writes, in bytes.
pub const REOPEN_MAX: usize = 112;

/// The progress of [`Rail::fence`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The rail and the peer are cut off from each other.
    Fenced,
    /// Operations may still land. Call again after the next poll.
    Pending,
    /// The rail cannot rule out that operations still land, so the peer must fail.
    Unknown,
}

/// Memory of this process that a post reads or fills.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// Pointer to the first byte.
    pub ptr: NonNull<u8>,
    /// Size in bytes.
    pub len: usize,
    /// The descriptor that [`Rail::register`] returned, or 0.
    pub desc: u64,
}

impl Local {
    /// Returns whether this memory overlaps the `len` bytes at `ptr`.
    pub fn overlaps(&self, ptr: *const u8, len: usize) -> bool {
        let (start, other) = (self.ptr.as_ptr().addr(), ptr.addr());
        start < other.saturating_add(len) && other < start.saturating_add(self.len)
    }
}

/// Memory of a peer that a post reads or fills: the key of its registration, and an offset into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The key that [`Rail::register`] returned at the peer.
    pub key: RailKey,
    /// Offset from the start of the region, in bytes.
    pub offset: u64,
}

/// The key that registration returns, for use by peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RailKey {
    /// Identifies the region to the rail on both sides.
    pub key: u64,
    /// The provider's address of the region's first byte, or 0 if offsets count from 0.
    pub base: u64,
}

impl RailKey {
    /// The key of device memory that a rail does not reach, although it was registered. The rail
    /// refuses to import it, and to post from or to it, as unsupported. Other rails may reach the
    /// memory.
    pub const ELSEWHERE: RailKey = RailKey { key: u64::MAX, base: u64::MAX };
}
