//! The class `Job`: processes of one job exchange addresses and other bytes.

use std::io;
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arguments::timeout;
use crate::error::Fault;
use crate::node::Node;

/// A process's membership in a job. Each call releases the GIL and waits until all processes of the
/// job have made the same call.
#[pyclass(frozen, module = "fishplate")]
pub(crate) struct Job {
    job: Mutex<fishplate::Job>,
    #[pyo3(get)]
    rank: usize,
    #[pyo3(get)]
    size: usize,
    #[pyo3(get)]
    local_rank: Option<usize>,
}

impl Job {
    fn new(
        py: Python<'_>,
        timeout: Option<f64>,
        join: impl FnOnce(Duration) -> io::Result<fishplate::Job> + Send,
    ) -> PyResult<Job> {
        let timeout = self::timeout(py, Duration::from_secs(30), timeout)?;
        let job = py.detach(|| join(timeout)).map_err(|error| Fault::System(error).raise(py))?;
        let (rank, size, local_rank) = (job.rank(), job.size(), job.local_rank());
        Ok(Job { rank, size, local_rank, job: Mutex::new(job) })
    }

    fn call<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut fishplate::Job) -> io::Result<T> + Send,
    ) -> PyResult<T> {
        let done = py.detach(|| match self.job.try_lock() {
            Ok(mut job) => call(&mut job).map_err(Fault::System),
            Err(TryLockError::Poisoned(job)) => call(&mut job.into_inner()).map_err(Fault::System),
            Err(TryLockError::WouldBlock) => Err(Fault::Misuse(
                "busy",
                "another thread is in a call of this job; call from one thread at a time".into(),
            )),
        });
        done.map_err(|fault| fault.raise(py))
    }
}

#[pymethods]
impl Job {
    #[new]
    #[pyo3(signature = (address="127.0.0.1:7117", size=2, timeout=None))]
    fn join(py: Python<'_>, address: &str, size: usize, timeout: Option<f64>) -> PyResult<Job> {
        Job::new(py, timeout, |timeout| fishplate::Job::join(address, size, timeout))
    }

    #[staticmethod]
    #[pyo3(signature = (timeout=None))]
    fn from_env(py: Python<'_>, timeout: Option<f64>) -> PyResult<Job> {
        Job::new(py, timeout, fishplate::Job::from_env)
    }

    fn exchange<'py>(&self, py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.call(py, |job| job.exchange(data))?))
    }

    fn allgather<'py>(&self, py: Python<'py>, data: &[u8]) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let all = self.call(py, |job| job.allgather(data))?;
        Ok(all.iter().map(|one| PyBytes::new(py, one)).collect())
    }

    #[pyo3(signature = (node=None))]
    fn barrier(&self, py: Python<'_>, node: Option<&Bound<'_, Node>>) -> PyResult<()> {
        let shared = node.map(|node| node.get().shared.clone());
        self.call(py, |job| job.barrier_with(|| shared.iter().for_each(|shared| shared.progress())))
    }
}
