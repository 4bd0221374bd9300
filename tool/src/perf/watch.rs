//! Every loop of every test uses a [`Watch`], so that it ends by the deadline and detects a lost
//! peer.
//!
//! Nothing here blocks. A loop that records samples reads the clock anyway ([`Watch::lap`]). Other
//! loops count their turns ([`Watch::turn`]).

use crate::clock::{Clock, monotonic_ns};
use crate::histogram::Histogram;

/// Some 10 to 30 ms.
const LOOK_TICKS: u64 = 1 << 25;

/// Number of turns between two clock reads, in a loop that records no samples.
const TURNS: u32 = 1024;

/// Some tens of microseconds.
const FRUITLESS: u32 = 256;

#[derive(Clone, Copy, Debug)]
pub struct Watch {
    clock: Clock,
    deadline_ns: u64,
    looked: u64,
    turns: u32,
    fruitless: u32,
}

impl Watch {
    /// Creates a watch that is expired until it is [set](Watch::set).
    pub fn new(clock: Clock) -> Self {
        Watch { clock, deadline_ns: 0, looked: clock.now(), turns: 0, fruitless: 0 }
    }

    pub fn set(&mut self, ns: u64) {
        self.deadline_ns = monotonic_ns().saturating_add(ns);
    }

    pub fn is_up(&self) -> bool {
        monotonic_ns() > self.deadline_ns
    }

    /// Records a sample from `last` to now, and starts the next sample. Returns whether a check is
    /// due.
    #[inline(always)]
    pub fn lap(&mut self, histogram: &mut Histogram, last: &mut u64) -> bool {
        let now = self.clock.now();
        histogram.record(now.wrapping_sub(*last));
        *last = now;
        let due = now.wrapping_sub(self.looked) >= LOOK_TICKS;
        if due {
            self.looked = now;
        }
        due
    }

    /// Counts a turn of a loop. Returns whether a check is due.
    #[inline(always)]
    pub fn turn(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        self.turns.is_multiple_of(TURNS) && self.is_due()
    }

    /// Counts an idle turn. At intervals, lets another thread run. Returns whether a check is due.
    #[inline(always)]
    pub fn fruitless(&mut self) -> bool {
        self.fruitless = self.fruitless.wrapping_add(1);
        self.fruitless.is_multiple_of(FRUITLESS) && self.pause()
    }

    #[cold]
    fn pause(&mut self) -> bool {
        std::thread::yield_now();
        self.is_due()
    }

    #[cold]
    fn is_due(&mut self) -> bool {
        let now = self.clock.now();
        let due = now.wrapping_sub(self.looked) >= LOOK_TICKS;
        if due {
            self.looked = now;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_of_counting_looks_again_and_again_and_time_is_up_once_it_has_passed() {
        let mut watch = Watch::new(Clock::calibrate());
        assert!(watch.is_up());
        watch.set(u64::MAX);
        assert!(!watch.is_up());
        let (mut histogram, mut last) = (Histogram::new(), watch.clock.now());
        for _ in 0..2 {
            while !watch.lap(&mut histogram, &mut last) {}
            while !watch.turn() {}
            while !watch.fruitless() {}
        }
        assert!(histogram.samples() > 0);
        watch.set(0);
        while !watch.is_up() {}
    }
}
