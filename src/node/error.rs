//! What can go wrong with a node: [`OpenError`] when it is opened, [`Error`] from then on.

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

/// Why there is no node.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// A setting is out of range.
    Setting(BadSetting),
    /// The libfabric rails that were asked for cannot be opened.
    Rails(RailsError),
    /// A rail's own address is too long, or its provider does not tell it.
    RailAddress,
    /// The device that was asked for cannot be opened.
    Gpu(Gpu, DeviceError),
    /// Shared memory or the engine cannot be set up.
    Attach(AttachError),
    /// The socket for peers of this host cannot be opened.
    Listen(HandshakeError),
    /// The thread of [`Builder::worker`](super::Builder::worker) cannot be started, or not pinned.
    Worker(Errno),
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Setting(error) => write!(f, "cannot open a node: {error}"),
            OpenError::Rails(error) => write!(f, "cannot open the libfabric rails: {error}"),
            OpenError::RailAddress => f.write_str("a libfabric rail does not tell an address that fits"),
            OpenError::Gpu(gpu, error) => write!(f, "cannot open the GPU {gpu}: {error}"),
            OpenError::Attach(error) => write!(f, "cannot open a node: {error}"),
            OpenError::Listen(error) => write!(f, "cannot listen for peers of this host: {error}"),
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

/// What a call of a [`Node`](super::Node) did not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// Not the address of a node, or one cut short.
    BadAddress,
    /// The address of a node of another version.
    Version {
        /// Theirs.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// The two nodes were opened with different values of a setting that both must share.
    Differs {
        /// The setting.
        what: &'static str,
        /// Theirs.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// No rail joins the two nodes: they are on different hosts and no libfabric fabric is common.
    NoRail,
    /// The peer has not connected before the deadline expired.
    NotConnected(PeerId),
    /// The peer of this host and this node refuse each other, for good.
    Handshake(HandshakeError),
    /// A table of the node is full: a limit of [`Builder::limits`](super::Builder::limits).
    Full {
        /// The field of [`Limits`](crate::Limits).
        limit: &'static str,
        /// Its value.
        value: u32,
    },
    /// The node was opened without a device: see [`Builder::gpu`](super::Builder::gpu).
    NoGpu,
    /// Memory of a device that no rail between this node and the peer carries: shared memory does
    /// where both were opened with [`Builder::gpu`](super::Builder::gpu), libfabric where the
    /// provider of its owner takes memory of devices.
    NoGpuRail(PeerId),
    /// The device refuses.
    Device(DeviceError),
    /// The deadline expired and this many peers have not said that they closed memory of this
    /// node's device. They close it in `progress` and in waits.
    StillOpen(usize),
    /// A peer, region or rail cannot be attached.
    Attach(AttachError),
    /// An operation was refused.
    Op(OpError),
    /// A wait ended without what it waited for.
    Wait(WaitError),
    /// An operation that was waited for has failed.
    Failed(Outcome),
    /// The node has closed with something left to do.
    Unfinished(Unfinished),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::BadAddress => {
                f.write_str("not the address of a node: hand over all bytes of `Node::address`")
            }
            Error::Version { theirs, ours } => write!(
                f,
                "the peer's address is of version {theirs}, and this program reads {ours}: run the same build"
            ),
            Error::Differs { what, theirs, ours } => {
                write!(f, "the peer was opened with {what} {theirs}, this node with {ours}: use the same")
            }
            Error::NoRail => f.write_str(
                "no rail joins the two nodes: they are on different hosts, and share no libfabric fabric",
            ),
            Error::NotConnected(peer) => {
                write!(f, "peer {} has not connected before the deadline; it must connect too", peer.peer().0)
            }
            Error::Handshake(error) => write!(f, "the peer of this host was not met: {error}"),
            Error::Full { limit, value } => {
                write!(f, "no room for another: `Limits::{limit}` is {value}; raise it in `Builder::limits`")
            }
            Error::NoGpu => f.write_str("the node was opened without a GPU: ask for one by `Builder::gpu`"),
            Error::NoGpuRail(peer) => write!(
                f,
                "no rail carries memory of a device between this node and peer {}: on one host, open both with \
                 `Builder::gpu`; over libfabric, its owner needs a provider with FI_HMEM",
                peer.peer().0
            ),
            Error::Device(error) => error.fmt(f),
            Error::StillOpen(peers) => write!(
                f,
                "{peers} peers have not closed memory of the device: they do in `progress` and in waits, unless \
                 they still copy"
            ),
            Error::Attach(error) => error.fmt(f),
            Error::Op(error) => error.fmt(f),
            Error::Wait(error) => error.fmt(f),
            Error::Failed(outcome) => write!(f, "an operation has {outcome}"),
            Error::Unfinished(unfinished) => write!(f, "closed before everything was done: {unfinished}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<AttachError> for Error {
    fn from(error: AttachError) -> Self {
        Error::Attach(error)
    }
}

impl Error {
    /// What an error of setup says where a full table is the one of this limit.
    pub(super) fn of(error: AttachError, limit: &'static str, value: impl Into<u32>) -> Error {
        match error {
            AttachError::Full => Error::Full { limit, value: value.into() },
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
