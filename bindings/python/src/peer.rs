//! Peers of a node.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use fishplate::PeerId;
use fishplate::core::error::OpError;
use pyo3::prelude::*;

use crate::memory::Remote;
use crate::shared::Shared;

/// Another node.
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
        let remote = this.shared.issue(slf.py(), true, |inner| Ok(inner.node.import(id, handle)?))?;
        Ok(Remote::new(&this.shared, remote, slf.clone().unbind()))
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
        other.is_ok_and(|other| Arc::ptr_eq(&self.shared, &other.get().shared) && self.id == other.get().id)
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
