//! A slot of the table of requests: a receive, or another request of a matched queue.

use crate::error::PeerError;
use crate::mem::{PeerId, Span};
use crate::op::Fault;

use super::super::list::{Links, Listed, NONE};
use super::super::slots::{Name, Slot};
use super::super::tag::{ReceiveId, Tag, UnexpectedId};
use super::head;
use super::request::{Destination, Envelope, Received, Request, Status};

/// The region number of memory that is not registered.
pub(in super::super) const UNREGISTERED: u16 = u16::MAX;

#[derive(Clone, Copy)]
pub(super) struct Buffer {
    pub ptr: *mut u8,
    pub len: u64,
    pub region: u16,
}

impl Buffer {
    /// The buffer of a receive that drops its message.
    pub const NONE: Buffer = Buffer { ptr: core::ptr::null_mut(), len: 0, region: UNREGISTERED };

    #[inline(always)]
    pub fn span(span: Span) -> Self {
        Buffer { ptr: span.ptr().as_ptr(), len: span.len() as u64, region: UNREGISTERED }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Posted,
    /// Matched. The payload must be read. If the value is `true`, the payload cannot be read, and
    /// must be pulled in chunks.
    Read(bool),
    Reading,
    Chunks,
    /// The payload has arrived, is lost or is refused; a Fin is due. If the value is `true`, the
    /// message matched after its peer began to close, and a Bye does not wait for the Fin.
    Tell(bool),
    ReadDevice,
    ReadingDevice,
    /// Like `Chunks`, but the chunks go into one of our outgoing blocks, and then to device memory.
    ChunksDevice,
    /// The payload is in a block kept for its sender, and must be copied to device memory. The
    /// value means the same as that of `Tell`.
    Place(bool),
    /// Like `Place(false)`, but the payload is in one of our outgoing blocks.
    PlaceOurs,
    /// In no list. The pass that took the receive off the due list continues it, even if its sender
    /// fails.
    InHand,
    /// A send of a matched queue that waits for room.
    Deferred,
    /// A send of a matched queue in flight. The completion of its operation ends it.
    Sending,
    /// A message that a matched queue has claimed.
    Claimed,
    /// The program has taken the request off the list of ended ones, and must free it.
    Dequeued,
    /// The request has ended, or the slot is free.
    Ended,
}

impl Stage {
    /// Returns whether the request is a receive that has not ended.
    fn receives(self) -> bool {
        use Stage::*;
        !matches!(self, Deferred | Sending | Claimed | Dequeued | Ended)
    }

    #[cold]
    pub(super) fn is_rendezvous(self) -> bool {
        use Stage::*;
        matches!(self, Reading | Chunks | ReadingDevice | ChunksDevice | PlaceOurs)
    }
}

/// How much of its message a receive got. For `Told`, `outcome` has the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    Whole,
    Cut,
    Told,
}

/// The sender of a message, as one word, so that a load is as wide as the store. A load that spans
/// several stores cannot be forwarded. Such a load waits until all earlier stores have retired,
/// including those to a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sender(u32);

impl Sender {
    /// No sender yet. No peer has this value, because no peer has the number 65535.
    pub(crate) const NONE: Sender = Sender(u32::MAX);

    #[inline(always)]
    pub(crate) fn new(peer: PeerId) -> Self {
        Sender(peer.index as u32 | (peer.generation as u32) << 16)
    }

    #[inline(always)]
    pub(crate) fn get(self) -> Option<PeerId> {
        let peer = PeerId { index: self.0 as u16, generation: (self.0 >> 16) as u16 };
        (peer.index != u16::MAX).then_some(peer)
    }
}

/// A receive or another request of a matched queue, in four cache lines. A match of an expected
/// message uses two of them.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct RecvSlot {
    pub(crate) links: Links,
    pub(crate) name: Name,
    pub(crate) ptr: *mut u8,
    pub(crate) capacity: u64,
    pub(crate) word: u64,
    pub(crate) len: u64,
    pub(crate) tag: Tag,

    pub(crate) delivered: u64,
    pub(crate) order: u64,
    pub(crate) posted: ReceiveId,
    pub(crate) source: Sender,
    pub(crate) region: u16,
    pub(crate) stage: Stage,
    pub(crate) fit: Fit,
    /// Whether to drop the status when the receive ends.
    pub(crate) unclaimed: bool,
    /// Whether this is a send. Its receiver is in `source`.
    pub(crate) sends: bool,
    /// Whether a deferred send is synchronous.
    pub(crate) sync: bool,
    pub(crate) stream: u32,
    pub(crate) header: u32,
    /// The sender's token of the send. In stage `ChunksDevice`, the block that the chunks fill.
    pub(crate) token: u64,
    /// Bytes that must still arrive in chunks. In stages `Place` and `PlaceOurs`, the block to
    /// copy.
    pub(crate) left: u64,

    /// The result, if the message is neither whole nor truncated.
    outcome: Received,
    /// The memory of a deferred send.
    pub(crate) from: Destination,
    /// For a deferred send: the next deferred send to the same peer.
    pub(crate) behind: u32,
    /// For the first deferred send to a peer: the last deferred send to that peer.
    pub(crate) last: u32,
    /// In stage `Claimed`, the message.
    pub(crate) claimed: UnexpectedId,
}

