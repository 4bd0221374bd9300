//! Operations with device memory on one or both sides. They are always posted: the processor never
//! accesses device memory. The ordinary path passes the operations that it rejects to this file, so
//! this file returns their errors. Nothing blocks.

use core::ptr::NonNull;

use crate::error::{OpError, PostError};
use crate::mem::{LocalAddr, RailId, RemoteAddr};
use crate::rail::Rail;

use super::super::super::pending::OpKind;
use super::super::super::table::{RemoteSlot, in_bounds, locate, resolve_remote};
use super::super::super::wire::Body;
use super::{Ask, ContextId, Engine, Issued, Notice, Signal, Target};

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    #[inline(never)]
    pub(super) fn put_device(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        signal: Option<Signal>,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let (source, _) = locate(self.state.locals, from, len as u64)?;
        let target = self.target_anywhere(to, len as u64)?;
        let message = match signal {
            Some(signal) => {
                let word = self.word_anywhere(signal.at)?;
                if word.peer != target.peer {
                    return Err(OpError::TwoPeers);
                }
                Some(Body::Signal {
                    at: word.place(),
                    op: signal.op,
                    value: signal.value,
                    data: None,
                })
            }
            None => None,
        };
        let stream = self.stream(context, target.peer)?;
        self.usable(target.peer)?;
        let carried = self.state.remotes[target.region as usize].carried;
        if message.is_none()
            && !carried
            && let Some(issued) =
                self.write_single(stream, source, from.region.index(), len, &target, notice, 0)
        {
            self.flush();
            return Ok(issued);
        }
        let kind = if carried { OpKind::Carry } else { OpKind::Write };
        let ask = Ask { message, ..Self::moves(kind, source, from, len, &target) };
        self.enqueue(stream, ask, notice)
    }

    /// Checks the addresses of [`put_signal`](Self::put_signal). For callers that put the bytes and
    /// the signal in separate calls.
    ///
    /// # Errors
    /// The errors of `put_signal`: a range out of bounds, a misaligned word, memory of two peers.
    #[inline(never)]
    pub fn check_put_signal(
        &self,
        to: RemoteAddr,
        len: u64,
        signal: Signal,
    ) -> Result<(), OpError> {
        match self.word_anywhere(signal.at)?.peer == self.target_anywhere(to, len)?.peer {
            true => Ok(()),
            false => Err(OpError::TwoPeers),
        }
    }

    #[inline(never)]
    pub(super) fn get_device(
        &mut self,
        context: ContextId,
        into: LocalAddr,
        len: usize,
        from: RemoteAddr,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let (local, here) = locate(self.state.locals, into, len as u64)?;
        let target = self.target_anywhere(from, len as u64)?;
        let stream = self.stream(context, target.peer)?;
        let kind = match self.state.remotes[target.region as usize].carried {
            true if here && self.state.pieces() == 0 => {
                return Err(OpError::Rail(RailId(target.rail), PostError::Unsupported));
            }
            true => OpKind::Fetch,
            false => OpKind::Read,
        };
        self.enqueue(stream, Self::moves(kind, local, into, len, &target), notice)
    }

    #[cold]
    #[inline(never)]
    pub(super) fn signal_device(
        &mut self,
        context: ContextId,
        signal: Signal,
        notice: Notice,
    ) -> Result<Issued, OpError> {
        let word = self.word_anywhere(signal.at)?;
        let stream = self.stream(context, word.peer)?;
        let message =
            Body::Signal { at: word.place(), op: signal.op, value: signal.value, data: None };
        self.enqueue(stream, Ask { message: Some(message), ..Ask::NOTHING }, notice)
    }

    fn word_anywhere(&self, at: RemoteAddr) -> Result<Target, OpError> {
        match self.word(at, 8) {
            Err(OpError::DeviceMemory) => self.target_anywhere(at, 8),
            word => word,
        }
    }

    fn moves(
        kind: OpKind,
        local: NonNull<u8>,
        addr: LocalAddr,
        len: usize,
        target: &Target,
    ) -> Ask {
        Ask {
            kind,
            local: local.as_ptr(),
            local_region: addr.region.index() as u16,
            remote: target.region,
            offset: target.offset,
            left: len as u64,
            ..Ask::NOTHING
        }
    }

    pub(super) fn target_anywhere(&self, addr: RemoteAddr, len: u64) -> Result<Target, OpError> {
        let slot: &RemoteSlot<RAILS> = match resolve_remote(self.state.remotes, addr, len) {
            Err(OpError::DeviceMemory | OpError::NativeAtomics) => {
                let slot = self.state.remotes.get(addr.region.index());
                slot.filter(|slot| in_bounds(addr.offset, len, slot.device))
                    .ok_or(OpError::UnknownRegion)?
            }
            resolved => resolved?,
        };
        Ok(Target {
            peer: slot.peer,
            region: addr.region.index() as u16,
            theirs: slot.theirs,
            rail: slot.rail,
            offset: addr.offset,
            mapped: core::ptr::null_mut(),
        })
    }
}
