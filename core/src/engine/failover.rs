//! Rails that fail without costing the peer that they lead to, while another rail does.
//!
//! An engine that has [failover](Engine::attach_failover) keeps, for each peer that several rails
//! join, what every number in flight carried and which rail took it. Both ends of a peer do so. The
//! streams of such a peer are *kept*: all that they send goes through the queue, so the source of
//! an operation is known, and stays as it is, until the operation is acknowledged.
//!
//! # The protocol
//!
//! Both ends do the same, each as soon as it knows of the failure: from an error of the rail, from
//! [`Engine::disable_rail`], or because the other end says so.
//!
//! 1. *Suspect*: nothing is posted to the peer on that rail any more. The other end is asked anew
//!    for the acknowledgement of all that is in flight, and to fence the rail.
//! 2. *Fence*: [`Rail::fence`], until nothing of the peer can land by that rail. The end that has
//!    suspected the rail waits until the other is heard over another one: a dead process does not
//!    answer, so its end costs no other peer a rail.
//! 3. *Tell*: over another rail the peer gets the cursor of each stream, and a bitmap of what has
//!    arrived behind it. What is not in there and went by that rail never arrives. That other rail
//!    may be dead too without anybody knowing, so the peer is told again, over one rail after the
//!    other and ever more rarely, until it says that it has heard.
//! 4. *Resume*: an end that is told posts what is missing again, under the same numbers and in
//!    their order, on the rails that are left.
//!
//! A number is in flight on one rail at a time, and a write is posted again only after the target
//! said that the first copy never lands. So no late write overwrites a later one. Whoever is told
//! twice finds nothing left to do, and a second failure begins anew for all rails that are fenced.
//! The words of what was told carry the epoch of the attachment, as all words do.
//!
//! 5. *Return*: once each end knows that the other has told it all, and [`Sink::peer_up`] or
//!    [`Engine::enable_rail`] says so, the rail is attached again and used: see `back`.
//!
//! Each rail to a peer has an epoch, which begins when both ends attach it again and which both
//! know. What an end says of a rail holds in one epoch only: what belongs to an earlier one is
//! dropped and counted ([`Stats::stale`](super::Stats)).
//!
//! # What has no number
//!
//! - The reply to a fetching atomic: the value stays in the place of the atomic's number, which its
//!   origin does not use again before it has the reply (`hold_back`). Once the other end has told
//!   of a rail, it is asked for each reply that is missing.
//! - Acknowledgements and credits: what is told carries both. Rooms are said again.
//! - The answers of the two-sided protocol: between kept streams they have numbers. A send that
//!   goes out in chunks ends when these are acknowledged too, not with its receiver's word alone.
//! - Reads: a read that a failed rail has ended is posted anew as a whole, once that rail is fenced
//!   here, so that no late piece of it lands.
//! - Byes and Hellos are said again.
//!
//! # Peers without it
//!
//! A Hello says whether its sender keeps its streams to the receiver. Where one end does not, the
//! other ceases to, before anything is posted, and the peer fails with its first rail. Over rails
//! that need no Hello ([`Caps::fresh`](crate::rail::Caps)) both ends attach failover, or neither.

mod back;
mod rejoin;
mod resume;
mod sent;
mod tell;
mod told;

pub(super) use rejoin::Rejoin;
pub use sent::SentSlot;
pub(super) use sent::{COPY, Sent};
pub(super) use told::{Asks, TOLD as LONGEST, Told};

use crate::error::{AttachError, PeerError};
use crate::mem::{PeerId, RailId};
use crate::op::Fault;
use crate::probe::probe;
use crate::rail::Rail;
#[cfg(doc)]
use crate::rail::Sink;
use crate::sync::seq::Seq;

use back::Back;

use super::joint::RAILS_MAX;
use super::stream::KEPT;
use super::table::PeerState;
use super::{Engine, State};

/// The memory of failover, borrowed by the engine. With `P` peers, `C` contexts and a window of
/// `W`:
pub struct FailoverMemory<'m> {
    /// P.
    pub peers: &'m mut [FailoverPeer],
    /// P·C.
    pub streams: &'m mut [FailoverStream],
    /// P·C·W.
    pub sent: &'m mut [SentSlot],
}

/// Passes until a peer is told again what it has not confirmed; doubled so often.
const AGAIN: u32 = 64;
const RARELY: u16 = 10;

