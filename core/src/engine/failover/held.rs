//! Detects rails that make no progress while their peer answers over other rails.
//!
//! A stream may be held up by one number, because its rail delays or has lost it. For example, TCP
//! repeats lost packets only after some time, and each time later. A rail itself may also report
//! that a peer is silent on it ([`Sink::silent`]). In both cases the peer is asked to acknowledge
//! what has arrived. Only the time during which it answers counts against the rail, because a peer
//! that has stopped makes no progress on any rail. A late rail gets fewer posts
//! ([`Loads`](super::super::load::Loads)), and is finally given up (see `given_up`).

use core::mem;

use crate::error::PeerError;
use crate::mem::RailId;
use crate::op::Fault;
use crate::rail::Rail;
#[cfg(doc)]
use crate::rail::Sink;
use crate::sync::seq::truncate;

use super::super::load::ahead;
use super::super::wire::{Body, HEAD_MAX, Message};
use super::super::{Engine, State};
use super::nth;
use super::sent::Carried;

/// The unit of all times here, in nanoseconds or passes. Also the time after which an
/// acknowledgement is first requested again, because the request or the answer may be delayed. The
/// interval doubles with each request, at most to `OFTEN` if the peer answers, and to `SELDOM` if
/// not.
const UNIT: [u64; 2] = [10_000_000, 10_486];
const OFTEN: u64 = 4;
const SELDOM: u64 = 128;

/// The longest time between two answers that counts in full.
const GAP: u64 = 20;

/// The rail of the oldest number counts as late once the peer has answered for this long. A peer
/// that makes no progress is no fault of a rail.
const LATE: u64 = 8;

/// A late rail is given up once the peer has answered for this long.
const GIVE_UP: u64 = 50;

/// A rail on which the peer is silent until the rail's deadline has failed once the peer has
/// answered for this long.
const SILENT: u64 = 100;

/// Time without a check of the peers after which the reports of rails are looked at.
const UNCHECKED: u64 = 4;

/// A wait for a rail to a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// [`Failover::time`](super::Failover::time) of the next request, or 0 before the first look.
    next: u64,
    /// Units from the next request to the one after it.
    again: u64,
    /// Time of the last look that saw an answer, or 0 before the first, and whether another has
    /// arrived since.
    seen: u64,
    answered: bool,
    /// Whether a request is due although nothing may be in flight, and the number of those so far.
    asks: bool,
    asked: u32,
    /// Time from the first answer of the peer to the last.
    alive: u64,
    /// Whether the rail has counted as late.
    late: bool,
}

impl Held {
    pub(super) const NONE: Held = Held {
        next: 0,
        again: 0,
        seen: 0,
        answered: false,
        asks: false,
        asked: 0,
        alive: 0,
        late: false,
    };

    fn begin(&mut self, time: u64, unit: u64) {
        *self = Held { next: time + unit, again: 2, ..Held::NONE };
    }

