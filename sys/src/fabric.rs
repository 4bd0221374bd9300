//! libfabric: the library, its objects, and a rail over them.
//!
//! One value owns each object and closes it on drop. The value also holds its parent object, so
//! objects close in reverse order. Building needs no headers and no linking:
//! [`library::Library::open`] loads the library.

pub mod av;
pub mod cq;
pub mod domain;
pub mod endpoint;
pub mod error;
#[allow(clippy::module_inception, reason = "one file per object, and this object is called so")]
pub mod fabric;
pub mod info;
pub mod library;
mod listeners;
pub mod mr;
pub mod negotiate;
mod object;
pub mod persona;
pub mod rail;
pub mod raw;
mod sockets;

pub use error::{CallError, Code, LoadError};
pub use library::Library;
pub use negotiate::{Ask, Offer, negotiate};
pub use rail::{FabricConfig, FabricRail, FabricSetup};
