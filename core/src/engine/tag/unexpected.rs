//! Stores unexpected messages: a list in arrival order, and the messages that a matched probe has
//! taken off that list (claimed). [`index`](super::index) searches the list.

use crate::mem::Zeroable;

use super::super::list::{Fifo, Links, Listed, NONE};
use super::group::{Buckets, GroupLinks, Grouped};
use super::key::Key;
use super::shape::Shapes;
use super::words::{Arrived, UnexpectedId};

#[derive(Clone, Copy, Debug)]
pub(super) struct Index {
    pub shape: u8,
    /// The oldest message that the index lacks, or [`NONE`] if it has all messages.
    pub cursor: u32,
    pub used: u64,
}

impl Index {
    pub(super) const NONE: Index = Index { shape: 0, cursor: NONE, used: 0 };
}

/// Maximum number of indexes: a slot has links for this many.
pub(super) const MOST_INDEXES: usize = 4;

/// Number of slots that come into use at a time. They fill one page.
const WIDER: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    Free = 0,
    Stored,
    Claimed,
}

/// One message, in two cache lines. Only indexes use the second line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct UnexpectedSlot {
    pub(super) key: Key,
    /// The message's place in the order of arrival. The low half is the generation of its id.
    pub(super) seq: u64,
    pub(super) len: u64,
    pub(super) cookie: u64,
    pub(super) order: Links,
    pub(super) state: State,
    /// Bit k is set if the message is in index k.
    pub(super) linked: u8,
    /// Bit k is set if this is the oldest message that index k lacks.
    pub(super) cursor_of: u8,
    /// Nonzero if a matcher has used this slot and all slots before it.
    used: u8,
    _pad: [u32; 3],
    pub(super) groups: [GroupLinks; MOST_INDEXES],
}

const _: () = assert!(size_of::<UnexpectedSlot>() == 128);

// SAFETY: zeroed memory is a valid slot: all fields are numbers except `state`, where 0 is `Free`.
unsafe impl Zeroable for UnexpectedSlot {}

impl UnexpectedSlot {
    /// A slot without a message.
    pub const EMPTY: UnexpectedSlot = UnexpectedSlot {
        key: Key::ZERO,
        seq: 0,
        len: 0,
        cookie: 0,
        order: Links::NONE,
        state: State::Free,
        linked: 0,
        cursor_of: 0,
        used: 0,
        _pad: [0; 3],
        groups: [GroupLinks::NONE; MOST_INDEXES],
    };

    #[inline(always)]
    pub(super) fn arrived(&self) -> Arrived {
        Arrived {
            source: self.key.source(),
            tag: self.key.tag(),
            len: self.len,
            cookie: self.cookie,
        }
    }
}

impl Listed<0> for UnexpectedSlot {
    fn links(&self) -> Links {
        self.order
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.order
    }
}

impl Grouped for UnexpectedSlot {
    fn group(&self, index: usize) -> &GroupLinks {
        &self.groups[index]
    }
    fn group_mut(&mut self, index: usize) -> &mut GroupLinks {
        &mut self.groups[index]
    }
}

pub(super) struct Unexpected<'m, const INDEXES: usize> {
    pub slots: &'m mut [UnexpectedSlot],
    pub buckets: Buckets<'m, 2>,
    pub order: Fifo<0>,
    pub len: u32,
    pub claimed: u32,
    pub free: u32,
    /// Number of slots that were ever used or put on the free list. Later slots were never written.
    pub used: u32,
    next_seq: u64,
    /// Below this many messages a linear scan beats an index.
    pub walked: u32,
    pub indexes: [Index; INDEXES],
    /// Bit k is set if index k is in use.
    pub active: u8,
    /// Bit k is set if index k has every message.
    pub caught_up: u8,
    /// Counts searches that used an index or could not get one.
    pub clock: u64,
}

