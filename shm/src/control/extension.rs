//! Carries packets of other packages over the socket of a link. A package declares and handles its
//! packet kinds in an [`Extension`], and sends through a [`Line`]. Slow path, like all of
//! [`control`](super).
//!
//! The first call of [`Line::extension`] registers an extension. If one of its packets arrives
//! earlier, its kind is unknown, which is a violation. So register it before any exchange with the
//! peer. Nothing is received before the first exchange, import, or pass of a rail.

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

/// Number of notices waiting for room in the socket at which [`Line::has_room`] returns false.
const MAX_QUEUED: usize = 1024;

/// At this limit, a further packet fails the peer, because the peer requests replies without
/// reading them.
const MAX_NOTICES: usize = 16 * 1024;

/// The state of another package at one end of a link, which handles that package's packets. Dropped
/// with the link.
pub trait Extension: Any + Debug + Send {
    /// The packet kinds of this extension, within [`EXTENSIONS`]. If two extensions share a kind,
    /// the extension that was registered first handles it.
    const KINDS: RangeInclusive<u16>;

    /// Maximum number of segments that this extension announces, in addition to the rail's
    /// segments.
    const SEGMENTS: u16;

    /// Maximum number of descriptors in one packet.
    const DESCRIPTORS: usize;

    /// Creates the state when the extension is registered. `home` is `true` if the peer is this
    /// same process.
    fn new(home: bool) -> Self;

    /// Handles a packet from an untrusted peer, and takes its descriptors from `fds`. Must not
    /// block, and must bound the state that it keeps. A descriptor left in `fds` is a violation.
    ///
    /// # Errors
    /// An error ends the link.
    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError>;
}

trait Handler: Any + Debug + Send {
    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError>;
}

impl<E: Extension> Handler for E {
    fn take(&mut self, kind: u16, body: Reader<'_>, fds: &mut Batch) -> Result<(), HandshakeError> {
        Extension::take(self, kind, body, fds)
    }
}

/// One per type.
#[derive(Debug, Default)]
pub(super) struct Extensions(Vec<Registered>);

#[derive(Debug)]
struct Registered {
    kinds: RangeInclusive<u16>,
    descriptors: usize,
    handler: Box<dyn Handler>,
}

impl Extensions {
    pub(super) fn take(
        &mut self,
        kind: u16,
        body: Reader<'_>,
        fds: &mut Batch,
    ) -> Result<(), HandshakeError> {
        let owner = self.0.iter_mut().find(|extension| extension.kinds.contains(&kind));
        owner.ok_or(HandshakeError::BadPacket)?.handler.take(kind, body, fds)
    }

    pub(super) fn room(&self, kind: u16) -> usize {
        self.0
            .iter()
            .find(|extension| extension.kinds.contains(&kind))
            .map_or(0, |it| it.descriptors)
    }

    fn find<E: Extension>(&self) -> Option<usize> {
        self.0.iter().position(|extension| (&*extension.handler as &dyn Any).is::<E>())
    }
}

/// Owns descriptors to send with a packet.
pub trait Descriptors: Debug + Send + Sync {
    /// Returns the descriptors in order: at most [`MAX_FDS`](crate::extension::MAX_FDS).
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

    /// Returns the state of an extension. The first call registers the extension.
    pub fn extension<E: Extension>(&mut self) -> &mut E {
        const {
            assert!(
                *E::KINDS.start() >= *EXTENSIONS.start(),
                "E::KINDS overlaps the protocol's own packet kinds; start at EXTENSIONS"
            )
        };
        let control = &mut *self.control;
        let at = control.extensions.find::<E>().unwrap_or_else(|| {
            control.max_segments += usize::from(E::SEGMENTS);
            control.extensions.0.push(Registered {
                kinds: E::KINDS,
                descriptors: E::DESCRIPTORS,
                handler: Box::new(E::new(control.home)),
            });
            control.extensions.0.len() - 1
        });
        match (&mut *control.extensions.0[at].handler as &mut dyn Any).downcast_mut() {
            Some(extension) => extension,
            None => unreachable!("found by its type, or just created"),
        }
    }

