//! Handles the two-sided messages that rails report. Changes state only; nothing here posts. All
//! input from a peer is checked before it has an effect. A message that arrives out of order is
//! stored in its sender's room here, until all earlier messages have arrived.

use crate::error::{PeerError, Violation};
use crate::mem::{Peer, PeerId, Untrusted, copy_bytes, copy_message};
use crate::op::Fault;
use crate::probe::probe;

use super::super::State;
use super::super::list::NONE;
use super::super::table::{PeerSlot, PeerState};
use super::super::tag::{Arrive, Tag, UnexpectedId};
use super::super::window::{Action, Arrival, Parked};
use super::super::wire::{NO_TOKEN, Place};
use super::head::{self, Head, Offer, trailing};
use super::near;
use super::request::Received;
use super::slot::{Sender, Stage};
use super::stock::{HeaderSlot, Kept};

impl<const RAILS: usize> State<'_, RAILS> {
    #[inline(never)]
    pub(in super::super) fn tagged_arrived(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        if !self.next_tagged(peer, bytes) {
            self.tagged_in_detail(peer, bytes);
        }
    }

    #[inline(never)]
    pub(super) fn store(
        &mut self,
        stream: u32,
        id: UnexpectedId,
        payload: Untrusted<'_>,
        token: u64,
    ) -> Result<(), Violation> {
        let block = self.keep_payload(stream, payload, token);
        let Some(protocol) = &mut self.protocol else { return Ok(()) };
        match block {
            Ok(kept) => protocol.matcher.set_cookie(id, kept.pack()).map_err(|_| Violation::Credit),
            Err(violation) => {
                let _ = protocol.matcher.discard(id);
                Err(violation)
            }
        }
    }

    /// Handles a message on the slow path: copies the header again, and checks all fields. The fast
    /// path has changed nothing.
    #[inline(never)]
    fn tagged_in_detail(&mut self, peer: Peer, bytes: Untrusted<'_>) {
        if let Err(violation) = self.tagged_checked(peer, bytes) {
            self.quarantine(peer.0, violation);
        }
    }

    fn tagged_checked(&mut self, peer: Peer, bytes: Untrusted<'_>) -> Result<(), Violation> {
        let (head, rest) = Head::read(bytes)?;
        let Some(stream) = self.arrival_stream(peer, head.context, head.word)? else {
            return Ok(());
        };
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        protocol.accounts[stream as usize].freed(head.freed)?;
        self.acknowledged(stream, head.ack)?;
        match head.kind {
            head::TAGGED if head.op <= 1 => {
                let tag = head.tag()?;
                if !self.streams[stream as usize].window.take_in_order(head.word, self.mask) {
                    return self.park_payload(stream, head.word, tag, rest, NO_TOKEN);
                }
                let s = &mut self.streams[stream as usize];
                s.unhurried = !s.window.expected().is_before(s.ack_wanted);
                self.payload(stream, tag, rest, NO_TOKEN)?;
                self.in_order(stream);
                Ok(())
            }
            _ => self.tagged_slow(stream, peer, head, rest),
        }
    }

    #[inline(never)]
    fn tagged_slow(
        &mut self,
        stream: u32,
        peer: Peer,
        head: Head,
        rest: Untrusted<'_>,
    ) -> Result<(), Violation> {
        match (head.kind, head.op) {
            (head::SYNCHRONOUS, 0) => {
                let tag = head.tag()?;
                let (token, payload) = trailing(rest)?;
                if token == NO_TOKEN {
                    return Err(Violation::Kind);
                }
                if !self.streams[stream as usize].window.take_in_order(head.word, self.mask) {
                    return self.park_payload(stream, head.word, tag, payload, token);
                }
                self.payload(stream, tag, payload, token)?;
                self.in_order(stream);
                Ok(())
            }
            (head::REQUEST, 0) => {
                let tag = head.tag()?;
                self.keep_message(stream, head.word, tag, |state| state.keep_header(stream, rest))
            }
            (head::SHORT, 0 | 1) => {
                let tag = head.tag()?;
                self.keep_message(stream, head.word, tag, |state| state.keep_short(stream, rest))
            }
            (head::FIN, head::RECEIVED..=head::CLOSING) if rest.is_empty() => {
                self.finned(stream, peer.0, &head)
            }
            (head::PULL, 0) => {
                let (len, rest) = trailing(rest)?;
                if !rest.is_empty() {
                    return Err(Violation::Length);
                }
                self.pull_asked(peer.0, head.words[0], head.words[1], len)
            }
            (head::CHUNK, 0) => self.chunk(stream, head.words[0], head.words[1], rest),
            (head::ROOM, 0) if rest.is_empty() => self.room_given(stream, head.words),
            (kind, _) if self.is_numbered(stream, kind) => {
                if !self.is_fresh(stream, head.word)? {
                    return Ok(());
                }
                self.tagged_slow(stream, peer, Head { kind: kind - head::NUMBERED, ..head }, rest)
            }
            (head::TAGGED..=head::REQUEST | head::PULL | head::CHUNK | head::SHORT, _) => {
                Err(Violation::Kind)
            }
            (head::FIN, head::RECEIVED..=head::CLOSING) | (head::ROOM, 0) => Err(Violation::Length),
            _ => Err(Violation::Kind),
        }
    }

    /// Stores a message by calling `keep`, and matches the message if it is the next of its stream.
    fn keep_message(
        &mut self,
        stream: u32,
        word: u32,
        tag: Tag,
        keep: impl FnOnce(&mut Self) -> Result<Kept, Violation>,
    ) -> Result<(), Violation> {
        if self.streams[stream as usize].window.take_in_order(word, self.mask) {
            let kept = keep(self)?;
            self.turn(stream, tag, kept)?;
            self.in_order(stream);
            return Ok(());
        }
        let (window, mut cells) = self.window(stream);
        if window.seen(word, &mut cells)? {
            self.held(stream, Arrival::Duplicate);
            return Ok(());
        }
        let kept = keep(self)?;
        self.park_kept(stream, word, tag, kept)
    }

    fn is_numbered(&self, stream: u32, kind: u8) -> bool {
        self.is_kept(stream)
            && (head::FIN + head::NUMBERED..=head::CHUNK + head::NUMBERED).contains(&kind)
    }

    #[inline(always)]
    fn payload(
        &mut self,
        stream: u32,
        tag: Tag,
        payload: Untrusted<'_>,
        token: u64,
    ) -> Result<(), Violation> {
        let Some(protocol) = &mut self.protocol else { return Ok(()) };
        let peer = self.streams[stream as usize].peer;
        let len = payload.len();
        // `store` sets the cookie later, if the payload needs a block.
        match protocol.matcher.arrive(peer as u32, tag, len as u64, 0) {
            Ok(Arrive::Matched { context, .. }) => {
                let source =
                    PeerId { index: peer, generation: self.peers[peer as usize].generation };
                let index = context as u32;
                let Some(slot) = protocol.requests.slots.get_mut(index as usize) else {
                    return self.matched_device(stream, context, tag, payload, token);
                };
                let (n, fit) = slot.fit(len as u64);
                // SAFETY: posting the receive checked the buffer against its region, and `fit`
                // limited `n` to the buffer. The payload is readable during this call.
                unsafe { copy_message(payload.as_ptr(), slot.ptr, n as usize) };
                protocol.stats.near += near(self.peers, peer);
                (slot.source, slot.tag, slot.len) = (Sender::new(source), tag, len as u64);
                (slot.delivered, slot.fit) = (n, fit);
                let account = &mut protocol.accounts[stream as usize];
                account.returned = account.returned.wrapping_add(1);
                if token == NO_TOKEN {
                    protocol.requests.end(index, &mut self.pending.ends);
                } else {
                    (slot.token, slot.stream) = (token, stream);
                    let stage = Stage::Tell(is_closing(self.peers, source));
                    protocol.requests.push_due(index, stage);
                }
                Ok(())
            }
            Ok(Arrive::Stored(id)) => self.store(stream, id, payload, token),
            Err(_) => Err(Violation::Credit),
        }
    }

    #[inline(never)]
    pub(super) fn keep_payload(
        &mut self,
        stream: u32,
        payload: Untrusted<'_>,
        token: u64,
    ) -> Result<Kept, Violation> {
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        let account = &mut protocol.accounts[stream as usize];
        let peer = self.streams[stream as usize].peer;
        let most = protocol.credits.after(account.credit_doublings);
        if account.kept >= most {
            return Err(Violation::Credit);
        }
        if payload.len() > protocol.blocks.size() {
            return Err(Violation::Length);
        }
        let source = PeerId { index: peer, generation: self.peers[peer as usize].generation };
        let block = protocol
            .blocks
            .take(stream, source, payload.len() as u32, token)
            .ok_or(Violation::Credit)?;
        account.kept += 1;
        if account.kept > most / 2 {
            account.grow_credits(&mut protocol.credits);
            if protocol.credits.after(account.credit_doublings) == most {
                account.grant_shorts(&mut protocol.shorts);
            }
            if account.grown {
                self.due.push(self.streams, stream);
            }
        }
        protocol.stats.kept += 1;
        protocol.stats.kept_bytes += payload.len() as u64;
        // SAFETY: `take` has just reserved the block for this message alone. The block holds `size`
        // bytes, and the payload was checked above to be no longer.
        unsafe { copy_message(payload.as_ptr(), protocol.blocks.bytes(block), payload.len()) };
        Ok(Kept::Block(block))
    }

    fn keep_header(&mut self, stream: u32, rest: Untrusted<'_>) -> Result<Kept, Violation> {
        let peer = self.streams[stream as usize].peer;
        let joined = self.joined_rails(peer);
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        let account = &mut protocol.accounts[stream as usize];
        let most = protocol.waiting.after(account.header_doublings);
        if account.headers >= most {
            return Err(Violation::Credit);
        }
        let source = PeerId { index: peer, generation: self.peers[peer as usize].generation };
        let header = protocol.headers.take(stream, source).ok_or(Violation::Credit)?;
        let offer = &mut protocol.headers.slots[header as usize].offer;
        if let Err(violation) = offer.read(rest, &self.pairings[peer as usize], joined) {
            protocol.headers.free(header);
            return Err(violation);
        }
        account.headers += 1;
        if account.headers > most / 2 {
            account.grow_headers(&mut protocol.waiting);
        }
        Ok(Kept::Header(header))
    }

    #[inline(never)]
    fn park_payload(
        &mut self,
        stream: u32,
        word: u32,
        tag: Tag,
        payload: Untrusted<'_>,
        token: u64,
    ) -> Result<(), Violation> {
        self.keep_message(stream, word, tag, |state| state.keep_payload(stream, payload, token))
    }

    fn park_kept(&mut self, stream: u32, word: u32, tag: Tag, kept: Kept) -> Result<(), Violation> {
        let what = Action::Tagged { lo: tag.lo, hi: tag.hi, kept: kept.pack() };
        // The caller has checked that the number is in the window and is not a duplicate.
        self.park(stream, word, Parked { at: Place::default(), what }).map(drop)
    }

    /// All earlier messages of the stream have matched.
    pub(in super::super) fn turn(
        &mut self,
        stream: u32,
        tag: Tag,
        kept: Kept,
    ) -> Result<(), Violation> {
        let Some(protocol) = &mut self.protocol else { return Ok(()) };
        let peer = self.streams[stream as usize].peer;
        let len = match kept {
            Kept::Block(index) => protocol.blocks.slots[index as usize].len as u64,
            Kept::Header(index) => protocol.headers.slots[index as usize].offer.len,
        };
        match protocol.matcher.arrive(peer as u32, tag, len, kept.pack()) {
            Ok(Arrive::Matched { context, .. }) => {
                self.deliver(context as u32, tag, kept);
                Ok(())
            }
            Ok(Arrive::Stored(_)) => Ok(()),
            Err(_) => {
                self.give_back(kept, false);
                Err(Violation::Credit)
            }
        }
    }

    /// Delivers a stored message to a receive. The receive must be in no list and not in the
    /// matcher.
    pub(super) fn deliver(&mut self, index: u32, tag: Tag, kept: Kept) {
        let Some(protocol) = &mut self.protocol else { return };
        let Some(slot) = protocol.requests.slots.get_mut(index as usize) else {
            return self.deliver_device(index, tag, kept);
        };
        slot.tag = tag;
        match kept {
            Kept::Block(block) => {
                let from = protocol.blocks.bytes(block);
                let description = &protocol.blocks.slots[block as usize];
                let (n, fit) = slot.fit(description.len as u64);
                // SAFETY: posting the receive checked the buffer against its region, and `fit`
                // limited `n` to the buffer. The block was taken for a payload of this length.
                unsafe { copy_bytes(from, slot.ptr, n as usize) };
                (slot.source, slot.len) = (Sender::new(description.source), description.len as u64);
                (slot.delivered, slot.fit) = (n, fit);
                protocol.stats.near += near(self.peers, description.source.index);
                let (token, stream) = (description.token, description.stream);
                if token == NO_TOKEN {
                    protocol.requests.end(index, &mut self.pending.ends);
                } else {
                    (slot.token, slot.stream) = (token, stream);
                    let stage = Stage::Tell(is_closing(self.peers, description.source));
                    protocol.requests.push_due(index, stage);
                }
                self.give_back(kept, true);
            }
            Kept::Header(header) => self.deliver_header(index, header, Stage::Read(false)),
        }
    }

    /// The payload is at its sender, so the receive continues in `stage`, or fails if the message
    /// is refused.
    pub(super) fn deliver_header(&mut self, index: u32, header: u32, mut stage: Stage) {
        let Some(protocol) = &self.protocol else { return };
        let HeaderSlot { source, stream, offer: Offer { len, token, .. }, .. } =
            protocol.headers.slots[header as usize];
        let refused = self.closing != 0 && self.refuses(source, token);
        let Some(protocol) = &mut self.protocol else { return };
        let slot = &mut protocol.requests.slots[index as usize];
        let (_, fit) = slot.fit(len);
        (slot.source, slot.len, slot.stream) = (Sender::new(source), len, stream);
        (slot.delivered, slot.fit) = (0, fit);
        (slot.header, slot.token) = (header, token);
        protocol.stats.near += near(self.peers, source.index);
        probe!("rendezvous_begin", index, len);
        if refused {
            slot.spoil(Received::Failed(Fault::Peer(PeerError::Closed)));
            stage = Stage::Tell(true);
        }
        protocol.requests.push_due(index, stage);
    }

    /// If `credit` is set, returns the block's credit to its peer.
    pub(super) fn give_back(&mut self, kept: Kept, credit: bool) {
        let Some(protocol) = &mut self.protocol else { return };
        match kept {
            Kept::Block(index) => {
                let stream = protocol.blocks.slots[index as usize].stream;
                protocol.blocks.free(index);
                if protocol.blocks.is_short(index) {
                    return self.short_freed(stream);
                }
                let Some(account) = protocol.accounts.get_mut(stream as usize) else { return };
                account.kept -= 1;
                if credit {
                    account.returned = account.returned.wrapping_add(1);
                    // As for a message that is received at once, few credits wait for a message
                    // that carries them.
                    if account.owed() > protocol.credits.after(account.credit_doublings) / 2 {
                        self.due.push(self.streams, stream);
                    }
                }
            }
            Kept::Header(index) => {
                let stream = protocol.headers.slots[index as usize].stream;
                protocol.headers.free(index);
                if let Some(account) = protocol.accounts.get_mut(stream as usize) {
                    account.headers -= 1;
                }
            }
        }
    }

    /// The receive must be in no list and not in the matcher.
    #[cold]
    pub(super) fn fail_receive(&mut self, index: u32, outcome: Received) {
        let Some(protocol) = &mut self.protocol else { return };
        let slot = &mut protocol.requests.slots[index as usize];
        slot.spoil(outcome);
        let header = core::mem::replace(&mut slot.header, NONE);
        if header != NONE || slot.stage.is_rendezvous() {
            probe!("rendezvous_end", index, 0u64);
        }
        protocol.requests.end(index, &mut self.pending.ends);
        if header != NONE {
            self.give_back(Kept::Header(header), false);
        }
    }
}

#[cold]
pub(super) fn is_closing(peers: &[PeerSlot], peer: PeerId) -> bool {
    let slot = &peers[peer.index as usize];
    slot.generation == peer.generation && slot.state == PeerState::Closing
}
