//! Packets of other packages over the socket of a link. A package names its kinds and says what it
//! makes of them by an [`Extension`], and reaches the socket through a [`Line`]. Slow path, as all
//! of [`control`](super).
//!
//! An extension is there from the first call of [`Line::extension`] on. What arrives before breaks
//! the protocol, as every unknown kind does: register it before anything is exchanged that the peer
//! answers. Nothing is taken out of the socket before the first exchange, import, or pass of a
//! rail.

use std::any::Any;
use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use fishplate_core::error::{PeerError, Violation};

use super::{Control, Notice};
use crate::error::HandshakeError;
use crate::foreign::Batch;
use crate::packet::{EXTENSIONS, Nonce, Reader};
use crate::segment::Segment;

/// Packets of extensions that wait for room in the socket, before their senders are refused.
const MAX_QUEUED: usize = 1024;

/// Notices that wait for room in the socket before the peer fails:
/// it makes us answer but does not read.
const MAX_NOTICES: usize = 16 * 1024;

/// What one end of a link knows of another package's packets. It dies with the link.
pub trait Extension: Any + Debug + Send {
    /// Its kinds of packets: within [`EXTENSIONS`], and no other extension's. Of two that share a
    /// kind, the one that was registered first gets it.
    const KINDS: RangeInclusive<u16>;

    /// Segments that it announces at most, beside those of the rail's regions.
    const SEGMENTS: u16;

    /// The state at the start of a link. `home`: the peer is this very process.
    fn new(home: bool) -> Self;

    /// Takes in a packet of one of its kinds, with its descriptors, from a peer that is not
    /// trusted. Must not wait, and bounds what it keeps. A descriptor that it does not take breaks
    /// the protocol.
    ///
    /// # Errors
    /// Any error ends the link.
    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError>;

    /// A packet with descriptors could not be taken in,
    /// for want of descriptors here: its content is lost.
    fn lost(&mut self);
}

/// An [`Extension`] whose type is not known.
trait Handler: Any + Debug + Send {
    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError>;
    fn lost(&mut self);
}

impl<E: Extension> Handler for E {
    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError> {
        Extension::take(self, kind, body, fds)
    }

    fn lost(&mut self) {
        Extension::lost(self);
    }
}

/// The extensions of one link: as many as there are types of them.
#[derive(Debug, Default)]
pub(super) struct Extensions(Vec<(RangeInclusive<u16>, Box<dyn Handler>)>);

impl Extensions {
    pub(super) fn take(
        &mut self,
        kind: u16,
        body: Reader<'_>,
        fds: &mut Batch,
    ) -> Result<(), HandshakeError> {
        let owner = self.0.iter_mut().find(|(kinds, _)| kinds.contains(&kind));
        owner.ok_or(HandshakeError::BadPacket)?.1.take(kind, body, fds)
    }

    pub(super) fn lost(&mut self) {
        self.0.iter_mut().for_each(|(_, extension)| extension.lost());
    }

    fn find<E: Extension>(&self) -> Option<usize> {
        self.0.iter().position(|(_, extension)| (&**extension as &dyn Any).is::<E>())
    }
}

/// What holds descriptors that go with a packet.
pub trait Descriptors: Debug + Send + Sync {
    /// They, in order; at most [`MAX_FDS`](crate::extension::MAX_FDS).
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
}

/// The socket to one peer, as an [`Extension`] uses it.
#[derive(Debug)]
pub struct Line<'a> {
    control: &'a mut Control,
    pidfd: Option<BorrowedFd<'a>>,
}

impl<'a> Line<'a> {
    pub(crate) fn new(control: &'a mut Control, pidfd: Option<&'a OwnedFd>) -> Self {
        Line { control, pidfd: pidfd.map(AsFd::as_fd) }
    }

