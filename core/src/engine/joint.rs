//! Joints. A joint names one of our rails, the rail of the peer that it leads to, and the longest
//! message between the two. Joints are set when a peer is connected. Hot paths use copies in the
//! peer's streams.

use crate::error::AttachError;
use crate::mem::{RailId, Zeroable};
use crate::rail::RailKey;

use super::close::Parting;
use super::doubt::Doubt;
use super::epoch::Meeting;
use super::load::Wait;
use super::protocol::MatchLimits;

/// Maximum number of rails of an engine.
pub const RAILS_MAX: usize = 16;

const MESSAGE_MIN: usize = 128;

/// One of our rails, and the rail of the peer that it leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joint {
    /// Our rail.
    pub ours: RailId,
    /// The peer's number for its rail, 0 to 15.
    pub theirs: u8,
    /// The longest message that the peer accepts on this rail, in bytes. At least 128. May be less
    /// than [`Caps::max_message`](crate::rail::Caps) of our rail, because the peer's rail may
    /// accept less.
    pub max_message: usize,
}

/// What this side knows about a peer: the numbers of its rails, its limits, and how far they have
/// connected or closed.
#[derive(Clone, Copy, Debug)]
pub struct Pairing {
    /// The peer's number for each of our rails, in four bits each.
    pub(super) theirs: u64,
    /// Longest message, in bytes, that both sides accept on each of our rails. 0 if a rail does not
    /// reach this peer.
    pub(crate) messages: [u32; RAILS_MAX],
    /// The longest message to the peer, in bytes: the maximum of `messages`. With failover, the
    /// minimum for the rails that reach the peer.
    pub(crate) longest: u32,
    /// Longest write, in bytes, that all rails to the peer accept in one post and that is not
    /// striped.
    pub(crate) single: u32,
    pub(crate) matching: MatchLimits,
    pub(crate) meeting: Meeting,
    pub(crate) parting: Parting,
    pub(crate) wait: Wait,
    pub(super) doubt: Doubt,
    /// The last epoch used in this slot. It outlives the attachment.
    pub(crate) last: u32,
}

// SAFETY: zeros are a valid value, because all fields are numbers, flags or `Bond`, and the first
// variant of `Bond` is 0.
unsafe impl Zeroable for Pairing {}

impl Pairing {
    /// Both sides number their rails alike, and have exchanged nothing yet.
    pub const ALIKE: Pairing = Pairing {
        theirs: 0xfedc_ba98_7654_3210,
        messages: [u32::MAX; RAILS_MAX],
        longest: 0,
        single: 0,
        matching: MatchLimits::ALIKE,
        meeting: Meeting::NONE,
        parting: Parting::NONE,
        wait: Wait::NONE,
        doubt: Doubt::NONE,
        last: 0,
    };

    /// Builds a pairing from joints. Also returns our rails that have a joint, as a bitmask.
    pub(super) fn of(joints: &[Joint], rails: usize) -> Result<(Pairing, u16), AttachError> {
        let mut pairing = Pairing { theirs: 0, messages: [0; RAILS_MAX], ..Pairing::ALIKE };
        let (mut ours, mut theirs) = (0u16, 0u16);
        for joint in joints {
            let (at, there) = (usize::from(joint.ours.0), usize::from(joint.theirs));
            if at >= rails || there >= RAILS_MAX {
                return Err(AttachError::Config(
                    "joints: names a rail that does not exist; name rails of both sides",
                ));
            }
            if ours & 1 << at != 0 || theirs & 1 << there != 0 {
                return Err(AttachError::Config("joints: names a rail twice; name each rail once"));
            }
            if joint.max_message < MESSAGE_MIN {
                return Err(AttachError::Config("joints: max_message must be at least 128 bytes"));
            }
            (ours, theirs) = (ours | 1 << at, theirs | 1 << there);
            pairing.theirs |= (there as u64) << (4 * at);
            pairing.messages[at] = u32::try_from(joint.max_message).unwrap_or(u32::MAX);
        }
        Ok((pairing, ours))
    }

    #[inline]
    pub(super) fn theirs(&self, ours: usize) -> usize {
        (self.theirs >> (4 * ours) & 15) as usize
    }

    #[cold]
    pub(super) fn as_ours(&self, theirs: u16) -> u16 {
        (0..RAILS_MAX).fold(0, |ours, rail| ours | (theirs >> self.theirs(rail) & 1) << rail)
    }

    /// Returns `None` if the key of a rail in the bitmask is missing.
    pub(crate) fn in_our_order<const RAILS: usize>(
        &self,
        rails: u16,
        key: impl Fn(usize) -> Option<RailKey>,
    ) -> Option<[RailKey; RAILS]> {
        let mut keys = [RailKey::default(); RAILS];
        for (ours, place) in keys.iter_mut().enumerate().filter(|(ours, _)| rails >> ours & 1 != 0)
        {
            *place = key(self.theirs(ours))?;
        }
        Some(keys)
    }

    #[cold]
    pub(crate) fn too_short(&self, bytes: u32) -> u16 {
        let short = |(rail, most): (usize, &u32)| ((*most < bytes) as u16) << rail;
        self.messages.iter().enumerate().map(short).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joint(ours: u8, theirs: u8) -> Joint {
        Joint { ours: RailId(ours), theirs, max_message: 256 }
    }

    fn key(rail: usize) -> RailKey {
        RailKey { key: rail as u64, base: !rail as u64 }
    }

    #[test]
    fn keys_are_taken_as_rails_are_joined() {
        let (one, rails) = Pairing::of(&[joint(2, 15), joint(0, 3)], 3).unwrap();
        assert_eq!(rails, 0b101);
        let keys = one.in_our_order::<4>(rails, |rail| Some(key(rail)));
        assert_eq!(keys, Some([key(3), RailKey::default(), key(15), RailKey::default()]));
        let few = one.in_our_order::<4>(rails, |rail| (rail < 15).then(|| key(rail)));
        assert_eq!(few, None, "a rail without a key");
        let alike = Pairing::ALIKE.in_our_order::<16>(u16::MAX, |rail| Some(key(rail)));
        assert_eq!(alike, Some(core::array::from_fn(key)));
        let turned: [Joint; 16] = core::array::from_fn(|rail| joint(rail as u8, 15 - rail as u8));
        let (turned, rails) = Pairing::of(&turned, 16).unwrap();
        let keys = turned.in_our_order::<16>(rails, |rail| Some(key(rail)));
        assert_eq!(keys, Some(core::array::from_fn(|rail| key(15 - rail))));
    }

    #[test]
    fn a_rail_is_named_once_and_exists() {
        let wrong: [&[Joint]; 5] = [
            &[joint(0, 1), joint(0, 2)],
            &[joint(0, 1), joint(1, 1)],
            &[joint(3, 0)],
            &[joint(255, 0)],
            &[joint(0, 16)],
        ];
        for joints in wrong {
            assert!(matches!(Pairing::of(joints, 3), Err(AttachError::Config(_))), "{joints:?}");
        }
        let short = Joint { max_message: 127, ..joint(0, 0) };
        assert!(Pairing::of(&[short], 1).is_err());
        let long = Joint { max_message: usize::MAX, ..joint(1, 0) };
        let (pairing, _) = Pairing::of(&[joint(0, 1), long], 2).unwrap();
        assert_eq!(pairing.messages[..3], [256, u32::MAX, 0]);
        assert_eq!(pairing.too_short(257), !0b10);
    }
}
