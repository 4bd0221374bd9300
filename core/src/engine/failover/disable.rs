//! Takes working rails out of use, and allows rails to return.
//!
//! Both sides may disable rails at the same time. If each side disabled a different one of their
//! last two rails, no rail would join them. So a rail that is disabled is at first *spare*: this
//! side posts nothing on it, but still receives. Meanwhile this side asks the peer to leave the
//! rail (see `leave`). Once the peer has agreed, the rail fails as any other. Until then, this side
//! uses the rail again if the last other rail fails.
//!
//! Tickets decide which side disables its rail. A side refuses a request over a rail that is spare
//! here. If the request is older than its own about that rail, it uses that rail again instead. But
//! once a side has confirmed a request, the peer may have left the rail already. So the side is
//! *sure*, and no longer uses the rail again, unless the last other rail fails: otherwise it could
//! agree to leave the last other one.

use crate::error::{AttachError, PeerError};
use crate::mem::{PeerId, RailId};
use crate::op::Fault;
use crate::rail::Rail;

use super::super::joint::RAILS_MAX;
use super::super::{Engine, State};
use super::leave::DOUBLINGS;
use super::{AGAIN, nth};

/// Rails to a peer that this side has disabled and that the peer has not left yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spare {
    pub(super) rails: u16,
    /// Spare rails whose present request this side has confirmed.
    pub(super) sure: u16,
    /// A spare rail that was not disabled, but given up (see `given_up`), as a bitmask, and since
    /// when, in [`Failover::time`](super::Failover::time).
    pub(super) stalled: u16,
    pub(super) since: u64,
    /// For each spare rail, the ticket of its request.
    tickets: [u64; RAILS_MAX],
    /// Passes until the peer is asked again.
    wait: u32,
    asked: u32,
}

impl Spare {
    pub(super) const NONE: Spare = Spare {
        rails: 0,
        sure: 0,
        stalled: 0,
        since: 0,
        tickets: [0; RAILS_MAX],
        wait: 0,
        asked: 0,
    };

    fn is_spare(&self, rail: usize) -> bool {
        self.rails >> rail & 1 != 0
    }

    /// Notes that this side confirms a request. Returns `false` if there is no such request.
    pub(super) fn confirm(&mut self, rail: usize, ticket: u64) -> bool {
        let ours = self.is_spare(rail) && self.tickets[rail] == ticket;
        self.sure |= u16::from(ours) << rail;
        ours
    }

    /// Whether this side uses a rail again, because the peer's request is older.
    pub(super) fn gives_way(&self, rail: usize, ticket: u64) -> bool {
        self.is_spare(rail) && self.sure >> rail & 1 == 0 && self.tickets[rail] > ticket
    }

    /// Forgets requests about rails. The other requests are soon repeated, because a side answers
    /// one at a time.
    pub(super) fn end(&mut self, rails: u16) {
        if self.rails & rails != 0 {
            (self.wait, self.asked) = (AGAIN, 0);
        }
        self.rails &= !rails;
        self.sure &= !rails;
        self.stalled &= !rails;
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Takes one of the rails to a peer out of use, as if it had failed, until
    /// [`enable_rail`](Self::enable_rail). Nothing new is posted on the rail. Once the peer has
    /// agreed, later passes move to other rails what the rail still carries. The rail stays in use
    /// after all if the last other rail fails first, or if the peer has asked earlier to disable
    /// another rail. Then [`rail_error`](Self::rail_error) returns `None` again. Does not block.
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`] if the peer was removed. [`AttachError::Config`] if the peer is
    /// not connected or has no [failover](Self::has_failover), if `rail` does not lead to it, or if
    /// `rail` is the last one in use.
    pub fn disable_rail(&mut self, peer: PeerId, rail: RailId) -> Result<(), AttachError> {
        let bit = self.kept_rail(peer, rail)?;
        let in_use = self.state.peers[peer.index as usize].rails;
        if in_use & !bit == 0 {
            return Err(AttachError::Config(
                "rail: the last one in use; enable another rail first",
            ));
        }
        let why = PeerError::Removed;
        let failed = self.state.has_failed(peer.index, bit);
        if let Some(kept) = self.state.kept_peer_mut(peer.index) {
            kept.disabled |= bit;
            kept.back.rest(bit);
            if failed || kept.spare.stalled & bit != 0 {
                // If a peer is leaving the rail, it can still be drained.
                kept.spare.stalled &= !bit;
                kept.why[usize::from(rail.0)] = Some(Fault::Peer(why));
                return Ok(());
            }
        }
        if in_use & bit != 0 {
            self.state.spare_rail(peer.index, rail.0.into(), Fault::Peer(why));
        } else if self.state.open_rails(peer.index) & bit == 0 {
            // The rail was about to return.
            self.state.rail_failed(peer.index, rail.0.into(), Fault::Peer(why), why);
        }
        Ok(())
    }

    /// Allows a rail to a peer to return after it was [disabled](Self::disable_rail) or has failed.
    /// Later passes use the rail once both sides agree, if it can reach the peer and the other side
    /// has not disabled it. A failed rail returns without this call. Does not block.
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`] if the peer was removed. [`AttachError::Config`] if the peer is
    /// not connected or has no [failover](Self::has_failover), or if `rail` does not lead to it.
    pub fn enable_rail(&mut self, peer: PeerId, rail: RailId) -> Result<(), AttachError> {
        let bit = self.kept_rail(peer, rail)?;
        if let Some(kept) = self.state.kept_peer_mut(peer.index) {
            kept.disabled &= !bit;
        }
        self.state.use_spares(peer.index, bit & self.state.unsure(peer.index));
        self.state.may_return(peer.index, bit);
        Ok(())
    }

