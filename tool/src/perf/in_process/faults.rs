//! Runs jobs with faults of simulated rails, and writes their traces.

use std::{array, fmt};

use fishplate_core::engine::Stats;
use fishplate_core::mem::RailId;
use fishplate_core::rail::Rail;
use fishplate_core::rail::sim::Sim;
use fishplate_core::rail::sim::schedule::{Event, Nodes, Schedule, Scope, shrink};

use super::super::job::{Job, Tally};
use super::One;
use crate::args::{Faults, Plan, Trace};
use crate::failure::{self, Failure, Outcome};

const DRAWN: usize = 4096;

#[derive(Clone, Copy)]
pub enum Source<'a> {
    None,
    Random,
    /// If the flag is set, events that could take the last rail are left out.
    Given(&'a [Event], bool),
}

impl<'a> Source<'a> {
    pub fn of(faults: &'a Faults) -> Self {
        match faults {
            Faults::None => Source::None,
            Faults::Random => Source::Random,
            Faults::Given(events) | Faults::Replay(_, Trace { events, .. }) => {
                Source::Given(events, false)
            }
        }
    }

    pub fn room(self) -> Vec<Event> {
        let count = match self {
            Source::None => 0,
            Source::Random => DRAWN,
            Source::Given(events, _) => events.len(),
        };
        vec![Event::EMPTY; count]
    }

    pub fn schedule<'m>(
        self,
        sim: &'a Sim<'m>,
        rails: usize,
        seed: u64,
        log: &'a mut [Event],
    ) -> Option<Schedule<'a, 'm>> {
        let scope =
            Scope { nodes: 2, rails: rails as u16, own: false, closes: false, stalls: false };
        match self {
            Source::None => None,
            Source::Random => Some(Schedule::drawn(sim, scope, seed, log)),
            Source::Given(events, spares) => Some(Schedule::given(sim, scope, events, spares, log)),
        }
    }
}

pub struct Ends<'a, 'm, R: Rail>(pub &'a mut [One<'m, R>]);

impl<R: Rail> Nodes for Ends<'_, '_, R> {
    fn uses(&self, from: u16, _: u16, rail: u16) -> bool {
        let One { engine, peer, .. } = &self.0[usize::from(from)];
        engine.rail_error(*peer, RailId(rail as u8)) == Ok(None)
    }

    fn disable(&mut self, by: u16, _: u16, rail: u16) -> bool {
        let One { engine, peer, .. } = &mut self.0[usize::from(by)];
        engine.disable_rail(*peer, RailId(rail as u8)).is_ok()
    }

    fn enable(&mut self, by: u16, _: u16, rail: u16) {
        let One { engine, peer, .. } = &mut self.0[usize::from(by)];
        // Fails if the peer has failed. The run then reports that.
        _ = engine.enable_rail(*peer, RailId(rail as u8));
    }
}

#[derive(Clone, Copy, Default)]
pub struct Counters([u64; 6]);

impl Counters {
    fn of(stats: &Stats) -> Self {
        let Stats {
            rails_failed, rails_returned, reposted, replied_again, duplicates, stale, ..
        } = *stats;
        Counters([rails_failed, rails_returned, reposted, replied_again, duplicates, stale])
    }

    fn and(self, other: Self) -> Self {
        Counters(array::from_fn(|at| self.0[at] + other.0[at]))
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [failed, returned, reposted, replied, duplicates, stale] = self.0;
        write!(
            f,
            "rails failed {failed}, returned {returned}; posted again: {reposted} operations, "
        )?;
        write!(f, "{replied} replies; dropped: {duplicates} duplicates, {stale} stale")
    }
}

#[derive(Default)]
pub struct Record {
    events: Vec<Event>,
    counters: Counters,
    /// The simulated fabric's time in polls, and the hash of its history.
    polls: u64,
    hash: u64,
}

