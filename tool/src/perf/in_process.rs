//! [`InProcess`] runs both sides of a run in one thread. Either one engine has a loopback rail to
//! itself, or two engines share the simulated fabric.
//!
//! Nothing here waits: while operations are outstanding, the engines make passes in turn. The
//! number of passes without a completion is limited, so an operation that never completes is
//! reported with its seed.

use std::array;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fishplate::{FailoverStorage, Limits, MatchStorage, Storage};
use fishplate_core::engine::protocol::{MatchConfig, Payload, Received, Request, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{
    Config, ContextId, Engine, HANDLE_MAX, Issued, Notice, RailPolicy, Signal,
};
use fishplate_core::error::{AttachError, OpError};
use fishplate_core::mem::{
    LocalAddr, LocalId, PeerId, RailId, Region, RegionKind, RemoteAddr, RemoteId,
};
use fishplate_core::op::{Amo, AmoOp, Cmp, Outcome as Ended, SignalOp};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim, SimRail};

use super::endpoint::Mapped;
use super::job::{Job, SLOTS_AT, Side, Tally};
use super::steps::{self, Span};
use super::verbs::{Area, Verbs};
use super::watch::Watch;
use super::{Files, always_checks, finish_row, headline, prepare, run_job};
use crate::args::{Faults, Plan, SEED_ITERS, SIM_ITERS, Test, Trace, Transport, name};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::interrupt;
use crate::limits;
use crate::progress::Progress;
use crate::report::{Report, Row};
use crate::sizes;
use faults::{Counters, Ends, Record, Source};

mod faults;
mod ordered;

/// Passes without a completion after which an operation counts as hung.
const PATIENCE: u64 = 2_000_000;

const DEPTH: usize = 256;
const PACKETS: usize = 1024;

/// Each seed allocates its own tables, so there are fewer credits than between two processes.
const MATCHING: MatchConfig =
    MatchConfig { eager: 192, credits: 96, headers: 96, ..MatchConfig::DEFAULT };
const RECEIVES: usize = 1024;

const CONTEXT: ContextId = ContextId(0);

pub fn run(plan: &Plan, files: &mut Files) -> Outcome {
    let _pinned = plan.places.pin_first()?;
    plan.trace.as_deref().map_or(Ok(()), Trace::create)?;
    match plan.rails {
        1 => rows::<1>(plan, files),
        2 => rows::<2>(plan, files),
        3 => rows::<3>(plan, files),
        _ => rows::<4>(plan, files),
    }
}

fn rows<const RAILS: usize>(plan: &Plan, files: &mut Files) -> Outcome {
    let clock = Clock::calibrate();
    let mut report = Report::new(plan.format);
    headline(&mut report, plan, &clock)?;
    let steps = plan.sizes.len() as u64 * plan.seeds.unwrap_or(1);
    let progress = Progress::new(steps.div_ceil(100), plan.transport == Transport::Sim);
    let mut fault = Ok(());
    for &size in &plan.sizes {
        progress.begin(format!("{} {}", name(plan.test), sizes::show(size)));
        let row = row::<RAILS>(plan, size, clock, &progress, &report, files)?;
        let check = plan.check || plan.transport == Transport::Sim || always_checks(plan.test);
        let written = progress.around(|| finish_row(&mut report, files, row, check));
        fault = fault.and(written);
    }
    fault
}

