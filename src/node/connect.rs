//! Connects peers: turns a peer's address into rails that carry operations.
//!
//! A peer on another host is attached at its first use, or when its first message arrives: see
//! `distant`. The engine queues operations until that peer answers. A peer on this host is
//! connected over a socket: see `near`. Only [`Node::connected`] waits. The first use of a peer
//! calls it.

use std::time::Duration;

use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{PeerId, RailId};
use fishplate_core::sync::host::Host;

use super::address::{Address, socket};
use super::contact::{Contact, Reach, Stage, joint, limits, to_ms};
use super::silent::Kind;
use super::{Driver, Error, Node, RailPair, behind};
use crate::topology::{FabricEnd, joined};

impl Node {
    /// Adds a peer by its address. The peer must add this node too, in any order. This call does
    /// not wait. [`progress`](Self::progress) and waits establish the connection. The first
    /// operation that needs an answer waits for the connection.
    ///
    /// Before the first operation to a peer or from it, the peer occupies at most 64 bytes of
    /// memory, or a little more with many rails.
    ///
    /// The same address returns the same peer, even if it has failed, until
    /// [`disconnect`](Self::disconnect). Slow path: allocates, makes system calls.
    ///
    /// # Errors
    /// The address is invalid or has another version; a setting that both nodes must share differs;
    /// the limit of peers is reached; or the two nodes have no rail in common.
    pub fn connect(&mut self, address: impl AsRef<[u8]>) -> Result<PeerId, Error> {
        behind!(self, |node| node.connect(address));
        let address = Address::decode(address.as_ref())?;
        if let Some(known) = self.peers.named(address.id) {
            return Ok(known);
        }
        let same = |what, theirs, ours| match theirs == ours {
            true => Ok(()),
            false => Err(Error::Differs { what, theirs, ours }),
        };
        same("window", address.window, self.address.window)?;
        same("contexts", address.contexts.into(), self.address.contexts.into())?;
        let peers = self.builder.limits.peers;
        let named = self.home.engine.name_peer();
        let peer = named.map_err(|error| Error::of(error, "peers", peers))?;
        let gpu = self.agrees.is_some() && address.gpu;
        // A node reaches itself through memory in any case.
        let near = address.host == self.address.host && self.builder.local;
        let begun = match near || address.id == self.address.id {
            true => self.begin_local(peer, &address, gpu).map(Some),
            false => self.expect(peer, &address).map(|()| None),
        };
        match begun {
            Ok(Some(stage)) => {
                let (limits, Address { id, door, .. }) = (limits(&address), address);
                self.turn = self.peers.contacts.len();
                self.peers.dials |= stage.is_meeting();
                self.peers.meeting |= stage.is_meeting();
                self.peers.contacts.push(Contact { peer, limits, id, door, stage });
                self.meet();
                Ok(peer)
            }
            Ok(None) => Ok(peer),
            Err(error) => {
                self.home.engine.remove_peer(peer)?;
                Err(error)
            }
        }
    }

    /// Removes a peer: its operations fail, and its regions are released. Slow path.
    ///
    /// # Errors
    /// The peer is unknown or was removed.
    pub fn disconnect(&mut self, peer: PeerId) -> Result<(), Error> {
        behind!(self, |node| node.disconnect(peer));
        self.home.engine.remove_peer(peer)?;
        if self.peers.silent.take(peer).is_some() {
            return Ok(());
        }
        self.agreements.retain(|(agrees, _)| *agrees != peer);
        if let Some(at) = self.peers.contacts.iter().position(|contact| contact.peer == peer) {
            // Closes the peer's link, so that the other end cannot use it together with a later
            // one.
            let contact = self.peers.contacts.swap_remove(at);
            match contact.pairs().is_empty() {
                true => self.listener.hang_up(socket(contact.door)),
                false => self.peers.part(contact.id, self.builder.limits.peers.into()),
            }
        }
        Ok(())
    }

    /// Returns the reason if the peer has failed. Also checks that all peers are alive, as waits
    /// do. Before this check, writes to a dead peer's memory can succeed. Slow path.
    ///
    /// # Errors
    /// The peer is unknown or was removed; or it connected but could not be attached.
    pub fn peer_error(&mut self, peer: PeerId) -> Result<Option<PeerError>, Error> {
        behind!(self, |node| node.peer_error(peer));
        self.home.engine.check_peer(peer);
        match self.peers.find(peer).map(|contact| &contact.stage) {
            Some(Stage::Failed(error)) => match **error {
                Error::Op(OpError::PeerFailed(why)) => Ok(Some(why)),
                error => Err(error),
            },
            Some(Stage::Meets(_)) => Ok(None),
            None if self.peers.silent.has(peer) => Ok(None),
            _ => Ok(self.home.engine.peer_error(peer)?),
        }
    }

