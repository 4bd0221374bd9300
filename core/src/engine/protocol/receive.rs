//! Receiving. Only the wait blocks. A call that returns an error has posted, cancelled and taken
//! nothing.

use crate::error::{Awaited, OpError, PeerError, Stuck, WaitError};
use crate::mem::PeerId;
use crate::op::Fault;
use crate::rail::Rail;
use crate::sync::event::Park;
use crate::sync::host::Host;

use super::super::table::{PeerSlot, PeerState, resolve_local};
use super::super::tag::{Arrived, Cancel, Post, ReceiveId, Tag, TagError, UnexpectedId};
use super::super::wait::Waiter;
use super::super::{Engine, State};
use super::request::{Cancelled, Destination, Envelope, Received, Request, Status};
use super::slot::{Buffer, DEVICE, Sender, Stage};
use super::stock::Kept;

const QUICK_PASSES: u32 = 256;

/// A message that only the holder of this value can receive. If it is neither received nor
/// [discarded](Engine::discard), the message keeps its memory here until its sender is removed.
#[doc(alias = "psm2_mq_req_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The source, tag and length of the message.
    pub envelope: Envelope,
    pub(crate) id: UnexpectedId,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Receives the oldest matching message into `into`, now or when it arrives. A message matches
    /// if it comes from `source` (`None`: from any) and agrees with `tag` in every bit that is not
    /// set in `ignore`. PSM's `tagsel` is `!ignore`. The status returns `word`.
    ///
    /// Neither blocks nor allocates. Do not use the buffer until the receive has completed. The
    /// receive completes exactly once, even if its peer fails. A receive from any source survives
    /// failed peers. A receive uses a slot of
    /// [`MatchMemory::receives`](super::MatchMemory::receives) until its status is taken by
    /// [`test_recv`](Self::test_recv), [`next_recv`](Self::next_recv) or
    /// [`wait_recv`](Self::wait_recv).
    ///
    /// # Errors
    /// - [`OpError::NoMatching`]: the engine has no matching.
    /// - [`OpError::Again`]: no slot is free.
    /// - [`OpError::PeerFailed`]: the peer has failed and left no matching message.
    /// - The error of an invalid region, range or peer.
    #[doc(alias = "psm2_mq_irecv")]
    #[doc(alias = "psm2_mq_irecv2")]
    #[doc(alias = "fi_trecv")]
    #[inline]
    pub fn recv(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: impl Into<Destination>,
        word: u64,
    ) -> Result<Request, OpError> {
        self.recv_inline(source, tag, ignore, into.into(), word)
    }

    /// [`recv`](Self::recv), for a caller that is itself inlined where it is hot.
    #[inline(always)]
    pub(crate) fn recv_inline(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: Destination,
        word: u64,
    ) -> Result<Request, OpError> {
        match self.recv_now(source, tag, ignore, into, word) {
            Some(request) => Ok(request),
            None => self.recv_slow(source, tag, ignore, into, word),
        }
    }

    /// Returns `None` and changes nothing if the slow path must take the call.
    #[inline(always)]
    fn recv_now(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: Destination,
        word: u64,
    ) -> Option<Request> {
        let buffer = self.buffer(into).ok()?;
        let state = &mut self.state;
        if let Some(source) = source {
            match state.peers.get(source.index as usize) {
                Some(PeerSlot { state: PeerState::Connected, generation, .. })
                    if *generation == source.generation => {}
                _ => return None,
            }
        }
        let protocol = state.protocol.as_mut()?;
        let slot = protocol.requests.slots.released_last()?;
        let posted = protocol.matcher.post_alike(
            source.map(|peer| peer.index as u32),
            tag,
            ignore,
            slot.index as u64,
        )?;
        Some(slot.take().receive(&buffer, word, posted))
    }

    #[inline(never)]
    fn recv_slow(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: Destination,
        word: u64,
    ) -> Result<Request, OpError> {
        let (buffer, mark) = match self.buffer(into) {
            Ok(buffer) => (buffer, 0),
            Err(error) => (self.device_buffer(into, error)?, DEVICE),
        };
        let state = &mut self.state;
        if let Some(source) = source {
            state.receivable(source, tag, ignore)?;
        }
        let protocol = state.protocol.as_mut().ok_or(OpError::NoMatching)?;
        let index = protocol.requests.slots.first_free().ok_or(OpError::Again)?;
        let name = index as u64 | mark;
        match protocol.matcher.post(source.map(|peer| peer.index as u32), tag, ignore, name) {
            Ok(Post::Waiting(id)) => Ok(protocol.requests.open(index, &buffer, word, id)),
            Ok(Post::Matched(message)) => {
                let request = protocol.requests.open(index, &buffer, word, ReceiveId::NONE);
                state.deliver(name as u32, message.tag, Kept::unpack(message.cookie));
                self.after_match();
                Ok(request)
            }
            Err(error) => Err(refused(error)),
        }
    }

    /// Returns the envelope of the oldest matching unexpected message. If there is none, makes one
    /// pass and searches again. The message stays. Neither blocks nor allocates.
    ///
    /// # Errors
    /// - [`OpError::NoMatching`]: the engine has no matching.
    /// - [`OpError::UnknownPeer`]: the peer was removed.
    /// - [`OpError::PeerFailed`]: the peer has failed and left no matching message.
    #[doc(alias = "psm2_mq_iprobe")]
    #[doc(alias = "psm2_mq_iprobe2")]
    pub fn probe(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
    ) -> Result<Option<Envelope>, OpError> {
        Ok(self.look_for(source, tag, ignore)?.map(|(_, message)| self.state.envelope(&message)))
    }

    /// Like [`probe`](Self::probe), but claims the message: other receives and probes skip it.
    /// Claimed messages may be [received](Self::mrecv) in any order.
    ///
    /// # Errors
    /// The errors of [`probe`](Self::probe).
    #[doc(alias = "psm2_mq_improbe")]
    #[doc(alias = "psm2_mq_improbe2")]
    pub fn mprobe(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
    ) -> Result<Option<Claimed>, OpError> {
        if self.look_for(source, tag, ignore)?.is_none() {
            return Ok(None);
        }
        let state = &mut self.state;
        let protocol = state.protocol.as_mut().ok_or(OpError::NoMatching)?;
        let claimed = protocol.matcher.mprobe(source.map(|peer| peer.index as u32), tag, ignore);
        let Some((id, message)) = claimed.map_err(refused)? else { return Ok(None) };
        Ok(Some(Claimed { envelope: state.envelope(&message), id }))
    }

    /// Receives a claimed message, like [`recv`](Self::recv).
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if the message was received or discarded before, or if its sender
    /// was removed. While the connection to the sender closes, and after the sender has failed, the
    /// call returns a receive that has failed instead. Otherwise the errors of `recv`; the message
    /// then stays claimed.
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn mrecv(
        &mut self,
        message: Claimed,
        into: impl Into<Destination>,
        word: u64,
    ) -> Result<Request, OpError> {
        let requests = self.state.protocol.as_mut().map(|protocol| &mut protocol.requests);
        let index = requests.ok_or(OpError::NoMatching)?.slots.take().ok_or(OpError::Again)?;
        let received = self.mrecv_in(index, message, into.into(), word);
        if received.is_err()
            && let Some(protocol) = &mut self.state.protocol
        {
            protocol.requests.slots.free(index);
        }
        received
    }

    /// [`mrecv`](Self::mrecv), in a taken slot. An error leaves the slot as it was.
    pub(crate) fn mrecv_in(
        &mut self,
        index: u32,
        message: Claimed,
        into: Destination,
        word: u64,
    ) -> Result<Request, OpError> {
        let (buffer, device) = self.buffer_anywhere(into)?;
        let state = &mut self.state;
        let protocol = state.protocol.as_mut().ok_or(OpError::NoMatching)?;
        let Ok(arrived) = protocol.matcher.take(message.id) else {
            // While a connection closes, claimed messages are refused too.
            let Envelope { source, tag, len } = message.envelope;
            let lost = state.peer_mut(source).and_then(|slot| slot.usable().err());
            let Some(OpError::PeerFailed(why)) = lost else { return Err(OpError::StaleToken) };
            let Some(protocol) = &mut state.protocol else { return Err(OpError::NoMatching) };
            let slot = &mut protocol.requests.slots[index as usize];
            let request = slot.receive(&buffer, word, ReceiveId::NONE);
            (slot.source, slot.tag, slot.len) = (Sender::new(source), tag, len);
            state.fail_receive(index, Received::Failed(Fault::Peer(why)));
            return Ok(request);
        };
        let slot = &mut protocol.requests.slots[index as usize];
        let request = slot.receive(&buffer, word, ReceiveId::NONE);
        match device {
            true => state.deliver_device(index, arrived.tag, Kept::unpack(arrived.cookie)),
            false => state.deliver(index, arrived.tag, Kept::unpack(arrived.cookie)),
        }
        self.after_match();
        Ok(request)
    }

    /// Discards a claimed message. A synchronous or rendezvous send of the message completes with
    /// nothing delivered. There is no status to take.
    ///
    /// # Errors
    /// The errors of [`mrecv`](Self::mrecv), because discarding briefly uses a receive slot.
    #[doc(alias = "FI_DISCARD")]
    pub fn discard(&mut self, message: Claimed) -> Result<(), OpError> {
        self.mrecv(message, Destination::Nothing, 0).map(|request| self.forget(request))
    }

    pub(crate) fn forget(&mut self, request: Request) {
        if let Some(protocol) = &mut self.state.protocol
            && let Ok(index) = protocol.requests.find(request)
        {
            let slot = &mut protocol.requests.slots[index as usize];
            slot.unclaimed = true;
            if slot.stage == Stage::Ended {
                protocol.requests.take(index);
            }
        }
    }

    /// Returns whether the payload of a matched message is still in flight. Slow path: scans every
    /// receive.
    pub(in super::super) fn is_receiving(&self) -> bool {
        let protocol = self.state.protocol.as_ref();
        protocol
            .is_some_and(|protocol| protocol.requests.slots.iter().any(super::RecvSlot::is_moving))
    }

    /// Cancels a receive that has not matched. Cancelled or not, the receive completes once, and
    /// its status must be taken. Neither blocks nor makes progress.
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if the status was taken before. [`OpError::NoMatching`] without
    /// matching.
    #[doc(alias = "psm2_mq_cancel")]
    #[doc(alias = "fi_cancel")]
    pub fn cancel(&mut self, request: Request) -> Result<Cancelled, OpError> {
        let protocol = self.state.protocol.as_mut().ok_or(OpError::NoMatching)?;
        let index = protocol.requests.find(request)?;
        let slot = &mut protocol.requests.slots[index as usize];
        if slot.stage != Stage::Posted {
            return Ok(Cancelled::AlreadyMatched);
        }
        match protocol.matcher.cancel(slot.posted) {
            Cancel::Removed(_) => {
                slot.spoil(Received::Cancelled);
                protocol.requests.end(index, &mut self.state.pending.ends);
                Ok(Cancelled::Removed)
            }
            Cancel::AlreadyMatched | Cancel::Stale => Ok(Cancelled::AlreadyMatched),
        }
    }

    /// [Cancels](Self::cancel) the receive that was posted with this word. Slow path: scans every
    /// receive.
    pub(in super::super) fn cancel_word(&mut self, word: u64) -> Result<Cancelled, OpError> {
        let protocol = self.state.protocol.as_ref().ok_or(OpError::NoMatching)?;
        let mut slots = protocol.requests.slots.taken();
        let slot = slots.find(|(_, slot)| slot.word == word).ok_or(OpError::StaleToken)?.1;
        let request = Request(slot.name.word());
        drop(slots);
        self.cancel(request)
    }

    /// Takes the status of a receive, or returns `None` if the receive has not ended. Does not make
    /// progress.
    ///
    /// # Errors
    /// [`OpError::StaleToken`] if the status was taken before.
    #[doc(alias = "psm2_mq_test2")]
    #[inline(always)]
    pub fn test_recv(&mut self, request: Request) -> Result<Option<Status>, OpError> {
        let protocol = self.state.protocol.as_mut().ok_or(OpError::NoMatching)?;
        let index = protocol.requests.find(request)?;
        if protocol.requests.slots[index as usize].stage != Stage::Ended {
            return Ok(None);
        }
        Ok(Some(protocol.requests.take(index)))
    }

    /// Returns the status of the first ended receive that was not taken. Does not make progress.
    #[doc(alias = "psm2_mq_ipeek2")]
    #[inline]
    pub fn peek_recv(&self) -> Option<Status> {
        let requests = &self.state.protocol.as_ref()?.requests;
        requests.oldest().map(|index| requests.status(index))
    }

    /// Takes the status of the receive that ended first. Does not make progress.
    #[doc(alias = "psm2_mq_ipeek_dequeue")]
    #[inline(always)]
    pub fn next_recv(&mut self) -> Option<Status> {
        self.state.protocol.as_mut()?.requests.take_oldest()
    }

    /// Waits until a receive has ended, and takes its status. `deadline_ns` is in the clock of
    /// [`Host::now_ns`]; `u64::MAX` means no deadline. Makes progress meanwhile. The first passes
    /// do not read the clock.
    ///
    /// # Errors
    /// - [`WaitError::Deadline`]: the receive is still posted; wait again.
    /// - [`OpError::StaleToken`]: its status was already taken.
    #[doc(alias = "psm2_mq_wait2")]
    #[inline]
    pub fn wait_recv<H: Host, P: Park>(
        &mut self,
        request: Request,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<Status, WaitError> {
        let index = match &self.state.protocol {
            Some(protocol) => protocol.requests.find(request)?,
            None => return Err(OpError::NoMatching.into()),
        };
        for _ in 0..QUICK_PASSES {
            if let Some(protocol) = &mut self.state.protocol
                && protocol.requests.slots[index as usize].stage == Stage::Ended
            {
                return Ok(protocol.requests.take(index));
            }
            self.progress();
        }
        self.wait_recv_slow(request, waiter, deadline_ns)
    }

    #[cold]
    fn wait_recv_slow<H: Host, P: Park>(
        &mut self,
        request: Request,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<Status, WaitError> {
        let found = self.block(waiter, deadline_ns, |e| e.test_recv(request).transpose());
        match found {
            Some(found) => Ok(found?),
            None => {
                let stuck = self.missing(None);
                Err(WaitError::Deadline(Stuck { awaits: Awaited::Message, ..stuck }))
            }
        }
    }

    #[inline(always)]
    fn buffer(&self, into: Destination) -> Result<Buffer, OpError> {
        match into {
            Destination::Region(at, len) => {
                let ptr = resolve_local(self.state.locals, at, len as u64)?.as_ptr();
                Ok(Buffer { ptr, len: len as u64, region: at.region.index() as u16 })
            }
            Destination::Span(span) => Ok(Buffer::span(span)),
            Destination::Nothing => Ok(Buffer::NONE),
        }
    }

    /// Makes a pass and searches again if no message is found.
    fn look_for(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
    ) -> Result<Option<(UnexpectedId, Arrived)>, OpError> {
        for last in [false, true] {
            if let Some(source) = source {
                self.state.receivable(source, tag, ignore)?;
            }
            let protocol = self.state.protocol.as_mut().ok_or(OpError::NoMatching)?;
            let found = protocol.matcher.probe(source.map(|peer| peer.index as u32), tag, ignore);
            let found = found.map_err(refused)?;
            if found.is_some() || last {
                return Ok(found);
            }
            self.progress();
        }
        Ok(None)
    }

    #[inline(never)]
    pub(super) fn after_match(&mut self) {
        if self.state.has_chores() {
            self.serve_protocol();
            self.flush();
        }
    }
}

fn refused(error: TagError) -> OpError {
    match error {
        TagError::TooWide => OpError::TagTooWide,
        _ => OpError::Again,
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// A receive may name a failed peer that left a matching message.
    #[inline(always)]
    fn receivable(&mut self, source: PeerId, tag: Tag, ignore: Tag) -> Result<(), OpError> {
        match self.peers.get(source.index as usize) {
            Some(slot) if slot.generation == source.generation => match slot.state {
                PeerState::Closing if self.has_said_bye(source.index) => {
                    let closed = OpError::PeerFailed(PeerError::Closed);
                    self.left_behind(source, tag, ignore).ok_or(closed)
                }
                PeerState::Connected | PeerState::Meeting | PeerState::Closing => Ok(()),
                PeerState::Failed(why) => {
                    self.left_behind(source, tag, ignore).ok_or(OpError::PeerFailed(why))
                }
                PeerState::Reserved | PeerState::Free => Err(OpError::UnknownPeer),
            },
            _ => Err(OpError::UnknownPeer),
        }
    }

    #[cold]
    fn left_behind(&mut self, source: PeerId, tag: Tag, ignore: Tag) -> Option<()> {
        let protocol = self.protocol.as_mut()?;
        protocol.matcher.probe(Some(source.index as u32), tag, ignore).ok().flatten().map(drop)
    }

    fn envelope(&self, message: &Arrived) -> Envelope {
        let source = match (Kept::unpack(message.cookie), &self.protocol) {
            (Kept::Block(index), Some(protocol)) => protocol.blocks.slots[index as usize].source,
            (Kept::Header(index), Some(protocol)) => protocol.headers.slots[index as usize].source,
            (_, None) => PeerId { index: message.source as u16, generation: 0 },
        };
        Envelope { source, tag: message.tag, len: message.len }
    }
}
