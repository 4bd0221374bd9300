//! Fishplate for Python: the module `fishplate._native`, which `python/fishplate` re-exports and
//! `_native.pyi` describes. The classes wrap [`fishplate::Node`]. This package adds conversion,
//! lifetimes and locking.
//!
//! No input from Python can cause undefined behavior. Objects belong to one node, and other nodes
//! reject them. Views hold buffers while the node may access them. A node rejects every call after
//! it is closed, in a forked process, and after a panic.
//!
//! # Example
//!
//! Two processes; `tests/python.sh` runs it with an installed wheel:
//!
//! ```python
#![doc = include_str!("../examples/put_signal.py")]
//! ```
//!
//! # Files
//!
//! `shared` holds a node under a lock; calls take the lock in turn and wait. `inner` is the data
//! under the lock, `lease` the operations in flight, `view` a buffer of the program, and `dlpack` a
//! DLPack tensor. `node`, `peer`, `memory`, `request` and `job` are the classes. `arguments` and
//! `settings` convert arguments, `error` creates exceptions. An event loop sleeps on `waker`, and
//! `calls` wakes it.

mod arguments;
mod calls;
mod dlpack;
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
