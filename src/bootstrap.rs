//! How two processes on different hosts come to know each other: over TCP, before any rail works.
//!
//! One side listens, the other connects; each sends its [`Card`] (rails with their addresses and
//! speeds, and what of the engine's configuration must be the same), and [`Card::agree`] says which
//! rail talks to which or why it cannot be. The listener hears many at once, so a stranger costs
//! only his own connection. After that the [`Wire`] carries the caller's messages, region handles
//! first, both sides at once: everybody sends one and gets one.
//!
//! All of it is setup: it allocates and blocks, each call until its deadline at the latest. While a
//! wire waits, it calls what the caller gives it, so that a rail without progress of its own gets
//! some. What comes in is checked for length before it is kept, and nothing in it is believed. A
//! wire that is kept open tells at once when the process at the other end dies.
//!
//! Neither encrypted nor authenticated:
//! use it in a network whose hosts trust each other with region handles.

mod card;
#[doc(hidden)]
pub mod fuzzing;
mod meet;
#[cfg(test)]
mod tests;
mod wire;

pub use card::{Agreement, Card, RailCard};
pub use meet::{Listener, connect, over};
pub use wire::{Lifeline, Wire};

use std::fmt;

use crate::topology::Mismatch;

/// What this version speaks. Both sides must speak the same.
pub const WIRE_VERSION: u16 = 2;

/// Longest message, in bytes.
pub const MESSAGE_MAX: usize = 64 << 10;

/// Why two processes did not come together, or lost each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BootstrapError {
    /// Not HOST:PORT, or a host that nobody knows.
    Address,
    /// The system's own code.
    System(i32),
    /// The time given has passed.
    Deadline,
    /// The other side closed the connection, or died.
    HungUp,
    /// The caller ended the wait.
    Stopped,
    /// What is at the other end does not speak this protocol.
    Stranger,
    /// The other side speaks another version of it.
    Version {
        /// Theirs.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// A message longer than allowed, in bytes.
    TooLong {
        /// What it claims to be.
        len: u64,
        /// What is allowed.
        max: usize,
    },
    /// A card that makes no sense: the field.
    BadCard(&'static str),
    /// Both sides must have the same.
    Differs {
        /// What.
        what: &'static str,
        /// Theirs.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
    /// The rails do not fit together.
    Rails(Mismatch),
    /// A rail here, and the rail there that it would talk to, belong to different providers.
    Providers {
        /// Ours.
        ours: u8,
        /// Theirs.
        theirs: u8,
    },
}

impl fmt::Display for BootstrapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BootstrapError::Address => {
                f.write_str("not an address of the form HOST:PORT, or a host that nobody knows")
            }
            BootstrapError::System(code) => write!(f, "{}", std::io::Error::from_raw_os_error(*code)),
            BootstrapError::Deadline => f.write_str("no answer in time"),
            BootstrapError::HungUp => f.write_str("the other side hung up"),
            BootstrapError::Stopped => f.write_str("the wait was ended"),
            BootstrapError::Stranger => f.write_str("what answers there is not fishplate"),
            BootstrapError::Version { theirs, ours } => {
                write!(
                    f,
                    "the other side speaks version {theirs} and this one {ours}: run the same build on both"
                )
            }
            BootstrapError::TooLong { len, max } => {
                write!(f, "a message of {len} bytes, where {max} are allowed")
            }
            BootstrapError::BadCard(field) => write!(f, "the other side says nonsense about its {field}"),
            BootstrapError::Differs { what, theirs, ours } => {
                write!(f, "the other side has {what} {theirs} and this one {ours}: give both the same")
            }
            BootstrapError::Rails(mismatch) => mismatch.fmt(f),
            BootstrapError::Providers { ours, theirs } => write!(
                f,
                "rail {ours} here and rail {theirs} there belong to different providers: give both sides the same"
            ),
        }
    }
}

impl std::error::Error for BootstrapError {}
