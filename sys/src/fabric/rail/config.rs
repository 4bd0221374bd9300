//! How large a rail is, and what goes wrong when one is made.

use alloc::string::String;
use core::fmt;
use core::time::Duration;

use crate::fabric::error::CallError;

/// Sizes and choices of a rail, fixed when it is made. Memory is taken then, and no more later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricConfig {
    /// Peers at once; their numbers are below this.
    pub max_peers: u16,
    /// Longest message, in bytes: from 256 on. A provider may carry less.
    pub max_message: usize,
    /// Posts outstanding at once. A provider may take fewer.
    pub depth: u32,
    /// Receive buffers posted, each of a longest message. A provider may take fewer.
    pub receives: u32,
    /// Buffers for messages that are too long for the provider to copy.
    pub bounces: u32,
    /// Regions registered at once.
    pub max_regions: u16,
    /// Regions of peers imported at once.
    pub max_imports: u32,
    /// Completions that the queue holds; 0: what the provider's persona says.
    pub completions: usize,
    /// How long a peer may owe the end of a post, or refuse every post, while nothing else comes
    /// back from it. Under manual progress a peer that does not poll owes, too. `None`: for ever.
    pub deadline: Option<Duration>,
    /// Whether the provider copies short writes and ends them at once.
    /// Their errors are not reported.
    pub inject: bool,
    /// Whether writes are batched (`FI_MORE`). `None`: the persona decides.
    pub more: Option<bool>,
    /// Whether the rail executes atomics, if the provider has all that are used, in all widths.
    /// Those of software providers are not atomic against processors, which also apply signals.
    pub native_atomics: bool,
    /// Where keys and the rail's number come from. `None`: the kernel's random numbers.
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
    /// Whether all values are in range.
    ///
    /// # Errors
    /// Which is not.
    pub fn check(&self) -> Result<(), SetupError> {
        let rules = [
            (self.max_peers >= 1, "max_peers: at least 1"),
            ((256..=1 << 20).contains(&self.max_message), "max_message: 256 to 1 MiB"),
            ((4..=1 << 16).contains(&self.depth), "depth: 4 to 65536"),
            ((4..=1 << 16).contains(&self.receives), "receives: 4 to 65536"),
            ((1..=1 << 16).contains(&self.bounces), "bounces: 1 to 65536"),
            (self.max_regions >= 1, "max_regions: at least 1"),
            ((1..=1 << 24).contains(&self.max_imports), "max_imports: 1 to 16777216"),
            (self.completions <= 1 << 24, "completions: at most 16777216"),
        ];
        match rules.iter().find(|rule| !rule.0) {
            Some(rule) => Err(SetupError::Config(rule.1)),
            None => Ok(()),
        }
    }
}

/// Why there is no rail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SetupError {
    /// A value out of range.
    Config(&'static str),
    /// A call to the provider failed; with the library's words.
    Call(CallError, String),
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SetupError::Config(rule) => write!(f, "fabric rail: {rule}"),
            SetupError::Call(error, words) => write!(f, "fabric rail: {error}: {words}"),
        }
    }
}

impl core::error::Error for SetupError {}
