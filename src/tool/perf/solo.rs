//! Both sides in one thread: a loopback rail to oneself, or two engines over the simulated fabric.
//!
//! Nothing waits here: while something is outstanding, every engine makes one pass after the other. Passes are bounded, so
//! an operation that never ends is found out and told with its seed.

use std::array;
use std::ptr::NonNull;

use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::engine::{Asleep, Config, HANDLE_MAX, Issued, Notice, RailPolicy, Signal, Waiter};
use fishplate_core::error::AttachError;
use fishplate_core::mem::{PeerId, RailId};
use fishplate_core::op::{Amo, AmoOp, SignalOp, Token};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim};
use fishplate_sys::LinuxHost;

use super::leg::{Leg, SLOTS_AT, Side, Tally};
use super::seat::{Buffer, CONTEXT, RECEIVES, Seat};
use super::who::Who;
use super::{always_checks, finish_row, headline, prepare_leg, worker};
use crate::tool::args::{Mode, Plan, SignalKind, Test, Transport, name};
use crate::tool::clock::Clock;
use crate::tool::cpu;
use crate::tool::failure::{Failure, Outcome};
use crate::tool::histogram::Histogram;
use crate::tool::payload::Pattern;
use crate::tool::progress::Progress;
use crate::tool::report::{Report, Row};
use crate::tool::sizes;

use fishplate::{Limits, MatchStorage, Storage};

mod tag;

/// Iterations when none are asked for: all of them, and for each of many seeds.
const SIM_ITERS: u64 = 100_000;
const SEED_ITERS: u64 = 200;

/// As in [`super::seat`], with less of everything: each seed has its own.
const MATCHING: MatchConfig = MatchConfig { eager: 192, credits: 96, headers: 96, ..MatchConfig::DEFAULT };

/// Passes without an end after which something hangs.
const PATIENCE: u64 = 2_000_000;

/// What one loopback rail, and the whole simulated fabric, hold in flight.
const DEPTH: usize = 256;
const PACKETS: usize = 1024;

/// Where the signal of a stream is; the payloads begin at [`SLOTS_AT`].
const WORD: usize = 0;

/// Runs a plan and writes its rows.
pub fn run(plan: &Plan) -> Outcome {
    let _pinned = plan.places.cpus.map(|(first, _)| cpu::pin(first)).transpose()?;
    match plan.rails {
        1 => rows::<1>(plan),
        2 => rows::<2>(plan),
        3 => rows::<3>(plan),
        _ => rows::<4>(plan),
    }
}

fn rows<const RAILS: usize>(plan: &Plan) -> Outcome {
    let clock = Clock::calibrate();
    let mut report = Report::new(plan.format);
    headline(&mut report, plan, &clock)?;
    let steps = plan.sizes.len() as u64 * plan.seeds.unwrap_or(1);
    let progress = Progress::new(steps.div_ceil(100), plan.transport == Transport::Sim);
    let mut fault = Ok(());
    for &size in &plan.sizes {
        progress.begin(format!("{} {}", name(plan.test), sizes::show(size)));
        let row = row::<RAILS>(plan, size, clock, &progress)?;
        let check = plan.check || plan.transport == Transport::Sim || always_checks(plan.test);
        let written = progress.around(|| finish_row(&mut report, &row, check));
        fault = fault.and(written);
    }
    fault
}

