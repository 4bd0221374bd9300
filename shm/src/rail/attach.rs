//! Attaches peers after their handshake, and detaches them. Slow paths.

use std::sync::Arc;
use std::time::Instant;

use fishplate_core::error::{AttachError, CompleteError};
use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;

use super::ShmRail;
use crate::error::HandshakeError;
use crate::handshake::Link;
use crate::peer::{Attached, Sizes};
use crate::record;

impl<H: Host> ShmRail<H> {
    /// Attaches a peer after its handshake, which must have used this rail's
    /// [`profile`](Self::profile). Slow path.
    pub fn attach(&mut self, peer: Peer, link: Link) -> Result<(), AttachError> {
        self.attach_at(peer, link, 0)
    }

    /// Both lanes are at position `start`, as at the other end.
    pub(crate) fn attach_at(
        &mut self,
        peer: Peer,
        link: Link,
        start: u64,
    ) -> Result<(), AttachError> {
        if !Arc::ptr_eq(&link.config, &self.config) {
            return Err(AttachError::Config(
                "the link was made with another rail's profile; use this rail's profile",
            ));
        }
        let sizes = self.sizes();
        let place = self.free_place(peer)?;
        let mut attached = Box::new(Attached::over(link, sizes, start));
        if let Some(remote) = &mut attached.remote {
            if let Some(set) = &self.set {
                remote.control.watch(set)?;
            }
            for segment in self.regions.segments() {
                remote.control.announce(segment.clone());
            }
        }
        self.enter(peer, place, attached);
        Ok(())
    }

    /// Attaches this rail to itself. It then has one lane and no socket, and reaches memory at its
    /// own addresses. Slow path.
    pub fn attach_self(&mut self, peer: Peer) -> Result<(), AttachError> {
        let sizes = self.sizes();
        let place = self.free_place(peer)?;
        self.enter(peer, place, Box::new(Attached::own(self.config.lane_cells, sizes)?));
        Ok(())
    }

    fn enter(&mut self, peer: Peer, place: usize, attached: Box<Attached>) {
        if place >= self.peers.len() {
            self.peers.resize_with(place + 1, || None);
        }
        self.peers[place] = Some(attached);
        self.active.push(peer);
        self.roster.join(peer);
    }

    /// Exchanges opaque bytes with an attached peer, in the same sequence as [`Link::exchange`].
    /// Slow path.
    pub fn exchange(
        &mut self,
        peer: Peer,
        blob: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, HandshakeError> {
        self.remote(peer).ok_or(HandshakeError::UnknownPeer)?.control.exchange(blob, deadline)
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            max_message: self.config.max_message,
            max_regions: self.config.max_regions,
            chunk: record::chunk_len(self.config.max_message),
        }
    }

    fn free_place(&self, peer: Peer) -> Result<usize, AttachError> {
        let place = usize::from(peer.0);
        match self.peers.get(place) {
            None | Some(None) if peer.0 < self.config.max_peers => Ok(place),
            _ => Err(AttachError::Full("ShmConfig::max_peers, or the peer is attached already")),
        }
    }

    /// Detaches a peer. Its staged operations fail in the next polls.
    pub(super) fn leave(&mut self, peer: Peer) {
        let Some(mut attached) = self.peers.get_mut(usize::from(peer.0)).and_then(Option::take)
        else {
            return;
        };
        while let Some(cx) = attached.staged.abandon() {
            self.ended.push_back((cx, CompleteError::PeerDown));
        }
        self.active.retain(|other| *other != peer);
        self.roster.leave(peer);
        self.due.remove(peer);
        // Removes regions in the common segment, because detaching unmaps it.
        self.regions.remove_common(peer);
    }
}

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
