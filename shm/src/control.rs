//! The socket of a link after the handshake. It carries blobs of the layer above, announcements of
//! segments, packets of other packages (see [`extension`]), rings and the Bye. All arrive in the
//! order of sending. Slow path: allocates, makes system calls, and waits only in calls with a
//! deadline.
//!
//! The number of announced segments and of pending blobs is bounded, and a peer that exceeds a
//! bound violates the protocol.

mod extension;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use fishplate_core::error::{PeerError, Violation};

use crate::error::{HandshakeError, SegmentError};
use crate::foreign::{self, Batch, Foreign};
use crate::packet::{MAX_BLOB, MAX_PACKET, Nonce, PacketKind, Reader, Writer};
use crate::segment::{self, Access, Mapping, Segment};
use crate::socket::{Packet, Senders, Socket};
use crate::watch::Watch;
use extension::Extensions;

pub use extension::{Descriptors, Extension, Line};

/// Maximum number of pending blobs.
const MAX_BLOBS: usize = 8;

/// Maximum number of packets that one [`pump`](Control::pump) receives. The rest stays in the
/// socket.
const PASS: usize = 64;

#[derive(Debug)]
struct Announced {
    number: u32,
    fd: Foreign,
    len: u64,
    mapping: Option<Mapping>,
    users: u32,
    withdrawn: bool,
}

#[derive(Debug)]
enum Notice {
    Announce(Segment),
    Withdraw(u32),
    /// A blob, or a packet of an extension together with its descriptors.
    Packet(Vec<u8>, Option<Arc<dyn Descriptors>>),
}

#[derive(Debug)]
pub(crate) struct Control {
    /// Declared before the socket, so that it is dropped first.
    watch: Option<Watch>,
    socket: Socket,
    blobs: VecDeque<Vec<u8>>,
    notices: VecDeque<Notice>,
    segments: Vec<Announced>,
    /// Maximum number of segments that the peer has announced and not withdrawn. Withdrawn segments
    /// that we still use do not count, because the peer does not know about those uses.
    max_segments: usize,
    extensions: Extensions,
    /// The peer's nonce.
    incarnation: Nonce,
    home: bool,
    /// Whether the next packet waits in the socket because this process has too few descriptors.
    starved: bool,
    ended: Option<PeerError>,
}

