//! A consistency check of a matcher's whole state.

use super::super::list::{Fifo, Listed, NONE};
use super::shape::OVERFLOW;
use super::{Matcher, group, posted, unexpected};

fn check_list<const LIST: usize, T: Listed<LIST>>(
    list: Fifo<LIST>,
    slots: &[T],
    mut each: impl FnMut(u32, &T) -> Result<(), &'static str>,
) -> Result<u32, &'static str> {
    let (mut at, mut before, mut count) = (list.head, NONE, 0);
    while at != NONE {
        let slot = slots.get(at as usize).ok_or("a link of a list is out of range")?;
        if slot.links().prev != before || count as usize == slots.len() {
            return Err("the links of a list disagree");
        }
        each(at, slot)?;
        (before, at) = (at, slot.links().next);
        count += 1;
    }
    if list.tail == before { Ok(count) } else { Err("the tail of a list is not its last slot") }
}

/// Walks the chains of all buckets and the rings of all leaders. Returns the number of entries
/// found, where an entry counts once per table.
fn check_buckets<const BITS: u32, T: group::Grouped>(
    buckets: &group::Buckets<'_, BITS>,
    entries: &[T],
    seq: impl Fn(&T) -> u64,
    mut each: impl FnMut(usize, u32, u32) -> Result<(), &'static str>,
) -> Result<u32, &'static str> {
    let (mut members, most) = (0, entries.len() as u32 * (1 << BITS));
    for head in buckets.heads() {
        let mut node = *head;
        while node != NONE {
            let (leader, table) = group::Buckets::<BITS>::entry(node);
            let links = entries
                .get(leader as usize)
                .ok_or("a link of a hash chain is out of range")?
                .group(table);
            if !links.leads() {
                return Err("a hash chain holds an entry that is not the leader of its group");
            }
            let mut at = leader;
            loop {
                each(table, leader, at)?;
                members += 1;
                if members > most {
                    return Err("a chain or a ring does not end");
                }
                let next = entries[at as usize].group(table).ring.next;
                let after =
                    entries.get(next as usize).ok_or("a link of a group's ring is out of range")?;
                if after.group(table).ring.prev != at {
                    return Err("the links of a group's ring disagree");
                }
                if next == leader {
                    break;
                }
                if after.group(table).leads() || seq(after) <= seq(&entries[at as usize]) {
                    return Err("a group is out of order");
                }
                at = next;
            }
            node = links.chain.next;
        }
    }
    Ok(members)
}

