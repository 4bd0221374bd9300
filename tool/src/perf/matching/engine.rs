//! The interface of a matching engine, in terms that all engines share.

/// Tags have 44 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// `None` accepts any source.
    pub source: Option<u32>,
    pub tag: u64,
    pub ignore: u64,
}

impl Wanted {
    pub const fn exact(source: u32, tag: u64) -> Self {
        Wanted { source: Some(source), tag, ignore: 0 }
    }

    pub const fn any_source(tag: u64) -> Self {
        Wanted { source: None, tag, ignore: 0 }
    }
}

/// A hash that does not depend on the order of the pairs: engines that make the same matches have
/// the same hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    pub count: u64,
    pub sum: u64,
}

impl Pairs {
    #[inline(always)]
    pub fn add(&mut self, context: u32, cookie: u32) {
        self.count += 1;
        self.sum = self.sum.wrapping_add((context as u64 + 1).wrapping_mul(2 * cookie as u64 + 1));
    }
}

/// A receive is identified by its context, which is less than the number of contexts at creation.
pub trait Engine {
    fn post(&mut self, wanted: Wanted, context: u32);

    /// Delivers a message from `source`. `cookie` identifies the message.
    fn arrive(&mut self, source: u32, tag: u64, cookie: u32);

    /// Returns whether the receive was still posted.
    fn cancel(&mut self, context: u32) -> bool;

    fn probe(&mut self, wanted: Wanted) -> bool;

    /// Receives the oldest waiting message that matches. Returns `false` if no message matches.
    fn claim(&mut self, wanted: Wanted, context: u32) -> bool;

    fn pairs(&self) -> Pairs;
}
