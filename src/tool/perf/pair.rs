//! Two processes over shared memory. One leads: it orders leg after leg and writes the rows; the other follows.
//!
//! They talk over the socket of their link, in steps: the leader's order against nothing, then both are ready, then both tell
//! what they found. Neither talks while a leg is timed. The floor is measured before, between and after the legs of a row,
//! on memory that both have mapped.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::engine::{Asleep, Config, HANDLE_MAX, Waiter};
use fishplate_core::error::AttachError;
use fishplate_core::mem::RailId;
use fishplate_shm::{HandshakeError, Link, ShmConfig, ShmRail};
use fishplate_sys::LinuxHost;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::leg::{Leg, Side, Tally};
use super::meet::{self, Second};
use super::seat::{Buffer, MATCHING, RECEIVES, Seat};
use super::{always_checks, answer_leg, finish_row, headline, prepare_leg, start_leg};
use crate::tool::args::{Meeting, PeerArgs, Plan, Test, name};
use crate::tool::clock::{Clock, monotonic_ns};
use crate::tool::cpu::{self, Pinned, Places};
use crate::tool::failure::{Failure, Outcome};
use crate::tool::floor::{Floors, PAD_LEN, Pad};
use crate::tool::histogram::Histogram;
use crate::tool::progress::Progress;
use crate::tool::report::{Report, Row};
use crate::tool::sizes;

use fishplate::{Limits, MatchStorage, Storage};

/// The pad of the floor comes first in the common segment, then the arena.
const ARENA_AT: usize = 4096;
const _: () = assert!(PAD_LEN <= ARENA_AT);

/// How often a row is measured again because the floor moved.
const REPEATS: u32 = 3;

/// What memcpy copies between two looks at the clock, in bytes.
const COPY_BYTES: usize = 64 << 20;

/// Time for a second process that gives up to say why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Iterations from which a run is long enough for a progress bar.
const LONG: u64 = 20_000_000;

/// What the leader asks of the follower.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
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

type Rail = ShmRail<LinuxHost>;

/// Runs a plan as the side that its meeting says.
pub fn run(plan: &Plan) -> Outcome {
    match &plan.meeting {
        Meeting::Listen(at) => {
            let rail = rail(plan.region)?;
            let link = meet::listen(plan, at, &rail.profile())?;
            follow(rail, link, plan.region, plan.timeout, Some(plan.test))
        }
        Meeting::Connect(at) => {
            let _pinned = pin_first(plan)?;
            let rail = rail(plan.region)?;
            let link = meet::find(at, plan.region, plan.timeout, &rail.profile())?;
            lead(plan, rail, link, None)
        }
        Meeting::Spawn => {
            // The second process is started before this one is pinned, so that it does not inherit that.
            let rail = rail(plan.region)?;
            let (link, second) = meet::spawn(plan, &rail.profile())?;
            let _pinned = pin_first(plan)?;
            lead(plan, rail, link, Some(second))
        }
    }
}

/// The process that [`meet::spawn`] starts.
pub fn answer(args: &PeerArgs) -> Outcome {
    let rail = rail(args.region)?;
    let link = meet::find(&args.connect, args.region, args.timeout, &rail.profile())?;
    follow(rail, link, args.region, args.timeout, None)
}

fn pin_first(plan: &Plan) -> Outcome<Option<Pinned>> {
    plan.places.cpus.map(|(first, _)| cpu::pin(first)).transpose()
}

fn rail(region: usize) -> Outcome<Rail> {
    // The rail itself fences towards peers that sleep without membarrier.
    let host = LinuxHost::shared().peer_uses_membarrier(true);
    let config = ShmConfig {
        max_peers: 1,
        common_len: ARENA_AT + Leg::arena(region),
        membarrier: host.sleeper_uses_membarrier(),
        ..ShmConfig::default()
    };
    ShmRail::new(host, config).map_err(|error| attach_failed("the rail", error))
}

#[cold]
fn attach_failed(what: &str, error: AttachError) -> Failure {
    Failure::run(format!("cannot set up {what}: {error:?}"))
}

