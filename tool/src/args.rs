//! The command line, and its translation into a checked [`Plan`].

pub mod bounds;
mod check;
mod choices;
mod faults;
mod given;
mod plan;
#[cfg(test)]
mod tests;
mod trace;

pub use check::{RAILS_IN_PROCESS, REGION};
use choices::Tests;
pub use choices::{DeviceName, Format, IpcPath, Layout, Mode, SignalKind, Test, Transport, name};
use faults::FaultArgs;
pub use faults::Faults;
use given::Given;
pub use plan::{Effort, Meeting, Plan, SEED_ITERS, SIM_ITERS};
pub use trace::Trace;

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use super::cpu::Pin;
use super::failure::{Failure, Outcome};
use super::sizes;

/// Measure and check ordered put, get, put-signal and atomics over several rails.
#[derive(Debug, Parser)]
#[command(name = "fishplate", version, max_term_width = 80)]
#[command(
    after_help = "Without a command, runs a demonstration: two processes put-signal over shared \
        memory, check every payload, and print a latency and a bandwidth table.\n\nperf match (tag \
        matching alone) and perf job (traffic between many processes) have their own options: \
        fishplate perf job --help.\n\nExit status: 0 done; 1 the run failed, the other side was \
        lost, or data was wrong; 2 the command line is invalid, an option has no effect here, or \
        its value cannot be used on this machine; 130 interrupted; 141 the reader of the output \
        exited. doctor has its own exit statuses."
)]
pub struct Cli {
    /// The subcommand. `None` runs the demonstration.
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one per run")]
pub enum Command {
    /// Measure and check one operation.
    Perf(PerfArgs),
    /// Draw latency and bandwidth by size from results that perf --json wrote.
    Plot(PlotArgs),
    /// Describe this machine and this build.
    Info(InfoArgs),
    /// Find what makes the transport slow or unusable here, and suggest remedies.
    Doctor(DoctorArgs),
    /// Show the counters of running programs that set the node option counters.
    Stat(StatArgs),
    /// The second process, which `perf` starts.
    #[command(hide = true)]
    Peer(PeerArgs),
}

/// Options of `fishplate plot`.
#[derive(Debug, Args)]
pub struct PlotArgs {
    /// Files of JSON lines. If there are several, each curve's name begins with the name of its
    /// file.
    #[arg(required = true, value_name = "RESULTS")]
    pub results: Vec<PathBuf>,
    /// The picture to write.
    #[arg(short, long, value_name = "FILE.svg")]
    pub output: PathBuf,
}

/// Options of `fishplate info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// Print every value, one per line, instead of a summary.
    #[arg(short, long)]
    pub verbose: bool,
    /// Print everything about one libfabric provider, such as tcp or efa.
    #[arg(short, long, value_name = "NAME")]
    pub provider: Option<String>,
    /// Print everything as one JSON object; tool/schema in the sources describes it.
    #[arg(long)]
    pub json: bool,
    /// json is the same as --json; table is text.
    #[arg(long, value_parser = ["table", "json"], conflicts_with = "json")]
    pub format: Option<String>,
}

/// Options of `fishplate doctor`.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 all checks pass; 1 a check fails; 3 there are only warnings; 2 the \
        command line is invalid."
)]
pub struct DoctorArgs {
    /// Print one JSON object instead of text; tool/schema in the sources describes it.
    #[arg(long)]
    pub json: bool,
    /// Read proc, sys and dev/shm below this folder, which may be a copy from another machine.
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
}

/// Options of `fishplate stat`.
#[derive(Debug, Args)]
pub struct StatArgs {
    /// The id of a process [default: all processes that may be read].
    pub pid: Option<u32>,
    /// Print one JSON object per line instead of text; tool/schema in the sources describes it.
    #[arg(long, conflicts_with = "prom")]
    pub json: bool,
    /// Print Prometheus' text format.
    #[arg(long)]
    pub prom: bool,
    /// Repeat at this interval, such as 5 (seconds), 500ms or 1m, and show rates.
    #[arg(short, long, value_name = "TIME", value_parser = sizes::parse_time)]
    pub interval: Option<Duration>,
    /// Number of repetitions [default: until interrupted].
    #[arg(
        short = 'n', long, value_name = "N", requires = "interval",
        value_parser = sizes::count_in::<u64>(1, u64::MAX)
    )]
    pub count: Option<u64>,
}

