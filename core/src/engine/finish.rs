//! Completes operations: by an acknowledgement, by the completion of a post, by a reply, or by the
//! failure of the peer.

use crate::error::{CompleteError, OpError, PeerError, Violation};
use crate::mem::RailId;
use crate::op::{Completion, Fault, Outcome, Token};
use crate::probe::probe;
use crate::rail::Rail;
use crate::sync::seq::{Seq, expand, truncate};

use super::list::{Fifo, NONE};
use super::pending::{OpKind, Pending, PendingSlot, State as Stage};
use super::table::PeerState;
use super::{Engine, State};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Takes the oldest completion, if any. Does not make progress.
    #[inline]
    pub fn next_completion(&mut self) -> Option<Completion> {
        match self.state.pending.ended.head {
            NONE => None,
            index => Some(self.state.take(index)),
        }
    }

    /// Takes the completion of one operation. Returns `None` while the operation is in flight. Does
    /// not make progress.
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if it was already taken, or never existed.
    #[inline]
    pub fn test(&mut self, token: Token) -> Result<Option<Completion>, OpError> {
        let index = self.state.pending.find(token)?;
        let slot = &self.state.pending.slots[index as usize];
        if !slot.report {
            return Err(OpError::StaleToken);
        }
        Ok(if slot.state == Stage::Ended { Some(self.state.take(index)) } else { None })
    }

    /// Makes [`quiet`](Self::quiet) report a failure of this send too, as if it were silent. For
    /// owners that use its completion only to learn when its memory is free.
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if the completion was taken before.
    pub fn count_failure(&mut self, token: Token) -> Result<(), OpError> {
        let index = self.state.pending.find(token)?;
        self.state.pending.slots[index as usize].counted = true;
        Ok(())
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    fn take(&mut self, index: u32) -> Completion {
        let Pending { slots, ended, .. } = &mut self.pending;
        let slot = &slots[index as usize];
        let (token, Seq(order)) = (slot.token(), slot.end);
        let completion =
            Completion { token, tag: slot.tag, outcome: slot.outcome, value: slot.value, order };
        slots.free(index);
        ended.remove(slots, index);
        completion
    }

    /// The peer has applied everything below a number, of which `ack` has the low 32 bits.
    #[inline(always)]
    pub(super) fn acknowledged(&mut self, stream: u32, ack: u32) -> Result<(), Violation> {
        if ack == truncate::<32>(self.streams[stream as usize].acked.0) {
            return Ok(());
        }
        self.acknowledged_more(stream, ack)
    }

    #[inline(never)]
    fn acknowledged_more(&mut self, stream: u32, ack: u32) -> Result<(), Violation> {
        let s = &self.streams[stream as usize];
        self.acknowledged_up_to(stream, Seq(expand::<32>(ack, s.acked.0)))
    }

    #[inline(always)]
    pub(super) fn acknowledged_up_to(&mut self, stream: u32, cursor: Seq) -> Result<(), Violation> {
        let s = &self.streams[stream as usize];
        if cursor.is_before(s.acked) {
            // An older message that arrives late acknowledges nothing new.
            return Ok(());
        }
        if cursor.since(s.acked) > s.in_flight() {
            return Err(Violation::Ack);
        }
        let cursor = if self.is_kept(stream) { self.kept_arrived(stream, cursor) } else { cursor };
        let s = &mut self.streams[stream as usize];
        s.acked = cursor;
        self.open -= s.silent_over();
        let waiting = s.unposted != NONE;
        if waiting {
            self.due.push(self.streams, stream);
        }
        loop {
            let State { streams, pending, open, .. } = self;
            let s = &mut streams[stream as usize];
            let index = s.ops.head;
            let Some(slot) = pending.slots.get_mut(index as usize) else { return Ok(()) };
            if !slot.posted || cursor.is_before(slot.end) {
                return Ok(());
            }
            slot.acked = true;
            let (report, done) = (slot.report, matches!(slot.outcome, Outcome::Done));
            let simple = done && slot.kind != OpKind::Send && !slot.inner;
            let over = slot.posts == 0 && !slot.fetch && simple;
            s.ops.pop(&mut pending.slots);
            if over {
                s.open -= 1;
                *open -= 1;
                pending.end(index, report);
            } else {
                s.closing.push(&mut pending.slots, index);
                self.end_if_over(index);
            }
        }
    }

    pub(super) fn replied(&mut self, peer: u16, token: u64, value: u64) -> Result<(), Violation> {
        let kept = RAILS > 1 && self.kept_peer(peer).is_some();
        let waits = |index: &u32| {
            let slot = &self.pending.slots[*index as usize];
            let theirs = slot.stream != NONE && self.streams[slot.stream as usize].peer == peer;
            theirs
                && slot.fetch
                && slot.posted
                && slot.state == Stage::Open
                && slot.kind == OpKind::Message
        };
        let index = match self.pending.find(Token(token)).ok().filter(waits) {
            Some(index) => index,
            // Failover may repeat a reply.
            None if kept => return Ok(()),
            None => return Err(Violation::Reply),
        };
        let slot = &mut self.pending.slots[index as usize];
        let stream = slot.stream;
        slot.fetch = false;
        slot.value = value;
        self.end_if_over(index);
        if kept {
            self.let_go(stream);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn post_done(&mut self, rail: usize, index: u32, result: Result<(), CompleteError>) {
        let Some(slot) = self.pending.slots.get_mut(index as usize) else { return };
        slot.posts -= 1;
        let over = slot.acked && slot.posts == 0;
        if let Err(error) = result {
            return self.post_failed(rail, index, error);
        }
        if over {
            self.end_if_over(index);
        }
    }

    /// The stream has waited for the atomic, and continues in the next pass.
    #[cold]
    pub(super) fn atomic_done(
        &mut self,
        rail: usize,
        index: u32,
        result: Result<(), CompleteError>,
    ) {
        let Some(slot) = self.pending.slots.get(index as usize) else { return };
        let (stream, waits) = (slot.stream, !slot.posted);
        self.post_done(rail, index, result);
        if waits {
            self.due.push(self.streams, stream);
        }
    }

    #[inline(always)]
    pub(super) fn silent_posts_done(&mut self, stream: u32, tag: u64, count: u32) {
        // Ignore posts to an earlier peer of this slot.
        let Some(s) = self.streams.get_mut(stream as usize) else { return };
        if s.tag != tag {
            return;
        }
        s.silent_posts = s.silent_posts.saturating_sub(count);
        if s.silent_posts == 0 {
            self.open -= s.silent_over();
        }
    }

    #[cold]
    pub(super) fn silent_post_failed(
        &mut self,
        rail: usize,
        stream: u32,
        tag: u64,
        error: CompleteError,
    ) {
        let Some(s) = self.streams.get_mut(stream as usize) else { return };
        if s.tag != tag || s.silent_posts == 0 {
            return;
        }
        s.silent_posts -= 1;
        self.stats.failed += 1;
        let (peer, id) = (s.peer, RailId(rail as u8));
        self.rail_failed(peer, rail, Fault::Rail(id, error), PeerError::Rail(id));
    }

    #[cold]
    fn post_failed(&mut self, rail: usize, index: u32, error: CompleteError) {
        self.stats.failed += 1;
        if RAILS > 1 && self.is_taken_over(rail, index, error) {
            return self.end_if_over(index);
        }
        let rail = RailId(rail as u8);
        let slot = &mut self.pending.slots[index as usize];
        let quiescent = match error {
            CompleteError::Failed(_) => true,
            // The peer has already failed. The kind of operation decides whether its data may still
            // land.
            CompleteError::PeerDown => slot.kind == OpKind::Read || slot.outcome != Outcome::Done,
            CompleteError::Unknown(_) => false,
        };
        slot.fail(Fault::Rail(rail, error), quiescent);
        // The lost number leaves a hole that nothing fills, so the stream and its peer fail.
        let (stream, numbered) = (slot.stream, slot.numbered);
        if numbered && stream != NONE {
            let peer = self.streams[stream as usize].peer;
            self.fail_peer(peer, PeerError::Rail(rail));
        }
        self.end_if_over(index);
    }

    /// Other rails post numbered data again once the peer has reported it missing, and they repeat
    /// reads. Returns `false` if they cannot.
    fn is_taken_over(&mut self, rail: usize, index: u32, error: CompleteError) -> bool {
        let PendingSlot { stream, kind, .. } = self.pending.slots[index as usize];
        if stream == NONE || !self.is_kept(stream) {
            return false;
        }
        let (peer, id) = (self.streams[stream as usize].peer, RailId(rail as u8));
        let read = kind == OpKind::Read;
        let failed = self.open_rails(peer) >> rail & 1 == 0;
        if read && !failed && matches!(error, CompleteError::Failed(_)) {
            // The target rejected the read, so no other rail may repeat it.
            return false;
        }
        if read {
            let slot = &mut self.pending.slots[index as usize];
            (slot.again, slot.fetch) = (true, true);
            if let Some(failover) = &mut self.failover {
                failover.streams[stream as usize].reads = true;
            }
            self.ask(stream);
        }
        self.rail_failed(peer, rail, Fault::Rail(id, error), PeerError::Rail(id));
        self.peers[peer as usize].state.is_up()
    }

    #[inline]
    pub(super) fn end_if_over(&mut self, index: u32) {
        let slot = &mut self.pending.slots[index as usize];
        if !(slot.posted && slot.acked && slot.posts == 0 && !slot.fetch)
            || slot.state != Stage::Open
        {
            return;
        }
        let (stream, report, failed) = (slot.stream, slot.report, slot.outcome != Outcome::Done);
        let (kind, inner) = (slot.kind, slot.inner);
        slot.state = Stage::Ended;
        self.open -= 1;
        if stream != NONE {
            let s = &mut self.streams[stream as usize];
            s.closing.remove(&mut self.pending.slots, index);
            s.open -= 1;
            if failed && self.pending.slots[index as usize].is_counted() {
                self.lose(stream);
            }
        }
        if kind == OpKind::Send {
            self.send_over(index);
        }
        match kind {
            _ if !inner => {}
            OpKind::Send => self.request_over(index),
            _ => self.read_over(index),
        }
        self.pending.end(index, report);
    }

    /// Fails a peer. Each operation to the peer fails now, or with the completion of its last post.
    /// Slow path.
    #[cold]
    pub(super) fn fail_peer(&mut self, peer: u16, why: PeerError) {
        let before = self.peers[peer as usize].state;
        if !before.is_up() && before != PeerState::Reserved {
            return;
        }
        let gone = why.is_gone();
        probe!("peer_down", peer, gone);
        let why = self.after_bye(peer, why);
        self.closing -= (before == PeerState::Closing) as u32;
        self.peers[peer as usize].state = PeerState::Failed(why);
        self.part(peer);
        self.troubles += 1;
        for remote in self.remotes.iter_mut().filter(|remote| remote.is_of(peer)) {
            remote.mapped = core::ptr::null_mut();
        }
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            if self.streams[stream].live && self.is_kept(stream as u32) {
                self.not_again(stream as u32, self.streams[stream].next);
            }
            let s = &mut self.streams[stream];
            s.shut();
            let (ops, closing) = (s.ops, s.closing);
            (s.ops, s.closing, s.unposted) = (Fifo::EMPTY, Fifo::EMPTY, NONE);
            if core::mem::take(&mut s.silent) {
                s.open -= 1;
                self.open -= 1;
                self.lose(stream as u32);
            }
            for list in [ops, closing] {
                let mut index = list.head;
                while index != NONE {
                    let slot = &mut self.pending.slots[index as usize];
                    let next = slot.links.next;
                    // An acknowledged operation is done, even if one of its posts is outstanding.
                    // An atomic that a rail executes has no number, and may have been executed
                    // already.
                    let native =
                        slot.kind == OpKind::Atomic && !slot.numbered && slot.message.is_none();
                    let executed = native && slot.posts == 0;
                    if !executed && (!slot.acked || slot.fetch || !slot.numbered) {
                        let sent = slot.numbered || native;
                        let placing = self.may_still_place(index);
                        let slot = &mut self.pending.slots[index as usize];
                        slot.fail(Fault::Peer(why), (gone || !sent) && !placing);
                    }
                    let slot = &mut self.pending.slots[index as usize];
                    (slot.posted, slot.acked, slot.fetch, slot.stream) = (true, true, false, NONE);
                    slot.again = false;
                    self.streams[stream].open -= 1;
                    if slot.outcome != Outcome::Done && slot.is_counted() {
                        self.lose(stream as u32);
                    }
                    // The receiver is gone, so stop sending the payload.
                    self.stop_pulling(index);
                    self.end_if_over(index);
                    index = next;
                }
            }
        }
        self.fail_matching(peer, why);
    }

    #[cold]
    fn lose(&mut self, stream: u32) {
        let s = &mut self.streams[stream as usize];
        self.troubles += (s.lost == 0) as u32;
        s.lost = s.lost.saturating_add(1);
    }

    pub(super) fn take_lost(&mut self, stream: u32) -> u32 {
        let lost = core::mem::take(&mut self.streams[stream as usize].lost);
        self.troubles -= (lost != 0) as u32;
        lost
    }
}

#[cfg(test)]
mod tests {
    use crate::engine::{Config, Engine, Tables};
    use crate::rail::loopback::Loopback;

    #[test]
    fn failures_that_nobody_asks_about_are_counted_up_to_a_number_that_stays() {
        let mut tables = Tables::<1, 1, 8, 1, 1>::new();
        let config = Config { window: 8, ..Config::DEFAULT };
        let mut engine = Engine::new(config, [Loopback::<4>::new()], tables.memory()).unwrap();
        let state = &mut engine.state;
        state.lose(0);
        state.streams[0].lost = u32::MAX;
        state.lose(0);
        assert_eq!((state.troubles, state.take_lost(0), state.troubles), (1, u32::MAX, 0));
    }
}
