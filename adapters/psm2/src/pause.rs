//! How a call waits without keeping a processor from others: it spins, then yields.

use std::time::{Duration, Instant};

/// Looks before the first yield.
const SPINS: u32 = 500;

/// Time between two looks whether peers live.
const LOOK: Duration = Duration::from_millis(100);

/// Passes between two reads of the clock, before the first yield.
const PASSES: u32 = 256;

/// What an endpoint found nothing in, and for how long.
#[derive(Debug)]
pub(crate) struct Idle {
    passes: u32,
    looked: Instant,
}

impl Idle {
    pub fn new() -> Self {
        Idle { passes: 0, looked: Instant::now() }
    }

    /// Something has happened.
    #[inline]
    pub fn busy(&mut self) {
        self.passes = 0;
    }

    /// Nothing has: what the caller does next.
    #[inline]
    pub fn idle(&mut self) -> Next {
        self.passes = self.passes.saturating_add(1);
        // A yield may take long, so the clock is read after each.
        let reads = self.passes >= SPINS || self.passes.is_multiple_of(PASSES);
        if reads && self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            return Next::Look;
        }
        if self.passes < SPINS { Next::Spin } else { Next::Yield }
    }
}

/// What a caller that found nothing does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Looks whether peers live.
    Look,
    /// Tries again.
    Spin,
    /// Gives up the processor for once. No lock may be held.
    Yield,
}
