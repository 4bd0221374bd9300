//! Packets in flight, registrations and the simulated time, which all endpoints share.

use core::ptr::{self, NonNull};

use super::Dials;
use super::links::{Cuts, ENDPOINTS};
use crate::error::{AttachError, CompleteError};
use crate::rail::random::Random;
use crate::rail::{RailKey, Remote};

pub(super) const REGIONS: usize = 128;

pub(super) const MESSAGE: usize = 256;

pub(super) const NONE: u16 = u16::MAX;

#[derive(Clone, Copy, Debug)]
pub(super) enum PacketKind {
    Free,
    /// Executed at the target: copies the bytes, reports the data word if there is one, and sends
    /// the completion. Without a source pointer, the packet contains the bytes.
    Write {
        from: Option<NonNull<u8>>,
        len: usize,
        remote: Remote,
        data: Option<u32>,
    },
    /// Executed at the origin, in place of the target's hardware: copies the bytes and completes.
    Read {
        into: *mut u8,
        len: usize,
        remote: Remote,
    },
    /// Executed at the target: reports the message.
    Message {
        len: u16,
    },
    /// Executed at the origin: reports the completion.
    Done(Result<(), CompleteError>),
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
pub struct Packet {
    pub(super) kind: PacketKind,
    pub(super) at: u64,
    pub(super) cx: u64,
    /// The endpoint that posted the packet, and its target node.
    pub(super) from: u16,
    pub(super) to_node: u16,
    pub(super) next: u16,
    /// Whether the packet's post has already completed.
    pub(super) late: bool,
    pub(super) bytes: [u8; MESSAGE],
}

impl Packet {
    /// An unused packet.
    pub const EMPTY: Packet = Packet {
        kind: PacketKind::Free,
        at: 0,
        cx: 0,
        from: 0,
        to_node: 0,
        next: NONE,
        late: false,
        bytes: [0; MESSAGE],
    };
}

pub(super) struct World<'m> {
    pub(super) packets: &'m mut [Packet],
    pub(super) free: u16,
    /// The list of packets that each endpoint must still execute or report. Unordered unless the
    /// rail is ordered.
    pub(super) heads: [u16; ENDPOINTS],
    pub(super) regions: [Registered; REGIONS],
    pub(super) dials: [Dials; 16],
    /// Time at which each endpoint's link is idle again, in polls times its rate.
    pub(super) busy: [u64; ENDPOINTS],
    pub(super) dead: u64,
    pub(super) cuts: Cuts,
    /// The address of each endpoint, which is the number of times it was closed.
    pub(super) addresses: [u16; ENDPOINTS],
    pub(super) nodes: u16,
    pub(super) rails: u16,
    pub(super) now: u64,
    pub(super) random: Random,
    pub(super) trace: u64,
}

/// A registration: its node and rail, the memory, and how often this slot has been used. The use
/// count is part of the key.
#[derive(Clone, Copy)]
pub(super) struct Registered {
    pub(super) memory: Option<((u16, u16), NonNull<u8>, usize)>,
    pub(super) uses: u64,
}

impl Registered {
    pub(super) fn key(&self, index: usize) -> u64 {
        (self.uses << 8) | (index as u64 + 1)
    }
}

