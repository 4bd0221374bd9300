//! Failover: a peer survives the failure of a rail while another rail leads to it.
//!
//! An engine with [failover](Engine::attach_failover) records what was sent under every number in
//! flight, and on which rail. It does so for each peer that several rails reach. Both sides keep
//! such records. The streams of such a peer are *kept*: they send everything through the queue. So
//! the source of each operation is known, and stays unchanged until the operation is acknowledged.
//!
//! # The protocol
//!
//! Both sides do the same, each as soon as it learns of the failure. It learns from an error of the
//! rail, from [`Engine::disable_rail`], from a stall of the rail, or from the other side.
//!
//! 1. *Suspect*: nothing more is posted to the peer on that rail. The other side is asked again to
//!    acknowledge everything in flight, and is asked to fence the rail.
//! 2. *Fence*: [`Rail::fence`] is called until nothing from the peer can land through that rail.
//!    The side that suspected the rail waits until it hears from the other side over another rail.
//!    A dead process does not answer, so its failure costs other peers no rail.
//! 3. *Tell*: the peer gets a report over another rail. The report has the cursor of each stream,
//!    and a bitmap of the numbers that arrived beyond the cursor. A number that was sent on the
//!    failed rail and is not in the bitmap never arrives. The other rail may have failed unnoticed.
//!    So the report is repeated on one rail after the other, at growing intervals, until the peer
//!    confirms it.
//! 4. *Resume*: a side that receives a report posts the missing numbers again on the remaining
//!    rails, unchanged and in order.
//! 5. *Return*: once each side knows that the other has reported everything, the rail may return.
//!    It does so when [`Sink::peer_up`] or [`Engine::enable_rail`] allows it: it is attached again
//!    and used. The module `back` has the details.
//!
//! A number is in flight on one rail at a time. A write is posted again only after the target has
//! reported that the first copy never lands. So a late write never overwrites newer data. A
//! repeated report changes nothing. After a second failure, reports cover all fenced rails again.
//!
//! A rail that is disabled works. So the side first asks the peer to leave it, and only then treats
//! it as failed. The module `disable` has the details.
//!
//! A rail that works, but delivers nothing for some time, is given up in the same way. The modules
//! `held` and `given_up` have the details.
//!
//! Each rail to a peer has an epoch, which both sides know. It begins when both sides attach the
//! rail again. A report about a rail is valid in one epoch only. Messages of an earlier epoch are
//! dropped and counted ([`Stats::stale`](super::Stats)).
//!
//! # Traffic without numbers
//!
//! - The reply to a fetching atomic: the value stays in the record of the atomic's number. The
//!   origin does not reuse that number before it has the reply (`hold_back`). After a report about
//!   a rail, the origin requests each reply that is missing.
//! - Acknowledgements and credits: a report carries both. Room messages are sent again.
//! - The answers of the two-sided protocol: between kept streams they have numbers. A send in
//!   chunks ends only when its receiver has confirmed it and its chunks are acknowledged.
//! - The pieces that answer a get of device memory: between kept streams they have numbers too.
//! - Reads: a read that a failed rail has ended is posted again as a whole. Before that, the rail
//!   is fenced here, so that no late piece of the read lands.
//! - Byes and Hellos are sent again.
//!
//! # Peers without failover
//!
//! A Hello says whether its sender keeps its streams to the receiver. If one side does not, the
//! other side stops keeping its streams before anything is posted. Then the peer fails with its
//! first rail. Over rails that need no Hello ([`Caps::fresh`](crate::rail::Caps)), both sides must
//! attach failover, or neither.

mod back;
mod count;
mod disable;
mod given_up;
mod held;
mod leave;
mod rejoin;
mod resume;
mod sent;
mod tell;
mod told;

pub use count::{RailChange, RailStats};
pub(super) use leave::{Leave, Stage as LeaveStage};
pub(super) use rejoin::Rejoin;
pub use sent::SentSlot;
pub(super) use sent::{COPY, Sent};
pub(super) use told::{Asks, TOLD as LONGEST, Told};

use core::mem::MaybeUninit;

use crate::error::{AttachError, PeerError};
use crate::mem::{RailId, Zeroable};
use crate::op::Fault;
use crate::rail::Rail;
#[cfg(doc)]
use crate::rail::Sink;
use crate::sync::seq::Seq;

