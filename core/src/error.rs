//! What can go wrong, one small `Copy` enum per phase: posting, completing, attaching, waiting.
//!
//! Each says what did *not* happen, and reads as a sentence (`Display`). Codes of a provider or the
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
    /// Longer than the rail carries in one post, in bytes.
    TooLong {
        /// What was asked, in bytes.
        len: usize,
        /// What [`Caps`](crate::rail::Caps) allows, in bytes.
        max: usize,
    },
    /// The key names no memory that the peer exports on this rail, or the range lies outside of it.
    BadKey,
    /// The peer is not connected on this rail, or has failed.
    PeerDown,
    /// The rail does not offer this verb.
    Unsupported,
    /// The provider's own code.
    Provider(i32),
}

/// How a post that was accepted went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CompleteError {
    /// It failed, and nothing of it lands later. The provider's own code.
    Failed(i32),
    /// The peer failed or was detached, and with it the operation. The local memory may be reused.
    /// Whether something that was sent can still land depends on the peer: see
    /// [`PeerError::is_gone`].
    PeerDown,
    /// It failed and may still land: the buffer must not be reused. The provider's own code.
    Unknown(i32),
}

/// Why a peer was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerError {
    /// The process at the other end is gone.
    Died,
    /// The connection was closed in good order, or is being closed, by either end.
    Closed,
    /// It broke the protocol in a message or in shared memory: it is quarantined.
    Protocol(Violation),
    /// A rail reported an error that leaves a hole in the stream.
    Rail(RailId),
    /// The connection to it broke, or it did not answer before the deadline. Its process may live.
    Lost,
    /// It was removed here. Its process may live.
    Removed,
    /// It has attached this process again, so the attachment in use here has ended.
    Reattached,
}

impl PeerError {
    /// Whether the peer applies nothing any more, so that nothing sent to it can land later.
    pub const fn is_gone(self) -> bool {
        matches!(self, PeerError::Died | PeerError::Closed)
    }
}

/// What a peer did that no correct peer does.
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
    /// A region that is not registered, or no longer.
    Region,
    /// A context number that is not configured here.
    Context,
    /// A ring counter that no correct peer can have written.
    Counter,
    /// A reply to nothing.
    Reply,
    /// More messages than the receiver has promised room for, or credits that were never used.
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
    /// The table for it, sized at setup, is full.
    Full,
    /// Not a handle of this project, or one cut short.
    BadHandle,
    /// A handle or a peer of another version.
    Version {
        /// Theirs.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// An empty region, or one whose end lies beyond the address space.
    BadRange,
    /// A region whose first byte is not at a multiple of 8.
    Misaligned,
    /// The peer is not known, or no longer.
    UnknownPeer,
    /// The region is not known, or no longer.
    UnknownRegion,
    /// The rail cannot serve such memory.
    Unsupported,
    /// The peer has not said where it is: not in time, or not yet.
    Unheard,
    /// The region is in use, by this; it must end first.
    InUse(Use),
    /// A configuration value out of range.
    Config(&'static str),
    /// The system's or the provider's own code.
    System(i32),
    /// The region is deregistered, but the provider or the device, whose code this is, still holds
    /// its memory: never reuse it.
    Kept(i32),
}

/// What still uses a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// Operations that were issued and have not ended. They do after progress, or with their peer.
    Operations,
    /// Receives that are posted or under way. They end with a message, or are cancelled.
    Receives,
    /// Posts that this rail has not finished, or whose end it does not know. The former end after
    /// progress; the latter keep their memory as long as the rail is there.
    Posts(RailId),
    /// An import of it by this process, which maps it at its own address. Release that.
    Import,
    /// It lies in the segment that this process and the peer to be removed have in common.
    /// Deregister it.
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
    /// The peer is not known, or no longer.
    UnknownPeer,
    /// The region is not registered, not imported, or no longer.
    UnknownRegion,
    /// The range does not lie inside its region, in bytes.
    OutOfBounds {
        /// First byte asked for.
        offset: u64,
        /// Length asked for, in bytes.
        len: u64,
        /// Size of the region, in bytes.
        size: u64,
    },
    /// Device memory, which the processor cannot touch:
    /// no signals, atomics, injected bytes or waits there.
    DeviceMemory,
    /// A rail of the region's owner executes its atomics: no signals, injected bytes or waits
    /// there, and no atomics where that rail does not lead here.
    NativeAtomics,
    /// The address of a signal or atomic is not a multiple of its width, in bytes.
    Misaligned {
        /// The offset asked for.
        offset: u64,
        /// The width of the operation, in bytes.
        width: u8,
    },
    /// Not a width of 1, 2, 4 or 8 bytes.
    BadWidth(u8),
    /// Data and signal lie in regions of different peers.
    TwoPeers,
    /// Longer than this call can carry, in bytes.
    TooLong {
        /// What was asked, in bytes.
        len: usize,
        /// What fits, in bytes.
        max: usize,
    },
    /// The peer has failed: remove it.
    PeerFailed(PeerError),
    /// The token names no operation in flight: it was completed and taken, or never given.
    StaleToken,
    /// A rail refused for good.
    Rail(RailId, PostError),
    /// Tagged messages need [`Engine::attach_matching`](crate::engine::Engine::attach_matching).
    NoMatching,
    /// The tag or the mask has bits beyond the width chosen at setup.
    TagTooWide,
    /// The bytes are copied on the way, so no completion reports their arrival.
    Unreported,
    /// The thread that drives the engine for its program has panicked. Whether what was begun
    /// before is done is not known, so its memory must not be reused.
    Abandoned,
}

/// Why a wait ended without what it waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitError {
    /// The time given has passed; this is what was outstanding.
    Deadline(Stuck),
    /// The peer waited for has failed.
    PeerFailed(PeerId, PeerError),
    /// This many operations without reports failed since the last quiet; the peer itself is well.
    Failed(u32),
    /// The wait itself was asked wrongly.
    Op(OpError),
}

/// What a wait that ran out of time was waiting for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Stuck {
    /// The peer with the oldest outstanding operation, if any operation is outstanding.
    pub peer: Option<PeerId>,
    /// The rail with a post to it that has not completed, if there is one; otherwise the peer's
    /// acknowledgement is missing. On a wait for what a peer sends: the rail that it must come by,
    /// if only one reaches that peer.
    pub rail: Option<RailId>,
    /// Sent to that peer and not acknowledged: the first sequence number. On a wait for what a peer
    /// sends: the first number missing here.
    pub hole: Option<u64>,
    /// That peer has not answered since it was connected here, so nothing was sent to it yet.
    pub unanswered: bool,
}

impl From<Short> for AttachError {
    fn from(_: Short) -> Self {
        AttachError::BadHandle
    }
}

/// What a shutdown has not finished before its deadline. Everything else is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The first peer that has not left.
    pub peer: PeerId,
    /// How many peers have not.
    pub peers: u16,
    /// What is missing of the first.
    pub missing: Missing,
}

/// What keeps a connection from being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// Operations to the peer have not ended: it has not applied them, not received a message, or
    /// never answered. Or a message of it has matched here and its payload is still on its way.
    Operations,
    /// All of that is done, and the peer has not said goodbye.
    Answer,
}

impl From<OpError> for WaitError {
    fn from(error: OpError) -> Self {
        WaitError::Op(error)
    }
}
