//! Runs a measurement between two processes. The leader orders each job and writes the rows. The
//! follower runs the same jobs.
//!
//! Both exchange messages over the connection of [`meet`](super::meet). The leader sends its order,
//! both report that they are ready, and finally both send their results. Neither sends anything
//! while a job is timed.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate::bootstrap::BootstrapError;
use fishplate_core::error::PeerError;
use fishplate_core::mem::RailId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::endpoint::Endpoint;
use super::job::{Job, SLOTS_AT, Tally};
use super::meet::Met;
use super::open::Opened;
use super::setup::Setup;
use super::steps::{self, Span};
use super::{Files, always_checks, finish_row, headline, prepare, run_job};
use crate::args::{IpcPath, Plan, Test, Transport, name};
use crate::clock::monotonic_ns;
use crate::cpu::{self, Pinned, Places};
use crate::failure::{Failure, Outcome, note};
use crate::floor::{AMPLE, Floor, Floors, PAD_LEN, Pad};
use crate::histogram::Histogram;
use crate::interrupt;
use crate::progress::Progress;
use crate::rails::Rails;
use crate::report::{Moved, Report, Row};
use crate::sizes;

const _: () = assert!(PAD_LEN <= super::endpoint::AREAS_AT);

#[cfg(test)]
mod orders;

/// Maximum number of times that a row is measured again because the floor changed.
const REPEATS: u32 = 3;

/// Bytes that memcpy copies between two clock reads.
const COPY_BYTES: usize = 64 << 20;

/// Time that the first process waits for a failed second process to exit.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Longer than the leader waits, so that the leader reports the error first.
const PATIENCE: Duration = Duration::from_secs(5);

/// Interval between checks that the other side is alive, while a side waits for its message, in
/// nanoseconds.
const LOOK_NS: u64 = 10_000_000;

/// Time that a side waits after it has lost the other side: for a last message, and for the other
/// process to exit.
const GRACE: Duration = Duration::from_millis(500);

const PART: Duration = Duration::from_secs(10);

const LONG: u64 = 20_000_000;
const LONG_TIME: Duration = Duration::from_secs(2);

#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// The greeting: the leader's version and test, and the processors of both sides.
    Hello {
        version: String,
        test: Test,
        places: Places,
    },
    Floor,
    Measure(Job),
    Done,
}

#[derive(Debug, Serialize, Deserialize)]
struct Greeting {
    refusal: Option<String>,
}

pub struct Session<const STARTS: bool> {
    side: Endpoint<STARTS>,
    met: Met,
    transport: Transport,
    pad: Option<Pad>,
    timeout: Duration,
    /// The counts of device-memory copies when the last row began.
    moved: Option<Moved>,
    /// The counts of the rails when the last row ended.
    rails: Rails,
}

impl<const STARTS: bool> Session<STARTS> {
    pub fn join(setup: &Setup, opened: Opened, mut met: Met) -> Outcome<Self> {
        let side = match setup.join::<STARTS>(opened, &mut met) {
            Ok(side) => side,
            Err(failure) => return Err(met.explain(failure)),
        };
        // SAFETY: the memory is page-aligned, and mapped as long as the node exists. The words of
        // the areas lie behind the pad.
        let pad = side.common.map(|start| unsafe { Pad::new(start) });
        let (transport, timeout) = (setup.transport, setup.timeout);
        Ok(Session { side, met, transport, pad, timeout, moved: None, rails: Rails::default() })
    }

    fn talk(&mut self, word: &[u8], deadline: Instant) -> Outcome<Vec<u8>> {
        let (side, mut looked, mut lost) = (&mut self.side, monotonic_ns(), None);
        let heard = self.met.wire.exchange(word, deadline, || {
            let events = side.node.progress();
            let now = monotonic_ns();
            if now.wrapping_sub(looked) >= LOOK_NS {
                looked = now;
                interrupt::check().ok()?;
                let why = side.node.peer_error(side.peer).unwrap_or(Some(PeerError::Closed));
                lost = lost.or(why.map(|why| (why, Instant::now() + GRACE)));
            }
            // A side closes its rails after its last message, but this side may see the close
            // before the message arrives.
            match lost {
                Some((_, until)) if Instant::now() >= until => None,
                _ => Some(events),
            }
        });
        interrupt::check()?;
        heard.map_err(|error| match (error, lost) {
            (BootstrapError::Stopped | BootstrapError::HungUp, Some((why, _))) => {
                self.side.who.lost(why)
            }
            (BootstrapError::Deadline, _) => {
                Failure::run(format!("{} did not answer in time", self.side.who))
            }
            (error, _) => self.side.who.gone(error),
        })
    }

