//! Waiting receives, in the order of posting.
//!
//! The youngest few receives are only in the list of all receives. The others are also in the hash
//! table, by shape and masked key. Receives with shape [`OVERFLOW`] are in the overflow list
//! instead. So a short queue is never hashed, and in a long queue each receive is hashed at most
//! once. Up to [`MatcherConfig::lazily`](super::MatcherConfig::lazily) further receives are hashed
//! only once a message does not match the oldest receive.

use super::super::list::{Fifo, Links, Listed, NONE};
use super::group::{Buckets, GroupLinks, Grouped};
use super::key::Key;
use super::shape::{OVERFLOW, Shapes};
use super::words::{ReceiveId, Tag};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Free: never used, or its receive was cancelled.
    Free,
    /// Free: its receive has matched.
    Matched,
    Fresh,
    /// A receive that is in the hash table, or in the overflow list.
    Indexed,
}

/// One receive, in one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct PostedSlot {
    /// The source and tag, masked.
    pub(super) key: Key,
    /// The receive's place in the order of posting. The low half is the generation of its id.
    pub(super) seq: u64,
    pub(super) context: u64,
    pub(super) order: Links,
    /// The receive's links in the hash table. For shape [`OVERFLOW`], `chain` links the overflow
    /// list, and `ring` holds the mask's bits 0 to 63.
    pub(super) group: GroupLinks,
    /// For shape [`OVERFLOW`]: the mask's bits 64 to 95, and whether the receive names a source.
    mask_hi: u32,
    exact: bool,
    pub(super) shape: u8,
    pub(super) state: State,
}

const _: () = assert!(size_of::<PostedSlot>() == 64);

impl PostedSlot {
    /// A slot without a receive.
    pub const EMPTY: PostedSlot = PostedSlot {
        key: Key::ZERO,
        seq: 0,
        context: 0,
        order: Links::NONE,
        group: GroupLinks::NONE,
        mask_hi: 0,
        exact: false,
        shape: OVERFLOW,
        state: State::Free,
    };

    fn own_mask(&self) -> Key {
        let Links { next, prev } = self.group.ring;
        Key::mask(self.exact, !Tag::from_words([next, prev, self.mask_hi]))
    }

    #[inline(always)]
    pub(super) fn waits(&self) -> bool {
        matches!(self.state, State::Fresh | State::Indexed)
    }
}

impl Listed<0> for PostedSlot {
    fn links(&self) -> Links {
        self.order
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.order
    }
}

impl Listed<1> for PostedSlot {
    fn links(&self) -> Links {
        self.group.chain
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.group.chain
    }
}

impl Grouped for PostedSlot {
    fn group(&self, _: usize) -> &GroupLinks {
        &self.group
    }
    fn group_mut(&mut self, _: usize) -> &mut GroupLinks {
        &mut self.group
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub index: u32,
    pub probes: u32,
    pub passed: u32,
}

pub(super) struct Posted<'m> {
    pub slots: &'m mut [PostedSlot],
    pub buckets: Buckets<'m, 0>,
    pub order: Fifo<0>,
    /// Indexed receives without a shape, oldest first.
    pub overflow: Fifo<1>,
    /// The oldest receive that is not indexed.
    pub cursor: u32,
    /// Number of receives that are not indexed.
    pub fresh: u32,
    unhashed: u32,
    /// Maximum number of receives that are not indexed while every message matches the oldest
    /// receive.
    most_fresh: u32,
    pub indexed: u32,
    pub free: u32,
    next_seq: u64,
}

impl<'m> Posted<'m> {
    pub(super) fn new(
        slots: &'m mut [PostedSlot],
        heads: &'m mut [u32],
        first_seq: u64,
        unhashed: u32,
        lazily: u32,
    ) -> Self {
        slots.fill(PostedSlot::EMPTY);
        let count = slots.len();
        for (i, slot) in slots.iter_mut().enumerate() {
            slot.order.next = if i + 1 < count { i as u32 + 1 } else { NONE };
        }
        Posted {
            slots,
            buckets: Buckets::new(heads),
            order: Fifo::EMPTY,
            overflow: Fifo::EMPTY,
            cursor: NONE,
            fresh: 0,
            unhashed,
            most_fresh: unhashed.saturating_add(lazily),
            indexed: 0,
            free: if count == 0 { NONE } else { 0 },
            next_seq: first_seq,
        }
    }

