//! The calls of a node, which end the sleep of an event loop: they may take what somebody awaits.
//! `waker` is the class that event loops use.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

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
    /// For a node with this descriptor. Makes system calls.
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

    /// The descriptor to sleep on.
    pub fn fd(&self) -> i32 {
        self.set.as_raw_fd()
    }

    /// A call was made. Ends a sleep.
    pub fn made(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        // Partner: the fence of `sleep`. Either that sees the count, or this sees the sleeper.
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst) {
            // SAFETY: eight bytes of ours. It fails only where the descriptor is readable.
            unsafe { libc::write(self.bell.as_raw_fd(), (&raw const ONE).cast(), size_of_val(&ONE)) };
        }
    }

    /// The calls so far.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Makes the next call end a sleep. Whether to sleep: no call was made since the count was
    /// `calls`.
    pub fn sleep(&self, calls: u64) -> bool {
        self.armed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.count() == calls
    }

    /// The sleep is over, or has not begun.
    pub fn woken(&self) {
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
