//! The memory side of a device: what this process exports and imports through it, over links to its
//! peers. Slow path, all but [`Imports::begin`] and [`Imports::end`]: allocates, makes system
//! calls, enters the driver. Only the calls that take a deadline wait, asleep, and none waits past
//! it; meanwhile they serve every peer, so that processes that wait for each other in a circle do
//! not stand still.
//!
//! In steady state nothing is said: publishing what is published already, importing what is open
//! already, and beginning a transfer send no packet and make no driver call.
//!
//! `exporting` has what the owner of memory does, `importing` what its peers do; here are the
//! links, and the pass that serves both.

mod exporting;
mod importing;

use std::os::fd::{AsRawFd, RawFd};
use std::time::Instant;

use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;
use fishplate_shm::extension::Line;
use fishplate_shm::{Link, Nonce, ShmRail};
use static_assertions::assert_impl_all;

use super::board::Board;
use super::export::{ExportStats, Exports};
use super::import::{ImportLimits, ImportStats, Imports};
use super::publish::Publications;
use super::revoke::Revocations;
use super::wire::{self, Ask};
use super::{Device, HostDevice};

pub use exporting::{Published, TellError};

/// What both ends of a link have said of device memory.
pub(crate) fn board<'a>(line: &'a mut Line<'_>) -> &'a mut Board {
    line.extension()
}

/// Lets a link carry packets about device memory, from either end. To be called before anything
/// else is done with a link whose peer may send some;
/// [`GpuProfile::agree`](super::GpuProfile::agree) does.
pub fn prepare(link: &mut Link) {
    board(&mut link.line());
}

/// Where the links to peers are.
pub trait Links {
    /// Peers are numbered below this.
    fn bound(&self) -> u16;

    /// The socket to a peer, if it is linked.
    fn line(&mut self, peer: Peer) -> Option<Line<'_>>;
}

/// Links that no rail has taken over yet. A peer's number is its place.
impl Links for [Option<Link>] {
    fn bound(&self) -> u16 {
        u16::try_from(self.len()).unwrap_or(u16::MAX)
    }

    fn line(&mut self, peer: Peer) -> Option<Line<'_>> {
        Some(self.get_mut(usize::from(peer.0))?.as_mut()?.line())
    }
}

/// The links of a rail.
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
    /// The lives of peers that were there in the last pass.
    alive: Vec<Nonce>,
    polls: Vec<libc::pollfd>,
}

impl<D: Device> Sharing<D> {
    /// Nothing shared yet.
    pub fn new(device: D, limits: ImportLimits) -> Self {
        Sharing {
            device,
            exports: Exports::new(),
            imports: Imports::new(limits),
            publications: Publications::default(),
            revocations: Revocations::default(),
            alive: Vec::new(),
            polls: Vec::new(),
        }
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device, to queue on.
    ///
    /// # Safety
    /// The device stays the same one. What was exported is revoked before it is freed; what was
    /// opened, pinned or queued here is left alone.
    pub unsafe fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// The device, for this crate, which keeps that promise.
    #[inline(always)]
    pub(crate) fn driver(&mut self) -> &mut D {
        &mut self.device
    }

    /// What is exported.
    pub fn exports(&self) -> &Exports {
        &self.exports
    }

    /// What is imported.
    pub fn imports(&self) -> &Imports {
        &self.imports
    }

    /// What is imported, to begin and end transfers.
    #[inline(always)]
    pub fn imports_mut(&mut self) -> &mut Imports {
        &mut self.imports
    }

    /// Closes what is open of a peer's memory, before the link to it ends: then the peer may free
    /// it. What something is still queued to stays open.
    pub(crate) fn part<L: Links + ?Sized>(&mut self, links: &mut L, peer: Peer) {
        if let Some(gone) = links.line(peer).map(|line| line.incarnation()) {
            self.imports.keep_only(|nonce| *nonce != gone);
            self.imports.sweep(&mut self.device);
        }
    }

    /// What is published.
    pub fn publications(&self) -> &Publications {
        &self.publications
    }

    /// How often what was done.
    pub fn stats(&self) -> (ExportStats, ImportStats) {
        (self.exports.stats(), self.imports.stats())
    }

    /// One pass over all peers: takes in what has arrived, answers it, closes what has drained,
    /// notices who is gone. Does not wait.
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
        // Nothing is imported but from who was there in a pass.
        if *alive != before {
            self.imports.keep_only(|nonce| alive.contains(nonce));
        }
        self.revocations.keep_only(|nonce| alive.contains(nonce));
        self.imports.sweep(&mut self.device);
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
        while let Some((sequence, alloc)) = board(line).acks.pop_front() {
            if self.revocations.acked(incarnation, sequence, alloc) {
                board(line).given.remove(&alloc);
            }
        }
        while let Some((sequence, alloc)) = board(line).revokes.pop_front() {
            if !self.imports.revoke(incarnation, alloc, sequence) {
                line.tell(wire::revoke_ack(sequence, alloc), None);
            }
        }
        while let Some(alloc) = board(line).fetches.pop_first() {
            if !exporting::give(&self.exports, &self.device, line, alloc) {
                line.tell(wire::refuse(Ask::Alloc(alloc)), None);
            }
        }
        if !board(line).queries.is_empty() {
            self.answer_queries(line);
        }
    }

    /// Sleeps until a peer has said something, or is gone. False: the deadline has passed.
    pub fn sleep<L: Links + ?Sized>(&mut self, links: &mut L, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        self.poll(links, i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX));
        true
    }

    /// Polls all sockets for at most this many milliseconds, takes in what came,
    /// and detects ended processes.
    fn poll<L: Links + ?Sized>(&mut self, links: &mut L, ms: i32) {
        self.polls.clear();
        for number in 0..links.bound() {
            let Some(line) = links.line(Peer(number)) else { continue };
            // What has ended stays readable, and would keep us awake.
            let up = line.ended().is_none();
            let events = libc::POLLIN | if line.has_notices() { libc::POLLOUT } else { 0 };
            let entry = |fd: RawFd, events| libc::pollfd { fd: if up { fd } else { -1 }, events, revents: 0 };
            self.polls.push(entry(line.fd().as_raw_fd(), events));
            self.polls.push(entry(line.pidfd().map_or(-1, |fd| fd.as_raw_fd()), libc::POLLIN));
        }
        // SAFETY: as many structures as the vector holds; a negative descriptor is skipped. If the
        // call fails, nothing is reported this time.
        unsafe { libc::poll(self.polls.as_mut_ptr(), self.polls.len() as libc::nfds_t, ms) };
        let mut polls = self.polls.chunks_exact(2);
        for number in 0..links.bound() {
            let Some(mut line) = links.line(Peer(number)) else { continue };
            let Some([socket, process]) = polls.next() else { return };
            let dead = process.revents != 0;
            let news = socket.revents != 0 || dead || line.has_notices();
            let heard = !news || {
                // A packet whose kinds are not registered yet would break the protocol.
                board(&mut line);
                line.pump()
            };
            if dead && heard {
                // What it has said before still counted.
                line.died();
            }
        }
    }
}

impl<D: Device> Drop for Sharing<D> {
    /// Closes what nothing is queued to. What something is queued to stays open until the process
    /// ends. What the device frees, no importer in this process finds any more.
    fn drop(&mut self) {
        self.exports.withdraw();
        self.imports.keep_only(|_| false);
        self.imports.sweep(&mut self.device);
    }
}
