//! The logic of `libplugin_FISHPLATE.so`, a backend plugin that stock NIXL loads. `docs/nixl.md`
//! explains its use. An agent is a [`fishplate::Node`]. The C++ half in `plugin/` holds what only
//! C++ can express: virtual tables, strings and vectors. It calls the functions of `ffi`.
//!
//! Any thread may call, because one lock protects an agent. Only an explicit connect, a
//! deregistration and closing an agent wait for peers, and all have deadlines. No panic crosses
//! into C++. After a panic, later calls on that agent fail.
//!
//! # Example
//!
//! Two agents of one process; `tests/nixl.sh` runs it with the wheel from PyPI:
//!
//! ```python
#![doc = include_str!("../examples/write.py")]
//! ```
//!
//! # Files
//!
//! `agent` opens and closes an agent. `state` holds its `memory`, each `peer`, each `transfer` and
//! its `notes`; `connect`, `carry`, `packed` and `tell` operate on the state. `intro` defines the
//! messages before two agents connect, `door` the sockets and threads for them. `chunk` defines the
//! later messages, which are sent from `buffers`. `options` has the parameters, `status` the codes,
//! `slab` the tables.

#![allow(
    clippy::missing_safety_doc,
    reason = "plugin/fishplate.hpp says what each function demands"
)]

mod agent;
mod buffers;
mod carry;
mod chunk;
mod connect;
mod door;
mod ffi;
#[cfg(test)]
mod fuzz;
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
