//! Descriptors that peers have sent, and what else takes its time to go. Slow path: allocates,
//! makes system calls, waits for nobody.
//!
//! Closing a descriptor can wait for whoever made the file: a TCP socket lingers as long as its
//! maker said, a file of FUSE asks its server, a terminal drains. Nothing can be asked of a socket
//! first either, since its maker may hold its lock. So of a descriptor from a peer only one
//! question is asked before all others, which the kernel answers by itself: whether it is memory
//! that can be sealed. Memory is closed where it is dropped, unless it is so much that freeing it
//! takes long. Everything else is put aside, for a thread that may wait: see [`set_closer`].
//!
//! The kernel closes descriptors itself, in the thread that makes the call, where a packet is
//! received without room for them, and where a socket is closed in whose queue they lie. So
//! [`Socket`](crate::socket::Socket) always makes room for all that a packet can carry, and takes
//! in what is left before it closes. What remains is a process that has run out of descriptors:
//! there the kernel may wait.

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
    /// The descriptor, if it is memory of that size which can be mapped without danger: see
    /// [`segment::verify`].
    pub(crate) fn into_memory(self, expected: u64) -> Result<OwnedFd, SegmentError> {
        segment::verify(self.as_fd(), expected)?;
        Ok(self.into_any())
    }

    /// The descriptor, whatever it is. Whoever drops it may wait.
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
        // Without a closer it would never be freed; closing memory takes time, but waits for
        // nobody.
        Ok(held) if held <= CLOSED || closer().is_none() => None,
        _ => Some(fd),
    }
}

/// The descriptors of one packet. What nobody takes out is put aside together, which calls the
/// closer once.
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

/// What is put aside.
static ASIDE: List<Box<dyn Send>> = List(AtomicPtr::new(ptr::null_mut()));

/// The closer, a `fn()`, or null.
static CLOSER: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());

/// Says who closes what is put aside. `closer` is called after something was, on the path of
/// progress: it must not wait, but start or wake a thread that calls [`close_aside`].
///
/// Without one, large memory of a peer is unmapped and freed on the path of progress, at 0.15 ms
/// per MiB. Descriptors that a peer should not have sent stay open until [`close_aside`] is called.
/// An attached peer can leave 253 of them, those of one packet, but whoever connects to a
/// [`Listener`](crate::Listener) leaves as many each time, up to all that this process may open.
pub fn set_closer(closer: fn()) {
    // Relaxed: a function's address carries nothing with it.
    CLOSER.store(closer as *mut (), Ordering::Relaxed);
}

fn closer() -> Option<fn()> {
    let closer = CLOSER.load(Ordering::Relaxed);
    // SAFETY: null, which is `None`, or stored by `set_closer`.
    unsafe { mem::transmute::<*mut (), Option<fn()>>(closer) }
}

/// Closes and unmaps what was put aside. May wait for whoever made a file, without a bound.
pub fn close_aside() {
    ASIDE.take().for_each(drop);
}

/// Whether something was put aside and not yet taken by [`close_aside`]. Stale as soon as it is
/// told.
pub fn has_aside() -> bool {
    !ASIDE.is_empty()
}

/// Puts something aside that may take long to drop.
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
