//! Adds a socket to the `epoll(7)` set that the rail's owner sleeps on. Slow path: makes system
//! calls that do not block.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::segment::errno;

/// Drop it before the descriptor is closed.
#[derive(Debug)]
pub(crate) struct Watch {
    set: Arc<OwnedFd>,
    fd: RawFd,
}

impl Watch {
    /// A thread that sleeps on the set wakes when the descriptor becomes readable or is hung up.
    /// The error is the system's code.
    pub(crate) fn new(set: &Arc<OwnedFd>, fd: BorrowedFd<'_>) -> Result<Watch, i32> {
        let fd = fd.as_raw_fd();
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        // SAFETY: both descriptors are open, and the call only reads the local structure.
        match unsafe { libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
            0 => Ok(Watch { set: Arc::clone(set), fd }),
            _ => Err(errno()),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // SAFETY: the call takes no structure. An error means that the descriptor is not in the set
        // any more.
        unsafe {
            libc::epoll_ctl(
                self.set.as_raw_fd(),
                libc::EPOLL_CTL_DEL,
                self.fd,
                std::ptr::null_mut(),
            )
        };
    }
}
