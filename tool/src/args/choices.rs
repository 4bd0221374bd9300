//! The values of options that have a few choices.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use fishplate::config::Settings;
use serde::{Deserialize, Serialize};

/// Operations that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Test {
    /// Ping-pong of put-signals; latency is half a round trip.
    PutSignal,
    /// Puts, as fast as the window allows, followed by a quiet.
    Put,
    /// Gets, one at a time.
    Get,
    /// Fetch-adds on one word, one at a time.
    Amo,
    /// A stream of signals to one word. The other side waits for the last one.
    SignalRate,
    /// Ping-pong of tagged messages; latency is half a round trip.
    Tag,
    /// Tagged messages, as fast as the window allows; the other side receives them all.
    TagBw,
    /// The ring alone, without a transport: ping-pong latency, then throughput.
    Ring,
    /// The command pool compared with other pools, in this process: see --streams. -n is per
    /// stream.
    Pool,
}

/// Ways to reach the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A loopback in one process: the cost of the engine alone.
    Loopback,
    /// Shared memory between two processes of one host.
    Shm,
    /// Two engines in one thread, over a simulated fabric that delays and reorders at random.
    Sim,
    /// libfabric, between two processes on one host or two.
    Fabric,
    /// Memory of a device, between two processes on one host.
    Gpu,
}

impl Transport {
    /// Returns the default window of a stream, which `FISHPLATE_WINDOW` overrides. It is larger
    /// between processes that share memory.
    pub fn window(self) -> u32 {
        match self {
            Transport::Shm | Transport::Gpu => 256,
            _ => Settings::DEFAULT.window,
        }
    }
}

/// How payloads travel from one device's memory into that of another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IpcPath {
    /// The device copies.
    Direct,
    /// Both sides copy, through host memory.
    Relay,
}

/// Which memory the payloads are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceName {
    /// Host memory in place of device memory.
    Host,
    /// The memory of an NVIDIA GPU, by its number in this process.
    Cuda(u32),
    /// The memory of an AMD GPU, by its number in this process.
    Hip(u32),
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceName::Host => f.write_str("host"),
            DeviceName::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            DeviceName::Hip(ordinal) => write!(f, "hip:{ordinal}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = match text.split_once(':') {
            None => (text == "host").then_some(DeviceName::Host),
            Some(("cuda", ordinal)) => ordinal.parse().ok().map(DeviceName::Cuda),
            Some(("hip", ordinal)) => ordinal.parse().ok().map(DeviceName::Hip),
            Some(_) => None,
        };
        named.ok_or_else(|| format!("`{text}` is not host, cuda:N or hip:N"))
    }
}

/// The placement of signal and payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// The signal directly behind the payload.
    Adjacent,
    /// The signal in a different cache line from the payload.
    Split,
}

/// Which thread makes progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The thread that issues the operations.
    Inline,
    /// A separate thread.
    Worker,
}

/// What `signal-rate` does to the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SignalKind {
    /// Adds one: no signal may be lost.
    Add,
    /// Stores the signal's number: it may never decrease.
    Set,
}

/// How results are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table for people.
    Table,
    /// One object per line.
    Json,
    /// One header line, then one line per row.
    Csv,
}

/// Returns the name of a choice on the command line.
pub fn name<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
}
