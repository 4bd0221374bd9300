//! Matched queues as PSM and PSM2 define them, on an [`Engine`]: what a C binding stands on.
//!
//! Calls keep the names and the rules of `psm2_mq.h`; where that leaves something to chance (contents of a status after a cancel or a
//! probe, a synchronous send to oneself that is tested early) it is defined here. One [`Mq`] has an engine to itself: it takes all of
//! the engine's completions. It never allocates; only [`Mq::wait`], [`Mq::wait2`], [`Mq::send`] and [`Mq::send2`] block, and they
//! take a deadline.
//!
//! # Rules
//!
//! - Version 1 has tags of 64 bits and no source: `irecv` matches from anybody, whatever the third word says. Version 2 has
//!   three words of 32 bits and a source. `tagsel` has a bit set for each bit that is compared.
//! - Requests complete in an order of their own, sends and receives alike: [`Mq::ipeek`] tells the oldest completed and leaves it;
//!   it makes progress only if none is there. [`Mq::test`] makes none.
//! - A request is over when `wait`, `test` or `req_free` has taken it, never before; its handle is stale then.
//! - [`Mq::cancel`] takes a receive back that has not matched. It completes, and is still to be taken.
//! - A message that is longer than its buffer completes with [`Code::Truncation`]; the call itself is fine. `msg_length` is always
//!   the sender's length and `nbytes` what was delivered.
//!
//! # Files
//!
//! `request` is the table of requests, `status` what is said of them; `provider` the calls that a libfabric provider makes besides.

mod provider;
mod request;
mod status;

pub use provider::{Copied, Fast, Opt};
pub use request::{MqReq, MqSlot};
pub use status::{Code, Stats, Status, Status2};

use crate::engine::protocol::{Cancelled, Envelope, Payload};
use crate::engine::tag::Tag;
use crate::engine::{ContextId, Engine, Issued, Notice, Waiter};
use crate::error::OpError;
use crate::mem::{LocalAddr, PeerId};
use crate::rail::Rail;
use crate::sync::event::Park;
use crate::sync::host::Host;

use request::{Deferred, Requests, State};

/// Bytes of registered memory: where they begin, and how many. Without it, none.
pub type Buffer = Option<(LocalAddr, u32)>;

/// A send completes only once it has matched.
#[doc(alias = "PSM2_MQ_FLAG_SENDSYNC")]
pub const FLAG_SENDSYNC: u32 = 0x01;

/// A matched queue.
#[doc(alias = "psm2_mq_t")]
pub struct Mq<'e, 'm, R: Rail, const RAILS: usize> {
    engine: &'e mut Engine<'m, R, RAILS>,
    context: ContextId,
    requests: Requests<'e>,
    stats: Stats,
    /// An option without effect.
    max_sysbuf_mbytes: u32,
}

impl<'e, 'm, R: Rail, const RAILS: usize> Mq<'e, 'm, R, RAILS> {
    /// A queue over an engine that matches, which sends in `context`, with one slot per request that is not over.
    ///
    /// # Errors
    /// [`Code::ParamErr`] if the engine does not match, or there is no slot.
    #[doc(alias = "psm2_mq_init")]
    pub fn new(
        engine: &'e mut Engine<'m, R, RAILS>,
        context: ContextId,
        slots: &'e mut [MqSlot],
    ) -> Result<Self, Code> {
        if !engine.has_matching() || slots.is_empty() || context.0 as u16 >= engine.config().contexts {
            return Err(Code::ParamErr);
        }
        let requests = Requests::new(slots);
        Ok(Mq { engine, context, requests, stats: Stats::default(), max_sysbuf_mbytes: u32::MAX })
    }

