//! Checks the arguments of commands.

use core::{error::Error, fmt};

use crate::engine::command::Command;

/// Why a command could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommandError {
    /// The command has no bytes to move.
    Empty,
    /// The pattern does not have 1, 2, 4 or 8 bytes, or the length of the memory is not a multiple
    /// of the pattern's width.
    Pattern {
        /// Width of the pattern in bytes.
        width: u8,
        /// Number of bytes to fill.
        len: usize,
    },
    /// The command already waits for the maximum number of events.
    TooManyEvents,
    /// The receive to be cancelled belongs to another queue.
    OtherQueue,
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the length is 0; give at least 1 byte"),
            Self::Pattern { width, len } => {
                write!(
                    f,
                    "cannot fill {len} bytes with a pattern of {width} bytes; use a width of 1, 2, \
                     4 or 8 that divides the length"
                )
            }
            Self::TooManyEvents => f.write_str("too many events: a command waits for at most 4"),
            Self::OtherQueue => {
                f.write_str("the receive belongs to another queue; cancel it there")
            }
        }
    }
}

impl Error for CommandError {}

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
        // Only `Queue::cancel` makes this command, because a bare slot number does not identify its
        // queue.
        Command::Cancel { .. } => Err(CommandError::OtherQueue),
        _ => Ok(()),
    }
}