fn row<const RAILS: usize>(
    plan: &Plan,
    size: usize,
    clock: Clock,
    progress: &Progress,
    report: &Report,
    files: &mut Files,
) -> Outcome<Row> {
    let default = match (plan.transport, plan.seeds) {
        (_, Some(_)) => Some(SEED_ITERS),
        (Transport::Sim, None) => Some(SIM_ITERS),
        _ => None,
    };
    let simulated = plan.transport == Transport::Sim;
    let job = Job::of(&Plan { iters: plan.iters.or(default), ..plan.clone() }, size);
    // A simulation has no speed, so it is always checked and needs no warm-up.
    let job = Job {
        check: plan.check || simulated,
        warmup: if simulated { 0 } else { job.warmup },
        ..job
    };
    let mut histogram = Histogram::new();
    let (mut total, mut iters) = (Tally::default(), 0);
    let mut packets = vec![Packet::EMPTY; if simulated { PACKETS } else { 0 }];
    let seeds = plan.seeds.unwrap_or(1);
    let mut counters = Counters::default();
    for number in 0..seeds {
        let seed = plan.seed + number;
        let job = Job { seed, ..job };
        let tally = match simulated {
            true => {
                let mut run = |source: Source<'_>, record: &mut Record| {
                    simulate::<RAILS>(&job, source, record, &mut packets, clock, &mut histogram)
                };
                let tally = match plan.faults {
                    Faults::None => run(Source::None, &mut Record::default()),
                    _ => {
                        let ran =
                            faults::run(plan, &job, RAILS, number + 1 == seeds, &mut counters, run);
                        ran.and_then(|(tally, notes)| {
                            progress.around(|| {
                                notes.iter().try_for_each(|note| report.comment(note))
                            })?;
                            Ok(tally)
                        })
                    }
                };
                tally.map(|tally| (tally, job.iters))
            }
            false => loop_back::<RAILS>(&job, plan.duration, clock, &mut histogram),
        };
        let (tally, done) = tally.map_err(|error| match error {
            Failure::Run(message) if simulated => Failure::Run(format!(
                "{message}; to repeat it, use --rails {RAILS} --seed {seed} --size {size}{}",
                if plan.faults == Faults::Random { " --random-faults" } else { "" }
            )),
            error => error,
        })?;
        if simulated && tally.errors + tally.misordered > 0 {
            eprintln!(
                "# seed {seed}: {} errors, {} signals misordered",
                tally.errors, tally.misordered
            );
        }
        (total, iters) = (total.and(tally), iters + done);
        if number % 100 == 99 {
            progress.step();
        }
    }
    let mut row = Row::new(plan, size);
    row.rate(total.ops, clock.ns(total.ticks) * 1e-9);
    row.iters = iters;
    row.lat_ns = if simulated { None } else { histogram.summary(&clock, job.divisor()) };
    if let Some(file) = &mut files.histogram {
        file.add(plan.test, size, &histogram, &clock, job.divisor())?;
    }
    if !simulated {
        row.processor(total.ops, total.cpu_ns, 0);
    }
    row.checked = total.checked;
    row.errors = total.errors;
    row.signals_misordered = total.misordered;
    row.arrivals_out_of_order = total.out_of_order;
    row.layout = (plan.test == Test::PutSignal && !simulated).then_some(job.layout);
    Ok(row)
}

fn attach_failed(error: AttachError) -> Failure {
    limits::attach_failed("the engine", error)
}

fn loop_back<const RAILS: usize>(
    job: &Job,
    duration: Option<Duration>,
    clock: Clock,
    histogram: &mut Histogram,
) -> Outcome<(Tally, u64)> {
    let config = Config { window: (job.window as u32).max(16), ..Config::DEFAULT };
    let mut parts = Parts::<RAILS>::new(&config, job, 2)?;
    let rails = array::from_fn(|_| Loopback::<DEPTH>::new());
    let (mut one, handle) =
        One::new(&mut parts, config, rails, |_, _, _| Ok(())).map_err(attach_failed)?;
    one.import(&handle).map_err(attach_failed)?;
    let mut both = InProcess::new(vec![one], clock);
    both.set_timeout(job.timeout_ns);
    let mut run = |job: &Job, histogram: &mut Histogram| {
        prepare(&mut both, job)?;
        run_job(&mut both, job, histogram)
    };
    match duration {
        None => Ok((run(job, histogram)?, job.iters)),
        Some(all) => {
            let span = Span::new(all, Duration::from_nanos(job.timeout_ns));
            steps::run(*job, span, histogram, run)
        }
    }
}

