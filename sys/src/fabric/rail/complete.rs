//! Completions: the ends of posts, writes that have arrived, messages. Handlers change state and report; none of them posts, but
//! for the receive buffer that goes back at once.

use core::ptr::NonNull;

use fishplate_core::error::{CompleteError, PeerError, Violation};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::Sink;

use super::pool::{Kind, Slot};
use super::{BATCH, Event, FabricRail, HEAD, USER, WORD};
use crate::fabric::cq::{self, CqError, Entry};
use crate::fabric::error::Code;
use crate::fabric::persona::Notify;
use crate::fabric::raw::*;

/// Idle polls between two looks at the clock: a power of two.
const LOOK: u32 = 4096;

/// Whether a write with data has arrived. The first flag alone does not say so: some providers repeat the flags of a post in its own
/// completion, which has a context; and libfabric 2's shm leaves the second away, and the context with it.
#[inline(always)]
fn is_arrival(entry: &Entry) -> bool {
    const BOTH: u64 = FI_REMOTE_CQ_DATA | FI_REMOTE_WRITE;
    entry.flags & BOTH == BOTH || (entry.flags & FI_REMOTE_CQ_DATA != 0 && entry.op_context.is_null())
}

/// The context of a write that has ended and of which nothing else is to be done, if that is what an entry says.
#[inline(always)]
fn ended_write(entry: &Entry) -> Option<*mut Slot> {
    if entry.flags & (FI_REMOTE_CQ_DATA | FI_RECV) != 0 {
        return None;
    }
    let slot = NonNull::new(entry.op_context.cast::<Slot>())?.as_ptr();
    // SAFETY: contexts that come back are ours and stay where they are.
    (unsafe { (*slot).kind } == Kind::Write).then_some(slot)
}

