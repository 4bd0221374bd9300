//! Applies the limits of `BUDGETS` to the benchmarks.

use fishplate_benches::limit;
use iai_callgrind::{Callgrind, EventKind, LibraryBenchmarkConfig};

/// Returns the configuration that fails the path if it takes more instructions than its budget.
pub fn budget(path: &str) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::default();
    callgrind.hard_limits([(EventKind::Ir, limit(path))]);
    LibraryBenchmarkConfig::default().tool(callgrind).clone()
}
