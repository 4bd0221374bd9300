//! Finds options that have no effect on the run. They are refused, or at least reported; none is
//! ignored silently.

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};

use super::{Cli, Command, PerfArgs, Test, Transport, name};
use crate::failure::{Failure, Outcome};

/// The tests in which an option has an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    /// Every test that has two sides.
    TwoSides,
    /// These tests.
    Tests(&'static [Test]),
}

/// The options that have no effect in some runs, by their names in clap and on the command line.
/// Other options are checked together with their values.
const OPTIONS: [(&str, &str, Counts); 21] = [
    ("size", "--size", Counts::TwoSides),
    ("begin", "--begin", Counts::TwoSides),
    ("end", "--end", Counts::TwoSides),
    ("factor", "--factor", Counts::TwoSides),
    ("duration", "--duration", Counts::TwoSides),
    ("bidirectional", "--bidirectional", Counts::TwoSides),
    ("hist", "--hist", Counts::TwoSides),
    ("plot", "--plot", Counts::TwoSides),
    ("warmup", "--warmup", Counts::TwoSides),
    ("transport", "--transport", Counts::TwoSides),
    ("rails", "--rails", Counts::TwoSides),
    ("seed", "--seed", Counts::TwoSides),
    ("check", "--check", Counts::TwoSides),
    ("pin", "--pin", Counts::TwoSides),
    ("region", "--region", Counts::TwoSides),
    ("timeout", "--timeout", Counts::TwoSides),
    ("listen", "--listen", Counts::TwoSides),
    ("connect", "--connect", Counts::TwoSides),
    ("streams", "--streams", Counts::Tests(&[Test::Pool])),
    ("layout", "--layout", Counts::Tests(&[Test::PutSignal])),
    ("signal", "--signal", Counts::Tests(&[Test::SignalRate])),
];

/// Options that the connecting side sets for both sides.
const LEADERS: [(&str, &str); 16] = [
    ("size", "--size"),
    ("begin", "--begin"),
    ("end", "--end"),
    ("factor", "--factor"),
    ("iters", "--iters"),
    ("duration", "--duration"),
    ("bidirectional", "--bidirectional"),
    ("hist", "--hist"),
    ("plot", "--plot"),
    ("warmup", "--warmup"),
    ("seed", "--seed"),
    ("check", "--check"),
    ("window", "--window"),
    ("pin", "--pin"),
    ("layout", "--layout"),
    ("format", "--format"),
];

/// The options of a command line, by their names in clap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given(Vec<String>);

impl Given {
    fn of(matches: &ArgMatches) -> Self {
        let written = |id: &&str| matches.value_source(id) == Some(ValueSource::CommandLine);
        Given(matches.ids().map(|id| id.as_str()).filter(written).map(str::to_owned).collect())
    }

    fn has(&self, id: &str) -> bool {
        self.0.iter().any(|given| given == id)
    }
}

impl Cli {
    /// Parses a command line, and records which options it contains.
    pub fn read(
        words: impl IntoIterator<Item = impl Into<std::ffi::OsString> + Clone>,
    ) -> clap::error::Result<Self> {
        let matches = Cli::command().try_get_matches_from(words)?;
        let mut cli = Cli::from_arg_matches(&matches)?;
        if let (Some(Command::Perf(args)), Some((_, matches))) = (&mut cli.command, matches.subcommand()) {
            args.given = Given::of(matches);
        }
        Ok(cli)
    }
}

impl PerfArgs {
    /// Checks that every given option has an effect on the run.
    pub(super) fn check_given(&self) -> Outcome {
        let counts = |counts| match counts {
            Counts::TwoSides => self.test != Test::Pool,
            Counts::Tests(tests) => tests.contains(&self.test),
        };
        let idle = OPTIONS.iter().find(|(id, _, where_)| self.given.has(id) && !counts(*where_));
        if let Some((_, option, _)) = idle {
            return Err(Failure::usage(format!(
                "{option} has no effect on {}: leave it out",
                name(self.test)
            )));
        }
        // Rings have a fixed size, and pools have no operations in flight.
        if self.given.has("window") && matches!(self.test, Test::Pool | Test::Ring) {
            return Err(Failure::usage(format!(
                "--window has no effect on {}: leave it out",
                name(self.test)
            )));
        }
        Ok(())
    }

    /// Returns messages about options that affect only the other side, or change nothing here.
    pub(super) fn notes(&self) -> Vec<String> {
        if self.given.has("warmup") && self.transport == Transport::Sim {
            return vec!["--warmup: not used, because a simulation needs no warm-up".into()];
        }
        let windowed = matches!(self.test, Test::Put | Test::SignalRate | Test::TagBw);
        if self.given.has("window") && !windowed && self.transport != Transport::Sim {
            return vec![format!(
                "--window: not used, because {} has one operation in flight",
                name(self.test)
            )];
        }
        let idle: Vec<&str> =
            LEADERS.iter().filter(|(id, _)| self.given.has(id)).map(|(_, option)| *option).collect();
        match self.listen.is_some() && !idle.is_empty() {
            true => vec![format!("{}: not used, because the side that connects decides", idle.join(", "))],
            false => vec![],
        }
    }
}

/// Returns the options named here, for a test that they exist.
#[cfg(test)]
pub fn ids() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|(id, ..)| *id).chain(LEADERS.iter().map(|(id, _)| *id))
}
