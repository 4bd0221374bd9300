//! Rendezvous: reads payloads from the sender's memory if it is reachable, pulls them in chunks
//! otherwise, and notifies the sender. Part of a pass, and bounded like a pass. Work that finds no
//! room is retried in the next pass.

use core::ptr::NonNull;

use crate::error::AttachError;
use crate::mem::{Peer, PeerId, Untrusted, copy_bytes};
use crate::op::{Fault, Outcome};
use crate::probe::probe;
use crate::rail::{Local, Rail, RailKey};

use super::super::list::NONE;
use super::super::pending::{OpKind, PendingSlot};
use super::super::submit::Notice;
use super::super::table::{self, Access, Handle, LocalSlot, NO_RAIL, PeerState, RemoteSlot};
use super::super::{Engine, State};
use super::head::{self, Offer};
use super::request::Received;
use super::slot::{Stage, UNREGISTERED};
use super::stock::Kept;

/// A list of sends with a payload that the receiver pulls in chunks. Linked through the slots of
/// operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pulled {
    head: u32,
    tail: u32,
    len: u32,
}

impl Pulled {
    pub(crate) const EMPTY: Pulled = Pulled { head: NONE, tail: NONE, len: 0 };

    #[inline(always)]
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn push(&mut self, slots: &mut [PendingSlot], index: u32) {
        slots[index as usize].pull_next = NONE;
        match self.tail {
            NONE => self.head = index,
            tail => slots[tail as usize].pull_next = index,
        }
        self.tail = index;
        self.len += 1;
    }

    fn turn(&mut self, slots: &mut [PendingSlot], first: u32) {
        if self.head == first && self.tail != first {
            self.remove(slots, first);
            self.push(slots, first);
        }
    }

    pub(super) fn remove(&mut self, slots: &mut [PendingSlot], index: u32) {
        let (mut before, mut at) = (NONE, self.head);
        while at != NONE && at != index {
            (before, at) = (at, slots[at as usize].pull_next);
        }
        if at == NONE {
            return;
        }
        let next = slots[at as usize].pull_next;
        match before {
            NONE => self.head = next,
            before => slots[before as usize].pull_next = next,
        }
        if self.tail == index {
            self.tail = before;
        }
        self.len -= 1;
    }
}

/// Maximum number of bytes that are copied by address at once. It bounds the time of a pass.
const STEP: u64 = 1 << 20;

enum Read {
    Copied,
    Started,
    Later,
    /// The payload cannot be read, or room may never become free.
    Unable,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Serves at most a batch of receives and a batch of chunks.
    #[inline(never)]
    pub(in super::super) fn serve_protocol(&mut self) {
        let batch = self.state.config.batch;
        let due =
            self.state.protocol.as_ref().map_or(0, |protocol| protocol.requests.due().min(batch));
        for _ in 0..due {
            let Some(protocol) = &mut self.state.protocol else { return };
            let Some((index, stage)) = protocol.requests.pop_due() else { break };
            match stage {
                Stage::Read(by_message) => self.bring(index, by_message),
                Stage::ReadDevice => self.bring_device(index),
                Stage::Place(late) => self.place(index, false, late),
                Stage::PlaceOurs => self.place(index, true, false),
                Stage::Tell(late) => self.tell(index, late),
                _ => self.tell(index, false),
            }
        }
        let mut stuck = 0;
        for _ in 0..batch {
            let Some(protocol) = &self.state.protocol else { return };
            let index = protocol.pulled.head;
            if index == NONE {
                return;
            }
            if self.send_chunk(index) {
                stuck = 0;
                continue;
            }
            // A lack of room to one peer does not stop sends to other peers.
            let Some(protocol) = &mut self.state.protocol else { return };
            protocol.pulled.turn(&mut self.state.pending.slots, index);
            stuck += 1;
            if stuck >= protocol.pulled.len {
                return;
            }
        }
    }

    pub(super) fn sender_lost(&self, index: u32) -> Option<Fault> {
        let protocol = self.state.protocol.as_ref()?;
        let source = protocol.requests.slots[index as usize].source.get()?;
        self.state.lost(source)
    }

