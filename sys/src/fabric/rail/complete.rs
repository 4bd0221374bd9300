//! Handles completions of posts, arrived writes and messages. Handlers change state and report to
//! the sink. They post nothing except the receive buffer of a handled message.

use core::ptr::NonNull;

use fishplate_core::error::{PeerError, Violation};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::Sink;

use super::device::Reached;
use super::pool::{ContextKind, Slot};
use super::{BATCH, Event, FabricRail, HEAD, USER, WORD};
use crate::fabric::cq::{self, Entry};
use crate::fabric::error::Code;
use crate::fabric::persona::Notify;
use crate::fabric::raw::*;

/// Number of idle polls between two clock reads. A power of two.
const LOOK: u32 = 4096;

/// Returns whether an entry is an arrived write with data. `FI_REMOTE_CQ_DATA` alone is not enough:
/// some providers repeat a post's flags in its own completion, which has a context. The shm
/// provider of libfabric 2 omits both `FI_REMOTE_WRITE` and the context.
#[inline(always)]
pub(super) fn is_arrival(entry: &Entry) -> bool {
    const BOTH: u64 = FI_REMOTE_CQ_DATA | FI_REMOTE_WRITE;
    entry.flags & BOTH == BOTH
        || (entry.flags & FI_REMOTE_CQ_DATA != 0 && entry.op_context.is_null())
}

/// Returns the context of a completed write that needs no further work.
#[inline(always)]
fn ended_write(entry: &Entry) -> Option<*mut Slot> {
    if entry.flags & (FI_REMOTE_CQ_DATA | FI_RECV) != 0 {
        return None;
    }
    let slot = NonNull::new(entry.op_context.cast::<Slot>())?.as_ptr();
    // SAFETY: the entry is not an arrival, so its context is from our pool. Contexts never move.
    (unsafe { (*slot).kind } == ContextKind::Write).then_some(slot)
}

