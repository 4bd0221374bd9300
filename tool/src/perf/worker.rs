//! The tests with a worker: for the length of a leg, a second thread drives the engine, and the one
//! that measures goes through a [`Context`].
//!
//! Both block, until the leg's deadline at the latest: they spin, then park, as
//! [`Policy::BALANCED`] says, and are woken by each other or by the rail's wait object. Without one
//! the worker does not sleep. The thread is started, and all memory taken, before the first
//! iteration. One loop serves all parts: two processes play a side each, and loopback plays both in
//! turn.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fishplate_core::context::{Context, Ticket};
use fishplate_core::engine::Signal;
use fishplate_core::engine::command::{Command, Reply};
use fishplate_core::engine::protocol::Received;
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::worker::Worker;
use fishplate_core::error::{OpError, Stuck, WaitError};
use fishplate_core::mem::{LocalId, PeerId, RemoteId};
use fishplate_core::op::{Amo, AmoOp, Cmp, SignalOp};
use fishplate_core::queue::QueueStorage;
use fishplate_core::rail::Rail;
use fishplate_core::sync::{event::Channels, spin::Policy};
use fishplate_sys::LinuxHost;

use super::leg::{Leg, SLOTS_AT, Side, Tally};
use super::put::SIGNALS;
use super::put_signal::comes_late;
use super::seat::{CONTEXT, Seat};
use super::tag;
use super::watch::Watch;
use super::who::Who;
use crate::args::Test;
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::payload::Pattern;

/// Requests that may be on their way to the worker.
const REQUESTS: usize = 64;

/// Runs a leg as one side of it, or as both. Returns the engine, idle if the leg went well.
pub fn run<R: Rail + Send, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    sides: &[Side],
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let host = seat.waiter.host();
    let (channels, stop) = (<Channels>::new(), AtomicBool::new(false));
    let mut room = QueueStorage::<REQUESTS>::new();
    let (context, consumer) = Context::new(CONTEXT, host, channels.queue(0), room.memory(), Policy::BALANCED)
        .map_err(|error| Failure::run(format!("cannot set up a context: {error}")))?;
    let mut consumers = [consumer];
    let deadline_ns = seat.watch.deadline_ns();
    let user = User {
        context,
        sides,
        leg,
        clock: seat.clock,
        name: seat.name.clone(),
        peer: seat.peer,
        theirs: seat.theirs,
        arena: (seat.ours, seat.arena),
        buffer: (seat.buffer, seat.bytes),
        watch: seat.watch,
        tally: Tally::default(),
    };
    let arrivals = seat.bell.as_deref();
    let mut worker = Worker::new(&mut seat.engine, &mut consumers, Policy::BALANCED);
    let tally = thread::scope(|scope| {
        let (send, stop) = (&channels.send, &stop);
        let running = thread::Builder::new()
            .spawn_scoped(scope, move || worker.run(host, send, arrivals, stop, deadline_ns))
            .map_err(|error| {
                Failure::run(format!("cannot start a worker: {error}; raise ulimit -v or ulimit -u"))
            })?;
        let tally = user.play(histogram);
        // Release: pairs with the worker's load; it finds in its ring what was submitted before.
        stop.store(true, Ordering::Release);
        send.notify(host);
        match running.join() {
            Ok(true) => tally,
            // If the leg failed too, it knows better why.
            Ok(false) => tally.and(Err(Failure::run("the worker did not come to an end in time"))),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    });
    // The thread that measures does not see what the engine misses.
    let mut tally = match tally {
        Err(Failure::Run(_)) if seat.watch.is_up() => return Err(seat.expired()),
        tally => tally?,
    };
    if leg.test == Test::Amo && sides.contains(&Side::Answers) {
        tally.errors += u64::from(seat.word(SLOTS_AT).load(Ordering::Acquire) != leg.warmup + leg.iters);
    }
    Ok(tally)
}

/// The thread that measures.
struct User<'c> {
    context: Context<'c, LinuxHost>,
    sides: &'c [Side],
    leg: &'c Leg,
    clock: Clock,
    name: Who,
    peer: PeerId,
    theirs: RemoteId,
    arena: (LocalId, NonNull<u8>),
    buffer: (LocalId, NonNull<u8>),
    watch: Watch,
    tally: Tally,
}

