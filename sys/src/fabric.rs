//! libfabric: the library, its objects, and a rail over them.
//!
//! | module            | what                                              | C            |
//! |-------------------|---------------------------------------------------|--------------|
//! | [`raw`]           | structures, tables and numbers with C's layout    | `rdma/*.h`   |
//! | [`error`]         | codes, and errors of setup                        | `fi_errno.h` |
//! | [`library`]       | the functions found at run time                   | `fi_getinfo` |
//! | [`info`]          | the offers of providers, and hints                | `fi_info`    |
//! | [`fabric`]        | a fabric; from here on, one object per module     | `fid_fabric` |
//! | [`domain`]        | a domain                                          | `fid_domain` |
//! | [`av`]            | an address vector                                 | `fid_av`     |
//! | [`cq`]            | a completion queue                                | `fid_cq`     |
//! | [`endpoint`]      | an endpoint: all posts                            | `fid_ep`     |
//! | [`mr`]            | a memory registration                             | `fid_mr`     |
//! | [`persona`]       | facts that providers do not report                |              |
//! | [`mod@negotiate`] | choosing an offer                                 |              |
//! | [`rail`]          | the rail over an endpoint                         |              |
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

pub use error::{CallError, Code, LoadError};
pub use library::Library;
pub use negotiate::{Ask, Offer, negotiate};
pub use rail::{FabricConfig, FabricRail, FabricSetup};