fn row<const RAILS: usize>(plan: &Plan, size: usize, clock: Clock, progress: &Progress) -> Outcome<Row> {
    let default = match (plan.transport, plan.seeds) {
        (_, Some(_)) => Some(SEED_ITERS),
        (Transport::Sim, None) => Some(SIM_ITERS),
        _ => None,
    };
    let filled = Plan { iters: plan.iters.or(default), ..plan.clone() };
    let half = Leg::half(&filled, size);
    let simulated = plan.transport == Transport::Sim;
    // What is simulated has no speed, so it is always checked.
    let mut leg = Leg { iters: 2 * half.iters, check: plan.check || simulated, ..half };
    leg.iters = leg.iters.next_multiple_of(leg.per_window());
    let mut histogram = Histogram::new();
    let mut total = Tally::default();
    let mut packets = vec![Packet::EMPTY; if simulated { PACKETS } else { 0 }];
    let host = LinuxHost::private();
    let seeds = plan.seeds.unwrap_or(1);
    for seed in plan.seed..plan.seed.saturating_add(seeds) {
        let leg = Leg { seed, ..leg };
        let tally = if simulated {
            simulate::<RAILS>(&leg, &mut packets, &host, clock, &mut histogram)
        } else {
            loop_back::<RAILS>(&leg, &host, clock, &mut histogram)
        };
        let tally = tally.map_err(|error| match error {
            Failure::Run(message) if simulated => Failure::Run(format!(
                "{message}; to see it again: --rails {RAILS} --seed {seed} --size {size}"
            )),
            error => error,
        })?;
        if simulated && tally.errors + tally.misordered > 0 {
            eprintln!("# seed {seed}: {} errors, {} signals misordered", tally.errors, tally.misordered);
        }
        total = total.and(tally);
        if (seed - plan.seed) % 100 == 99 {
            progress.step();
        }
    }
    let mut row = Row::new(plan, size);
    row.rate(total.ops, clock.ns(total.ticks) * 1e-9);
    row.iters = leg.iters * seeds;
    row.lat_ns = if simulated { None } else { histogram.summary(&clock, leg.divisor()) };
    row.checked = total.checked;
    row.errors = total.errors;
    row.signals_misordered = total.misordered;
    row.arrivals_out_of_order = total.out_of_order;
    row.layout = (plan.test == Test::PutSignal && !simulated).then_some(leg.layout);
    Ok(row)
}

fn attach_failed(error: AttachError) -> Failure {
    Failure::run(format!("cannot set up the engine: {error}"))
}

/// What a seat stands on.
struct Ground<const RAILS: usize> {
    storage: Storage<RAILS>,
    matching: MatchStorage<RAILS>,
    arena: Buffer,
    buffer: Buffer,
}

impl<const RAILS: usize> Ground<RAILS> {
    fn new(config: &Config, leg: &Leg) -> Outcome<Self> {
        let bytes = Leg::arena(leg.size).max(SLOTS_AT + leg.window as usize * leg.stride());
        let limits = Limits { peers: 1, locals: 2, remotes: 8, operations: 4 * config.window.max(64) };
        Ok(Ground {
            storage: Storage::new(config, limits),
            matching: MatchStorage::new(&MATCHING, 1, RECEIVES, 1),
            arena: Buffer::new(bytes)?,
            buffer: Buffer::new(bytes)?,
        })
    }
}

/// Sets an engine up to its handle; `attach` tells its rails of the peer.
fn sit<'m, R: Rail, const RAILS: usize>(
    ground: &'m mut Ground<RAILS>,
    config: Config,
    rails: [R; RAILS],
    host: &'m LinuxHost,
    never: &'m Asleep,
    clock: Clock,
    mut attach: impl FnMut(&mut R, PeerId) -> Result<(), AttachError>,
) -> Result<(Halfway<'m, R, RAILS>, Vec<u8>), AttachError> {
    let (arena, bytes) = (ground.arena.ptr(), ground.buffer.ptr());
    // SAFETY: arena and buffer belong to the ground, from which the engine borrows its memory, and so outlive it.
    let (arena_region, buffer_region) = unsafe { (ground.arena.region(), ground.buffer.region()) };
    let mut engine = ground.storage.engine(config, rails)?;
    engine.attach_matching(MATCHING, ground.matching.memory())?;
    let peer = engine.reserve_peer()?;
    for rail in 0..RAILS {
        if let Some(rail) = engine.rail_mut(RailId(rail as u8)) {
            attach(rail, peer)?;
        }
    }
    engine.connect_peer(peer, (1 << RAILS) - 1)?;
    let ours = engine.register(arena_region)?;
    let buffer = engine.register(buffer_region)?;
    let mut handle = [0; HANDLE_MAX];
    let len = engine.export(ours, &mut handle)?;
    let halfway =
        Halfway { engine, peer, ours, buffer, arena, bytes, clock, waiter: Waiter::awake(host, never) };
    Ok((halfway, handle[..len].to_vec()))
}

/// A seat that has not yet heard of the other side's memory.
struct Halfway<'m, R: Rail, const RAILS: usize> {
    engine: fishplate_core::engine::Engine<'m, R, RAILS>,
    peer: PeerId,
    ours: fishplate_core::mem::LocalId,
    buffer: fishplate_core::mem::LocalId,
    arena: NonNull<u8>,
    bytes: NonNull<u8>,
    clock: Clock,
    waiter: Waiter<'m, LinuxHost>,
}

