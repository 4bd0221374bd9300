//! Runs the measurements. `meet` connects two processes, and `open` connects their nodes. Each side
//! has an `endpoint`. In a `session`, both processes run the same jobs. `in_process` runs both
//! sides in one thread.

mod amo;
mod bidirectional;
mod endpoint;
#[cfg(test)]
mod fuzz;
mod get;
mod in_process;
mod job;
pub mod matching;
mod meet;
mod node_verbs;
mod open;
mod pool;
mod put;
mod put_signal;
pub mod ranks;
mod ring;
mod session;
mod setup;
mod signal_rate;
mod steps;
mod tag;
mod tag_bw;
mod verbs;
mod watch;
mod who;

use std::time::Duration;

use super::args::{Meeting, PeerArgs, Plan, Test, Transport, name};
use super::clock::{self, Clock};
use super::failure::{Failure, Outcome};
use super::histogram::Histogram;
use super::histogram_file::HistogramFile;
use super::interrupt;
use super::limits;
use super::plot;
use super::report::{Report, Row};
use super::variables;

use job::{Job, SLOTS_AT, Side, Tally};
use session::Session;
use setup::Setup;
use verbs::Verbs;

struct Files {
    histogram: Option<HistogramFile>,
    rows: Vec<Row>,
}

pub fn run(plan: &Plan) -> Outcome {
    if plan.test == Test::Pool {
        return pool::run(plan);
    }
    interrupt::watch();
    let measures = !matches!(plan.meeting, Meeting::Listen(_));
    let hist = plan.hist.as_deref().filter(|_| measures);
    let mut files = Files { histogram: hist.map(HistogramFile::create).transpose()?, rows: vec![] };
    let picture =
        plan.plot.as_deref().filter(|_| measures).map(plot::Picture::create).transpose()?;
    match plan.transport {
        Transport::Shm | Transport::Fabric | Transport::Gpu => two_processes(plan, &mut files),
        Transport::Loopback | Transport::Sim => in_process::run(plan, &mut files),
    }?;
    picture.map_or(Ok(()), |picture| picture.draw_rows(&files.rows))
}

/// Runs a plan between two processes. This process is the side that the plan names.
fn two_processes(plan: &Plan, files: &mut Files) -> Outcome {
    let sides = if plan.meeting == Meeting::Spawn { 2 } else { 1 };
    let own = Job::arena(plan.region) + Job::buffer(plan.region);
    limits::demand(plan.region, own, sides * own)?;
    let mut plan = plan.clone();
    if plan.transport == Transport::Gpu {
        let first = plan.devices.first().copied().unwrap_or_else(open::usual_device);
        plan.devices = vec![first, plan.devices.get(1).copied().unwrap_or(first)];
    }
    let setup = Setup {
        transport: plan.transport,
        rails: plan.rails,
        settings: plan.settings.clone(),
        device: plan.devices.first().copied(),
        relay: plan.ipc_path == super::args::IpcPath::Relay,
        mode: plan.mode,
        crowded: plan.meeting == Meeting::Spawn && plan.places.crowded(),
        region: plan.region,
        timeout: plan.timeout,
    };
    let opened = setup.open()?;
    // libfabric providers install their own handlers.
    interrupt::watch();
    // Starts the second process before pinning this one, so that the second process does not
    // inherit the pinning.
    let met = meet::meet(&plan, &setup, &opened.card)?;
    if let Meeting::Listen(_) = plan.meeting {
        return Session::<false>::join(&setup, opened, met)?.follow(plan.region, Some(plan.test));
    }
    let _pinned = plan.places.pin_first()?;
    Session::<true>::join(&setup, opened, met)?.lead(&plan, files)
}

