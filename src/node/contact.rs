//! What a node knows of a peer that is connected, attached or failed.

use fishplate_core::engine::Joint;
use fishplate_core::engine::protocol::MatchLimits;
use fishplate_core::mem::{PeerId, RailId};

use super::address::Address;
use super::{Error, RailPair};

/// Minimum and maximum time between two attempts to dial a peer, or two checks that it still
/// listens, in milliseconds. The time grows by an eighth with each attempt.
const REDIAL: [u16; 2] = [20, 1000];

/// The rail to peers on this host.
pub(super) const LOCAL: RailId = RailId(0);

/// The rails that reach a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Whether shared memory reaches the peer. `false` also before a peer on this host is
    /// connected.
    pub shared_memory: bool,
    /// Whether shared memory also carries device memory.
    pub gpu: bool,
    /// Number of libfabric rails.
    pub fabric: usize,
}

/// This structure is small, because a program may connect many peers and talk to few of them. The
/// engine's tables and the rails' memory are set up when the peer is attached.
pub(super) struct Contact {
    pub peer: PeerId,
    pub limits: MatchLimits,
    pub id: u64,
    pub door: u64,
    pub stage: Stage,
}

static_assertions::const_assert_eq!(size_of::<Contact>(), 48);

#[derive(PartialEq, Eq)]
pub(super) enum Stage {
    /// A peer on this host that is not attached yet.
    Meets(Meeting),
    Joined(Box<Joined>),
    /// The peer connected, but could not be attached; or it ended before it connected.
    Failed(Box<Error>),
}

#[derive(PartialEq, Eq)]
pub(super) struct Joined {
    pub reach: Reach,
    pub pairs: Vec<RailPair>,
}

impl Stage {
    pub(super) fn local(gpu: bool) -> Stage {
        let reach = Reach { shared_memory: true, gpu, fabric: 0 };
        Stage::Joined(Box::new(Joined { reach, pairs: vec![] }))
    }

    pub(super) fn over_fabric(pairs: Vec<RailPair>) -> Stage {
        let reach = Reach { shared_memory: false, gpu: false, fabric: pairs.len() };
        Stage::Joined(Box::new(Joined { reach, pairs }))
    }

    pub(super) fn failed(error: Error) -> Stage {
        Stage::Failed(Box::new(error))
    }

    pub(super) fn is_meeting(&self) -> bool {
        matches!(self, Stage::Meets(_))
    }
}

impl Contact {
    /// Returns the contact of a peer on another host.
    pub(super) fn distant(peer: PeerId, id: u64, limits: MatchLimits, stage: Stage) -> Contact {
        Contact { peer, limits, id, door: 0, stage }
    }

    pub(super) fn pairs(&self) -> &[RailPair] {
        match &self.stage {
            Stage::Joined(joined) => &joined.pairs,
            _ => &[],
        }
    }

    pub(super) fn meeting(&mut self) -> Option<&mut Meeting> {
        match &mut self.stage {
            Stage::Meets(meeting) => Some(meeting),
            _ => None,
        }
    }

    pub(super) fn is_at(&self, step: Step) -> bool {
        matches!(&self.stage, Stage::Meets(meeting) if meeting.step == step)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Meeting {
    pub step: Step,
    /// Whether both nodes have a device.
    pub gpu: bool,
    /// Time of the next attempt, and pause after it, in milliseconds.
    pub at: u32,
    pub pause: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Dials,
    /// This node has dialled. It never dials twice at once, because both sides must use the same
    /// link.
    Dialled,
    /// The peer dials. Meanwhile this node checks that it still listens.
    Waits,
    /// Connected. The two nodes still exchange the settings of their devices.
    Agrees,
}

impl Meeting {
    pub(super) fn new(dials: bool, gpu: bool, now: u32) -> Meeting {
        let mut meeting = Meeting { step: Step::Dials, gpu, at: now, pause: REDIAL[0] };
        if !dials {
            meeting.later(Step::Waits, now);
        }
        meeting
    }

    pub(super) fn later(&mut self, step: Step, now: u32) {
        let pause = self.pause;
        (self.step, self.at) = (step, now.wrapping_add(pause.into()));
        self.pause = (pause + pause / 8).min(REDIAL[1]);
    }

    pub(super) fn again(&mut self, dials: bool, now: u32) {
        self.later(if dials { Step::Dials } else { Step::Waits }, now);
    }

    pub(super) fn is_due(&self, now: u32) -> bool {
        matches!(self.step, Step::Dials | Step::Waits) && now.wrapping_sub(self.at) <= u32::MAX / 2
    }
}

pub(super) fn joint(ours: RailId, theirs: RailId, max_message: usize) -> Joint {
    Joint { ours, theirs: theirs.0, max_message }
}

/// Converts a time to milliseconds. The value wraps.
pub(super) fn to_ms(ns: u64) -> u32 {
    (ns / 1_000_000) as u32
}

pub(super) fn limits(address: &Address) -> MatchLimits {
    let Address { eager, credits, headers, .. } = *address;
    MatchLimits { eager, credits, headers }
}
