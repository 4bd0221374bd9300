//! Fishplate for C. `include/fishplate.h` documents every function. Start with `docs/c.md` and
//! `examples/put_signal.c`. This package only checks handles and converts arguments and results.
//!
//! Input is not trusted: a handle is looked up in a fixed table, and the node checks numbers. The
//! caller's pointers to buffers, strings and results are only checked for null and alignment. A
//! panic makes the node unusable and becomes an error.
//!
//! # Example
//!
//! Two processes; `tests/c.sh` builds and runs it:
//!
//! ```c
#![doc = include_str!("../examples/put_signal.c")]
//! ```
//!
//! # Files
//!
//! `handle` holds the table of nodes and checks which thread may call. `status` has the return
//! codes. `node`, `memory`, `verbs`, `messages` and `poll` hold the functions, grouped as in the
//! header. `layout` asserts the layouts of the structures.

#![allow(clippy::missing_safety_doc, reason = "the header says what each function demands")]

mod handle;
mod layout;
mod memory;
mod messages;
mod node;
mod poll;
mod status;
mod verbs;

pub use handle::{FpNode, fp_node_unbind};
pub use memory::*;
pub use messages::*;
pub use node::*;
pub use poll::*;
pub use status::{fp_last_error, fp_strerror};
pub use verbs::*;