    fn exchange<W: Serialize, A: DeserializeOwned>(&mut self, word: &W) -> Outcome<A> {
        let text = serde_json::to_vec(word)
            .map_err(|error| Failure::run(format!("cannot write a message: {error}")))?;
        // A job may use up the whole time limit, on either side.
        let deadline = Instant::now() + self.timeout + Duration::from_secs(5);
        let answer = self.talk(&text, deadline)?;
        serde_json::from_slice(&answer).map_err(|error| {
            Failure::run(format!(
                "{} sent an invalid message ({}); run the same build on both sides",
                self.side.who,
                plain(&error.to_string())
            ))
        })
    }

    fn order(&mut self, order: Order) -> Outcome {
        self.exchange::<Order, ()>(&order)
    }

    fn ready(&mut self) -> Outcome {
        self.exchange::<(), ()>(&())
    }

    /// Measures the floor. Returns `None` if both sides share one processor, or share no memory.
    fn floor(&mut self) -> Outcome<Option<Floor>> {
        let Some(pad) = self.pad.filter(|_| !self.side.crowded) else {
            return Ok(None);
        };
        self.order(Order::Floor)?;
        let clock = self.side.clock;
        self.side.watch.set(self.timeout.as_nanos() as u64);
        let limit = AMPLE.min(self.timeout / 2);
        pad.measure(limit, &clock, &mut || self.side.check())
    }

    fn floor_after(&mut self, before: Option<Floor>) -> Outcome<Option<Floor>> {
        before.map_or(Ok(None), |_| self.floor())
    }

    fn job(&mut self, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
        job.check_bounds(self.transport, job.size)?;
        self.order(Order::Measure(*job))?;
        prepare(&mut self.side, job)?;
        self.ready()?;
        let tally = run_job(&mut self.side, job, histogram)?;
        let answer: Tally = self.exchange(&tally)?;
        Ok(tally.both(answer, job.is_two_way()))
    }

    fn copy(&self, job: &Job) -> f64 {
        let count = (COPY_BYTES / job.size).clamp(1, 1 << 20);
        let (slots, clock) = (job.slots() as usize, self.side.clock);
        let [landing, buffer] = self.side.views;
        let begun = clock.now();
        for k in 0..count {
            let offset = k % slots * job.stride();
            // SAFETY: the slots lie inside both areas, which do not overlap; the follower waits for
            // an order.
            unsafe { copy(buffer.add(offset), landing.add(SLOTS_AT + offset), job.size) };
        }
        (count * job.size) as f64 / (clock.ns(clock.now().wrapping_sub(begun)) * 1e-9)
    }

    /// Orders all jobs, and writes their rows. The inner error means that a row has wrong data.
    fn lead_all(&mut self, plan: &Plan, files: &mut Files) -> Outcome<Outcome> {
        let hello = Order::Hello {
            version: env!("CARGO_PKG_VERSION").into(),
            test: plan.test,
            places: plan.places,
        };
        self.order(hello)?;
        let greeting: Greeting = self.exchange(&())?;
        if let Some(refusal) = greeting.refusal {
            return Err(Failure::run(plain(&refusal)));
        }
        let mut report = Report::new(plan.format);
        headline(&mut report, plan, &self.side.clock)?;
        for note in &self.met.notes {
            report.comment(note)?;
        }
        let total: u64 = plan.sizes.iter().map(|&size| Job::of(plan, size).iters).sum();
        let long = total >= LONG || plan.duration.is_some_and(|each| each >= LONG_TIME);
        let progress = Progress::new(plan.sizes.len() as u64 * 2, long);
        let mut fault = Ok(());
        for &size in &plan.sizes {
            let row = self.measure(plan, size, &progress, files)?;
            let check = plan.check || always_checks(plan.test);
            let mut notes = row.failover.as_ref().map_or(vec![], |it| self.side.what_happened(it));
            let written = progress.around(|| finish_row(&mut report, files, row, check));
            fault = fault.and(written);
            notes.extend(self.side.out_of_use());
            for note in notes {
                report.comment(&note)?;
            }
        }
        drop(progress);
        self.order(Order::Done)?;
        Ok(fault)
    }

    /// Ends the run. Each side closes its node only after both have finished.
    fn part(mut self) -> Outcome<Met> {
        self.ready()?;
        let Session { side: Endpoint { node, who, .. }, met, timeout, .. } = self;
        node.close(timeout.min(PART)).map_err(|error| who.failed("the shutdown", error))?;
        Ok(met)
    }

