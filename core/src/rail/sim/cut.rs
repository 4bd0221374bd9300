//! What becomes of packets on links that are cut, and where a peer was fenced.

use super::world::{NONE, Packet, PacketKind, World};
use crate::error::CompleteError;
use crate::rail::Fence;

/// The longest time, in polls, from a cut to its report at the node that posts on the link, and
/// from the first call of `fence` to its effect.
const NOTICE: u64 = 200;
const FENCE: u64 = 60;

impl World<'_> {
    /// Cuts the link from a node to another.
    pub(super) fn cut(&mut self, from: u16, to: u16, rail: u16, late: u32) {
        let (own, there) = (from * self.rails + rail, to * self.rails + rail);
        self.cuts.cut[own as usize] |= 1 << to;
        self.cuts.late[own as usize] = late;
        self.cuts.told_at[own as usize] = self.now + self.random.below(NOTICE);
        // Operations in flight wait at their target's endpoint, reads at their origin's. Those of
        // the other end fail as well.
        let sent = self.take(there, |packet| packet.from == own && packet.to_node == to);
        self.end_each(sent, late);
        for (endpoint, node) in [(own, to), (there, from)] {
            let is_read = |packet: &Packet| matches!(packet.kind, PacketKind::Read { .. });
            let reads = self.take(endpoint, |packet| is_read(packet) && packet.to_node == node);
            self.end_each(reads, late);
        }
    }

    /// Whether a post from an endpoint to a node will never be carried as it should.
    pub(super) fn is_broken(&self, own: u16, to: u16, read: bool) -> bool {
        let there = to * self.rails + own % self.rails;
        let from = own / self.rails;
        let fenced = |endpoint: u16, node: u16| self.cuts.fenced[endpoint as usize] & 1 << node != 0;
        let cut = self.cuts.is_cut(own, to) || (read && self.cuts.is_cut(there, from));
        cut || fenced(own, to) || fenced(there, from)
    }

    /// Decides what becomes of a packet that was posted on a link which is cut.
    pub(super) fn doom(&mut self, index: u16) {
        let Packet { from, to_node, .. } = self.packets[index as usize];
        let there = to_node * self.rails + from % self.rails;
        let fenced = |endpoint: u16, node: u16| self.cuts.fenced[endpoint as usize] & 1 << node != 0;
        let fenced = fenced(there, from / self.rails) || fenced(from, to_node);
        let late = if fenced { 0 } else { self.cuts.late[from as usize] };
        self.packets[index as usize].next = NONE;
        self.end_each(index, late);
    }

    /// Continues to fence a node at an endpoint.
    pub(super) fn fence(&mut self, own: u16, node: u16) -> Fence {
        let (at, bit) = (own as usize, 1 << node);
        if self.cuts.fenced[at] & bit != 0 {
            return Fence::Fenced;
        }
        if self.cuts.fencing[at] & bit == 0 {
            self.cuts.fencing[at] |= bit;
            self.cuts.fenced_at[at] = self.now + self.random.below(FENCE);
        }
        if self.now < self.cuts.fenced_at[at] {
            return Fence::Pending;
        }
        self.cuts.fenced[at] |= bit;
        let there = node * self.rails + own % self.rails;
        // Nothing of the node lands here any more.
        let is_done = |packet: &Packet| matches!(packet.kind, PacketKind::Done(_));
        let here = own / self.rails;
        let theirs =
            self.take(own, |packet| packet.from == there && packet.to_node == here && !is_done(packet));
        self.end_each(theirs, 0);
        // Reads of this end are over, and what it has sent takes no bytes from here.
        let is_read = |packet: &Packet| matches!(packet.kind, PacketKind::Read { .. });
        let reads = self.take(own, |packet| packet.from == own && packet.to_node == node && is_read(packet));
        self.end_each(reads, 0);
        let late = self.cuts.late[at];
        let sent = self.take(there, |packet| {
            packet.from == own && packet.to_node == node && !packet.late && !is_done(packet)
        });
        self.end_each(sent, late.max(1));
        Fence::Fenced
    }

    /// Takes packets out of those before an endpoint; returns the first, linked to the others.
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

    /// Ends posts that are in no list, linked to each other: see [`end`](Self::end).
    fn end_each(&mut self, first: u16, late: u32) {
        let mut link = first;
        while link != NONE {
            let next = self.packets[link as usize].next;
            self.end(link, late);
            link = next;
        }
    }

    /// Ends a post in one of the ways of a broken link. With `late` it may still land within that
    /// many polls; a read lands in the memory of its origin.
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
                return;
            }
        }
        if is_over {
            return self.release(index);
        }
        let result = match self.random.below(3) {
            // It has left its origin, and is done there wherever it is.
            0 if lands && !read => Ok(()),
            1 => Err(CompleteError::Unknown(-1)),
            _ => Err(CompleteError::PeerDown),
        };
        self.packets[index as usize].kind = PacketKind::Done(result);
        self.schedule(index, node, rail, 0);
    }
}