/// The rails of one peer.
#[derive(Clone, Copy, Debug)]
pub struct FailoverPeer {
    /// Those that joined it at first, by bit. 0: its streams are not kept.
    pub(super) joined: u16,
    /// Those that have failed and are to be fenced once the peer was heard; those that are to be
    /// fenced now; and those that are fenced.
    suspect: u16,
    fencing: u16,
    fenced: u16,
    /// Those that the user has taken out of use.
    disabled: u16,
    /// The context, and the number, from which on the peer is to be told.
    telling: Option<(u16, Option<Seq>)>,
    /// Rails of which the peer is known to have been told.
    confirmed: u16,
    /// It was told so often of what it has not confirmed; passes until it is told again.
    told: u16,
    wait: u32,
    /// Passes for which a fence waits for rails of other peers.
    patience: u32,
    /// The return of rails.
    back: Back,
    /// Longest write that each of them takes, in bytes.
    pub(super) longest: u64,
    /// Why each failed.
    why: [Option<Fault>; RAILS_MAX],
}

impl FailoverPeer {
    /// The peer is to be told of all its rails, now: what it was told may have been lost.
    fn tell_anew(&mut self) {
        self.telling = Some((0, None));
        (self.told, self.wait) = (0, AGAIN);
    }

    /// Memory for a peer.
    pub const EMPTY: FailoverPeer = FailoverPeer {
        joined: 0,
        suspect: 0,
        fencing: 0,
        fenced: 0,
        disabled: 0,
        telling: None,
        confirmed: 0,
        told: 0,
        wait: 0,
        patience: 0,
        back: Back::NONE,
        longest: 0,
        why: [None; RAILS_MAX],
    };
}

/// One stream.
#[derive(Clone, Copy, Debug)]
pub struct FailoverStream {
    /// The peer has applied every operation before this number. The stream's own cursor may be
    /// lower, because it waits for replies.
    heard: Seq,
    /// Rails that the peer has told of, by bit.
    told: u16,
    /// Some numbers are to be posted again; some replies; some reads.
    lost: bool,
    answers: bool,
    pub(super) reads: bool,
}

impl FailoverStream {
    /// Memory for a stream.
    pub const EMPTY: FailoverStream =
        FailoverStream { heard: Seq(0), told: 0, lost: false, answers: false, reads: false };
}

/// The state of failover.
pub(crate) struct Failover<'m> {
    pub(super) peers: &'m mut [FailoverPeer],
    pub(super) streams: &'m mut [FailoverStream],
    sent: &'m mut [SentSlot],
    window: u32,
}

impl<'m, R: Rail, const RAILS: usize> Engine<'m, R, RAILS> {
    /// Lets the peers that this engine is connected to from now on, by several rails each, live on
    /// while one of these rails is left. [`has_failover`](Self::has_failover) says whether the
    /// other end of a connection does it too. Rails that cannot [fence](Rail::fence) a peer still
    /// cost it. Where no rail to a peer needs a Hello ([`Caps::fresh`](crate::rail::Caps)), both
    /// ends do it, or neither. Slow path; allocates nothing.
    ///
    /// Every operation to such a peer takes a slot, also a silent one, and a tagged message that is
    /// sent from a slice takes one of
    /// [`MatchMemory::outgoing`](super::protocol::MatchMemory::outgoing) until it is acknowledged.
    ///
    /// # Errors
    /// [`AttachError::Config`] names what is too short, or says that it is too late: it was done
    /// before, a peer is connected, or memory of a device is registered, which this does not serve.
    pub fn attach_failover(&mut self, memory: FailoverMemory<'m>) -> Result<(), AttachError> {
        let check = |ok: bool, what| if ok { Ok(()) } else { Err(AttachError::Config(what)) };
        let FailoverMemory { peers, streams, sent } = memory;
        let (count, window) = (self.state.peers.len(), self.state.config.window);
        let each = count * self.state.config.contexts as usize;
        let early = |state| matches!(state, PeerState::Free | PeerState::Reserved);
        check(self.state.failover.is_none(), "failover: attached before")?;
        check(self.state.peers.iter().all(|peer| early(peer.state)), "failover: before peers connect")?;
        check(self.state.devices == 0, "failover: not with memory of devices")?;
        check(peers.len() >= count, "failover.peers: too short; one entry per peer")?;
        check(streams.len() >= each, "failover.streams: peers x contexts")?;
        check(sent.len() >= each * window as usize, "failover.sent: streams x window")?;
        peers.fill(FailoverPeer::EMPTY);
        streams.fill(FailoverStream::EMPTY);
        sent.fill(SentSlot::EMPTY);
        self.state.failover = Some(Failover { peers, streams, sent, window });
        Ok(())
    }

