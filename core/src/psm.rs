//! Matched queues as PSM and PSM2 define them, on an [`Engine`].
//!
//! Calls keep the names and the rules of `psm2_mq.h`. This module defines the cases that the header
//! leaves open. Examples are the contents of a status after a cancel or a probe, and a synchronous
//! send to oneself that is tested early. The queue and the receives of its engine share one list of
//! completions. So a program that uses an [`Mq`] must send and receive all its messages through it.
//! It never allocates. Only [`Mq::wait`], [`Mq::wait2`], [`Mq::send`] and [`Mq::send2`] block, and
//! they take a deadline.
//!
//! # Rules
//!
//! - Version 1 has tags of 64 bits and no source: `irecv` matches messages from any peer, and
//!   ignores the third word of their tags. Version 2 has three words of 32 bits and a source. A bit
//!   that is set in `tagsel` is compared.
//! - Sends and receives complete in one common order. [`Mq::ipeek`] reports the oldest completed
//!   request and leaves it in the queue; it makes progress only if no request has completed.
//!   [`Mq::test`] makes no progress.
//! - A request ends when `wait`, `test`, `req_free` or `ipeek_dequeue_multi` takes it. Its handle
//!   is stale then.
//! - A message that is longer than its buffer completes with [`Code::Truncation`], but the
//!   receiving call itself succeeds. `msg_length` is always the sender's length, and `nbytes` the
//!   delivered length.

mod complete;
mod probe;
mod provider;
mod receive;
mod request;
mod send;
mod status;

pub use provider::{Copied, Fast, Opt};
pub use request::{Completed, MqReq};
pub use status::{Code, Stats, Status, Status2};

use crate::engine::protocol::{Cancelled, Destination, Requests, Stage};
use crate::engine::tag::Tag;
use crate::engine::wait::Drive;
use crate::engine::{ContextId, Engine};
use crate::mem::{LocalAddr, PeerId, Span};
use crate::rail::Rail;

/// The memory that a send reads or a receive fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// No memory, for an empty message.
    Nothing,
    /// This many bytes of registered memory.
    Region(LocalAddr, u32),
    /// Unregistered memory of at most 4 GiB - 1.
    Span(Span),
}

impl Buffer {
    /// The length must fit PSM's 32 bits.
    fn len(self) -> Result<u32, Code> {
        match self {
            Buffer::Nothing => Ok(0),
            Buffer::Region(_, len) => Ok(len),
            Buffer::Span(span) => u32::try_from(span.len()).map_err(|_| Code::ParamErr),
        }
    }
}

impl From<Option<(LocalAddr, u32)>> for Buffer {
    fn from(buffer: Option<(LocalAddr, u32)>) -> Self {
        buffer.map_or(Buffer::Nothing, |(at, len)| Buffer::Region(at, len))
    }
}

impl From<Span> for Buffer {
    fn from(span: Span) -> Self {
        Buffer::Span(span)
    }
}

impl From<Buffer> for Destination {
    fn from(buffer: Buffer) -> Self {
        match buffer {
            Buffer::Nothing => Destination::Nothing,
            Buffer::Region(at, len) => Destination::Region(at, len as usize),
            Buffer::Span(span) => Destination::Span(span),
        }
    }
}

impl From<Destination> for Buffer {
    fn from(memory: Destination) -> Self {
        match memory {
            Destination::Nothing => Buffer::Nothing,
            Destination::Region(at, len) => Buffer::Region(at, len as u32),
            Destination::Span(span) => Buffer::Span(span),
        }
    }
}

/// Makes a send complete only once it has matched.
#[doc(alias = "PSM2_MQ_FLAG_SENDSYNC")]
pub const FLAG_SENDSYNC: u32 = 0x01;

/// The state of a matched queue between calls: its counters and options. Use it with one engine. An
/// engine has one matched queue, so use one state at a time, and always the same context. A poll
/// sends all deferred sends in the context of its own state.
///
/// The engine has the requests, one for each slot of
/// [`MatchMemory::receives`](crate::engine::protocol::MatchMemory::receives), and they stay if the
/// state is dropped. More requests need [more slots](Engine::grow_receives).
#[derive(Debug)]
pub struct MqState {
    context: ContextId,
    stats: Stats,
    /// The value of an option that has no effect.
    max_sysbuf_mbytes: u32,
}

impl MqState {
    /// Creates the state of a queue that sends in `context`.
    #[doc(alias = "psm2_mq_init")]
    pub fn new(context: ContextId) -> Self {
        MqState { context, stats: Stats::default(), max_sysbuf_mbytes: u32::MAX }
    }
}

/// A matched queue and its engine.
#[doc(alias = "psm2_mq_t")]
pub struct Mq<'e, 'm, R: Rail, const RAILS: usize> {
    engine: &'e mut Engine<'m, R, RAILS>,
    state: &'e mut MqState,
}

