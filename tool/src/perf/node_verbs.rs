//! Implements [`Verbs`] for a side with its own node.
//!
//! [`endpoint`](super::endpoint) describes which calls block and which are hot paths.

use std::ptr::NonNull;

use fishplate::node::{Error, Source};
use fishplate::{Cmp, Issued, Notice, Signal};
use fishplate_core::engine::protocol::Request;
use fishplate_core::engine::tag::Tag;
use fishplate_core::op::{Amo, AmoOp, Outcome as Ended, SignalOp};

use super::endpoint::{AREAS_AT, Endpoint, SLICE};
use super::job::{Job, Side, Tally};
use super::ring;
use super::verbs::{Area, Verbs};
use crate::clock::Clock;
use crate::failure::Outcome;
use crate::histogram::Histogram;

impl<const STARTS: bool> Verbs for Endpoint<STARTS> {
    #[inline(always)]
    fn plays(&self, side: Side) -> bool {
        (side == Side::Starts) == STARTS
    }

    #[inline(always)]
    fn clock(&self) -> Clock {
        self.clock
    }

    fn out_of_order(&self) -> u64 {
        self.node.stats().arrivals_out_of_order
    }

    fn set_timeout(&mut self, ns: u64) {
        self.watch.set(ns);
    }

    #[inline(always)]
    fn area(&self, _: Side, area: Area) -> (NonNull<u8>, usize) {
        (self.views[area as usize], self.lens[area as usize])
    }

    #[inline(always)]
    fn write_device(&mut self, area: Area, offset: usize, len: usize) -> Outcome {
        let Some(memory) = self.on_device(area) else { return Ok(()) };
        let at = memory.at((if area == Area::Landing { AREAS_AT } else { 0 } + offset) as u64);
        // SAFETY: the callers check that the range is inside the view. Only this thread uses views
        // of a device.
        let bytes = unsafe {
            std::slice::from_raw_parts(self.views[area as usize].as_ptr().add(offset), len)
        };
        self.node
            .write_device(at, bytes)
            .map_err(|error| self.who.failed("a copy to the device", error))
    }

    #[inline(always)]
    fn read_device(&mut self, area: Area, offset: usize, len: usize) -> Outcome {
        let Some(memory) = self.on_device(area) else { return Ok(()) };
        let at = memory.at((if area == Area::Landing { AREAS_AT } else { 0 } + offset) as u64);
        // SAFETY: the callers check that the range is inside the view. Only this thread uses views
        // of a device.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(self.views[area as usize].as_ptr().add(offset), len)
        };
        self.node
            .read_device(at, bytes)
            .map_err(|error| self.who.failed("a copy from the device", error))
    }

    fn set_word(&mut self, _: Side, offset: usize, value: u64) -> Outcome {
        let at = self.here(offset);
        self.node.store(at, value).map_err(|error| self.who.failed("a word", error))
    }

    fn word(&self, _: Side, offset: usize) -> Outcome<u64> {
        self.node.load(self.here(offset)).map_err(|error| self.who.failed("a word", error))
    }

    #[inline(always)]
    fn put(&mut self, _: Side, from: usize, len: usize, to: usize) -> Outcome {
        let (from, to) = (self.slice(from, len), self.target(to));
        self.retry(|side| side.node.put(from, to, Notice::Silent)).map(drop)
    }

    #[inline(always)]
    fn put_signal(
        &mut self,
        _: Side,
        from: usize,
        len: usize,
        to: usize,
        word: usize,
        value: u64,
    ) -> Outcome {
        let (from, to) = (self.slice(from, len), self.target(to));
        let signal = Signal::set(self.there(word), value);
        self.retry(|side| side.node.put_signal(from, to, signal, Notice::Silent)).map(drop)
    }

    #[inline(always)]
    fn signal(&mut self, _: Side, word: usize, op: SignalOp, value: u64) -> Outcome {
        let signal = Signal { at: self.there(word), op, value };
        self.retry(|side| side.node.signal(signal, Notice::Silent)).map(drop)
    }

    #[inline(always)]
    fn get(&mut self, _: Side, into: usize, len: usize, from: usize) -> Outcome {
        let (into, from) = (self.slice(into, len), self.target(from));
        let issued = self.retry(|side| side.node.get(into, from, Notice::Report(0)))?;
        self.finish(issued).map(drop)
    }

    #[inline(always)]
    fn fetch_add(&mut self, _: Side, word: usize) -> Outcome<u64> {
        let (at, amo) =
            (self.there(word), Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 });
        let issued = self.retry(|side| side.node.start_fetch(at, amo))?;
        self.finish(issued)
    }

    #[inline(always)]
    fn wait(&mut self, _: Side, word: usize, cmp: Cmp, value: u64) -> Outcome<u64> {
        let (at, from) = (self.here(word), Some(self.peer));
        self.retry(|side| side.node.wait(at, cmp, value, from, SLICE))
    }

    fn quiet(&mut self, _: Side) -> Outcome {
        let peer = self.peer;
        self.retry(|side| side.node.quiet(peer, SLICE))
    }

    #[inline(always)]
    fn send(&mut self, _: Side, tag: u64, offset: usize, len: usize) -> Outcome<u64> {
        let (peer, slice) = (self.peer, self.slice(offset, len));
        if len <= self.eager {
            let start = self.views[Area::Buffer as usize];
            // SAFETY: the tests use offsets inside the buffer, and the call ends before anything
            // writes there.
            let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr().add(offset), len) };
            self.retry(|side| side.node.send(peer, tag, Source::Bytes(bytes), Notice::Silent))?;
            return Ok(0);
        }
        let issued = self.retry(|side| side.node.send(peer, tag, slice, Notice::Report(tag)))?;
        Ok(u64::from(matches!(issued, Issued::Pending(_))))
    }

    fn sent(&mut self, _: Side, mut count: u64) -> Outcome {
        while count != 0 {
            match self.node.next_completion() {
                Some(end) if end.outcome == Ended::Done => count -= 1,
                Some(end) => return Err(self.who.failed("a send", Error::Failed(end.outcome))),
                None => {
                    self.node.progress();
                    self.idle()?;
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn recv(
        &mut self,
        _: Side,
        tag: u64,
        offset: usize,
        len: usize,
        word: u64,
    ) -> Outcome<Request> {
        let (from, into) = (Some(self.peer), self.slice(offset, len));
        self.retry(|side| side.node.post_recv(from, tag, Tag::ZERO, into, word))
    }

    #[inline(always)]
    fn received(&mut self, _: Side, request: Request) -> Outcome {
        let status = self.retry(|side| side.node.wait_recv(request, SLICE))?;
        self.right(status).map(drop)
    }

    #[inline(always)]
    fn next_recv(&mut self, _: Side) -> Outcome<u64> {
        loop {
            if let Some(status) = self.node.next_recv() {
                self.turn()?;
                return self.right(status);
            }
            self.node.progress();
            self.idle()?;
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

    fn ring(&mut self, job: &Job, histogram: Option<&mut Histogram>) -> Outcome<Tally> {
        ring::run(self, job, histogram)
    }
}
