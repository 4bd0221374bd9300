//! Meets peers on this host, over sockets: the node with the smaller id dials, and the other
//! accepts. No call waits. If both nodes have a device, they then exchange the settings of their
//! devices over the link.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::time::Instant;

use fishplate_core::engine::protocol::MatchLimits;
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::PeerId;
use fishplate_gpu::GpuLink;
use fishplate_shm::{HandshakeError, Link, Listener};

use super::address::{Address, socket};
use super::contact::{Contact, LOCAL, Meeting, Stage, Step, joint, limits};
use super::home::Home;
use super::rail::NodeSetup;
use super::{Error, Node};

/// Maximum number of unconnected peers that one pass polls, so that absent peers do not slow the
/// pass down.
const ONCE: usize = 32;

impl Node {
    pub(super) fn meet_here(&mut self, now_ms: u32) {
        let now = Instant::now();
        self.accept(now);
        self.agree(now_ms);
        for (address, why) in self.listener.failed() {
            let dialled = |contact: &&mut Contact| {
                contact.is_at(Step::Dialled) && *address == *OsStr::new(&socket(contact.door))
            };
            let Some(contact) = self.peers.contacts.iter_mut().find(dialled) else { continue };
            match contact.meeting() {
                Some(meeting) if !is_final(why) => meeting.later(Step::Dials, now_ms),
                _ => contact.stage = Stage::failed(Error::Handshake(why)),
            }
        }
        for _ in 0..ONCE.min(self.peers.contacts.len()) {
            self.turn = if self.turn < self.peers.contacts.len() { self.turn } else { 0 };
            let contact = &mut self.peers.contacts[self.turn];
            self.turn += 1;
            let door = contact.door;
            let Some(meeting) = contact.meeting().filter(|meeting| meeting.is_due(now_ms)) else {
                continue;
            };
            let attempt = match meeting.step {
                Step::Waits => is_listening(door),
                _ => self.listener.dial(socket(door), &self.profile),
            };
            match (attempt, meeting.step) {
                (Ok(()), Step::Dials) => meeting.step = Step::Dialled,
                // A node listens before it has an address, until it closes or its process ends.
                (Err(HandshakeError::System(libc::ECONNREFUSED)), _) => {
                    contact.stage = Stage::failed(OpError::PeerFailed(PeerError::Closed).into());
                }
                (_, step) => meeting.later(step, now_ms),
            }
        }
        self.peers.dials = self.peers.contacts.iter().any(|contact| contact.stage.is_meeting());
    }

    fn accept(&mut self, now: Instant) {
        for _ in 0..self.peers.contacts.len() + 1 {
            let Ok(link) = self.listener.accept(&self.profile, now) else { break };
            self.met(link);
        }
    }

    fn met(&mut self, link: Link) {
        let id = link.peer_id();
        let waiting = |contact: &Contact| match contact.stage {
            Stage::Meets(meeting) if contact.id == id => {
                Some((contact.peer, meeting, contact.limits))
            }
            _ => None,
        };
        match self.peers.contacts.iter().find_map(waiting) {
            Some((peer, meeting, limits)) => {
                let stage =
                    self.take_link(peer, meeting, limits, link).unwrap_or_else(Stage::failed);
                if let Some(contact) =
                    self.peers.contacts.iter_mut().find(|contact| contact.peer == peer)
                {
                    contact.stage = stage;
                }
            }
            // The peer dialled before the program has connected to it. A peer's latest link
            // replaces its earlier links, so there is at most one link per peer.
            None => {
                self.early.retain(|early| early.peer_id() != id);
                if self.early.len() < usize::from(self.builder.limits.peers) {
                    self.early.push(link);
                }
            }
        }
    }

