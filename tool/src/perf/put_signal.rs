//! Ping-pong of put-signals. An iteration is from one post to the next; half is the latency.
//!
//! The clock is read, and the next payload made, right after a post, while the line is in flight.

use std::hint::black_box;

use fishplate_core::engine::{Notice, Signal};
use fishplate_core::op::{Cmp, SignalOp};
use fishplate_core::rail::Rail;

use super::leg::{Leg, Side, Tally};
use super::seat::{CONTEXT, Memory, Seat, issue};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Looks at a payload that should have been there before its signal.
const SECOND_LOOKS: u32 = 1_000_000;

/// The same where each look is a copy.
const COPIES: u32 = 100;

/// Clears this side's words before the leg.
pub fn prepare<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg, side: Side) -> Outcome {
    seat.set_word(leg.placement().signal[1 - side as usize], 0);
    Ok(())
}

/// The side that measures.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let mut play = Play::new(leg, Side::Starts);
    match leg.check {
        true => play.start::<R, RAILS, true>(seat, leg, histogram)?,
        false => play.start::<R, RAILS, false>(seat, leg, histogram)?,
    }
    Ok(play.tally)
}

/// The side that answers.
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    let mut play = Play::new(leg, Side::Answers);
    match leg.check {
        true => play.answer::<R, RAILS, true>(seat, leg)?,
        false => play.answer::<R, RAILS, false>(seat, leg)?,
    }
    Ok(play.tally)
}

/// What does not change from iteration to iteration.
struct Play {
    len: usize,
    seed: u64,
    /// Offsets: our payload and signal at the other side, theirs here.
    out: (u64, u64),
    inward: (usize, usize),
    directions: (u64, u64),
    /// The source of the next post, and the distance to that of the one after: checked, the
    /// operation before may still read its own while the next payload is made. Unchecked, nothing
    /// is made, and one will do. Kept rather than computed from the number: a branch on an
    /// alternating bit, in the wake of a wait of random length, is mispredicted half of the time.
    from: usize,
    stride: usize,
    tally: Tally,
}

impl Play {
    fn new(leg: &Leg, side: Side) -> Self {
        let place = leg.placement();
        let (mine, theirs) = (side as usize, 1 - side as usize);
        Play {
            len: leg.size,
            seed: leg.seed,
            out: (place.payload[mine] as u64, place.signal[mine] as u64),
            inward: (place.payload[theirs], place.signal[theirs]),
            directions: (mine as u64, theirs as u64),
            from: 0,
            stride: if leg.check { leg.size.next_multiple_of(64) } else { 0 },
            tally: Tally::default(),
        }
    }

    fn start<R: Rail, const RAILS: usize, const CHECK: bool>(
        &mut self,
        seat: &mut Seat<'_, R, RAILS>,
        leg: &Leg,
        histogram: &mut Histogram,
    ) -> Outcome {
        self.fill::<R, RAILS, CHECK>(seat, 1)?;
        let mut discarded = Histogram::new();
        self.run::<R, RAILS, CHECK>(seat, 1, leg.warmup, &mut discarded)?;
        self.tally = Tally::default();
        self.run::<R, RAILS, CHECK>(seat, leg.warmup + 1, leg.iters, histogram)?;
        // One message each way.
        self.tally.ops = 2 * leg.iters;
        seat.quiet()
    }

    /// Iterations from `first` on. The payload of the first is ready.
    #[inline(never)]
    fn run<R: Rail, const RAILS: usize, const CHECK: bool>(
        &mut self,
        seat: &mut Seat<'_, R, RAILS>,
        first: u64,
        count: u64,
        histogram: &mut Histogram,
    ) -> Outcome {
        if count == 0 {
            return Ok(());
        }
        let clock = seat.clock;
        self.post(seat, first)?;
        let begun = clock.now();
        let mut last = begun;
        for seq in first..first + count {
            if seq != first {
                self.post(seat, seq)?;
                seat.lap(histogram, &mut last)?;
            }
            // In flight.
            self.fill::<R, RAILS, CHECK>(seat, seq + 1)?;
            // Made before the wait, not where the compiler would put it:
            // between the signal and its answer.
            let expected = black_box(Pattern::new(self.seed, self.directions.1, seq));
            seat.wait(self.inward.1, Cmp::Eq, seq)?;
            self.verify::<R, RAILS, CHECK>(seat, expected)?;
        }
        seat.lap(histogram, &mut last)?;
        self.tally.ticks = last.wrapping_sub(begun);
        Ok(())
    }