use back::Back;
use disable::Spare;
use held::Held;
use leave::{CLOCK_MAX, Closing};

use super::joint::RAILS_MAX;
use super::pieces::{Answer, GETS};
use super::stream::KEPT;
use super::table::{NO_RAIL, PeerState, lent};
use super::{Engine, State, mix};

/// The memory of failover, borrowed by the engine, for `P` peers, `C` contexts and a window of `W`.
/// The engine first touches the part of `sent` for a peer when it sends to that peer.
pub struct FailoverMemory<'m> {
    /// P entries.
    pub peers: &'m mut [MaybeUninit<FailoverPeer>],
    /// P·C entries: zeros, or as an earlier engine left them together with `sent`.
    pub streams: &'m mut [FailoverStream],
    /// P·C·W entries: zeros, or as an earlier engine left them together with `streams`.
    pub sent: &'m mut [SentSlot],
    /// An entry per rail.
    pub rails: &'m mut [RailStats],
}

/// Passes until an unconfirmed report is repeated. Doubles with each repetition, at most [`RARELY`]
/// times.
const AGAIN: u32 = 64;
const RARELY: u16 = 10;

/// Maximum time that one pass adds to the clock of waiting fences, in nanoseconds or passes. So a
/// pause of this process counts little. If the rails have no clock, each check of the peers adds
/// the second value: a wait sleeps for 10 ms between two checks.
const LOOK: [u64; 2] = [10_000_000, 10_486];

/// The state of the rails to one peer. Bitmasks use our rail numbers.
#[derive(Clone, Copy, Debug)]
pub struct FailoverPeer {
    pub(super) joined: u16,
    /// Failed rails. The engine fences them once it hears from the peer.
    suspect: u16,
    fencing: u16,
    fenced: u16,
    disabled: u16,
    spare: Spare,
    /// `allowed`: rails that the peer may leave (see `leave`). `left`: rails that it has left.
    allowed: u16,
    left: u16,
    /// Rails that this side may leave (see `leave`). If one of them is fenced, it was drained
    /// first.
    leaving: u16,
    /// Rails for which this side has confirmed a request since they were attached, so that the peer
    /// may have left them.
    sure: u16,
    /// The answers that are due to the peer: to its request to leave rails, and to its reply to our
    /// request.
    answers: [Option<Leave>; 2],
    /// Where the next report starts, if one is due.
    telling: Option<(u16, Option<Seq>)>,
    /// The peer has confirmed our reports about these rails.
    confirmed: u16,
    /// Repetitions of the unconfirmed reports.
    told: u16,
    wait: u32,
    /// For each rail, the [`Failover::time`] at which its fence began to wait for other peers, or
    /// for this peer to close its endpoint. 0 if the fence does not wait.
    waits: [u64; RAILS_MAX],
    back: Back,
    /// `silent`: rails reported as silent since the last look. `overdue`: those whose deadline has
    /// passed. `examined`: rails whose silence is examined. `held`: how long the peer has answered
    /// meanwhile. `looked`: the [`Failover::time`] of the last look (see `held`).
    silent: u16,
    overdue: u16,
    examined: u16,
    held: Held,
    looked: u64,
    /// Longest write that all joined rails accept, in bytes.
    pub(super) longest: u64,
    /// `None` for a rail in use.
    why: [Option<Fault>; RAILS_MAX],
    /// Rails that have failed or returned since the owner looked.
    changed: u16,
    /// Failed rails whose lost numbers are not all posted again, and when they failed.
    resuming: u16,
    since: [u64; RAILS_MAX],
}

impl FailoverPeer {
    fn tell_anew(&mut self) {
        self.telling = Some((0, None));
        (self.told, self.wait) = (0, AGAIN);
    }

    /// The state of an unused entry.
    pub const EMPTY: FailoverPeer = FailoverPeer {
        joined: 0,
        suspect: 0,
        fencing: 0,
        fenced: 0,
        disabled: 0,
        spare: Spare::NONE,
        allowed: 0,
        left: 0,
        leaving: 0,
        sure: 0,
        answers: [None; 2],
        telling: None,
        confirmed: 0,
        told: 0,
        wait: 0,
        waits: [0; RAILS_MAX],
        back: Back::NONE,
        silent: 0,
        overdue: 0,
        examined: 0,
        held: Held::NONE,
        looked: 0,
        longest: 0,
        why: [None; RAILS_MAX],
        changed: 0,
        resuming: 0,
        since: [0; RAILS_MAX],
    };
}