impl World<'_> {
    pub(super) fn is_dead(&self, node: u16) -> bool {
        self.dead & 1u64.unbounded_shl(node as u32) != 0
    }

    pub(super) fn delay(&mut self, rail: u16) -> u64 {
        let Dials { min_delay, max_delay, .. } = self.dials[rail as usize];
        min_delay as u64 + self.random.below(max_delay.saturating_sub(min_delay) as u64 + 1)
    }

    /// Returns the number of polls until `len` more bytes have arrived at an endpoint.
    pub(super) fn carry(&mut self, node: u16, rail: u16, len: usize) -> u64 {
        let rate = self.dials[rail as usize].rate as u64;
        if rate == 0 {
            return 0;
        }
        let (busy, now) = (&mut self.busy[(node * self.rails + rail) as usize], self.now * rate);
        *busy = now.max(*busy) + len as u64;
        (*busy - now).div_ceil(rate)
    }

    /// Keeps the order of posting if the rail is ordered.
    pub(super) fn schedule(&mut self, index: u16, node: u16, rail: u16, len: usize) {
        let mut at = self.now + self.carry(node, rail, len) + self.delay(rail);
        let endpoint = (node * self.rails + rail) as usize;
        let mut link = self.heads[endpoint];
        if self.dials[rail as usize].ordered {
            let from = self.packets[index as usize].from;
            let mut last = NONE;
            while link != NONE {
                let packet = &self.packets[link as usize];
                if packet.from == from {
                    at = at.max(packet.at);
                }
                (last, link) = (link, packet.next);
            }
            self.packets[index as usize].next = NONE;
            match last {
                NONE => self.heads[endpoint] = index,
                last => self.packets[last as usize].next = index,
            }
        } else {
            self.packets[index as usize].next = link;
            self.heads[endpoint] = index;
        }
        self.packets[index as usize].at = at;
    }

    /// Completes the post of a packet that will still arrive. Returns the packet of the completion.
    /// Returns `None` if no packet is free, or if the packet cannot hold the payload.
    pub(super) fn make_late(&mut self, index: u16) -> Option<u16> {
        let Packet { kind, cx, from, to_node, late, .. } = self.packets[index as usize];
        let end = self.free;
        if late || end == NONE {
            return None;
        }
        let packet = &mut self.packets[index as usize];
        match kind {
            PacketKind::Message { .. }
            | PacketKind::Write { from: None, .. }
            | PacketKind::Read { .. } => {}
            PacketKind::Write { from: Some(bytes), len, remote, data } if len <= MESSAGE => {
                // SAFETY: the post has not completed, and until then the poster keeps the source
                // readable.
                unsafe { ptr::copy(bytes.as_ptr(), packet.bytes.as_mut_ptr(), len) };
                packet.kind = PacketKind::Write { from: None, len, remote, data };
            }
            _ => return None,
        }
        packet.late = true;
        self.free = self.packets[end as usize].next;
        let kind = PacketKind::Done(Err(CompleteError::Unknown(-1)));
        self.packets[end as usize] = Packet { kind, cx, from, to_node, ..Packet::EMPTY };
        Some(end)
    }

    pub(super) fn release(&mut self, index: u16) {
        self.packets[index as usize].kind = PacketKind::Free;
        self.packets[index as usize].next = self.free;
        self.free = index;
    }

    /// Takes a packet that is due from an endpoint's list.
    pub(super) fn next_due(&mut self, own: u16) -> Option<(u16, Packet)> {
        let (mut last, mut link) = (NONE, self.heads[own as usize]);
        while link != NONE {
            let packet = self.packets[link as usize];
            if packet.at <= self.now {
                match last {
                    NONE => self.heads[own as usize] = packet.next,
                    last => self.packets[last as usize].next = packet.next,
                }
                self.trace = (self.trace ^ packet.cx ^ ((link as u64) << 48))
                    .wrapping_mul(0x100_0000_01b3)
                    ^ self.now;
                return Some((link, packet));
            }
            (last, link) = (link, packet.next);
        }
        None
    }

    /// Sends the completion of an executed packet to its origin.
    pub(super) fn give_back(&mut self, index: u16, result: Result<(), CompleteError>) {
        let packet = &mut self.packets[index as usize];
        if packet.late {
            return self.release(index);
        }
        packet.kind = PacketKind::Done(result);
        let from = packet.from;
        self.schedule(index, from / self.rails, from % self.rails, 0);
    }

    pub(super) fn check_link(&self, from: u16, to: u16, rail: u16) -> Result<(), AttachError> {
        match rail < self.rails && from < self.nodes && to < self.nodes {
            true => Ok(()),
            false => Err(AttachError::Config(
                "sim: the link does not exist; name nodes and a rail of this simulation",
            )),
        }
    }

    /// Drops the registrations and posts of an endpoint. Operations in flight to the endpoint fail.
    pub(super) fn withdraw(&mut self, node: u16, rail: u16) {
        for place in &mut self.regions {
            if place.memory.is_some_and(|(owner, ..)| owner == (node, rail)) {
                (place.memory, place.uses) = (None, place.uses + 1);
            }
        }
        let own = node * self.rails + rail;
        for endpoint in 0..ENDPOINTS {
            let mut link = core::mem::replace(&mut self.heads[endpoint], NONE);
            let (mut last, mut returned) = (NONE, NONE);
            while link != NONE {
                let packet = &mut self.packets[link as usize];
                let next = core::mem::replace(&mut packet.next, NONE);
                if packet.from == own {
                    self.release(link);
                } else if endpoint == own as usize {
                    packet.kind = PacketKind::Done(Err(CompleteError::PeerDown));
                    packet.next = returned;
                    returned = link;
                } else {
                    match last {
                        NONE => self.heads[endpoint] = link,
                        last => self.packets[last as usize].next = link,
                    }
                    last = link;
                }
                link = next;
            }
            while returned != NONE {
                let Packet { next, from, .. } = self.packets[returned as usize];
                self.schedule(returned, from / self.rails, from % self.rails, 0);
                returned = next;
            }
        }
    }

    /// Fails the posts of an endpoint to a node. With [`Dials::late`] they may still arrive.
    pub(super) fn detach(&mut self, own: u16, node: u16) {
        let (origin, rail) = (own / self.rails, own % self.rails);
        // Operations to the node wait at the node's endpoint, and reads wait at this endpoint.
        for endpoint in [node * self.rails + rail, own] {
            let (mut last, mut link) = (NONE, self.heads[endpoint as usize]);
            while link != NONE {
                let Packet { next, from, to_node, kind, late, .. } = self.packets[link as usize];
                if from != own || to_node != node || late || matches!(kind, PacketKind::Done(_)) {
                    (last, link) = (link, next);
                    continue;
                }
                if self.dials[rail as usize].late
                    && !matches!(kind, PacketKind::Read { .. })
                    && let Some(end) = self.make_late(link)
                {
                    self.schedule(end, origin, rail, 0);
                    (last, link) = (link, next);
                    continue;
                }
                match last {
                    NONE => self.heads[endpoint as usize] = next,
                    last => self.packets[last as usize].next = next,
                }
                self.packets[link as usize].kind = PacketKind::Done(Err(CompleteError::PeerDown));
                self.schedule(link, origin, rail, 0);
                // In an unordered list the new packet is at the front, so the loop continues behind
                // it. In an ordered list it is at the back.
                if last == NONE && self.heads[endpoint as usize] == link {
                    last = link;
                }
                link = next;
            }
        }
    }

    /// Fails the packets that wait at endpoints of dead nodes.
    pub(super) fn fail_dead(&mut self) {
        let (dead, rails) = (self.dead, self.rails);
        for endpoint in 0..ENDPOINTS as u16 {
            let node = endpoint / rails;
            if dead & (1 << node) == 0 {
                continue;
            }
            let mut link = core::mem::replace(&mut self.heads[endpoint as usize], NONE);
            while link != NONE {
                let Packet { next, from, late, .. } = self.packets[link as usize];
                let origin = from / rails;
                if late || dead & (1 << origin) != 0 {
                    self.release(link);
                } else {
                    self.packets[link as usize].kind =
                        PacketKind::Done(Err(CompleteError::PeerDown));
                    self.schedule(link, origin, from % rails, 0);
                }
                link = next;
            }
        }
    }

    /// `endpoint` is a node and a rail.
    pub(super) fn registered(&self, endpoint: (u16, u16), key: RailKey) -> Option<usize> {
        let index = (key.key as usize & 0xff).checked_sub(1)?;
        let place = self.regions.get(index)?;
        (place.key(index) == key.key
            && matches!(place.memory, Some((owner, ..)) if owner == endpoint))
        .then_some(index)
    }

    pub(super) fn resolve(
        &self,
        endpoint: (u16, u16),
        remote: Remote,
        len: usize,
    ) -> Option<*mut u8> {
        let (_, base, size) = self.regions[self.registered(endpoint, remote.key)?].memory?;
        let end = remote.offset.checked_add(len as u64)?;
        // SAFETY: offset + len <= size, so the pointer stays inside the registered region.
        (end <= size as u64).then(|| unsafe { base.as_ptr().add(remote.offset as usize) })
    }
}