impl User<'_> {
    fn play(mut self, histogram: &mut Histogram) -> Outcome<Tally> {
        let Leg { test, warmup, iters, check, .. } = *self.leg;
        let mut discarded = Histogram::new();
        for (first, count, histogram) in [(0, warmup, &mut discarded), (warmup, iters, histogram)] {
            // What went wrong before counts, what went right does not.
            self.tally.checked = 0;
            let begun = self.clock.now();
            match test {
                Test::PutSignal => self.ping_pong(first + 1, count, histogram)?,
                Test::Put => self.put(first, count, histogram)?,
                Test::Get | Test::Amo => self.one_by_one(first, count, histogram)?,
                Test::Tag => self.tagged(first + 1, count, histogram)?,
                Test::SignalRate | Test::TagBw | Test::Ring | Test::Pool => {
                    return Err(Failure::usage("--mode worker cannot do that"));
                }
            }
            self.tally.ticks = self.clock.now().wrapping_sub(begun);
        }
        self.tally.ops = if self.leg.is_two_way() { 2 * iters } else { iters };
        // Ends the other side's wait where nothing has.
        if !matches!((test, check), (Test::PutSignal, _) | (Test::Put, true)) {
            self.hand_over(1, |_| ())?;
        }
        self.quiet()?;
        Ok(self.tally)
    }

    /// Messages to and fro, from number `first` on.
    fn ping_pong(&mut self, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let (place, len, seed) = (self.leg.placement(), self.leg.size, self.leg.seed);
        let mut last = self.clock.now();
        for seq in first..first + count {
            // The operation before may still read the other source.
            let from = (seq & 1) * len.next_multiple_of(64) as u64;
            let mut whole = true;
            for (sender, receiver) in [(Side::Starts, Side::Answers), (Side::Answers, Side::Starts)] {
                let way = sender as usize;
                let pattern = Pattern::new(seed, way as u64, seq);
                if self.plays(sender) {
                    self.fill(from as usize, pattern);
                    let signal = self.signal(place.signal[way], seq);
                    let (from, to) = (self.buffer.0.at(from), self.theirs.at(place.payload[way] as u64));
                    self.submit(Command::PutSignal { from, len, to, signal })?;
                }
                if self.plays(receiver) {
                    self.wait(place.signal[way], seq)?;
                    whole &= self.leg.check && self.arrived(place.payload[way], pattern);
                }
            }
            self.record(histogram, &mut last)?;
            self.tally.checked += u64::from(whole);
        }
        Ok(())
    }

    /// Tagged messages to and fro, from number `first` on.
    fn tagged(&mut self, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let (len, seed, inward) = (self.leg.size, self.leg.seed, tag::inward_of(self.leg));
        let peer = self.peer;
        let mut last = self.clock.now();
        for seq in first..first + count {
            let (number, mut whole) = (Tag::from(seq), true);
            for (sender, receiver) in [(Side::Starts, Side::Answers), (Side::Answers, Side::Starts)] {
                let pattern = Pattern::new(seed, sender as u64, seq);
                let into = self.buffer.0.at(inward as u64);
                let receive = match self.plays(receiver) {
                    true => Some(
                        self.ask(|context| context.recv(Some(peer), number, Tag::ZERO, Some((into, len))))?,
                    ),
                    false => None,
                };
                if self.plays(sender) {
                    self.fill(0, pattern);
                    let from = self.buffer.0.at(0);
                    let sent = self.ask(|context| context.send(peer, number, Some((from, len))))?;
                    self.done("a send", sent)?;
                }
                let Some(receive) = receive else { continue };
                self.done("a receive", receive)?;
                if self.leg.check && !self.is_there(self.buffer.1, inward, pattern) {
                    (whole, self.tally.errors) = (false, self.tally.errors + 1);
                }
            }
            self.record(histogram, &mut last)?;
            self.tally.checked += u64::from(whole && self.leg.check);
        }
        Ok(())
    }

    /// Waits until a request is done. Returns the value that it fetched, or 0.
    fn done(&mut self, what: &str, ticket: Ticket) -> Outcome<u64> {
        match self.context.wait(ticket, self.watch.deadline_ns()) {
            Ok(Reply::Done(value)) => Ok(value),
            Ok(Reply::Received(status)) if status.outcome == Received::Ok => Ok(0),
            Ok(reply) => Err(self.name.replied(what, reply)),
            Err(error) => Err(self.name.wait_failed(error)),
        }
    }

    /// Windows of puts, each with a quiet. Checked:
    /// the other side verifies each before the next begins.
    fn put(&mut self, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let Leg { size: len, seed, check, .. } = *self.leg;
        let (stride, slots, per_window) = (self.leg.stride(), self.leg.slots(), self.leg.per_window());
        let mut last = self.clock.now();
        for window in first / per_window + 1..=(first + count) / per_window {
            let pattern = |slot| Pattern::new(seed, window, slot);
            if self.plays(Side::Starts) {
                (0..slots).for_each(|slot| self.fill(slot as usize * stride, pattern(slot)));
                for k in 0..per_window {
                    let offset = k % slots * stride as u64;
                    let (from, to) = (self.buffer.0.at(offset), self.theirs.at(SLOTS_AT as u64 + offset));
                    self.submit(Command::Put { from, len, to })?;
                }
            }
            self.quiet()?;
            if check {
                self.hand_over(window, |user| {
                    for slot in 0..slots {
                        let offset = SLOTS_AT + slot as usize * stride;
                        user.verified(user.is_there(user.arena.1, offset, pattern(slot)));
                    }
                })?;
            }
            self.record(histogram, &mut last)?;
        }
        Ok(())
    }

    /// Gets or fetch-adds, each from submission to answer. The side that answers only waits.
    fn one_by_one(&mut self, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let Leg { test, size: len, seed, check, .. } = *self.leg;
        let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
        if !self.plays(Side::Starts) {
            return Ok(());
        }
        for k in first..first + count {
            let slot = if test == Test::Amo { 0 } else { k % self.leg.slots() };
            let offset = slot as usize * self.leg.stride();
            let (into, from) = (self.buffer.0.at(offset as u64), self.theirs.at((SLOTS_AT + offset) as u64));
            let mut last = self.clock.now();
            let ticket = self.ask(|context| match test {
                Test::Amo => context.fetch(from, amo),
                _ => context.get(into, len, from),
            })?;
            let value = self.done("an operation", ticket)?;
            self.record(histogram, &mut last)?;
            if test == Test::Amo {
                self.verified(value == k);
            } else if check {
                self.verified(self.is_there(self.buffer.1, offset, Pattern::new(seed, 0, slot)));
                // SAFETY: the slot lies inside the buffer, and the get has ended.
                // The next cannot pass for it.
                unsafe { self.buffer.1.add(offset).write(!self.buffer.1.add(offset).read()) };
            }
        }
        Ok(())
    }

    /// The side that starts announces something; the side that answers checks it and says so.
    fn hand_over(&mut self, number: u64, look: impl FnOnce(&mut Self)) -> Outcome {
        let [there, seen] = SIGNALS;
        if self.plays(Side::Starts) {
            self.submit(Command::Signal(self.signal(there, number)))?;
        }
        if self.plays(Side::Answers) {
            self.wait(there, number)?;
            look(self);
            self.submit(Command::Signal(self.signal(seen, number)))?;
        }
        if self.plays(Side::Starts) { self.wait(seen, number).map(drop) } else { Ok(()) }
    }

    fn plays(&self, side: Side) -> bool {
        self.sides.contains(&side)
    }

    fn signal(&self, word: usize, value: u64) -> Signal {
        Signal { at: self.theirs.at(word as u64), op: SignalOp::Set, value }
    }

    /// Asks until the worker has room.
    fn ask<T>(&mut self, ask: impl Fn(&mut Context<'_, LinuxHost>) -> Result<T, OpError>) -> Outcome<T> {
        loop {
            match ask(&mut self.context) {
                Ok(asked) => return Ok(asked),
                Err(OpError::Again) if !self.watch.is_up() => thread::yield_now(),
                Err(_) => return Err(Failure::run("the worker takes no more operations")),
            }
        }
    }

    /// Submits what nobody waits for; quiet says if it failed.
    fn submit(&mut self, command: Command) -> Outcome {
        self.ask(|context| context.submit_silent(command))
    }

    fn wait(&mut self, word: usize, value: u64) -> Outcome<u64> {
        let (at, from) = (self.arena.0.at(word as u64), Some(self.peer));
        let waited = self.context.wait_signal(at, Cmp::Eq, value, from, self.watch.deadline_ns());
        waited.map_err(|error| self.name.wait_failed(error))
    }

    fn quiet(&mut self) -> Outcome {
        self.context.quiet(self.peer, self.watch.deadline_ns()).map_err(|error| self.name.wait_failed(error))
    }

    /// Records a sample that ends now, where the next one begins. Now and then looks whether the
    /// time is up; the engine's thread looks whether the peer lives.
    fn record(&mut self, histogram: &mut Histogram, last: &mut u64) -> Outcome {
        match self.watch.lap(histogram, last) && self.watch.is_up() {
            true => Err(self.name.wait_failed(WaitError::Deadline(Stuck::default()))),
            false => Ok(()),
        }
    }

    /// Writes a source, which no operation reads any more, if anybody will look.
    fn fill(&self, offset: usize, pattern: Pattern) {
        if self.leg.check {
            // SAFETY: the sources of every test lie inside the buffer.
            unsafe { pattern.fill(self.buffer.1.add(offset).as_ptr(), self.leg.size) };
        }
    }

    /// Whether a payload is where it belongs, in the arena or in the buffer.
    fn is_there(&self, base: NonNull<u8>, offset: usize, pattern: Pattern) -> bool {
        // SAFETY: so do their targets, in the arena and in the buffer, which is as large.
        unsafe { pattern.verify(base.add(offset).as_ptr(), self.leg.size) }
    }

    fn verified(&mut self, right: bool) {
        self.tally.checked += u64::from(right);
        self.tally.errors += u64::from(!right);
    }

    /// Whether a payload came with its signal. Otherwise finds out if it is late or wrong.
    fn arrived(&mut self, offset: usize, pattern: Pattern) -> bool {
        let whole = self.is_there(self.arena.1, offset, pattern);
        if !whole {
            // SAFETY: as in `is_there`.
            let late = unsafe { comes_late(self.arena.1.add(offset).as_ptr(), self.leg.size, pattern) };
            self.tally.misordered += u64::from(late);
            self.tally.errors += u64::from(!late);
        }
        whole
    }
}
