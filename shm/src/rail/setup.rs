//! The setup calls of a [`ShmRail`] that an engine owns. Slow paths.

use std::time::Instant;

use fishplate_core::error::AttachError;
use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;

use super::ShmRail;
use crate::error::HandshakeError;
use crate::handshake::Link;

/// Gives access to the setup calls of a [`ShmRail`] that an engine owns.
#[derive(Debug)]
pub struct ShmSetup<'a, H: Host>(pub(super) &'a mut ShmRail<H>);

impl<H: Host> ShmSetup<'_, H> {
    /// Attaches a peer after its handshake: see [`ShmRail::attach`].
    ///
    /// # Errors
    /// The slot is in use, or the link was made with another rail's profile.
    pub fn attach(&mut self, peer: Peer, link: Link) -> Result<(), AttachError> {
        self.0.attach(peer, link)
    }

    /// Attaches the rail to itself: see [`ShmRail::attach_self`].
    ///
    /// # Errors
    /// The slot is in use, or there is no memory for a lane.
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        self.0.attach_self(peer)
    }

    /// Exchanges opaque bytes with a peer: see [`ShmRail::exchange`].
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
}
