//! Settings of a rail, and the errors of opening a rail.

use alloc::string::String;
use core::fmt;
use core::time::Duration;

use crate::fabric::error::CallError;

/// Settings of a rail. They are fixed once the rail is open. Posts and polls do not allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricConfig {
    /// Maximum number of attached peers. Peer numbers are below this.
    pub max_peers: u16,
    /// Maximum length of a message in bytes, at least 256. A provider may support less.
    pub max_message: usize,
    /// Maximum number of outstanding posts. A provider may support fewer.
    pub depth: u32,
    /// Number of posted receive buffers of `max_message` bytes each. A provider may support fewer.
    pub receives: u32,
    /// Number of bounce buffers, for messages too long to inject and for the first to each peer.
    pub bounces: u32,
    /// Maximum number of registered regions.
    pub max_regions: u16,
    /// Maximum number of imported regions.
    pub max_imports: u32,
    /// Depth of the completion queue. 0 selects the depth of the provider's persona.
    pub completions: usize,
    /// How long a peer may show no sign of life while a post to it is outstanding or every post is
    /// rejected. Under manual progress a peer that does not poll shows no sign of life. `None`
    /// means no limit. If the engine does not [give up](fishplate_core::rail::Sink::silent) the
    /// peer then, the rail gives it up after six times this time.
    pub deadline: Option<Duration>,
    /// Whether short writes are injected. An injected write completes at once, and its errors go
    /// unreported.
    pub inject: bool,
    /// Whether writes are batched (`FI_MORE`). With `None` the persona decides.
    pub more: Option<bool>,
    /// Whether the provider executes the atomics that it supports, in regions [with native
    /// atomics](fishplate_core::mem::Region::with_native_atomics). The offer must have been
    /// requested with [`Ask::atomics`](crate::fabric::Ask::atomics).
    pub native_atomics: bool,
    /// Seed of the keys and of the rail's signature. `None` takes random numbers from the kernel.
    pub seed: Option<u64>,
}

impl Default for FabricConfig {
    fn default() -> Self {
        FabricConfig {
            max_peers: 64,
            max_message: 4096,
            depth: 256,
            receives: 256,
            bounces: 64,
            max_regions: 64,
            max_imports: 1024,
            completions: 0,
            deadline: Some(Duration::from_secs(30)),
            inject: true,
            more: None,
            native_atomics: false,
            seed: None,
        }
    }
}

impl FabricConfig {
    /// Checks that all settings are in range.
    ///
    /// # Errors
    /// [`SetupError::Config`] names the setting that is out of range.
    pub fn check(&self) -> Result<(), SetupError> {
        let rules = [
            (self.max_peers >= 1, "max_peers; use at least 1"),
            ((256..=1 << 20).contains(&self.max_message), "max_message; use 256 to 1 MiB"),
            ((4..=1 << 16).contains(&self.depth), "depth; use 4 to 65536"),
            ((4..=1 << 16).contains(&self.receives), "receives; use 4 to 65536"),
            ((1..=1 << 16).contains(&self.bounces), "bounces; use 1 to 65536"),
            (self.max_regions >= 1, "max_regions; use at least 1"),
            ((1..=1 << 24).contains(&self.max_imports), "max_imports; use 1 to 16777216"),
            (self.completions <= 1 << 24, "completions; use at most 16777216"),
        ];
        match rules.iter().find(|rule| !rule.0) {
            Some(rule) => Err(SetupError::Config(rule.1)),
            None => Ok(()),
        }
    }
}

/// Why a rail was not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetupError {
    /// A setting is out of range.
    Config(&'static str),
    /// A provider call failed. The string is libfabric's message.
    Call(CallError, String),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Config(rule) => write!(f, "invalid setting: FabricConfig::{rule}"),
            SetupError::Call(error, words) => write!(f, "{error}: {words}{}", error.code.remedy()),
        }
    }
}

impl core::error::Error for SetupError {}
