//! The commands that a queue takes, one type each:
//! arguments have names and are checked on creation.

use core::{error::Error, fmt};

use crate::engine::Signal;
use crate::engine::command::Command;
use crate::engine::tag::Tag;
use crate::mem::{LocalAddr, PeerId, RemoteAddr};

mod sealed {
    pub trait Sealed {}
}

/// A kind of command. The kinds are those of this module.
pub trait QueueCommand: sealed::Sealed + Copy + Send {
    /// What the worker will do, if the arguments make sense.
    ///
    /// # Errors
    /// [`CommandError`].
    fn command(self) -> Result<Command, CommandError>;
}

/// Why a command could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandError {
    /// There are no bytes to move.
    Empty,
    /// A pattern has 1, 2, 4 or 8 bytes, and fills memory a whole number of times.
    Pattern {
        /// Bytes of the pattern.
        width: u8,
        /// Bytes to fill.
        len: usize,
    },
    /// It comes after as many events as it can.
    TooManyEvents,
    /// The receive to be taken back is not one of this queue.
    OtherQueue,
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("no bytes to move"),
            Self::Pattern { width, len } => write!(f, "a pattern of {width} bytes does not fill {len} bytes"),
            Self::TooManyEvents => f.write_str("a command comes after four events at most"),
            Self::OtherQueue => f.write_str("a receive of another queue"),
        }
    }
}

impl Error for CommandError {}

/// Reads a peer's memory: a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadCommand {
    /// The source.
    pub from: RemoteAddr,
    /// Bytes.
    pub len: usize,
    /// The target.
    pub into: LocalAddr,
}

/// Writes to a peer's memory: a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteCommand {
    /// The source.
    pub from: LocalAddr,
    /// Bytes.
    pub len: usize,
    /// The target.
    pub to: RemoteAddr,
}

/// Repeats a pattern over memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FillCommand {
    /// The target.
    pub at: LocalAddr,
    /// Bytes, a multiple of `width`.
    pub len: usize,
    /// The pattern; its low `width` bytes count, lowest first.
    pub pattern: u64,
    /// Bytes of the pattern: 1, 2, 4 or 8.
    pub width: u8,
}

/// Copies within this process. The ranges do not overlap, or the target begins before the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyCommand {
    /// The source.
    pub from: LocalAddr,
    /// Bytes.
    pub len: usize,
    /// The target.
    pub to: LocalAddr,
}

/// Copies from one peer's memory to another's, by way of this process.
/// What follows in the queue waits behind the first half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCopyCommand {
    /// The source.
    pub from: RemoteAddr,
    /// Where the bytes pass through; not to be touched until the command has ended.
    pub via: LocalAddr,
    /// Bytes.
    pub len: usize,
    /// The target.
    pub to: RemoteAddr,
}

/// Done when every command before it in its queue has ended. What follows waits behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkerCommand;

/// Writes to a peer's memory, and then a signal that nobody there sees before the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutSignalCommand {
    /// The source.
    pub from: LocalAddr,
    /// Bytes.
    pub len: usize,
    /// The target.
    pub to: RemoteAddr,
    /// The signal that follows.
    pub signal: Signal,
}

/// Sends a tagged message. Its memory stays as it is until the command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendCommand {
    /// The receiver.
    pub to: PeerId,
    /// The tag.
    pub tag: Tag,
    /// The payload and its length in bytes; without it, none.
    pub from: Option<(LocalAddr, usize)>,
    /// Whether it ends only once it has matched.
    pub sync: bool,
}

/// Receives a tagged message; ends as [`Reply::Received`](crate::engine::command::Reply::Received).
/// A receive that nothing matches does not end, nor does a marker behind it, before it is [taken
/// back](super::Queue::cancel).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvCommand {
    /// The sender, or anybody.
    pub source: Option<PeerId>,
    /// The tag,
    pub tag: Tag,
    /// and the bits of it that are not compared.
    pub ignore: Tag,
    /// The buffer and its length in bytes; without it, none.
    pub into: Option<(LocalAddr, usize)>,
}

fn some_bytes(len: usize) -> Result<(), CommandError> {
    if len == 0 { Err(CommandError::Empty) } else { Ok(()) }
}

impl sealed::Sealed for ReadCommand {}
impl QueueCommand for ReadCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { from, len, into } = self;
        some_bytes(len).map(|()| Command::Get { into, len, from })
    }
}

impl sealed::Sealed for WriteCommand {}
impl QueueCommand for WriteCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { from, len, to } = self;
        some_bytes(len).map(|()| Command::Put { from, len, to })
    }
}

impl sealed::Sealed for FillCommand {}
impl QueueCommand for FillCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { at, len, pattern, width } = self;
        some_bytes(len)?;
        match width {
            1 | 2 | 4 | 8 if len.is_multiple_of(width.into()) => {
                Ok(Command::Fill { at, len, pattern, width })
            }
            _ => Err(CommandError::Pattern { width, len }),
        }
    }
}

impl sealed::Sealed for CopyCommand {}
impl QueueCommand for CopyCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { from, len, to } = self;
        some_bytes(len).map(|()| Command::Copy { from, len, to })
    }
}

impl sealed::Sealed for PeerCopyCommand {}
impl QueueCommand for PeerCopyCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { from, via, len, to } = self;
        some_bytes(len).map(|()| Command::PeerCopy { from, via, len, to })
    }
}

impl sealed::Sealed for MarkerCommand {}
impl QueueCommand for MarkerCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        Ok(Command::Marker)
    }
}

impl sealed::Sealed for PutSignalCommand {}
impl QueueCommand for PutSignalCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { from, len, to, signal } = self;
        Ok(Command::PutSignal { from, len, to, signal })
    }
}

impl sealed::Sealed for SendCommand {}
impl QueueCommand for SendCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { to, tag, from, sync } = self;
        Ok(Command::Send { to, tag, from, sync })
    }
}

impl sealed::Sealed for RecvCommand {}
impl QueueCommand for RecvCommand {
    #[inline]
    fn command(self) -> Result<Command, CommandError> {
        let Self { source, tag, ignore, into } = self;
        Ok(Command::Recv { source, tag, ignore, into })
    }
}
