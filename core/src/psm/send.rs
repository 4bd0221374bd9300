//! Sends. The queue defers a send for which the engine has no room. Later polls issue deferred
//! sends, in order for each peer.

use core::slice;

use crate::engine::protocol::Payload;
use crate::engine::tag::Tag;
use crate::engine::{Issued, Notice, Waiter};
use crate::error::OpError;
use crate::mem::PeerId;
use crate::rail::Rail;
use crate::sync::event::Park;
use crate::sync::host::Host;

use super::request::{Deferred, MqReq, State};
use super::status::{Code, Stats};
use super::{Buffer, FLAG_SENDSYNC, Mq};

impl<R: Rail, const RAILS: usize> Mq<'_, '_, R, RAILS> {
    /// Starts a send with a 64-bit tag.
    ///
    /// # Errors
    /// The errors of [`isend2`](Self::isend2).
    #[doc(alias = "psm2_mq_isend")]
    #[doc(alias = "psm_mq_isend")]
    pub fn isend(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: u64,
        from: impl Into<Buffer>,
        context: u64,
    ) -> Result<MqReq, Code> {
        self.begin(to, flags, Tag::from(tag), from.into(), context)
    }

    /// Starts a send with a 96-bit tag. If there is no room now, later polls and probes issue it,
    /// in order for each peer.
    ///
    /// # Errors
    /// [`Code::NoMemory`] if every request is in use. [`Code::InternalErr`] if the peer has failed.
    /// [`Code::ParamErr`] for an unknown peer, or an invalid buffer or flag.
    #[doc(alias = "psm2_mq_isend2")]
    #[inline(always)]
    pub fn isend2(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: impl Into<Tag>,
        from: impl Into<Buffer>,
        context: u64,
    ) -> Result<MqReq, Code> {
        self.begin(to, flags, tag.into(), from.into(), context)
    }

    /// Starts a send like [`isend`](Self::isend), and waits for its completion.
    ///
    /// # Errors
    /// The errors of [`isend`](Self::isend), and [`Code::NoCompletions`] if the deadline expires.
    /// The send then continues and is not reported.
    #[doc(alias = "psm2_mq_send")]
    pub fn send<H: Host, P: Park>(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: u64,
        from: impl Into<Buffer>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), Code> {
        let from = from.into();
        if flags == 0 && self.send_at_once(to, Tag::from(tag), from) {
            return Ok(());
        }
        let req = self.isend(to, flags, tag, from, 0)?;
        self.sent(req, waiter, deadline_ns)
    }

    /// Starts a send like [`isend2`](Self::isend2), and waits for its completion.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send).
    #[doc(alias = "psm2_mq_send2")]
    pub fn send2<H: Host, P: Park>(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: [u32; 3],
        from: impl Into<Buffer>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), Code> {
        let from = from.into();
        if flags == 0 && self.send_at_once(to, Tag::from_words(tag), from) {
            return Ok(());
        }
        let req = self.isend2(to, flags, tag, from, 0)?;
        self.sent(req, waiter, deadline_ns)
    }

    fn sent<H: Host, P: Park>(
        &mut self,
        req: MqReq,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), Code> {
        match self.wait2(&mut Some(req), waiter, deadline_ns) {
            Ok(status) if status.error_code == Code::Ok => Ok(()),
            Ok(status) => Err(status.error_code),
            Err(error) => {
                self.state.requests.forget(req);
                Err(error)
            }
        }
    }

    /// Sends a short message at once, without a request. Returns false if nothing was done: then
    /// [`isend2`](Self::isend2) starts the send, or returns why it cannot.
    #[inline(always)]
    pub fn send2_at_once(
        &mut self,
        to: PeerId,
        tag: impl Into<Tag>,
        from: impl Into<Buffer>,
    ) -> bool {
        self.send_at_once(to, tag.into(), from.into())
    }

    /// Sends a short message at once, like [`send2_at_once`](Self::send2_at_once). Returns its
    /// request, which has completed, or `None` if nothing was done.
    #[inline(always)]
    pub fn isend2_at_once(
        &mut self,
        to: PeerId,
        tag: impl Into<Tag>,
        from: impl Into<Buffer>,
        context: u64,
    ) -> Option<MqReq> {
        let (tag, from): (Tag, Buffer) = (tag.into(), from.into());
        // Collect earlier completions first, to preserve completion order.
        self.collect();
        let len = from.len().ok()?;
        self.state.requests.slots.first_free()?;
        if !self.send_at_once(to, tag, from) {
            return None;
        }
        let send = Deferred { to, tag, from, len, sync: false };
        self.state.requests.take_completed(send.status(context, Code::Ok))
    }