impl FabricRail {
    /// Reads completions, at most `budget`.
    #[inline(always)]
    pub(super) fn reap<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        self.polls = self.polls.wrapping_add(1);
        if self.busy {
            count = self.chores(budget, sink);
        }
        while count < budget {
            let want = ((budget - count) as usize).min(BATCH);
            let entries = &mut self.entries[..want];
            let read = match self.notify {
                Notify::Source => self.endpoint.cq.read_from(entries, &mut self.sources),
                _ => self.endpoint.cq.read(entries),
            };
            match read {
                Ok(n) => {
                    if self.on_arrival.is_some() {
                        self.prepare(n.min(want));
                    }
                    self.complete_all(n.min(want), sink);
                    count += n as u32;
                    if n < want {
                        break;
                    }
                }
                Err(Code::EAGAIN) => {
                    if self.polls.is_multiple_of(LOOK) {
                        self.look();
                    }
                    break;
                }
                Err(code) => {
                    if !self.trouble(code, sink, &mut count) {
                        break;
                    }
                }
            }
        }
        count
    }

    /// Calls the hook if something has arrived.
    #[inline(never)]
    fn prepare(&mut self, count: usize) {
        let arrived = |entry: &Entry| is_arrival(entry) || entry.flags & FI_RECV != 0;
        if let Some(hook) = &mut self.on_arrival
            && self.entries[..count].iter().any(arrived)
        {
            hook();
        }
    }

    /// Handles what was read. Ends of the same word are reported together: those of a stream of posts are.
    #[inline(always)]
    fn complete_all<S: Sink>(&mut self, count: usize, sink: &mut S) {
        let mut next = self.entries.as_ptr();
        // SAFETY: no more were read than there are places.
        let end = unsafe { next.add(count) };
        while next != end {
            // SAFETY: before the end.
            let Some(mut slot) = ended_write(unsafe { &*next }) else {
                // SAFETY: before the end. What is needed of it is read once, before anything is reported.
                let Entry { op_context, flags, len, data, .. } = unsafe { *next };
                let entry = Entry { op_context, flags, len, data, ..cq::EMPTY };
                self.complete(entry, next, sink);
                // SAFETY: before the end.
                next = unsafe { next.add(1) };
                continue;
            };
            // SAFETY: contexts that come back are ours and stay where they are; the provider is done with this one.
            let (cx, peer) = unsafe { ((*slot).cx, (*slot).peer) };
            let first = next;
            loop {
                // SAFETY: the provider is done with it; and `next` was before the end.
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
            // SAFETY: both lie in the array, and `first` was passed.
            let ends = unsafe { next.offset_from_unsigned(first) } as u32;
            let slot = &mut self.peers.slots[peer as usize];
            slot.ended = slot.ended.wrapping_add(ends);
            sink.done_alike(cx, ends);
        }
    }

    /// Where what an entry says came from, as far as the provider tells.
    #[inline(always)]
    fn source(&self, place: *const Entry) -> u64 {
        let at = (place.addr() - self.entries.as_ptr().addr()) / size_of::<Entry>();
        self.sources[at]
    }

    /// Handles any other entry, which was read from `place`.
    #[inline(always)]
    fn complete<S: Sink>(&mut self, entry: Entry, place: *const Entry, sink: &mut S) {
        if is_arrival(&entry) {
            let peer = match self.notify {
                Notify::Word => self.peers.numbers.find(entry.data >> 32),
                Notify::Source => self.peers.addresses.find(self.source(place)),
                Notify::Message => None,
            };
            if let Some(peer) = self.hears(peer) {
                sink.landed(Peer(peer), entry.data as u32);
            }
            // With `FI_RX_CQ_DATA` the write has used up a receive buffer. Otherwise the context is nothing of ours: shm 1.17 gives that of
            // the sender, as a pointer of another process.
            if self.takes_receives && !entry.op_context.is_null() {
                let slot = entry.op_context.cast::<Slot>();
                // SAFETY: contexts that come back are ours, and stay where they are.
                if unsafe { (*slot).kind } == Kind::Receive {
                    self.give_back(slot);
                }
            }
        } else if entry.flags & FI_RECV != 0 {
            self.receive(&entry, place, sink);
        } else if !entry.op_context.is_null() {
            self.ended(entry.op_context.cast(), sink);
        }
    }

    /// The peer, if it is one that is heard.
    #[inline(always)]
    fn hears(&mut self, peer: Option<u16>) -> Option<u16> {
        if let Some(peer) = peer {
            let slot = &mut self.peers.slots[peer as usize];
            if slot.up {
                slot.arrived = slot.arrived.wrapping_add(1);
                return Some(peer);
            }
        }
        self.stats.strangers += 1;
        None
    }

    /// A message has come.
    #[inline(always)]
    fn receive<S: Sink>(&mut self, entry: &Entry, place: *const Entry, sink: &mut S) {
        let slot = entry.op_context.cast::<Slot>();
        // SAFETY: contexts that come back with this flag are those of receives.
        let index = unsafe { (*slot).index };
        let buffer = self.slab.at(index as usize - self.caps.depth as usize);
        let len = entry.len.min(self.caps.max_message + HEAD);
        let mut head = [0; HEAD];
        // SAFETY: the buffer is ours until it goes back, below, and `len` bytes of it hold the message.
        let bytes = unsafe { Untrusted::new(buffer, len) };
        bytes.copy_out(&mut head);
        let number = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let kind = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
        let peer = match self.notify {
            Notify::Source => self.peers.addresses.find(self.source(place)),
            _ if len >= HEAD => self.peers.numbers.find(number as u64),
            _ => None,
        };
        if let Some(peer) = self.hears(peer) {
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
        }
        self.give_back(slot);
    }

    /// Posts a receive buffer again, now or in the next pass.
    #[inline(always)]
    fn give_back(&mut self, slot: *mut Slot) {
        // SAFETY: a receive's context, which came back.
        let index = unsafe { (*slot).index };
        if self.post_receive(index).is_err() {
            // Room was made for all of them.
            self.unposted.push(index);
            self.busy = true;
        }
    }

    /// A post has ended well.
    #[inline]
    fn ended<S: Sink>(&mut self, slot: *mut Slot, sink: &mut S) {
        // SAFETY: contexts that come back are ours and stay where they are; the provider is done with this one.
        let (cx, peer, extra, (kind, orphan)) =
            unsafe { ((*slot).cx, (*slot).peer, (*slot).extra, (*slot).used_for()) };
        match kind {
            Kind::Free | Kind::Receive | Kind::Orphan => return,
            Kind::Send => self.bounces.push(extra),
            // SAFETY: writable for 8 bytes until the end is reported, by the promise made when it was posted.
            Kind::Atomic if !orphan => unsafe {
                if !(*slot).fetch.is_null() {
                    (*slot).fetch.write((*slot).words[2]);
                }
            },
            Kind::WriteThenWord if !orphan => self.owe(peer, extra),
            _ => {}
        }
        self.free(slot);
        if !orphan {
            self.settle(peer);
            sink.done(cx, Ok(()));
        }
    }

    /// Takes a context back from the provider.
    fn free(&mut self, slot: *mut Slot) {
        // SAFETY: as in `ended`.
        unsafe {
            self.stats.orphans -= ((*slot).kind == Kind::Orphan) as u32;
            self.pool.give(slot);
        }
    }

    /// A peer owes one end less.
    #[inline(always)]
    pub(super) fn settle(&mut self, peer: u16) {
        let slot = &mut self.peers.slots[peer as usize];
        slot.ended = slot.ended.wrapping_add(1);
    }

    /// The queue gave no completion. Returns whether to go on reading.
    #[cold]
    fn trouble<S: Sink>(&mut self, code: Code, sink: &mut S, count: &mut u32) -> bool {
        if code != Code::EAVAIL {
            self.break_down(code);
            return false;
        }
        match self.endpoint.cq.read_error() {
            Ok(error) => {
                *count += 1;
                self.failed(error, sink);
                true
            }
            Err(Code::EAGAIN) => false,
            Err(code) => {
                self.break_down(code);
                false
            }
        }
    }

    /// An error completion.
    #[cold]
    fn failed<S: Sink>(&mut self, error: CqError, sink: &mut S) {
        self.stats.errors += 1;
        self.stats.last_error = (error.code.0, error.provider);
        let slot = error.op_context.cast::<Slot>();
        if slot.is_null() {
            return;
        }
        // SAFETY: contexts that come back are ours and stay where they are; the provider is done with this one.
        let (cx, peer, extra, (kind, orphan)) =
            unsafe { ((*slot).cx, (*slot).peer, (*slot).extra, (*slot).used_for()) };
        match kind {
            Kind::Free => return,
            // Cut short or cancelled: whoever sent it is not named, and hears nothing of it.
            Kind::Receive => return self.give_back(slot),
            Kind::Send => self.bounces.push(extra),
            _ => {}
        }
        self.free(slot);
        if orphan {
            return;
        }
        self.settle(peer);
        // Nothing is cancelled from here: the provider gave it up together with its connection.
        let lost = error.code.is_disconnect()
            || error.code == Code::ECANCELED
            || !self.peers.slots[peer as usize].up;
        let end = if lost { CompleteError::PeerDown } else { CompleteError::Failed(error.code.0) };
        if lost {
            self.take_down(Peer(peer), PeerError::Died);
        }
        sink.done(cx, Err(end));
    }

    /// What waits: reports, words, receive buffers, a batch that could not be closed.
    #[cold]
    fn chores<S: Sink>(&mut self, budget: u32, sink: &mut S) -> u32 {
        let mut count = 0;
        while count < budget {
            let Some(event) = self.events.pop_front() else { break };
            report(event, sink);
            count += 1;
        }
        while let Some(&(peer, data)) = self.owed.front() {
            if !self.send_word(peer, data) {
                break;
            }
            self.owed.pop_front();
        }
        while let Some(index) = self.unposted.pop() {
            if self.post_receive(index).is_err() {
                self.unposted.push(index);
                break;
            }
        }
        let closed = self.close_batch();
        self.busy = !(closed && self.events.is_empty() && self.owed.is_empty() && self.unposted.is_empty());
        count
    }

    /// Reports something at the next occasion. There is room: one end per context, and little per peer.
    pub(super) fn tell(&mut self, event: Event) {
        self.events.push_back(event);
        self.busy = true;
    }
}

pub(super) fn report<S: Sink>(event: Event, sink: &mut S) {
    match event {
        Event::Done(cx, result) => sink.done(cx, result),
        Event::Down(peer, why) => sink.peer_down(peer, why),
    }
}
