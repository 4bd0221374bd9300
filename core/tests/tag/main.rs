//! The matcher against the rule it implements. Two lists that are searched from the oldest on (`model`) say what is right; the
//! matcher, in every configuration (`engines`), must answer the same.
//!
//! | file | what |
//! |---|---|
//! | `differential` | random operations, tiny alphabets; `FISHPLATE_TAG_OPS=n` sets how many |
//!
//! Randomised tests print their seed; `FISHPLATE_SEED=n` runs that one.

mod differential;
mod engines;
mod model;
mod ops;
