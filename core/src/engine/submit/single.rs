//! The usual numbered operation: one post, nothing before it that waits, room everywhere. It is posted at once. One that is
//! reported takes its slot afterwards, with nothing in it that is left to do; a silent one takes none: its stream counts its
//! post, and the cursor that passes its number says the rest.
//!
//! `None` means that nothing has changed and that the operation goes into the queue. A rail that refuses is asked again from
//! there, and it is there that a refusal is dealt with.

use core::ptr::NonNull;

use crate::error::PostError;
use crate::mem::{Peer, Untrusted};
use crate::op::Token;
use crate::rail::{Local, Posted, Rail, Remote};
use crate::sync::seq::{Seq, truncate};

use super::super::pending::NONE;
use super::super::wire::{Body, HEAD_MAX, Message, Owner, PostTag, STREAM_POST_MAX, write_word};
use super::super::{Engine, State};
use super::queue::Target;
use super::{Issued, Notice};

/// What one post needs to know.
struct Way {
    peer: u16,
    context: u8,
    rail: usize,
    seq: Seq,
    /// The slot that the operation will take; [`NONE`] for a silent one.
    index: u32,
    /// The tag of its post, but for the bytes.
    tag: u64,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// Posts a write that is one piece. A `from_region` that does not exist: an inject, which the rail copies at once.
    #[inline(always)]
    pub(super) fn write_single(
        &mut self,
        stream: u32,
        from: NonNull<u8>,
        from_region: u32,
        len: usize,
        to: &Target,
        notice: Notice,
    ) -> Option<Issued> {
        let state = &mut self.state;
        let way = state.way(stream, notice)?;
        let bytes = len as u64;
        if len == 0 || bytes > STREAM_POST_MAX || state.piece(bytes, way.rail, false) != bytes {
            return None;
        }
        let desc = state.locals.get(from_region as usize).map_or(0, |region| region.desc[way.rail]);
        let key = state.remotes.get(to.region as usize)?.keys[way.rail];
        let local = Local { ptr: from, len, desc };
        let remote = Remote { key, offset: to.offset };
        let word = Some(write_word(way.context, way.seq));
        // SAFETY: the range was checked by the caller, and the source stays as it is until the operation ends (the promise of
        // `Region::new`), that of an inject during the call.
        let posted =
            unsafe { self.rails[way.rail].post_write(Peer(way.peer), local, remote, word, way.tag | bytes) };
        self.state.single_posted(stream, &way, posted, bytes, notice)
    }

    /// Posts a message that has a number, and with it the reverse stream's cursor.
    #[inline(always)]
    pub(super) fn message_single(
        &mut self,
        stream: u32,
        body: Body,
        payload: Untrusted<'_>,
        notice: Notice,
    ) -> Option<Issued> {
        let way = self.state.way(stream, notice)?;
        let cursor = self.state.streams[stream as usize].window.expected();
        let mut head = [0; HEAD_MAX];
        let message =
            Message { context: way.context, seq: way.seq.to_wire(), ack: truncate::<32>(cursor.0), body };
        let len = message.encode(&mut head);
        let bytes = (len + payload.len()) as u64;
        let posted =
            self.rails[way.rail].post_message(Peer(way.peer), &head[..len], payload, way.tag | bytes);
        let issued = self.state.single_posted(stream, &way, posted, bytes, notice)?;
        let s = &mut self.state.streams[stream as usize];
        (s.ack_sent, s.age) = (cursor, 0);
        Some(issued)
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Where the next number of a stream can go now, if one post is all that stands before it. Only the streams of peers that may
    /// be posted to are live.
    #[inline(always)]
    fn way(&mut self, stream: u32, notice: Notice) -> Option<Way> {
        let s = self.streams.get(stream as usize)?;
        let (peer, context, seq) = (s.peer, s.context, s.next);
        if !s.live || s.unposted != NONE || s.fence || s.in_flight() >= self.config.window as u64 {
            return None;
        }
        let (index, tag) = match notice {
            Notice::Silent => (NONE, s.tag),
            Notice::Report(_) => {
                let index = self.pending.first_free()?;
                (index, PostTag { owner: Owner::Op(index), bytes: 0 }.pack())
            }
        };
        let rail = self.pick(peer, 0)?;
        Some(Way { peer, context, rail, seq, index, tag })
    }

    /// Notes an operation whose one post was made, or was not.
    #[inline(always)]
    fn single_posted(
        &mut self,
        stream: u32,
        way: &Way,
        posted: Result<Posted, PostError>,
        bytes: u64,
        notice: Notice,
    ) -> Option<Issued> {
        let posts = match posted {
            Ok(Posted::Done) => 0,
            Ok(Posted::Pending) => {
                let (posts, outstanding) = &mut self.outstanding[way.rail];
                *posts += 1;
                *outstanding += bytes;
                1
            }
            Err(_) => return None,
        };
        self.stats.posted += 1;
        let s = &mut self.streams[stream as usize];
        s.next = way.seq.plus(1);
        if let Notice::Silent = notice {
            s.silent_posts += posts;
            s.silent_end = s.next;
            if !s.silent {
                s.silent = true;
                s.open += 1;
                self.open += 1;
            }
            return Some(Issued::Pending(Token::NONE));
        }
        s.open += 1;
        self.open += 1;
        self.pending.take();
        s.ops.push(self.pending.slots, way.index);
        let slot = &mut self.pending.slots[way.index as usize];
        slot.set_posted(stream, posts, s.next, notice);
        Some(Issued::Pending(slot.token(way.index)))
    }
}
