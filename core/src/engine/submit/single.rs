//! The single-post path of numbered operations. It applies if the operation is one post, nothing is
//! queued before it, and the window and a rail have room. A reported operation takes a slot,
//! already fully posted. A silent operation takes no slot: its stream counts the post, and the
//! acknowledgement of its number completes it.
//!
//! `None` means that nothing has changed and that the operation must be queued. The queue also
//! retries, and handles errors of the rail.

use core::ptr::NonNull;

use crate::error::PostError;
use crate::mem::{LocalAddr, Peer, RemoteAddr, Untrusted};
use crate::op::Token;
use crate::rail::{Local, Posted, Rail, Remote};
use crate::sync::seq::{Seq, truncate};

use super::super::list::NONE;
use super::super::post_tag::{Owner, PostTag};
use super::super::stream::{WRITES, kept};
use super::super::wire::{Body, HEAD_MAX, Message};
use super::super::{ContextId, Engine, State};
use super::queue::Target;
use super::{Issued, Notice};

struct Way {
    peer: u16,
    context: u8,
    rail: usize,
    seq: Seq,
    word: u32,
    /// The slot that the operation will take, or [`NONE`] for a silent one.
    index: u32,
    /// The tag of the post, without the size.
    tag: u64,
}

impl<R: Rail, const RAILS: usize> Engine<'_, R, RAILS> {
    /// The hot path of puts over a network.
    #[inline(always)]
    pub(super) fn put_single(
        &mut self,
        context: ContextId,
        from: LocalAddr,
        len: usize,
        to: RemoteAddr,
        notice: Notice,
    ) -> Option<Issued> {
        let (bytes, state) = (len as u64, &self.state);
        let remote = state.remotes.get(to.region.index())?;
        if !remote.mapped.is_null()
            || remote.generation != to.region.generation()
            || bytes.wrapping_sub(1) >= state.single_max
            || to.offset.checked_add(bytes).is_none_or(|end| end > remote.len)
        {
            return None;
        }
        // An unconfigured context has no stream.
        let peer = remote.peer;
        let stream = state.stream_of(context.0, peer) as usize;
        if !state.streams.get(stream)?.clear(state.config.window, WRITES | kept(RAILS)) {
            return None;
        }
        let local = state.locals.get(from.region.index())?;
        if local.generation != from.region.generation()
            || from.offset.checked_add(bytes).is_none_or(|end| end > local.len)
        {
            return None;
        }
        let index = match notice {
            Notice::Silent => NONE,
            Notice::Report(_) => state.pending.slots.first_free()?,
        };
        // Pick a rail last, because picking a rail uses its turn.
        let rail = self.state.pick(peer, 0, 0, bytes)?;
        let State { locals, remotes, streams, loads, stats, open, mask, .. } = &mut self.state;
        let local = locals.get(from.region.index())?;
        let remote = remotes.get(to.region.index())?;
        let s = streams.get_mut(stream)?;
        // SAFETY: at least one byte is put, so the bounds check fails for unregistered regions. The
        // pointer of a registered region is not null.
        let ptr = unsafe { NonNull::new_unchecked(local.ptr.wrapping_add(from.offset as usize)) };
        let (key, desc) = (remote.keys[rail], local.desc[rail]);
        let (context, seq, word) = (s.context, s.next, s.word(*mask));
        let tag = match notice {
            Notice::Silent => s.tag,
            Notice::Report(_) => PostTag { owner: Owner::Op(index), bytes: 0 }.pack(),
        };
        let (local, remote) = (Local { ptr, len, desc }, Remote { key, offset: to.offset });
        // SAFETY: the checks above place both ranges in their regions. `Region::new` requires that
        // the local range stays valid until the operation ends. The remote range was imported on
        // every rail of its peer, including `rail`. Every rail accepts `single_max` bytes.
        let posted = unsafe {
            self.rails[rail].post_write_checked(Peer(peer), local, remote, word, tag | bytes)
        };
        if let Notice::Report(_) = notice {
            let way = Way { peer, context, rail, seq, word, index, tag };
            return self.state.single_posted(stream as u32, &way, posted, bytes, notice);
        }
        let pending = posted.ok()? == Posted::Pending;
        s.silent_posts += pending as u32;
        if RAILS > 1 && pending {
            loads.posted(rail, bytes);
        }
        stats.posted += 1;
        s.next = s.next.plus(1);
        s.silent_end = s.next;
        if !s.silent {
            *open += s.silent_until_next();
        }
        Some(Issued::Pending(Token::NONE))
    }

    /// Posts a write of one piece, on a rail that is not in `exclude`. An invalid `from_region`
    /// marks an inject: the rail copies its source at once.
    #[expect(clippy::too_many_arguments, reason = "the parts of one write")]
    #[inline(always)]
    pub(super) fn write_single(
        &mut self,
        stream: u32,
        from: NonNull<u8>,
        from_region: usize,
        len: usize,
        to: &Target,
        notice: Notice,
        exclude: u16,
    ) -> Option<Issued> {
        let state = &mut self.state;
        let bytes = len as u64;
        if bytes.wrapping_sub(1) >= state.single_max && !state.is_single(to.peer, bytes) {
            return None;
        }
        let way = state.way(stream, bytes, notice, WRITES, exclude)?;
        let desc = state.locals.get(from_region).map_or(0, |region| region.desc[way.rail]);
        let key = state.remotes.get(to.region as usize)?.keys[way.rail];
        let local = Local { ptr: from, len, desc };
        let remote = Remote { key, offset: to.offset };
        let (peer, word, tag) = (Peer(way.peer), way.word, way.tag | bytes);
        // SAFETY: the caller has checked both ranges. `Region::new` requires that the source stays
        // valid until the operation ends; the source of an inject is valid during the call. The
        // target was imported on every rail of its peer, including `way.rail`. Each of these rails
        // accepts `single` bytes.
        let posted =
            unsafe { self.rails[way.rail].post_write_checked(peer, local, remote, word, tag) };
        self.state.single_posted(stream, &way, posted, bytes, notice)
    }

    /// Posts a numbered message together with the cursor of the reverse stream. `data` is the kind
    /// of data that the message carries, as for [`clear`](super::super::stream::Stream::clear).
    #[inline(always)]
    pub(super) fn message_single(
        &mut self,
        stream: u32,
        body: Body,
        payload: Untrusted<'_>,
        data: u8,
        notice: Notice,
    ) -> Option<Issued> {
        let most = (HEAD_MAX + payload.len()) as u32;
        let short = self.state.too_short(self.state.streams.get(stream as usize)?.peer, most);
        let way = self.state.way(stream, most as u64, notice, data, short)?;
        let cursor = self.state.streams[stream as usize].window.expected();
        let mut head = [0; HEAD_MAX];
        let message =
            Message { context: way.context, word: way.word, ack: truncate::<32>(cursor.0), body };
        let len = message.encode(&mut head);
        let bytes = (len + payload.len()) as u64;
        let posted = self.rails[way.rail].post_message(
            Peer(way.peer),
            &head[..len],
            payload,
            way.tag | bytes,
        );
        let issued = self.state.single_posted(stream, &way, posted, bytes, notice)?;
        let s = &mut self.state.streams[stream as usize];
        (s.ack_sent, s.age) = (cursor, 0);
        Some(issued)
    }
}

