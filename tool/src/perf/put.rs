//! A stream of puts. Unchecked, nothing holds it up but the transport itself, and a quiet ends it.
//! Checked, every window ends with a signal, and the other side verifies all of it before the next
//! begins.

use fishplate_core::engine::{Notice, Signal};
use fishplate_core::op::{Cmp, SignalOp};
use fishplate_core::rail::Rail;

use super::leg::{Leg, SLOTS_AT, Side, Tally};
use super::seat::{CONTEXT, Memory, Seat, issue};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Where the two signals are: a window is there; it was seen. On own lines, away from payloads.
pub const SIGNALS: [usize; 2] = [0, 128];

/// Clears this side's word.
pub fn prepare<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    _leg: &Leg,
    side: Side,
) -> Outcome {
    seat.set_word(SIGNALS[1 - side as usize], 0);
    Ok(())
}

/// Sends one of the two signals.
pub fn signal<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, side: Side, value: u64) -> Outcome {
    let signal = Signal { at: seat.theirs.at(SIGNALS[side as usize] as u64), op: SignalOp::Set, value };
    issue!(seat, engine => engine.signal(CONTEXT, signal, Notice::Silent));
    Ok(())
}

/// The side that sends.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let mut discarded = Histogram::new();
    let warm = leg.warmup / leg.per_window();
    let windows = leg.iters / leg.per_window();
    windows_of(seat, leg, 1, warm, &mut discarded)?;
    let ticks = windows_of(seat, leg, warm + 1, windows, histogram)?;
    // Ends the other side's wait when nothing is checked.
    if !leg.check {
        signal(seat, Side::Starts, 1)?;
        seat.wait(SIGNALS[1], Cmp::Eq, 1)?;
    }
    Ok(Tally { ticks, ops: leg.iters, ..Tally::default() })
}

/// Sends windows from number `first` on. Ticks from the first post to quiet.
#[inline(never)]
fn windows_of<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
) -> Outcome<u64> {
    let (len, stride, slots, per_window) =
        (leg.size, leg.stride(), leg.slots() as usize, leg.per_window() as usize);
    let clock = seat.clock;
    let begun = clock.now();
    let mut last = begun;
    for window in first..first + count {
        if leg.check {
            fill(seat, leg, window)?;
        }
        let mut slot = 0;
        for _ in 0..per_window {
            let offset = slot * stride;
            slot = if slot + 1 == slots { 0 } else { slot + 1 };
            let (from, to) = (seat.buffer.at(offset as u64), seat.there.at((SLOTS_AT + offset) as u64));
            issue!(seat, engine => engine.put(CONTEXT, from, len, to, Notice::Silent));
        }
        if leg.check {
            signal(seat, Side::Starts, window)?;
            seat.wait(SIGNALS[1], Cmp::Eq, window)?;
        }
        // Memory of a peer that is gone takes what is written to it without complaint: this looks.
        seat.lap(histogram, &mut last)?;
    }
    seat.quiet()?;
    Ok(clock.now().wrapping_sub(begun))
}

/// The contents of one slot in one window.
fn pattern(leg: &Leg, window: u64, slot: u64) -> Pattern {
    Pattern::new(leg.seed, window, slot)
}

fn fill<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg, window: u64) -> Outcome {
    for slot in 0..leg.slots() {
        // SAFETY: the slots lie inside the buffer, which is as large as the arena; the window
        // before was answered, so nothing reads them now.
        unsafe {
            let at = seat.bytes.as_ptr().add(slot as usize * leg.stride());
            pattern(leg, window, slot).fill(at, leg.size);
        }
        seat.give(Memory::Buffer, slot as usize * leg.stride(), leg.size)?;
    }
    Ok(())
}

/// The side that receives.
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    let mut tally = Tally::default();
    if !leg.check {
        seat.wait(SIGNALS[0], Cmp::Eq, 1)?;
        signal(seat, Side::Answers, 1)?;
        seat.quiet()?;
        return Ok(tally);
    }
    let warm = leg.warmup / leg.per_window();
    for window in 1..=warm + leg.iters / leg.per_window() {
        seat.wait(SIGNALS[0], Cmp::Eq, window)?;
        for slot in 0..leg.slots() {
            seat.take(Memory::Landing, SLOTS_AT + slot as usize * leg.stride(), leg.size)?;
            // SAFETY: the slots lie inside the memory where payloads land.
            let whole = unsafe {
                let at = seat.landing.as_ptr().add(SLOTS_AT + slot as usize * leg.stride());
                pattern(leg, window, slot).verify(at, leg.size)
            };
            tally.checked += u64::from(whole && window > warm);
            tally.errors += u64::from(!whole);
        }
        signal(seat, Side::Answers, window)?;
        seat.turn()?;
    }
    seat.quiet()?;
    Ok(tally)
}