impl Record {
    pub fn take<R: Rail>(
        &mut self,
        schedule: &Schedule<'_, '_>,
        sim: &Sim<'_>,
        engines: &[One<'_, R>],
    ) {
        let counters = engines.iter().map(|one| Counters::of(&one.engine.stats()));
        *self = Record {
            events: schedule.events().to_vec(),
            counters: counters.fold(Counters::default(), Counters::and),
            polls: sim.now(),
            hash: sim.trace(),
        };
    }

    pub fn trace(&self, job: &Job, rails: usize, outcome: &Outcome<Tally>) -> Trace {
        let end = match outcome {
            Err(failure) => failure.to_string().replace('\n', " "),
            Ok(Tally { errors: 0, misordered: 0, .. }) => "done".into(),
            Ok(tally) => {
                format!("{} errors, {} signals misordered", tally.errors, tally.misordered)
            }
        };
        let Record { events, counters, polls, hash } = self;
        Trace {
            test: job.test,
            rails,
            size: job.size,
            iters: job.iters,
            window: job.window as u32,
            seed: job.seed,
            events: events.clone(),
            end: format!("{polls} polls, hash {hash:016x}; {counters}; {end}"),
        }
    }
}

/// Runs a job with the faults of a plan, and writes its trace if `--trace` asks for one. Returns
/// the result, and lines that describe the run. `attempt` runs the job once.
///
/// If a run with drawn faults fails, removes the faults that the failure does not need, and prints
/// the others.
pub fn run(
    plan: &Plan,
    job: &Job,
    is_last: bool,
    totals: &mut Counters,
    mut attempt: impl FnMut(Source<'_>, &mut Record) -> Outcome<Tally>,
) -> Outcome<(Tally, Vec<String>)> {
    let mut record = Record::default();
    let mut outcome = attempt(Source::of(&plan.faults), &mut record);
    let (failed, all) = (has_failed(&outcome), record.events.len());
    if failed && plan.faults == Faults::Random {
        (record, outcome) = reduce(record, outcome, attempt);
    }
    let trace = record.trace(job, plan.rails, &outcome);
    if let Some(path) = plan.trace.as_deref().filter(|_| failed || is_last) {
        trace.write(path)?;
    }
    *totals = totals.and(record.counters);
    let mut notes = match plan.faults {
        Faults::Random if failed => {
            vec![format!("seed {} fails with {} of {all} events:", job.seed, record.events.len())]
        }
        _ => vec![],
    };
    if failed || plan.seeds.is_none() {
        notes.extend(record.events.iter().map(Event::to_string));
    }
    match failed {
        true => notes.push(record.counters.to_string()),
        false if is_last => notes.push(totals.to_string()),
        false => {}
    }
    if let Faults::Replay(_, given) = &plan.faults {
        compare(given, &trace)?;
        notes.push("the run is the same as in the trace".into());
    }
    if failed {
        notes.drain(..).for_each(|note| failure::note(format_args!("# {note}")));
    }
    let tally = outcome?;
    if failed {
        let Tally { errors, misordered, .. } = tally;
        return Err(Failure::run(format!("{errors} errors, {misordered} signals misordered")));
    }
    Ok((tally, notes))
}

/// An interrupted run has not failed.
fn has_failed(outcome: &Outcome<Tally>) -> bool {
    match outcome {
        Ok(tally) => tally.errors + tally.misordered != 0,
        Err(failure) => !matches!(failure, Failure::Interrupted(_)),
    }
}

/// Removes the events that a failed run does not need. Returns the record and the result of the
/// shortest run that fails.
fn reduce(
    record: Record,
    failed: Outcome<Tally>,
    mut attempt: impl FnMut(Source<'_>, &mut Record) -> Outcome<Tally>,
) -> (Record, Outcome<Tally>) {
    let mut events = record.events.clone();
    let mut shortest = (record, failed);
    shrink(&mut events, |some| {
        let mut record = Record::default();
        let outcome = attempt(Source::Given(some, true), &mut record);
        let fails = has_failed(&outcome);
        if fails {
            shortest = (record, outcome);
        }
        fails
    });
    shortest
}

fn compare(given: &Trace, now: &Trace) -> Outcome {
    let (given, now) = (given.to_string(), now.to_string());
    match given.lines().zip(now.lines()).zip(1..).find(|((given, now), _)| given != now) {
        None if given == now => Ok(()),
        found => {
            let ((given, now), line) = found.unwrap_or((("", ""), 0));
            Err(Failure::run(format!(
                "the run differs from its trace in line {line}: `{now}` instead of `{given}`; \
                 replay it with the build that wrote it"
            )))
        }
    }
}
