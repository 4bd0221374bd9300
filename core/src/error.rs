//! Errors: one small `Copy` enum per phase, for posting, completing, attaching and waiting.
//!
//! Each error states what did *not* happen, and `Display` makes it a sentence. Codes of a provider
//! or the system stay raw. Nothing here allocates.

mod display;

use crate::bytes::Short;
use crate::mem::{PeerId, RailId};

/// Why a rail refused a post. Nothing was posted and nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The queue is full for now. Poll, then post again.
    Again,
    /// The post is longer than the rail can carry.
    TooLong {
        /// Requested length, in bytes.
        len: usize,
        /// The limit of [`Caps`](crate::rail::Caps), in bytes.
        max: usize,
    },
    /// The key names no memory that the peer exports on this rail, or the range is outside that
    /// memory.
    BadKey,
    /// The peer is not connected on this rail, or has failed.
    PeerDown,
    /// The rail does not support this operation.
    Unsupported,
    /// The provider failed with this code.
    Provider(i32),
}

/// Why an accepted post failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompleteError {
    /// The post failed, and no part of it will land later. Contains the provider's code.
    Failed(i32),
    /// The peer failed or was detached. The local memory may be reused. After a
    /// [detach](crate::rail::Rail::detach) the post no longer lands. If the peer has failed,
    /// [`PeerError::is_gone`] says whether sent data may still land.
    PeerDown,
    /// The post failed but may still land, so the buffer must not be reused. Contains the
    /// provider's code.
    Unknown(i32),
}

/// Why a peer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerError {
    /// The peer's process has ended.
    Died,
    /// Either side has closed the connection in an orderly way, or is closing it. Also: the peer
    /// closed its node, or its process ended, before it connected.
    Closed,
    /// The peer violated the protocol in a message or in shared memory, and is quarantined.
    Protocol(Violation),
    /// A rail reported an error that leaves a hole in the stream.
    Rail(RailId),
    /// A rail refused the first posts to the peer, because the peer is not attached to it. Attach
    /// the peer to the rail before
    /// [`connect_peer`](crate::engine::Engine::connect_peer).
    Unattached(RailId),
    /// The connection broke. The peer's process may be alive.
    Lost,
    /// The peer made no progress before the deadline. Its process may be alive. As the reason of
    /// [`Engine::rail_error`](crate::engine::Engine::rail_error): on this rail, before the deadline
    /// or while the peer answered over other rails.
    Silent,
    /// This process has removed the peer. The peer's process may be alive.
    Removed,
    /// The peer has attached this process again, which ended the current attachment.
    Reattached,
}

impl PeerError {
    /// Returns whether the peer applies no more operations, so that no sent data can land later.
    pub const fn is_gone(self) -> bool {
        matches!(self, PeerError::Died | PeerError::Closed)
    }
}

impl From<Violation> for PeerError {
    fn from(violation: Violation) -> Self {
        PeerError::Protocol(violation)
    }
}

/// How a peer violated the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A message is shorter or longer than its kind requires.
    Length,
    /// A message kind, operation or width does not exist.
    Kind,
    /// A sequence number is outside the receive window, or repeated.
    Sequence,
    /// An acknowledgement names a number that was never sent.
    Ack,
    /// An address is misaligned, or outside the region that it names.
    Bounds,
    /// A region was never registered, or was deregistered.
    Region,
    /// A context number is not configured here.
    Context,
    /// A ring counter has a value that no correct peer writes.
    Counter,
    /// A reply answers no request.
    Reply,
    /// The peer sent more messages or requests than this side allows, or returned credits that were
    /// never used.
    Credit,
}

impl From<Short> for Violation {
    #[inline(always)]
    fn from(_: Short) -> Self {
        Violation::Length
    }
}

/// Why memory, a peer or a rail could not be attached. Nothing was attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttachError {
    /// The table with this name is full. If its size is a setting, the name is that of the setting,
    /// such as `memory.peers` or `ShmConfig::max_regions`. Other tables have a fixed size, and the
    /// name includes the remedy.
    Full(&'static str),
    /// The buffer is shorter than the handle to be written.
    BufferTooShort {
        /// Length of the buffer, in bytes.
        len: usize,
        /// Length of the handle, in bytes.
        least: usize,
    },
    /// The bytes are not a Fishplate handle, or are truncated.
    BadHandle,
    /// The handle or the peer has another version.
    Version {
        /// The version of the handle or peer.
        theirs: u16,
        /// The version of this build.
        ours: u16,
    },
    /// The region is empty, or exceeds its allocation or the address space.
    BadRange,
    /// The region's address is not a multiple of 8.
    Misaligned,
    /// The peer was never connected, or was removed.
    UnknownPeer,
    /// The peer is not attached to this rail, or the rail has lost it.
    Unattached(RailId),
    /// The region was never registered, or was deregistered.
    UnknownRegion,
    /// No rail supports this kind of memory, or its native atomics. Failover does not support
    /// native atomics, and supports device memory only if all rails to the peer reach it or its
    /// data can travel in messages.
    Unsupported,
    /// The peer has not announced the memory in time.
    Unheard,
    /// The region is still in use. End that use first.
    InUse(Use),
    /// A configuration value or an argument is invalid. The text names it, and says what is
    /// allowed.
    Config(&'static str),
    /// Memory lent at setup is too short.
    Memory {
        /// The field, and the formula of its length.
        what: &'static str,
        /// The number of entries lent.
        len: usize,
        /// The number of entries needed.
        least: usize,
    },
    /// The system or the provider failed with this code.
    System(i32),
    /// The region is deregistered, but the provider or the device still holds its memory, so never
    /// reuse it. Contains the error code.
    Kept(i32),
}

/// A use of a region that prevents the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// Operations that have not completed. They complete with progress, or when their peer fails.
    Operations,
    /// Receives that are posted or in flight. They complete with a message, or when they are
    /// cancelled.
    Receives,
    /// Posts that this rail has not completed, or has completed as unknown. An incomplete post
    /// completes with progress. An unknown post uses its memory until the rail is dropped.
    Posts(RailId),
    /// An import of the region in this process, which maps it at its own address. Release that
    /// import.
    Import,
    /// The region is in the segment that this process shares with the peer to be removed.
    /// Deregister it.
    Common,
}

