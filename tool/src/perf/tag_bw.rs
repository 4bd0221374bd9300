//! A stream of tagged messages, all with the same tag. The other side has a window of receives
//! posted, and posts each again when its message has come. Checked, every window is answered, and
//! verified before that. Unchecked, all messages are sent from one place and received into one
//! place, as those of `ucx_perftest` and `osu_bw` are.

use fishplate_core::engine::protocol::{Received, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::rail::Rail;

use super::leg::{Leg, SLOTS_AT, Tally};
use super::seat::Seat;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// The tag of the stream, and that of the answers to it.
const STREAM: u64 = 1;
const ANSWER: u64 = 2;

/// From one payload to the next, in bytes.
fn stride(leg: &Leg) -> usize {
    if leg.check { leg.stride() } else { 0 }
}

/// The side that sends.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let mut discarded = Histogram::new();
    // The other side has its receives posted.
    answered(seat)?;
    stream(seat, leg, 0, leg.warmup, &mut discarded)?;
    let ticks = stream(seat, leg, leg.warmup, leg.iters, histogram)?;
    Ok(Tally { ticks, ops: leg.iters, ..Tally::default() })
}

fn answered<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>) -> Outcome {
    let request = seat.recv(ANSWER, 0, 0)?;
    seat.received(request).map(drop)
}

/// Sends `count` messages, and waits until the other side has the last.
#[inline(never)]
fn stream<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
) -> Outcome<u64> {
    let clock = seat.clock;
    let (stride, per_window) = (stride(leg), leg.per_window());
    if count == 0 {
        return Ok(0);
    }
    let begun = clock.now();
    let mut last = begun;
    let mut pending = 0;
    for window in 0..count / per_window {
        for k in 0..per_window {
            // Checked, a window has as many messages as there are slots.
            let at = SLOTS_AT + k as usize * stride;
            if leg.check {
                let pattern = Pattern::new(leg.seed, STREAM, first + window * per_window + k);
                // SAFETY: the slots lie inside the buffer;
                // the window before was answered, so nothing reads them.
                unsafe { pattern.fill(seat.bytes.as_ptr().add(at), leg.size) };
            }
            pending += u64::from(seat.send(STREAM, at, leg.size)?);
            // As many as the window are under way.
            if pending >= leg.window {
                seat.sent(1)?;
                pending -= 1;
            }
        }
        if leg.check {
            seat.sent(std::mem::take(&mut pending))?;
            answered(seat)?;
        }
        seat.lap(histogram, &mut last)?;
    }
    seat.sent(pending)?;
    if !leg.check {
        answered(seat)?;
    }
    Ok(clock.now().wrapping_sub(begun))
}

/// The side that receives.
#[inline(never)]
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    let (stride, slots, per_window) = (stride(leg) as u64, leg.slots(), leg.per_window());
    let mut tally = Tally::default();
    let total = leg.warmup + leg.iters;
    // Where the next receive goes: the slots in turn, without a division for each message.
    let mut next = 0;
    let behind = |at: u64| if at + stride == slots * stride { 0 } else { at + stride };
    let (mut posted, mut got) = (0, 0);
    while posted < total.min(leg.window.min(super::seat::RECEIVES as u64 / 2)) {
        post(seat, leg, posted, next)?;
        posted += 1;
        next = behind(next);
    }
    seat.send(ANSWER, 0, 0)?;
    while got < total {
        let Some(Status { outcome, word: number, .. }) = seat.engine.next_recv() else {
            seat.engine.progress();
            seat.idle()?;
            continue;
        };
        if outcome != Received::Ok {
            return Err(seat.name.receive_ended(outcome));
        }
        seat.turn()?;
        if leg.check {
            // Messages match in the order sent: the receive posted as this number got this number.
            let at = SLOTS_AT + (number % slots * stride) as usize;
            let pattern = Pattern::new(leg.seed, STREAM, number);
            // SAFETY: the slots lie inside the buffer, and the receive is over.
            let whole = unsafe { pattern.verify(seat.bytes.as_ptr().add(at), leg.size) };
            tally.checked += u64::from(whole && got >= leg.warmup);
            tally.errors += u64::from(!whole);
        }
        got += 1;
        if posted < total {
            post(seat, leg, posted, next)?;
            posted += 1;
            next = behind(next);
        }
        let answers = match leg.check {
            true => got % per_window == 0,
            false => got == leg.warmup || got == total,
        };
        if answers {
            seat.send(ANSWER, 0, 0)?;
        }
    }
    Ok(tally)
}

/// Posts the receive of message `number`, into the slots from `offset` on.
#[inline(always)]
fn post<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    number: u64,
    offset: u64,
) -> Outcome {
    let into = Some((seat.buffer.at(SLOTS_AT as u64 + offset), leg.size));
    let posted = seat.engine.recv(Some(seat.peer), Tag::from(STREAM), Tag::ZERO, into, number);
    posted.map(drop).map_err(|error| Failure::run(format!("a receive was refused: {error}")))
}
