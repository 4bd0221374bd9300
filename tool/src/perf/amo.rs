//! Measures fetch-adds on one word of the other side, one at a time. Each fetched value is known in
//! advance, so every iteration is verified, even without `--check`.

use super::job::{Job, SLOTS_AT, Side, Tally};
use super::put;
use super::verbs::Verbs;
use crate::failure::Outcome;
use crate::histogram::Histogram;

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    let mut tally = Tally { ops: job.iters, ..Tally::default() };
    if verbs.plays(Side::Starts) {
        adds(verbs, 0, job.warmup, &mut Histogram::new(), &mut tally)?;
        tally.checked = 0;
        tally.ticks = adds(verbs, job.warmup, job.iters, histogram, &mut tally)?;
    }
    put::finish(verbs, |verbs| {
        let sum = verbs.word(Side::Answers, SLOTS_AT)?;
        tally.errors += u64::from(sum != job.warmup + job.iters);
        Ok(())
    })?;
    Ok(tally)
}

#[inline(never)]
fn adds<V: Verbs>(
    verbs: &mut V,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    let begun = verbs.clock().now();
    let mut last = begun;
    for expected in first..first + count {
        let value = verbs.fetch_add(Side::Starts, SLOTS_AT)?;
        verbs.lap(histogram, &mut last)?;
        tally.checked += u64::from(value == expected);
        tally.errors += u64::from(value != expected);
    }
    Ok(verbs.clock().now().wrapping_sub(begun))
}
