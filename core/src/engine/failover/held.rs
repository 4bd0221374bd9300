//! Detects rails that make no progress while their peer answers over other rails.
//!
//! A stream may be held up by one number, because its rail delays or has lost it. For example, TCP
//! repeats lost packets only after some time, and each time later. A rail itself may also report
//! that a peer is silent on it ([`Sink::silent`]). In both cases the peer is asked to acknowledge
//! what has arrived. Only the time during which it answers counts against the rail, because a peer
//! that has stopped makes no progress on any rail.

use core::mem;

use crate::error::PeerError;
use crate::mem::RailId;
use crate::op::Fault;
#[cfg(doc)]
use crate::rail::Sink;

use super::super::State;
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

/// Time during which the peer answers after which the rail of the oldest number counts as late. A
/// peer that makes no progress is no fault of a rail. Doubles each time.
const LATE: u64 = 8;

/// Time during which the peer answers after which a rail on which it is silent counts as failed.
const SILENT: u64 = 100;

/// A wait for a rail to a peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// [`Failover::time`](super::Failover::time) of the next request, or 0 if nothing is held up.
    next: u64,
    /// Units from the next request to the one after it.
    again: u64,
    /// Time of the last look that saw an answer, and whether another has arrived since.
    seen: u64,
    answered: bool,
    /// Whether a request is due although nothing may be in flight.
    asks: bool,
    /// Time during which the peer has answered.
    alive: u64,
    /// The value of `alive` at which the rail next counts as late.
    late: u64,
}

impl Held {
    pub(super) const NONE: Held =
        Held { next: 0, again: 0, seen: 0, answered: false, asks: false, alive: 0, late: 0 };

    fn begin(&mut self, time: u64, unit: u64) {
        *self = Held { next: time + unit, again: 2, seen: time, late: LATE * unit, ..Held::NONE };
    }

    /// Returns whether the peer must be asked again.
    fn look(&mut self, time: u64, unit: u64) -> bool {
        if mem::take(&mut self.answered) {
            self.alive += (time - self.seen).min(GAP * unit);
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

    /// Returns whether a silent peer has failed on a rail. While another rail leads to the peer,
    /// only `look_at_silent` decides that.
    #[cold]
    pub(in super::super) fn is_lost_in_silence(&mut self, peer: u16, rail: usize) -> bool {
        let Some(slot) = self.peers.get(peer as usize) else { return true };
        let up = slot.state.is_up() && !self.is_meeting(peer);
        if RAILS == 1 || !up || self.open_rails(peer) >> rail & 1 == 0 {
            return true;
        }
        let Some(kept) = self.kept_peer_mut(peer) else { return true };
        kept.silent |= 1 << rail;
        false
    }

    fn look_at_silent(&mut self, peer: u16) {
        let (unit, in_use) = (UNIT[self.loads.untimed()], self.peers[peer as usize].rails);
        let time = self.failover.as_ref().map_or(0, |failover| failover.time);
        let Some(kept) = self.kept_peer_mut(peer) else { return };
        let silent = mem::take(&mut kept.silent) & in_use;
        kept.examined &= silent;
        if kept.examined == 0 {
            kept.examined = silent;
            kept.held.begin(time, unit);
            return;
        }
        let due = kept.held.look(time, unit);
        if kept.held.alive >= SILENT * unit {
            let rail = mem::take(&mut kept.examined).trailing_zeros() as usize;
            return self.lose_silent(peer, rail);
        }
        if due {
            kept.held.asks = true;
            self.ask(self.stream_of(0, peer));
        }
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
        let late = kept.held.alive >= kept.held.late && kept.heard == acked;
        if late && let Carried::By(rail) = failover.at(stream, acked).carried {
            failover.streams[stream as usize].held.late *= 2;
            self.loads.held_up(rail.into());
        }
        self.streams[stream as usize].asked = acked;
        self.ask(stream);
    }

    /// Returns whether a silent peer must be asked, although nothing may be in flight.
    #[cold]
    pub(in super::super) fn asks_silent(&mut self, stream: u32) -> bool {
        let (context, peer) =
            (self.streams[stream as usize].context, self.streams[stream as usize].peer);
        let kept = self.kept_peer_mut(peer).filter(|_| context == 0);
        kept.is_some_and(|kept| mem::take(&mut kept.held.asks))
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
        if let Some(kept) = self.kept_peer_mut(peer) {
            kept.held.answered = true;
        }
    }
}
