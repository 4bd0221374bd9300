//! The handling of failed rails in a pass: fence, report, post again. Bounded; work without room
//! continues in the next pass.

use core::ptr::NonNull;

use crate::error::{PeerError, PostError, Violation};
use crate::mem::{Peer, RailId, Untrusted};
use crate::op::Fault;
use crate::rail::{Fence, Local, Posted, Rail, Remote};
use crate::sync::seq::{Seq, expand, truncate};

use super::super::list::NONE;
use super::super::pending::{OpKind, PendingSlot};
use super::super::post::Blocked;
use super::super::protocol::head;
use super::super::table::PeerSlot;
use super::super::wire::{Body, HEAD_MAX, Message, NO_TOKEN, Owner, PostTag};
use super::super::{Engine, State};
use super::sent::{Carried, Sent};
use super::told::{LONGEST, WORDS};
use super::{Asks, Failover, FailoverPeer, FailoverStream, SentSlot, Told};

/// Passes until a peer is told again what it has not confirmed; doubled so often.
const AGAIN: u32 = 64;
const RARELY: u16 = 10;

impl FailoverPeer {
    /// Whether the peer is not known to have been told of all rails that are fenced.
    fn is_unconfirmed(&self) -> bool {
        self.fenced & !self.confirmed != 0
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Continues the failover of a stream; for the first stream of a peer, also that of the rails
    /// themselves.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn mend(&mut self, stream: u32) {
        let s = &self.state.streams[stream as usize];
        if s.context == 0 {
            let peer = s.peer;
            self.fence_rails(peer);
            self.tell_fenced(peer);
        }
        self.repost_lost(stream);
        self.reply_again(stream);
        self.read_again(stream);
    }

    /// Fences the rails of a peer that have failed.
    fn fence_rails(&mut self, peer: u16) {
        let Some(kept) = self.state.kept_peer(peer) else { return };
        let mut fencing = kept.fencing;
        while fencing != 0 {
            let rail = fencing.trailing_zeros() as usize;
            fencing &= fencing - 1;
            let costs = self.rails[rail].fences_all() && self.state.is_last_of_another(peer, rail);
            let fence = if costs { Fence::Unknown } else { self.rails[rail].fence(Peer(peer)) };
            match fence {
                Fence::Fenced => {
                    let Some(kept) = self.state.kept_peer_mut(peer) else { return };
                    kept.fencing &= !(1 << rail);
                    kept.fenced |= 1 << rail;
                    // Also of those fenced before: what the peer was told may have been lost.
                    kept.telling = Some((0, None));
                    (kept.told, kept.wait) = (0, AGAIN);
                }
                Fence::Pending => {}
                Fence::Unknown => {
                    self.state.fail_peer(peer, PeerError::Rail(RailId(rail as u8)));
                    return;
                }
            }
        }
    }

    /// Reports to a peer which numbers of its streams have arrived.
    fn tell_fenced(&mut self, peer: u16) {
        let Some(kept) = self.state.kept_peer_mut(peer) else { return };
        if kept.telling.is_none() && kept.is_unconfirmed() {
            kept.wait = kept.wait.saturating_sub(1);
            if kept.wait == 0 {
                kept.told = kept.told.saturating_add(1);
                (kept.telling, kept.wait) = (Some((0, None)), AGAIN << kept.told.min(RARELY));
            }
        }
        let turn = self.state.turn_to_tell(peer);
        for _ in 0..self.state.config.batch {
            let Some(kept) = self.state.kept_peer(peer) else { return };
            let (Some((context, from)), rails) = (kept.telling, kept.fenced) else { return };
            let stream = self.state.stream_of(context as u8, peer);
            let (told, next) = self.state.told(stream, from, rails);
            let mut out = [0; LONGEST];
            let len = told.encode(&mut out);
            let owner = self.state.control(peer);
            let cursor = self.state.streams[stream as usize].window.expected();
            let (bytes, nothing) = (&out[..len], Untrusted::from_slice(&[]));
            let posted = match turn {
                Some(rail) if self.post_on(rail, stream, peer, bytes, owner, cursor) => Ok(Posted::Done),
                _ => self.post_bytes(stream, peer, bytes, nothing, owner, cursor),
            };
            match posted {
                Ok(_) => {}
                Err(Blocked::Refused(rail, _)) => {
                    self.state.fail_peer(peer, PeerError::Rail(rail));
                    return;
                }
                Err(_) => return,
            }
            self.state.credits_told(stream);
            let contexts = self.state.config.contexts;
            let Some(kept) = self.state.kept_peer_mut(peer) else { return };
            kept.telling = match next {
                None if context + 1 < contexts => Some((context + 1, None)),
                None => None,
                from => Some((context, from)),
            };
        }
    }