    /// Returns the peer's nonce, which identifies this connection of its process.
    pub fn incarnation(&self) -> Nonce {
        self.control.incarnation
    }

    /// Returns the socket, for `poll(2)`.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.control.fd()
    }

    /// Returns the peer's pidfd, for `poll(2)`, if it is known.
    pub fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd
    }

    /// Returns why the connection ended, or `None` if it is open.
    pub fn ended(&self) -> Option<PeerError> {
        self.control.ended()
    }

    /// Records that the peer's process has exited.
    pub fn died(&mut self) {
        self.control.ended.get_or_insert(PeerError::Died);
    }

    /// Returns whether notices wait for room in the socket.
    pub fn has_notices(&self) -> bool {
        self.control.has_notices()
    }

    /// Returns whether so few packets are queued that the caller may add an optional one.
    /// [`tell`](Line::tell) accepts more.
    pub fn has_room(&self) -> bool {
        self.control.notices.len() < MAX_QUEUED
    }

    /// Sends a packet with descriptors, now or in a later [`pump`](Line::pump).
    pub fn tell(&mut self, packet: Vec<u8>, fds: Option<Arc<dyn Descriptors>>) {
        let control = &mut *self.control;
        if control.ended.is_some() {
            return;
        }
        if control.notices.len() == MAX_NOTICES {
            control.ended = Some(PeerError::Protocol(Violation::Credit));
            return control.notices.clear();
        }
        control.notices.push_back(Notice::Packet(packet, fds));
        control.send_notices();
    }

    /// Receives a bounded number of packets and sends queued packets, without blocking. Returns
    /// whether the socket is drained.
    pub fn pump(&mut self) -> bool {
        self.control.pump()
    }

    /// Exchanges bytes with the peer, as [`Link::exchange`](crate::Link::exchange) does.
    ///
    /// # Errors
    /// The peer hung up, broke the protocol, or did not answer in time.
    pub fn exchange(&mut self, blob: &[u8], deadline: Instant) -> Result<Vec<u8>, HandshakeError> {
        self.control.exchange(blob, deadline)
    }

    /// Begins an exchange: sends the bytes, now or in a later [`pump`](Line::pump).
    ///
    /// # Errors
    /// The blob is longer than [`MAX_BLOB`](crate::MAX_BLOB).
    pub fn send_blob(&mut self, blob: &[u8]) -> Result<(), HandshakeError> {
        self.control.send_blob(blob)
    }

    /// Completes an exchange: returns the peer's bytes, or `None` if they have not arrived. Does
    /// not wait.
    ///
    /// # Errors
    /// The peer hung up, or broke the protocol.
    pub fn take_blob(&mut self) -> Result<Option<Vec<u8>>, HandshakeError> {
        self.control.take_blob()
    }

    /// Waits until a packet has arrived, or a queued packet can be sent.
    ///
    /// # Errors
    /// The deadline expired, or the peer is gone.
    pub fn rest(&mut self, deadline: Instant) -> Result<(), HandshakeError> {
        self.control.rest(deadline)
    }

    /// Announces a segment to the peer, now or in a later [`pump`](Line::pump).
    pub fn announce(&mut self, segment: Segment) {
        self.control.announce(segment);
    }

    /// Withdraws our segment with this number.
    pub fn withdraw(&mut self, number: u32) {
        self.control.withdraw(number);
    }

    /// Maps `len` bytes at `offset` of the peer's segment, until they are [released](Line::release)
    /// or the link ends. Waits until the peer has announced the segment.
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

    /// Releases one import of the peer's segment `number`.
    ///
    /// # Safety
    /// The caller imported the segment through this link, has not released that import, and no
    /// longer uses its memory.
    pub unsafe fn release(&mut self, number: u32) {
        self.control.release(number);
    }

    /// Leaks the mapping of a peer's segment, because a device may still write into it.
    #[cold]
    pub fn keep(&mut self, number: u32) {
        if let Some(segment) = self.control.segments.iter_mut().find(|known| known.number == number)
        {
            std::mem::forget(segment.mapping.take());
        }
    }
}
