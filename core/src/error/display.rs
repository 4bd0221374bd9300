//! The text of errors: what did not happen and, if there is one, the remedy. Nothing here
//! allocates.

use core::error::Error;
use core::fmt::{Display, Formatter, Result};

use super::{
    AttachError, CompleteError, Missing, OpError, PeerError, PostError, Stuck, Unfinished, Use, Violation,
    WaitError,
};

impl Display for PostError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            PostError::Again => f.write_str("the rail's queue is full; poll, then post again"),
            PostError::TooLong { len, max } => {
                write!(f, "{len} bytes in one post, but the rail carries {max}")
            }
            PostError::BadKey => f.write_str("the peer exports no such memory on this rail"),
            PostError::PeerDown => f.write_str("the peer is not connected on this rail, or has failed"),
            PostError::Unsupported => f.write_str("the rail does not offer this"),
            PostError::Provider(code) => write!(f, "the provider refused (its code {code})"),
        }
    }
}

impl Display for CompleteError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            CompleteError::Failed(code) => write!(f, "failed, and is over (the provider's code {code})"),
            CompleteError::PeerDown => f.write_str("failed with its peer"),
            CompleteError::Unknown(code) => {
                write!(f, "failed, and may still land: do not reuse the buffer (the provider's code {code})")
            }
        }
    }
}

impl Display for PeerError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            PeerError::Died => f.write_str("its process is gone"),
            PeerError::Closed => f.write_str("the connection is closed"),
            PeerError::Protocol(violation) => write!(f, "it broke the protocol: {violation}"),
            PeerError::Rail(rail) => write!(f, "rail {} failed and left a hole in its stream", rail.0),
            PeerError::Lost => f.write_str("it does not answer any more"),
            PeerError::Removed => f.write_str("it was removed here"),
            PeerError::Reattached => {
                f.write_str("it attached this process anew; remove it and attach it again")
            }
        }
    }
}

impl Display for Violation {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        f.write_str(match self {
            Violation::Length => "a message too short or too long for its kind",
            Violation::Kind => "a message kind, operation or width that does not exist",
            Violation::Sequence => "a sequence number outside the window, or seen before",
            Violation::Ack => "an acknowledgement of what was never sent",
            Violation::Bounds => "an address outside its region, or misaligned",
            Violation::Region => "a region that is not registered",
            Violation::Context => "a context number that is not configured here",
            Violation::Counter => "a counter that no correct peer writes",
            Violation::Reply => "a reply to nothing",
            Violation::Credit => "more messages than there was room promised for",
        })
    }
}

impl Display for AttachError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            AttachError::Full => f.write_str("the table for it is full; make it larger at setup"),
            AttachError::BadHandle => f.write_str("not a handle of fishplate, or one cut short"),
            AttachError::Version { theirs, ours } => {
                write!(f, "version {theirs} there, version {ours} here; both ends must be of one version")
            }
            AttachError::BadRange => f.write_str("an empty region, or one beyond the address space"),
            AttachError::Misaligned => f.write_str("the region does not begin at a multiple of 8"),
            AttachError::UnknownPeer => f.write_str("the peer is not known, or no longer"),
            AttachError::UnknownRegion => f.write_str("the region is not known, or no longer"),
            AttachError::Unsupported => f.write_str("the rail cannot serve such memory"),
            AttachError::Unheard => f.write_str("the peer has not said where it is; it does so in its waits"),
            AttachError::InUse(by) => write!(f, "the region is in use: {by}"),
            AttachError::Config(what) => write!(f, "a setting out of range: {what}"),
            AttachError::System(code) => write!(f, "the system or the provider refused (its code {code})"),
            AttachError::Kept(code) => {
                write!(f, "the provider still holds the memory (its code {code}); do not give it back")
            }
        }
    }
}

impl Display for Use {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            Use::Operations => f.write_str("by operations that have not ended; wait for them"),
            Use::Receives => f.write_str("by receives that have not ended; cancel them or wait for them"),
            Use::Posts(rail) => {
                write!(f, "by posts that rail {} has not finished; make progress, then try again", rail.0)
            }
            Use::Import => f.write_str("by an import in this process; release that"),
            Use::Common => f.write_str("it lies in the peer's common segment; deregister it first"),
        }
    }
}