impl<'m, R: Rail, const RAILS: usize> Halfway<'m, R, RAILS> {
    fn import(mut self, handle: &[u8]) -> Result<Seat<'m, R, RAILS>, AttachError> {
        let theirs = self.engine.import(self.peer, handle)?;
        Ok(Seat {
            engine: self.engine,
            waiter: self.waiter,
            bell: None,
            peer: self.peer,
            ours: self.ours,
            arena: self.arena,
            theirs,
            there: theirs,
            landing: self.arena,
            on_device: false,
            mirror: None,
            buffer: self.buffer,
            bytes: self.bytes,
            clock: self.clock,
            crowded: false,
            name: Who::new("this process", vec![]),
            looked_ns: 0,
        })
    }
}

fn loop_back<const RAILS: usize>(
    leg: &Leg,
    host: &LinuxHost,
    clock: Clock,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    let config = Config { window: (leg.window as u32).max(16), ..Config::DEFAULT };
    let mut ground = Ground::<RAILS>::new(&config, leg)?;
    let never = Asleep::new();
    let rails = array::from_fn(|_| Loopback::<DEPTH>::new());
    let (halfway, handle) =
        sit(&mut ground, config, rails, host, &never, clock, |_, _| Ok(())).map_err(attach_failed)?;
    let mut seat = halfway.import(&handle).map_err(attach_failed)?;
    if leg.mode == Mode::Worker {
        for side in [Side::Starts, Side::Answers] {
            prepare_leg(&mut seat, leg, side)?;
        }
        let tally = worker::run(&mut seat, leg, &[Side::Starts, Side::Answers], histogram)?;
        return Ok(Tally { out_of_order: seat.engine.stats().arrivals_out_of_order, ..tally });
    }
    let seats = vec![seat];
    Solo { seats, tally: Tally::default(), passes: 0 }.run(leg, histogram, false)
}

fn simulate<const RAILS: usize>(
    leg: &Leg,
    packets: &mut [Packet],
    host: &LinuxHost,
    clock: Clock,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    // Numbers begin where counters are likely to go wrong, and rails are chosen in every way.
    let begins = [0, (1 << 20) - 9, (1 << 32) - 9, 1 << 40];
    let policies = [RailPolicy::LeastOutstanding, RailPolicy::RoundRobin, RailPolicy::Fixed];
    let config = Config {
        window: (leg.window as u32).max(16),
        stripe_threshold: 2048,
        stripe_chunk: 1024,
        first_sequence: begins[(leg.seed % begins.len() as u64) as usize],
        policy: policies[(leg.seed / 4 % policies.len() as u64) as usize],
        seed: leg.seed,
        ..Config::DEFAULT
    };
    let sim = Sim::new(packets, 2, RAILS as u16, Dials::WILD, leg.seed).map_err(attach_failed)?;
    let (mut near, mut far) = (Ground::<RAILS>::new(&config, leg)?, Ground::<RAILS>::new(&config, leg)?);
    let never = Asleep::new();
    let rails = |node| array::from_fn(|rail| sim.endpoint(node, rail as u16));
    let (a, a_handle) = sit(&mut near, config, rails(0), host, &never, clock, |r, p| r.attach(p.peer(), 1))
        .map_err(attach_failed)?;
    let (b, b_handle) = sit(&mut far, config, rails(1), host, &never, clock, |r, p| r.attach(p.peer(), 0))
        .map_err(attach_failed)?;
    let seats =
        vec![a.import(&b_handle).map_err(attach_failed)?, b.import(&a_handle).map_err(attach_failed)?];
    Solo { seats, tally: Tally::default(), passes: 0 }.run(leg, histogram, true)
}

/// Both sides; one seat when a side is its own peer.
struct Solo<'m, R: Rail, const RAILS: usize> {
    seats: Vec<Seat<'m, R, RAILS>>,
    tally: Tally,
    /// Passes since something ended.
    passes: u64,
}

