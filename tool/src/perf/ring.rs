//! Measures the ring alone: two rings between the sides, without engine or rail. Every value is
//! verified.

use std::ptr::NonNull;

use fishplate_core::sync::ring::{Consumer, Header, Producer, Shared};

use super::endpoint::{AREAS_AT, Endpoint};
use super::job::{Job, RING_ARENA, Tally};
use super::verbs::Verbs;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;

const CAPACITY: usize = 1024;

/// A check takes only a few nanoseconds, so a few checks are no reason to yield. If both sides
/// share one processor, every check counts.
const LOOKS: u32 = 64;

/// Index 0 is the ring towards the answering side.
const HEADERS: [usize; 2] = [0, 512];
const SLOTS: [usize; 2] = [4096, RING_ARENA / 2];
const _: () =
    assert!(SLOTS[1] - SLOTS[0] >= CAPACITY * 64 && RING_ARENA - SLOTS[1] >= CAPACITY * 64);

/// Without a histogram, only prepares: the answering side empties both rings, and the starting side
/// does nothing.
pub fn run<const STARTS: bool>(
    side: &mut Endpoint<STARTS>,
    job: &Job,
    histogram: Option<&mut Histogram>,
) -> Outcome<Tally> {
    let Some(histogram) = histogram else {
        return if STARTS { Ok(Tally::default()) } else { empty(side).map(|()| Tally::default()) };
    };
    match job.size / 8 {
        1 => Ends::<_, 1>::attach(side)?.run(job, histogram),
        2 => Ends::<_, 2>::attach(side)?.run(job, histogram),
        4 => Ends::<_, 4>::attach(side)?.run(job, histogram),
        _ => Ends::<_, 8>::attach(side)?.run(job, histogram),
    }
}

fn memory<const STARTS: bool>(side: &Endpoint<STARTS>) -> Outcome<NonNull<u8>> {
    let common = side.common.ok_or_else(|| Failure::run("the two processes share no memory"))?;
    // SAFETY: the areas begin at this offset of the shared memory, and have at least RING_ARENA
    // bytes.
    Ok(unsafe { common.add(AREAS_AT) })
}

fn empty<const STARTS: bool>(side: &Endpoint<STARTS>) -> Outcome {
    let memory = memory(side)?;
    for header in HEADERS {
        // SAFETY: the header is inside the rings' memory. The other side does not use it before
        // this side is ready.
        unsafe { memory.add(header).write_bytes(0, size_of::<Header>()) };
    }
    Ok(())
}

struct Ends<'s, E, const N: usize> {
    tx: Producer<'s, [u64; N], Shared>,
    rx: Consumer<'s, [u64; N], Shared>,
    side: &'s mut E,
    looks: u32,
}

impl<'s, const STARTS: bool, const N: usize> Ends<'s, Endpoint<STARTS>, N> {
    fn attach(side: &'s mut Endpoint<STARTS>) -> Outcome<Self> {
        let arena = memory(side)?;
        let looks = if side.crowded { 1 } else { LOOKS };
        let (out, inward) = if STARTS { (0, 1) } else { (1, 0) };
        // SAFETY: the arena has RING_ARENA bytes and stays mapped longer than the job. Both rings
        // lie inside it and do not overlap. Each side creates one end of each ring once per job,
        // after the ends of the previous job are dropped. Words have no invalid values.
        let ends = unsafe {
            (
                Producer::from_raw(
                    arena.add(HEADERS[out]).cast(),
                    arena.add(SLOTS[out]).cast(),
                    CAPACITY,
                ),
                Consumer::from_raw(
                    arena.add(HEADERS[inward]).cast(),
                    arena.add(SLOTS[inward]).cast(),
                    CAPACITY,
                ),
            )
        };
        match ends {
            (Ok(tx), Ok(rx)) => Ok(Ends { tx, rx, side, looks }),
            (Err(error), _) | (_, Err(error)) => {
                Err(Failure::run(format!("cannot create the ring: {error}")))
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
        self.side.turn()
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
        self.side.idle()
    }

    fn run(mut self, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
        if !STARTS {
            return self.answer(job);
        }
        let clock = self.side.clock;
        let mut tally = Tally::default();
        let mut discarded = Histogram::new();
        self.bounce(1, job.warmup, &mut discarded, &mut Tally::default())?;
        self.bounce(job.warmup + 1, job.iters, histogram, &mut tally)?;
        self.stream(job.warmup)?;
        let begun = clock.now();
        self.stream(job.iters)?;
        tally.ticks = clock.now().wrapping_sub(begun);
        tally.ops = job.iters;
        Ok(tally)
    }

    #[inline(never)]
    fn bounce(
        &mut self,
        first: u64,
        count: u64,
        histogram: &mut Histogram,
        tally: &mut Tally,
    ) -> Outcome {
        let clock = self.side.clock;
        let mut last = clock.now();
        for value in first..first + count {
            self.send(value)?;
            match value == first {
                true => last = clock.now(),
                false => self.side.lap(histogram, &mut last)?,
            }
            let right = self.receive()? == [value; N];
            tally.checked += u64::from(right);
            tally.errors += u64::from(!right);
        }
        Ok(())
    }

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

    fn answer(mut self, job: &Job) -> Outcome<Tally> {
        let mut tally = Tally::default();
        for _ in 0..job.warmup + job.iters {
            let value = self.receive()?[0];
            self.send(value)?;
        }
        for count in [job.warmup, job.iters] {
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
