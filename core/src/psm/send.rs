//! Sends. The queue defers a send for which the engine has no room. Later polls issue deferred
//! sends, in order for each peer.

use core::slice;

use crate::engine::protocol::{Caller, Form, Payload, Received, Request, SendEnd, Stage};
use crate::engine::tag::Tag;
use crate::engine::{Issued, Notice, Waiter};
use crate::error::{OpError, PeerError};
use crate::mem::PeerId;
use crate::op::Fault;
use crate::rail::Rail;
use crate::sync::event::Park;
use crate::sync::host::Host;

use super::request::{MqReq, SendArgs};
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
        if flags == 0 && self.send2_at_once(to, tag, from) {
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
        if flags == 0 && self.send2_at_once(to, tag, from) {
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
                self.engine.forget(req.0);
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
        self.send_at_once(to, tag.into(), from.into(), Caller::Queue).is_some()
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
        from.len().ok()?;
        self.send_at_once(to, tag, from, Caller::Request(context)).map(MqReq)
    }

    /// Returns the caller's request. It names none if the caller needs none.
    #[inline(always)]
    fn send_at_once(
        &mut self,
        to: PeerId,
        tag: Tag,
        from: Buffer,
        caller: Caller,
    ) -> Option<Request> {
        let payload = match from {
            Buffer::Region(at, len) => Payload::Region(at, len as usize),
            Buffer::Span(span) => Payload::Span(span),
            Buffer::Nothing => Payload::Bytes(&[]),
        };
        let (len, rails, request) =
            self.engine.post_eager(self.state.context, to, tag, payload, caller)?;
        self.state.stats.tx_eager_num += 1;
        self.state.stats.tx_eager_bytes += len;
        self.state.stats.tx_shm_num += u64::from(rails & 1);
        Some(request)
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
        let send = SendArgs { to, tag, from, len, sync: flags & FLAG_SENDSYNC != 0, context };
        let requests = self.engine.requests_mut().ok_or(Code::ParamErr)?;
        let index = requests.take_send(&send).ok_or(Code::NoMemory)?;
        let req = MqReq(requests.name(index));
        // A send waits behind earlier deferred sends to the same peer.
        let begun = match requests.is_deferred(to) {
            true => Err(OpError::Again),
            false => self.start(index, &send),
        };
        if let Err(error) = begun
            && let Some(requests) = self.engine.requests_mut()
        {
            match error {
                OpError::Again => requests.defer(index, &send),
                _ => {
                    requests.free(index);
                    return Err(error.into());
                }
            }
        }
        Ok(req)
    }

    /// Sends the message of a request in stage `Sending`, which ends the request now or later.
    fn start(&mut self, index: u32, send: &SendArgs) -> Result<(), OpError> {
        let short = send.len as usize <= self.engine.eager_max(send.to) && !send.sync;
        let (payload, copied) = match send.from {
            Buffer::Region(at, len) => (Payload::Region(at, len as usize), false),
            Buffer::Span(span) if short => {
                // SAFETY: the creator of a span guarantees that it is valid and unchanged during
                // this call. Its pointer is not null.
                let bytes = unsafe { slice::from_raw_parts(span.ptr().as_ptr(), span.len()) };
                (Payload::Bytes(bytes), true)
            }
            Buffer::Span(span) => (Payload::Span(span), false),
            Buffer::Nothing => (Payload::Bytes(&[]), false),
        };
        let context = self.state.context;
        // No earlier send to this peer is deferred here, so this message is the next one. The slow
        // path would need an operation, even for a message that can be posted at once.
        if short && self.engine.send_eager(context, send.to, send.tag, payload).is_some() {
            self.count(send, Form::Eager);
            self.engine.end_request(index);
            return Ok(());
        }
        let request = self.requests().ok_or(OpError::NoMatching)?.name(index);
        // Without a credit the engine makes a copy, so a copied send is complete in any case.
        let end = match copied {
            true => SendEnd::Notice(Notice::Silent),
            false => SendEnd::Request(request),
        };
        let (issued, form) =
            self.engine.send_slow(context, send.to, send.tag, payload, end, send.sync)?;
        self.count(send, form);
        match issued {
            Issued::Pending(_) if !copied => {}
            Issued::Pending(_) | Issued::Done { .. } => self.engine.end_request(index),
        }
        Ok(())
    }

    /// Counts a message that the engine has accepted. A short message without a credit counts as
    /// rendezvous, because its payload stays here.
    fn count(&mut self, send: &SendArgs, form: Form) {
        let len = u64::from(send.len);
        let Stats { tx_eager_num, tx_eager_bytes, tx_rndv_num, tx_rndv_bytes, .. } =
            &mut self.state.stats;
        let (num, bytes) = match form {
            Form::Request => (tx_rndv_num, tx_rndv_bytes),
            _ => (tx_eager_num, tx_eager_bytes),
        };
        (*num, *bytes) = (*num + 1, *bytes + len);
        self.state.stats.tx_shm_num += u64::from(self.is_near(send.to));
    }

    /// Issues at most one batch: the peers in turn, and the sends to each peer in order.
    pub(super) fn send_deferred(&mut self) {
        let mut stuck = 0;
        for _ in 0..self.engine.config().batch {
            let Some(requests) = self.engine.requests_mut() else { return };
            if stuck >= requests.waiting {
                return;
            }
            let Some((index, send)) = requests.pop_deferred() else { return };
            requests.slots[index as usize].stage = Stage::Sending;
            let sent = self.start(index, &send);
            let Some(requests) = self.engine.requests_mut() else { return };
            stuck = match sent {
                Err(OpError::Again) => {
                    requests.push_deferred(index);
                    stuck + 1
                }
                sent => {
                    requests.behind_deferred(index);
                    if sent.is_err() {
                        let lost = Received::Failed(Fault::Peer(PeerError::Lost));
                        requests.slots[index as usize].spoil(lost);
                        self.engine.end_request(index);
                    }
                    0
                }
            };
        }
    }
}