/// The failover state of one stream.
#[derive(Clone, Copy, Debug)]
pub struct FailoverStream {
    /// Whether the peer has failover state and the stream may have records.
    kept: bool,
    /// The peer has applied every operation before this number. The stream's own cursor may be
    /// lower, because it waits for replies.
    heard: Seq,
    /// Rails that the peer has reported about, as a bitmask.
    told: u16,
    lost: bool,
    answers: bool,
    pub(super) reads: bool,
    pub(super) asked: u8,
    /// Number of pieces in flight that answer the peer's gets.
    pub(super) pieces: u32,
    /// Number of answers of the two-sided protocol in flight.
    pub(super) answered: u32,
    /// The peer's gets that are not completely answered, oldest first.
    pub(super) gets: [Answer; GETS],
    /// The oldest number in flight at the last look, and the wait for it (see `held`).
    oldest: Seq,
    held: Held,
    /// For a number that is posted again: the rail's id of the copy out of device memory, and the
    /// low 32 bits of the number.
    staging: (u32, u32),
}

// SAFETY: zeroed memory is a valid value, because all fields are numbers and flags.
unsafe impl Zeroable for FailoverStream {}

impl FailoverStream {
    /// The state of an unused entry: zeros.
    pub const EMPTY: FailoverStream = FailoverStream {
        kept: false,
        heard: Seq(0),
        told: 0,
        lost: false,
        answers: false,
        reads: false,
        asked: 0,
        pieces: 0,
        answered: 0,
        gets: [Answer::NONE; GETS],
        oldest: Seq(0),
        held: Held::NONE,
        staging: (0, 0),
    };
}

/// Counts from 0, and continues with the first rail after the last. Returns `None` if the bitmask
/// is empty.
fn nth(rails: u16, n: u32) -> Option<usize> {
    let skipped = n.checked_rem(rails.count_ones())?;
    let rest = (0..skipped).fold(rails, |rails, _| rails & (rails - 1));
    Some(rest.trailing_zeros() as usize)
}

pub(crate) struct Failover<'m> {
    /// Initialized for a peer whose first stream is kept.
    peers: &'m mut [MaybeUninit<FailoverPeer>],
    pub(super) streams: &'m mut [FailoverStream],
    sent: &'m mut [SentSlot],
    window: u32,
    /// Whether an answer of the two-sided protocol has found no room in a window.
    refused: bool,
    closing: [Closing; RAILS_MAX],
    /// Rails that can fence a peer, and those whose fence cuts off all peers, as bitmasks.
    fences: u16,
    fences_all: u16,
    /// `time`: the clock of waiting fences, which begins at 1. `counted`: the clock of the rails
    /// when `time` was last advanced.
    time: u64,
    counted: u64,
    /// `clock`: the upper half of the newest ticket that this side knows (see `leave`). `salt`: the
    /// lower half of this side's tickets.
    clock: u64,
    salt: u64,
    rails: &'m mut [RailStats],
    /// Whether changes of rails count as calls, and the first peer that may have one.
    reports: bool,
    changed: u16,
}

impl Failover<'_> {
    fn keeps(&self, peer: u16) -> bool {
        // The stream of context 0.
        self.streams.get(peer as usize).is_some_and(|stream| stream.kept)
    }

    /// Returns a ticket for a request to leave a rail (see `leave`).
    fn ticket(&mut self) -> u64 {
        self.clock = (self.clock + 1).min(CLOCK_MAX);
        self.clock << 32 | self.salt
    }

    fn forget(&mut self, stream: u32) {
        if self.streams[stream as usize].kept {
            sent::clear(self.of(stream));
            self.streams[stream as usize] = FailoverStream::EMPTY;
        }
    }
}

