//! Fishplate for Python: the module `fishplate._native`, which `python/fishplate` re-exports and
//! `_native.pyi` describes. Each method is a call of [`fishplate::Node`]. This package adds
//! conversion, lifetimes, and turns of threads.
//!
//! Nothing that a Python program passes is believed. Objects name their node and are refused by any
//! other; buffers are held by their views as long as the node may touch them; a closed node, one
//! that was inherited by a forked process, and one that a panic has ended refuse every call.
//!
//! # Files
//!
//! `shared` is a node behind a lock, and how calls take turns and wait; `inner` is what the lock
//! guards, `lease` what operations in flight hold, `view` a buffer of the program; `node`, `peer`,
//! `memory`, `request` and `job` are the classes; `arguments` and `settings` read what calls are
//! given, `error` makes exceptions; `waker` is what an event loop sleeps on.

mod arguments;
mod error;
mod inner;
mod job;
mod lease;
mod memory;
mod node;
mod peer;
mod request;
mod settings;
mod shared;
mod view;
mod waker;

/// The native part of the package `fishplate`.
#[pyo3::pymodule(name = "_native")]
mod native {
    #[pymodule_export]
    use crate::job::Job;
    #[pymodule_export]
    use crate::memory::{Memory, Slice};
    #[pymodule_export]
    use crate::node::Node;
    #[pymodule_export]
    use crate::peer::{Peer, Place, Remote};
    #[pymodule_export]
    use crate::request::{Message, Request};
    #[pymodule_export]
    use crate::waker::Waker;

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use pyo3::types::PyModuleMethods;
        crate::shared::watch_forks();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("ADDRESS_MAX", fishplate::node::ADDRESS_MAX)
    }
}
