//! A slot allocator with generations: each holder of a slot has a unique name.
//!
//! Taking, releasing and looking up a slot take a few instructions. Nothing allocates: the memory
//! is borrowed. The table dereferences to the slice of its slots, for intrusive lists through them.

use core::ops::{Deref, DerefMut};

use crate::sync::pool::FreeList;

/// The name of a slot: the generation of its holder in the upper half, its index in the lower half.
///
/// While the slot is free, the lower half links the free list, with values that are not an index.
/// So one comparison says whether a name is current. Generations of a slot repeat after 2^32 - 1
/// holders. No generation is 0, so no name is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name(u64);

impl Name {
    pub(crate) const FRESH: Name = Name::free(1, 0);

    /// Returns the name of a free slot with this link. A link is at most the length of the table.
    #[inline(always)]
    const fn free(generation: u32, link: u32) -> Name {
        Name((generation as u64) << 32 | !link as u64)
    }

    #[inline(always)]
    fn link(self) -> u32 {
        !(self.0 as u32)
    }

    /// Returns the name as a word, for tokens and requests. The slot must be taken.
    #[inline(always)]
    pub(crate) fn word(self) -> u64 {
        self.0
    }
}

pub(crate) trait Slot: Copy {
    fn name(&self) -> Name;
    fn name_mut(&mut self) -> &mut Name;
}

pub(crate) struct Slots<'m, T> {
    slots: &'m mut [T],
    free: FreeList,
}

impl<'m, T: Slot> Slots<'m, T> {
    pub(crate) fn new(slots: &'m mut [T], empty: T) -> Self {
        debug_assert!(empty.name() == Name::FRESH && slots.len() < 1 << 31);
        slots.fill(empty);
        Slots { slots, free: FreeList::new() }
    }

    /// The names stay, and no reference to the old memory remains. Does nothing if the new memory
    /// is not longer.
    #[cold]
    pub(crate) fn grow(&mut self, longer: &'m mut [T], empty: T) {
        let old = self.slots.len();
        if longer.len() > old && longer.len() < 1 << 31 {
            longer[..old].copy_from_slice(self.slots);
            longer[old..].fill(empty);
            self.slots = longer;
        }
    }

    #[inline(always)]
    pub(crate) fn first_free(&self) -> Option<u32> {
        self.free.first(self.slots.len())
    }

    /// `index` comes from [`first_free`](Self::first_free).
    #[inline(always)]
    pub(crate) fn take_first(&mut self, index: u32) -> &mut T {
        let len = self.slots.len();
        let slot = &mut self.slots[index as usize];
        let name = slot.name_mut();
        self.free.take_first(len, index, name.link());
        *name = Name(name.0 >> 32 << 32 | index as u64);
        slot
    }

    /// Returns the slot that was released last, for a step that may not take it. Returns `None` if
    /// only unused slots are free.
    #[inline(always)]
    pub(crate) fn released_last(&mut self) -> Option<Vacant<'_, T>> {
        let index = self.free.head_index();
        let slot = self.slots.get_mut(index as usize)?;
        Some(Vacant { slot, free: &mut self.free, index })
    }

    /// Returns the slots and the free list, for steps that load the address of the slots once.
    #[inline(always)]
    pub(crate) fn parts(&mut self) -> (&mut [T], &mut FreeList) {
        (self.slots, &mut self.free)
    }

    /// The contents of the slot are stale except for the name; the caller sets them.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Option<u32> {
        let (slots, free) = self.parts();
        take(slots, free).map(|(index, _)| index)
    }

    /// The name of the slot becomes stale. Does nothing if the slot is free.
    #[inline(always)]
    pub(crate) fn free(&mut self, index: u32) {
        release(&mut self.slots[index as usize], &mut self.free, index);
    }

    #[inline(always)]
    pub(crate) fn find(&self, name: u64) -> Option<u32> {
        let index = name as u32;
        (self.slots.get(index as usize)?.name().0 == name).then_some(index)
    }

    /// The slots ever taken are the first slots of the table.
    pub(crate) fn used(&self) -> u32 {
        self.free.used()
    }

    pub(crate) fn taken(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..self.used())
            .zip(self.slots.iter())
            .filter(|&(index, slot)| slot.name().0 as u32 == index)
    }
}

/// A free slot, the first of the free list.
pub(crate) struct Vacant<'a, T> {
    slot: &'a mut T,
    free: &'a mut FreeList,
    pub index: u32,
}

impl<'a, T: Slot> Vacant<'a, T> {
    /// The contents of the slot are stale except for the name; the caller sets them.
    #[inline(always)]
    pub(crate) fn take(self) -> &'a mut T {
        let name = self.slot.name_mut();
        self.free.set_head(name.link());
        *name = Name(name.0 >> 32 << 32 | self.index as u64);
        self.slot
    }
}

/// [`Slots::take`], for the [parts](Slots::parts) of a table.
#[inline(always)]
pub(crate) fn take<'a, T: Slot>(
    slots: &'a mut [T],
    free: &mut FreeList,
) -> Option<(u32, &'a mut T)> {
    let link = |index| slots.get(index as usize).map(|slot: &T| slot.name().link());
    let index = free.take(slots.len(), link)?;
    let slot = slots.get_mut(index as usize)?;
    let name = slot.name_mut();
    *name = Name(name.0 >> 32 << 32 | index as u64);
    Some((index, slot))
}

