//! Measures `--bidirectional`: both sides run put or tag-bw at once.
//!
//! Each side waits for the other at the end of a stream. If payloads are checked, it also waits
//! after each window.
//!
//! The measured time is from the first post until both sides have received everything.

use fishplate_core::op::{Cmp, SignalOp};

use super::job::{Job, SLOTS_AT, Side, Tally};
use super::put::SIGNALS;
use super::tag_bw::{POSTED, Receiver, answer_from, send};
use super::verbs::{Area, Verbs};
use crate::args::Test;
use crate::failure::Outcome;
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Number of messages that a side sends before it receives any.
const PIECE: u64 = 32;

pub fn run<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    let me = if verbs.plays(Side::Starts) { Side::Starts } else { Side::Answers };
    let mut tally = Tally { ops: 2 * job.iters, ..Tally::default() };
    let mut discarded = Histogram::new();
    if job.test == Test::Put {
        let warm = puts(verbs, job, me, 0, job.warmup, &mut discarded, &mut tally)?;
        tally.checked = 0;
        tally.ticks = puts(verbs, job, me, warm.0, job.iters, histogram, &mut tally)?.1;
        return Ok(tally);
    }
    let mut receiver = Receiver::new(job, me, Job::arena(job.size));
    receiver.post_first(verbs)?;
    both_answer(verbs, me)?;
    messages(verbs, job, 0, job.warmup, (me, &mut receiver), &mut discarded, &mut tally)?;
    tally.checked = 0;
    tally.ticks =
        messages(verbs, job, job.warmup, job.iters, (me, &mut receiver), histogram, &mut tally)?;
    Ok(tally)
}

/// Ends once each side has received an empty message from the other.
fn both_answer<V: Verbs>(verbs: &mut V, me: Side) -> Outcome {
    answer_from(verbs, me)?;
    answer_from(verbs, me.other())
}

/// Each side sets a word of the other side to `number`, and waits until its own word is set.
fn meet<V: Verbs>(verbs: &mut V, me: Side, word: usize, number: u64) -> Outcome {
    verbs.signal(me, word, SignalOp::Set, number)?;
    verbs.wait(me, word, Cmp::Ge, number).map(drop)
}

/// Sends `count` puts in windows. `window` is the number of the previous window. Returns the number
/// of the last window, and the ticks until both sides have received everything.
#[inline(never)]
fn puts<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    me: Side,
    mut window: u64,
    count: u64,
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<(u64, u64)> {
    let (len, stride, per_window) = (job.size, job.stride(), job.per_window());
    let [there, seen] = SIGNALS;
    let pattern =
        |side: Side, window, slot| Pattern::new(job.seed.wrapping_add(side as u64), window, slot);
    let begun = verbs.clock().now();
    let (mut last, mut left) = (begun, count);
    while left > 0 {
        let now = left.min(per_window);
        (left, window) = (left - now, window + 1);
        for slot in (0..now).filter(|_| job.check) {
            verbs.fill(me, Area::Buffer, slot as usize * stride, pattern(me, window, slot), len)?;
        }
        let slots = job.slots();
        let mut slot = 0;
        for _ in 0..now {
            let offset = slot as usize * stride;
            slot = if slot + 1 == slots { 0 } else { slot + 1 };
            verbs.put(me, offset, len, SLOTS_AT + offset)?;
        }
        if job.check {
            meet(verbs, me, there, window)?;
            for slot in 0..now {
                let (offset, expected) =
                    (SLOTS_AT + slot as usize * stride, pattern(me.other(), window, slot));
                let whole = verbs.is_whole(me, Area::Landing, offset, expected, len)?;
                tally.checked += u64::from(whole);
                tally.errors += u64::from(!whole);
            }
            meet(verbs, me, seen, window)?;
        }
        match now == per_window {
            true => verbs.lap(histogram, &mut last)?,
            false => verbs.turn()?,
        }
    }
    verbs.quiet(me)?;
    window += 1;
    meet(verbs, me, there, window)?;
    meet(verbs, me, seen, window)?;
    Ok((window, verbs.clock().now().wrapping_sub(begun)))
}

#[inline(never)]
fn messages<V: Verbs>(
    verbs: &mut V,
    job: &Job,
    done: u64,
    count: u64,
    (me, receiver): (Side, &mut Receiver),
    histogram: &mut Histogram,
    tally: &mut Tally,
) -> Outcome<u64> {
    let per_window = job.per_window();
    // Each side stays behind the receives that the other side has posted. Unreceived messages could
    // stop both sides from sending.
    let posted = job.window.min(POSTED);
    let lag = posted.saturating_sub(PIECE);
    let begun = verbs.clock().now();
    let (mut last, mut pending, mut sent) = (begun, 0, done);
    while sent < done + count {
        let now = per_window.min(done + count - sent);
        let mut slot = 0;
        while slot < now {
            let piece = PIECE.min(posted).min(now - slot);
            for slot in slot..slot + piece {
                pending += send(verbs, job, me, sent + slot, slot)?;
                if pending >= job.window {
                    verbs.sent(me, 1)?;
                    pending -= 1;
                }
            }
            slot += piece;
            receiver.until(verbs, job, (sent + slot).saturating_sub(lag), tally)?;
        }
        sent += now;
        if job.check {
            verbs.sent(me, std::mem::take(&mut pending))?;
            receiver.until(verbs, job, sent, tally)?;
            both_answer(verbs, me)?;
        }
        match now == per_window {
            true => verbs.lap(histogram, &mut last)?,
            false => verbs.turn()?,
        }
    }
    receiver.until(verbs, job, done + count, tally)?;
    verbs.sent(me, pending)?;
    both_answer(verbs, me)?;
    Ok(verbs.clock().now().wrapping_sub(begun))
}
