//! Gets, one after the other, each from call to completion. The other side only waits.

use fishplate_core::engine::{Issued, Notice};
use fishplate_core::op::Cmp;
use fishplate_core::rail::Rail;

use super::leg::{Leg, SLOTS_AT, Side, Tally};
use super::put;
use super::seat::{CONTEXT, Memory, Seat, issue};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Clears this side's word, and writes what is to be got.
pub fn prepare<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg, side: Side) -> Outcome {
    put::prepare(seat, leg, side)?;
    if side == Side::Answers {
        for slot in 0..leg.slots() {
            // SAFETY: the slots lie inside the memory for payloads,
            // which nobody reads before the leg begins.
            unsafe {
                let at = seat.landing.as_ptr().add(SLOTS_AT + slot as usize * leg.stride());
                Pattern::new(leg.seed, 0, slot).fill(at, leg.size);
            }
            seat.give(Memory::Landing, SLOTS_AT + slot as usize * leg.stride(), leg.size)?;
        }
    }
    Ok(())
}

/// The side that gets.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let mut tally = Tally::default();
    gets(seat, leg, leg.warmup, &mut Histogram::new(), &mut tally)?;
    tally = Tally { errors: tally.errors, ..Tally::default() };
    tally.ticks = gets(seat, leg, leg.iters, histogram, &mut tally)?;
    tally.ops = leg.iters;
    put::signal(seat, Side::Starts, 1)?;
    seat.quiet()?;
    Ok(tally)
}

#[inline(never)]
fn gets<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    let (len, stride, slots) = (leg.size, leg.stride(), leg.slots());
    let clock = seat.clock;
    let begun = clock.now();
    let mut last = begun;
    let mut slot = 0;
    for _ in 0..count {
        let offset = slot as usize * stride;
        let (into, from) = (seat.buffer.at(offset as u64), seat.there.at((SLOTS_AT + offset) as u64));
        let issued = issue!(seat, engine => engine.get(CONTEXT, into, len, from, Notice::Report(0)));
        if let Issued::Pending(token) = issued {
            finish(seat, token)?;
        }
        seat.lap(histogram, &mut last)?;
        if leg.check {
            seat.take(Memory::Buffer, offset, len)?;
            // SAFETY: the slot lies inside the buffer, and the get that filled it is over.
            let at = unsafe { seat.bytes.as_ptr().add(offset) };
            // SAFETY: as above.
            let whole = unsafe { Pattern::new(leg.seed, 0, slot).verify(at, len) };
            tally.checked += u64::from(whole);
            tally.errors += u64::from(!whole);
            // So that the next get cannot pass for this one.
            // SAFETY: as above.
            unsafe { at.write(!at.read()) };
            seat.give(Memory::Buffer, offset, 1)?;
            last = clock.now();
        }
        slot = if slot + 1 == slots { 0 } else { slot + 1 };
    }
    Ok(clock.now().wrapping_sub(begun))
}

/// Waits for an operation, and returns what it fetched.
pub fn finish<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    token: fishplate_core::op::Token,
) -> Outcome<u64> {
    let deadline_ns = seat.watch.deadline_ns();
    match seat.engine.wait(token, &mut seat.waiter, deadline_ns) {
        Ok(completion) if completion.outcome == fishplate_core::op::Outcome::Done => Ok(completion.value),
        Ok(completion) => Err(seat.name.ended("an operation", completion.outcome)),
        Err(error) => Err(seat.wait_failed(error)),
    }
}

/// The side that holds still.
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, _leg: &Leg) -> Outcome<Tally> {
    seat.wait(put::SIGNALS[0], Cmp::Eq, 1)?;
    Ok(Tally::default())
}