    /// Checks that peers are alive, as [`peer_error`](Self::peer_error) does, and returns the
    /// failed peers. A peer that has closed its node has not failed. Also
    /// [publishes](Node::publish_counters) the counters. Slow path: allocates.
    pub fn failed_peers(&mut self) -> Vec<(PeerId, PeerError)> {
        if let Driver::Worker(worker) = &self.driver {
            return worker.call(Node::failed_peers).unwrap_or_default();
        }
        self.home.engine.check_peers();
        self.publish_counters();
        let engine = &self.home.engine;
        let failed = |contact: &Contact| match engine.peer_error(contact.peer) {
            Ok(Some(error)) if error != PeerError::Closed => Some((contact.peer, error)),
            _ => None,
        };
        self.peers.contacts.iter().filter_map(failed).collect()
    }

    /// Returns the kinds of rails that reach a peer.
    ///
    /// # Errors
    /// The peer is unknown or was removed.
    pub fn reach(&self, peer: PeerId) -> Result<Reach, Error> {
        behind!(self, |node| node.reach(peer));
        if let Some(kind) = self.peers.silent.kind(peer) {
            return Ok(Reach { shared_memory: false, gpu: false, fabric: kind.pairs.len() });
        }
        match &self.contact(peer)?.stage {
            Stage::Joined(joined) => Ok(joined.reach),
            _ => Ok(Reach::default()),
        }
    }

    #[cold]
    pub(super) fn connected(&mut self, peer: PeerId) -> Result<(), Error> {
        self.connected_by(peer, self.deadline_ns(self.builder.connect_timeout))
    }

    pub(super) fn connected_by(&mut self, peer: PeerId, deadline_ns: u64) -> Result<(), Error> {
        self.attach(peer);
        loop {
            match self.peers.find(peer).map(|contact| &contact.stage) {
                Some(stage) if stage.is_meeting() => {}
                Some(Stage::Failed(error)) => return Err(**error),
                _ => return Ok(()),
            }
            if self.home.host().now_ns() >= deadline_ns {
                return Err(Error::NotConnected(peer));
            }
            self.serve();
        }
    }

    /// Returns the reason if a peer could not be connected or attached.
    pub(super) fn attachable(&self, peer: PeerId) -> Result<(), Error> {
        match self.peers.find(peer) {
            Some(Contact { stage: Stage::Failed(error), .. }) => Err(**error),
            _ => Ok(()),
        }
    }

    /// Makes progress while a call waits for another process.
    pub(super) fn serve(&mut self) {
        if self.home.engine.progress() == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.meet();
    }

    /// Returns whether operations can be sent to the peer. `None` if the peer is unknown.
    pub(super) fn is_met(&self, peer: PeerId) -> Option<bool> {
        if self.peers.silent.has(peer) {
            return Some(false);
        }
        Some(matches!(self.peers.find(peer)?.stage, Stage::Joined(_)))
    }

    /// Attaches a peer on another host, unless it is attached.
    #[cold]
    pub(super) fn attach(&mut self, peer: PeerId) {
        self.peers.attach(&mut self.home.engine, peer, false);
    }

    #[cold]
    pub(super) fn meet_now_and_then(&mut self) {
        if self.home.engine.has_call() {
            self.peers.answer_calls(&mut self.home.engine);
        }
        if self.peers.is_due() {
            self.meet();
            self.peers.rest();
        }
    }

    /// Connects the peers that are not connected yet. Never waits.
    pub(super) fn meet(&mut self) {
        if self.home.engine.has_call() {
            self.peers.answer_calls(&mut self.home.engine);
        }
        if !self.peers.meeting {
            return;
        }
        let now_ms = self.now_ms();
        if self.peers.dials {
            self.meet_here(now_ms);
        }
        self.peers.greet_again(&mut self.home.engine, now_ms);
    }

    /// Returns the host's time in milliseconds. The value wraps.
    pub(super) fn now_ms(&self) -> u32 {
        to_ms(self.home.host().now_ns())
    }

    fn expect(&mut self, peer: PeerId, address: &Address) -> Result<(), Error> {
        let ends = |address: &Address| -> Vec<FabricEnd> {
            address.rails.iter().map(|rail| rail.end).collect()
        };
        let mut joined = joined(&ends(&self.address), &ends(address), self.address.id, address.id);
        if joined.is_empty() {
            return Err(Error::NoRail);
        }
        joined.sort_unstable();
        let (mut joints, mut pairs, mut addresses) = (vec![], vec![], vec![]);
        for (ours, theirs) in joined {
            let rail = &address.rails[theirs];
            // The first rail of each node is shared memory.
            let [ours, theirs] = [ours, theirs].map(|rail| RailId(rail as u8 + 1));
            addresses.push(&rail.address[..]);
            joints.push(joint(ours, theirs, rail.max_message as usize));
            pairs.push(RailPair { ours, theirs, their_mbit: rail.end.mbit });
        }
        // The peer is joined later, and the caller must hear of a bad address now.
        self.home.engine.check_joints(&joints)?;
        let kind = Kind { pairs, joints, limits: limits(address) };
        self.peers.expect(&mut self.home.engine, peer, address.id, kind, &addresses)
    }
}
