//! How a call waits without keeping a processor from others: it spins, then yields. And when a call
//! looks whether peers live: also while others keep the program busy.

use std::time::{Duration, Instant};

/// Looks before the first yield.
const SPINS: u32 = 500;

/// Time between two looks whether peers live.
const LOOK: Duration = Duration::from_millis(100);

/// Calls between two reads of the clock, before the first yield.
const CALLS: u32 = 256;

/// Counts the calls that look for something on an endpoint.
#[derive(Debug)]
pub(crate) struct Idle {
    /// Calls in a row that found nothing.
    empty: u32,
    /// All calls; wraps.
    calls: u32,
    looked: Instant,
}

impl Idle {
    pub fn new() -> Self {
        Idle { empty: 0, calls: 0, looked: Instant::now() }
    }

    /// A call has found something or not: what it does next.
    #[inline]
    pub fn next(&mut self, found: bool) -> Next {
        self.calls = self.calls.wrapping_add(1);
        self.empty = if found { 0 } else { self.empty.saturating_add(1) };
        // A yield may take long, so the clock is read after each.
        let reads = self.empty >= SPINS || self.calls.is_multiple_of(CALLS);
        if reads && self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            return Next::Look;
        }
        if self.empty < SPINS { Next::Return } else { Next::Yield }
    }
}

/// What a call does before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Looks whether peers live.
    Look,
    /// Nothing.
    Return,
    /// Gives up the processor for once. No lock may be held.
    Yield,
}
