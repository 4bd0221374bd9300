//! Operations as the user issues them: checked, then done directly or put in order to be posted.
//!
//! Nothing here blocks. An error means that nothing was done; [`OpError::Again`] goes away by making progress.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering, fence};

use crate::error::{OpError, PostError};
use crate::mem::{LocalAddr, Peer, PeerId, RailId, RemoteAddr, copy_bytes};
use crate::op::{Amo, AmoOp, SignalOp, Token};
use crate::rail::{Local, Rail, Remote};

use super::pending::{Kind, NONE, State as Stage};
use super::table::{RemoteSlot, resolve_local, resolve_remote};
use super::wire::{Body, NO_TOKEN, Place};
use super::{ContextId, Engine, State};
use crate::op::Outcome;

/// A change of a 64-bit word at the target, applied after everything before it in the stream has landed.
/// OpenSHMEM: `shmem_put_signal`, `SHMEM_SIGNAL_SET`, `SHMEM_SIGNAL_ADD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The word: a multiple of 8 bytes into its region.
    pub at: RemoteAddr,
    /// Set or add.
    pub op: SignalOp,
    /// The operand.
    pub value: u64,
}

/// What became of an operation that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issued {
    /// It is applied at its target already; the value it fetched, or 0.
    Done {
        /// The fetched value, or 0.
        value: u64,
    },
    /// It is on its way under this token.
    Pending(Token),
}

/// Whether the end of an operation is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// As a [`Completion`](crate::op::Completion) that carries this word, to be taken by token or by
    /// [`Engine::next_completion`]; until then its slot stays in use.
    Report(u64),
    /// Not at all: quiet waits for it, and says if it failed.
    Silent,
}

/// The imported range that an operation names, copied out of the table.
#[derive(Clone, Copy)]
struct Target {
    peer: u16,
    region: u16,
    theirs: (u16, u16),
    rail: u8,
    offset: u64,
    /// First byte where it is mapped, or null.
    mapped: *mut u8,
}

/// What an operation has to post: data, a message, or data and then a message.
#[derive(Clone, Copy)]
struct Ask {
    kind: Kind,
    local: *mut u8,
    local_region: u16,
    remote: u16,
    offset: u64,
    /// Bytes of data, whether they are posted as writes, as reads, or in the message.
    left: u64,
    message: Option<Body>,
    fetch: bool,
}

impl Ask {
    const NOTHING: Ask = Ask {
        kind: Kind::Message,
        local: core::ptr::null_mut(),
        local_region: 0,
        remote: 0,
        offset: 0,
        left: 0,
        message: None,
        fetch: false,
    };
}

/// Memory of a peer that is mapped here.
#[derive(Clone, Copy)]
struct Mapped {
    ptr: *mut u8,
    peer: u16,
    rail: u8,
}

impl Target {
    fn mapped(&self) -> Option<Mapped> {
        (!self.mapped.is_null()).then_some(Mapped { ptr: self.mapped, peer: self.peer, rail: self.rail })
    }

    fn place(&self) -> Place {
        Place { region: self.theirs.0, generation: self.theirs.1, offset: self.offset }
    }
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Writes `len` bytes at `from` to `to`. The source stays as it is until the operation is done.
    #[doc(alias = "shmem_put_nbi")]
    #[inline]
    pub fn put(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        if let Some(source) = self.here(from, len)
            && let Some(target) = self.there(context, to, len)
        {
            // SAFETY: both ranges were checked against their regions; a mapping stays until its peer is detached, and a failed
            // peer's regions are marked unmapped first.
            unsafe { copy_bytes(source, target.ptr, len) };
            self.state.direct = true;
            return Ok(Issued::Done { value: 0 });
        }
        self.put_slow(context, from, len, to, notice)
    }

    #[inline(never)]
    fn put_slow(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let source = resolve_local(self.state.locals, from, len as u64)?;
        let target = self.target(to, len as u64)?;
        let stream = self.stream(context, target.peer)?;
        if self.is_idle(stream)
            && let Some(done) = self.write_now(source, len, &target)
        {
            return done.map(|()| Issued::Done { value: 0 });
        }
        let ask = Ask {
            kind: Kind::Write,
            local: source.as_ptr(),
            local_region: from.region.index as u16,
            remote: target.region,
            offset: target.offset,
            left: len as u64,
            ..Ask::NOTHING
        };
        self.enqueue(stream, ask, notice)
    }

