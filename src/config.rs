//! All settings of the assembled transport, in one structure.
//!
//! Nothing here reads the environment or a file: a program fills in [`Settings`]. The tool maps
//! `FISHPLATE_*` variables onto it.

use std::path::PathBuf;
use std::time::Duration;

use fishplate_core::engine::{Config, RailPolicy};
use fishplate_core::sync::seq::MAX_WINDOW;

/// The settings, with their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Libfabric providers to try, in order, as libfabric names them. Empty:
    /// every one that is usable, the fastest first.
    pub providers: Vec<String>,
    /// Interfaces to use, one rail for each time that one is named, as the provider calls them.
    /// Empty: chosen by distance.
    pub interfaces: Vec<String>,
    /// Rails that a process uses at most, 1 to 16.
    pub max_rails: usize,
    /// The libfabric to load. `None`: `libfabric.so.1`, wherever the system finds it.
    pub library: Option<PathBuf>,
    /// How rails are chosen, operation by operation.
    pub policy: RailPolicy,
    /// Numbers that a stream may have in flight: a power of two. The same at both ends.
    pub window: u32,
    /// Events, and due streams, that a pass handles per queue.
    pub batch: u32,
    /// Payload up to which a put-signal is one message, in bytes.
    pub eager: u32,
    /// Size from which a write or read is cut and spread over rails, in bytes.
    pub stripe_threshold: u64,
    /// Size of the pieces, in bytes.
    pub stripe_chunk: u64,
    /// Passes after which an acknowledgement that is owed goes out alone.
    pub ack_age: u32,
    /// Contexts, 1 to 256. The same at both ends.
    pub contexts: u16,
    /// A post that a rail has not completed after this time counts as lost, and its peer fails.
    pub deadline: Duration,
}

/// A setting is out of range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadSetting {
    /// The field of [`Settings`].
    pub field: &'static str,
    /// The allowed values.
    pub allowed: &'static str,
}

impl std::fmt::Display for BadSetting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} must be {}", self.field, self.allowed)
    }
}

impl std::error::Error for BadSetting {}

/// Rails that one process can have: what a region's handle has room for.
pub const RAILS_LIMIT: usize = 16;

impl Settings {
    /// The defaults.
    pub const DEFAULT: Settings = Settings {
        providers: vec![],
        interfaces: vec![],
        max_rails: RAILS_LIMIT,
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

    /// The part that the engine takes. `seed` is for [`Config::seed`]: give each process its own,
    /// and another each time it starts.
    ///
    /// # Errors
    /// The first field that is out of range.
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
        })
    }

    /// Whether every field is in range.
    ///
    /// # Errors
    /// The first that is not.
    pub fn check(&self) -> Result<(), BadSetting> {
        let window = self.window.is_power_of_two() && u64::from(self.window) <= MAX_WINDOW;
        let unnamed = |names: &[String]| names.iter().any(String::is_empty);
        let checks = [
            (!unnamed(&self.providers), "providers", "names of providers, such as tcp or efa"),
            (!unnamed(&self.interfaces), "interfaces", "names of interfaces, such as eth0 or mlx5_0"),
            ((1..=RAILS_LIMIT).contains(&self.max_rails), "max_rails", "from 1 to 16"),
            (window, "window", "a power of two from 1 to 524288"),
            (self.batch >= 1, "batch", "at least 1"),
            ((1..=1 << 31).contains(&self.stripe_chunk), "stripe_chunk", "from 1 byte to 2 GiB"),
            ((1..=256).contains(&self.contexts), "contexts", "from 1 to 256"),
            (!self.deadline.is_zero(), "deadline", "longer than nothing"),
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
    fn the_defaults_are_the_engines() {
        assert_eq!(Settings::DEFAULT.engine(0), Ok(Config::DEFAULT));
    }

    #[test]
    fn what_is_out_of_range_is_named() {
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
