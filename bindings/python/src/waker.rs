//! How an event loop sleeps until a node has something to do: one descriptor for the node's own
//! events and for the calls of this process, which may take what somebody awaits.
//!
//! [`Waker::arm`], a look by all who wait, and [`Waker::sleep`] come before each wait on the
//! descriptor. A call in between, or after it, by anyone, ends the wait.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::calls::Calls;
use crate::error::Fault;
use crate::shared::Shared;

/// What an event loop needs of a node.
#[pyclass(frozen, name = "_Waker", module = "fishplate")]
pub(crate) struct Waker {
    pub shared: Arc<Shared>,
}

#[pymethods]
impl Waker {
    /// The same for all wakers of a node, and for no other while one of them lives.
    #[getter]
    fn key(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// The descriptor to wait on. `None`: the node has none.
    #[getter]
    fn fd(&self) -> Option<i32> {
        self.shared.calls.as_ref().map(Calls::fd)
    }

    /// Prepares a wait, and makes progress. Returns for how many seconds to wait at most, 0 if
    /// there is something to do, and the count of calls.
    fn arm(&self, py: Python<'_>) -> PyResult<(f64, u64)> {
        let Some(calls) = &self.shared.calls else { return Ok((0.0, 0)) };
        calls.woken();
        self.shared.enter(py, |inner| {
            let longest = inner.node.arm();
            inner.reap();
            // This call counts when it ends.
            Ok::<_, Fault>((longest.map_or(0.0, |longest| longest.as_secs_f64()), calls.count() + 1))
        })
    }

    /// Whether to wait: nobody else has made a call since [`arm`](Self::arm). `calls`: its count,
    /// and one for each look since.
    fn sleep(&self, calls: u64) -> bool {
        self.shared.calls.as_ref().is_some_and(|all| all.sleep(calls))
    }
}
