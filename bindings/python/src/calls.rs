//! Counts the calls of a node, and wakes an event loop that sleeps on the node, because a call may
//! take a completion that a coroutine awaits. The class in [`waker`](crate::waker) uses [`Calls`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

pub(crate) struct Calls {
    count: AtomicU64,
    armed: AtomicBool,
    /// The epoll descriptor to sleep on. It contains the node's descriptor and `bell`, which
    /// becomes readable after a call.
    set: OwnedFd,
    bell: OwnedFd,
}

impl Calls {
    pub fn new(node: BorrowedFd<'_>) -> io::Result<Calls> {
        // SAFETY: each call returns a new descriptor or -1.
        let (set, bell) = unsafe {
            let set = owned(libc::epoll_create1(libc::EPOLL_CLOEXEC))?;
            (set, owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?)
        };
        for fd in [node, bell.as_fd()] {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: both descriptors are open, and `event` is only read during the call.
            if unsafe {
                libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event)
            } < 0
            {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Calls { count: AtomicU64::new(0), armed: AtomicBool::new(false), set, bell })
    }

    pub fn fd(&self) -> i32 {
        self.set.as_raw_fd()
    }

    pub fn made(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        // Pairs with the fence in `sleep`. Either `sleep` sees the new count, or this call sees
        // `armed`.
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::SeqCst) && self.armed.swap(false, Ordering::SeqCst) {
            // SAFETY: `ONE` is eight bytes long. The write fails only if the descriptor is already
            // readable.
            unsafe {
                libc::write(self.bell.as_raw_fd(), (&raw const ONE).cast(), size_of_val(&ONE))
            };
        }
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Makes the next call wake the sleeper. Returns true if the count is still `calls`, so that
    /// the caller should sleep.
    pub fn sleep(&self, calls: u64) -> bool {
        self.armed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.count() == calls
    }

    /// Ends a sleep, and clears `bell`.
    pub fn woken(&self) {
        self.armed.store(false, Ordering::SeqCst);
        let mut rings = 0u64;
        // SAFETY: `rings` has room for eight bytes. If there is nothing to read, the call fails and
        // changes nothing.
        unsafe { libc::read(self.bell.as_raw_fd(), (&raw mut rings).cast(), size_of_val(&rings)) };
    }
}

static ONE: u64 = 1;

/// # Safety
/// `fd` is a new descriptor, or negative if the system call that should create it has just failed.
unsafe fn owned(fd: i32) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees that the descriptor is new, so nothing else owns it.
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { OwnedFd::from_raw_fd(fd) }) }
}
