//! Both sides in one thread: a loopback rail to oneself, or two engines over the simulated fabric.
//!
//! Nothing waits here: while something is outstanding, every engine makes one pass after the other.
//! Passes are bounded, so an operation that never ends is found out and told with its seed.
//!
//! `ground` sets a side up; `one_sided` and `tag` have the tests.

use std::array;

use fishplate_core::engine::{Asleep, Config, Engine, Issued, RailPolicy};
use fishplate_core::error::AttachError;
use fishplate_core::mem::PeerId;
use fishplate_core::op::Token;
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim, SimRail};
use fishplate_sys::LinuxHost;

use super::leg::{Leg, Side, Tally};
use super::seat::{CONTEXT, Seat};
use super::{always_checks, finish_row, headline, prepare_leg, worker};
use crate::args::{Mode, Plan, Test, Transport, name};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::histogram::Histogram;
use crate::payload::Pattern;
use crate::progress::Progress;
use crate::report::{Report, Row};
use crate::room;
use crate::sizes;

mod ground;
mod one_sided;
#[cfg(test)]
mod orders;
mod tag;

use ground::{Ground, sit};

/// Iterations when none are asked for: all of them, and for each of many seeds.
const SIM_ITERS: u64 = 100_000;
const SEED_ITERS: u64 = 200;

/// Passes without an end after which something hangs.
const PATIENCE: u64 = 2_000_000;

/// What one loopback rail, and the whole simulated fabric, hold in flight.
const DEPTH: usize = 256;
const PACKETS: usize = 1024;

/// Where the signal of a stream is; the payloads begin at [`SLOTS_AT`].
const WORD: usize = 0;

/// Runs a plan and writes its rows.
pub fn run(plan: &Plan) -> Outcome {
    let _pinned = plan.places.pin_first()?;
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
    for number in 0..seeds {
        let seed = plan.seed + number;
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
        if number % 100 == 99 {
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
    room::attach_failed("the engine", error)
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
        sit(&mut ground, config, rails, host, &never, clock, |_, _, _| Ok(())).map_err(attach_failed)?;
    let mut seat = halfway.import(&handle).map_err(attach_failed)?;
    if leg.mode == Mode::Worker {
        for side in [Side::Starts, Side::Answers] {
            prepare_leg(&mut seat, leg, side)?;
        }
        seat.watch.set(leg.timeout_ns);
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
    let attach = |node| {
        move |engine: &mut Engine<'_, SimRail<'_, '_>, RAILS>, rail, peer: PeerId| match engine.rail_mut(rail)
        {
            Some(mut rail) => rail.attach(peer.peer(), node),
            None => Ok(()),
        }
    };
    let (a, a_handle) =
        sit(&mut near, config, rails(0), host, &never, clock, attach(1)).map_err(attach_failed)?;
    let (b, b_handle) =
        sit(&mut far, config, rails(1), host, &never, clock, attach(0)).map_err(attach_failed)?;
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
        self.seats[0].watch.set(leg.timeout_ns);
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

    /// Records a sample that ends now, where the next begins. Now and then looks whether the time
    /// is up.
    #[inline(always)]
    fn lap(&mut self, histogram: &mut Histogram, last: &mut u64) -> Outcome {
        self.seats[0].lap(histogram, last)
    }

    /// One pass of every engine.
    #[inline(always)]
    fn pass(&mut self) -> Outcome {
        for seat in &mut self.seats {
            seat.engine.progress();
        }
        self.seats[0].turn()?;
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

    /// Whether the payload is at an offset of a side's arena, which has `len` bytes there.
    fn arrived(&self, side: usize, offset: usize, pattern: Pattern, len: usize) -> bool {
        // SAFETY: all offsets in the tests lie inside the arena,
        // which `Ground::new` made large enough.
        unsafe { pattern.verify(self.seats[side].arena.as_ptr().add(offset), len) }
    }

    /// Writes a payload into a side's buffer; the operation that read it before is over.
    fn fill(&self, side: usize, offset: usize, pattern: Pattern, len: usize) {
        // SAFETY: as for the arena, which is as large.
        unsafe { pattern.fill(self.seats[side].bytes.as_ptr().add(offset), len) };
    }
}