    /// Moves the receives into longer memory. Does nothing if the new memory is not longer. No
    /// reference to the old memory remains.
    #[cold]
    pub(super) fn grow(&mut self, longer: &'m mut [PostedSlot]) {
        let old = self.slots.len();
        if longer.len() <= old || longer.len() >= 1 << 31 {
            return;
        }
        longer[..old].copy_from_slice(self.slots);
        for (index, slot) in longer.iter_mut().enumerate().skip(old) {
            *slot = PostedSlot::EMPTY;
            slot.order.next = core::mem::replace(&mut self.free, index as u32);
        }
        self.slots = longer;
    }

    #[inline(always)]
    pub(super) fn id(&self, index: u32) -> ReceiveId {
        ReceiveId { index, generation: self.slots[index as usize].seq as u32 }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> u32 {
        self.fresh + self.indexed
    }

    #[inline(always)]
    pub(super) fn mask_of<const S: usize>(slot: &PostedSlot, shapes: &Shapes<S>) -> Key {
        match shapes.get(slot.shape) {
            Some(shape) => shape.mask,
            None => slot.own_mask(),
        }
    }

    /// Returns the set of shapes of receives that are not indexed. Bit s stands for shape s.
    #[cold]
    pub(super) fn fresh_shapes(&self) -> u64 {
        let (mut at, mut shapes) = (self.cursor, 0);
        while at != NONE {
            let slot = &self.slots[at as usize];
            if slot.shape != OVERFLOW {
                shapes |= 1 << slot.shape;
            }
            at = slot.order.next;
        }
        shapes
    }

    #[inline(always)]
    pub(super) fn pop_fresh<const S: usize>(
        &mut self,
        shapes: &Shapes<S>,
        key: Key,
    ) -> Option<(ReceiveId, u64)> {
        let index = self.order.head;
        let slot = self.slots.get_mut(index as usize)?;
        if !key.agrees(slot.key, Self::mask_of(slot, shapes)) || slot.state != State::Fresh {
            return None;
        }
        let (next, generation, context) = (slot.order.next, slot.seq as u32, slot.context);
        slot.state = State::Matched;
        slot.order.next = self.free;
        self.free = index;
        self.fresh -= 1;
        self.cursor = next;
        self.order.head = next;
        match self.slots.get_mut(next as usize) {
            Some(slot) => slot.order.prev = NONE,
            None => self.order.tail = NONE,
        }
        Some((ReceiveId { index, generation }, context))
    }

    /// Finds the oldest receive that accepts a message with this key. There must be at least one
    /// receive.
    pub(super) fn find<const S: usize>(&self, shapes: &Shapes<S>, key: Key) -> Found {
        let head = self.order.head;
        let slot = &self.slots[head as usize];
        if key.agrees(slot.key, Self::mask_of(slot, shapes)) {
            return Found { index: head, probes: 0, passed: 0 };
        }
        let (mut index, mut best, mut probes, mut passed) = (NONE, u64::MAX, 0, 0);
        let mut active = shapes.active;
        while active != 0 {
            let number = active.trailing_zeros() as u8;
            active &= active - 1;
            let Some(shape) = shapes.get(number) else { break };
            if shape.min_seq >= best {
                continue;
            }
            let masked = key.under(shape.mask);
            let same = |slot: &PostedSlot| slot.shape == number && slot.key == masked;
            let (leader, neighbours) =
                self.buckets.find(self.slots, masked.hash(shape.salt), 0, same);
            probes += 1;
            passed += neighbours;
            if leader != NONE && self.slots[leader as usize].seq < best {
                (index, best) = (leader, self.slots[leader as usize].seq);
            }
        }
        let mut at = self.overflow.head;
        while at != NONE {
            let slot = &self.slots[at as usize];
            if slot.seq >= best {
                break;
            }
            if key.agrees(slot.key, slot.own_mask()) {
                index = at;
                break;
            }
            at = slot.group.chain.next;
            passed += 1;
        }
        if index == NONE {
            // Receives that are not indexed are younger than all others.
            at = self.cursor;
            while at != NONE {
                let slot = &self.slots[at as usize];
                if key.agrees(slot.key, Self::mask_of(slot, shapes)) {
                    index = at;
                    break;
                }
                at = slot.order.next;
                passed += 1;
            }
        }
        Found { index, probes, passed }
    }

    /// Adds a receive as the youngest. `shape` has this mask, or is [`OVERFLOW`]. Returns `None` if
    /// no slot is free.
    #[inline(always)]
    pub(super) fn append<const S: usize>(
        &mut self,
        shapes: &mut Shapes<S>,
        shape: u8,
        mask: Key,
        key: Key,
        context: u64,
    ) -> Option<ReceiveId> {
        let index = self.free;
        let slot = self.slots.get_mut(index as usize)?;
        self.free = slot.order.next;
        let seq = self.next_seq;
        self.next_seq = seq + 1;
        slot.key = key.under(mask);
        slot.seq = seq;
        slot.context = context;
        slot.shape = shape;
        slot.state = State::Fresh;
        if shape == OVERFLOW {
            let [next, prev, hi] = mask.tag().words();
            (slot.group.ring, slot.mask_hi, slot.exact) =
                (Links { next, prev }, hi, mask.source() != 0);
        }
        self.order.push(self.slots, index);
        if self.cursor == NONE {
            self.cursor = index;
        }
        self.fresh += 1;
        if self.fresh > self.most_fresh {
            self.index_oldest_fresh(shapes);
        }
        Some(ReceiveId { index, generation: seq as u32 })
    }

    /// Indexes the oldest receive that is not indexed. At least one must exist.
    #[inline(never)]
    fn index_oldest_fresh<const S: usize>(&mut self, shapes: &mut Shapes<S>) {
        let index = self.cursor;
        let slot = &mut self.slots[index as usize];
        self.cursor = slot.order.next;
        slot.state = State::Indexed;
        self.fresh -= 1;
        self.indexed += 1;
        let (number, key, seq) = (slot.shape, slot.key, slot.seq);
        match shapes.get_mut(number) {
            Some(shape) => {
                if shape.indexed == 0 {
                    shape.min_seq = seq;
                }
                shape.indexed += 1;
                let hash = key.hash(shape.salt);
                shapes.active |= 1 << number;
                self.buckets.insert(self.slots, hash, index, 0, |slot| {
                    slot.shape == number && slot.key == key
                });
            }
            None => self.overflow.push(self.slots, index),
        }
    }

    /// Does nothing if the message matches the oldest receive.
    #[inline]
    pub(super) fn catch_up<const S: usize>(&mut self, shapes: &mut Shapes<S>, key: Key) {
        let head = &self.slots[self.order.head as usize];
        if key.agrees(head.key, Self::mask_of(head, shapes)) {
            return;
        }
        while self.fresh > self.unhashed {
            self.index_oldest_fresh(shapes);
        }
    }

    #[inline(never)]
    pub(super) fn remove<const S: usize>(
        &mut self,
        shapes: &mut Shapes<S>,
        index: u32,
        state: State,
    ) {
        let slot = &mut self.slots[index as usize];
        let was = core::mem::replace(&mut slot.state, state);
        let (next, number) = (slot.order.next, slot.shape);
        if was == State::Fresh {
            self.fresh -= 1;
            if self.cursor == index {
                self.cursor = next;
            }
        } else {
            self.indexed -= 1;
            match shapes.get_mut(number) {
                Some(shape) => {
                    shape.indexed -= 1;
                    if shape.indexed == 0 {
                        shapes.active &= !(1 << number);
                    }
                    self.buckets.remove(self.slots, index, 0);
                }
                None => self.overflow.remove(self.slots, index),
            }
        }
        self.order.remove(self.slots, index);
        self.slots[index as usize].order.next = self.free;
        self.free = index;
    }

    #[inline(always)]
    pub(super) fn slot(&self, id: ReceiveId) -> Option<&PostedSlot> {
        self.slots.get(id.index as usize).filter(|slot| slot.seq as u32 == id.generation)
    }
}
