//! Issues operations: checks them, then completes them at once or passes them to `queue`, which
//! posts them in order.
//!
//! Nothing here blocks. An error means that nothing was done. After [`OpError::Again`], make
//! progress and try again.

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
    /// The word, at a multiple of 8 bytes from the start of its region.
    pub at: RemoteAddr,
    /// Set or add.
    pub op: SignalOp,
    /// The value to set or to add.
    pub value: u64,
}

impl Signal {
    /// Creates a signal that sets a word.
    pub const fn set(at: RemoteAddr, value: u64) -> Signal {
        Signal { at, op: SignalOp::Set, value }
    }

    /// Creates a signal that adds to a word, wrapping.
    pub const fn add(at: RemoteAddr, value: u64) -> Signal {
        Signal { at, op: SignalOp::Add, value }
    }
}

/// The result of issuing an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issued {
    /// The operation is applied at its target, and its local memory may be reused. After a
    /// [`send`](super::Engine::send) the memory may be reused, but the message may not have
    /// arrived; [`quiet`](super::Engine::quiet) waits for its arrival.
    Done {
        /// The fetched value, or 0.
        value: u64,
    },
    /// The operation is in flight under this token. The token of a silent operation has no meaning.
    Pending(Token),
}

/// Whether the completion of an operation is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Reports a [`Completion`](crate::op::Completion) that carries this word. The slot of the
    /// operation stays in use until the completion is taken, by token or by
    /// [`Engine::next_completion`].
    Report(u64),
    /// Reports no completion. Quiet waits for the operation, and reports its failure.
    Silent,
}

#[derive(Clone, Copy)]
struct Transfer {
    context: ContextId,
    local: LocalAddr,
    len: usize,
    remote: RemoteAddr,
    notice: Notice,
}

