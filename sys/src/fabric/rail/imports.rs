//! The imported regions of peers. Every post is checked against them, because providers treat
//! invalid keys differently: some close the connection, some write by address without a check.
//!
//! The table is a hash table of fixed size, keyed by (peer, key) and at most half full. Lookup is
//! hot and probes a bounded number of entries. Changes are slow.

use alloc::boxed::Box;
use alloc::vec;

/// A table entry of half a cache line, so that a shift computes its address.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Place {
    key: u64,
    len: u64,
    peer: u32,
    count: u32,
}

/// Marks a free entry. No peer has this number.
const NOBODY: u32 = u32::MAX;

const FREE: Place = Place { key: 0, len: 0, peer: NOBODY, count: 0 };

impl Place {
    fn used(&self) -> bool {
        self.peer != NOBODY
    }
}

pub(super) struct Imports {
    places: Box<[Place]>,
    shift: u32,
    left: u32,
}

impl Imports {
    pub fn new(max: u32) -> Imports {
        let size = (max as usize * 2).next_power_of_two();
        Imports { places: vec![FREE; size].into(), shift: 64 - size.trailing_zeros(), left: max }
    }

    pub fn bytes(&self) -> usize {
        size_of_val(&*self.places)
    }

    #[inline(always)]
    fn start(&self, peer: u16, key: u64) -> usize {
        // The product's upper bits depend on all bits of the key, so they form the index.
        ((key ^ peer as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// Returns the index of a region's entry, or of the free entry where the region belongs.
    #[inline(always)]
    fn find(&self, peer: u16, key: u64) -> usize {
        let mask = self.places.len() - 1;
        let mut at = self.start(peer, key) & mask;
        // Terminates: at least half of the entries are free.
        loop {
            let place = &self.places[at];
            if !place.used() || (place.key == key && place.peer == peer as u32) {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    #[inline(always)]
    pub fn allows(&self, peer: u16, key: u64, offset: u64, len: u64) -> bool {
        let at = self.start(peer, key);
        // SAFETY: the shift leaves an index below the number of entries, which is a power of two.
        let first = unsafe { self.places.get_unchecked(at) };
        let place = match first.key == key && first.peer == peer as u32 {
            true => first,
            false => self.further(peer, key),
        };
        place.peer == peer as u32 && offset <= place.len && len <= place.len - offset
    }

    #[cold]
    #[inline(never)]
    fn further(&self, peer: u16, key: u64) -> &Place {
        &self.places[self.find(peer, key)]
    }

    /// Adds a region, or counts another import of a known region.
    pub fn insert(&mut self, peer: u16, key: u64, len: u64) -> bool {
        let at = self.find(peer, key);
        if self.places[at].used() {
            self.places[at].count += 1;
            self.places[at].len = self.places[at].len.max(len);
            return true;
        }
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        self.places[at] = Place { key, len, peer: peer as u32, count: 1 };
        true
    }

    pub fn remove(&mut self, peer: u16, key: u64) {
        let at = self.find(peer, key);
        if !self.places[at].used() {
            return;
        }
        self.places[at].count -= 1;
        if self.places[at].count == 0 {
            self.clear(at);
        }
    }

    pub fn forget(&mut self, peer: u16) {
        let mut at = 0;
        while at < self.places.len() {
            let place = &self.places[at];
            if place.peer == peer as u32 {
                // Do not advance: `clear` may move another entry to this index.
                self.clear(at);
            } else {
                at += 1;
            }
        }
    }

    /// Frees an entry, and moves entries that had probed past it closer to their start.
    fn clear(&mut self, mut hole: usize) {
        let mask = self.places.len() - 1;
        self.left += 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let place = self.places[at];
            if !place.used() {
                break;
            }
            let start = self.start(place.peer as u16, place.key) & mask;
            // An entry may fill the hole only if its start does not lie between the hole and the
            // entry.
            if (at.wrapping_sub(start) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.places[hole] = place;
                hole = at;
            }
        }
        self.places[hole] = FREE;
    }
}

#[cfg(test)]
mod tests {
    use super::Imports;
    use alloc::collections::BTreeMap;

    #[test]
    fn it_agrees_with_a_map_through_collisions_and_removals() {
        let (mut table, mut model) = (Imports::new(16), BTreeMap::<(u16, u64), (u64, u32)>::new());
        let mut random = 0x1234_5678_9abc_def1u64;
        for step in 0..20_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let (peer, key, len) =
                ((random >> 8) as u16 % 3, (random >> 24) % 12, (random >> 40) % 100);
            match random % 8 {
                0..4 => {
                    let fits = model.contains_key(&(peer, key)) || model.len() < 16;
                    assert_eq!(table.insert(peer, key, len), fits, "step {step}");
                    if fits {
                        let entry = model.entry((peer, key)).or_insert((0, 0));
                        *entry = (entry.0.max(len), entry.1 + 1);
                    }
                }
                4..7 => {
                    table.remove(peer, key);
                    if let Some(entry) = model.get_mut(&(peer, key)) {
                        entry.1 -= 1;
                        if entry.1 == 0 {
                            model.remove(&(peer, key));
                        }
                    }
                }
                _ if random.is_multiple_of(64) => {
                    table.forget(peer);
                    model.retain(|of, _| of.0 != peer);
                }
                _ => {}
            }
            for peer in 0..3 {
                for key in 0..12 {
                    let len = model.get(&(peer, key)).map(|entry| entry.0);
                    assert_eq!(
                        table.allows(peer, key, 0, len.unwrap_or(0)),
                        len.is_some(),
                        "step {step}: {peer} {key}"
                    );
                    assert!(
                        !table.allows(peer, key, 1, len.unwrap_or(0)),
                        "step {step}: {peer} {key}"
                    );
                }
            }
        }
    }

    #[test]
    fn ranges_that_wrap_are_outside() {
        let mut table = Imports::new(1);
        assert!(table.insert(1, 7, 100));
        assert!(table.allows(1, 7, 100, 0) && table.allows(1, 7, 0, 100));
        assert!(
            !table.allows(1, 7, 101, 0)
                && !table.allows(1, 7, u64::MAX, 2)
                && !table.allows(1, 7, 2, u64::MAX)
        );
        assert!(!table.insert(1, 8, 1), "full");
    }
}
