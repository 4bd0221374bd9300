//! Two processes that measure together:
//! the leader orders each leg and writes the rows; the other follows.
//!
//! They talk aside, over what brought them together ([`Talk`]), in steps: the leader's order
//! against nothing, then both are ready, then both tell what they found. Neither talks while a leg
//! is timed. The floor is measured before, between and after the legs of a row, where both have
//! memory in common.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::rail::Rail;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::leg::{Leg, SLOTS_AT, Side, Tally};
use super::meet::Second;
use super::seat::Seat;
use super::{always_checks, answer_leg, finish_row, headline, prepare_leg, start_leg};
use crate::args::{Plan, Test, Transport, name};
use crate::cpu::{self, Pinned, Places};
use crate::failure::{Failure, Outcome};
use crate::floor::{AMPLE, Floors, Pad};
use crate::histogram::Histogram;
use crate::progress::Progress;
use crate::report::{Report, Row};
use crate::sizes;

/// How often a row is measured again because the floor moved.
const REPEATS: u32 = 3;

/// What memcpy copies between two looks at the clock, in bytes.
const COPY_BYTES: usize = 64 << 20;

/// Time for a second process that gives up to say why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How much longer than its leader a second process waits, so that the leader says what went wrong.
const PATIENCE: Duration = Duration::from_secs(5);

/// Iterations that tell how many there is time for, as long as there is time for more of them.
const TRIALS: [u64; 4] = [1, 16, 128, 1024];

/// Iterations before the measured ones of a step that follows another.
const STEP_WARMUP: u64 = 100;

/// Iterations from which a run is long enough for a progress bar.
const LONG: u64 = 20_000_000;

/// What the leader asks of the follower.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Who follows, and where it shall run.
    Hello { version: String, test: Test, places: Places },
    /// Measure the floor.
    Floor,
    /// Run a leg.
    Leg(Leg),
    /// It was all.
    Done,
}

/// What the follower says to a greeting.
#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    refusal: Option<String>,
}

/// How two processes talk beside what they measure.
pub trait Talk<R: Rail, const RAILS: usize> {
    /// Sends a message and waits for one, like the other side.
    /// Makes progress where the rails need it.
    fn exchange(&mut self, seat: &mut Seat<'_, R, RAILS>, word: &[u8], deadline: Instant)
    -> Outcome<Vec<u8>>;

    /// Adds to a row what the rails know of it.
    fn fill_in(&mut self, _seat: &mut Seat<'_, R, RAILS>, _row: &mut Row) {}

    /// Ends what both sides have in common, when both have nothing more to measure.
    fn part(&mut self, _seat: &mut Seat<'_, R, RAILS>) -> Outcome {
        Ok(())
    }

    /// Adds what is known of the other side's process, and what the rails have to say, to the news
    /// that it is lost.
    fn explain(&mut self, _seat: &Seat<'_, R, RAILS>, failure: Failure) -> Failure {
        failure
    }
}

/// One side that has met the other: its seat, and what they have in common.
pub struct Table<'m, R: Rail, const RAILS: usize, T> {
    /// Its seat.
    pub seat: Seat<'m, R, RAILS>,
    /// How it talks.
    pub talk: T,
    /// What it is reached by.
    pub transport: Transport,
    /// Memory for the floor, if both have some in common.
    pub pad: Option<Pad>,
    /// Time for a leg.
    pub timeout: Duration,
    /// What is to be said of the way between the two, above the rows.
    pub notes: Vec<String>,
}

impl<R: Rail + Send, const RAILS: usize, T: Talk<R, RAILS>> Table<'_, R, RAILS, T> {
    /// Tells the other side something and hears something from it.
    fn exchange<W: Serialize, A: DeserializeOwned>(&mut self, word: &W) -> Outcome<A> {
        let text = serde_json::to_vec(word)
            .map_err(|error| Failure::run(format!("cannot write a message: {error}")))?;
        // A leg may take all the time there is, on either side.
        let deadline = Instant::now() + self.timeout + Duration::from_secs(5);
        let answer = self.talk.exchange(&mut self.seat, &text, deadline)?;
        serde_json::from_slice(&answer).map_err(|error| {
            Failure::run(format!(
                "{} said what was not understood ({}): run the same build on both sides",
                self.seat.name,
                plain(&error.to_string())
            ))
        })
    }

