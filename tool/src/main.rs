//! The command-line tool `fishplate` measures and checks the transport, and describes this machine.
//!
//! Without a command it demonstrates put-signal and put between two processes over shared memory.
//! `--help` lists the exit statuses.
//!
//! ```sh
//! fishplate perf put-signal -s 8,4K,64K    # latency between two processes on this host
//! fishplate perf put --listen 0.0.0.0:7000 --transport fabric    # prints the other side's line
//! fishplate doctor                         # what limits this machine, and how to change it
//! ```
//!
//! `tests/commands.txt` has more command lines, with their output and exit status.

mod args;
mod clock;
mod cpu;
mod demo;
mod doctor;
mod failure;
mod floor;
mod histogram;
mod histogram_file;
mod info;
mod instructions;
mod interrupt;
mod layout;
mod limits;
mod payload;
mod perf;
mod plot;
mod progress;
mod rails;
mod report;
mod sizes;
mod stat;
mod variables;

use std::process::ExitCode;

use args::{Cli, Command};

#[global_allocator]
static HEAP: limits::Heap = limits::Heap;

fn main() -> ExitCode {
    limits::within_limits(run)
}

fn run() -> ExitCode {
    let mut words: Vec<_> = std::env::args_os().collect();
    // `help perf match` means `perf match --help`.
    if words.len() == 4
        && words[1] == "help"
        && ["match", "job"].iter().any(|name| words[3] == *name)
    {
        words.remove(1);
        words.push("--help".into());
    }
    // `perf match` and `perf job` parse their own options.
    let own = words
        .get(1)
        .filter(|word| *word == "perf")
        .and(words.get(2))
        .and_then(|word| word.to_str());
    match own {
        Some("match") => return say("fishplate", perf::matching::run(&words)),
        Some("job") => return say("fishplate", perf::ranks::run(&words)),
        _ => {}
    }
    fishplate::close_in_background();
    let command = Cli::read(words).unwrap_or_else(|error| error.exit()).command;
    let speaker = if matches!(command, Some(Command::Peer(_))) {
        "fishplate, second process"
    } else {
        "fishplate"
    };
    let outcome = match command {
        None => demo::run(),
        Some(Command::Perf(args)) => args.plan().and_then(|plan| {
            plan.notes.iter().for_each(|note| failure::note(format_args!("# {note}")));
            perf::run(&plan)
        }),
        Some(Command::Info(args)) => info::run(&args),
        Some(Command::Plot(args)) => plot::run(&args),
        Some(Command::Stat(args)) => stat::run(&args),
        Some(Command::Doctor(args)) => match doctor::run(&args) {
            Ok(code) => return code,
            Err(failure) => Err(failure),
        },
        Some(Command::Peer(args)) => perf::answer(&args),
    };
    say(speaker, outcome)
}

fn say(speaker: &str, outcome: failure::Outcome) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            failure::note(format_args!("{speaker}: {failure}"));
            ExitCode::from(failure.code())
        }
    }
}
