//! Lets an event loop sleep until a node has work. One descriptor covers the node's own events and
//! the calls of this process, because a call may take a completion that a coroutine awaits.
//!
//! Before each wait on the descriptor, call [`Waker::arm`], let every waiting coroutine check its
//! condition, and call [`Waker::sleep`]. A call by any thread after `arm` ends the wait.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::calls::Calls;
use crate::error::Fault;
use crate::shared::Shared;

/// The interface of a node for event loops.
#[pyclass(frozen, name = "_Waker", module = "fishplate")]
pub(crate) struct Waker {
    pub shared: Arc<Shared>,
}

#[pymethods]
impl Waker {
    /// Returns a number that identifies the node: equal for all its wakers, and unique while one
    /// exists.
    #[getter]
    fn key(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// Returns the descriptor to wait on, or `None` if the node has none.
    #[getter]
    fn fd(&self) -> Option<i32> {
        self.shared.calls.as_ref().map(Calls::fd)
    }

    /// Prepares a wait, and makes progress. Returns the maximum wait in seconds, which is 0 if
    /// there is work, and the count of calls.
    fn arm(&self, py: Python<'_>) -> PyResult<(f64, u64)> {
        let Some(calls) = &self.shared.calls else { return Ok((0.0, 0)) };
        calls.woken();
        self.shared.enter(py, |inner| {
            let longest = inner.node.arm();
            inner.reap();
            // `enter` counts this call too, when it ends.
            Ok::<_, Fault>((
                longest.map_or(0.0, |longest| longest.as_secs_f64()),
                calls.count() + 1,
            ))
        })
    }

    /// Returns true if the loop may wait: no other call was made since [`arm`](Self::arm). `calls`
    /// is the count from `arm` plus the checks that the loop has made since.
    fn sleep(&self, calls: u64) -> bool {
        self.shared.calls.as_ref().is_some_and(|all| all.sleep(calls))
    }
}
