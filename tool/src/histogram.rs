//! Counts the samples of the timed loops.
//!
//! [`Histogram::record`] is a comparison and an increment: no allocation and no division. A sample
//! of 4096 ticks (some 1.5 us) or more takes a call and a few shifts. The expensive work is in
//! [`Histogram::summary`].

use serde::{Deserialize, Serialize};

use super::clock::Clock;

/// Samples below this many ticks are counted exactly.
const LINEAR: usize = 1 << LINEAR_BITS;
const LINEAR_BITS: u32 = 12;
/// A duration of at least [`LINEAR`] ticks is counted in a bucket. Each power of two has `1 <<
/// STEPS_BITS` buckets.
const STEPS_BITS: u32 = 6;
const COARSE: usize = ((64 - LINEAR_BITS) as usize) << STEPS_BITS;

/// Number of parts of one clock step. Samples of equal value are spread over these parts.
const PARTS: u64 = 20;

pub struct Histogram {
    linear: Box<[u32; LINEAR]>,
    coarse: Box<[u32; COARSE]>,
    longest: u64,
}

/// Percentiles of a latency, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    pub min: f64,
    pub p50: f64,
    /// 90 % of the samples are not longer.
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Histogram {
    pub fn new() -> Self {
        Histogram { linear: Box::new([0; LINEAR]), coarse: Box::new([0; COARSE]), longest: 0 }
    }

    /// Counts one duration in ticks. Hot path.
    #[inline(always)]
    pub fn record(&mut self, ticks: u64) {
        if ticks < LINEAR as u64 {
            self.linear[ticks as usize] += 1;
        } else {
            self.record_coarse(ticks);
        }
    }

    /// Not inlined, so that the timed loop stays short. Not `cold`, because all large transfers use
    /// it.
    #[inline(never)]
    fn record_coarse(&mut self, ticks: u64) {
        self.coarse[coarse_index(ticks)] += 1;
        self.longest = self.longest.max(ticks);
    }

    pub fn clear(&mut self) {
        self.linear.fill(0);
        self.coarse.fill(0);
        self.longest = 0;
    }

    pub fn samples(&self) -> u64 {
        self.linear.iter().chain(self.coarse.iter()).map(|&count| u64::from(count)).sum()
    }

    /// Returns each duration in ticks with its count, in ascending order. A duration of at least
    /// [`LINEAR`] ticks is the middle of its bucket.
    pub fn counts(&self) -> impl Iterator<Item = (f64, u32)> {
        let fine = self.linear.iter().enumerate().map(|(ticks, &count)| (ticks as f64, count));
        let coarse =
            self.coarse.iter().enumerate().map(|(index, &count)| (coarse_middle(index), count));
        fine.chain(coarse).filter(|&(_, count)| count > 0)
    }

    /// Returns percentiles of `sample / divisor`. The divisor is 2 if a sample is a round trip, or
    /// else the number of operations that a sample covers. `None` if nothing was recorded.
    ///
    /// If the clock advances in steps, a sample is known only to within one step. The durations are
    /// independent of the clock, so samples of equal value are spread evenly over one step.
    pub fn summary(&self, clock: &Clock, divisor: f64) -> Option<Latency> {
        // Picoseconds, so that a latency of a few nanoseconds keeps three digits.
        let picos = |ticks: f64| (clock.ns(1) * ticks * 1000.0 / divisor).round().max(1.0) as u64;
        let mut sorted = hdrhistogram::Histogram::<u64>::new(3).ok()?;
        sorted.auto(true);
        let mut first = None;
        let mut last = 0.0;
        for (ticks, count) in self.counts() {
            let mut left = u64::from(count);
            for part in (1..=PARTS).rev() {
                let share = left / part;
                left -= share;
                let place = (part as f64 - 0.5) / PARTS as f64 - 0.5;
                if share > 0 {
                    sorted.record_n(picos(ticks + place * clock.step() as f64), share).ok()?;
                }
            }
            first.get_or_insert(ticks);
            last = ticks;
        }
        let first = first?;
        if self.longest > 0 {
            last = self.longest as f64;
        }
        // The middle of a bucket or a spread sample may lie outside the recorded range. A
        // percentile may not.
        let (min, max) = (picos(first.min(last)), picos(last));
        let at = |quantile| sorted.value_at_quantile(quantile).clamp(min, max) as f64 / 1000.0;
        Some(Latency {
            min: min as f64 / 1000.0,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: max as f64 / 1000.0,
        })
    }
}

