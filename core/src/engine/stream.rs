//! The two directions of one (context, peer): the send window with its operations, and the receive
//! window.

use core::mem::MaybeUninit;

use crate::mem::Zeroable;
use crate::sync::seq::Seq;

use super::list::{Fifo, NONE};
use super::window::Window;

/// Flag of [`Stream::fence`]: data posted as writes.
pub(crate) const WRITES: u8 = 1;

/// Flag of [`Stream::fence`]: data that travels in numbered messages.
pub(crate) const MESSAGES: u8 = 2;

/// Permanent flag of [`Stream::fence`], for failover: everything goes through the queue, which
/// records its posts.
pub(crate) const KEPT: u8 = 8;

/// Returns the bits that the fast path checks in addition to the bits of its data. An engine with
/// one rail never fails over, and skips the check.
pub(crate) const fn kept(rails: usize) -> u8 {
    if rails > 1 { KEPT } else { 0 }
}

/// The state of one (context, peer). Its size is a power of two of cache lines, so that indexing is
/// a shift. The first line holds everything that the fast path of a message writes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Stream {
    pub(crate) next: Seq,
    /// The number after the last silent operation that took no slot.
    pub(crate) silent_end: Seq,
    /// The peer has applied every number below this number.
    pub(crate) acked: Seq,
    pub(crate) ack_sent: Seq,
    /// Number of passes since an acknowledgement became due.
    pub(crate) age: u32,
    /// Operations in flight. If 0, everything that this context has sent to this peer is applied.
    pub(crate) open: u32,
    pub(crate) unposted: u32,
    /// Outstanding posts of silent operations without a slot.
    pub(crate) silent_posts: u32,
    pub(crate) peer: u16,
    pub(crate) generation: u16,
    pub(crate) context: u8,
    pub(crate) live: bool,
    /// Whether the stream is open and the peer has requested no acknowledgement of later numbers.
    /// If so, a tagged message need not be acknowledged early.
    pub(crate) unhurried: bool,
    /// Whether silent operations without a slot are in flight. Together they count as one open
    /// operation.
    pub(crate) silent: bool,
    /// Flags of the data that must wait for everything earlier: after a fence [`WRITES`],
    /// [`MESSAGES`] or both. The next operation with such data carries the fence and clears these
    /// flags. [`KEPT`] is permanent.
    pub(crate) fence: u8,
    /// Whether an acknowledgement is wanted soon and must be requested.
    pub(crate) ask: bool,
    pub(crate) due: bool,
    /// The kinds of data, [`WRITES`] and [`MESSAGES`], that the rails to the peer do not order. A
    /// fence must hold them back.
    pub(crate) holds: u8,
    /// The context and epoch bits of outgoing words.
    pub(crate) stamp: u32,

    /// Operations in order of issue, from submission to acknowledgement.
    pub(crate) ops: Fifo,
    /// Fully posted operations that need no acknowledgement. Each is removed when its last post
    /// completes.
    pub(crate) closing: Fifo,
    /// The tag of silent posts that have no slot: an [`Owner::Stream`](super::post_tag::Owner)
    /// without the size.
    pub(crate) tag: u64,
    /// The number up to which an acknowledgement was last requested.
    pub(crate) asked: Seq,
    /// The peer wants an acknowledgement once the cursor reaches this number.
    pub(crate) ack_wanted: Seq,
    pub(crate) lost: u32,
    pub(crate) due_next: u32,
    pub(crate) window: Window,
}

const _: () = assert!(core::mem::offset_of!(Stream, ops) == 64 && size_of::<Stream>() == 128);

// SAFETY: zeroed memory is a valid value, because all fields are numbers and flags.
unsafe impl Zeroable for Stream {}

impl Stream {
    /// Memory for a stream of a peer slot that was never reserved: all zeros.
    // SAFETY: all fields are numbers and flags, so zeros are a valid value.
    pub const EMPTY: Stream = unsafe { MaybeUninit::zeroed().assume_init() };

    /// Returns whether the stream is [`EMPTY`](Self::EMPTY). A stream that was set up is open, or
    /// [shut](Self::shut).
    pub(crate) fn is_empty(&self) -> bool {
        !self.live && self.acked == self.next
    }