impl FabricRail {
    /// Reads at most `budget` completions. Only the usual case of an empty queue is inlined.
    #[inline(always)]
    pub(super) fn reap<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        // This one counter guards all rare work, so that an idle poll checks nothing else.
        self.plain_polls = self.plain_polls.wrapping_sub(1);
        if self.plain_polls == 0 {
            return self.long_poll(budget, sink);
        }
        if budget == 0 {
            return 0;
        }
        let want = (budget as usize).min(BATCH);
        match self.endpoint.completions(self.entries.room(want)) {
            Ok(count) if count < want => {
                self.complete_all(count, sink);
                count as u32
            }
            Ok(_) => self.full_batch(budget, sink),
            Err(Code::EAGAIN) => 0,
            Err(code) => self.trouble(code, budget, sink),
        }
    }

    /// Polls and does more than read the queue: work is queued, or the clock must be read.
    #[inline(never)]
    fn long_poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        self.plan();
        let waited = if self.busy { self.chores(budget, sink) } else { 0 };
        if self.busy && !self.endpoint.is_open() {
            return self.poll_closed(waited, sink);
        }
        let left = budget - waited;
        let want = (left as usize).min(BATCH);
        if want == 0 {
            return waited;
        }
        let count = match self.read_queue(want) {
            Ok(count) if count < want => {
                self.prepare(count);
                self.complete_all(count, sink);
                count as u32
            }
            Ok(_) => self.full_batch(left, sink),
            Err(Code::EAGAIN) => {
                if self.polls().is_multiple_of(LOOK) {
                    self.look(sink);
                }
                0
            }
            Err(code) => self.trouble(code, left, sink),
        };
        waited + count
    }

    /// Polls while the endpoint is closed. Does not read the queue, because no peer can reach this
    /// rail.
    #[cold]
    fn poll_closed<S: Sink>(&mut self, waited: u32, sink: &mut S) -> u32 {
        if self.polls().is_multiple_of(LOOK) {
            self.look(sink);
        }
        waited
    }

    #[inline(always)]
    pub(super) fn read_queue(&mut self, want: usize) -> Result<usize, Code> {
        let entries = self.entries.room(want);
        match self.notify {
            Notify::Source => self.endpoint.completions_from(entries, &mut self.sources),
            _ => self.endpoint.completions(entries),
        }
    }

    /// Handles a full batch and the completions behind it, at most `budget` in all. The next poll
    /// handles an error behind them.
    #[inline(never)]
    pub(super) fn full_batch<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut left = budget;
        let mut count = (left as usize).min(BATCH);
        while count != 0 {
            self.prepare(count);
            self.complete_all(count, sink);
            left -= count as u32;
            let want = (left as usize).min(BATCH);
            if want == 0 || count < BATCH {
                break;
            }
            count = self.read_queue(want).map_or(0, |count| count.min(want));
        }
        budget - left
    }

    pub(super) fn polls(&self) -> u32 {
        self.polls_planned.wrapping_sub(self.plain_polls)
    }

    /// Makes the next poll long, because there is queued work.
    pub(super) fn hurry(&mut self) {
        if !self.busy {
            self.busy = true;
            self.plan();
        }
    }

    pub(super) fn plan(&mut self) {
        let polls = self.polls();
        let flushes = self.device.as_ref().is_some_and(|reached| reached.device.must_flush());
        let plain = !self.busy && !flushes && self.notify != Notify::Source;
        self.plain_polls = if plain { LOOK - polls % LOOK } else { 1 };
        self.polls_planned = polls.wrapping_add(self.plain_polls);
    }

    /// Flushes the device if a NIC may have written to its memory. If the flush fails, all peers
    /// fail and no arrival is reported.
    #[inline(never)]
    pub(super) fn prepare(&mut self, count: usize) {
        let Some(Reached { device, .. }) = &mut self.device else { return };
        if !device.must_flush() {
            return;
        }
        let written = |entry: &Entry| {
            let slot = entry.op_context.cast::<Slot>();
            // SAFETY: other entries than arrivals and receives have a context from our pool, and
            // contexts never move.
            let is_read = || !slot.is_null() && unsafe { (*slot).kind } == ContextKind::Read;
            is_arrival(entry) || entry.flags & FI_RECV != 0 || is_read()
        };
        if self.entries.room(count).iter().any(written)
            && let Err(code) = device.flush()
        {
            self.lose_all(Code(code));
        }
    }

    /// Handles `count` completions. Reports consecutive completions with the same context word
    /// together.
    #[inline(never)]
    pub(super) fn complete_all<S: Sink>(&mut self, count: usize, sink: &mut S) {
        let mut next = self.entries.first();
        // SAFETY: `count` entries were read into the batch, so it has room for them.
        let end = unsafe { next.add(count) };
        while next != end {
            // SAFETY: `next` is before `end`, so its entry was read into the batch.
            let Some(mut slot) = ended_write(unsafe { &*next }) else {
                // SAFETY: `next` is before `end`. The fields are copied once, before any report.
                let Entry { op_context, flags, len, data, .. } = unsafe { *next };
                let entry = Entry { op_context, flags, len, data, ..cq::EMPTY };
                self.complete(entry, next, sink);
                // SAFETY: `next` was before `end`, so the sum is at most `end`.
                next = unsafe { next.add(1) };
                continue;
            };
            // SAFETY: `ended_write` returns only contexts from our pool, which never move. The
            // provider has completed the post of this context.
            let (cx, peer) = unsafe { ((*slot).cx, (*slot).peer) };
            let first = next;
            loop {
                // SAFETY: the provider has completed the post of `slot`, and `next` was before
                // `end`.
                next = unsafe {
                    self.pool.give(slot);
                    next.add(1)
                };
                if next == end {
                    break;
                }
                // SAFETY: `next` is before `end`, so its entry was read into the batch.
                let Some(another) = ended_write(unsafe { &*next }) else { break };
                slot = another;
                // SAFETY: `ended_write` returned this context from our pool.
                if unsafe { (*slot).cx } != cx {
                    break;
                }
                // SAFETY: `ended_write` returned this context from our pool.
                if unsafe { (*slot).peer } != peer {
                    break;
                }
            }
            // SAFETY: both pointers are into the batch or one past it, and `next` is not before
            // `first`.
            let ends = unsafe { next.offset_from_unsigned(first) } as u32;
            // SAFETY: the context's post was checked against the peer's slot, and slots are never
            // removed.
            let slot = unsafe { self.peers.place(peer) };
            slot.ended = slot.ended.wrapping_add(ends);
            sink.done_alike(cx, ends);
        }
    }

    /// Returns the source address of the entry at `place`. Valid only if the provider reports
    /// sources.
    #[inline(always)]
    fn source(&self, place: *const Entry) -> u64 {
        let at = (place.addr() - self.entries.first().addr()) / size_of::<Entry>();
        self.sources[at]
    }

    /// Handles an entry that is not a plain completed write.
    #[inline(always)]
    fn complete<S: Sink>(&mut self, entry: Entry, place: *const Entry, sink: &mut S) {
        if is_arrival(&entry) {
            let peer = match self.plain_arrivals {
                true => self.peers.hear_signed((entry.data >> 32) as u32),
                false => self.arrival(&entry, place),
            };
            match peer {
                Some(peer) => sink.landed(Peer(peer), entry.data as u32),
                None => self.unattached((entry.data >> 32) as u32, sink),
            }
        } else if entry.flags & FI_RECV != 0 {
            self.receive(&entry, place, sink);
        } else if !entry.op_context.is_null() {
            self.ended(entry.op_context.cast(), sink);
        }
    }

    /// Handles an arrived write that used a receive buffer, or that has no signature in its data.
    #[inline(never)]
    fn arrival(&mut self, entry: &Entry, place: *const Entry) -> Option<u16> {
        // With `FI_RX_CQ_DATA` the context belongs to a receive buffer. Otherwise it is not ours:
        // shm 1.17 returns the sender's context, a pointer of another process.
        if self.takes_receives && !entry.op_context.is_null() {
            let slot = entry.op_context.cast::<Slot>();
            // SAFETY: with `takes_receives` a context in an arrival is from our pool, and contexts
            // never move.
            if unsafe { (*slot).kind } == ContextKind::Receive {
                self.give_back(slot);
            }
        }
        match self.notify {
            Notify::Word => self.peers.hear_signed((entry.data >> 32) as u32),
            Notify::Source => self.peers.hear_from(self.source(place)),
            Notify::Message => None,
        }
    }

    #[inline(always)]
    fn receive<S: Sink>(&mut self, entry: &Entry, place: *const Entry, sink: &mut S) {
        let slot = entry.op_context.cast::<Slot>();
        // SAFETY: an entry with `FI_RECV` has the context of one of our receives.
        let index = unsafe { (*slot).index };
        let buffer = self.slab.at(index as usize - self.caps.depth as usize);
        let len = entry.len.min(self.caps.max_message + HEAD);
        let mut head = [0; HEAD];
        // SAFETY: the buffer is ours until the receive is posted again below. Its first `len` bytes
        // are the message.
        let bytes = unsafe { Untrusted::new(buffer, len) };
        bytes.copy_out(&mut head);
        let number = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let kind = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        let peer = match self.notify {
            Notify::Source => self.peers.hear_from(self.source(place)),
            _ if len >= HEAD => self.peers.hear_signed(number),
            _ => None,
        };
        if let Some(peer) = peer {
            match bytes.split_at(HEAD) {
                Some((_, body)) if kind == USER => sink.message(Peer(peer), body),
                Some((_, body))
                    if kind == WORD && body.len() == 4 && self.notify == Notify::Message =>
                {
                    let mut word = [0; 4];
                    body.copy_out(&mut word);
                    sink.landed(Peer(peer), u32::from_le_bytes(word));
                }
                Some(_) => self.take_down(Peer(peer), PeerError::Protocol(Violation::Kind)),
                None => self.take_down(Peer(peer), PeerError::Protocol(Violation::Length)),
            }
        } else {
            self.unattached(number, sink);
        }
        self.give_back(slot);
    }

    /// Drops an arrival with the signature of a peer that is not attached.
    #[cold]
    #[inline(never)]
    fn unattached<S: Sink>(&mut self, number: u32, sink: &mut S) {
        match self.expected.call(number) {
            true => sink.called(),
            false => self.stats.strangers += 1,
        }
    }

    /// Posts a receive buffer again, now or in the next pass.
    #[inline(always)]
    pub(super) fn give_back(&mut self, slot: *mut Slot) {
        // SAFETY: the provider has completed the receive of this context, which is from our pool.
        let index = unsafe { (*slot).index };
        if self.post_receive(index).is_err() {
            // Does not allocate: the vector has capacity for all receive buffers.
            self.unposted.push(index);
            self.hurry();
        }
    }

    #[inline]
    fn ended<S: Sink>(&mut self, slot: *mut Slot, sink: &mut S) {
        // SAFETY: contexts of completed posts are from our pool and never move. The provider has
        // completed the post of this context.
        let (cx, peer, extra, (kind, orphan)) =
            unsafe { ((*slot).cx, (*slot).peer, (*slot).extra, (*slot).used_for()) };
        match kind {
            ContextKind::Free | ContextKind::Receive | ContextKind::Orphan => return,
            ContextKind::Send => self.bounces.push(extra),
            // SAFETY: the poster guarantees 8 writable bytes at `fetch` until the completion is
            // reported, which happens below.
            ContextKind::Atomic if !orphan => unsafe {
                if !(*slot).fetch.is_null() {
                    (*slot).fetch.write((*slot).words[2]);
                }
            },
            ContextKind::WriteThenWord if !orphan => self.owe(peer, extra),
            _ => {}
        }
        self.free(slot);
        if !orphan {
            self.settle(peer);
            sink.done(cx, Ok(()));
        }
    }

    pub(super) fn free(&mut self, slot: *mut Slot) {
        // SAFETY: the callers pass a context from our pool that the provider has completed or never
        // received.
        unsafe {
            self.stats.orphans -= ((*slot).kind == ContextKind::Orphan) as u32;
            self.pool.give(slot);
        }
    }

    #[inline(always)]
    pub(super) fn settle(&mut self, peer: u16) {
        let slot = &mut self.peers.slots[peer as usize];
        slot.ended = slot.ended.wrapping_add(1);
    }

    #[cold]
    fn chores<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        while count < budget {
            let Some(event) = self.events.pop_front() else { break };
            // A peer that may return does not count as work, so a worker may sleep.
            count += u32::from(!matches!(event, Event::Up(_)));
            report(event, sink);
        }
        while let Some(&(peer, data)) = self.owed.front() {
            if !self.send_word(peer, data) {
                break;
            }
            self.owed.pop_front();
        }
        while self.endpoint.is_open()
            && let Some(index) = self.unposted.pop()
        {
            if self.post_receive(index).is_err() {
                self.unposted.push(index);
                break;
            }
        }
        let closed = self.close_batch();
        let idle =
            closed && self.events.is_empty() && self.owed.is_empty() && self.unposted.is_empty();
        self.busy = !(idle && self.endpoint.is_open());
        self.plan();
        count
    }

    /// Queues a report. The queue has room for one completion per context and a few events per
    /// peer.
    pub(super) fn tell(&mut self, event: Event) {
        self.events.push_back(event);
        self.hurry();
    }
}

pub(super) fn report<S: Sink>(event: Event, sink: &mut S) {
    match event {
        Event::Done(cx, result) => sink.done(cx, result),
        Event::Down(peer, why) => sink.peer_down(peer, why),
        Event::Up(peer) => sink.peer_up(peer),
    }
}
