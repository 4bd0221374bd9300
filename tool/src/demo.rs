//! Runs a demonstration of put-signal and put, if the tool is called without a command.

use super::args::{Cli, Command, Effort, Plan};
use super::failure::{Failure, Outcome};
use super::{perf, report};

use clap::Parser;

struct Act {
    title: &'static str,
    line: &'static str,
}

const ACTS: [Act; 2] = [
    Act {
        title: "Latency: put-signal ping-pong between two processes over shared memory, every \
            payload verified",
        line: "put-signal -s 8,64,512,4K,64K --check",
    },
    Act {
        title: "Bandwidth: puts to the other process, beside a plain memcpy of the same buffers",
        line: "put -s 8,64,512,4K,64K,1M,4M",
    },
];

pub fn run() -> Outcome {
    for (k, act) in ACTS.iter().enumerate() {
        let gap = if k == 0 { "" } else { "\n" };
        report::print(&format!("{gap}# {}\n#   fishplate perf {}\n", act.title, act.line))?;
        let words = ["fishplate", "perf"].into_iter().chain(act.line.split_whitespace());
        match Cli::try_parse_from(words).map_err(|error| Failure::run(error.to_string()))?.command {
            Some(Command::Perf(args)) => perf::run(&Plan { effort: Effort::SHOW, ..args.plan()? })?,
            _ => return Err(Failure::run("the demonstration is not a measurement")),
        }
    }
    report::print("\n# More: fishplate perf --help, fishplate info\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_act_is_a_possible_plan() {
        for act in &ACTS {
            let words = ["fishplate", "perf"].into_iter().chain(act.line.split_whitespace());
            match Cli::try_parse_from(words).unwrap().command {
                Some(Command::Perf(args)) => assert!(!args.plan().unwrap().sizes.is_empty()),
                other => panic!("{other:?}"),
            }
        }
    }
}
