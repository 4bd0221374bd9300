//! Gives up rails that stall.
//!
//! A number that a rail delays holds up its stream, whatever the other rails can carry. TCP repeats
//! lost packets later and later, so a rail that loses many may stall for seconds. Such a rail is
//! fenced, and the other rails carry its numbers.
//!
//! The rail works, so both sides must agree, as if it were disabled: it becomes spare, and the peer
//! is asked to leave it. But the rail is not drained, because that would last as long as the stall.
//! Both sides fence it, as after a failure. It returns in the same way too.
//!
//! Other peers must not be affected, and other rails must remain. So each side gives up one rail to
//! a peer at a time, only if all other rails to that peer are in use and one of them does not
//! stall, and only if its fence cuts off no other peer. If the peer does not agree, or the rail
//! delivers after all, the rail is used again. While the rail is out of use, for a few seconds if
//! it works, the peer fails if all other rails fail.

use crate::error::PeerError;
use crate::op::Fault;

use super::super::State;
use super::super::list::NONE;
use super::super::pending::OpKind;
use super::disable::Spare;

/// Time, in nanoseconds or passes, after which a rail that the peer does not leave is used again.
const ENOUGH: [u64; 2] = [2_000_000_000, 1 << 21];

impl<const RAILS: usize> State<'_, RAILS> {
    /// Gives up a rail that stalls, if that costs nothing.
    #[cold]
    pub(super) fn give_up(&mut self, peer: u16, rail: usize) {
        let (bit, in_use) = (1 << rail, self.peers[peer as usize].rails);
        let working =
            |other: usize| (in_use & !bit) >> other & 1 != 0 && !self.loads.is_stalled(other);
        let Some(kept) = self.kept_peer(peer) else { return };
        let whole = kept.joined & !kept.disabled == in_use;
        if !whole
            || !self.may_carry(peer, rail)
            || !(0..RAILS).any(working)
            || !self.fences_only(peer, rail)
        {
            return;
        }
        let time = self.failover.as_ref().map_or(0, |failover| failover.time);
        self.spare_rail(peer, rail, Fault::Peer(PeerError::Silent));
        if let Some(kept) = self.kept_peer_mut(peer) {
            (kept.spare.stalled, kept.spare.since) = (bit, time);
        }
    }

    /// Returns whether a rail carries a number to the peer, or may carry a read. Other messages are
    /// repeated on other rails, and may wait behind what the peer sends on a slow rail.
    fn may_carry(&self, peer: u16, rail: usize) -> bool {
        self.carries(peer, rail) || self.loads.has_posts(rail) && self.reads_from(peer)
    }

    fn reads_from(&self, peer: u16) -> bool {
        let slots = &self.pending.slots;
        (0..self.config.contexts).any(|context| {
            let s = &self.streams[self.stream_of(context as u8, peer) as usize];
            [s.ops.head, s.closing.head].into_iter().any(|mut index| {
                while index != NONE && slots[index as usize].kind != OpKind::Read {
                    index = slots[index as usize].links.next;
                }
                index != NONE
            })
        })
    }

    /// Returns whether this side can fence a peer on a rail without cutting off another peer.
    pub(super) fn fences_only(&self, peer: u16, rail: usize) -> bool {
        let Some(failover) = &self.failover else { return false };
        let all = failover.fences_all >> rail & 1 != 0;
        let uses = |other: u16| {
            let attached =
                self.kept_peer(other).is_some_and(|kept| kept.back.is_attached(1 << rail));
            let open = attached || self.open_rails(other) >> rail & 1 != 0;
            other != peer && self.peers[other as usize].state.is_up() && open
        };
        failover.fences >> rail & 1 != 0 && !(all && (0..self.reached as u16).any(uses))
    }

    /// Uses a rail again that was given up, once it carries nothing or the peer has not agreed for
    /// too long. If the peer may have left it, asks the peer to leave it as a rail that works.
    pub(super) fn take_back(&mut self, peer: u16) {
        let Some(kept) = self.kept_peer(peer) else { return };
        let Spare { stalled, sure, since, .. } = kept.spare;
        if stalled == 0 {
            return;
        }
        let over = self.is_over(since, ENOUGH);
        if stalled & !sure != 0
            && (over || !self.may_carry(peer, stalled.trailing_zeros() as usize))
        {
            self.use_spares(peer, stalled);
        } else if over && let Some(kept) = self.kept_peer_mut(peer) {
            kept.spare.stalled = 0;
        }
    }
}
