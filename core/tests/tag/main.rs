//! The matcher against the rule it implements. Two lists that are searched from the oldest on
//! (`model`) say what is right; the matcher, in every configuration (`engines`), must answer the
//! same.
//!
//! | file           | what                                                                     |
//! |----------------|--------------------------------------------------------------------------|
//! | `differential` | random operations, tiny alphabets; `FISHPLATE_TAG_OPS=n` sets how many   |
//! | `exhaustive`   | all sequences over 15 letters; `FISHPLATE_TAG_WORDS=n` sets their length |
//! | `invariance`   | one sequence, every configuration, the same answers                      |
//! | `properties`   | what holds without a model: nothing lost, order per pair, duality        |
//! | `calls`        | every call by itself, ids, errors that change nothing                    |
//! | `limits`       | wraps, depth, counters, what a search costs                              |
//!
//! Randomised tests print their seed; `FISHPLATE_SEED=n` runs that one.

mod calls;
mod differential;
mod engines;
mod exhaustive;
mod invariance;
mod limits;
mod model;
mod ops;
mod properties;
