//! Load and speed of each rail: the input of rail selection.
//!
//! Counting costs a few additions per post and completion, and nothing with one rail. No clock is
//! read. Rails that are busy over the same interval work for the same time, so the bytes that each
//! moves give their relative speeds. Every [`SAMPLE`] completions update a moving average. A rail
//! that was idle in the interval could have moved more, so its sample counts only if it exceeds the
//! average. Averages drift back to equal, because rails that are not the bottleneck only move what
//! they are given. Only ratios matter, so each update rescales the averages to one mean.

use core::array;

/// Number of completions, of all rails together, between two samples.
const SAMPLE: u32 = 64;

/// The cost of a byte on the fastest rail.
const UNIT: u64 = 64;
/// The largest ratio of the cost on a rail to the cost on the fastest.
const SLOWEST: u64 = 64;
/// Rails up to this cost count as equally fast, so that rails of one kind take turns.
const NEAR: u64 = UNIT + UNIT / 8;

/// The initial speed of a rail.
const SPEED: u64 = 1 << 16;

/// The upper limit of a speed.
const TOP: u64 = SPEED << 10;

/// The weight of a sample in the average is 1 / `NEW`.
const NEW: u64 = 4;
/// The weight of the drift back to equal speeds is 1 / `FORGET`.
const FORGET: u64 = 256;

/// Load and speed of every rail. Bytes outstanding stay below 2^50: a window of posts of 2 GiB.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loads<const RAILS: usize> {
    /// Posts outstanding.
    posts: [u32; RAILS],
    /// Bytes outstanding.
    bytes: [u64; RAILS],
    /// Time cost of a byte on each rail: [`UNIT`] on the fastest.
    cost: [u64; RAILS],
    /// Relative average speeds.
    speed: [u64; RAILS],
    /// Bytes completed since the last sample.
    moved: [u64; RAILS],
    /// Posts completed since the last sample, on all rails.
    ends: u32,
    /// Rails that were idle since the last sample, as a bitmask.
    dry: u16,
    /// Number of rails.
    count: u8,
}

impl<const RAILS: usize> Loads<RAILS> {
    /// Creates the loads of `count` rails, at most `RAILS`. Nothing is outstanding, and all are
    /// equally fast.
    pub(crate) fn new(count: usize) -> Self {
        Loads {
            posts: [0; RAILS],
            bytes: [0; RAILS],
            cost: [UNIT; RAILS],
            speed: [SPEED; RAILS],
            moved: [0; RAILS],
            ends: 0,
            dry: u16::MAX,
            count: count as u8,
        }
    }

    /// Records an accepted post that is pending.
    #[inline(always)]
    pub(crate) fn posted(&mut self, rail: usize, bytes: u64) {
        if RAILS > 1 {
            self.posts[rail] += 1;
            self.bytes[rail] += bytes;
        }
    }

    /// Records `count` completed posts of `each` bytes each.
    #[inline(always)]
    pub(crate) fn ended(&mut self, rail: usize, count: u32, each: u64) {
        if RAILS > 1 {
            let bytes = count as u64 * each;
            self.posts[rail] = self.posts[rail].wrapping_sub(count);
            self.bytes[rail] = self.bytes[rail].wrapping_sub(bytes);
            self.moved[rail] += bytes;
            self.dry |= ((self.bytes[rail] == 0) as u16) << rail;
            self.ends += count;
            if self.ends >= SAMPLE {
                self.look();
            }
        }
    }

    /// Returns the relative time until a rail has drained its outstanding bytes and `more`. The
    /// result is meaningless with a single rail.
    #[inline(always)]
    pub(crate) fn time(&self, rail: usize, more: u64) -> u64 {
        (self.bytes[rail] + more) * self.cost[rail]
    }

    /// Returns whether posts may be outstanding on a rail. The posts of a single rail are not
    /// counted.
    pub(crate) fn has_posts(&self, rail: usize) -> bool {
        RAILS == 1 || self.posts[rail] != 0
    }

