//! A stream of tagged messages, all with the same tag. The other side has a window of receives
//! posted, and posts each again when its message has come. Checked, every window is answered, and
//! verified before that. Unchecked, all messages are sent from one place and received into one
//! place, as those of `ucx_perftest` and `osu_bw` are.

use super::job::{Job, SLOTS_AT, Side, Tally};
use super::verbs::{Area, Verbs};
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// The tag of the stream, and that of the answers to it.
const STREAM: u64 = 1;
const ANSWER: u64 = 2;

/// The most receives posted at once.
pub const POSTED: u64 = 512;

/// The most messages that are sent before some are received, where one process plays both sides.
const PIECE: u64 = 32;

/// From one payload to the next, in bytes.
fn stride(job: &Job) -> usize {
    if job.check { job.stride() } else { 0 }
}

/// Runs the sides that this process plays.
pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    let mut tally = Tally { ops: job.iters, ..Tally::default() };
    let mut receiver = Receiver { posted: 0, got: 0, next: 0 };
    if verbs.plays(Side::Answers) {
        receiver.post(verbs, job, job.window.min(POSTED))?;
    }
    // The receives are posted.
    answer(verbs)?;
    stream(verbs, job, 0, job.warmup, &mut receiver, &mut Histogram::new(), &mut tally)?;
    tally.checked = 0;
    tally.ticks = stream(verbs, job, job.warmup, job.iters, &mut receiver, histogram, &mut tally)?;
    Ok(tally)
}

/// The side that answers sends an empty message, and the other waits for it.
fn answer<V: Verbs>(verbs: &mut V) -> Outcome {
    if verbs.plays(Side::Answers) {
        verbs.send(Side::Answers, ANSWER, 0, 0)?;
    }
    if verbs.plays(Side::Starts) {
        let request = verbs.recv(Side::Starts, ANSWER, 0, 0, 0)?;
        verbs.received(Side::Starts, request)?;
    }
    Ok(())
}

/// Sends `count` messages after the first `done`, and waits until the other side has the last.
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
    let (stride, per_window) = (stride(job), job.per_window());
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
                    // Checked, a window has as many messages as there are slots.
                    let at = SLOTS_AT + slot as usize * stride;
                    if job.check {
                        let pattern = Pattern::new(job.seed, STREAM, sent + slot);
                        verbs.fill(Side::Starts, Area::Buffer, at, pattern, job.size)?;
                    }
                    pending += verbs.send(Side::Starts, STREAM, at, job.size)?;
                    // As many as the window are under way.
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

/// The side that receives.
struct Receiver {
    /// Receives posted, and ended.
    posted: u64,
    got: u64,
    /// Offset of the next receive, without a division for each.
    next: usize,
}

impl Receiver {
    /// Posts receives until there were `count`, or as many as there will be messages.
    #[inline(always)]
    fn post<V: Verbs>(&mut self, verbs: &mut V, job: &Job, count: u64) -> Outcome {
        let stride = stride(job);
        while self.posted < count.min(job.warmup + job.iters) {
            verbs.recv(Side::Answers, STREAM, SLOTS_AT + self.next, job.size, self.posted)?;
            self.posted += 1;
            self.next =
                if self.next + stride == job.slots() as usize * stride { 0 } else { self.next + stride };
        }
        Ok(())
    }

    /// Receives until there were `count`.
    #[inline(always)]
    fn until<V: Verbs>(&mut self, verbs: &mut V, job: &Job, count: u64, tally: &mut Tally) -> Outcome {
        while self.got < count {
            let number = verbs.next_recv(Side::Answers)?;
            if job.check {
                // Messages match in the order sent: the receive posted as this number got it.
                let at = SLOTS_AT + (number % job.slots()) as usize * job.stride();
                let pattern = Pattern::new(job.seed, STREAM, number);
                let whole = verbs.is_whole(Side::Answers, Area::Buffer, at, pattern, job.size)?;
                tally.checked += u64::from(whole);
                tally.errors += u64::from(!whole);
            }
            self.got += 1;
            self.post(verbs, job, self.posted + 1)?;
        }
        Ok(())
    }
}
