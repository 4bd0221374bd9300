//! Runs `perf match`, which compares tag-matching engines without a transport. The engines take
//! turns at the same work. If their matches differ, the run fails.
//!
//! | part | what |
//! |---|---|
//! | `engine` | the interface of an engine |
//! | `ours`, `list`, `ucx` | the engines |
//! | `workload`, `trace` | the work |
//! | `oracle` | random operations, for tests |

mod engine;
mod list;
#[cfg(test)]
mod oracle;
mod ours;
mod trace;
mod ucx;
mod workload;

use std::ffi::OsString;
use std::hint::black_box;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use serde::Serialize;

use crate::args::Format;
use crate::clock::Clock;
use crate::failure::{Failure, Outcome};
use crate::instructions::Instructions;
use crate::interrupt;
use crate::report::{Columns, Report, SCHEMA_VERSION};
use crate::sizes::{self, time};

use engine::{Engine, Pairs};
use trace::{Step, Trace};
use workload::{Bench, Workload};

/// Measure tag matching without a transport, and compare engines.
#[derive(Debug, Parser)]
#[command(name = "fishplate perf match", bin_name = "fishplate perf \
    match", max_term_width = 80, after_long_help = HELP)]
pub struct MatchArgs {
    /// Engines to compare.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "ours,list")]
    engines: Vec<Kind>,
    /// Workloads and traces [default: all].
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = parse_work)]
    workloads: Vec<Work>,
    /// Depths, at most 65536 [default: 0 and the powers of 4]; traces have their own.
    #[arg(
        long, value_name = "LIST",
        value_delimiter = ',', value_parser = sizes::count_in::<u32>(0, DEPTH_MAX)
    )]
    depths: Vec<u32>,
    /// Units that an engine runs per turn.
    #[arg(
        short = 'n', long, value_name = "N", value_parser = sizes::count_in::<u64>(1, u64::MAX),
        default_value = "20K"
    )]
    units: u64,
    /// Turns of each engine; medians are reported.
    #[arg(long, value_name = "N", value_parser = sizes::count_in::<u32>(1, 1000), default_value = "5")]
    rounds: u32,
    /// Skip a row for an engine that would take longer than this.
    #[arg(long, value_name = "TIME", value_parser = sizes::parse_time, default_value = "2s")]
    patience: Duration,
    /// How to write the results.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// The same as --format json.
    #[arg(long, conflicts_with = "format")]
    json: bool,
}

const HELP: &str = "\
A unit is a receive and its message: post, arrival, match, completion. D is
the depth. An exact receive names source and tag, and compares every bit.
  P1-P4   an exact receive behind D others: exact ones; from any source; of
          any tag; of any source and tag, in another communicator
  P5      a receive from any source behind D receives from any source
  P6-P8   D receives, then their messages in order, in reverse, at random
  P9      D equal receives, then their messages
  P10     a receive behind D receives of the same tag from other sources; one
          bit of the tag is always ignored
  P11     a receive behind D receives that use 32 different masks
  U1-U4   D messages, then their receives in reverse: exact, from any source,
          of any tag, of any source and tag
  U5      receives with a new mask behind D messages; 16 receives per mask
  U6      D messages; for each a probe that finds nothing, and a matched probe
          with its receive
  C1      post and cancel D receives: oldest first, youngest first, at random
  T1-T6   traces: halo exchange, all to all, master and workers, many to one,
          threads, a runtime that accepts any message
max_ns is the longest single call, or the longest unit behind D others.
instr_per_op is null where the kernel counts no instructions for this program
(mostly in virtual machines); benches/budgets.sh counts them everywhere. ucx is
loaded at run time (package libucx0) and uses its self transport (loopback).";

const DEPTH_MAX: u64 = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// The matcher of this project.
    Ours,
    /// Two lists searched from the oldest entry.
    List,
    /// UCX, over its self transport (loopback).
    Ucx,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Load(Workload),
    Trace(Trace),
}

fn kind_name(kind: Kind) -> String {
    crate::args::name(kind)
}

fn all_work() -> impl Iterator<Item = (String, Work)> {
    let loads = Workload::ALL.iter().map(|load| (format!("{load:?}"), Work::Load(*load)));
    loads.chain(Trace::ALL.iter().map(|trace| (format!("{trace:?}"), Work::Trace(*trace))))
}

fn parse_work(text: &str) -> Result<Work, String> {
    let known = all_work().find(|(name, _)| name.eq_ignore_ascii_case(text));
    known
        .map(|(_, work)| work)
        .ok_or_else(|| format!("`{text}`: use P1 to P11, U1 to U6, C1 or T1 to T6"))
}

/// The JSON has the same fields.
#[derive(Clone, Debug, Serialize)]
struct Row {
    schema_version: u32,
    test: &'static str,
    engine: String,
    workload: String,
    depth: u32,
    ns_per_op: f64,
    instr_per_op: Option<f64>,
    max_ns: f64,
    bytes_per_entry: Option<f64>,
}

trait Ready {
    fn run(&mut self, rounds: u64);
    /// Runs one round. Returns the longest time between two consecutive steps, in clock cycles.
    fn longest(&mut self, clock: Clock) -> u64;
    fn pairs(&self) -> Pairs;
}