    /// [`put`](Self::put), and then a signal that is applied only once the data, and all that was sent before, has landed.
    #[doc(alias = "shmem_put_signal_nbi")]
    #[inline(always)]
    pub fn put_signal(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        if let Some(source) = self.here(from, len)
            && let Some((target, word)) = self.there_with_word(context, to, len, signal.at)
        {
            // SAFETY: as in `put`.
            unsafe { copy_bytes(source, target, len) };
            self.signal_now(word, signal.op, signal.value);
            return Ok(Issued::Done { value: 0 });
        }
        self.put_signal_slow(context, from, len, to, signal, notice)
    }

    #[inline(never)]
    fn put_signal_slow(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let source = resolve_local(self.state.locals, from, len as u64)?;
        let target = self.target(to, len as u64)?;
        let word = self.word(signal.at, 8)?;
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
        let mut ask = Ask {
            kind: Kind::Write,
            local: source.as_ptr(),
            local_region: from.region.index as u16,
            remote: target.region,
            offset: target.offset,
            left: len as u64,
            ..Ask::NOTHING
        };
        let mut data = None;
        if len as u64 <= self.state.eager as u64 && len > 0 {
            ask.kind = Kind::Message;
            data = Some((target.place(), len as u32));
        }
        ask.message = Some(Body::Signal { at: word.place(), op: signal.op, value: signal.value, data });
        self.enqueue(stream, ask, notice)
    }

    /// Writes bytes that may be reused on return. At most [`inject_max`](Self::inject_max).
    #[doc(alias = "shmem_p")]
    #[inline]
    pub fn inject(&mut self, context: ContextId, bytes: &[u8], to: RemoteAddr) -> Result<(), OpError> {
        if let Some(target) = self.there(context, to, bytes.len()) {
            // SAFETY: the target was checked against its region, the source is a slice; otherwise as in `put`.
            unsafe { copy_bytes(bytes.as_ptr(), target.ptr, bytes.len()) };
            self.state.direct = true;
            return Ok(());
        }
        self.inject_slow(context, bytes, to)
    }

    /// Longest [`inject`](Self::inject) that every rail takes, in bytes.
    pub fn inject_max(&self) -> usize {
        (self.state.inject as usize).max(self.state.message_room as usize)
    }

    /// Applies a signal after everything that was sent before it has landed.
    #[inline]
    pub fn signal(&mut self, context: ContextId, signal: Signal, notice: Notice) -> Result<Issued, OpError> {
        if let Some(word) = self.there(context, signal.at, 8)
            && signal.at.offset & 7 == 0
        {
            self.signal_now(word, signal.op, signal.value);
            return Ok(Issued::Done { value: 0 });
        }
        self.signal_slow(context, signal, notice)
    }

    #[inline(never)]
    fn signal_slow(&mut self, context: ContextId, signal: Signal, notice: Notice) -> Result<Issued, OpError> {
        let word = self.word(signal.at, 8)?;
        let stream = self.stream(context, word.peer)?;
        if self.is_idle(stream)
            && let Some(mapped) = word.mapped()
        {
            self.signal_now(mapped, signal.op, signal.value);
            return Ok(Issued::Done { value: 0 });
        }
        let message = Body::Signal { at: word.place(), op: signal.op, value: signal.value, data: None };
        self.enqueue(stream, Ask { message: Some(message), ..Ask::NOTHING }, notice)
    }

    /// Reads `len` bytes at `from` into `into`. Not ordered with writes: [`quiet`](Self::quiet) first where that matters.
    #[doc(alias = "shmem_get_nbi")]
    #[inline]
    pub fn get(
        &mut self,
        context: ContextId,
        into: LocalAddr,
        len: usize,
        from: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        if let Some(local) = self.here(into, len)
            && let Some(source) = self.there(context, from, len)
        {
            // SAFETY: as in `put`, the other way.
            unsafe { copy_bytes(source.ptr, local, len) };
            return Ok(Issued::Done { value: 0 });
        }
        self.get_slow(context, into, len, from, notice)
    }

    #[inline(never)]
    fn get_slow(
        &mut self,
        context: ContextId,
        into: LocalAddr,
        len: usize,
        from: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let local = resolve_local(self.state.locals, into, len as u64)?;
        let target = self.target(from, len as u64)?;
        let stream = self.stream(context, target.peer)?;
        if self.is_idle(stream)
            && let Some(done) = self.read_now(local, len, &target)
        {
            return done.map(|()| Issued::Done { value: 0 });
        }
        let ask = Ask {
            kind: Kind::Read,
            local: local.as_ptr(),
            local_region: into.region.index as u16,
            remote: target.region,
            offset: target.offset,
            left: len as u64,
            ..Ask::NOTHING
        };
        self.enqueue(stream, ask, notice)
    }

