//! The memory side of a device: what this process exports and imports through it, over links to its peers. Slow path, all but
//! [`Imports::begin`] and [`Imports::end`]: allocates, makes system calls, enters the driver. Only the calls that take a deadline
//! wait, asleep, and none waits past it; meanwhile they serve every peer, so that processes that wait for each other in a circle
//! do not stand still.
//!
//! In steady state nothing is said: publishing what is published already, importing what is open already, and beginning a transfer
//! send no packet and make no driver call.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Instant;

use fishplate_core::mem::Peer;
use fishplate_core::sync::host::Host;
use static_assertions::assert_impl_all;

use super::export::{AllocId, ExportError, ExportStats, Exports, Registration};
use super::import::{Fault, ImportError, ImportId, ImportLimits, ImportStats, Imported, Imports};
use super::publish::{Binding, DirectToken, Found, Publications, PublishError, Wanted};
use super::revoke::{Revocations, RevokeError};
use super::wire::{self, Ask};
use super::{Device, DeviceError, DevicePtr, HostDevice};
use crate::control::Control;
use crate::handshake::{Link, Nonce};
use crate::rail::ShmRail;

/// The socket to one peer, where device memory is spoken of.
#[derive(Debug)]
pub struct Line<'a> {
    pub(crate) control: &'a mut Control,
    pub(crate) pidfd: Option<BorrowedFd<'a>>,
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
        let Link { control, peer, .. } = self.get_mut(usize::from(peer.0))?.as_mut()?;
        Some(Line { control, pidfd: peer.pidfd.as_ref().map(AsFd::as_fd) })
    }
}

/// The links of a rail.
impl<H: Host> Links for ShmRail<H> {
    fn bound(&self) -> u16 {
        self.max_peers()
    }

    fn line(&mut self, peer: Peer) -> Option<Line<'_>> {
        let remote = self.remote(peer)?;
        Some(Line { control: &mut remote.control, pidfd: remote.pidfd.as_ref().map(AsFd::as_fd) })
    }
}

/// Exports of which nothing is registered that are taken back at once, to make room.
const RECLAIMED: usize = 32;

/// What is published, and whether anything had to be said for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where the buffer is.
    pub binding: Binding,
    /// Whether the peer was told; it knew already otherwise.
    pub told: bool,
}

/// Why a peer was not told. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TellError {
    /// The version cannot be.
    Publish(PublishError),
    /// The range is not registered, or its allocation is being revoked.
    Export(ExportError),
    /// The peer cannot be told.
    Peer(ImportError),
}

assert_impl_all!(Sharing<HostDevice>: Send);

/// Exports, imports and publications of one device. It belongs to the thread that the device belongs to.
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