impl<'e, 'm, R: Rail, const RAILS: usize> Mq<'e, 'm, R, RAILS> {
    /// Creates a queue over an engine with matching.
    ///
    /// # Errors
    /// [`Code::ParamErr`] if the engine has no matching, or no such context.
    #[inline]
    pub fn new(engine: &'e mut Engine<'m, R, RAILS>, state: &'e mut MqState) -> Result<Self, Code> {
        if !engine.has_matching() || state.context.0 as u16 >= engine.config().contexts {
            return Err(Code::ParamErr);
        }
        Ok(Mq { engine, state })
    }

    /// Creates a queue over an engine and a state that [`new`](Self::new) has accepted. Checks
    /// nothing. The calls of another pair return errors.
    #[inline(always)]
    pub fn resume(engine: &'e mut Engine<'m, R, RAILS>, state: &'e mut MqState) -> Self {
        Mq { engine, state }
    }

    /// Returns the engine, for use between calls.
    pub fn engine_mut(&mut self) -> &mut Engine<'m, R, RAILS> {
        self.engine
    }

    /// Makes one pass of the engine. Returns the number of events that the rails reported. For zero
    /// events, PSM returns `PSM2_OK_NO_PROGRESS`.
    #[doc(alias = "psm2_poll")]
    #[inline]
    pub fn poll(&mut self) -> u32 {
        self.pass()
    }

    /// Ends the use of the queue: cancels every unmatched receive, discards every claimed message,
    /// and frees every completed or dequeued request. Returns whether all accesses to the program's
    /// memory have ended. Returns `false` while a send is deferred or in flight, or a matched
    /// receive is incomplete. Slow path: scans all slots.
    #[doc(alias = "psm2_mq_finalize")]
    pub fn finish(&mut self) -> bool {
        let mut over = true;
        for index in 0..self.requests().map_or(0, |requests| requests.slots.used()) {
            let Some(requests) = self.engine.requests_mut() else { break };
            let slot = &requests.slots[index as usize];
            over &= match slot.stage {
                Stage::Posted => {
                    let request = slot.request();
                    self.engine.cancel(request) == Ok(Cancelled::Removed)
                }
                Stage::Claimed => {
                    self.discard(index);
                    true
                }
                Stage::Dequeued => {
                    requests.free(index);
                    true
                }
                Stage::Ended => true,
                _ => slot.is_discarded(),
            };
        }
        if let Some(requests) = self.engine.requests_mut() {
            while requests.completed().is_some() {
                requests.end_oldest();
            }
        }
        over
    }

    #[inline(always)]
    fn requests(&self) -> Option<&Requests<'m>> {
        self.engine.requests()
    }

    /// Returns whether a deferred send waits.
    #[inline(always)]
    fn waits(&self) -> bool {
        self.requests().is_some_and(|requests| requests.waiting != 0)
    }

    #[inline(always)]
    fn after_pass(&mut self) {
        if self.waits() {
            self.send_deferred();
        }
    }

    /// Returns a [crowding peer](Engine::crowding_peers), and whether the program may be waiting
    /// for it. Prefers a peer for which an open request may be waiting. If no request is open, the
    /// program may be waiting for any peer. Slow path: looks at every slot.
    pub fn crowding_peer(&self) -> Option<(PeerId, bool)> {
        let awaits = |peer| (peer, self.can_wait_for(peer));
        let mut peers = self.engine.crowding_peers().map(awaits);
        peers.clone().find(|(_, awaited)| *awaited).or_else(|| peers.next())
    }

    /// Returns whether an open request names the peer or any peer, or no request is open. Slow
    /// path: scans all slots.
    fn can_wait_for(&self, peer: PeerId) -> bool {
        let Some(requests) = self.requests() else { return true };
        let ended = |stage| matches!(stage, Stage::Claimed | Stage::Ended | Stage::Dequeued);
        let mut idle = true;
        for (_, slot) in requests.slots.taken().filter(|(_, slot)| !ended(slot.stage)) {
            if self.engine.may_wait_for(slot, peer) {
                return true;
            }
            idle = false;
        }
        idle
    }

    /// Returns the counters.
    #[doc(alias = "psm2_mq_get_stats")]
    pub fn stats(&self) -> Stats {
        let protocol = self.engine.matching_stats();
        let matching = protocol.matching;
        Stats {
            rx_sysbuf_num: protocol.kept,
            rx_sysbuf_bytes: protocol.kept_bytes,
            rx_user_bytes: matching.expected_bytes,
            rx_user_num: matching.expected,
            rx_sys_bytes: matching.unexpected_bytes,
            rx_sys_num: matching.unexpected,
            rx_shm_num: protocol.near,
            tx_num: self.state.stats.tx_eager_num + self.state.stats.tx_rndv_num,
            ..self.state.stats
        }
    }

    #[inline]
    fn is_near(&self, peer: PeerId) -> bool {
        self.engine.rails_to(peer) & 1 != 0
    }
}

/// Never compares the third word.
fn narrow(tagsel: u64) -> Tag {
    Tag { lo: !tagsel, hi: u32::MAX }
}
