//! The trace of a simulated run with faults: the parameters, the faults with their times, and the
//! result. The same build repeats the run exactly from its trace.

use std::fmt;
use std::path::Path;

use clap::ValueEnum;
use fishplate_core::rail::sim::schedule::{Change, Event};

use super::{Test, name};
use crate::failure::{Failure, Outcome};

const FIRST_LINE: &str = "fishplate trace 1";

fn write(path: &Path, text: &str) -> Outcome {
    std::fs::write(path, text).map_err(|error| {
        Failure::usage(format!("--trace {}: {error}; choose another file", path.display()))
    })
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    pub test: Test,
    pub rails: usize,
    pub size: usize,
    pub iters: u64,
    pub window: u32,
    pub seed: u64,
    /// The faults, in order of the number of operations that are issued before them.
    pub events: Vec<Event>,
    pub end: String,
}

impl Trace {
    pub fn read(path: &Path) -> Outcome<Self> {
        let failed = |why: String| {
            Failure::usage(format!(
                "--replay {}: {why}; name a file that --trace wrote",
                path.display()
            ))
        };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(failed)
    }

    /// Creates the file that `--trace` names, before the run starts.
    pub fn create(path: &Path) -> Outcome {
        write(path, "")
    }

    pub fn write(&self, path: &Path) -> Outcome {
        write(path, &self.to_string())
    }

    /// Parses the text of a trace. An error names the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.strip_suffix('\n').ok_or("its last line is incomplete")?;
        let mut lines = text.split('\n').zip(1..);
        let mut line = || lines.next().unwrap_or(("", 0));
        if line().0 != FIRST_LINE {
            return Err(format!("the first line is not `{FIRST_LINE}`"));
        }
        let mut trace = Self::parse_run(line().0)
            .ok_or("line 2 does not describe a run of put-signal or tag")?;
        loop {
            let (text, number) = line();
            if let Some(end) = text.strip_prefix("end: ") {
                trace.end = end.into();
                return match line() {
                    (_, 0) => Ok(trace),
                    _ => Err(format!("line {number} ends the trace, but more lines follow")),
                };
            }
            if number == 0 {
                return Err("the line with its result is missing".into());
            }
            let event: Event = text.parse().map_err(|why| format!("line {number}: {why}"))?;
            let of_pair = match event.change {
                Change::Cut { link, .. } | Change::Disable { link, .. } | Change::Heal(link) => {
                    (link.a, link.b) == (0, 1) && usize::from(link.rail) < trace.rails
                }
                Change::Stall { .. } | Change::Die(_) => false,
            };
            let in_order = trace.events.last().is_none_or(|last| last.at <= event.at);
            if !of_pair || !in_order || event.to_string() != text {
                return Err(format!(
                    "line {number}: `{text}` is not a fault of this run, or is out of order"
                ));
            }
            trace.events.push(event);
        }
    }

    /// Parses the line that describes the run.
    fn parse_run(line: &str) -> Option<Self> {
        let words: Vec<_> = line.split(' ').collect();
        let &[
            test,
            "rails",
            rails,
            "size",
            size,
            "iterations",
            iters,
            "window",
            window,
            "seed",
            seed,
        ] = &words[..]
        else {
            return None;
        };
        let test = Test::from_str(test, false).ok()?;
        let trace = Trace {
            test,
            rails: rails.parse().ok()?,
            size: size.parse().ok()?,
            iters: iters.parse().ok()?,
            window: window.parse().ok()?,
            seed: seed.parse().ok()?,
            events: vec![],
            end: String::new(),
        };
        (trace.run() == line && matches!(test, Test::PutSignal | Test::Tag)).then_some(trace)
    }

    fn run(&self) -> String {
        let Trace { test, rails, size, iters, window, seed, .. } = self;
        let test = name(*test);
        format!("{test} rails {rails} size {size} iterations {iters} window {window} seed {seed}")
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FIRST_LINE}\n{}", self.run())?;
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))?;
        writeln!(f, "end: {}", self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "fishplate trace 1\n\
        put-signal rails 2 size 8 iterations 200 window 64 seed 7\n\
        10 cut 0-1 rail 1 late 300\n\
        20 heal 0-1 rail 1\n\
        end: 4711 polls, done\n";

    #[test]
    fn a_trace_is_written_as_it_is_read() {
        assert_eq!(Trace::parse(TEXT).unwrap().to_string(), TEXT);
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        for (from, to, says) in [
            ("trace 1", "trace 2", "first line"),
            ("put-signal", "put", "line 2"),
            ("seed 7", "seed 07", "line 2"),
            ("rails 2", "rails", "line 2"),
            ("cut", "melt", "line 3"),
            ("10 cut", "30 cut", "line 4"),
            ("10 cut", "10  cut", "line 3"),
            ("rail 1\n", "rail 2\n", "line 4"),
            ("20 heal 0-1 rail 1", "20 die 1", "line 4"),
            ("20 heal 0-1 rail 1", "20 heal 1-1 rail 1", "line 4"),
            ("end: 4711 polls, done\n", "", "its result"),
            ("done\n", "done", "incomplete"),
            ("done\n", "done\n\n", "line 5"),
        ] {
            let error = Trace::parse(&TEXT.replacen(from, to, 1)).unwrap_err();
            assert!(error.contains(says), "{from} -> {to}: {error}");
        }
    }
}
