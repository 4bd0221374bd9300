//! Writes results to standard output: a table for people, or JSON or CSV for programs.

use std::io::{self, Write};

use serde::Serialize;

use super::args::{self, Format, IpcPath, Layout, Mode, Plan, Test, Transport};
use super::failure::{Failure, Outcome, note};
use super::histogram::Latency;
use super::limits;
use super::rails::Rails;
use super::sizes::{self, time};

/// Increases when a field changes its meaning or disappears.
pub const SCHEMA_VERSION: u32 = 1;

/// Numbers of payload copies between the device memories of two processes, by path. Counted on the
/// measuring side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moved {
    /// Copies by a device.
    pub direct: u64,
    /// Copies through bounce slots.
    pub relayed: u64,
    /// Copies by the processor.
    pub stored: u64,
}

impl Moved {
    /// Returns the copies since the counts `before`.
    pub fn since(self, before: Moved) -> Moved {
        Moved {
            direct: self.direct - before.direct,
            relayed: self.relayed - before.relayed,
            stored: self.stored - before.stored,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub schema_version: u32,
    pub test: Test,
    pub transport: Transport,
    pub rails: usize,
    /// Payload size in bytes.
    pub size: usize,
    pub iters: u64,
    /// Latency in nanoseconds, for tests that measure it.
    pub lat_ns: Option<Latency>,
    pub msgs_per_s: f64,
    pub bytes_per_s: f64,
    /// Half of a round trip of bare atomics between the two sides. `None` within one process.
    pub floor_ns: Option<f64>,
    /// The floor with a separate cache line for each direction, as in the tests.
    pub floor_apart_ns: Option<f64>,
    pub checked: u64,
    pub errors: u64,
    /// Processor time of this side's process per operation, in nanoseconds. Covers both sides if
    /// they share a process.
    pub cpu_ns_per_op: Option<f64>,
    /// Processor time of the other side's process per operation, in nanoseconds.
    pub peer_cpu_ns_per_op: Option<f64>,
    /// Number of arrivals that overtook a lower sequence number, on both sides.
    pub arrivals_out_of_order: u64,
    /// Number of signals seen before their data or before an earlier signal.
    pub signals_misordered: u64,
    /// The placement of the signal, if there was one.
    pub layout: Option<Layout>,
    pub mode: Mode,
    pub window: u32,
    /// Whether both sides sent at once. Rates are then the sum of both directions.
    pub bidirectional: bool,
    pub seed: u64,
    pub pin: Option<(usize, usize)>,
    /// `lat_ns.p50 / floor_ns`, for ping-pong tests.
    pub p50_over_floor: Option<f64>,
    /// `lat_ns.p50 / floor_apart_ns`, for ping-pong tests.
    pub p50_over_apart: Option<f64>,
    /// Speed of memcpy between the same buffers, interleaved with the measurement.
    pub memcpy_bytes_per_s: Option<f64>,
    /// The memory of the payloads here and on the other side, if it is device memory.
    pub devices: Vec<String>,
    /// The requested path of the payloads, if they are in device memory.
    pub ipc_path: Option<IpcPath>,
    /// Numbers of payload copies by path, if payloads are in device memory.
    pub moved: Option<Moved>,
    /// What happened to the rails, if there are several between two processes.
    pub failover: Option<Rails>,
    /// Number of times that the row was measured again because the floor changed.
    pub repeats: u32,
    /// Whether the floor still changed in the reported repetition.
    pub floor_unsteady: bool,
}

impl Row {
    pub fn new(plan: &Plan, size: usize) -> Self {
        Row {
            schema_version: SCHEMA_VERSION,
            test: plan.test,
            transport: plan.transport,
            rails: plan.rails,
            size,
            iters: 0,
            lat_ns: None,
            msgs_per_s: 0.0,
            bytes_per_s: 0.0,
            floor_ns: None,
            floor_apart_ns: None,
            checked: 0,
            errors: 0,
            cpu_ns_per_op: None,
            peer_cpu_ns_per_op: None,
            arrivals_out_of_order: 0,
            signals_misordered: 0,
            layout: None,
            mode: plan.mode,
            window: plan.window,
            bidirectional: plan.bidirectional,
            seed: plan.seed,
            pin: plan.places.cpus,
            p50_over_floor: None,
            p50_over_apart: None,
            memcpy_bytes_per_s: None,
            devices: plan.devices.iter().map(ToString::to_string).collect(),
            ipc_path: (plan.transport == Transport::Gpu).then_some(plan.ipc_path),
            moved: None,
            failover: None,
            repeats: 0,
            floor_unsteady: false,
        }
    }

    /// Sets the rates for `iters` operations in `seconds`.
    pub fn rate(&mut self, iters: u64, seconds: f64) {
        self.iters = iters;
        self.msgs_per_s = if seconds > 0.0 { iters as f64 / seconds } else { 0.0 };
        self.bytes_per_s = self.msgs_per_s * self.size as f64;
    }

    /// Sets the processor time per operation, from the totals of this process and of the other
    /// process.
    pub fn processor(&mut self, ops: u64, ns: u64, peer_ns: u64) {
        let each = |ns: u64| (ns > 0 && ops > 0).then(|| ns as f64 / ops as f64);
        (self.cpu_ns_per_op, self.peer_cpu_ns_per_op) = (each(ns), each(peer_ns));
    }

    /// Describes what is wrong with the row's data. Returns `None` if nothing is wrong.
    pub fn fault(&self, check: bool) -> Option<String> {
        let at = format!("{} of {} bytes", args::name(self.test), sizes::show(self.size));
        if self.errors > 0 || self.signals_misordered > 0 {
            return Some(format!(
                "{at}: {} of {} iterations had wrong data, {} signals arrived before their data",
                self.errors, self.iters, self.signals_misordered
            ));
        }
        (check && self.checked < self.iters).then(|| {
            format!("{at}: only {} of {} iterations were verified", self.checked, self.iters)
        })
    }
}

/// The formats that each kind of row defines itself. JSON comes from `Serialize`.
pub trait Columns: Serialize {
    fn table(&self) -> [String; 2];

    fn csv(&self) -> [String; 2];
}

/// Writes rows to standard output as they are measured.
pub struct Report {
    format: Format,
    started: bool,
}

impl Report {
    pub fn new(format: Format) -> Self {
        Report { format, started: false }
    }

    /// Writes a line for people about the run: above a table, or to standard error if the rows are
    /// CSV. With JSON, writes nothing.
    pub fn comment(&self, text: &str) -> Outcome {
        match self.format {
            Format::Json => {}
            Format::Csv => note(format_args!("# {text}")),
            Format::Table => print(&format!("# {text}\n"))?,
        }
        Ok(())
    }

    /// Writes a row, after the header if it is the first.
    pub fn row<R: Columns>(&mut self, row: &R) -> Outcome {
        let first = !std::mem::replace(&mut self.started, true);
        let [header, line] = match self.format {
            Format::Table => row.table(),
            Format::Csv => row.csv(),
            Format::Json => {
                let text = serde_json::to_string(row)
                    .map_err(|e| Failure::run(format!("cannot write JSON: {e}")))?;
                return print(&format!("{text}\n"));
            }
        };
        if first {
            print(&format!("{header}\n"))?;
        }
        print(&format!("{line}\n"))
    }
}

impl Columns for Row {
    fn table(&self) -> [String; 2] {
        [header(), line(self)]
    }

    fn csv(&self) -> [String; 2] {
        csv(self)
    }
}

/// Writes to standard output. If the reader (such as `head`) has exited, SIGPIPE ends the process
/// silently, as it ends other tools.
pub fn print(text: &str) -> Outcome {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => limits::end_by(libc::SIGPIPE),
        written => written.map_err(|error| Failure::run(format!("cannot write results: {error}"))),
    }
}

fn header() -> String {
    format!(
        "#{:>6} {:>9} {:>9} {:>9} {:>8}  {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {:>8} {:>7} {:>8} \
         {:>7} {:>7}",
        "size",
        "iters",
        "Mops/s",
        "GB/s",
        "cpu/op",
        "min",
        "p50",
        "p90",
        "p99",
        "p99.9",
        "max",
        "floor",
        "p50/fl",
        "apart",
        "p50/ap",
        "errors"
    )
}

fn line(row: &Row) -> String {
    let dash = || "-".to_string();
    let times = |ratio: f64| format!("{ratio:.2}x");
    let lat = |pick: fn(&Latency) -> f64| row.lat_ns.as_ref().map_or_else(dash, |l| time(pick(l)));
    let mut line = format!(
        "{:>7} {:>9} {:>9.3} {:>9.3} {:>8}  {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {:>8} {:>7} {:>8} \
         {:>7} {:>7}",
        sizes::show(row.size),
        row.iters,
        row.msgs_per_s / 1e6,
        row.bytes_per_s / 1e9,
        row.cpu_ns_per_op.map_or_else(dash, time),
        lat(|l| l.min),
        lat(|l| l.p50),
        lat(|l| l.p90),
        lat(|l| l.p99),
        lat(|l| l.p999),
        lat(|l| l.max),
        row.floor_ns.map_or_else(dash, time),
        row.p50_over_floor.map_or_else(dash, times),
        row.floor_apart_ns.map_or_else(dash, time),
        row.p50_over_apart.map_or_else(dash, times),
        row.errors + row.signals_misordered,
    );
    if let Some(copy) = row.memcpy_bytes_per_s {
        line += &format!("  memcpy {:.3} GB/s", copy / 1e9);
    }
    if row.bidirectional {
        line += "  both directions";
    }
    if row.arrivals_out_of_order > 0 {
        line += &format!("  out of order {}", row.arrivals_out_of_order);
    }
    if let Some(Rails { failed, returned, reposted, .. }) = row.failover
        && failed + returned > 0
    {
        line += &format!("  rails failed {failed}, returned {returned}; posted again {reposted}");
    }
    if row.repeats > 0 {
        line += &format!("  repeated {}", row.repeats);
    }
    if row.floor_unsteady {
        line += "  FLOOR MOVED";
    }
    line
}

fn csv(row: &Row) -> [String; 2] {
    let number = |value: Option<f64>| value.map_or_else(String::new, |v| format!("{v:.3}"));
    let lat = |pick: fn(&Latency) -> f64| number(row.lat_ns.as_ref().map(pick));
    let fields = [
        ("schema_version", row.schema_version.to_string()),
        ("test", args::name(row.test)),
        ("transport", args::name(row.transport)),
        ("rails", row.rails.to_string()),
        ("size", row.size.to_string()),
        ("iters", row.iters.to_string()),
        ("lat_ns_min", lat(|l| l.min)),
        ("lat_ns_p50", lat(|l| l.p50)),
        ("lat_ns_p90", lat(|l| l.p90)),
        ("lat_ns_p99", lat(|l| l.p99)),
        ("lat_ns_p999", lat(|l| l.p999)),
        ("lat_ns_max", lat(|l| l.max)),
        ("msgs_per_s", number(Some(row.msgs_per_s))),
        ("bytes_per_s", number(Some(row.bytes_per_s))),
        ("floor_ns", number(row.floor_ns)),
        ("checked", row.checked.to_string()),
        ("errors", row.errors.to_string()),
        ("arrivals_out_of_order", row.arrivals_out_of_order.to_string()),
        ("signals_misordered", row.signals_misordered.to_string()),
        ("memcpy_bytes_per_s", number(row.memcpy_bytes_per_s)),
        ("floor_apart_ns", number(row.floor_apart_ns)),
        ("cpu_ns_per_op", number(row.cpu_ns_per_op)),
        ("peer_cpu_ns_per_op", number(row.peer_cpu_ns_per_op)),
        ("bidirectional", row.bidirectional.to_string()),
    ];
    let (names, values): (Vec<_>, Vec<_>) = fields.into_iter().unzip();
    [names.join(","), values.join(",")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Effort, Meeting, SignalKind};
    use crate::cpu::Places;

    fn row() -> Row {
        let plan = Plan {
            test: Test::PutSignal,
            transport: Transport::Shm,
            rails: 1,
            sizes: vec![8],
            iters: None,
            duration: None,
            bidirectional: false,
            hist: None,
            plot: None,
            warmup: None,
            effort: Effort::MEASURE,
            seed: 7,
            seeds: None,
            check: true,
            window: 64,
            places: Places { cpus: Some((0, 1)) },
            streams: vec![],
            layout: None,
            signal: SignalKind::Add,
            mode: Mode::Inline,
            format: Format::Json,
            devices: vec![],
            ipc_path: args::IpcPath::Direct,
            meeting: Meeting::Spawn,
            region: 4096,
            timeout: std::time::Duration::from_secs(1),
            faults: Default::default(),
            trace: None,
            settings: Default::default(),
            notes: vec![],
        };
        let mut row = Row::new(&plan, 8);
        row.rate(1000, 0.001);
        row.lat_ns = Some(Latency { min: 1.0, p50: 2.0, p90: 3.0, p99: 4.0, p999: 5.0, max: 1e6 });
        row.checked = 1000;
        row
    }

    #[test]
    fn json_has_the_fields_that_were_promised() {
        let value = serde_json::to_value(row()).unwrap();
        for field in [
            "schema_version",
            "test",
            "transport",
            "rails",
            "size",
            "iters",
            "lat_ns",
            "msgs_per_s",
            "bytes_per_s",
            "floor_ns",
            "floor_apart_ns",
            "checked",
            "errors",
            "arrivals_out_of_order",
            "signals_misordered",
        ] {
            assert!(value.get(field).is_some(), "{field}");
        }
        for field in ["min", "p50", "p90", "p99", "p999", "max"] {
            assert!(value["lat_ns"][field].is_f64(), "{field}");
        }
        assert_eq!(value["test"], "put-signal");
        assert_eq!(value["transport"], "shm");
    }

    #[test]
    fn columns_line_up() {
        let (header, line) = (header(), line(&row()));
        assert_eq!(header.len(), line.len(), "\n{header}\n{line}");
        let [names, values] = csv(&row()).map(|line| line.split(',').count());
        assert_eq!(values, names);
    }

    #[test]
    fn a_row_says_what_happened_to_the_rails() {
        let rails = Rails { failed: 2, returned: 1, reposted: 3, each: vec![] };
        let row = |rails| line(&Row { failover: Some(rails), ..row() });
        assert!(!row(Rails::default()).contains("rails"));
        assert!(row(rails).ends_with("  rails failed 2, returned 1; posted again 3"));
    }

    #[test]
    fn a_row_with_wrong_or_unverified_data_is_a_fault() {
        assert_eq!(row().fault(true), None);
        assert!(Row { errors: 1, ..row() }.fault(false).is_some());
        assert!(Row { signals_misordered: 1, ..row() }.fault(false).is_some());
        assert!(Row { checked: 999, ..row() }.fault(true).is_some());
        assert_eq!(Row { checked: 0, ..row() }.fault(false), None);
    }
}
