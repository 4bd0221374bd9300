//! Attaches peers by their addresses. Slow paths.

use alloc::boxed::Box;
use alloc::vec::Vec;

use fishplate_core::error::AttachError;
use fishplate_core::mem::Peer;

use super::address::Address;
use super::fence::Return;
use super::{DeviceMemory, FabricRail};
use crate::clock::monotonic_ns;
use crate::fabric::error::CallError;
use crate::fabric::raw::*;

impl FabricRail {
    /// Returns the address that peers [attach](Self::attach). Slow path.
    ///
    /// # Errors
    /// The provider's code if it cannot name its endpoint.
    pub fn address(&self) -> Result<Vec<u8>, CallError> {
        let provider = self.endpoint.name()?;
        let format = self.endpoint.form().format();
        Ok(Address { notify: self.notify, number: self.number, format, provider: &provider }
            .encode())
    }

    /// Attaches the rail at `address` as `peer`. Slow path.
    ///
    /// Both sides must have attached each other before either posts: the rail drops arrivals from
    /// unknown senders. If the interface has lost its address and no endpoint can be opened, the
    /// peer is attached as [fenced](fishplate_core::rail::Rail::is_fenced). Polls then report the
    /// peer as lost, and later as up.
    ///
    /// # Errors
    /// The peer number is taken or out of range. The address is malformed, belongs to an
    /// incompatible rail, or is this rail's own (use [`attach_self`](Self::attach_self)). Otherwise
    /// the provider's code.
    pub fn attach(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        let theirs = Address::decode(address)?;
        if theirs.provider == self.endpoint.form().own() {
            return Err(AttachError::Config("the address is this rail's own; call attach_self"));
        }
        self.attach_to(peer, theirs)
    }

    /// Attaches the rail to itself as `peer`. Slow path.
    ///
    /// # Errors
    /// The peer number is taken or out of range, or the provider's code.
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        let name = self.endpoint.form().own().to_vec();
        let (notify, number, format) = (self.notify, self.number, self.endpoint.form().format());
        self.attach_to(peer, Address { notify, number, format, provider: &name })
    }

    fn attach_to(&mut self, peer: Peer, theirs: Address<'_>) -> Result<(), AttachError> {
        match self.peers.slots.get(peer.0 as usize) {
            Some(slot) if !slot.attached => {}
            None if peer.0 < self.config.max_peers => {}
            _ => {
                return Err(AttachError::Full(
                    "FabricConfig::max_peers, or the peer is attached already",
                ));
            }
        }
        if theirs.notify != self.notify {
            return Err(AttachError::Config(
                "the two rails report writes in different ways; use the same provider at both ends",
            ));
        }
        if theirs.format != self.endpoint.form().format() {
            return Err(AttachError::Config(
                "the two rails have different address formats; use the same provider at both ends",
            ));
        }
        if self.peers.knows(theirs.number) {
            return Err(AttachError::Config(
                "two peers have the same signature; open one of their rails again with another \
                 seed",
            ));
        }
        if !self.endpoint.form().allows(theirs.provider) {
            return Err(AttachError::BadHandle);
        }
        if self.returns.len() <= peer.0 as usize {
            self.returns.resize(peer.0 as usize + 1, Return::default());
        }
        if !self.open_again() {
            self.peers.attach(peer.0, FI_ADDR_NOTAVAIL, theirs.number, None);
            self.shut_out(peer, monotonic_ns());
            return Ok(());
        }
        let inserted = self.endpoint.insert(theirs.provider);
        let addr = inserted.map_err(|error| AttachError::System(error.code.0))?;
        self.peers.attach(peer.0, addr, theirs.number, self.short_below);
        Ok(())
    }
}

/// The calls that stay available on a [`FabricRail`] inside an engine.
pub struct FabricSetup<'a>(pub(super) &'a mut FabricRail);

impl FabricSetup<'_> {
    /// Attaches a peer: see [`FabricRail::attach`].
    ///
    /// # Errors
    /// The errors of [`FabricRail::attach`].
    pub fn attach(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        self.0.attach(peer, address)
    }

    /// Attaches the rail to itself: see [`FabricRail::attach_self`].
    ///
    /// # Errors
    /// The errors of [`FabricRail::attach_self`].
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        self.0.attach_self(peer)
    }

    /// Adds a device: see [`FabricRail::reach`].
    ///
    /// # Errors
    /// The errors of [`FabricRail::reach`].
    pub fn reach(&mut self, device: Box<dyn DeviceMemory>) -> Result<(), AttachError> {
        self.0.reach(device)
    }
}
