//! What people read of the errors: what did not happen, and the remedy where there is one.

use std::error::Error;
use std::fmt::{Display, Formatter, Result};
use std::io;

use crate::handshake::HandshakeError;
use crate::segment::SegmentError;

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