    /// Updates the averages with a sample.
    #[cold]
    fn look(&mut self) {
        let count = (self.count as usize).min(RAILS);
        let busy = |rail: &usize| self.dry & (1 << rail) == 0;
        // Add up the bytes that busy rails moved, scaled to avoid overflow, and the speeds of these
        // rails.
        let (moved, speed) = (0..count).filter(busy).fold((0u64, 0u64), |(moved, speed), rail| {
            (moved + (self.moved[rail] >> 8), speed + self.speed[rail])
        });
        if moved != 0 {
            let samples: [u64; RAILS] = array::from_fn(|rail| {
                let now = (self.moved[rail] >> 8) as u128 * speed as u128 / moved as u128;
                let now = now.min(TOP as u128) as u64;
                if busy(&rail) { now } else { now.max(self.speed[rail]) }
            });
            let mean = samples[..count].iter().sum::<u64>() / count as u64;
            for (speed, sample) in self.speed[..count].iter_mut().zip(samples) {
                *speed = (*speed * (NEW - 1) + sample) / NEW;
                *speed = (*speed * (FORGET - 1) + mean) / FORGET;
            }
            let all = self.speed[..count].iter().sum::<u64>().max(1);
            for speed in &mut self.speed[..count] {
                *speed = *speed * (SPEED * count as u64) / all;
            }
            let fastest = self.speed[..count].iter().fold(1, |most, &speed| most.max(speed));
            for (cost, &speed) in self.cost.iter_mut().zip(&self.speed) {
                let exact = (UNIT * fastest / speed.max(1)).min(UNIT * SLOWEST);
                *cost = if exact <= NEAR { UNIT } else { exact };
            }
        }
        (self.ends, self.dry) = (0, 0);
        for rail in 0..count {
            self.moved[rail] = 0;
            self.dry |= ((self.bytes[rail] == 0) as u16) << rail;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps `depth` pieces outstanding on two rails. The first rail completes `speeds.0` pieces
    /// for each `speeds.1` of the second. Returns how many of `pieces` each rail was given.
    fn share(loads: &mut Loads<2>, speeds: (u64, u64), depth: u32, pieces: u32) -> (u32, u32) {
        const PIECE: u64 = 64 << 10;
        let (mut given, mut credit) = ([0; 2], [0u64; 2]);
        let mut posted = 0;
        while posted < pieces {
            while loads.posts[0] + loads.posts[1] < depth {
                let rail = (loads.time(1, PIECE) < loads.time(0, PIECE)) as usize;
                loads.posted(rail, PIECE);
                given[rail] += 1;
                posted += 1;
            }
            for (rail, speed) in [(0, speeds.0), (1, speeds.1)] {
                credit[rail] = if loads.posts[rail] == 0 { 0 } else { credit[rail] + speed };
                let ends = (credit[rail] / 100).min(loads.posts[rail] as u64);
                credit[rail] -= ends * 100;
                loads.ended(rail, ends as u32, PIECE);
            }
        }
        (given[0], given[1])
    }

    #[test]
    fn work_is_shared_as_rails_work_it_off() {
        for (speeds, least, most) in
            [((300, 100), 2.5, 3.3), ((100, 300), 0.30, 0.40), ((200, 200), 0.95, 1.05)]
        {
            let mut loads = Loads::<2>::new(2);
            share(&mut loads, speeds, 128, 1000);
            let (a, b) = share(&mut loads, speeds, 128, 4000);
            let ratio = a as f64 / b as f64;
            assert!(ratio > least && ratio < most, "{speeds:?}: {a} and {b}");
        }
    }

    #[test]
    fn a_rail_that_changes_its_speed_is_found_out_and_a_dead_slow_one_is_still_tried() {
        let mut loads = Loads::<2>::new(2);
        share(&mut loads, (400, 4), 128, 4000);
        assert!(loads.cost[1] > 16 * loads.cost[0] && loads.cost[1] <= SLOWEST * UNIT, "{loads:?}");
        let (_, slow) = share(&mut loads, (400, 4), 128, 4000);
        assert!(slow > 0);
        share(&mut loads, (100, 300), 128, 8000);
        assert!(loads.cost[0] > 2 * loads.cost[1], "{loads:?}");
    }

    #[test]
    fn rails_that_run_dry_are_not_compared() {
        let mut loads = Loads::<2>::new(2);
        for n in 0..10 * SAMPLE {
            let rail = (n % 8 == 0) as usize;
            loads.posted(rail, 8);
            loads.ended(rail, 1, 8);
        }
        assert_eq!(loads.cost, [UNIT; 2]);
    }

    #[test]
    fn speeds_stay_in_bounds_however_long_one_rail_runs_dry_beside_a_busy_one() {
        const LEAST: u64 = 256;
        // The busy rail posts twice the minimum, or posts of the maximum length.
        for most in [2 * LEAST, 1 << 31] {
            let mut loads = Loads::<2>::new(2);
            loads.posted(0, LEAST);
            for _ in 0..1_000_000 {
                for (rail, bytes) in [(0, LEAST), (1, most)] {
                    loads.posted(rail, bytes);
                    loads.ended(rail, 1, bytes);
                }
            }
            let [slow, fast] = loads.cost;
            assert!(slow > fast && slow <= SLOWEST * UNIT && fast == UNIT, "{loads:?}");
            loads.ended(0, 1, LEAST);
            share(&mut loads, (200, 200), 128, 8000);
            let (a, b) = share(&mut loads, (200, 200), 128, 4000);
            assert!(a.abs_diff(b) < 200, "{most}: {a} and {b}");
        }
    }

    #[test]
    fn one_rail_is_not_counted() {
        let mut loads = Loads::<1>::new(1);
        loads.ended(0, 1, 100);
        assert!(loads.has_posts(0));
    }
}
