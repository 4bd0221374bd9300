//! Lets an event loop wait for a node: a descriptor that becomes readable when the node has work,
//! and a protocol that loses no wake-up.
//!
//! ```no_run
//! use fishplate::Node;
//! use std::{os::fd::AsRawFd, time::Duration};
//! # fn wait_readable(_: i32, _: Duration) {}
//! # fn act(_: &mut Node) -> bool { true }
//!
//! let mut node = Node::builder().wait_fd().open()?;
//! let fd = node.wait_fd().ok_or("a rail of this node cannot end a sleep")?.as_raw_fd();
//! loop {
//!     // `act` tests all that the program waits for: words, receives, completions, peers.
//!     while act(&mut node) {}
//!     if let Some(timeout) = node.arm() && !act(&mut node) {
//!         wait_readable(fd, timeout); // poll(2), epoll_wait(2), or the program's event loop
//!     }
//! }
//! # #[allow(unreachable_code)]
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A readable descriptor says only that the node may have work.
//!
//! Call [`Node::arm`] before each wait. Otherwise peers on this host do not make the descriptor
//! readable. Test once more after `arm`: a peer that wrote a word just before `arm` did not wake
//! the node. Later events make the descriptor readable, so no wake-up is lost.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::worker::Driver;
use super::{MEETING_SLICE, Node, SLICE};

/// Maximum duration of a wait, in nanoseconds, while the node has work that no event announces.
const DUE_NS: u64 = 1_000_000;

impl Node {
    /// Returns the descriptor that an event loop waits on until it is readable. Call
    /// [`arm`](Self::arm) before each wait. Never read the descriptor or change its flags. A node
    /// has the same descriptor as long as it exists.
    ///
    /// `None`: a libfabric rail cannot end a sleep (`RailInfo::wakes`), or the node has a worker.
    /// Also `None` if the node has no libfabric rails and was opened without
    /// [`Builder::wait_fd`](super::Builder::wait_fd). Then the program must call `progress`
    /// regularly.
    pub fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        match self.driver {
            Driver::Program => self.home.wait_object().elsewhere().map(|sleep| sleep.as_fd()),
            _ => None,
        }
    }

    /// Prepares a wait on [`wait_fd`](Self::wait_fd), and makes progress. Returns the maximum time
    /// to wait: 20 ms, or less while peers connect or work is due. Test the program's conditions
    /// once more, and then wait.
    ///
    /// `None`: do not wait. An event has arrived, a provider must be polled first, or the node has
    /// no descriptor.
    ///
    /// A longer wait delays acknowledgements, and the cleanup after a failed peer. Makes system
    /// calls, but does not block.
    pub fn arm(&mut self) -> Option<Duration> {
        self.wait_fd()?;
        self.meet();
        self.publish_counters();
        let wait_object = self.home.wait_object().clone();
        let sleep = wait_object.elsewhere()?;
        let longest_ns = if self.peers.hurries() { MEETING_SLICE } else { SLICE };
        let home = &mut *self.home;
        let (engine, host) = (&mut home.engine, home.waiter.host());
        // Checks that peers are alive, as after each sleep. Also reads the packets that wake this
        // node, which peers on this host send.
        engine.check_peers();
        // SAFETY: the driver is the program, so no other thread uses the rails.
        let timeout_ns = unsafe {
            sleep.arm(wait_object.event(), host, || {
                wait_object.look(longest_ns, || engine.progress() != 0)
            })
        }?;
        Some(Duration::from_nanos(if engine.has_due() {
            timeout_ns.min(DUE_NS)
        } else {
            timeout_ns
        }))
    }
}
