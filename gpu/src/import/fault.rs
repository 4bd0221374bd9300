//! Why memory of a peer cannot be had.

use std::fmt;

use fishplate_core::mem::Peer;

use crate::{AllocId, DeviceError};

/// Why memory of a peer cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// There is no such peer, or it is gone.
    PeerGone,
    /// The time given has passed without an answer.
    Deadline,
    /// The peer does not export it, or no longer.
    NotExported,
    /// The peer has taken it back.
    Revoked,
    /// It was looked up in an earlier life of the peer.
    Incarnation,
    /// This version was followed by others and is not remembered.
    Gone,
    /// Revoked, then offered again, while earlier transfers are in flight: finish them first.
    Busy,
    /// The range does not lie inside the allocation, in bytes.
    OutOfBounds {
        /// First byte asked for.
        offset: u64,
        /// Length asked for.
        len: u64,
        /// Size of the allocation.
        size: u64,
    },
    /// The peer said another size than the allocation has, in bytes.
    Size {
        /// What it said.
        told: u64,
        /// What there is.
        actual: u64,
    },
    /// More is in use than may be open at once.
    Full,
    /// So much waits to be said to the peer that no more is taken for now.
    Again,
    /// An import that was released, or never given.
    Stale,
    /// What the device says.
    Device(DeviceError),
}

/// What a peer's memory was wanted for in vain: which peer, and which allocation if that was known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportError {
    /// The peer.
    pub peer: Peer,
    /// The allocation, as the peer numbers them.
    pub alloc: Option<AllocId>,
    /// Why.
    pub why: Fault,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::PeerGone => f.write_str("the peer is gone"),
            Fault::Deadline => f.write_str("no answer in the time given"),
            Fault::NotExported => f.write_str("the peer does not export it"),
            Fault::Revoked => f.write_str("the peer has taken it back"),
            Fault::Incarnation => f.write_str("it was looked up before the peer was started again"),
            Fault::Gone => f.write_str("the version is too old to be remembered"),
            Fault::Busy => f.write_str("transfers from before it was revoked are under way"),
            Fault::OutOfBounds { offset, len, size } => {
                write!(f, "{len} bytes at {offset} are not inside its {size} bytes")
            }
            Fault::Size { told, actual } => {
                write!(f, "it has {actual} bytes, and the peer said {told}")
            }
            Fault::Full => f.write_str("too much is imported and in use"),
            Fault::Again => f.write_str("too much waits to be said to the peer"),
            Fault::Stale => f.write_str("not an import that is held"),
            Fault::Device(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.alloc {
            Some(alloc) => write!(f, "peer {}, allocation {}: {}", self.peer.0, alloc.key(), self.why),
            None => write!(f, "peer {}: {}", self.peer.0, self.why),
        }
    }
}

impl std::error::Error for ImportError {}
