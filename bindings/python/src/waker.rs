//! How an event loop sleeps until a node has something to do: one descriptor for the node's own
//! events and for the calls of this process, which may take what somebody awaits.
//!
//! [`Waker::arm`], a look by all who wait, and [`Waker::sleep`] come before each wait on the
//! descriptor. A call in between, or after it, by anyone, ends the wait.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use pyo3::prelude::*;

use crate::error::Fault;
use crate::shared::Shared;

/// Counts the calls of a node, and makes a descriptor readable after one.
pub(crate) struct Calls {
    count: AtomicU64,
    /// Somebody sleeps on `set`.
    armed: AtomicBool,
    /// The set to sleep on: the node's descriptor, and `bell`, readable once a call was made.
    set: OwnedFd,
    bell: OwnedFd,
}

impl Calls {
    /// For a node with this descriptor.
    pub fn new(node: BorrowedFd<'_>) -> io::Result<Calls> {
        // SAFETY: two calls that return a new descriptor or -1.
        let (set, bell) = unsafe {
            let set = owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            (set, owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?)
        };
        for fd in [node, bell.as_fd()] {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: two open descriptors, and a structure that is only read during the call.
            if unsafe { libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event) }
                < 0
            {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Calls { count: AtomicU64::new(0), armed: AtomicBool::new(false), set, bell })
    }

    /// A call was made. Ends a sleep.
    pub fn made(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        // With the fence of `sleep`: it sees the count, or this sees that somebody sleeps.
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst) {
            // SAFETY: eight bytes of ours. It fails only where the descriptor is readable.
            unsafe { libc::write(self.bell.as_raw_fd(), (&raw const ONE).cast(), size_of_val(&ONE)) };
        }
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    fn sleep(&self, calls: u64) -> bool {
        self.armed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.count() == calls
    }

    fn woken(&self) {
        self.armed.store(false, Ordering::SeqCst);
        let mut rings = 0u64;
        // SAFETY: room for eight bytes. It fails and changes nothing where there are none.
        unsafe { libc::read(self.bell.as_raw_fd(), (&raw mut rings).cast(), size_of_val(&rings)) };
    }
}

static ONE: u64 = 1;

/// # Safety
/// `fd` is new, or negative if the call that made it has just failed.
unsafe fn owned(fd: i32) -> io::Result<OwnedFd> {
    // SAFETY: the caller's guarantee.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}

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
        self.shared.calls.as_ref().map(|calls| calls.set.as_raw_fd())
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