    fn take_link(
        &mut self,
        peer: PeerId,
        meeting: Meeting,
        limits: MatchLimits,
        link: Link,
    ) -> Result<Stage, Error> {
        // The new link replaces an older link of this peer.
        self.agreements.retain(|(agrees, _)| *agrees != peer);
        self.home.engine.set_up_peer(peer)?;
        let Some(profile) = self.agrees.as_ref().filter(|_| meeting.gpu) else {
            if let Some(mut rail) = self.home.engine.rail_mut(LOCAL) {
                rail.attach(peer.peer(), link)?;
            }
            join_local(&mut self.home, peer, limits)?;
            return Ok(Stage::local(false));
        };
        // If this fails, the link is broken. [`agree`](Self::agree) then connects to the peer
        // again.
        if let Ok(agreement) = profile.begin(link) {
            self.agreements.push((peer, agreement));
        }
        Ok(Stage::Meets(Meeting { step: Step::Agrees, ..meeting }))
    }

    fn agree(&mut self, now: u32) {
        for contact in self.peers.contacts.iter_mut().filter(|contact| contact.is_at(Step::Agrees))
        {
            let (agrees, dials) = (contact.peer, self.address.id < contact.id);
            let Some(meeting) = contact.meeting() else { continue };
            let Some(at) = self.agreements.iter().position(|(peer, _)| *peer == agrees) else {
                meeting.again(dials, now);
                continue;
            };
            let (peer, agreement) = self.agreements.swap_remove(at);
            contact.stage = match agreement.step() {
                Ok(ControlFlow::Continue(agreement)) => {
                    self.agreements.push((peer, agreement));
                    continue;
                }
                Ok(ControlFlow::Break(link)) => {
                    match attach_gpu(&mut self.home, peer, link, contact.limits) {
                        Ok(()) => Stage::local(true),
                        Err(error) => Stage::failed(error),
                    }
                }
                Err(why) if is_final(why) => Stage::failed(Error::Handshake(why)),
                Err(_) => {
                    meeting.again(dials, now);
                    continue;
                }
            };
        }
    }

    pub(super) fn begin_local(
        &mut self,
        peer: PeerId,
        address: &Address,
        gpu: bool,
    ) -> Result<Stage, Error> {
        let meeting = Meeting::new(self.address.id < address.id, gpu, self.now_ms());
        if address.id == self.address.id {
            self.home.engine.set_up_peer(peer)?;
            if let Some(mut rail) = self.home.engine.rail_mut(LOCAL) {
                rail.attach_self(peer.peer())?;
            }
            join_local(&mut self.home, peer, limits(address))?;
            return Ok(Stage::local(gpu));
        }
        // The peer may have closed this link and dialled again.
        self.accept(Instant::now());
        self.early.retain_mut(|link| !link.has_ended());
        if let Some(at) = self.early.iter().position(|link| link.peer_id() == address.id) {
            let link = self.early.swap_remove(at);
            return self.take_link(peer, meeting, limits(address), link);
        }
        Ok(Stage::Meets(meeting))
    }
}

fn attach_gpu(
    home: &mut Home,
    peer: PeerId,
    link: GpuLink,
    limits: MatchLimits,
) -> Result<(), Error> {
    if let Some(NodeSetup::Gpu(mut gpu)) = home.engine.rail_mut(LOCAL) {
        gpu.attach(peer.peer(), link)?;
    }
    join_local(home, peer, limits)
}

fn join_local(home: &mut Home, peer: PeerId, limits: MatchLimits) -> Result<(), Error> {
    Ok(home.engine.join_peer(peer, &[joint(LOCAL, LOCAL, usize::MAX)], Some(limits))?)
}

/// Checks that a node listens, without a connection that it would have to accept.
fn is_listening(door: u64) -> Result<(), HandshakeError> {
    match Listener::bind(socket(door)) {
        Ok(_) => Err(HandshakeError::System(libc::ECONNREFUSED)),
        Err(_) => Ok(()),
    }
}

/// Returns whether a handshake would fail again in every attempt.
fn is_final(why: HandshakeError) -> bool {
    use HandshakeError::{Mismatch, Process, Segment, User, Version};
    matches!(why, Version { .. } | Mismatch { .. } | User(_) | Process { .. } | Segment(_))
}

#[cfg(test)]
mod tests;
