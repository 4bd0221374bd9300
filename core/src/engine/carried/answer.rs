//! The side that owns the memory of a get: checks the request, and sends the pieces in the turn of
//! the stream. Between sides with failover, a get leaves the stream and waits in a list of at most
//! [`GETS`](super::super::pieces::GETS), because its answers take numbers.

use crate::error::{PeerError, PostError, Violation};
use crate::mem::{Peer, Untrusted};
use crate::rail::Rail;
use crate::sync::seq::truncate;

use super::super::failover::{Failover, FailoverStream, Sent};
use super::super::list::NONE;
use super::super::pieces::{Answer, COPIER, Get, Got, LONGEST, PIECE_BITS};
use super::super::post::Blocked;
use super::super::{Engine, State};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Answers the get that is next in the stream. Returns the unanswered rest, or `None` if the
    /// get is answered or queued.
    ///
    /// # Errors
    /// A protocol violation if the peer has too many unanswered gets. [`PeerError::Rail`] if the
    /// device or a rail has failed.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn answer(
        &mut self,
        stream: u32,
        answer: Answer,
    ) -> Result<Option<Answer>, PeerError> {
        match self.state.is_kept(stream) {
            true => {
                self.state.answer_later(stream, answer).map(|()| None).map_err(PeerError::Protocol)
            }
            false => self.send_pieces(stream, answer),
        }
    }

    pub(in super::super) fn answer_gets(&mut self, stream: u32) {
        let s = &self.state.streams[stream as usize];
        if self.state.config.window == 1 && s.next.0 & 1 != 0 && s.unposted != NONE {
            self.advance(stream);
        }
        let Some(answer) = self.state.oldest_get(stream) else { return };
        let rest = self.send_pieces(stream, answer);
        match rest {
            Ok(rest) => self.state.get_answered(stream, rest),
            Err(why) => self.state.fail_peer(self.state.streams[stream as usize].peer, why),
        }
    }

    /// Sends the next pieces of the answer to a get, or one empty piece if the region is gone.
    fn send_pieces(
        &mut self,
        stream: u32,
        mut answer: Answer,
    ) -> Result<Option<Answer>, PeerError> {
        let kept = self.state.is_kept(stream);
        for _ in 0..self.state.config.batch {
            let state = &mut self.state;
            let s = &state.streams[stream as usize];
            if answer.left == 0 || !s.live {
                return Ok(None);
            }
            if kept && !state.may_send_piece(stream) {
                return Ok(Some(answer));
            }
            let word = if kept { s.word(state.mask) } else { s.stamp };
            let (peer, context, cursor) = (s.peer, s.context, s.window.expected());
            let most = state.room(peer).min(LONGEST as u64).min(answer.piece.into());
            let (start, len) = match state.place_anywhere(answer.at, answer.left) {
                Ok((ptr, _)) => (Some(ptr), answer.left.min(most)),
                Err(Violation::Region) => (None, answer.left),
                Err(violation) => return Err(PeerError::Protocol(violation)),
            };
            let Some(protocol) = &state.protocol else { return Ok(None) };
            let mut copy = protocol.accounts[stream as usize].carriage.answering;
            let mut bytes = [0; LONGEST];
            let staged = match start {
                Some(ptr) => {
                    self.staged((ptr, answer.at.region, len as usize), &mut bytes, &mut copy)
                }
                None => {
                    copy = 0;
                    Ok(Untrusted::from_slice(&[]))
                }
            };
            if let Some(protocol) = &mut self.state.protocol {
                protocol.accounts[stream as usize].carriage.answering = copy;
            }
            let payload = match staged {
                Ok(payload) => payload,
                Err(PostError::Again) => return Ok(Some(answer)),
                Err(_) => return Err(PeerError::Rail(COPIER)),
            };
            let last = len == answer.left;
            // Without failover, the last piece also acknowledges the get.
            let cursor = cursor.plus((last && !kept) as u64);
            let (token, into) = (answer.token, answer.into);
            let got = Got { context, last, word, ack: truncate::<32>(cursor.0), token, into };
            let owner = self.state.control(peer);
            match self.post_bytes(stream, peer, &got.encode(), payload, owner, cursor) {
                Ok(_) => {}
                Err(Blocked::Refused(rail, _)) => return Err(PeerError::Rail(rail)),
                Err(_) => return Ok(Some(answer)),
            }
            if kept {
                let what =
                    Sent::Got { at: answer.at, len: payload.len() as u32, last, token, into };
                self.state.keep_piece_sent(stream, what);
            }
            answer.at.offset += len;
            (answer.left, answer.into) = (answer.left - len, answer.into + len);
        }
        Ok(if answer.left == 0 { None } else { Some(answer) })
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    fn answer_later(&mut self, stream: u32, answer: Answer) -> Result<(), Violation> {
        let Some(failover) = &mut self.failover else { return Err(Violation::Kind) };
        let resuming = &mut failover.streams[stream as usize];
        let place = resuming.gets.get_mut(resuming.asked as usize).ok_or(Violation::Credit)?;
        *place = answer;
        resuming.asked += 1;
        self.ask(stream);
        Ok(())
    }

    fn oldest_get(&self, stream: u32) -> Option<Answer> {
        let resuming = self.failover.as_ref()?.streams.get(stream as usize)?;
        resuming.gets[..resuming.asked as usize].first().copied()
    }

    fn get_answered(&mut self, stream: u32, rest: Option<Answer>) {
        let Some(failover) = &mut self.failover else { return };
        let resuming = &mut failover.streams[stream as usize];
        match rest {
            Some(rest) => resuming.gets[0] = rest,
            None => {
                resuming.gets.copy_within(1.., 0);
                resuming.asked = resuming.asked.saturating_sub(1);
            }
        }
    }

    /// Answers to gets leave room in the window for operations.
    fn may_send_piece(&self, stream: u32) -> bool {
        let window = self.config.window;
        let pieces =
            self.failover.as_ref().map_or(0, |failover| failover.streams[stream as usize].pieces);
        self.streams[stream as usize].in_flight() < window.into() && pieces < (window / 4).max(1)
    }

    /// Answers do not count, so a peer that keeps getting or sending does not hold up a fence.
    pub(in super::super) fn has_operations_in_flight(&self, stream: u32) -> bool {
        let in_flight = self.streams[stream as usize].in_flight();
        let answers = |failover: &Failover<'_>| {
            let FailoverStream { pieces, answered, .. } = failover.streams[stream as usize];
            u64::from(pieces) + u64::from(answered)
        };
        in_flight != 0 && in_flight > self.failover.as_ref().map_or(0, answers)
    }

    fn keep_piece_sent(&mut self, stream: u32, what: Sent) {
        self.keep(stream, what, Untrusted::from_slice(&[]));
        let s = &mut self.streams[stream as usize];
        s.next = s.next.plus(1);
        self.stats.posted += 1;
    }

    pub(super) fn park_get(&mut self, peer: Peer, get: Get) -> Result<(), Violation> {
        let Get { context, word, ack, at, token, len, into, piece } = get;
        let Some(stream) = self.arrival_stream(peer, context, word)? else { return Ok(()) };
        self.acknowledged(stream, ack)?;
        if !self.can_carry(peer.0) {
            return Err(Violation::Kind);
        }
        match self.place_anywhere(at, len) {
            // If the region is gone, the answer says so later.
            Ok(_) | Err(Violation::Region) => {}
            Err(violation) => return Err(violation),
        }
        let named = into.checked_add(len).is_some_and(|end| end >> (64 - PIECE_BITS) == 0);
        if !named || at.offset.checked_add(len).is_none() {
            return Err(Violation::Bounds);
        }
        let piece = u16::try_from(piece).unwrap_or(u16::MAX);
        self.park(stream, word, Answer { at, token, left: len, into, piece }.parked()).map(drop)
    }
}