    /// Starts reading the payload of a receive. The receive must be in no list.
    fn bring(&mut self, index: u32, by_message: bool) {
        if let Some(fault) = self.sender_lost(index) {
            return self.state.fail_receive(index, Received::Failed(fault));
        }
        let Some(protocol) = &mut self.state.protocol else { return };
        let slot = &mut protocol.requests.slots[index as usize];
        let (want, _) = slot.fit(slot.len);
        if want == 0 {
            return self.tell(index, false);
        }
        if !by_message {
            match self.read(index, want) {
                Read::Copied => {
                    if let Some(protocol) = &mut self.state.protocol {
                        protocol.requests.slots[index as usize].delivered = want;
                        protocol.stats.read += 1;
                    }
                    return self.tell(index, false);
                }
                Read::Started => return,
                Read::Later => return self.later(index, Stage::Read(false)),
                Read::Unable => {}
            }
        }
        let Some(protocol) = &mut self.state.protocol else { return };
        let name = protocol.requests.name(index).0;
        let slot = &mut protocol.requests.slots[index as usize];
        let (stream, token) = (slot.stream, slot.token);
        if self.post_answer(stream, head::PULL, 0, [token, name], Some(want), None).is_none() {
            return match self.sender_lost(index) {
                Some(fault) => self.state.fail_receive(index, Received::Failed(fault)),
                None => self.later(index, Stage::Read(true)),
            };
        }
        let Some(protocol) = &mut self.state.protocol else { return };
        (protocol.stats.read, protocol.stats.pulled) =
            (protocol.stats.read + 1, protocol.stats.pulled + 1);
        let slot = &mut protocol.requests.slots[index as usize];
        (slot.stage, slot.left) = (Stage::Chunks, want);
        // The sender counts the header as free once it has sent everything, so free it here first.
        let header = core::mem::replace(&mut slot.header, NONE);
        if header != NONE {
            self.state.give_back(Kept::Header(header), false);
        }
    }

    pub(super) fn later(&mut self, index: u32, stage: Stage) {
        if let Some(protocol) = &mut self.state.protocol {
            protocol.requests.push_due(index, stage);
        }
    }

    /// Sends a Fin and ends a receive. The receive must be in no list. `late` is the value of
    /// [`Stage::Tell`].
    pub(super) fn tell(&mut self, index: u32, late: bool) {
        let lost = self.sender_lost(index).is_some();
        let Some(protocol) = &mut self.state.protocol else { return };
        let slot = &mut protocol.requests.slots[index as usize];
        let (stream, op, words) = (slot.stream, slot.fin_op(), [slot.token, slot.delivered]);
        let answered =
            !lost && self.post_answer(stream, head::FIN, op, words, None, None).is_some();
        if !answered && self.sender_lost(index).is_none() {
            return self.later(index, Stage::Tell(late));
        }
        let Some(protocol) = &mut self.state.protocol else { return };
        let account = &mut protocol.accounts[stream as usize];
        account.fins_sent = account.fins_sent.wrapping_add(answered as u32);
        let header = core::mem::replace(&mut protocol.requests.slots[index as usize].header, NONE);
        protocol.requests.end(index, &mut self.state.pending.ends);
        // If there is no header, the message carried its payload and needs a Fin, or all its chunks
        // have arrived.
        if header != NONE {
            probe!("rendezvous_end", index, words[1]);
            self.state.give_back(Kept::Header(header), false);
        }
    }

    fn read(&mut self, index: u32, want: u64) -> Read {
        let Some(protocol) = &self.state.protocol else { return Read::Unable };
        let slot = &protocol.requests.slots[index as usize];
        let (ptr, region) = (slot.ptr, slot.region);
        let header = &protocol.headers.slots[slot.header as usize];
        let source = header.source;
        if let Some(address) = header.offer.address() {
            return self.read_address(index, want, source, address);
        }
        let offer = header.offer;
        let Ok(remote) = self.reach(source, &offer) else { return Read::Unable };
        let mapped = self.state.remotes[remote as usize].mapped;
        if !mapped.is_null() {
            // SAFETY: `Offer::read` checked that the offer lies inside its region, which is mapped
            // here with the size in the offer. The buffer is a span, or was checked against its
            // region. `want` was limited to the buffer.
            unsafe { copy_bytes(mapped.add(offer.offset as usize), ptr, want as usize) };
            return Read::Copied;
        }
        if region == UNREGISTERED {
            // A rail may need a registered buffer, so the sender sends the payload instead.
            return Read::Unable;
        }
        if self.start_read(index, want, remote, Stage::Reading) {
            return Read::Started;
        }
        // No slot is free. Wait only if a read is in flight, because it will free its slot. The
        // other slots may hold completions that the program never takes.
        match &self.state.protocol {
            Some(protocol) if protocol.reads != 0 => Read::Later,
            _ => Read::Unable,
        }
    }

    /// Copies the next part of a receive's message out of the sender's process. `delivered` counts
    /// the bytes copied so far.
    #[inline(never)]
    fn read_address(&mut self, index: u32, want: u64, source: PeerId, address: u64) -> Read {
        let Some(protocol) = &mut self.state.protocol else { return Read::Unable };
        let slot = &mut protocol.requests.slots[index as usize];
        let done = slot.delivered;
        let len = (want - done).min(STEP);
        // SAFETY: `done + len` is at most `want`, which fits the buffer.
        let Some(ptr) = NonNull::new(unsafe { slot.ptr.add(done as usize) }) else {
            return Read::Unable;
        };
        let local = Local { ptr, len: len as usize, desc: 0 };
        let joins = self.state.peers[source.index as usize].rails;
        let mut rails =
            self.rails.iter_mut().enumerate().filter(|(rail, _)| joins >> rail & 1 != 0);
        // SAFETY: the buffer is a span, or was checked against its region, and `done + len` bytes
        // fit it.
        if !rails.any(|(_, rail)| unsafe {
            rail.read_address(Peer(source.index), local, address + done)
        }) {
            return Read::Unable;
        }
        slot.delivered = done + len;
        if slot.delivered == want { Read::Copied } else { Read::Later }
    }

