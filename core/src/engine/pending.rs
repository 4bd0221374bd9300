//! Operations in flight: a fixed table of slots, and the lists through it.
//!
//! An open slot is on the list of its stream until it is acknowledged. An ended slot waits until
//! its completion is taken. Nothing allocates.

use crate::error::{OpError, PeerError};
use crate::op::{Fault, Outcome, Token};
use crate::sync::seq::Seq;

use super::list::{Fifo, Links, Listed, NONE};
use super::protocol::Form;
use super::slots::{Name, Slot, Slots};
use super::submit::Notice;
use super::tag::Tag;
use super::wire::Body;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Open,
    /// The operation has completed, or the slot is free.
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    /// Numbered writes, then perhaps a numbered message.
    Write,
    /// Reads, which have no number.
    Read,
    Message,
    /// An atomic that a rail executes. It has no number.
    Atomic,
    Send,
    /// A put with its data in numbered messages, then perhaps a numbered message.
    Carry,
    /// A get with its data in messages.
    Fetch,
}

/// One operation, in four cache lines. The first line has most of what a fully posted operation
/// needs.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct PendingSlot {
    pub(crate) links: Links,
    pub(crate) name: Name,
    pub(crate) stream: u32,
    /// The number after the operation's last, once the operation is posted.
    pub(crate) end: Seq,
    /// Number of outstanding posts, and of parts of the payload that failover may have to post
    /// again.
    pub(crate) posts: u32,
    pub(crate) state: State,
    pub(crate) kind: OpKind,
    pub(crate) posted: bool,
    /// Whether every number is acknowledged. Also true without numbers.
    pub(crate) acked: bool,
    /// Whether the completion is reported. Of a silent operation, only a failure is counted.
    pub(crate) report: bool,
    /// Whether the failure of a reported send is counted too.
    pub(crate) counted: bool,
    /// Whether the writes wait until everything before them is acknowledged.
    pub(crate) fenced: bool,
    /// Whether a reply is expected, or a read may have to be posted again.
    pub(crate) fetch: bool,
    pub(crate) numbered: bool,
    pub(crate) tag: u64,
    /// The fetched value. For a [carried put](OpKind::Carry), the rail's id of the copy in
    /// progress.
    pub(crate) value: u64,
    pub(crate) outcome: Outcome,

    /// The start of the local memory not yet posted.
    pub(crate) local: *mut u8,
    pub(crate) local_region: u16,
    pub(crate) remote: u16,
    /// The offset of the unposted part in the imported region.
    pub(crate) offset: u64,
    pub(crate) left: u64,
    pub(crate) message: Option<Body>,

    /// Whether the operation belongs to the two-sided protocol, which handles its completion.
    pub(crate) inner: bool,
    /// Whether the receiver pulls the payload, under the request number `request`.
    pub(crate) pulled: bool,
    /// Whether a read must be posted again, because a failed rail has interrupted a part of it.
    /// Until then `fetch` keeps the operation open, and `request` is the length of the read.
    pub(crate) again: bool,
    pub(crate) request: u64,
    /// Bytes that a [fetch](OpKind::Fetch) has requested. `request` of them have not arrived.
    pub(crate) asked: u64,
    pub(crate) pull_next: u32,
    pub(crate) form: Form,
    pub(crate) envelope: Tag,
    /// The block that holds the payload of a tagged message, or [`NONE`].
    pub(crate) outgoing: u32,
}

// SAFETY: the pointer names registered memory or a span, which any thread may access, as
// `Region::new` and `Span::new` require. Otherwise it names a block of the engine, or the bytes of
// an inject during one call.
unsafe impl Send for PendingSlot {}

impl PendingSlot {
    /// A slot without an operation.
    pub const EMPTY: PendingSlot = PendingSlot {
        links: Links::NONE,
        name: Name::FRESH,
        stream: 0,
        posts: 0,
        state: State::Ended,
        kind: OpKind::Message,
        posted: false,
        acked: false,
        report: false,
        counted: false,
        fenced: false,
        fetch: false,
        numbered: false,
        end: Seq(0),
        outcome: Outcome::Done,
        value: 0,
        tag: 0,
        local: core::ptr::null_mut(),
        local_region: 0,
        remote: 0,
        offset: 0,
        left: 0,
        message: None,
        inner: false,
        pulled: false,
        again: false,
        request: 0,
        asked: 0,
        pull_next: NONE,
        form: Form::Eager,
        envelope: Tag::ZERO,
        outgoing: NONE,
    };

    /// Makes the slot a fully posted operation with `posts` posts outstanding. `end` is the number
    /// after the operation's last number.
    #[inline(always)]
    pub(crate) fn set_posted(&mut self, stream: u32, posts: u32, end: Seq, notice: Notice) {
        (self.stream, self.posts, self.end) = (stream, posts, end);
        (self.state, self.posted, self.acked, self.numbered) = (State::Open, true, false, true);
        (self.kind, self.fenced, self.fetch, self.inner) = (OpKind::Message, false, false, false);
        (self.outcome, self.value) = (Outcome::Done, 0);
        (self.report, self.tag) = match notice {
            Notice::Report(tag) => (true, tag),
            Notice::Silent => (false, 0),
        };
    }

