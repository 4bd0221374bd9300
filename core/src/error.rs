//! Errors: one small `Copy` enum per phase, for posting, completing, attaching and waiting.
//!
//! Each states what did *not* happen, and `Display` makes it a sentence. Codes of a provider or the
//! system are kept raw. Nothing here allocates.

mod display;

use crate::bytes::Short;
use crate::mem::{PeerId, RailId};

/// Why a rail refused a post. Nothing was posted and nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The queue is full for now: poll, then post again.
    Again,
    /// Longer than the rail can carry in one post, in bytes.
    TooLong {
        /// Requested length, in bytes.
        len: usize,
        /// The limit of [`Caps`](crate::rail::Caps), in bytes.
        max: usize,
    },
    /// The key names no memory that the peer exports on this rail, or the range is outside of it.
    BadKey,
    /// The peer is not connected on this rail, or has failed.
    PeerDown,
    /// The rail does not offer this verb.
    Unsupported,
    /// The provider's own code.
    Provider(i32),
}

/// Why an accepted post failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompleteError {
    /// It failed, and nothing of it will land later. The provider's own code.
    Failed(i32),
    /// The peer failed or was detached, so the operation failed. The local memory may be reused.
    /// Whether something that was sent can still land depends on the peer: see
    /// [`PeerError::is_gone`].
    PeerDown,
    /// It failed but may still land, so the buffer must not be reused. The provider's own code.
    Unknown(i32),
}

/// Why a peer was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerError {
    /// The process at the other end is gone.
    Died,
    /// Either end has closed the connection in good order, or is closing it.
    Closed,
    /// It broke the protocol in a message or in shared memory: it is quarantined.
    Protocol(Violation),
    /// A rail reported an error that leaves a hole in the stream.
    Rail(RailId),
    /// The connection broke, or the peer did not answer before the deadline. Its process may be
    /// alive.
    Lost,
    /// It was removed here. Its process may be alive.
    Removed,
    /// It has attached this process again, so the current attachment has ended.
    Reattached,
}

impl PeerError {
    /// Returns whether the peer applies nothing any more, so that nothing sent to it can land
    /// later.
    pub const fn is_gone(self) -> bool {
        matches!(self, PeerError::Died | PeerError::Closed)
    }
}

impl From<Violation> for PeerError {
    fn from(violation: Violation) -> Self {
        PeerError::Protocol(violation)
    }
}

/// A violation of the protocol by a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Violation {
    /// A message shorter or longer than its kind.
    Length,
    /// A message kind, operation or width that does not exist.
    Kind,
    /// A sequence number outside the receive window, or seen before.
    Sequence,
    /// An acknowledgement of something never sent.
    Ack,
    /// An address outside the region it names, or a misaligned one.
    Bounds,
    /// A region that is not registered, or not any more.
    Region,
    /// A context number that is not configured here.
    Context,
    /// A ring counter that no correct peer can have written.
    Counter,
    /// A reply to no request.
    Reply,
    /// More messages than the receiver has room for, or a return of credits that were never used.
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
    /// The table is full. Its size was set at set-up.
    Full,
    /// The bytes are not a handle of this project, or are truncated.
    BadHandle,
    /// A handle or a peer of another version.
    Version {
        /// The peer's version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },
    /// An empty region, or one whose end lies beyond the address space.
    BadRange,
    /// A region whose first byte is not at a multiple of 8.
    Misaligned,
    /// The peer is unknown, or no longer known.
    UnknownPeer,
    /// The region is unknown, or no longer known.
    UnknownRegion,
    /// The rail does not support such memory.
    Unsupported,
    /// The peer has not announced the memory, yet or in time.
    Unheard,
    /// The region is still in use; end this use first.
    InUse(Use),
    /// A configuration value out of range.
    Config(&'static str),
    /// The system's or the provider's own code.
    System(i32),
    /// The region is deregistered, but the provider or the device still holds its memory, so never
    /// reuse it. Its error code.
    Kept(i32),
}

/// What still uses a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// Operations that have not completed. They complete with progress, or when their peer fails.
    Operations,
    /// Receives that are posted or in flight. They end with a message, or are cancelled.
    Receives,
    /// Posts that this rail has not completed, or has completed as unknown. The former complete
    /// with progress; the latter use their memory until the rail is dropped.
    Posts(RailId),
    /// An import of it by this process, which maps it at its own address. Release that import.
    Import,
    /// It is in the segment that this process shares with the peer to be removed. Deregister it.
    Common,
}