#[derive(Clone, Copy)]
struct Mapped {
    ptr: *mut u8,
    peer: u16,
    rail: u8,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Writes `len` bytes from `from` to `to`. Do not change the source until the operation has
    /// completed.
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
            // SAFETY: `here` and `there` checked both ranges against their regions. A mapping stays
            // until its peer is detached. When a peer fails, its regions are marked unmapped first.
            unsafe { copy_bytes(source, target.ptr, len) };
            self.state.direct = true;
            return Ok(Issued::Done { value: 0 });
        }
        if let Notice::Silent = notice
            && !R::COPIES
            && self.put_single(context, from, len, to, notice).is_some()
        {
            self.flush();
            return Ok(Issued::Pending(Token::NONE));
        }
        self.put_slow(Transfer { context, local: from, len, remote: to, notice })
    }

    /// Writes like [`put`](Self::put), then applies a signal once the data and everything earlier
    /// has landed.
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

    /// The mapped path of [`put_signal`](Self::put_signal): if the peer's memory is mapped and
    /// nothing is in flight, writes with plain stores. Returns `None` if nothing was done. Then
    /// call [`put_signal_posted`](Self::put_signal_posted), which posts the operation or returns
    /// the error. For callers that want to keep the slow path out of their hot path.
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
        // SAFETY: `here` and `there_with_word` checked both ranges against their regions. A mapping
        // stays until its peer is detached.
        unsafe { copy_bytes(source, target, len) };
        self.signal_now(word, signal.op, signal.value);
        Some(Issued::Done { value: 0 })
    }

    /// Like [`put_signal_mapped`](Self::put_signal_mapped), but writes bytes that may be reused on
    /// return.
    #[inline(always)]
    pub fn inject_signal_mapped(
        &mut self,
        context: ContextId,
        bytes: &[u8],
        to: RemoteAddr,
        signal: Signal,
    ) -> Option<Issued> {
        let (target, word) = self.there_with_word(context, to, bytes.len(), signal.at)?;
        // SAFETY: `there_with_word` checked the target against its region, and the source is a
        // slice. A mapping stays until its peer is detached.
        unsafe { copy_bytes(bytes.as_ptr(), target, bytes.len()) };
        self.signal_now(word, signal.op, signal.value);
        Some(Issued::Done { value: 0 })
    }

    /// Writes bytes that may be reused on return. Accepts at most [`inject_max`](Self::inject_max)
    /// bytes.
    #[doc(alias = "shmem_p")]
    #[inline]
    pub fn inject(
        &mut self,
        context: ContextId,
        bytes: &[u8],
        to: RemoteAddr,
    ) -> Result<(), OpError> {
        if let Some(target) = self.there(context, to, bytes.len()) {
            // SAFETY: `there` checked the target against its region, and the source is a slice. A
            // mapping stays until its peer is detached.
            unsafe { copy_bytes(bytes.as_ptr(), target.ptr, bytes.len()) };
            self.state.direct = true;
            return Ok(());
        }
        self.inject_slow(context, bytes, to)
    }

    /// Returns the longest [`inject`](Self::inject) to this peer, in bytes. 0 if the peer is
    /// unknown.
    pub fn inject_max(&self, peer: PeerId) -> usize {
        let known = self
            .state
            .peers
            .get(peer.index as usize)
            .filter(|slot| slot.generation == peer.generation);
        known.map_or(0, |_| self.state.inject_max(peer.index))
    }

    /// Applies a signal after everything sent earlier has landed.
    #[inline]
    pub fn signal(
        &mut self,
        context: ContextId,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        match self.signal_mapped(context, signal) {
            Some(issued) => Ok(issued),
            None => self.signal_posted(context, signal, notice),
        }
    }

    /// The mapped path of [`signal`](Self::signal). Returns `None` if nothing was done. Then call
    /// [`signal_posted`](Self::signal_posted).
    #[inline(always)]
    pub fn signal_mapped(&mut self, context: ContextId, signal: Signal) -> Option<Issued> {
        let word = self.there(context, signal.at, 8)?;
        if signal.at.offset & 7 != 0 {
            return None;
        }
        self.signal_now(word, signal.op, signal.value);
        Some(Issued::Done { value: 0 })
    }

    /// Reads `len` bytes from `from` into `into`. Reads are not ordered with writes: call
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
            // SAFETY: `here` and `there` checked both ranges against their regions. A mapping stays
            // until its peer is detached.
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

    /// Executes an atomic at the target, in stream order. The completion carries the old value.
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

    /// Orders later writes after everything issued earlier, without waiting. If a later write could
    /// overtake an earlier operation ([`Caps::order`](crate::rail::Caps::order)), the write is held
    /// back until earlier operations are applied. Signals and atomics need no fence.
    #[doc(alias = "shmem_fence")]
    #[inline]
    pub fn fence(&mut self, context: ContextId, peer: PeerId) -> Result<(), OpError> {
        // Release: this processor writes mapped memory of the peer. Writes before this fence must
        // be visible before writes after it. Pairs with the acquire load of the thread that polls
        // the later data.
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

    /// Returns `None` if the memory is invalid; the slow path then returns the error.
    #[inline(always)]
    fn here(&self, addr: LocalAddr, len: usize) -> Option<*mut u8> {
        let slot = self.state.locals.get(addr.region.index())?;
        let end = addr.offset.checked_add(len as u64)?;
        if slot.generation != addr.region.generation() || end > slot.len {
            return None;
        }
        Some(slot.ptr.wrapping_add(addr.offset as usize))
    }

    /// Resolves the mapped target of an operation. Returns `None` if the target is invalid or not
    /// mapped, or a stream has something in flight: a direct access preserves order only if nothing
    /// is in flight.
    #[inline(always)]
    fn there(&self, context: ContextId, addr: RemoteAddr, len: usize) -> Option<Mapped> {
        let slot = self.state.remotes.get(addr.region.index())?;
        if slot.mapped.is_null() {
            return None;
        }
        let end = addr.offset.checked_add(len as u64)?;
        if slot.generation != addr.region.generation()
            || end > slot.len
            || context.0 as u16 >= self.state.config.contexts
            || self.state.open != 0
        {
            return None;
        }
        Some(Mapped {
            ptr: slot.mapped.wrapping_add(addr.offset as usize),
            peer: slot.peer,
            rail: slot.rail,
        })
    }

    /// Like [`there`](Self::there), for data and its signal word at the same peer. Both are usually
    /// in the same region, which is then looked up once.
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
        if slot.generation != to.region.generation()
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
            if other.generation != word.region.generation()
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
        // SAFETY: the word is mapped and was checked to be in its region. It is aligned to 8 bytes,
        // because regions are, and its offset was checked. Signal words are only accessed
        // atomically.
        unsafe { op.apply(word.ptr, value) };
        self.state.direct = true;
        self.notify(word);
    }

    /// Notifies the owner of a mapped word. The call is inline for the first rail, because that is
    /// usually the rail of shared memory.
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
        // SAFETY: the word is mapped, was checked to be in its region, and is aligned to its valid
        // width. Words of atomics are only accessed atomically.
        let value = unsafe { amo.apply(word.ptr) };
        if amo.op != AmoOp::Fetch {
            self.state.direct = true;
            self.notify(word);
        }
        if fetch { value } else { 0 }
    }
}