    /// Executes an atomic at the target, in stream order, without fetching.
    #[doc(alias = "shmem_atomic_add")]
    #[inline]
    pub fn amo(
        &mut self,
        context: ContextId,
        at: RemoteAddr,
        amo: Amo,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        self.atomic(context, at, amo, notice, false)
    }

    /// Executes an atomic at the target, in stream order; its completion carries the value from before.
    #[doc(alias = "shmem_atomic_fetch_add")]
    #[inline]
    pub fn fetch(
        &mut self,
        context: ContextId,
        at: RemoteAddr,
        amo: Amo,
        tag: u64,
    ) -> Result<Issued, OpError> {
        self.atomic(context, at, amo, Notice::Report(tag), true)
    }

    /// Orders: writes issued after it land after everything issued before it. Waits for nothing; where the rails do not keep
    /// order, later writes to this peer are held back until earlier operations are applied. Signals and atomics need no fence.
    #[doc(alias = "shmem_fence")]
    #[inline]
    pub fn fence(&mut self, context: ContextId, peer: PeerId) -> Result<(), OpError> {
        // Release: mapped memory of the peer is written by this processor, and what was written before this fence must
        // be visible before what is written after it. Pairs with the acquire load of whoever polls the later data.
        fence(Ordering::Release);
        let slot = self.state.peer_mut(peer).ok_or(OpError::UnknownPeer)?;
        slot.usable()?;
        let stream = self.stream(context, peer.index)?;
        let state = &mut self.state;
        if !state.ordered && state.streams[stream as usize].open != 0 {
            state.streams[stream as usize].fence = true;
            state.ask(stream);
        }
        Ok(())
    }

    /// The local memory of an operation, if everything about it is in order. The slow path says what is not.
    #[inline(always)]
    fn here(&self, addr: LocalAddr, len: usize) -> Option<*mut u8> {
        let slot = self.state.locals.get(addr.region.index as usize)?;
        let end = addr.offset.checked_add(len as u64)?;
        if slot.generation as u32 != addr.region.generation || end > slot.len {
            return None;
        }
        Some(slot.ptr.wrapping_add(addr.offset as usize))
    }

    /// Where the target of an operation is mapped, if it is, if everything about it is in order, and if no stream has
    /// anything in flight, so that what is done directly now keeps its place. The slow path looks closer.
    #[inline(always)]
    fn there(&self, context: ContextId, addr: RemoteAddr, len: usize) -> Option<Mapped> {
        let slot = self.state.remotes.get(addr.region.index as usize)?;
        let end = addr.offset.checked_add(len as u64)?;
        if slot.generation as u32 != addr.region.generation
            || end > slot.len
            || slot.mapped.is_null()
            || context.0 as u16 >= self.state.config.contexts
            || self.state.open != 0
        {
            return None;
        }
        Some(Mapped { ptr: slot.mapped.wrapping_add(addr.offset as usize), peer: slot.peer, rail: slot.rail })
    }

    /// [`there`](Self::there) for data and the word of the signal that follows it: of the same peer, and most often in the same
    /// region, which is then looked up once. What stands between a signal seen and the answer to it counts twice per round trip.
    #[inline(always)]
    fn there_with_word(
        &self,
        context: ContextId,
        to: RemoteAddr,
        len: usize,
        word: RemoteAddr,
    ) -> Option<(*mut u8, Mapped)> {
        let slot = self.state.remotes.get(to.region.index as usize)?;
        let end = to.offset.checked_add(len as u64)?;
        if slot.generation as u32 != to.region.generation
            || end > slot.len
            || slot.mapped.is_null()
            || context.0 as u16 >= self.state.config.contexts
            || self.state.open != 0
            || word.offset & 7 != 0
        {
            return None;
        }
        let target = slot.mapped.wrapping_add(to.offset as usize);
        let slot = if word.region == to.region {
            slot
        } else {
            let other = self.state.remotes.get(word.region.index as usize)?;
            if other.generation as u32 != word.region.generation
                || other.peer != slot.peer
                || other.mapped.is_null()
            {
                return None;
            }
            other
        };
        if word.offset.checked_add(8)? > slot.len {
            return None;
        }
        let ptr = slot.mapped.wrapping_add(word.offset as usize);
        Some((target, Mapped { ptr, peer: slot.peer, rail: slot.rail }))
    }

