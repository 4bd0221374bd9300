//! Measures a stream of tagged messages with the same tag. The other side posts a window of
//! receives, and posts each again when it completes. With checks, every window is verified and then
//! answered. Without checks, all messages are sent from one place and received into one place, as
//! in `ucx_perftest` and `osu_bw`.

use super::job::{Job, SLOTS_AT, Side, Tally};
use super::verbs::{Area, Verbs};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

const STREAM: u64 = 1;
const ANSWER: u64 = 2;

pub const POSTED: u64 = 512;

/// Maximum number of messages sent before some are received, if one process runs both sides.
const PIECE: u64 = 32;

fn stride(job: &Job) -> usize {
    if job.check { job.stride() } else { 0 }
}

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    let mut tally = Tally { ops: job.iters, ..Tally::default() };
    let mut receiver = Receiver::new(job, Side::Answers, 0);
    if verbs.plays(Side::Answers) {
        receiver.post_first(verbs)?;
    }
    answer(verbs)?;
    stream(verbs, job, 0, job.warmup, &mut receiver, &mut Histogram::new(), &mut tally)?;
    tally.checked = 0;
    tally.ticks = stream(verbs, job, job.warmup, job.iters, &mut receiver, histogram, &mut tally)?;
    Ok(tally)
}

fn answer<V: Verbs>(verbs: &mut V) -> Outcome {
    answer_from(verbs, Side::Answers)
}

/// `side` sends an empty message, and the other side waits for it.
pub fn answer_from<V: Verbs>(verbs: &mut V, side: Side) -> Outcome {
    if verbs.plays(side) {
        verbs.send(side, ANSWER, 0, 0)?;
    }
    if verbs.plays(side.other()) {
        let request = verbs.recv(side.other(), ANSWER, 0, 0, 0)?;
        verbs.received(side.other(), request)?;
    }
    Ok(())
}

#[inline(never)]
fn stream<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    done: u64,
    count: u64,
    receiver: &mut Receiver,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    if count == 0 {
        return Ok(0);
    }
    let per_window = job.per_window();
    let both = Side::BOTH.iter().all(|&side| verbs.plays(side));
    let begun = verbs.clock().now();
    let (mut last, mut pending, mut sent) = (begun, 0, done);
    while sent < done + count {
        let now = per_window.min(done + count - sent);
        let mut slot = 0;
        while slot < now {
            let piece = if both { PIECE.min(now - slot) } else { now - slot };
            if verbs.plays(Side::Starts) {
                for slot in slot..slot + piece {
                    pending += send(verbs, job, Side::Starts, sent + slot, slot)?;
                    if pending >= job.window {
                        verbs.sent(Side::Starts, 1)?;
                        pending -= 1;
                    }
                }
            }
            slot += piece;
            if verbs.plays(Side::Answers) {
                receiver.until(verbs, job, sent + slot, tally)?;
            }
        }
        sent += now;
        if job.check {
            if verbs.plays(Side::Starts) {
                verbs.sent(Side::Starts, std::mem::take(&mut pending))?;
            }
            answer(verbs)?;
        }
        match now == per_window {
            true => verbs.lap(histogram, &mut last)?,
            false => verbs.turn()?,
        }
    }
    if verbs.plays(Side::Starts) {
        verbs.sent(Side::Starts, pending)?;
    }
    if !job.check {
        answer(verbs)?;
    }
    Ok(verbs.clock().now().wrapping_sub(begun))
}

/// Sends message `number` from a slot. Returns the number of completions that the send will
/// generate.
#[inline(always)]
pub fn send<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    side: Side,
    number: u64,
    slot: u64,
) -> Outcome<u64> {
    // With checks, the number of messages in a window is the number of slots.
    let at = SLOTS_AT + slot as usize * stride(job);
    if job.check {
        verbs.fill(side, Area::Buffer, at, pattern(job, side, number), job.size)?;
    }
    verbs.send(side, STREAM, at, job.size)
}

fn pattern(job: &Job, side: Side, number: u64) -> Pattern {
    Pattern::new(job.seed, STREAM + side as u64, number)
}

pub struct Receiver {
    side: Side,
    start: usize,
    len: usize,
    stride: usize,
    end: usize,
    window: u64,
    total: u64,
    posted: u64,
    got: u64,
    /// Offset of the next receive. Stored, so that a receive needs no division.
    next: usize,
}

impl Receiver {
    pub fn new(job: &Job, side: Side, start: usize) -> Self {
        let stride = stride(job);
        Receiver {
            side,
            start: start + SLOTS_AT,
            len: job.size,
            stride,
            end: job.slots() as usize * stride,
            window: job.window.min(POSTED),
            total: job.warmup + job.iters,
            posted: 0,
            got: 0,
            next: 0,
        }
    }

    pub fn post_first<V: Verbs>(&mut self, verbs: &mut V) -> Outcome {
        (0..self.window).try_for_each(|_| self.post(verbs))
    }

    #[inline(always)]
    fn post<V: Verbs>(&mut self, verbs: &mut V) -> Outcome {
        if self.posted < self.total {
            verbs.recv(self.side, STREAM, self.start + self.next, self.len, self.posted)?;
            self.posted += 1;
            let next = self.next + self.stride;
            self.next = if next == self.end { 0 } else { next };
        }
        Ok(())
    }

    #[inline(always)]
    pub fn until<V: Verbs>(
        &mut self,
        verbs: &mut V,
        job: &Job,
        count: u64,
        tally: &mut Tally,
    ) -> Outcome {
        while self.got < count {
            let number = verbs.next_recv(self.side)?;
            if job.check {
                // Messages match in send order, so receive `number` gets message `number`.
                let at = self.start + (number % job.slots()) as usize * job.stride();
                let expected = pattern(job, self.side.other(), number);
                let whole = verbs.is_whole(self.side, Area::Buffer, at, expected, job.size)?;
                tally.checked += u64::from(whole);
                tally.errors += u64::from(!whole);
            }
            self.got += 1;
            self.post(verbs)?;
        }
        Ok(())
    }
}
