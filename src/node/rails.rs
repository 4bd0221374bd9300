//! Describes a node's rails, and the rails that reach a peer.

use std::fmt;
use std::os::fd::OwnedFd;

use fishplate_core::error::{AttachError, PeerError, Stuck};
use fishplate_core::mem::{PeerId, RailId};
use fishplate_core::op::{AmoSet, Fault};
use fishplate_core::rail::Rail;

use super::contact::Contact;
use super::home::NodeEngine;
use super::rail::{NodeRail, NodeSetup};
use super::{Driver, Error, Node, behind};
use crate::rails::OpenRail;

/// A libfabric rail of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailInfo {
    /// The number of the rail, which also appears in errors. Rail 0 reaches peers on this host.
    pub id: RailId,
    /// The provider's name.
    pub provider: String,
    /// The provider's name for the interface.
    pub interface: String,
    /// Speed in megabits per second; 0 if unknown.
    pub mbit: u32,
    /// Whether the rail registers memory of the node's device. If it refuses some memory,
    /// [`last_error`](Node::last_error) has the reason.
    pub device: bool,
    /// The atomics that the provider executes. Empty without
    /// [`Settings::native_atomics`](crate::config::Settings::native_atomics). The node executes all
    /// other atomics, and all atomics in memory that is not from
    /// [`alloc_native_atomics`](Node::alloc_native_atomics).
    pub atomics: AmoSet,
    /// Whether the provider has a descriptor (`FI_WAIT_FD`) that ends the sleep of a wait.
    pub wakes: bool,
}

/// A rail of this node, and the peer's rail that it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailPair {
    /// The rail of this node.
    pub ours: RailId,
    /// The rail of the peer.
    pub theirs: RailId,
    /// Speed of the peer's rail in megabits per second; 0 if unknown.
    pub their_mbit: u32,
}

/// The reason why a rail to a peer is out of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RailError {
    /// The rail.
    pub rail: RailId,
    /// The reason why the engine does not use the rail.
    pub fault: Fault,
    /// The last error that libfabric or the provider reported for the rail.
    pub provider: Option<String>,
}

impl fmt::Display for RailError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rail {} is out of use: {}", self.rail.0, self.why())
    }
}

impl RailError {
    /// Returns the reason as text, without the rail. Allocates.
    pub fn why(&self) -> String {
        let why = match self.fault {
            Fault::Peer(PeerError::Removed) => "it was disabled".into(),
            Fault::Peer(PeerError::Rail(_)) => "its link is down, or its connection broke".into(),
            Fault::Peer(error) => error.to_string(),
            fault => fault.to_string(),
        };
        match &self.provider {
            Some(words) => format!("{why} ({words})"),
            None => why,
        }
    }
}

impl RailInfo {
    pub(super) fn of(open: &OpenRail, id: RailId, device: bool) -> RailInfo {
        let OpenRail { rail, provider, interface, mbit, .. } = open;
        let (provider, interface) = (provider.clone(), interface.clone());
        let (atomics, wakes) = (rail.caps().native_atomics, rail.inner().wait().is_some());
        RailInfo { id, provider, interface, mbit: *mbit, device, atomics, wakes }
    }
}

pub(super) fn last_error(engine: &NodeEngine, rail: RailId) -> Option<String> {
    match engine.rail(rail)? {
        NodeRail::Fabric(guard) => guard.inner().last_error(),
        NodeRail::Local(_) | NodeRail::Gpu(_) => None,
    }
}

impl Node {
    /// Returns the libfabric rails in the order of their numbers, which begin at 1. Rail 0 is
    /// shared memory.
    pub fn rails(&self) -> &[RailInfo] {
        &self.rails
    }

