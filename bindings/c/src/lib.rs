//! Fishplate for C: `include/fishplate.h` describes every function, `docs/c.md` how to begin. This
//! package turns each into a call of [`fishplate::Node`] and holds no logic of its own.
//!
//! Nothing that a C program passes is believed: a handle names a slot of a fixed table and is
//! checked there, numbers are checked by the node, and only the buffers and strings of the caller
//! are taken at their word. No panic leaves a function: it ends the node, and is an error.
//!
//! # Files
//!
//! `handle` is the table of nodes and who may call into them, `status` what functions return;
//! `node`, `memory`, `verbs`, `messages` and `poll` are the functions, as the header groups them;
//! `layout` pins what programs were compiled with.

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
