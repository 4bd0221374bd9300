//! A stream of signals to one word. The other side waits for a window's worth at a time until the
//! last has come: with `add` the sum must be exact, with `set` the word may never go back. Every
//! iteration is verified in that sense.

use fishplate_core::engine::{Notice, Signal};
use fishplate_core::op::{Cmp, SignalOp};
use fishplate_core::rail::Rail;

use super::leg::{Leg, SLOTS_AT, Side, Tally};
use super::put;
use super::seat::{CONTEXT, Seat, issue};
use crate::args::SignalKind;
use crate::failure::Outcome;
use crate::histogram::Histogram;

/// Clears this side's words.
pub fn prepare<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg, side: Side) -> Outcome {
    if side == Side::Answers {
        seat.set_word(SLOTS_AT, 0);
    }
    put::prepare(seat, leg, side)
}

/// The side that signals.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    stream(seat, leg, 0, leg.warmup, &mut Histogram::new())?;
    let ticks = stream(seat, leg, leg.warmup, leg.iters, histogram)?;
    seat.quiet()?;
    Ok(Tally { ticks, ops: leg.iters, ..Tally::default() })
}

/// Sends `count` signals, and waits until the other side has seen the last.
#[inline(never)]
fn stream<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
) -> Outcome<u64> {
    if count == 0 {
        return Ok(0);
    }
    let at = seat.theirs.at(SLOTS_AT as u64);
    let clock = seat.clock;
    let begun = clock.now();
    let mut last = begun;
    let mut sent = first;
    while sent < first + count {
        for _ in 0..leg.per_window() {
            sent += 1;
            let signal = match leg.signal {
                SignalKind::Add => Signal { at, op: SignalOp::Add, value: 1 },
                SignalKind::Set => Signal { at, op: SignalOp::Set, value: sent },
            };
            issue!(seat, engine => engine.signal(CONTEXT, signal, Notice::Silent));
        }
        // Memory of a peer that is gone takes what is written to it without complaint: this looks.
        seat.lap(histogram, &mut last)?;
    }
    seat.wait(put::SIGNALS[1], Cmp::Eq, sent)?;
    Ok(clock.now().wrapping_sub(begun))
}

/// The side that is signalled.
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    let mut tally = Tally::default();
    let mut seen = 0;
    for last in [leg.warmup, leg.warmup + leg.iters] {
        while seen < last {
            // A window's worth at a time, as a consumer would: one that looks as fast as it can
            // takes the line away from the sender at every look, and measures its own polling.
            let next = last.min(seen + leg.per_window());
            let word = seat.wait(SLOTS_AT, Cmp::Ge, next)?;
            tally.misordered += u64::from(word < seen);
            tally.errors += u64::from(word > last);
            seen = word;
            seat.turn()?;
        }
        put::signal(seat, Side::Answers, last)?;
    }
    seat.quiet()?;
    if tally.errors == 0 && tally.misordered == 0 {
        tally.checked = leg.iters;
    }
    Ok(tally)
}
