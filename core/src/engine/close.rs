//! Closes connections in an orderly way, so that neither side mistakes the other's exit for a
//! failure.
//!
//! # The exchange
//!
//! Either side begins, or both at once. A closing side rejects new operations to the peer with
//! [`PeerError::Closed`]. The side sends a Bye on each of its streams once two conditions hold:
//!
//! - Each of its own operations to the peer has completed: the peer has applied it, and no post of
//!   it is outstanding.
//! - Every receive that had matched a message of the peer before has completed. From then on this
//!   side reads no payload of the peer and answers no send.
//!
//! Meanwhile the peer may send more. A message that matches and whose payload is still at the peer
//! is refused: the receive and the send fail with `Closed`. Otherwise a peer that keeps sending
//! would delay the Byes for ever.
//!
//! A send of this side that waits for a match could delay its Bye for ever too, for instance if
//! the peer closes and waits in the same way. So a side that only waits for such sends refuses
//! all messages of the peer that no receive has matched, with the outcomes that its Bye would
//! cause. An engine that is its own peer receives what it sent before, if a receive matches in
//! time.
//!
//! A side that receives a Bye closes too, while it makes progress, and answers with its own Byes.
//! It waits for all Byes of the peer, and for the rails to complete its own Byes. Some passes later
//! the peer is [`PeerError::Closed`]. These passes are needed because a rail may complete a Bye
//! before it is sent. A Bye carries the cursor and the credits of its stream, so no acknowledgement
//! is lost.
//!
//! # Operations in flight when a Bye arrives
//!
//! The sender of a Bye makes progress until it receives the answer. The other side answers only
//! when nothing is in flight towards the sender. So writes, signals, atomics, reads and messages
//! complete as usual. Only a send that waits for a matching receive fails, with `Closed`. It fails
//! once all Fins of the peer have arrived, because a Bye may overtake them. The Bye carries the
//! number of Fins. The outcome of a synchronous send whose payload the peer has is unknown: the
//! peer may have received it, or receive it later.
//!
//! # Duplicates and late messages
//!
//! A rail delivers a message once or reports the peer as down, so a Bye is sent once. A duplicate
//! changes nothing.

use crate::error::{AttachError, Missing, OpError, PeerError, Unfinished, Violation};
use crate::mem::{Peer, PeerId, Untrusted};
use crate::rail::{Posted, Rail};
use crate::sync::event::Park;
use crate::sync::host::Host;
use crate::sync::seq::{Seq, truncate};

use super::list::NONE;
use super::pending::{OpKind, PendingSlot};
use super::post::Blocked;
use super::post_tag::{GENERATION_MASK, Owner};
use super::table::PeerState;
use super::wait::Waiter;
use super::wire::{HEAD_MAX, KIND_BYE, get32, get64, put64};
use super::{Engine, State};

/// Number of passes that a side makes after all Byes were sent and received.
const LINGER: u16 = 1024;

const LEN: usize = 28;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Parting {
    due: bool,
    /// The Byes of the contexts below this number were sent.
    sent: u16,
    lingered: u16,
    /// Contexts whose Bye has arrived.
    heard: [u64; 4],
}

impl Parting {
    pub(crate) const NONE: Parting = Parting { due: false, sent: 0, lingered: 0, heard: [0; 4] };

    /// Marks all Byes as unsent, because a failed rail may have lost them.
    pub(super) fn say_again(&mut self) {
        self.sent = 0;
    }

    fn has_heard(&self, context: u8) -> bool {
        self.heard[context as usize / 64] & 1 << (context % 64) != 0
    }

