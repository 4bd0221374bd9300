//! The wrappers on the Linux they run on: parking, rings between processes, affinity.

mod affinity;
mod asleep;
mod park;
mod shared_ring;
mod support;
