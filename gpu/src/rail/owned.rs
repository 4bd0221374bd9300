//! Memory that the rail has allocated, and the slow turns that free it when no peer has it open.
//! All functions are slow paths: they make system calls, and call the driver, which may wait for
//! the device. Only [`GpuRail::revoke_all`], [`GpuRail::revoke`], [`GpuRail::free`] and
//! [`GpuRail::close_revoked`] wait for peers.

use std::time::Instant;

use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;

use super::GpuRail;
use crate::{AllocId, Device, DeviceError, DevicePtr, ExportError, RevokeError};

/// Number of polls between two clock reads. Slow turns are at least `TURN_PAUSE` nanoseconds apart.
pub(super) const TURN_PASSES: u32 = 16;
const TURN_PAUSE: u64 = 1_000_000;

#[derive(Debug, Default)]
pub(super) struct Owned {
    /// Memory from [`GpuRail::alloc`] that is not freed yet.
    allocated: Vec<DevicePtr>,
    /// Memory to be freed when its allocation is no longer exported.
    leaving: Vec<(DevicePtr, Option<AllocId>)>,
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

    /// Asks all peers to close the allocation that contains `at`, if it was exported. Waits until
    /// they have closed it. Slow path.
    ///
    /// # Errors
    /// See [`RevokeError`].
    pub fn revoke(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        match self.sharing.exports().find(at, 1) {
            Some((alloc, _)) => self.sharing.revoke_and_wait(&mut self.inner, alloc, deadline),
            None => Ok(()),
        }
    }

    /// Asks all peers to close all memory that this rail exports, even if the program allocated it.
    /// Waits until they have closed it. Slow path.
    ///
    /// # Errors
    /// [`RevokeError::Deadline`] counts the peers that have not answered.
    pub fn revoke_all(&mut self, deadline: Instant) -> Result<(), RevokeError> {
        let revoked = self.begin_to_revoke_all()?;
        loop {
            self.turn();
            let awaited =
                |&alloc: &AllocId| self.sharing.awaited(alloc).map(move |peer| (peer, alloc));
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
        let exported = self.sharing.exports().all();
        for &alloc in &exported {
            self.sharing.revoke(&mut self.inner, alloc)?;
        }
        Ok(exported)
    }

    /// Frees memory from [`alloc`](Self::alloc). Waits until no peer has it open, or until the
    /// deadline. May be called again after an error. Slow path.
    ///
    /// # Errors
    /// A peer still has the memory open, or the device fails. The memory stays allocated.
    ///
    /// # Safety
    /// `alloc` returned `at`. The memory is not registered, and no queued work uses it.
    pub unsafe fn free(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        self.revoke(at, deadline)?;
        // SAFETY: the caller guarantees that nothing uses the memory. `revoke` has waited until no
        // peer has it open.
        Ok(unsafe { self.free_closed(at) }.map_err(ExportError::Device)?)
    }

    /// Frees memory like [`free`](Self::free), without waiting for peers. If a peer has the memory
    /// open, a later poll frees it after the peer has closed it. Slow path.
    ///
    /// # Safety
    /// The contract of [`free`](Self::free) applies.
    pub unsafe fn give_back(&mut self, at: DevicePtr) {
        let exported = self.sharing.exports().find(at, 1).map(|(alloc, _)| alloc);
        if let Some(alloc) = exported {
            // Cannot fail, because the allocation is exported.
            let _ = self.sharing.revoke(&mut self.inner, alloc);
            if self.sharing.exports().allocation(alloc).is_some() {
                self.owned.leaving.push((at, exported));
                return self.turn_now_and_then();
            }
        }
        if self.sharing.defers_closes() {
            return self.owned.leaving.push((at, None));
        }
        // SAFETY: the caller guarantees that nothing uses the memory. It is no longer exported, so
        // no peer has it open.
        let _ = unsafe { self.free_closed(at) };
    }

    /// With `true`, polls do not free [given-back](Self::give_back) memory, and do not close memory
    /// of peers. The driver frees and closes memory only when no kernel of the process runs. If a
    /// kernel waits for a word that a poll must store, a poll that frees memory would never return.
    /// With `false`, polls free and close memory again. Detaching a peer closes the peer's memory
    /// in any case.
    pub fn defer_frees(&mut self, defer: bool) {
        self.sharing.defer_closes(defer);
        if !defer {
            self.turn();
        }
    }

    /// Leaks memory from [`alloc`](Self::alloc), even after the rail is dropped, because a NIC or a
    /// kernel may still access it. Asks peers to close it. Slow path.
    pub fn keep(&mut self, at: DevicePtr) {
        if let Some((alloc, _)) = self.sharing.exports().find(at, 1) {
            // Cannot fail, because the allocation is exported. The memory is leaked whether peers
            // close it or not.
            let _ = self.sharing.revoke(&mut self.inner, alloc);
        }
        self.owned.allocated.retain(|&allocated| allocated != at);
        self.sharing.driver().keep(at);
    }

    /// Frees memory that no peer has open.
    ///
    /// # Safety
    /// `alloc` returned `at`. The memory is not registered, no queued work uses it, and no peer has
    /// it open.
    unsafe fn free_closed(&mut self, at: DevicePtr) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that nothing uses the memory, and that no peer has it open.
        unsafe { self.sharing.driver().free(at) }?;
        self.owned.allocated.retain(|&allocated| allocated != at);
        Ok(())
    }