fn simulate<const RAILS: usize>(
    job: &Job,
    faults: Source<'_>,
    record: &mut Record,
    packets: &mut [Packet],
    clock: Clock,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    // The sequence numbers begin near their wrap. The runs use all rail policies.
    let begins = [0, (1 << 20) - 9, (1 << 32) - 9, 1 << 40];
    let policies = [RailPolicy::LeastOutstanding, RailPolicy::RoundRobin, RailPolicy::Fixed];
    let config = Config {
        window: (job.window as u32).max(16),
        stripe_threshold: 2048,
        stripe_chunk: 1024,
        first_sequence: begins[(job.seed % begins.len() as u64) as usize],
        policy: policies[(job.seed / 4 % policies.len() as u64) as usize],
        seed: job.seed,
        ..Config::DEFAULT
    };
    let fails = !matches!(faults, Source::None);
    // The two sides of a failover need different seeds.
    let configs = [config, Config { seed: if fails { !job.seed } else { job.seed }, ..config }];
    let sim = Sim::new(packets, 2, RAILS as u16, Dials::WILD, job.seed).map_err(attach_failed)?;
    let (mut near, mut far) =
        (Parts::<RAILS>::new(&config, job, 1)?, Parts::<RAILS>::new(&config, job, 1)?);
    if fails {
        near.keep(&config);
        far.keep(&config);
    }
    let mut log = faults.room();
    let mut schedule = faults.schedule(&sim, RAILS, job.seed, &mut log);
    let rails = |node| array::from_fn(|rail| sim.endpoint(node, rail as u16));
    let attach = |node| {
        move |engine: &mut Engine<'_, SimRail<'_, '_>, RAILS>, rail, peer: PeerId| match engine
            .rail_mut(rail)
        {
            Some(mut rail) => rail.attach(peer.peer(), node),
            None => Ok(()),
        }
    };
    let (mut a, a_handle) =
        One::new(&mut near, configs[0], rails(0), attach(1)).map_err(attach_failed)?;
    let (mut b, b_handle) =
        One::new(&mut far, configs[1], rails(1), attach(0)).map_err(attach_failed)?;
    a.import(&b_handle).map_err(attach_failed)?;
    b.import(&a_handle).map_err(attach_failed)?;
    let mut both = InProcess::new(vec![a, b], clock);
    both.set_timeout(job.timeout_ns);
    let begun = clock.now();
    let mut turn = |op, engines: &mut [One<'_, SimRail<'_, '_>, RAILS>]| {
        if let Some(schedule) = &mut schedule {
            schedule.turn(op, &mut Ends(engines));
        }
    };
    let done = match job.test {
        Test::PutSignal => both.put_signals(job, &mut turn),
        Test::Tag => both.messages(job, &mut turn),
        _ => {
            prepare(&mut both, job)?;
            return run_job(&mut both, job, histogram);
        }
    };
    if let Some(schedule) = &schedule {
        record.take(schedule, &sim, &both.engines);
    }
    done?;
    let (ticks, out_of_order) = (clock.now().wrapping_sub(begun), both.out_of_order());
    Ok(Tally { ticks, ops: job.iters, out_of_order, ..both.tally })
}

struct Parts<const RAILS: usize> {
    storage: Storage<RAILS>,
    matching: MatchStorage<RAILS>,
    failover: Option<FailoverStorage>,
    landing: Mapped,
    buffer: Mapped,
    lens: [usize; 2],
}

impl<const RAILS: usize> Parts<RAILS> {
    fn new(config: &Config, job: &Job, sides: usize) -> Outcome<Self> {
        // The tests of order use a slot for each operation in flight.
        let slots = SLOTS_AT + job.window as usize * job.stride();
        let lens = [Job::arena(job.size), Job::buffer(job.size)].map(|len| len.max(slots));
        Ok(Parts {
            storage: Storage::new(config, Self::limits(config)),
            failover: None,
            matching: MatchStorage::new(&MATCHING, 1, RECEIVES, 1),
            landing: Mapped::new(job.size, sides * lens[0])?,
            buffer: Mapped::new(job.size, sides * lens[1])?,
            lens,
        })
    }