    /// Posts reads of `want` bytes of a receive's message. Returns `false` if no slot is free.
    pub(super) fn start_read(&mut self, index: u32, want: u64, remote: u16, stage: Stage) -> bool {
        let Some(protocol) = &self.state.protocol else { return false };
        let slot = &protocol.requests.slots[index as usize];
        let (stream, ptr, region) = (slot.stream, slot.ptr, slot.region);
        let offset = protocol.headers.slots[slot.header as usize].offer.offset;
        let state = &mut self.state;
        let Some(op) = state.pending.slots.take() else { return false };
        state.remotes[remote as usize].uses += 1;
        let generation = state.remotes[remote as usize].generation;
        let kind = match state.remotes[remote as usize].carried {
            true => OpKind::Fetch,
            false => OpKind::Read,
        };
        state.pending.slots[op as usize].set_open(stream, kind, Notice::Silent);
        let slot = &mut state.pending.slots[op as usize];
        (slot.local, slot.local_region, slot.left) = (ptr, region, want);
        (slot.remote, slot.offset) = (remote, offset);
        (slot.inner, slot.tag, slot.value) = (true, index as u64, generation as u64);
        (slot.asked, slot.request) = if kind == OpKind::Fetch { (0, 0) } else { (0, want) };
        let s = &mut state.streams[stream as usize];
        s.ops.push(&mut state.pending.slots, op);
        if s.unposted == NONE {
            s.unposted = op;
        }
        s.open += 1;
        state.open += 1;
        if let Some(protocol) = &mut state.protocol {
            protocol.requests.slots[index as usize].stage = stage;
            protocol.reads += 1;
        }
        self.advance(stream);
        true
    }

    pub(super) fn reach(
        &mut self,
        source: PeerId,
        offer: &Offer<RAILS>,
    ) -> Result<u16, AttachError> {
        if offer.rails == 0 {
            return Err(AttachError::Unsupported);
        }
        let theirs = (offer.region, offer.generation);
        let place = (source.index as usize ^ (offer.region as usize) << 2) % HINTS;
        let serves = |slot: &RemoteSlot<RAILS>| {
            slot.reads(source.index, theirs, offer.size) && !slot.carried && slot.keys == offer.keys
        };
        let hint = self.state.hints[place];
        if self.state.remotes.get(hint as usize).is_some_and(serves) {
            return Ok(hint);
        }
        let found = self.state.remotes.iter().position(serves).map(|found| found as u16);
        let found = match found {
            Some(found) => found,
            None => self.import_offer(source, offer)?,
        };
        self.state.hints[place] = found;
        Ok(found)
    }

    #[cold]
    fn import_offer(&mut self, source: PeerId, offer: &Offer<RAILS>) -> Result<u16, AttachError> {
        let theirs = (offer.region, offer.generation);
        // Release imports of earlier regions with the same number.
        let stale = |slot: &RemoteSlot<RAILS>| {
            slot.is_idle() && slot.peer == source.index && slot.theirs.0 == offer.region
        };
        while let Some(index) = self.state.remotes.iter().position(stale) {
            self.release_slot(index);
        }
        // Device memory is imported as `Plain` too, because it is not mapped and only these reads
        // use it.
        let handle = Handle { theirs, len: offer.size, access: Access::Plain, keys: offer.keys };
        // `try_import` does not wait for the owner's announcement.
        let id = self.import_evicting(source, handle, R::try_import)?;
        self.state.remotes[id.index()].auto = true;
        Ok(id.index() as u16)
    }