    /// Returns whether the peer must be asked again.
    fn look(&mut self, time: u64, unit: u64) -> bool {
        if mem::take(&mut self.answered) {
            // A peer that pauses has received what arrived meanwhile only at its second answer.
            self.alive += if self.seen == 0 { 0 } else { (time - self.seen).min(GAP * unit) };
            self.seen = time;
            self.again = self.again.min(OFTEN);
            self.next = self.next.min(time + self.again * unit);
        }
        if time < self.next {
            return false;
        }
        self.next = time + self.again * unit;
        self.again = (self.again * 2).min(SELDOM);
        true
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Looks for rails that make no progress. Called when the rails have checked their peers.
    #[cold]
    pub(super) fn look_at_held(&mut self) {
        if RAILS == 1 || self.failover.is_none() {
            return;
        }
        self.count_time();
        for peer in 0..self.reached as u16 {
            let slot = &self.peers[peer as usize];
            if slot.state.is_up() && slot.rails.count_ones() > 1 && !self.is_meeting(peer) {
                self.look_at_silent(peer);
                for context in 0..self.config.contexts {
                    self.look_at_stream(self.stream_of(context as u8, peer));
                }
            }
        }
    }

    /// Returns whether a silent peer has failed on a rail: no other rail leads to it. Otherwise
    /// notes the silence for `look_at_silent`.
    #[cold]
    pub(in super::super) fn is_lost_in_silence(
        &mut self,
        peer: u16,
        rail: usize,
        overdue: bool,
    ) -> bool {
        let Some(slot) = self.peers.get(peer as usize) else { return true };
        let up = slot.state.is_up() && !self.is_meeting(peer);
        let open = self.open_rails(peer);
        if RAILS == 1 || !up || open >> rail & 1 == 0 || open.count_ones() == 1 {
            return true;
        }
        self.count_time();
        let time = self.failover.as_ref().map_or(0, |failover| failover.time);
        let unit = UNIT[self.loads.untimed()];
        let Some(kept) = self.kept_peer_mut(peer) else { return true };
        kept.silent |= 1 << rail;
        kept.overdue |= u16::from(overdue) << rail;
        // A program may make passes and never check its peers.
        if time - kept.looked >= UNCHECKED * unit {
            self.look_at_silent(peer);
        }
        false
    }

    fn look_at_silent(&mut self, peer: u16) {
        let (unit, in_use) = (UNIT[self.loads.untimed()], self.peers[peer as usize].rails);
        let time = self.failover.as_ref().map_or(0, |failover| failover.time);
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.looked = time;
        if kept.silent | kept.examined == 0 {
            return;
        }
        let silent = mem::take(&mut kept.silent) & in_use;
        let overdue = mem::take(&mut kept.overdue) & in_use;
        kept.examined &= silent;
        if kept.examined == 0 {
            kept.examined = silent;
            kept.held.begin(time, unit);
            return;
        }
        let due = kept.held.look(time, unit);
        let Held { alive, late, .. } = kept.held;
        let examined = kept.examined;
        if alive >= SILENT * unit && overdue & examined != 0 {
            kept.examined = 0;
            return self.lose_silent(peer, (overdue & examined).trailing_zeros() as usize);
        }
        let is_late =
            ahead(examined, 0).fold(late, |is, rail| self.is_late(peer, rail, alive, !late) | is);
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        kept.held.late = is_late;
        if due {
            kept.held.asks = true;
            self.ask(self.stream_of(0, peer));
        }
    }

    /// Returns whether a rail is late that has delivered nothing while its peer has answered for a
    /// time. If so, notes this, and gives the rail up if it takes too long.
    fn is_late(&mut self, peer: u16, rail: usize, alive: u64, first: bool) -> bool {
        let unit = UNIT[self.loads.untimed()];
        if alive < LATE * unit || self.loads.may_need(rail, alive) {
            return false;
        }
        self.loads.held_up(rail, alive, first);
        if alive >= GIVE_UP * unit {
            self.give_up(peer, rail);
        }
        true
    }

    fn lose_silent(&mut self, peer: u16, rail: usize) {
        let why = PeerError::Silent;
        self.rail_failed(peer, rail, Fault::Peer(why), PeerError::Rail(RailId(rail as u8)));
    }

    fn look_at_stream(&mut self, stream: u32) {
        let (s, unit) = (&self.streams[stream as usize], UNIT[self.loads.untimed()]);
        let (acked, waits) = (s.acked, s.live && s.in_flight() != 0);
        let Some(failover) = &mut self.failover else { return };
        let time = failover.time;
        let Some(kept) = failover.streams.get_mut(stream as usize).filter(|kept| kept.kept) else {
            return;
        };
        if !waits || kept.oldest != acked || kept.held.next == 0 {
            kept.oldest = acked;
            kept.held.begin(time, unit);
            return;
        }
        if !kept.held.look(time, unit) {
            return;
        }
        // If the number has arrived, only a reply is missing.
        let (Held { alive, late, .. }, peer) = (kept.held, s.peer);
        if kept.heard == acked
            && let Carried::By(rail) = failover.at(stream, acked).carried
            && self.is_late(peer, rail.into(), alive, !late)
            && let Some(failover) = &mut self.failover
        {
            failover.streams[stream as usize].held.late = true;
        }
        self.streams[stream as usize].asked = acked;
        self.ask(stream);
    }

    /// Notes that the peer has acknowledged, so it makes progress.
    #[cold]
    pub(in super::super) fn note_answer(&mut self, stream: u32) {
        if let Some(failover) = &mut self.failover
            && let Some(kept) = failover.streams.get_mut(stream as usize)
        {
            kept.held.answered = true;
        }
        let peer = self.streams[stream as usize].peer;
        if let Some(kept) = self.kept_peer_mut(peer).filter(|kept| kept.examined != 0) {
            kept.held.answered = true;
        }
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Asks a silent peer, if that is due, although nothing may be in flight. Uses rails on which
    /// the peer is not silent. Returns `false` if a rail has no room: the next call uses another.
    #[cold]
    pub(in super::super) fn ask_silent(&mut self, stream: u32) -> bool {
        let s = &self.state.streams[stream as usize];
        let (context, peer, word, cursor) = (s.context, s.peer, s.stamp, s.window.expected());
        let (live, wanted) = (s.live && context == 0, Some(s.next));
        let in_use = self.state.peers[peer as usize].rails;
        let Some(kept) = self.state.kept_peer_mut(peer).filter(|kept| live && kept.held.asks)
        else {
            return true;
        };
        let heard = in_use & !kept.examined;
        let rail = nth(if heard == 0 { in_use } else { heard }, kept.held.asked);
        kept.held.asked = kept.held.asked.wrapping_add(1);
        let Some(rail) = rail else { return true };
        let body = Body::Ack { wanted, freed: self.state.returned(stream) };
        let mut head = [0; HEAD_MAX];
        let len = Message { context, word, ack: truncate::<32>(cursor.0), body }.encode(&mut head);
        let owner = self.state.control(peer);
        if !self.post_on(rail, stream, peer, &head[..len], owner, cursor) {
            return false;
        }
        self.state.credits_told(stream);
        if let Some(kept) = self.state.kept_peer_mut(peer) {
            kept.held.asks = false;
        }
        true
    }
}