    #[inline(never)]
    fn answer<R: Rail, const RAILS: usize, const CHECK: bool>(
        &mut self,
        seat: &mut Seat<'_, R, RAILS>,
        leg: &Leg,
    ) -> Outcome {
        for seq in 1..=leg.warmup + leg.iters {
            self.fill::<R, RAILS, CHECK>(seat, seq)?;
            // Made before the wait, not where the compiler would put it:
            // between the signal and its answer.
            let expected = black_box(Pattern::new(self.seed, self.directions.1, seq));
            seat.wait(self.inward.1, Cmp::Eq, seq)?;
            self.verify::<R, RAILS, CHECK>(seat, expected)?;
            self.post(seat, seq)?;
            seat.turn()?;
        }
        self.tally.checked = self.tally.checked.saturating_sub(leg.warmup);
        seat.quiet()
    }

    #[inline(always)]
    fn post<R: Rail, const RAILS: usize>(&mut self, seat: &mut Seat<'_, R, RAILS>, seq: u64) -> Outcome {
        let signal = Signal { at: seat.theirs.at(self.out.1), op: SignalOp::Set, value: seq };
        let (from, to) = (seat.buffer.at(self.from as u64), seat.there.at(self.out.0));
        issue!(seat, engine =>
            engine.put_signal(CONTEXT, from, self.len, to, signal, Notice::Silent));
        self.from ^= self.stride;
        Ok(())
    }

    #[inline(always)]
    fn fill<R: Rail, const RAILS: usize, const CHECK: bool>(
        &self,
        seat: &mut Seat<'_, R, RAILS>,
        seq: u64,
    ) -> Outcome {
        if CHECK {
            // SAFETY: two sources of `stride` bytes lie inside the buffer. This one belonged to the
            // operation before the last, which was answered and is over.
            let at = unsafe { seat.bytes.as_ptr().add(self.from) };
            // SAFETY: as above; `len <= stride`.
            unsafe { Pattern::new(self.seed, self.directions.0, seq).fill(at, self.len) };
            seat.give(Memory::Buffer, self.from, self.len)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn verify<R: Rail, const RAILS: usize, const CHECK: bool>(
        &mut self,
        seat: &mut Seat<'_, R, RAILS>,
        expected: Pattern,
    ) -> Outcome {
        if CHECK {
            seat.take(Memory::Landing, self.inward.0, self.len)?;
            // SAFETY: the placement of the payload lies inside the memory where payloads land.
            let at = unsafe { seat.landing.as_ptr().add(self.inward.0) };
            // SAFETY: as above.
            if unsafe { expected.verify(at, self.len) } {
                self.tally.checked += 1;
            } else if seat.is_mirrored() {
                self.wrong_there(seat, at, expected)?;
            } else {
                self.wrong(at, expected);
            }
        }
        Ok(())
    }

    /// The same of memory of a device, which is looked at again by copying it again.
    #[cold]
    #[inline(never)]
    fn wrong_there<R: Rail, const RAILS: usize>(
        &mut self,
        seat: &mut Seat<'_, R, RAILS>,
        at: *const u8,
        expected: Pattern,
    ) -> Outcome {
        for _ in 0..COPIES {
            seat.take(Memory::Landing, self.inward.0, self.len)?;
            // SAFETY: as in `verify`.
            if unsafe { expected.verify(at, self.len) } {
                self.tally.misordered += 1;
                return Ok(());
            }
        }
        self.tally.errors += 1;
        Ok(())
    }

    /// Finds out whether the payload comes late or is wrong.
    #[cold]
    #[inline(never)]
    fn wrong(&mut self, at: *const u8, expected: Pattern) {
        // SAFETY: as in `verify`.
        match unsafe { comes_late(at, self.len, expected) } {
            true => self.tally.misordered += 1,
            false => self.tally.errors += 1,
        }
    }
}

/// Whether a payload that was not there with its signal comes after it.
///
/// # Safety
/// `at` is readable for `len` bytes.
#[cold]
pub unsafe fn comes_late(at: *const u8, len: usize, expected: Pattern) -> bool {
    // SAFETY: the caller's promise.
    (0..SECOND_LOOKS).any(|_| unsafe { expected.verify(black_box(at), len) })
}
