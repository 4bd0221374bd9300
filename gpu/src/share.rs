//! The exports and imports of a device, over links to peers. All but [`Imports::begin`] and
//! [`Imports::end`] are slow paths: they allocate, make system calls and call the driver. Only
//! calls with a deadline wait for peers, but closing memory may wait for the device. While a call
//! waits for a peer, it serves all peers, so processes that wait for each other in a circle still
//! make progress.
//!
//! In steady state, publishing again, importing open memory and beginning a transfer send no packet
//! and make no driver call.

mod exporting;
mod importing;

use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;
use fishplate_shm::extension::Line;
use fishplate_shm::{Link, Nonce, ShmRail};
use static_assertions::assert_impl_all;

use super::export::{ExportStats, Exports};
use super::import::{ImportLimits, ImportStats, Imports};
use super::publish::Publications;
use super::record::LinkRecord;
use super::revoke::Revocations;
use super::wire::{self, Ask};
use super::{Device, HostDevice};

pub use exporting::{Published, TellError};

pub(crate) fn record<'a>(line: &'a mut Line<'_>) -> &'a mut LinkRecord {
    line.extension()
}

/// Lets a link carry packets about device memory. If the peer may send such packets, call this
/// function before any other use of the link. [`GpuProfile::agree`](super::GpuProfile::agree) calls
/// it.
pub fn prepare(link: &mut Link) {
    record(&mut link.line());
}

/// Gives access to the sockets of linked peers, by peer number.
pub trait Links {
    /// Returns the upper bound of the peer numbers. Every peer number is less.
    fn bound(&self) -> u16;

    /// Returns the socket to a peer, or `None` if the peer is not linked.
    fn line(&mut self, peer: Peer) -> Option<Line<'_>>;
}

/// Links that are not attached to a rail yet. The index in the slice is the peer number.
impl Links for [Option<Link>] {
    fn bound(&self) -> u16 {
        u16::try_from(self.len()).unwrap_or(u16::MAX)
    }

    fn line(&mut self, peer: Peer) -> Option<Line<'_>> {
        Some(self.get_mut(usize::from(peer.0))?.as_mut()?.line())
    }
}

impl<H: Host> Links for ShmRail<H> {
    fn bound(&self) -> u16 {
        self.max_peers()
    }

    fn line(&mut self, peer: Peer) -> Option<Line<'_>> {
        ShmRail::line(self, peer)
    }
}

assert_impl_all!(Sharing<HostDevice>: Send);

/// Exports, imports and publications of one device, owned by the device's thread.
#[derive(Debug)]
pub struct Sharing<D: Device> {
    device: D,
    exports: Exports,
    imports: Imports,
    publications: Publications,
    revocations: Revocations,
    /// The incarnations of the peers that were linked in the last pass.
    alive: Vec<Nonce>,
    polls: Vec<libc::pollfd>,
    defers: bool,
}

impl<D: Device> Sharing<D> {
    /// Creates a `Sharing` without exports and imports.
    pub fn new(device: D, limits: ImportLimits) -> Self {
        Sharing {
            device,
            exports: Exports::new(),
            imports: Imports::new(limits),
            publications: Publications::default(),
            revocations: Revocations::default(),
            alive: Vec::new(),
            polls: Vec::new(),
            defers: false,
        }
    }

    /// Sets whether [`turn`](Self::turn) leaves drained mappings open. The driver closes memory
    /// only when no kernel of the process runs. So a kernel that waits for a peer would block the
    /// close.
    pub fn defer_closes(&mut self, defer: bool) {
        self.defers = defer;
    }

    /// Returns whether closes are [deferred](Self::defer_closes).
    pub fn defers_closes(&self) -> bool {
        self.defers
    }

    /// Returns the device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Returns the device for queueing work.
    ///
    /// # Safety
    /// The caller does not replace the device, and revokes exported memory before it frees the
    /// memory. It does not close, unpin or free memory that this `Sharing` opened or pinned. It
    /// does not interfere with queued work.
    pub unsafe fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// This crate upholds the contract of `device_mut`.
    #[inline(always)]
    pub(crate) fn driver(&mut self) -> &mut D {
        &mut self.device
    }

    /// Returns the exports.
    pub fn exports(&self) -> &Exports {
        &self.exports
    }

    /// Returns the imports.
    pub fn imports(&self) -> &Imports {
        &self.imports
    }

    /// Returns the imports, for beginning and ending transfers.
    #[inline(always)]
    pub fn imports_mut(&mut self) -> &mut Imports {
        &mut self.imports
    }