impl<const SHAPES: usize, const INDEXES: usize> Matcher<'_, SHAPES, INDEXES> {
    /// Checks every list, group and counter. Changes nothing. Use it in tests, and to detect
    /// corrupted memory. Slow: visits everything.
    ///
    /// # Errors
    /// Describes the first inconsistency.
    #[cold]
    pub fn verify(&self) -> Result<(), &'static str> {
        self.verify_posted()?;
        self.verify_unexpected()
    }

    fn verify_posted(&self) -> Result<(), &'static str> {
        let posted = &self.posted;
        let (mut last, mut fresh, mut indexed, mut seen) = (None, 0, 0, false);
        let mut by_shape = [0; SHAPES];
        let len = check_list(posted.order, posted.slots, |at, slot| {
            if last.is_some_and(|last| slot.seq <= last) {
                return Err("receives are out of order");
            }
            last = Some(slot.seq);
            seen |= at == posted.cursor;
            let expected = if seen { posted::State::Fresh } else { posted::State::Indexed };
            if slot.state != expected {
                return Err("the state of a receive does not fit its place in the list");
            }
            fresh += u32::from(seen);
            if slot.shape == OVERFLOW {
                return Ok(());
            }
            indexed += u32::from(!seen);
            let of =
                by_shape.get_mut(slot.shape as usize).ok_or("a receive has an unknown shape")?;
            *of += u32::from(!seen);
            let shape = self.shapes.get(slot.shape).ok_or("a receive has an unknown shape")?;
            if !seen && shape.min_seq > slot.seq {
                return Err("a receive is older than the minimum that its shape records");
            }
            if slot.key.under(shape.mask) != slot.key {
                Err("the key of a receive is not masked")
            } else {
                Ok(())
            }
        })?;
        if (len, fresh, seen) != (posted.len(), posted.fresh, posted.cursor != NONE) {
            return Err("the count of receives is wrong");
        }
        for (number, indexed) in by_shape.iter().enumerate() {
            let shape = self.shapes.get(number as u8).ok_or("a shape is missing")?;
            let active = self.shapes.active >> number & 1 == 1;
            if shape.indexed != *indexed || active != (*indexed != 0) {
                return Err("a shape has a wrong count of receives");
            }
        }
        let overflow = check_list(posted.overflow, posted.slots, |_, slot| {
            let right = slot.shape == OVERFLOW && slot.state == posted::State::Indexed;
            if right { Ok(()) } else { Err("a receive is wrongly in the overflow list") }
        })?;
        if overflow + indexed + fresh != len {
            return Err("the overflow list is incomplete");
        }
        let grouped = check_buckets(
            &posted.buckets,
            posted.slots,
            |slot| slot.seq,
            |_, leader, at| {
                let (leader, member) = (&posted.slots[leader as usize], &posted.slots[at as usize]);
                let right = (leader.shape, leader.key) == (member.shape, member.key)
                    && member.shape != OVERFLOW;
                if right && member.state == posted::State::Indexed {
                    Ok(())
                } else {
                    Err("a receive is in the wrong group")
                }
            },
        )?;
        let free = self.count_free(posted.slots, posted.free, |slot| !slot.waits())?;
        if grouped != indexed {
            return Err("an indexed receive is in no group");
        }
        if (free + len) as usize != posted.slots.len() {
            return Err("receive slots have leaked");
        }
        Ok(())
    }

    fn verify_unexpected(&self) -> Result<(), &'static str> {
        let messages = &self.unexpected;
        let (mut last, mut linked) = (None, 0);
        // Bit k is set until the walk from the oldest message meets the cursor of index k.
        let mut unmet = messages.active & !messages.caught_up;
        let len = check_list(messages.order, messages.slots, |at, slot| {
            if last.is_some_and(|last| slot.seq <= last) || slot.state != unexpected::State::Stored
            {
                return Err("messages are out of order");
            }
            last = Some(slot.seq);
            linked += slot.linked.count_ones();
            for (number, index) in messages.indexes.iter().enumerate() {
                let bit = 1 << number;
                if messages.active & bit == 0 {
                    continue;
                }
                if unmet & bit != 0 && index.cursor == at {
                    unmet &= !bit;
                }
                let before = unmet & bit != 0 || messages.caught_up & bit != 0;
                if (slot.linked & bit != 0) != before {
                    return Err("a message is in an index beyond its cursor, or missing before it");
                }
                if (slot.cursor_of & bit != 0)
                    != (index.cursor == at && messages.caught_up & bit == 0)
                {
                    return Err("the cursor of an index and its message disagree");
                }
            }
            if (slot.linked | slot.cursor_of) & !messages.active == 0 {
                Ok(())
            } else {
                Err("a message refers to an index that is not in use")
            }
        })?;
        if unmet != 0 || len != messages.len {
            return Err("the count of messages is wrong");
        }
        for (number, index) in messages.indexes.iter().enumerate() {
            let shape = self.shapes.get(index.shape);
            if messages.active >> number & 1 == 1
                && shape.is_none_or(|shape| shape.index as usize != number)
            {
                return Err("an index and its shape disagree");
            }
        }
        let grouped = check_buckets(
            &messages.buckets,
            messages.slots,
            |slot| slot.seq,
            |table, leader, at| {
                let (leader, member) =
                    (&messages.slots[leader as usize], &messages.slots[at as usize]);
                let index = messages
                    .indexes
                    .get(table)
                    .ok_or("a hash chain belongs to an unknown index")?;
                let mask = self.shapes.get(index.shape).ok_or("an index has no shape")?.mask;
                let right = leader.key.agrees(member.key, mask) && member.linked >> table & 1 == 1;
                if right { Ok(()) } else { Err("a message is in the wrong group") }
            },
        )?;
        let free = self.count_free(messages.slots, messages.free, |slot| {
            slot.state == unexpected::State::Free
        })?;
        let here = (free + len + messages.claimed) as usize;
        if grouped != linked || here != messages.used as usize {
            return Err("message slots have leaked");
        }
        Ok(())
    }

    fn count_free<T: Listed<0>>(
        &self,
        slots: &[T],
        head: u32,
        is_free: impl Fn(&T) -> bool,
    ) -> Result<u32, &'static str> {
        let (mut at, mut count) = (head, 0);
        while at != NONE {
            let slot = slots.get(at as usize).ok_or("a link of the free list is out of range")?;
            if !is_free(slot) || count as usize == slots.len() {
                return Err("the free list holds a slot that is in use");
            }
            (at, count) = (slot.links().next, count + 1);
        }
        Ok(count)
    }
}