/// Options of the hidden second process.
#[derive(Debug, Args)]
pub struct PeerArgs {
    /// The descriptor of a socket to the first process.
    #[arg(long)]
    pub socket: i32,
    /// Size of the region, in bytes.
    #[arg(long)]
    pub region: usize,
    /// The `--timeout` of the first process.
    #[arg(long, value_parser = sizes::parse_time)]
    pub timeout: Duration,
    /// The transport to the first process.
    #[arg(long, value_enum, default_value_t = Transport::Shm)]
    pub transport: Transport,
    /// Number of rails.
    #[arg(long, default_value_t = 1)]
    pub rails: usize,
    /// Providers to try for the rails, in this order.
    #[arg(long, value_delimiter = ',')]
    pub provider: Vec<String>,
    /// Interfaces of the rails.
    #[arg(long, value_delimiter = ',')]
    pub interface: Vec<String>,
    /// Memory of the payloads: host, cuda:N or hip:N.
    #[arg(long, default_value = "host")]
    pub device: DeviceName,
    /// How payloads travel from one device to the other.
    #[arg(long, value_enum, default_value_t = IpcPath::Auto)]
    pub ipc_path: IpcPath,
    /// Which thread makes progress.
    #[arg(long, value_enum, default_value_t = Mode::Inline)]
    pub mode: Mode,
    /// Both sides share one processor.
    #[arg(long)]
    pub crowded: bool,
}

/// Options of `fishplate perf`.
#[derive(Debug, Args)]
#[command(after_help = MORE_HELP, after_long_help = LAYOUT_HELP)]
pub struct PerfArgs {
    /// What to measure.
    #[arg(value_parser = Tests)]
    pub test: Test,
    /// The options given on the command line.
    #[arg(skip)]
    pub given: Given,

