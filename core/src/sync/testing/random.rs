//! Repeatable pseudo-random numbers.

extern crate std;

use core::ops::Range;
use std::{
    env, eprintln,
    time::{SystemTime, UNIX_EPOCH},
};

/// A random generator (splitmix64). It prints its seed, so that `FISHPLATE_SEED` can repeat a
/// failing run.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(test: &str) -> Self {
        let seed = env::var("FISHPLATE_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .unwrap_or_else(|| {
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |since| since.as_nanos() as u64)
            });
        eprintln!("{test}: FISHPLATE_SEED={seed}");
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn within(&mut self, range: Range<usize>) -> usize {
        range.start + (self.next() % (range.len() as u64)) as usize
    }
}
