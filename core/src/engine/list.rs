//! Intrusive lists through the slots of a table, linked by index. Insertion and removal take
//! constant time. A slot may be in several lists, distinguished by their number `LIST`.

pub(crate) const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Links {
    pub next: u32,
    pub prev: u32,
}

impl Links {
    pub(crate) const NONE: Links = Links { next: NONE, prev: NONE };
}

pub(crate) trait Listed<const LIST: usize = 0> {
    fn links(&self) -> Links;
    fn links_mut(&mut self) -> &mut Links;
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fifo<const LIST: usize = 0> {
    pub head: u32,
    pub tail: u32,
}

impl<const LIST: usize> Fifo<LIST> {
    pub(crate) const EMPTY: Self = Fifo { head: NONE, tail: NONE };

    #[inline(always)]
    pub(crate) fn push<T: Listed<LIST>>(&mut self, slots: &mut [T], index: u32) {
        *slots[index as usize].links_mut() = Links { next: NONE, prev: self.tail };
        // The bounds check also detects the end of the list.
        match slots.get_mut(self.tail as usize) {
            Some(tail) => tail.links_mut().next = index,
            None => self.head = index,
        }
        self.tail = index;
    }

    #[inline(always)]
    pub(crate) fn pop<T: Listed<LIST>>(&mut self, slots: &mut [T]) {
        self.head = slots[self.head as usize].links().next;
        match slots.get_mut(self.head as usize) {
            Some(next) => next.links_mut().prev = NONE,
            None => self.tail = NONE,
        }
    }

    #[inline(always)]
    pub(crate) fn first(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    #[inline(always)]
    pub(crate) fn remove<T: Listed<LIST>>(&mut self, slots: &mut [T], index: u32) {
        let Links { next, prev } = slots[index as usize].links();
        match slots.get_mut(prev as usize) {
            Some(prev) => prev.links_mut().next = next,
            None => self.head = next,
        }
        match slots.get_mut(next as usize) {
            Some(next) => next.links_mut().prev = prev,
            None => self.tail = prev,
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

    #[test]
    fn the_end_takes_and_the_head_is_given() {
        let mut slots = [Links::NONE; 3];
        let mut list = Fifo::EMPTY;
        (0..3).for_each(|i| list.push(&mut slots, i));
        for index in 0..3 {
            assert_eq!(list.first(), Some(index));
            list.pop(&mut slots);
        }
        assert_eq!((list.first(), list.tail), (None, NONE));
    }
}