struct Loaded<E> {
    engine: E,
    task: Task,
}

#[derive(Clone)]
enum Task {
    Bench(Bench),
    Steps(Vec<Step>),
}

impl<E: Engine> Loaded<E> {
    #[inline(always)]
    fn round(&mut self, tick: impl FnMut()) {
        match &mut self.task {
            Task::Bench(bench) => bench.round(&mut self.engine, tick),
            Task::Steps(steps) => trace::replay(steps, &mut self.engine, tick),
        }
    }
}

impl<E: Engine> Ready for Loaded<E> {
    fn run(&mut self, rounds: u64) {
        for _ in 0..rounds {
            self.round(|| {});
        }
        black_box(self.engine.pairs());
    }

    fn longest(&mut self, clock: Clock) -> u64 {
        let (mut last, mut longest) = (clock.now(), 0);
        self.round(|| {
            let now = clock.now();
            longest = longest.max(now.wrapping_sub(last));
            last = now;
        });
        longest
    }

    fn pairs(&self) -> Pairs {
        self.engine.pairs()
    }
}

/// A workload or trace at one depth: its task, the units per round, and the numbers of entries and
/// contexts that it needs.
struct Job {
    task: Task,
    units: u64,
    room: usize,
    contexts: usize,
    unexpected: bool,
}

impl Job {
    fn new(work: Work, depth: u32) -> Self {
        match work {
            Work::Load(load) => {
                let room = workload::room(depth);
                let task = Task::Bench(Bench::new(load, depth));
                Job {
                    task,
                    units: load.units(depth),
                    room,
                    contexts: room,
                    unexpected: load.is_unexpected(),
                }
            }
            Work::Trace(trace) => {
                let steps = trace.steps(depth);
                let contexts = steps.iter().filter(|step| matches!(step, Step::Post(..))).count();
                let unexpected = matches!(trace, Trace::T3 | Trace::T4);
                Job {
                    task: Task::Steps(steps),
                    units: contexts as u64,
                    room: contexts,
                    contexts,
                    unexpected,
                }
            }
        }
    }

    fn load<E: Engine + 'static>(&self, mut engine: E) -> Box<dyn Ready> {
        let task = self.task.clone();
        if let Task::Bench(bench) = &task {
            bench.prepare(&mut engine);
        }
        Box::new(Loaded { engine, task })
    }

    fn ready(&self, kind: Kind) -> Outcome<(Box<dyn Ready>, Option<f64>)> {
        Ok(match kind {
            Kind::Ours => {
                let (posted, message) = ours::Ours::BYTES;
                let bytes = if self.unexpected { message } else { posted };
                (self.load(ours::Ours::new(self.room, self.contexts)), Some(bytes))
            }
            Kind::List => {
                (self.load(list::List::new(self.room, self.contexts)), Some(list::List::BYTES))
            }
            Kind::Ucx => {
                let ucx = ucx::Ucx::new(self.contexts)
                    .map_err(|why| Failure::usage(format!("ucx: {why}")))?;
                (self.load(ucx), None)
            }
        })
    }
}

pub fn run(words: &[OsString]) -> Outcome {
    let args = MatchArgs::parse_from(words[2..].iter());
    interrupt::end_at_once();
    let (clock, mut counter) = (Clock::calibrate(), Instructions::start());
    let format = if args.json { Format::Json } else { args.format };
    let mut report = Report::new(format);
    report.comment(&format!(
        "fishplate {} perf match  units={} rounds={} clock={} build={}",
        env!("CARGO_PKG_VERSION"),
        args.units,
        args.rounds,
        clock.describe(),
        if cfg!(debug_assertions) { "debug (figures mean nothing)" } else { "release" },
    ))?;
    let chosen = |work: &Work| args.workloads.is_empty() || args.workloads.contains(work);
    for (name, work) in all_work().filter(|(_, work)| chosen(work)) {
        // For each engine: the previous depth, and its time per unit there in nanoseconds.
        let mut before = vec![(0, 0.0); args.engines.len()];
        for depth in depths(work, &args.depths) {
            run_row(&args, &mut report, (clock, &mut counter), (&name, work, depth), &mut before)?;
        }
    }
    Ok(())
}

fn depths(work: Work, asked: &[u32]) -> Vec<u32> {
    const DEPTHS: [u32; 10] = [0, 1, 4, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10];
    match work {
        Work::Trace(trace) => trace.depths().to_vec(),
        Work::Load(load) => {
            let depths = if asked.is_empty() { &DEPTHS } else { asked };
            depths.iter().copied().filter(|depth| *depth > 0 || !load.drains()).collect()
        }
    }
}