    fn order(&mut self, order: Order) -> Outcome {
        self.exchange::<Order, ()>(&order)
    }

    /// Both sides are ready to go.
    fn ready(&mut self) -> Outcome {
        self.exchange::<(), ()>(&())
    }

    /// Nanoseconds; `None` where both sides share one processor, or no memory,
    /// and there is no floor.
    fn floor(&mut self) -> Outcome<Option<f64>> {
        let Some(pad) = self.pad.filter(|_| !self.seat.crowded) else {
            return Ok(None);
        };
        self.order(Order::Floor)?;
        let clock = self.seat.clock;
        self.seat.watch.set(self.timeout.as_nanos() as u64);
        let limit = AMPLE.min(self.timeout / 2);
        pad.measure(limit, &clock, &mut || self.seat.check())
    }

    /// As [`floor`](Self::floor), after another, without which there is no use in it.
    fn floor_after(&mut self, before: Option<f64>) -> Outcome<Option<f64>> {
        before.map_or(Ok(None), |_| self.floor())
    }

    fn leg(&mut self, leg: &Leg, histogram: &mut Histogram) -> Outcome<Tally> {
        leg.check_bounds(self.transport, leg.size)?;
        self.order(Order::Leg(*leg))?;
        prepare_leg(&mut self.seat, leg, Side::Starts)?;
        self.ready()?;
        let before = histogram.samples();
        let tally = start_leg(&mut self.seat, leg, histogram).map_err(|failure| {
            let done = (histogram.samples() - before) * if leg.is_windowed() { leg.per_window() } else { 1 };
            self.talk.explain(&self.seat, failure.after(done, leg.iters))
        })?;
        let answer: Tally = self.exchange(&tally)?;
        Ok(tally.both(answer, leg.is_two_way()))
    }

    /// What memcpy makes of the same buffers, in bytes per second.
    fn copy(&self, leg: &Leg) -> f64 {
        let count = (COPY_BYTES / leg.size).clamp(1, 1 << 20);
        let slots = leg.slots() as usize;
        let clock = self.seat.clock;
        let begun = clock.now();
        for k in 0..count {
            let offset = k % slots * leg.stride();
            // SAFETY: the slots lie inside the buffer and where payloads land, which do not
            // overlap; the follower waits for an order.
            unsafe {
                copy(self.seat.bytes.add(offset), self.seat.landing.add(SLOTS_AT + offset), leg.size);
            };
        }
        (count * leg.size) as f64 / (clock.ns(clock.now().wrapping_sub(begun)) * 1e-9)
    }

    /// Orders and writes.
    fn lead_all(&mut self, plan: &Plan) -> Outcome {
        self.seat.set_crowded(plan.places.crowded());
        let hello =
            Order::Hello { version: env!("CARGO_PKG_VERSION").into(), test: plan.test, places: plan.places };
        self.order(hello)?;
        let greeting: Greeting = self.exchange(&())?;
        if let Some(refusal) = greeting.refusal {
            return Err(Failure::run(plain(&refusal)));
        }
        let mut report = Report::new(plan.format);
        headline(&mut report, plan, &self.seat.clock)?;
        for note in &self.notes {
            report.comment(note)?;
        }
        let total: u64 = plan.sizes.iter().map(|&size| Leg::half(plan, size).iters * 2).sum();
        let progress = Progress::new(plan.sizes.len() as u64 * 2, total >= LONG);
        let mut fault = Ok(());
        for &size in &plan.sizes {
            let row = self.measure(plan, size, &progress)?;
            let check = plan.check || always_checks(plan.test);
            let written = progress.around(|| finish_row(&mut report, &row, check));
            fault = fault.and(written);
        }
        drop(progress);
        self.order(Order::Done)?;
        self.part()?;
        fault
    }

    /// Ends what both sides have in common. Neither leaves before both have said that they need
    /// nothing more of the other.
    fn part(&mut self) -> Outcome {
        self.talk.part(&mut self.seat)?;
        self.ready()
    }

    /// Half of a row: as many iterations as were asked for, or as there is time for. Returns how
    /// many.
    fn half(&mut self, plan: &Plan, leg: Leg, histogram: &mut Histogram) -> Outcome<(Tally, u64)> {
        match plan.iters {
            Some(_) => Ok((self.leg(&leg, histogram)?, leg.iters)),
            None => self.in_steps(leg, histogram),
        }
    }

