//! Posts messages of the protocol: sends that a stream has queued, their answers, and messages that
//! failover posts again. Nothing here blocks. A post that fails has sent nothing.

use crate::mem::{Peer, Untrusted};
use crate::rail::{Posted, Rail};
use crate::sync::seq::truncate;

use super::super::failover::Sent;
use super::super::list::NONE;
use super::super::pending::PendingSlot;
use super::super::post::Blocked;
use super::super::post_tag::Owner;
use super::super::table::NO_RAIL;
use super::super::{Engine, State};
use super::head::{self, Head, LONGEST, Offer};
use super::send::Form;
use super::slot::UNREGISTERED;

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    pub(in super::super) fn post_send(&mut self, stream: u32, index: u32) -> Result<(), Blocked> {
        let s = &self.state.streams[stream as usize];
        let (seq, word) = (s.next, s.word(self.state.mask));
        if s.in_flight() >= self.state.config.window as u64 {
            return Err(Blocked::Window);
        }
        let posted = self.post_send_as(stream, index, word)?;
        if self.state.is_kept(stream) {
            self.state.keep(stream, Sent::Tagged { op: index }, Untrusted::from_slice(&[]));
        }
        let slot = &mut self.state.pending.slots[index as usize];
        slot.posts += (posted == Posted::Pending) as u32;
        slot.numbered = true;
        self.state.streams[stream as usize].next = seq.plus(1);
        self.state.stats.posted += 1;
        Ok(())
    }

    pub(in super::super) fn post_send_as(
        &mut self,
        stream: u32,
        index: u32,
        word: u32,
    ) -> Result<Posted, Blocked> {
        let s = &self.state.streams[stream as usize];
        let (peer, context) = (s.peer, s.context);
        let token = self.state.pending.slots[index as usize].token().0;
        let slot = &self.state.pending.slots[index as usize];
        let kind = match slot.form {
            Form::Eager => head::TAGGED,
            Form::Sync => head::SYNCHRONOUS,
            Form::Request => head::REQUEST,
            Form::Short => head::SHORT,
        };
        let head = Head {
            // The sender waits for the acknowledgement, so request an early one.
            op: (slot.form == Form::Eager) as u8,
            word,
            freed: self.state.returned(stream),
            ..Head::tagged(kind, context, slot.envelope)
        };
        let mut out = [0; LONGEST];
        let (len, payload) = match slot.form {
            Form::Eager | Form::Short => (head::HEAD, slot.left),
            Form::Sync => {
                out[head::HEAD..head::SYNC].copy_from_slice(&token.to_le_bytes());
                (head::SYNC, slot.left)
            }
            Form::Request => (self.offer(peer, slot, token).write(&mut out), 0),
        };
        // SAFETY: the source was checked against its region, or is a span or the send's own block.
        // It stays valid until the send ends.
        let payload = unsafe { Untrusted::new(slot.local, payload as usize) };
        self.post_headed(stream, peer, head, &mut out, len, payload, Owner::Op(index))
    }

    /// Posts a message of the protocol on any rail with room. `out` holds the bytes after the
    /// header, up to `len`.
    #[expect(clippy::too_many_arguments, reason = "the parts of one message")]
    pub(super) fn post_headed(
        &mut self,
        stream: u32,
        peer: u16,
        mut head: Head,
        out: &mut [u8; LONGEST],
        len: usize,
        payload: Untrusted<'_>,
        owner: Owner,
    ) -> Result<Posted, Blocked> {
        let cursor = self.state.streams[stream as usize].window.expected();
        head.ack = truncate::<32>(cursor.0);
        head.freed = self.state.returned(stream);
        out[..head::HEAD].copy_from_slice(&head.write());
        let posted = self.post_bytes(stream, peer, &out[..len], payload, owner, cursor)?;
        self.state.credits_told(stream);
        Ok(posted)
    }

    /// Posts an answer of the protocol. If the stream is kept for failover, every answer but a Room
    /// takes the next number. `payload` names the send that it belongs to: the send's slot, the
    /// address of the bytes in its source, and the bytes. Failover may read these bytes again until
    /// the send ends. Returns `None` if there is no room, or if the peer has failed.
    pub(super) fn post_answer(
        &mut self,
        stream: u32,
        kind: u8,
        op: u8,
        words: [u64; 2],
        last: Option<u64>,
        payload: Option<(u32, *const u8, Untrusted<'_>)>,
    ) -> Option<()> {
        let nothing = Untrusted::from_slice(&[]);
        let (of, local, payload) = payload.unwrap_or((NONE, nothing.as_ptr(), nothing));
        let numbered = self.state.is_kept(stream) && kind != head::ROOM;
        let s = &self.state.streams[stream as usize];
        let (peer, context, stamp) = (s.peer, s.context, s.stamp);
        let (kind, word) = match numbered {
            true if !self.state.may_answer(stream) => return None,
            true => {
                (kind + head::NUMBERED, self.state.streams[stream as usize].word(self.state.mask))
            }
            false => (kind, stamp),
        };
        let head = Head { kind, context, op, word, ack: 0, freed: 0, words };
        let owner = self.state.control(peer);
        match self.post_answer_as(stream, peer, head, last, payload, owner) {
            Ok(_) if numbered => {
                let len = payload.len() as u32;
                let what = Sent::Answer { of, kind, op, words, last, local, len };
                self.state.keep(stream, what, nothing);
                let s = &mut self.state.streams[stream as usize];
                s.next = s.next.plus(1);
                self.state.stats.posted += 1;
                Some(())
            }
            Ok(_) => Some(()),
            Err(Blocked::Refused(rail, _)) => {
                self.state.fail_peer(peer, crate::error::PeerError::Rail(rail));
                None
            }
            Err(_) => None,
        }
    }

    /// The payload is in a region, or at an address for a peer that may read addresses.
    fn offer(&self, peer: u16, slot: &PendingSlot, token: u64) -> Offer<RAILS> {
        let mut offer = self.state.offer(peer, slot, token);
        let joins = self.state.peers[peer as usize].rails;
        let mut rails = self.rails.iter().enumerate().filter(|(rail, _)| joins >> rail & 1 != 0);
        if slot.local_region == UNREGISTERED
            && rails.any(|(_, rail)| rail.reads_addresses(Peer(peer)))
        {
            offer.offset = slot.local.addr() as u64;
            (offer.size, offer.region) = (offer.offset + slot.left, head::ADDRESS);
        }
        offer
    }

    /// `head` already has the word.
    pub(in super::super) fn post_answer_as(
        &mut self,
        stream: u32,
        peer: u16,
        head: Head,
        last: Option<u64>,
        payload: Untrusted<'_>,
        owner: Owner,
    ) -> Result<Posted, Blocked> {
        let mut out = [0; LONGEST];
        let mut len = head::HEAD;
        if let Some(last) = last {
            out[len..len + 8].copy_from_slice(&last.to_le_bytes());
            len += 8;
        }
        self.post_headed(stream, peer, head, &mut out, len, payload, owner)
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Returns the offer of a payload, with as many of the region's keys as fit in a message.
    fn offer(&self, peer: u16, slot: &PendingSlot, token: u64) -> Offer<RAILS> {
        let mut offer = Offer { token, len: slot.left, size: slot.left, ..Offer::NONE };
        let mut rails = self.joined_rails(peer);
        let room = (self.pairings[peer as usize].longest as usize).saturating_sub(head::RTS) / 16;
        let all = rails.count_ones() as usize <= room;
        while rails.count_ones() as usize > room {
            rails &= !(1 << (u16::BITS - 1 - rails.leading_zeros()));
        }
        if let Some(region) = self.locals.get(slot.local_region as usize)
            && !region.ptr.is_null()
            // If some keys do not fit, the payload may have to travel in messages. Messages do not
            // reach memory with native atomics.
            && (all || region.native == NO_RAIL)
            && rails != 0
        {
            offer.rails = rails;
            offer.region = slot.local_region;
            offer.generation = region.generation as u16;
            offer.offset = (slot.local as usize).wrapping_sub(region.ptr as usize) as u64;
            (offer.size, offer.keys) = (region.len + region.device, region.keys);
        }
        offer
    }
}
