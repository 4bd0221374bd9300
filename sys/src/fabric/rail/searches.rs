//! Searches for new connections of `tcp`, to make them close-on-exec. Slow path.

use super::FabricRail;
use crate::clock::monotonic_ns;

/// Bounds of the interval between two searches, in nanoseconds. It doubles while nothing is found.
const MIN: u64 = 10_000_000;
const MAX: u64 = 10_000_000_000;

/// Minimum interval between two searches, as a multiple of the time that a search takes.
const SHARE: u64 = 100;

#[derive(Default)]
pub(super) struct Searches {
    last: u64,
    wait: u64,
    least: u64,
}

impl Searches {
    /// A connection may appear soon.
    pub fn resume(&mut self) {
        self.wait = self.least;
    }
}

impl FabricRail {
    pub(super) fn search_connections(&mut self, now: u64) {
        if !self.offer.persona.listens || now - self.searches.last < self.searches.wait {
            return;
        }
        let found = self.endpoint.close_on_exec();
        let least = MIN.max(SHARE * (monotonic_ns() - now));
        let longer = if found { 0 } else { MAX.min(2 * self.searches.wait) };
        self.searches = Searches { last: now, wait: least.max(longer), least };
    }
}
