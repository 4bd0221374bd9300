//! A [`Leg`]: one uninterrupted measurement, as the leading side orders it and both sides run it;
//! and what they tell each other afterwards.

use serde::{Deserialize, Serialize};

use crate::args::{Layout, Mode, Plan, SignalKind, Test, Transport, bounds};
use crate::failure::{Failure, Outcome};
use crate::layout::{self, Placement};

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leg {
    /// What to measure.
    pub test: Test,
    /// Payload in bytes.
    pub size: usize,
    /// Measured iterations.
    pub iters: u64,
    /// Iterations before them.
    pub warmup: u64,
    /// Verify every payload.
    pub check: bool,
    /// Operations in flight.
    pub window: u64,
    /// Where the signals lie.
    pub layout: Layout,
    /// What `signal-rate` does.
    pub signal: SignalKind,
    /// Who drives the engine, on both sides.
    pub mode: Mode,
    /// What payloads are made from.
    pub seed: u64,
    /// Time for it, in nanoseconds.
    pub timeout_ns: u64,
}

/// Which side of a leg one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that starts, and measures.
    Starts,
    /// The side that answers.
    Answers,
}

/// What a side found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Duration of the measured part in ticks, of the side that measures.
    pub ticks: u64,
    /// Operations in that time.
    pub ops: u64,
    /// Iterations verified.
    pub checked: u64,
    /// Iterations whose data was wrong.
    pub errors: u64,
    /// Signals seen before what they announce.
    pub misordered: u64,
    /// Arrivals out of order, as the engine counted.
    pub out_of_order: u64,
}

impl Tally {
    /// Both sides of one leg: an iteration counts as verified when both say so.
    pub fn both(self, answer: Tally, two_way: bool) -> Tally {
        Tally {
            ticks: self.ticks,
            ops: self.ops,
            checked: match two_way {
                true => self.checked.min(answer.checked),
                false => self.checked.saturating_add(answer.checked),
            },
            errors: self.errors.saturating_add(answer.errors),
            misordered: self.misordered.saturating_add(answer.misordered),
            out_of_order: self.out_of_order.saturating_add(answer.out_of_order),
        }
    }

    /// This leg and another of the same row.
    pub fn and(self, other: Tally) -> Tally {
        Tally {
            ticks: self.ticks + other.ticks,
            ops: self.ops + other.ops,
            // These may contain what another process told.
            checked: self.checked.saturating_add(other.checked),
            errors: self.errors.saturating_add(other.errors),
            misordered: self.misordered.saturating_add(other.misordered),
            out_of_order: self.out_of_order.saturating_add(other.out_of_order),
        }
    }
}

/// Bytes that the slots of a stream of puts may take before they are used again sooner than the
/// window asks: what a first-level cache holds.
const SLOTS_BYTES: usize = 32 << 10;
/// Where the payloads of a stream begin, behind its signals: at a page, since copies between like
/// places in pages are the fastest.
pub const SLOTS_AT: usize = 4096;

impl Leg {
    /// The legs of one row: both halves, alike.
    pub fn half(plan: &Plan, size: usize) -> Leg {
        let iters =
            plan.iters.unwrap_or_else(|| (plan.effort.bytes / size as u64).clamp(100, plan.effort.iters));
        let warmup = plan.warmup.unwrap_or((iters / 10).min(10_000));
        let leg = Leg {
            test: plan.test,
            size,
            iters: 0,
            warmup: 0,
            check: plan.check,
            window: u64::from(plan.window).min(iters.div_ceil(2).next_power_of_two()),
            layout: plan.layout.unwrap_or_else(|| layout::fitting(size)),
            signal: plan.signal,
            mode: plan.mode,
            seed: plan.seed,
            timeout_ns: plan.timeout.saturating_mul(1_000_000_000),
        };
        leg.with_iters(iters.div_ceil(2), warmup)
    }

    /// Checks what another process orders, or this one is about to, as the command line is checked.
    pub fn check_bounds(&self, transport: Transport, region: usize) -> Outcome {
        if self.test == Test::Pool {
            return Err(Failure::usage("pool has no sides"));
        }
        bounds::test(self.test, transport)?;
        bounds::mode(self.mode, self.test, transport)?;
        bounds::size(self.size, self.test, region)?;
        bounds::iterations(self.iters, self.warmup)?;
        bounds::window(self.window)?;
        bounds::seconds(self.timeout_ns.div_ceil(1_000_000_000))?;
        bounds::layout(self.layout, transport)
    }

    /// The same with this many iterations and warm-up ones: whole windows, where there are windows.
    pub fn with_iters(self, iters: u64, warmup: u64) -> Leg {
        let unit = if self.is_windowed() { self.per_window() } else { 1 };
        Leg { iters: iters.next_multiple_of(unit), warmup: warmup.next_multiple_of(unit), ..self }
    }

    /// Whether samples are of whole windows.
    pub fn is_windowed(&self) -> bool {
        matches!(self.test, Test::Put | Test::SignalRate | Test::TagBw)
    }

    /// Whether both sides send payloads.
    pub fn is_two_way(&self) -> bool {
        matches!(self.test, Test::PutSignal | Test::Tag)
    }

    /// Bytes from one slot of a stream to the next.
    pub fn stride(&self) -> usize {
        if self.size <= 64 { self.size.next_multiple_of(8) } else { self.size.next_multiple_of(64) }
    }

    /// Slots that a stream of puts writes in turn.
    pub fn slots(&self) -> u64 {
        ((SLOTS_BYTES / self.stride()) as u64).clamp(1, self.window)
    }

    /// Operations of one window: those after which the other side verifies, when it does.
    pub fn per_window(&self) -> u64 {
        if self.check && matches!(self.test, Test::Put | Test::TagBw) { self.slots() } else { self.window }
    }

    /// Where payload and signal lie.
    pub fn placement(&self) -> Placement {
        Placement::of(self.layout, self.size)
    }

    /// What one sample of the histogram has to be divided by.
    pub fn divisor(&self) -> f64 {
        match self.test {
            Test::PutSignal | Test::Tag | Test::Ring => 2.0,
            Test::Put | Test::SignalRate | Test::TagBw => self.per_window() as f64,
            Test::Get | Test::Amo | Test::Pool => 1.0,
        }
    }

    /// Bytes of arena that payloads up to `region` bytes may need.
    pub fn arena(region: usize) -> usize {
        (Placement::arena(region) + SLOTS_AT + SLOTS_BYTES).max(RING_ARENA).next_multiple_of(4096)
    }
}

/// What the ring test takes of the arena.
pub const RING_ARENA: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn leg(test: Test, size: usize, window: u64, check: bool) -> Leg {
        Leg {
            test,
            size,
            iters: 1,
            warmup: 0,
            check,
            window,
            layout: layout::fitting(size),
            signal: SignalKind::Add,
            mode: Mode::Inline,
            seed: 0,
            timeout_ns: 0,
        }
    }

    #[test]
    fn slots_fit_and_a_checked_window_uses_each_once() {
        for size in [1, 8, 9, 63, 64, 65, 4096, 40_000, 1 << 20] {
            for window in [1, 64, 65_536] {
                let leg = leg(Test::Put, size, window, true);
                assert!(leg.slots() >= 1 && leg.slots() <= window);
                assert_eq!(leg.per_window(), leg.slots());
                let end = SLOTS_AT + (leg.slots() as usize - 1) * leg.stride() + size;
                assert!(end <= Leg::arena(size), "{size} {window}");
            }
        }
    }
}
