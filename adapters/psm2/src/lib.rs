//! A `libpsm2.so.2` over Fishplate. Programs built for Intel's PSM2, such as Open MPI's `mtl/psm2`,
//! run on it unchanged. Start with `docs/mpi.md`. The package contains no matching or transport: an
//! endpoint is a [`fishplate::Node`] with its [matched queue](fishplate::Node::queue).
//!
//! Handles are numbers that look like pointers, and are never dereferenced. The program's other
//! pointers, to buffers, arrays and functions, are only checked for null. A panic is caught: the
//! endpoint becomes unusable and the call returns an error. One lock protects each endpoint, so any
//! thread may call.
//!
//! # Example
//!
//! Runs an MPI program on four processes.
//!
//! ```sh
//! adapters/psm2/build.sh /opt/fishplate
//! mpicc adapters/psm2/tests/mpi.c -o mpi
//! export LD_LIBRARY_PATH=/opt/fishplate
//! mpirun --mca pml cm --mca mtl psm2 -x LD_LIBRARY_PATH \
//!     -x LD_PRELOAD=/opt/fishplate/libfishplate_hfi1.so -n 4 ./mpi 1000
//! ```
//!
//! # Files
//!
//! `table` holds the endpoints, each an `endpoint`. `home` has the layout of handles, `handle`
//! their types, `error` the codes and handlers, `layout` the structures of the headers. `lock` is
//! the lock of an endpoint, and `system` makes its system calls. The C functions are in `open`,
//! `info`, `connect`, `address`, `mq` with `complete`, and `am`, grouped as in the headers. `call`
//! has the steps that calls of queues share. Before they connect, two endpoints exchange the frames
//! of `frame`: `dial` asks and `door` answers. `pause` decides how calls wait.

#![allow(clippy::missing_safety_doc, reason = "the headers of PSM2 say what each function demands")]

mod active;
mod address;
mod am;
mod call;
mod complete;
mod connect;
mod dial;
mod door;
mod endpoint;
mod error;
mod frame;
mod handle;
mod home;
mod info;
mod layout;
mod lock;
mod mq;
mod open;
mod pause;
#[cfg(all(test, fishplate_loom))]
mod races;
mod system;
mod table;

use fishplate::core::sync::primitive;

pub use address::*;
pub use am::*;
pub use complete::*;
pub use connect::*;
pub use error::{Handler, Token, psm2_error_defer, psm2_error_get_string};
pub use handle::{Ep, EpAddr, Mq, Req};
pub use info::*;
pub use layout::*;
pub use mq::*;
pub use open::*;
