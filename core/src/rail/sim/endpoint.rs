//! The endpoint of one node on one rail: posts packets, and executes them when polled.

mod report;

use core::ptr::{self, NonNull};

use super::Sim;
use super::world::{MESSAGE, NONE, PacketKind, Registered};
use crate::error::{AttachError, CompleteError, PostError};
use crate::mem::{Peer, Region, Untrusted};
use crate::op::AmoSet;
use crate::rail::{Caps, Fence, Local, Order, Posted, REOPEN_MAX, Rail, RailKey, Remote, Sink};

pub(super) const PEERS: usize = 16;

/// Maximum length of a write that is copied when it is posted, in bytes.
const INJECT: usize = 64;

/// Number of polls in which posts of a closed endpoint may still land.
const LINGER: u32 = 400;

const RMA: usize = 1 << 16;

/// The endpoint of one node on one rail.
pub struct SimRail<'s, 'm> {
    pub(super) sim: &'s Sim<'m>,
    pub(super) node: u16,
    pub(super) rail: u16,
    /// The number of this endpoint in the world.
    pub(super) own: u16,
    /// `peers`: the node of each peer. `addresses`: the address at which the peer is attached.
    pub(super) peers: [u16; PEERS],
    pub(super) addresses: [u16; PEERS],
    pub(super) closes: bool,
    /// One bit per peer. `told`: the peer was reported as down. `lost`: the fence of another peer
    /// cut the peer off, and this is not yet reported.
    pub(super) told: u16,
    pub(super) lost: u16,
    /// The time at which fenced peers are next reported as up.
    pub(super) up_at: u64,
}

impl<'s, 'm> SimRail<'s, 'm> {
    /// Returns the fabric of this endpoint.
    pub fn sim(&self) -> &'s Sim<'m> {
        self.sim
    }

    /// Makes a fence close this endpoint and open it again at another address, as the rails of
    /// libfabric do. A fence then cuts off all peers, and [`Rail::fences_all`] returns true.
    pub fn with_closing_fence(mut self) -> Self {
        self.closes = true;
        self
    }
}

impl SimRail<'_, '_> {
    /// Attaches node `node` as peer number `peer`. The node may be the endpoint's own node.
    ///
    /// # Errors
    /// [`AttachError::Full`] for more than 16 peers.
    pub fn attach(&mut self, peer: Peer, node: u16) -> Result<(), AttachError> {
        let world = self.sim.world.borrow();
        let there = (node * world.rails + self.rail) as usize;
        let address = world.addresses.get(there).copied().unwrap_or(0);
        drop(world);
        self.attach_at(peer, node, address)
    }

    fn attach_at(&mut self, peer: Peer, node: u16, address: u16) -> Result<(), AttachError> {
        *self
            .peers
            .get_mut(peer.0 as usize)
            .ok_or(AttachError::Full("sim: 16 peers at most; use a peer number below 16"))? = node;
        self.addresses[peer.0 as usize] = address;
        (self.told, self.lost) = (self.told & !(1 << peer.0), self.lost & !(1 << peer.0));
        let world = &mut *self.sim.world.borrow_mut();
        world.cuts.open(self.own as usize, node);
        Ok(())
    }

    fn node_of(&self, peer: Peer) -> Result<u16, PostError> {
        match self.peers.get(peer.0 as usize) {
            Some(&node) if node != NONE => Ok(node),
            _ => Err(PostError::PeerDown),
        }
    }

