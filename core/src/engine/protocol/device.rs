//! Two-sided messages from and into device memory, which the processor may not access. A send from
//! device memory keeps its payload, whatever its length, until the receiver reads it. A payload
//! that arrives in a message or in chunks goes into a block first, and a rail then copies it to the
//! device. Slow paths, which wait only for a device.

use crate::error::{AttachError, OpError, PostError, Violation};
use crate::mem::{RailId, Untrusted, copy_bytes};
use crate::op::Fault;
use crate::probe::probe;
use crate::rail::{Local, Rail};

use super::super::list::NONE;
use super::super::table::locate;
use super::super::tag::Tag;
use super::super::wire::NO_TOKEN;
use super::super::{Engine, State};
use super::arrive::is_closing;
use super::head;
use super::near;
use super::request::{Destination, Received};
use super::slot::{Buffer, DEVICE, Sender, Stage};
use super::stock::Kept;

/// Longest chunk from device memory, in bytes. Chunks are staged on the stack.
const CHUNK: usize = 2048;

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// `error` comes from the ordinary look-up. Returns it unchanged if the buffer is not in memory
    /// that only rails access.
    #[cold]
    #[inline(never)]
    pub(super) fn device_buffer(
        &mut self,
        into: Destination,
        error: OpError,
    ) -> Result<Buffer, OpError> {
        match error {
            OpError::DeviceMemory | OpError::NativeAtomics => {
                self.buffer_anywhere(into).map(|(buffer, _)| buffer)
            }
            error => Err(error),
        }
    }

    /// Also returns whether the memory is device memory.
    #[cold]
    #[inline(never)]
    pub(super) fn buffer_anywhere(&mut self, into: Destination) -> Result<(Buffer, bool), OpError> {
        let (at, len) = match into {
            Destination::Region(at, len) => (at, len),
            Destination::Span(span) => return Ok((Buffer::span(span), false)),
            Destination::Nothing => return Ok((Buffer::NONE, false)),
        };
        let (place, device) = locate(self.state.locals, at, len as u64)?;
        Ok((
            Buffer { ptr: place.as_ptr(), len: len as u64, region: at.region.index() as u16 },
            device,
        ))
    }

    /// Starts reading the payload of a receive into device memory. The receive must be in no list.
    #[cold]
    #[inline(never)]
    pub(super) fn bring_device(&mut self, index: u32) {
        if let Some(fault) = self.sender_lost(index) {
            return self.state.fail_receive(index, Received::Failed(fault));
        }
        let Some(protocol) = &self.state.protocol else { return };
        let slot = &protocol.requests.slots[index as usize];
        let want = slot.fit(slot.len).0;
        let header = &protocol.headers.slots[slot.header as usize];
        let (source, offer) = (header.source, header.offer);
        if want == 0 {
            return self.tell(index, false);
        }
        let unreached = match self.reach(source, &offer) {
            Err(why) => why,
            Ok(remote) => {
                if !self.start_read(index, want, remote, Stage::ReadingDevice) {
                    self.later(index, Stage::ReadDevice);
                }
                return;
            }
        };
        // The sender sends a payload that cannot be read, if it is short enough for a block. A long
        // one is got in pieces.
        let Some(protocol) = &mut self.state.protocol else { return };
        if want > protocol.outgoing.size() as u64 {
            // The message has overtaken the announcement of its memory.
            if unreached == AttachError::Unheard {
                return self.later(index, Stage::ReadDevice);
            }
            let Some(remote) = self.reach_apart(source, &offer) else {
                return self.state.unreadable(index, Fault::Receiver);
            };
            if !self.start_read(index, want, remote, Stage::ReadingDevice) {
                self.later(index, Stage::ReadDevice);
            }
            return;
        }
        let slot = &protocol.requests.slots[index as usize];
        let (stream, token) = (slot.stream, slot.token);
        // With failover, the sender waits for a Fin after its chunks.
        let finishes = if self.state.is_kept(stream) { token } else { NO_TOKEN };
        let Some(protocol) = &mut self.state.protocol else { return };
        let Some(block) = protocol.outgoing.take(stream, source, want as u32, finishes) else {
            return self.later(index, Stage::ReadDevice);
        };
        let name = protocol.requests.name(index).0;
        let asked = self.post_answer(stream, head::PULL, 0, [token, name], Some(want), None);
        let Some(protocol) = &mut self.state.protocol else { return };
        if asked.is_none() {
            protocol.outgoing.free(block);
            return match self.sender_lost(index) {
                Some(fault) => self.state.fail_receive(index, Received::Failed(fault)),
                None => self.later(index, Stage::ReadDevice),
            };
        }
        (protocol.stats.read, protocol.stats.pulled) =
            (protocol.stats.read + 1, protocol.stats.pulled + 1);
        let slot = &mut protocol.requests.slots[index as usize];
        (slot.stage, slot.left, slot.token) = (Stage::ChunksDevice, want, block as u64);
        let header = core::mem::replace(&mut slot.header, NONE);
        self.state.give_back(Kept::Header(header), false);
    }

    /// Copies from an outgoing block if `ours` is set, and from a received one otherwise. The
    /// receive must be in no list. `late` is the value of [`Stage::Place`].
    #[cold]
    #[inline(never)]
    pub(super) fn place(&mut self, index: u32, ours: bool, late: bool) {
        let Some(protocol) = &mut self.state.protocol else { return };
        let slot = &protocol.requests.slots[index as usize];
        let (block, len, region) = (slot.left as u32, slot.delivered as usize, slot.region);
        let from = if ours { protocol.outgoing.bytes(block) } else { protocol.blocks.bytes(block) };
        // SAFETY: the block was taken for this payload, and holds at least `len` bytes of it.
        let from = unsafe { Untrusted::new(from, len) };
        let desc = self.state.locals.get(region as usize).map_or(0, |local| local.desc[0]);
        let placed = match core::ptr::NonNull::new(slot.ptr) {
            // SAFETY: posting the receive checked the buffer against its region, and `fit` limited
            // `len` to the buffer.
            Some(ptr) => unsafe { self.rails[0].write_device(Local { ptr, len, desc }, from) },
            None => Err(PostError::BadKey),
        };
        if placed == Err(PostError::Again) {
            return self.later(index, if ours { Stage::PlaceOurs } else { Stage::Place(late) });
        }
        let Some(protocol) = &mut self.state.protocol else { return };
        let slot = &mut protocol.requests.slots[index as usize];
        if let Err(error) = placed {
            // The device may still finish the copy, so the outcome is unknown.
            slot.spoil(Received::Unknown(Fault::Post(RailId(0), error)));
        }
        let token = slot.token;
        match ours {
            true => {
                probe!("rendezvous_end", index, slot.delivered);
                protocol.outgoing.free(block);
            }
            false => self.state.give_back(Kept::Block(block), true),
        }
        if token != NO_TOKEN {
            return self.tell(index, late);
        }
        let Some(protocol) = &mut self.state.protocol else { return };
        protocol.requests.end(index, &mut self.state.pending.ends);
    }

    /// Sends a chunk of a payload in device memory. Returns `false` if the chunk must be tried
    /// again.
    #[cold]
    #[inline(never)]
    pub(super) fn send_chunk_of_device(&mut self, index: u32, most: u64) -> bool {
        let slot = &self.state.pending.slots[index as usize];
        let (stream, request, sent, region) =
            (slot.stream, slot.request, slot.offset, slot.local_region);
        let mut bytes = [0; CHUNK];
        let piece = &mut bytes[..most.min(CHUNK as u64) as usize];
        let desc = self.state.locals.get(region as usize).map_or(0, |local| local.desc[0]);
        let Some(ptr) = core::ptr::NonNull::new(slot.local.wrapping_add(sent as usize)) else {
            return false;
        };
        // SAFETY: the source of a send stays valid until the send ends. `sent` plus the piece is
        // within the length of the source.
        match unsafe { self.rails[0].read_device(Local { ptr, len: piece.len(), desc }, piece) } {
            Ok(()) => {}
            Err(PostError::Again) => return false,
            Err(_) => {
                // The receiver waits for bytes that will never arrive, so only failing the peer
                // ends the wait.
                let peer = self.state.streams[stream as usize].peer;
                self.state.fail_peer(peer, crate::error::PeerError::Rail(RailId(0)));
                return false;
            }
        }
        let payload = Some((index, ptr.as_ptr().cast_const(), Untrusted::from_slice(piece)));
        if self.post_answer(stream, head::CHUNK, 0, [request, sent], None, payload).is_none() {
            return false;
        }
        self.chunk_sent(index, piece.len() as u64);
        true
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    #[cold]
    #[inline(never)]
    pub(super) fn matched_device(
        &mut self,
        stream: u32,
        context: u64,
        tag: Tag,
        payload: Untrusted<'_>,
        token: u64,
    ) -> Result<(), Violation> {
        let index = (context & !DEVICE) as u32;
        self.due.push(self.streams, stream);
        match self.keep_payload(stream, payload, token) {
            Ok(kept) => {
                self.deliver_device(index, tag, kept);
                Ok(())
            }
            Err(violation) => {
                self.fail_receive(index, Received::Failed(Fault::Receiver));
                Err(violation)
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn deliver_device(&mut self, index: u32, tag: Tag, kept: Kept) {
        let index = (index as u64 & !DEVICE) as u32;
        let Some(protocol) = &mut self.protocol else { return };
        let Some(slot) = protocol.requests.slots.get_mut(index as usize) else { return };
        slot.tag = tag;
        match kept {
            Kept::Block(block) => {
                let description = &protocol.blocks.slots[block as usize];
                (slot.source, slot.len) = (Sender::new(description.source), description.len as u64);
                (slot.stream, slot.token) = (description.stream, description.token);
                (slot.delivered, slot.fit) = slot.fit(slot.len);
                slot.left = block as u64;
                protocol.stats.near += near(self.peers, description.source.index);
                let stage = Stage::Place(is_closing(self.peers, description.source));
                protocol.requests.push_due(index, stage);
            }
            Kept::Header(header) => self.deliver_header(index, header, Stage::ReadDevice),
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn chunk_for_device(
        &mut self,
        index: u32,
        stream: u32,
        offset: u64,
        bytes: Untrusted<'_>,
    ) -> Result<(), Violation> {
        let Some(protocol) = &mut self.protocol else { return Err(Violation::Kind) };
        let slot = &mut protocol.requests.slots[index as usize];
        if slot.stage != Stage::ChunksDevice || slot.stream != stream {
            return Err(Violation::Reply);
        }
        let len = bytes.len() as u64;
        let want = slot.fit(slot.len).0;
        if len == 0 || len > slot.left || offset > want || len > want - offset {
            return Err(Violation::Bounds);
        }
        let block = slot.token as u32;
        // SAFETY: the block was taken for `want` bytes, and the chunk was checked to lie within
        // them.
        unsafe {
            copy_bytes(
                bytes.as_ptr(),
                protocol.outgoing.bytes(block).add(offset as usize),
                len as usize,
            )
        };
        slot.left -= len;
        if slot.left == 0 {
            (slot.delivered, slot.left) = (want, block as u64);
            slot.token = protocol.outgoing.slots[block as usize].token;
            protocol.requests.push_due(index, Stage::PlaceOurs);
        }
        Ok(())
    }

    /// The payload cannot be transferred. Notifies the sender.
    #[cold]
    #[inline(never)]
    pub(super) fn unreadable(&mut self, index: u32, fault: Fault) {
        let Some(protocol) = &mut self.protocol else { return };
        let slot = &mut protocol.requests.slots[index as usize];
        slot.spoil(Received::Failed(fault));
        protocol.requests.push_due(index, Stage::Tell(false));
    }

    /// Fails the receives from a removed peer with a payload that is not copied to the device yet.
    #[cold]
    #[inline(never)]
    pub(super) fn forget_placing(&mut self, peer: u16) {
        let count = self.protocol.as_ref().map_or(0, |protocol| protocol.requests.slots.used());
        for index in 0..count {
            let Some(protocol) = &mut self.protocol else { return };
            let slot = &protocol.requests.slots[index as usize];
            let ours = match slot.stage {
                Stage::Place(_) => false,
                Stage::PlaceOurs => true,
                _ => continue,
            };
            if slot.source.get().is_none_or(|source| source.index != peer) {
                continue;
            }
            let block = slot.left as u32;
            protocol.requests.remove_due(index);
            match ours {
                true => protocol.outgoing.free(block),
                false => self.give_back(Kept::Block(block), false),
            }
            self.fail_receive(
                index,
                Received::Failed(Fault::Peer(crate::error::PeerError::Removed)),
            );
        }
    }
}
