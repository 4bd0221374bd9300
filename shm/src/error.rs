//! Setup errors and their messages: what failed, and what to do.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};
use std::io;

use fishplate_core::error::AttachError;

/// Why memory could not be created, attached or split into regions. Nothing is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SegmentError {
    /// No bytes, or more than an address space has.
    Length,
    /// The range does not lie inside the segment.
    Range,
    /// The descriptor is not sealed against shrinking and growing, or not memory at all.
    Unsealed,
    /// The memory is not of ordinary pages.
    Pages,
    /// The size, in bytes, is not the one agreed.
    Size {
        /// What the descriptor has, in bytes.
        actual: u64,
        /// What was agreed, in bytes.
        expected: u64,
    },
    /// Some of its pages do not exist yet.
    Sparse,
    /// Not the memory that was announced: a magic number, version, size or nonce in it differs.
    Foreign,
    /// More than the machine or the control groups of this process have left.
    Room {
        /// What was asked, in bytes.
        asked: u64,
        /// What can be had, in bytes.
        there: u64,
    },
    /// More than files of this process may have (RLIMIT_FSIZE), which shared memory counts as.
    FileSize {
        /// What was asked, in bytes.
        asked: u64,
        /// What is allowed, in bytes.
        limit: u64,
    },
    /// The system's own code.
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

/// Why a handshake failed. Nothing is mapped, and no descriptor is left open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The deadline expired.
    Deadline,
    /// The peer closed the connection.
    HungUp,
    /// The packet is malformed, unexpected, or has the wrong descriptors.
    BadPacket,
    /// The peer speaks another version.
    Version {
        /// Theirs.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// The two ends were configured with different sizes.
    Mismatch {
        /// Which size.
        what: &'static str,
        /// Theirs.
        theirs: u64,
        /// Ours.
        ours: u64,
    },
    /// The peer echoed another nonce: it answers another process, or an earlier run.
    Nonce,
    /// The peer belongs to a user who is not admitted: the user's number.
    User(u32),
    /// The packets of the handshake came from more than one process.
    Process {
        /// The one that sent the first, or 0 if it is not known.
        hello: i32,
        /// The one that sent the last, likewise.
        ready: i32,
    },
    /// The peer offered invalid memory.
    Segment(SegmentError),
    /// The path or name to listen on is in use.
    InUse,
    /// Not a path or name that fits a socket address.
    Address,
    /// More bytes than one packet carries.
    TooLong {
        /// What was asked, in bytes.
        len: usize,
        /// What fits, in bytes.
        max: usize,
    },
    /// No such peer is attached over a socket.
    UnknownPeer,
    /// The system's own code.
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
                f.write_str("a segment of no bytes, or of more than an address space has")
            }
            SegmentError::Range => f.write_str("the range does not lie inside the segment"),
            SegmentError::Unsealed => {
                f.write_str("the descriptor is not sealed against a change of its size")
            }
            SegmentError::Pages => f.write_str("the descriptor is not memory of ordinary pages (tmpfs)"),
            SegmentError::Size { actual, expected } => {
                write!(f, "the descriptor has {actual} bytes, not the {expected} agreed")
            }
            SegmentError::Sparse => f.write_str("some pages of the segment do not exist yet"),
            SegmentError::Foreign => f.write_str("not the memory that was announced"),
            SegmentError::Room { asked, there } => write!(
                f,
                "{asked} bytes of memory, but {there} can be had within the limits of this machine and its control groups"
            ),
            SegmentError::FileSize { asked, limit } => write!(
                f,
                "{asked} bytes of shared memory, but files are limited to {limit} bytes; raise ulimit -f"
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
            HandshakeError::BadPacket => {
                f.write_str("the other end sent what is not of this protocol, or not due")
            }
            HandshakeError::Version { theirs, ours } => {
                write!(f, "version {theirs} there, version {ours} here; both ends must be of one version")
            }
            HandshakeError::Mismatch { what, theirs, ours } => {
                write!(f, "{what} is {theirs} there and {ours} here; both ends need the same")
            }
            HandshakeError::Nonce => {
                f.write_str("the other end answers to somebody else, or to an earlier run")
            }
            HandshakeError::User(user) => {
                write!(f, "the other end belongs to user {user}, who is not admitted")
            }
            HandshakeError::Process { hello, ready } => write!(
                f,
                "process {hello} began the handshake and process {ready} ended it; both parts need one process"
            ),
            HandshakeError::Segment(error) => write!(f, "the memory that the other end offers: {error}"),
            HandshakeError::InUse => f.write_str("somebody listens there already"),
            HandshakeError::Address => f.write_str("not a path or name that fits a socket's address"),
            HandshakeError::TooLong { len, max } => {
                write!(f, "{len} bytes in one packet, but it carries {max}")
            }
            HandshakeError::UnknownPeer => f.write_str("no such peer is attached over a socket"),
            HandshakeError::System(code) => write!(f, "{}", io::Error::from_raw_os_error(*code)),
        }
    }
}

impl Error for SegmentError {}
impl Error for HandshakeError {}