    /// Closes a peer's memory before the link to the peer ends, so that the peer may free it.
    /// Memory with queued work stays open.
    pub(crate) fn part<L: Links + ?Sized>(&mut self, links: &mut L, peer: Peer) {
        if let Some(gone) = links.line(peer).map(|line| line.incarnation()) {
            self.imports.keep_only(|nonce| *nonce != gone);
            self.imports.sweep(&mut self.device);
        }
    }

    /// Returns the publications.
    pub fn publications(&self) -> &Publications {
        &self.publications
    }

    /// Returns the counters of exports and imports.
    pub fn stats(&self) -> (ExportStats, ImportStats) {
        (self.exports.stats(), self.imports.stats())
    }

    /// Makes one pass over all peers: handles and answers messages, closes drained mappings, and
    /// detects failed peers. Does not wait for peers, but a close may wait for the device.
    pub fn turn<L: Links + ?Sized>(&mut self, links: &mut L) {
        self.poll(links, 0);
        self.revoke_superseded(links);
        let before = std::mem::take(&mut self.alive);
        for number in 0..links.bound() {
            if let Some(mut line) = links.line(Peer(number)) {
                self.answer(&mut line);
            }
        }
        let alive = &self.alive;
        // All imports belong to peers of earlier passes. So a search for failed peers is needed
        // only when the set of linked peers has changed.
        if *alive != before {
            self.imports.keep_only(|nonce| alive.contains(nonce));
        }
        self.revocations.keep_only(|nonce| alive.contains(nonce));
        if !self.defers {
            self.imports.sweep(&mut self.device);
        }
        for closed in self.imports.take_closed() {
            if let Some(mut line) = links.line(closed.peer)
                && line.incarnation() == closed.incarnation
            {
                line.tell(wire::revoke_ack(closed.sequence, closed.alloc), None);
            }
        }
        self.settle();
    }

    fn answer(&mut self, line: &mut Line<'_>) {
        if line.ended().is_some() {
            return;
        }
        let incarnation = line.incarnation();
        self.alive.push(incarnation);
        while let Some((sequence, alloc)) = record(line).acks.pop_front() {
            if self.revocations.acked(incarnation, sequence, alloc) {
                record(line).given.remove(&alloc);
            }
        }
        while let Some((sequence, alloc)) = record(line).revokes.pop_front() {
            if !self.imports.revoke(incarnation, alloc, sequence) {
                line.tell(wire::revoke_ack(sequence, alloc), None);
            }
        }
        while let Some(alloc) = record(line).requested.pop_first() {
            if !exporting::give(&self.exports, &self.device, line, alloc) {
                line.tell(wire::refuse(Ask::Alloc(alloc)), None);
            }
        }
        if !record(line).queries.is_empty() {
            self.answer_queries(line);
        }
    }

    /// Sleeps until a peer has sent something or failed. Returns `false` if the deadline expired.
    pub fn sleep<L: Links + ?Sized>(&mut self, links: &mut L, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        self.poll(links, i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
        true
    }

    fn poll<L: Links + ?Sized>(&mut self, links: &mut L, ms: i32) {
        self.polls.clear();
        for number in 0..links.bound() {
            let Some(line) = links.line(Peer(number)) else { continue };
            // The socket of an ended link stays readable, and would end every sleep at once.
            let up = line.ended().is_none();
            let events = libc::POLLIN | if line.has_notices() { libc::POLLOUT } else { 0 };
            let entry = |fd: RawFd, events| libc::pollfd {
                fd: if up { fd } else { -1 },
                events,
                revents: 0,
            };
            self.polls.push(entry(line.fd().as_raw_fd(), events));
            self.polls.push(entry(line.pidfd().map_or(-1, |fd| fd.as_raw_fd()), libc::POLLIN));
        }
        // SAFETY: the pointer and the count describe the vector, and poll(2) skips negative
        // descriptors. If the call fails, no events are reported.
        unsafe { libc::poll(self.polls.as_mut_ptr(), self.polls.len() as libc::nfds_t, ms) };
        let mut polls = self.polls.chunks_exact(2);
        for number in 0..links.bound() {
            let Some(mut line) = links.line(Peer(number)) else { continue };
            let Some([socket, process]) = polls.next() else { return };
            let dead = process.revents != 0;
            let news = socket.revents != 0 || dead || line.has_notices();
            let heard = !news || {
                // Registers the packet kinds first, because an unknown kind is a violation.
                record(&mut line);
                line.pump()
            };
            if dead && heard {
                // All messages that the process sent before it exited were handled above.
                line.died();
            }
        }
    }
}

impl<D: Device> Drop for Sharing<D> {
    /// Mappings with queued work stay open until the process exits. Importers in this process no
    /// longer find memory that the device frees.
    fn drop(&mut self) {
        self.exports.withdraw();
        self.imports.keep_only(|_| false);
        self.imports.sweep(&mut self.device);
    }
}
