//! The part of a [`GpuRail`] that the owner of its engine may use. Slow paths.

use std::time::Instant;

use fishplate_core::error::AttachError;
use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;
use fishplate_shm::HandshakeError;

use super::{GpuLink, GpuRail};
use crate::{Device, DeviceError, DevicePtr, RevokeError};

/// What the owner of an engine may do with a [`GpuRail`] in it.
#[derive(Debug)]
pub struct GpuSetup<'a, D: Device, H: Host>(pub(super) &'a mut GpuRail<D, H>);

impl<D: Device, H: Host> GpuSetup<'_, D, H> {
    /// See [`GpuRail::attach`].
    ///
    /// # Errors
    /// The place is taken, or the link was made with another rail's profile.
    pub fn attach(&mut self, peer: Peer, link: GpuLink) -> Result<(), AttachError> {
        self.0.attach(peer, link)
    }

    /// See [`GpuRail::attach_self`].
    ///
    /// # Errors
    /// The place is taken, or there is no memory for a lane.
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
    /// The device's.
    pub fn alloc(&mut self, size: u64) -> Result<DevicePtr, DeviceError> {
        self.0.alloc(size)
    }

    /// See [`GpuRail::revoke`].
    ///
    /// # Errors
    /// See [`RevokeError`].
    pub fn revoke(&mut self, at: DevicePtr, deadline: Instant) -> Result<(), RevokeError> {
        self.0.revoke(at, deadline)
    }

    /// See [`GpuRail::close_revoked`].
    pub fn close_revoked(&mut self, deadline: Instant) -> bool {
        self.0.close_revoked(deadline)
    }
}
