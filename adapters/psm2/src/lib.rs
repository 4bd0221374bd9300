//! A `libpsm2.so.2` over Fishplate: programs built for Intel's PSM2, such as Open MPI's `mtl/psm2`,
//! run on it unchanged. `docs/mpi.md` is the way in. The package has no logic of matching or
//! transport: an endpoint is a [`fishplate::Node`] and its [matched queue](fishplate::Node::queue).
//!
//! Handles are numbers that look like pointers; they are looked up and never dereferenced. Only
//! buffers, strings and arrays are used unchecked. A panic ends the endpoint and becomes an error.
//! One lock protects each endpoint, so any thread may call.
//!
//! # Files
//!
//! `table` has the endpoints, `handle` the types of handles, `error` the codes and handlers,
//! `layout` the structures of the headers. `open`, `info`, `connect`, `address`, `mq` and `am` are
//! the functions, grouped as in the headers. Before two endpoints connect they exchange the frames
//! of `frame`: `dial` asks, `door` answers. `pause` decides how calls wait.

#![allow(clippy::missing_safety_doc, reason = "the headers of PSM2 say what each function demands")]

mod active;
mod address;
mod am;
mod connect;
mod dial;
mod door;
mod error;
mod frame;
mod handle;
mod info;
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
pub use info::*;
pub use layout::*;
pub use mq::*;
pub use open::*;
