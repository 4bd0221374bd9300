//! The errors of the setup. All are `Copy`.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};
use std::io;

use fishplate_core::error::AttachError;

/// Why memory could not be created, attached, or divided into regions. Nothing remains mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SegmentError {
    /// The length is zero or exceeds the address space.
    Length,
    /// The range does not lie inside the segment.
    Range,
    /// The descriptor is not memory, or is not sealed against shrinking and growing.
    Unsealed,
    /// The memory consists of huge pages.
    Pages,
    /// The size differs from the agreed size.
    Size {
        /// Actual size, in bytes.
        actual: u64,
        /// Agreed size, in bytes.
        expected: u64,
    },
    /// Some of the pages are not allocated.
    Sparse,
    /// The memory is not the announced memory: its magic number, version, size or nonce differs.
    Foreign,
    /// The machine, or a control group of this process, has too little memory left.
    Room {
        /// Requested size, in bytes.
        asked: u64,
        /// Available memory, in bytes.
        there: u64,
    },
    /// The size exceeds the file size limit of this process (RLIMIT_FSIZE), which also limits
    /// shared memory.
    FileSize {
        /// Requested size, in bytes.
        asked: u64,
        /// The limit, in bytes.
        limit: u64,
    },
    /// A system call failed with this errno.
    System(i32),
}

impl From<SegmentError> for AttachError {
    fn from(error: SegmentError) -> Self {
        match error {
            SegmentError::Length | SegmentError::Range => AttachError::BadRange,
            SegmentError::System(code) => AttachError::System(code),
            SegmentError::Room { .. } => AttachError::System(libc::ENOMEM),
            SegmentError::FileSize { .. } => AttachError::System(libc::EFBIG),
            _ => AttachError::BadHandle,
        }
    }
}

/// Why a handshake failed. Nothing remains mapped, and no descriptor remains open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The deadline expired.
    Deadline,
    /// The peer closed the connection.
    HungUp,
    /// The packet is malformed, unexpected, or has the wrong descriptors.
    BadPacket,
    /// The peer uses another version of the protocol.
    Version {
        /// The peer's version.
        theirs: u16,
        /// Our version.
        ours: u16,
    },
    /// The two ends are configured with different sizes.
    Mismatch {
        /// The setting that differs.
        what: &'static str,
        /// The peer's value.
        theirs: u64,
        /// Our value.
        ours: u64,
    },
    /// The peer echoed a different nonce. Its answer is meant for another process, or an earlier
    /// run.
    Nonce,
    /// The peer's user, with this user ID, is not admitted.
    User(u32),
    /// The packets of the handshake came from more than one process.
    Process {
        /// The process that sent the first packet, or 0 if unknown.
        hello: i32,
        /// The process that sent the last packet, or 0 if unknown.
        ready: i32,
    },
    /// The peer offered invalid memory.
    Segment(SegmentError),
    /// The path or abstract name to listen on is in use.
    InUse,
    /// The address is not a path or an abstract name, or does not fit into a socket address.
    Address,
    /// The blob or packet is longer than a packet can be.
    TooLong {
        /// Requested length, in bytes.
        len: usize,
        /// The limit, in bytes.
        max: usize,
    },
    /// No peer with this number is attached over a socket.
    UnknownPeer,
    /// A system call failed with this errno.
    System(i32),
}

impl From<SegmentError> for HandshakeError {
    fn from(error: SegmentError) -> Self {
        HandshakeError::Segment(error)
    }
}

impl From<HandshakeError> for AttachError {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Version { theirs, ours } => AttachError::Version { theirs, ours },
            HandshakeError::Segment(error) => error.into(),
            HandshakeError::System(code) => AttachError::System(code),
            HandshakeError::Deadline => AttachError::Unheard,
            HandshakeError::HungUp | HandshakeError::UnknownPeer => AttachError::UnknownPeer,
            HandshakeError::Mismatch { what, .. } => AttachError::Config(what),
            _ => AttachError::BadHandle,
        }
    }
}

impl Display for SegmentError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            SegmentError::Length => {
                f.write_str("invalid segment size: zero, or larger than the address space")
            }
            SegmentError::Range => f.write_str("the range does not lie inside the segment"),
            SegmentError::Unsealed => {
                f.write_str("the descriptor is not memory with a sealed size")
            }
            SegmentError::Pages => {
                f.write_str("the memory does not consist of ordinary pages (tmpfs)")
            }
            SegmentError::Size { actual, expected } => {
                write!(f, "the shared memory has {actual} bytes instead of {expected}")
            }
            SegmentError::Sparse => f.write_str("some pages of the segment are not allocated"),
            SegmentError::Foreign => f.write_str(
                "the memory is not the announced memory: its magic number, version, size or nonce \
                 differs",
            ),
            SegmentError::Room { asked, there } => write!(
                f,
                "cannot allocate {asked} bytes: the machine or a control group has only {there} \
                 bytes left"
            ),
            SegmentError::FileSize { asked, limit } => write!(
                f,
                "cannot allocate {asked} bytes of shared memory: files are limited to {limit} \
                 bytes; raise ulimit -f"
            ),
            SegmentError::System(code) => write!(f, "{}", io::Error::from_raw_os_error(*code)),
        }
    }
}

impl Display for HandshakeError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            HandshakeError::Deadline => f.write_str("the other end did not answer in time"),
            HandshakeError::HungUp => f.write_str("the other end closed the connection"),
            HandshakeError::BadPacket => f.write_str(
                "the other end sent an invalid or unexpected packet; check that it runs fishplate",
            ),
            HandshakeError::Version { theirs, ours } => {
                write!(
                    f,
                    "different versions: {theirs} at the other end, {ours} here; run the same build"
                )
            }
            HandshakeError::Mismatch { what, theirs, ours } => {
                write!(
                    f,
                    "different {what}: {theirs} at the other end, {ours} here; use the same value"
                )
            }
            HandshakeError::Nonce => f.write_str(
                "the other end's answer is for another process or an earlier run; connect again",
            ),
            HandshakeError::User(user) => {
                write!(
                    f,
                    "the other end runs as user {user}, which is not admitted here; run both ends \
                     as the same user, or list that user in `ShmConfig::users`"
                )
            }
            HandshakeError::Process { hello, ready } => write!(
                f,
                "process {hello} began the handshake, but process {ready} completed it; do not \
                 fork in between"
            ),
            HandshakeError::Segment(error) => {
                write!(f, "invalid memory from the other end: {error}")
            }
            HandshakeError::InUse => {
                f.write_str("the address to listen on is in use; choose another address")
            }
            HandshakeError::Address => {
                f.write_str("invalid socket address: the path or name is empty or too long")
            }
            HandshakeError::TooLong { len, max } => {
                write!(f, "packet too long: {len} bytes given; send at most {max}")
            }
            HandshakeError::UnknownPeer => {
                f.write_str("no peer with this number is attached over a socket")
            }
            HandshakeError::System(code) => write!(f, "{}", io::Error::from_raw_os_error(*code)),
        }
    }
}

impl Error for SegmentError {}
impl Error for HandshakeError {}
