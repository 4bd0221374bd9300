//! The workloads and engines of `fishplate perf match` that have budgets. Includes the tool's
//! source files, because code from another crate would be inlined differently and change the
//! counts.

#[path = "../../tool/src/perf/matching/engine.rs"]
pub mod engine;
#[path = "../../tool/src/perf/matching/list.rs"]
pub mod list;
#[path = "../../tool/src/perf/matching/ours.rs"]
pub mod ours;
#[path = "../../tool/src/perf/matching/workload.rs"]
pub mod workload;
