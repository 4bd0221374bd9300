//! Requests: a fixed table of slots; a list of completed ones in completion order; and the deferred
//! sends, a queue per peer and a list of the queues' first entries.

use crate::engine::list::{Fifo, Links, Listed, NONE};
use crate::engine::protocol::{Claimed, Request, Status as Ended};
use crate::engine::slots::{Name, Slot, Slots};
use crate::engine::tag::Tag;
use crate::mem::PeerId;
use crate::op::{Completion, Outcome, Token};

use super::status::{Code, Status2};

/// A request. Using a finished one is a parameter error, never "done".
#[doc(alias = "psm2_mq_req_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MqReq(u64);

impl MqReq {
    /// As a number, for languages without types. Never 0. Of a table of `2^n` slots, bits `n` to 31
    /// are 0.
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// The reverse. A number that was never given names no request.
    pub const fn from_raw(raw: u64) -> MqReq {
        MqReq(raw)
    }
}

/// A send that found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deferred {
    pub to: PeerId,
    pub tag: Tag,
    pub from: super::Buffer,
    pub len: u32,
    pub sync: bool,
}

impl Deferred {
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

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Deferred(Deferred),
    Sending(Token),
    Receiving(Request),
    Claimed(Claimed),
    /// In the list of the completed.
    Completed,
    /// No longer; also while its slot is free.
    Dequeued,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct MqSlot {
    pub(super) state: State,
    pub(super) status: Status2,
    pub(super) context: u64,
    pub(super) receive: bool,
    name: Name,
    links: Links,
    /// For a send that found no room: the next such send to the same peer.
    behind: u32,
    /// Of the first of them: the last.
    last: u32,
    /// The program has no handle to it any more.
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
}

impl Listed for MqSlot {
    fn links(&self) -> Links {
        self.links
    }

    fn links_mut(&mut self) -> &mut Links {
        &mut self.links
    }
}

impl Slot for MqSlot {
    fn name(&self) -> Name {
        self.name
    }

    fn name_mut(&mut self) -> &mut Name {
        &mut self.name
    }
}

/// The table.
pub(super) struct Requests<'m> {
    pub slots: Slots<'m, MqSlot>,
    completed: Fifo,
    /// The first send to each peer among those that found no room, and how many they are.
    deferred: Fifo,
    waiting: u32,
}

impl<'m> Requests<'m> {
    pub(super) fn new(slots: &'m mut [MqSlot]) -> Self {
        let slots = Slots::new(slots, MqSlot::EMPTY);
        Requests { slots, completed: Fifo::EMPTY, deferred: Fifo::EMPTY, waiting: 0 }
    }

    pub(super) fn take(&mut self, context: u64, receive: bool) -> Option<u32> {
        let index = self.slots.take()?;
        let slot = &mut self.slots[index as usize];
        (slot.context, slot.receive, slot.forgotten) = (context, receive, false);
        slot.status = Status2::EMPTY;
        Some(index)
    }

    pub(super) fn free(&mut self, index: u32) {
        self.slots[index as usize].state = State::Dequeued;
        self.slots.free(index);
    }

    /// The context word that the engine returns with the end of a request.
    pub(super) fn word(&self, index: u32) -> u64 {
        self.slots[index as usize].name.word()
    }

    pub(super) fn name(&self, index: u32) -> MqReq {
        MqReq(self.word(index))
    }

    pub(super) fn find(&self, req: MqReq) -> Option<u32> {
        self.slots.find(req.0)
    }

    pub(super) fn complete(&mut self, index: u32) {
        if self.slots[index as usize].forgotten {
            return self.free(index);
        }
        self.slots[index as usize].state = State::Completed;
        self.completed.push(&mut self.slots, index);
    }

    /// Takes a completed one off its list.
    pub(super) fn dequeue(&mut self, index: u32) {
        self.completed.remove(&mut self.slots, index);
        self.slots[index as usize].state = State::Dequeued;
    }

    pub(super) fn oldest(&self) -> Option<u32> {
        self.completed.first()
    }

    /// Marks a request whose handle the program has dropped.
    pub(super) fn forget(&mut self, req: MqReq) {
        if let Some(index) = self.find(req) {
            self.slots[index as usize].forgotten = true;
        }
    }

    /// A send has ended in the engine.
    /// It may be an earlier queue's, whose name another one has here.
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

    /// A receive has ended in the engine; as above.
    pub(super) fn received(&mut self, end: Ended) {
        let Some(index) = self.find(MqReq(end.word)) else { return };
        let slot = &mut self.slots[index as usize];
        if slot.state != State::Receiving(end.request) {
            return;
        }
        slot.status = Status2::received(&end, slot.context);
        self.complete(index);
    }

    /// How many peers have sends that found no room.
    pub(super) fn waiting(&self) -> u32 {
        self.waiting
    }

    /// The first send to this peer that found no room.
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

    /// A send found no room: it waits behind those to the same peer.
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

    /// Takes the peer's first send off the list. Those behind it wait until its outcome is known.
    pub(super) fn pop_deferred(&mut self) -> Option<(u32, Deferred)> {
        let index = self.deferred.first()?;
        let State::Deferred(send) = self.slots[index as usize].state else { return None };
        self.deferred.remove(&mut self.slots, index);
        self.waiting -= 1;
        Some((index, send))
    }

    /// There is no room yet: the turn of other peers.
    pub(super) fn push_deferred(&mut self, index: u32) {
        self.deferred.push(&mut self.slots, index);
        self.waiting += 1;
    }

    /// The next send to the peer of a send that is no longer deferred.
    pub(super) fn behind_deferred(&mut self, index: u32) {
        let MqSlot { behind, last, .. } = self.slots[index as usize];
        if behind != NONE {
            self.slots[behind as usize].last = last;
            self.push_deferred(behind);
        }
    }
}
