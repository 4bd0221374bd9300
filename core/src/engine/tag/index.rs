//! Indexes over unexpected messages: one hash table for each of a few shapes that receives and
//! probes use.
//!
//! Searches add messages to an index; arrivals do not. Each index has a cursor into the order of
//! arrival. A search first looks up the messages before the cursor. If none matches, it advances
//! the cursor, message by message, until one matches. So a message enters each index at most once,
//! and messages received in order enter none.
//!
//! A shape gets an index at its second search among more than
//! [`MatcherConfig::walked`](super::MatcherConfig::walked) messages. The first search scans them.

use super::super::list::NONE;
use super::key::Key;
use super::posted::Found;
use super::shape::{NO_INDEX, Shapes};
use super::unexpected::{Index, Unexpected};

/// Another shape may take an index that was not used for this many searches.
const PATIENCE: u64 = 64;

impl<const INDEXES: usize> Unexpected<'_, INDEXES> {
    /// Finds the oldest message that a receive with this key, mask and shape accepts. At least one
    /// message must wait.
    pub(super) fn find<const S: usize>(
        &mut self,
        shapes: &mut Shapes<S>,
        number: u8,
        mask: Key,
        key: Key,
    ) -> Found {
        let head = self.order.head;
        if key.agrees(self.slots[head as usize].key, mask) {
            return Found { index: head, probes: 0, passed: 0 };
        }
        if self.len == 1 {
            return Found { index: NONE, probes: 0, passed: 1 };
        }
        let Some(shape) = shapes.get_mut(number) else { return self.walk(mask, key) };
        let (salt, mut index) = (shape.salt, shape.index);
        if index == NO_INDEX {
            if self.len <= self.walked {
                return self.walk(mask, key);
            }
            if shape.walks == 0 {
                shape.walks = 1;
                return self.walk(mask, key);
            }
            match self.activate(shapes, number) {
                Some(activated) => index = activated,
                None => return self.walk(mask, key),
            }
        }
        self.find_indexed(index as usize, salt, mask, key.under(mask))
    }

    fn walk(&self, mask: Key, key: Key) -> Found {
        let mut at = self.slots[self.order.head as usize].order.next;
        let mut passed = 1;
        while at != NONE {
            let slot = &self.slots[at as usize];
            if key.agrees(slot.key, mask) {
                break;
            }
            at = slot.order.next;
            passed += 1;
        }
        Found { index: at, probes: 0, passed }
    }

    fn find_indexed(&mut self, number: usize, salt: Key, mask: Key, key: Key) -> Found {
        self.clock += 1;
        self.indexes[number].used = self.clock;
        let (leader, mut passed) = self
            .buckets
            .find(self.slots, key.hash(salt), number, |slot| key.agrees(slot.key, mask));
        if leader != NONE {
            return Found { index: leader, probes: 1, passed };
        }
        let start = self.indexes[number].cursor;
        let mut at = start;
        while at != NONE {
            let slot = &mut self.slots[at as usize];
            if key.agrees(slot.key, mask) {
                break;
            }
            let (next, masked) = (slot.order.next, slot.key.under(mask));
            slot.linked |= 1 << number;
            self.buckets.insert(self.slots, masked.hash(salt), at, number, |slot| {
                masked.agrees(slot.key, mask)
            });
            at = next;
            passed += 1;
        }
        if at != start {
            self.slots[start as usize].cursor_of &= !(1 << number);
            self.set_cursor(number, at);
        }
        Found { index: at, probes: 1, passed }
    }

    #[inline]
    fn set_cursor(&mut self, number: usize, at: u32) {
        self.indexes[number].cursor = at;
        match self.slots.get_mut(at as usize) {
            Some(slot) => slot.cursor_of |= 1 << number,
            None => self.caught_up |= 1 << number,
        }
    }

    /// Sets the cursor of every index that had all messages. The new cursor is the message just
    /// stored, the first message that the index lacks.
    #[inline(always)]
    pub(super) fn wake_indexes(&mut self, at: u32) {
        for (number, index) in self.indexes.iter_mut().enumerate() {
            if self.caught_up & 1 << number != 0 {
                index.cursor = at;
            }
        }
        self.caught_up = 0;
    }

    /// Removes a message from the indexes. Call this before the message leaves the order of
    /// arrival.
    #[inline(never)]
    pub(super) fn leave_indexes(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        let (next, mut linked, mut cursor_of) = (slot.order.next, slot.linked, slot.cursor_of);
        (slot.linked, slot.cursor_of) = (0, 0);
        while linked != 0 {
            self.buckets.remove(self.slots, at, linked.trailing_zeros() as usize);
            linked &= linked - 1;
        }
        while cursor_of != 0 {
            self.set_cursor(cursor_of.trailing_zeros() as usize, next);
            cursor_of &= cursor_of - 1;
        }
    }

    /// Assigns an empty index to a shape. Takes a free index, or the index of a shape that was not
    /// searched for recently.
    #[cold]
    fn activate<const S: usize>(&mut self, shapes: &mut Shapes<S>, shape: u8) -> Option<u8> {
        let number = match (0..INDEXES).find(|k| self.active & 1 << k == 0) {
            Some(free) => free,
            None => {
                let oldest = (0..INDEXES).min_by_key(|k| self.indexes[*k].used)?;
                if self.clock - self.indexes[oldest].used < PATIENCE {
                    // Count this search too, or an unused shape would keep its index.
                    self.clock += 1;
                    return None;
                }
                self.evict(shapes, oldest);
                oldest
            }
        };
        self.active |= 1 << number;
        self.indexes[number].shape = shape;
        let head = self.order.head;
        self.set_cursor(number, head);
        shapes.get_mut(shape)?.index = number as u8;
        Some(number as u8)
    }

    #[cold]
    pub(super) fn evict<const S: usize>(&mut self, shapes: &mut Shapes<S>, number: usize) {
        let Index { shape, cursor, .. } = self.indexes[number];
        let bit = 1 << number;
        let mut at = self.order.head;
        while at != cursor {
            if self.slots[at as usize].linked & bit != 0 {
                self.slots[at as usize].linked &= !bit;
                self.buckets.remove(self.slots, at, number);
            }
            at = self.slots[at as usize].order.next;
        }
        if let Some(slot) = self.slots.get_mut(cursor as usize) {
            slot.cursor_of &= !bit;
        }
        self.caught_up &= !bit;
        self.active &= !bit;
        if let Some(shape) = shapes.get_mut(shape) {
            shape.index = NO_INDEX;
        }
    }

    #[cold]
    pub(super) fn drop_indexes<const S: usize>(&mut self, shapes: &mut Shapes<S>) {
        for index in &self.indexes {
            if let Some(shape) = shapes.get_mut(index.shape) {
                shape.index = NO_INDEX;
            }
        }
        (self.active, self.caught_up) = (0, 0);
    }
}