    /// The imported range, checked.
    #[inline]
    fn target(&self, addr: RemoteAddr, len: u64) -> Result<Target, OpError> {
        let slot: &RemoteSlot<RAILS> = resolve_remote(self.state.remotes, addr, len)?;
        let mapped =
            if slot.mapped.is_null() { slot.mapped } else { slot.mapped.wrapping_add(addr.offset as usize) };
        Ok(Target {
            peer: slot.peer,
            region: addr.region.index as u16,
            theirs: slot.theirs,
            rail: slot.rail,
            offset: addr.offset,
            mapped,
        })
    }

    /// The word of a signal or an atomic, checked.
    #[inline]
    fn word(&self, addr: RemoteAddr, width: u8) -> Result<Target, OpError> {
        if addr.offset & (width as u64 - 1) != 0 {
            return Err(OpError::Misaligned { offset: addr.offset, width });
        }
        self.target(addr, width as u64)
    }

    #[inline(always)]
    fn stream(&self, context: ContextId, peer: u16) -> Result<u32, OpError> {
        if context.0 as u16 >= self.state.config.contexts {
            return Err(OpError::UnknownContext);
        }
        Ok(self.state.stream_of(context.0, peer))
    }

    /// Nothing of the stream is in flight: what is done directly now keeps its place in the order.
    #[inline(always)]
    fn is_idle(&self, stream: u32) -> bool {
        self.state.streams[stream as usize].open == 0
    }

    /// Writes at once, where the memory is mapped or the rail can. `None`: it must be posted.
    #[inline]
    fn write_now(&mut self, from: NonNull<u8>, len: usize, to: &Target) -> Option<Result<(), OpError>> {
        if !to.mapped.is_null() {
            // SAFETY: `from` was checked against its registered region, `mapped` against the imported one; the rail
            // keeps the mapping until the peer is detached, and a failed peer's regions are marked unmapped first.
            unsafe { copy_bytes(from.as_ptr(), to.mapped, len) };
            self.state.direct = true;
            return Some(Ok(()));
        }
        let (rail, local, remote) = self.unmapped(from, len, to)?;
        // SAFETY: the source is a registered region, or the caller's bytes during the call.
        let done = unsafe { self.rails[rail].copy_to(Peer(to.peer), local, remote) }?;
        self.state.direct = true;
        Some(done.map_err(|error| self.state.refused(rail, to.peer, error)))
    }

    /// As [`write_now`](Self::write_now), the other way.
    #[inline]
    fn read_now(&mut self, into: NonNull<u8>, len: usize, from: &Target) -> Option<Result<(), OpError>> {
        if !from.mapped.is_null() {
            // SAFETY: as in `write_now`.
            unsafe { copy_bytes(from.mapped, into.as_ptr(), len) };
            return Some(Ok(()));
        }
        let (rail, local, remote) = self.unmapped(into, len, from)?;
        // SAFETY: the target of the copy lies in a registered region.
        let done = unsafe { self.rails[rail].copy_from(Peer(from.peer), local, remote) }?;
        Some(done.map_err(|error| self.state.refused(rail, from.peer, error)))
    }

    /// What a rail needs to copy at once. `None` when the peer has failed: the slow path says why.
    #[inline]
    fn unmapped(&self, local: NonNull<u8>, len: usize, to: &Target) -> Option<(usize, Local, Remote)> {
        self.state.peers[to.peer as usize].usable().ok()?;
        let rail = to.rail as usize;
        let key = self.state.remotes[to.region as usize].keys[rail];
        Some((rail, Local { ptr: local, len, desc: 0 }, Remote { key, offset: to.offset }))
    }

    #[inline(always)]
    fn signal_now(&mut self, word: Mapped, op: SignalOp, value: u64) {
        // SAFETY: mapped, inside its region and a multiple of 8 bytes (regions begin at one); only accessed atomically.
        let at = unsafe { &*word.ptr.cast::<AtomicU64>() };
        // Release: everything copied to the peer before is visible to whoever acquires this value in `wait_signal`.
        match op {
            SignalOp::Set => at.store(value, Ordering::Release),
            SignalOp::Add => {
                at.fetch_add(value, Ordering::Release);
            }
        }
        self.state.direct = true;
        self.rails[word.rail as usize].notify(Peer(word.peer));
    }

