//! A hash table of two bytes per place, which stores numbers of peers. The caller keeps the keys.

use alloc::boxed::Box;
use alloc::vec;

/// Numbers below `u16::MAX`, found by the hash of their keys. At most four of five places are
/// taken. Slow path: insertion may allocate.
#[derive(Debug, Default)]
pub struct Index {
    /// Each place has a number plus 1, or 0 if it is free.
    places: Box<[u16]>,
    taken: usize,
}

impl Index {
    /// Returns the number with this hash for which `is` returns `true`.
    pub fn find(&self, hash: u64, is: impl FnMut(u16) -> bool) -> Option<u16> {
        let at = self.place(hash, is)?;
        Some(self.places[at] - 1)
    }

    /// Inserts a number. `hash_of` returns the hash of the key of any number: the new one, or one
    /// that the table has.
    pub fn insert(&mut self, number: u16, hash_of: impl Fn(u16) -> u64) {
        if 5 * (self.taken + 1) > 4 * self.places.len() {
            let old = core::mem::take(&mut self.places);
            // Grows by a quarter, so that few places are free.
            self.places = vec![0; (old.len() + old.len() / 4).max(8)].into();
            old.iter().filter(|&&place| place != 0).for_each(|&place| {
                self.put(place, hash_of(place - 1));
            });
        }
        self.put(number + 1, hash_of(number));
        self.taken += 1;
    }

    /// Removes a number. Does nothing if the table does not have it.
    pub fn remove(&mut self, number: u16, hash_of: impl Fn(u16) -> u64) {
        let Some(mut hole) = self.place(hash_of(number), |other| other == number) else { return };
        self.taken -= 1;
        // A search for a later entry of the run may pass the hole. If so, moves that entry into the
        // hole.
        let len = self.places.len();
        let distance =
            |from: usize, to: usize| if to >= from { to - from } else { to + len - from };
        let mut at = hole;
        loop {
            at = self.after(at);
            let place = self.places[at];
            if place == 0 {
                break;
            }
            let start = self.start(hash_of(place - 1));
            if distance(start, at) >= distance(hole, at) {
                self.places[hole] = place;
                hole = at;
            }
        }
        self.places[hole] = 0;
    }

    /// Returns how many numbers the table has.
    pub fn len(&self) -> usize {
        self.taken
    }

    /// Returns whether the table has no numbers.
    pub fn is_empty(&self) -> bool {
        self.taken == 0
    }

    fn start(&self, hash: u64) -> usize {
        let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (((mixed >> 32) * self.places.len() as u64) >> 32) as usize
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.places.len() { 0 } else { at + 1 }
    }

    fn place(&self, hash: u64, mut is: impl FnMut(u16) -> bool) -> Option<usize> {
        if self.places.is_empty() {
            return None;
        }
        let mut at = self.start(hash);
        // Terminates: a fifth of the places is free.
        loop {
            match self.places[at] {
                0 => return None,
                place if is(place - 1) => return Some(at),
                _ => at = self.after(at),
            }
        }
    }

    fn put(&mut self, place: u16, hash: u64) {
        let mut at = self.start(hash);
        while self.places[at] != 0 {
            at = self.after(at);
        }
        self.places[at] = place;
    }
}

#[cfg(test)]
mod tests {
    use super::Index;

    #[test]
    fn numbers_are_found_until_they_are_removed_even_if_all_hashes_are_close() {
        for spread in [0, 1, 3, 0x1234_5678_9abc_def1] {
            let hash_of = |number: u16| u64::from(number).wrapping_mul(spread);
            let mut index = Index::default();
            let mut here = [false; 200];
            let mut random = 1u64;
            for _ in 0..4000 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let number = (random >> 33) as u16 % 200;
                match here[number as usize] {
                    true => index.remove(number, hash_of),
                    false => index.insert(number, hash_of),
                }
                here[number as usize] ^= true;
                if (random >> 60) == 0 {
                    for other in 0..200 {
                        let found = index.find(hash_of(other), |found| found == other);
                        assert_eq!(found.is_some(), here[other as usize], "{spread} {other}");
                    }
                    assert_eq!(index.len(), here.iter().filter(|here| **here).count());
                }
            }
            index.remove(u16::MAX - 1, hash_of);
        }
    }
}
