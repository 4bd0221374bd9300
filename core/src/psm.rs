//! Matched queues as PSM and PSM2 define them, on an [`Engine`]: the basis of a C binding.
//!
//! Calls keep the names and the rules of `psm2_mq.h`; where that leaves something to chance
//! (contents of a status after a cancel or a probe, a synchronous send to oneself that is tested
//! early) it is defined here. One [`Mq`] has an engine to itself: it takes all of the engine's
//! completions. It never allocates; only [`Mq::wait`], [`Mq::wait2`], [`Mq::send`] and
//! [`Mq::send2`] block, and they take a deadline.
//!
//! # Rules
//!
//! - Version 1 has tags of 64 bits and no source: `irecv` matches from anybody, whatever the third
//!   word says. Version 2 has three words of 32 bits and a source. `tagsel` has a bit set for each
//!   bit that is compared.
//! - Requests complete in an order of their own, sends and receives alike: [`Mq::ipeek`] tells the
//!   oldest completed and leaves it; it makes progress only if none is there. [`Mq::test`] makes
//!   none.
//! - A request ends when `wait`, `test` or `req_free` takes it, never before; its handle is stale
//!   then.
//! - [`Mq::cancel`] cancels an unmatched receive. It completes, and its status is still to be
//!   taken.
//! - A message that is longer than its buffer completes with [`Code::Truncation`]; the call itself
//!   is fine. `msg_length` is always the sender's length and `nbytes` what was delivered.
//!
//! # Files
//!
//! `send`, `receive`, `probe` and `complete` are the calls, `request` is the table of requests,
//! `status` what is said of them; `provider` the calls that a libfabric provider makes besides.

mod complete;
mod probe;
mod provider;
mod receive;
mod request;
mod send;
mod status;

pub use provider::{Copied, Fast, Opt};
pub use request::{MqReq, MqSlot};
pub use status::{Code, Stats, Status, Status2};

use crate::engine::tag::Tag;
use crate::engine::wait::Drive;
use crate::engine::{ContextId, Engine};
use crate::mem::LocalAddr;
use crate::rail::Rail;

use request::Requests;

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
    /// A queue over an engine that matches.
    /// It sends in `context` and has one slot per open request.
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

    /// Makes one pass of the engine and collects completions.
    #[doc(alias = "psm2_poll")]
    pub fn poll(&mut self) {
        self.pass();
    }

    /// Collects completions of a pass, and issues deferred sends.
    fn after_pass(&mut self) {
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

    /// Collects completions from the engine, in order.
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
}

/// The `ignore` mask of a 64-bit selector, which never compares the third word.
fn narrow(tagsel: u64) -> Tag {
    Tag { lo: !tagsel, hi: u32::MAX }
}
