//! Implements [`Verbs`] for both sides in one thread. An operation makes passes until it completes.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use fishplate_core::engine::protocol::{Payload, Received, Request};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Issued, Notice, Signal};
use fishplate_core::op::{Amo, AmoOp, Cmp, Outcome as Ended, SignalOp};
use fishplate_core::rail::Rail;

use super::super::job::Side;
use super::super::verbs::{Area, Verbs};
use super::{CONTEXT, InProcess};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;

impl<R: Rail> Verbs for InProcess<'_, R> {
    #[inline(always)]
    fn plays(&self, _: Side) -> bool {
        true
    }

    #[inline(always)]
    fn clock(&self) -> Clock {
        self.clock
    }

    fn out_of_order(&self) -> u64 {
        self.engines.iter().map(|one| one.engine.stats().arrivals_out_of_order).sum()
    }

    fn set_timeout(&mut self, ns: u64) {
        self.watch.set(ns);
    }

    #[inline(always)]
    fn area(&self, side: Side, area: Area) -> (NonNull<u8>, usize) {
        let one = &self.engines[side as usize % self.engines.len()];
        // SAFETY: the memory has an area for each side that the engine serves, so `start` is inside
        // it.
        (
            unsafe { one.memory[area as usize].1.add(self.start(side, area)) },
            one.lens[area as usize],
        )
    }

    fn write_device(&mut self, _: Area, _: usize, _: usize) -> Outcome {
        Ok(())
    }

    fn read_device(&mut self, _: Area, _: usize, _: usize) -> Outcome {
        Ok(())
    }

    fn set_word(&mut self, side: Side, offset: usize, value: u64) -> Outcome {
        self.landing_word(side, offset).store(value, Ordering::Release);
        Ok(())
    }

    #[inline(always)]
    fn word(&self, side: Side, offset: usize) -> Outcome<u64> {
        Ok(self.landing_word(side, offset).load(Ordering::Acquire))
    }

    #[inline(always)]
    fn put(&mut self, side: Side, from: usize, len: usize, to: usize) -> Outcome {
        let (from, to) = (self.buffer_at(side, from), self.there(side, to)?);
        self.until(side, "a put", |one| {
            one.engine.put(CONTEXT, from, len, to, Notice::Silent).map(Some)
        })
        .map(drop)
    }

    #[inline(always)]
    fn put_signal(
        &mut self,
        side: Side,
        from: usize,
        len: usize,
        to: usize,
        word: usize,
        value: u64,
    ) -> Outcome {
        let (from, to) = (self.buffer_at(side, from), self.there(side, to)?);
        let signal = Signal::set(self.there(side, word)?, value);
        self.until(side, "a put-signal", |one| {
            one.engine.put_signal(CONTEXT, from, len, to, signal, Notice::Silent).map(Some)
        })
        .map(drop)
    }

    #[inline(always)]
    fn signal(&mut self, side: Side, word: usize, op: SignalOp, value: u64) -> Outcome {
        let signal = Signal { at: self.there(side, word)?, op, value };
        self.until(side, "a signal", |one| {
            one.engine.signal(CONTEXT, signal, Notice::Silent).map(Some)
        })
        .map(drop)
    }

    #[inline(always)]
    fn get(&mut self, side: Side, into: usize, len: usize, from: usize) -> Outcome {
        let (into, from) = (self.buffer_at(side, into), self.there(side, from)?);
        let issued = self.until(side, "a get", |one| {
            one.engine.get(CONTEXT, into, len, from, Notice::Report(0)).map(Some)
        })?;
        self.finish(side, issued).map(drop)
    }

    #[inline(always)]
    fn fetch_add(&mut self, side: Side, word: usize) -> Outcome<u64> {
        let (at, amo) =
            (self.there(side, word)?, Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 });
        let issued =
            self.until(side, "an atomic", |one| one.engine.fetch(CONTEXT, at, amo, 0).map(Some))?;
        self.finish(side, issued)
    }

    #[inline(always)]
    fn wait(&mut self, side: Side, offset: usize, cmp: Cmp, value: u64) -> Outcome<u64> {
        loop {
            let now = self.word(side, offset)?;
            if cmp.holds(now, value) {
                self.passes = 0;
                return Ok(now);
            }
            self.pass()?;
        }
    }

    fn quiet(&mut self, side: Side) -> Outcome {
        self.until(side, "a quiet", |one| Ok(one.engine.is_quiet(CONTEXT, one.peer)?.then_some(())))
    }

    #[inline(always)]
    fn send(&mut self, side: Side, tag: u64, offset: usize, len: usize) -> Outcome<u64> {
        let at = self.buffer_at(side, offset);
        let (start, _) = self.area(side, Area::Buffer);
        // SAFETY: the tests use only offsets inside the buffer, and nothing writes there during the
        // call.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr().add(offset), len) };
        let issued = self.until(side, "a send", |one| {
            let (payload, notice) = match len <= one.engine.eager_max(one.peer) {
                true => (Payload::Bytes(bytes), Notice::Silent),
                false => (Payload::Region(at, len), Notice::Report(tag)),
            };
            let issued = one.engine.send(CONTEXT, one.peer, Tag::from(tag), payload, notice);
            issued.map(|issued| {
                Some(matches!((issued, notice), (Issued::Pending(_), Notice::Report(_))))
            })
        })?;
        Ok(u64::from(issued))
    }

    fn sent(&mut self, side: Side, count: u64) -> Outcome {
        for _ in 0..count {
            let end = self.until(side, "a send", |one| Ok(one.engine.next_completion()))?;
            if end.outcome != Ended::Done {
                return Err(Failure::run(format!("a send has {}", end.outcome)));
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn recv(
        &mut self,
        side: Side,
        tag: u64,
        offset: usize,
        len: usize,
        word: u64,
    ) -> Outcome<Request> {
        let into = self.buffer_at(side, offset);
        self.until(side, "a receive", |one| {
            one.engine
                .recv(Some(one.peer), Tag::from(tag), Tag::ZERO, Some((into, len)), word)
                .map(Some)
        })
    }

    #[inline(always)]
    fn received(&mut self, side: Side, request: Request) -> Outcome {
        self.status(side, request).map(drop)
    }

    #[inline(always)]
    fn next_recv(&mut self, side: Side) -> Outcome<u64> {
        let status = self.until(side, "a receive", |one| Ok(one.engine.next_recv()))?;
        match status.outcome {
            Received::Ok => Ok(status.word),
            outcome => Err(Failure::run(format!("a receive did not succeed: {outcome}"))),
        }
    }

    #[inline(always)]
    fn lap(&mut self, histogram: &mut Histogram, last: &mut u64) -> Outcome {
        if self.watch.lap(histogram, last) { self.check() } else { Ok(()) }
    }

    #[inline(always)]
    fn turn(&mut self) -> Outcome {
        if self.watch.turn() { self.check() } else { Ok(()) }
    }
}
