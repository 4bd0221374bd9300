//! How a benchmark is held to its limit.

use fishplate_benches::limit;
use iai_callgrind::{Callgrind, EventKind, LibraryBenchmarkConfig};

/// The path may take no more instructions than its budget says.
pub fn budget(path: &str) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, limit(path))]);
    LibraryBenchmarkConfig::default().tool(callgrind).clone()
}
