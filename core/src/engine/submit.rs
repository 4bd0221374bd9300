//! Issues operations: checks them, then completes them at once or passes them to `queue`, which
//! posts in order.
//!
//! Nothing here blocks. An error means that nothing was done; progress clears [`OpError::Again`].

mod queue;
mod single;

pub use queue::NOW_MAX;

use crate::error::OpError;
use crate::mem::{LocalAddr, Peer, PeerId, RemoteAddr, copy_bytes};
use crate::op::{Amo, AmoOp, SignalOp, Token};
use crate::rail::Rail;
use crate::sync::primitive::edge_fence;

use super::{ContextId, Engine};

/// A change of a 64-bit word at the target, applied after everything before it in the stream has
/// landed. OpenSHMEM: `shmem_put_signal`, `SHMEM_SIGNAL_SET`, `SHMEM_SIGNAL_ADD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The word: a multiple of 8 bytes into its region.
    pub at: RemoteAddr,
    /// Set or add.
    pub op: SignalOp,
    /// The operand.
    pub value: u64,
}

impl Signal {
    /// Sets a word.
    pub const fn set(at: RemoteAddr, value: u64) -> Signal {
        Signal { at, op: SignalOp::Set, value }
    }

    /// Adds to a word, wrapping.
    pub const fn add(at: RemoteAddr, value: u64) -> Signal {
        Signal { at, op: SignalOp::Add, value }
    }
}

/// The result of issuing an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issued {
    /// It is already applied at its target.
    Done {
        /// The fetched value, or 0.
        value: u64,
    },
    /// It is in flight under this token. For a silent operation the token has no meaning.
    Pending(Token),
}

/// Whether the completion of an operation is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Reports a [`Completion`](crate::op::Completion) that carries this word. Its slot stays in
    /// use until it is taken by token or by [`Engine::next_completion`].
    Report(u64),
    /// No report: quiet waits for it and reports a failure.
    Silent,
}

/// A requested transfer, as one argument of out-of-line functions.
#[derive(Clone, Copy)]
struct Transfer {
    context: ContextId,
    local: LocalAddr,
    len: usize,
    remote: RemoteAddr,
    notice: Notice,
}