    fn count_heard(&self) -> u32 {
        self.heard.iter().map(|bits| bits.count_ones()).sum()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bye {
    pub context: u8,
    /// The stamp of the stream: a word with sequence number 0.
    pub word: u32,
    pub ack: u32,
    pub freed: u32,
    /// All numbers of the stream below `end` are acknowledged.
    pub end: Seq,
    pub fins: u32,
}

impl Bye {
    pub(crate) fn encode(&self) -> [u8; LEN] {
        let mut out = [0; HEAD_MAX];
        out[..4].copy_from_slice(&[KIND_BYE, self.context, 0, 0]);
        out[4..8].copy_from_slice(&self.word.to_le_bytes());
        out[8..12].copy_from_slice(&self.ack.to_le_bytes());
        out[12..16].copy_from_slice(&self.freed.to_le_bytes());
        put64(&mut out, 16, self.end.0);
        out[24..LEN].copy_from_slice(&self.fins.to_le_bytes());
        core::array::from_fn(|at| out[at])
    }

    pub(crate) fn decode(bytes: Untrusted<'_>) -> Option<Result<Bye, Violation>> {
        let mut head = [0; HEAD_MAX];
        let len = bytes.copy_out(&mut head);
        if head[0] != KIND_BYE {
            return None;
        }
        if head[2..4] != [0, 0] {
            return Some(Err(Violation::Kind));
        }
        if len != LEN || bytes.len() != LEN {
            return Some(Err(Violation::Length));
        }
        Some(Ok(Bye {
            context: head[1],
            word: get32(&head, 4),
            ack: get32(&head, 8),
            freed: get32(&head, 12),
            end: Seq(get64(&head, 16)),
            fins: get32(&head, 24),
        }))
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Begins to close the connection to a peer. New operations to the peer are rejected with
    /// [`PeerError::Closed`]. Earlier operations complete as usual, and then the peer is notified.
    /// Long messages of the peer that match from now on fail with `Closed` at both ends. Make
    /// progress until [`has_left`](Self::has_left) returns `true`. Does not block. Closing twice
    /// changes nothing.
    ///
    /// The other side closes too, and answers while it makes progress, without a call of its
    /// program. Operations of the other side that are in flight are applied here first. Sends of
    /// the other side fail if no receive has matched them.
    ///
    /// # Errors
    /// [`OpError::UnknownPeer`] if the peer was removed or is not connected yet.
    /// [`OpError::PeerFailed`] if it has failed or left.
    #[doc(alias = "ucp_ep_close_nbx")]
    #[doc(alias = "psm2_ep_disconnect")]
    pub fn close_peer(&mut self, peer: PeerId) -> Result<(), OpError> {
        let slot = self.state.peer_mut(peer).ok_or(OpError::UnknownPeer)?;
        if slot.state != PeerState::Closing {
            slot.usable()?;
            self.state.begin_closing(peer.index);
        }
        Ok(())
    }

    /// Returns whether the connection to a peer is closed or has failed.
    /// [`peer_error`](Self::peer_error) tells the two cases apart. After a close nothing is in
    /// flight in either direction. After a failure posts may still be outstanding. Does not make
    /// progress.
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`] if the peer was removed.
    pub fn has_left(&self, peer: PeerId) -> Result<bool, AttachError> {
        self.peer_error(peer)?;
        Ok(!self.state.peers[peer.index as usize].state.is_up())
    }

    /// [Closes](Self::close_peer) the connections to all peers, and makes progress until the peers
    /// have left. Does not wait for failed peers. Blocks until `deadline_ns` at most.
    ///
    /// After a return without an error, every peer that has not failed is closed: nothing is in
    /// flight to or from it, and it does not wait for this engine. So the engine may be dropped,
    /// and the process may exit.
    ///
    /// # Errors
    /// [`Unfinished`] names the peer that is furthest from closed when the deadline expires. Call
    /// `shutdown` again to continue.
    #[doc(alias = "shmem_finalize")]
    pub fn shutdown<H: Host, P: Park>(
        &mut self,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), Unfinished> {
        for peer in 0..self.state.peers.len() as u16 {
            if self.state.peers[peer as usize].usable().is_ok() {
                self.state.begin_closing(peer);
            }
        }
        let left = self.block(waiter, deadline_ns, |e| (e.state.closing == 0).then_some(()));
        left.ok_or(()).or_else(|()| self.state.unfinished())
    }

    /// Continues closing a stream's peer. Returns `false` if the stream must not be served.
    #[cold]
    pub(super) fn close_step(&mut self, stream: u32) -> bool {
        let peer = self.state.streams[stream as usize].peer;
        if self.state.is_meeting(peer) {
            self.greet(peer);
            return false;
        }
        let first = self.state.stream_of(0, peer);
        if stream != first {
            return true;
        }
        if !self.state.has_parted(peer) {
            self.state.fail_unmatched(peer);
            if self.state.is_busy(peer) {
                if self.state.waits_for_match(peer) {
                    self.refuse_unmatched(peer);
                }
                // Stay due, because the completion of the last operation does not make the stream
                // due.
                let up = self.state.peers[peer as usize].state.is_up();
                if up {
                    self.state.due.push(self.state.streams, first);
                }
                return up;
            }
            // Make direct writes visible before the Bye.
            self.settle();
            self.state.pairings[peer as usize].parting.due = true;
        }
        let (contexts, batch) = (self.state.config.contexts, self.state.config.batch);
        let unsent = self.state.pairings[peer as usize].parting.sent..contexts;
        for context in unsent.take(batch as usize) {
            if !self.post_bye(self.state.stream_of(context as u8, peer)) {
                let state = &mut self.state;
                let lost = state.peers[peer as usize].state != PeerState::Closing;
                if !lost {
                    state.due.push(state.streams, first);
                }
                return !lost;
            }
            let parting = &mut self.state.pairings[peer as usize].parting;
            if parting.sent != context {
                // A rail has failed during the post, so all Byes are due again.
                break;
            }
            parting.sent += 1;
        }
        let parting = self.state.pairings[peer as usize].parting;
        let all_sent = parting.sent == contexts;
        if all_sent && parting.count_heard() < contexts.into() {
            return true;
        }
        if !all_sent || self.state.has_posts(peer) || parting.lingered < LINGER {
            let lingered = parting.lingered.saturating_add(all_sent as u16);
            self.state.pairings[peer as usize].parting.lingered = lingered;
            self.state.due.push(self.state.streams, first);
            return true;
        }
        self.state.fail_peer(peer, PeerError::Closed);
        false
    }

    fn post_bye(&mut self, stream: u32) -> bool {
        let s = &self.state.streams[stream as usize];
        let (peer, cursor) = (s.peer, s.window.expected());
        let account =
            self.state.protocol.as_ref().map(|protocol| &protocol.accounts[stream as usize]);
        let bye = Bye {
            context: s.context,
            word: s.stamp,
            ack: truncate::<32>(cursor.0),
            freed: self.state.returned(stream),
            // Later numbers answer gets of the peer, which may complete after the Bye.
            end: s.acked,
            fins: account.map_or(0, |account| account.fins_sent),
        };
        // The stream counts this post, because closing waits for the completion.
        let owner = Owner::Stream(stream, s.generation & GENERATION_MASK);
        let nothing = Untrusted::from_slice(&[]);
        match self.post_bytes(stream, peer, &bye.encode(), nothing, owner, cursor) {
            Ok(posted) => {
                self.state.credits_told(stream);
                let s = &mut self.state.streams[stream as usize];
                s.silent_posts += (posted == Posted::Pending) as u32;
                true
            }
            Err(Blocked::Refused(rail, _)) => {
                self.state.fail_peer(peer, PeerError::Rail(rail));
                false
            }
            Err(_) => false,
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    #[cold]
    fn begin_closing(&mut self, peer: u16) {
        self.peers[peer as usize].state = PeerState::Closing;
        self.closing += 1;
        // Invalidate imported regions for new operations. Earlier operations use only the keys.
        for remote in self.remotes.iter_mut().filter(|remote| remote.is_of(peer) && !remote.auto) {
            (remote.mapped, remote.len, remote.device) = (core::ptr::null_mut(), 0, 0);
        }
        for context in 0..self.config.contexts {
            self.ask(self.stream_of(context as u8, peer));
        }
    }

    /// A peer that has sent a Bye sends no new operations, but still applies operations that are in
    /// flight to it.
    #[cold]
    pub(super) fn has_said_bye(&self, peer: u16) -> bool {
        self.pairings[peer as usize].parting.count_heard() != 0
    }

    /// Once our Byes are due, this side neither reads the peer's memory nor answers the peer.
    #[cold]
    pub(super) fn has_parted(&self, peer: u16) -> bool {
        self.pairings[peer as usize].parting.due
    }

    /// Once a peer has sent Byes, its failure counts as `Closed`, unless it broke the protocol or
    /// was removed.
    #[cold]
    pub(super) fn after_bye(&self, peer: u16, why: PeerError) -> PeerError {
        match why {
            PeerError::Protocol(_) | PeerError::Removed => why,
            _ if self.has_said_bye(peer) => PeerError::Closed,
            _ => why,
        }
    }

    fn contexts_of(&self, peer: u16) -> impl Iterator<Item = usize> + '_ {
        (0..self.config.contexts).map(move |context| self.stream_of(context as u8, peer) as usize)
    }

    fn has_posts(&self, peer: u16) -> bool {
        self.contexts_of(peer).any(|stream| self.streams[stream].silent_posts != 0)
    }

    /// Returns whether answers to a peer with failover are in flight. Answers do not delay the Bye.
    /// An answer that a failed rail has lost is sent again.
    fn has_answers(&self, peer: u16) -> bool {
        self.contexts_of(peer).any(|stream| {
            let s = &self.streams[stream];
            s.live && self.is_kept(stream as u32) && s.in_flight() != 0
        })
    }

    #[cold]
    fn missing_of(&self, peer: u16) -> Missing {
        let told = self.pairings[peer as usize].parting.sent == self.config.contexts;
        match () {
            () if self.is_meeting(peer) || self.is_busy(peer) => Missing::Operations,
            () if !told || self.has_posts(peer) || self.has_answers(peer) => Missing::Bye,
            () => Missing::Answer,
        }
    }

    /// Returns whether an operation to a peer, or a payload from it, is in flight. Slow path: scans
    /// all receives.
    #[cold]
    fn is_busy(&self, peer: u16) -> bool {
        self.contexts_of(peer).any(|stream| self.streams[stream].open != 0)
            || self.is_receiving_from(peer)
    }

    #[cold]
    fn is_receiving_from(&self, peer: u16) -> bool {
        self.protocol.as_ref().is_some_and(|protocol| {
            let slots = protocol.requests.slots.iter();
            let mut moving = slots.filter(|slot| slot.delays_bye());
            moving.any(|slot| slot.source.get().is_some_and(|source| source.index == peer))
        })
    }

    /// Returns whether nothing delays the Bye to a busy peer except sends that wait for a match.
    #[cold]
    fn waits_for_match(&self, peer: u16) -> bool {
        let waits = |stream: usize| {
            self.streams[stream].open as usize == self.unmatched(stream as u32).count()
        };
        self.contexts_of(peer).all(waits) && !self.is_receiving_from(peer)
    }

    #[cold]
    pub(super) fn bye_heard(&mut self, peer: Peer, bye: Bye) -> Result<(), Violation> {
        let Some(stream) = self.arrival_stream(peer, bye.context, bye.word)? else { return Ok(()) };
        // The sender had its operations acknowledged before the Bye, so their numbers were applied
        // here.
        let expected = self.streams[stream as usize].window.expected();
        if expected.is_before(bye.end) || expected != bye.end && !self.is_kept(stream) {
            return Err(Violation::Sequence);
        }
        let waiting = self.unmatched(stream).count() as u32;
        let mut account =
            self.protocol.as_mut().map(|protocol| &mut protocol.accounts[stream as usize]);
        let heard = account.as_ref().map_or(0, |account| account.fins_heard);
        if bye.fins.wrapping_sub(heard) > waiting {
            return Err(Violation::Reply);
        }
        if let Some(account) = &mut account {
            account.fins_said = bye.fins;
        }
        self.credits_freed(stream, bye.freed)?;
        self.acknowledged(stream, bye.ack)?;
        self.pairings[peer.0 as usize].parting.heard[bye.context as usize / 64] |=
            1 << (bye.context % 64);
        if self.peers[peer.0 as usize].state == PeerState::Connected {
            self.begin_closing(peer.0);
        }
        self.due.push(self.streams, self.stream_of(0, peer.0));
        Ok(())
    }

    fn unmatched(&self, stream: u32) -> impl Iterator<Item = (u32, &PendingSlot)> {
        let s = &self.streams[stream as usize];
        let slot = |index: u32| Some((index, self.pending.slots.get(index as usize)?));
        let list =
            move |head| core::iter::successors(slot(head), move |(_, at)| slot(at.links.next));
        let waits = |(_, slot): &(u32, &PendingSlot)| {
            slot.kind == OpKind::Send && slot.fetch && !slot.pulled
        };
        list(s.ops.head).chain(list(s.closing.head)).filter(waits)
    }

    fn fail_unmatched(&mut self, peer: u16) {
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer);
            let Some(protocol) = &self.protocol else { return };
            let account = &protocol.accounts[stream as usize];
            let s = &self.streams[stream as usize];
            // A Fin in flight will still complete one of the sends.
            let heard = self.pairings[peer as usize].parting.has_heard(context as u8);
            if !heard || account.fins_said != account.fins_heard {
                continue;
            }
            // The rest may fail only once they are acknowledged.
            let mut index = s.closing.head;
            while index != NONE {
                let slot = &mut self.pending.slots[index as usize];
                let next = slot.links.next;
                if slot.kind == OpKind::Send && slot.fetch && !slot.pulled {
                    slot.fail_unmatched();
                    self.end_if_over(index);
                }
                index = next;
            }
        }
    }

    #[cold]
    fn unfinished(&self) -> Result<(), Unfinished> {
        let closing = |peer: &u16| self.peers[*peer as usize].state == PeerState::Closing;
        let peers = (0..self.peers.len() as u16).filter(closing);
        let worst = peers.clone().map(|peer| (self.missing_of(peer), peer)).min();
        worst.map_or(Ok(()), |(missing, peer)| {
            Err(Unfinished { peer: self.peer_id(peer), peers: peers.count() as u16, missing })
        })
    }
}
