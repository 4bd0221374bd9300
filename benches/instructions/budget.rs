//! Applies the limits of `BUDGETS` to the benchmarks.

use fishplate_benches::limit;
use iai_callgrind::{Callgrind, EventKind, LibraryBenchmarkConfig};

/// Returns a configuration that makes a benchmark fail if `path` exceeds its instruction limit.
pub fn budget(path: &str) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, limit(path))]);
    LibraryBenchmarkConfig::default().tool(callgrind).clone()
}
