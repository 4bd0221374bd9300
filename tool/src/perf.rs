//! Measuring. `pair`, `gpu` and `fabric` bring two processes together, at a `table` where both run
//! the same legs; `solo` plays both sides in one thread. `pool` has no sides. The tests themselves
//! (`put_signal`, `put`, `get`, `amo`, `signal_rate`, `tag`, `tag_bw`, `ring`) do not know which.
//! `worker` runs some of them with a second thread per side, which drives the engine. `matching`
//! stands apart: it measures tag matching without a transport, beside other engines.

mod amo;
mod fabric;
#[cfg(test)]
mod fuzz;
mod get;
mod gpu;
mod leg;
pub mod matching;
mod meet;
mod pair;
mod pool;
mod put;
mod put_signal;
mod ring;
mod seat;
mod signal_rate;
mod solo;
mod table;
mod tag;
mod tag_bw;
mod watch;
mod who;
mod worker;

use fishplate_core::rail::Rail;

use super::args::{Mode, PeerArgs, Plan, Test, Transport, name};
use super::clock::Clock;
use super::failure::{Failure, Outcome};
use super::histogram::Histogram;
use super::report::{Report, Row};

use leg::{Leg, Side, Tally};
use seat::Seat;

/// The process that a measuring process starts.
pub fn answer(args: &PeerArgs) -> Outcome {
    match args.transport {
        Transport::Fabric => fabric::answer(args),
        Transport::Gpu => gpu::answer(args),
        _ => pair::answer(args),
    }
}

/// Runs a plan and writes its rows.
pub fn run(plan: &Plan) -> Outcome {
    match plan.transport {
        _ if plan.test == Test::Pool => pool::run(plan),
        Transport::Shm => pair::run(plan),
        Transport::Fabric => fabric::run(plan),
        Transport::Gpu => gpu::run(plan),
        Transport::Loopback | Transport::Sim => solo::run(plan),
    }
}

/// Says what is measured, above the table.
fn headline(report: &mut Report, plan: &Plan, clock: &Clock) -> Outcome {
    report.comment(&format!(
        "fishplate {} perf {}  transport={} rails={} seed={} window={} pin={} check={} clock={} build={}",
        env!("CARGO_PKG_VERSION"),
        name(plan.test),
        name(plan.transport),
        plan.rails,
        plan.seed,
        plan.window,
        plan.places.describe(),
        if plan.check { "yes" } else { "no" },
        clock.describe(),
        if cfg!(debug_assertions) { "debug (figures mean nothing)" } else { "release" },
    ))
}

/// Writes a row, and says whether it makes the run a failure.
fn finish_row(report: &mut Report, row: &Row, check: bool) -> Outcome {
    report.row(row)?;
    row.fault(check).map_or(Ok(()), |fault| Err(Failure::run(fault)))
}

fn no_sides() -> Failure {
    Failure::usage("pool has no sides: it stays within one thread or more of one process")
}

/// Whether the test verifies every iteration without being asked.
fn always_checks(test: Test) -> bool {
    matches!(test, Test::Amo | Test::SignalRate | Test::Ring)
}

/// Gets a side's memory ready for a leg. The other side does nothing meanwhile but the same.
fn prepare_leg<R: Rail, const RAILS: usize>(seat: &mut Seat<'_, R, RAILS>, leg: &Leg, side: Side) -> Outcome {
    match leg.test {
        Test::PutSignal => put_signal::prepare(seat, leg, side),
        Test::Put => put::prepare(seat, leg, side),
        Test::Get => get::prepare(seat, leg, side),
        Test::Amo => amo::prepare(seat, leg, side),
        Test::SignalRate => signal_rate::prepare(seat, leg, side),
        // Messages find their own place. Workers part by signals.
        Test::Tag => put::prepare(seat, leg, side),
        Test::TagBw => Ok(()),
        Test::Ring => ring::prepare(seat, leg, side),
        Test::Pool => Err(no_sides()),
    }
}

/// Runs a leg as the side that measures.
fn start_leg<R: Rail + Send, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
    histogram: &mut Histogram,
) -> Outcome<Tally> {
    seat.watch.set(leg.timeout_ns);
    let before = seat.engine.stats().arrivals_out_of_order;
    let mut tally = match leg.test {
        _ if leg.mode == Mode::Worker => worker::run(seat, leg, &[Side::Starts], histogram),
        Test::PutSignal => put_signal::start(seat, leg, histogram),
        Test::Put => put::start(seat, leg, histogram),
        Test::Get => get::start(seat, leg, histogram),
        Test::Amo => amo::start(seat, leg, histogram),
        Test::SignalRate => signal_rate::start(seat, leg, histogram),
        Test::Tag => tag::start(seat, leg, histogram),
        Test::TagBw => tag_bw::start(seat, leg, histogram),
        Test::Ring => ring::start(seat, leg, histogram),
        Test::Pool => Err(no_sides()),
    }?;
    tally.out_of_order = seat.engine.stats().arrivals_out_of_order - before;
    Ok(tally)
}

/// Runs a leg as the side that answers.
fn answer_leg<R: Rail + Send, const RAILS: usize>(
    seat: &mut Seat<'_, R, RAILS>,
    leg: &Leg,
) -> Outcome<Tally> {
    seat.watch.set(leg.timeout_ns);
    let before = seat.engine.stats().arrivals_out_of_order;
    let mut tally = match leg.test {
        _ if leg.mode == Mode::Worker => worker::run(seat, leg, &[Side::Answers], &mut Histogram::new()),
        Test::PutSignal => put_signal::answer(seat, leg),
        Test::Put => put::answer(seat, leg),
        Test::Get => get::answer(seat, leg),
        Test::Amo => amo::answer(seat, leg),
        Test::SignalRate => signal_rate::answer(seat, leg),
        Test::Tag => tag::answer(seat, leg),
        Test::TagBw => tag_bw::answer(seat, leg),
        Test::Ring => ring::answer(seat, leg),
        Test::Pool => Err(no_sides()),
    }?;
    tally.out_of_order = seat.engine.stats().arrivals_out_of_order - before;
    Ok(tally)
}