/// One side that has met the other: its seat, and what they have in common.
struct Table<'m> {
    seat: Seat<'m, Rail, 1>,
    pad: Pad,
    timeout: Duration,
}

/// What a table stands on.
struct Ground {
    storage: Storage<1>,
    matching: MatchStorage<1>,
    buffer: Buffer,
    host: LinuxHost,
    never: Asleep,
}

const CONFIG: Config = Config { window: 256, ..Config::DEFAULT };

impl Ground {
    fn new(region: usize) -> Outcome<Self> {
        let limits = Limits { peers: 1, locals: 2, remotes: 8, operations: 1024 };
        Ok(Ground {
            storage: Storage::new(&CONFIG, limits),
            matching: MatchStorage::new(&MATCHING, 1, RECEIVES, 1),
            buffer: Buffer::new(Leg::arena(region))?,
            host: LinuxHost::shared(),
            never: Asleep::new(),
        })
    }

    fn set(&mut self, rail: Rail, link: Link, region: usize, timeout: u64) -> Outcome<Table<'_>> {
        let refused = |error| attach_failed("the connection", error);
        let pid = link.pid();
        let common = link.common().map(|(base, _)| base);
        let base = common.ok_or_else(|| Failure::run("the two processes have no memory in common"))?;
        let mut engine = self.storage.engine(CONFIG, [rail]).map_err(refused)?;
        engine.attach_matching(MATCHING, self.matching.memory()).map_err(refused)?;
        let peer = engine.reserve_peer().map_err(refused)?;
        // SAFETY: both processes touch the common segment only through atomics, raw copies and the engine. The engine
        // and the table, which use it, are dropped together, and the peer is not detached before.
        let region = unsafe { link.common_region(peer.peer(), ARENA_AT, Leg::arena(region)) }
            .map_err(|error| Failure::run(format!("the common segment is too small: {error:?}")))?;
        let rail = engine.rail_mut(RailId(0)).ok_or_else(|| Failure::run("the engine has no rail"))?;
        rail.attach(peer.peer(), link).map_err(refused)?;
        engine.connect_peer(peer, 1).map_err(refused)?;
        let ours = engine.register(region).map_err(refused)?;
        // SAFETY: the buffer belongs to the same ground as the engine's memory, and so outlives the engine.
        let buffer = engine.register(unsafe { self.buffer.region() }).map_err(refused)?;
        let mut handle = [0; HANDLE_MAX];
        let len = engine.export(ours, &mut handle).map_err(refused)?;
        let deadline = Instant::now() + Duration::from_secs(timeout);
        let rail = engine.rail_mut(RailId(0)).ok_or_else(|| Failure::run("the engine has no rail"))?;
        let theirs = rail
            .exchange(peer.peer(), &handle[..len], deadline)
            .map_err(|error| Failure::lost(&format!("the other process (pid {pid})"), error))?;
        let bell = Some(rail.bell());
        let theirs = engine.import(peer, &theirs).map_err(refused)?;
        // SAFETY: page-aligned, at least ARENA_AT bytes, mapped until the peer is detached; nothing else is there.
        let pad = unsafe { Pad::new(base) };
        // SAFETY: the segment is longer than ARENA_AT.
        let arena = unsafe { base.add(ARENA_AT) };
        Ok(Table {
            seat: Seat {
                engine,
                waiter: Waiter::awake(&self.host, &self.never),
                bell,
                peer,
                ours,
                arena,
                theirs,
                buffer,
                bytes: self.buffer.ptr(),
                clock: Clock::calibrate(),
                crowded: false,
                name: format!("the other process (pid {pid})"),
            },
            pad,
            timeout: Duration::from_secs(timeout),
        })
    }
}

