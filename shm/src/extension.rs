//! API for packages that build on this one, such as `fishplate-gpu`. Programs do not need it.
//!
//! - Packets of their own over the sockets of links: [`Extension`], [`Line`], [`Writer`] and
//!   [`Reader`].
//! - Descriptors from peers, dropped without blocking: [`Foreign`], [`Batch`].
//! - Sealed memory behind descriptors: [`create`], [`seal`], [`verify`], [`Mapping`], [`unmap`].
//! - A rail over [`ShmRail`](crate::ShmRail): its methods [`line`](crate::ShmRail::line),
//!   [`is_up`](crate::ShmRail::is_up), [`land`](crate::ShmRail::land).

pub use crate::control::{Descriptors, Extension, Line};
pub use crate::foreign::{Batch, Foreign, unmap};
pub use crate::packet::{EXTENSIONS, Reader, Writer};
pub use crate::rail::FOREVER;
pub use crate::segment::{Access, Mapping, PAGE, create, memory_size, seal, verify};
pub use crate::socket::MAX_FDS;
