//! Tagged messages where one thread plays both sides.
//!
//! Payloads go from the buffer of one side to the arena of the other, at the same offset.

use fishplate_core::engine::Notice;
use fishplate_core::engine::protocol::{Payload, Received, Request, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::error::OpError;
use fishplate_core::rail::Rail;

use super::super::leg::{Leg, SLOTS_AT};
use super::super::seat::{CONTEXT, RECEIVES};
use super::Solo;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::payload::Pattern;

impl<R: Rail, const RAILS: usize> Solo<'_, R, RAILS> {
    /// Sends, making passes while there is no room.
    #[inline(always)]
    fn send(&mut self, side: usize, tag: u64, offset: usize, len: usize) -> Outcome {
        loop {
            let seat = &mut self.seats[side];
            let payload = match seat.payload(offset, len) {
                Payload::Bytes(bytes) => {
                    // SAFETY: the buffer lives as long as the engine;
                    // the call below ends before anything writes there.
                    Payload::Bytes(unsafe { &*(bytes as *const [u8]) })
                }
                Payload::Region(at, len) => Payload::Region(at, len),
                Payload::Span(span) => Payload::Span(span),
            };
            match seat.engine.send(CONTEXT, seat.peer, Tag::from(tag), payload, Notice::Silent) {
                Ok(_) => {
                    self.passes = 0;
                    return Ok(());
                }
                Err(OpError::Again) => self.pass()?,
                Err(error) => return Err(Failure::run(format!("a send was refused: {error}"))),
            }
        }
    }

    #[inline(always)]
    fn recv(&mut self, side: usize, tag: u64, ignore: Tag, offset: usize, len: usize) -> Outcome<Request> {
        let seat = &mut self.seats[side];
        let into = Some((seat.ours.at(offset as u64), len));
        let posted = seat.engine.recv(Some(seat.peer), Tag::from(tag), ignore, into, tag);
        posted.map_err(|error| Failure::run(format!("a receive was refused: {error}")))
    }

    /// Makes passes until a receive has ended.
    #[inline(always)]
    fn received(&mut self, side: usize, request: Request) -> Outcome<Status> {
        loop {
            match self.seats[side].engine.test_recv(request) {
                Ok(Some(status)) if status.outcome == Received::Ok => {
                    self.passes = 0;
                    return Ok(status);
                }
                Ok(Some(status)) => {
                    return Err(Failure::run(format!("a receive ended: {}", status.outcome)));
                }
                Ok(None) => self.pass()?,
                Err(error) => return Err(Failure::run(format!("a receive was lost: {error}"))),
            }
        }
    }
}

/// There and back, the receive posted while its message is in flight.
pub fn ping_pong<R: Rail, const RAILS: usize>(
    solo: &mut Solo<'_, R, RAILS>,
    leg: &Leg,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
) -> Outcome {
    let clock = solo.seats[0].clock;
    let mut last = clock.now();
    for seq in first..first + count {
        let mut whole = true;
        for way in 0..2 {
            let side = way % solo.seats.len();
            let to = solo.other(side);
            let pattern = Pattern::new(leg.seed, way as u64, seq);
            if leg.check {
                solo.fill(side, SLOTS_AT, pattern, leg.size);
            }
            solo.send(side, seq, SLOTS_AT, leg.size)?;
            let request = solo.recv(to, seq, Tag::ZERO, SLOTS_AT, leg.size)?;
            solo.received(to, request)?;
            whole &= !leg.check || solo.arrived(to, SLOTS_AT, pattern, leg.size);
        }
        solo.lap(histogram, &mut last)?;
        solo.tally.checked += u64::from(leg.check && whole);
        solo.tally.errors += u64::from(!whole);
    }
    solo.quiet(0)
}

/// Windows of messages, to receives posted before or after them.
pub fn stream<R: Rail, const RAILS: usize>(
    solo: &mut Solo<'_, R, RAILS>,
    leg: &Leg,
    first: u64,
    count: u64,
    histogram: &mut Histogram,
) -> Outcome {
    let (clock, to) = (solo.seats[0].clock, solo.other(0));
    let (stride, slots) = (leg.stride(), leg.slots());
    let place = |k: u64| SLOTS_AT + (k % slots) as usize * stride;
    let batch = leg.per_window().min(RECEIVES as u64 / 2);
    let mut done = 0;
    let mut requests = Vec::with_capacity(batch as usize);
    while done < count {
        let mut begun = clock.now();
        let round = batch.min(count - done);
        let pattern = |k: u64| Pattern::new(leg.seed, 0, first + done + k);
        for k in 0..round {
            requests.push(solo.recv(to, 1, Tag::ZERO, place(k), leg.size)?);
        }
        for k in 0..round {
            if leg.check {
                solo.fill(0, place(k), pattern(k), leg.size);
            }
            solo.send(0, 1, place(k), leg.size)?;
        }
        for (k, request) in requests.drain(..).enumerate() {
            solo.received(to, request)?;
            if leg.check {
                let there = solo.arrived(to, place(k as u64), pattern(k as u64), leg.size);
                solo.tally.checked += u64::from(there);
                solo.tally.errors += u64::from(!there);
            }
        }
        solo.quiet(0)?;
        solo.lap(histogram, &mut begun)?;
        done += round;
    }
    Ok(())
}

/// Windows of messages under different tags to and fro, received half of the time by receives of
/// anything that were posted before them: the k-th of those must get the k-th message.
pub fn ordered<R: Rail, const RAILS: usize>(solo: &mut Solo<'_, R, RAILS>, leg: &Leg, count: u64) -> Outcome {
    let (stride, len) = (leg.stride(), leg.size);
    let place = |k: u64| SLOTS_AT + k as usize * stride;
    let (mut sent, mut turn) = (0, 0u64);
    while sent < count {
        let (side, early) = ((turn % 2) as usize, turn / 2 % 2 == 0);
        let to = solo.other(side);
        let round = leg.window.min(count - sent).min(RECEIVES as u64 / 2);
        let mut requests = Vec::with_capacity(round as usize);
        for k in (0..round).filter(|_| early) {
            requests.push(solo.recv(to, 0, Tag::ALL, place(k), len)?);
        }
        for k in 0..round {
            solo.fill(side, place(k), Pattern::new(leg.seed, side as u64, sent + k), len);
            solo.send(side, sent + k, place(k), len)?;
            if !early && k % 2 == 1 {
                // One behind the other, while messages arrive in any order.
                for k in k - 1..=k {
                    requests.push(solo.recv(to, 0, Tag::ALL, place(k), len)?);
                }
            }
        }
        for k in requests.len() as u64..round {
            requests.push(solo.recv(to, 0, Tag::ALL, place(k), len)?);
        }
        for (k, request) in requests.into_iter().enumerate() {
            let status = solo.received(to, request)?;
            let number = status.envelope.map(|envelope| envelope.tag.lo);
            let k = k as u64;
            solo.tally.misordered += u64::from(number != Some(sent + k));
            let there = solo.arrived(to, place(k), Pattern::new(leg.seed, side as u64, sent + k), len);
            solo.tally.checked += u64::from(there);
            solo.tally.errors += u64::from(!there);
        }
        solo.quiet(side)?;
        (sent, turn) = (sent + round, turn + 1);
    }
    Ok(())
}
