//! The errors of imports.

use std::fmt;

use fishplate_core::mem::Peer;

use crate::{AllocId, DeviceError};

/// Why memory of a peer cannot be imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The peer is unknown or has failed.
    PeerGone,
    /// The deadline expired.
    Deadline,
    /// The peer does not export the allocation.
    NotExported,
    /// The peer revoked the allocation.
    Revoked,
    /// The token belongs to an earlier incarnation of the peer.
    Incarnation,
    /// The peer no longer keeps the requested version of the buffer.
    Gone,
    /// The allocation was revoked and offered again while earlier transfers are in flight. Finish
    /// them first.
    Busy,
    /// The range does not lie inside the allocation.
    OutOfBounds {
        /// Requested offset, in bytes.
        offset: u64,
        /// Requested length, in bytes.
        len: u64,
        /// Size of the allocation, in bytes.
        size: u64,
    },
    /// The peer announced a size that differs from the allocation's size.
    Size {
        /// Announced size, in bytes.
        told: u64,
        /// Actual size, in bytes.
        actual: u64,
    },
    /// The limit of opened memory is reached, and all of it is in use.
    Full,
    /// The queue of packets to the peer is full. Retry later.
    Again,
    /// The import was released, or never existed.
    Stale,
    /// An error of the device.
    Device(DeviceError),
}

/// A failed import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportError {
    /// The peer that owns the memory.
    pub peer: Peer,
    /// The allocation's id at the peer, if it was known.
    pub alloc: Option<AllocId>,
    /// Why the import failed.
    pub why: Fault,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::PeerGone => f.write_str("the peer is unknown or has failed"),
            Fault::Deadline => f.write_str("the peer did not answer before the deadline"),
            Fault::NotExported => f.write_str("the peer does not export this memory"),
            Fault::Revoked => f.write_str("the peer has revoked this memory"),
            Fault::Incarnation => {
                f.write_str("the token is from before the peer's restart; look the buffer up again")
            }
            Fault::Gone => {
                f.write_str("the peer no longer keeps this version; look up a newer version")
            }
            Fault::Busy => f.write_str(
                "transfers from before a revocation are still in flight; retry after they complete",
            ),
            Fault::OutOfBounds { offset, len, size } => {
                write!(f, "{len} bytes at offset {offset} exceed the allocation of {size} bytes")
            }
            Fault::Size { told, actual } => {
                write!(f, "the peer announced {told} bytes, but the memory has {actual}")
            }
            Fault::Full => f.write_str(
                "the limit of imported memory is reached; release imports, or raise the limit",
            ),
            Fault::Again => f.write_str("the queue to the peer is full; retry"),
            Fault::Stale => f.write_str("the import was released, or never existed"),
            Fault::Device(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.alloc {
            Some(alloc) => {
                write!(f, "peer {}, allocation {}: {}", self.peer.0, alloc.key(), self.why)
            }
            None => write!(f, "peer {}: {}", self.peer.0, self.why),
        }
    }
}

impl std::error::Error for ImportError {}
