//! The values of options that have a few choices.

use std::fmt;
use std::str::FromStr;

use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, Error, ValueEnum};
use fishplate::config::Settings;
use serde::{Deserialize, Serialize};

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
    /// A stream of signals to one word. The other side waits for the last signal.
    SignalRate,
    /// Ping-pong of tagged messages; latency is half a round trip.
    Tag,
    /// Tagged messages, as fast as the window allows; the other side receives them all.
    TagBw,
    /// The ring alone, without a transport: ping-pong latency, then throughput.
    Ring,
    /// The command pool compared with other pools, in this process; see --streams. -n is the number
    /// of iterations per stream.
    Pool,
}

/// Parses a [`Test`]. Its list of tests names `match` and `job` too, which `main` starts.
#[derive(Clone, Copy)]
pub struct Tests;

impl TypedValueParser for Tests {
    type Value = Test;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<Test, Error> {
        EnumValueParser::<Test>::new().parse_ref(command, arg, value).map_err(|mut error| {
            if value == "match" || value == "job" {
                let name = value.display();
                return Error::raw(
                    ErrorKind::ValueValidation,
                    format!("{name} must follow perf: use fishplate perf {name} [OPTIONS]\n"),
                )
                .with_cmd(command);
            }
            let names = self.possible_values().into_iter().flatten();
            let names = names.map(|value| value.get_name().to_owned()).collect();
            error.insert(ContextKind::ValidValue, ContextValue::Strings(names));
            error
        })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let own = [
            ("match", "Tag matching alone, without a transport"),
            ("job", "Traffic between many processes"),
        ];
        let own = own.map(|(name, help)| {
            PossibleValue::new(name).help(format!("{help}; has its own options and --help"))
        });
        let tests = Test::value_variants().iter().filter_map(Test::to_possible_value);
        Some(Box::new(tests.chain(own)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// A loopback in one process: the cost of the engine alone.
    Loopback,
    /// Shared memory between two processes on one host.
    Shm,
    /// Two engines in one thread, over a simulated fabric that delays and reorders at random.
    Sim,
    /// libfabric, between two processes on one host or two.
    Fabric,
    /// Memory of a device, between two processes on one host.
    Gpu,
}

impl Transport {
    /// `FISHPLATE_WINDOW` overrides this. Processes that share memory get a larger window.
    pub fn window(self) -> u32 {
        match self {
            Transport::Shm | Transport::Gpu => 256,
            _ => Settings::DEFAULT.window,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IpcPath {
    /// The device copies them, or both sides where devices do not reach each other.
    Auto,
    /// The device copies them. Fails if a payload would take another path.
    Direct,
    /// Both sides copy them through host memory.
    Relay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceName {
    /// Host memory in place of device memory.
    Host,
    /// Memory of an NVIDIA GPU, with its CUDA device number in this process.
    Cuda(u32),
    /// Memory of an AMD GPU, with its HIP device number in this process.
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
        named.ok_or_else(|| format!("`{text}` is not a device; use host, cuda:N or hip:N"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// The signal directly behind the payload.
    Adjacent,
    /// The signal in a different cache line from the payload.
    Split,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The thread that issues the operations.
    Inline,
    /// A separate thread.
    Worker,
}

/// How a signal of `signal-rate` changes its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SignalKind {
    /// Adds one. The run checks that no signal is lost.
    Add,
    /// Stores the signal's sequence number. The run checks that it never decreases.
    Set,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table for people.
    Table,
    /// One JSON object per line.
    Json,
    /// One header line, then one line per row.
    Csv,
}

pub fn name<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
}
