//! What `fishplate perf match` runs: the workloads, and the engines that have budgets. These are the tool's own files, compiled into the
//! benchmark itself: from another crate they are inlined otherwise, and counts are of that.

#[path = "../../src/tool/perf/matching/engine.rs"]
pub mod engine;
#[path = "../../src/tool/perf/matching/list.rs"]
pub mod list;
#[path = "../../src/tool/perf/matching/ours.rs"]
pub mod ours;
#[path = "../../src/tool/perf/matching/workload.rs"]
pub mod workload;