impl Control {
    pub(crate) fn new(socket: Socket, max_segments: u16, incarnation: Nonce, home: bool) -> Self {
        Control {
            watch: None,
            socket,
            blobs: VecDeque::new(),
            notices: VecDeque::new(),
            segments: Vec::new(),
            max_segments: usize::from(max_segments),
            extensions: Extensions::default(),
            incarnation,
            home,
            starved: false,
            ended: None,
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Adds the socket to an epoll set for this process to sleep on, until the connection ends.
    pub(crate) fn watch(&mut self, set: &Arc<OwnedFd>) -> Result<(), HandshakeError> {
        self.watch = Some(Watch::new(set, self.fd()).map_err(HandshakeError::System)?);
        Ok(())
    }

    /// Wakes a peer that sleeps on its sockets. Ignores a full socket, because the peer then has
    /// packets to read.
    #[cold]
    pub(crate) fn ring(&self) {
        let _ = self.socket.try_send(&Writer::new(PacketKind::Ring).finish(), &[]);
    }

    pub(crate) fn has_notices(&self) -> bool {
        !self.notices.is_empty()
    }

    pub(crate) fn ended(&self) -> Option<PeerError> {
        self.ended
    }

    /// Sends a blob and waits for the peer's blob. Returns only after our blob has been sent too,
    /// so the caller may drop the link at once.
    pub(crate) fn exchange(
        &mut self,
        blob: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, HandshakeError> {
        self.send_blob(blob)?;
        loop {
            self.pump();
            if !self.has_notices()
                && let Some(blob) = self.next_blob()?
            {
                return Ok(blob);
            }
            self.rest(deadline)?;
        }
    }

    /// Sends a blob, now or in a later [`pump`](Control::pump).
    pub(crate) fn send_blob(&mut self, blob: &[u8]) -> Result<(), HandshakeError> {
        if blob.len() > MAX_BLOB {
            return Err(HandshakeError::TooLong { len: blob.len(), max: MAX_BLOB });
        }
        let mut packet = Writer::new(PacketKind::Blob);
        packet.extend(blob);
        self.notices.push_back(Notice::Packet(packet.finish(), None));
        self.send_notices();
        Ok(())
    }

    /// Returns the peer's next blob, or `None` if it has not arrived. Does not wait.
    pub(crate) fn take_blob(&mut self) -> Result<Option<Vec<u8>>, HandshakeError> {
        self.pump();
        self.next_blob()
    }

    fn next_blob(&mut self) -> Result<Option<Vec<u8>>, HandshakeError> {
        match self.blobs.pop_front() {
            None if self.ended.is_some() => Err(HandshakeError::HungUp),
            blob => Ok(blob),
        }
    }

    pub(crate) fn rest(&mut self, deadline: Instant) -> Result<(), HandshakeError> {
        match self.has_notices() {
            true => self.make_room(deadline),
            false => self.wait(deadline),
        }
    }

    /// Announces a segment to the peer, now or in a later [`pump`](Control::pump).
    pub(crate) fn announce(&mut self, segment: Segment) {
        self.notices.push_back(Notice::Announce(segment));
        self.send_notices();
    }

    /// Withdraws a segment, or its queued announcement, so that a peer that does not read cannot
    /// keep the memory alive.
    pub(crate) fn withdraw(&mut self, number: u32) {
        let is_it = |notice: &Notice| {
            matches!(notice, Notice::Announce(segment)
                if segment.number() == number)
        };
        if let Some(untold) = self.notices.iter().position(is_it) {
            self.notices.remove(untold);
            return;
        }
        self.notices.push_back(Notice::Withdraw(number));
        self.send_notices();
    }

    fn send_notices(&mut self) {
        while let Some(notice) = self.notices.front() {
            let (packet, fds) = notice.packet();
            match self.socket.try_send(&packet, &fds) {
                Ok(()) => {}
                Err(HandshakeError::System(libc::EAGAIN)) => return,
                // The next read reports the broken connection.
                Err(_) => return self.notices.clear(),
            }
            self.notices.pop_front();
        }
    }

    /// Receives a bounded number of packets and sends queued notices, without blocking. Returns
    /// whether the socket is drained, or this process has no free descriptors.
    pub(crate) fn pump(&mut self) -> bool {
        self.send_notices();
        self.take_in()
    }

    fn take_in(&mut self) -> bool {
        let mut buffer = packet_buffer();
        for _ in 0..PASS {
            if self.ended.is_some() {
                return true;
            }
            let room = |packet: &[u8]| room(&self.extensions, packet);
            let received = self.socket.try_recv(&mut buffer, Senders::Unnamed, room);
            self.starved = matches!(received, Err(HandshakeError::System(libc::EMFILE)));
            match received {
                Ok(Some(Packet { len, fds, .. })) => self.file(&buffer[..len], fds),
                // Without free descriptors the packet stays in the socket. That is not the peer's
                // fault, so the link continues.
                Ok(None) | Err(HandshakeError::System(libc::EMFILE)) => return true,
                Err(error) => self.end(error),
            }
        }
        self.ended.is_some()
    }

    /// Waits for room in the socket. Also receives packets, because the peer may wait for room too.
    fn make_room(&mut self, deadline: Instant) -> Result<(), HandshakeError> {
        if self.ended.is_some() {
            return Err(HandshakeError::HungUp);
        }
        self.socket.wait(libc::POLLIN | libc::POLLOUT, deadline)?;
        self.take_in();
        Ok(())
    }

    /// Waits for the next packet and receives it. Checks the deadline first, because a peer may
    /// send unrelated packets endlessly.
    fn wait(&mut self, deadline: Instant) -> Result<(), HandshakeError> {
        if self.ended.is_some() {
            return Err(HandshakeError::HungUp);
        }
        if Instant::now() >= deadline {
            return Err(HandshakeError::Deadline);
        }
        let mut buffer = packet_buffer();
        match self.socket.recv(&mut buffer, |packet| room(&self.extensions, packet), deadline) {
            Ok(Packet { len, fds, .. }) => self.file(&buffer[..len], fds),
            Err(error @ (HandshakeError::Deadline | HandshakeError::System(libc::EMFILE))) => {
                return Err(error);
            }
            Err(error) => self.end(error),
        }
        Ok(())
    }

    fn end(&mut self, error: HandshakeError) {
        self.end_as(match error {
            HandshakeError::BadPacket | HandshakeError::Version { .. } => {
                PeerError::Protocol(Violation::Kind)
            }
            HandshakeError::Segment(_) => PeerError::Protocol(Violation::Region),
            // The process died. A process that closes its link sends a Bye first.
            _ => PeerError::Died,
        });
    }

    fn end_as(&mut self, why: PeerError) {
        self.ended = Some(why);
        // A closed socket stays readable, and would wake the owner again and again.
        self.watch = None;
    }

    fn file(&mut self, packet: &[u8], fds: Batch) {
        if let Err(error) = self.sort(packet, fds) {
            self.end(error);
        }
    }

    fn sort(&mut self, packet: &[u8], mut fds: Batch) -> Result<(), HandshakeError> {
        let (kind, mut body) = Reader::open(packet)?;
        match kind {
            PacketKind::Blob if self.blobs.len() < MAX_BLOBS => {
                self.blobs.push_back(body.rest().to_vec())
            }
            PacketKind::Announce => {
                let number = u32::from_ne_bytes(body.take()?);
                let len = u64::from_ne_bytes(body.take()?);
                body.end()?;
                let fd = fds.next().ok_or(HandshakeError::BadPacket)?;
                segment::verify(fd.as_fd(), len)?;
                if let Some(known) = self.segments.iter_mut().find(|known| known.number == number) {
                    // The peer announces the same memory again: a process never reuses a segment
                    // number.
                    known.withdrawn = false;
                } else if self.segments.iter().filter(|known| !known.withdrawn).count()
                    == self.max_segments
                {
                    return Err(HandshakeError::BadPacket);
                } else {
                    let new =
                        Announced { number, fd, len, mapping: None, users: 0, withdrawn: false };
                    self.segments.push(new);
                }
            }
            PacketKind::Withdraw => {
                let number = u32::from_ne_bytes(body.take()?);
                body.end()?;
                if let Some(known) = self.segments.iter_mut().find(|known| known.number == number) {
                    known.withdrawn = true;
                }
                self.drop_withdrawn();
            }
            PacketKind::Bye => {
                body.end()?;
                self.end_as(PeerError::Closed);
            }
            PacketKind::Ring => body.end()?,
            PacketKind::Extension(kind) => self.extensions.take(kind, body, &mut fds)?,
            PacketKind::Blob | PacketKind::Hello | PacketKind::Offer | PacketKind::Ready => {
                return Err(HandshakeError::BadPacket);
            }
        }
        if fds.next().is_some() { Err(HandshakeError::BadPacket) } else { Ok(()) }
    }

    fn drop_withdrawn(&mut self) {
        self.segments.retain(|segment| !segment.withdrawn || segment.users > 0);
    }

    /// Maps `len` bytes at `offset` of the peer's segment. Waits for the announcement until the
    /// deadline. [`release`](Control::release) undoes the import.
    pub(crate) fn import(
        &mut self,
        number: u32,
        offset: u64,
        len: u64,
        deadline: Instant,
    ) -> Result<NonNull<u8>, HandshakeError> {
        self.pump();
        while self.announced(number).is_none() {
            if self.starved {
                return Err(HandshakeError::System(libc::EMFILE));
            }
            self.wait(deadline)?;
        }
        self.map(number, offset, len, Mapping::new)
    }

    /// Like [`import`](Control::import), but does not wait: fails with [`HandshakeError::Deadline`]
    /// if the peer has not announced the segment. Takes the same time for any segment size.
    pub(crate) fn try_import(
        &mut self,
        number: u32,
        offset: u64,
        len: u64,
    ) -> Result<NonNull<u8>, HandshakeError> {
        self.pump();
        self.map(number, offset, len, Mapping::quickly)
    }

    fn announced(&mut self, number: u32) -> Option<&mut Announced> {
        self.segments.iter_mut().find(|known| known.number == number && !known.withdrawn)
    }

    fn map(
        &mut self,
        number: u32,
        offset: u64,
        len: u64,
        map: impl Fn(BorrowedFd<'_>, usize, Access) -> Result<Mapping, SegmentError>,
    ) -> Result<NonNull<u8>, HandshakeError> {
        let segment = self.announced(number).ok_or(HandshakeError::Deadline)?;
        match offset.checked_add(len) {
            Some(end) if end <= segment.len => {}
            _ => return Err(SegmentError::Range.into()),
        }
        let mapping = match segment.mapping.take() {
            Some(mapping) => mapping,
            // `sort` verified the size and the seals when the peer announced the segment.
            None => map(segment.fd.as_fd(), segment.len as usize, Access::Write)?,
        };
        // SAFETY: `offset <= segment.len` was checked above, and the mapping is `segment.len` bytes
        // long.
        let ptr = unsafe { mapping.ptr().add(offset as usize) };
        segment.mapping = Some(mapping);
        segment.users += 1;
        Ok(ptr)
    }

    /// Releases one import of a segment. The last release unmaps the segment.
    pub(crate) fn release(&mut self, number: u32) {
        if let Some(segment) = self.segments.iter_mut().find(|known| known.number == number) {
            segment.users = segment.users.saturating_sub(1);
            if segment.users == 0
                && let Some(mapping) = segment.mapping.take()
            {
                foreign::unmap(mapping);
            }
        }
        self.drop_withdrawn();
    }
}

fn room(extensions: &Extensions, packet: &[u8]) -> usize {
    match Reader::open(packet) {
        Ok((PacketKind::Announce, _)) => 1,
        Ok((PacketKind::Extension(kind), _)) => extensions.room(kind),
        _ => 0,
    }
}

/// Allocates a buffer for a packet of any length. Not kept per peer, because a rail has many peers
/// and most of them are silent.
fn packet_buffer() -> Vec<u8> {
    vec![0; MAX_PACKET]
}

impl Notice {
    fn packet(&self) -> (Cow<'_, [u8]>, Vec<BorrowedFd<'_>>) {
        match self {
            Notice::Announce(segment) => {
                let mut packet = Writer::new(PacketKind::Announce);
                packet
                    .put(segment.number().to_ne_bytes())
                    .put((segment.len() as u64).to_ne_bytes());
                (packet.finish().into(), vec![segment.fd()])
            }
            Notice::Withdraw(number) => {
                let mut packet = Writer::new(PacketKind::Withdraw);
                packet.put(number.to_ne_bytes());
                (packet.finish().into(), Vec::new())
            }
            Notice::Packet(packet, fds) => {
                (packet.into(), fds.as_deref().map(Descriptors::descriptors).unwrap_or_default())
            }
        }
    }
}

impl Drop for Control {
    /// Sends a Bye, which tells the peer that this end closed its link and did not die.
    fn drop(&mut self) {
        // If the Bye cannot be sent, the peer sees the socket close.
        let _ = self.socket.try_send(&Writer::new(PacketKind::Bye).finish(), &[]);
    }
}

#[cfg(test)]
mod tests;
