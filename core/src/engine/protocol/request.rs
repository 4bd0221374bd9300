//! What programs see of a receive: its id, its destination and its status.

use core::fmt;

use crate::mem::{LocalAddr, PeerId, Span};
use crate::op::Fault;

use super::super::tag::Tag;

/// Identifies a receive, or a request of a matched queue, until its status is taken. A stale id is
/// an error and never looks completed. Another engine may use the same ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Request(pub(crate) u64);

impl Request {
    /// Returns the id as a number, for C and other languages.
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// Converts a number back to an id. A number that [`to_raw`](Self::to_raw) never returned names
    /// no request.
    pub const fn from_raw(raw: u64) -> Request {
        Request(raw)
    }
}

/// How a receive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// The whole message is in the buffer.
    Ok,
    /// The message was longer than the buffer, which is full.
    Truncated,
    /// The receive was cancelled before a message matched. The buffer is untouched.
    Cancelled,
    /// The receive failed, and nothing will be written to the buffer later.
    Failed(Fault),
    /// The receive failed, and the buffer may still be written later: do not reuse it.
    Unknown(Fault),
}

impl fmt::Display for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Received::Ok => f.write_str("done"),
            Received::Truncated => f.write_str("the message was longer than the buffer"),
            Received::Cancelled => f.write_str("cancelled; the buffer is unchanged"),
            Received::Failed(fault) => write!(f, "failed, and the buffer may be reused: {fault}"),
            Received::Unknown(fault) => {
                write!(f, "failed, and may still take effect; do not reuse the buffer: {fault}")
            }
        }
    }
}

/// The source, tag and length of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The sender.
    pub source: PeerId,
    /// The tag that the sender chose.
    pub tag: Tag,
    /// Length of the message in bytes, even if it was truncated.
    pub len: u64,
}

/// The completion of one receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The id of the receive.
    pub request: Request,
    /// The `word` that was passed when the receive was posted.
    pub word: u64,
    /// How the receive ended.
    pub outcome: Received,
    /// The message that matched, if one did.
    pub envelope: Option<Envelope>,
    /// Bytes delivered into the buffer, from its start.
    pub delivered: u64,
    /// Position in the order of all completions, of receives and operations. Has no meaning for a
    /// send of a matched queue.
    pub order: u64,
}

/// The result of a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// Nothing had matched. The receive ends as [`Received::Cancelled`], and its status can be
    /// taken.
    Removed,
    /// A message had matched. The receive completes, or has completed, as if it were not cancelled.
    AlreadyMatched,
}

/// Where a receive puts its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Nowhere: the message is received and dropped.
    Nothing,
    /// This many bytes at an address. Keep them registered and untouched until the receive has
    /// ended.
    Region(LocalAddr, usize),
    /// Memory that is not registered.
    Span(Span),
}

impl From<Option<(LocalAddr, usize)>> for Destination {
    #[inline(always)]
    fn from(into: Option<(LocalAddr, usize)>) -> Self {
        into.map_or(Destination::Nothing, |(at, len)| Destination::Region(at, len))
    }
}

impl From<Span> for Destination {
    #[inline(always)]
    fn from(span: Span) -> Self {
        Destination::Span(span)
    }
}