    /// Ends the deferral of frees. Then answers revocations until this process has no peer's memory
    /// open. Returns false if the deadline expired. Slow path.
    pub fn close_revoked(&mut self, deadline: Instant) -> bool {
        self.defer_frees(false);
        while self.sharing.imports().mapped().0 > 0 {
            self.turn();
            if !self.sharing.sleep(&mut self.inner, deadline) {
                return false;
            }
        }
        true
    }

    /// Does not wait for peers.
    pub(super) fn turn(&mut self) {
        self.stage.look(self.sharing.driver());
        self.sharing.turn(&mut self.inner);
        if self.sharing.defers_closes() {
            return;
        }
        let exports = self.sharing.exports();
        let closed = |&mut (_, alloc): &mut (DevicePtr, Option<AllocId>)| {
            alloc.is_none_or(|alloc| exports.allocation(alloc).is_none())
        };
        let closed: Vec<_> = self.owned.leaving.extract_if(.., closed).collect();
        for (at, _) in closed {
            // SAFETY: the caller of `give_back` guarantees that nothing in this process uses the
            // memory. It is no longer exported, so every peer has closed it or is gone.
            let _ = unsafe { self.free_closed(at) };
        }
    }

    #[cold]
    pub(super) fn turn_now_and_then(&mut self) {
        let now = self.inner.host().now_ns();
        if now >= self.next_turn_ns {
            self.next_turn_ns = now.saturating_add(TURN_PAUSE);
            self.turn();
        }
    }

    /// Detaches all peers. Leaks memory that a peer or the device may still access. Dropping the
    /// device frees the rest.
    pub(super) fn end(&mut self) {
        // First records which memory is open, because a detached peer no longer counts as a user.
        let revoked = self.begin_to_revoke_all().is_ok();
        self.defer_frees(false);
        let Owned { allocated, .. } = std::mem::take(&mut self.owned);
        let exports = self.sharing.exports();
        let is_open = |at: DevicePtr| !revoked || exports.find(at, 1).is_some();
        let allocated: Vec<_> = allocated.into_iter().map(|at| (at, is_open(at))).collect();
        for peer in 0..self.peers.len() as u16 {
            self.detach_peer(Peer(peer));
        }
        self.copies.settle(self.sharing.driver(), Instant::now() + self.config.timeout);
        // Work that has not finished by now may still access any memory.
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
