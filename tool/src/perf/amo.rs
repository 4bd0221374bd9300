//! Fetch-adds on one word of the other side, one after the other. Every fetched value is known
//! beforehand, so every iteration is verified, asked for or not.

use fishplate_core::engine::Issued;
use fishplate_core::op::{Amo, AmoOp, Cmp};
use fishplate_core::rail::Rail;

use super::get::finish;
use super::leg::{Leg, SLOTS_AT, Side, Tally};
use super::put;
use super::seat::{CONTEXT, Seat, issue};
use crate::failure::Outcome;
use crate::histogram::Histogram;

/// Clears this side's words.
pub fn prepare<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg, side: Side) -> Outcome {
    if side == Side::Answers {
        seat.set_word(SLOTS_AT, 0);
    }
    put::prepare(seat, leg, side)
}

/// The side that adds.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let mut tally = Tally::default();
    adds(seat, 0, leg.warmup, &mut Histogram::new(), &mut tally)?;
    tally = Tally { errors: tally.errors, ..Tally::default() };
    tally.ticks = adds(seat, leg.warmup, leg.iters, histogram, &mut tally)?;
    tally.ops = leg.iters;
    put::signal(seat, Side::Starts, 1)?;
    seat.quiet()?;
    Ok(tally)
}

#[inline(never)]
fn adds<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
    let at = seat.theirs.at(SLOTS_AT as u64);
    let clock = seat.clock;
    let begun = clock.now();
    let mut last = begun;
    for expected in first..first + count {
        let value = match issue!(seat, engine => engine.fetch(CONTEXT, at, amo, 0)) {
            Issued::Done { value } => value,
            Issued::Pending(token) => finish(seat, token)?,
        };
        seat.lap(histogram, &mut last)?;
        tally.checked += u64::from(value == expected);
        tally.errors += u64::from(value != expected);
    }
    Ok(clock.now().wrapping_sub(begun))
}

/// The side whose word it is: looks at the sum.
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    seat.wait(put::SIGNALS[0], Cmp::Eq, 1)?;
    let sum = seat.word(SLOTS_AT).load(std::sync::atomic::Ordering::Acquire);
    Ok(Tally { errors: u64::from(sum != leg.warmup + leg.iters), ..Tally::default() })
}
