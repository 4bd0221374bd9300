//! Measures a ping-pong of put-signals. An iteration lasts from one post to the next post. The
//! latency is half of that time.
//!
//! Right after a post, while the cache line is in flight, the clock is read and the next payload is
//! written.

use std::hint::black_box;

use fishplate_core::op::Cmp;

use super::job::{Job, Side, Tally};
use super::verbs::{Area, Verbs};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Maximum number of further checks of a payload that is wrong when its signal arrives. They tell a
/// late payload from a wrong one.
const SECOND_LOOKS: u32 = 1000;

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    match job.check {
        true => play::<V, true>(verbs, job, histogram),
        false => play::<V, false>(verbs, job, histogram),
    }
}

fn play<V: Verbs, const CHECK: bool>(
    verbs: &mut V,
    job: &Job,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let mut tally = Tally::default();
    rounds::<V, CHECK>(verbs, job, 1, job.warmup, &mut Histogram::new(), &mut tally)?;
    tally.checked = 0;
    tally.ticks = rounds::<V, CHECK>(verbs, job, job.warmup + 1, job.iters, histogram, &mut tally)?;
    // An iteration has one message each way.
    tally.ops = 2 * job.iters;
    verbs.quiet_all()?;
    Ok(tally)
}

/// Runs `count` iterations, starting with iteration `first`. Returns the ticks from the first post
/// to the last arrival.
#[inline(never)]
fn rounds<V: Verbs, const CHECK: bool>(
    verbs: &mut V,
    job: &Job,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    use Side::{Answers, Starts};
    let (place, len, seed, clock) = (job.placement(), job.size, job.seed, verbs.clock());
    // The previous operation may still read its source while the next payload is written, so two
    // sources alternate. The offset is stored, not computed from the iteration. After a wait of
    // random length, a branch on an alternating bit is mispredicted half of the time.
    let (mut from, stride) = (0, if CHECK { len.next_multiple_of(64) } else { 0 });
    let sent = |side: Side, seq| Pattern::new(seed, side as u64, seq);
    let (mut begun, mut last) = (0, 0);
    if CHECK && verbs.plays(Starts) {
        verbs.fill(Starts, Area::Buffer, from, sent(Starts, first), len)?;
    }
    for seq in first..first + count {
        let mut whole = true;
        if verbs.plays(Starts) {
            verbs.put_signal(Starts, from, len, place.payload, place.signal, seq)?;
            if seq == first {
                last = clock.now();
                begun = last;
            } else {
                verbs.lap(histogram, &mut last)?;
            }
            if CHECK {
                verbs.fill(Starts, Area::Buffer, from ^ stride, sent(Starts, seq + 1), len)?;
            }
        }
        if verbs.plays(Answers) {
            if CHECK {
                verbs.fill(Answers, Area::Buffer, from, sent(Answers, seq), len)?;
            }
            whole &= arrival::<V, CHECK>(verbs, job, Answers, seq, tally)?;
            verbs.put_signal(Answers, from, len, place.payload, place.signal, seq)?;
            if !verbs.plays(Starts) {
                verbs.turn()?;
            }
        }
        if verbs.plays(Starts) {
            whole &= arrival::<V, CHECK>(verbs, job, Starts, seq, tally)?;
        }
        from ^= stride;
        if CHECK {
            tally.checked += u64::from(whole);
        }
    }
    if count != 0 && verbs.plays(Starts) {
        verbs.lap(histogram, &mut last)?;
    }
    Ok(last.wrapping_sub(begun))
}

/// Returns whether the payload is right.
#[inline(always)]
fn arrival<V: Verbs, const CHECK: bool>(
    verbs: &mut V,
    job: &Job,
    side: Side,
    seq: u64,
    tally: &mut Tally,
) -> Outcome<bool> {
    let sender = 1 - side as usize;
    let (place, len) = (job.placement(), job.size);
    // Computed before the wait, because otherwise the compiler would compute it between the signal
    // and its answer.
    let expected = if CHECK {
        black_box(Pattern::new(job.seed, sender as u64, seq))
    } else {
        Pattern::new(0, 0, 0)
    };
    verbs.wait(side, place.signal, Cmp::Eq, seq)?;
    if !CHECK || verbs.is_whole(side, Area::Landing, place.payload, expected, len)? {
        return Ok(true);
    }
    wrong(verbs, side, place.payload, expected, len, tally)
}

#[cold]
#[inline(never)]
fn wrong<V: Verbs>(
    verbs: &mut V,
    side: Side,
    offset: usize,
    expected: Pattern,
    len: usize,
    tally: &mut Tally,
) -> Outcome<bool> {
    for _ in 0..SECOND_LOOKS {
        if verbs.is_whole(side, Area::Landing, offset, expected, len)? {
            tally.misordered += 1;
            return Ok(false);
        }
    }
    tally.errors += 1;
    Ok(false)
}
