//! The text of errors: what did not happen, and the remedy if there is one. Nothing here allocates.

use core::error::Error;
use core::fmt::{Display, Formatter, Result};

use super::{
    AttachError, Awaited, CompleteError, Missing, OpError, PeerError, PostError, Stuck, Unfinished,
    Use, Violation, WaitError,
};

impl Display for PostError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            PostError::Again => f.write_str("the rail's queue is full; poll, then post again"),
            PostError::TooLong { len, max } => {
                write!(f, "a post of {len} bytes is too long; the rail accepts at most {max}")
            }
            PostError::BadKey => f.write_str(
                "invalid remote key or range: the peer exports no such memory on this rail",
            ),
            PostError::PeerDown => {
                f.write_str("the peer is not connected on this rail, or has failed")
            }
            PostError::Unsupported => f.write_str("the rail does not support this operation"),
            PostError::Provider(code) => write!(f, "the provider returned code {code}"),
        }
    }
}

impl Display for CompleteError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            CompleteError::Failed(code) => {
                write!(f, "failed; the buffer may be reused (provider's code {code})")
            }
            CompleteError::PeerDown => f.write_str("failed, because its peer failed"),
            CompleteError::Unknown(code) => {
                write!(
                    f,
                    "failed, but may still land; do not reuse the buffer (provider's code {code})"
                )
            }
        }
    }
}

impl Display for PeerError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            PeerError::Died => f.write_str("its process has ended"),
            PeerError::Closed => f.write_str("the connection is closed"),
            PeerError::Protocol(violation) => write!(f, "it violated the protocol: {violation}"),
            PeerError::Rail(rail) => write!(f, "rail {} failed, and operations were lost", rail.0),
            PeerError::Unattached(rail) => write!(
                f,
                "it is not attached to rail {0}, which refused the first posts; attach it to rail \
                 {0} before connecting it",
                rail.0
            ),
            PeerError::Lost => f.write_str("its connection broke"),
            PeerError::Silent => f.write_str("it made no progress before the deadline"),
            PeerError::Removed => f.write_str("it was disconnected here"),
            PeerError::Reattached => {
                f.write_str("it has connected again; disconnect it and connect it again")
            }
        }
    }
}

impl Display for Violation {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            Violation::Length => "a message of the wrong length for its kind",
            Violation::Kind => "an unknown message kind, operation or width",
            Violation::Sequence => "a sequence number that is repeated or outside the window",
            Violation::Ack => "an acknowledgement of a number that was never sent",
            Violation::Bounds => "an address that is misaligned or outside its region",
            Violation::Region => "a region that is not registered",
            Violation::Context => "a context number that is not configured here",
            Violation::Counter => "a ring counter with an impossible value",
            Violation::Reply => "a reply without a request",
            Violation::Credit => "more messages, requests or returned credits than allowed",
        })
    }
}

impl Display for AttachError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            // A table that the user sizes is named by its setting.
            AttachError::Full(table) if table.starts_with("memory.") || table.contains("::") => {
                write!(f, "table full: {table}; free an entry, or raise this setting at setup")
            }
            AttachError::Full(table) => write!(f, "table full: {table}"),
            AttachError::BufferTooShort { len, least } => {
                write!(
                    f,
                    "buffer too short: {len} bytes given, the handle has {least}; pass HANDLE_MAX \
                     bytes"
                )
            }
            AttachError::BadHandle => f.write_str(
                "not a Fishplate handle, or truncated; pass all bytes of the exported handle",
            ),
            AttachError::Version { theirs, ours } => {
                write!(
                    f,
                    "different versions: {theirs} at the peer, {ours} here; run the same build"
                )
            }
            AttachError::BadRange => f.write_str(
                "invalid region: it is empty, or exceeds its allocation or the address space",
            ),
            AttachError::Misaligned => {
                f.write_str("misaligned region: it must begin at a multiple of 8")
            }
            AttachError::UnknownPeer => {
                f.write_str("unknown peer: it was never connected, or was removed")
            }
            AttachError::Unattached(rail) => write!(
                f,
                "the peer is not attached to rail {}, or the rail has lost it; attach it before \
                 connecting it",
                rail.0
            ),
            AttachError::UnknownRegion => {
                f.write_str("unknown region: it was never registered, or was deregistered")
            }
            AttachError::Unsupported => f.write_str(
                "no rail supports this kind of region; check \
                 its memory kind, `Settings::native_atomics` and failover",
            ),
            AttachError::Unheard => f.write_str(
                "the peer has not announced this memory, or has freed it; let the peer make \
                 progress, then try again",
            ),
            AttachError::InUse(by) => write!(f, "the region is in use: {by}"),
            AttachError::Config(what) => write!(f, "invalid setting or argument: {what}"),
            AttachError::Memory { what, len, least } => {
                write!(f, "memory too short: {what}: {len} given; lend at least {least}")
            }
            AttachError::System(code) => {
                write!(f, "the system or the provider refused: code {code}")
            }
            AttachError::Kept(code) => {
                write!(f, "the provider still holds the memory (code {code}); never reuse it")
            }
        }
    }
}

