//! Posts operations. Hot: checks, takes a context, and makes one provider call.

use core::ffi::c_void;
use core::ptr::{self, NonNull};

use fishplate_core::bytes::{Put, Writer};
use fishplate_core::error::{CompleteError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::op::{Amo, AmoOp, AmoSet};
use fishplate_core::rail::{Local, Posted, Remote};

use super::pool::{ContextKind, Pool, Slot};
use super::{Event, FabricRail, HEAD, Held, MORE, USER, WORD};
use crate::fabric::endpoint::{AtomicKind, AtomicWords, Buffer, Endpoint, Target};
use crate::fabric::error::Code;
use crate::fabric::info::Info;
use crate::fabric::persona::Notify;
use crate::fabric::raw::*;

impl FabricRail {
    #[inline(always)]
    fn target(&self, peer: Peer, remote: Remote, len: usize) -> Result<Target, PostError> {
        let Some(slot) = self.peers.slots.get(peer.0 as usize) else {
            return Err(PostError::PeerDown);
        };
        if !slot.up {
            return Err(PostError::PeerDown);
        }
        if len > self.caps.max_rma {
            return Err(PostError::TooLong { len, max: self.caps.max_rma });
        }
        if !self.imports.allows(peer.0, remote.key.key, remote.offset, len as u64) {
            return Err(PostError::BadKey);
        }
        // Cannot overflow: base plus region length does not, and the range lies inside the region.
        let addr = remote.key.base.wrapping_add(remote.offset);
        Ok(Target { peer: slot.addr, addr, key: remote.key.key })
    }

    /// Takes a context for a post. The peer must be up.
    #[inline(always)]
    fn begin(&mut self, peer: Peer, kind: ContextKind, cx: u64) -> Result<*mut Slot, PostError> {
        let Some(slot) = self.pool.take() else { return Err(PostError::Again) };
        // SAFETY: the context was just taken from the pool, so this post is its only owner.
        unsafe {
            (*slot).cx = cx;
            (*slot).peer = peer.0;
            (*slot).kind = kind;
        }
        Ok(slot)
    }

    #[inline(always)]
    fn begin_at(
        &mut self,
        peer: Peer,
        kind: ContextKind,
        cx: u64,
        at: *mut u8,
    ) -> Result<*mut Slot, PostError> {
        let slot = self.begin(peer, kind, cx)?;
        // SAFETY: `begin` just took the context from the pool, so this post is its only owner.
        unsafe { (*slot).words[0] = at.addr() as u64 };
        Ok(slot)
    }

    /// Records the result of a post with a context.
    #[inline(always)]
    fn end(
        &mut self,
        peer: Peer,
        slot: *mut Slot,
        result: Result<(), Code>,
    ) -> Result<Posted, PostError> {
        match result {
            Ok(()) => {
                let place = &mut self.peers.slots[peer.0 as usize];
                place.posted = place.posted.wrapping_add(1);
                Ok(Posted::Pending)
            }
            Err(code) => {
                // SAFETY: the context was taken for this post, and the provider has rejected the
                // post.
                unsafe { self.pool.give(slot) };
                Err(self.refused(peer, code))
            }
        }
    }

    /// Records the result of a post without a context.
    #[inline(always)]
    fn over(&mut self, peer: Peer, result: Result<(), Code>) -> Result<Posted, PostError> {
        match result {
            Ok(()) => {
                let place = &mut self.peers.slots[peer.0 as usize];
                place.injected = place.injected.wrapping_add(1);
                Ok(Posted::Done)
            }
            Err(code) => Err(self.refused(peer, code)),
        }
    }

    #[cold]
    fn refused(&mut self, peer: Peer, code: Code) -> PostError {
        if code == Code::EAGAIN {
            self.stats.refused += 1;
            let place = &mut self.peers.slots[peer.0 as usize];
            (place.refused, place.refused_at) = (true, place.accepted());
            return PostError::Again;
        }
        self.note_error(code);
        if code.is_disconnect() {
            self.take_down(peer, fishplate_core::error::PeerError::Lost);
            return PostError::PeerDown;
        }
        PostError::Provider(code.0)
    }

    #[inline(always)]
    pub(super) unsafe fn write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let to = self.target(peer, remote, local.len)?;
        let (ptr, desc) = (local.ptr.as_ptr(), local.desc as *mut c_void);
        // SAFETY: the caller upholds the contract of `Rail::post_write`. `target` has checked the
        // peer and the range, as `write_to` requires.
        unsafe { self.write_to(peer, ptr, local.len, desc, to.addr, to.key, data, cx) }
    }

    /// Like [`write`](Self::write), for a target that the caller has checked.
    ///
    /// # Safety
    /// The conditions of
    /// [`Rail::post_write_checked`](fishplate_core::rail::Rail::post_write_checked).
    #[inline(always)]
    pub(super) unsafe fn write_checked(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: u32,
        cx: u64,
    ) -> Result<Posted, PostError> {
        debug_assert!(!matches!(self.target(peer, remote, local.len), Err(PostError::BadKey)));
        let addr = remote.key.base.wrapping_add(remote.offset);
        let (ptr, desc) = (local.ptr.as_ptr(), local.desc as *mut c_void);
        // SAFETY: the caller upholds the contract of `Rail::post_write_checked`, which `write_to`
        // requires.
        unsafe { self.write_to(peer, ptr, local.len, desc, addr, remote.key.key, Some(data), cx) }
    }

    /// Posts a write to a checked target.
    ///
    /// # Safety
    /// The conditions of
    /// [`Rail::post_write_checked`](fishplate_core::rail::Rail::post_write_checked).
    #[allow(
        clippy::too_many_arguments,
        reason = "the compiler would build a structure in memory even where only registers are \
            needed"
    )]
    #[inline(always)]
    unsafe fn write_to(
        &mut self,
        peer: Peer,
        ptr: *mut u8,
        len: usize,
        desc: *mut c_void,
        addr: u64,
        key: u64,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        // SAFETY: our caller guarantees that the peer was checked, so it has a slot. Slots are
        // never removed.
        let slot = unsafe { self.peers.slots.get_unchecked(peer.0 as usize) };
        let short = len < slot.short_below;
        if !short && !slot.plain {
            // SAFETY: the caller upholds the contract of `write_to`, which `unusual_write`
            // requires.
            return unsafe { self.unusual_write(peer, ptr, len, desc, addr, key, data, cx) };
        }
        let word = data.map(|data| self.signature | data as u64);
        let (from, to) = (Buffer { ptr, len, desc }, Target { peer: slot.addr, addr, key });
        if short {
            // SAFETY: our caller guarantees that the local memory is readable during the call.
            let result = unsafe { self.endpoint.inject_write(from, to, word) };
            return self.over(peer, result);
        }
        let slot = self.begin_at(peer, ContextKind::Write, cx, from.ptr)?;
        // SAFETY: our caller guarantees that the local memory is readable until the completion.
        // This post owns the context until then.
        let result = unsafe { self.endpoint.write(from, to, word, Pool::context(slot)) };
        self.end(peer, slot, result)
    }

    #[allow(clippy::too_many_arguments, reason = "as above")]
    #[cold]
    #[inline(never)]
    unsafe fn unusual_write(
        &mut self,
        peer: Peer,
        ptr: *mut u8,
        len: usize,
        desc: *mut c_void,
        addr: u64,
        key: u64,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let slot = &self.peers.slots[peer.0 as usize];
        if !slot.up {
            return Err(PostError::PeerDown);
        }
        let (from, to) = (Buffer { ptr, len, desc }, Target { peer: slot.addr, addr, key });
        let word = match data {
            Some(data) if self.notify == Notify::Message => {
                // SAFETY: the caller upholds the contract of `unusual_write`, which
                // `write_and_word` requires.
                return unsafe { self.write_and_word(peer, from, to, data, cx) };
            }
            Some(data) => Some(self.signature | data as u64),
            None => None,
        };
        // The provider copies an injected write with the processor, which cannot access device
        // memory.
        if len <= self.inject && !self.is_of_device(ptr, len) {
            if !self.close_batch() {
                return Err(PostError::Again);
            }
            // SAFETY: our caller guarantees that the local memory is readable during the call.
            let result = unsafe { self.endpoint.inject_write(from, to, word) };
            return self.over(peer, result);
        }
        let slot = self.begin_at(peer, ContextKind::Write, cx, from.ptr)?;
        if self.more {
            return self.hold(peer, Held { slot, from, to, data: word });
        }
        // SAFETY: our caller guarantees that the local memory is readable until the completion.
        // This post owns the context until then.
        let result = unsafe { self.write_at_level(from, to, word, slot) };
        self.end(peer, slot, result)
    }

    unsafe fn write_at_level(
        &mut self,
        from: Buffer,
        to: Target,
        word: Option<u64>,
        slot: *mut Slot,
    ) -> Result<(), Code> {
        // SAFETY: the caller upholds the contract of `Endpoint::write`, which `write_with` requires
        // too.
        unsafe {
            match self.say_level {
                Some(flags) => {
                    let remote = if word.is_some() { FI_REMOTE_CQ_DATA } else { 0 };
                    let word = word.unwrap_or(0);
                    self.endpoint.write_with(from, to, word, flags | remote, Pool::context(slot))
                }
                None => self.endpoint.write(from, to, word, Pool::context(slot)),
            }
        }
    }

    fn hold(&mut self, peer: Peer, write: Held) -> Result<Posted, PostError> {
        if let Some(before) = self.held {
            let more = if self.batched + 1 < MORE { FI_MORE } else { 0 };
            if !self.hand_over(before, more) {
                // SAFETY: the context was taken for this post, which the provider has not seen.
                unsafe { self.pool.give(write.slot) };
                return Err(PostError::Again);
            }
            self.batched = if more == 0 { 0 } else { self.batched + 1 };
        }
        self.held = Some(write);
        self.hurry();
        self.end(peer, write.slot, Ok(()))
    }

    /// Posts the held write, and rings the doorbell for the whole batch.
    pub(super) fn close_batch(&mut self) -> bool {
        if let Some(held) = self.held {
            if !self.hand_over(held, 0) {
                return false;
            }
            self.held = None;
            self.batched = 0;
        }
        true
    }

    /// A permanent error completes the write with that error.
    fn hand_over(&mut self, write: Held, more: u64) -> bool {
        let Held { slot, from, to, data } = write;
        let remote = if data.is_some() { FI_REMOTE_CQ_DATA } else { 0 };
        let flags = FI_COMPLETION | self.offer.level.flag() | remote | more;
        // SAFETY: the poster guarantees that the memory is readable until the completion is
        // reported. The write owns its context.
        let result = unsafe {
            self.endpoint.write_with(from, to, data.unwrap_or(0), flags, Pool::context(slot))
        };
        match result {
            Ok(()) => true,
            Err(Code::EAGAIN) => {
                self.stats.refused += 1;
                false
            }
            Err(code) => {
                // SAFETY: the context is from our pool, and the write owns it until the completion
                // is reported below.
                let (cx, peer, (_, orphan)) =
                    unsafe { ((*slot).cx, (*slot).peer, (*slot).used_for()) };
                // SAFETY: the provider has rejected the write, so it does not hold the context.
                unsafe { self.pool.give(slot) };
                if !orphan {
                    self.settle(peer);
                    self.tell(Event::Done(cx, Err(CompleteError::Failed(code.0))));
                }
                true
            }
        }
    }

    /// Posts a write without immediate data, followed by a message that carries the word.
    unsafe fn write_and_word(
        &mut self,
        peer: Peer,
        from: Buffer,
        to: Target,
        data: u32,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if from.len == 0 {
            // An empty write needs no completion before its word, and shm 1.17 rejects empty
            // writes.
            if self.owed.len() == self.caps.depth as usize {
                return Err(PostError::Again);
            }
            self.owe(peer.0, data);
            return Ok(Posted::Done);
        }
        if self.words_follow && self.owed.len() == self.caps.depth as usize {
            return Err(PostError::Again);
        }
        let kind = if self.words_follow { ContextKind::Write } else { ContextKind::WriteThenWord };
        let slot = self.begin_at(peer, kind, cx, from.ptr)?;
        // SAFETY: `begin_at` just took the context for this post.
        unsafe { (*slot).extra = data };
        // SAFETY: our caller guarantees that the local memory is readable until the completion.
        // This post owns the context until then.
        let result = unsafe { self.write_at_level(from, to, None, slot) };
        let posted = self.end(peer, slot, result)?;
        if self.words_follow {
            self.owe(peer.0, data);
        }
        Ok(posted)
    }

    /// Sends a word, or queues it while the provider is busy. The queue cannot overflow: at most
    /// one word per context waits.
    #[inline]
    pub(super) fn owe(&mut self, peer: u16, data: u32) {
        if !self.owed.is_empty() || !self.send_word(peer, data) {
            self.owed.push_back((peer, data));
            self.hurry();
        }
    }

    /// Sends a word. Returns `false` if the provider is busy. Drops the word if the peer is not up.
    pub(super) fn send_word(&mut self, peer: u16, data: u32) -> bool {
        let slot = &self.peers.slots[peer as usize];
        if !slot.up {
            return true;
        }
        let mut bytes = [0; HEAD + 4];
        Writer::new(&mut bytes).put_u32(self.number).put_u32(WORD).put_u32(data);
        // SAFETY: the peer is up, so `slot.addr` is its `fi_addr_t`.
        let result = unsafe { self.endpoint.inject(&bytes, slot.addr) };
        match self.over(Peer(peer), result) {
            Err(PostError::Again) => false,
            Err(PostError::Provider(_)) => {
                // The word is lost and the peer would wait for it for ever, so the peer fails.
                self.take_down(Peer(peer), fishplate_core::error::PeerError::Lost);
                true
            }
            _ => true,
        }
    }

    #[inline(always)]
    pub(super) unsafe fn read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let from = self.target(peer, remote, local.len)?;
        if self.holds() && !self.close_batch() {
            return Err(PostError::Again);
        }
        let into =
            Buffer { ptr: local.ptr.as_ptr(), len: local.len, desc: local.desc as *mut c_void };
        let slot = self.begin_at(peer, ContextKind::Read, cx, into.ptr)?;
        // SAFETY: our caller guarantees that nothing reads or writes the local memory until the
        // completion. This post owns the context until then.
        let result = unsafe { self.endpoint.read(into, from, Pool::context(slot)) };
        self.end(peer, slot, result)
    }

    #[inline(always)]
    pub(super) fn message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let Some(place) = self.peers.slots.get(peer.0 as usize) else {
            return Err(PostError::PeerDown);
        };
        let (addr, first) = (place.addr, place.first);
        let len = head.len().saturating_add(body.len());
        if len > self.caps.max_message {
            return Err(PostError::TooLong { len, max: self.caps.max_message });
        }
        if self.holds() && !self.close_batch() {
            return Err(PostError::Again);
        }
        if first == 0 && len + HEAD <= self.inject_message {
            let scratch = self.scratch.as_mut_ptr();
            // SAFETY: `scratch` has room for `inject_message` bytes, and nothing else uses it, so
            // it does not overlap the message's parts.
            let bytes = unsafe {
                compose(self.number, head, body, scratch);
                core::slice::from_raw_parts(scratch, len + HEAD)
            };
            // SAFETY: `first` is 0 only while the peer is up, so `addr` is its `fi_addr_t`.
            let result = unsafe { self.endpoint.inject(bytes, addr) };
            return self.over(peer, result);
        }
        self.long_message(peer, addr, head, body, cx)
    }

    fn long_message(
        &mut self,
        peer: Peer,
        addr: u64,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        if !self.peers.slots[peer.0 as usize].up {
            return Err(PostError::PeerDown);
        }
        let Some(bounce) = self.bounces.pop() else { return Err(PostError::Again) };
        let slot = match self.begin(peer, ContextKind::Send, cx) {
            Ok(slot) => slot,
            Err(error) => {
                self.bounces.push(bounce);
                return Err(error);
            }
        };
        let bytes = self.slab.at(bounce as usize);
        let from = Buffer { ptr: bytes, len: head.len() + body.len() + HEAD, desc: self.desc };
        // SAFETY: a bounce buffer has room for the longest message. This post owns the buffer and
        // the context until its completion.
        let result = unsafe {
            (*slot).extra = bounce;
            compose(self.number, head, body, bytes);
            self.endpoint.send(from, addr, FI_COMPLETION, Pool::context(slot))
        };
        if result.is_err() {
            self.bounces.push(bounce);
        }
        let posted = self.end(peer, slot, result)?;
        let place = &mut self.peers.slots[peer.0 as usize];
        place.first = place.first.saturating_sub(1);
        Ok(posted)
    }

    pub(super) unsafe fn atomic(
        &mut self,
        peer: Peer,
        amo: Amo,
        remote: Remote,
        fetch: Option<NonNull<u64>>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let Some(datatype) =
            datatype(amo.width).filter(|_| self.caps.native_atomics.has(amo.op, amo.width))
        else {
            return Err(PostError::Unsupported);
        };
        let to = self.target(peer, remote, amo.width as usize)?;
        if self.holds() && !self.close_batch() {
            return Err(PostError::Again);
        }
        let (kind, op, operand) = provider_op(amo.op, amo.operand);
        let slot = self.begin(peer, ContextKind::Atomic, cx)?;
        // SAFETY: this post owns the context, with its words, until the completion.
        let result = unsafe {
            (*slot).fetch = fetch.map_or(ptr::null_mut(), NonNull::as_ptr);
            // The words are in native byte order. A narrow operand uses the first bytes of its
            // word.
            (*slot).words = [narrow(operand, amo.width), narrow(amo.compare, amo.width), 0];
            let words = (&raw mut (*slot).words).cast::<u64>();
            let words = AtomicWords { operand: words, compare: words.add(1), result: words.add(2) };
            self.endpoint.atomic(kind, words, to, datatype, op, Pool::context(slot))
        };
        self.end(peer, slot, result)
    }
}

