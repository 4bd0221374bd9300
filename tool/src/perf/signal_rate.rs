//! Measures a stream of signals to one word. Every iteration is verified: with `add` the final sum
//! must be exact, and with `set` the word must never decrease.

use fishplate_core::op::{Cmp, SignalOp};

use super::job::{Job, SLOTS_AT, Side, Tally};
use super::put::SIGNALS;
use super::verbs::Verbs;
use crate::args::SignalKind;
use crate::failure::Outcome;
use crate::histogram::Histogram;

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    let mut tally = Tally { ops: job.iters, ..Tally::default() };
    stream(verbs, job, 0, job.warmup, &mut Histogram::new(), &mut tally)?;
    tally.ticks = stream(verbs, job, job.warmup, job.iters, histogram, &mut tally)?;
    verbs.quiet_all()?;
    if verbs.plays(Side::Answers) && tally.errors == 0 && tally.misordered == 0 {
        tally.checked = job.iters;
    }
    Ok(tally)
}

#[inline(never)]
fn stream<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    if count == 0 {
        return Ok(0);
    }
    let begun = verbs.clock().now();
    let (mut last, mut sent, mut seen) = (begun, first, first);
    let end = first + count;
    while sent < end {
        let now = job.per_window().min(end - sent);
        if verbs.plays(Side::Starts) {
            for number in sent + 1..=sent + now {
                match job.signal {
                    SignalKind::Add => verbs.signal(Side::Starts, SLOTS_AT, SignalOp::Add, 1)?,
                    SignalKind::Set => {
                        verbs.signal(Side::Starts, SLOTS_AT, SignalOp::Set, number)?
                    }
                }
            }
        }
        sent += now;
        if verbs.plays(Side::Answers) {
            // A tight loop would take the cache line from the sender with every load, and measure
            // its own polling.
            let word = verbs.wait(Side::Answers, SLOTS_AT, Cmp::Ge, sent)?;
            tally.misordered += u64::from(word < seen);
            tally.errors += u64::from(word > end);
            seen = word;
        }
        // Writes to the memory of a dead peer succeed, so this call also checks that the peer is
        // alive.
        match now == job.per_window() {
            true => verbs.lap(histogram, &mut last)?,
            false => verbs.turn()?,
        }
    }
    if verbs.plays(Side::Answers) {
        verbs.signal(Side::Answers, SIGNALS[1], SignalOp::Set, end)?;
    }
    if verbs.plays(Side::Starts) {
        verbs.wait(Side::Starts, SIGNALS[1], Cmp::Eq, end)?;
    }
    Ok(verbs.clock().now().wrapping_sub(begun))
}