/// Why an operation was refused. Nothing was done and nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpError {
    /// A window, queue or pool is full for now: make progress, then try again.
    Again,
    /// The context number is not configured.
    UnknownContext,
    /// The peer is unknown, or no longer known.
    UnknownPeer,
    /// The region is not registered or imported, or not any more.
    UnknownRegion,
    /// The range does not lie inside its region, in bytes.
    OutOfBounds {
        /// Requested offset.
        offset: u64,
        /// Requested length, in bytes.
        len: u64,
        /// Size of the region, in bytes.
        size: u64,
    },
    /// Device memory, which the processor cannot access: no injects there. Wait for a word there by
    /// [`wait_signal_anywhere`](crate::engine::Engine::wait_signal_anywhere).
    DeviceMemory,
    /// A rail of the region's owner executes its atomics. No signals, injects or waits there, and
    /// no atomics unless that rail leads here.
    NativeAtomics,
    /// The address of a signal or atomic is not a multiple of its width, in bytes.
    Misaligned {
        /// The requested offset.
        offset: u64,
        /// The width of the operation, in bytes.
        width: u8,
    },
    /// The width is not 1, 2, 4 or 8 bytes.
    BadWidth(u8),
    /// Data and signal are in regions of different peers.
    TwoPeers,
    /// Longer than this call can carry, in bytes.
    TooLong {
        /// Requested length, in bytes.
        len: usize,
        /// The limit, in bytes.
        max: usize,
    },
    /// The peer has failed: remove it.
    PeerFailed(PeerError),
    /// The token names no operation in flight: its completion was taken, or it never existed.
    StaleToken,
    /// A rail refused the operation permanently.
    Rail(RailId, PostError),
    /// Tagged messages need [`Engine::attach_matching`](crate::engine::Engine::attach_matching).
    NoMatching,
    /// The tag or the mask has bits beyond the configured width.
    TagTooWide,
    /// The bytes are copied in between, so no completion can report their arrival.
    Unreported,
    /// The thread that drives the engine for its program has panicked. The outcome of earlier
    /// operations is unknown, so their memory must not be reused.
    Abandoned,
}

/// Why a wait ended without the awaited event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitError {
    /// The deadline expired; this was outstanding.
    Deadline(Stuck),
    /// The awaited peer has failed.
    PeerFailed(PeerId, PeerError),
    /// This many operations without reports failed since the last quiet. The peer itself is alive.
    Failed(u32),
    /// The wait was called with invalid arguments.
    Op(OpError),
}

/// What an expired wait was waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Stuck {
    /// The peer with the oldest outstanding operation, if any operation is outstanding.
    pub peer: Option<PeerId>,
    /// A rail with an incomplete post to that peer. `None`: the peer's acknowledgement is missing.
    /// For a wait on what a peer sends: the rail that must deliver it, if only one reaches that
    /// peer.
    pub rail: Option<RailId>,
    /// The first sequence number that was sent to that peer and not acknowledged. For a wait on
    /// what a peer sends: the first number missing here.
    pub hole: Option<u64>,
    /// The peer has not answered since it was connected here, so nothing was sent to it yet.
    pub unanswered: bool,
}

impl From<Short> for AttachError {
    fn from(_: Short) -> Self {
        AttachError::BadHandle
    }
}

/// The peers that a shutdown could not close before its deadline. Everything else is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The first peer that has not left.
    pub peer: PeerId,
    /// How many peers have not left.
    pub peers: u16,
    /// What the first peer is missing.
    pub missing: Missing,
}

/// What keeps a connection from being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// Operations to the peer have not completed: it has not applied them, has not received a
    /// message, or has never answered. Or one of its messages has matched here, and the payload is
    /// in flight.
    Operations,
    /// Everything else is complete, but the peer has not sent its Bye.
    Answer,
}

impl From<OpError> for WaitError {
    fn from(error: OpError) -> Self {
        WaitError::Op(error)
    }
}