/// Writes a message: the rail's header, then the two parts.
///
/// # Safety
/// `into` has room for the header and both parts, and does not overlap the parts.
#[inline(always)]
unsafe fn compose(number: u32, head: &[u8], body: Untrusted<'_>, into: *mut u8) {
    // SAFETY: our caller guarantees room and no overlap. A raw copy tolerates a body that changes
    // during the copy.
    unsafe {
        into.cast::<[u8; 4]>().write(number.to_le_bytes());
        into.add(4).cast::<[u8; 4]>().write(USER.to_le_bytes());
        ptr::copy_nonoverlapping(head.as_ptr(), into.add(HEAD), head.len());
        ptr::copy_nonoverlapping(body.as_ptr(), into.add(HEAD + head.len()), body.len());
    }
}

fn narrow(value: u64, width: u8) -> u64 {
    let mut bytes = [0; 8];
    match width {
        1 => bytes[..1].copy_from_slice(&(value as u8).to_ne_bytes()),
        2 => bytes[..2].copy_from_slice(&(value as u16).to_ne_bytes()),
        4 => bytes[..4].copy_from_slice(&(value as u32).to_ne_bytes()),
        _ => bytes = value.to_ne_bytes(),
    }
    u64::from_ne_bytes(bytes)
}

fn datatype(width: u8) -> Option<i32> {
    match width {
        1 => Some(FI_UINT8),
        2 => Some(FI_UINT16),
        4 => Some(FI_UINT32),
        8 => Some(FI_UINT64),
        _ => None,
    }
}

