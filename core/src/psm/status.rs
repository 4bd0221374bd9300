//! The status of requests, as PSM defines it.

use crate::engine::protocol::{Received, RecvSlot};
use crate::error::OpError;
use crate::mem::PeerId;

/// The error codes of PSM2 that matched queues return.
#[doc(alias = "psm2_error_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Code {
    /// `PSM2_OK`.
    Ok = 0,
    /// `PSM2_PARAM_ERR`.
    ParamErr = 3,
    /// `PSM2_NO_MEMORY`: every request is in use.
    NoMemory = 4,
    /// `PSM2_INTERNAL_ERR`: the peer or a rail has failed.
    InternalErr = 8,
    /// `PSM2_MQ_NO_COMPLETIONS`.
    NoCompletions = 60,
    /// `PSM2_MQ_TRUNCATION`.
    Truncation = 61,
}

impl Code {
    #[inline(always)]
    pub(super) fn of(slot: &RecvSlot) -> Code {
        match slot.outcome() {
            // A cancelled receive is `Ok`, as in PSM: the caller knows that it cancelled the
            // receive.
            Received::Ok | Received::Cancelled => Code::Ok,
            Received::Truncated => Code::Truncation,
            Received::Failed(_) | Received::Unknown(_) => Code::InternalErr,
        }
    }
}

impl From<OpError> for Code {
    fn from(error: OpError) -> Self {
        match error {
            OpError::Again => Code::NoMemory,
            OpError::PeerFailed(_) | OpError::Rail(..) => Code::InternalErr,
            _ => Code::ParamErr,
        }
    }
}

/// The status of version 1, with a 64-bit tag.
#[doc(alias = "psm2_mq_status_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The sender's tag, words 0 and 1.
    pub msg_tag: u64,
    /// The sender's length, in bytes.
    pub msg_length: u32,
    /// The delivered length, in bytes.
    pub nbytes: u32,
    /// The outcome of the request.
    pub error_code: Code,
    /// The context word of the request, or 0 for a probe.
    pub context: u64,
}

/// The status of version 2, with a 96-bit tag and the peer.
#[doc(alias = "psm2_mq_status2_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status2 {
    /// The sender of a received message, or the receiver of a sent one. `None` for a cancelled
    /// receive.
    pub msg_peer: Option<PeerId>,
    /// The sender's tag.
    pub msg_tag: [u32; 3],
    /// The sender's length, in bytes.
    pub msg_length: u32,
    /// The delivered length of a receive, or the length of a send, in bytes.
    pub nbytes: u32,
    /// The outcome of the request.
    pub error_code: Code,
    /// The context word of the request, or 0 for a probe.
    pub context: u64,
}

impl Status2 {
    /// A status without a message.
    pub const EMPTY: Status2 = Status2 {
        msg_peer: None,
        msg_tag: [0; 3],
        msg_length: 0,
        nbytes: 0,
        error_code: Code::Ok,
        context: 0,
    };
}

#[inline(always)]
pub(super) fn length(len: u64) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

impl From<Status2> for Status {
    fn from(status: Status2) -> Self {
        let [low, high, _] = status.msg_tag;
        Status {
            msg_tag: low as u64 | (high as u64) << 32,
            msg_length: status.msg_length,
            nbytes: status.nbytes,
            error_code: status.error_code,
            context: status.context,
        }
    }
}

/// The counters of `psm2_mq_get_stats`. "User" messages arrived after their receive was posted.
/// "Sys" messages are unexpected. "Shm" messages are sent to or received from peers that rail 0
/// reaches. By convention, rail 0 is shared memory, so these peers are on this host.
#[doc(alias = "psm2_mq_stats_t")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of expected messages.
    pub rx_user_bytes: u64,
    /// Number of expected messages.
    pub rx_user_num: u64,
    /// Bytes of unexpected messages.
    pub rx_sys_bytes: u64,
    /// Number of unexpected messages.
    pub rx_sys_num: u64,
    /// Number of sent messages.
    pub tx_num: u64,
    /// Number of messages sent with their payload.
    pub tx_eager_num: u64,
    /// Bytes of messages sent with their payload.
    pub tx_eager_bytes: u64,
    /// Number of sent messages with a payload that the receiver reads.
    pub tx_rndv_num: u64,
    /// Bytes of sent messages with a payload that the receiver reads.
    pub tx_rndv_bytes: u64,
    /// Number of messages sent to peers that the first rail reaches.
    pub tx_shm_num: u64,
    /// Number of messages that matched a receive, from peers that the first rail reaches.
    pub rx_shm_num: u64,
    /// Number of payloads that were stored until their receive was posted.
    pub rx_sysbuf_num: u64,
    /// Bytes of payloads that were stored until their receive was posted.
    pub rx_sysbuf_bytes: u64,
}
