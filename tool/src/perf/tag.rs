//! Measures a ping-pong of tagged messages. An iteration lasts from one send to the next send. The
//! latency is half of that time.
//!
//! Both sides send from one part of their private buffer and receive into another. Each receive is
//! posted right after the send, while the message is in flight.

use std::hint::black_box;

use super::job::{Job, Side, Tally};
use super::verbs::{Area, Verbs};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Returns the distance between sent payloads, in bytes. Large payloads share one place, because
/// each is answered before the next is sent.
fn stride(len: usize) -> usize {
    if len <= 4096 { len.next_multiple_of(64) } else { 0 }
}

fn inward(len: usize) -> usize {
    (2 * stride(len)).max(len.next_multiple_of(64))
}

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    // An iteration has one message each way.
    let mut tally = Tally { ops: 2 * job.iters, ..Tally::default() };
    rounds(verbs, job, 1, job.warmup, &mut Histogram::new(), &mut tally)?;
    tally.checked = 0;
    tally.ticks = rounds(verbs, job, job.warmup + 1, job.iters, histogram, &mut tally)?;
    Ok(tally)
}

/// Runs `count` iterations, starting with iteration `first`. Returns the ticks from the first send
/// to the last arrival.
#[inline(never)]
fn rounds<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    use Side::{Answers, Starts};
    if count == 0 {
        return Ok(0);
    }
    let (len, end) = (job.size, first + count);
    let (stride, inward) = (stride(len), inward(len));
    let tag = |side: Side, seq: u64| 2 * seq + side as u64;
    let begun = verbs.clock().now();
    let (mut last, mut from) = (begun, 0);
    let mut posted = match verbs.plays(Answers) {
        true => Some(verbs.recv(Answers, tag(Starts, first), inward, len, 0)?),
        false => None,
    };
    for seq in first..end {
        let (mut whole, mut answer, mut pending) = (true, None, 0);
        if verbs.plays(Starts) {
            fill(verbs, job, Starts, seq, from)?;
            pending = verbs.send(Starts, tag(Starts, seq), from, len)?;
            if seq != first {
                verbs.lap(histogram, &mut last)?;
            }
            answer = Some(verbs.recv(Starts, tag(Answers, seq), inward, len, 0)?);
        }
        if let Some(request) = posted.take() {
            fill(verbs, job, Answers, seq, from)?;
            let expected = black_box(Pattern::new(job.seed, Starts as u64, seq));
            verbs.received(Answers, request)?;
            whole &= verify(verbs, job, Answers, expected, tally)?;
            let pending = verbs.send(Answers, tag(Answers, seq), from, len)?;
            if seq + 1 != end {
                posted = Some(verbs.recv(Answers, tag(Starts, seq + 1), inward, len, 0)?);
            }
            verbs.sent(Answers, pending)?;
            if answer.is_none() {
                verbs.turn()?;
            }
        }
        if let Some(request) = answer {
            let expected = black_box(Pattern::new(job.seed, Answers as u64, seq));
            verbs.received(Starts, request)?;
            whole &= verify(verbs, job, Starts, expected, tally)?;
            verbs.sent(Starts, pending)?;
        }
        from ^= stride;
        tally.checked += u64::from(job.check && whole);
    }
    if verbs.plays(Starts) {
        verbs.lap(histogram, &mut last)?;
    }
    Ok(last.wrapping_sub(begun))
}

#[inline(always)]
fn fill<V: Verbs>(verbs: &mut V, job: &Job, side: Side, seq: u64, from: usize) -> Outcome {
    match job.check {
        true => {
            verbs.fill(side, Area::Buffer, from, Pattern::new(job.seed, side as u64, seq), job.size)
        }
        false => Ok(()),
    }
}

#[inline(always)]
fn verify<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    side: Side,
    expected: Pattern,
    tally: &mut Tally,
) -> Outcome<bool> {
    if !job.check {
        return Ok(true);
    }
    let whole = verbs.is_whole(side, Area::Buffer, inward(job.size), expected, job.size)?;
    tally.errors += u64::from(!whole);
    Ok(whole)
}