const _: () = assert!(size_of::<RecvSlot>() == 256);

// SAFETY: its pointers name registered memory or spans. `Region::new` and `Span::new` require that
// any thread may access them.
unsafe impl Send for RecvSlot {}

impl RecvSlot {
    /// A free slot.
    pub const EMPTY: RecvSlot = RecvSlot {
        links: Links::NONE,
        name: Name::FRESH,
        ptr: core::ptr::null_mut(),
        capacity: 0,
        word: 0,
        len: 0,
        tag: Tag { lo: 0, hi: 0 },
        delivered: 0,
        order: 0,
        posted: ReceiveId::NONE,
        source: Sender::NONE,
        region: 0,
        stage: Stage::Ended,
        fit: Fit::Whole,
        unclaimed: false,
        sends: false,
        sync: false,
        stream: NONE,
        header: NONE,
        token: 0,
        left: 0,
        outcome: Received::Ok,
        from: Destination::Nothing,
        behind: NONE,
        last: NONE,
        claimed: UnexpectedId::NONE,
    };

    #[cold]
    pub(crate) fn uses(&self, region: u16) -> bool {
        self.stage.receives() && self.capacity != 0 && self.region == region
    }

    pub(crate) fn is_moving(&self) -> bool {
        self.stage.receives() && self.stage != Stage::Posted
    }

    /// Returns whether this receive drops its message, and no status will be taken.
    #[cold]
    pub(crate) fn is_discarded(&self) -> bool {
        self.stage.receives() && self.unclaimed && self.capacity == 0
    }

    /// Returns whether the message must be received or answered before a Bye to its sender.
    pub(crate) fn delays_bye(&self) -> bool {
        self.is_moving() && !matches!(self.stage, Stage::Tell(true) | Stage::Place(true))
    }

    #[inline(always)]
    pub(super) fn receive(&mut self, buffer: &Buffer, word: u64, posted: ReceiveId) -> Request {
        (self.ptr, self.capacity, self.region, self.word) =
            (buffer.ptr, buffer.len, buffer.region, word);
        (self.stage, self.unclaimed, self.sends) = (Stage::Posted, false, false);
        (self.posted, self.source) = (posted, Sender::NONE);
        (self.delivered, self.header) = (0, NONE);
        self.request()
    }

    /// Returns whether the slot has the request with this name, and the request has ended.
    #[inline(always)]
    pub(crate) fn is_ended(&self, name: u64) -> bool {
        self.name.word() == name && self.stage == Stage::Ended
    }

    /// Writes a send that has completed.
    #[inline(always)]
    pub(crate) fn write_send(&mut self, to: PeerId, tag: Tag, len: u64, word: u64) {
        (self.source, self.tag, self.word) = (Sender::new(to), tag, word);
        (self.len, self.delivered) = (len, len);
        (self.stage, self.fit, self.unclaimed, self.sends) =
            (Stage::Ended, Fit::Whole, false, true);
    }

    #[inline(always)]
    pub(crate) fn request(&self) -> Request {
        Request(self.name.word())
    }

    #[inline(always)]
    pub(crate) fn fit(&self, len: u64) -> (u64, Fit) {
        if len <= self.capacity { (len, Fit::Whole) } else { (self.capacity, Fit::Cut) }
    }

    #[cold]
    pub(crate) fn spoil(&mut self, outcome: Received) {
        if self.source == Sender::NONE {
            // The slot has the tag and the length of an earlier message.
            (self.tag, self.len) = (Tag::ZERO, 0);
        }
        (self.fit, self.outcome, self.delivered) = (Fit::Told, outcome, 0);
    }

    #[inline(always)]
    pub(crate) fn outcome(&self) -> Received {
        match self.fit {
            Fit::Whole => Received::Ok,
            Fit::Cut => Received::Truncated,
            Fit::Told => self.outcome,
        }
    }

    #[inline(always)]
    pub(super) fn status(&self) -> Status {
        Status {
            request: self.request(),
            word: self.word,
            outcome: self.outcome(),
            envelope: self.source.get().map(|source| Envelope {
                source,
                tag: self.tag,
                len: self.len,
            }),
            delivered: self.delivered,
            order: self.order,
        }
    }

    pub(crate) fn fin_op(&self) -> u8 {
        match (self.fit, self.outcome) {
            (Fit::Told, Received::Failed(Fault::Peer(PeerError::Closed))) => head::CLOSING,
            (Fit::Told, Received::Failed(_) | Received::Unknown(_)) => head::FAILED,
            _ => head::RECEIVED,
        }
    }
}

/// Flag in the matcher's context of a receive into device memory. The flag makes the slot number
/// out of range, so the fast path misses.
pub(super) const DEVICE: u64 = 1 << 31;

impl Listed for RecvSlot {
    #[inline(always)]
    fn links(&self) -> Links {
        self.links
    }

    #[inline(always)]
    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Slot for RecvSlot {
    #[inline(always)]
    fn name(&self) -> Name {
        self.name
    }

    #[inline(always)]
    fn name_mut(&mut self) -> &mut Name {
        &mut self.name
    }
}
