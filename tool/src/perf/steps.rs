//! A job in steps, for runs that are given a time rather than a number of iterations.
//!
//! Each step is a small part of the time there is, by what the one before took. A machine that gets
//! slower makes fewer iterations of it, not an error.

use std::time::{Duration, Instant};

use super::job::{Job, Tally};
use crate::failure::Outcome;
use crate::histogram::Histogram;

/// Iterations that tell how many there is time for, as long as there is time for more of them.
const TRIALS: [u64; 4] = [1, 16, 128, 1024];

/// Iterations before the measured ones of a step that follows another.
const WARMUP: u64 = 100;

/// The time of all steps, and of one.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// Steps begin before this has passed.
    pub all: Duration,
    /// What a step is made to take at most.
    pub each: Duration,
}

/// Runs as many iterations of `job` as fit, through `run`. Returns how many.
pub fn run(
    job: Job,
    span: Span,
    histogram: &mut Histogram,
    mut run: impl FnMut(&Job, &mut Histogram) -> Outcome<Tally>,
) -> Outcome<(Tally, u64)> {
    // What an iteration of a step takes, those before the measured ones included.
    let mut step = |job: Job, histogram: &mut Histogram| {
        let begun = Instant::now();
        let tally = run(&job, histogram)?;
        let count = u32::try_from(job.iters + job.warmup).unwrap_or(u32::MAX);
        Ok((tally, begun.elapsed() / count.max(1)))
    };
    let until = Instant::now() + span.all;
    let mut discarded = Histogram::new();
    let mut each = Duration::ZERO;
    for few in TRIALS {
        if job.iters <= few {
            break;
        }
        each = step(Job { iters: few, warmup: 0, ..job }, &mut discarded)?.1;
        if each.saturating_mul(8 * few as u32) > span.each {
            break;
        }
    }
    let (mut tally, mut done) = (Tally::default(), 0);
    let unit = if job.is_windowed() { job.per_window() } else { 1 };
    let mut warmup = job.warmup;
    while done < job.iters {
        let most = span.each.min(until.saturating_duration_since(Instant::now()));
        let fit = most.as_nanos().checked_div(each.as_nanos()).map_or(job.iters, |fit| fit as u64);
        let fit = fit.min(job.iters);
        // Samples are of whole windows.
        let iters = fit.max(1).next_multiple_of(unit).min(job.iters - done);
        let (found, took) = step(Job { iters, warmup: warmup.min(iters), ..job }, histogram)?;
        (tally, done, each) = (tally.and(found), done + iters, took);
        // What follows at once need not warm up for long.
        warmup = job.warmup.min(WARMUP);
        if Instant::now() >= until {
            break;
        }
    }
    Ok((tally, done))
}
