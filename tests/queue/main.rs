//! Tests queues of commands: the effect of each kind of command, their order, and dropped queues,
//! workers and events.

#[path = "../../core/tests/support/mod.rs"]
mod support;

mod commands;
mod ends;
mod order;
mod rig;
mod threads;
