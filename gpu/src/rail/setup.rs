//! The setup calls of a [`GpuRail`] that an engine owns. Slow paths.

use std::time::Instant;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::sync::host::Host;
use fishplate_shm::HandshakeError;

use super::{GpuLink, GpuRail, Refused};
use crate::{Device, DeviceError, DevicePtr, RevokeError};

/// Gives access to the setup calls of a [`GpuRail`] that an engine owns.
#[derive(Debug)]
pub struct GpuSetup<'a, D: Device, H: Host>(pub(super) &'a mut GpuRail<D, H>);

impl<D: Device, H: Host> GpuSetup<'_, D, H> {
    /// Attaches a peer: see [`GpuRail::attach`].
    ///
    /// # Errors
    /// The peer number is in use, or the link was made with another rail's profile.
    pub fn attach(&mut self, peer: Peer, link: GpuLink) -> Result<(), AttachError> {
        self.0.attach(peer, link)
    }

    /// Attaches the rail to itself: see [`GpuRail::attach_self`].
    ///
    /// # Errors
    /// The peer number is in use, or there is no memory for a lane.
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        self.0.attach_self(peer)
    }

    /// Exchanges opaque bytes with a peer: see [`GpuRail::exchange`].
    ///
    /// # Errors
    /// The peer is not attached, hung up, or did not answer in time.
    pub fn exchange(
        &mut self,
        peer: Peer,
        blob: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, HandshakeError> {
        self.0.exchange(peer, blob, deadline)
    }

    /// Allocates device memory: see [`GpuRail::alloc`].
    ///
    /// # Errors
    /// Any error of the device.
    pub fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        self.0.alloc(size)
    }

    /// Returns the device.
    pub fn device(&self) -> &D {
        self.0.device()
    }

    /// Returns why device memory was last rejected.
    pub fn why(&self) -> Option<Refused> {
        self.0.why()
    }

    /// Copies bytes into registered device memory, and waits for the copy.
    ///
    /// # Errors
    /// The range is not registered, or the device is busy or fails.
    pub fn write(&mut self, at: DevicePtr, bytes: &[u8]) -> Result<(), PostError> {
        let local = self.0.registered(at, bytes.len()).ok_or(PostError::BadKey)?;
        // SAFETY: `registered` returned a registered range, and `bytes` is host memory.
        unsafe { self.0.write_device_bytes(local, Untrusted::from_slice(bytes)) }
    }

    /// Copies bytes out of registered device memory, and waits for the copy.
    ///
    /// # Errors
    /// The range is not registered, or the device is busy or fails.
    pub fn read(&mut self, at: DevicePtr, into: &mut [u8]) -> Result<(), PostError> {
        let local = self.0.registered(at, into.len()).ok_or(PostError::BadKey)?;
        // SAFETY: `registered` returned a registered range, and `into` is host memory.
        unsafe { self.0.read_device_bytes(local, into) }
    }

    /// Copies between ranges of registered device memory (to, from, length), and waits for the
    /// copies.
    ///
    /// # Errors
    /// A range is not registered, the two ranges of a copy overlap, or the device is busy or fails.
    /// Some copies may be complete.
    pub fn copy(&mut self, ranges: &[(DevicePtr, DevicePtr, usize)]) -> Result<(), PostError> {
        for &(to, from, len) in ranges {
            let overlaps = to.0.abs_diff(from.0) < len as u64;
            if overlaps || [to, from].iter().any(|at| self.0.registered(*at, len).is_none()) {
                return Err(PostError::BadKey);
            }
        }
        // SAFETY: the loop above found all ranges registered. The two ranges of a copy do not
        // overlap.
        unsafe { self.0.copy_device_bytes(ranges) }
    }

    /// Frees device memory, and waits for peers: see [`GpuRail::free`].
    ///
    /// # Errors
    /// A peer still has the memory open, or the device fails. The memory stays allocated.
    ///
    /// # Safety
    /// The contract of [`GpuRail::free`] applies.
    pub unsafe fn free(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        // SAFETY: the caller upholds the contract of `GpuRail::free`.
        unsafe { self.0.free(at, deadline) }
    }

    /// Frees device memory without waiting: see [`GpuRail::give_back`].
    ///
    /// # Safety
    /// The contract of [`GpuRail::free`] applies.
    pub unsafe fn give_back(&mut self, at: DevicePtr) {
        // SAFETY: the caller upholds the contract of `GpuRail::free`, which `give_back` requires.
        unsafe { self.0.give_back(at) }
    }

    /// Sets whether polls free and close memory: see [`GpuRail::defer_frees`].
    pub fn defer_frees(&mut self, defer: bool) {
        self.0.defer_frees(defer);
    }

    /// Leaks device memory: see [`GpuRail::keep`].
    pub fn keep(&mut self, at: DevicePtr) {
        self.0.keep(at);
    }

    /// Revokes device memory, and waits for peers: see [`GpuRail::revoke`].
    ///
    /// # Errors
    /// See [`RevokeError`].
    pub fn revoke(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        self.0.revoke(at, deadline)
    }

    /// Revokes all device memory, and waits for peers: see [`GpuRail::revoke_all`].
    ///
    /// # Errors
    /// [`RevokeError::Deadline`] counts the peers that have not answered.
    pub fn revoke_all(&mut self, deadline: Instant) -> Result<(), RevokeError> {
        self.0.revoke_all(deadline)
    }

    /// Waits until this process has no peer's memory open: see [`GpuRail::close_revoked`].
    pub fn close_revoked(&mut self, deadline: Instant) -> bool {
        self.0.close_revoked(deadline)
    }
}
