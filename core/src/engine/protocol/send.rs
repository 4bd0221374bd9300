//! Sending. A message is posted at once if possible. Otherwise it is queued on its stream, and a
//! later pass posts it. Nothing here blocks. A call that returns an error has sent nothing.

use core::ptr::NonNull;

use crate::error::OpError;
use crate::mem::{LocalAddr, Peer, PeerId, Span, Untrusted};
use crate::op::Outcome;
use crate::rail::{Posted, Rail};
use crate::sync::seq::truncate;

use super::super::list::NONE;
use super::super::pending::OpKind;
use super::super::post::Blocked;
use super::super::post_tag::{GENERATION_MASK, Owner, PostTag};
use super::super::stream::{Stream, kept};
use super::super::submit::{Issued, Notice};
use super::super::table::{PeerSlot, PeerState, locate, resolve_local};
use super::super::tag::Tag;
use super::super::{ContextId, Engine, State};
use super::head::{self, Head, LONGEST};
use super::request::{Received, Request};
use super::slot::{Stage, UNREGISTERED};
use super::stock::{Account, SHORT};

/// The payload of a send.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Bytes that may be reused on return, even after an error. Their number is at most the peer's
    /// [`Engine::eager_max`].
    Bytes(&'a [u8]),
    /// This many bytes at an address. Keep them registered and unchanged until the send is done.
    Region(LocalAddr, usize),
    /// Memory that is not registered, of any length.
    Span(Span),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Eager,
    /// Sent with its payload. Completes once a receive has matched.
    Sync,
    /// Sent as a header. The receiver reads the payload.
    Request,
    /// Sent with its payload, as a short message that the receiver has granted.
    Short,
}

/// Who posts a message at once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    Program,
    /// A matched queue, which needs no request.
    Queue,
    /// A matched queue, for a request with this word.
    Request(u64),
}

/// How the end of a send is reported.
#[derive(Clone, Copy)]
pub(crate) enum SendEnd {
    Notice(Notice),
    /// The send ends this request, which is in stage [`Sending`](Stage::Sending).
    Request(Request),
}

impl From<Notice> for SendEnd {
    fn from(notice: Notice) -> Self {
        SendEnd::Notice(notice)
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Sends a tagged message. Messages of one context to one peer match in the order sent. The
    /// peer may be this engine. Neither blocks nor allocates.
    ///
    /// After [`Issued::Done`] the payload may be reused. The message is in flight, and
    /// [`quiet`](Self::quiet) waits for its arrival.
    ///
    /// After [`Issued::Pending`] do not change a region's payload until the send has completed. The
    /// [`Completion`](crate::op::Completion) has the number of bytes that the receiver read. With
    /// [`Notice::Silent`] there is no completion: only `quiet` waits until the receiver has read
    /// the payload.
    ///
    /// # Errors
    /// - [`OpError::NoMatching`]: the engine has no matching.
    /// - [`OpError::TooLong`]: a slice is longer than the eager limit.
    /// - [`OpError::Again`]: no room in rails or tables, or no header room at the receiver.
    /// - [`OpError::Rail`]: a rail permanently rejected a slice.
    /// - The error of an invalid context, region or peer.
    #[doc(alias = "psm2_mq_isend")]
    #[doc(alias = "psm2_mq_isend2")]
    #[doc(alias = "psm2_mq_send2")]
    #[doc(alias = "fi_tsend")]
    // The slow path is out of line, so that its stack frame costs the fast path no stores.
    #[inline(always)]
    pub fn send(
        &mut self,
        context: ContextId,
        to: PeerId,
        tag: Tag,
        payload: Payload<'_>,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        match self.send_eager(context, to, tag, payload) {
            Some(issued) => Ok(issued),
            None => {
                self.send_slow(context, to, tag, payload, notice.into(), false).map(|sent| sent.0)
            }
        }
    }

    /// Like [`send`](Self::send), but completes only once a receive has matched, even if the peer
    /// is this engine. Never returns [`Issued::Done`]. The completion has the number of bytes that
    /// the receiver took.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send). A slice needs a free block of
    /// [`MatchMemory::outgoing`](super::MatchMemory::outgoing); without one, [`OpError::Again`].
    #[doc(alias = "PSM2_MQ_FLAG_SENDSYNC")]
    #[doc(alias = "fi_tsendmsg")]
    pub fn send_sync(
        &mut self,
        context: ContextId,
        to: PeerId,
        tag: Tag,
        payload: Payload<'_>,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        self.send_slow(context, to, tag, payload, notice.into(), true).map(|sent| sent.0)
    }

