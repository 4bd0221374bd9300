//! Queues of commands: what each kind does, what orders them, and what happens when a queue, worker
//! or event is dropped.

#[path = "../../core/tests/support/mod.rs"]
mod support;

mod commands;
mod ends;
mod order;
mod rig;
mod threads;
