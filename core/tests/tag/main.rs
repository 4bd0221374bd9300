//! Tests the matcher against its specification. The model (`model`) consists of two lists that are
//! searched from the oldest entry. The matcher must give the same results in every configuration
//! (`engines`).
//!
//! | file           | what                                                                     |
//! |----------------|--------------------------------------------------------------------------|
//! | `differential` | random operations, tiny alphabets; `FISHPLATE_TAG_OPS=n` sets how many   |
//! | `exhaustive`   | all sequences over 15 letters; `FISHPLATE_TAG_WORDS=n` sets their length |
//! | `invariance`   | one sequence, every configuration, the same results                      |
//! | `properties`   | properties without a model: nothing lost, order per pair, duality         |
//! | `calls`        | each call alone, ids, errors that change nothing                          |
//! | `limits`       | wraps, depth, counters, search costs                                      |
//!
//! Randomised tests print their seed. `FISHPLATE_SEED=n` runs that seed.

mod calls;
mod differential;
mod engines;
mod exhaustive;
mod invariance;
mod limits;
mod model;
mod ops;
mod properties;
