//! Runs a job in steps, if the user gives a time instead of a number of iterations.
//!
//! Each step is planned to take a small part of the time, as estimated from the previous step.

use std::time::{Duration, Instant};

use super::job::{Job, Tally};
use crate::failure::Outcome;
use crate::histogram::Histogram;

/// The times of these steps show how many iterations fit into the remaining time.
const TRIALS: [u64; 4] = [1, 16, 128, 1024];

const WARMUP: u64 = 100;

/// Time limits of all steps, and of one step.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// No step begins after this time.
    pub all: Duration,
    pub each: Duration,
}

impl Span {
    /// Plans the steps of a run that takes `all`. A step fails after `timeout`. So a step is
    /// planned to take only a small part of either time.
    pub fn new(all: Duration, timeout: Duration) -> Span {
        Span { all, each: (all / 16).min(timeout / 256) }
    }
}

pub fn run(
    job: Job,
    span: Span,
    histogram: &mut Histogram,
    mut run: impl FnMut(&Job, &mut Histogram) -> Outcome<Tally>,
) -> Outcome<(Tally, u64)> {
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
        let iters = fit.max(1).next_multiple_of(unit).min(job.iters - done);
        let (found, took) = step(Job { iters, warmup: warmup.min(iters), ..job }, histogram)?;
        (tally, done, each) = (tally.and(found), done + iters, took);
        // Later steps need little warm-up, because they follow immediately.
        warmup = job.warmup.min(WARMUP);
        if Instant::now() >= until {
            break;
        }
    }
    Ok((tally, done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_short_beside_the_time_of_the_run_and_its_own_limit() {
        for (all, timeout) in [(1, 60), (600, 1), (3600, 60), (1, 1)] {
            let [all, timeout] = [all, timeout].map(Duration::from_secs);
            let span = Span::new(all, timeout);
            assert_eq!(span.all, all);
            assert!(span.each * 16 <= all && span.each * 256 <= timeout, "{span:?} {timeout:?}");
        }
    }
}
