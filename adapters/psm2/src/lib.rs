//! A `libpsm2.so.2` over Fishplate: programs that were built for Intel's PSM2, among them Open
//! MPI's `mtl/psm2`, run on it unchanged. `docs/mpi.md` says how. The package holds no logic of
//! matching or transport: an endpoint is a [`fishplate::Node`] and its
//! [matched queue](fishplate::Node::queue).
//!
//! Nothing that a program passes is believed, except buffers, strings and arrays: handles are
//! numbers that look like pointers and are never followed. No panic leaves a function: it ends the
//! endpoint, and is an error. One lock protects each endpoint, so any thread may call.
//!
//! # Files
//!
//! `table` holds the endpoints, `handle` the types by which programs name them, `error` the codes
//! and handlers, `layout` the structures of the headers. `open`, `connect`, `address`, `mq` and
//! `am` are the functions as the headers group them. `frame` is what two endpoints exchange before
//! they connect, `dial` and `door` its two ends; `pause` is how a call waits.

#![allow(clippy::missing_safety_doc, reason = "the headers of PSM2 say what each function demands")]

mod address;
mod am;
mod connect;
mod dial;
mod door;
mod error;
mod frame;
mod handle;
mod layout;
mod mq;
mod open;
mod pause;
mod table;

pub use address::*;
pub use am::*;
pub use connect::*;
pub use error::{Handler, Token, psm2_error_defer, psm2_error_get_string};
pub use handle::{Ep, EpAddr, Mq, Req};
pub use layout::*;
pub use mq::*;
pub use open::*;