    fn half(&mut self, plan: &Plan, job: Job, histogram: &mut Histogram) -> Outcome<(Tally, u64)> {
        let span = match plan.duration {
            Some(all) => Span::new(all / 2, self.timeout),
            None => Span::new(self.timeout / 4, self.timeout),
        };
        let tally = match plan.iters {
            Some(_) => self.job(&job, histogram).map(|tally| (tally, job.iters)),
            None => steps::run(job, span, histogram, |job, histogram| self.job(job, histogram)),
        };
        let each = if job.is_windowed() { job.per_window() } else { 1 };
        tally.map_err(|failure| failure.after(histogram.samples() * each, plan.iters))
    }

    /// Measures one row: two halves, with the floor before, between and after them. Repeats the row
    /// if the floor changed.
    fn measure(
        &mut self,
        plan: &Plan,
        size: usize,
        progress: &Progress,
        files: &mut Files,
    ) -> Outcome<Row> {
        let mut histogram = Histogram::new();
        let job = Job::of(plan, size);
        let [one, two] = job.halves();
        let mut repeats = 0;
        loop {
            histogram.clear();
            progress.begin(format!("{} {}", name(plan.test), sizes::show(size)));
            let compare = plan.test == Test::Put && self.side.device.is_none();
            let mut copied = Vec::new();
            let mut copy = |session: &Self| {
                if compare {
                    copied.push(session.copy(&job))
                }
            };
            let before = self.floor()?;
            copy(self);
            let (first, some) = self.half(plan, one, &mut histogram)?;
            progress.step();
            copy(self);
            let between = self.floor_after(before)?;
            let (second, more) = match two.iters {
                0 => (Tally::default(), 0),
                _ => self.half(plan, two, &mut histogram)?,
            };
            progress.step();
            copy(self);
            let after = self.floor_after(between)?;
            let floors =
                before.zip(between).zip(after).map(|((a, b), c)| Floors { taken: [a, b, c] });
            if let Some(Floors { taken: [a, b, c] }) = floors.filter(|floors| !floors.steady())
                && repeats < REPEATS
            {
                repeats += 1;
                progress.extend(2);
                progress.around(|| {
                    note(format_args!(
                        "# floor changed ({:.1}, {:.1}, {:.1} ns): measuring {} again",
                        a.ns,
                        b.ns,
                        c.ns,
                        sizes::show(size)
                    ));
                });
                continue;
            }
            let tally = first.and(second);
            let clock = &self.side.clock;
            let mut row = Row::new(plan, size);
            row.rate(tally.ops, clock.ns(tally.ticks) * 1e-9);
            row.iters = some + more;
            row.lat_ns = histogram.summary(clock, job.divisor());
            if let Some(file) = &mut files.histogram {
                file.add(plan.test, size, &histogram, clock, job.divisor())?;
            }
            row.processor(tally.ops, tally.cpu_ns, tally.peer_cpu_ns);
            let floor = floors.map(|floors| floors.median());
            row.floor_ns = floor.map(|floor| floor.ns);
            row.floor_apart_ns = floor.map(|floor| floor.apart_ns);
            row.checked = tally.checked;
            row.errors = tally.errors;
            row.signals_misordered = tally.misordered;
            row.arrivals_out_of_order = tally.out_of_order;
            row.window = plan.window;
            row.layout = (plan.test == Test::PutSignal).then_some(job.layout);
            if let (Test::PutSignal | Test::Tag | Test::Ring, Some(latency)) =
                (plan.test, row.lat_ns)
            {
                row.p50_over_floor = row.floor_ns.map(|floor| latency.p50 / floor);
                row.p50_over_apart = row.floor_apart_ns.map(|floor| latency.p50 / floor);
            }
            copied.sort_by(f64::total_cmp);
            row.memcpy_bytes_per_s = copied.get(copied.len() / 2).copied();
            row.repeats = repeats;
            row.floor_unsteady = floors.is_some_and(|floors| !floors.steady());
            let moved = self.side.moved();
            row.moved = moved.map(|now| now.since(self.moved.unwrap_or_default()));
            self.moved = moved;
            if plan.rails > 1 {
                let rails = self.side.rails();
                row.failover = Some(rails.since(&self.rails));
                self.rails = rails;
            }
            let relayed = row.moved.map_or(0, |moved| moved.relayed);
            if plan.ipc_path == IpcPath::Direct && relayed != 0 {
                return Err(Failure::run(format!(
                    "--ipc-path direct: {relayed} copies of {} bytes went through bounce slots, \
                     because the devices do not reach each other; use --ipc-path auto",
                    job.size
                )));
            }
            return Ok(row);
        }
    }

    /// Follows the leader's orders, then closes the node. If the user started this side, fails if
    /// data was wrong. Otherwise the leader reports wrong data.
    pub fn follow(mut self, region: usize, expected: Option<Test>) -> Outcome {
        let wrong = match self.follow_all(region, expected) {
            Ok(wrong) => wrong,
            Err(failure) => return Err(self.explain(failure)),
        };
        self.part()?;
        match wrong == 0 || expected.is_none() {
            true => Ok(()),
            false => Err(Failure::run(format!("{wrong} iterations had wrong data"))),
        }
    }

