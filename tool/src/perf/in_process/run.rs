//! The runs of both sides in one process: for each size one over loopback, or one for each seed
//! over the simulated fabric.

use std::time::Duration;

use fishplate_core::engine::{Config, RailPolicy};
use fishplate_core::error::AttachError;
use fishplate_core::mem::PeerId;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::{Dials, Packet, Sim, SimRail};

use super::super::job::{Job, Tally};
use super::super::steps::{self, Span};
use super::super::verbs::Verbs;
use super::super::{Files, always_checks, finish_row, headline, prepare, run_job};
use super::faults::{self, Counters, Ends, Record, Source};
use super::{InProcess, One, OwnEngine, Parts};
use crate::args::{Faults, Plan, SEED_ITERS, SIM_ITERS, Test, Trace, Transport, name};
use crate::clock::Clock;
use crate::failure::{Failure, Outcome, note};
use crate::histogram::Histogram;
use crate::limits;
use crate::progress::Progress;
use crate::report::{Report, Row};
use crate::sizes;

const DEPTH: usize = 256;
const PACKETS: usize = 1024;

pub fn run(plan: &Plan, files: &mut Files) -> Outcome {
    let _pinned = plan.places.pin_first()?;
    plan.trace.as_deref().map_or(Ok(()), Trace::create)?;
    let clock = Clock::calibrate();
    let mut report = Report::new(plan.format);
    headline(&mut report, plan, &clock)?;
    let steps = plan.sizes.len() as u64 * plan.seeds.unwrap_or(1);
    let progress = Progress::new(steps.div_ceil(100), plan.transport == Transport::Sim);
    let mut fault = Ok(());
    for &size in &plan.sizes {
        progress.begin(format!("{} {}", name(plan.test), sizes::show(size)));
        let row = row(plan, size, clock, &progress, &report, files)?;
        let check = plan.check || plan.transport == Transport::Sim || always_checks(plan.test);
        let written = progress.around(|| finish_row(&mut report, files, row, check));
        fault = fault.and(written);
    }
    fault
}

fn row(
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
                    simulate(plan.rails, &job, source, record, &mut packets, clock, &mut histogram)
                };
                let tally = match plan.faults {
                    Faults::None => run(Source::None, &mut Record::default()),
                    _ => {
                        let ran = faults::run(plan, &job, number + 1 == seeds, &mut counters, run);
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
            false => loop_back(plan.rails, &job, plan.duration, clock, &mut histogram),
        };
        let (tally, done) = tally.map_err(|error| match error {
            Failure::Run(message) if simulated => Failure::Run(format!(
                "{message}; to repeat it, use --rails {} --seed {seed} --size {size}{}",
                plan.rails,
                if plan.faults == Faults::Random { " --random-faults" } else { "" }
            )),
            error => error,
        })?;
        if simulated && tally.errors + tally.misordered > 0 {
            note(format_args!(
                "# seed {seed}: {} errors, {} signals misordered",
                tally.errors, tally.misordered
            ));
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

fn loop_back(
    rails: usize,
    job: &Job,
    duration: Option<Duration>,
    clock: Clock,
    histogram: &mut Histogram,
) -> Outcome<(Tally, u64)> {
    let config = Config { window: (job.window as u32).max(16), ..Config::DEFAULT };
    let mut parts = Parts::new(&config, job, 2)?;
    let (mut one, handle) =
        One::new(&mut parts, config, rails, |_| Loopback::<DEPTH>::new(), |_, _, _| Ok(()))
            .map_err(attach_failed)?;
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

fn simulate(
    rails: usize,
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
    let sim = Sim::new(packets, 2, rails as u16, Dials::WILD, job.seed).map_err(attach_failed)?;
    let (mut near, mut far) = (Parts::new(&config, job, 1)?, Parts::new(&config, job, 1)?);
    if fails {
        near.keep(&config);
        far.keep(&config);
    }
    let mut log = faults.room();
    let mut schedule = faults.schedule(&sim, rails, job.seed, &mut log);
    let attach = |node| {
        move |engine: &mut OwnEngine<'_, SimRail<'_, '_>>, rail, peer: PeerId| match engine
            .rail_mut(rail)
        {
            Some(mut rail) => rail.attach(peer.peer(), node),
            None => Ok(()),
        }
    };
    let (mut a, a_handle) =
        One::new(&mut near, configs[0], rails, |rail| sim.endpoint(0, rail as u16), attach(1))
            .map_err(attach_failed)?;
    let (mut b, b_handle) =
        One::new(&mut far, configs[1], rails, |rail| sim.endpoint(1, rail as u16), attach(0))
            .map_err(attach_failed)?;
    a.import(&b_handle).map_err(attach_failed)?;
    b.import(&a_handle).map_err(attach_failed)?;
    let mut both = InProcess::new(vec![a, b], clock);
    both.set_timeout(job.timeout_ns);
    let begun = clock.now();
    let mut turn = |op, engines: &mut [One<'_, SimRail<'_, '_>>]| {
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
