//! Measures gets, one at a time, from call to completion. The other side only makes progress.

use super::job::{Job, SLOTS_AT, Side, Tally};
use super::put;
use super::verbs::{Area, Verbs};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Writes the payload of the answering side, which the starting side gets.
pub fn prepare<V: Verbs>(verbs: &mut V, job: &Job) -> Outcome {
    for slot in 0..job.slots() {
        let offset = SLOTS_AT + slot as usize * job.stride();
        verbs.fill(
            Side::Answers,
            Area::Landing,
            offset,
            Pattern::new(job.seed, 0, slot),
            job.size,
        )?;
    }
    Ok(())
}

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    let mut tally = Tally { ops: job.iters, ..Tally::default() };
    if verbs.plays(Side::Starts) {
        gets(verbs, job, job.warmup, &mut Histogram::new(), &mut tally)?;
        tally.checked = 0;
        tally.ticks = gets(verbs, job, job.iters, histogram, &mut tally)?;
    }
    put::finish(verbs, |_| Ok(()))?;
    Ok(tally)
}

#[inline(never)]
fn gets<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    let (len, stride, slots, clock) = (job.size, job.stride(), job.slots(), verbs.clock());
    let begun = clock.now();
    let (mut last, mut slot) = (begun, 0);
    for _ in 0..count {
        let offset = slot as usize * stride;
        verbs.get(Side::Starts, offset, len, SLOTS_AT + offset)?;
        verbs.lap(histogram, &mut last)?;
        if job.check {
            let expected = Pattern::new(job.seed, 0, slot);
            let whole = verbs.is_whole(Side::Starts, Area::Buffer, offset, expected, len)?;
            tally.checked += u64::from(whole);
            tally.errors += u64::from(!whole);
            verbs.spoil(Side::Starts, Area::Buffer, offset)?;
            last = clock.now();
        }
        slot = if slot + 1 == slots { 0 } else { slot + 1 };
    }
    Ok(clock.now().wrapping_sub(begun))
}
