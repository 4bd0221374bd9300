//! The slow path of operations: checks them, returns specific errors, and completes them at once if
//! the rail can copy. Other operations are queued on their stream, to be posted in order.

use core::ptr::NonNull;

use crate::error::{OpError, PostError};
use crate::mem::{LocalAddr, Peer, RailId, RemoteAddr, Untrusted};
use crate::op::{Amo, Outcome};
use crate::rail::{Local, Rail, Remote};

use super::super::failover::COPY;
use super::super::list::NONE;
use super::super::pending::{OpKind, State as Stage};
use super::super::stream::{KEPT, MESSAGES, WRITES};
use super::super::table::{RemoteSlot, resolve_local, resolve_remote};
use super::super::wire::{Body, NO_TOKEN, Place};
use super::super::{ContextId, Engine, State};
use super::{Issued, Mapped, Notice, Signal, Transfer, copy_bytes};

mod device;
mod native;
mod now;

pub use now::NOW_MAX;

#[derive(Clone, Copy)]
pub(super) struct Target {
    pub peer: u16,
    pub region: u16,
    pub theirs: (u16, u16),
    pub rail: u8,
    pub offset: u64,
    /// Where the range is mapped here, or null.
    pub mapped: *mut u8,
}

#[derive(Clone, Copy)]
struct Ask {
    kind: OpKind,
    local: *mut u8,
    local_region: u16,
    remote: u16,
    offset: u64,
    /// Bytes of data, posted as writes, as reads, or in the message.
    left: u64,
    message: Option<Body>,
    fetch: bool,
}

impl Ask {
    const NOTHING: Ask = Ask {
        kind: OpKind::Message,
        local: core::ptr::null_mut(),
        local_region: 0,
        remote: 0,
        offset: 0,
        left: 0,
        message: None,
        fetch: false,
    };
}

impl Target {
    fn mapped(&self) -> Option<Mapped> {
        (!self.mapped.is_null()).then_some(Mapped {
            ptr: self.mapped,
            peer: self.peer,
            rail: self.rail,
        })
    }

