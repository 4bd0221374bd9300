//! Asks peers to stop using an endpoint before a fence closes it.
//!
//! A rail may fence a peer by closing its endpoint, which cuts off its other peers too
//! ([`Rail::fences_all`]). If both ends of each pair closed their endpoints in turn, one cut link
//! would interrupt its rail everywhere, and two cut links could separate peers that a good rail
//! joins. So a side that must close an endpoint does this first:
//!
//! 1. It asks every other peer of the rail to *leave* the rail, and repeats the request until the
//!    peer agrees.
//! 2. A peer agrees if another rail in use joins both, and works in both directions. The link of
//!    that rail may be cut unnoticed. So the request, the answer and a confirmation all travel over
//!    that rail. Then the peer stops using the rail that it leaves, and reports this. The next
//!    request tests another rail.
//! 3. The side stops using the rail too. It *drains* the rail: it waits until the peers have
//!    reported the arrival of everything that it has sent on the rail. A rail that stalls is not
//!    drained.
//! 4. It closes the endpoint, and reports to each drained peer that it has left the rail.
//! 5. The peer fences the rail without closing its own endpoint ([`Rail::fence_left`]), because
//!    nothing from this side can land late. The rail returns as after any fence.
//!
//! Two sides that ask each other to leave their last two rails must not both agree. So each request
//! has a ticket, and all sides agree on the order of tickets. A side refuses by silence while an
//! older request of its own is about the rail that would remain. But if that request waits for
//! another rail to return, and this peer has not got a confirmation, the side agrees. A side makes
//! one request to close at a time. The lower half of a ticket comes from
//! [`Config::seed`](crate::engine::Config::seed), so the tickets of different sides differ.
//!
//! After [`PATIENCE`] the side closes its endpoint anyway. A peer that has not agreed, or was not
//! drained, then fences the rail as after a failure.
//!
//! ```text
//! 24 bytes: kind u8 | rail u8 | over u8 | stage u8 | word u32 | epoch u16 | stalls u16 | 0 u32
//!           | ticket u64
//! ```
//!
//! `rail` is the rail to leave, in the `epoch` of that rail. `over` is the rail that carries the
//! message. Both are the sender's numbers. `stalls` is 1 if the rail is not to be drained, because
//! it stalls (see `given_up`), and otherwise 0.

use crate::bytes::{Put, Reader, Writer};
use crate::error::{CompleteError, PeerError, Violation};
use crate::mem::{Peer, RailId, Untrusted};
use crate::op::Fault;
use crate::rail::Rail;

use super::super::joint::RAILS_MAX;
use super::super::table::PeerSlot;
use super::super::wire::KIND_LEAVE;
use super::super::{Engine, State};
use super::sent::Carried;
use super::{AGAIN, Failover, nth};

const LEAVE: usize = 24;

/// Maximum of the upper half of a ticket. Our clock stops at this value, because a peer may send
/// any ticket.
pub(super) const CLOCK_MAX: u64 = u32::MAX as u64;

/// Time limits, in nanoseconds or passes, after which an endpoint is closed although peers have not
/// left it. The first applies once this side has made [`ENOUGH`] passes, and otherwise the second.
/// On a busy machine, few passes fit into the first limit.
const PATIENCE: [[u64; 2]; 2] = [[80_000_000, 1 << 18], [500_000_000, 1 << 20]];
const ENOUGH: u32 = 1 << 12;