    /// The state of an extension, which is registered if it is not yet.
    pub fn extension<E: Extension>(&mut self) -> &mut E {
        const { assert!(*E::KINDS.start() >= *EXTENSIONS.start(), "kinds of the protocol itself") };
        let control = &mut *self.control;
        let at = control.extensions.find::<E>().unwrap_or_else(|| {
            control.max_segments += usize::from(E::SEGMENTS);
            control.extensions.0.push((E::KINDS, Box::new(E::new(control.home))));
            control.extensions.0.len() - 1
        });
        let (_, extension) = &mut control.extensions.0[at];
        match (&mut **extension as &mut dyn Any).downcast_mut() {
            Some(extension) => extension,
            None => unreachable!("found by its type, or just made"),
        }
    }

    /// The peer's nonce: which life of which process this is.
    pub fn incarnation(&self) -> Nonce {
        self.control.incarnation
    }

    /// The socket, to wait for.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.control.fd()
    }

    /// The peer's process, to wait for its end, if it is known.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd
    }

    /// Why nothing more will come, if so.
    pub fn ended(&self) -> Option<PeerError> {
        self.control.ended()
    }

    /// The peer's process is known to be gone.
    pub fn died(&mut self) {
        self.control.ended.get_or_insert(PeerError::Died);
    }

    /// Whether something waits for room in the socket.
    pub fn has_notices(&self) -> bool {
        self.control.has_notices()
    }

    /// Whether [`tell`](Line::tell) would not make the queue any longer than it may be.
    pub fn has_room(&self) -> bool {
        self.control.notices.len() < MAX_QUEUED
    }

    /// Sends a packet, and descriptors with it, now or in a later [`pump`](Line::pump).
    pub fn tell(&mut self, packet: Vec<u8>, fds: Option<Arc<dyn Descriptors>>) {
        let control = &mut *self.control;
        if control.ended.is_some() {
            return;
        }
        if control.notices.len() == MAX_NOTICES {
            control.ended = Some(PeerError::Protocol(Violation::Credit));
            return control.notices.clear();
        }
        control.notices.push_back(Notice::Extension(packet, fds));
        control.send_notices();
    }

    /// Takes in what has arrived, a bounded number of packets, and sends what waits, without
    /// waiting. Whether nothing more is to come for now.
    pub fn pump(&mut self) -> bool {
        self.control.pump()
    }

    /// See [`Link::exchange`](crate::Link::exchange).
    ///
    /// # Errors
    /// The peer hung up, broke the protocol, or did not answer in time.
    pub fn exchange(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<u8>, HandshakeError> {
        self.control.exchange(blob, deadline)
    }

    /// Tells the peer of a segment, now or in a later [`pump`](Line::pump).
    pub fn announce(&mut self, segment: Segment) {
        self.control.announce(segment);
    }

    /// Tells the peer that the segment of that number is not used any more.
    pub fn withdraw(&mut self, number: u32) {
        self.control.withdraw(number);
    }

    /// Where `len` bytes at `offset` of the peer's segment of that number are mapped here, until
    /// they are [released](Line::release) or the link ends. Waits until the peer has announced the
    /// segment.
    ///
    /// # Errors
    /// The deadline expired, the peer is gone, or the range does not lie inside the segment.
    pub fn import(
        &mut self,
        number: u32,
        offset: u64,
        len: u64,
        deadline: Instant,
    ) -> Result<NonNull<u8>, HandshakeError> {
        self.control.import(number, offset, len, deadline)
    }

    /// Gives back one import.
    ///
    /// # Safety
    /// The caller imported that segment through this link, has not released it, and no longer uses
    /// its memory.
    pub unsafe fn release(&mut self, number: u32) {
        self.control.release(number);
    }

    /// Leaves a segment of the peer mapped for good: a device may still be writing into it.
    #[cold]
    pub fn keep(&mut self, number: u32) {
        if let Some(segment) = self.control.segments.iter_mut().find(|known| known.number == number) {
            std::mem::forget(segment.mapping.take());
        }
    }
}