/// Why an operation was refused. Nothing was posted and nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpError {
    /// A window, queue or pool is full for now. Make progress, then try again.
    Again,
    /// The context number is not configured.
    UnknownContext,
    /// The peer was never connected, or was removed.
    UnknownPeer,
    /// The region was never registered or imported, or was released.
    UnknownRegion,
    /// The range does not lie inside its region.
    OutOfBounds {
        /// Requested offset, in bytes.
        offset: u64,
        /// Requested length, in bytes.
        len: u64,
        /// Size of the region, in bytes.
        size: u64,
    },
    /// The region is device memory, which the processor cannot access, so injects are refused. To
    /// wait for a word in it, use
    /// [`wait_signal_anywhere`](crate::engine::Engine::wait_signal_anywhere).
    DeviceMemory,
    /// A rail of the region's owner executes its atomics. Signals, injects and waits are refused in
    /// such a region. Atomics are refused unless they use that rail.
    NativeAtomics,
    /// The address of a signal or atomic is not a multiple of its width.
    Misaligned {
        /// The requested offset, in bytes.
        offset: u64,
        /// The width of the operation, in bytes.
        width: u8,
    },
    /// The given width is not 1, 2, 4 or 8 bytes.
    BadWidth(u8),
    /// Data and signal are in regions of different peers.
    TwoPeers,
    /// The data are longer than this call can carry.
    TooLong {
        /// Requested length, in bytes.
        len: usize,
        /// Maximum length, in bytes.
        max: usize,
    },
    /// The peer has failed. Remove it.
    PeerFailed(PeerError),
    /// The token names no operation in flight: its completion was taken, or the operation never
    /// existed.
    StaleToken,
    /// A rail refused the operation permanently.
    Rail(RailId, PostError),
    /// Tagged messages are not set up. Call
    /// [`Engine::attach_matching`](crate::engine::Engine::attach_matching) first.
    NoMatching,
    /// The tag or the mask has bits beyond the configured width.
    TagTooWide,
    /// A put of bytes copies them first, so no completion can report their arrival.
    Unreported,
    /// The thread that drives the engine for its program has panicked. The outcome of earlier
    /// operations is unknown, so their memory must not be reused.
    Abandoned,
}

/// Why a wait ended before the awaited event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline expired. The value describes the outstanding operation.
    Deadline(Stuck),
    /// The awaited peer has failed.
    PeerFailed(PeerId, PeerError),
    /// This many silent operations failed since the last quiet. The peer itself is alive.
    Failed(u32),
    /// The wait was called with invalid arguments.
    Op(OpError),
}

/// What an expired wait waited for. The default describes a wait about which nothing is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Stuck {
    /// Whether the wait was for operations of this side, or for an arrival.
    pub awaits: Awaited,
    /// The peer with the oldest outstanding operation, or the peer from which an arrival is
    /// missing. `None` if it is not known.
    pub peer: Option<PeerId>,
    /// For operations: a rail with an incomplete post to that peer, or `None` if the peer's
    /// acknowledgement is missing. For an arrival: the rail to that peer, or `None` if several
    /// rails reach it.
    pub rail: Option<RailId>,
    /// For operations: the first sequence number that was sent to that peer and not acknowledged.
    /// For an arrival: the first number that has not arrived.
    pub hole: Option<u64>,
    /// Whether the peer has never answered since it was connected here. In that case nothing was
    /// sent to it yet.
    pub unanswered: bool,
}

/// What a wait waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Awaited {
    /// Operations of this side: their completion or acknowledgement.
    #[default]
    Completion,
    /// A signal in a word of this side.
    Signal,
    /// A tagged message.
    Message,
}

impl From<Short> for AttachError {
    fn from(_: Short) -> Self {
        AttachError::BadHandle
    }
}

/// The peers that a shutdown could not close before its deadline. All other peers are closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The peer that is furthest from closed, or the first of several such peers.
    pub peer: PeerId,
    /// Number of peers that did not close.
    pub peers: u16,
    /// Why this peer did not close.
    pub missing: Missing,
}

/// Why a connection is not closed. The smallest value is furthest from closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Missing {
    /// Operations to the peer are incomplete: it has not applied them, has not received a message,
    /// or has never answered. Or one of its messages has matched here, and the payload is in
    /// flight.
    Operations,
    /// All operations are complete, but our Bye message is not sent, or the peer has not
    /// acknowledged our answer to one of its messages.
    Bye,
    /// Our Bye message is sent, but the peer has not sent its own.
    Answer,
}

impl From<OpError> for WaitError {
    fn from(error: OpError) -> Self {
        WaitError::Op(error)
    }
}