    /// Runs a leg in steps, each a small part of the time there is by what the one before took, and
    /// stops when a quarter of that time is over. A machine that gets slower makes fewer iterations
    /// of it, not an error.
    fn in_steps(&mut self, leg: Leg, histogram: &mut Histogram) -> Outcome<(Tally, u64)> {
        let until = Instant::now() + self.timeout / 4;
        let most = self.timeout / 64;
        let mut discarded = Histogram::new();
        let mut each = Duration::ZERO;
        for few in TRIALS {
            if leg.iters <= few {
                break;
            }
            each = self.step(leg.with_iters(few, 0), &mut discarded)?.1;
            if each.saturating_mul(8 * few as u32) > most {
                break;
            }
        }
        let (mut tally, mut done) = (Tally::default(), 0);
        let mut warmup = leg.warmup;
        while done < leg.iters {
            let fit = most.as_nanos().checked_div(each.as_nanos()).map_or(leg.iters, |fit| fit as u64);
            let iters = fit.clamp(1, leg.iters - done);
            let step = leg.with_iters(iters, warmup.min(iters));
            let (found, took) = self.step(step, histogram)?;
            (tally, done, each) = (tally.and(found), done + step.iters, took);
            // What follows at once need not warm up for long.
            warmup = leg.warmup.min(STEP_WARMUP);
            if Instant::now() >= until {
                break;
            }
        }
        Ok((tally, done))
    }

    /// Runs a leg. Returns what an iteration of it took, those before the measured ones included.
    fn step(&mut self, leg: Leg, histogram: &mut Histogram) -> Outcome<(Tally, Duration)> {
        let begun = Instant::now();
        let tally = self.leg(&leg, histogram)?;
        let count = u32::try_from(leg.iters + leg.warmup).unwrap_or(u32::MAX);
        Ok((tally, begun.elapsed() / count.max(1)))
    }

    /// One row: two halves between three floors, again if the floor moved.
    fn measure(&mut self, plan: &Plan, size: usize, progress: &Progress) -> Outcome<Row> {
        let mut histogram = Histogram::new();
        let leg = Leg::half(plan, size);
        let mut repeats = 0;
        loop {
            histogram.clear();
            progress.begin(format!("{} {}", name(plan.test), sizes::show(size)));
            let compare = plan.test == Test::Put && !self.seat.is_mirrored();
            let mut copied = Vec::new();
            let mut copy = |table: &Self| {
                if compare {
                    copied.push(table.copy(&leg))
                }
            };
            let before = self.floor()?;
            copy(self);
            let (first, some) = self.half(plan, leg, &mut histogram)?;
            progress.step();
            copy(self);
            let between = self.floor_after(before)?;
            let (second, more) = self.half(plan, leg, &mut histogram)?;
            progress.step();
            copy(self);
            let after = self.floor_after(between)?;
            let floors = before.zip(between).zip(after).map(|((a, b), c)| Floors { taken: [a, b, c] });
            if let Some(Floors { taken: [a, b, c] }) = floors.filter(|floors| !floors.steady())
                && repeats < REPEATS
            {
                repeats += 1;
                progress.around(|| {
                    eprintln!(
                        "# floor moved ({a:.1}, {b:.1}, {c:.1} ns): measuring {} again",
                        sizes::show(size)
                    );
                });
                continue;
            }
            let tally = first.and(second);
            let clock = &self.seat.clock;
            let mut row = Row::new(plan, size);
            row.rate(tally.ops, clock.ns(tally.ticks) * 1e-9);
            row.iters = some + more;
            row.lat_ns = histogram.summary(clock, leg.divisor());
            row.floor_ns = floors.map(|floors| floors.median());
            row.checked = tally.checked;
            row.errors = tally.errors;
            row.signals_misordered = tally.misordered;
            row.arrivals_out_of_order = tally.out_of_order;
            row.window = plan.window;
            row.layout = (plan.test == Test::PutSignal).then_some(leg.layout);
            row.p50_over_floor = match (plan.test, row.lat_ns, row.floor_ns) {
                (Test::PutSignal | Test::Tag | Test::Ring, Some(latency), Some(floor)) => {
                    Some(latency.p50 / floor)
                }
                _ => None,
            };
            copied.sort_by(f64::total_cmp);
            row.memcpy_bytes_per_s = copied.get(copied.len() / 2).copied();
            row.repeats = repeats;
            row.floor_unsteady = floors.is_some_and(|floors| !floors.steady());
            self.talk.fill_in(&mut self.seat, &mut row);
            return Ok(row);
        }
    }

