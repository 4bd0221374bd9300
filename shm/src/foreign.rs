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

use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
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
const THREADS: usize = 4;

/// Something that is still to be dropped, in a list.
struct Waiting {
    thing: Box<dyn Send>,
    next: *mut Waiting,
}

/// What is still to be dropped: a list that anybody adds to and that is taken as a whole, so nobody waits for a lock whose holder has lost
/// its processor.
static WAITING: AtomicPtr<Waiting> = AtomicPtr::new(ptr::null_mut());

/// Threads that are dropping.
static DROPPING: AtomicUsize = AtomicUsize::new(0);

/// Drops something in a thread that nobody waits for. If no thread can be had, it stays until the next call.
#[cold]
pub(crate) fn drop_elsewhere<T: Send + 'static>(thing: T) {
    let waiting = Box::into_raw(Box::new(Waiting { thing: Box::new(thing), next: ptr::null_mut() }));
    // SAFETY: a list of one, which is ours.
    unsafe { add(waiting, waiting) };
    let builder = || thread::Builder::new().name("fishplate-close".into()).stack_size(64 << 10);
    if take_turn() && without_signals(|| builder().spawn(drop_all)).is_err() {
        DROPPING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Adds a list to what waits.
///
/// # Safety
/// `first` leads to `last`, and nobody else has any of them.
unsafe fn add(first: *mut Waiting, last: *mut Waiting) {
    let mut next = WAITING.load(Ordering::SeqCst);
    loop {
        // SAFETY: the caller's promise: nobody else sees it before the exchange succeeds.
        unsafe { (*last).next = next };
        match WAITING.compare_exchange(next, first, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return,
            Err(now) => next = now,
        }
    }
}

/// Whether one thread more may drop things, which then counts.
fn take_turn() -> bool {
    let more = |count: usize| (count < THREADS).then_some(count + 1);
    DROPPING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more).is_ok()
}

/// Drops what waits. Whoever adds something looks for a thread afterwards, and a thread that leaves looks once more for something: one of
/// the two sees the other.
fn drop_all() {
    loop {
        while let Some(thing) = take_one() {
            drop(thing);
        }
        DROPPING.fetch_sub(1, Ordering::SeqCst);
        if WAITING.load(Ordering::SeqCst).is_null() || !take_turn() {
            return;
        }
    }
}

/// Takes one thing that waits. The others go back first, for they must not wait for its end.
fn take_one() -> Option<Box<dyn Send>> {
    let first = WAITING.swap(ptr::null_mut(), Ordering::SeqCst);
    if first.is_null() {
        return None;
    }
    // SAFETY: each was made by `Box::into_raw`, and the exchange gave all of them to this thread alone.
    let one = unsafe { Box::from_raw(first) };
    let mut last = one.next;
    if !last.is_null() {
        // SAFETY: as above; the list ends with a null pointer.
        unsafe {
            while !(*last).next.is_null() {
                last = (*last).next;
            }
            add(one.next, last);
        }
    }
    Some(one.thing)
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
