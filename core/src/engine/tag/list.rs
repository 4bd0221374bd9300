//! Lists through arrays of slots, by index: the order of posting, the order of arrival, free slots. Adding and removing cost a
//! few stores.

/// No slot.
pub(super) const NONE: u32 = u32::MAX;

/// A slot's neighbours in a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub next: u32,
    pub prev: u32,
}

impl Links {
    pub(super) const NONE: Links = Links { next: NONE, prev: NONE };
}

/// Slots that lie in list number `LIST` of their array.
pub(super) trait Listed<const LIST: usize> {
    fn links(&self) -> Links;
    fn links_mut(&mut self) -> &mut Links;
}

/// A list, oldest first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fifo<const LIST: usize> {
    pub head: u32,
    pub tail: u32,
}

impl<const LIST: usize> Fifo<LIST> {
    pub(super) const EMPTY: Self = Fifo { head: NONE, tail: NONE };

    #[inline(always)]
    pub(super) fn push<T: Listed<LIST>>(&mut self, slots: &mut [T], index: u32) {
        *slots[index as usize].links_mut() = Links { next: NONE, prev: self.tail };
        match self.tail {
            NONE => self.head = index,
            tail => slots[tail as usize].links_mut().next = index,
        }
        self.tail = index;
    }

    #[inline(always)]
    pub(super) fn remove<T: Listed<LIST>>(&mut self, slots: &mut [T], index: u32) {
        let Links { next, prev } = slots[index as usize].links();
        match prev {
            NONE => self.head = next,
            prev => slots[prev as usize].links_mut().next = next,
        }
        match next {
            NONE => self.tail = prev,
            next => slots[next as usize].links_mut().prev = prev,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Listed<0> for Links {
        fn links(&self) -> Links {
            *self
        }
        fn links_mut(&mut self) -> &mut Links {
            self
        }
    }

    #[test]
    fn order_stays_whatever_is_removed() {
        let mut slots = [Links::NONE; 5];
        let mut list = Fifo::EMPTY;
        (0..5).for_each(|i| list.push(&mut slots, i));
        [2, 0, 4].into_iter().for_each(|i| list.remove(&mut slots, i));
        assert_eq!((list.head, slots[1].next, slots[3].prev, list.tail), (1, 3, 1, 3));
        [1, 3].into_iter().for_each(|i| list.remove(&mut slots, i));
        assert_eq!((list.head, list.tail), (NONE, NONE));
    }
}