/// Runs the second process, which the measuring process starts.
pub fn answer(args: &PeerArgs) -> Outcome {
    let socket = meet::inherited(args.socket)?;
    let mut settings = variables::for_run(args.transport.window(), args.timeout)?;
    settings.providers.clone_from(&args.provider);
    settings.interfaces.clone_from(&args.interface);
    let setup = Setup {
        transport: args.transport,
        rails: args.rails,
        settings,
        device: (args.transport == Transport::Gpu).then_some(args.device),
        relay: args.ipc_path == super::args::IpcPath::Relay,
        mode: args.mode,
        crowded: args.crowded,
        region: args.region,
        // The first process gives up earlier, because it reports the error.
        timeout: args.timeout + PATIENCE,
    };
    let opened = setup.open()?;
    interrupt::leave_to_parent();
    let met = meet::answer(socket, &opened.card)?;
    Session::<false>::join(&setup, opened, met)?.follow(args.region, None)
}

/// Time that the second process waits beyond the timeout of the first process.
const PATIENCE: Duration = Duration::from_secs(5);

fn headline(report: &mut Report, plan: &Plan, clock: &Clock) -> Outcome {
    report.comment(&format!(
        "fishplate {} perf {}  transport={} rails={} seed={} window={} pin={} check={} clock={} \
         build={}",
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

/// Writes a row. Returns an error if the row has wrong or unverified data.
fn finish_row(report: &mut Report, files: &mut Files, row: Row, check: bool) -> Outcome {
    report.row(&row)?;
    let fault = row.fault(check);
    files.rows.push(row);
    fault.map_or(Ok(()), |fault| Err(Failure::run(fault)))
}

/// Returns whether the test verifies every iteration even without `--check`.
fn always_checks(test: Test) -> bool {
    matches!(test, Test::Amo | Test::SignalRate | Test::Ring)
}

/// Prepares the memory of each side that this process runs. The other process prepares its own
/// side.
fn prepare<V: Verbs>(verbs: &mut V, job: &Job) -> Outcome {
    for side in Side::BOTH {
        if !verbs.plays(side) {
            continue;
        }
        match job.test {
            Test::PutSignal => verbs.set_word(side, job.placement().signal, 0)?,
            Test::Ring => drop(verbs.ring(job, None)?),
            _ => verbs.set_word(side, put::SIGNALS[side.other() as usize], 0)?,
        }
        if job.bidirectional {
            verbs.set_word(side, put::SIGNALS[side as usize], 0)?;
        }
        match (job.test, side) {
            (Test::Amo | Test::SignalRate, Side::Answers) => verbs.set_word(side, SLOTS_AT, 0)?,
            (Test::Get, Side::Answers) => get::prepare(verbs, job)?,
            _ => {}
        }
    }
    Ok(())
}

fn run_job<V: Verbs>(verbs: &mut V, job: &Job, histogram: &mut Histogram) -> Outcome<Tally> {
    verbs.set_timeout(job.timeout_ns);
    let (before, busy) = (verbs.out_of_order(), clock::processor_ns());
    let tally = match job.test {
        _ if job.bidirectional => bidirectional::run(verbs, job, histogram),
        Test::PutSignal => put_signal::run(verbs, job, histogram),
        Test::Put => put::run(verbs, job, histogram),
        Test::Get => get::run(verbs, job, histogram),
        Test::Amo => amo::run(verbs, job, histogram),
        Test::SignalRate => signal_rate::run(verbs, job, histogram),
        Test::Tag => tag::run(verbs, job, histogram),
        Test::TagBw => tag_bw::run(verbs, job, histogram),
        Test::Ring => verbs.ring(job, Some(histogram)),
        Test::Pool => Err(Failure::usage("pool has no sides")),
    }?;
    // Excludes the share of the warm-up iterations. Assumes that they take as long as measured
    // iterations.
    let busy = clock::processor_ns() - busy;
    let cpu_ns =
        (u128::from(busy) * u128::from(job.iters) / u128::from(job.iters + job.warmup)) as u64;
    Ok(Tally { out_of_order: verbs.out_of_order() - before, cpu_ns, ..tally })
}