impl<'m, R: Rail, const RAILS: usize> Engine<'m, R, RAILS> {
    /// Lets peers survive the failure of a rail while another rail leads to them. Applies to peers
    /// that are later connected by several rails. [`has_failover`](Self::has_failover) says whether
    /// both sides of a connection take part. If a failed rail cannot [fence](Rail::fence) a peer,
    /// the peer still fails. If all rails to a peer keep attachments apart
    /// ([`Caps::fresh`](crate::rail::Caps)), the sides do not tell each other whether they take
    /// part. So both must attach failover, or neither. Engines that connect to each other should
    /// have different [seeds](super::Config::seed). With equal seeds, a peer may fail when several
    /// rails fail at once. Slow path; allocates nothing.
    ///
    /// Every operation to such a peer takes a slot, even a silent one. A tagged message that is
    /// sent from a slice takes an entry of
    /// [`MatchMemory::outgoing`](super::protocol::MatchMemory::outgoing) until it is acknowledged.
    ///
    /// # Errors
    /// [`AttachError::Memory`] names the memory that is too short. [`AttachError::Config`] gives
    /// the reason why failover cannot be attached: it is already attached, a peer is connected, or
    /// memory with native atomics is registered, which failover does not support.
    pub fn attach_failover(&mut self, memory: FailoverMemory<'m>) -> Result<(), AttachError> {
        let check = |ok: bool, what| if ok { Ok(()) } else { Err(AttachError::Config(what)) };
        let FailoverMemory { peers, streams, sent, rails } = memory;
        let (count, window) = (self.state.peers.len(), self.state.config.window);
        let each = count * self.state.config.contexts as usize;
        let early = |state| matches!(state, PeerState::Free | PeerState::Reserved);
        check(self.state.failover.is_none(), "failover: already attached")?;
        check(
            self.state.peers.iter().all(|peer| early(peer.state)),
            "failover: a peer is connected; attach failover first",
        )?;
        check(
            self.state.locals.iter().all(|region| region.native == NO_RAIL),
            "failover: memory with native atomics is registered; failover does not support it",
        )?;
        lent("failover.peers (one per peer)", peers.len(), count)?;
        lent("failover.streams (peers x contexts)", streams.len(), each)?;
        lent("failover.sent (peers x contexts x window)", sent.len(), each * window as usize)?;
        lent("failover.rails (one per rail)", rails.len(), RAILS)?;
        rails.fill(RailStats::default());
        // An earlier engine may have used the memory. Otherwise it stays untouched.
        if streams.iter().any(|stream| stream.kept) {
            streams.fill(FailoverStream::EMPTY);
            sent::clear(sent);
        }
        let of = |has: fn(&R) -> bool| {
            let rails = self.rails.iter().enumerate();
            rails.fold(0, |all, (at, rail)| all | u16::from(has(rail)) << at)
        };
        let (fences, fences_all) = (of(|rail| rail.caps().fences), of(R::fences_all));
        let (closing, salt) = ([Closing::NONE; RAILS_MAX], mix(self.state.config.seed) >> 32);
        self.state.failover = Some(Failover {
            peers,
            streams,
            sent,
            window,
            refused: false,
            closing,
            fences,
            fences_all,
            time: 1,
            counted: 0,
            clock: 0,
            salt,
            rails,
            reports: false,
            changed: u16::MAX,
        });
        Ok(())
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    fn count_time(&mut self) {
        let (now, most) = (self.loads.now(), LOOK[self.loads.untimed()]);
        if let Some(failover) = &mut self.failover {
            failover.time += now.wrapping_sub(failover.counted).min(most);
            failover.counted = now;
        }
    }

    /// `limit` is in nanoseconds or passes. Returns `false` if `since` is 0.
    fn is_over(&self, since: u64, limit: [u64; 2]) -> bool {
        let time = self.failover.as_ref().map_or(0, |failover| failover.time);
        since != 0 && time - since >= limit[self.loads.untimed()]
    }

    #[cold]
    pub(super) fn kept_peer(&self, peer: u16) -> Option<&FailoverPeer> {
        let failover =
            self.failover.as_ref().filter(|failover| RAILS > 1 && failover.keeps(peer))?;
        // SAFETY: the peer's first stream is kept, so `keep_peer` has initialized the entry.
        failover.peers.get(peer as usize).map(|kept| unsafe { kept.assume_init_ref() })
    }

    #[cold]
    fn kept_peer_mut(&mut self, peer: u16) -> Option<&mut FailoverPeer> {
        let failover =
            self.failover.as_mut().filter(|failover| RAILS > 1 && failover.keeps(peer))?;
        // SAFETY: the peer's first stream is kept, so `keep_peer` has initialized the entry.
        failover.peers.get_mut(peer as usize).map(|kept| unsafe { kept.assume_init_mut() })
    }

    pub(super) fn joined_rails(&self, peer: u16) -> u16 {
        self.kept_peer(peer).map_or(self.peers[peer as usize].rails, |kept| kept.joined)
    }

    /// Any of the rails may have to take over a post, so the limits stay while rails fail and
    /// return.
    pub(super) fn keep_peer(&mut self, peer: u16, rails: u16, (longest, message): (u64, u32)) {
        let Some(failover) = &mut self.failover else { return };
        if rails.count_ones() < 2 {
            return;
        }
        let kept = FailoverPeer { joined: rails, longest, ..FailoverPeer::EMPTY };
        failover.peers[peer as usize].write(kept);
        self.pairings[peer as usize].longest = message;
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            self.streams[stream].fence |= KEPT;
            let heard = self.streams[stream].next;
            if let Some(failover) = &mut self.failover {
                failover.streams[stream] =
                    FailoverStream { kept: true, heard, ..FailoverStream::EMPTY };
            }
        }
    }

