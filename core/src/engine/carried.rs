//! Moves data to or from device memory that no rail reaches: in messages, through host memory. The
//! device copies each piece between its memory and staging memory of its rail. Nothing here waits
//! for a device: a pass begins a copy, and a later pass continues. Slow paths.
//!
//! | operation | what is sent | at the other end |
//! |---|---|---|
//! | put | numbered Data messages | at once into host memory, in order into a device |
//! | get | numbered [`Get`] messages | answered in order by [`Got`] messages |
//!
//! Pieces for a device wait in blocks of the two-sided protocol. The handle of the memory says how
//! many pieces of one stream its owner stores. The sender has at most that number of pieces
//! unacknowledged. A get into device memory asks for no more pieces than there are blocks for.
//!
//! Answering a get takes no number and no block, so two sides that get from each other do not wait
//! for each other. If every rail refuses the post of an operation as unsupported, the operation is
//! carried instead.
//!
//! Between sides with failover, each Got has a number, so that it can be posted again if its rail
//! fails. So two sides could wait for room in each other's windows. To avoid this, a get leaves the
//! stream at once and waits in a short list. A side sends no more gets than this list holds. Any
//! rail may have to take over. So data travels in messages unless all rails reach the memory, and
//! every rail accepts the longest piece.

use core::ptr::NonNull;

use crate::error::{PeerError, PostError, Violation};
use crate::mem::{Peer, PeerId, RailId, Untrusted, copy_bytes};
use crate::op::{Fault, Outcome, Token};
use crate::rail::{Local, Posted, Rail, RailKey};
use crate::sync::seq::truncate;