    /// Payload sizes in bytes, such as 8, 64K, 1M (powers of 1024) or 1e6 [default: 8].
    #[arg(
        short, long, value_name = "LIST", value_delimiter = ',', value_parser = sizes::parse,
        conflicts_with_all = ["begin", "end", "factor"]
    )]
    pub size: Vec<usize>,
    /// First payload size of a range [default: 8].
    #[arg(short, long, value_name = "SIZE", value_parser = sizes::parse)]
    pub begin: Option<usize>,
    /// Last payload size of a range [default: 4M].
    #[arg(short, long, value_name = "SIZE", value_parser = sizes::parse)]
    pub end: Option<usize>,
    /// Factor between the sizes of a range [default: 2].
    #[arg(short, long, value_name = "N", value_parser = sizes::parse_count::<usize>)]
    pub factor: Option<usize>,

    /// Measured iterations per size, such as 5000, 100K (powers of 1000) or 1e6. By default at most
    /// one million; fewer for large payloads, or if half of --timeout is too short for them.
    #[arg(short = 'n', long, value_name = "N", value_parser = sizes::parse_count::<u64>)]
    pub iters: Option<u64>,
    /// Measure each size for about this long, such as 10s, rather than a number of iterations.
    #[arg(
        short = 'D', long, value_name = "TIME", value_parser = sizes::parse_time,
        conflicts_with = "iters"
    )]
    pub duration: Option<Duration>,
    /// Iterations before measuring. By default a tenth of the measured ones, at most 10000.
    #[arg(short, long, value_name = "N", value_parser = sizes::parse_count::<u64>)]
    pub warmup: Option<u64>,

    /// How to reach the other side.
    #[arg(long, value_enum, default_value_t = Transport::Shm)]
    pub transport: Transport,
    /// Number of rails between the two sides.
    #[arg(long, value_name = "N", value_parser = sizes::parse_count::<usize>, default_value = "1")]
    pub rails: usize,
    /// With --transport fabric: providers to try, in order [default: hardware ones, then tcp].
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub provider: Vec<String>,
    /// With --transport fabric: interfaces, one rail for each name given [default: the nearest].
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub interface: Vec<String>,
    /// With --transport gpu: memory of the payloads (host, cuda:N or hip:N), or A,B for this side
    /// and the other [default: the first GPU if there is one, else host].
    #[arg(long, value_name = "WHERE", value_delimiter = ',')]
    pub device: Vec<DeviceName>,
    /// With --transport gpu: how payloads reach another process's device memory [default: auto].
    #[arg(long, value_enum)]
    pub ipc_path: Option<IpcPath>,
    /// Seed of payloads and of the simulated fabric.
    #[arg(long, value_name = "N", value_parser = sizes::parse_count::<u64>, default_value = "1")]
    pub seed: u64,
    /// Run put-signal or tag with this many seeds, starting with --seed (only with --transport
    /// sim).
    #[arg(long, value_name = "N", value_parser = sizes::parse_count::<u64>)]
    pub seeds: Option<u64>,
    /// Verify the payload of every iteration. amo, signal-rate and ring always verify.
    #[arg(long)]
    pub check: bool,
    /// Operations in flight (put, signal-rate, tag-bw; over sim also put-signal and tag); receives
    /// posted at once (tag-bw).
    #[arg(long, value_name = "N", value_parser = sizes::parse_count::<u32>, default_value = "64")]
    pub window: u32,
    /// Both sides send at once (put, tag-bw); rates are the sum of both directions.
    #[arg(long)]
    pub bidirectional: bool,
    /// Processors to pin to: auto (none with --mode worker or --transport fabric), none, or A,B for
    /// this side and the other.
    #[arg(long, value_name = "WHERE", default_value = "auto")]
    pub pin: Pin,
    /// For pool: numbers of threads to measure with. Each thread has its own pool.
    #[arg(
        long, value_name = "LIST",
        value_delimiter = ',', value_parser = sizes::parse_count::<usize>, default_value = "1,2,4"
    )]
    pub streams: Vec<usize>,
    /// Placement of the signal [default: adjacent up to 56 bytes, else split]. See --help.
    #[arg(long, value_enum)]
    pub layout: Option<Layout>,
    /// For signal-rate: how a signal changes its word.
    #[arg(long, value_enum, default_value_t = SignalKind::Add)]
    pub signal: SignalKind,
    /// Which thread makes progress, here and in a process that this one starts. worker adds a
    /// thread to each node (shm, fabric, gpu).
    #[arg(long, value_enum, default_value_t = Mode::Inline)]
    pub mode: Mode,
    /// How to write the results.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub format: Format,
    /// The same as --format json.
    #[arg(long, conflicts_with = "format")]
    pub json: bool,
    /// Write a CSV file with each measured duration and its count.
    #[arg(long, value_name = "FILE")]
    pub hist: Option<PathBuf>,
    /// Draw latency and bandwidth by size into this file, as SVG; see also fishplate plot.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,

    /// Run as the answering side. Wait at this address: HOST:PORT, a path with a slash, or @NAME
    /// for an abstract socket on this host.
    #[arg(long, value_name = "ADDR", conflicts_with = "connect", value_parser = address)]
    pub listen: Option<String>,
    /// Run as the measuring side. Connect to the answering side at this address.
    #[arg(long, value_name = "ADDR", value_parser = address)]
    pub connect: Option<String>,
    /// Memory for the payloads of one direction; must be the same on both sides.
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, default_value = "64M")]
    pub region: usize,
    /// Time limit of each measurement, and of waiting for the other side (with --connect at most
    /// 5s), such as 90 (seconds), 500ms or 5m. Also the deadline of operations over libfabric,
    /// unless FISHPLATE_DEADLINE is set.
    #[arg(
        short = 'T', long, value_name = "TIME", value_parser = sizes::parse_time,
        default_value = "60s"
    )]
    pub timeout: Duration,

    /// The faults of simulated rails.
    #[command(flatten)]
    pub faults: FaultArgs,
}