impl<'m, const INDEXES: usize> Unexpected<'m, INDEXES> {
    pub(super) fn new(
        slots: &'m mut [UnexpectedSlot],
        heads: &'m mut [u32],
        first_seq: u64,
        walked: u32,
    ) -> Self {
        // Invalidates ids that an earlier matcher left in this memory. Stops at the first slot
        // never used.
        slots
            .iter_mut()
            .take_while(|slot| slot.used != 0)
            .for_each(|slot| slot.state = State::Free);
        Unexpected {
            slots,
            buckets: Buckets::new(heads),
            order: Fifo::EMPTY,
            len: 0,
            claimed: 0,
            free: NONE,
            used: 0,
            next_seq: first_seq,
            walked,
            indexes: [Index::NONE; INDEXES],
            active: 0,
            caught_up: 0,
            clock: 0,
        }
    }

    #[inline(always)]
    pub(super) fn id(&self, index: u32) -> UnexpectedId {
        UnexpectedId { index, generation: self.slots[index as usize].seq as u32 }
    }

    /// Adds a message, the youngest. Returns `None` if no slot is free; [`widen`](Self::widen) may
    /// help. If an index had all messages, call [`wake_indexes`](Self::wake_indexes) next.
    #[inline(always)]
    pub(super) fn store(&mut self, key: Key, len: u64, cookie: u64) -> Option<UnexpectedId> {
        let index = self.free;
        let slot = self.slots.get_mut(index as usize)?;
        self.free = slot.order.next;
        let seq = self.next_seq;
        self.next_seq = seq + 1;
        slot.key = key;
        slot.seq = seq;
        slot.len = len;
        slot.cookie = cookie;
        slot.state = State::Stored;
        slot.linked = 0;
        slot.cursor_of = self.caught_up;
        self.order.push(self.slots, index);
        self.len += 1;
        Some(UnexpectedId { index, generation: seq as u32 })
    }

    /// Frees a few slots that were never used, when no other slot is free. Returns `false` if none
    /// is left.
    #[cold]
    pub(super) fn widen(&mut self) -> bool {
        let from = self.used as usize;
        let end = self.slots.len().min(from + WIDER);
        for (slot, next) in self.slots[from..end].iter_mut().zip(from as u32 + 1..) {
            // Four adjacent bytes: one store.
            (slot.state, slot.linked, slot.cursor_of, slot.used) = (State::Free, 0, 0, 1);
            slot.order.next = next;
        }
        let Some(last) = self.slots[from..end].last_mut() else { return false };
        last.order.next = NONE;
        (self.free, self.used) = (from as u32, end as u32);
        true
    }

    #[inline(always)]
    pub(super) fn pop_unindexed<const S: usize>(
        &mut self,
        shapes: &mut Shapes<S>,
        mask: Key,
        key: Key,
    ) -> Option<Arrived> {
        let index = self.order.head;
        let slot = self.slots.get_mut(index as usize)?;
        if !key.agrees(slot.key, mask) || slot.linked | slot.cursor_of != 0 {
            return None;
        }
        let (next, arrived) = (slot.order.next, slot.arrived());
        slot.state = State::Free;
        slot.order.next = self.free;
        self.free = index;
        self.len -= 1;
        self.order.head = next;
        match self.slots.get_mut(next as usize) {
            Some(slot) => slot.order.prev = NONE,
            None => {
                self.order.tail = NONE;
                if self.active != 0 {
                    self.drop_indexes(shapes);
                }
            }
        }
        Some(arrived)
    }

    /// Does not free the slot.
    #[inline]
    pub(super) fn unlink<const S: usize>(&mut self, shapes: &mut Shapes<S>, index: u32) {
        let slot = &self.slots[index as usize];
        if slot.linked | slot.cursor_of != 0 {
            self.leave_indexes(index);
        }
        self.order.remove(self.slots, index);
        self.len -= 1;
        if self.len == 0 && self.active != 0 {
            self.drop_indexes(shapes);
        }
    }

    /// Frees the slot of a message that is in no list. The message's id becomes stale.
    #[inline(always)]
    pub(super) fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Free;
        slot.order.next = self.free;
        self.free = index;
    }

    #[inline(always)]
    pub(super) fn slot(&self, id: UnexpectedId) -> Option<&UnexpectedSlot> {
        let slot = self.slots.get(id.index as usize)?;
        (slot.seq as u32 == id.generation && slot.state != State::Free).then_some(slot)
    }
}