use super::failover::{Failover, FailoverStream, Sent};
use super::list::NONE;
use super::pending::{OpKind, State as Stage};
use super::pieces::{Answer, COPIER, GETS, Get, Got, LONGEST, PIECE_BITS};
use super::post::Blocked;
use super::post_tag::Owner;
use super::table::{LocalSlot, NO_RAIL, in_bounds};
use super::window::{Action, Arrival, Parked};
use super::wire::{Body, Place};
use super::{Engine, State};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    #[cold]
    #[inline(never)]
    pub(super) fn post_carried(
        &mut self,
        stream: u32,
        index: u32,
        budget: &mut u32,
    ) -> Result<(), Blocked> {
        while self.state.pending.slots[index as usize].left != 0 {
            self.post_carried_piece(stream, index, budget)?;
        }
        Ok(())
    }

    fn post_carried_piece(
        &mut self,
        stream: u32,
        index: u32,
        budget: &mut u32,
    ) -> Result<(), Blocked> {
        let state = &mut self.state;
        let s = &state.streams[stream as usize];
        let (peer, seq, word) = (s.peer, s.next, s.word(state.mask));
        if s.in_flight() >= state.config.window as u64 {
            return Err(Blocked::Window);
        }
        let slot = &state.pending.slots[index as usize];
        let (region, offset, remote) =
            (slot.local_region, slot.offset, &state.remotes[slot.remote as usize]);
        let (most, at) = (
            remote.pieces as u32,
            Place { region: remote.theirs.0, generation: remote.theirs.1, offset },
        );
        let unacknowledged = match (&state.protocol, most) {
            (_, 0) => 0,
            // Answers take numbers too, so count only the pieces of data in flight.
            (Some(_), _) if s.in_flight() > 64 && state.is_kept(stream) => {
                state.data_in_flight(stream)
            }
            (Some(protocol), _) => {
                protocol.accounts[stream as usize].carriage.in_flight(seq, s.in_flight())
            }
            (None, _) => most,
        };
        if most != 0 && unacknowledged >= most {
            return Err(Blocked::Fence);
        }
        if *budget == 0 {
            return Err(Blocked::Budget);
        }
        *budget -= 1;
        let len = slot.left.min(state.piece_max(peer)) as usize;
        let (local, mut copy) = (slot.local, slot.value as u32);
        let mut bytes = [0; LONGEST];
        let staged = self.staged((local, region, len), &mut bytes, &mut copy);
        self.state.pending.slots[index as usize].value = copy.into();
        let payload = staged.map_err(|error| match error {
            PostError::Again => self.state.no_room(),
            error => Blocked::Refused(COPIER, error),
        })?;
        let body = Body::Data { at };
        if self.post_message(stream, peer, word, body, payload, Owner::Op(index))?
            == Posted::Pending
        {
            self.state.pending.slots[index as usize].posts += 1;
        }
        let state = &mut self.state;
        if state.is_kept(stream) {
            let what = Sent::Message { op: index, body, local, len: len as u32 };
            state.keep(stream, what, Untrusted::from_slice(&[]));
        }
        let slot = &mut state.pending.slots[index as usize];
        slot.left -= len as u64;
        slot.offset += len as u64;
        // Wrapping, because a device address is not a pointer into our memory.
        slot.local = slot.local.wrapping_add(len);
        slot.numbered = true;
        state.streams[stream as usize].next = seq.plus(1);
        state.stats.posted += 1;
        if most != 0 {
            if let Some(protocol) = &mut state.protocol {
                protocol.accounts[stream as usize].carriage.sent(seq);
            }
            // Ask at half the limit, so that the acknowledgement arrives before the sender must
            // stop.
            if unacknowledged == most / 2 {
                state.ask(stream);
            }
        }
        Ok(())
    }

    /// Returns bytes of a registered region. Copies device memory to `into` first, and returns
    /// [`PostError::Again`] until that copy has completed.
    pub(super) fn staged<'a>(
        &mut self,
        (ptr, region, len): (*mut u8, u16, usize),
        into: &'a mut [u8; LONGEST],
        copy: &mut u32,
    ) -> Result<Untrusted<'a>, PostError> {
        let local = self.state.locals.get(region as usize).filter(|local| local.is_device());
        let Some(&LocalSlot { desc, .. }) = local else {
            // SAFETY: the caller has checked the range against its region, or it is the source of
            // an operation that has not completed.
            return Ok(unsafe { Untrusted::new(ptr, len) });
        };
        let ptr = NonNull::new(ptr).ok_or(PostError::BadKey)?;
        let from = Local { ptr, len, desc: desc[COPIER.0 as usize] };
        // SAFETY: the range was checked against its region, which is registered with this rail. The
        // owner of the region may read it.
        unsafe { self.rails.first_mut().fetch_device(from, &mut into[..len], copy) }?;
        Ok(Untrusted::from_slice(&into[..len]))
    }

    /// Continues a get that travels in messages. A get into device memory counts as posted only
    /// when all its data was copied.
    #[cold]
    #[inline(never)]
    pub(super) fn post_fetch(
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

    /// Copies a block into device memory, `into` bytes after `start`. Returns `None` once the copy
    /// has completed, or else the rail's id of the copy.
    fn place_block(
        &mut self,
        (start, into): (*mut u8, u64),
        region: u16,
        block: u32,
        mut copy: u32,
    ) -> Result<Option<u32>, PostError> {
        let Some(protocol) = &mut self.state.protocol else { return Err(PostError::BadKey) };
        let len = protocol.blocks.slots[block as usize].len as usize;
        // SAFETY: the block was taken for a payload of this length.
        let from = unsafe { Untrusted::new(protocol.blocks.bytes(block), len) };
        let ptr = NonNull::new(start.wrapping_add(into as usize)).ok_or(PostError::BadKey)?;
        let desc =
            self.state.locals.get(region as usize).map_or(0, |local| local.desc[COPIER.0 as usize]);
        let to = Local { ptr, len, desc };
        // SAFETY: the caller has checked the range against its region, which is registered with
        // this rail. The owner of the region may write it.
        match unsafe { self.rails.first_mut().place_device(to, from, &mut copy) } {
            Ok(()) => Ok(None),
            Err(PostError::Again) => Ok(Some(copy)),
            Err(error) => Err(error),
        }
    }

    /// Returns `None` once the copy of the piece has completed, or else the rail's id of the copy.
    ///
    /// # Errors
    /// A protocol violation if the region is gone. [`PeerError::Rail`] if the device has failed; it
    /// may still finish the copy.
    #[cold]
    #[inline(never)]
    pub(super) fn place_piece(
        &mut self,
        stream: u32,
        at: Place,
        block: u32,
        copy: u32,
    ) -> Result<Option<u32>, PeerError> {
        let len = self.state.protocol.as_ref().map_or(0, |p| p.blocks.slots[block as usize].len);
        let (start, _) = self.state.place_anywhere(at, len.into()).map_err(PeerError::Protocol)?;
        let placed = self.place_block((start, 0), at.region, block, copy);
        let more = placed.map_err(|_| PeerError::Rail(COPIER))?;
        if more.is_none()
            && let Some(protocol) = &mut self.state.protocol
        {
            protocol.blocks.free(block);
            protocol.accounts[stream as usize].carriage.kept -= 1;
        }
        Ok(more)
    }

    /// Answers the get that is next in the stream. Returns the unanswered rest, or `None` if the
    /// get is answered or queued.
    ///
    /// # Errors
    /// A protocol violation if the peer has too many unanswered gets. [`PeerError::Rail`] if the
    /// device or a rail has failed.
    #[cold]
    #[inline(never)]
    pub(super) fn answer(
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

    pub(super) fn answer_gets(&mut self, stream: u32) {
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
    /// For a peer with failover, returns a rail that does not reach both memories, if any. Any rail
    /// may have to take over, so the data then travels in messages.
    #[inline(always)]
    pub(super) fn unreached(&self, peer: u16, local: u16, remote: u16) -> Option<RailId> {
        let here = self.locals.get(local as usize).filter(|local| local.is_device());
        let carried = self.remotes[remote as usize].carried;
        if here.is_some() || carried { self.unreached_of(peer, here, carried) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn unreached_of(
        &self,
        peer: u16,
        here: Option<&LocalSlot<RAILS>>,
        carried: bool,
    ) -> Option<RailId> {
        let joined = self.joined_rails(peer);
        let misses =
            |rail: &usize| carried || here.is_some_and(|l| l.keys[*rail] == RailKey::ELSEWHERE);
        let rail = (0..RAILS).filter(|rail| joined >> rail & 1 != 0).find(misses)?;
        Some(RailId(rail as u8))
    }

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
    pub(super) fn has_operations_in_flight(&self, stream: u32) -> bool {
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

    pub(super) fn can_carry(&self, peer: u16) -> bool {
        self.block_size() != 0 && self.piece_max(peer) != 0
    }

    fn block_size(&self) -> u64 {
        self.protocol.as_ref().map_or(0, |protocol| protocol.blocks.size().min(LONGEST) as u64)
    }

    pub(super) fn pieces(&self) -> u8 {
        self.protocol.as_ref().map_or(0, |protocol| protocol.pieces)
    }

    fn piece_max(&self, peer: u16) -> u64 {
        let theirs = self.pairings[peer as usize].matching.eager;
        let most = self.protocol.as_ref().map_or(0, |protocol| protocol.most_eager);
        let most = if theirs == u32::MAX { most } else { theirs };
        (most.min(LONGEST as u32) as u64).min(self.room(peer))
    }

    /// Called when every rail has refused the post. Returns `false` if the operation cannot be
    /// carried.
    #[cold]
    #[inline(never)]
    pub(super) fn carry_instead(&mut self, stream: u32, index: u32, error: PostError) -> bool {
        let peer = self.streams[stream as usize].peer;
        if error != PostError::Unsupported || !self.can_carry(peer) {
            return false;
        }
        let slot = &self.pending.slots[index as usize];
        let here = self.locals.get(slot.local_region as usize).is_some_and(LocalSlot::is_device);
        let remote = &self.remotes[slot.remote as usize];
        if remote.native != NO_RAIL {
            // Only the owner's provider may access memory with native atomics.
            return false;
        }
        // A host region takes any number of pieces.
        let there = remote.on_device;
        let kind = match slot.kind {
            OpKind::Write if here && !there || there && remote.pieces != 0 => OpKind::Carry,
            OpKind::Read if (here || there) && !(here && self.pieces() == 0) => OpKind::Fetch,
            _ => return false,
        };
        let slot = &mut self.pending.slots[index as usize];
        slot.kind = kind;
        match kind {
            OpKind::Fetch => (slot.asked, slot.request) = (0, 0),
            _ => slot.value = 0,
        }
        true
    }

    fn fetches_to_device(&self, index: u32) -> bool {
        let region = self.pending.slots[index as usize].local_region;
        self.locals.get(region as usize).is_some_and(LocalSlot::is_device)
    }

    #[cold]
    pub(super) fn may_still_place(&self, index: u32) -> bool {
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

    /// Also returns whether the memory is device memory.
    pub(super) fn place_anywhere(
        &self,
        place: Place,
        len: u64,
    ) -> Result<(*mut u8, bool), Violation> {
        let slot = self.locals.get(place.region as usize).ok_or(Violation::Region)?;
        if slot.ptr.is_null() || slot.generation as u16 != place.generation {
            return Err(Violation::Region);
        }
        if slot.native != NO_RAIL || !in_bounds(place.offset, len, slot.len + slot.device) {
            return Err(Violation::Bounds);
        }
        // Wrapping, because a device address is not a pointer into our memory.
        Ok((slot.ptr.wrapping_add(place.offset as usize), slot.device != 0))
    }

    /// Takes a block for a piece of `stream` and copies the piece into it. The caller has checked
    /// that the stream may have another piece.
    fn keep_piece(
        &mut self,
        stream: u32,
        payload: Untrusted<'_>,
        token: u64,
    ) -> Result<u32, Violation> {
        let peer = self.streams[stream as usize].peer;
        let source = PeerId { index: peer, generation: self.peers[peer as usize].generation };
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        if payload.len() > protocol.blocks.size() {
            return Err(Violation::Length);
        }
        let len = payload.len() as u32;
        let block = protocol.blocks.take(stream, source, len, token).ok_or(Violation::Credit)?;
        // SAFETY: `take` has just reserved the block for this piece alone. The check above ensures
        // that the piece fits.
        unsafe { copy_bytes(payload.as_ptr(), protocol.blocks.bytes(block), payload.len()) };
        Ok(block)
    }

    #[cold]
    pub(super) fn piece_arrived(
        &mut self,
        stream: u32,
        word: u32,
        at: Place,
        payload: Untrusted<'_>,
    ) -> Result<(), Violation> {
        if !self.place_anywhere(at, payload.len() as u64)?.1 {
            return Err(Violation::Bounds);
        }
        let (window, mut cells) = self.window(stream);
        if window.seen(word, &mut cells)? {
            self.held(stream, Arrival::Duplicate);
            return Ok(());
        }
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        if protocol.accounts[stream as usize].carriage.kept >= protocol.pieces {
            return Err(Violation::Credit);
        }
        let block = self.keep_piece(stream, payload, 0)?;
        if let Some(protocol) = &mut self.protocol {
            protocol.accounts[stream as usize].carriage.kept += 1;
        }
        self.park(stream, word, Parked { at, what: Action::Piece { block, copy: 0 } }).map(drop)
    }

    /// Handles a `Get` or `Got` message. Returns `None` for any other message.
    #[cold]
    pub(super) fn get_arrived(
        &mut self,
        peer: Peer,
        bytes: Untrusted<'_>,
    ) -> Option<Result<(), Violation>> {
        if let Some(get) = Get::decode(bytes) {
            return Some(get.and_then(|get| self.park_get(peer, get)));
        }
        let got = Got::decode(bytes)?;
        Some(got.and_then(|(got, payload)| self.got(peer, got, payload)))
    }

    fn park_get(&mut self, peer: Peer, get: Get) -> Result<(), Violation> {
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

    fn got(&mut self, peer: Peer, got: Got, payload: Untrusted<'_>) -> Result<(), Violation> {
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