    /// Posts a message up to the eager limit at once, like [`send`](Self::send). The message needs
    /// a credit, a stream with nothing unposted, and a rail with room. Returns `None` if nothing
    /// was done: call `send` then. Hot path.
    #[inline(always)]
    pub fn send_eager(
        &mut self,
        context: ContextId,
        to: PeerId,
        tag: Tag,
        payload: Payload<'_>,
    ) -> Option<Issued> {
        let (value, ..) = self.post_eager(context, to, tag, payload, Caller::Program)?;
        Some(Issued::Done { value })
    }

    /// Like [`send_eager`](Self::send_eager). Returns the length, the rails to the peer, and the
    /// completed request of [`Caller::Request`]. For other callers the request has no meaning.
    #[inline(always)]
    pub(crate) fn post_eager(
        &mut self,
        context: ContextId,
        to: PeerId,
        tag: Tag,
        payload: Payload<'_>,
        caller: Caller,
    ) -> Option<(u64, u16, Request)> {
        let (from, len) = match payload {
            Payload::Bytes(bytes) => (bytes.as_ptr(), bytes.len()),
            Payload::Span(span) => (span.ptr().as_ptr().cast_const(), span.len()),
            Payload::Region(at, len) => {
                let from = resolve_local(self.state.locals, at, len as u64).ok()?;
                (from.as_ptr().cast_const(), len)
            }
        };
        let bytes = (head::HEAD + len) as u32;
        let state = &mut self.state;
        let rails = match state.peers.get(to.index as usize) {
            Some(PeerSlot { state: PeerState::Connected, generation, rails, .. })
                if *generation == to.generation =>
            {
                *rails
            }
            _ => return None,
        };
        let rail = state.pick_from(
            to.index,
            rails & !state.too_short(to.index, bytes),
            0,
            bytes as u64,
        )?;
        let stream = context.0 as usize * state.peers.len() + to.index as usize;
        let protocol = state.protocol.as_mut()?;
        let account = protocol.accounts.get_mut(stream)?;
        // An unconfigured context has no stream.
        let s = state.streams.get_mut(stream)?;
        if s.unposted != NONE
            || s.fence & kept(RAILS) != 0
            || s.in_flight() >= state.config.window as u64
            || len > account.takes.eager as usize
            || account.used() >= account.takes.credits
        {
            return None;
        }
        // A send of a queue waits behind deferred sends.
        if caller != Caller::Program && protocol.requests.waiting != 0 {
            return None;
        }
        let request = match caller {
            Caller::Request(word) => protocol.requests.take_sent(to, tag, len as u64, word)?,
            Caller::Program | Caller::Queue => Request(0),
        };
        let head = Head {
            word: s.word(state.mask),
            ack: truncate::<32>(s.window.expected().0),
            freed: account.returned,
            ..Head::tagged(head::TAGGED, context.0, tag)
        };
        let owner = Owner::Control(Peer(to.index), to.generation & GENERATION_MASK);
        // SAFETY: `from` and `len` are a slice, a span, or a range that `resolve_local` checked
        // against its region.
        let body = unsafe { Untrusted::new(from, len) };
        let cx = PostTag { owner, bytes }.pack();
        let through = &mut self.rails[rail];
        let Ok(posted) = through.post_message(Peer(to.index), &head.write(), body, cx) else {
            if let Caller::Request(_) = caller {
                protocol.requests.release(request.0 as u32);
            }
            return None;
        };
        // Flush only this rail. Other rails hold nothing back between two calls.
        through.flush();
        if posted == Posted::Pending {
            state.loads.posted(rail, bytes as u64);
        }
        account.sent = account.sent.wrapping_add(1);
        sent_at_once(s, account, &mut state.open);
        Some((len as u64, rails, request))
    }

