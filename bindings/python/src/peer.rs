//! The classes `Peer`, `Remote` and `Place`: a peer, its memory, and an address there.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fishplate::core::error::OpError;
use fishplate::node::Remote as Imported;
use fishplate::{PeerId, RemoteAddr};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::error::{Fault, misuse};
use crate::inner::Inner;
use crate::lease::Turn;
use crate::shared::Shared;
use crate::waker::Waker;

/// A peer of the node.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Peer {
    pub shared: Arc<Shared>,
    pub id: PeerId,
}

#[pymethods]
impl Peer {
    fn connected(&self, py: Python<'_>) -> PyResult<bool> {
        let id = self.id;
        self.shared.enter(py, |inner| {
            inner.node.progress();
            if let Some(error) = inner.node.peer_error(id)? {
                return Err(OpError::PeerFailed(error).into());
            }
            let reach = inner.node.reach(id)?;
            Ok(reach.shared_memory || reach.fabric != 0)
        })
    }

    fn import_memory(slf: &Bound<'_, Self>, handle: &[u8]) -> PyResult<Remote> {
        let this = slf.get();
        let id = this.id;
        let remote = this.shared.issue(slf.py(), true, |inner| {
            inner.in_turn(Turn::Send(Some(id)))?;
            Ok(inner.node.import(id, handle)?)
        })?;
        Ok(Remote::new(&this.shared, remote, slf.clone().unbind()))
    }

    /// Imports memory as `import_memory` does. Returns `None` if the peer is not connected.
    fn _try_import(slf: &Bound<'_, Self>, handle: &[u8]) -> PyResult<Option<Remote>> {
        let this = slf.get();
        let id = this.id;
        let remote = this.shared.enter(slf.py(), |inner| {
            inner.node.progress();
            inner.reap();
            let import = |inner: &mut Inner| {
                inner.in_turn(Turn::Send(Some(id)))?;
                Ok::<_, Fault>(inner.node.import(id, handle)?)
            };
            match import(inner) {
                Err(fault) if fault.may_pass() => Ok(None),
                remote => remote.map(Some),
            }
        })?;
        Ok(remote.map(|remote| Remote::new(&this.shared, remote, slf.clone().unbind())))
    }

    #[pyo3(signature = (handle, timeout=None))]
    fn until_imported<'py>(
        slf: &Bound<'py, Self>,
        handle: &Bound<'py, PyBytes>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let limit = timeout.unwrap_or(slf.get().shared.timeout.as_secs_f64());
        slf.py().import("fishplate._aio")?.call_method1("imported", (slf, handle, limit))
    }

    #[pyo3(signature = (timeout=None))]
    fn until_connected<'py>(
        slf: &Bound<'py, Self>,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let limit = timeout.unwrap_or(slf.get().shared.timeout.as_secs_f64());
        slf.py().import("fishplate._aio")?.call_method1("connected", (slf, limit))
    }

    fn _waker(&self) -> Waker {
        Waker { shared: self.shared.clone() }
    }

    fn disconnect(&self, py: Python<'_>) -> PyResult<()> {
        let id = self.id;
        self.shared.enter(py, |inner| {
            inner.node.disconnect(id)?;
            inner.peers.retain(|peer| *peer != id);
            inner.disconnected = true;
            Ok(())
        })
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        let other = other.cast::<Peer>();
        other.is_ok_and(|other| {
            Arc::ptr_eq(&self.shared, &other.get().shared) && self.id == other.get().id
        })
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (Arc::as_ptr(&self.shared).addr(), self.id.to_raw()).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("<fishplate.Peer {}>", self.id.peer().0)
    }
}

/// Imported memory of a peer.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Remote {
    pub shared: Arc<Shared>,
    pub remote: Imported,
    pub peer: Py<Peer>,
    released: AtomicBool,
}

impl Remote {
    pub fn new(shared: &Arc<Shared>, remote: Imported, peer: Py<Peer>) -> Remote {
        Remote { shared: shared.clone(), remote, peer, released: AtomicBool::new(false) }
    }
}

#[pymethods]
impl Remote {
    #[getter]
    fn peer(&self, py: Python<'_>) -> Py<Peer> {
        self.peer.clone_ref(py)
    }

    #[pyo3(signature = (offset))]
    fn at(&self, offset: u64) -> Place {
        Place { shared: self.shared.clone(), at: self.remote.at(offset) }
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let remote = self.remote;
        self.shared.enter(py, |inner| {
            inner.reap();
            Ok(inner.node.release(remote)?)
        })?;
        self.released.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn __repr__(&self) -> String {
        let released = if self.released.load(Ordering::Relaxed) { ", released" } else { "" };
        format!("<fishplate.Remote{released}>")
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        if self.released.load(Ordering::Relaxed) || self.shared.is_closed() {
            return Ok(());
        }
        match self.release(py) {
            // Another thread has closed the node meanwhile.
            Err(_) if self.shared.is_closed() => Ok(()),
            released => released,
        }
    }
}

/// An address in a peer's memory.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Place {
    pub shared: Arc<Shared>,
    pub at: RemoteAddr,
}

#[pymethods]
impl Place {
    fn __repr__(&self) -> String {
        format!("<fishplate.Place at {}>", self.at.offset)
    }

    fn __add__(&self, py: Python<'_>, bytes: u64) -> PyResult<Place> {
        match self.at.offset.checked_add(bytes) {
            Some(offset) => {
                Ok(Place { shared: self.shared.clone(), at: RemoteAddr { offset, ..self.at } })
            }
            None => Err(misuse(py, "range", "the offset exceeds the address space")),
        }
    }
}
