//! Descriptors received from peers, and other resources that are slow to release. Slow path:
//! allocates and makes system calls, but does not block.
//!
//! Closing a descriptor can block: a TCP socket lingers, a FUSE file asks its server, a terminal
//! drains. Even a query can block, because a peer may hold the lock of a socket, so this module
//! first asks for the seals of a descriptor, which the kernel reports without blocking. Dropping
//! sealable memory closes it, unless freeing its pages would take long. Everything else is set
//! aside for a thread that may block: see [`set_closer`].
//!
//! In two cases the kernel itself closes descriptors, in the calling thread. First, a packet is
//! received without room for its descriptors. Second, a socket is closed while descriptors are in
//! its queue. So [`Socket`](crate::socket::Socket) leaves a packet in its queue until there is room
//! for all its descriptors, and is set aside itself if some are in its queue.
//!
//! A connection of a stranger can therefore leave the few descriptors of an Offer here, and one
//! more. While [`most`] resources are set aside, a [`Listener`](crate::Listener) accepts no
//! connections.

mod list;

use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;

use fishplate_core::sync::primitive::{self, AtomicPtr, AtomicU32, Ordering};

use list::List;

use crate::error::SegmentError;
use crate::per_process::PerProcess;
use crate::segment::{self, Mapping};

/// Maximum size, in bytes, of memory that the dropping thread closes itself. Freeing one MiB takes
/// about 0.15 ms, and a packet can carry 253 descriptors.
const CLOSED: u64 = 64 << 10;

/// Maximum size, in bytes, of memory that the calling thread unmaps itself.
const UNMAPPED: usize = 1 << 20;

/// A descriptor from a peer. Dropping it never waits.
#[derive(Debug)]
pub struct Foreign {
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
    /// Returns the descriptor if it refers to memory of this size that [`segment::verify`] accepts
    /// as safe to map.
    pub(crate) fn into_memory(self, expected: u64) -> Result<OwnedFd, SegmentError> {
        segment::verify(self.as_fd(), expected)?;
        Ok(self.into_any())
    }

    /// Returns the descriptor unchecked. Dropping it may block.
    pub fn into_any(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is consumed here and never dropped, so nothing takes `fd` again.
        unsafe { ManuallyDrop::take(&mut this.fd) }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: `drop` runs once, and nothing uses `fd` after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        if let Some(slow) = close_quickly(fd) {
            put_aside(slow);
        }
    }
}

/// Closes a descriptor, or returns it if closing it may take long.
fn close_quickly(fd: OwnedFd) -> Option<OwnedFd> {
    match segment::memory_held(fd.as_fd()) {
        // Without a closer thread the memory would never be freed. Closing memory takes time but
        // does not block.
        Ok(held) if held <= CLOSED || closer().is_none() => None,
        _ => Some(fd),
    }
}

/// The descriptors of one packet.
#[derive(Debug)]
pub struct Batch(std::vec::IntoIter<Foreign>);

impl From<Vec<Foreign>> for Batch {
    fn from(all: Vec<Foreign>) -> Self {
        Batch(all.into_iter())
    }
}

impl Batch {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Iterator for Batch {
    type Item = Foreign;

    fn next(&mut self) -> Option<Foreign> {
        self.0.next()
    }
}

/// Unmaps a peer's memory. If there is a closer, sets large memory aside instead.
pub fn unmap(mapping: Mapping) {
    if mapping.len() > UNMAPPED && closer().is_some() {
        put_aside(mapping);
    }
}

static ASIDE: List<Box<dyn Send>> = List(AtomicPtr::new(ptr::null_mut()));

/// The resources that a call of [`close_aside`] has taken from [`ASIDE`] but not begun to close.
/// Another call closes them while the first call blocks.
static WAITING: PerProcess<Box<dyn Send>> = PerProcess::new();

/// The number of resources set aside and not yet closed.
static HELD: AtomicU32 = AtomicU32::new(0);

const MOST: u64 = 512;

/// A `fn()` as a pointer, or null.
static CLOSER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Sets the function that runs each time a resource is set aside. It runs on the progress path, so
/// it must not block. It should start or wake a thread that calls [`close_aside`].
///
/// Without a closer, the progress path unmaps and frees a peer's large memory, which takes 0.15 ms
/// per MiB. Descriptors that a peer should not have sent stay open until [`close_aside`] is called.
/// At half of the process's descriptor limit, or at 512, a [`Listener`](crate::Listener) accepts no
/// connections until some are closed.
pub fn set_closer(closer: fn()) {
    // Relaxed: the address of a function publishes no other data.
    CLOSER.store(closer as *mut (), Ordering::Relaxed);
}

fn closer() -> Option<fn()> {
    let closer = CLOSER.load(Ordering::Relaxed);
    // SAFETY: the pointer is null, which is `None`, or `set_closer` stored it from a `fn()`.
    unsafe { mem::transmute::<*mut (), Option<fn()>>(closer) }
}

/// Closes and unmaps all resources that are set aside. May block without limit, for example on the
/// server of a FUSE file. Several threads may call it at the same time, and then share the work.
pub fn close_aside() {
    while let Some(thing) = next_aside() {
        drop(thing);
        // Relaxed: `is_full` may return an older state.
        HELD.fetch_sub(1, Ordering::Relaxed);
    }
}

fn next_aside() -> Option<Box<dyn Send>> {
    let mut waiting = WAITING.lock();
    waiting.extend(ASIDE.take());
    waiting.pop_front()
}

/// Returns whether any resources are set aside for [`close_aside`]. May be stale on return.
pub fn has_aside() -> bool {
    !ASIDE.is_empty() || !WAITING.lock().is_empty()
}

/// Returns whether a listener must not accept connections, because too many resources are set
/// aside. May be stale on return.
pub(crate) fn is_full() -> bool {
    u64::from(HELD.load(Ordering::Relaxed)) >= most()
}

/// Half of the descriptors that this process may open, at most [`MOST`].
fn most() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call fills the local structure. If it fails, the structure stays 0.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    MOST.min(limit.rlim_cur / 2)
}

#[cold]
pub(crate) fn put_aside<T: Send + 'static>(thing: T) {
    // Relaxed: `is_full` may return an older state.
    HELD.fetch_add(1, Ordering::Relaxed);
    ASIDE.add(Box::new(thing));
    if let Some(closer) = closer() {
        closer();
    }
}

#[cfg(all(test, fishplate_loom))]
mod races;
#[cfg(test)]
mod tests;
