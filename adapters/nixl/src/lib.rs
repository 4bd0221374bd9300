//! The logic of `libplugin_FISHPLATE.so`, a backend plugin that stock NIXL loads. `docs/nixl.md`
//! says how. An agent is a [`fishplate::Node`]; its C++ half in `plugin/` has what only C++ can:
//! virtual tables, strings and vectors. It calls the functions of `ffi`.
//!
//! Any thread may call: one lock protects an agent. No call waits for a peer, but those that
//! connect explicitly or end an agent, which have deadlines. No panic leaves a function: it ends
//! the agent, whose calls then fail.
//!
//! # Files
//!
//! `agent` opens and closes an agent, `state` is what it has: its `memory`, each `peer`, each
//! `transfer` and its `notes`. `connect`, `carry`, `packed` and `tell` are what is done with these.
//! `intro` is what two agents tell each other before they connect, `door` the sockets and threads
//! for it; `chunk` is what they send later, from `buffers`. `options` are the parameters, `status`
//! the codes, `slab` the tables.

#![allow(clippy::missing_safety_doc, reason = "plugin/fishplate.hpp says what each function demands")]

mod agent;
mod buffers;
mod carry;
mod chunk;
mod connect;
mod door;
mod ffi;
mod intro;
mod memory;
mod notes;
mod options;
mod packed;
mod peer;
mod slab;
mod state;
mod status;
mod tell;
mod transfer;

pub use ffi::*;
