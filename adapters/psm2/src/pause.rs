//! How a waiting call yields the processor: it spins, then yields. Also decides when a call checks
//! that peers are alive, which busy programs do too.

use std::time::{Duration, Instant};

/// How long a program may wait while messages that it does not receive fill all memory for them, if
/// `FISHPLATE_PSM2_PATIENCE` says no other number of seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Short messages that may wait for their receive in an endpoint. `FISHPLATE_PSM2_UNEXPECTED` sets
/// another number.
const UNEXPECTED: u64 = 1 << 21;

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
    /// Since when all memory for messages is full and nothing else is found.
    crowded: Option<Instant>,
    patience: Duration,
}

impl Idle {
    pub fn new() -> Self {
        let patience = number("FISHPLATE_PSM2_PATIENCE").map_or(PATIENCE, Duration::from_secs);
        Idle { empty: 0, calls: 0, looked: Instant::now(), crowded: None, patience }
    }

    /// At a look: whether the memory for messages has been full for too long while the program
    /// found nothing.
    pub fn is_crowded_out(&mut self, full: bool) -> bool {
        match full && self.empty >= SPINS {
            true => self.crowded.get_or_insert_with(Instant::now).elapsed() >= self.patience,
            false => {
                self.crowded = None;
                false
            }
        }
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

/// Short messages that can wait for their receive in an endpoint.
pub(crate) fn unexpected() -> u32 {
    number("FISHPLATE_PSM2_UNEXPECTED").unwrap_or(UNEXPECTED).min(1 << 24) as u32
}

/// The number in a variable of the environment.
pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
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