    fn post(
        &mut self,
        peer: Peer,
        kind: PacketKind,
        cx: u64,
        fill: impl FnOnce(&mut [u8; MESSAGE]),
    ) -> Result<Posted, PostError> {
        let node = self.node_of(peer)?;
        let world = &mut *self.sim.world.borrow_mut();
        if world.is_dead(node) || world.is_dead(self.node) {
            return Err(PostError::PeerDown);
        }
        if let PacketKind::Write { remote, len, .. } | PacketKind::Read { remote, len, .. } = kind {
            if len > RMA {
                return Err(PostError::TooLong { len, max: RMA });
            }
            if world.resolve((node, self.rail), remote, len).is_none() {
                return Err(PostError::BadKey);
            }
        }
        let off = world.is_cut_off(self.own, node, self.addresses[peer.0 as usize]);
        let broken =
            off || world.is_broken(self.own, node, matches!(kind, PacketKind::Read { .. }));
        if broken && world.random.below(2) == 0 {
            return Err(PostError::PeerDown);
        }
        let again = world.dials[self.rail as usize].again as u64;
        let index = world.free;
        if index == NONE || (again != 0 && world.random.below(1000) < again) {
            return Err(PostError::Again);
        }
        world.free = world.packets[index as usize].next;
        let packet = &mut world.packets[index as usize];
        (packet.kind, packet.cx, packet.to_node, packet.late) = (kind, cx, node, false);
        packet.from = self.own;
        fill(&mut packet.bytes);
        if broken {
            let late = if off { 0 } else { world.cuts.late[self.own as usize] };
            world.doom(index, late);
            return Ok(Posted::Pending);
        }
        let (place, len) = match kind {
            PacketKind::Read { len, .. } => (self.node, len),
            PacketKind::Write { len, .. } => (node, len),
            PacketKind::Message { len } => (node, len as usize),
            PacketKind::Free | PacketKind::Done(_) => (node, 0),
        };
        world.schedule(index, place, self.rail, len);
        Ok(Posted::Pending)
    }

    fn peer_at(&self, node: u16) -> Option<Peer> {
        let world = self.sim.world.borrow();
        if world.cuts.muted[self.own as usize] & 1 << node != 0 {
            return None;
        }
        self.peers.iter().position(|&n| n == node).map(|i| Peer(i as u16))
    }
}

impl Drop for SimRail<'_, '_> {
    /// The memory of the endpoint becomes unreachable, and its posts no longer access memory.
    fn drop(&mut self) {
        self.sim.world.borrow_mut().withdraw(self.node, self.rail);
    }
}

/// Access to a [`SimRail`] inside an engine.
pub struct SimSetup<'a, 's, 'm>(&'a mut SimRail<'s, 'm>);

impl SimSetup<'_, '_, '_> {
    /// Attaches a node as a peer that has no node yet, like [`SimRail::attach`].
    ///
    /// # Errors
    /// [`AttachError::Full`] for more than 16 peers, or if `peer` already has a node.
    pub fn attach(&mut self, peer: Peer, node: u16) -> Result<(), AttachError> {
        match self.0.node_of(peer) {
            Err(PostError::PeerDown) => self.0.attach(peer, node),
            _ => Err(AttachError::Full(
                "sim: the peer number is attached already, or is not below 16; use a free number",
            )),
        }
    }
}

// SAFETY: the rail maps nothing. Packets in flight hold pointers only until their completion, which
// `poll` reports once. `SimSetup` attaches only to free peer numbers.
unsafe impl<'s, 'm> Rail for SimRail<'s, 'm> {
    type Setup<'a>
        = SimSetup<'a, 's, 'm>
    where
        Self: 'a;

    const COPIES: bool = false;

