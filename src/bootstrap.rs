//! Connects two processes over TCP before any rail works (out-of-band setup).
//!
//! One side listens, and the other connects. Each side sends its [`Card`]. [`Card::agree`] pairs
//! the rails, or reports why they do not match.
//!
//! Then the [`Wire`] exchanges the caller's messages, such as region handles.
//!
//! All calls are setup: they allocate, and block at most until their deadline. While a wire waits,
//! it calls the caller's closure, so that the caller can poll a rail with manual progress. Received
//! lengths are checked before anything is stored, and every field is validated. A wire that stays
//! open reports the death of the peer's process at once.
//!
//! Nothing is encrypted or authenticated. Use this only among hosts that trust each other.

mod card;
#[doc(hidden)]
pub mod fuzzing;
mod meet;
#[cfg(test)]
mod tests;
mod wire;

pub(crate) use card::random_id;
pub use card::{Agreement, Card, RailCard};
pub use meet::{Listener, connect, over};
pub use wire::{Lifeline, Wire};

use std::fmt;

use crate::topology::Mismatch;

/// Version of the protocol. It must be the same on both sides.
pub const WIRE_VERSION: u16 = 3;

/// Maximum message size in bytes.
pub const MESSAGE_MAX: usize = 64 << 10;

/// The reason why two processes did not connect, or why they lost the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BootstrapError {
    /// The address is not HOST:PORT, or its host name cannot be resolved.
    Address,
    /// A system call failed with this errno.
    System(i32),
    /// The deadline expired.
    Deadline,
    /// The peer closed the connection, or its process ended.
    HungUp,
    /// The caller's closure stopped the wait.
    Stopped,
    /// The peer does not speak this protocol.
    Stranger,
    /// The peer uses another protocol version.
    Version {
        /// The peer's version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },
    /// A message exceeds the maximum size.
    TooLong {
        /// The size in the message's header, in bytes.
        len: u64,
        /// The maximum size in bytes.
        max: usize,
    },
    /// A received card has an invalid field.
    BadCard(&'static str),
    /// A setting that must be the same on both sides differs.
    Differs {
        /// The name of the setting.
        what: &'static str,
        /// The peer's value.
        theirs: u64,
        /// Our value.
        ours: u64,
    },
    /// The rails cannot be paired.
    Rails(Mismatch),
    /// Two paired rails belong to different providers.
    Providers {
        /// The number of our rail in our engine.
        ours: u8,
        /// The number of the peer's rail in its engine.
        theirs: u8,
    },
}

impl fmt::Display for BootstrapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BootstrapError::Address => f.write_str(
                "invalid address: not HOST:PORT, or the host name cannot be resolved; \
                 pass HOST:PORT",
            ),
            BootstrapError::System(code) => {
                write!(f, "{}", std::io::Error::from_raw_os_error(*code))
            }
            BootstrapError::Deadline => {
                f.write_str("the other side did not answer before the deadline")
            }
            BootstrapError::HungUp => f.write_str("the other side closed the connection"),
            BootstrapError::Stopped => f.write_str("the caller cancelled the wait"),
            BootstrapError::Stranger => {
                f.write_str("the program at this address is not fishplate; check HOST:PORT")
            }
            BootstrapError::Version { theirs, ours } => {
                write!(
                    f,
                    "the other side speaks version {theirs}, and this side version {ours}; run the \
                     same build on both sides"
                )
            }
            BootstrapError::TooLong { len, max } => {
                write!(f, "message too long: {len} bytes given; send at most {max}")
            }
            BootstrapError::BadCard(field) => write!(f, "the other side sent an invalid {field}"),
            BootstrapError::Differs { what, theirs, ours } => {
                write!(
                    f,
                    "different {what}: {theirs} on the other side, {ours} here; use the same value"
                )
            }
            BootstrapError::Rails(mismatch) => mismatch.fmt(f),
            BootstrapError::Providers { ours, theirs } => write!(
                f,
                "rail {ours} here and rail {theirs} on the other side belong to different \
                 providers; use the same provider"
            ),
        }
    }
}

impl std::error::Error for BootstrapError {}
