//! A table that gives each new entry a new number, so that it recognizes numbers of removed
//! entries.

/// Values in slots. The lower half of a number is the slot. The upper half counts the uses of the
/// slot, so a removed value and its successor have different numbers. Bit 63 is never set.
pub(crate) struct Slab<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

/// After this many uses of a slot, the count is 1 again.
const USES: u32 = u32::MAX >> 1;

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { slots: vec![], free: vec![] }
    }
}

impl<T> Slab<T> {
    /// Stores a value and returns its number, which is never 0.
    pub fn insert(&mut self, value: T) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[at as usize];
        *slot = (((slot.0 + 1) & USES).max(1), Some(value));
        u64::from(slot.0) << 32 | u64::from(at)
    }

    pub fn get(&self, number: u64) -> Option<&T> {
        let slot = self.slots.get(number as u32 as usize)?;
        slot.1.as_ref().filter(|_| u64::from(slot.0) == number >> 32)
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        let slot = self.slots.get_mut(number as u32 as usize)?;
        slot.1.as_mut().filter(|_| u64::from(slot.0) == number >> 32)
    }

    pub fn remove(&mut self, number: u64) -> Option<T> {
        self.get(number)?;
        self.free.push(number as u32);
        self.slots[number as u32 as usize].1.take()
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.slots.iter().enumerate().filter_map(|(at, (uses, value))| {
            value.as_ref().map(|value| (u64::from(*uses) << 32 | at as u64, value))
        })
    }

    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.slots.iter_mut().filter_map(|(_, value)| value.as_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_removed_value_names_nothing() {
        let mut slab = Slab::default();
        let first = slab.insert('a');
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b');
        assert_eq!(first as u32, second as u32, "the slot is used again");
        assert!(slab.get(first).is_none() && slab.remove(first).is_none());
        assert_eq!((slab.get(second), slab.get(0)), (Some(&'b'), None));
        assert_eq!(slab.iter().collect::<Vec<_>>(), [(second, &'b')]);
    }

    #[test]
    fn bit_63_of_a_number_stays_free() {
        let mut slab = Slab::default();
        let first = slab.insert('a');
        slab.remove(first);
        slab.slots[0].0 = USES - 1;
        let numbers = [(); 3].map(|()| {
            let number = slab.insert('b');
            assert_eq!(slab.remove(number), Some('b'));
            number
        });
        assert_eq!(numbers, [u64::from(USES) << 32, 1 << 32, 2 << 32]);
        assert!(numbers.iter().all(|number| number >> 63 == 0));
    }
}
