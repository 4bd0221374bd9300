//! Turns the command line into a [`Plan`], or an error.

use std::path::PathBuf;
use std::time::Duration;

use fishplate::config::Settings;

use super::{
    DeviceName, Faults, Format, IpcPath, Layout, Mode, PerfArgs, SignalKind, Test, Transport,
};
use crate::cpu::{Pin, Places};
use crate::failure::{Failure, Outcome};
use crate::variables;

/// Default number of iterations of a simulated run, and of each seed's run with `--seeds`.
pub const SIM_ITERS: u64 = 100_000;
pub const SEED_ITERS: u64 = 200;

/// A run, with all options checked.
#[derive(Clone, Debug)]
pub struct Plan {
    pub test: Test,
    pub transport: Transport,
    pub rails: usize,
    /// Payload sizes, each at least 1 and within the region.
    pub sizes: Vec<usize>,
    pub iters: Option<u64>,
    /// Measured time per size, if given. Replaces the number of iterations.
    pub duration: Option<Duration>,
    pub warmup: Option<u64>,
    /// Limits of one row if no iterations are given.
    pub effort: Effort,
    pub seed: u64,
    pub seeds: Option<u64>,
    pub check: bool,
    pub window: u32,
    pub places: Places,
    pub streams: Vec<usize>,
    pub layout: Option<Layout>,
    pub signal: SignalKind,
    pub mode: Mode,
    /// Both sides send at once.
    pub bidirectional: bool,
    pub hist: Option<PathBuf>,
    pub plot: Option<PathBuf>,
    pub format: Format,
    /// Empty selects the transport's default.
    pub devices: Vec<DeviceName>,
    pub ipc_path: IpcPath,
    pub meeting: Meeting,
    /// Memory for the payloads of one direction, in bytes.
    pub region: usize,
    pub timeout: Duration,
    pub faults: Faults,
    pub trace: Option<PathBuf>,
    pub settings: Settings,
    pub notes: Vec<String>,
}

/// The first limit that is reached ends the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    pub iters: u64,
    pub bytes: u64,
}

impl Effort {
    pub const MEASURE: Effort = Effort { iters: 1_000_000, bytes: 4 << 30 };
    /// The limits of the demonstration, which must be quick in unoptimised builds too.
    pub const SHOW: Effort = if cfg!(debug_assertions) {
        Effort { iters: 5_000, bytes: 8 << 20 }
    } else {
        Effort { iters: 200_000, bytes: 512 << 20 }
    };
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meeting {
    /// The tool starts the other side itself.
    Spawn,
    /// The user starts the other side, which connects to this address.
    Listen(String),
    /// The user starts the other side, which listens at this address.
    Connect(String),
}

impl PerfArgs {
    /// Checks everything that can be checked before the run starts.
    pub fn plan(mut self) -> Outcome<Plan> {
        self.check_given()?;
        let trace = self.take_trace()?;
        let notes = self.notes();
        let sizes = self.sizes()?;
        self.check_numbers()?;
        self.check_roles()?;
        let default = if self.seeds.is_some() { SEED_ITERS } else { SIM_ITERS };
        let faults = self.faults(trace, self.iters.unwrap_or(default))?;
        let meeting = match (self.listen, self.connect) {
            (Some(at), _) => Meeting::Listen(at),
            (_, Some(at)) => Meeting::Connect(at),
            _ => Meeting::Spawn,
        };
        let pin = match self.pin {
            // A worker, or the threads of a provider, would inherit the pinning.
            Pin::Auto if self.mode == Mode::Worker || self.transport == Transport::Fabric => {
                Pin::None
            }
            pin => pin,
        };
        let mut settings = variables::for_run(self.transport.window(), self.timeout)?;
        if !self.provider.is_empty() {
            settings.providers = self.provider;
        }
        if !self.interface.is_empty() {
            settings.interfaces = self.interface;
        }
        settings.check().map_err(|error| Failure::usage(error.to_string()))?;
        Ok(Plan {
            test: self.test,
            transport: self.transport,
            rails: self.rails,
            sizes,
            iters: self.iters,
            duration: self.duration,
            warmup: self.warmup,
            effort: Effort::MEASURE,
            seed: self.seed,
            seeds: self.seeds,
            check: self.check,
            window: self.window,
            places: pin.resolve()?,
            streams: self.streams,
            layout: match self.transport {
                Transport::Gpu => Some(Layout::Split),
                _ => self.layout,
            },
            signal: self.signal,
            mode: self.mode,
            bidirectional: self.bidirectional,
            hist: self.hist,
            plot: self.plot,
            format: if self.json { Format::Json } else { self.format },
            devices: self.device,
            ipc_path: self.ipc_path.unwrap_or(IpcPath::Auto),
            meeting,
            region: self.region,
            timeout: self.timeout,
            faults,
            trace: self.faults.trace,
            settings,
            notes,
        })
    }
}
