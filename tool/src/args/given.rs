//! Rejects options that have no effect on the run. The listening side only reports options that the
//! connecting side decides, so that both sides may be given the same options.

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};

use super::{Cli, Command, PerfArgs, Test, Transport, name};
use crate::failure::{Failure, Outcome};

/// The tests that an option affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    /// Every test that has two sides.
    TwoSides,
    Tests(&'static [Test]),
    /// Tests with more than one operation in flight.
    Windows,
    /// Tests with payloads, and every test over the simulated fabric.
    Seeds,
    /// Tests that warm up. Tests over the simulated fabric do not.
    WarmUp,
}

/// Options that some tests ignore: the name in clap, the name on the command line, and the affected
/// tests.
const OPTIONS: [(&str, &str, Counts); 22] = [
    ("size", "--size", Counts::TwoSides),
    ("begin", "--begin", Counts::TwoSides),
    ("end", "--end", Counts::TwoSides),
    ("factor", "--factor", Counts::TwoSides),
    ("duration", "--duration", Counts::TwoSides),
    ("bidirectional", "--bidirectional", Counts::TwoSides),
    ("hist", "--hist", Counts::TwoSides),
    ("plot", "--plot", Counts::TwoSides),
    ("warmup", "--warmup", Counts::WarmUp),
    ("transport", "--transport", Counts::TwoSides),
    ("rails", "--rails", Counts::TwoSides),
    ("seed", "--seed", Counts::Seeds),
    ("check", "--check", Counts::TwoSides),
    ("pin", "--pin", Counts::TwoSides),
    ("region", "--region", Counts::TwoSides),
    ("timeout", "--timeout", Counts::TwoSides),
    ("listen", "--listen", Counts::TwoSides),
    ("connect", "--connect", Counts::TwoSides),
    ("streams", "--streams", Counts::Tests(&[Test::Pool])),
    ("layout", "--layout", Counts::Tests(&[Test::PutSignal])),
    ("signal", "--signal", Counts::Tests(&[Test::SignalRate])),
    ("window", "--window", Counts::Windows),
];

/// Options that the connecting side sets for both sides.
const LEADERS: [(&str, &str); 18] = [
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
    ("signal", "--signal"),
    ("format", "--format"),
    ("json", "--json"),
];

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
    pub fn read(
        words: impl IntoIterator<Item = impl Into<std::ffi::OsString> + Clone>,
    ) -> clap::error::Result<Self> {
        let matches = Cli::command().try_get_matches_from(words)?;
        let mut cli = Cli::from_arg_matches(&matches)?;
        if let (Some(Command::Perf(args)), Some((_, matches))) =
            (&mut cli.command, matches.subcommand())
        {
            args.given = Given::of(matches);
        }
        Ok(cli)
    }
}

impl PerfArgs {
    pub(super) fn check_given(&self) -> Outcome {
        let simulated = self.transport == Transport::Sim;
        let has_payload =
            !matches!(self.test, Test::Pool | Test::Ring | Test::Amo | Test::SignalRate);
        let counts = |counts| match counts {
            Counts::TwoSides => self.test != Test::Pool,
            Counts::Tests(tests) => tests.contains(&self.test),
            Counts::Windows => match self.test {
                Test::Put | Test::SignalRate | Test::TagBw => true,
                Test::PutSignal | Test::Tag => simulated,
                _ => false,
            },
            Counts::Seeds => has_payload || simulated && self.test != Test::Pool,
            Counts::WarmUp => self.test != Test::Pool && !simulated,
        };
        let idle = OPTIONS.iter().find(|(id, _, where_)| self.given.has(id) && !counts(*where_));
        idle.map_or(Ok(()), |(_, option, _)| {
            let over = if simulated { " over sim" } else { "" };
            let test = name(self.test);
            Err(Failure::usage(format!("{option} has no effect on {test}{over}; leave it out")))
        })
    }

    /// Returns a message if this side was given options that the other side decides.
    pub(super) fn notes(&self) -> Vec<String> {
        let idle: Vec<&str> = LEADERS
            .iter()
            .filter(|(id, _)| self.given.has(id))
            .map(|(_, option)| *option)
            .collect();
        match self.listen.is_some() && !idle.is_empty() {
            true => vec![format!(
                "{}: not used, because the side that connects decides",
                idle.join(", ")
            )],
            false => vec![],
        }
    }
}

#[cfg(test)]
pub fn ids() -> impl Iterator<Item = &'static str> {
    OPTIONS.iter().map(|(id, ..)| *id).chain(LEADERS.iter().map(|(id, _)| *id))
}
