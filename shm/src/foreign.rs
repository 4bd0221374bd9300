//! Descriptors that peers have sent, and what else takes its time to go. Slow path: allocates, makes system calls, waits for nobody.
//!
//! Closing a descriptor can wait for whoever made the file: a TCP socket lingers as long as its maker said, a file of FUSE asks its
//! server, a terminal drains. Nothing can be asked of a socket first either, since its maker may hold its lock. So of a descriptor from a
//! peer only one question is asked before all others, which the kernel answers by itself: whether it is memory that can be
//! sealed. Memory is closed where it is dropped, unless it is so much that freeing it takes long. Everything else is closed by a
//! thread of its own, which exists only while there is something to close.
//!
//! The kernel closes descriptors itself, in the thread that makes the call, where a packet is received without room for them, and where
//! a socket is closed in whose queue they lie. So [`Socket`](crate::socket::Socket) always makes room for all that a packet can
//! carry, and takes in what is left before it closes. What remains is a process that has run out of descriptors: there the
//! kernel may wait.

use std::collections::VecDeque;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{ptr, thread};

use crate::segment::{self, Mapping, SegmentError};

/// Memory up to this size is freed and unmapped at once, in bytes. Each MiB takes some 0.15 ms.
const QUICK: u64 = 8 << 20;

/// A descriptor from a peer. Dropping it never waits.
#[derive(Debug)]
pub(crate) struct Foreign {
    fd: ManuallyDrop<OwnedFd>,
}

impl From<OwnedFd> for Foreign {
    fn from(fd: OwnedFd) -> Self {
        Foreign { fd: ManuallyDrop::new(fd) }
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Foreign {
    /// The descriptor, if it is memory of that size which can be mapped without danger: see [`segment::verify`].
    pub(crate) fn into_memory(self, expected: u64) -> Result<OwnedFd, SegmentError> {
        segment::verify(self.as_fd(), expected)?;
        Ok(self.into_any())
    }

    /// The descriptor, whatever it is. Whoever drops it may wait.
    pub(crate) fn into_any(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken out once: `this` is not dropped.
        unsafe { ManuallyDrop::take(&mut this.fd) }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: taken out once: nothing uses it after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        match segment::memory_size(fd.as_fd()) {
            Ok(size) if size <= QUICK => drop(fd),
            _ => drop_elsewhere(fd),
        }
    }
}

/// Unmaps memory of a peer.
pub(crate) fn unmap(mapping: Mapping) {
    if mapping.len() as u64 > QUICK {
        drop_elsewhere(mapping);
    }
}

/// Threads that drop things at once. What comes while all of them are held up stays as it is until one is free.
const THREADS: usize = 8;

/// What is still to be dropped, and how many threads do it.
struct Waiting {
    things: VecDeque<Box<dyn Send>>,
    threads: usize,
}

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { things: VecDeque::new(), threads: 0 });

fn waiting() -> MutexGuard<'static, Waiting> {
    // No panic between lock and unlock leaves it half changed.
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops something in a thread that nobody waits for. If no thread can be had, it stays until the next call.
#[cold]
pub(crate) fn drop_elsewhere<T: Send + 'static>(thing: T) {
    let mut waiting = waiting();
    waiting.things.push_back(Box::new(thing));
    if waiting.threads < THREADS {
        let builder = thread::Builder::new().name("fishplate-close".into()).stack_size(64 << 10);
        waiting.threads += usize::from(without_signals(|| builder.spawn(drop_all)).is_ok());
    }
}

fn drop_all() {
    loop {
        let mut waiting = waiting();
        let Some(thing) = waiting.things.pop_front() else {
            waiting.threads -= 1;
            return;
        };
        drop(waiting);
        drop(thing);
    }
}

/// Blocks all signals meanwhile, so that a thread begun here never runs a handler of the program's.
fn without_signals<T>(begin: impl FnOnce() -> T) -> T {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: the calls fill the sets, which are ours; the second one is used only if it was filled.
    let blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) == 0
    };
    let begun = begin();
    if blocked {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    }
    begun
}

#[cfg(test)]
mod tests;
