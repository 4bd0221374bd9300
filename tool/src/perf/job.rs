//! [`Job`] is one uninterrupted measurement. The leading side orders it, and both sides run it.

use serde::{Deserialize, Serialize};

use crate::args::{Layout, Plan, SignalKind, Test, Transport, bounds};
use crate::failure::{Failure, Outcome};
use crate::layout::{self, Placement};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    pub test: Test,
    /// Payload size in bytes.
    pub size: usize,
    pub iters: u64,
    pub warmup: u64,
    pub check: bool,
    pub window: u64,
    pub layout: Layout,
    pub signal: SignalKind,
    pub bidirectional: bool,
    pub seed: u64,
    pub timeout_ns: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The side that starts the exchange, and measures.
    Starts,
    Answers,
}

impl Side {
    pub const BOTH: [Side; 2] = [Side::Starts, Side::Answers];

    pub fn other(self) -> Side {
        Side::BOTH[1 - self as usize]
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Duration of the measured part, in clock ticks of the measuring side.
    pub ticks: u64,
    pub ops: u64,
    pub checked: u64,
    pub errors: u64,
    /// Number of signals seen before the data that they announce, and of signals and messages out
    /// of order.
    pub misordered: u64,
    pub out_of_order: u64,
    /// Processor time of this side's process in the measured part, in nanoseconds.
    pub cpu_ns: u64,
    /// Processor time of the other side's process in nanoseconds. Zero if both sides run in this
    /// process.
    pub peer_cpu_ns: u64,
}

impl Tally {
    /// Combines the results of both sides of a job. If both sides receive payloads, an iteration
    /// counts as verified only if both sides have verified it.
    pub fn both(self, answer: Tally, two_way: bool) -> Tally {
        Tally {
            ticks: self.ticks,
            ops: self.ops,
            checked: match two_way {
                true => self.checked.min(answer.checked),
                false => self.checked.saturating_add(answer.checked),
            },
            errors: self.errors.saturating_add(answer.errors),
            misordered: self.misordered.saturating_add(answer.misordered),
            out_of_order: self.out_of_order.saturating_add(answer.out_of_order),
            cpu_ns: self.cpu_ns,
            peer_cpu_ns: answer.cpu_ns,
        }
    }

    pub fn and(self, other: Tally) -> Tally {
        Tally {
            ticks: self.ticks + other.ticks,
            ops: self.ops + other.ops,
            // Saturates, because the other process may have sent any number.
            checked: self.checked.saturating_add(other.checked),
            errors: self.errors.saturating_add(other.errors),
            misordered: self.misordered.saturating_add(other.misordered),
            out_of_order: self.out_of_order.saturating_add(other.out_of_order),
            cpu_ns: self.cpu_ns.saturating_add(other.cpu_ns),
            peer_cpu_ns: self.peer_cpu_ns.saturating_add(other.peer_cpu_ns),
        }
    }
}

/// Maximum total size of the slots of a stream of puts: the size of a first-level cache. A window
/// that needs more slots writes the same slots again.
const SLOTS_BYTES: usize = 32 << 10;
/// The offset of a stream's payloads, which follow its signals. It is a whole page, because copies
/// between equal page offsets are fastest.
pub const SLOTS_AT: usize = 4096;

impl Job {
    /// Returns the job of a whole row, which is measured in [`halves`](Self::halves).
    pub fn of(plan: &Plan, size: usize) -> Job {
        let usual = (plan.effort.bytes / size as u64).clamp(100, plan.effort.iters);
        let planned = plan.iters.unwrap_or(usual);
        let iters = if plan.duration.is_some() { bounds::ITERS_MAX } else { planned };
        // Each half has at least one whole window, because a sample covers a whole window.
        let fits = 1 << (iters / 2).max(1).ilog2();
        Job {
            test: plan.test,
            size,
            iters,
            warmup: plan.warmup.unwrap_or((planned / 10).min(10_000)),
            check: plan.check,
            window: u64::from(plan.window).min(fits),
            layout: plan.layout.unwrap_or_else(|| layout::fitting(size)),
            signal: plan.signal,
            bidirectional: plan.bidirectional,
            seed: plan.seed,
            timeout_ns: plan.timeout.as_nanos() as u64,
        }
    }

    /// Splits a row into two halves. If the row has one iteration, the second half is empty.
    pub fn halves(self) -> [Job; 2] {
        let second = self.iters / 2;
        [Job { iters: self.iters - second, ..self }, Job { iters: second, ..self }]
    }

