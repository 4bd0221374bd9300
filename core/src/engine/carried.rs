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

mod answer;
mod get;

use core::ptr::NonNull;

use crate::error::{PeerError, PostError, Violation};
use crate::mem::{Peer, PeerId, RailId, Untrusted, copy_bytes};
use crate::rail::{Local, Posted, Rail, RailKey};

use super::failover::Sent;
use super::pending::OpKind;
use super::pieces::{COPIER, Get, Got, LONGEST};
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

    /// Also returns whether the memory is device memory. Memory with native atomics counts as gone,
    /// so a get of it fails alone.
    pub(super) fn place_anywhere(
        &self,
        place: Place,
        len: u64,
    ) -> Result<(*mut u8, bool), Violation> {
        let slot = self.locals.get(place.region as usize).ok_or(Violation::Region)?;
        let gone = slot.ptr.is_null() || slot.generation as u16 != place.generation;
        if gone || slot.native != NO_RAIL {
            return Err(Violation::Region);
        }
        if !in_bounds(place.offset, len, slot.len + slot.device) {
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
}