    /// Sends without the fast path.
    #[inline(never)]
    pub(crate) fn send_slow(
        &mut self,
        context: ContextId,
        to: PeerId,
        tag: Tag,
        payload: Payload<'_>,
        end: SendEnd,
        sync: bool,
    ) -> Result<(Issued, Form), OpError> {
        let state = &mut self.state;
        if context.0 as u16 >= state.config.contexts {
            return Err(OpError::UnknownContext);
        }
        let protocol = state.protocol.as_mut().ok_or(OpError::NoMatching)?;
        let (len, region, device) = match payload {
            Payload::Bytes(bytes) => (bytes.len(), UNREGISTERED, false),
            Payload::Span(span) => (span.len(), UNREGISTERED, false),
            Payload::Region(at, len) => {
                let (_, device) = locate(state.locals, at, len as u64)?;
                (len, at.region.index() as u16, device)
            }
        };
        let slot =
            state.peers.get(to.index as usize).filter(|slot| slot.generation == to.generation);
        slot.ok_or(OpError::UnknownPeer)?.usable()?;
        let stream = context.0 as u32 * state.peers.len() as u32 + to.index as u32;
        let account = &mut protocol.accounts[stream as usize];
        // Payloads in device memory are never eager.
        let eager = len <= account.takes.eager as usize && !device;
        if !eager && matches!(payload, Payload::Bytes(_)) {
            return Err(OpError::TooLong { len, max: account.takes.eager as usize });
        }
        let credit = account.used() < account.takes.credits;
        let form = match (eager && credit, sync) {
            (true, false) => Form::Eager,
            (true, true) => Form::Sync,
            (false, false) if eager && len <= SHORT && account.shorts_left() != 0 => Form::Short,
            (false, _) => Form::Request,
        };
        if matches!(form, Form::Eager | Form::Short)
            && let Payload::Bytes(bytes) = payload
            && state.streams[stream as usize].fence & kept(RAILS) == 0
        {
            return self.send_bytes(stream, to, tag, bytes, form).map(|issued| (issued, form));
        }
        if form == Form::Request && account.asked >= account.takes.headers {
            return Err(OpError::Again);
        }
        let source = PeerId { index: to.index, generation: to.generation };
        let mut outgoing = NONE;
        let local = match payload {
            Payload::Region(at, len) => locate(state.locals, at, len as u64)?.0.as_ptr(),
            Payload::Span(span) => span.ptr().as_ptr(),
            Payload::Bytes([]) => NonNull::dangling().as_ptr(),
            // The last block is reserved for receives into device memory, because they can end
            // without waiting for a send.
            Payload::Bytes(_) if state.devices != 0 && protocol.outgoing.is_last() => {
                return Err(OpError::Again);
            }
            Payload::Bytes(bytes) => {
                outgoing =
                    protocol.outgoing.take(stream, source, len as u32, 0).ok_or(OpError::Again)?;
                let block = protocol.outgoing.bytes(outgoing);
                // SAFETY: `take` has just reserved the block for this send alone. The block holds
                // `eager` bytes, and the slice was checked to be no longer.
                unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), block, len) };
                block
            }
        };
        let Some(index) = state.pending.slots.take() else {
            if outgoing != NONE {
                protocol.outgoing.free(outgoing);
            }
            return Err(OpError::Again);
        };
        match form {
            Form::Eager => protocol.stats.eager += 1,
            Form::Short => {
                protocol.stats.eager += 1;
                account.shorts_sent = account.shorts_sent.wrapping_add(1);
            }
            Form::Sync => {}
            Form::Request => {
                protocol.stats.rendezvous += 1;
                protocol.stats.credits_exhausted += eager as u64;
                account.asked += 1;
            }
        }
        if matches!(form, Form::Eager | Form::Sync) {
            account.sent = account.sent.wrapping_add(1);
        }
        let slot = &mut state.pending.slots[index as usize];
        match end {
            SendEnd::Notice(notice) => slot.set_open(stream, OpKind::Send, notice),
            SendEnd::Request(request) => {
                slot.set_open(stream, OpKind::Send, Notice::Silent);
                (slot.inner, slot.tag) = (true, request.0);
            }
        }
        (slot.local, slot.local_region, slot.left) = (local, region, len as u64);
        (slot.form, slot.envelope, slot.outgoing) = (form, tag, outgoing);
        slot.fetch = matches!(form, Form::Sync | Form::Request);
        let s = &mut state.streams[stream as usize];
        s.ops.push(&mut state.pending.slots, index);
        if s.unposted == NONE {
            s.unposted = index;
        }
        s.open += 1;
        state.open += 1;
        let token = state.pending.slots[index as usize].token();
        self.advance(stream);
        self.flush();
        Ok((Issued::Pending(token), form))
    }

    /// Posts bytes that have a credit or a grant, on any rail. Fails if no rail accepts them,
    /// because no copy is kept for a retry.
    fn send_bytes(
        &mut self,
        stream: u32,
        to: PeerId,
        tag: Tag,
        bytes: &[u8],
        form: Form,
    ) -> Result<Issued, OpError> {
        let s = &self.state.streams[stream as usize];
        if s.unposted != NONE || s.in_flight() >= self.state.config.window as u64 {
            return Err(OpError::Again);
        }
        let word = s.word(self.state.mask);
        let kind = if form == Form::Short { head::SHORT } else { head::TAGGED };
        let head = Head { word, ..Head::tagged(kind, s.context, tag) };
        let owner = Owner::Control(Peer(to.index), to.generation & GENERATION_MASK);
        let (mut out, payload) = ([0; LONGEST], Untrusted::from_slice(bytes));
        match self.post_headed(stream, to.index, head, &mut out, head::HEAD, payload, owner) {
            Ok(_) => {}
            Err(Blocked::Refused(rail, error)) => return Err(OpError::Rail(rail, error)),
            Err(Blocked::PeerDown) => {
                let lost = self.state.peers[to.index as usize].usable().err();
                return Err(lost.unwrap_or(OpError::UnknownPeer));
            }
            Err(
                Blocked::Window
                | Blocked::Fence
                | Blocked::Atomic
                | Blocked::Rail
                | Blocked::Budget,
            ) => {
                // Nothing is in flight, and the caller may try again until there is room.
                self.state.awaits_slot(to.index);
                return Err(OpError::Again);
            }
        }
        let state = &mut self.state;
        if let Some(protocol) = &mut state.protocol {
            let account = &mut protocol.accounts[stream as usize];
            let total =
                if form == Form::Short { &mut account.shorts_sent } else { &mut account.sent };
            *total = total.wrapping_add(1);
            sent_at_once(&mut state.streams[stream as usize], account, &mut state.open);
        }
        self.flush();
        Ok(Issued::Done { value: bytes.len() as u64 })
    }
}

