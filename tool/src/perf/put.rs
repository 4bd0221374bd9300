//! Measures a stream of puts. Without checks, only the transport limits the stream, and a quiet
//! ends it. With checks, every window ends with a signal.

use fishplate_core::op::{Cmp, SignalOp};

use super::job::{Job, SLOTS_AT, Side, Tally};
use super::verbs::{Area, Verbs};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// The offsets of two signal words. The words are on separate cache lines, away from payloads.
pub const SIGNALS: [usize; 2] = [0, 128];

/// Signals `number` to the answering side, which calls `look` and signals back.
pub fn hand_over<V: Verbs>(
    verbs: &mut V,
    number: u64,
    look: impl FnOnce(&mut V) -> Outcome,
) -> Outcome {
    let [there, seen] = SIGNALS;
    if verbs.plays(Side::Starts) {
        verbs.signal(Side::Starts, there, SignalOp::Set, number)?;
    }
    if verbs.plays(Side::Answers) {
        verbs.wait(Side::Answers, there, Cmp::Eq, number)?;
        look(verbs)?;
        verbs.signal(Side::Answers, seen, SignalOp::Set, number)?;
    }
    if verbs.plays(Side::Starts) {
        verbs.wait(Side::Starts, seen, Cmp::Eq, number)?;
    }
    Ok(())
}

/// Ends a test with an answering side that only makes progress.
pub fn finish<V: Verbs>(verbs: &mut V, look: impl FnOnce(&mut V) -> Outcome) -> Outcome {
    hand_over(verbs, 1, look)?;
    verbs.quiet_all()
}

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    let mut tally = Tally { ops: job.iters, ..Tally::default() };
    windows(verbs, job, 0, job.warmup, &mut Histogram::new(), &mut tally)?;
    tally.checked = 0;
    let first = job.warmup.div_ceil(job.per_window());
    tally.ticks = windows(verbs, job, first, job.iters, histogram, &mut tally)?;
    if !job.check {
        finish(verbs, |_| Ok(()))?;
    }
    Ok(tally)
}

/// Sends `count` puts in windows. The first window has number `last_window + 1`. Returns the ticks
/// from the first post to the end of quiet.
#[inline(never)]
fn windows<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    last_window: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    let (len, stride, slots, per_window) = (job.size, job.stride(), job.slots(), job.per_window());
    if !job.check && !verbs.plays(Side::Starts) {
        return Ok(0);
    }
    let begun = verbs.clock().now();
    let (mut last, mut left, mut window) = (begun, count, last_window);
    while left > 0 {
        let now = left.min(per_window);
        (left, window) = (left - now, window + 1);
        let pattern = |slot| Pattern::new(job.seed, window, slot);
        if verbs.plays(Side::Starts) {
            for slot in (0..now).filter(|_| job.check) {
                verbs.fill(
                    Side::Starts,
                    Area::Buffer,
                    slot as usize * stride,
                    pattern(slot),
                    len,
                )?;
            }
            // Not a slot number, which would need a multiplication for each put.
            let (mut offset, end) = (0, slots as usize * stride);
            for _ in 0..now {
                verbs.put(Side::Starts, offset, len, SLOTS_AT + offset)?;
                offset += stride;
                offset = if offset == end { 0 } else { offset };
            }
        }
        if job.check {
            hand_over(verbs, window, |verbs| {
                for slot in 0..now {
                    let offset = SLOTS_AT + slot as usize * stride;
                    let whole =
                        verbs.is_whole(Side::Answers, Area::Landing, offset, pattern(slot), len)?;
                    tally.checked += u64::from(whole);
                    tally.errors += u64::from(!whole);
                }
                Ok(())
            })?;
        }
        // Writes to the memory of a dead peer succeed, so this call also checks that the peer is
        // alive.
        match now == per_window {
            true => verbs.lap(histogram, &mut last)?,
            false => verbs.turn()?,
        }
    }
    verbs.quiet_all()?;
    Ok(verbs.clock().now().wrapping_sub(begun))
}