/// Memory of a peer that is mapped here.
#[derive(Clone, Copy)]
struct Mapped {
    ptr: *mut u8,
    peer: u16,
    rail: u8,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Writes `len` bytes at `from` to `to`. Do not change the source until the operation is done.
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
        if let Some(target) = self.there(context, to, len)
            && let Some(source) = self.here(from, len)
        {
            // SAFETY: both ranges were checked against their regions; a mapping stays until its
            // peer is detached, and a failed peer's regions are marked unmapped first.
            unsafe { copy_bytes(source, target.ptr, len) };
            self.state.direct = true;
            return Ok(Issued::Done { value: 0 });
        }
        if let Notice::Silent = notice
            && !R::COPIES
            && self.put_single(context, from, len, to)
        {
            self.flush();
            return Ok(Issued::Pending(Token::NONE));
        }
        self.put_slow(Transfer { context, local: from, len, remote: to, notice })
    }

    /// [`put`](Self::put), then a signal that is applied once the data and everything earlier has
    /// landed.
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
        match self.put_signal_mapped(context, from, len, to, signal) {
            Some(issued) => Ok(issued),
            None => self.put_signal_posted(context, from, len, to, signal, notice),
        }
    }

    /// The mapped tier of [`put_signal`](Self::put_signal): if the peer's memory is mapped and
    /// nothing is in flight, writes with plain stores. `None`: nothing was done; call
    /// [`put_signal_posted`](Self::put_signal_posted), which posts it or returns the error. For
    /// callers that want to keep the slow path out of their hot path.
    #[inline(always)]
    pub fn put_signal_mapped(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Signal,
    ) -> Option<Issued> {
        let (target, word) = self.there_with_word(context, to, len, signal.at)?;
        let source = self.here(from, len)?;
        // SAFETY: as in `put`.
        unsafe { copy_bytes(source, target, len) };
        self.signal_now(word, signal.op, signal.value);
        Some(Issued::Done { value: 0 })
    }

    /// Writes bytes that may be reused on return. At most [`inject_max`](Self::inject_max).
    #[doc(alias = "shmem_p")]
    #[inline]
    pub fn inject(&mut self, context: ContextId, bytes: &[u8], to: RemoteAddr) -> Result<(), OpError> {
        if let Some(target) = self.there(context, to, bytes.len()) {
            // SAFETY: the target was checked against its region, and the source is a slice. The
            // mapping stays as in `put`.
            unsafe { copy_bytes(bytes.as_ptr(), target.ptr, bytes.len()) };
            self.state.direct = true;
            return Ok(());
        }
        self.inject_slow(context, bytes, to)
    }

    /// Longest [`inject`](Self::inject) to this peer, in bytes. 0 if it is unknown.
    pub fn inject_max(&self, peer: PeerId) -> usize {
        let known =
            self.state.peers.get(peer.index as usize).filter(|slot| slot.generation == peer.generation);
        known.map_or(0, |_| self.state.inject_max(peer.index))
    }

    /// Applies a signal after everything sent earlier has landed.
    #[inline]
    pub fn signal(&mut self, context: ContextId, signal: Signal, notice: Notice) -> Result<Issued, OpError> {
        match self.signal_mapped(context, signal) {
            Some(issued) => Ok(issued),
            None => self.signal_posted(context, signal, notice),
        }
    }

    /// The mapped tier of [`signal`](Self::signal), like
    /// [`put_signal_mapped`](Self::put_signal_mapped).
    #[inline(always)]
    pub fn signal_mapped(&mut self, context: ContextId, signal: Signal) -> Option<Issued> {
        let word = self.there(context, signal.at, 8)?;
        if signal.at.offset & 7 != 0 {
            return None;
        }
        self.signal_now(word, signal.op, signal.value);
        Some(Issued::Done { value: 0 })
    }

    /// Reads `len` bytes at `from` into `into`. Not ordered with writes: call
    /// [`quiet`](Self::quiet) first if that matters.
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
        if let Some(source) = self.there(context, from, len)
            && let Some(local) = self.here(into, len)
        {
            // SAFETY: the ranges were checked and the mapping stays, as in `put`.
            unsafe { copy_bytes(source.ptr, local, len) };
            return Ok(Issued::Done { value: 0 });
        }
        self.get_slow(context, into, len, from, notice)
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

    /// Executes an atomic at the target, in stream order; its completion carries the old value.
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

    /// Orders later writes after everything issued earlier, without waiting. Where a later write
    /// could overtake something ([`Caps::order`](crate::rail::Caps::order)), it is held back until
    /// earlier operations are applied. Signals and atomics need no fence.
    #[doc(alias = "shmem_fence")]
    #[inline]
    pub fn fence(&mut self, context: ContextId, peer: PeerId) -> Result<(), OpError> {
        // Release: mapped memory of the peer is written by this processor, and what was written
        // before this fence must be visible before what is written after it. Pairs with the acquire
        // load of the thread that polls the later data.
        edge_fence!("engine.fence", Release);
        let slot = self.state.peer_mut(peer).ok_or(OpError::UnknownPeer)?;
        slot.usable()?;
        let stream = self.stream(context, peer.index)?;
        let state = &mut self.state;
        if state.open != 0 {
            state.fence(stream);
        }
        Ok(())
    }

    /// Resolves the local memory of an operation. `None`: invalid; the slow path returns the error.
    #[inline(always)]
    fn here(&self, addr: LocalAddr, len: usize) -> Option<*mut u8> {
        let slot = self.state.locals.get(addr.region.index())?;
        let end = addr.offset.checked_add(len as u64)?;
        if slot.generation as u32 != addr.region.generation() || end > slot.len {
            return None;
        }
        Some(slot.ptr.wrapping_add(addr.offset as usize))
    }

    /// Resolves the mapped target of an operation, if it is valid and no stream has anything in
    /// flight, so that a direct access preserves order. `None`: take the slow path.
    #[inline(always)]
    fn there(&self, context: ContextId, addr: RemoteAddr, len: usize) -> Option<Mapped> {
        let slot = self.state.remotes.get(addr.region.index())?;
        if slot.mapped.is_null() {
            return None;
        }
        let end = addr.offset.checked_add(len as u64)?;
        if slot.generation as u32 != addr.region.generation()
            || end > slot.len
            || context.0 as u16 >= self.state.config.contexts
            || self.state.open != 0
        {
            return None;
        }
        Some(Mapped { ptr: slot.mapped.wrapping_add(addr.offset as usize), peer: slot.peer, rail: slot.rail })
    }

    /// [`there`](Self::there) for data and its signal word at the same peer. They are usually in
    /// the same region, which is then looked up once, because this path counts twice per round
    /// trip.
    #[inline(always)]
    fn there_with_word(
        &self,
        context: ContextId,
        to: RemoteAddr,
        len: usize,
        word: RemoteAddr,
    ) -> Option<(*mut u8, Mapped)> {
        let slot = self.state.remotes.get(to.region.index())?;
        if slot.mapped.is_null() {
            return None;
        }
        let end = to.offset.checked_add(len as u64)?;
        if slot.generation as u32 != to.region.generation()
            || end > slot.len
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
            let other = self.state.remotes.get(word.region.index())?;
            if other.generation as u32 != word.region.generation()
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

    #[inline(always)]
    fn signal_now(&mut self, word: Mapped, op: SignalOp, value: u64) {
        // SAFETY: mapped, inside its region and aligned to 8 bytes, as regions are;
        // only accessed atomically.
        unsafe { op.apply(word.ptr, value) };
        self.state.direct = true;
        self.notify(word);
    }

    /// Notifies the owner of a mapped word: inline through the first rail, which shared memory is.
    #[inline(always)]
    fn notify(&mut self, word: Mapped) {
        match word.rail {
            0 => self.rails.first_mut().notify(Peer(word.peer)),
            _ => self.notify_through(word),
        }
    }

    #[cold]
    #[inline(never)]
    fn notify_through(&mut self, word: Mapped) {
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
        // SAFETY: mapped, inside its region, aligned to its width, which is valid;
        // only accessed atomically.
        let value = unsafe { amo.apply(word.ptr) };
        if amo.op != AmoOp::Fetch {
            self.state.direct = true;
            self.notify(word);
        }
        if fetch { value } else { 0 }
    }
}