    #[inline(always)]
    fn send_at_once(&mut self, to: PeerId, tag: Tag, from: Buffer) -> bool {
        let payload = match from {
            Buffer::Region(at, len) => Payload::Region(at, len as usize),
            Buffer::Span(span) => Payload::Span(span),
            Buffer::Nothing => Payload::Bytes(&[]),
        };
        // A send waits behind deferred sends.
        if self.state.requests.waiting() != 0 {
            return false;
        }
        let Some((len, rails)) = self.engine.post_eager(self.state.context, to, tag, payload)
        else {
            return false;
        };
        self.state.stats.tx_eager_num += 1;
        self.state.stats.tx_eager_bytes += len;
        self.state.stats.tx_shm_num += u64::from(rails & 1);
        true
    }

    /// Short messages are sent at once if there is room, and all others on the slow path.
    #[inline(always)]
    fn begin(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: Tag,
        from: Buffer,
        context: u64,
    ) -> Result<MqReq, Code> {
        let begun = match flags {
            0 => self.isend2_at_once(to, tag, from, context),
            _ => None,
        };
        begun.map_or_else(|| self.begin_slow(to, flags, tag, from, context), Ok)
    }

    #[inline(never)]
    fn begin_slow(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: Tag,
        from: Buffer,
        context: u64,
    ) -> Result<MqReq, Code> {
        if flags & !FLAG_SENDSYNC != 0 {
            return Err(Code::ParamErr);
        }
        let len = from.len()?;
        let (index, _) =
            self.state.requests.take(context, false, Some(to)).ok_or(Code::NoMemory)?;
        let send = Deferred { to, tag, from, len, sync: flags & FLAG_SENDSYNC != 0 };
        // A send waits behind earlier deferred sends to the same peer.
        let begun = match self.state.requests.deferred_to(to) {
            Some(_) => Err(OpError::Again),
            None => self.start(index, send),
        };
        match begun {
            Ok(()) => {}
            Err(OpError::Again) => self.state.requests.defer(index, send),
            Err(error) => {
                self.state.requests.free(index);
                return Err(error.into());
            }
        }
        Ok(self.state.requests.name(index))
    }

    fn start(&mut self, index: u32, send: Deferred) -> Result<(), OpError> {
        let short = send.len as usize <= self.engine.eager_max(send.to);
        let (payload, copied) = match send.from {
            Buffer::Region(at, len) => (Payload::Region(at, len as usize), false),
            Buffer::Span(span) if short && !send.sync => {
                // SAFETY: the creator of a span guarantees that it is valid and unchanged during
                // this call. Its pointer is not null.
                let bytes = unsafe { slice::from_raw_parts(span.ptr().as_ptr(), span.len()) };
                (Payload::Bytes(bytes), true)
            }
            Buffer::Span(span) => (Payload::Span(span), false),
            Buffer::Nothing => (Payload::Bytes(&[]), false),
        };
        // Without a credit the engine makes a copy, so a copied send is complete in any case.
        let notice = match copied {
            true => Notice::Silent,
            false => Notice::Report(self.state.requests.word(index)),
        };
        let issued = match send.sync {
            true => {
                self.engine.send_sync(self.state.context, send.to, send.tag, payload, notice)?
            }
            false => self.engine.send(self.state.context, send.to, send.tag, payload, notice)?,
        };
        self.count(send, issued);
        let slot = &mut self.state.requests.slots[index as usize];
        slot.status = send.status(slot.context, Code::Ok);
        match issued {
            Issued::Pending(token) if !copied => slot.state = State::Sending(token),
            Issued::Pending(_) | Issued::Done { .. } => {
                // Collect earlier completions first, to preserve completion order.
                self.collect();
                self.state.requests.complete(index);
            }
        }
        Ok(())
    }

    /// Counts a message that the engine has accepted. A short message without a credit counts as
    /// rendezvous, because its payload stays here.
    fn count(&mut self, send: Deferred, issued: Issued) {
        let len = u64::from(send.len);
        let stays = matches!(issued, Issued::Pending(token) if self.engine.is_fetched(token));
        let Stats { tx_eager_num, tx_eager_bytes, tx_rndv_num, tx_rndv_bytes, .. } =
            &mut self.state.stats;
        let (num, bytes) = match stays {
            true => (tx_rndv_num, tx_rndv_bytes),
            false => (tx_eager_num, tx_eager_bytes),
        };
        (*num, *bytes) = (*num + 1, *bytes + len);
        self.state.stats.tx_shm_num += u64::from(self.is_near(send.to));
    }

    /// Issues at most one batch: the peers in turn, and the sends to each peer in order.
    pub(super) fn send_deferred(&mut self) {
        let mut stuck = 0;
        for _ in 0..self.engine.config().batch {
            if stuck >= self.state.requests.waiting() {
                return;
            }
            let Some((index, send)) = self.state.requests.pop_deferred() else { return };
            stuck = match self.start(index, send) {
                Err(OpError::Again) => {
                    self.state.requests.push_deferred(index);
                    stuck + 1
                }
                sent => {
                    self.state.requests.behind_deferred(index);
                    if sent.is_err() {
                        let slot = &mut self.state.requests.slots[index as usize];
                        slot.status = send.status(slot.context, Code::InternalErr);
                        self.state.requests.complete(index);
                    }
                    0
                }
            };
        }
    }
}