    /// Imports the region of an offer that rails cannot read, so that its bytes travel in messages.
    #[cold]
    pub(super) fn reach_apart(&mut self, source: PeerId, offer: &Offer<RAILS>) -> Option<u16> {
        let theirs = (offer.region, offer.generation);
        let carries = self.state.can_carry(source.index) && self.state.pieces() != 0;
        if !offer.names_region() || !carries {
            return None;
        }
        let serves =
            |slot: &RemoteSlot<RAILS>| slot.reads(source.index, theirs, offer.size) && slot.carried;
        if let Some(found) = self.state.remotes.iter().position(serves) {
            return Some(found as u16);
        }
        let id = loop {
            match table::free_remote(self.state.remotes, self.state.config.owner) {
                Ok(id) => break id,
                Err(_) => {
                    let idle = self.state.remotes.iter().position(RemoteSlot::is_idle)?;
                    self.release_slot(idle);
                }
            }
        };
        let rails = self.state.peers[source.index as usize].rails;
        self.state.remotes[id.index()] = RemoteSlot {
            len: offer.size,
            taken: true,
            peer: source.index,
            generation: id.generation(),
            theirs,
            rail: rails.trailing_zeros() as u8,
            auto: true,
            carried: true,
            keys: [RailKey::ELSEWHERE; RAILS],
            ..RemoteSlot::EMPTY
        };
        Some(id.index() as u16)
    }

    /// Sends the next chunk of a send that its receiver pulls. Returns `false` if no rail has room.
    fn send_chunk(&mut self, index: u32) -> bool {
        let slot = &self.state.pending.slots[index as usize];
        let (stream, request, sent, total) = (slot.stream, slot.request, slot.offset, slot.left);
        let peer = self.state.streams[stream as usize].peer;
        let room = self.state.pairings[peer as usize].longest as u64 - head::HEAD as u64;
        let len = (total - sent).min(room);
        let of_device = |region: &LocalSlot<RAILS>| region.device != 0 && region.native == NO_RAIL;
        if self.state.locals.get(slot.local_region as usize).is_some_and(of_device) {
            return self.send_chunk_of_device(index, len);
        }
        // SAFETY: the source of a send stays valid until the send ends, and `sent + len` is within
        // its length.
        let piece = unsafe { Untrusted::new(slot.local.add(sent as usize), len as usize) };
        let payload = Some((index, piece.as_ptr(), piece));
        if self.post_answer(stream, head::CHUNK, 0, [request, sent], None, payload).is_none() {
            return false;
        }
        self.chunk_sent(index, len);
        true
    }

    pub(super) fn chunk_sent(&mut self, index: u32, len: u64) {
        let slot = &mut self.state.pending.slots[index as usize];
        slot.offset += len;
        let total = slot.left;
        let stream = slot.stream;
        if slot.offset == total {
            // Numbered chunks may have to be sent again, so wait for the receiver's Fin.
            if !self.state.is_kept(stream) {
                self.state.pending.slots[index as usize].fetch = false;
                self.state.end_if_over(index);
            }
            // The send's own post may still be outstanding, but its payload is sent.
            self.state.stop_pulling(index);
        }
    }
}

pub(crate) const HINTS: usize = 64;

impl<const RAILS: usize> State<'_, RAILS> {
    pub(super) fn lost(&self, peer: PeerId) -> Option<Fault> {
        match self.peers.get(peer.index as usize) {
            Some(slot) if slot.generation == peer.generation => match slot.state {
                // Our Bye has promised that we no longer read the peer's memory.
                PeerState::Closing if self.has_parted(peer.index) => {
                    Some(Fault::Peer(crate::error::PeerError::Closed))
                }
                PeerState::Connected | PeerState::Meeting | PeerState::Closing => None,
                PeerState::Failed(why) => Some(Fault::Peer(why)),
                _ => Some(Fault::Peer(crate::error::PeerError::Removed)),
            },
            _ => Some(Fault::Peer(crate::error::PeerError::Removed)),
        }
    }

    pub(in super::super) fn read_over(&mut self, op: u32) {
        let slot = &mut self.pending.slots[op as usize];
        slot.inner = false;
        let (index, outcome, remote) = (slot.tag as u32, slot.outcome, slot.remote);
        let generation = slot.value as u32;
        if let Some(remote) = self.remotes.get_mut(remote as usize)
            && remote.generation == generation
            && remote.auto
        {
            remote.uses = remote.uses.saturating_sub(1);
        }
        let Some(protocol) = &mut self.protocol else { return };
        protocol.reads -= 1;
        let slot = &mut protocol.requests.slots[index as usize];
        let Some(source) = slot.source.get() else { return };
        match outcome {
            Outcome::Done => {
                slot.delivered = slot.fit(slot.len).0;
                protocol.stats.read += 1;
                protocol.requests.push_due(index, Stage::Tell(false));
            }
            Outcome::Failed(fault) => match self.lost(source) {
                Some(_) => self.fail_receive(index, Received::Failed(fault)),
                // The sender still holds the payload and can send it.
                None => {
                    if let Some(protocol) = &mut self.protocol {
                        if protocol.requests.slots[index as usize].stage == Stage::ReadingDevice {
                            return self.unreadable(index, fault);
                        }
                        protocol.requests.push_due(index, Stage::Read(true));
                    }
                }
            },
            Outcome::Unknown(fault) => {
                slot.spoil(Received::Unknown(fault));
                protocol.requests.push_due(index, Stage::Tell(false));
            }
        }
    }
}
