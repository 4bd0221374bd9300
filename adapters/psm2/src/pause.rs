//! Decides the last step of a polling call: nothing at first, a yield after many empty calls, and
//! at intervals a check that peers are alive. Calls that always find something make this check too.

use std::time::{Duration, Instant};

/// Maximum time that a program waits while unexpected messages fill all their memory.
/// `FISHPLATE_PSM2_PATIENCE` overrides it, in seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Factor for [`PATIENCE`] if the program waits only for peers whose messages do not fill the
/// memory. Such a peer may compute for a long time. It may also wait itself for a peer whose
/// messages fill the memory.
const THIRD: u32 = 10;

/// `FISHPLATE_PSM2_UNEXPECTED` overrides this.
const UNEXPECTED: u64 = 1 << 21;

const SPINS: u32 = 500;

const LOOK: Duration = Duration::from_millis(100);

const CALLS: u32 = 256;

#[derive(Debug)]
pub(crate) struct Idle {
    empty: u32,
    /// Wraps around.
    calls: u32,
    looked: Instant,
    calls_at_look: u32,
    /// Set while unexpected messages fill their memory and calls find nothing. Contains the time
    /// when this began, and whether the program may be waiting for a peer that fills the memory.
    crowded: Option<(Instant, bool)>,
    patience: Duration,
}

impl Idle {
    pub fn new() -> Self {
        let patience = number("FISHPLATE_PSM2_PATIENCE").map_or(PATIENCE, Duration::from_secs);
        Idle {
            empty: 0,
            calls: 0,
            looked: Instant::now(),
            calls_at_look: 0,
            crowded: None,
            patience,
        }
    }

    /// Returns whether the memory of unexpected messages has been full for too long while no call
    /// found anything. Call this at each liveness check. `crowding` is `None` unless that memory is
    /// full. It then tells whether the program may be waiting for a peer that fills the memory.
    pub fn is_crowded_out(&mut self, crowding: Option<bool>) -> bool {
        let calls = self.calls.wrapping_sub(self.calls_at_look);
        self.calls_at_look = self.calls;
        match crowding.filter(|_| self.empty >= calls.max(SPINS)) {
            Some(awaited) => {
                let begun = self.crowded.filter(|(_, before)| *before == awaited);
                let (since, _) = *self.crowded.insert(begun.unwrap_or((Instant::now(), awaited)));
                since.elapsed()
                    >= if awaited { self.patience } else { self.patience.saturating_mul(THIRD) }
            }
            None => {
                self.crowded = None;
                false
            }
        }
    }

    /// Counts a call. Returns `true` if the call may return without a yield or a liveness check.
    #[inline(always)]
    pub fn returns(&mut self, found: bool) -> bool {
        self.calls = self.calls.wrapping_add(1);
        self.empty = if found { 0 } else { self.empty.saturating_add(1) };
        self.empty < SPINS && !self.calls.is_multiple_of(CALLS)
    }

    /// Like [`returns`](Self::returns), for a call that found something. Counts nothing if this
    /// returns `false`.
    #[inline(always)]
    pub fn returns_at_once(&mut self) -> bool {
        let calls = self.calls.wrapping_add(1);
        let returns = !calls.is_multiple_of(CALLS);
        if returns {
            (self.calls, self.empty) = (calls, 0);
        }
        returns
    }

    /// Returns the last step of a call for which [`returns`](Self::returns) returned `false`.
    pub fn next(&mut self) -> Next {
        // A yield may take long, so a clock read follows each yield.
        if self.looked.elapsed() >= LOOK {
            self.looked = Instant::now();
            return Next::Look;
        }
        if self.empty < SPINS { Next::Return } else { Next::Yield }
    }
}

pub(crate) fn unexpected() -> u32 {
    number("FISHPLATE_PSM2_UNEXPECTED").unwrap_or(UNEXPECTED).min(1 << 24) as u32
}

pub(crate) fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Look,
    Return,
    /// The caller must hold no lock.
    Yield,
}