fn fault(peer: Peer, alloc: Option<AllocId>, why: Fault) -> ImportError {
    ImportError { peer, alloc, why }
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
    #[inline(always)]
    pub fn device_mut(&mut self) -> &mut D {
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

    /// What is published.
    pub fn publications(&self) -> &Publications {
        &self.publications
    }

    /// How often what was done.
    pub fn stats(&self) -> (ExportStats, ImportStats) {
        (self.exports.stats(), self.imports.stats())
    }

    // Exporting.

    /// Registers a range of this device's memory. One driver call or two if its allocation is exported already. Memory found to have
    /// been freed and taken again is taken back from its importers; when there is no room for another export, so are some allocations
    /// of which no range is registered any more.
    pub fn register<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        ptr: DevicePtr,
        len: u64,
    ) -> Result<Registration, ExportError> {
        let mut registered = self.exports.register(&mut self.device, ptr, len);
        if let Err(ExportError::Full(_) | ExportError::Device(DeviceError::Exhausted)) = registered {
            for alloc in self.exports.idle(RECLAIMED) {
                self.revoke(links, alloc)?;
            }
            registered = self.exports.register(&mut self.device, ptr, len);
        }
        self.revoke_superseded(links);
        registered
    }

    /// Takes a registration back. Peers may still have the allocation open: [`revoke`](Sharing::revoke) it before it is freed.
    pub fn deregister(&mut self, registration: &Registration) -> bool {
        self.exports.deregister(registration)
    }

    /// Asks the driver whether the memory is still what was registered; if not it is taken back from its importers. One or two driver
    /// calls, for callers who do not trust whoever frees memory.
    pub fn verify<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        registration: &Registration,
    ) -> Result<(), ExportError> {
        let verified = self.exports.verify(&mut self.device, registration.alloc);
        self.revoke_superseded(links);
        verified
    }

    fn revoke_superseded<L: Links + ?Sized>(&mut self, links: &mut L) {
        for alloc in self.exports.take_superseded() {
            self.take_back(links, alloc);
        }
    }

    /// Tells a peer where a buffer is, unless it knows. The version is the user's, or one of our own: greater than all before it. The
    /// handle of the allocation goes before the first version that lies in it, so the peer can open it without asking.
    pub fn publish<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        version: Option<u64>,
        at: &Registration,
    ) -> Result<Published, TellError> {
        if !self.exports.holds(at) {
            return Err(TellError::Export(ExportError::Unknown(at.alloc)));
        }
        let gone = TellError::Peer(fault(peer, Some(at.alloc), Fault::PeerGone));
        let line = links.line(peer).ok_or(gone)?;
        if line.control.ended().is_some() {
            return Err(gone);
        }
        if !line.control.has_room() {
            return Err(TellError::Peer(fault(peer, Some(at.alloc), Fault::Again)));
        }
        let (binding, new) = self.publications.publish(buffer, version, at).map_err(TellError::Publish)?;
        let told = line.control.board.told.get(&buffer) != Some(&Some(binding));
        if told {
            tell(&self.exports, &self.device, line, buffer, binding);
        }
        if new {
            self.serve_queries(links, buffer);
        }
        Ok(Published { binding, told })
    }

    /// Takes a buffer back from all who were told of it.
    pub fn unpublish<L: Links + ?Sized>(&mut self, links: &mut L, buffer: u64) -> bool {
        for number in 0..links.bound() {
            if let Some(line) = links.line(Peer(number))
                && line.control.board.told.remove(&buffer).is_some()
            {
                line.control.tell(wire::unpublish(buffer), None);
            }
        }
        self.publications.unpublish(buffer)
    }

    fn serve_queries<L: Links + ?Sized>(&mut self, links: &mut L, buffer: u64) {
        for number in 0..links.bound() {
            if let Some(line) = links.line(Peer(number))
                && line.control.board.queries.iter().any(|(wanted, _)| *wanted == buffer)
            {
                self.answer_queries(line);
            }
        }
    }

    fn answer_queries(&mut self, line: Line<'_>) {
        for (buffer, wanted) in std::mem::take(&mut line.control.board.queries) {
            match self.publications.look(buffer, wanted) {
                Found::Here(binding) => {
                    let line = Line { control: line.control, pidfd: None };
                    tell(&self.exports, &self.device, line, buffer, binding);
                }
                Found::NotYet => line.control.board.queries.push((buffer, wanted)),
                Found::Gone => line.control.tell(wire::refuse(Ask::Buffer(buffer, wanted)), None),
            }
        }
    }

    /// Begins to take an allocation back from all who may have it open. It must not be freed before [`awaited`](Sharing::awaited) names
    /// nobody any more. Beginning again what has begun changes nothing.
    pub fn revoke<L: Links + ?Sized>(&mut self, links: &mut L, alloc: AllocId) -> Result<(), ExportError> {
        if self.exports.retire(alloc)? {
            self.take_back(links, alloc);
        }
        Ok(())
    }

    fn take_back<L: Links + ?Sized>(&mut self, links: &mut L, alloc: AllocId) {
        self.publications.forget(alloc);
        let mut awaited = Vec::new();
        for number in 0..links.bound() {
            let peer = Peer(number);
            let Some(line) = links.line(peer) else { continue };
            for told in line.control.board.told.values_mut() {
                *told = told.filter(|binding| binding.alloc != alloc);
            }
            if line.control.ended().is_none() && line.control.board.given.contains(&alloc) {
                awaited.push((peer, line.control.incarnation()));
            }
        }
        let peers: Vec<Peer> = awaited.iter().map(|(peer, _)| *peer).collect();
        let sequence = self.revocations.begin(alloc, awaited);
        for peer in peers {
            if let Some(line) = links.line(peer) {
                line.control.tell(wire::revoke(sequence, alloc), None);
            }
        }
        self.settle();
    }

    /// Gives an allocation to peers again whose revocation is not over.
    pub fn call_off(&mut self, alloc: AllocId) -> Result<(), ExportError> {
        self.exports.resume(alloc)?;
        self.revocations.call_off(alloc);
        Ok(())
    }

    /// The peers that may still have an allocation open which is being revoked.
    pub fn awaited(&self, alloc: AllocId) -> impl Iterator<Item = Peer> {
        self.revocations.awaited(alloc)
    }

    /// Takes an allocation back and waits until nobody has it open: then it may be freed.
    pub fn revoke_and_wait<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        alloc: AllocId,
        deadline: Instant,
    ) -> Result<(), RevokeError> {
        self.revoke(links, alloc)?;
        loop {
            self.turn(links);
            let mut awaited = self.awaited(alloc);
            let Some(peer) = awaited.next() else { return Ok(()) };
            let peers = 1 + awaited.count();
            if !self.sleep(links, deadline) {
                return Err(RevokeError::Deadline { alloc, peer, peers });
            }
        }
    }

    fn settle(&mut self) {
        for alloc in self.revocations.take_done() {
            self.exports.remove(alloc);
        }
    }

    // Importing.

    /// Where a buffer of a peer is, if the peer has said so.
    pub fn look_up<L: Links + ?Sized>(
        &self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
    ) -> Option<DirectToken> {
        let control = links.line(peer)?.control;
        let binding = control.board.find(buffer, wanted)?;
        Some(DirectToken { incarnation: control.incarnation(), binding })
    }

    /// As [`look_up`](Sharing::look_up), taking in what has arrived; if the peer has not said it, it is asked to, as soon as it can.
    /// Does not wait.
    pub fn fetch<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
    ) -> Result<Option<DirectToken>, ImportError> {
        self.turn(links);
        let found = self.look_up(links, peer, buffer, wanted);
        let gone = fault(peer, None, Fault::PeerGone);
        let control = links.line(peer).ok_or(gone)?.control;
        if control.ended().is_some() {
            return Err(gone);
        }
        if found.is_some() {
            return Ok(found);
        }
        let ask = Ask::Buffer(buffer, wanted);
        if control.board.refused(ask) {
            return Err(fault(peer, None, Fault::Gone));
        }
        for packet in control.board.ask(ask) {
            control.tell(packet, None);
        }
        Ok(None)
    }

    /// Waits until the peer has said where a buffer is.
    pub fn wait<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
        deadline: Instant,
    ) -> Result<DirectToken, ImportError> {
        loop {
            if let Some(found) = self.fetch(links, peer, buffer, wanted)? {
                return Ok(found);
            }
            if !self.sleep(links, deadline) {
                self.give_up(links, peer, Ask::Buffer(buffer, wanted));
                return Err(fault(peer, None, Fault::Deadline));
            }
        }
    }

    /// Waits until the peer has said where a buffer is, and opens it: the first transfer finds it open.
    pub fn prefetch<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        buffer: u64,
        wanted: Wanted,
        deadline: Instant,
    ) -> Result<(DirectToken, Imported), ImportError> {
        let token = self.wait(links, peer, buffer, wanted, deadline)?;
        Ok((token, self.open_direct(links, peer, &token, deadline)?))
    }

    /// Imports what a token names, which must be of this life of the peer.
    pub fn open_direct<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        token: &DirectToken,
        deadline: Instant,
    ) -> Result<Imported, ImportError> {
        let Binding { alloc, offset, len, .. } = token.binding;
        let incarnation = links.line(peer).map(|line| line.control.incarnation());
        match incarnation {
            None => Err(fault(peer, Some(alloc), Fault::PeerGone)),
            Some(now) if now != token.incarnation => Err(fault(peer, Some(alloc), Fault::Incarnation)),
            Some(_) => self.import(links, peer, alloc, offset, len, deadline),
        }
    }

    /// Imports a range of an allocation of a peer. Opens the allocation if it is not open, and asks the peer for its handle if it has not
    /// sent it. What is open costs no system call.
    pub fn import<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        alloc: AllocId,
        offset: u64,
        len: u64,
        deadline: Instant,
    ) -> Result<Imported, ImportError> {
        loop {
            if let Some(imported) = self.try_import(links, peer, alloc, offset, len)? {
                return Ok(imported);
            }
            if !self.sleep(links, deadline) {
                self.give_up(links, peer, Ask::Alloc(alloc));
                return Err(fault(peer, Some(alloc), Fault::Deadline));
            }
        }
    }

    fn give_up<L: Links + ?Sized>(&mut self, links: &mut L, peer: Peer, ask: Ask) {
        if let Some(line) = links.line(peer)
            && let Some(packet) = line.control.board.give_up(ask)
        {
            line.control.tell(packet, None);
        }
    }

    /// As [`import`](Sharing::import), without waiting: `None` until the handle has come, which is asked for.
    pub fn try_import<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        alloc: AllocId,
        offset: u64,
        len: u64,
    ) -> Result<Option<Imported>, ImportError> {
        // What is open needs no look at any socket.
        if let Some(found) = self.open_already(links, peer, alloc, offset, len) {
            return found.map(Some);
        }
        self.turn(links);
        if let Some(found) = self.open_already(links, peer, alloc, offset, len) {
            return found.map(Some);
        }
        let error = |why| fault(peer, Some(alloc), why);
        let control = links.line(peer).ok_or(error(Fault::PeerGone))?.control;
        if control.ended().is_some() {
            return Err(error(Fault::PeerGone));
        }
        let incarnation = control.incarnation();
        if let Some(offer) = control.board.accept(alloc) {
            let opened = self.imports.open(&mut self.device, peer, incarnation, offer, offset, len);
            return opened.map(Some).map_err(error);
        }
        let ask = Ask::Alloc(alloc);
        if control.board.refused(ask) {
            return Err(error(Fault::NotExported));
        }
        for packet in control.board.ask(ask) {
            control.tell(packet, None);
        }
        Ok(None)
    }

    fn open_already<L: Links + ?Sized>(
        &mut self,
        links: &mut L,
        peer: Peer,
        alloc: AllocId,
        offset: u64,
        len: u64,
    ) -> Option<Result<Imported, ImportError>> {
        let control = links.line(peer)?.control;
        if control.ended().is_some() {
            return None;
        }
        let found = self.imports.find(control.incarnation(), alloc, offset, len)?;
        Some(found.map_err(|why| fault(peer, Some(alloc), why)))
    }

    /// Gives an import back.
    pub fn release(&mut self, id: ImportId) {
        self.imports.release(id);
    }

    // Both.

    /// One pass over all peers: takes in what has arrived, answers it, closes what has drained, notices who is gone. Does not wait.
    pub fn turn<L: Links + ?Sized>(&mut self, links: &mut L) {
        self.poll(links, 0);
        let before = std::mem::take(&mut self.alive);
        for number in 0..links.bound() {
            if let Some(line) = links.line(Peer(number)) {
                self.answer(line);
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
            if let Some(line) = links.line(closed.peer)
                && line.control.incarnation() == closed.incarnation
            {
                line.control.tell(wire::revoke_ack(closed.sequence, closed.alloc), None);
            }
        }
        self.settle();
    }

    fn answer(&mut self, line: Line<'_>) {
        let Line { control, .. } = line;
        if control.ended().is_some() {
            return;
        }
        let incarnation = control.incarnation();
        self.alive.push(incarnation);
        while let Some((sequence, alloc)) = control.board.acks.pop_front() {
            if self.revocations.acked(incarnation, sequence, alloc) {
                control.board.given.remove(&alloc);
            }
        }
        while let Some((sequence, alloc)) = control.board.revokes.pop_front() {
            if !self.imports.revoke(incarnation, alloc, sequence) {
                control.tell(wire::revoke_ack(sequence, alloc), None);
            }
        }
        while let Some(alloc) = control.board.fetches.pop_first() {
            if !give(&self.exports, &self.device, control, alloc) {
                control.tell(wire::refuse(Ask::Alloc(alloc)), None);
            }
        }
        if !control.board.queries.is_empty() {
            self.answer_queries(Line { control, pidfd: None });
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

    /// Looks at all sockets, for so many milliseconds at most, takes in what has come, and sees whose process is gone.
    fn poll<L: Links + ?Sized>(&mut self, links: &mut L, ms: i32) {
        self.polls.clear();
        for number in 0..links.bound() {
            let Some(line) = links.line(Peer(number)) else { continue };
            // What has ended stays readable, and would keep us awake.
            let up = line.control.ended().is_none();
            let events = libc::POLLIN | if line.control.has_notices() { libc::POLLOUT } else { 0 };
            let entry = |fd: RawFd, events| libc::pollfd { fd: if up { fd } else { -1 }, events, revents: 0 };
            self.polls.push(entry(line.control.fd().as_raw_fd(), events));
            self.polls.push(entry(line.pidfd.map_or(-1, |fd| fd.as_raw_fd()), libc::POLLIN));
        }
        // SAFETY: as many structures as the vector holds; a negative descriptor is skipped. If the call fails, nothing is reported
        // this time.
        unsafe { libc::poll(self.polls.as_mut_ptr(), self.polls.len() as libc::nfds_t, ms) };
        let mut polls = self.polls.chunks_exact(2);
        for number in 0..links.bound() {
            let Some(line) = links.line(Peer(number)) else { continue };
            let Some([socket, process]) = polls.next() else { return };
            let dead = process.revents != 0;
            if socket.revents != 0 || dead || line.control.has_notices() {
                line.control.pump();
            }
            if dead {
                // What it has said before still counted, as far as it came.
                line.control.died();
            }
        }
    }
}

impl<D: Device> Drop for Sharing<D> {
    /// Closes what nothing is queued to. What something is queued to stays open until the process ends.
    fn drop(&mut self) {
        self.imports.keep_only(|_| false);
        self.imports.sweep(&mut self.device);
    }
}

/// Gives a peer the handle of an allocation, unless it has it or may not. Whether it may.
fn give<D: Device>(exports: &Exports, device: &D, control: &mut Control, alloc: AllocId) -> bool {
    let Some((size, handle)) = exports.handle(alloc) else { return false };
    let uuid = device.caps().uuid;
    control.board.given.insert(alloc);
    if control.home() {
        control.tell(wire::export(alloc, size, &uuid, None), None);
    } else {
        control.tell(wire::export(alloc, size, &uuid, Some(&handle)), Some(handle));
    }
    true
}

/// Tells a peer where a buffer is, after the handle of its allocation if it was never given that.
fn tell<D: Device>(exports: &Exports, device: &D, line: Line<'_>, buffer: u64, binding: Binding) {
    let Line { control, .. } = line;
    if !control.board.given.contains(&binding.alloc) && !give(exports, device, control, binding.alloc) {
        return;
    }
    control.tell(wire::publish(buffer, &binding), None);
    let told = control.board.told.entry(buffer).or_default();
    // An older version may have been asked for.
    if told.is_none_or(|told| told.version < binding.version) {
        *told = Some(binding);
    }
}