/// Every call fetches, because only the completion of a fetch proves that the atomic is applied at
/// the target.
fn provider_op(op: AmoOp, operand: u64) -> (AtomicKind, i32, u64) {
    match op {
        AmoOp::Set | AmoOp::Swap => (AtomicKind::Fetch, FI_ATOMIC_WRITE, operand),
        AmoOp::Add => (AtomicKind::Fetch, FI_SUM, operand),
        AmoOp::Inc => (AtomicKind::Fetch, FI_SUM, 1),
        AmoOp::And => (AtomicKind::Fetch, FI_BAND, operand),
        AmoOp::Or => (AtomicKind::Fetch, FI_BOR, operand),
        AmoOp::Xor => (AtomicKind::Fetch, FI_BXOR, operand),
        AmoOp::CompareSwap => (AtomicKind::Compare, FI_CSWAP, operand),
        AmoOp::Fetch => (AtomicKind::Fetch, FI_ATOMIC_READ, 0),
    }
}

/// Queries each operation, because `net` of 1.17 has the capability bit but supports no operation.
/// Returns none if operands must lie in registered memory (`FI_MR_LOCAL`).
pub(super) fn atomics(endpoint: &Endpoint, info: &Info) -> AmoSet {
    if info.raw().caps & FI_ATOMIC == 0 || info.domain().mr_mode & FI_MR_LOCAL != 0 {
        return AmoSet::NONE;
    }
    AmoSet::of(|op, width| {
        let (kind, op, _) = provider_op(op, 0);
        datatype(width).is_some_and(|datatype| endpoint.has_atomic(kind, datatype, op))
    })
}
