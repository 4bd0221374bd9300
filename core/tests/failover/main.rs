//! Rails fail and return in the simulator, by seeded schedules. Every operation is applied once and
//! in order, and so is every message.
//!
//! `FISHPLATE_SEED=n` runs one seed, and `FISHPLATE_SEEDS=n` that many in each part.
//! `tests/proofs.sh` runs 100,000. A seed that fails is reduced to the events that it needs.

#[path = "../twosided/rig.rs"]
#[allow(dead_code, reason = "this uses a part of it")]
mod rig;
#[path = "../support/mod.rs"]
mod support;

mod closing;
mod counts;
mod devices;
mod disabled;
mod fences;
mod given_up;
mod held;
mod leaving;
mod mail;
mod parting;
mod prompt;
mod reads;
mod run;
mod schedule;
mod search;
mod stalls;