    pub(crate) const fn new(context: u8, peer: u16, first: Seq) -> Stream {
        let mut stream = Stream {
            peer,
            generation: 0,
            context,
            live: false,
            unhurried: false,
            open: 0,
            unposted: NONE,
            ops: Fifo::EMPTY,
            closing: Fifo::EMPTY,
            next: first,
            acked: first,
            tag: 0,
            silent: false,
            silent_posts: 0,
            silent_end: first,
            fence: 0,
            ask: false,
            asked: first,
            lost: 0,
            stamp: 0,
            window: Window::new(0, first),
            ack_sent: first,
            ack_wanted: first,
            age: 0,
            due: false,
            holds: 0,
            due_next: NONE,
        };
        stream.shut();
        stream
    }

    /// Opens the stream. Posts carry the stamp `sends`, and only words with the stamp `takes` are
    /// accepted.
    pub(crate) fn open(&mut self, sends: u32, takes: u32) {
        (self.live, self.unhurried) = (true, true);
        (self.acked, self.stamp) = (self.next, sends);
        self.window.set_stamp(takes);
    }

    /// The stream appears to have more than a window in flight, and no word equals the expected
    /// one, so hot paths need no check of their own.
    pub(crate) const fn shut(&mut self) {
        (self.live, self.unhurried) = (false, false);
        self.acked = self.next.plus(1);
        // No word matches: words with this context go to another stream, and no valid stamp has a
        // bit of the sequence.
        self.window.set_stamp((!self.context as u32) << 24 | 1);
    }

    #[inline(always)]
    pub(crate) fn word(&self, mask: u32) -> u32 {
        self.stamp | self.next.low(mask)
    }

    /// Returns whether a post can take the next number at once. `data` combines [`WRITES`],
    /// [`MESSAGES`] or neither with [`kept`]. Returns `false` for a closed stream.
    #[inline(always)]
    pub(crate) fn clear(&self, window: u32, data: u8) -> bool {
        // An open stream has at most a window in flight, which fits in 32 bits.
        self.unposted == NONE && self.fence & data == 0 && (self.in_flight() as u32) < window
    }

    /// Records that the last number belongs to a silent operation without a slot. Returns how many
    /// operations this opens: 0 or 1.
    #[inline(always)]
    pub(crate) fn silent_until_next(&mut self) -> u32 {
        self.silent_end = self.next;
        if self.silent {
            return 0;
        }
        self.silent = true;
        self.open += 1;
        1
    }

    /// Ends the silent operations once all are acknowledged and none of their posts is outstanding.
    /// Returns how many operations this closes: 0 or 1.
    #[inline(always)]
    pub(crate) fn silent_over(&mut self) -> u32 {
        let over = self.silent && self.silent_posts == 0 && !self.acked.is_before(self.silent_end);
        self.silent &= !over;
        self.open -= over as u32;
        over as u32
    }

    /// Returns how many numbers are sent and not acknowledged. For a closed stream, returns more
    /// than any window.
    #[inline(always)]
    pub(crate) fn in_flight(&self) -> u64 {
        self.next.since(self.acked)
    }

    /// Returns how many numbers were applied here and not acknowledged to the peer.
    #[inline(always)]
    pub(crate) fn owed(&self) -> u64 {
        self.window.expected().since(self.ack_sent)
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Due {
    head: u32,
    tail: u32,
    pub(crate) len: u32,
}

impl Due {
    pub(crate) const EMPTY: Due = Due { head: NONE, tail: NONE, len: 0 };

    #[inline(always)]
    pub(crate) fn push(&mut self, streams: &mut [Stream], index: u32) {
        let stream = &mut streams[index as usize];
        if stream.due {
            return;
        }
        stream.due = true;
        stream.due_next = NONE;
        match self.tail {
            NONE => self.head = index,
            tail => streams[tail as usize].due_next = index,
        }
        self.tail = index;
        self.len += 1;
    }

    #[inline(always)]
    pub(crate) fn pop(&mut self, streams: &mut [Stream]) -> Option<u32> {
        let index = self.head;
        let stream = streams.get_mut(index as usize)?;
        stream.due = false;
        self.head = stream.due_next;
        if self.head == NONE {
            self.tail = NONE;
        }
        self.len -= 1;
        Some(index)
    }
}