impl<const RAILS: usize> State<'_, RAILS> {
    /// Returns whether every rail to a peer accepts this many bytes in one post, and the post is
    /// not split. Called only if this is not so for some peer.
    #[cold]
    #[inline(never)]
    fn is_single(&self, peer: u16, bytes: u64) -> bool {
        bytes != 0
            && (bytes < self.loads.split.from || !self.has_several_rails(peer))
            && self
                .pairings
                .get(peer as usize)
                .is_some_and(|pairing| bytes <= pairing.single as u64)
    }

    /// Never chooses a rail in `exclude`. Returns `None` if the number cannot be posted at once.
    #[inline(always)]
    fn way(
        &mut self,
        stream: u32,
        bytes: u64,
        notice: Notice,
        data: u8,
        exclude: u16,
    ) -> Option<Way> {
        let s = self.streams.get(stream as usize)?;
        let (peer, context, seq, word) = (s.peer, s.context, s.next, s.word(self.mask));
        if !s.clear(self.config.window, data | kept(RAILS)) {
            return None;
        }
        let (index, tag) = match notice {
            Notice::Silent => (NONE, s.tag),
            Notice::Report(_) => {
                let index = self.pending.slots.first_free()?;
                (index, PostTag { owner: Owner::Op(index), bytes: 0 }.pack())
            }
        };
        let rail = self.pick(peer, exclude, 0, bytes)?;
        Some(Way { peer, context, rail, seq, word, index, tag })
    }

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
                self.loads.posted(way.rail, bytes);
                1
            }
            Err(_) => return None,
        };
        self.stats.posted += 1;
        let s = &mut self.streams[stream as usize];
        s.next = way.seq.plus(1);
        if let Notice::Silent = notice {
            s.silent_posts += posts;
            self.open += s.silent_until_next();
            return Some(Issued::Pending(Token::NONE));
        }
        s.open += 1;
        self.open += 1;
        s.ops.push(&mut self.pending.slots, way.index);
        let slot = self.pending.slots.take_first(way.index);
        slot.set_posted(stream, posts, s.next, notice);
        Some(Issued::Pending(slot.token()))
    }
}