impl<R: Rail, const RAILS: usize> Solo<'_, R, RAILS> {
    fn run(mut self, leg: &Leg, histogram: &mut Histogram, simulated: bool) -> Outcome<Tally> {
        let clock = self.seats[0].clock;
        let mut first = 1;
        for (count, measured) in [(leg.warmup, false), (leg.iters, true)] {
            if count == 0 || (simulated && !measured) {
                continue;
            }
            let (errors, misordered) = (self.tally.errors, self.tally.misordered);
            self.tally = Tally { errors, misordered, ..Tally::default() };
            if measured {
                histogram.clear();
            }
            let begun = clock.now();
            match leg.test {
                Test::PutSignal if simulated => self.ordered(leg, count)?,
                Test::PutSignal => self.ping_pong(leg, first, count, histogram)?,
                Test::Put => self.put(leg, first, count, histogram)?,
                Test::Get => self.get(leg, count, histogram)?,
                Test::Amo => self.amo(first - 1, count, histogram)?,
                Test::SignalRate => self.signal_rate(leg, first - 1, count, histogram)?,
                Test::Tag if simulated => tag::ordered(&mut self, leg, count)?,
                Test::Tag => tag::ping_pong(&mut self, leg, first, count, histogram)?,
                Test::TagBw => tag::stream(&mut self, leg, first - 1, count, histogram)?,
                Test::Pool => return Err(Failure::usage("pool has no sides")),
                Test::Ring => return Err(Failure::usage("ring needs two sides: use --transport shm")),
            }
            self.tally.ticks = clock.now().wrapping_sub(begun);
            let two_way = leg.is_two_way() && !simulated;
            self.tally.ops = if two_way { 2 * count } else { count };
            first += count;
        }
        self.tally.out_of_order =
            self.seats.iter().map(|seat| seat.engine.stats().arrivals_out_of_order).sum();
        Ok(self.tally)
    }

    /// The side at which operations of `side` arrive.
    fn other(&self, side: usize) -> usize {
        (side + 1) % self.seats.len()
    }

    /// One pass of every engine.
    #[inline(always)]
    fn pass(&mut self) -> Outcome {
        for seat in &mut self.seats {
            seat.engine.progress();
        }
        self.passes += 1;
        if self.passes > PATIENCE {
            Err(Failure::run("nothing happens any more: an operation hangs"))
        } else {
            Ok(())
        }
    }

    /// Issues an operation of one side, making passes while there is no room for it.
    #[inline(always)]
    fn issue(
        &mut self,
        side: usize,
        mut call: impl FnMut(&mut Seat<'_, R, RAILS>) -> Result<Issued, fishplate_core::error::OpError>,
    ) -> Outcome<Issued> {
        loop {
            match call(&mut self.seats[side]) {
                Ok(issued) => {
                    self.passes = 0;
                    return Ok(issued);
                }
                Err(fishplate_core::error::OpError::Again) => self.pass()?,
                Err(error) => return Err(Failure::run(format!("an operation was refused: {error}"))),
            }
        }
    }

    /// Makes passes until a word of a side's arena has a value.
    #[inline(always)]
    fn until(&mut self, side: usize, offset: usize, value: u64) -> Outcome {
        while self.word(side, offset) != value {
            self.pass()?;
        }
        self.passes = 0;
        Ok(())
    }

    #[inline(always)]
    fn word(&self, side: usize, offset: usize) -> u64 {
        self.seats[side].word(offset).load(std::sync::atomic::Ordering::Acquire)
    }

    /// Makes passes until everything that a side sent is applied.
    fn quiet(&mut self, side: usize) -> Outcome {
        loop {
            let seat = &mut self.seats[side];
            match seat.engine.is_quiet(CONTEXT, seat.peer) {
                Ok(true) => break,
                Ok(false) => self.pass()?,
                Err(error) => return Err(Failure::run(format!("the peer was given up: {error}"))),
            }
        }
        self.passes = 0;
        Ok(())
    }

    /// Makes passes until an operation of the first side has ended; the value it fetched.
    fn finish(&mut self, token: Token) -> Outcome<u64> {
        loop {
            match self.seats[0].engine.test(token) {
                Ok(Some(done)) if done.outcome == fishplate_core::op::Outcome::Done => {
                    self.passes = 0;
                    return Ok(done.value);
                }
                Ok(Some(done)) => {
                    return Err(Failure::run(format!("an operation ended: {}", done.outcome)));
                }
                Ok(None) => self.pass()?,
                Err(error) => return Err(Failure::run(format!("an operation was lost: {error}"))),
            }
        }
    }

    /// Whether the payload is at an offset of a side's arena, where `len` bytes are known to lie inside.
    fn arrived(&self, side: usize, offset: usize, pattern: Pattern, len: usize) -> bool {
        // SAFETY: every offset that the tests use lies inside the arena, which `Ground::new` made large enough.
        unsafe { pattern.verify(self.seats[side].arena.as_ptr().add(offset), len) }
    }

    /// Writes a payload into a side's buffer; the operation that read it before is over.
    fn fill(&self, side: usize, offset: usize, pattern: Pattern, len: usize) {
        // SAFETY: as for the arena, which is as large.
        unsafe { pattern.fill(self.seats[side].bytes.as_ptr().add(offset), len) };
    }

    #[inline(always)]
    fn put_signal(
        &mut self,
        side: usize,
        from: usize,
        len: usize,
        to: usize,
        word: usize,
        seq: u64,
    ) -> Outcome {
        self.issue(side, |seat| {
            let signal = Signal { at: seat.theirs.at(word as u64), op: SignalOp::Set, value: seq };
            let (from, to) = (seat.buffer.at(from as u64), seat.theirs.at(to as u64));
            seat.engine.put_signal(CONTEXT, from, len, to, signal, Notice::Silent)
        })?;
        Ok(())
    }

    fn ping_pong(&mut self, leg: &Leg, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let (place, clock) = (leg.placement(), self.seats[0].clock);
        let stride = leg.size.next_multiple_of(64);
        let mut last = clock.now();
        for seq in first..first + count {
            let mut whole = true;
            for way in 0..2 {
                let side = way % self.seats.len();
                let to = self.other(side);
                let from = (seq & 1) as usize * stride;
                let pattern = Pattern::new(leg.seed, way as u64, seq);
                if leg.check {
                    self.fill(side, from, pattern, leg.size);
                }
                self.put_signal(side, from, leg.size, place.payload[way], place.signal[way], seq)?;
                self.until(to, place.signal[way], seq)?;
                whole &= !leg.check || self.arrived(to, place.payload[way], pattern, leg.size);
            }
            let now = clock.now();
            histogram.record(now.wrapping_sub(last));
            last = now;
            self.tally.checked += u64::from(leg.check && whole);
            self.tally.errors += u64::from(!whole);
        }
        self.quiet(0)
    }

    /// Rounds of put-signals, `window` of them in flight, to and fro. After every pass, whatever the signal announces
    /// must be there, and the signal may not go back.
    fn ordered(&mut self, leg: &Leg, count: u64) -> Outcome {
        let (stride, len) = (leg.stride(), leg.size);
        let mut sent = 0;
        let mut sides = [0, 1].into_iter().cycle();
        // Numbers of the two directions: each has a word of its own.
        let mut seen = [0u64; 2];
        while sent < count {
            let Some(side) = sides.next() else { break };
            let round = leg.window.min(count - sent);
            let base = seen[side];
            let slot = |seq: u64| (seq - base - 1) as usize * stride;
            for seq in base + 1..=base + round {
                self.fill(side, slot(seq), Pattern::new(leg.seed, side as u64, seq), len);
            }
            let mut posted = base;
            while seen[side] < base + round {
                if posted < base + round {
                    posted += 1;
                    self.put_signal(side, slot(posted), len, SLOTS_AT + slot(posted), WORD, posted)?;
                }
                self.pass()?;
                let word = self.word(1 - side, WORD);
                if word < seen[side] || word > posted {
                    self.tally.misordered += 1;
                    return Ok(());
                }
                if word > seen[side] {
                    self.passes = 0;
                }
                for seq in seen[side] + 1..=word {
                    let pattern = Pattern::new(leg.seed, side as u64, seq);
                    let there = self.arrived(1 - side, SLOTS_AT + slot(seq), pattern, len);
                    self.tally.checked += u64::from(there);
                    self.tally.misordered += u64::from(!there);
                }
                seen[side] = word;
            }
            self.quiet(side)?;
            sent += round;
        }
        Ok(())
    }

    fn put(&mut self, leg: &Leg, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let (clock, to) = (self.seats[0].clock, self.other(0));
        let (stride, slots) = (leg.stride(), leg.slots());
        let mut last = clock.now();
        for window in 0..count / leg.per_window() {
            let pattern = |slot| Pattern::new(leg.seed, first + window, slot);
            for slot in (0..slots).filter(|_| leg.check) {
                self.fill(0, slot as usize * stride, pattern(slot), leg.size);
            }
            for k in 0..leg.per_window() {
                let offset = (k % slots) as usize * stride;
                self.issue(0, |seat| {
                    let (from, to) =
                        (seat.buffer.at(offset as u64), seat.theirs.at((SLOTS_AT + offset) as u64));
                    seat.engine.put(CONTEXT, from, leg.size, to, Notice::Silent)
                })?;
            }
            self.quiet(0)?;
            let now = clock.now();
            histogram.record(now.wrapping_sub(last));
            for slot in (0..slots).filter(|_| leg.check) {
                let there = self.arrived(to, SLOTS_AT + slot as usize * stride, pattern(slot), leg.size);
                self.tally.checked += u64::from(there);
                self.tally.errors += u64::from(!there);
            }
            last = clock.now();
        }
        Ok(())
    }

    fn get(&mut self, leg: &Leg, count: u64, histogram: &mut Histogram) -> Outcome {
        let (clock, to) = (self.seats[0].clock, self.other(0));
        let pattern = Pattern::new(leg.seed, 0, 0);
        // SAFETY: as in `arrived`; nobody reads the arena now.
        unsafe { pattern.fill(self.seats[to].arena.as_ptr().add(SLOTS_AT), leg.size) };
        for _ in 0..count {
            let begun = clock.now();
            let issued = self.issue(0, |seat| {
                let (into, from) = (seat.buffer.at(0), seat.theirs.at(SLOTS_AT as u64));
                seat.engine.get(CONTEXT, into, leg.size, from, Notice::Report(0))
            })?;
            if let Issued::Pending(token) = issued {
                self.finish(token)?;
            }
            histogram.record(clock.now().wrapping_sub(begun));
            if leg.check {
                let at = self.seats[0].bytes.as_ptr();
                // SAFETY: the payload lies at the start of the buffer, and the get is over. Its first byte is spoilt so
                // that the next get cannot pass for this one.
                let there = unsafe { pattern.verify(at, leg.size) };
                // SAFETY: as above.
                unsafe { at.write(!at.read()) };
                self.tally.checked += u64::from(there);
                self.tally.errors += u64::from(!there);
            }
        }
        Ok(())
    }

    fn amo(&mut self, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let clock = self.seats[0].clock;
        let amo = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
        for expected in first..first + count {
            let begun = clock.now();
            let issued =
                self.issue(0, |seat| seat.engine.fetch(CONTEXT, seat.theirs.at(WORD as u64), amo, 0))?;
            let value = match issued {
                Issued::Done { value } => value,
                Issued::Pending(token) => self.finish(token)?,
            };
            histogram.record(clock.now().wrapping_sub(begun));
            self.tally.checked += u64::from(value == expected);
            self.tally.errors += u64::from(value != expected);
        }
        Ok(())
    }

    fn signal_rate(&mut self, leg: &Leg, first: u64, count: u64, histogram: &mut Histogram) -> Outcome {
        let (clock, to) = (self.seats[0].clock, self.other(0));
        let (mut sent, mut seen) = (first, first);
        let mut last = clock.now();
        while sent < first + count {
            for _ in 0..leg.per_window() {
                sent += 1;
                self.issue(0, |seat| {
                    let at = seat.theirs.at(WORD as u64);
                    let signal = match leg.signal {
                        SignalKind::Add => Signal { at, op: SignalOp::Add, value: 1 },
                        SignalKind::Set => Signal { at, op: SignalOp::Set, value: sent },
                    };
                    seat.engine.signal(CONTEXT, signal, Notice::Silent)
                })?;
            }
            while seen != sent {
                self.pass()?;
                let word = self.word(to, WORD);
                self.tally.misordered += u64::from(word < seen);
                if word > sent {
                    return Err(Failure::run(format!("{sent} signals were sent and {word} have come")));
                }
                seen = word;
            }
            self.passes = 0;
            let now = clock.now();
            histogram.record(now.wrapping_sub(last));
            last = now;
        }
        self.tally.checked = count;
        Ok(())
    }
}