impl Table<'_> {
    /// Tells the other side something and hears something from it.
    fn exchange<T: Serialize, U: DeserializeOwned>(&mut self, word: &T) -> Outcome<U> {
        let name = &self.seat.name;
        let text = serde_json::to_vec(word)
            .map_err(|error| Failure::run(format!("cannot write a message: {error}")))?;
        // A leg may take all the time there is, on either side.
        let deadline = Instant::now() + self.timeout + Duration::from_secs(5);
        let peer = self.seat.peer.peer();
        let rail =
            self.seat.engine.rail_mut(RailId(0)).ok_or_else(|| Failure::run("the engine has no rail"))?;
        let answer = rail.exchange(peer, &text, deadline).map_err(|error| match error {
            HandshakeError::Deadline => Failure::run(format!("{name} did not answer in time")),
            error => Failure::lost(name, error),
        })?;
        serde_json::from_slice(&answer).map_err(|error| {
            Failure::run(format!(
                "{name} said what was not understood ({error}): run the same build on both sides"
            ))
        })
    }

    fn deadline_ns(&self) -> u64 {
        monotonic_ns().saturating_add(self.timeout.as_nanos() as u64)
    }

    fn order(&mut self, order: Order) -> Outcome {
        self.exchange::<Order, ()>(&order)
    }

    /// Both sides are ready to go.
    fn ready(&mut self) -> Outcome {
        self.exchange::<(), ()>(&())
    }

    /// Nanoseconds; 0 where both sides share one processor, and there is no floor to speak of.
    fn floor(&mut self) -> Outcome<f64> {
        if self.seat.crowded {
            return Ok(0.0);
        }
        self.order(Order::Floor)?;
        let (clock, deadline) = (self.seat.clock, self.deadline_ns());
        self.pad.measure(&clock, &mut || self.seat.check(deadline))
    }

    fn leg(&mut self, leg: &Leg, histogram: &mut Histogram) -> Outcome<Tally> {
        self.order(Order::Leg(*leg))?;
        prepare_leg(&mut self.seat, leg, Side::Starts)?;
        self.ready()?;
        let tally = start_leg(&mut self.seat, leg, histogram)?;
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
            // SAFETY: the slots lie inside buffer and arena, which do not overlap; the follower waits for an order.
            unsafe {
                copy(
                    self.seat.bytes.add(offset),
                    self.seat.arena.add(super::leg::SLOTS_AT + offset),
                    leg.size,
                )
            };
        }
        (count * leg.size) as f64 / (clock.ns(clock.now().wrapping_sub(begun)) * 1e-9)
    }
}

/// # Safety
/// Both are valid for `len` bytes and do not overlap.
#[inline(never)]
unsafe fn copy(from: NonNull<u8>, to: NonNull<u8>, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), len) };
}