    /// Returns whether a peer survives the failure of a rail. This requires that the peer has
    /// [answered](Self::has_answered), that both sides have attached failover, and that several
    /// rails join them.
    pub fn has_failover(&self, peer: PeerId) -> Result<bool, AttachError> {
        Ok(self.has_answered(peer)? && self.state.kept_peer(peer.index).is_some())
    }

    /// Returns why a rail to a peer is out of use, or `None` if it is in use. The reason stays
    /// available after the peer has failed with its last rail. After
    /// [`disable_rail`](Self::disable_rail) it is [`PeerError::Removed`].
    pub fn rail_error(&self, peer: PeerId, rail: RailId) -> Result<Option<Fault>, AttachError> {
        self.peer_error(peer)?;
        let kept = self.state.kept_peer(peer.index);
        Ok(kept.and_then(|kept| kept.why.get(rail.0 as usize).copied().flatten()))
    }

    fn kept_rail(&self, peer: PeerId, rail: RailId) -> Result<u16, AttachError> {
        self.peer_error(peer)?;
        let up = self.state.peers[peer.index as usize].state.is_up();
        let Some(kept) = self.state.kept_peer(peer.index).filter(|_| up) else {
            return Err(AttachError::Config(
                "peer: not connected with failover; check has_failover",
            ));
        };
        match kept.joined & 1u16.checked_shl(rail.0.into()).unwrap_or(0) {
            0 => Err(AttachError::Config(
                "rail: does not lead to the peer; name one of the rails that do",
            )),
            bit => Ok(bit),
        }
    }

    /// Asks a peer to leave the spare rails. Repeats the requests over one rail after the other,
    /// because any rail may have failed unnoticed.
    pub(super) fn ask_for_spares(&mut self, peer: u16) {
        if self.state.is_meeting(peer) {
            return;
        }
        let in_use = self.state.peers[peer as usize].rails;
        self.state.take_back(peer);
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        let spare = &mut kept.spare;
        spare.wait = spare.wait.saturating_sub(1);
        if spare.rails == 0 || spare.wait != 0 {
            return;
        }
        let Spare { rails, stalled, tickets, asked, .. } = *spare;
        spare.wait = AGAIN << asked.min(DOUBLINGS);
        spare.asked = asked.wrapping_add(1);
        let Some(over) = nth(in_use, asked) else { return };
        for (rail, ticket) in tickets.into_iter().enumerate() {
            if rails >> rail & 1 != 0 {
                let stalls = stalled >> rail & 1 != 0;
                _ = self.ask_to_leave(peer, rail, over, stalls, ticket);
            }
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    pub(super) fn spare_rail(&mut self, peer: u16, rail: usize, why: Fault) {
        let bit = 1 << rail;
        let Some(failover) = &mut self.failover else { return };
        let ticket = failover.ticket();
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.spare.rails |= bit;
        kept.spare.tickets[rail] = ticket;
        (kept.spare.wait, kept.spare.asked) = (0, 0);
        kept.why[rail] = Some(why);
        self.peers[peer as usize].rails &= !bit;
        self.pairings[peer as usize].wait.end(rail);
        self.ask(self.stream_of(0, peer));
    }

    /// Returns the spare rails that the peer cannot have left yet.
    pub(super) fn unsure(&self, peer: u16) -> u16 {
        self.kept_peer(peer).map_or(0, |kept| kept.spare.rails & !kept.spare.sure)
    }

    /// Uses spare rails again, as if this side had not disabled them.
    #[cold]
    pub(super) fn use_spares(&mut self, peer: u16, rails: u16) {
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        let back = kept.spare.rails & rails;
        kept.spare.end(back);
        kept.disabled &= !back;
        for (rail, why) in kept.why.iter_mut().enumerate() {
            *why = why.filter(|_| back >> rail & 1 == 0);
        }
        self.peers[peer as usize].rails |= back;
    }

    /// Returns the rails that have not failed here: those in use and the spare ones.
    #[cold]
    pub(in super::super) fn open_rails(&self, peer: u16) -> u16 {
        self.peers[peer as usize].rails | self.kept_peer(peer).map_or(0, |kept| kept.spare.rails)
    }
}