    /// Posts a message on this rail. `false`: it has no room, or another one is to be tried.
    fn post_on(
        &mut self,
        rail: usize,
        stream: u32,
        peer: u16,
        bytes: &[u8],
        owner: Owner,
        cursor: Seq,
    ) -> bool {
        let (len, nothing) = (bytes.len() as u32, Untrusted::from_slice(&[]));
        let tag = PostTag { owner, bytes: len }.pack();
        match self.rails[rail].post_message(Peer(peer), bytes, nothing, tag) {
            Ok(Posted::Pending) => self.state.loads.posted(rail, u64::from(len)),
            Ok(Posted::Done) => {}
            Err(_) => return false,
        }
        let s = &mut self.state.streams[stream as usize];
        (s.ack_sent, s.age) = (cursor, 0);
        true
    }

    /// Posts numbers again that never arrive, in their order.
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

    /// Asks for the reply to the fetching atomic with this number.
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

    /// Posts one number again, on any rail that has room.
    fn repost(&mut self, stream: u32, seq: Seq) -> Result<(), Blocked> {
        let Some(failover) = &mut self.state.failover else { return Ok(()) };
        let SentSlot { what, bytes, .. } = *failover.at(stream, seq);
        let s = &self.state.streams[stream as usize];
        let (peer, context, word) = (s.peer, s.context, s.stamp | seq.low(self.state.mask));
        let (op, posted) = match what {
            Sent::Nothing => (NONE, Posted::Done),
            Sent::Write { op, local, len, offset } => (op, self.rewrite(peer, op, local, len, offset, word)?),
            Sent::Message { op, body, local, len } => {
                let payload = match local.is_null() {
                    true => Untrusted::from_slice(&bytes[..len as usize]),
                    // SAFETY: the source of an operation stays until it ends, which is not before
                    // this number is acknowledged.
                    false => unsafe { Untrusted::new(local, len as usize) },
                };
                (op, self.post_message(stream, peer, word, body, payload, Owner::Op(op))?)
            }
            Sent::Tagged { op } => (op, self.post_send_as(stream, op, word)?),
            Sent::Answer { kind, op, words, last, local, len, .. } => {
                // SAFETY: as for a message: `keep` holds the send open until this number is
                // acknowledged. Without a payload no byte is read.
                let payload = unsafe { Untrusted::new(local, len as usize) };
                let head = head::Head { kind, context, op, word, ack: 0, freed: 0, words };
                let owner = self.state.control(peer);
                (NONE, self.post_answer_as(stream, peer, head, last, payload, owner)?)
            }
        };
        if posted == Posted::Pending
            && let Some(slot) = self.state.pending.slots.get_mut(op as usize)
        {
            slot.posts += 1;
        }
        let rail = self.state.took;
        if let Some(failover) = &mut self.state.failover {
            failover.at(stream, seq).carried = Carried::By(rail);
        }
        self.state.stats.reposted += 1;
        Ok(())
    }

