//! Streams that one number holds up, because its rail delays or has lost it. For example, TCP
//! repeats lost packets only after some time, and each time later.

use super::super::State;
use super::sent::Carried;

/// Time, in nanoseconds or passes, after which an acknowledgement is requested again, because the
/// request or the answer may be delayed. Doubles with each request.
const AGAIN: [u64; 2] = [10_000_000, 10_486];

/// Number of times `AGAIN` after which the rail of the oldest number counts as late, if the peer
/// answers requests meanwhile. A peer that makes no progress is no fault of a rail.
const LATE: u64 = 16;

impl<const RAILS: usize> State<'_, RAILS> {
    /// Looks for streams that a number holds up. Called when the rails have checked their peers.
    #[cold]
    pub(super) fn look_at_held(&mut self) {
        if RAILS == 1 || self.failover.is_none() {
            return;
        }
        self.count_time();
        for peer in 0..self.reached as u16 {
            let slot = &self.peers[peer as usize];
            if slot.state.is_up() && slot.rails.count_ones() > 1 && !self.is_meeting(peer) {
                for context in 0..self.config.contexts {
                    self.look_at_stream(self.stream_of(context as u8, peer));
                }
            }
        }
    }

    fn look_at_stream(&mut self, stream: u32) {
        let (s, untimed) = (&self.streams[stream as usize], self.loads.untimed());
        let (acked, waits) = (s.acked, s.live && s.in_flight() != 0);
        let Some(failover) = &mut self.failover else { return };
        let time = failover.time;
        let Some(kept) = failover.streams.get_mut(stream as usize).filter(|kept| kept.kept) else {
            return;
        };
        if !waits || kept.oldest != acked || kept.since == 0 {
            (kept.oldest, kept.since, kept.again) = (acked, time, 1);
            kept.heard_from = false;
            return;
        }
        if time - kept.since < AGAIN[untimed] * kept.again {
            return;
        }
        let late = kept.again >= LATE && kept.heard_from;
        (kept.again, kept.heard_from) = (kept.again * 2, false);
        if late && let Carried::By(rail) = failover.at(stream, acked).carried {
            self.loads.held_up(rail.into());
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
            kept.heard_from = true;
        }
    }
}
