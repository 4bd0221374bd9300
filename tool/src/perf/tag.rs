//! Ping-pong of tagged messages. An iteration is from one send to the next; half is the latency.
//!
//! Both sides send from one part of their private buffer and receive into another. A receive is
//! posted right after the send that it answers, while that is in flight, as a program would that
//! calls send and receive in turn.

use std::hint::black_box;

use fishplate_core::rail::Rail;

use super::leg::{Leg, Side, Tally};
use super::seat::{Memory, Seat};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// From one sent payload to the next. Large ones share one place: each is answered before the next.
pub fn stride(len: usize) -> usize {
    if len <= 4096 { len.next_multiple_of(64) } else { 0 }
}

/// The side that measures.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let mut tally = Tally::default();
    let mut discarded = Histogram::new();
    rounds(seat, leg, 1, leg.warmup, &mut discarded, &mut tally)?;
    tally = Tally::default();
    tally.ticks = rounds(seat, leg, leg.warmup + 1, leg.iters, histogram, &mut tally)?;
    // One message each way.
    tally.ops = 2 * leg.iters;
    Ok(tally)
}

#[inline(never)]
fn rounds<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    let clock = seat.clock;
    let begun = clock.now();
    let mut last = begun;
    let mut from = 0;
    for seq in first..first + count {
        fill(seat, leg, Side::Starts, seq, from)?;
        let pending = seat.send(seq, from, leg.size)?;
        from ^= stride(leg.size);
        if seq != first {
            seat.lap(histogram, &mut last)?;
        }
        let request = seat.recv(seq, inward_of(leg), leg.size)?;
        // Made before the wait, not between the message and the answer to it.
        let expected = black_box(Pattern::new(leg.seed, Side::Answers as u64, seq));
        seat.received(request)?;
        verify(seat, leg, expected, tally)?;
        seat.sent(pending as u64)?;
    }
    seat.lap(histogram, &mut last)?;
    Ok(last.wrapping_sub(begun))
}

/// The side that answers.
#[inline(never)]
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    let mut tally = Tally::default();
    let mut from = 0;
    let last = leg.warmup + leg.iters;
    let mut request = seat.recv(1, inward_of(leg), leg.size)?;
    for seq in 1..=last {
        fill(seat, leg, Side::Answers, seq, from)?;
        let expected = black_box(Pattern::new(leg.seed, Side::Starts as u64, seq));
        seat.received(request)?;
        verify(seat, leg, expected, &mut tally)?;
        let pending = seat.send(seq, from, leg.size)?;
        from ^= stride(leg.size);
        if seq != last {
            request = seat.recv(seq + 1, inward_of(leg), leg.size)?;
        }
        seat.sent(pending as u64)?;
        seat.turn()?;
    }
    tally.checked = tally.checked.saturating_sub(leg.warmup);
    Ok(tally)
}

/// Where the payload of this leg is received.
pub fn inward_of(leg: &Leg) -> usize {
    (2 * stride(leg.size)).max(leg.size.next_multiple_of(64))
}

#[inline(always)]
fn fill<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    side: Side,
    seq: u64,
    from: usize,
) -> Outcome {
    if leg.check {
        // SAFETY: the sources lie inside the buffer. This one belonged to a send that is over.
        unsafe { Pattern::new(leg.seed, side as u64, seq).fill(seat.bytes.as_ptr().add(from), leg.size) };
        seat.give(Memory::Buffer, from, leg.size)?;
    }
    Ok(())
}

#[inline(always)]
fn verify<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    expected: Pattern,
    tally: &mut Tally,
) -> Outcome {
    if leg.check {
        seat.take(Memory::Buffer, inward_of(leg), leg.size)?;
        // SAFETY: the payload lies inside the buffer, and its receive is over.
        let whole = unsafe { expected.verify(seat.bytes.as_ptr().add(inward_of(leg)), leg.size) };
        tally.checked += u64::from(whole);
        tally.errors += u64::from(!whole);
    }
    Ok(())
}
