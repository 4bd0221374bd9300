//! Receives and the requests of a matched queue: a fixed table of slots. A slot is in use until the
//! status of its request is taken.
//!
//! The slot of a receive is posted (in the matcher), in flight (matched, its payload still moving),
//! or ended. A [matched queue](crate::psm) also has slots for its sends and for claimed messages,
//! so that all its requests complete in one order. Nothing here allocates; every step is a few
//! stores.

use crate::error::OpError;
use crate::mem::PeerId;

use super::super::list::Fifo;
use super::super::slots::{Slots, take};
use super::super::tag::{ReceiveId, Tag};
use super::request::{Request, Status};
use super::slot::{Buffer, RecvSlot, Stage};

pub(crate) struct Requests<'m> {
    pub slots: Slots<'m, RecvSlot>,
    /// Requests with a status to take, oldest first.
    pub ended: Fifo,
    /// Receives with something to post. `due_len` is their number.
    due: Fifo,
    due_len: u32,
    /// The first deferred send to each peer. `waiting` is the number of these peers.
    pub deferred: Fifo,
    pub waiting: u32,
}

impl<'m> Requests<'m> {
    pub(crate) fn new(slots: &'m mut [RecvSlot]) -> Self {
        let slots = Slots::new(slots, RecvSlot::EMPTY);
        let (ended, due, deferred) = (Fifo::EMPTY, Fifo::EMPTY, Fifo::EMPTY);
        Requests { slots, ended, due, due_len: 0, deferred, waiting: 0 }
    }

    /// Takes a slot for a send that completes at once.
    #[inline(always)]
    pub(super) fn take_sent(
        &mut self,
        to: PeerId,
        tag: Tag,
        len: u64,
        word: u64,
    ) -> Option<Request> {
        let (slots, free) = self.slots.parts();
        let (index, slot) = take(slots, free)?;
        slot.write_send(to, tag, len, word);
        let request = slot.request();
        self.ended.push(slots, index);
        Some(request)
    }

    #[inline(always)]
    pub(super) fn open(
        &mut self,
        index: u32,
        buffer: &Buffer,
        word: u64,
        posted: ReceiveId,
    ) -> Request {
        self.slots.take_first(index).receive(buffer, word, posted)
    }

    #[inline(always)]
    pub(crate) fn name(&self, index: u32) -> Request {
        self.slots[index as usize].request()
    }

    #[inline(always)]
    pub(crate) fn find(&self, request: Request) -> Result<u32, OpError> {
        self.slots.find(request.0).ok_or(OpError::StaleToken)
    }

    #[inline(always)]
    pub(crate) fn end(&mut self, index: u32, order: &mut u64) {
        if end(self.slots.parts().0, &mut self.ended, index, order) {
            self.release(index);
        }
    }

    pub(crate) fn push_due(&mut self, index: u32, stage: Stage) {
        self.slots[index as usize].stage = stage;
        self.due.push(&mut self.slots, index);
        self.due_len += 1;
    }

    pub(crate) fn pop_due(&mut self) -> Option<(u32, Stage)> {
        let index = self.due.first()?;
        self.remove_due(index);
        let stage = core::mem::replace(&mut self.slots[index as usize].stage, Stage::InHand);
        Some((index, stage))
    }

    pub(crate) fn remove_due(&mut self, index: u32) {
        self.due.remove(&mut self.slots, index);
        self.due_len -= 1;
    }

    #[inline(always)]
    pub(crate) fn due(&self) -> u32 {
        self.due_len
    }

    #[inline(always)]
    pub(crate) fn oldest(&self) -> Option<u32> {
        self.ended.first()
    }

    #[inline(always)]
    pub(crate) fn status(&self, index: u32) -> Status {
        self.slots[index as usize].status()
    }

    #[inline(always)]
    pub(crate) fn take_oldest(&mut self) -> Option<Status> {
        let index = self.oldest()?;
        let status = self.status(index);
        self.slots.free(index);
        self.ended.pop(&mut self.slots);
        Some(status)
    }

    /// The id becomes stale. Inlined, so that a caller loads only the fields that it uses.
    #[inline(always)]
    pub(crate) fn take(&mut self, index: u32) -> Status {
        let status = self.status(index);
        self.release(index);
        status
    }

    #[inline(always)]
    pub(super) fn release(&mut self, index: u32) {
        self.slots.free(index);
        self.ended.remove(&mut self.slots, index);
    }
}

/// Ends a request, for a caller that has loaded the address of the slots. The caller must
/// [release](Requests::release) the request if this returns `true`.
#[inline(always)]
pub(super) fn end(slots: &mut [RecvSlot], ended: &mut Fifo, index: u32, order: &mut u64) -> bool {
    let slot = &mut slots[index as usize];
    (slot.stage, slot.order) = (Stage::Ended, *order);
    *order += 1;
    let unclaimed = slot.unclaimed;
    ended.push(slots, index);
    unclaimed
}