fn run_row(
    args: &MatchArgs,
    report: &mut Report,
    (clock, counter): (Clock, &mut Instructions),
    (name, work, depth): (&str, Work, u32),
    before: &mut [(u32, f64)],
) -> Outcome {
    let job = Job::new(work, depth);
    let mut running = vec![];
    let mut pairs: Option<(Kind, Pairs)> = None;
    for (kind, (depth_before, ns_before)) in args.engines.iter().zip(&*before) {
        // Assumes the worst case: the time per unit grows with the depth, as in a linear list.
        let growth = if *depth_before > 0 { depth as f64 / *depth_before as f64 } else { 1.0 };
        if ns_before * growth * job.units as f64 > args.patience.as_nanos() as f64 {
            report.comment(&format!(
                "{name} {depth}: skipped {}, which would take too long",
                kind_name(*kind)
            ))?;
            continue;
        }
        let (mut ready, bytes) = job.ready(*kind)?;
        let began = Instant::now();
        ready.run(1);
        let took = began.elapsed();
        match pairs {
            None => pairs = Some((*kind, ready.pairs())),
            Some((first, right)) if ready.pairs() != right => {
                return Err(Failure::run(format!(
                    "{name} {depth}: {} and {} matched messages to different receives; one of them \
                     is wrong",
                    kind_name(*kind),
                    kind_name(first)
                )));
            }
            Some(_) => {}
        }
        let affordable =
            args.patience.as_nanos() / (took.as_nanos().max(1) * (args.rounds as u128 + 1));
        let rounds = args.units.div_ceil(job.units.max(1)).min(affordable as u64).max(1);
        running.push(Turns {
            kind: *kind,
            ready,
            bytes,
            rounds,
            times: vec![],
            instructions: vec![],
        });
    }
    for _ in 0..args.rounds {
        for Turns { ready, rounds, times, instructions, .. } in &mut running {
            let units = (*rounds * job.units) as f64;
            let counted = counter.read();
            let began = clock.now();
            ready.run(*rounds);
            let ticks = clock.now().wrapping_sub(began);
            times.push(clock.ns(ticks) / units);
            if let (Some(before), Some(now)) = (counted, counter.read()) {
                instructions.push(now.wrapping_sub(before) as f64 / units);
            }
        }
    }
    for Turns { kind, mut ready, bytes, rounds, times, instructions } in running {
        let longest = (0..rounds).map(|_| ready.longest(clock)).max().unwrap_or(0);
        let ns = median(times).unwrap_or(f64::NAN);
        if let Some(at) = args.engines.iter().position(|other| *other == kind) {
            before[at] = (depth, ns);
        }
        report.row(&Row {
            schema_version: SCHEMA_VERSION,
            test: "match",
            engine: kind
                .to_possible_value()
                .map_or_else(String::new, |value| value.get_name().to_owned()),
            workload: name.to_owned(),
            depth,
            ns_per_op: ns,
            instr_per_op: median(instructions),
            max_ns: clock.ns(longest),
            bytes_per_entry: bytes,
        })?;
    }
    Ok(())
}

struct Turns {
    kind: Kind,
    ready: Box<dyn Ready>,
    bytes: Option<f64>,
    rounds: u64,
    /// For each turn, nanoseconds per unit, and instructions per unit if they are counted.
    times: Vec<f64>,
    instructions: Vec<f64>,
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

impl Row {
    /// Formats the optional values. A missing value becomes an empty string.
    fn optional(&self) -> [String; 2] {
        let bytes = self.bytes_per_entry.map_or_else(String::new, |bytes| bytes.to_string());
        [bytes, self.instr_per_op.map_or_else(String::new, |count| format!("{count:.1}"))]
    }
}

impl Columns for Row {
    fn table(&self) -> [String; 2] {
        let [bytes, instructions] = self.optional();
        [
            format!(
                "#{:>8} {:>6}  {:<7} {:>10} {:>10} {:>11} {:>12}",
                "workload", "depth", "engine", "per unit", "longest", "bytes/entry", "instructions"
            ),
            format!(
                "{:>9} {:>6}  {:<7} {:>10} {:>10} {bytes:>11} {instructions:>12}",
                self.workload,
                self.depth,
                self.engine,
                time(self.ns_per_op),
                time(self.max_ns)
            ),
        ]
    }

    fn csv(&self) -> [String; 2] {
        let [bytes, instructions] = self.optional();
        [
            "schema_version,test,engine,workload,depth,ns_per_op,instr_per_op,max_ns,bytes_per_entry".into(),
            format!(
                "{},match,{},{},{},{:.3},{instructions},{:.3},{bytes}",
                self.schema_version, self.engine, self.workload, self.depth, self.ns_per_op,
                    self.max_ns
            ),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_and_trace_pairs_alike_in_both_engines_and_leaves_nothing_behind() {
        for (name, work) in all_work() {
            for depth in depths(work, &[1, 2, 5, 40]) {
                let job = Job::new(work, depth);
                let (mut ours, _) = job.ready(Kind::Ours).unwrap();
                let (mut list, _) = job.ready(Kind::List).unwrap();
                for round in 1..4 {
                    ours.run(1);
                    list.run(1);
                    assert_eq!(ours.pairs(), list.pairs(), "{name} {depth}");
                    let units = if work == Work::Load(Workload::C1) { 0 } else { job.units };
                    assert_eq!(ours.pairs().count, round * units, "{name} {depth}");
                }
            }
        }
    }
}
