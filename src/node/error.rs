//! The errors of a node: [`OpenError`] when it is opened, and [`Error`] afterwards.

use std::fmt;

use fishplate_core::error::{AttachError, OpError, Unfinished, WaitError};
use fishplate_core::mem::PeerId;
use fishplate_core::op::Outcome;
use fishplate_gpu::DeviceError;
use fishplate_shm::HandshakeError;
use fishplate_sys::Errno;

use super::Gpu;
use crate::config::BadSetting;
use crate::rails::RailsError;

/// The reason why a node did not open.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// A setting is out of range.
    Setting(BadSetting),
    /// The requested libfabric rails cannot be opened.
    Rails(RailsError),
    /// A rail's own address is too long, or the provider does not return one.
    RailAddress,
    /// The requested device cannot be opened.
    Gpu(Gpu, DeviceError),
    /// Shared memory or the engine cannot be set up.
    Attach(AttachError),
    /// The socket for peers on this host cannot be opened.
    Listen(HandshakeError),
    /// The thread of [`Builder::worker`](super::Builder::worker) cannot be started or pinned.
    Worker(Errno),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Setting(error) => write!(f, "cannot open a node: {error}"),
            OpenError::Rails(error) => write!(f, "cannot open the libfabric rails: {error}"),
            OpenError::RailAddress => f.write_str(
                "cannot use a libfabric rail: the provider returns no address, or one that is too \
                 long",
            ),
            OpenError::Gpu(gpu, error) => write!(f, "cannot open the GPU {gpu}: {error}"),
            OpenError::Attach(error) => write!(f, "cannot open a node: {}", Told(error)),
            OpenError::Listen(error) => {
                let remedy = match error {
                    HandshakeError::System(code) => remedy(*code),
                    _ => "",
                };
                write!(f, "cannot listen for peers on this host: {error}{remedy}")
            }
            OpenError::Worker(error) => write!(f, "cannot start the node's worker: {error}"),
        }
    }
}

impl std::error::Error for OpenError {}

impl From<AttachError> for OpenError {
    fn from(error: AttachError) -> Self {
        OpenError::Attach(error)
    }
}

/// The reason why a call of a [`Node`](super::Node) failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The bytes are not a node's address, or are truncated.
    BadAddress,
    /// The address has another version.
    Version {
        /// The peer's version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },
    /// The two nodes were opened with different values of a setting that both must share.
    Differs {
        /// The name of the setting.
        what: &'static str,
        /// The peer's value.
        theirs: u32,
        /// Our value.
        ours: u32,
    },
    /// No rail connects the two nodes: they are on different hosts and share no libfabric fabric.
    NoRail,
    /// The peer did not connect before the deadline.
    NotConnected(PeerId),
    /// The handshake with a peer on this host failed for good.
    Handshake(HandshakeError),
    /// A table of the node is full. Its size is set with
    /// [`Builder::limits`](super::Builder::limits).
    Full {
        /// The field of [`Limits`](crate::Limits).
        limit: &'static str,
        /// The value of the limit.
        value: u32,
    },
    /// The node was opened without a device: see [`Builder::gpu`](super::Builder::gpu).
    NoGpu,
    /// No rail between this node and the peer reaches the device memory. Messages cannot carry it
    /// either: its owner was opened without a device, or one side accepts no eager messages.
    NoGpuRail(PeerId),
    /// An error of the device.
    Device(DeviceError),
    /// The deadline expired while this many peers still had memory of this node's device open.
    StillOpen(usize),
    /// A peer, region or rail cannot be attached.
    Attach(AttachError),
    /// A received message was longer than the buffer. The buffer contains its first bytes, and the
    /// rest is lost.
    Truncated {
        /// Length of the message, in bytes.
        len: u64,
        /// Length of the buffer, in bytes.
        max: usize,
    },
    /// An operation was refused.
    Op(OpError),
    /// A wait ended before its condition was met.
    Wait(WaitError),
    /// The operation that was waited for has failed.
    Failed(Outcome),
    /// The node was closed, although some operations were not complete.
    Unfinished(Unfinished),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::BadAddress => {
                f.write_str("not a node's address; pass all bytes of `Node::address`")
            }
            Error::Version { theirs, ours } => write!(
                f,
                "the peer's address has version {theirs}, and this program reads version {ours}; \
                 run the same build on both sides"
            ),
            Error::Differs { what, theirs, ours } => {
                write!(
                    f,
                    "different {what}: the peer has {theirs}, this node {ours}; use the same value"
                )
            }
            Error::NoRail => f.write_str(
                "no rail connects the two nodes: they are on different hosts and share no \
                 libfabric fabric",
            ),
            Error::NotConnected(peer) => {
                write!(
                    f,
                    "peer {} did not connect before the deadline; check that it calls `connect` \
                     too",
                    peer.peer().0
                )
            }
            Error::Handshake(error) => {
                write!(f, "cannot connect to the peer on this host: {error}")
            }
            Error::Full { limit, value } => {
                write!(
                    f,
                    "limit reached: `Limits::{limit}` is {value}; raise it in `Builder::limits`"
                )
            }
            Error::NoGpu => {
                f.write_str("the node was opened without a GPU; set one with `Builder::gpu`")
            }
            Error::NoGpuRail(peer) => write!(
                f,
                "no rail carries device memory between this node and peer {}, and messages cannot \
                 carry it either; open its owner with `Builder::gpu`, and both nodes with an eager \
                 limit above 0",
                peer.peer().0
            ),
            Error::Device(error) => error.fmt(f),
            Error::StillOpen(peers) => write!(
                f,
                "{peers} peers still have device memory of this node open; they close it in \
                 `progress` and in waits once their copies are complete"
            ),
            Error::Attach(error) => Told(error).fmt(f),
            Error::Truncated { len, max } => write!(
                f,
                "message truncated: it has {len} bytes, the buffer {max}, and the rest is lost; \
                 pass a longer buffer"
            ),
            Error::Op(error) => error.fmt(f),
            Error::Wait(error) => error.fmt(f),
            Error::Failed(outcome) => write!(f, "the operation has {outcome}"),
            Error::Unfinished(unfinished) => write!(f, "closed with incomplete work: {unfinished}"),
        }
    }
}

