//! The callers of a rail: senders of messages that are not attached. Their messages are dropped.
//! The owner of the rail attaches those that it knows, which then repeat what was lost.

use alloc::vec::Vec;

pub(super) struct Callers {
    /// Signatures of callers. At most as many as there is capacity for.
    numbers: Vec<u32>,
    /// Whether callers were forgotten.
    anybody: bool,
}

impl Callers {
    /// Remembers at most `most` callers.
    pub fn new(most: u32) -> Callers {
        Callers { numbers: Vec::with_capacity(most as usize), anybody: false }
    }

    /// Remembers a caller. Returns whether that is news.
    pub fn note(&mut self, number: u32) -> bool {
        if self.anybody || self.numbers.contains(&number) || self.numbers.capacity() == 0 {
            return false;
        }
        match self.numbers.len() < self.numbers.capacity() {
            true => self.numbers.push(number),
            false => self.anybody = true,
        }
        true
    }

    /// Returns whether the rail with this signature may have called.
    pub fn has(&self, number: u32) -> bool {
        self.anybody || self.numbers.contains(&number)
    }

    /// Forgets a caller, because it is attached.
    pub fn forget(&mut self, number: u32) {
        self.numbers.retain(|caller| *caller != number);
    }

    /// Forgets all callers, and remembers none from now on.
    pub fn end(&mut self) {
        *self = Callers::new(0);
    }
}

#[cfg(test)]
mod tests {
    use super::Callers;

    #[test]
    fn each_caller_is_news_once_and_too_many_may_be_anybody() {
        let mut callers = Callers::new(2);
        assert_eq!([7, 7, 8].map(|number| callers.note(number)), [true, false, true]);
        callers.forget(7);
        assert_eq!([7, 8].map(|number| callers.has(number)), [false, true]);
        assert_eq!([7, 9, 10].map(|number| callers.note(number)), [true, true, false]);
        assert!(callers.has(11));
        callers.end();
        assert!(!callers.note(7) && !callers.has(7));
    }
}