    /// Posts a piece of a write again.
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
        let mut tried = 0;
        loop {
            let Some(rail) = state.pick(peer, tried, len as u64) else { return Err(state.no_room()) };
            let desc = state.locals.get(local_region as usize).map_or(0, |local| local.desc[rail]);
            let local = Local { ptr, len: len as usize, desc };
            let remote = Remote { key: state.remotes[remote as usize].keys[rail], offset };
            // SAFETY: both ranges were checked when the operation was taken in. Its source stays as
            // it is, and both regions stay where they are, until this number is acknowledged.
            match unsafe { self.rails[rail].post_write(Peer(peer), local, remote, Some(word), cx) } {
                Ok(posted) => {
                    if posted == Posted::Pending {
                        state.loads.posted(rail, len as u64);
                    }
                    state.took = rail as u8;
                    return Ok(posted);
                }
                Err(PostError::Again) => tried |= 1 << rail,
                Err(error) => {
                    state.hard_error(peer, rail, error)?;
                    tried |= 1 << rail;
                }
            }
        }
    }

    /// Answers fetching atomics again whose replies were lost.
    fn reply_again(&mut self, stream: u32) {
        if !self.state.resuming(stream).is_some_and(|resuming| resuming.answers) {
            return;
        }
        for n in 0..self.state.config.window as usize {
            let Some(failover) = &mut self.state.failover else { return };
            let SentSlot { reply: value, again: token, .. } = failover.of(stream)[n];
            if token == NO_TOKEN {
                continue;
            }
            let s = &self.state.streams[stream as usize];
            // It was applied: the cursor is beyond it.
            let (peer, word, cursor) = (s.peer, s.stamp, s.window.expected());
            let (ack, body) = (truncate::<32>(cursor.0), Body::Reply { token, value });
            let mut head = [0; HEAD_MAX];
            let len = Message { context: s.context, word, ack, body }.encode(&mut head);
            let owner = self.state.control(peer);
            match self.post_bytes(stream, peer, &head[..len], Untrusted::from_slice(&[]), owner, cursor) {
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

    /// Posts reads anew that failed rails have ended.
    fn read_again(&mut self, stream: u32) {
        if !self.state.resuming(stream).is_some_and(|resuming| resuming.reads) {
            return;
        }
        let peer = self.state.streams[stream as usize].peer;
        let fencing = self.state.kept_peer(peer).is_some_and(|kept| kept.fencing != 0);
        let mut budget = self.state.config.batch;
        let mut more = false;
        // One that is not wholly posted comes here once it is.
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
                // Where it began; `request` says how long it is.
                let len = slot.request;
                (slot.local, slot.offset) = (slot.local.wrapping_sub(len as usize), slot.offset - len);
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
    /// Whether there is more to do for a stream, or for the first one's peer.
    #[cold]
    pub(in super::super) fn is_broken(&self, stream: u32) -> bool {
        let s = &self.streams[stream as usize];
        let (Some(kept), Some(failover)) = (self.kept_peer(s.peer), &self.failover) else { return false };
        let FailoverStream { lost, answers, reads, .. } = failover.streams[stream as usize];
        let telling = kept.telling.is_some() || kept.is_unconfirmed();
        let peer = s.context == 0 && (kept.fencing != 0 || telling);
        s.live && (peer || lost || answers || reads)
    }

    /// Whether a rail is the only one that leads to another peer, or one whose loss that does not
    /// outlive.
    fn is_last_of_another(&self, peer: u16, rail: usize) -> bool {
        let mut others = (0..self.peers.len() as u16).filter(|&other| other != peer);
        others.any(|other| {
            let PeerSlot { state, rails, .. } = self.peers[other as usize];
            let on = state.is_up() && rails >> rail & 1 != 0;
            on && (rails.count_ones() == 1 || self.kept_peer(other).is_none())
        })
    }

    fn resuming(&mut self, stream: u32) -> Option<&mut FailoverStream> {
        self.failover.as_mut()?.streams.get_mut(stream as usize)
    }

    /// Whether a number is to be posted again: [`NO_TOKEN`]. Or the token for whose reply the
    /// target is to be asked.
    fn is_missing(&mut self, stream: u32, seq: Seq) -> Option<u64> {
        let slot = self.failover.as_mut()?.at(stream, seq);
        if slot.carried == Carried::Lost {
            return Some(NO_TOKEN);
        }
        let Sent::Message { op, body: Body::Amo { token, .. }, .. } = slot.what else { return None };
        (slot.ask && self.pending.slots[op as usize].fetch).then_some(token)
    }

    /// What a peer is to be told of a stream from a number on, or from the cursor, and with which
    /// number that goes on.
    fn told(&mut self, stream: u32, from: Option<Seq>, rails: u16) -> (Told, Option<Seq>) {
        let freed = self.returned(stream);
        let s = &self.streams[stream as usize];
        let (context, word, peer) = (s.context, s.stamp, s.peer);
        let asks = self.kept_peer(peer).is_some_and(FailoverPeer::is_unconfirmed);
        let heard = self.heard(peer);
        let (size, mask) = (self.config.window as u64, self.mask);
        let (window, mut cells) = self.window(stream);
        let (expected, stamp) = (window.expected(), window.stamp());
        let from = from.unwrap_or(expected);
        // Beyond that nothing can have arrived.
        let end = expected.plus(size);
        let rest = if from.is_before(end) { end.since(from) } else { 0 };
        let count = rest.div_ceil(64).min(WORDS as u64);
        let mut words = [0; WORDS];
        for n in 0..(64 * count).min(rest) {
            let seq = from.plus(n);
            let seen = window.seen(stamp | seq.low(mask), &mut cells);
            words[(n / 64) as usize] |= u64::from(seen == Ok(true)) << (n % 64);
        }
        let last = 64 * count >= rest;
        let ack = truncate::<32>(expected.0);
        let count = count as u16;
        let told = Told { context, last, asks, word, ack, freed, from, rails, heard, count, words };
        (told, (!last).then(|| from.plus(64 * u64::from(count))))
    }

    /// The rails that a peer has told of: in all streams, and of each number that is in flight on
    /// them.
    fn heard(&self, peer: u16) -> u16 {
        let Some(failover) = &self.failover else { return 0 };
        let mut heard = self.joined_rails(peer);
        for context in 0..self.config.contexts {
            let stream = self.stream_of(context as u8, peer) as usize;
            heard &= failover.streams[stream].told;
            let s = &self.streams[stream];
            if heard == 0 || !s.live {
                continue;
            }
            let sent = &failover.sent[stream * failover.window as usize..];
            for n in 0..s.in_flight() {
                let at = s.acked.plus(n).0 as usize & (failover.window as usize - 1);
                if let Carried::By(rail) = sent[at].carried {
                    heard &= !(1 << rail);
                }
            }
        }
        heard
    }

    /// The rail over which a peer is told again: another one each time, because which of them is
    /// dead is not known. `None`, the first time: any.
    fn turn_to_tell(&self, peer: u16) -> Option<usize> {
        let kept = self.kept_peer(peer).filter(|kept| kept.told != 0)?;
        let rails = self.peers[peer as usize].rails;
        let skipped = u32::from(kept.told).checked_rem(rails.count_ones())?;
        let rest = (0..skipped).fold(rails, |rails, _| rails & (rails - 1));
        Some(rest.trailing_zeros() as usize)
    }

    /// A peer has said that it has fenced rails, and what has arrived there.
    #[cold]
    pub(in super::super) fn told_arrived(&mut self, peer: Peer, told: &Told) -> Result<(), Violation> {
        let Some(stream) = self.arrival_stream(peer, told.context, told.word)? else { return Ok(()) };
        if self.kept_peer(peer.0).is_none() {
            return Err(Violation::Kind);
        }
        let cursor = Seq(expand::<32>(told.ack, self.streams[stream as usize].acked.0));
        self.credits_freed(stream, told.freed)?;
        self.acknowledged(stream, told.ack)?;
        let joined = self.joined_rails(peer.0);
        let ours = self.pairings[peer.0 as usize].as_ours(told.rails) & joined;
        for rail in (0..RAILS).filter(|rail| ours >> rail & 1 != 0) {
            let id = RailId(rail as u8);
            let why = Fault::Rail(id, crate::error::CompleteError::PeerDown);
            self.rail_failed(peer.0, rail, why, PeerError::Rail(id));
        }
        let confirmed = self.pairings[peer.0 as usize].as_ours(told.heard) & joined;
        if let Some(kept) = self.kept_peer_mut(peer.0) {
            kept.confirmed |= confirmed;
            if told.asks && kept.telling.is_none() && kept.fenced != 0 {
                kept.telling = Some((0, None));
            }
        }
        self.ask(self.stream_of(0, peer.0));
        let s = &self.streams[stream as usize];
        if !s.live {
            return Ok(());
        }
        let (acked, count) = (s.acked, s.in_flight());
        let State { failover, pending, .. } = self;
        let Some(failover) = failover else { return Ok(()) };
        let resuming = failover.streams[stream as usize];
        let news = ours & !resuming.told != 0;
        let mut lost = false;
        for n in 0..count {
            let seq = acked.plus(n);
            let slot = failover.at(stream, seq);
            if let Carried::By(rail) = slot.carried
                && ours >> rail & 1 != 0
            {
                match told.says(seq, cursor) {
                    Some(true) => slot.carried = Carried::Arrived,
                    Some(false) => slot.carried = Carried::Lost,
                    None => {}
                }
            }
            // The reply may have been on that rail, however the atomic travelled.
            if news
                && let Sent::Message { op, body: Body::Amo { token, .. }, .. } = slot.what
                && token != NO_TOKEN
                && pending.slots[op as usize].fetch
            {
                slot.ask = true;
            }
            lost |= slot.carried == Carried::Lost || slot.ask;
        }
        let Failover { streams, .. } = failover;
        let resuming = &mut streams[stream as usize];
        (resuming.told, resuming.lost) = (resuming.told | ours, resuming.lost | lost);
        self.ask(stream);
        Ok(())
    }
}
