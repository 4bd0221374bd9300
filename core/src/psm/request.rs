//! The requests of a queue: a fixed table of slots, a list of completed requests in completion
//! order, and the deferred sends. Each peer has a queue of deferred sends, and a list contains the
//! first entry of each queue.

use crate::engine::list::{Fifo, Links, Listed, NONE};
use crate::engine::protocol::{Claimed, Request, Status as Ended};
use crate::engine::slots::{Name, Slot, Slots, release, take};
use crate::engine::tag::Tag;
use crate::mem::PeerId;
use crate::op::{Completion, Outcome, Token};
use crate::sync::pool::FreeList;

use super::status::{Code, Status2};

/// The handle of a request. Using the handle of a finished request is a parameter error, never
/// "done".
#[doc(alias = "psm2_mq_req_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MqReq(u64);

impl MqReq {
    /// Returns the handle as a number, for C and other languages. The number is never 0. In a
    /// table of `2^n` slots, bits `n` to 31 are 0.
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// Converts a number back to a handle. A number that `to_raw` never returned names no request.
    pub const fn from_raw(raw: u64) -> MqReq {
        MqReq(raw)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deferred {
    pub to: PeerId,
    pub tag: Tag,
    pub from: super::Buffer,
    pub len: u32,
    pub sync: bool,
}

impl Deferred {
    #[inline(always)]
    pub(super) fn status(self, context: u64, error_code: Code) -> Status2 {
        let len = self.len;
        Status2 {
            msg_peer: Some(self.to),
            msg_tag: self.tag.words(),
            msg_length: len,
            nbytes: if error_code == Code::Ok { len } else { 0 },
            error_code,
            context,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Deferred(Deferred),
    Sending(Token),
    Receiving(Request),
    Claimed(Claimed),
    Completed,
    /// Removed from the list of completed requests. Also the state of a free slot.
    Dequeued,
}

/// A slot of the table of requests.
#[derive(Clone, Copy, Debug)]
pub struct MqSlot {
    pub(super) state: State,
    pub(super) status: Status2,
    pub(super) context: u64,
    pub(super) receive: bool,
    name: Name,
    links: Links,
    /// For a deferred send: the next deferred send to the same peer.
    behind: u32,
    /// For the first deferred send to a peer: the last deferred send to that peer.
    last: u32,
    /// Whether the program has dropped its handle to the request.
    forgotten: bool,
}

impl MqSlot {
    /// A slot without a request.
    pub const EMPTY: MqSlot = MqSlot {
        state: State::Dequeued,
        status: Status2::EMPTY,
        context: 0,
        receive: false,
        name: Name::FRESH,
        links: Links::NONE,
        behind: NONE,
        last: NONE,
        forgotten: false,
    };

    #[inline(always)]
    pub(super) fn req(&self) -> MqReq {
        MqReq(self.name.word())
    }
}

impl Listed for MqSlot {
    #[inline(always)]
    fn links(&self) -> Links {
        self.links
    }

    #[inline(always)]
    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Slot for MqSlot {
    #[inline(always)]
    fn name(&self) -> Name {
        self.name
    }

    #[inline(always)]
    fn name_mut(&mut self) -> &mut Name {
        &mut self.name
    }
}

pub(super) struct Requests<'m> {
    pub slots: Slots<'m, MqSlot>,
    completed: Fifo,
    /// The first deferred send to each peer, and the number of these peers.
    deferred: Fifo,
    waiting: u32,
}

impl<'m> Requests<'m> {
    pub(super) fn new(slots: &'m mut [MqSlot]) -> Self {
        let slots = Slots::new(slots, MqSlot::EMPTY);
        Requests { slots, completed: Fifo::EMPTY, deferred: Fifo::EMPTY, waiting: 0 }
    }

    /// Takes a slot. The status in the slot is stale until the request completes, except for its
    /// peer.
    #[inline(always)]
    pub(super) fn take(
        &mut self,
        context: u64,
        receive: bool,
        peer: Option<PeerId>,
    ) -> Option<(u32, MqReq)> {
        let (slots, free) = self.slots.parts();
        let (index, slot) = take(slots, free)?;
        (slot.context, slot.receive, slot.forgotten) = (context, receive, false);
        slot.status.msg_peer = peer;
        Some((index, slot.req()))
    }

    /// Takes a slot for a send that has completed.
    #[inline(always)]
    pub(super) fn take_completed(&mut self, status: Status2) -> Option<MqReq> {
        let (slots, free) = self.slots.parts();
        let (index, slot) = take(slots, free)?;
        (slot.receive, slot.forgotten) = (false, false);
        (slot.state, slot.status) = (State::Completed, status);
        let req = slot.req();
        self.completed.push(slots, index);
        Some(req)
    }

    /// Returns the slot of a completed request. Returns `None` if the request has not completed, or
    /// there is no such request.
    #[inline(always)]
    pub(super) fn find_completed(&self, req: MqReq) -> Option<u32> {
        let index = self.find(req)?;
        matches!(self.slots[index as usize].state, State::Completed).then_some(index)
    }

    /// Ends a completed request. Passes its status to `take`.
    #[inline(always)]
    pub(super) fn end_with<T>(&mut self, index: u32, take: impl FnOnce(&Status2) -> T) -> T {
        let (slots, free) = self.slots.parts();
        let slot = &mut slots[index as usize];
        let taken = take(&slot.status);
        slot.state = State::Dequeued;
        release(slot, free, index);
        self.completed.remove(slots, index);
        taken
    }

    #[inline(always)]
    pub(super) fn free(&mut self, index: u32) {
        self.slots[index as usize].state = State::Dequeued;
        self.slots.free(index);
    }

    #[inline(always)]
    pub(super) fn word(&self, index: u32) -> u64 {
        self.slots[index as usize].name.word()
    }

    #[inline(always)]
    pub(super) fn name(&self, index: u32) -> MqReq {
        MqReq(self.word(index))
    }

    #[inline(always)]
    pub(super) fn find(&self, req: MqReq) -> Option<u32> {
        self.slots.find(req.0)
    }

    #[inline(always)]
    pub(super) fn complete(&mut self, index: u32) {
        let (slots, free) = self.slots.parts();
        complete(slots, free, &mut self.completed, index);
    }

    #[inline(always)]
    pub(super) fn dequeue(&mut self, index: u32) {
        self.completed.remove(&mut self.slots, index);
        self.slots[index as usize].state = State::Dequeued;
    }

    #[inline(always)]
    pub(super) fn end(&mut self, index: u32) {
        self.end_with(index, |_| ());
    }

    #[inline(always)]
    pub(super) fn oldest(&self) -> Option<u32> {
        self.completed.first()
    }

    pub(super) fn forget(&mut self, req: MqReq) {
        if let Some(index) = self.find(req) {
            self.slots[index as usize].forgotten = true;
        }
    }

    /// Records the engine's completion of a send. Ignores a send of an earlier queue, because
    /// another request may have its handle now.
    pub(super) fn sent(&mut self, end: Completion) {
        let Some(index) = self.find(MqReq(end.tag)) else { return };
        if self.slots[index as usize].state != State::Sending(end.token) {
            return;
        }
        if end.outcome != Outcome::Done {
            let status = &mut self.slots[index as usize].status;
            (status.error_code, status.nbytes) = (Code::InternalErr, 0);
        }
        self.complete(index);
    }

    /// Records the engine's completion of a receive. Ignores a receive of an earlier queue, as
    /// [`sent`](Self::sent) does.
    #[inline(always)]
    pub(super) fn received(&mut self, end: Ended) {
        let index = end.word as u32;
        let (slots, free) = self.slots.parts();
        let Some(slot) = slots.get_mut(index as usize) else { return };
        if slot.name.word() != end.word
            || !matches!(slot.state, State::Receiving(request) if request == end.request)
        {
            return;
        }
        slot.status = Status2::received(&end, slot.context);
        complete(slots, free, &mut self.completed, index);
    }

    /// Returns whether an open request names the peer or any peer, or no request is open. Slow
    /// path: scans all slots.
    pub(super) fn can_wait_for(&self, peer: PeerId) -> bool {
        let mut idle = true;
        for (_, slot) in self.slots.taken() {
            let named = match slot.state {
                State::Sending(_) | State::Receiving(_) => slot.status.msg_peer,
                State::Deferred(send) => Some(send.to),
                State::Claimed(_) | State::Completed | State::Dequeued => continue,
            };
            if named.is_none_or(|named| named == peer) {
                return true;
            }
            idle = false;
        }
        idle
    }

    #[inline(always)]
    pub(super) fn waiting(&self) -> u32 {
        self.waiting
    }

    pub(super) fn deferred_to(&self, to: PeerId) -> Option<u32> {
        let mut at = self.deferred.head;
        while at != NONE {
            let slot = &self.slots[at as usize];
            if matches!(slot.state, State::Deferred(send) if send.to == to) {
                return Some(at);
            }
            at = slot.links.next;
        }
        None
    }

    pub(super) fn defer(&mut self, index: u32, send: Deferred) {
        let slot = &mut self.slots[index as usize];
        (slot.state, slot.behind, slot.last) = (State::Deferred(send), NONE, index);
        match self.deferred_to(send.to) {
            Some(first) => {
                let last = core::mem::replace(&mut self.slots[first as usize].last, index);
                self.slots[last as usize].behind = index;
            }
            None => self.push_deferred(index),
        }
    }

    /// Later sends to the peer of the removed send wait until its outcome is known.
    pub(super) fn pop_deferred(&mut self) -> Option<(u32, Deferred)> {
        let index = self.deferred.first()?;
        let State::Deferred(send) = self.slots[index as usize].state else { return None };
        self.deferred.remove(&mut self.slots, index);
        self.waiting -= 1;
        Some((index, send))
    }

    /// Appends a peer's first deferred send, so that other peers come first.
    pub(super) fn push_deferred(&mut self, index: u32) {
        self.deferred.push(&mut self.slots, index);
        self.waiting += 1;
    }

    /// Queues the next deferred send to the same peer, once the send in slot `index` has left the
    /// queue.
    pub(super) fn behind_deferred(&mut self, index: u32) {
        let MqSlot { behind, last, .. } = self.slots[index as usize];
        if behind != NONE {
            self.slots[behind as usize].last = last;
            self.push_deferred(behind);
        }
    }
}

/// Marks a request as completed, or frees the slot of a forgotten one.
#[inline(always)]
fn complete(slots: &mut [MqSlot], free: &mut FreeList, completed: &mut Fifo, index: u32) {
    let slot = &mut slots[index as usize];
    if slot.forgotten {
        slot.state = State::Dequeued;
        return release(slot, free, index);
    }
    slot.state = State::Completed;
    completed.push(slots, index);
}