    /// The engine, between calls.
    pub fn engine_mut(&mut self) -> &mut Engine<'m, R, RAILS> {
        self.engine
    }

    /// Posts a receive of 64 bits, from anybody.
    ///
    /// # Errors
    /// [`Code::NoMemory`] without a free request, [`Code::ParamErr`] for a bad buffer.
    #[doc(alias = "psm2_mq_irecv")]
    #[doc(alias = "psm_mq_irecv")]
    pub fn irecv(&mut self, tag: u64, tagsel: u64, into: Buffer, context: u64) -> Result<MqReq, Code> {
        self.post(None, Tag::from(tag), narrow(tagsel), into, context)
    }

    /// Posts a receive of 96 bits, from one peer or, with none, from anybody.
    ///
    /// # Errors
    /// As [`irecv`](Self::irecv).
    #[doc(alias = "psm2_mq_irecv2")]
    pub fn irecv2(
        &mut self,
        source: Option<PeerId>,
        tag: [u32; 3],
        tagsel: [u32; 3],
        into: Buffer,
        context: u64,
    ) -> Result<MqReq, Code> {
        self.post(source, Tag::from_words(tag), !Tag::from_words(tagsel), into, context)
    }

    /// Receives a message that [`improbe`](Self::improbe) has claimed. The handle becomes that of the receive.
    ///
    /// # Errors
    /// [`Code::ParamErr`] for a handle of anything else.
    #[doc(alias = "psm2_mq_imrecv")]
    pub fn imrecv(&mut self, into: Buffer, context: u64, req: MqReq) -> Result<(), Code> {
        let index = self.requests.find(req).ok_or(Code::ParamErr)?;
        let State::Claimed(message) = self.requests.slots[index as usize].state else {
            return Err(Code::ParamErr);
        };
        let into = into.map(|(at, len)| (at, len as usize));
        match self.engine.mrecv(message, into, self.requests.word(index)) {
            Ok(request) => {
                let slot = &mut self.requests.slots[index as usize];
                (slot.state, slot.context) = (State::Receiving(request), context);
                Ok(())
            }
            Err(OpError::Again) => Err(Code::NoMemory),
            Err(_) => Err(Code::ParamErr),
        }
    }

    /// Begins a send under a tag of 64 bits.
    ///
    /// # Errors
    /// As [`isend2`](Self::isend2).
    #[doc(alias = "psm2_mq_isend")]
    #[doc(alias = "psm_mq_isend")]
    pub fn isend(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: u64,
        from: Buffer,
        context: u64,
    ) -> Result<MqReq, Code> {
        self.begin(to, flags, Tag::from(tag), from, context)
    }

    /// Begins a send under a tag of 96 bits. What finds no room now is sent by later polls, in order.
    ///
    /// # Errors
    /// [`Code::NoMemory`] without a free request, [`Code::ParamErr`] for a bad peer, buffer or flag.
    #[doc(alias = "psm2_mq_isend2")]
    pub fn isend2(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: [u32; 3],
        from: Buffer,
        context: u64,
    ) -> Result<MqReq, Code> {
        self.begin(to, flags, Tag::from_words(tag), from, context)
    }

    /// [`isend`](Self::isend), and waits for it.
    ///
    /// # Errors
    /// As there; [`Code::NoCompletions`] at the deadline: the send goes on, and its end is not told.
    #[doc(alias = "psm2_mq_send")]
    pub fn send<H: Host, P: Park>(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: u64,
        from: Buffer,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), Code> {
        let req = self.isend(to, flags, tag, from, 0)?;
        self.sent(req, waiter, deadline_ns)
    }

    /// [`isend2`](Self::isend2), and waits for it.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    #[doc(alias = "psm2_mq_send2")]
    pub fn send2<H: Host, P: Park>(
        &mut self,
        to: PeerId,
        flags: u32,
        tag: [u32; 3],
        from: Buffer,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<(), Code> {
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
                self.requests.forget(req);
                Err(error)
            }
        }
    }

    /// Looks for a message of 64 bits that nobody has received. It stays.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if there is none.
    #[doc(alias = "psm2_mq_iprobe")]
    pub fn iprobe(&mut self, tag: u64, tagsel: u64) -> Result<Status, Code> {
        self.probe(None, Tag::from(tag), narrow(tagsel)).map(Status::from)
    }

    /// Looks for a message of 96 bits that nobody has received. It stays.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if there is none, [`Code::ParamErr`] for a bad peer.
    #[doc(alias = "psm2_mq_iprobe2")]
    pub fn iprobe2(
        &mut self,
        source: Option<PeerId>,
        tag: [u32; 3],
        tagsel: [u32; 3],
    ) -> Result<Status2, Code> {
        self.probe(source, Tag::from_words(tag), !Tag::from_words(tagsel))
    }

    /// [`iprobe`](Self::iprobe) that claims the message for [`imrecv`](Self::imrecv).
    ///
    /// # Errors
    /// As there; [`Code::NoMemory`] without a free request, and then nothing is claimed.
    #[doc(alias = "psm2_mq_improbe")]
    pub fn improbe(&mut self, tag: u64, tagsel: u64) -> Result<(MqReq, Status), Code> {
        self.claim(None, Tag::from(tag), narrow(tagsel)).map(|(req, status)| (req, status.into()))
    }

    /// [`iprobe2`](Self::iprobe2) that claims the message for [`imrecv`](Self::imrecv).
    ///
    /// # Errors
    /// As [`improbe`](Self::improbe).
    #[doc(alias = "psm2_mq_improbe2")]
    pub fn improbe2(
        &mut self,
        source: Option<PeerId>,
        tag: [u32; 3],
        tagsel: [u32; 3],
    ) -> Result<(MqReq, Status2), Code> {
        self.claim(source, Tag::from_words(tag), !Tag::from_words(tagsel))
    }

    /// The request that completed first among those not taken. It stays: `test` or `wait` takes it. Polls only if there is none.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if there is none.
    #[doc(alias = "psm2_mq_ipeek")]
    pub fn ipeek(&mut self) -> Result<(MqReq, Status), Code> {
        self.ipeek2().map(|(req, status)| (req, status.into()))
    }

    /// As [`ipeek`](Self::ipeek).
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "psm2_mq_ipeek2")]
    pub fn ipeek2(&mut self) -> Result<(MqReq, Status2), Code> {
        self.collect();
        if self.requests.oldest().is_none() {
            self.poll();
        }
        let index = self.requests.oldest().ok_or(Code::NoCompletions)?;
        Ok((self.requests.name(index), self.requests.slots[index as usize].status))
    }

    /// Takes the request that completed first off the queue of completions; [`req_free`](Self::req_free) ends it.
    ///
    /// # Errors
    /// As [`ipeek`](Self::ipeek).
    #[doc(alias = "psm2_mq_ipeek_dequeue")]
    pub fn ipeek_dequeue(&mut self) -> Result<(MqReq, Status2), Code> {
        let (req, status) = self.ipeek2()?;
        if let Some(index) = self.requests.find(req) {
            self.requests.dequeue(index);
        }
        Ok((req, status))
    }

    /// Ends a request that was [dequeued](Self::ipeek_dequeue).
    ///
    /// # Errors
    /// [`Code::ParamErr`] for any other.
    #[doc(alias = "psm2_mq_req_free")]
    pub fn req_free(&mut self, req: MqReq) -> Result<(), Code> {
        match self.requests.find(req) {
            Some(index) if self.requests.slots[index as usize].state == State::Dequeued => {
                self.requests.free(index);
                Ok(())
            }
            _ => Err(Code::ParamErr),
        }
    }

    /// Takes a request if it has completed. Makes no progress. The handle is taken away then.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if it has not; [`Code::ParamErr`] for one that is over or claimed.
    #[doc(alias = "psm2_mq_test")]
    pub fn test(&mut self, req: &mut Option<MqReq>) -> Result<Status, Code> {
        self.test2(req).map(Status::from)
    }

    /// As [`test`](Self::test).
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "psm2_mq_test2")]
    pub fn test2(&mut self, req: &mut Option<MqReq>) -> Result<Status2, Code> {
        let Some(name) = *req else { return Ok(Status2::EMPTY) };
        self.collect();
        let index = self.requests.find(name).ok_or(Code::ParamErr)?;
        match self.requests.slots[index as usize].state {
            State::Completed => {
                *req = None;
                let status = self.requests.slots[index as usize].status;
                self.requests.dequeue(index);
                self.requests.free(index);
                Ok(status)
            }
            State::Claimed(_) | State::Dequeued | State::Free => Err(Code::ParamErr),
            State::Sending | State::Deferred(_) | State::Receiving(_) => Err(Code::NoCompletions),
        }
    }

    /// Waits for a request and takes it. Without one, is done at once.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] at the deadline: the request goes on. [`Code::ParamErr`] as in [`test`](Self::test).
    #[doc(alias = "psm2_mq_wait")]
    pub fn wait<H: Host, P: Park>(
        &mut self,
        req: &mut Option<MqReq>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<Status, Code> {
        self.wait2(req, waiter, deadline_ns).map(Status::from)
    }

    /// As [`wait`](Self::wait).
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "psm2_mq_wait2")]
    pub fn wait2<H: Host, P: Park>(
        &mut self,
        req: &mut Option<MqReq>,
        waiter: &mut Waiter<'_, H, P>,
        deadline_ns: u64,
    ) -> Result<Status2, Code> {
        let mut passes = 0u32;
        loop {
            match self.test2(req) {
                Err(Code::NoCompletions) => {}
                other => return other,
            }
            self.poll();
            passes = passes.wrapping_add(1);
            if passes.is_multiple_of(1024) {
                self.engine.check_peers();
                if waiter.host().now_ns() >= deadline_ns {
                    return self.test2(req);
                }
                waiter.host().yield_now();
            }
        }
    }

    /// Takes a receive back that has not matched. It completes, and is still to be taken by `wait` or `test`.
    ///
    /// # Errors
    /// [`Code::NoCompletions`] if it has matched, or there is none: nothing changed. [`Code::ParamErr`] for a send.
    #[doc(alias = "psm2_mq_cancel")]
    pub fn cancel(&mut self, req: &Option<MqReq>) -> Result<(), Code> {
        let Some(req) = *req else { return Err(Code::NoCompletions) };
        let index = self.requests.find(req).ok_or(Code::ParamErr)?;
        let slot = &self.requests.slots[index as usize];
        match slot.state {
            State::Receiving(request) => match self.engine.cancel(request) {
                Ok(Cancelled::Removed) => {
                    self.collect();
                    Ok(())
                }
                _ => Err(Code::NoCompletions),
            },
            State::Completed | State::Dequeued if slot.receive => Err(Code::NoCompletions),
            _ => Err(Code::ParamErr),
        }
    }

    /// One pass of the engine, and what it brought.
    #[doc(alias = "psm2_poll")]
    pub fn poll(&mut self) {
        self.engine.progress();
        self.collect();
        self.send_deferred();
    }

    /// The counters.
    #[doc(alias = "psm2_mq_get_stats")]
    pub fn stats(&self) -> Stats {
        let matching = self.engine.matching_stats().matching;
        Stats {
            rx_user_bytes: matching.expected_bytes,
            rx_user_num: matching.expected,
            rx_sys_bytes: matching.unexpected_bytes,
            rx_sys_num: matching.unexpected,
            ..self.stats
        }
    }

    fn post(
        &mut self,
        source: Option<PeerId>,
        tag: Tag,
        ignore: Tag,
        into: Buffer,
        context: u64,
    ) -> Result<MqReq, Code> {
        let index = self.requests.take(context, true).ok_or(Code::NoMemory)?;
        let into = into.map(|(at, len)| (at, len as usize));
        match self.engine.recv(source, tag, ignore, into, self.requests.word(index)) {
            Ok(request) => {
                self.requests.slots[index as usize].state = State::Receiving(request);
                Ok(self.requests.name(index))
            }
            Err(error) => {
                self.requests.free(index);
                Err(if error == OpError::Again { Code::NoMemory } else { Code::ParamErr })
            }
        }
    }

    fn begin(&mut self, to: PeerId, flags: u32, tag: Tag, from: Buffer, context: u64) -> Result<MqReq, Code> {
        if flags & !FLAG_SENDSYNC != 0 {
            return Err(Code::ParamErr);
        }
        let index = self.requests.take(context, false).ok_or(Code::NoMemory)?;
        let send = Deferred { to, tag, from, sync: flags & FLAG_SENDSYNC != 0 };
        // Behind those that found no room.
        let begun = if self.requests.defers() { Err(OpError::Again) } else { self.start(index, send) };
        match begun {
            Ok(()) => {}
            Err(OpError::Again) => self.requests.defer(index, send),
            Err(_) => {
                self.requests.free(index);
                return Err(Code::ParamErr);
            }
        }
        self.stats.tx_num += 1;
        let len = from.map_or(0, |(_, len)| len as u64);
        if len <= self.engine.eager_max() as u64 {
            (self.stats.tx_eager_num, self.stats.tx_eager_bytes) =
                (self.stats.tx_eager_num + 1, self.stats.tx_eager_bytes + len);
        } else {
            (self.stats.tx_rndv_num, self.stats.tx_rndv_bytes) =
                (self.stats.tx_rndv_num + 1, self.stats.tx_rndv_bytes + len);
        }
        Ok(self.requests.name(index))
    }

    /// Hands a send to the engine.
    fn start(&mut self, index: u32, send: Deferred) -> Result<(), OpError> {
        let payload = match send.from {
            Some((at, len)) => Payload::Region(at, len as usize),
            None => Payload::Bytes(&[]),
        };
        let notice = Notice::Report(self.requests.word(index));
        let issued = match send.sync {
            true => self.engine.send_sync(self.context, send.to, send.tag, payload, notice)?,
            false => self.engine.send(self.context, send.to, send.tag, payload, notice)?,
        };
        self.requests.slots[index as usize].state = State::Sending;
        let slot = &mut self.requests.slots[index as usize];
        slot.status = Status2::sent(send, slot.context, Code::Ok);
        if let Issued::Done { .. } = issued {
            // What completed before it comes before it.
            self.collect();
            self.requests.complete(index);
        }
        Ok(())
    }

    /// Sends what found no room, in order.
    fn send_deferred(&mut self) {
        while let Some((index, send)) = self.requests.pop_deferred() {
            match self.start(index, send) {
                Err(OpError::Again) => return self.requests.defer_again(index, send),
                Ok(()) => {}
                Err(_) => {
                    let slot = &mut self.requests.slots[index as usize];
                    slot.status = Status2::sent(send, slot.context, Code::InternalErr);
                    self.requests.complete(index);
                }
            }
        }
    }

    /// Takes over what has ended in the engine, in the order of the ends.
    fn collect(&mut self) {
        let (mut send, mut receive) = (self.engine.next_completion(), self.engine.next_recv());
        loop {
            let first = match (send, receive) {
                (None, None) => return,
                (Some(a), Some(b)) => a.order < b.order,
                (a, _) => a.is_some(),
            };
            if first {
                if let Some(end) = send {
                    self.requests.sent(end);
                }
                send = self.engine.next_completion();
            } else {
                if let Some(end) = receive {
                    self.requests.received(end);
                }
                receive = self.engine.next_recv();
            }
        }
    }

    fn probe(&mut self, source: Option<PeerId>, tag: Tag, ignore: Tag) -> Result<Status2, Code> {
        match self.engine.probe(source, tag, ignore) {
            Ok(Some(envelope)) => Ok(found(envelope)),
            Ok(None) => Err(Code::NoCompletions),
            Err(_) => Err(Code::ParamErr),
        }
    }

    fn claim(&mut self, source: Option<PeerId>, tag: Tag, ignore: Tag) -> Result<(MqReq, Status2), Code> {
        let index = self.requests.take(0, true).ok_or(Code::NoMemory)?;
        match self.engine.mprobe(source, tag, ignore) {
            Ok(Some(message)) => {
                self.requests.slots[index as usize].state = State::Claimed(message);
                Ok((self.requests.name(index), found(message.envelope)))
            }
            other => {
                self.requests.free(index);
                Err(if other.is_ok() { Code::NoCompletions } else { Code::ParamErr })
            }
        }
    }
}

/// What a selector of 64 bits does not compare: the third word neither.
fn narrow(tagsel: u64) -> Tag {
    Tag { lo: !tagsel, hi: u32::MAX }
}

/// What a probe says of a message.
fn found(envelope: Envelope) -> Status2 {
    let len = status::length(envelope.len);
    Status2 {
        msg_peer: Some(envelope.source),
        msg_tag: envelope.tag.words(),
        msg_length: len,
        nbytes: len,
        ..Status2::EMPTY
    }
}