    fn limits(config: &Config) -> Limits {
        Limits { peers: 1, locals: 2, remotes: 8, operations: 4 * config.window.max(64) }
    }

    fn keep(&mut self, config: &Config) {
        self.failover = Some(FailoverStorage::new(config, Self::limits(config)));
    }
}

struct One<'m, R: Rail, const RAILS: usize> {
    engine: Engine<'m, R, RAILS>,
    peer: PeerId,
    /// The landing memory and the buffer memory. Each has an area for each side that the engine
    /// serves.
    memory: [(LocalId, NonNull<u8>); 2],
    lens: [usize; 2],
    /// `None` until the memory is imported.
    theirs: Option<RemoteId>,
}

impl<'m, R: Rail, const RAILS: usize> One<'m, R, RAILS> {
    /// Creates an engine, and returns the handle of its landing area. `attach` connects its rails.
    fn new(
        parts: &'m mut Parts<RAILS>,
        config: Config,
        rails: [R; RAILS],
        mut attach: impl FnMut(&mut Engine<'m, R, RAILS>, RailId, PeerId) -> Result<(), AttachError>,
    ) -> Result<(Self, Vec<u8>), AttachError> {
        let Parts { storage, matching, failover, landing, buffer, lens } = parts;
        let mut engine = storage.engine(config, rails)?;
        engine.attach_matching(MATCHING, matching.memory())?;
        if let Some(failover) = failover {
            engine.attach_failover(failover.memory())?;
        }
        let peer = engine.reserve_peer()?;
        for rail in 0..RAILS {
            attach(&mut engine, RailId(rail as u8), peer)?;
        }
        engine.connect_peer(peer, (1 << RAILS) - 1)?;
        let mut register = |memory: &Mapped| {
            // SAFETY: the parts, which the engine borrows, own the memory. It is accessed only
            // through raw pointers and atomics.
            let region = unsafe { Region::new(memory.ptr(), memory.len(), RegionKind::Private) };
            engine.register(region).map(|id| (id, memory.ptr()))
        };
        let memory = [register(landing)?, register(buffer)?];
        let mut handle = [0; HANDLE_MAX];
        let written = engine.export(memory[0].0, &mut handle)?;
        Ok((One { engine, peer, memory, lens: *lens, theirs: None }, handle[..written].to_vec()))
    }

    fn import(&mut self, handle: &[u8]) -> Result<(), AttachError> {
        self.theirs = Some(self.engine.import(self.peer, handle)?);
        Ok(())
    }
}

/// Either one engine is its own peer, or two engines are peers.
pub struct InProcess<'m, R: Rail, const RAILS: usize> {
    engines: Vec<One<'m, R, RAILS>>,
    clock: Clock,
    watch: Watch,
    tally: Tally,
    passes: u64,
}

impl<'m, R: Rail, const RAILS: usize> InProcess<'m, R, RAILS> {
    fn new(engines: Vec<One<'m, R, RAILS>>, clock: Clock) -> Self {
        InProcess { engines, clock, watch: Watch::new(clock), tally: Tally::default(), passes: 0 }
    }