    /// Takes one of the rails to a peer out of use, as if it had failed, until
    /// [`enable_rail`](Self::enable_rail). What is in flight on it goes by the others, in later
    /// passes. Does not block.
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`]; [`AttachError::Config`] if that peer has no
    /// [failover](Self::attach_failover), or this is not one of several rails that lead to it, or
    /// the last one in use.
    pub fn disable_rail(&mut self, peer: PeerId, rail: RailId) -> Result<(), AttachError> {
        let bit = self.kept_rail(peer, rail)?;
        if self.state.peers[peer.index as usize].rails & !bit == 0 {
            return Err(AttachError::Config("rail: not the last one in use"));
        }
        if let Some(kept) = self.state.kept_peer_mut(peer.index) {
            kept.disabled |= bit;
            kept.back.rest(bit);
        }
        let why = PeerError::Removed;
        self.state.rail_failed(peer.index, rail.0.into(), Fault::Peer(why), why);
        Ok(())
    }

    /// Uses a rail to a peer again that was [disabled](Self::disable_rail) or has failed, once both
    /// ends agree: in later passes, if the rail can carry the peer and the other end has not
    /// disabled it too. A rail that failed returns without this call. Does not block.
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`]; [`AttachError::Config`] if that peer has no
    /// [failover](Self::attach_failover), or this is not one of several rails that lead to it.
    pub fn enable_rail(&mut self, peer: PeerId, rail: RailId) -> Result<(), AttachError> {
        let bit = self.kept_rail(peer, rail)?;
        if let Some(kept) = self.state.kept_peer_mut(peer.index) {
            kept.disabled &= !bit;
        }
        self.state.may_return(peer.index, bit);
        Ok(())
    }

    /// One of the rails to a peer with failover, by bit.
    fn kept_rail(&self, peer: PeerId, rail: RailId) -> Result<u16, AttachError> {
        self.peer_error(peer)?;
        let up = self.state.peers[peer.index as usize].state.is_up();
        let Some(kept) = self.state.kept_peer(peer.index).filter(|_| up) else {
            return Err(AttachError::Config("peer: connected, with failover"));
        };
        match kept.joined & 1u16.checked_shl(rail.0.into()).unwrap_or(0) {
            0 => Err(AttachError::Config("rail: one of several that lead to the peer")),
            bit => Ok(bit),
        }
    }

    /// Whether a peer outlives a rail: it has [answered](Self::has_answered), and both ends have
    /// attached failover and are joined by several rails.
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`].
    pub fn has_failover(&self, peer: PeerId) -> Result<bool, AttachError> {
        Ok(self.has_answered(peer)? && self.state.kept_peer(peer.index).is_some())
    }

    /// Why a rail to a peer is out of use, also once the peer has failed with its last one; `None`:
    /// it is not. [`disable_rail`](Self::disable_rail) leaves [`PeerError::Removed`].
    ///
    /// # Errors
    /// [`AttachError::UnknownPeer`].
    pub fn rail_error(&self, peer: PeerId, rail: RailId) -> Result<Option<Fault>, AttachError> {
        self.peer_error(peer)?;
        let kept = self.state.kept_peer(peer.index);
        Ok(kept.and_then(|kept| kept.why.get(rail.0 as usize).copied().flatten()))
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// The rails of a peer whose streams are kept.
    #[cold]
    pub(super) fn kept_peer(&self, peer: u16) -> Option<&FailoverPeer> {
        let peers = &self.failover.as_ref()?.peers;
        peers.get(peer as usize).filter(|kept| RAILS > 1 && kept.joined != 0)
    }

    /// The same, to change them.
    #[cold]
    fn kept_peer_mut(&mut self, peer: u16) -> Option<&mut FailoverPeer> {
        let peers = &mut self.failover.as_mut()?.peers;
        peers.get_mut(peer as usize).filter(|kept| RAILS > 1 && kept.joined != 0)
    }

    /// The rails that joined a peer when it was connected, by bit.
    pub(super) fn joined_rails(&self, peer: u16) -> u16 {
        self.kept_peer(peer).map_or(self.peers[peer as usize].rails, |kept| kept.joined)
    }

    /// Records the rails that lead to a peer, and the longest write that all of them accept.
    pub(super) fn keep_peer(&mut self, peer: u16, rails: u16, longest: u64) {
        let Some(failover) = &mut self.failover else { return };
        if rails.count_ones() < 2 {
            return;
        }
        failover.peers[peer as usize] = FailoverPeer { joined: rails, longest, ..FailoverPeer::EMPTY };
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            self.streams[stream].fence |= KEPT;
            let heard = self.streams[stream].next;
            if let Some(failover) = &mut self.failover {
                failover.streams[stream] = FailoverStream { heard, ..FailoverStream::EMPTY };
            }
        }
    }

    /// A peer that has just been heard of does not keep its streams, so those to it are not kept
    /// either. `false`: a rail to it has failed already, and so has the peer.
    #[cold]
    pub(super) fn keep_no_more(&mut self, peer: u16) -> bool {
        let Some(kept) = self.kept_peer(peer) else { return true };
        let lost = kept.suspect | kept.fencing | kept.fenced;
        if lost != 0 {
            self.fail_peer(peer, PeerError::Rail(RailId(lost.trailing_zeros() as u8)));
            return false;
        }
        self.forget_kept(peer);
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            self.streams[stream].fence &= !KEPT;
        }
        true
    }

    /// A peer is forgotten.
    pub(super) fn forget_kept(&mut self, peer: u16) {
        let (contexts, peers) = (self.config.contexts as u32, self.peers.len() as u32);
        let Some(failover) = &mut self.failover else { return };
        failover.peers[peer as usize] = FailoverPeer::EMPTY;
        for stream in (0..contexts).map(|context| context * peers + peer as u32) {
            failover.streams[stream as usize] = FailoverStream::EMPTY;
            failover.of(stream).fill(SentSlot::EMPTY);
        }
    }

    /// A rail to a peer has failed. Others take over if they can; otherwise the peer fails, as
    /// `cost` says.
    #[cold]
    pub(super) fn rail_failed(&mut self, peer: u16, rail: usize, why: Fault, cost: PeerError) {
        let Some(slot) = self.peers.get(peer as usize) else { return };
        let (rails, bit) = (slot.rails, 1u16 << rail);
        let back = self.kept_peer(peer).is_some_and(|kept| kept.back.is_attached(bit));
        if !back && self.kept_peer(peer).is_some_and(|kept| kept.joined & !rails & bit != 0) {
            // It has failed before.
            return;
        }
        let left = rails & !bit;
        let (up, meeting) = (slot.state.is_up(), self.is_meeting(peer));
        let Some(kept) = self.kept_peer_mut(peer) else { return self.fail_peer(peer, cost) };
        kept.why[rail] = Some(why);
        if left == 0 || !up {
            return self.fail_peer(peer, cost);
        }
        probe!("rail_down", peer, rail);
        kept.suspect |= bit;
        kept.back.stop(bit);
        kept.tell_anew();
        self.stats.rails_failed += 1;
        self.peers[peer as usize].rails = left;
        // What the others take of messages.
        let pairing = &mut self.pairings[peer as usize];
        let messages = pairing.messages.iter().enumerate();
        pairing.longest =
            messages.filter(|(at, _)| left >> at & 1 != 0).map(|(_, &most)| most).max().unwrap_or(0);
        pairing.parting.say_again();
        self.eager = self.eager.min(self.room(peer) as u32);
        self.open_accounts(peer);
        // It may have been mapped by this rail.
        for remote in
            self.remotes.iter_mut().filter(|remote| remote.peer == peer && remote.rail as usize == rail)
        {
            (remote.mapped, remote.rail) = (core::ptr::null_mut(), left.trailing_zeros() as u8);
        }
        if meeting {
            self.meet_again(peer);
        }
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer);
            if meeting {
                // Nothing is in flight.
                self.ask(stream);
                continue;
            }
            let s = &mut self.streams[stream as usize];
            s.asked = s.acked;
            self.say_room_again(stream);
            self.ask(stream);
        }
    }
}