const MORE_HELP: &str = "\
match and job have their own options: see fishplate perf job --help.
--help explains layouts, columns and exit statuses, and lists the environment
variables FISHPLATE_*.";

const LAYOUT_HELP: &str = "\
Environment: FISHPLATE_PROVIDER, _INTERFACES, _MAX_RAILS, _LIBFABRIC, _POLICY,
  _WINDOW, _BATCH, _EAGER, _STRIPE_THRESHOLD, _STRIPE_CHUNK, _ACK_AGE,
  _CONTEXTS, _NATIVE_ATOMICS, _NIC_DEVICE_MEMORY and _DEADLINE are settings of
  rails. fishplate info -v shows each with its value, default and meaning.

Exit status: 0 done; 1 the run failed, the other side was lost, or data was
  wrong; 2 the command line is invalid, an option has no effect here, or its
  value cannot be used on this machine; 130 interrupted; 141 the reader of the
  output exited.

Layouts:
  adjacent  The signal lies directly behind the payload. With up to 56 bytes
            it is in the same cache line; with more it is in the line where
            the payload ends, or in the next line.
  split     The signal lies in a different cache line from the payload.

Latency:
  put-signal  half of a round trip, measured from one post to the next. With
              --check both sides verify each payload before they answer, and
              that time is included.
  put         time per put, averaged over a window; with --check the other
              side verifies every window.
  --bidirectional  put and tag-bw, in each direction at once. Rates are the
              sum of both. The iterations of the row are those of one direction.
  get, amo    from the call to its completion.
  signal-rate time per signal, averaged over a window.
  tag         half of a round trip, from one send to the next. Receives are
              posted while a message is in flight.
  tag-bw      time per message, averaged over a window; with --check every
              window is answered.
  ring        half of a round trip through two rings. Rates are those of a
              stream through one ring.
  With --mode worker a second thread makes progress. Each call takes a lock,
  and a wait of more than a few microseconds sleeps.
  cpu/op is the processor time of all threads of this side's process, per
  operation. A spinning thread uses a whole processor. The start and the end of
  a row are included, so it is meaningful from some 10000 iterations on.
  floor_ns is half of a round trip of two bare atomics between the same
  processors: the best of four ways. Each row is measured in two halves, and the
  floor before, between and after them. If the floor changed by more than 20 %,
  the row is repeated. There is no floor if other programs keep the two sides
  from running at the same time. p50/fl is p50 divided by the floor, for tests
  that are ping-pongs.
  floor_apart_ns (apart, p50/ap) is the best floor with a cache line for each
  direction, as in the tests, where each side writes to the other's memory.
  A p50/ap of 0.8 to 1.2 is usual: both floors are the best of short batches,
  and the distance between two virtual processors changes during a row.
  If p50/fl is below 1, or p50/ap below 0.8, the processors were slower or
  busier during the measurement of the floor than during the test: repeat the
  run with --pin on idle processors.

Faults (put-signal and tag, --transport sim --rails 2 to 4):
  --kill 1@500 --heal 1@900 cuts rail 1 once 500 operations are issued, and
  restores it after 900. Operations of both sides count. Rails are numbered
  from 0. Operations in flight on a cut rail are lost, or fail at once; with
  --late they may land up to 5000 polls later. Every operation must still be
  applied once and in order. When the last rail is cut, the run fails and
  names the reason for each rail.
  A trace is text: the run, one event per line, and the result with a hash of
  all traffic. --replay repeats the run and compares.

JSON: tool/schema in the sources describes every field of a row.";

fn address(text: &str) -> Result<String, String> {
    let port = text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<NonZeroU16>().is_ok());
    match text.starts_with('@') && text.len() > 1 || text.contains('/') || port {
        true => Ok(text.into()),
        false => Err(
            "use HOST:PORT with a port from 1 to 65535, a path with a slash such as ./name, or \
             @NAME"
                .into(),
        ),
    }
}