    #[inline(always)]
    fn one(&mut self, side: Side) -> &mut One<'m, R, RAILS> {
        let at = side as usize % self.engines.len();
        &mut self.engines[at]
    }

    /// Not zero if one engine serves both sides.
    #[inline(always)]
    fn start(&self, side: Side, area: Area) -> usize {
        let before = if self.engines.len() == 1 { side as usize } else { 0 };
        before * self.engines[0].lens[area as usize]
    }

    #[inline(always)]
    fn buffer_at(&mut self, side: Side, offset: usize) -> LocalAddr {
        let start = self.start(side, Area::Buffer);
        self.one(side).memory[Area::Buffer as usize].0.at((start + offset) as u64)
    }

    #[inline(always)]
    fn there(&mut self, side: Side, offset: usize) -> Outcome<RemoteAddr> {
        let start = self.start(side.other(), Area::Landing);
        let theirs =
            self.one(side).theirs.ok_or_else(|| Failure::run("the two sides are not connected"))?;
        Ok(theirs.at((start + offset) as u64))
    }

    #[inline(always)]
    fn pass(&mut self) -> Outcome {
        for one in &mut self.engines {
            one.engine.progress();
        }
        self.turn()?;
        self.passes += 1;
        if self.passes > PATIENCE {
            Err(Failure::run("no progress: an operation hangs"))
        } else {
            Ok(())
        }
    }

    #[inline(always)]
    fn until<T>(
        &mut self,
        side: Side,
        what: &str,
        mut done: impl FnMut(&mut One<'m, R, RAILS>) -> Result<Option<T>, OpError>,
    ) -> Outcome<T> {
        loop {
            match done(self.one(side)) {
                Ok(Some(value)) => {
                    self.passes = 0;
                    return Ok(value);
                }
                Ok(None) | Err(OpError::Again) => self.pass()?,
                Err(error) => {
                    return Err(Failure::run(format!("{what} failed: {error}{}", self.why(side))));
                }
            }
        }
    }

    #[cold]
    fn why(&mut self, side: Side) -> String {
        let One { engine, peer, .. } = self.one(side);
        let faults = (0..RAILS).filter_map(|rail| {
            let fault = engine.rail_error(*peer, RailId(rail as u8)).ok()??;
            Some(format!("; rail {rail}: {fault}"))
        });
        faults.collect()
    }

    /// Makes passes until an operation of `side` completes. Returns the fetched value.
    fn finish(&mut self, side: Side, issued: Issued) -> Outcome<u64> {
        let token = match issued {
            Issued::Done { value } => return Ok(value),
            Issued::Pending(token) => token,
        };
        let end = self.until(side, "an operation", |one| one.engine.test(token))?;
        match end.outcome {
            Ended::Done => Ok(end.value),
            outcome => Err(Failure::run(format!("an operation has {outcome}"))),
        }
    }

    fn status(&mut self, side: Side, request: Request) -> Outcome<Status> {
        let status = self.until(side, "a receive", |one| one.engine.test_recv(request))?;
        match status.outcome {
            Received::Ok => Ok(status),
            outcome => Err(Failure::run(format!("a receive did not succeed: {outcome}"))),
        }
    }

    fn forget_ends(&mut self, side: Side) {
        while self.one(side).engine.next_completion().is_some() {}
    }
}

impl<R: Rail, const RAILS: usize> Verbs for InProcess<'_, R, RAILS> {
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

impl<R: Rail, const RAILS: usize> InProcess<'_, R, RAILS> {
    /// Fails if the time is up or the user has pressed Ctrl-C. First lets another thread run.
    #[cold]
    #[inline(never)]
    fn check(&mut self) -> Outcome {
        std::thread::yield_now();
        interrupt::check()?;
        match self.watch.is_up() {
            true => Err(Failure::run("the run did not complete in time; use a longer --timeout")),
            false => Ok(()),
        }
    }

    #[inline(always)]
    fn landing_word(&self, side: Side, offset: usize) -> &AtomicU64 {
        let (start, len) = self.area(side, Area::Landing);
        assert!(offset.is_multiple_of(8) && offset + 8 <= len);
        // SAFETY: the word is inside the area, as just checked. It is aligned, because areas begin
        // at a page. The area stays mapped as long as the engines exist. Words are accessed only
        // atomically.
        unsafe { start.add(offset).cast::<AtomicU64>().as_ref() }
    }
}