    /// Returns whether a quiet reports the failure of this operation.
    #[cold]
    pub(crate) fn is_counted(&self) -> bool {
        !self.inner && (!self.report || self.kind == OpKind::Send && self.counted)
    }

    #[inline(always)]
    pub(crate) fn token(&self) -> Token {
        Token(self.name.word())
    }

    pub(crate) fn set_open(&mut self, stream: u32, kind: OpKind, notice: Notice) {
        let (report, tag) = match notice {
            Notice::Report(tag) => (true, tag),
            Notice::Silent => (false, 0),
        };
        let name = self.name;
        *self = PendingSlot {
            name,
            stream,
            state: State::Open,
            kind,
            report,
            tag,
            ..PendingSlot::EMPTY
        };
    }

    /// Returns whether the operation still needs its pointer into this registered region. Does not
    /// cover outstanding posts, because the rails know them.
    #[cold]
    pub(crate) fn uses_local(&self, region: u16) -> bool {
        if self.state != State::Open || self.local_region != region {
            return false;
        }
        match self.kind {
            OpKind::Read | OpKind::Fetch if self.fetch => true,
            _ if self.left == 0 => false,
            // The receiver reads the payload, or requests chunks of it, until the send has ended.
            OpKind::Send => !self.posted || self.fetch,
            OpKind::Write | OpKind::Read | OpKind::Message | OpKind::Atomic => !self.posted,
            OpKind::Carry | OpKind::Fetch => !self.posted,
        }
    }

    #[cold]
    pub(crate) fn uses_remote(&self, region: u16) -> bool {
        let again = self.kind == OpKind::Read && self.fetch;
        let open = self.state == State::Open && (!self.posted || again) && self.remote == region;
        open && match self.kind {
            OpKind::Read if again => true,
            OpKind::Write | OpKind::Read | OpKind::Carry | OpKind::Fetch => self.left != 0,
            OpKind::Atomic => self.message.is_some(),
            OpKind::Message => false,
            OpKind::Send => false,
        }
    }

    /// The first failure counts, but one after which data may still land takes precedence.
    #[cold]
    pub(crate) fn fail(&mut self, fault: Fault, quiescent: bool) {
        if self.kind == OpKind::Carry {
            self.value = 0;
        }
        match self.outcome {
            Outcome::Unknown(_) => {}
            Outcome::Failed(first) if !quiescent => self.outcome = Outcome::Unknown(first),
            Outcome::Failed(_) => {}
            Outcome::Done if quiescent => self.outcome = Outcome::Failed(fault),
            Outcome::Done => self.outcome = Outcome::Unknown(fault),
        }
    }

    /// Fails a send that no receive has matched, because the peer closes. The peer may still
    /// receive a payload that it has.
    #[cold]
    pub(crate) fn fail_unmatched(&mut self) {
        self.fail(Fault::Peer(PeerError::Closed), self.form == Form::Request);
        self.fetch = false;
    }
}

impl Listed for PendingSlot {
    #[inline(always)]
    fn links(&self) -> Links {
        self.links
    }

    #[inline(always)]
    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Slot for PendingSlot {
    #[inline(always)]
    fn name(&self) -> Name {
        self.name
    }

    #[inline(always)]
    fn name_mut(&mut self) -> &mut Name {
        &mut self.name
    }
}

pub(crate) struct Pending<'m> {
    pub slots: Slots<'m, PendingSlot>,
    /// Completed operations with a completion to take, oldest first.
    pub ended: Fifo,
    /// Number of completions so far, of operations and of receives.
    pub ends: u64,
}

impl<'m> Pending<'m> {
    pub(crate) fn new(slots: &'m mut [PendingSlot]) -> Self {
        Pending { slots: Slots::new(slots, PendingSlot::EMPTY), ended: Fifo::EMPTY, ends: 0 }
    }

    /// Queues the completion of an operation that is on no list, or frees its slot.
    #[inline(always)]
    pub(crate) fn end(&mut self, index: u32, report: bool) {
        if report {
            let slot = &mut self.slots[index as usize];
            // An ended operation has no numbers, so this field now orders completions.
            (slot.state, slot.end) = (State::Ended, Seq(self.ends));
            self.ends += 1;
            self.ended.push(&mut self.slots, index);
        } else {
            self.free(index);
        }
    }

    #[inline(always)]
    pub(crate) fn free(&mut self, index: u32) {
        self.slots[index as usize].state = State::Ended;
        self.slots.free(index);
    }

    #[inline]
    pub(crate) fn find(&self, token: Token) -> Result<u32, OpError> {
        self.slots.find(token.0).ok_or(OpError::StaleToken)
    }
}
