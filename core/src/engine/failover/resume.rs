//! Posts again the numbers, replies and reads that were lost on failed rails. Bounded: work that
//! finds no room continues in the next pass.

use core::mem;
use core::ptr::NonNull;

use crate::error::{PeerError, PostError};
use crate::mem::{Peer, Untrusted};
use crate::op::Fault;
use crate::rail::{Local, Posted, Rail, Remote};
use crate::sync::seq::{Seq, truncate};

use super::super::list::NONE;
use super::super::pending::{OpKind, PendingSlot};
use super::super::pieces::{COPIER, Get, Got, LONGEST};
use super::super::post::Blocked;
use super::super::post_tag::{Owner, PostTag};
use super::super::protocol::head;
use super::super::wire::{Body, HEAD_MAX, Message, NO_TOKEN};
use super::super::{Engine, State};
use super::sent::{Carried, Sent};
use super::{Asks, FailoverStream, SentSlot};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Continues the failover of a stream. For the first stream of a peer, also continues the
    /// fencing and the return of its rails.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn mend(&mut self, stream: u32) {
        let s = &self.state.streams[stream as usize];
        if s.context == 0 {
            let peer = s.peer;
            self.fence_rails(peer);
            self.tell_fenced(peer);
            self.rejoin_rails(peer);
        }
        self.repost_lost(stream);
        self.reply_again(stream);
        self.read_again(stream);
        self.state.note_resumed(self.state.streams[stream as usize].peer);
    }

    /// Sends answers that found no room earlier, before operations take the room.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn answer_first(&mut self) {
        if self.state.failover.as_ref().is_some_and(|failover| failover.refused) {
            self.serve_protocol();
            // Answers that still wait are tried again at the end of the pass.
            if let Some(failover) = &mut self.state.failover {
                failover.refused = false;
            }
        }
    }

    fn repost_lost(&mut self, stream: u32) {
        if !self.state.resuming(stream).is_some_and(|resuming| resuming.lost) {
            return;
        }
        let mut budget = self.state.config.batch;
        let s = &self.state.streams[stream as usize];
        let (first, count) = (s.acked, if s.live { s.in_flight() } else { 0 });
        for n in 0..count {
            let seq = first.plus(n);
            let Some(token) = self.state.is_missing(stream, seq) else { continue };
            if budget == 0 {
                return;
            }
            budget -= 1;
            let posted = match token {
                NO_TOKEN => self.repost(stream, seq),
                token => self.ask_reply(stream, seq, token),
            };
            match posted {
                Ok(()) => {}
                Err(Blocked::Refused(rail, _)) => {
                    let peer = self.state.streams[stream as usize].peer;
                    self.state.fail_peer(peer, PeerError::Rail(rail));
                    return;
                }
                Err(_) => return,
            }
        }
        if let Some(resuming) = self.state.resuming(stream) {
            resuming.lost = false;
        }
    }

    fn ask_reply(&mut self, stream: u32, number: Seq, token: u64) -> Result<(), Blocked> {
        let s = &self.state.streams[stream as usize];
        let (peer, cursor) = (s.peer, s.window.expected());
        let ack = truncate::<32>(cursor.0);
        let asks = Asks { context: s.context, word: s.stamp, ack, token, number };
        let owner = self.state.control(peer);
        self.post_bytes(stream, peer, &asks.encode(), Untrusted::from_slice(&[]), owner, cursor)?;
        if let Some(failover) = &mut self.state.failover {
            failover.at(stream, number).ask = false;
        }
        Ok(())
    }

    fn repost(&mut self, stream: u32, seq: Seq) -> Result<(), Blocked> {
        let Some(failover) = &mut self.state.failover else { return Ok(()) };
        let SentSlot { what, bytes, .. } = *failover.at(stream, seq);
        let s = &self.state.streams[stream as usize];
        let (peer, context, word) = (s.peer, s.context, s.stamp | seq.low(self.state.mask));
        let cursor = s.window.expected();
        let (ack, nothing) = (truncate::<32>(cursor.0), Untrusted::from_slice(&[]));
        let mut staging = [0; LONGEST];
        let payload = match self.state.source_again(&what) {
            Some(source) => self.stage_again(stream, seq, source, &mut staging)?,
            None => nothing,
        };
        let control = self.state.control(peer);
        let (op, posted) = match what {
            Sent::Nothing => (NONE, Posted::Done),
            Sent::Write { op, local, len, offset } => {
                (op, self.rewrite(peer, op, local, len, offset, word)?)
            }
            Sent::Message { op, body, local, len } => {
                let payload = if local.is_null() {
                    Untrusted::from_slice(&bytes[..len as usize])
                } else {
                    payload
                };
                (op, self.post_message(stream, peer, word, body, payload, Owner::Op(op))?)
            }
            Sent::Tagged { op } => (op, self.post_send_as(stream, op, word)?),
            Sent::Answer { kind, op, words, last, .. } => {
                let head = head::Head { kind, context, op, word, ack: 0, freed: 0, words };
                (NONE, self.post_answer_as(stream, peer, head, last, payload, control)?)
            }
            Sent::Get { op, piece, at, len, into } => {
                let token = self.state.pending.slots[op as usize].token().0;
                let get = Get { context, word, ack, at, token, len, into, piece };
                (op, self.post_bytes(stream, peer, &get.encode(), nothing, Owner::Op(op), cursor)?)
            }
            Sent::Got { last, token, into, .. } => {
                let got = Got { context, last, word, ack, token, into };
                (NONE, self.post_bytes(stream, peer, &got.encode(), payload, control, cursor)?)
            }
        };
        if posted == Posted::Pending
            && let Some(slot) = self.state.pending.slots.get_mut(op as usize)
        {
            slot.posts += 1;
        }
        let rail = self.state.took;
        if let Some(failover) = &mut self.state.failover {
            let slot = failover.at(stream, seq);
            if let Carried::Lost(lost) = mem::replace(&mut slot.carried, Carried::By(rail)) {
                failover.rails[lost as usize].reposted += 1;
            }
        }
        Ok(())
    }

    /// Copies a payload in device memory to `into` first, and fails until that copy has completed.
    fn stage_again<'a>(
        &mut self,
        stream: u32,
        seq: Seq,
        source: (*mut u8, u16, usize),
        into: &'a mut [u8; LONGEST],
    ) -> Result<Untrusted<'a>, Blocked> {
        let low = seq.0 as u32;
        // If a copy for another number is in progress, abandon it: that number is no longer posted
        // again.
        let staging = self.state.resuming(stream).map_or((0, 0), |resuming| resuming.staging);
        let mut copy = if staging.1 == low { staging.0 } else { 0 };
        let staged = self.staged(source, into, &mut copy);
        if let Some(resuming) = self.state.resuming(stream) {
            resuming.staging = (copy, low);
        }
        staged.map_err(|error| match error {
            PostError::Again => self.state.no_room(),
            error => Blocked::Refused(COPIER, error),
        })
    }

    fn rewrite(
        &mut self,
        peer: u16,
        op: u32,
        local: *mut u8,
        len: u32,
        offset: u64,
        word: u32,
    ) -> Result<Posted, Blocked> {
        let state = &mut self.state;
        let PendingSlot { local_region, remote, .. } = state.pending.slots[op as usize];
        let Some(ptr) = NonNull::new(local) else { return Ok(Posted::Done) };
        let cx = PostTag { owner: Owner::Op(op), bytes: len }.pack();
        let (mut tried, mut full) = (0, 0);
        loop {
            let Some(rail) = state.pick(peer, tried, full, len as u64) else {
                return Err(state.no_room());
            };
            let desc = state.locals.get(local_region as usize).map_or(0, |local| local.desc[rail]);
            let local = Local { ptr, len: len as usize, desc };
            let remote = Remote { key: state.remotes[remote as usize].keys[rail], offset };
            // SAFETY: both ranges were checked when the operation was submitted. Until this number
            // is acknowledged, the operation is open: its source does not change, and both regions
            // stay registered.
            match unsafe { self.rails[rail].post_write(Peer(peer), local, remote, Some(word), cx) }
            {
                Ok(posted) => {
                    if posted == Posted::Pending {
                        state.loads.posted(rail, len as u64);
                    }
                    state.not_waiting(peer, rail);
                    state.took = rail as u8;
                    return Ok(posted);
                }
                Err(PostError::Again) => full |= 1 << rail,
                Err(error) => {
                    state.hard_error(peer, rail, error)?;
                    tried |= 1 << rail;
                }
            }
        }
    }

    fn reply_again(&mut self, stream: u32) {
        if !self.state.resuming(stream).is_some_and(|resuming| resuming.answers) {
            return;
        }
        let mut budget = self.state.config.batch;
        for n in 0..self.state.config.window as usize {
            let Some(failover) = &mut self.state.failover else { return };
            let SentSlot { reply: value, again: token, .. } = failover.of(stream)[n];
            if token == NO_TOKEN {
                continue;
            }
            if budget == 0 {
                return;
            }
            budget -= 1;
            let s = &self.state.streams[stream as usize];
            // The atomic was applied, so the cursor is beyond it.
            let (peer, word, cursor) = (s.peer, s.stamp, s.window.expected());
            let (ack, body) = (truncate::<32>(cursor.0), Body::Reply { token, value });
            let mut head = [0; HEAD_MAX];
            let len = Message { context: s.context, word, ack, body }.encode(&mut head);
            let owner = self.state.control(peer);
            match self.post_bytes(
                stream,
                peer,
                &head[..len],
                Untrusted::from_slice(&[]),
                owner,
                cursor,
            ) {
                Ok(_) => self.state.stats.replied_again += 1,
                Err(_) => return,
            }
            let Some(failover) = &mut self.state.failover else { return };
            failover.of(stream)[n].again = NO_TOKEN;
        }
        if let Some(resuming) = self.state.resuming(stream) {
            resuming.answers = false;
        }
    }

    fn read_again(&mut self, stream: u32) {
        if !self.state.resuming(stream).is_some_and(|resuming| resuming.reads) {
            return;
        }
        let peer = self.state.streams[stream as usize].peer;
        let fencing =
            self.state.kept_peer(peer).is_some_and(|kept| kept.suspect | kept.fencing != 0);
        let mut budget = self.state.config.batch;
        let mut more = false;
        // A read that is only partly posted is handled in a later pass, once it is fully posted.
        let mut index = self.state.streams[stream as usize].ops.head;
        while index != NONE {
            let slot = &self.state.pending.slots[index as usize];
            more |= slot.kind == OpKind::Read && slot.fetch;
            index = slot.links.next;
        }
        let mut index = self.state.streams[stream as usize].closing.head;
        while index != NONE {
            let slot = &mut self.state.pending.slots[index as usize];
            let (this, next) = (index, slot.links.next);
            index = next;
            if slot.kind != OpKind::Read || !slot.fetch {
                continue;
            }
            more = true;
            if slot.again && slot.left == 0 && slot.posts == 0 && !fencing {
                // Start again at the beginning. `request` holds the length of the read.
                let len = slot.request;
                (slot.local, slot.offset) =
                    (slot.local.wrapping_sub(len as usize), slot.offset - len);
                (slot.left, slot.again) = (len, false);
            }
            while self.state.pending.slots[this as usize].left != 0 {
                match self.post_piece(stream, this, false, &mut budget) {
                    Ok(()) => {}
                    Err(Blocked::Refused(rail, error)) => {
                        let slot = &mut self.state.pending.slots[this as usize];
                        slot.fail(Fault::Post(rail, error), slot.posts == 0);
                        (slot.left, slot.again) = (0, false);
                    }
                    Err(_) => return,
                }
            }
            let slot = &mut self.state.pending.slots[this as usize];
            if slot.left == 0 && !slot.again {
                slot.fetch = false;
                self.state.end_if_over(this);
            }
        }
        if !more && let Some(resuming) = self.state.resuming(stream) {
            resuming.reads = false;
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Returns whether failover has more to do for a stream. For the first stream of a peer, also
    /// covers the peer itself.
    #[cold]
    pub(in super::super) fn is_broken(&self, stream: u32) -> bool {
        let s = &self.streams[stream as usize];
        let (Some(kept), Some(failover)) = (self.kept_peer(s.peer), &self.failover) else {
            return false;
        };
        let FailoverStream { lost, answers, reads, asked, .. } = failover.streams[stream as usize];
        let telling = kept.telling.is_some() || kept.is_unconfirmed();
        let asks = self.is_asked(s.peer) || kept.spare.rails != 0;
        let leaving = asks || kept.answers != [None; 2];
        let peer = s.context == 0 && (telling || leaving || self.is_returning(s.peer));
        s.live && (peer || lost || answers || reads || asked != 0)
    }

    /// Returns the start, the region and the length of the payload to post again. Returns `None` if
    /// the payload is empty or in the record of the number.
    fn source_again(&self, what: &Sent) -> Option<(*mut u8, u16, usize)> {
        let of = |op: u32| {
            self.pending.slots.get(op as usize).map_or(u16::MAX, |slot| slot.local_region)
        };
        // The source of an operation stays valid until the operation ends, which happens only after
        // the number is acknowledged. `keep` also holds the send of an answer open until then.
        match *what {
            Sent::Message { len: 0, .. } | Sent::Answer { len: 0, .. } => None,
            Sent::Message { op, local, len, .. } if !local.is_null() => {
                Some((local.cast_mut(), of(op), len as usize))
            }
            Sent::Answer { of: send, local, len, .. } => {
                Some((local.cast_mut(), of(send), len as usize))
            }
            // If the region is gone, the piece is sent without data.
            Sent::Got { at, len, .. } if len != 0 => {
                let (start, _) = self.place_anywhere(at, len.into()).ok()?;
                Some((start, at.region, len as usize))
            }
            _ => None,
        }
    }

    fn resuming(&mut self, stream: u32) -> Option<&mut FailoverStream> {
        self.failover.as_mut()?.streams.get_mut(stream as usize)
    }

    /// Returns [`NO_TOKEN`] if a number must be posted again. If only its reply is missing, returns
    /// the token of the reply to request.
    fn is_missing(&mut self, stream: u32, seq: Seq) -> Option<u64> {
        let slot = self.failover.as_mut()?.at(stream, seq);
        if let Carried::Lost(_) = slot.carried {
            return Some(NO_TOKEN);
        }
        let Sent::Message { op, body: Body::Amo { token, .. }, .. } = slot.what else {
            return None;
        };
        (slot.ask && self.pending.slots[op as usize].fetch).then_some(token)
    }
}