/// An eager message takes the next number, and carries the cursor and all returned credits. It
/// needs no slot: the stream counts as `open` until the message is acknowledged.
///
/// Writes few cache lines, and only fields that change. Stores retire in program order. So while a
/// store to a lane waits for its cache line, all later stores wait too.
#[inline(always)]
fn sent_at_once(s: &mut Stream, account: &mut Account, open: &mut u32) {
    let cursor = s.window.expected();
    account.at_once += 1;
    // If nothing is owed, `age` is already 0.
    if s.ack_sent != cursor || account.owed() != 0 {
        account.told = account.returned;
        (s.ack_sent, s.age) = (cursor, 0);
    }
    s.next = s.next.plus(1);
    s.silent_end = s.next;
    if !s.silent {
        *open += s.silent_until_next();
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Ends the request of a send.
    pub(in super::super) fn request_over(&mut self, op: u32) {
        let slot = &mut self.pending.slots[op as usize];
        slot.inner = false;
        let Some(protocol) = &mut self.protocol else { return };
        let Ok(index) = protocol.requests.find(Request(slot.tag)) else { return };
        let request = &mut protocol.requests.slots[index as usize];
        if request.stage != Stage::Sending {
            return;
        }
        match slot.outcome {
            Outcome::Done => {}
            Outcome::Failed(fault) => request.spoil(Received::Failed(fault)),
            Outcome::Unknown(fault) => request.spoil(Received::Unknown(fault)),
        }
        protocol.requests.end(index, &mut self.pending.ends);
    }

    pub(in super::super) fn stop_pulling(&mut self, index: u32) {
        let Some(protocol) = &mut self.protocol else { return };
        if core::mem::take(&mut self.pending.slots[index as usize].pulled) {
            protocol.pulled.remove(&mut self.pending.slots, index);
        }
    }

    pub(in super::super) fn send_over(&mut self, index: u32) {
        let Some(protocol) = &mut self.protocol else { return };
        let slot = &mut self.pending.slots[index as usize];
        let (stream, form, outgoing, numbered) =
            (slot.stream, slot.form, slot.outgoing, slot.numbered);
        if outgoing != NONE {
            slot.outgoing = NONE;
            protocol.outgoing.free(outgoing);
        }
        self.stop_pulling(index);
        let Some(protocol) = &mut self.protocol else { return };
        let Some(account) = protocol.accounts.get_mut(stream as usize) else { return };
        match form {
            Form::Request => account.asked = account.asked.saturating_sub(1),
            // The message was never posted, so its credit will not be returned.
            Form::Eager | Form::Sync if !numbered => account.sent = account.sent.wrapping_sub(1),
            Form::Short if !numbered => account.shorts_sent = account.shorts_sent.wrapping_sub(1),
            Form::Eager | Form::Sync | Form::Short => {}
        }
    }
}
