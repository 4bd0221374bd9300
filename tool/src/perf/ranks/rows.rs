//! Writes the rows of rank 0: one for each pattern and size, for all ranks together.

use serde::{Deserialize, Serialize};

use super::JobArgs;
use super::pattern::Pattern;
use crate::args::{Format, name};
use crate::failure::{Failure, Outcome};
use crate::report::{Columns, Report, SCHEMA_VERSION};
use crate::sizes::{self, time};

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Tally {
    pub ns: f64,
    pub cpu_ns: u64,
    pub checked: u64,
    pub errors: u64,
    pub startup_s: f64,
    pub first_s: f64,
    pub pss_bytes: u64,
}

/// The JSON has the same fields, which `schema/job.json` describes.
#[derive(Clone, Debug, Serialize)]
struct Row {
    schema_version: u32,
    test: &'static str,
    pattern: Pattern,
    ranks: usize,
    flows: u64,
    size: usize,
    iters: u64,
    window: u32,
    seed: u64,
    msgs_per_s: f64,
    bytes_per_s: f64,
    cpu_ns_per_op: f64,
    checked: u64,
    errors: u64,
    startup_s: f64,
    first_s: f64,
    pss_bytes: u64,
}

/// Rank 0 writes the rows.
pub struct Rows {
    report: Option<Report>,
}

impl Rows {
    pub fn new(format: Format, writes: bool) -> Self {
        Rows { report: writes.then(|| Report::new(format)) }
    }

    pub fn headline(&self, args: &JobArgs, ranks: usize) -> Outcome {
        let Some(report) = &self.report else { return Ok(()) };
        report.comment(&format!(
            "fishplate {} perf job  ranks={ranks} seed={} window={} check={} build={}",
            env!("CARGO_PKG_VERSION"),
            args.seed,
            args.window,
            if args.check { "yes" } else { "no" },
            if cfg!(debug_assertions) { "debug (figures mean nothing)" } else { "release" },
        ))
    }

    /// Combines the results of all ranks, and writes the row. Returns the number of messages with
    /// wrong data.
    pub fn row(
        &mut self,
        args: &JobArgs,
        pattern: Pattern,
        size: usize,
        all: &[Tally],
    ) -> Outcome<u64> {
        let flows = pattern.flows(all.len());
        let messages = flows * args.iters;
        let most = |pick: fn(&Tally) -> f64| all.iter().map(pick).fold(0.0, f64::max);
        let sum = |pick: fn(&Tally) -> u64| all.iter().map(pick).fold(0, u64::saturating_add);
        let seconds = most(|tally| tally.ns) * 1e-9;
        let msgs_per_s = if seconds > 0.0 { messages as f64 / seconds } else { 0.0 };
        let row = Row {
            schema_version: SCHEMA_VERSION,
            test: "job",
            pattern,
            ranks: all.len(),
            flows,
            size,
            iters: args.iters,
            window: args.window,
            seed: args.seed,
            msgs_per_s,
            bytes_per_s: msgs_per_s * size as f64,
            cpu_ns_per_op: sum(|tally| tally.cpu_ns) as f64 / messages as f64,
            checked: sum(|tally| tally.checked),
            errors: sum(|tally| tally.errors),
            startup_s: most(|tally| tally.startup_s),
            first_s: most(|tally| tally.first_s),
            pss_bytes: most(|tally| tally.pss_bytes as f64) as u64,
        };
        if let Some(report) = &mut self.report {
            report.row(&row)?;
        }
        if args.check && row.errors == 0 && row.checked < messages {
            let told = format!("only {} of {messages} messages were verified", row.checked);
            return Err(Failure::run(told));
        }
        Ok(row.errors)
    }
}

impl Columns for Row {
    fn table(&self) -> [String; 2] {
        [
            format!(
                "#{:>11} {:>5} {:>6} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>7}",
                "pattern",
                "ranks",
                "flows",
                "size",
                "iters",
                "Mmsgs/s",
                "GB/s",
                "cpu/op",
                "first",
                "startup",
                "memory",
                "errors"
            ),
            format!(
                "{:>12} {:>5} {:>6} {:>7} {:>9} {:>9.3} {:>9.3} {:>9} {:>9} {:>9} {:>7.1}M {:>7}",
                name(self.pattern),
                self.ranks,
                self.flows,
                sizes::show(self.size),
                self.iters,
                self.msgs_per_s / 1e6,
                self.bytes_per_s / 1e9,
                time(self.cpu_ns_per_op),
                time(self.first_s * 1e9),
                time(self.startup_s * 1e9),
                self.pss_bytes as f64 / f64::from(1 << 20),
                self.errors
            ),
        ]
    }

    /// The fields are those of the JSON.
    fn csv(&self) -> [String; 2] {
        // The texts of a row have no comma, colon, brace or quote.
        let json = serde_json::to_string(self).unwrap_or_default().replace(['{', '}', '"'], "");
        let (names, values): (Vec<&str>, Vec<&str>) =
            json.split(',').filter_map(|field| field.split_once(':')).unzip();
        [names.join(","), values.join(",")]
    }
}

/// Returns the memory of this process with its share of shared pages (PSS), in bytes. 0 if unknown.
pub fn pss() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap_or_default();
    line.split_whitespace()
        .next()
        .and_then(|kib| kib.parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}
