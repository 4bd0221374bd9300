//! Tests the engine's contract over loopback, faulty and simulated rails. In test names, `iN_`
//! numbers an invariant, and `eN_` an edge case.
//!
//! Randomised tests run over [`support::seeds`] and name the seed when they fail.
//! `FISHPLATE_SEED=n` runs one seed, and `FISHPLATE_SEEDS=n` runs that many.

#[path = "../support/mod.rs"]
mod support;

mod acks;
mod atomics;
mod bad_input;
mod bounds;
mod close;
mod completion;
mod damage;
mod device;
mod device_words;
mod epoch;
mod failover;
mod failover_meeting;
mod failure;
mod fence_quiet;
mod hostile;
mod hostile_returns;
mod joints;
mod long_messages;
mod mapped;
mod oracle;
mod order;
mod refused;
mod removal;
mod returns;
mod speed;
