//! The options that make simulated rails fail.

use std::path::PathBuf;

use clap::Args;
use fishplate_core::rail::sim::schedule::{Change, Event, Link};

use super::{PerfArgs, Test, Trace, Transport};
use crate::failure::{Failure, Outcome};
use crate::sizes;

/// Number of polls during which traffic may still land on a rail that `--late` has cut.
const LATE: u32 = 5000;

/// Options of `fishplate perf` for put-signal and tag with `--transport sim`.
#[derive(Clone, Debug, Default, Args)]
pub struct FaultArgs {
    /// With --transport sim: cut a rail in both directions. 1@500 cuts rail 1 once 500 operations
    /// are issued. See --help.
    #[arg(long, value_name = "RAIL@OP", value_delimiter = ',', value_parser = Point::parse)]
    pub kill: Vec<Point>,
    /// Restore a rail that was cut.
    #[arg(long, value_name = "RAIL@OP", value_delimiter = ',', value_parser = Point::parse)]
    pub heal: Vec<Point>,
    /// Like --kill, but operations in flight may still land later, although they were reported as
    /// failed.
    #[arg(long, value_name = "RAIL@OP", value_delimiter = ',', value_parser = Point::parse)]
    pub late: Vec<Point>,
    /// Cut a rail in one direction. 1@500 cuts from the first side to the second, 1@500:back from
    /// the second to the first.
    #[arg(long, value_name = "RAIL@OP", value_delimiter = ',', value_parser = OneWay::parse)]
    pub cut_one_way: Vec<OneWay>,
    /// Draw faults from the seed. One rail stays in use. If a run fails, it is repeated with fewer
    /// faults, to find the smallest failing set.
    #[arg(long, conflicts_with_all = ["kill", "heal", "late", "cut_one_way"])]
    pub random_faults: bool,
    /// Write the run and its faults into this file. With --seeds: the first run that fails, else
    /// the last run.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Repeat the run that a trace file records. Fail if the new run differs.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kill", "heal", "late", "cut_one_way", "random_faults",
        "size", "begin", "end", "factor", "iters", "rails", "seed", "seeds", "window"])]
    pub replay: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    rail: u16,
    op: u64,
}

impl Point {
    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not RAIL@OPERATION, such as 1@500");
        let (rail, op) = text.split_once('@').ok_or_else(wrong)?;
        let op = sizes::parse_count(op).map_err(|_| wrong())?;
        Ok(Point { rail: rail.parse().map_err(|_| wrong())?, op })
    }
}

/// If `back`, from the second side to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OneWay {
    at: Point,
    back: bool,
}

impl OneWay {
    fn parse(text: &str) -> Result<Self, String> {
        let (point, back) = text.strip_suffix(":back").map_or((text, false), |point| (point, true));
        Point::parse(point).map(|at| OneWay { at, back })
    }
}

/// The source of a run's faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Faults {
    #[default]
    None,
    /// Drawn from the seed.
    Random,
    /// The faults that the command line gives, in order of time.
    Given(Vec<Event>),
    /// The faults of a trace file. The run must end as the trace records.
    Replay(PathBuf, Trace),
}

impl PerfArgs {
    pub(super) fn take_trace(&mut self) -> Outcome<Option<Trace>> {
        let Some(path) = &self.faults.replay else { return Ok(None) };
        let trace = Trace::read(path)?;
        if self.test != trace.test {
            let test = super::name(trace.test);
            return Err(Failure::usage(format!(
                "--replay {}: this is a trace of {test}; use fishplate perf {test}",
                path.display()
            )));
        }
        (self.size, self.iters) = (vec![trace.size], Some(trace.iters));
        (self.window, self.rails, self.seed) = (trace.window, trace.rails, trace.seed);
        Ok(Some(trace))
    }

    /// Checks the fault options. Returns the source of the faults. `iters` is the number of
    /// operations of a run.
    pub(super) fn faults(&self, trace: Option<Trace>, iters: u64) -> Outcome<Faults> {
        let FaultArgs { kill, heal, late, cut_one_way, random_faults, replay, .. } = &self.faults;
        let events = kill.len() + heal.len() + late.len() + cut_one_way.len();
        let given = [
            (events > 0, "--kill, --heal, --late and --cut-one-way"),
            (*random_faults, "--random-faults"),
            (self.faults.trace.is_some(), "--trace"),
            (replay.is_some(), "--replay"),
        ];
        let simulated =
            self.transport == Transport::Sim && matches!(self.test, Test::PutSignal | Test::Tag);
        if let Some((_, options)) = given.iter().find(|(given, _)| *given && !simulated) {
            return Err(Failure::usage(format!(
                "{options}: only simulated rails fail; use put-signal or tag and --transport sim"
            )));
        }
        let events = self.events(iters)?;
        if self.faults.trace.is_some() && self.sizes()?.len() > 1 {
            return Err(Failure::usage(
                "--trace: a trace has one payload size; name one with --size",
            ));
        }
        match (trace, replay) {
            (Some(trace), Some(path)) => Ok(Faults::Replay(path.clone(), trace)),
            _ if *random_faults && self.rails < 2 => Err(Failure::usage(
                "--random-faults: one rail stays in use, so no rail could fail; use --rails 2 or \
                 more",
            )),
            _ if *random_faults => Ok(Faults::Random),
            _ if events.is_empty() && self.faults.trace.is_none() => Ok(Faults::None),
            _ => Ok(Faults::Given(events)),
        }
    }

    fn events(&self, iters: u64) -> Outcome<Vec<Event>> {
        let FaultArgs { kill, heal, late, cut_one_way, .. } = &self.faults;
        let cut = |there, back, late| move |link| Change::Cut { link, there, back, late };
        let mut events = vec![];
        let mut add = |option: &str, at: &Point, change: &dyn Fn(Link) -> Change| {
            let Point { rail, op } = *at;
            if usize::from(rail) >= self.rails {
                return Err(Failure::usage(format!(
                    "{option} {rail}@{op}: the last rail is {}; use a lower rail number, or more \
                     --rails",
                    self.rails - 1
                )));
            }
            if op >= iters {
                return Err(Failure::usage(format!(
                    "{option} {rail}@{op}: the run has {iters} operations; use a lower operation \
                     number, or a larger -n"
                )));
            }
            events.push(Event { at: op, change: change(Link { a: 0, b: 1, rail }) });
            Ok(())
        };
        kill.iter().try_for_each(|at| add("--kill", at, &cut(true, true, 0)))?;
        late.iter().try_for_each(|at| add("--late", at, &cut(true, true, LATE)))?;
        for OneWay { at, back } in cut_one_way {
            add("--cut-one-way", at, &cut(!back, *back, 0))?;
        }
        heal.iter().try_for_each(|at| add("--heal", at, &Change::Heal))?;
        events.sort_by_key(|event: &Event| event.at);
        let mut down = vec![false; self.rails];
        for event in &events {
            match event.change {
                Change::Heal(link) if !std::mem::take(&mut down[usize::from(link.rail)]) => {
                    return Err(Failure::usage(format!(
                        "--heal {}@{}: the rail is not cut by then; cut it before, with --kill",
                        link.rail, event.at
                    )));
                }
                Change::Cut { link, .. } => down[usize::from(link.rail)] = true,
                _ => {}
            }
        }
        Ok(events)
    }
}