fn coarse_index(ticks: u64) -> usize {
    let top = 63 - ticks.leading_zeros();
    let step = (ticks >> (top - STEPS_BITS)) as usize & ((1 << STEPS_BITS) - 1);
    ((top - LINEAR_BITS) as usize) << STEPS_BITS | step
}

fn coarse_middle(index: usize) -> f64 {
    let width = 2f64.powi((index >> STEPS_BITS) as i32 + (LINEAR_BITS - STEPS_BITS) as i32);
    ((1 << STEPS_BITS) + (index & ((1 << STEPS_BITS) - 1))) as f64 * width + width / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarse_buckets_hold_what_they_say() {
        for shift in LINEAR_BITS..62 {
            for odd in [0u64, 1, 17, 1 << (shift - 1), (1 << shift) - 1] {
                let ticks = (1u64 << shift) + odd;
                let middle = coarse_middle(coarse_index(ticks));
                assert!((middle / ticks as f64 - 1.0).abs() < 1.0 / 64.0, "{ticks} {middle}");
            }
        }
        assert!(coarse_index(u64::MAX) < COARSE);
    }

    #[test]
    fn percentiles_of_a_known_distribution() {
        let clock = Clock::stepping(1);
        let mut histogram = Histogram::new();
        assert_eq!(histogram.summary(&clock, 1.0), None);
        (1..=1000u64).for_each(|ticks| histogram.record(ticks));
        histogram.record(1_000_000);
        let got = histogram.summary(&clock, 2.0).unwrap();
        for (value, ticks) in [
            (got.min, 1),
            (got.p50, 501),
            (got.p90, 901),
            (got.p99, 991),
            (got.p999, 1000),
            (got.max, 1_000_000),
        ] {
            let expected = clock.ns(ticks) / 2.0;
            assert!((value / expected - 1.0).abs() < 0.01, "{value} {expected}");
        }
        histogram.clear();
        assert_eq!(histogram.summary(&clock, 1.0), None);
    }

    #[test]
    fn no_percentile_is_below_the_shortest_or_above_the_longest() {
        let clock = Clock::stepping(26);
        let mut histogram = Histogram::new();
        for sample in 0..2000u64 {
            histogram.clear();
            // Records one to four durations. They are equal, or fall into both kinds of bucket.
            for n in 0..=sample % 4 {
                let spread = if sample % 3 == 0 { 0 } else { n * sample * 37 };
                histogram.record(1 + sample * sample / 7 + spread);
            }
            let got = histogram.summary(&clock, 2.0).unwrap();
            let all = [got.min, got.p50, got.p90, got.p99, got.p999, got.max];
            assert!(all.is_sorted(), "{sample}: {all:?}");
        }
    }

    #[test]
    fn durations_between_two_steps_of_the_clock_are_found() {
        // 67 ns, measured with a clock that advances every 10 ns: sometimes 60, mostly 70.
        let mut histogram = Histogram::new();
        for start in 0..100_000u64 {
            let start = start * 7;
            histogram.record((start + 67) / 10 * 10 - start / 10 * 10);
        }
        let got = histogram.summary(&Clock::stepping(10), 1.0).unwrap();
        assert!((got.p50 - 67.0).abs() < 1.5, "{}", got.p50);
    }
}