    /// Does what the leader says.
    pub fn follow(&mut self, region: usize, expected: Option<Test>) -> Outcome {
        let _pinned = self.greet(expected)?;
        let mut wrong = 0;
        loop {
            match self.exchange::<(), Order>(&())? {
                Order::Hello { .. } => return Err(Failure::run("the other process greeted twice")),
                Order::Floor => {
                    self.seat.watch.set(self.timeout.as_nanos() as u64);
                    let Table { pad, seat, .. } = self;
                    let pad = pad.ok_or_else(|| {
                        Failure::run("the other process asks for a floor, and there is no memory for it")
                    })?;
                    pad.answer(&mut || seat.check())?;
                }
                Order::Leg(leg) => {
                    leg.check_bounds(self.transport, region).map_err(|failure| {
                        Failure::run(format!("{} orders what cannot be done: {failure}", self.seat.name))
                    })?;
                    // This side gives up when its own user said. One that was started by the other
                    // leaves that to it.
                    let own = self.timeout + if expected.is_some() { Duration::ZERO } else { PATIENCE };
                    let leg = Leg { timeout_ns: own.as_nanos() as u64, ..leg };
                    prepare_leg(&mut self.seat, &leg, Side::Answers)?;
                    self.ready()?;
                    let tally = answer_leg(&mut self.seat, &leg)
                        .map_err(|failure| self.talk.explain(&self.seat, failure))?;
                    wrong += tally.errors + tally.misordered;
                    let _: Tally = self.exchange(&tally)?;
                }
                Order::Done => {
                    self.part()?;
                    return match wrong == 0 || expected.is_none() {
                        true => Ok(()),
                        false => Err(Failure::run(format!("{wrong} iterations had wrong data"))),
                    };
                }
            }
        }
    }

    /// Hears who leads, agrees or refuses, and goes where it is told to.
    fn greet(&mut self, expected: Option<Test>) -> Outcome<Option<Pinned>> {
        let Order::Hello { version, test, places } = self.exchange(&())? else {
            return Err(Failure::run("the other process did not greet"));
        };
        let ours = env!("CARGO_PKG_VERSION");
        let refusal = match expected {
            _ if version != ours => Some(format!(
                "one side is version {}, the other {ours}: run the same build on both sides",
                plain(&version)
            )),
            Some(expected) if expected != test => Some(format!(
                "one side was started for {}, the other for {}: give both the same test",
                name(expected),
                name(test)
            )),
            _ => None,
        };
        let () = self.exchange(&Greeting { refusal: refusal.clone() })?;
        if let Some(refusal) = refusal {
            return Err(Failure::run(refusal));
        }
        self.seat.set_crowded(places.crowded());
        places.cpus.map(|(_, second)| cpu::pin(second)).transpose()
    }
}

/// What another process said, fit to be shown: not long, and nothing that a terminal obeys.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// Leads, at a table that `set` lays; and sees the second process off, if this one started it.
pub fn lead<R: Rail + Send, const RAILS: usize, T: Talk<R, RAILS>>(
    plan: &Plan,
    table: Outcome<Table<'_, R, RAILS, T>>,
    mut second: Option<Second>,
) -> Outcome {
    let outcome = table.and_then(|mut table| table.lead_all(plan));
    match (outcome, &mut second) {
        (Ok(()), _) => second.map_or(Ok(()), Second::leave),
        (Err(Failure::Lost(message)), Some(second)) => {
            // How it ended is worth knowing; if by itself, it says why.
            let how = second.ends(LAST_WORDS).unwrap_or_else(|| "has not ended".into());
            Err(Failure::Lost(format!("{message}; process {} {how}", second.id())))
        }
        (error, _) => error,
    }
}

/// # Safety
/// Both are valid for `len` bytes and do not overlap.
#[inline(never)]
unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
}
