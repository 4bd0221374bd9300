//! Descriptors received from peers, and other resources that are slow to release. Slow path:
//! allocates and makes system calls, but does not block.
//!
//! Closing a descriptor can block: a TCP socket lingers, a FUSE file asks its server, a terminal
//! drains. Even a query can block, because a peer may hold the lock of a socket. So a peer's
//! descriptor is first queried for seals, which the kernel answers without blocking. Sealable
//! memory is closed when it is dropped, unless it is so large that freeing it takes long.
//! Everything else is set aside for a thread that may block: see [`set_closer`].
//!
//! The kernel itself closes descriptors in the calling thread in two cases: a packet is received
//! without room for them, or a socket is closed with them in its queue. So
//! [`Socket`](crate::socket::Socket) always offers room for all that a packet can carry, and drains
//! its queue before it closes. One case remains: in a process without free descriptors the kernel
//! may block.

mod list;

use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;

use fishplate_core::sync::primitive::{self, AtomicPtr, Ordering};

use list::List;

use crate::error::SegmentError;
use crate::segment::{self, Mapping};

/// Memory up to this size is closed at once, in bytes. Each MiB takes some 0.15 ms to free, and a
/// packet can carry 253 pieces.
const CLOSED: u64 = 64 << 10;

/// Memory up to this size is unmapped at once, in bytes.
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
    /// Returns the descriptor if it is memory of this size that is safe to map: see
    /// [`segment::verify`].
    pub(crate) fn into_memory(self, expected: u64) -> Result<OwnedFd, SegmentError> {
        segment::verify(self.as_fd(), expected)?;
        Ok(self.into_any())
    }

    /// Returns the descriptor, whatever it is. Dropping it may block.
    pub fn into_any(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken out once: `this` is not dropped.
        unsafe { ManuallyDrop::take(&mut this.fd) }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: taken out once: nothing uses it after this.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        if let Some(slow) = close_quickly(fd) {
            put_aside(slow);
        }
    }
}

/// Closes a descriptor, or returns it if that may take long.
fn close_quickly(fd: OwnedFd) -> Option<OwnedFd> {
    match segment::memory_held(fd.as_fd()) {
        // Without a closer it would never be freed. Closing memory takes time but does not block.
        Ok(held) if held <= CLOSED || closer().is_none() => None,
        _ => Some(fd),
    }
}

/// The descriptors of one packet. Those that are not taken are set aside together, with one call of
/// the closer.
#[derive(Debug)]
pub struct Batch(std::vec::IntoIter<Foreign>);

impl From<Vec<Foreign>> for Batch {
    fn from(all: Vec<Foreign>) -> Self {
        Batch(all.into_iter())
    }
}

impl Batch {
    /// How many are left.
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

impl Drop for Batch {
    fn drop(&mut self) {
        let slow: Vec<_> = self.0.by_ref().map(Foreign::into_any).filter_map(close_quickly).collect();
        if !slow.is_empty() {
            put_aside(slow);
        }
    }
}

/// Unmaps memory of a peer: at once, unless that takes long and there is a closer.
pub fn unmap(mapping: Mapping) {
    if mapping.len() > UNMAPPED && closer().is_some() {
        put_aside(mapping);
    }
}

/// The resources that are set aside.
static ASIDE: List<Box<dyn Send>> = List(AtomicPtr::new(ptr::null_mut()));

/// The closer, a `fn()`, or null.
static CLOSER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Sets the function that is called after a resource was set aside. It runs on the progress path:
/// it must not block, but start or wake a thread that calls [`close_aside`].
///
/// Without a closer, large memory of a peer is unmapped and freed on the progress path, at 0.15 ms
/// per MiB. Descriptors that a peer should not have sent stay open until [`close_aside`] is called.
/// An attached peer can leave at most the 253 of one packet. A stranger that connects to a
/// [`Listener`](crate::Listener) can leave as many each time, up to the descriptor limit of this
/// process.
pub fn set_closer(closer: fn()) {
    // Relaxed: the address of a function publishes no other data.
    CLOSER.store(closer as *mut (), Ordering::Relaxed);
}

fn closer() -> Option<fn()> {
    let closer = CLOSER.load(Ordering::Relaxed);
    // SAFETY: null, which is `None`, or stored by `set_closer`.
    unsafe { mem::transmute::<*mut (), Option<fn()>>(closer) }
}

/// Closes and unmaps the resources that were set aside. May block without a bound, for example on
/// the server of a FUSE file.
pub fn close_aside() {
    ASIDE.take().for_each(drop);
}

/// Whether resources are set aside and not yet taken by [`close_aside`]. May be stale on return.
pub fn has_aside() -> bool {
    !ASIDE.is_empty()
}

/// Sets aside a value that may take long to drop.
#[cold]
pub(crate) fn put_aside<T: Send + 'static>(thing: T) {
    ASIDE.add(Box::new(thing));
    if let Some(closer) = closer() {
        closer();
    }
}

#[cfg(all(test, fishplate_loom))]
mod races;
#[cfg(test)]
mod tests;
