//! The interface of a matching engine, in terms that all engines share.

/// The criteria of a receive. Tags have 44 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The source. `None` accepts any.
    pub source: Option<u32>,
    /// The tag.
    pub tag: u64,
    /// Bits of the tag that are not compared.
    pub ignore: u64,
}

impl Wanted {
    /// Accepts one source, and compares every bit.
    pub const fn exact(source: u32, tag: u64) -> Self {
        Wanted { source: Some(source), tag, ignore: 0 }
    }

    /// Accepts any source, and compares every bit.
    pub const fn any_source(tag: u64) -> Self {
        Wanted { source: None, tag, ignore: 0 }
    }
}

/// A hash of all pairs of a receive and its message, independent of their order. Engines that
/// matched the same pairs have the same hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    /// The number of pairs.
    pub count: u64,
    /// The sum of the hashes of all pairs.
    pub sum: u64,
}

impl Pairs {
    /// Adds a pair.
    #[inline(always)]
    pub fn add(&mut self, context: u32, cookie: u32) {
        self.count += 1;
        self.sum = self.sum.wrapping_add((context as u64 + 1).wrapping_mul(2 * cookie as u64 + 1));
    }
}

/// A matching engine. A context identifies one receive, and is below the number given at creation.
pub trait Engine {
    /// Posts a receive.
    fn post(&mut self, wanted: Wanted, context: u32);

    /// Delivers a message from `source`.
    fn arrive(&mut self, source: u32, tag: u64, cookie: u32);

    /// Cancels a receive. Returns whether it was still posted.
    fn cancel(&mut self, context: u32) -> bool;

    /// Returns whether a message that matches these criteria has arrived.
    fn probe(&mut self, wanted: Wanted) -> bool;

    /// Claims the oldest message that matches. If there is one, receives it, and returns `true`.
    fn claim(&mut self, wanted: Wanted, context: u32) -> bool;

    /// Returns the pairs so far.
    fn pairs(&self) -> Pairs;
}