    /// Returns the last error that libfabric or the provider reported for a rail. `None`: no error,
    /// or no such libfabric rail. Slow path: allocates.
    pub fn last_error(&self, rail: RailId) -> Option<String> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.last_error(rail)).ok().flatten();
        }
        last_error(&self.home.engine, rail)
    }

    /// Returns the libfabric rails that reach a peer, in the order of our rails. A peer on this
    /// host has none. Slow path: allocates.
    ///
    /// # Errors
    /// The peer is unknown or was removed.
    pub fn rail_pairs(&self, peer: PeerId) -> Result<Vec<RailPair>, Error> {
        behind!(self, |node| node.rail_pairs(peer));
        match self.peers.silent.kind(peer) {
            Some(kind) => Ok(kind.pairs.clone()),
            None => Ok(self.contact(peer)?.pairs().to_vec()),
        }
    }

    /// Takes a libfabric rail to a peer out of use until [`enable_rail`](Self::enable_rail), for
    /// example for maintenance. Later calls move the rail's operations to the peer's other rails,
    /// once the peer has agreed. Other peers lose the rail for some milliseconds. The rail stays in
    /// use if the last other rail fails first, or if the peer has asked earlier to disable another
    /// rail: then [`rail_errors`](Self::rail_errors) no longer names it. Does not wait.
    ///
    /// # Errors
    /// The peer is unknown, not connected, or has no [failover](super::Builder::failover). Or the
    /// rail does not lead to the peer, or is the last rail in use.
    pub fn disable_rail(&mut self, peer: PeerId, rail: RailId) -> Result<(), Error> {
        behind!(self, |node| node.disable_rail(peer, rail));
        self.attach(peer);
        Ok(self.home.engine.disable_rail(peer, rail)?)
    }

    /// Allows a rail to a peer to return after it was [disabled](Self::disable_rail). Later calls
    /// use the rail once both nodes agree. A failed rail returns without this call. Does not wait.
    ///
    /// # Errors
    /// The peer is unknown, not connected, or has no [failover](super::Builder::failover). Or the
    /// rail does not lead to the peer, or is the only rail that does.
    pub fn enable_rail(&mut self, peer: PeerId, rail: RailId) -> Result<(), Error> {
        behind!(self, |node| node.enable_rail(peer, rail));
        self.attach(peer);
        Ok(self.home.engine.enable_rail(peer, rail)?)
    }

    /// Returns the reasons why rails to a peer are out of use, in the order of the rails' numbers.
    /// Empty if all rails are in use. Also works after the peer has failed with its last rail. Slow
    /// path: allocates.
    ///
    /// # Errors
    /// The peer is unknown or was removed.
    pub fn rail_errors(&self, peer: PeerId) -> Result<Vec<RailError>, Error> {
        behind!(self, |node| node.rail_errors(peer));
        let mut errors = vec![];
        if self.peers.silent.has(peer) {
            return Ok(errors);
        }
        for RailPair { ours: rail, .. } in self.rail_pairs(peer)? {
            if let Some(fault) = self.home.engine.rail_error(peer, rail)? {
                errors.push(RailError { rail, fault, provider: self.last_error(rail) });
            }
        }
        Ok(errors)
    }

    /// Watches a peer through a descriptor, such as a TCP connection to its process. End of stream
    /// means that the peer's process has ended, which a provider may not report.
    ///
    /// From now on, waits and [`peer_error`](Self::peer_error) poll the descriptor. Nothing is read
    /// from it or written to it. For a peer on this host the descriptor is closed, because shared
    /// memory reports the end of the process. Slow path: system calls.
    ///
    /// # Errors
    /// The peer is unknown or was removed, or no descriptors are left. Each rail to the peer needs
    /// one.
    pub fn watch(&mut self, peer: PeerId, lifeline: impl Into<OwnedFd>) -> Result<(), Error> {
        let lifeline = lifeline.into();
        behind!(self, |node| node.watch(peer, lifeline));
        self.attach(peer);
        for RailPair { ours, .. } in self.rail_pairs(peer)? {
            let own = lifeline.try_clone().map_err(|error| {
                AttachError::System(error.raw_os_error().unwrap_or(libc::EMFILE))
            })?;
            if let Some(NodeSetup::Fabric(mut guard)) = self.home.engine.rail_mut(ours) {
                guard.watch(peer.peer(), Some(own.into()));
            }
        }
        Ok(())
    }

    /// Returns the oldest missing arrival from the peer `from`, or from any peer. The error of
    /// [`quiet`](Self::quiet) describes missing acknowledgements of this node's own operations.
    pub fn missing(&self, from: Option<PeerId>) -> Stuck {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(|node| node.missing(from)).unwrap_or_default();
        }
        self.home.engine.missing(from)
    }

    pub(super) fn contact(&self, peer: PeerId) -> Result<&Contact, Error> {
        self.peers.find(peer).ok_or_else(|| AttachError::UnknownPeer.into())
    }
}
