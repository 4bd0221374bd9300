//! Checks the arguments of commands.

use core::{error::Error, fmt};

use crate::engine::command::Command;

/// Why a command could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandError {
    /// There are no bytes to move.
    Empty,
    /// The pattern does not have 1, 2, 4 or 8 bytes, or does not fill the memory a whole number of
    /// times.
    Pattern {
        /// Bytes of the pattern.
        width: u8,
        /// Bytes to fill.
        len: usize,
    },
    /// It already waits for the maximum number of events.
    TooManyEvents,
    /// The receive to be cancelled belongs to another queue.
    OtherQueue,
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("no bytes to move"),
            Self::Pattern { width, len } => {
                write!(f, "a pattern of {width} bytes does not divide {len} bytes; use a multiple")
            }
            Self::TooManyEvents => f.write_str("too many events: a command waits for at most four"),
            Self::OtherQueue => f.write_str("the receive belongs to another queue"),
        }
    }
}

impl Error for CommandError {}

/// Checks that the arguments of a command are valid.
#[inline]
pub(super) fn check(command: &Command) -> Result<(), CommandError> {
    match *command {
        Command::Put { len, .. }
        | Command::Get { len, .. }
        | Command::Copy { len, .. }
        | Command::PeerCopy { len, .. }
        | Command::Fill { len, .. }
            if len == 0 =>
        {
            Err(CommandError::Empty)
        }
        Command::Fill { len, width, .. }
            if !matches!(width, 1 | 2 | 4 | 8) || !len.is_multiple_of(width.into()) =>
        {
            Err(CommandError::Pattern { width, len })
        }
        // A bare slot number does not identify its queue: see `Queue::cancel`.
        Command::Cancel { .. } => Err(CommandError::OtherQueue),
        _ => Ok(()),
    }
}