impl Display for Use {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Use::Operations => f.write_str("operations on it are incomplete; wait for them"),
            Use::Receives => {
                f.write_str("receives into it are incomplete; cancel them, or wait for them")
            }
            Use::Posts(rail) => {
                write!(f, "rail {} may still access it; make progress, then try again", rail.0)
            }
            Use::Import => {
                f.write_str("an import in this process refers to it; release the import")
            }
            Use::Common => f.write_str("it is shared with the peer; deregister it first"),
        }
    }
}

impl Display for OpError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            OpError::Again => {
                f.write_str("a window, queue or pool is full; make progress, then try again")
            }
            OpError::UnknownContext => {
                f.write_str("unknown context: its number must be below `Config::contexts`")
            }
            OpError::UnknownPeer => {
                f.write_str("unknown peer: it was never connected, or was removed")
            }
            OpError::UnknownRegion => {
                f.write_str("unknown region: it was never registered or imported, or was released")
            }
            OpError::OutOfBounds { offset, len, size } => {
                write!(
                    f,
                    "out of bounds: {len} bytes at offset {offset}, but the region has {size}"
                )
            }
            OpError::Misaligned { offset, width } => {
                write!(
                    f,
                    "misaligned: offset {offset} is not a multiple of the width, {width} bytes"
                )
            }
            OpError::BadWidth(width) => write!(f, "invalid width: {width} bytes; use 1, 2, 4 or 8"),
            OpError::TwoPeers => f.write_str(
                "data and signal are in regions of different peers; use regions of one peer",
            ),
            OpError::TooLong { len, max } => {
                write!(f, "{len} bytes are too long; this call accepts at most {max}")
            }
            OpError::PeerFailed(why) => write!(f, "the peer has failed: {why}; disconnect it"),
            OpError::StaleToken => f.write_str("stale token: it names no operation in flight"),
            OpError::Rail(rail, error) => write!(f, "rail {}: {error}", rail.0),
            OpError::DeviceMemory => {
                f.write_str("device memory: the processor cannot access it; use host memory here")
            }
            OpError::NativeAtomics => f.write_str(
                "a rail of the region's owner executes its atomics; use that rail, or another \
                 region",
            ),
            OpError::NoMatching => {
                f.write_str("tagged messages are not set up; attach matching first")
            }
            OpError::TagTooWide => {
                f.write_str("the tag or the mask has bits beyond the configured width")
            }
            OpError::Unreported => f.write_str(
                "a put of bytes cannot be reported; use registered memory, or a silent put and \
                 quiet",
            ),
            OpError::Abandoned => f.write_str("the worker thread has panicked; close the node"),
        }
    }
}

impl Display for WaitError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            WaitError::Deadline(stuck) => write!(f, "deadline expired: {stuck}"),
            WaitError::PeerFailed(peer, why) => {
                write!(f, "peer {} has failed: {why}", peer.peer().0)
            }
            WaitError::Failed(count) => write!(f, "{count} silent operations have failed"),
            WaitError::Op(error) => write!(f, "{error}"),
        }
    }
}

impl Display for Stuck {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match (self.awaits, self.peer) {
            (Awaited::Completion, Some(_)) => "operations are outstanding at",
            (Awaited::Completion, None) => "the operation is not complete",
            (Awaited::Signal, Some(_)) => "no signal arrived from",
            (Awaited::Signal, None) => "no signal arrived",
            (Awaited::Message, Some(_)) => "no message arrived from",
            (Awaited::Message, None) => "no message arrived",
        })?;
        if let Some(peer) = self.peer {
            write!(f, " peer {}", peer.peer().0)?;
        }
        if let Some(rail) = self.rail {
            write!(f, " on rail {}", rail.0)?;
        }
        if let Some(hole) = self.hole {
            write!(f, ", first missing sequence number {hole}")?;
        }
        f.write_str(match self.awaits {
            _ if self.unanswered => {
                ", which has not answered since it was connected; check that it connects to this \
                 side"
            }
            Awaited::Completion if self.peer.is_none() => "; wait longer",
            Awaited::Completion => "; wait longer, or check that the peer makes progress",
            Awaited::Signal if self.peer.is_none() => "; check that a peer sends to this word",
            Awaited::Signal => "; check that it sends to this word",
            Awaited::Message if self.peer.is_none() => "; check that a peer sends with this tag",
            Awaited::Message => "; check that it sends with this tag",
        })
    }
}