    #[inline]
    fn atomic(
        &mut self,
        context: ContextId,
        at: RemoteAddr,
        amo: Amo,
        notice: Notice,
        fetch: bool,
    ) -> Result<Issued, OpError> {
        if amo.width_is_valid()
            && let Some(word) = self.there(context, at, amo.width as usize)
            && at.offset & (amo.width as u64 - 1) == 0
        {
            return Ok(Issued::Done { value: self.atomic_now(word, amo, fetch) });
        }
        self.atomic_slow(context, at, amo, notice, fetch)
    }

    #[inline(always)]
    fn atomic_now(&mut self, word: Mapped, amo: Amo, fetch: bool) -> u64 {
        // SAFETY: mapped, inside its region, a multiple of its width, which is valid; only accessed atomically.
        let value = unsafe { amo.apply(word.ptr) };
        if amo.op != AmoOp::Fetch {
            self.state.direct = true;
            self.rails[word.rail as usize].notify(Peer(word.peer));
        }
        if fetch { value } else { 0 }
    }

    #[inline(never)]
    fn atomic_slow(
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
        let word = self.word(at, amo.width)?;
        let stream = self.stream(context, word.peer)?;
        if self.is_idle(stream)
            && let Some(mapped) = word.mapped()
        {
            return Ok(Issued::Done { value: self.atomic_now(mapped, amo, fetch) });
        }
        let message = Body::Amo { at: word.place(), amo, token: NO_TOKEN };
        let ask = Ask { message: Some(message), fetch, remote: word.region, ..Ask::NOTHING };
        self.enqueue(stream, ask, notice)
    }

    /// Takes an operation in, behind what the stream has, and posts what can be posted.
    #[inline(always)]
    fn enqueue(&mut self, stream: u32, ask: Ask, notice: Notice) -> Result<Issued, OpError> {
        let peer = self.state.streams[stream as usize].peer;
        self.state.peers[peer as usize].usable()?;
        let index = self.state.open_slot(stream, ask, notice)?;
        let token = self.state.pending.token(index);
        self.advance(stream);
        self.flush();
        Ok(Issued::Pending(token))
    }

    /// An inject that cannot simply be copied: posted now, or refused with nothing changed.
    #[inline(never)]
    fn inject_slow(&mut self, context: ContextId, bytes: &[u8], to: RemoteAddr) -> Result<(), OpError> {
        let target = self.target(to, bytes.len() as u64)?;
        let stream = self.stream(context, target.peer)?;
        if self.is_idle(stream)
            && let Some(done) = self.write_now(NonNull::from(bytes).cast(), bytes.len(), &target)
        {
            return done;
        }
        self.state.peers[target.peer as usize].usable()?;
        if bytes.len() > self.inject_max() {
            return Err(OpError::TooLong { len: bytes.len(), max: self.inject_max() });
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let state = &self.state.streams[stream as usize];
        if state.unposted != NONE || (state.fence && state.in_flight() != 0) {
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
        // A write if every rail copies that much before it returns, otherwise a message.
        match bytes.len() as u64 <= self.state.inject {
            true => ask.kind = Kind::Write,
            false => ask.message = Some(Body::Data { at: target.place() }),
        }
        let fenced = state.fence;
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
    /// Takes a slot for an operation and puts it at the end of its stream.
    #[inline(always)]
    fn open_slot(&mut self, stream: u32, ask: Ask, notice: Notice) -> Result<u32, OpError> {
        let index = self.pending.take().ok_or(OpError::Again)?;
        let token = self.pending.token(index);
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
        // The first operation with data after a fence carries it.
        slot.fenced = left != 0 && kind != Kind::Read && s.fence;
        s.fence &= !slot.fenced;
        (slot.kind, slot.local, slot.local_region) = (kind, local, local_region);
        (slot.remote, slot.offset, slot.left) = (remote, offset, left);
        (slot.message, slot.fetch) = (message, fetch);
        s.ops.push(self.pending.slots, index);
        if s.unposted == NONE {
            s.unposted = index;
        }
        s.open += 1;
        self.open += 1;
        Ok(index)
    }

    /// Takes back an operation of which nothing was posted, the last of its stream.
    fn cancel_slot(&mut self, stream: u32, index: u32) {
        let state = &mut self.streams[stream as usize];
        if self.pending.slots[index as usize].state == Stage::Open {
            state.ops.remove(self.pending.slots, index);
            state.unposted = NONE;
            state.open -= 1;
            self.open -= 1;
            self.pending.free(index);
        }
    }

    /// A rail refused to copy at once.
    #[cold]
    pub(super) fn refused(&mut self, rail: usize, peer: u16, error: PostError) -> OpError {
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
