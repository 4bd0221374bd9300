//! Connects peers: turns a peer's address into rails that carry operations.
//!
//! A peer on another host is attached at its first use, or when its first message arrives: see
//! `distant`. The engine queues operations until that peer answers.
//!
//! A peer on this host is connected over a socket: the node with the smaller id dials, and the
//! other accepts. Only [`Node::connected`] waits. The first use of a peer calls it.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use fishplate_core::engine::Joint;
use fishplate_core::engine::protocol::MatchLimits;
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{PeerId, RailId};
use fishplate_core::sync::host::Host;
use fishplate_gpu::GpuLink;
use fishplate_shm::{HandshakeError, Link, Listener};

use super::address::{Address, socket};
use super::home::Home;
use super::rail::NodeSetup;
use super::silent::Kind;
use super::{Driver, Error, Node, RailPair, behind};
use crate::topology::{FabricEnd, joined};

/// The rail to peers on this host.
pub(super) const LOCAL: RailId = RailId(0);

/// Minimum and maximum time between two attempts to dial a peer, or two checks that it still
/// listens, in milliseconds. The time grows by an eighth with each attempt.
const REDIAL: [u16; 2] = [20, 1000];

/// Maximum number of unconnected peers that one pass polls, so that absent peers do not slow the
/// pass down.
const ONCE: usize = 32;

/// The rails that reach a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Whether shared memory reaches the peer. `false` also before a peer on this host is
    /// connected.
    pub shared_memory: bool,
    /// Whether shared memory also carries device memory.
    pub gpu: bool,
    /// Number of libfabric rails.
    pub fabric: usize,
}

/// This structure is small, because a program may connect many peers and talk to few of them. The
/// engine's tables and the rails' memory are set up when the peer is attached.
pub(super) struct Contact {
    pub peer: PeerId,
    limits: MatchLimits,
    pub id: u64,
    door: u64,
    stage: Stage,
}

static_assertions::const_assert_eq!(size_of::<Contact>(), 48);

#[derive(PartialEq, Eq)]
pub(super) enum Stage {
    /// A peer on this host that is not attached yet.
    Meets(Meeting),
    Joined(Box<Joined>),
    /// Connected, but the peer could not be attached.
    Failed(Box<Error>),
}

#[derive(PartialEq, Eq)]
pub(super) struct Joined {
    reach: Reach,
    pairs: Vec<RailPair>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Meeting {
    step: Step,
    /// Whether both nodes have a device.
    gpu: bool,
    /// Time of the next attempt, and pause after it, in milliseconds.
    at: u32,
    pause: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Dials,
    /// This node has dialled. It never dials twice at once, because both sides must use the same
    /// link.
    Dialled,
    /// The peer dials. Meanwhile this node checks that it still listens.
    Waits,
    /// Connected. The two nodes still exchange the settings of their devices.
    Agrees,
}

impl Meeting {
    fn later(&mut self, step: Step, now: u32) {
        let pause = self.pause;
        (self.step, self.at) = (step, now.wrapping_add(pause.into()));
        self.pause = (pause + pause / 8).min(REDIAL[1]);
    }

    fn again(&mut self, dials: bool, now: u32) {
        self.later(if dials { Step::Dials } else { Step::Waits }, now);
    }

    fn is_due(&self, now: u32) -> bool {
        matches!(self.step, Step::Dials | Step::Waits) && now.wrapping_sub(self.at) <= u32::MAX / 2
    }
}

impl Stage {
    fn local(gpu: bool) -> Stage {
        let reach = Reach { shared_memory: true, gpu, fabric: 0 };
        Stage::Joined(Box::new(Joined { reach, pairs: vec![] }))
    }

    pub(super) fn over_fabric(pairs: Vec<RailPair>) -> Stage {
        let reach = Reach { shared_memory: false, gpu: false, fabric: pairs.len() };
        Stage::Joined(Box::new(Joined { reach, pairs }))
    }

    pub(super) fn failed(error: Error) -> Stage {
        Stage::Failed(Box::new(error))
    }

    fn is_meeting(&self) -> bool {
        matches!(self, Stage::Meets(_))
    }
}

impl Contact {
    /// Returns the contact of a peer on another host.
    pub(super) fn distant(peer: PeerId, id: u64, limits: MatchLimits, stage: Stage) -> Contact {
        Contact { peer, limits, id, door: 0, stage }
    }

    fn meeting(&mut self) -> Option<&mut Meeting> {
        match &mut self.stage {
            Stage::Meets(meeting) => Some(meeting),
            _ => None,
        }
    }

    pub(super) fn pairs(&self) -> &[RailPair] {
        match &self.stage {
            Stage::Joined(joined) => &joined.pairs,
            _ => &[],
        }
    }

    fn is_at(&self, step: Step) -> bool {
        matches!(&self.stage, Stage::Meets(meeting) if meeting.step == step)
    }
}

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
        self.home.engine.check_peers();
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

    fn meet_here(&mut self, now_ms: u32) {
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

    /// Returns the host's time in milliseconds. The value wraps.
    fn now_ms(&self) -> u32 {
        to_ms(self.home.host().now_ns())
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

    fn begin_local(&mut self, peer: PeerId, address: &Address, gpu: bool) -> Result<Stage, Error> {
        let mut meeting = Meeting { step: Step::Dials, gpu, at: self.now_ms(), pause: REDIAL[0] };
        if self.address.id > address.id {
            meeting.later(Step::Waits, meeting.at);
        }
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

fn joint(ours: RailId, theirs: RailId, max_message: usize) -> Joint {
    Joint { ours, theirs: theirs.0, max_message }
}

/// Converts a time to milliseconds. The value wraps.
pub(super) fn to_ms(ns: u64) -> u32 {
    (ns / 1_000_000) as u32
}

fn limits(address: &Address) -> MatchLimits {
    let Address { eager, credits, headers, .. } = *address;
    MatchLimits { eager, credits, headers }
}

#[cfg(test)]
mod tests;