    /// Called if the peer's Hello says that it keeps no streams. Returns `false` if a rail to the
    /// peer has already failed, which fails the peer.
    #[cold]
    pub(super) fn keep_no_more(&mut self, peer: u16) -> bool {
        self.use_spares(peer, u16::MAX);
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
        let (rails, pairing) = (self.peers[peer as usize].rails, &mut self.pairings[peer as usize]);
        let messages =
            pairing.messages.iter().enumerate().filter(|(rail, _)| rails >> rail & 1 != 0);
        pairing.longest = messages.map(|(_, &most)| most).max().unwrap_or(0);
        self.open_accounts(peer);
        true
    }

    pub(super) fn forget_kept(&mut self, peer: u16) {
        let (contexts, peers) = (self.config.contexts as u32, self.peers.len() as u32);
        let Some(failover) = &mut self.failover else { return };
        (0..contexts).for_each(|context| failover.forget(context * peers + peer as u32));
    }

    fn has_failed(&self, peer: u16, rail: u16) -> bool {
        let open = self.open_rails(peer) & rail != 0;
        !open
            && self
                .kept_peer(peer)
                .is_some_and(|kept| kept.joined & rail != 0 && !kept.back.is_attached(rail))
    }

    /// The peer fails with `cost` if no other rail can take over.
    #[cold]
    pub(super) fn rail_failed(&mut self, peer: u16, rail: usize, why: Fault, cost: PeerError) {
        let Some(slot) = self.peers.get(peer as usize) else { return };
        let (rails, bit) = (slot.rails, 1u16 << rail);
        if self.has_failed(peer, bit) {
            // Posts on a failed rail may never arrive, so the rail cannot be drained.
            if let Some(kept) = self.kept_peer_mut(peer) {
                kept.leaving &= kept.fenced | !bit;
            }
            return;
        }
        let (up, meeting) = (slot.state.is_up(), self.is_meeting(peer));
        let open = self.open_rails(peer) & bit != 0;
        let Some(kept) = self.kept_peer_mut(peer) else { return self.fail_peer(peer, cost) };
        // Keep the first reason: posts that end after the last rail has failed report another one.
        let first = rails & bit == 0 || kept.why[rail].is_none();
        if kept.spare.rails & bit == 0 && first {
            kept.why[rail] = Some(why);
        }
        let stalled = kept.spare.stalled & bit != 0;
        kept.spare.end(bit);
        if stalled {
            self.loads.given_up(rail);
        }
        if open && up {
            self.note_change(peer, rail);
        }
        if rails & !bit == 0 {
            self.use_spares(peer, u16::MAX);
        }
        let left = self.peers[peer as usize].rails & !bit;
        if left == 0 || !up {
            return self.fail_peer(peer, cost);
        }
        self.note_failed(peer, rail, open && !meeting);
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.suspect |= bit;
        kept.back.stop(bit);
        kept.tell_anew();
        self.peers[peer as usize].rails = left;
        let pairing = &mut self.pairings[peer as usize];
        pairing.parting.say_again();
        pairing.wait.end(rail);
        // The failed rail may have provided the mappings of the peer's memory.
        for remote in self
            .remotes
            .iter_mut()
            .filter(|remote| remote.is_of(peer) && remote.rail as usize == rail)
        {
            (remote.mapped, remote.rail) = (core::ptr::null_mut(), left.trailing_zeros() as u8);
        }
        if meeting {
            self.meet_again(peer);
        }
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer);
            if meeting {
                // Nothing is in flight to a peer that has not answered.
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
