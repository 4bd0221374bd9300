//! [`Settings`] contains all settings of the assembled transport.
//!
//! Nothing here reads the environment or a file. The tool fills in [`Settings`] from `FISHPLATE_*`
//! variables.

use std::path::PathBuf;
use std::time::Duration;

use fishplate_core::engine::{Config, RailPolicy};
use fishplate_core::sync::seq::MAX_WINDOW;

/// The settings of a node. `docs/tuning.md` lists their defaults and costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Libfabric providers to try, in order. If empty, all of
    /// [`PROVIDERS`](crate::rails::PROVIDERS) are tried.
    pub providers: Vec<String>,
    /// Interfaces to use, by the names that the provider gives them. Each name adds one rail. If
    /// empty, the nearest interfaces are used.
    pub interfaces: Vec<String>,
    /// Maximum number of rails of a process, 1 to 16.
    pub max_rails: usize,
    /// The number of this process among those of its host, from 0. If a process may open fewer
    /// rails than there are equally near NICs, processes with other numbers begin with other NICs.
    /// A process with a GPU uses the NICs of that GPU instead. `None` uses the number that
    /// [`Job::from_env`](crate::Job::from_env) got from the launcher, or 0.
    pub local_rank: Option<usize>,
    /// Whether the provider executes the atomics that it supports, in memory from
    /// [`Node::alloc_native_atomics`](crate::Node::alloc_native_atomics). If so, providers without
    /// atomics are not used, and [failover](crate::node::Builder::failover) is unavailable.
    pub native_atomics: bool,
    /// Whether NICs access device memory themselves, if their provider supports that. Otherwise
    /// libfabric rails copy device memory through host memory.
    pub nic_device_memory: bool,
    /// The path of the libfabric to load. `None` loads `libfabric.so.1` from the linker's search
    /// path.
    pub library: Option<PathBuf>,
    /// How each operation selects its rail.
    pub policy: RailPolicy,
    /// Maximum number of sequence numbers that a stream has in flight: a power of two up to 2^19.
    /// It must be the same on both sides.
    pub window: u32,
    /// Maximum number of events per queue, and of streams with pending work, that a pass handles.
    pub batch: u32,
    /// Maximum payload of a put-signal that is sent as one message, in bytes. A rail may lower it.
    pub eager: u32,
    /// Minimum size of a write or read that is striped over rails, in bytes. Shorter ones are
    /// striped too, in shorter pieces, if they take 200 us or more on the fastest rail; `u64::MAX`
    /// stripes none.
    pub stripe_threshold: u64,
    /// Size of the pieces of a striped write or read, from 1 byte to 2 GiB.
    pub stripe_chunk: u64,
    /// Number of passes before a pending acknowledgement is sent as a separate message.
    pub ack_age: u32,
    /// Number of contexts, 1 to 256. It must be the same on both sides. A node uses only one
    /// context.
    pub contexts: u16,
    /// Maximum time without a sign of life from a peer while a libfabric post to it is outstanding.
    /// Then the peer fails as [`Silent`](fishplate_core::error::PeerError::Silent). With failover
    /// over several rails, only the rail fails, if the peer answers over another rail. A peer that
    /// is silent on all rails fails after six times this time.
    pub deadline: Duration,
}

/// The error of a setting that is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadSetting {
    /// The name of the field in [`Settings`].
    pub field: &'static str,
    /// A description of the allowed values.
    pub allowed: &'static str,
}

impl std::fmt::Display for BadSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} must be {}", self.field, self.allowed)
    }
}

impl std::error::Error for BadSetting {}

/// Maximum number of rails of a process. The size of a region's handle limits it.
pub const RAILS_LIMIT: usize = 16;

impl Settings {
    /// Every provider, at most 16 rails, and the engine's defaults.
    pub const DEFAULT: Settings = Settings {
        providers: vec![],
        interfaces: vec![],
        max_rails: RAILS_LIMIT,
        local_rank: None,
        native_atomics: false,
        nic_device_memory: true,
        library: None,
        policy: Config::DEFAULT.policy,
        window: Config::DEFAULT.window,
        batch: Config::DEFAULT.batch,
        eager: Config::DEFAULT.eager,
        stripe_threshold: Config::DEFAULT.stripe_threshold,
        stripe_chunk: Config::DEFAULT.stripe_chunk,
        ack_age: Config::DEFAULT.ack_age,
        contexts: Config::DEFAULT.contexts,
        deadline: Duration::from_secs(10),
    };

    /// Returns the engine's configuration. `seed` becomes [`Config::seed`]. Give each process a
    /// different seed at each start.
    ///
    /// # Errors
    /// Returns the first field that is out of range.
    pub fn engine(&self, seed: u64) -> Result<Config, BadSetting> {
        self.check()?;
        Ok(Config {
            contexts: self.contexts,
            window: self.window,
            batch: self.batch,
            eager: self.eager,
            stripe_threshold: self.stripe_threshold,
            stripe_chunk: self.stripe_chunk,
            policy: self.policy,
            ack_age: self.ack_age,
            first_sequence: 0,
            seed,
            owner: Config::DEFAULT.owner,
        })
    }

    /// Checks that every field is in range.
    ///
    /// # Errors
    /// Returns the first field that is out of range.
    pub fn check(&self) -> Result<(), BadSetting> {
        let window = self.window.is_power_of_two() && u64::from(self.window) <= MAX_WINDOW;
        let unnamed = |names: &[String]| names.iter().any(String::is_empty);
        let checks = [
            (!unnamed(&self.providers), "providers", "names of providers, such as tcp or efa"),
            (
                !unnamed(&self.interfaces),
                "interfaces",
                "names of interfaces, such as eth0 or mlx5_0",
            ),
            ((1..=RAILS_LIMIT).contains(&self.max_rails), "max_rails", "from 1 to 16"),
            (window, "window", "a power of two from 1 to 524288"),
            (self.batch >= 1, "batch", "at least 1"),
            ((1..=1 << 31).contains(&self.stripe_chunk), "stripe_chunk", "from 1 byte to 2 GiB"),
            ((1..=256).contains(&self.contexts), "contexts", "from 1 to 256"),
            (!self.deadline.is_zero(), "deadline", "longer than zero"),
        ];
        match checks.into_iter().find(|&(good, ..)| !good) {
            Some((_, field, allowed)) => Err(BadSetting { field, allowed }),
            None => Ok(()),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_engine() {
        assert_eq!(Settings::DEFAULT.engine(0), Ok(Config::DEFAULT));
    }

    #[test]
    fn a_field_out_of_range_is_named() {
        let good = || Settings::DEFAULT;
        for (bad, field) in [
            (Settings { window: 3, ..good() }, "window"),
            (Settings { window: 1 << 20, ..good() }, "window"),
            (Settings { batch: 0, ..good() }, "batch"),
            (Settings { max_rails: 17, ..good() }, "max_rails"),
            (Settings { max_rails: 0, ..good() }, "max_rails"),
            (Settings { contexts: 257, ..good() }, "contexts"),
            (Settings { stripe_chunk: 0, ..good() }, "stripe_chunk"),
            (Settings { deadline: Duration::ZERO, ..good() }, "deadline"),
            (Settings { providers: vec![String::new()], ..good() }, "providers"),
            (Settings { interfaces: vec!["a".into(), String::new()], ..good() }, "interfaces"),
        ] {
            assert_eq!(bad.check().unwrap_err().field, field);
            assert!(bad.engine(0).is_err());
        }
    }
}