    /// Checks a job as strictly as a command line, before it is sent and after it is received.
    pub fn check_bounds(&self, transport: Transport, region: usize) -> Outcome {
        if self.test == Test::Pool {
            return Err(Failure::usage("pool has no sides"));
        }
        bounds::test(self.test, transport)?;
        bounds::directions(self.bidirectional, self.test, transport)?;
        bounds::size(self.size, self.test, region)?;
        bounds::iterations(self.iters, self.warmup)?;
        bounds::window(self.window)?;
        bounds::timeout(self.timeout_ns)?;
        bounds::layout(self.layout, transport)
    }

    pub fn is_windowed(&self) -> bool {
        matches!(self.test, Test::Put | Test::SignalRate | Test::TagBw)
    }

    pub fn is_two_way(&self) -> bool {
        self.bidirectional || matches!(self.test, Test::PutSignal | Test::Tag)
    }

    pub fn stride(&self) -> usize {
        if self.size <= 64 { self.size.next_multiple_of(8) } else { self.size.next_multiple_of(64) }
    }

    pub fn slots(&self) -> u64 {
        ((SLOTS_BYTES / self.stride()) as u64).clamp(1, self.window)
    }

    /// The other side verifies payloads after each window.
    pub fn per_window(&self) -> u64 {
        if self.check && matches!(self.test, Test::Put | Test::TagBw) {
            self.slots()
        } else {
            self.window
        }
    }

    pub fn placement(&self) -> Placement {
        Placement::of(self.layout, self.size)
    }

    pub fn divisor(&self) -> f64 {
        match self.test {
            Test::PutSignal | Test::Tag | Test::Ring => 2.0,
            Test::Put | Test::SignalRate | Test::TagBw => self.per_window() as f64,
            Test::Get | Test::Amo | Test::Pool => 1.0,
        }
    }

    /// Returns the size of the buffer, which holds two payloads of up to `region` bytes. The two
    /// are used alternately.
    pub fn buffer(region: usize) -> usize {
        2 * Job::arena(region)
    }

    pub fn arena(region: usize) -> usize {
        (Placement::arena(region) + SLOTS_AT + SLOTS_BYTES).max(RING_ARENA).next_multiple_of(4096)
    }
}

pub const RING_ARENA: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};

    fn job(test: Test, size: usize, window: u64, check: bool) -> Job {
        Job {
            test,
            size,
            iters: 1,
            warmup: 0,
            check,
            window,
            layout: layout::fitting(size),
            signal: SignalKind::Add,
            bidirectional: false,
            seed: 0,
            timeout_ns: 0,
        }
    }

    #[test]
    fn halves_are_as_many_iterations_as_the_row() {
        for (iters, halves) in [(1, [1, 0]), (2, [1, 1]), (7, [4, 3]), (100, [50, 50])] {
            let whole = Job { iters, ..job(Test::Put, 8, 1, false) };
            assert_eq!(whole.halves().map(|half| half.iters), halves);
        }
    }

    #[test]
    fn warmup_is_a_tenth_of_the_planned_iterations() {
        let job = |line: &str| {
            let words = ["fishplate", "perf", "put", "--transport", "loopback"];
            let cli = Cli::read(words.into_iter().chain(line.split_whitespace())).unwrap();
            let Some(Command::Perf(args)) = cli.command else { panic!("not perf") };
            Job::of(&args.plan().unwrap(), 64 << 20)
        };
        // Payloads of this size are sent 100 times by default.
        for (line, iters, warmup) in [
            ("", 100, 10),
            ("-n 50", 50, 5),
            ("-n 5000", 5000, 500),
            ("-n 1e6", 1_000_000, 10_000),
            ("-n 5000 -w 7", 5000, 7),
            ("-D 1s", bounds::ITERS_MAX, 10),
        ] {
            assert_eq!((job(line).iters, job(line).warmup), (iters, warmup), "{line}");
        }
    }

    #[test]
    fn slots_fit_and_a_checked_window_uses_each_once() {
        for size in [1, 8, 9, 63, 64, 65, 4096, 40_000, 1 << 20] {
            for window in [1, 64, 65_536] {
                let job = job(Test::Put, size, window, true);
                assert!(job.slots() >= 1 && job.slots() <= window);
                assert_eq!(job.per_window(), job.slots());
                let end = SLOTS_AT + (job.slots() as usize - 1) * job.stride() + size;
                assert!(end <= Job::arena(size), "{size} {window}");
            }
        }
    }
}
