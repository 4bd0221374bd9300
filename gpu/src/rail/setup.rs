//! The calls that a [`GpuRail`] inside an engine allows. Slow paths.

use std::time::Instant;

use fishplate_core::error::{AttachError, PostError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::sync::host::Host;
use fishplate_shm::HandshakeError;

use super::{GpuLink, GpuRail, Refused};
use crate::{Device, DeviceError, DevicePtr, RevokeError};

/// A [`GpuRail`] inside an engine.
#[derive(Debug)]
pub struct GpuSetup<'a, D: Device, H: Host>(pub(super) &'a mut GpuRail<D, H>);

impl<D: Device, H: Host> GpuSetup<'_, D, H> {
    /// See [`GpuRail::attach`].
    ///
    /// # Errors
    /// The peer number is in use, or the link was made with another rail's profile.
    pub fn attach(&mut self, peer: Peer, link: GpuLink) -> Result<(), AttachError> {
        self.0.attach(peer, link)
    }

    /// See [`GpuRail::attach_self`].
    ///
    /// # Errors
    /// The peer number is in use, or there is no memory for a lane.
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        self.0.attach_self(peer)
    }

    /// See [`GpuRail::exchange`].
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

    /// See [`GpuRail::alloc`].
    ///
    /// # Errors
    /// Any error of the device.
    pub fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        self.0.alloc(size)
    }

    /// See [`GpuRail::device`].
    pub fn device(&self) -> &D {
        self.0.device()
    }

    /// See [`GpuRail::why`].
    pub fn why(&self) -> Option<Refused> {
        self.0.why()
    }

    /// Copies bytes into registered device memory, and waits for the copy.
    ///
    /// # Errors
    /// The range is not registered, or the device is busy or fails.
    pub fn write(&mut self, at: DevicePtr, bytes: &[u8]) -> Result<(), PostError> {
        let local = self.0.registered(at, bytes.len()).ok_or(PostError::BadKey)?;
        // SAFETY: `write_device_bytes` checks the range; `bytes` is not device memory.
        unsafe { self.0.write_device_bytes(local, Untrusted::from_slice(bytes)) }
    }

    /// Copies bytes out of registered device memory, and waits for the copy.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&mut self, at: DevicePtr, into: &mut [u8]) -> Result<(), PostError> {
        let local = self.0.registered(at, into.len()).ok_or(PostError::BadKey)?;
        // SAFETY: `read_device_bytes` checks the range; `into` is not device memory.
        unsafe { self.0.read_device_bytes(local, into) }
    }

    /// See [`GpuRail::free`].
    ///
    /// # Errors
    /// See [`GpuRail::free`].
    ///
    /// # Safety
    /// As for [`GpuRail::free`].
    pub unsafe fn free(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.0.free(at, deadline) }
    }

    /// See [`GpuRail::give_back`].
    ///
    /// # Safety
    /// As for [`GpuRail::free`].
    pub unsafe fn give_back(&mut self, at: DevicePtr) {
        // SAFETY: our caller guarantees the same contract.
        unsafe { self.0.give_back(at) }
    }

    /// See [`GpuRail::keep`].
    pub fn keep(&mut self, at: DevicePtr) {
        self.0.keep(at);
    }

    /// See [`GpuRail::revoke`].
    ///
    /// # Errors
    /// See [`RevokeError`].
    pub fn revoke(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        self.0.revoke(at, deadline)
    }

    /// See [`GpuRail::revoke_all`].
    ///
    /// # Errors
    /// See [`GpuRail::revoke_all`].
    pub fn revoke_all(&mut self, deadline: Instant) -> Result<(), RevokeError> {
        self.0.revoke_all(deadline)
    }

    /// See [`GpuRail::close_revoked`].
    pub fn close_revoked(&mut self, deadline: Instant) -> bool {
        self.0.close_revoked(deadline)
    }
}
