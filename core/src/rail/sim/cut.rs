//! Decides the fate of packets on cut links, and fences peers.

use super::world::{NONE, Packet, PacketKind, World};
use crate::error::CompleteError;

/// `NOTICE`: maximum delay in polls from a cut to its report at the posting node. `FENCE`: maximum
/// delay in polls from the first call of `fence` until it takes effect.
const NOTICE: u64 = 200;
const FENCE: u64 = 60;

impl World<'_> {
    pub(super) fn cut(&mut self, from: u16, to: u16, rail: u16, late: u32) {
        let (own, there) = (from * self.rails + rail, to * self.rails + rail);
        self.cuts.cut[own as usize] |= 1 << to;
        self.cuts.broken[own as usize] |= 1 << to;
        self.cuts.late[own as usize] = late;
        self.cuts.told_at[own as usize] = self.now + self.random.below(NOTICE);
        // A packet waits at its target's endpoint, except for a read, which waits at its origin's
        // endpoint. Reads by the target fail too.
        let sent = self.take(there, |packet| packet.from == own && packet.to_node == to);
        self.end_each(sent, late);
        for (endpoint, node) in [(own, to), (there, from)] {
            let is_read = |packet: &Packet| matches!(packet.kind, PacketKind::Read { .. });
            let reads = self.take(endpoint, |packet| is_read(packet) && packet.to_node == node);
            self.end_each(reads, late);
        }
        self.deny(own, to);
        self.deny(there, from);
    }

    /// Reports some landed posts from an endpoint to a node as failed.
    fn deny(&mut self, own: u16, to: u16) {
        let mut link = self.heads[own as usize];
        while link != NONE {
            let packet = &mut self.packets[link as usize];
            let done = matches!(packet.kind, PacketKind::Done(Ok(())));
            if done && packet.from == own && packet.to_node == to && self.random.below(2) == 0 {
                packet.kind = PacketKind::Done(Err(CompleteError::Unknown(-1)));
            }
            link = packet.next;
        }
    }

    pub(super) fn is_broken(&self, own: u16, to: u16, read: bool) -> bool {
        let there = to * self.rails + own % self.rails;
        let from = own / self.rails;
        self.cuts.is_broken(own, to) || (read && self.cuts.is_broken(there, from))
    }

    /// An endpoint and a node are cut off if either side has fenced the other, or if the node's
    /// address has changed since the endpoint attached it.
    pub(super) fn is_cut_off(&self, own: u16, to: u16, address: u16) -> bool {
        let there = to * self.rails + own % self.rails;
        let fenced = self.cuts.is_fenced(own, to) || self.cuts.is_fenced(there, own / self.rails);
        fenced || self.addresses[there as usize] != address
    }

    /// Decides the fate of a packet that was posted on a broken link. The packet may land within
    /// `late` polls.
    pub(super) fn doom(&mut self, index: u16, late: u32) {
        self.packets[index as usize].next = NONE;
        self.end_each(index, late);
    }

    /// Starts the fence of a node at an endpoint. Returns whether the fence takes effect now.
    pub(super) fn is_fence_due(&mut self, own: u16, node: u16) -> bool {
        let (at, bit) = (own as usize, 1 << node);
        if self.cuts.fencing[at] & bit == 0 {
            self.cuts.fencing[at] |= bit;
            self.cuts.fenced_at[at] = self.now + self.random.below(FENCE);
        }
        self.now >= self.cuts.fenced_at[at]
    }

    /// Fences a node at an endpoint. Posts to the node may land within `late` polls.
    pub(super) fn cut_off(&mut self, own: u16, node: u16, late: u32) {
        let at = own as usize;
        self.cuts.fenced[at] |= 1 << node;
        let there = node * self.rails + own % self.rails;
        let is_done = |packet: &Packet| matches!(packet.kind, PacketKind::Done(_));
        let here = own / self.rails;
        let theirs = self
            .take(own, |packet| packet.from == there && packet.to_node == here && !is_done(packet));
        self.end_each(theirs, 0);
        // Fails reads by this endpoint. Packets that it has sent no longer read local memory.
        let is_read = |packet: &Packet| matches!(packet.kind, PacketKind::Read { .. });
        let reads = self
            .take(own, |packet| packet.from == own && packet.to_node == node && is_read(packet));
        self.end_each(reads, 0);
        let late = self.cuts.late[at].max(late);
        let sent = self.take(there, |packet| {
            packet.from == own && packet.to_node == node && !packet.late && !is_done(packet)
        });
        self.end_each(sent, late.max(1));
    }

    /// The node has closed its endpoint. Drops its messages. The node's writes still land, but are
    /// not reported. Returns `false` while posts to the node are in flight.
    pub(super) fn part(&mut self, own: u16, node: u16) -> bool {
        let reads = |packet: &Packet| matches!(packet.kind, PacketKind::Read { .. });
        let late_read =
            |packet: &Packet| reads(packet) && packet.from == own && packet.to_node == node;
        if self.has_posts(own, node) || self.packets.iter().any(late_read) {
            return false;
        }
        self.cuts.fenced[own as usize] |= 1 << node;
        let there = node * self.rails + own % self.rails;
        let mut link = self.heads[own as usize];
        while link != NONE {
            let packet = &mut self.packets[link as usize];
            if packet.from == there
                && let PacketKind::Write { data, .. } = &mut packet.kind
            {
                *data = None;
            }
            link = packet.next;
        }
        let is_message = |packet: &Packet| matches!(packet.kind, PacketKind::Message { .. });
        let here = own / self.rails;
        let messages = self.take(own, |packet| {
            packet.from == there && packet.to_node == here && is_message(packet)
        });
        self.end_each(messages, 0);
        true
    }

    /// A post counts until its completion is reported.
    pub(super) fn has_posts(&self, own: u16, node: u16) -> bool {
        self.packets.iter().any(|packet| {
            let posted = !packet.late && !matches!(packet.kind, PacketKind::Free);
            posted && packet.from == own && packet.to_node == node
        })
    }

    /// Returns the first of the chosen packets, which links to the rest.
    fn take(&mut self, endpoint: u16, chosen: impl Fn(&Packet) -> bool) -> u16 {
        let (mut last, mut taken) = (NONE, NONE);
        let mut link = self.heads[endpoint as usize];
        while link != NONE {
            let packet = &mut self.packets[link as usize];
            let next = packet.next;
            if chosen(packet) {
                packet.next = core::mem::replace(&mut taken, link);
                match last {
                    NONE => self.heads[endpoint as usize] = next,
                    last => self.packets[last as usize].next = next,
                }
            } else {
                last = link;
            }
            link = next;
        }
        taken
    }

    /// Calls [`end`](Self::end) for each post of a linked list. The posts are in no other list.
    fn end_each(&mut self, first: u16, late: u32) {
        let mut link = first;
        while link != NONE {
            let next = self.packets[link as usize].next;
            self.end(link, late);
            link = next;
        }
    }

    /// Completes a post with one of the outcomes of a broken link. If `late` is not 0, the post may
    /// still land within that many polls. A read lands in the memory of its origin.
    fn end(&mut self, index: u16, late: u32) {
        let Packet { kind, from, to_node, late: is_over, .. } = self.packets[index as usize];
        let (node, rail) = (from / self.rails, from % self.rails);
        if let PacketKind::Done(_) = kind {
            return self.schedule(index, node, rail, 0);
        }
        let (lands, read) = (late != 0, matches!(kind, PacketKind::Read { .. }));
        if lands && self.random.below(2) == 0 {
            let end = if is_over { Some(NONE) } else { self.make_late(index) };
            if let Some(end) = end {
                if end != NONE {
                    self.schedule(end, node, rail, 0);
                }
                self.schedule(index, if read { node } else { to_node }, rail, 0);
                self.packets[index as usize].at += self.random.below(late as u64);
                self.repeat(index, late);
                return;
            }
        }
        if is_over {
            return self.release(index);
        }
        let result = match self.random.below(3) {
            // The packet has left the origin, so it completes there although it is lost.
            0 if lands && !read => Ok(()),
            1 => Err(CompleteError::Unknown(-1)),
            _ => Err(CompleteError::PeerDown),
        };
        self.packets[index as usize].kind = PacketKind::Done(result);
        self.schedule(index, node, rail, 0);
    }

    /// Duplicates about every second late message, if the rail repeats messages.
    fn repeat(&mut self, index: u16, late: u32) {
        let packet = self.packets[index as usize];
        let (rail, copy) = (packet.from % self.rails, self.free);
        let repeats =
            self.dials[rail as usize].repeats && matches!(packet.kind, PacketKind::Message { .. });
        if !repeats || copy == NONE || self.random.below(2) == 0 {
            return;
        }
        self.free = self.packets[copy as usize].next;
        self.packets[copy as usize] = packet;
        self.schedule(copy, packet.to_node, rail, 0);
        self.packets[copy as usize].at += self.random.below(late as u64);
    }
}
