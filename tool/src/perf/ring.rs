//! The ring alone: two of them between the sides, without engine or rail. First ping-pong, which
//! gives the latency, then a stream through one of them, which gives the rate. Every value is
//! verified.

use std::ptr::NonNull;

use fishplate_core::rail::Rail;
use fishplate_core::sync::ring::{Consumer, Header, Producer, Shared};

use super::leg::{Leg, RING_ARENA, Side, Tally};
use super::seat::Seat;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;

const CAPACITY: usize = 1024;

/// Looks at a ring that count as one fruitless turn: a look is a few nanoseconds, too little to
/// give the processor up after some of them. Where both sides share one processor, every look
/// counts.
const LOOKS: u32 = 64;

/// Headers and slots of both rings in the arena, in bytes. Index 0: towards the answering side.
const HEADERS: [usize; 2] = [0, 512];
const SLOTS: [usize; 2] = [4096, RING_ARENA / 2];
const _: () = assert!(SLOTS[1] - SLOTS[0] >= CAPACITY * 64 && RING_ARENA - SLOTS[1] >= CAPACITY * 64);

/// Empties both rings, which only one side does.
pub fn prepare<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    _leg: &Leg,
    side: Side,
) -> Outcome {
    if side == Side::Answers {
        for header in HEADERS {
            for at in (0..size_of::<Header>()).step_by(8) {
                seat.set_word(header + at, 0);
            }
        }
    }
    Ok(())
}

/// The side that measures.
pub fn start<R: Rail, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    match leg.size / 8 {
        1 => Ends::<_, _, 1>::attach(seat, Side::Starts)?.start(leg, histogram),
        2 => Ends::<_, _, 2>::attach(seat, Side::Starts)?.start(leg, histogram),
        4 => Ends::<_, _, 4>::attach(seat, Side::Starts)?.start(leg, histogram),
        _ => Ends::<_, _, 8>::attach(seat, Side::Starts)?.start(leg, histogram),
    }
}

/// The side that answers.
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    match leg.size / 8 {
        1 => Ends::<_, _, 1>::attach(seat, Side::Answers)?.answer(leg),
        2 => Ends::<_, _, 2>::attach(seat, Side::Answers)?.answer(leg),
        4 => Ends::<_, _, 4>::attach(seat, Side::Answers)?.answer(leg),
        _ => Ends::<_, _, 8>::attach(seat, Side::Answers)?.answer(leg),
    }
}

/// One side's ends of both rings; slots of `N` words.
struct Ends<'s, 'm, R: Rail, const RAILS: usize, const N: usize> {
    tx: Producer<'s, [u64; N], Shared>,
    rx: Consumer<'s, [u64; N], Shared>,
    seat: &'s mut Seat<'m, R, RAILS>,
    /// Looks that count as one turn.
    looks: u32,
}

impl<'s, 'm, R: Rail, const RAILS: usize, const N: usize> Ends<'s, 'm, R, RAILS, N> {
    fn attach(seat: &'s mut Seat<'m, R, RAILS>, side: Side) -> Outcome<Self> {
        let arena: NonNull<u8> = seat.arena;
        let looks = if seat.crowded { 1 } else { LOOKS };
        let (out, inward) = (side as usize, 1 - side as usize);
        // SAFETY: the arena has RING_ARENA bytes and stays mapped longer than the leg; both rings
        // lie inside it and do not overlap. Each side makes one end of each, once per leg, and the
        // ends of the leg before are gone. Words have no invalid values.
        let ends = unsafe {
            (
                Producer::from_raw(arena.add(HEADERS[out]).cast(), arena.add(SLOTS[out]).cast(), CAPACITY),
                Consumer::from_raw(
                    arena.add(HEADERS[inward]).cast(),
                    arena.add(SLOTS[inward]).cast(),
                    CAPACITY,
                ),
            )
        };
        match ends {
            (Ok(tx), Ok(rx)) => Ok(Ends { tx, rx, seat, looks }),
            (Err(error), _) | (_, Err(error)) => {
                Err(Failure::run(format!("the ring cannot be laid out: {error}")))
            }
        }
    }

    #[inline(always)]
    fn send(&mut self, value: u64) -> Outcome {
        let slot = [value; N];
        let mut looks = 0;
        while self.tx.push(slot).is_err() {
            self.fruitless(&mut looks)?;
        }
        self.seat.turn()
    }

    #[inline(always)]
    fn receive(&mut self) -> Outcome<[u64; N]> {
        let mut looks = 0;
        loop {
            if let Some(slot) = self.rx.pop() {
                return Ok(slot);
            }
            self.fruitless(&mut looks)?;
        }
    }

    #[inline(always)]
    fn fruitless(&mut self, looks: &mut u32) -> Outcome {
        *looks += 1;
        if *looks < self.looks {
            return Ok(());
        }
        *looks = 0;
        self.seat.idle()
    }

    fn start(mut self, leg: &Leg, histogram: &mut Histogram) -> Outcome<Tally> {
        let clock = self.seat.clock;
        let mut tally = Tally::default();
        let mut discarded = Histogram::new();
        self.bounce(1, leg.warmup, &mut discarded, &mut Tally::default())?;
        self.bounce(leg.warmup + 1, leg.iters, histogram, &mut tally)?;
        self.stream(leg.warmup)?;
        let begun = clock.now();
        self.stream(leg.iters)?;
        tally.ticks = clock.now().wrapping_sub(begun);
        tally.ops = leg.iters;
        Ok(tally)
    }

    #[inline(never)]
    fn bounce(&mut self, first: u64, count: u64, histogram: &mut Histogram, tally: &mut Tally) -> Outcome {
        let clock = self.seat.clock;
        let mut last = clock.now();
        for value in first..first + count {
            self.send(value)?;
            match value == first {
                true => last = clock.now(),
                false => self.seat.lap(histogram, &mut last)?,
            }
            let right = self.receive()? == [value; N];
            tally.checked += u64::from(right);
            tally.errors += u64::from(!right);
        }
        Ok(())
    }

    /// Sends `count` values and waits until the last has been taken out.
    #[inline(never)]
    fn stream(&mut self, count: u64) -> Outcome {
        for value in 1..=count {
            self.send(value)?;
        }
        if count > 0 {
            self.receive()?;
        }
        Ok(())
    }

    fn answer(mut self, leg: &Leg) -> Outcome<Tally> {
        let mut tally = Tally::default();
        for _ in 0..leg.warmup + leg.iters {
            let value = self.receive()?[0];
            self.send(value)?;
        }
        for count in [leg.warmup, leg.iters] {
            tally.errors += self.drain(count)?;
            if count > 0 {
                self.send(count)?;
            }
        }
        Ok(tally)
    }

    #[inline(never)]
    fn drain(&mut self, count: u64) -> Outcome<u64> {
        let mut wrong = 0;
        for value in 1..=count {
            wrong += u64::from(self.receive()? != [value; N]);
        }
        Ok(wrong)
    }
}
