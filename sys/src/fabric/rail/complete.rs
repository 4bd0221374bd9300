//! Handles completions: of posts, of arrived writes, and of messages. Handlers change state and
//! report. They post nothing except the receive buffer that a message used.

use core::ptr::NonNull;

use fishplate_core::error::{CompleteError, PeerError, Violation};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::Sink;

use super::device::Reached;
use super::pool::{ContextKind, Slot};
use super::{BATCH, Event, FabricRail, HEAD, USER, WORD};
use crate::fabric::cq::{self, CqError, Entry};
use crate::fabric::error::Code;
use crate::fabric::persona::Notify;
use crate::fabric::raw::*;

/// Idle polls between two clock reads: a power of two.
const LOOK: u32 = 4096;

/// Returns whether an entry is an arrived write with data. `FI_REMOTE_CQ_DATA` alone does not tell:
/// some providers repeat a post's flags in its own completion, which has a context. The shm
/// provider of libfabric 2 omits `FI_REMOTE_WRITE` and the context.
#[inline(always)]
pub(super) fn is_arrival(entry: &Entry) -> bool {
    const BOTH: u64 = FI_REMOTE_CQ_DATA | FI_REMOTE_WRITE;
    entry.flags & BOTH == BOTH || (entry.flags & FI_REMOTE_CQ_DATA != 0 && entry.op_context.is_null())
}

/// Returns the context if the entry is a completed write that needs no further work.
#[inline(always)]
fn ended_write(entry: &Entry) -> Option<*mut Slot> {
    if entry.flags & (FI_REMOTE_CQ_DATA | FI_RECV) != 0 {
        return None;
    }
    let slot = NonNull::new(entry.op_context.cast::<Slot>())?.as_ptr();
    // SAFETY: returned contexts are ours and never move.
    (unsafe { (*slot).kind } == ContextKind::Write).then_some(slot)
}

impl FabricRail {
    /// Reads at most `budget` completions. Only the usual case, an empty queue, is inlined.
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

