//! Operations and their results, in terms common to all engines. A receive is named by its context,
//! a message by its cookie.

use fishplate_core::engine::tag::{Arrived, Cancel, Tag, TagError};

/// The matching criteria of a receive or a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub source: Option<u32>,
    pub tag: Tag,
    pub ignore: Tag,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    Post { wanted: Wanted, context: u64 },
    Arrive(Arrived),
    Cancel { context: u64 },
    Probe(Wanted),
    Claim(Wanted),
    Take { cookie: u64 },
    Discard { cookie: u64 },
    FailSource(u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The receive or the message waits.
    Waits,
    /// The message that the receive matched, that the probe found, or that was taken or discarded.
    Message(Arrived),
    /// The message matched this receive.
    Receive(u64),
    /// The probe found nothing.
    Nothing,
    Cancelled(Cancel),
    Removed(Vec<u64>),
    Refused(TagError),
}

/// An engine that executes operations.
pub trait Answers {
    fn answer(&mut self, op: &Op) -> Seen;
}

/// A splitmix64 generator.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Creates a generator with a seed from `FISHPLATE_SEED` or the time, and prints the seed.
    pub fn seeded(test: &str) -> Self {
        let seed = std::env::var("FISHPLATE_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .unwrap_or_else(|| {
                std::time::SystemTime::UNIX_EPOCH
                    .elapsed()
                    .map_or(0, |since| since.as_nanos() as u64)
            });
        println!("{test}: FISHPLATE_SEED={seed}");
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        ((self.next() as u128 * n as u128) >> 64) as u64
    }
}

/// Returns the number in an environment variable, or the default.
pub fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}
