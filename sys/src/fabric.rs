//! libfabric: the library, its objects, and a rail over them.
//!
//! | module            | what                                              | C            |
//! |-------------------|---------------------------------------------------|--------------|
//! | [`raw`]           | structures, tables and numbers as C lays them out | `rdma/*.h`   |
//! | [`error`]         | codes, and what goes wrong at setup               | `fi_errno.h` |
//! | [`library`]       | the functions found at run time                   | `fi_getinfo` |
//! | [`info`]          | what providers offer and what is asked of them    | `fi_info`    |
//! | [`fabric`]        | one file per object from here: a fabric           | `fid_fabric` |
//! | [`domain`]        | a domain                                          | `fid_domain` |
//! | [`av`]            | an address vector                                 | `fid_av`     |
//! | [`cq`]            | a completion queue                                | `fid_cq`     |
//! | [`endpoint`]      | an endpoint: all posts                            | `fid_ep`     |
//! | [`mr`]            | a memory registration                             | `fid_mr`     |
//! | [`persona`]       | what is known of providers beyond what they say   |              |
//! | [`mod@negotiate`] | choosing an offer                                 |              |
//! | [`rail`]          | the rail over an endpoint                         |              |
//!
//! Each object is owned by one value and closed when that is dropped, in reverse order: a value
//! holds what it was opened in. No headers and no linking are needed to build; the library is found
//! when [`library::Library::open`] is called.

pub mod av;
pub mod cq;
pub mod domain;
pub mod endpoint;
pub mod error;
#[allow(clippy::module_inception, reason = "one file per object, and this object is called so")]
pub mod fabric;
pub mod info;
pub mod library;
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