    /// A poll that does more than read the queue: work is queued, or the clock is due. Every poll
    /// is long if entries come with their source, or a device must be flushed.
    #[inline(never)]
    fn long_poll<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        self.plan();
        let waited = if self.busy { self.chores(budget, sink) } else { 0 };
        if self.busy && !self.endpoint.is_open() {
            return self.poll_closed(waited);
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
                    self.look();
                }
                0
            }
            Err(code) => self.trouble(code, left, sink),
        };
        waited + count
    }

    /// Polls without an endpoint. Does not read the queue, because it has nothing from a peer.
    #[cold]
    fn poll_closed(&mut self, waited: u32) -> u32 {
        if self.polls().is_multiple_of(LOOK) {
            self.look();
        }
        waited
    }

    /// Reads one batch of at most `want` completions.
    #[inline(always)]
    fn read_queue(&mut self, want: usize) -> Result<usize, Code> {
        let entries = self.entries.room(want);
        match self.notify {
            Notify::Source => self.endpoint.completions_from(entries, &mut self.sources),
            _ => self.endpoint.completions(entries),
        }
    }

    /// Handles a full batch and the ones behind it, at most `budget` entries in all. Leaves an
    /// error behind them to the next poll.
    #[inline(never)]
    fn full_batch<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
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

    /// The number of polls so far. Wraps.
    pub(super) fn polls(&self) -> u32 {
        self.polls_planned.wrapping_sub(self.plain_polls)
    }

    /// Makes the next poll a long one, because work is queued.
    pub(super) fn hurry(&mut self) {
        if !self.busy {
            self.busy = true;
            self.plan();
        }
    }

    /// Computes how many of the next polls only read the queue.
    pub(super) fn plan(&mut self) {
        let polls = self.polls();
        let flushes = self.device.as_ref().is_some_and(|reached| reached.device.must_flush());
        let plain = !self.busy && !flushes && self.notify != Notify::Source;
        self.plain_polls = if plain { LOOK - polls % LOOK } else { 1 };
        self.polls_planned = polls.wrapping_add(self.plain_polls);
    }

    /// Flushes the device if a NIC may have written to it: the batch has an arrival or a completed
    /// read. If the flush fails, all peers fail and no arrival is reported.
    #[inline(never)]
    fn prepare(&mut self, count: usize) {
        let Some(Reached { device, .. }) = &mut self.device else { return };
        if !device.must_flush() {
            return;
        }
        let written = |entry: &Entry| {
            let slot = entry.op_context.cast::<Slot>();
            // SAFETY: a context of a completion that is no arrival is ours, and never moves.
            let is_read = || !slot.is_null() && unsafe { (*slot).kind } == ContextKind::Read;
            is_arrival(entry) || entry.flags & FI_RECV != 0 || is_read()
        };
        if self.entries.room(count).iter().any(written)
            && let Err(code) = device.flush()
        {
            self.lose_all(Code(code));
        }
    }

    /// Handles completions. Reports consecutive ones with the same context word together.
    #[inline(never)]
    fn complete_all<S: Sink>(&mut self, count: usize, sink: &mut S) {
        let mut next = self.entries.first();
        // SAFETY: no more entries were read than fit.
        let end = unsafe { next.add(count) };
        while next != end {
            // SAFETY: before the end.
            let Some(mut slot) = ended_write(unsafe { &*next }) else {
                // SAFETY: before the end. Its fields are read once, before any report.
                let Entry { op_context, flags, len, data, .. } = unsafe { *next };
                let entry = Entry { op_context, flags, len, data, ..cq::EMPTY };
                self.complete(entry, next, sink);
                // SAFETY: before the end.
                next = unsafe { next.add(1) };
                continue;
            };
            // SAFETY: returned contexts are ours and stay in place;
            // the provider is done with this one.
            let (cx, peer) = unsafe { ((*slot).cx, (*slot).peer) };
            let first = next;
            loop {
                // SAFETY: the provider has completed it, and `next` was before the end.
                next = unsafe {
                    self.pool.give(slot);
                    next.add(1)
                };
                if next == end {
                    break;
                }
                // SAFETY: before the end.
                let Some(another) = ended_write(unsafe { &*next }) else { break };
                slot = another;
                // SAFETY: as above.
                if unsafe { (*slot).cx } != cx {
                    break;
                }
                // SAFETY: as above.
                if unsafe { (*slot).peer } != peer {
                    break;
                }
            }
            // SAFETY: both are in the array, and `first` comes first.
            let ends = unsafe { next.offset_from_unsigned(first) } as u32;
            // SAFETY: a peer to which something was posted has a slot.
            let slot = unsafe { self.peers.place(peer) };
            slot.ended = slot.ended.wrapping_add(ends);
            sink.done_alike(cx, ends);
        }
    }

    /// The source address of an entry, if the provider reports it.
    #[inline(always)]
    fn source(&self, place: *const Entry) -> u64 {
        let at = (place.addr() - self.entries.first().addr()) / size_of::<Entry>();
        self.sources[at]
    }

    /// Handles any other entry; `place` is its index in the batch.
    #[inline(always)]
    fn complete<S: Sink>(&mut self, entry: Entry, place: *const Entry, sink: &mut S) {
        if is_arrival(&entry) {
            let peer = match self.plain_arrivals {
                true => self.peers.hear_signed((entry.data >> 32) as u32),
                false => self.arrival(&entry, place),
            };
            match peer {
                Some(peer) => sink.landed(Peer(peer), entry.data as u32),
                None => self.stats.strangers += 1,
            }
        } else if entry.flags & FI_RECV != 0 {
            self.receive(&entry, place, sink);
        } else if !entry.op_context.is_null() {
            self.ended(entry.op_context.cast(), sink);
        }
    }

    /// Handles an arrived write whose data does not name the sender, or that used up a receive
    /// buffer.
    #[inline(never)]
    fn arrival(&mut self, entry: &Entry, place: *const Entry) -> Option<u16> {
        // With `FI_RX_CQ_DATA` the context is a receive buffer. Otherwise it is not ours: shm 1.17
        // returns the sender's context, a pointer of another process.
        if self.takes_receives && !entry.op_context.is_null() {
            let slot = entry.op_context.cast::<Slot>();
            // SAFETY: returned contexts are ours and never move.
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

    /// Handles an arrived message.
    #[inline(always)]
    fn receive<S: Sink>(&mut self, entry: &Entry, place: *const Entry, sink: &mut S) {
        let slot = entry.op_context.cast::<Slot>();
        // SAFETY: contexts with this flag are those of receives.
        let index = unsafe { (*slot).index };
        let buffer = self.slab.at(index as usize - self.caps.depth as usize);
        let len = entry.len.min(self.caps.max_message + HEAD);
        let mut head = [0; HEAD];
        // SAFETY: the buffer is ours until it is posted again below, and its first `len` bytes are
        // the message.
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
                Some((_, body)) if kind == WORD && body.len() == 4 && self.notify == Notify::Message => {
                    let mut word = [0; 4];
                    body.copy_out(&mut word);
                    sink.landed(Peer(peer), u32::from_le_bytes(word));
                }
                Some(_) => self.take_down(Peer(peer), PeerError::Protocol(Violation::Kind)),
                None => self.take_down(Peer(peer), PeerError::Protocol(Violation::Length)),
            }
        } else {
            self.stats.strangers += 1;
        }
        self.give_back(slot);
    }

    /// Reposts a receive buffer, now or in the next pass.
    #[inline(always)]
    fn give_back(&mut self, slot: *mut Slot) {
        // SAFETY: a receive's context, which the provider has returned.
        let index = unsafe { (*slot).index };
        if self.post_receive(index).is_err() {
            // It has capacity for all receive buffers.
            self.unposted.push(index);
            self.hurry();
        }
    }

    /// Handles a successful completion of a post.
    #[inline]
    fn ended<S: Sink>(&mut self, slot: *mut Slot, sink: &mut S) {
        // SAFETY: returned contexts are ours and stay in place; the provider is done with this one.
        let (cx, peer, extra, (kind, orphan)) =
            unsafe { ((*slot).cx, (*slot).peer, (*slot).extra, (*slot).used_for()) };
        match kind {
            ContextKind::Free | ContextKind::Receive | ContextKind::Orphan => return,
            ContextKind::Send => self.bounces.push(extra),
            // SAFETY: the poster guarantees 8 writable bytes until the completion is reported.
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

    /// Returns a context to the pool.
    pub(super) fn free(&mut self, slot: *mut Slot) {
        // SAFETY: as in `ended`.
        unsafe {
            self.stats.orphans -= ((*slot).kind == ContextKind::Orphan) as u32;
            self.pool.give(slot);
        }
    }

    /// Counts a completed post of a peer.
    #[inline(always)]
    pub(super) fn settle(&mut self, peer: u16) {
        let slot = &mut self.peers.slots[peer as usize];
        slot.ended = slot.ended.wrapping_add(1);
    }

    /// Handles a queue that returned an error: reads all error entries, then the completions behind
    /// them.
    #[cold]
    #[inline(never)]
    fn trouble<S: Sink>(&mut self, code: Code, budget: u32, sink: &mut S) -> u32 {
        let (mut code, mut count) = (code, 0);
        while code == Code::EAVAIL {
            match self.endpoint.error_completion() {
                Ok(error) => self.failed(error, sink),
                Err(Code::EAGAIN) => return count,
                Err(other) => {
                    code = other;
                    break;
                }
            }
            count += 1;
            if count == budget {
                return count;
            }
            let want = ((budget - count) as usize).min(BATCH);
            match self.read_queue(want) {
                Ok(more) if more < want => {
                    self.prepare(more);
                    self.complete_all(more, sink);
                    return count + more as u32;
                }
                Ok(_) => return count + self.full_batch(budget - count, sink),
                Err(Code::EAGAIN) => return count,
                Err(other) => code = other,
            }
        }
        self.break_down(code);
        count
    }

    /// Handles an error completion.
    #[cold]
    fn failed<S: Sink>(&mut self, error: CqError, sink: &mut S) {
        self.stats.errors += 1;
        self.stats.last_error = (error.code.0, error.provider);
        self.last_error = error;
        let slot = error.op_context.cast::<Slot>();
        if slot.is_null() {
            return;
        }
        // SAFETY: returned contexts are ours and stay in place; the provider is done with this one.
        let (cx, peer, extra, (kind, orphan)) =
            unsafe { ((*slot).cx, (*slot).peer, (*slot).extra, (*slot).used_for()) };
        match kind {
            ContextKind::Free => return,
            // A truncated or cancelled receive. The entry does not name the sender.
            ContextKind::Receive => return self.give_back(slot),
            ContextKind::Send => self.bounces.push(extra),
            _ => {}
        }
        self.free(slot);
        if orphan {
            return;
        }
        self.settle(peer);
        // The rail cancels no receives, so the provider dropped it with its connection.
        let lost = error.code.is_disconnect()
            || error.code == Code::ECANCELED
            || !self.peers.slots[peer as usize].up;
        let end = if lost { CompleteError::PeerDown } else { CompleteError::Failed(error.code.0) };
        if lost {
            self.take_down(Peer(peer), PeerError::Lost);
        }
        sink.done(cx, Err(end));
    }

    /// Does the queued work: reports, words, receive buffers, an unposted batch.
    #[cold]
    fn chores<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        while count < budget {
            let Some(event) = self.events.pop_front() else { break };
            // A peer that may return does not count as work: a worker may sleep.
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
        let idle = closed && self.events.is_empty() && self.owed.is_empty() && self.unposted.is_empty();
        self.busy = !(idle && self.endpoint.is_open());
        self.plan();
        count
    }

    /// Queues a report. There is room: one completion per context, and a few events per peer.
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
