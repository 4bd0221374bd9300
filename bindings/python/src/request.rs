//! The classes `Request` and `Message`: operations in flight, and received messages.

use std::sync::Arc;
use std::time::Duration;

use fishplate::core::engine::protocol::{Envelope, Received, Status};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::arguments::of_tag;
use crate::error::{Fault, of_outcome, of_received};
use crate::inner::Inner;
use crate::lease::{Brings, End, Flight};
use crate::peer::Peer;
use crate::shared::Shared;
use crate::waker::Waker;

/// An operation or a receive in flight. Dropping this object does not stop it.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Request {
    shared: Arc<Shared>,
    flight: Arc<Flight>,
}

impl Request {
    pub fn new(shared: &Arc<Shared>, flight: Arc<Flight>) -> Request {
        Request { shared: shared.clone(), flight }
    }

    pub fn finish(&self, py: Python<'_>, timeout: Duration) -> PyResult<Py<PyAny>> {
        if let Some(end) = self.flight.end.get() {
            return self.result(py, *end);
        }
        let wait = |inner: &mut Inner, slice: Duration| inner.wait_for(&self.flight, slice);
        let end = self.shared.wait(py, timeout, true, wait)?;
        self.result(py, end)
    }

    /// Waits for a receive, and returns its message. If the wait fails, cancels the receive. A
    /// message that has already matched still arrives.
    pub fn receive(&self, py: Python<'_>, timeout: Duration) -> PyResult<Py<PyAny>> {
        let message = self.finish(py, timeout);
        if message.is_err() {
            // The error of the wait is more useful than an error of the cancellation.
            let _ = self.cancel(py);
        }
        message
    }

    fn result(&self, py: Python<'_>, end: End) -> PyResult<Py<PyAny>> {
        let ended = match &end {
            End::Done(_) => Ok(()),
            End::Operation(end) => of_outcome(end.outcome),
            End::Receive(end) => of_received(end.outcome),
            End::Failed(error) => Err(Fault::Node(*error)),
            End::Cancelled => Err(Fault::Cancelled),
        };
        ended.map_err(|fault| fault.raise(py))?;
        match (end, self.flight.brings) {
            (End::Done(value), Brings::Value) => value.into_py_any(py),
            (End::Operation(end), Brings::Value) => end.value.into_py_any(py),
            (
                End::Receive(Status { envelope: Some(envelope), outcome, .. }),
                Brings::Message(max),
            ) => match outcome {
                Received::Truncated => Err(Fault::Truncated { len: envelope.len, max }.raise(py)),
                _ => Message::new(&self.shared, envelope).into_py_any(py),
            },
            _ => Ok(py.None()),
        }
    }
}

#[pymethods]
impl Request {
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        if self.flight.end.get().is_none() {
            self.shared.enter(py, |inner| {
                inner.node.progress();
                inner.reap();
                Ok(())
            })?;
        }
        Ok(self.flight.end.get().is_some())
    }

    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        self.finish(py, crate::arguments::timeout(py, self.shared.timeout, timeout)?)
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<bool> {
        if self.flight.end.get().is_some() {
            return Ok(false);
        }
        self.shared.enter(py, |inner| inner.cancel(&self.flight))
    }

    fn _waker(&self) -> Waker {
        Waker { shared: self.shared.clone() }
    }

    fn __await__<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let aio = slf.py().import("fishplate._aio")?;
        aio.call_method1("finished", (slf,))?.call_method0("__await__")
    }

    fn __repr__(&self) -> &'static str {
        match self.flight.end.get() {
            Some(_) => "<fishplate.Request, ended>",
            None => "<fishplate.Request>",
        }
    }
}

/// The envelope of a message.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Message {
    shared: Arc<Shared>,
    envelope: Envelope,
}

impl Message {
    pub fn new(shared: &Arc<Shared>, envelope: Envelope) -> Message {
        Message { shared: shared.clone(), envelope }
    }

    pub fn len(&self) -> usize {
        self.envelope.len as usize
    }
}

#[pymethods]
impl Message {
    #[getter]
    fn source(&self) -> Peer {
        Peer { shared: self.shared.clone(), id: self.envelope.source }
    }

    #[getter]
    fn tag(&self) -> u128 {
        of_tag(self.envelope.tag)
    }

    #[getter(len)]
    fn length(&self) -> u64 {
        self.envelope.len
    }

    fn __repr__(&self) -> String {
        let tag = of_tag(self.envelope.tag);
        format!("<fishplate.Message of {} bytes with tag {tag}>", self.envelope.len)
    }
}
