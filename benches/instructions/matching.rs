//! What `fishplate perf match` runs: the workloads, and the engines that have budgets. These are
//! the tool's own files, compiled into the benchmark itself: from another crate they are inlined
//! otherwise, and counts are of that.

#[path = "../../tool/src/perf/matching/engine.rs"]
pub mod engine;
#[path = "../../tool/src/perf/matching/list.rs"]
pub mod list;
#[path = "../../tool/src/perf/matching/ours.rs"]
pub mod ours;
#[path = "../../tool/src/perf/matching/workload.rs"]
pub mod workload;
