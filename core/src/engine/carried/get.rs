//! The side that issues a get: asks for pieces, and stores those that arrive. Pieces for host
//! memory are copied on arrival. Pieces for a device wait in a list of blocks, and later passes
//! copy them to it.

use crate::error::{PostError, Violation};
use crate::mem::{Peer, Untrusted, copy_bytes};
use crate::op::{Fault, Outcome, Token};
use crate::rail::{Posted, Rail};
use crate::sync::seq::truncate;

use super::super::failover::Sent;
use super::super::pending::{OpKind, State as Stage};
use super::super::pieces::{COPIER, GETS, Get, Got};
use super::super::post::Blocked;
use super::super::post_tag::Owner;
use super::super::table::{LocalSlot, in_bounds};
use super::super::wire::Place;
use super::super::{Engine, State};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Continues a get that travels in messages. A get into device memory counts as posted only
    /// when all its data was copied.
    #[cold]
    #[inline(never)]
    pub(in super::super) fn post_fetch(
        &mut self,
        stream: u32,
        index: u32,
        budget: &mut u32,
    ) -> Result<(), Blocked> {
        if !self.state.streams[stream as usize].live {
            // The peer has not said yet whether it keeps the stream.
            return Err(Blocked::Window);
        }
        let fetched = self.fetch_more(stream, index, budget);
        if let Err(Blocked::Refused(..)) = fetched {
            self.state.drop_got(stream);
        }
        fetched
    }

    fn fetch_more(&mut self, stream: u32, index: u32, budget: &mut u32) -> Result<(), Blocked> {
        let device = self.state.fetches_to_device(index);
        loop {
            if device {
                self.place_got(stream, index)?;
            }
            let state = &mut self.state;
            let slot = &state.pending.slots[index as usize];
            if device && slot.request != 0 {
                return Err(Blocked::Window);
            }
            if slot.left == 0 {
                if device {
                    // If the answers have acknowledged everything, no acknowledgement follows.
                    let applied = state.streams[stream as usize].in_flight() == 0;
                    let slot = &mut state.pending.slots[index as usize];
                    (slot.fetch, slot.numbered) = (false, slot.numbered && !applied);
                }
                return Ok(());
            }
            let s = &state.streams[stream as usize];
            let kept = state.is_kept(stream);
            let asked =
                state.protocol.as_ref().map_or(0, |p| p.accounts[stream as usize].carriage.asked);
            if s.in_flight() >= state.config.window as u64 || kept && asked as usize >= GETS {
                return Err(Blocked::Window);
            }
            if *budget == 0 {
                return Err(Blocked::Budget);
            }
            *budget -= 1;
            let (peer, context, word, cursor) =
                (s.peer, s.context, s.word(state.mask), s.window.expected());
            let piece = state.room(peer).min(state.block_size()) as u32;
            let most = if device { state.pieces() as u64 * piece as u64 } else { u64::MAX };
            let remote = &state.remotes[slot.remote as usize];
            let (region, generation) = remote.theirs;
            let at = Place { region, generation, offset: slot.offset + slot.asked };
            let (token, into, len) = (slot.token().0, slot.asked, slot.left.min(most));
            let ack = truncate::<32>(cursor.0);
            let get = Get { context, word, ack, at, token, len, into, piece };
            let nothing = Untrusted::from_slice(&[]);
            let posted =
                self.post_bytes(stream, peer, &get.encode(), nothing, Owner::Op(index), cursor)?;
            let state = &mut self.state;
            if kept {
                state.keep(stream, Sent::Get { op: index, piece, at, len, into }, nothing);
                if let Some(protocol) = &mut state.protocol {
                    protocol.accounts[stream as usize].carriage.asked += 1;
                }
            }
            let slot = &mut state.pending.slots[index as usize];
            slot.posts += (posted == Posted::Pending) as u32;
            (slot.left, slot.asked, slot.request) =
                (slot.left - len, slot.asked + len, slot.request + len);
            (slot.numbered, slot.fetch) = (true, true);
            let s = &mut state.streams[stream as usize];
            s.next = s.next.plus(1);
            state.stats.posted += 1;
        }
    }

    fn place_got(&mut self, stream: u32, index: u32) -> Result<(), Blocked> {
        loop {
            let slot = &self.state.pending.slots[index as usize];
            let (start, region) = (slot.local, slot.local_region);
            let Some(protocol) = &mut self.state.protocol else { return Ok(()) };
            let carriage = &mut protocol.accounts[stream as usize].carriage;
            if carriage.got == 0 {
                return Ok(());
            }
            let (block, copy) = (carriage.first, carriage.placing);
            let into = protocol.blocks.slots[block as usize].token;
            let placed = self.place_block((start, into), region, block, copy);
            let Some(protocol) = &mut self.state.protocol else { return Ok(()) };
            let carriage = &mut protocol.accounts[stream as usize].carriage;
            match placed {
                Ok(None) => {
                    (carriage.first, carriage.placing) =
                        (protocol.blocks.slots[block as usize].next(), 0);
                    carriage.got -= 1;
                    protocol.blocks.free(block);
                }
                Ok(Some(copy)) => {
                    carriage.placing = copy;
                    return Err(self.state.no_room());
                }
                Err(error) => {
                    // The device may still finish the copy, so the outcome is unknown.
                    self.state.pending.slots[index as usize]
                        .fail(Fault::Post(COPIER, error), false);
                    return Err(Blocked::Refused(COPIER, error));
                }
            }
        }
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    fn fetches_to_device(&self, index: u32) -> bool {
        let region = self.pending.slots[index as usize].local_region;
        self.locals.get(region as usize).is_some_and(LocalSlot::is_device)
    }

    #[cold]
    pub(in super::super) fn may_still_place(&self, index: u32) -> bool {
        let slot = &self.pending.slots[index as usize];
        slot.kind == OpKind::Fetch && slot.asked != 0 && self.fetches_to_device(index)
    }

    fn drop_got(&mut self, stream: u32) {
        let Some(protocol) = &mut self.protocol else { return };
        let carriage = &mut protocol.accounts[stream as usize].carriage;
        while carriage.got != 0 {
            let block = carriage.first;
            carriage.first = protocol.blocks.slots[block as usize].next();
            carriage.got -= 1;
            protocol.blocks.free(block);
        }
        carriage.placing = 0;
    }

    pub(super) fn got(
        &mut self,
        peer: Peer,
        got: Got,
        payload: Untrusted<'_>,
    ) -> Result<(), Violation> {
        let Got { context, last, word, ack, token, into } = got;
        let Some(stream) = self.arrival_stream(peer, context, word)? else { return Ok(()) };
        self.acknowledged(stream, ack)?;
        if self.is_kept(stream) {
            if !self.is_fresh(stream, word)? {
                return Ok(());
            }
            if let Some(protocol) = &mut self.protocol {
                let asked = &mut protocol.accounts[stream as usize].carriage.asked;
                *asked = asked.checked_sub(last.into()).ok_or(Violation::Reply)?;
            }
        }
        let Ok(index) = self.pending.find(Token(token)) else {
            // The get has failed meanwhile.
            self.stats.stale += 1;
            return Ok(());
        };
        let device = self.fetches_to_device(index);
        let head = self.streams[stream as usize].unposted;
        let slot = &mut self.pending.slots[index as usize];
        let ours = slot.kind == OpKind::Fetch && slot.stream == stream;
        if ours && !matches!(slot.outcome, Outcome::Done) {
            // The get has failed here, and the peer still answers it.
            self.stats.stale += 1;
            return Ok(());
        }
        let waits = slot.kind == OpKind::Fetch && slot.state == Stage::Open && slot.fetch;
        if !waits || slot.stream != stream || device && head != index {
            return Err(Violation::Reply);
        }
        let len = payload.len() as u64;
        if len == 0 {
            // An empty answer means that the peer's region is gone. Pieces that have arrived are
            // still copied to the device.
            slot.fail(Fault::Post(COPIER, PostError::BadKey), true);
            (slot.left, slot.request, slot.fetch) = (0, 0, device);
            self.due.push(self.streams, stream);
            self.end_if_over(index);
            return Ok(());
        }
        if len > slot.request || !in_bounds(into, len, slot.asked) {
            return Err(Violation::Bounds);
        }
        slot.request -= len;
        if device {
            return self.keep_got(stream, into, payload);
        }
        // SAFETY: the buffer was checked against its region when the get was submitted, and holds
        // at least `asked` bytes.
        unsafe { copy_bytes(payload.as_ptr(), slot.local.add(into as usize), payload.len()) };
        if slot.request == 0 && slot.left == 0 {
            slot.fetch = false;
            self.end_if_over(index);
        }
        Ok(())
    }

    fn keep_got(
        &mut self,
        stream: u32,
        into: u64,
        payload: Untrusted<'_>,
    ) -> Result<(), Violation> {
        let Some(protocol) = &self.protocol else { return Err(Violation::Kind) };
        if protocol.accounts[stream as usize].carriage.got >= protocol.pieces {
            return Err(Violation::Credit);
        }
        let block = self.keep_piece(stream, payload, into)?;
        let Some(protocol) = &mut self.protocol else { return Ok(()) };
        let carriage = &mut protocol.accounts[stream as usize].carriage;
        match carriage.got {
            0 => carriage.first = block,
            _ => protocol.blocks.slots[carriage.last as usize].set_next(block),
        }
        (carriage.last, carriage.got) = (block, carriage.got + 1);
        self.due.push(self.streams, stream);
        Ok(())
    }
}