/// Number of times that the interval between two requests doubles. So a peer that makes no passes
/// gets few requests.
pub(super) const DOUBLINGS: u32 = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Stage {
    Asks,
    /// The sender can leave that rail.
    Answers,
    /// The sender has the answer, so the receiver may rely on the rail that carries the message.
    Confirms,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Leave {
    pub(in super::super) rail: u8,
    pub(in super::super) over: u8,
    pub(in super::super) stage: Stage,
    pub(in super::super) word: u32,
    pub(in super::super) epoch: u16,
    pub(in super::super) stalls: bool,
    pub(in super::super) ticket: u64,
}

impl Leave {
    pub(in super::super) fn encode(&self) -> [u8; LEAVE] {
        let mut bytes = [0; LEAVE];
        let mut out = Writer::new(&mut bytes);
        out.put(&[KIND_LEAVE, self.rail, self.over, self.stage as u8]).put_u32(self.word);
        out.put_u16(self.epoch).put_u16(self.stalls.into()).put_u32(0).put_u64(self.ticket);
        bytes
    }

    pub(in super::super) fn decode(bytes: Untrusted<'_>) -> Option<Result<Leave, Violation>> {
        let mut raw = [0; LEAVE];
        bytes.copy_out(&mut raw);
        (raw[0] == KIND_LEAVE).then(|| Self::read(&raw, bytes.len()))
    }

    fn read(raw: &[u8; LEAVE], len: usize) -> Result<Leave, Violation> {
        if len != LEAVE {
            return Err(Violation::Length);
        }
        let [_, rail, over, stage, ..] = *raw;
        let stage = match stage {
            0 => Stage::Asks,
            1 => Stage::Answers,
            2 => Stage::Confirms,
            _ => return Err(Violation::Kind),
        };
        let mut fields = Reader::new(&raw[4..]);
        let (word, epoch) = (fields.u32()?, fields.u16()?);
        let (stalls, rest, ticket) = (fields.u16()?, fields.u32()?, fields.u64()?);
        if stalls > 1 || rest != 0 || rail == over || rail.max(over) as usize >= RAILS_MAX {
            return Err(Violation::Kind);
        }
        Ok(Leave { rail, over, stage, word, epoch, stalls: stalls == 1, ticket })
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    /// Orders the requests of all sides. 0 if the endpoint is not to be closed.
    ticket: u64,
    /// When the peers were first asked, in [`Failover::time`]. 0 if they have not been asked since
    /// this endpoint last had to wait.
    since: u64,
    /// `wait`: passes until the peers are asked again. `passes`: passes since they were first
    /// asked.
    wait: u32,
    passes: u32,
    /// Number of requests so far. Selects the rail that carries the request.
    asked: u32,
    /// The first peer that could not be asked in the last round, because a rail had no room.
    next: u16,
    /// Whether the endpoint waits until another rail has returned to a peer.
    waits: bool,
}

impl Closing {
    pub(super) const NONE: Closing =
        Closing { ticket: 0, since: 0, wait: 0, passes: 0, asked: 0, next: 0, waits: false };
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Until the endpoint may be closed, asks the other peers to leave the rail.
    pub(super) fn may_close(&mut self, peer: u16, rail: usize) -> bool {
        let first = self.state.asks(rail) == Some(peer);
        let Some(closing) = self.state.closing(rail) else { return true };
        closing.waits = false;
        let Closing { ticket, since, wait, passes, asked, next, .. } = *closing;
        if self.state.is_over(since, PATIENCE[usize::from(passes < ENOUGH)]) {
            return true;
        }
        let older = self.state.has_older_request(rail, ticket);
        let due = first && !older && wait == 0;
        let Some(failover) = &mut self.state.failover else { return true };
        let closing = &mut failover.closing[rail];
        if older {
            (closing.since, closing.passes) = (0, 0);
        }
        if !first || older {
            return false;
        }
        if closing.since == 0 {
            closing.since = failover.time;
        }
        closing.wait = wait.saturating_sub(1);
        closing.passes = passes.saturating_add(1);
        if due {
            (closing.wait, closing.asked) = (AGAIN << asked.min(DOUBLINGS), asked.wrapping_add(1));
        }
        let (mut left, mut missed) = (true, None);
        for other in (next..self.state.peers.len() as u16).chain(0..next) {
            // This peer can leave the rail only for one that this side has disabled.
            if self.state.peers[other as usize].rails == 1 << rail {
                self.state.use_spares(other, self.state.unsure(other));
            }
            if self.state.may_leave(other, rail) {
                left = false;
                let rest = self.state.peers[other as usize].rails & !(1 << rail);
                if due
                    && let Some(over) = nth(rest, asked)
                    && !self.ask_to_leave(other, rail, over, false, ticket)
                {
                    missed = missed.or(Some(other));
                }
            } else if self.state.is_undrained(other, rail) {
                left = false;
            }
        }
        if let (Some(other), Some(closing)) = (missed, self.state.closing(rail)) {
            closing.next = other;
        }
        left
    }

    /// Repeats requests after the peer that was to be fenced has failed. Another peer may have
    /// agreed already, so requests that were made must not be dropped.
    pub(super) fn ask_on(&mut self, peer: u16) {
        for rail in 0..RAILS {
            if !self.state.is_closing(rail) {
                continue;
            }
            let asks =
                self.state.wants_to_close(rail).is_none() && self.state.asks(rail) == Some(peer);
            if asks
                && self.may_close(peer, rail)
                && let Some(closing) = self.state.closing(rail)
            {
                *closing = Closing::NONE;
            }
        }
    }

    /// Asks a peer to leave a rail. The caller repeats the request, so a request may be lost.
    /// Returns `false` if the rail for the request has no room.
    pub(super) fn ask_to_leave(
        &mut self,
        peer: u16,
        rail: usize,
        over: usize,
        stalls: bool,
        ticket: u64,
    ) -> bool {
        let epoch = self.state.kept_peer(peer).map_or(0, |kept| kept.back.epoch(rail));
        let (rail, over, stage) = (rail as u8, over as u8, Stage::Asks);
        self.post_leave(peer, Leave { rail, over, stage, word: 0, epoch, stalls, ticket })
    }

    pub(super) fn answer_leave(&mut self, peer: u16) {
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        for answer in core::mem::take(&mut kept.answers).into_iter().flatten() {
            _ = self.post_leave(peer, answer);
        }
    }

    /// Posts a message on the rail that it names, if that rail is in use. Returns `false` if the
    /// rail has no room.
    fn post_leave(&mut self, peer: u16, message: Leave) -> bool {
        if self.state.peers[peer as usize].rails >> message.over & 1 == 0 {
            return true;
        }
        let stream = self.state.stream_of(0, peer);
        let s = &self.state.streams[stream as usize];
        let (word, cursor) = (s.stamp, s.ack_sent);
        let (bytes, owner) = (Leave { word, ..message }.encode(), self.state.control(peer));
        let posted = self.post_on(message.over as usize, stream, peer, &bytes, owner, cursor);
        self.state.ask(stream);
        posted
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    fn is_closing(&self, rail: usize) -> bool {
        self.failover.as_ref().is_some_and(|failover| failover.closing[rail].ticket != 0)
    }

    fn closing(&mut self, rail: usize) -> Option<&mut Closing> {
        let failover = self.failover.as_mut()?;
        if failover.closing[rail].ticket == 0 {
            let ticket = failover.ticket();
            failover.closing[rail] = Closing { ticket, ..Closing::NONE };
        }
        Some(&mut failover.closing[rail])
    }

    /// Restarts the wait, because another rail of a peer must return first.
    pub(super) fn closing_waits(&mut self, rail: usize) {
        if let Some(closing) = self.closing(rail) {
            let Closing { ticket, asked, .. } = *closing;
            *closing = Closing { ticket, asked, waits: true, ..Closing::NONE };
        }
    }

    pub(super) fn closings_looked(&mut self) {
        for rail in 0..RAILS {
            if !self.is_closing(rail) {
                continue;
            }
            if self.asks(rail).is_none()
                && let Some(failover) = &mut self.failover
            {
                failover.closing[rail] = Closing::NONE;
            }
        }
    }

    /// Returns the first peer that can be fenced only by closing the endpoint of a rail. Peers that
    /// have left the rail come last, because the fence of another peer made them leave.
    fn wants_to_close(&self, rail: usize) -> Option<u16> {
        let wants = |peer: u16| {
            let kept = self.kept_peer(peer).filter(|_| self.peers[peer as usize].state.is_up())?;
            let wants = (kept.fencing & !kept.allowed) >> rail & 1 != 0;
            wants.then_some((kept.leaving >> rail & 1, peer))
        };
        (0..self.peers.len() as u16).filter_map(wants).min().map(|(_, peer)| peer)
    }

    /// Returns the peer that repeats the request to leave a rail in its passes, if any. If no peer
    /// needs a fence, only a request that was already sent is repeated.
    fn asks(&self, rail: usize) -> Option<u16> {
        let Closing { ticket, asked, .. } = self.failover.as_ref()?.closing[rail];
        let all = 0..if ticket != 0 && asked != 0 { self.peers.len() as u16 } else { 0 };
        self.wants_to_close(rail).or_else(|| all.clone().find(|&peer| self.may_leave(peer, rail)))
    }

    pub(super) fn is_asked(&self, peer: u16) -> bool {
        self.failover.as_ref().is_some_and(|failover| {
            let mut rails = failover.closing.iter().enumerate();
            rails.any(|(rail, closing)| closing.asked != 0 && self.may_leave(peer, rail))
        })
    }

    fn request(&self, rail: usize) -> Option<u64> {
        let ticket = self.failover.as_ref()?.closing[rail].ticket;
        (ticket != 0 && self.asks(rail).is_some()).then_some(ticket)
    }

    fn waits(&self, rail: usize) -> bool {
        self.failover.as_ref().is_some_and(|failover| failover.closing[rail].waits)
    }

    /// Returns whether this side has an older request about another rail. A request that waits for
    /// a rail to return does not count.
    fn has_older_request(&self, rail: usize, ticket: u64) -> bool {
        // Requests have equal tickets once the clock is at its maximum.
        let older =
            |other: usize| self.request(other).is_some_and(|its| (its, other) < (ticket, rail));
        (0..RAILS).any(|other| older(other) && !self.waits(other))
    }

    /// Returns whether this side may agree to a request with this ticket, after which only this
    /// rail may join both. An older request about the rail forbids it, but not while that request
    /// waits and the peer cannot have left the rail.
    fn may_stay(&self, peer: u16, rail: usize, ticket: u64) -> bool {
        let sure = self.kept_peer(peer).is_some_and(|kept| kept.sure >> rail & 1 != 0);
        self.request(rail).is_none_or(|ours| ours > ticket || self.waits(rail) && !sure)
    }

    fn may_leave(&self, peer: u16, rail: usize) -> bool {
        let PeerSlot { state, rails, .. } = self.peers[peer as usize];
        let up = state.is_up() && !self.is_meeting(peer) && self.kept_peer(peer).is_some();
        up && self.open_rails(peer) >> rail & 1 != 0 && rails & !(1 << rail) != 0
    }

    /// Returns whether a peer that has agreed to leave a rail may still miss data sent on that
    /// rail.
    fn is_undrained(&self, peer: u16, rail: usize) -> bool {
        let leaving =
            self.kept_peer(peer).is_some_and(|kept| (kept.leaving & !kept.fenced) >> rail & 1 != 0);
        leaving && self.carries(peer, rail)
    }

    pub(super) fn carries(&self, peer: u16, rail: usize) -> bool {
        let Some(failover) = &self.failover else { return false };
        (0..self.config.contexts).any(|context| {
            let stream = self.stream_of(context as u8, peer) as usize;
            let s = &self.streams[stream];
            let count = if s.live { s.in_flight() } else { 0 };
            (0..count).map(|n| s.acked.plus(n)).any(|seq| {
                let at = seq.0 as usize & (failover.window as usize - 1);
                let sent = &failover.sent[stream * failover.window as usize + at];
                !seq.is_before(failover.streams[stream].heard)
                    && sent.carried == Carried::By(rail as u8)
            })
        })
    }

    /// A rail must be fenced if the peer has left it, a number in flight is on it, or a read must
    /// be repeated.
    pub(super) fn needs_fence(&self, peer: u16, rail: usize) -> bool {
        let reads = |failover: &Failover<'_>| {
            (0..self.config.contexts)
                .any(|context| failover.streams[self.stream_of(context as u8, peer) as usize].reads)
        };
        let left = self.kept_peer(peer).is_some_and(|kept| kept.left >> rail & 1 != 0);
        left || self.carries(peer, rail) || self.failover.as_ref().is_some_and(reads)
    }

    /// Closing the endpoint fences all peers on the rail. Data sent to undrained peers may still
    /// land there, so these peers must fence the rail as after a failure.
    pub(super) fn closed(&mut self, rail: usize) {
        let (bit, id) = (1 << rail, RailId(rail as u8));
        for peer in 0..self.peers.len() as u16 {
            if self.kept_peer(peer).is_some_and(|kept| kept.back.is_attached(bit)) {
                // Nothing was sent yet on a rail that is about to return.
                self.rail_failed(
                    peer,
                    rail,
                    Fault::Rail(id, CompleteError::PeerDown),
                    PeerError::Rail(id),
                );
                if let Some(kept) = self.kept_peer_mut(peer) {
                    kept.leaving |= bit;
                }
            }
            let undrained = self.is_undrained(peer, rail);
            let Some(kept) = self.kept_peer_mut(peer) else { continue };
            if kept.leaving & !kept.fenced & bit == 0 {
                continue;
            }
            if undrained {
                kept.leaving &= !bit;
                continue;
            }
            (kept.suspect, kept.fencing) = (kept.suspect & !bit, kept.fencing & !bit);
            kept.fenced |= bit;
            kept.tell_anew();
            if let Some(counts) = self.counts(rail) {
                counts.fenced += 1;
            }
            self.ask(self.stream_of(0, peer));
        }
        if let Some(failover) = &mut self.failover {
            failover.closing[rail] = Closing::NONE;
        }
    }

    /// Returns whether this side still makes the request with this ticket.
    fn confirms(&mut self, peer: u16, rail: usize, ticket: u64) -> bool {
        let disables =
            self.kept_peer_mut(peer).is_some_and(|kept| kept.spare.confirm(rail, ticket));
        disables || self.request(rail) == Some(ticket)
    }

    #[cold]
    pub(in super::super) fn leave_arrived(
        &mut self,
        peer: Peer,
        leave: &Leave,
    ) -> Result<(), Violation> {
        if self.arrival_stream(peer, 0, leave.word)?.is_none() {
            return Ok(());
        }
        let (pairing, joined) = (&self.pairings[peer.0 as usize], self.joined_rails(peer.0));
        let [ours, via] = [leave.rail, leave.over].map(|rail| pairing.as_ours(1 << rail) & joined);
        let (rail, over) = (ours.trailing_zeros() as usize, via.trailing_zeros() as usize);
        let Some(kept) = self.kept_peer(peer.0).filter(|_| ours != 0 && via != 0) else {
            return Err(Violation::Kind);
        };
        let gives_way = kept.spare.gives_way(over, leave.ticket);
        match leave.epoch.wrapping_sub(kept.back.epoch(rail)).cast_signed() {
            0 => {}
            1.. => return Err(Violation::Sequence),
            _ => {
                self.stats.stale += 1;
                return Ok(());
            }
        }
        if let Some(failover) = &mut self.failover {
            failover.clock = failover.clock.max(leave.ticket >> 32);
        }
        // Does not give way to a late request about a rail that has been left.
        let open = self.open_rails(peer.0) & ours != 0;
        if leave.stage != Stage::Answers && gives_way && open {
            self.use_spares(peer.0, via);
        }
        let in_use = self.peers[peer.0 as usize].rails & via != 0;
        // Agree only if this side has no older request about the rail. Otherwise this side would
        // close its own endpoint first.
        let first = self.request(rail).is_none_or(|ticket| ticket >= leave.ticket);
        let stays = in_use && self.may_stay(peer.0, over, leave.ticket);
        let gives_up = leave.stalls && self.fences_only(peer.0, rail);
        let answer = match leave.stage {
            _ if leave.stalls && !gives_up => return Ok(()),
            Stage::Asks if first && stays && self.may_leave(peer.0, rail) => Stage::Answers,
            Stage::Answers if in_use && self.confirms(peer.0, rail, leave.ticket) => {
                Stage::Confirms
            }
            Stage::Confirms if first && stays && self.may_leave(peer.0, rail) => {
                if let Some(kept) = self.kept_peer_mut(peer.0).filter(|_| !gives_up) {
                    // If this side has disabled the rail, it fences the rail itself, because the
                    // peer may have disabled it too.
                    kept.allowed |= ours & !kept.spare.rails;
                }
                let id = RailId(rail as u8);
                let why = match gives_up {
                    true => Fault::Peer(PeerError::Silent),
                    false => Fault::Rail(id, CompleteError::PeerDown),
                };
                self.rail_failed(peer.0, rail, why, PeerError::Rail(id));
                return Ok(());
            }
            _ => return Ok(()),
        };
        if let Some(kept) = self.kept_peer_mut(peer.0) {
            let message = Leave { rail: rail as u8, over: over as u8, stage: answer, ..*leave };
            let confirms = answer == Stage::Confirms;
            kept.sure |= u16::from(confirms) << rail;
            kept.answers[usize::from(confirms)] = Some(message);
        }
        self.ask(self.stream_of(0, peer.0));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_bytes_of_its_description_and_comes_back() {
        let (word, epoch, ticket) = (0x0403_0201, 0x0605, 0x1817_1615_1413_1211);
        let decode = |bytes: &[u8]| Leave::decode(Untrusted::from_slice(bytes));
        for (n, stage) in (0..).zip([Stage::Asks, Stage::Answers, Stage::Confirms]) {
            let leave = Leave { rail: 9, over: 15, stage, word, epoch, stalls: n == 1, ticket };
            let bytes = leave.encode();
            let stalls = u8::from(n == 1);
            let fields = [KIND_LEAVE, 9, 15, n, 1, 2, 3, 4, 5, 6, stalls, 0, 0, 0, 0, 0];
            assert_eq!(bytes[..16], fields);
            assert_eq!(bytes[16..], ticket.to_le_bytes());
            assert_eq!(decode(&bytes), Some(Ok(leave)));
        }
        let (stage, stalls) = (Stage::Asks, false);
        let bytes = Leave { rail: 9, over: 15, stage, word, epoch, stalls, ticket }.encode();
        assert_eq!(decode(&[9; LEAVE]), None);
        for cut in 1..LEAVE {
            assert_eq!(decode(&bytes[..cut]), Some(Err(Violation::Length)), "{cut} bytes");
        }
        // Byte 1 becomes the number of the rail that carries the message.
        for (at, value) in [(1, 15), (1, 16), (2, 16), (3, 3), (10, 2), (11, 1), (12, 1), (15, 1)] {
            let mut bad = bytes;
            bad[at] = value;
            assert_eq!(decode(&bad), Some(Err(Violation::Kind)), "byte {at}");
        }
    }
}