    /// Follows the leader's orders. Returns the number of iterations with wrong data.
    fn follow_all(&mut self, region: usize, expected: Option<Test>) -> Outcome<u64> {
        let _pinned = self.greet(expected)?;
        let mut wrong = 0;
        loop {
            match self.exchange::<(), Order>(&())? {
                Order::Hello { .. } => {
                    return Err(Failure::run("the other process sent its greeting twice"));
                }
                Order::Floor => {
                    self.side.watch.set(self.timeout.as_nanos() as u64);
                    let Session { pad, side, .. } = self;
                    let pad = pad.ok_or_else(|| {
                        Failure::run(
                            "the other process asked to measure the floor, but the two share no \
                             memory",
                        )
                    })?;
                    pad.answer(&mut || side.check())?;
                }
                Order::Measure(job) => {
                    job.check_bounds(self.transport, region).map_err(|failure| {
                        Failure::run(format!("{} sent an invalid order: {failure}", self.side.who))
                    })?;
                    // If the user started this side, its own timeout applies. Otherwise the leader
                    // gives up first.
                    let own =
                        self.timeout + if expected.is_some() { Duration::ZERO } else { PATIENCE };
                    let job = Job { timeout_ns: own.as_nanos() as u64, ..job };
                    prepare(&mut self.side, &job)?;
                    self.ready()?;
                    let tally = run_job(&mut self.side, &job, &mut Histogram::new())?;
                    wrong += tally.errors + tally.misordered;
                    let _: Tally = self.exchange(&tally)?;
                }
                Order::Done => return Ok(wrong),
            }
        }
    }

    fn greet(&mut self, expected: Option<Test>) -> Outcome<Option<Pinned>> {
        let Order::Hello { version, test, places } = self.exchange(&())? else {
            return Err(Failure::run("the other process did not begin with its greeting"));
        };
        let ours = env!("CARGO_PKG_VERSION");
        let refusal = match expected {
            _ if version != ours => Some(format!(
                "one side is version {}, the other {ours}: run the same build on both sides",
                plain(&version)
            )),
            Some(expected) if expected != test => Some(format!(
                "one side was started for {}, the other for {}; use the same test on both sides",
                name(expected),
                name(test)
            )),
            _ => None,
        };
        let () = self.exchange(&Greeting { refusal: refusal.clone() })?;
        if let Some(refusal) = refusal {
            return Err(Failure::run(refusal));
        }
        places.cpus.map(|(_, second)| cpu::pin(second)).transpose()
    }
}

impl<const STARTS: bool> Session<STARTS> {
    /// Runs the plan as the leader. If this process started the second process, waits for it to
    /// exit.
    pub fn lead(mut self, plan: &Plan, files: &mut Files) -> Outcome {
        let fault = match self.lead_all(plan, files) {
            Ok(fault) => fault,
            Err(failure) => return Err(self.explain(failure)),
        };
        let met = self.part()?;
        fault.and(met.second.map_or(Ok(()), |second| second.leave()))
    }

    /// If the other side was lost, adds the state of its process and of the rails to the error.
    fn explain(&mut self, failure: Failure) -> Failure {
        let Failure::Lost(mut message) = self.met.explain(failure.clone()) else { return failure };
        let out_of_use = self.side.out_of_use();
        if !out_of_use.is_empty() {
            return Failure::Lost(format!("{message}; {}", out_of_use.join("; ")));
        }
        for (number, info) in self.side.node.rails().iter().enumerate() {
            if let Some(text) = self.side.node.last_error(RailId(info.id.0)) {
                message += &format!("; rail {number} reports: {text}");
            }
        }
        Failure::Lost(message)
    }
}

impl Met {
    fn explain(&mut self, failure: Failure) -> Failure {
        let Failure::Lost(message) = failure else { return failure };
        if let Some(second) = &mut self.second {
            let (id, fate) = (second.id(), second.fate(LAST_WORDS));
            return Failure::Lost(format!("{message}; process {id} {fate}"));
        }
        let until = Instant::now() + GRACE;
        while self.wire.is_open() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        Failure::Lost(match self.wire.is_open() {
            true => format!("{message}; its process is still alive"),
            false => format!("{message}; its process has ended"),
        })
    }
}

/// Makes text from another process printable: removes control characters, and truncates it.
fn plain(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(200).collect()
}

/// # Safety
/// Both pointers are valid for `len` bytes, and the ranges do not overlap.
#[inline(never)]
unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    // SAFETY: our caller guarantees the same contract.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
}
