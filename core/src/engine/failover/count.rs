//! Counts what happens to each rail, and notes which rails have failed or returned.

use core::array::from_fn;

use crate::mem::{PeerId, RailId};
use crate::op::Fault;
use crate::probe::probe;
use crate::rail::Rail;

use super::super::{Engine, State};
use super::Failover;

/// Counters of one rail, over all peers. Only peers with [failover](Engine::has_failover) count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RailStats {
    /// Number of times that the rail failed while its peer stayed connected.
    pub failed: u64,
    /// Number of times that this side fenced the rail to a peer.
    pub fenced: u64,
    /// Number of times that the rail returned to a peer.
    pub returned: u64,
    /// Sequence numbers that were lost on this rail, and posted again on another rail.
    pub reposted: u64,
    /// Arrivals that the rail has [dropped](Rail::late), because their sender was not attached.
    pub late: u64,
    /// The last time to resume: from the detection of the rail's failure until everything that a
    /// peer lost by it was posted again. In nanoseconds, or in passes if the rails have no
    /// [clock](Rail::CLOCK).
    pub resumed_ns: u64,
    /// The longest time to resume.
    pub resumed_max_ns: u64,
}

impl RailStats {
    /// Names of the counters, in the order of [`values`](Self::values).
    pub const NAMES: [&'static str; 7] =
        ["failed", "fenced", "returned", "reposted", "late", "resumed_ns", "resumed_max_ns"];

    /// Returns the counters in the order of [`NAMES`](Self::NAMES).
    pub fn values(&self) -> [u64; Self::NAMES.len()] {
        let RailStats { failed, fenced, returned, reposted, late, resumed_ns, resumed_max_ns } =
            *self;
        [failed, fenced, returned, reposted, late, resumed_ns, resumed_max_ns]
    }
}

/// A rail to a peer that has failed or returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailChange {
    /// The peer.
    pub peer: PeerId,
    /// The rail.
    pub rail: RailId,
    /// The reason why the rail is out of use, or `None` if it is in use again.
    pub error: Option<Fault>,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Returns the counters of a rail, or `None` if there is no such rail.
    pub fn rail_stats(&self, rail: RailId) -> Option<RailStats> {
        let late = self.rails.get(usize::from(rail.0))?.late();
        let counted = self
            .state
            .failover
            .as_ref()
            .and_then(|failover| failover.rails.get(usize::from(rail.0)));
        Some(RailStats { late, ..counted.copied().unwrap_or_default() })
    }

    /// Makes [`has_call`](Self::has_call) return `true` also when a rail to a peer has failed or
    /// returned. Then take the changes with [`next_rail_change`](Self::next_rail_change). Without
    /// [failover](Self::attach_failover), no rail changes.
    pub fn report_rail_changes(&mut self) {
        if let Some(failover) = &mut self.state.failover {
            failover.reports = true;
        }
    }

    /// Takes the next rail that has failed or returned since the last look. A rail that has done
    /// both is taken once, with its present state. A peer's last rail is taken too: the peer fails
    /// with it. Slow path: looks at the peers one by one.
    pub fn next_rail_change(&mut self) -> Option<RailChange> {
        let state = &mut self.state;
        let mut found = None;
        for peer in state.failover.as_ref()?.changed..state.reached as u16 {
            let Some(kept) = state.kept_peer_mut(peer).filter(|kept| kept.changed != 0) else {
                continue;
            };
            let rail = kept.changed.trailing_zeros() as u8;
            kept.changed &= kept.changed - 1;
            // A rail that the peer has not left may be used again.
            let error = kept.why[usize::from(rail)].filter(|_| kept.spare.rails >> rail & 1 == 0);
            found = Some(RailChange { peer: state.peer_id(peer), rail: RailId(rail), error });
            break;
        }
        if let Some(failover) = &mut state.failover {
            failover.changed = found.map_or(u16::MAX, |change| change.peer.index);
        }
        found
    }
}

impl Failover<'_> {
    /// Returns how often rails have failed and returned, and how many numbers were posted again.
    pub(in super::super) fn totals(&self) -> [u64; 3] {
        let each = |rail: &RailStats| [rail.failed, rail.returned, rail.reposted];
        self.rails.iter().map(each).fold([0; 3], |all, one| from_fn(|at| all[at] + one[at]))
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    pub(super) fn counts(&mut self, rail: usize) -> Option<&mut RailStats> {
        self.failover.as_mut()?.rails.get_mut(rail)
    }

    pub(super) fn note_change(&mut self, peer: u16, rail: usize) {
        if let Some(kept) = self.kept_peer_mut(peer) {
            kept.changed |= 1 << rail;
        }
        if let Some(failover) = &mut self.failover {
            failover.changed = failover.changed.min(peer);
            self.called |= failover.reports;
        }
    }

    /// `carried`: whether posts to the peer may be in flight on the rail.
    pub(super) fn note_failed(&mut self, peer: u16, rail: usize, carried: bool) {
        probe!("rail_down", peer, rail);
        let now = self.loads.now();
        if let Some(counts) = self.counts(rail) {
            counts.failed += 1;
        }
        if let Some(kept) = self.kept_peer_mut(peer).filter(|_| carried) {
            kept.resuming |= 1 << rail;
            kept.since[rail] = now;
        }
    }

    pub(super) fn note_returned(&mut self, peer: u16, rail: usize) {
        probe!("rail_up", peer, rail);
        if let Some(counts) = self.counts(rail) {
            counts.returned += 1;
        }
        self.note_change(peer, rail);
    }

    /// Records the time to resume of each failed rail about which the peer has reported everything,
    /// once nothing is left to post again.
    pub(super) fn note_resumed(&mut self, peer: u16) {
        let Some(kept) = self.kept_peer(peer).filter(|kept| kept.resuming != 0) else { return };
        // A rail in a new epoch has no reports. Those of the epoch that ended were complete.
        let failed = kept.suspect | kept.fencing | kept.fenced;
        let done = kept.resuming & (self.heard(peer) | !failed);
        let (now, contexts) = (self.loads.now(), self.config.contexts);
        let left = |stream: u32| {
            let resuming = self.failover.as_ref().map(|failover| failover.streams[stream as usize]);
            resuming.is_some_and(|one| one.lost || one.answers || one.reads)
        };
        if done == 0 || (0..contexts).any(|context| left(self.stream_of(context as u8, peer))) {
            return;
        }
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.resuming &= !done;
        let since = kept.since;
        for rail in (0..RAILS).filter(|rail| done >> rail & 1 != 0) {
            let Some(counts) = self.counts(rail) else { return };
            counts.resumed_ns = now.saturating_sub(since[rail]);
            counts.resumed_max_ns = counts.resumed_max_ns.max(counts.resumed_ns);
        }
    }
}
