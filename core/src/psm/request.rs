//! The requests of a queue. They use the engine's slots for receives, so each request has one slot.
//! The engine lists the completed ones in completion order. Each peer has a queue of deferred
//! sends, and a list contains the first entry of each queue.

use crate::engine::list::NONE;
use crate::engine::protocol::{RecvSlot, Request, Requests, Stage};
use crate::engine::slots::release_named;
use crate::engine::tag::Tag;
use crate::mem::PeerId;

use super::Buffer;
use super::status::{Code, Status2, length};

/// The handle of a request. Using the handle of a finished request is a parameter error, never
/// "done".
#[doc(alias = "psm2_mq_req_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MqReq(pub(super) Request);

impl MqReq {
    /// Returns the handle as a number, for C and other languages. The number is never 0. In a
    /// table of `2^n` slots, bits `n` to 31 are 0.
    #[inline(always)]
    pub const fn to_raw(self) -> u64 {
        self.0.to_raw()
    }

    /// Converts a number back to a handle. A number that `to_raw` never returned names no request.
    #[inline(always)]
    pub const fn from_raw(raw: u64) -> MqReq {
        MqReq(Request::from_raw(raw))
    }
}

/// A completed request that the queue still has.
#[derive(Clone, Copy)]
pub struct Completed<'q>(&'q RecvSlot);

impl Completed<'_> {
    /// Returns the handle.
    #[inline(always)]
    pub fn req(&self) -> MqReq {
        MqReq(self.0.request())
    }

    /// Returns the status.
    #[inline(always)]
    pub fn status(&self) -> Status2 {
        Status2 {
            msg_peer: self.msg_peer(),
            msg_tag: self.msg_tag(),
            msg_length: self.msg_length(),
            nbytes: self.nbytes(),
            error_code: self.error_code(),
            context: self.context(),
        }
    }

    /// Returns this field of the status.
    #[inline(always)]
    pub fn msg_peer(&self) -> Option<PeerId> {
        self.0.source.get()
    }

    /// Returns this field of the status.
    #[inline(always)]
    pub fn msg_tag(&self) -> [u32; 3] {
        self.0.tag.words()
    }

    /// Returns this field of the status.
    #[inline(always)]
    pub fn msg_length(&self) -> u32 {
        length(self.0.len)
    }

    /// Returns this field of the status.
    #[inline(always)]
    pub fn nbytes(&self) -> u32 {
        // At most the length of a buffer of the queue.
        self.0.delivered as u32
    }

    /// Returns this field of the status.
    #[inline(always)]
    pub fn error_code(&self) -> Code {
        Code::of(self.0)
    }

    /// Returns this field of the status.
    #[inline(always)]
    pub fn context(&self) -> u64 {
        self.0.word
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SendArgs {
    pub to: PeerId,
    pub tag: Tag,
    pub from: Buffer,
    pub len: u32,
    pub sync: bool,
    pub context: u64,
}

impl Requests<'_> {
    /// Takes a slot for a send that completes later.
    pub(super) fn take_send(&mut self, send: &SendArgs) -> Option<u32> {
        let index = self.slots.take()?;
        let slot = &mut self.slots[index as usize];
        slot.write_send(send.to, send.tag, u64::from(send.len), send.context);
        slot.stage = Stage::Sending;
        Some(index)
    }

    /// Frees a completed request, after it has passed the request to `take`. Returns `None` if
    /// there is no such request, or it has not completed.
    #[inline(always)]
    pub(super) fn end_with<T>(
        &mut self,
        req: MqReq,
        take: impl FnOnce(Completed<'_>) -> T,
    ) -> Option<T> {
        let (name, index) = (req.to_raw(), req.to_raw() as u32);
        let (slots, free) = self.slots.parts();
        let completed = |slot: &&mut RecvSlot| slot.is_ended(name);
        let slot = slots.get_mut(index as usize).filter(completed)?;
        let taken = take(Completed(slot));
        release_named(slot, free, name);
        self.ended.remove(slots, index);
        Some(taken)
    }

    /// Returns why a request cannot be taken.
    #[inline(never)]
    pub(super) fn why_not(&self, req: MqReq) -> Code {
        match self.find(req.0).map(|index| self.slots[index as usize].stage) {
            Err(_) | Ok(Stage::Claimed | Stage::Dequeued) => Code::ParamErr,
            Ok(_) => Code::NoCompletions,
        }
    }

    /// Frees the oldest completed request.
    pub(super) fn end_oldest(&mut self) {
        if let Some(oldest) = self.completed() {
            let req = oldest.req();
            _ = self.end_with(req, |_| ());
        }
    }

    /// Frees a request that is in no list.
    pub(super) fn free(&mut self, index: u32) {
        self.slots[index as usize].stage = Stage::Ended;
        self.slots.free(index);
    }

    pub(super) fn dequeue(&mut self, index: u32) {
        self.ended.remove(&mut self.slots, index);
        self.slots[index as usize].stage = Stage::Dequeued;
    }

    #[inline(always)]
    pub(super) fn completed(&self) -> Option<Completed<'_>> {
        self.slots.get(self.ended.head as usize).map(Completed)
    }

    fn deferred_to(&self, to: PeerId) -> Option<u32> {
        let mut at = self.deferred.head;
        while at != NONE {
            let slot = &self.slots[at as usize];
            if slot.source.get() == Some(to) {
                return Some(at);
            }
            at = slot.links.next;
        }
        None
    }

    pub(super) fn is_deferred(&self, to: PeerId) -> bool {
        self.deferred_to(to).is_some()
    }

    pub(super) fn defer(&mut self, index: u32, send: &SendArgs) {
        let slot = &mut self.slots[index as usize];
        (slot.stage, slot.from, slot.sync) = (Stage::Deferred, send.from.into(), send.sync);
        (slot.behind, slot.last) = (NONE, index);
        match self.deferred_to(send.to) {
            Some(first) => {
                let last = core::mem::replace(&mut self.slots[first as usize].last, index);
                self.slots[last as usize].behind = index;
            }
            None => self.push_deferred(index),
        }
    }

    /// Later sends to the peer of the removed send wait until its outcome is known.
    pub(super) fn pop_deferred(&mut self) -> Option<(u32, SendArgs)> {
        let index = self.deferred.first()?;
        self.deferred.remove(&mut self.slots, index);
        self.waiting -= 1;
        let slot = &self.slots[index as usize];
        let send = SendArgs {
            to: slot.source.get()?,
            tag: slot.tag,
            from: slot.from.into(),
            len: slot.len as u32,
            sync: slot.sync,
            context: slot.word,
        };
        Some((index, send))
    }

    /// Appends a peer's first deferred send, so that other peers come first.
    pub(super) fn push_deferred(&mut self, index: u32) {
        self.slots[index as usize].stage = Stage::Deferred;
        self.deferred.push(&mut self.slots, index);
        self.waiting += 1;
    }

    /// Queues the next deferred send to the same peer, once the send in slot `index` has left the
    /// queue.
    pub(super) fn behind_deferred(&mut self, index: u32) {
        let RecvSlot { behind, last, .. } = self.slots[index as usize];
        if behind != NONE {
            self.slots[behind as usize].last = last;
            self.push_deferred(behind);
        }
    }
}
