//! The ring alone: two of them between the sides, without engine or rail. First ping-pong, which gives the latency,
//! then a stream through one of them, which gives the rate. Every value is verified.

use std::ptr::NonNull;

use fishplate_core::rail::Rail;
use fishplate_core::sync::ring::{Consumer, Header, Producer, Shared};

use super::leg::{Leg, RING_ARENA, Side, Tally};
use super::seat::Seat;
use crate::tool::clock::Clock;
use crate::tool::failure::{Failure, Outcome};
use crate::tool::floor::Alive;
use crate::tool::histogram::Histogram;

const CAPACITY: usize = 1024;
/// Headers and slots of both rings in the arena, in bytes. Index 0: towards the answering side.
const HEADERS: [usize; 2] = [0, 512];
const SLOTS: [usize; 2] = [4096, RING_ARENA / 2];
const _: () = assert!(SLOTS[1] - SLOTS[0] >= CAPACITY * 64 && RING_ARENA - SLOTS[1] >= CAPACITY * 64);

/// Looks between two questions whether the other side lives, which also let it run: when it has a processor of its own, and
/// when it waits for this one.
const PATIENCE: u32 = 1 << 16;
const NO_PATIENCE: u32 = 64;

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
    let (arena, clock, deadline_ns) = (seat.arena, seat.clock, leg.deadline_ns());
    let patience = if seat.crowded { NO_PATIENCE } else { PATIENCE };
    let mut alive = || seat.check(deadline_ns);
    match leg.size / 8 {
        1 => Ends::<1>::attach(arena, Side::Starts, patience, &mut alive)?.start(leg, histogram, clock),
        2 => Ends::<2>::attach(arena, Side::Starts, patience, &mut alive)?.start(leg, histogram, clock),
        4 => Ends::<4>::attach(arena, Side::Starts, patience, &mut alive)?.start(leg, histogram, clock),
        _ => Ends::<8>::attach(arena, Side::Starts, patience, &mut alive)?.start(leg, histogram, clock),
    }
}

/// The side that answers.
pub fn answer<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg) -> Outcome<Tally> {
    let (arena, deadline_ns) = (seat.arena, leg.deadline_ns());
    let patience = if seat.crowded { NO_PATIENCE } else { PATIENCE };
    let mut alive = || seat.check(deadline_ns);
    match leg.size / 8 {
        1 => Ends::<1>::attach(arena, Side::Answers, patience, &mut alive)?.answer(leg),
        2 => Ends::<2>::attach(arena, Side::Answers, patience, &mut alive)?.answer(leg),
        4 => Ends::<4>::attach(arena, Side::Answers, patience, &mut alive)?.answer(leg),
        _ => Ends::<8>::attach(arena, Side::Answers, patience, &mut alive)?.answer(leg),
    }
}

/// One side's ends of both rings; slots of `N` words.
struct Ends<'m, const N: usize> {
    tx: Producer<'m, [u64; N], Shared>,
    rx: Consumer<'m, [u64; N], Shared>,
    patience: u32,
    alive: Alive<'m>,
}

impl<'m, const N: usize> Ends<'m, N> {
    fn attach(arena: NonNull<u8>, side: Side, patience: u32, alive: Alive<'m>) -> Outcome<Self> {
        let (out, inward) = (side as usize, 1 - side as usize);
        // SAFETY: the arena has RING_ARENA bytes and stays mapped longer than the leg; both rings lie inside it and do
        // not overlap. Each side makes one end of each, once per leg, and the ends of the leg before are gone. Words
        // have no invalid values.
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
            (Ok(tx), Ok(rx)) => Ok(Ends { tx, rx, patience, alive }),
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
            self.patience(&mut looks)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn receive(&mut self) -> Outcome<[u64; N]> {
        let mut looks = 0;
        loop {
            if let Some(slot) = self.rx.pop() {
                return Ok(slot);
            }
            self.patience(&mut looks)?;
        }
    }

    #[inline(always)]
    fn patience(&mut self, looks: &mut u32) -> Outcome {
        *looks += 1;
        if (*looks).is_multiple_of(self.patience) { (self.alive)() } else { Ok(()) }
    }

    fn start(mut self, leg: &Leg, histogram: &mut Histogram, clock: Clock) -> Outcome<Tally> {
        let mut tally = Tally::default();
        let mut discarded = Histogram::new();
        self.bounce(1, leg.warmup, &mut discarded, clock, &mut Tally::default())?;
        self.bounce(leg.warmup + 1, leg.iters, histogram, clock, &mut tally)?;
        self.stream(leg.warmup)?;
        let begun = clock.now();
        self.stream(leg.iters)?;
        tally.ticks = clock.now().wrapping_sub(begun);
        tally.ops = leg.iters;
        Ok(tally)
    }

    #[inline(never)]
    fn bounce(
        &mut self,
        first: u64,
        count: u64,
        histogram: &mut Histogram,
        clock: Clock,
        tally: &mut Tally,
    ) -> Outcome {
        let mut last = clock.now();
        for value in first..first + count {
            self.send(value)?;
            let now = clock.now();
            if value != first {
                histogram.record(now.wrapping_sub(last));
            }
            last = now;
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