/// Orders and writes.
fn lead(plan: &Plan, rail: Rail, link: Link, second: Option<Second>) -> Outcome {
    let mut second = second;
    let outcome = lead_all(plan, rail, link);
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

fn lead_all(plan: &Plan, rail: Rail, link: Link) -> Outcome {
    let mut ground = Ground::new(plan.region)?;
    let mut table = ground.set(rail, link, plan.region, plan.timeout)?;
    table.seat.set_crowded(plan.places.crowded());
    let hello =
        Order::Hello { version: env!("CARGO_PKG_VERSION").into(), test: plan.test, places: plan.places };
    table.order(hello)?;
    let greeting: Greeting = table.exchange(&())?;
    if let Some(refusal) = greeting.refusal {
        return Err(Failure::run(refusal));
    }
    let mut report = Report::new(plan.format);
    headline(&mut report, plan, &table.seat.clock)?;
    let total: u64 = plan.sizes.iter().map(|&size| Leg::half(plan, size).iters * 2).sum();
    let progress = Progress::new(plan.sizes.len() as u64 * 2, total >= LONG);
    let mut fault = Ok(());
    for &size in &plan.sizes {
        let row = measure(plan, size, &mut table, &progress)?;
        let check = plan.check || always_checks(plan.test);
        let written = progress.around(|| finish_row(&mut report, &row, check));
        fault = fault.and(written);
    }
    drop(progress);
    table.order(Order::Done)?;
    fault
}

/// One row: two halves between three floors, again if the floor moved.
fn measure(plan: &Plan, size: usize, table: &mut Table<'_>, progress: &Progress) -> Outcome<Row> {
    let leg = Leg::half(plan, size);
    let mut histogram = Histogram::new();
    let mut repeats = 0;
    loop {
        histogram.clear();
        progress.begin(format!("{} {}", name(plan.test), sizes::show(size)));
        let compare = plan.test == Test::Put;
        let mut copied = Vec::new();
        let mut copy = |table: &Table<'_>| {
            if compare {
                copied.push(table.copy(&leg))
            }
        };
        let before = table.floor()?;
        copy(table);
        let first = table.leg(&leg, &mut histogram)?;
        progress.step();
        copy(table);
        let between = table.floor()?;
        let second = table.leg(&leg, &mut histogram)?;
        progress.step();
        copy(table);
        let floors = Floors { taken: [before, between, table.floor()?] };
        if !floors.steady() && repeats < REPEATS {
            repeats += 1;
            progress.around(|| {
                let [a, b, c] = floors.taken;
                eprintln!("# floor moved ({a:.1}, {b:.1}, {c:.1} ns): measuring {} again", sizes::show(size));
            });
            continue;
        }
        let tally = first.and(second);
        let clock = &table.seat.clock;
        let mut row = Row::new(plan, size);
        row.rate(tally.ops, clock.ns(tally.ticks) * 1e-9);
        row.iters = 2 * leg.iters;
        row.lat_ns = histogram.summary(clock, leg.divisor());
        row.floor_ns = (!table.seat.crowded).then(|| floors.median());
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
        row.floor_unsteady = !floors.steady();
        return Ok(row);
    }
}

/// Does what the leader says.
fn follow(rail: Rail, link: Link, region: usize, timeout: u64, expected: Option<Test>) -> Outcome {
    let mut ground = Ground::new(region)?;
    let mut table = ground.set(rail, link, region, timeout)?;
    let _pinned = greet(&mut table, expected)?;
    let mut wrong = 0;
    loop {
        match table.exchange::<(), Order>(&())? {
            Order::Hello { .. } => return Err(Failure::run("the other process greeted twice")),
            Order::Floor => {
                let deadline = table.deadline_ns();
                let Table { pad, seat, .. } = &mut table;
                pad.answer(&mut || seat.check(deadline))?;
            }
            Order::Leg(leg) => {
                if leg.size > region || leg.window == 0 {
                    return Err(Failure::run("the other process asks for more than the region holds"));
                }
                prepare_leg(&mut table.seat, &leg, Side::Answers)?;
                table.ready()?;
                let tally = answer_leg(&mut table.seat, &leg)?;
                wrong += tally.errors + tally.misordered;
                let _: Tally = table.exchange(&tally)?;
            }
            Order::Done if wrong == 0 || expected.is_none() => return Ok(()),
            Order::Done => return Err(Failure::run(format!("{wrong} iterations had wrong data"))),
        }
    }
}

/// Hears who leads, agrees or refuses, and goes where it is told to.
fn greet(table: &mut Table<'_>, expected: Option<Test>) -> Outcome<Option<Pinned>> {
    let Order::Hello { version, test, places } = table.exchange(&())? else {
        return Err(Failure::run("the other process did not greet"));
    };
    let ours = env!("CARGO_PKG_VERSION");
    let refusal = match expected {
        _ if version != ours => {
            Some(format!("one side is version {version}, the other {ours}: run the same build on both sides"))
        }
        Some(expected) if expected != test => Some(format!(
            "one side was started for {}, the other for {}: give both the same test",
            name(expected),
            name(test)
        )),
        _ => None,
    };
    let () = table.exchange(&Greeting { refusal: refusal.clone() })?;
    if let Some(refusal) = refusal {
        return Err(Failure::run(refusal));
    }
    table.seat.set_crowded(places.crowded());
    places.cpus.map(|(_, second)| cpu::pin(second)).transpose()
}
