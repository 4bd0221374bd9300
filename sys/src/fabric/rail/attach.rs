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
    /// senders that are not attached. If the interface has lost its address and no endpoint can be
    /// opened, the peer is attached as [fenced](fishplate_core::rail::Rail::is_fenced). Polls then
    /// report the peer as lost, and later as up.
    ///
    /// # Errors
    /// The peer number is taken or out of range. The address is malformed, belongs to an
    /// incompatible rail, or is this rail's own (use [`attach_self`](Self::attach_self)). Otherwise
    /// the provider's code.
    pub fn attach(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        let theirs = self.foreign(address)?;
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

    /// Makes the rail at `address` known as `peer`, so that
    /// [`attach_expected`](Self::attach_expected) can attach it later. When something from the
    /// peer arrives before that, polls report
    /// [`Sink::called`](fishplate_core::rail::Sink::called), and
    /// [`next_caller`](Self::next_caller) names the peer. The arrival itself is dropped, so the
    /// peer must repeat it, or wait for an answer to any of its posts. Slow path.
    ///
    /// # Errors
    /// The errors of [`attach`](Self::attach), except those of the provider.
    pub fn expect(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        let theirs = self.foreign(address)?;
        self.check_new(peer, &theirs)?;
        self.expected.add(peer.0, theirs.number, theirs.provider);
        Ok(())
    }

    /// Attaches a peer that was [expected](Self::expect). Slow path.
    ///
    /// # Errors
    /// The peer is not expected, or the provider's code. The peer is not expected then.
    pub fn attach_expected(&mut self, peer: Peer) -> Result<(), AttachError> {
        let (number, provider) = self.expected.take(peer.0).ok_or(AttachError::UnknownPeer)?;
        let (notify, format) = (self.notify, self.endpoint.form().format());
        self.attach_to(peer, Address { notify, number, format, provider: &provider })
    }

    /// Returns the next expected peer that has called. Each peer is named once, and again if it
    /// calls again.
    pub fn next_caller(&mut self) -> Option<Peer> {
        self.expected.next_caller().map(Peer)
    }

    /// Returns whether a post to the peer is outstanding.
    pub fn has_posts_to(&self, peer: Peer) -> bool {
        self.peers.slots.get(peer.0 as usize).is_some_and(|slot| slot.outstanding() != 0)
    }

    fn foreign<'a>(&self, address: &'a [u8]) -> Result<Address<'a>, AttachError> {
        let theirs = Address::decode(address)?;
        if theirs.provider == self.endpoint.form().own() {
            return Err(AttachError::Config("the address is this rail's own; call attach_self"));
        }
        Ok(theirs)
    }

    fn check_new(&self, peer: Peer, theirs: &Address<'_>) -> Result<(), AttachError> {
        match self.peers.slots.get(peer.0 as usize) {
            Some(slot) if !slot.attached && !self.expected.has(peer.0) => {}
            None if peer.0 < self.config.max_peers && !self.expected.has(peer.0) => {}
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
        if self.peers.knows(theirs.number) || self.expected.knows(theirs.number) {
            return Err(AttachError::Config(
                "two peers have the same signature; open one of their rails again with another \
                 seed",
            ));
        }
        if !self.endpoint.form().allows(theirs.provider) {
            return Err(AttachError::BadHandle);
        }
        Ok(())
    }

    fn attach_to(&mut self, peer: Peer, theirs: Address<'_>) -> Result<(), AttachError> {
        self.check_new(peer, &theirs)?;
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
        self.knocks.note(peer.0, theirs.provider);
        self.searches.resume();
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

    /// Makes a peer known: see [`FabricRail::expect`].
    ///
    /// # Errors
    /// The errors of [`FabricRail::expect`].
    pub fn expect(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        self.0.expect(peer, address)
    }

    /// Attaches an expected peer: see [`FabricRail::attach_expected`].
    ///
    /// # Errors
    /// The errors of [`FabricRail::attach_expected`].
    pub fn attach_expected(&mut self, peer: Peer) -> Result<(), AttachError> {
        self.0.attach_expected(peer)
    }

    /// Undoes [`expect`](Self::expect).
    pub fn forget_expected(&mut self, peer: Peer) {
        self.0.expected.take(peer.0);
    }

    /// Returns a peer that has called: see [`FabricRail::next_caller`].
    pub fn next_caller(&mut self) -> Option<Peer> {
        self.0.next_caller()
    }

    /// Adds a device: see [`FabricRail::reach`].
    ///
    /// # Errors
    /// The errors of [`FabricRail::reach`].
    pub fn reach(&mut self, device: Box<dyn DeviceMemory>) -> Result<(), AttachError> {
        self.0.reach(device)
    }
}
