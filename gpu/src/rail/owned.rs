//! Memory that the rail has allocated, and slow turns that free it once no peer has it open. Slow
//! paths: they make system calls and call the driver, which may wait for the device. Only
//! [`GpuRail::revoke_all`], [`GpuRail::revoke`], [`GpuRail::free`] and [`GpuRail::close_revoked`]
//! wait for peers.

use std::time::Instant;

use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;

use super::GpuRail;
use crate::{AllocId, Device, DeviceError, DevicePtr, ExportError, RevokeError};

/// Polls between two clock reads, and the minimum time between two turns of polls, in nanoseconds.
pub(super) const TURN_PASSES: u32 = 16;
const TURN_PAUSE: u64 = 1_000_000;

/// Device memory that the rail owns.
#[derive(Debug, Default)]
pub(super) struct Owned {
    /// Allocated, and not to be freed yet.
    allocated: Vec<DevicePtr>,
    /// To be freed once they are no longer exported.
    leaving: Vec<(DevicePtr, AllocId)>,
}

impl<D: Device, H: Host> GpuRail<D, H> {
    /// Allocates `size` bytes of device memory. Slow path.
    ///
    /// # Errors
    /// Any error of the device.
    pub fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        let mut taken = self.sharing.driver().alloc(size);
        if taken == Err(DeviceError::Exhausted) && !self.owned.leaving.is_empty() {
            self.turn();
            taken = self.sharing.driver().alloc(size);
        }
        self.owned.allocated.extend(taken.ok());
        taken
    }

    /// Asks all peers to close the allocation that holds `at`, if it was exported, and waits until
    /// they have. Slow path.
    ///
    /// # Errors
    /// See [`RevokeError`].
    pub fn revoke(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        match self.sharing.exports().find(at, 1) {
            Some((alloc, _)) => self.sharing.revoke_and_wait(&mut self.inner, alloc, deadline),
            None => Ok(()),
        }
    }

    /// Asks all peers to close all memory of [`alloc`](Self::alloc), and waits until they have.
    /// Slow path.
    ///
    /// # Errors
    /// [`RevokeError::Deadline`] counts the peers that have not answered.
    pub fn revoke_all(&mut self, deadline: Instant) -> Result<(), RevokeError> {
        let revoked = self.begin_to_revoke_all()?;
        loop {
            self.turn();
            let awaited = |&alloc: &AllocId| self.sharing.awaited(alloc).map(move |peer| (peer, alloc));
            let mut awaited = revoked.iter().flat_map(awaited).peekable();
            let Some(&(peer, alloc)) = awaited.peek() else { return Ok(()) };
            if Instant::now() >= deadline {
                let mut peers: Vec<u16> = awaited.map(|(Peer(number), _)| number).collect();
                peers.sort_unstable();
                peers.dedup();
                return Err(RevokeError::Deadline { alloc, peer, peers: peers.len() });
            }
            drop(awaited);
            self.sharing.sleep(&mut self.inner, deadline);
        }
    }

    fn begin_to_revoke_all(&mut self) -> Result<Vec<AllocId>, ExportError> {
        let exports = self.sharing.exports();
        let exported = self.owned.allocated.iter().filter_map(|&at| Some(exports.find(at, 1)?.0));
        let exported: Vec<AllocId> = exported.collect();
        for &alloc in &exported {
            self.sharing.revoke(&mut self.inner, alloc)?;
        }
        Ok(exported)
    }

    /// Frees memory of [`alloc`](Self::alloc). Waits until no peer has it open, or until the
    /// deadline. May be called again. Slow path.
    ///
    /// # Errors
    /// A peer still has it open, so it stays allocated; or the device fails.
    ///
    /// # Safety
    /// `at` is what `alloc` returned. It is not registered, and nothing queued uses it.
    pub unsafe fn free(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        self.revoke(at, deadline)?;
        // SAFETY: our caller guarantees that nothing uses it, and no peer has it open.
        Ok(unsafe { self.free_closed(at) }.map_err(ExportError::Device)?)
    }

    /// Like [`free`](Self::free), without waiting: memory that a peer has open is freed in a later
    /// poll, once the peer has closed it. Memory that is never closed is freed with the device.
    /// Slow path.
    ///
    /// # Safety
    /// As for [`free`](Self::free).
    pub unsafe fn give_back(&mut self, at: DevicePtr) {
        if let Some((alloc, _)) = self.sharing.exports().find(at, 1) {
            // Cannot fail: it is exported.
            let _ = self.sharing.revoke(&mut self.inner, alloc);
            if self.sharing.exports().allocation(alloc).is_some() {
                self.owned.leaving.push((at, alloc));
                return self.turn_now_and_then();
            }
        }
        // SAFETY: our caller guarantees that nothing uses it, and no peer has it open.
        let _ = unsafe { self.free_closed(at) };
    }

    /// Leaks memory of [`alloc`](Self::alloc), even beyond the drop of the rail, because something
    /// other than a peer may still use it. Asks peers to close it. Slow path.
    pub fn keep(&mut self, at: DevicePtr) {
        if let Some((alloc, _)) = self.sharing.exports().find(at, 1) {
            // Cannot fail: it is exported. Whether peers close it changes nothing.
            let _ = self.sharing.revoke(&mut self.inner, alloc);
        }
        self.owned.allocated.retain(|&allocated| allocated != at);
        self.sharing.driver().keep(at);
    }

    /// # Safety
    /// As for [`free`](Self::free), and no peer has it open.
    unsafe fn free_closed(&mut self, at: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: our caller guarantees that nothing uses it, and that no peer has it open.
        unsafe { self.sharing.driver().free(at) }?;
        self.owned.allocated.retain(|&allocated| allocated != at);
        Ok(())
    }

    /// Answers peers that revoke their memory, until none of it is open here. Returns `false` if
    /// the deadline expired. Slow path.
    pub fn close_revoked(&mut self, deadline: Instant) -> bool {
        while self.sharing.imports().mapped().0 > 0 {
            self.turn();
            if !self.sharing.sleep(&mut self.inner, deadline) {
                return false;
            }
        }
        true
    }

    /// Answers all peers, and frees what they have closed. Does not wait for them.
    pub(super) fn turn(&mut self) {
        self.stage.look(self.sharing.driver());
        self.sharing.turn(&mut self.inner);
        let exports = self.sharing.exports();
        let closed = |&mut (_, alloc): &mut (DevicePtr, AllocId)| exports.allocation(alloc).is_none();
        let closed: Vec<_> = self.owned.leaving.extract_if(.., closed).collect();
        for (at, _) in closed {
            // SAFETY: the caller of `give_back` guarantees that nothing here uses it, and every
            // peer that had it open has closed it or is gone.
            let _ = unsafe { self.free_closed(at) };
        }
    }

    /// Takes a [`turn`](Self::turn), unless the last one was less than a millisecond ago.
    #[cold]
    pub(super) fn turn_now_and_then(&mut self) {
        let now = self.inner.host().now_ns();
        if now >= self.next_turn_ns {
            self.next_turn_ns = now.saturating_add(TURN_PAUSE);
            self.turn();
        }
    }

    /// Detaches all peers, and frees what can be freed; the device keeps the rest.
    pub(super) fn end(&mut self) {
        // A detached peer no longer counts as a user of memory, so check before.
        let revoked = self.begin_to_revoke_all().is_ok();
        self.turn();
        let Owned { allocated, .. } = std::mem::take(&mut self.owned);
        let exports = self.sharing.exports();
        let is_open = |at: DevicePtr| !revoked || exports.find(at, 1).is_some();
        let allocated: Vec<_> = allocated.into_iter().map(|at| (at, is_open(at))).collect();
        for peer in 0..self.peers.len() as u16 {
            self.detach_peer(Peer(peer));
        }
        // Work that has not finished by now may still access memory.
        let unsure = self.is_unsure() || self.streams.out() > 0;
        for (at, open) in allocated {
            if unsure {
                self.sharing.driver().keep(at);
            } else if open {
                self.sharing.driver().forsake(at);
            }
        }
    }
}