/// [`Slots::free`], for a slot and its index.
#[inline(always)]
pub(crate) fn release<T: Slot>(slot: &mut T, free: &mut FreeList, index: u32) {
    let name = slot.name().0;
    if name as u32 == index {
        release_named(slot, free, name);
    }
}

/// [`release`], for the word of a current name.
#[inline(always)]
pub(crate) fn release_named<T: Slot>(slot: &mut T, free: &mut FreeList, name: u64) {
    let generation = ((name >> 32) as u32).wrapping_add(1).max(1);
    *slot.name_mut() = Name::free(generation, free.give(name as u32));
}

impl<T> Deref for Slots<'_, T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        self.slots
    }
}

impl<T> DerefMut for Slots<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        self.slots
    }
}

#[cfg(all(test, not(fishplate_loom)))]
mod tests {
    extern crate std;

    use std::collections::BTreeMap;
    use std::{vec, vec::Vec};

    use super::*;
    use crate::sync::testing::Random;

    impl Slot for Name {
        fn name(&self) -> Name {
            *self
        }
        fn name_mut(&mut self) -> &mut Name {
            self
        }
    }

    /// Takes and releases slots at random, and compares their names with a map.
    #[test]
    fn names_and_slots_are_those_of_a_map_with_serial_numbers() {
        let mut random = Random::new("slots");
        for len in [0usize, 1, 3, 8] {
            let mut memory = vec![Name(7); len];
            let mut slots = Slots::new(&mut memory, Name::FRESH);
            let (mut held, mut stale) = (BTreeMap::<u64, u32>::new(), Vec::<u64>::new());
            for _ in 0..20_000 {
                match random.within(0..4) {
                    0 | 1 => {
                        let first = slots.first_free();
                        assert_eq!(first.is_some(), held.len() < len);
                        match (first, slots.released_last()) {
                            (Some(_), Some(last)) if random.within(0..2) == 0 => {
                                assert_eq!(Some(last.index), first);
                                last.take();
                            }
                            (Some(first), None) if random.within(0..2) == 0 => {
                                slots.take_first(first);
                            }
                            _ => assert_eq!(slots.take(), first),
                        }
                        let Some(index) = first else { continue };
                        let name = slots[index as usize].word();
                        assert!(name != 0 && !held.values().any(|&other| other == index));
                        assert!(held.insert(name, index).is_none() && !stale.contains(&name));
                    }
                    2 => {
                        let Some((&name, &index)) = held.iter().nth(random.within(0..len + 1))
                        else {
                            continue;
                        };
                        slots.free(index);
                        if random.within(0..4) == 0 {
                            slots.free(index);
                        }
                        held.remove(&name);
                        stale.push(name);
                        stale.drain(..stale.len().saturating_sub(64));
                    }
                    _ => {
                        let index = random.within(0..len + 2) as u64;
                        let guess = (random.within(0..4) as u64) << 32 | index;
                        let free = slots.get(index as usize).map_or(0, |name| name.0);
                        for name in stale.iter().copied().chain(held.keys().copied()).chain([
                            0,
                            guess,
                            index,
                            free,
                            free >> 32 << 32 | index,
                        ]) {
                            assert_eq!(slots.find(name), held.get(&name).copied(), "{name:x}");
                        }
                    }
                }
                let mut taken: Vec<u32> = held.values().copied().collect();
                taken.sort_unstable();
                assert!(slots.taken().map(|(index, _)| index).eq(taken));
            }
        }
    }

    #[test]
    fn slots_keep_their_names_in_longer_memory() {
        let (mut short, mut longer) = (vec![Name(7); 3], vec![Name(7); 5]);
        let mut slots = Slots::new(&mut short, Name::FRESH);
        let mut names = vec![];
        for _ in 0..3 {
            let at = slots.take().unwrap();
            names.push(slots[at as usize].0);
        }
        slots.free(1);
        slots.grow(&mut longer, Name::FRESH);
        assert_eq!(slots.find(names.remove(1)), None);
        for _ in 0..3 {
            let at = slots.take().unwrap();
            names.push(slots[at as usize].0);
        }
        assert!(slots.take().is_none());
        let found: Vec<_> = names.iter().map(|&name| slots.find(name)).collect();
        assert_eq!(found, [Some(0), Some(2), Some(1), Some(3), Some(4)]);
    }

    #[test]
    fn generations_go_round_all_but_zero() {
        let mut memory = [Name::FRESH; 1];
        let mut slots = Slots::new(&mut memory, Name::FRESH);
        slots.slots[0] = Name::free(u32::MAX, 0);
        assert_eq!(slots.take(), Some(0));
        let last = slots[0].word();
        assert_eq!((last, slots.find(last)), ((u32::MAX as u64) << 32, Some(0)));
        slots.free(0);
        assert_eq!(slots.take(), Some(0));
        assert_eq!((slots[0].word(), slots.find(last)), (1 << 32, None));
    }
}