    fn place(&self) -> Place {
        Place { region: self.theirs.0, generation: self.theirs.1, offset: self.offset }
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    #[inline(never)]
    pub(super) fn put_slow(&mut self, transfer: Transfer) -> Result<Issued, OpError> {
        let Transfer { context, local: from, len, remote: to, notice } = transfer;
        if let Notice::Report(_) = notice
            && !R::COPIES
            && let Some(issued) = self.put_single(context, from, len, to, notice)
        {
            self.flush();
            return Ok(issued);
        }
        let Ok(source) = resolve_local(self.state.locals, from, len as u64) else {
            return self.put_device(context, from, len, to, None, notice);
        };
        let Ok(target) = self.target(to, len as u64) else {
            return self.put_device(context, from, len, to, None, notice);
        };
        let stream = self.stream(context, target.peer)?;
        if self.is_idle(stream)
            && let Some(done) = self.write_now(source, len, &target)
        {
            return done.map(|()| Issued::Done { value: 0 });
        }
        if let Some(issued) =
            self.write_single(stream, source, from.region.index(), len, &target, notice, 0)
        {
            self.flush();
            return Ok(issued);
        }
        let ask = Ask {
            kind: OpKind::Write,
            local: source.as_ptr(),
            local_region: from.region.index() as u16,
            remote: target.region,
            offset: target.offset,
            left: len as u64,
            ..Ask::NOTHING
        };
        self.enqueue(stream, ask, notice)
    }

    /// Posts a [`put_signal`](Self::put_signal) for which
    /// [`put_signal_mapped`](Self::put_signal_mapped) has returned `None`. The operation is posted
    /// now or in a later pass.
    #[inline(never)]
    pub fn put_signal_posted(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let Ok(source) = resolve_local(self.state.locals, from, len as u64) else {
            return self.put_device(context, from, len, to, Some(signal), notice);
        };
        let Ok(target) = self.target(to, len as u64) else {
            return self.put_device(context, from, len, to, Some(signal), notice);
        };
        let Ok(word) = self.word(signal.at, 8) else {
            return self.put_device(context, from, len, to, Some(signal), notice);
        };
        if word.peer != target.peer {
            return Err(OpError::TwoPeers);
        }
        let stream = self.stream(context, target.peer)?;
        if self.is_idle(stream)
            && let Some(mapped) = word.mapped()
            && let Some(done) = self.write_now(source, len, &target)
        {
            done?;
            self.signal_now(mapped, signal.op, signal.value);
            return Ok(Issued::Done { value: 0 });
        }
        let eager = self.state.is_eager(target.peer, len as u64);
        let data = eager.then_some((target.place(), len as u32));
        let message = Body::Signal { at: word.place(), op: signal.op, value: signal.value, data };
        if eager || len == 0 {
            // SAFETY: `resolve_local` checked the source. The rail copies a message before its post
            // returns.
            let payload = unsafe { Untrusted::new(source.as_ptr(), len) };
            if let Some(issued) = self.message_single(stream, message, payload, MESSAGES, notice) {
                self.flush();
                return Ok(issued);
            }
        }
        let ask = Ask {
            kind: if eager { OpKind::Message } else { OpKind::Write },
            message: Some(message),
            local: source.as_ptr(),
            local_region: from.region.index() as u16,
            remote: target.region,
            offset: target.offset,
            left: len as u64,
            ..Ask::NOTHING
        };
        self.enqueue(stream, ask, notice)
    }

    /// Posts a [`signal`](Self::signal) for which [`signal_mapped`](Self::signal_mapped) has
    /// returned `None`. The operation is posted now or in a later pass.
    #[inline(never)]
    pub fn signal_posted(
        &mut self,
        context: ContextId,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let Ok(word) = self.word(signal.at, 8) else {
            return self.signal_device(context, signal, notice);
        };
        let stream = self.stream(context, word.peer)?;
        if self.is_idle(stream)
            && let Some(mapped) = word.mapped()
        {
            self.signal_now(mapped, signal.op, signal.value);
            return Ok(Issued::Done { value: 0 });
        }
        let message =
            Body::Signal { at: word.place(), op: signal.op, value: signal.value, data: None };
        if let Some(issued) =
            self.message_single(stream, message, Untrusted::from_slice(&[]), 0, notice)
        {
            self.flush();
            return Ok(issued);
        }
        self.enqueue(stream, Ask { message: Some(message), ..Ask::NOTHING }, notice)
    }

    #[inline(never)]
    pub(super) fn get_slow(
        &mut self,
        context: ContextId,
        into: LocalAddr,
        len: usize,
        from: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let Ok(local) = resolve_local(self.state.locals, into, len as u64) else {
            return self.get_device(context, into, len, from, notice);
        };
        let Ok(target) = self.target(from, len as u64) else {
            return self.get_device(context, into, len, from, notice);
        };
        let stream = self.stream(context, target.peer)?;
        if self.is_idle(stream)
            && let Some(done) = self.read_now(local, len, &target)
        {
            return done.map(|()| Issued::Done { value: 0 });
        }
        let ask = Ask {
            kind: OpKind::Read,
            local: local.as_ptr(),
            local_region: into.region.index() as u16,
            remote: target.region,
            offset: target.offset,
            left: len as u64,
            ..Ask::NOTHING
        };
        self.enqueue(stream, ask, notice)
    }

    #[inline(always)]
    fn target(&self, addr: RemoteAddr, len: u64) -> Result<Target, OpError> {
        let slot: &RemoteSlot<RAILS> = resolve_remote(self.state.remotes, addr, len)?;
        let mapped = if slot.mapped.is_null() {
            slot.mapped
        } else {
            slot.mapped.wrapping_add(addr.offset as usize)
        };
        Ok(Target {
            peer: slot.peer,
            region: addr.region.index() as u16,
            theirs: slot.theirs,
            rail: slot.rail,
            offset: addr.offset,
            mapped,
        })
    }

    #[inline]
    fn word(&self, addr: RemoteAddr, width: u8) -> Result<Target, OpError> {
        if addr.offset & (width as u64 - 1) != 0 {
            return Err(OpError::Misaligned { offset: addr.offset, width });
        }
        self.target(addr, width as u64)
    }

    #[inline(always)]
    pub(super) fn stream(&self, context: ContextId, peer: u16) -> Result<u32, OpError> {
        if context.0 as u16 >= self.state.config.contexts {
            return Err(OpError::UnknownContext);
        }
        Ok(self.state.stream_of(context.0, peer))
    }

    #[inline(always)]
    fn usable(&self, peer: u16) -> Result<(), OpError> {
        self.state.peers.get(peer as usize).ok_or(OpError::UnknownPeer)?.usable()
    }

    /// Returns whether the stream has nothing in flight. If so, a direct access preserves order.
    #[inline(always)]
    fn is_idle(&self, stream: u32) -> bool {
        self.state.streams.get(stream as usize).is_some_and(|stream| stream.open == 0)
    }

    #[inline]
    fn write_now(
        &mut self,
        from: NonNull<u8>,
        len: usize,
        to: &Target,
    ) -> Option<Result<(), OpError>> {
        if !to.mapped.is_null() {
            // SAFETY: `from` was checked against its registered region, and `mapped` against the
            // imported one. The rail keeps the mapping until the peer is detached. When a peer
            // fails, its regions are marked unmapped first.
            unsafe { copy_bytes(from.as_ptr(), to.mapped, len) };
            self.state.direct = true;
            return Some(Ok(()));
        }
        let (rail, local, remote) = self.unmapped(from, len, to)?;
        // SAFETY: the source is in a registered region, or is a slice of the caller that outlives
        // this call.
        let done = unsafe { self.rails.get_mut(rail)?.copy_to(Peer(to.peer), &[(local, remote)]) }?;
        self.state.direct = true;
        Some(done.map_err(|error| self.state.refused(rail, to.peer, error)))
    }

    #[inline]
    fn read_now(
        &mut self,
        into: NonNull<u8>,
        len: usize,
        from: &Target,
    ) -> Option<Result<(), OpError>> {
        if !from.mapped.is_null() {
            // SAFETY: `into` was checked against its registered region, and `mapped` against the
            // imported one. The rail keeps the mapping until the peer is detached.
            unsafe { copy_bytes(from.mapped, into.as_ptr(), len) };
            return Some(Ok(()));
        }
        let (rail, local, remote) = self.unmapped(into, len, from)?;
        // SAFETY: the destination was checked against its registered region.
        let done =
            unsafe { self.rails.get_mut(rail)?.copy_from(Peer(from.peer), &[(local, remote)]) }?;
        Some(done.map_err(|error| self.state.refused(rail, from.peer, error)))
    }

    /// Returns the rail and arguments of a direct copy. Returns `None` if the peer has failed; the
    /// slow path then returns the reason.
    #[inline]
    fn unmapped(
        &self,
        local: NonNull<u8>,
        len: usize,
        to: &Target,
    ) -> Option<(usize, Local, Remote)> {
        self.usable(to.peer).ok()?;
        let rail = to.rail as usize;
        let key = *self.state.remotes.get(to.region as usize)?.keys.get(rail)?;
        Some((rail, Local { ptr: local, len, desc: 0 }, Remote { key, offset: to.offset }))
    }

    #[inline(never)]
    pub(super) fn atomic_slow(
        &mut self,
        context: ContextId,
        at: RemoteAddr,
        amo: Amo,
        notice: Notice,
        fetch: bool,
    ) -> Result<Issued, OpError> {
        if !amo.width_is_valid() {
            return Err(OpError::BadWidth(amo.width));
        }
        let word = match self.word(at, amo.width) {
            Err(OpError::NativeAtomics) => {
                return self.atomic_native(context, at, amo, notice, fetch);
            }
            Err(OpError::DeviceMemory) => self.target_anywhere(at, amo.width as u64)?,
            word => word?,
        };
        let stream = self.stream(context, word.peer)?;
        if self.is_idle(stream)
            && let Some(mapped) = word.mapped()
        {
            return Ok(Issued::Done { value: self.atomic_now(mapped, amo, fetch) });
        }
        let message = Body::Amo { at: word.place(), amo, token: NO_TOKEN };
        if !fetch
            && let Some(issued) =
                self.message_single(stream, message, Untrusted::from_slice(&[]), 0, notice)
        {
            self.flush();
            return Ok(issued);
        }
        let ask = Ask { message: Some(message), fetch, remote: word.region, ..Ask::NOTHING };
        self.enqueue(stream, ask, notice)
    }

    #[inline(never)]
    fn enqueue(&mut self, stream: u32, ask: Ask, notice: Notice) -> Result<Issued, OpError> {
        self.usable(self.state.streams[stream as usize].peer)?;
        let index = self.state.open_slot(stream, ask, notice)?;
        let token = self.state.pending.slots[index as usize].token();
        self.advance(stream);
        self.flush();
        Ok(Issued::Pending(token))
    }

    /// If this fails, nothing has changed.
    #[inline(never)]
    pub(super) fn inject_slow(
        &mut self,
        context: ContextId,
        bytes: &[u8],
        to: RemoteAddr,
    ) -> Result<(), OpError> {
        let target = self.target(to, bytes.len() as u64)?;
        let stream = self.stream(context, target.peer)?;
        if self.is_idle(stream)
            && let Some(done) = self.write_now(NonNull::from(bytes).cast(), bytes.len(), &target)
        {
            return done;
        }
        self.usable(target.peer)?;
        let most = self.state.inject_max(target.peer);
        if bytes.len() > most {
            return Err(OpError::TooLong { len: bytes.len(), max: most });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        // Use a write if a rail copies that many bytes before the post returns, otherwise a
        // message.
        let rails = self.state.injecting(target.peer, bytes.len() as u64);
        let as_write = rails != 0 && !self.state.is_kept(stream);
        let issued = if as_write {
            let from = NonNull::from(bytes).cast();
            self.write_single(
                stream,
                from,
                usize::MAX,
                bytes.len(),
                &target,
                Notice::Silent,
                !rails,
            )
        } else {
            let (body, payload) = (Body::Data { at: target.place() }, Untrusted::from_slice(bytes));
            self.message_single(stream, body, payload, MESSAGES, Notice::Silent)
        };
        if issued.is_some() {
            self.flush();
            return Ok(());
        }
        let s = &self.state.streams[stream as usize];
        let data = if as_write { WRITES } else { MESSAGES };
        if s.unposted != NONE || s.fence & data != 0 && self.state.has_operations_in_flight(stream)
        {
            return Err(OpError::Again);
        }
        let mut ask = Ask {
            local: bytes.as_ptr().cast_mut(),
            local_region: u16::MAX,
            remote: target.region,
            offset: target.offset,
            left: bytes.len() as u64,
            ..Ask::NOTHING
        };
        match as_write {
            true => ask.kind = OpKind::Write,
            false => ask.message = Some(Body::Data { at: target.place() }),
        }
        let fenced = s.fence;
        let index = self.state.open_slot(stream, ask, Notice::Silent)?;
        let posted = self.post_inject(stream, index);
        self.flush();
        if posted.is_err() {
            self.state.cancel_slot(stream, index);
            self.state.streams[stream as usize].fence = fenced;
        }
        posted
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    #[inline(always)]
    fn open_slot(&mut self, stream: u32, ask: Ask, notice: Notice) -> Result<u32, OpError> {
        let index = self.pending.slots.take().ok_or(OpError::Again)?;
        let token = self.pending.slots[index as usize].token();
        let s = &mut self.streams[stream as usize];
        let slot = &mut self.pending.slots[index as usize];
        slot.stream = stream;
        slot.state = Stage::Open;
        slot.posts = 0;
        (slot.posted, slot.acked, slot.numbered) = (false, false, false);
        (slot.outcome, slot.value) = (Outcome::Done, 0);
        (slot.report, slot.tag) = match notice {
            Notice::Report(tag) => (true, tag),
            Notice::Silent => (false, 0),
        };
        let Ask { kind, local, local_region, remote, offset, left, mut message, fetch } = ask;
        if fetch && let Some(Body::Amo { token: reply_to, .. }) = &mut message {
            *reply_to = token.0;
        }
        // The first operation with fenced data carries the fence. Later operations are posted after
        // it.
        let data = match kind {
            _ if left == 0 => 0,
            OpKind::Write => WRITES,
            OpKind::Message | OpKind::Carry => MESSAGES,
            OpKind::Read | OpKind::Send | OpKind::Atomic | OpKind::Fetch => 0,
        };
        slot.fenced = s.fence & data != 0;
        s.fence &= KEPT | (slot.fenced as u8).wrapping_sub(1);
        (slot.kind, slot.local, slot.local_region) = (kind, local, local_region);
        (slot.remote, slot.offset, slot.left) = (remote, offset, left);
        (slot.message, slot.fetch, slot.asked) = (message, fetch, 0);
        match kind {
            OpKind::Read if RAILS > 1 => slot.request = left,
            OpKind::Fetch => slot.request = 0,
            _ => {}
        }
        s.ops.push(&mut self.pending.slots, index);
        if s.unposted == NONE {
            s.unposted = index;
        }
        s.open += 1;
        self.open += 1;
        Ok(index)
    }

    /// No part of the slot's operation was posted.
    fn cancel_slot(&mut self, stream: u32, index: u32) {
        let state = &mut self.streams[stream as usize];
        if self.pending.slots[index as usize].state == Stage::Open {
            state.ops.remove(&mut self.pending.slots, index);
            state.unposted = NONE;
            state.open -= 1;
            self.open -= 1;
            self.pending.free(index);
        }
    }

    pub(super) fn inject_max(&self, peer: u16) -> usize {
        if RAILS > 1 && self.kept_peer(peer).is_some() {
            return self.room(peer).min(COPY as u64) as usize;
        }
        let rails = self.peers.get(peer as usize).map_or(0, |slot| slot.rails);
        let each = self.inject.iter().enumerate().filter(|(rail, _)| rails >> rail & 1 != 0);
        each.fold(self.room(peer), |most, (_, &inject)| most.max(inject)) as usize
    }

    #[cold]
    fn refused(&mut self, rail: usize, peer: u16, error: PostError) -> OpError {
        match error {
            PostError::Again => OpError::Again,
            PostError::PeerDown => match self.peers[peer as usize].usable() {
                Err(why) => why,
                Ok(()) => OpError::Rail(RailId(rail as u8), error),
            },
            _ => OpError::Rail(RailId(rail as u8), error),
        }
    }
}
