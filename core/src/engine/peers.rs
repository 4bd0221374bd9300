//! Reserves, connects and removes peers. Slow paths that neither block nor allocate. After an error
//! nothing has changed.

use crate::error::{AttachError, PeerError, Use};
use crate::mem::PeerId;
use crate::rail::{Order, Rail};
use crate::sync::seq::Seq;

use super::failover;
use super::joint::{Joint, Pairing};
use super::post_tag::{GENERATION_MASK, Owner, PostTag, STREAM_POST_MAX};
use super::protocol::MatchLimits;
use super::stream::{MESSAGES, Stream, WRITES};
use super::table::{self, PeerSlot, PeerState};
use super::window::bitmap_words;
use super::{Engine, State, mix};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Reserves a slot for a peer. Attach the peer to the rails under [`PeerId::peer`]. Then call
    /// [`join_peer`](Self::join_peer), or [`connect_peer`](Self::connect_peer) if both sides have
    /// the same rails. Make no progress in between: messages from the peer are dropped until it is
    /// connected, and are not sent again.
    pub fn reserve_peer(&mut self) -> Result<PeerId, AttachError> {
        let peer = self.name_peer()?;
        self.set_up_peer(peer)?;
        Ok(peer)
    }

    /// Reserves a slot for a peer without touching memory other than its [`PeerSlot`]. Call
    /// [`set_up_peer`](Self::set_up_peer) before you attach the peer to a rail.
    pub fn name_peer(&mut self) -> Result<PeerId, AttachError> {
        table::reserve_peer(self.state.peers)
    }

    /// Sets up the tables of a peer that [`name_peer`](Self::name_peer) has returned.
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`] if the peer is not reserved.
    pub fn set_up_peer(&mut self, peer: PeerId) -> Result<(), AttachError> {
        self.state.peer_mut(peer).ok_or(AttachError::UnknownPeer)?;
        self.state.set_up_peer(peer.index);
        Ok(())
    }

    #[inline]
    pub(crate) fn rails_to(&self, peer: PeerId) -> u16 {
        let slot = self.state.peers.get(peer.index as usize);
        slot.filter(|slot| slot.generation == peer.generation).map_or(0, |slot| slot.rails)
    }

    /// Connects a peer that is attached to the rails in `rails` (bit i: rail i). Use this instead
    /// of [`join_peer`](Self::join_peer) if each rail leads to the peer's rail of the same number,
    /// and both sides have equal limits.
    pub fn connect_peer(&mut self, peer: PeerId, rails: u16) -> Result<(), AttachError> {
        self.join(peer, rails, Pairing::ALIKE)
    }

    /// Connects a peer that is attached to the rails that `joints` name. The program may then issue
    /// operations.
    ///
    /// Operations are queued until the peer has connected too and both sides have made progress.
    /// [`has_answered`](Self::has_answered) says when. Over rails that keep attachments apart
    /// ([`Caps::fresh`](crate::rail::Caps)), operations need no such answer.
    ///
    /// The two sides may number the rails differently; `joints` names the peer's rail for each of
    /// ours. `matching` has the peer's limits of tagged messages; `None` means that they equal
    /// ours. Slow path.
    ///
    /// # Errors
    /// [`AttachError::Config`] if there are no joints, or one is invalid.
    /// [`AttachError::UnknownPeer`] if the peer is not reserved.
    pub fn join_peer(
        &mut self,
        peer: PeerId,
        joints: &[Joint],
        matching: Option<MatchLimits>,
    ) -> Result<(), AttachError> {
        let (pairing, rails) = Pairing::of(joints, self.rails.len())?;
        let matching = matching.unwrap_or(MatchLimits::ALIKE);
        self.join(peer, rails, Pairing { matching, ..pairing })
    }

    /// Checks joints as [`join_peer`](Self::join_peer) does.
    ///
    /// # Errors
    /// [`AttachError::Config`] if one is invalid.
    pub fn check_joints(&self, joints: &[Joint]) -> Result<(), AttachError> {
        Pairing::of(joints, self.rails.len()).map(drop)
    }

    fn join(&mut self, peer: PeerId, rails: u16, mut pairing: Pairing) -> Result<(), AttachError> {
        let slot = self.state.peer_mut(peer).ok_or(AttachError::UnknownPeer)?;
        if slot.state != PeerState::Reserved {
            return Err(AttachError::UnknownPeer);
        }
        if rails == 0 || u32::from(rails) >> self.rails.len() != 0 {
            return Err(AttachError::Config(
                "rails: empty, or names a rail that does not exist; name rails of this engine",
            ));
        }
        let config = self.state.config;
        self.state.set_up_peer(peer.index);
        let several = rails.count_ones() > 1;
        pairing.single = STREAM_POST_MAX as u32;
        // Nothing orders posts on different rails.
        let mut order = if several { Order::None } else { Order::All };
        let (mut fresh, mut shortest) = (true, u32::MAX);
        for (i, rail) in self.rails.iter().enumerate() {
            if rails & (1 << i) == 0 {
                pairing.messages[i] = 0;
                continue;
            }
            let caps = rail.caps();
            // The tag of a silent post cannot encode a greater length.
            let message = caps.max_message.min(STREAM_POST_MAX as usize) as u32;
            pairing.messages[i] = pairing.messages[i].min(message);
            shortest = shortest.min(pairing.messages[i]);
            pairing.longest = pairing.longest.max(pairing.messages[i]);
            pairing.single = pairing.single.min(self.state.max_rma[i] as u32);
            order = order.min(caps.order);
            fresh &= caps.fresh;
        }
        let holds = match order {
            Order::None => WRITES | MESSAGES,
            Order::Reports => WRITES,
            Order::All => 0,
        };
        let slot = &mut self.state.peers[peer.index as usize];
        slot.rails = rails;
        let skipped =
            mix(config.seed ^ ((peer.index as u64) << 32)) % u64::from(rails.count_ones());
        let first = (0..skipped).fold(rails, |rails, _| rails & (rails - 1));
        slot.turn = first.trailing_zeros() as u8;
        for context in 0..config.contexts {
            let stream = self.state.stream_of(context as u8, peer.index);
            let owner = Owner::Stream(stream, peer.generation & GENERATION_MASK);
            let stream = &mut self.state.streams[stream as usize];
            (stream.generation, stream.holds) = (peer.generation, holds);
            stream.tag = PostTag { owner, bytes: 0 }.pack();
        }
        let place = &mut self.state.pairings[peer.index as usize];
        *place = Pairing { last: place.last, ..pairing };
        self.state.shortest = self.state.shortest.min(shortest);
        if shortest as usize >= failover::LONGEST {
            let least =
                self.state.max_rma.iter().enumerate().filter(|(rail, _)| rails >> rail & 1 != 0);
            let least = least.map(|(_, &most)| most).min().unwrap_or(0);
            self.state.keep_peer(peer.index, rails, (least, shortest));
        }
        self.state.eager = self.state.eager.min(self.state.room(peer.index) as u32);
        self.state.open_accounts(peer.index);
        self.state.meet(peer.index, fresh);
        Ok(())
    }

    /// Removes a peer, alive or failed. Operations to the peer fail. Their outcome is unknown if a
    /// living peer may still apply them. The peer's regions are released, and its [`PeerId`]
    /// becomes stale. Slow path.
    ///
    /// # Errors
    /// [`AttachError::InUse`] while regions in the segment shared with this peer are registered,
    /// because the segment is removed with the peer.
    pub fn remove_peer(&mut self, peer: PeerId) -> Result<(), AttachError> {
        let slot = self.state.peer_mut(peer).ok_or(AttachError::UnknownPeer)?;
        // A peer that was never connected may be attached to any rail.
        let rails = if slot.rails == 0 { u16::MAX } else { self.state.joined_rails(peer.index) };
        if self.state.locals.iter().any(|local| local.common == peer.index) {
            return Err(AttachError::InUse(Use::Common));
        }
        self.state.set_up_peer(peer.index);
        self.state.fail_peer(peer.index, PeerError::Removed);
        for index in 0..self.state.remotes.len() {
            if self.state.remotes[index].is_of(peer.index) {
                self.release_slot(index);
            }
        }
        for (i, rail) in self.rails.iter_mut().enumerate() {
            if rails & (1 << i) != 0 {
                rail.detach(peer.peer());
            }
        }
        self.state.forget_matching(peer.index);
        self.state.forget_kept(peer.index);
        self.state.reset_streams(peer.index);
        self.state.troubles -= 1;
        let slot = &mut self.state.peers[peer.index as usize];
        let generation = slot.generation.wrapping_add(1);
        *slot = PeerSlot { generation, ready: true, ..PeerSlot::EMPTY };
        let pairing = &mut self.state.pairings[peer.index as usize];
        *pairing = Pairing { last: pairing.last, ..Pairing::ALIKE };
        Ok(())
    }

    /// Returns whether the peer has connected too and knows this attachment, so that operations are
    /// sent. Returns `false` if the peer has failed.
    pub fn has_answered(&self, peer: PeerId) -> Result<bool, AttachError> {
        self.peer_error(peer)?;
        Ok(self.state.streams[self.state.stream_of(0, peer.index) as usize].live)
    }

    /// Returns why a peer has failed, if it has.
    pub fn peer_error(&self, peer: PeerId) -> Result<Option<PeerError>, AttachError> {
        let slot = self.state.peers.get(peer.index as usize).ok_or(AttachError::UnknownPeer)?;
        match slot.state {
            _ if slot.generation != peer.generation => Err(AttachError::UnknownPeer),
            PeerState::Connected | PeerState::Meeting => Ok(None),
            PeerState::Closing => {
                Ok(self.state.has_said_bye(peer.index).then_some(PeerError::Closed))
            }
            PeerState::Failed(why) => Ok(Some(why)),
            PeerState::Free | PeerState::Reserved => Err(AttachError::UnknownPeer),
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    pub(crate) fn peer_mut(&mut self, peer: PeerId) -> Option<&mut PeerSlot> {
        let slot = self.peers.get_mut(peer.index as usize)?;
        (slot.generation == peer.generation && slot.state != PeerState::Free).then_some(slot)
    }

    fn set_up_peer(&mut self, peer: u16) {
        if core::mem::replace(&mut self.peers[peer as usize].ready, true) {
            return;
        }
        self.pairings[peer as usize] = Pairing::ALIKE;
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            // The list of due streams may contain this stream already.
            let Stream { due, due_next, .. } = self.streams[stream];
            let fresh = Stream::new(context as u8, peer, Seq(self.config.first_sequence));
            self.streams[stream] = Stream { due, due_next, ..fresh };
        }
        self.reset_accounts(peer);
        self.reached = self.reached.max(peer as usize + 1);
    }

    fn reset_streams(&mut self, peer: u16) {
        let words = bitmap_words(self.config.window);
        for context in 0..self.config.contexts {
            let index = self.stream_of(context as u8, peer) as usize;
            self.take_lost(index as u32);
            let Stream { due, due_next, .. } = self.streams[index];
            let fresh = Stream::new(context as u8, peer, Seq(self.config.first_sequence));
            self.streams[index] = Stream { due, due_next, ..fresh };
            self.bitmap[2 * index * words..2 * (index + 1) * words].fill(0);
        }
    }
}