impl std::error::Error for Error {}

/// Names the error codes of the system, which the core cannot.
struct Told<'a>(&'a AttachError);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            &AttachError::System(code) if code > 0 => {
                let error = std::io::Error::from_raw_os_error(code);
                write!(f, "the system or the provider refused: {error}{}", remedy(code))
            }
            error => error.fmt(f),
        }
    }
}

/// Returns the end of a message about an error code: which limit of the process to raise.
fn remedy(code: i32) -> &'static str {
    match code {
        libc::EMFILE => "; raise ulimit -n",
        libc::ENOMEM => "; use less memory, or raise ulimit -v",
        libc::EFBIG => "; raise ulimit -f, which also limits shared memory",
        _ => "",
    }
}

impl From<AttachError> for Error {
    fn from(error: AttachError) -> Self {
        Error::Attach(error)
    }
}

impl Error {
    /// Converts an error of setup. Returns [`Error::Full`] for a full table if `limit` determines
    /// its size. Other tables have a fixed size or another setting, so their errors stay as they
    /// are.
    pub(super) fn of(error: AttachError, limit: &'static str, value: impl Into<u32>) -> Error {
        let limited = ["memory.", "ShmConfig::max_", "FabricConfig::max_", "GpuConfig::max_"];
        match error {
            AttachError::Full(table) if limited.iter().any(|start| table.starts_with(start)) => {
                Error::Full { limit, value: value.into() }
            }
            error => Error::Attach(error),
        }
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        Error::Device(error)
    }
}

impl From<OpError> for Error {
    fn from(error: OpError) -> Self {
        Error::Op(error)
    }
}

impl From<WaitError> for Error {
    fn from(error: WaitError) -> Self {
        match error {
            WaitError::Op(error) => Error::Op(error),
            error => Error::Wait(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_of_the_system_are_named_with_a_remedy() {
        for (code, end) in [
            (
                libc::ENOMEM,
                "Cannot allocate memory (os error 12); use less memory, or raise ulimit -v",
            ),
            (libc::EMFILE, "Too many open files (os error 24); raise ulimit -n"),
            (
                libc::EFBIG,
                "File too large (os error 27); raise ulimit -f, which also limits shared memory",
            ),
            (libc::EACCES, "Permission denied (os error 13)"),
        ] {
            let text = Error::Attach(AttachError::System(code)).to_string();
            assert_eq!(text, format!("the system or the provider refused: {end}"));
            let text = OpenError::Listen(HandshakeError::System(code)).to_string();
            assert_eq!(text, format!("cannot listen for peers on this host: {end}"));
        }
    }

    #[test]
    fn only_tables_that_limits_size_are_told_as_limits() {
        let of = |table| Error::of(AttachError::Full(table), "locals", 8u16).to_string();
        for table in [
            "memory.locals",
            "ShmConfig::max_regions",
            "ShmConfig::max_segments",
            "FabricConfig::max_regions",
            "GpuConfig::max_regions, imports of one peer",
        ] {
            assert_eq!(
                of(table),
                "limit reached: `Limits::locals` is 8; raise it in `Builder::limits`"
            );
        }
        assert_eq!(
            of("gpu: exports; revoke an allocation"),
            "table full: gpu: exports; revoke an allocation"
        );
        let of_imports =
            "table full: GpuConfig::imports; free an entry, or raise this setting at setup";
        assert_eq!(of("GpuConfig::imports"), of_imports);
    }
}
