//! Keeps a socket in an `epoll(7)` set on which the owner of the rail sleeps. Slow path: makes
//! system calls, none of which blocks.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::segment::errno;

/// Keeps a descriptor in the set. Drop it before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct Watch {
    set: Arc<OwnedFd>,
    fd: RawFd,
}

impl Watch {
    /// Adds the descriptor: a thread that sleeps on the set wakes when it becomes readable or is
    /// hung up. The error is the system's number.
    pub(crate) fn new(set: &Arc<OwnedFd>, fd: BorrowedFd<'_>) -> Result<Watch, i32> {
        let fd = fd.as_raw_fd();
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: two open descriptors, and a structure that is only read during the call.
        match unsafe { libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
            0 => Ok(Watch { set: Arc::clone(set), fd }),
            _ => Err(errno()),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: plain numbers; this call takes no structure. If it fails, the descriptor has left
        // the set already.
        unsafe { libc::epoll_ctl(self.set.as_raw_fd(), libc::EPOLL_CTL_DEL, self.fd, std::ptr::null_mut()) };
    }
}