impl Display for Unfinished {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Unfinished { peer, peers, missing } = self;
        let missing = match missing {
            Missing::Operations => "operations are incomplete",
            Missing::Bye => "our close was not sent, or it has not acknowledged an answer",
            Missing::Answer => "it has not confirmed the close",
        };
        let (some, one) = if *peers == 1 { ("peer", "it") } else { ("peers", "one") };
        write!(f, "{peers} {some} did not close; {one} is peer {}: {missing}", peer.peer().0)
    }
}

impl Error for Unfinished {}
impl Error for PostError {}
impl Error for CompleteError {}
impl Error for PeerError {}
impl Error for AttachError {}
impl Error for OpError {}
impl Error for WaitError {}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::ToString;

    use super::*;
    use crate::mem::{PeerId, RailId};

    /// The text of an expired wait names the peer, the rail and the missing number if they are
    /// known.
    #[test]
    fn a_deadline_names_what_was_stuck() {
        let peer = PeerId { index: 3, generation: 9 };
        let stuck =
            Stuck { peer: Some(peer), rail: Some(RailId(1)), hole: Some(77), ..Stuck::default() };
        assert_eq!(
            WaitError::Deadline(stuck).to_string(),
            "deadline expired: operations are outstanding at peer 3 on rail 1, first missing \
             sequence number 77; wait longer, or check that the peer makes progress"
        );
        assert_eq!(
            Stuck { awaits: Awaited::Signal, hole: Some(0), ..stuck }.to_string(),
            "no signal arrived from peer 3 on rail 1, first missing sequence number 0; check that \
             it sends to this word"
        );
        assert_eq!(
            Stuck { awaits: Awaited::Message, rail: None, hole: None, ..stuck }.to_string(),
            "no message arrived from peer 3; check that it sends with this tag"
        );
        assert_eq!(
            Stuck { unanswered: true, rail: None, hole: None, ..stuck }.to_string(),
            "operations are outstanding at peer 3, which has not answered since it was connected; \
             check that it connects to this side"
        );
        let unknown = |awaits| Stuck { awaits, ..Stuck::default() }.to_string();
        assert_eq!(unknown(Awaited::Completion), "the operation is not complete; wait longer");
        assert_eq!(
            unknown(Awaited::Signal),
            "no signal arrived; check that a peer sends to this word"
        );
        assert_eq!(
            unknown(Awaited::Message),
            "no message arrived; check that a peer sends with this tag"
        );
        let refused = OpError::Rail(RailId(2), PostError::TooLong { len: 9, max: 8 });
        assert_eq!(
            WaitError::Op(refused).to_string(),
            "rail 2: a post of 9 bytes is too long; the rail accepts at most 8"
        );
        assert_eq!(
            PeerError::Protocol(Violation::Reply).to_string(),
            "it violated the protocol: a reply without a request"
        );
    }

    /// The texts say what failed, what was given and what to do.
    #[test]
    fn errors_of_setup_name_the_remedy() {
        for (error, text) in [
            (
                AttachError::Full("memory.peers"),
                "table full: memory.peers; free an entry, or raise this setting at setup",
            ),
            (
                AttachError::Full("ShmConfig::max_regions"),
                "table full: ShmConfig::max_regions; free an entry, or raise this setting at setup",
            ),
            (
                AttachError::Full("gpu: exports; revoke an allocation"),
                "table full: gpu: exports; revoke an allocation",
            ),
            (
                AttachError::Memory { what: "memory.streams (peers x contexts)", len: 1, least: 2 },
                "memory too short: memory.streams (peers x contexts): 1 given; lend at least 2",
            ),
            (
                AttachError::Unattached(RailId(3)),
                "the peer is not attached to rail 3, or the rail has lost it; attach it before \
                 connecting it",
            ),
        ] {
            assert_eq!(error.to_string(), text);
        }
        assert_eq!(
            PeerError::Unattached(RailId(3)).to_string(),
            "it is not attached to rail 3, which refused the first posts; attach it to rail 3 \
             before connecting it"
        );
    }
}
