//! Layer 1: atomics only. Nothing here allocates, except pools on the heap (feature `alloc`). Only
//! a sleep with a deadline blocks.
//!
//! | module        | provides                                                            |
//! |---------------|---------------------------------------------------------------------|
//! | [`primitive`] | the atomics, and their replacements for the model checker           |
//! | [`seq`]       | sequence numbers, and their truncation to a field on the wire       |
//! | [`ring`]      | single-producer single-consumer ring over borrowed or shared memory |
//! | [`pool`]      | slots that one owner takes and any thread releases                  |
//! | [`host`]      | the interface to the host: clock, yield, futex                      |
//! | [`event`]     | eventcount: sleep without losing a wake-up                          |
//! | [`sequence`]  | sequence lock: readers detect concurrent changes                    |
//! | [`turns`]     | a bounded number of threads that drain a list                       |
//! | [`owner`]     | the thread that owns an object                                      |
//! | [`spin`]      | how long to spin before sleeping, and the loop of a wait            |

pub mod event;
pub mod host;
pub mod owner;
pub mod pool;
pub mod primitive;
pub mod ring;
pub mod seq;
pub mod sequence;
pub mod spin;
pub mod turns;

#[cfg(test)]
pub(crate) mod testing;
