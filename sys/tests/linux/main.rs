//! Tests the wrappers on this machine's Linux: parking, rings between processes, affinity.

mod affinity;
mod asleep;
mod park;
mod shared_ring;
mod support;