    fn setup(&mut self) -> SimSetup<'_, 's, 'm> {
        SimSetup(self)
    }

    fn caps(&self) -> Caps {
        let world = self.sim.world.borrow();
        Caps {
            max_message: MESSAGE,
            max_rma: RMA,
            inject: INJECT,
            data_bytes: 4,
            order: if world.dials[self.rail as usize].ordered { Order::All } else { Order::None },
            native_atomics: AmoSet::NONE,
            depth: world.packets.len() as u32,
            fresh: false,
            fences: true,
        }
    }

    fn register(&mut self, region: &Region) -> Result<(RailKey, u64), AttachError> {
        let world = &mut *self.sim.world.borrow_mut();
        let free =
            world.regions.iter().position(|place| place.memory.is_none()).ok_or(
                AttachError::Full("sim: 128 regions at most, of all nodes; deregister one"),
            )?;
        let place = &mut world.regions[free];
        place.memory = Some(((self.node, self.rail), region.ptr(), region.len()));
        Ok((RailKey { key: place.key(free), base: 0 }, 0))
    }

    fn deregister(&mut self, key: RailKey) -> Result<(), AttachError> {
        let world = &mut *self.sim.world.borrow_mut();
        if let Some(index) = world.registered((self.node, self.rail), key) {
            let Registered { memory, uses } = &mut world.regions[index];
            (*memory, *uses) = (None, *uses + 1);
        }
        Ok(())
    }

    fn touches(&mut self, memory: Local) -> bool {
        let world = self.sim.world.borrow();
        world.packets.iter().filter(|packet| packet.from == self.own).any(|packet| {
            match packet.kind {
                PacketKind::Write { from: Some(from), len, .. } => {
                    memory.overlaps(from.as_ptr(), len)
                }
                PacketKind::Read { into, len, .. } => memory.overlaps(into, len),
                _ => false,
            }
        })
    }

    fn import(
        &mut self,
        peer: Peer,
        key: RailKey,
        len: u64,
    ) -> Result<Option<NonNull<u8>>, AttachError> {
        let node = self.node_of(peer).map_err(|_| AttachError::UnknownPeer)?;
        let world = self.sim.world.borrow();
        let len = usize::try_from(len).map_err(|_| AttachError::BadHandle)?;
        world
            .resolve((node, self.rail), Remote { key, offset: 0 }, len)
            .map(|_| None)
            .ok_or(AttachError::BadHandle)
    }

    fn release(&mut self, _peer: Peer, _key: RailKey) {}

    fn detach(&mut self, peer: Peer) {
        let Ok(node) = self.node_of(peer) else { return };
        self.peers[peer.0 as usize] = NONE;
        self.sim.world.borrow_mut().detach(self.own, node);
    }

    #[cold]
    fn fence(&mut self, peer: Peer) -> Fence {
        let Ok(node) = self.node_of(peer) else { return Fence::Fenced };
        let world = &mut *self.sim.world.borrow_mut();
        if world.cuts.is_fenced(self.own, node) {
            return Fence::Fenced;
        }
        if !world.is_fence_due(self.own, node) {
            return Fence::Pending;
        }
        world.cut_off(self.own, node, 0);
        if self.closes {
            let address = &mut world.addresses[self.own as usize];
            *address = address.wrapping_add(1);
            for (i, &other) in self.peers.iter().enumerate() {
                if other != NONE && !world.cuts.is_fenced(self.own, other) {
                    world.cut_off(self.own, other, LINGER);
                    self.lost |= 1 << i;
                }
            }
        }
        Fence::Fenced
    }

    #[cold]
    fn mute(&mut self, peer: Peer) {
        let Ok(node) = self.node_of(peer) else { return };
        let world = &mut *self.sim.world.borrow_mut();
        world.cuts.muted[self.own as usize] |= 1 << node;
    }

    #[cold]
    fn fence_left(&mut self, peer: Peer) -> Fence {
        let Ok(node) = self.node_of(peer) else { return Fence::Fenced };
        if !self.closes {
            return self.fence(peer);
        }
        let world = &mut *self.sim.world.borrow_mut();
        match world.cuts.is_fenced(self.own, node) || world.part(self.own, node) {
            true => Fence::Fenced,
            false => Fence::Pending,
        }
    }

    fn fences_all(&self) -> bool {
        self.closes
    }

    #[cold]
    fn is_fenced(&self, peer: Peer) -> bool {
        let world = self.sim.world.borrow();
        self.node_of(peer).is_ok_and(|node| world.cuts.is_fenced(self.own, node))
    }

    #[cold]
    fn reopen(&mut self, peer: Peer, into: &mut [u8; REOPEN_MAX]) -> Option<usize> {
        let node = self.node_of(peer).ok()?;
        let world = self.sim.world.borrow();
        if world.cuts.is_cut(self.own, node)
            || (world.cuts.is_fenced(self.own, node) && world.has_posts(self.own, node))
        {
            return None;
        }
        into[..2].copy_from_slice(&self.node.to_le_bytes());
        into[2..4].copy_from_slice(&world.addresses[self.own as usize].to_le_bytes());
        Some(4)
    }

    #[cold]
    fn rejoin(&mut self, peer: Peer, address: &[u8]) -> Result<(), AttachError> {
        let node = self.node_of(peer).map_err(|_| AttachError::UnknownPeer)?;
        match *address {
            [a, b, c, d] if [a, b] == node.to_le_bytes() => {
                self.attach_at(peer, node, u16::from_le_bytes([c, d]))
            }
            _ => Err(AttachError::BadHandle),
        }
    }

    unsafe fn post_write(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        data: Option<u32>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let Local { ptr, len, .. } = local;
        let from = (len > INJECT).then_some(ptr);
        self.post(peer, PacketKind::Write { from, len, remote, data }, cx, |bytes| {
            if from.is_none() {
                // SAFETY: our caller guarantees that the source is readable, and the packet has
                // room for `len` bytes.
                unsafe { ptr::copy(ptr.as_ptr(), bytes.as_mut_ptr(), len) };
            }
        })
    }

    unsafe fn post_read(
        &mut self,
        peer: Peer,
        local: Local,
        remote: Remote,
        cx: u64,
    ) -> Result<Posted, PostError> {
        self.post(
            peer,
            PacketKind::Read { into: local.ptr.as_ptr(), len: local.len, remote },
            cx,
            |_| (),
        )
    }

    fn post_message(
        &mut self,
        peer: Peer,
        head: &[u8],
        body: Untrusted<'_>,
        cx: u64,
    ) -> Result<Posted, PostError> {
        let len = head.len() + body.len();
        if len > MESSAGE {
            return Err(PostError::TooLong { len, max: MESSAGE });
        }
        self.post(peer, PacketKind::Message { len: len as u16 }, cx, |bytes| {
            let (first, rest) = bytes.split_at_mut(head.len());
            first.copy_from_slice(head);
            body.copy_out(rest);
        })
    }

    fn poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let down = self.report_peers(budget, sink);
        {
            let world = &mut *self.sim.world.borrow_mut();
            world.now += 1;
            let idle = world.dials[self.rail as usize].idle as u64;
            if world.is_dead(self.node) || (idle != 0 && world.random.below(1000) < idle) {
                return down;
            }
        }
        for n in down..budget {
            let (due, rails) = {
                let world = &mut *self.sim.world.borrow_mut();
                (world.next_due(self.own), world.rails)
            };
            let Some((index, packet)) = due else { return n };
            let origin = packet.from / rails;
            match packet.kind {
                PacketKind::Free => {}
                PacketKind::Done(result) => {
                    self.sim.world.borrow_mut().release(index);
                    sink.done(packet.cx, result);
                }
                PacketKind::Read { into, len, remote } => {
                    let (dead, source) = {
                        let world = self.sim.world.borrow();
                        (
                            world.is_dead(packet.to_node),
                            world.resolve((packet.to_node, self.rail), remote, len),
                        )
                    };
                    self.sim.world.borrow_mut().release(index);
                    let result = match source {
                        _ if dead => Err(CompleteError::PeerDown),
                        None => Err(CompleteError::Failed(-1)),
                        Some(source) => {
                            // SAFETY: `resolve` found the source inside a registration. The poster
                            // keeps the target writable until its completion, which is sent below.
                            // If the read completed as unknown, the target stays writable until the
                            // peer is fenced.
                            unsafe { ptr::copy(source, into, len) };
                            Ok(())
                        }
                    };
                    if !packet.late {
                        sink.done(packet.cx, result);
                    }
                }
                PacketKind::Write { from, len, remote, data } => {
                    let target =
                        self.sim.world.borrow().resolve((self.node, self.rail), remote, len);
                    if let Some(target) = target {
                        let from =
                            from.map_or(packet.bytes.as_ptr(), |from| from.as_ptr().cast_const());
                        // SAFETY: `resolve` found the target inside a registration. The poster
                        // keeps the source readable until the completion, or the source is the
                        // packet itself.
                        unsafe { ptr::copy(from, target, len) };
                        if let (Some(data), Some(peer)) = (data, self.peer_at(origin)) {
                            sink.landed(peer, data);
                        }
                    }
                    let result = target.map(drop).ok_or(CompleteError::Failed(-1));
                    self.sim.world.borrow_mut().give_back(index, result);
                }
                PacketKind::Message { len } => {
                    if let Some(peer) = self.peer_at(origin) {
                        sink.message(peer, Untrusted::from_slice(&packet.bytes[..len as usize]));
                    }
                    self.sim.world.borrow_mut().give_back(index, Ok(()));
                }
            }
        }
        budget
    }
}