impl Display for OpError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            OpError::Again => f.write_str("a window, queue or pool is full; make progress, then try again"),
            OpError::UnknownContext => f.write_str("the context number is not configured"),
            OpError::UnknownPeer => f.write_str("the peer is not known, or no longer"),
            OpError::UnknownRegion => f.write_str("the region is not registered, not imported, or no longer"),
            OpError::OutOfBounds { offset, len, size } => {
                write!(f, "{len} bytes at offset {offset} do not lie in a region of {size}")
            }
            OpError::Misaligned { offset, width } => {
                write!(f, "offset {offset} is no multiple of the operation's width, {width} bytes")
            }
            OpError::BadWidth(width) => write!(f, "a width of {width} bytes; there are 1, 2, 4 and 8"),
            OpError::TwoPeers => f.write_str("data and signal lie in regions of different peers"),
            OpError::TooLong { len, max } => write!(f, "{len} bytes, but this call carries {max}"),
            OpError::PeerFailed(why) => write!(f, "the peer has failed: {why}; remove it"),
            OpError::StaleToken => f.write_str("the token names no operation in flight"),
            OpError::Rail(rail, error) => write!(f, "rail {}: {error}", rail.0),
            OpError::DeviceMemory => f.write_str("the processor does not touch memory of a device"),
            OpError::NativeAtomics => f.write_str(
                "a rail of the region's owner executes its atomics; use that rail, or another region",
            ),
            OpError::NoMatching => f.write_str("tagged messages need matching to be attached at setup"),
            OpError::TagTooWide => {
                f.write_str("the tag or the mask has bits beyond the width chosen at setup")
            }
            OpError::Unreported => f.write_str(
                "bytes that are copied on the way have no completion; use registered memory, or quiet",
            ),
            OpError::Abandoned => f.write_str("the thread that drives the engine has panicked"),
        }
    }
}

impl Display for WaitError {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self {
            WaitError::Deadline(stuck) => write!(f, "the time given has passed: {stuck}"),
            WaitError::PeerFailed(peer, why) => write!(f, "peer {} has failed: {why}", peer.peer().0),
            WaitError::Failed(count) => write!(f, "{count} operations without a report have failed"),
            WaitError::Op(error) => write!(f, "{error}"),
        }
    }
}

impl Display for Stuck {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        match self.peer {
            Some(peer) => write!(f, "outstanding at peer {}", peer.peer().0)?,
            None => f.write_str("no operation is outstanding")?,
        }
        if let Some(rail) = self.rail {
            write!(f, " on rail {}", rail.0)?;
        }
        if let Some(hole) = self.hole {
            write!(f, ", first missing number {hole}")?;
        }
        match self.unanswered {
            true => f.write_str(", which has not answered since it was connected"),
            false => Ok(()),
        }
    }
}

impl Display for Unfinished {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Unfinished { peer, peers, missing } = self;
        let missing = match missing {
            Missing::Operations => "operations have not ended",
            Missing::Answer => "no goodbye has come",
        };
        write!(f, "{peers} peers have not left; of the first, peer {}, {missing}", peer.peer().0)
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

    /// The text of an expired wait names peer, rail and missing number, as far as they are known.
    #[test]
    fn a_deadline_names_what_was_stuck() {
        let peer = PeerId { index: 3, generation: 9 };
        let stuck = Stuck { peer: Some(peer), rail: Some(RailId(1)), hole: Some(77), unanswered: false };
        assert_eq!(
            WaitError::Deadline(stuck).to_string(),
            "the time given has passed: outstanding at peer 3 on rail 1, first missing number 77"
        );
        assert_eq!(Stuck::default().to_string(), "no operation is outstanding");
        let refused = OpError::Rail(RailId(2), PostError::TooLong { len: 9, max: 8 });
        assert_eq!(WaitError::Op(refused).to_string(), "rail 2: 9 bytes in one post, but the rail carries 8");
        assert_eq!(
            PeerError::Protocol(Violation::Reply).to_string(),
            "it broke the protocol: a reply to nothing"
        );
    }
}
