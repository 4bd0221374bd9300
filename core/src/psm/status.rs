//! The status of requests, in PSM's terms.

use crate::engine::protocol::{Received, Status as Ended};
use crate::error::OpError;
use crate::mem::PeerId;

/// PSM2's error codes, as far as matched queues have them.
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

impl From<OpError> for Code {
    fn from(error: OpError) -> Self {
        match error {
            OpError::Again => Code::NoMemory,
            OpError::PeerFailed(_) | OpError::Rail(..) => Code::InternalErr,
            _ => Code::ParamErr,
        }
    }
}

/// Version 1: tags of 64 bits.
#[doc(alias = "psm2_mq_status_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The sender's tag: words 0 and 1.
    pub msg_tag: u64,
    /// The sender's length, in bytes.
    pub msg_length: u32,
    /// What was delivered, in bytes.
    pub nbytes: u32,
    /// How it ended.
    pub error_code: Code,
    /// The context word of the request; 0 for a probe.
    pub context: u64,
}

/// Version 2: tags of 96 bits, and the peer.
#[doc(alias = "psm2_mq_status2_t")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status2 {
    /// The sender of a message that matched, or the receiver of one that was sent;
    /// none for a receive that was cancelled.
    pub msg_peer: Option<PeerId>,
    /// The sender's tag.
    pub msg_tag: [u32; 3],
    /// The sender's length, in bytes.
    pub msg_length: u32,
    /// What was delivered, in bytes; of a send, its length.
    pub nbytes: u32,
    /// How it ended.
    pub error_code: Code,
    /// The context word of the request; 0 for a probe.
    pub context: u64,
}

impl Status2 {
    /// Nothing.
    pub const EMPTY: Status2 = Status2 {
        msg_peer: None,
        msg_tag: [0; 3],
        msg_length: 0,
        nbytes: 0,
        error_code: Code::Ok,
        context: 0,
    };

    /// Of a receive.
    pub(super) fn received(end: &Ended, context: u64) -> Self {
        let error_code = match end.outcome {
            // As in PSM: the caller knows that it cancelled it.
            Received::Ok | Received::Cancelled => Code::Ok,
            Received::Truncated => Code::Truncation,
            Received::Failed(_) | Received::Unknown(_) => Code::InternalErr,
        };
        let nbytes = length(end.delivered);
        match end.envelope {
            Some(envelope) => Status2 {
                msg_peer: Some(envelope.source),
                msg_tag: envelope.tag.words(),
                msg_length: length(envelope.len),
                nbytes,
                error_code,
                context,
            },
            None => Status2 { error_code, context, ..Status2::EMPTY },
        }
    }
}

/// PSM's lengths have 32 bits.
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

/// What `psm2_mq_get_stats` tells. User means that the receive was posted first, sys that it was
/// not; shm that the first rail of the engine joins the two ends, which is shared memory in a node.
#[doc(alias = "psm2_mq_stats_t")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of messages whose receive was posted.
    pub rx_user_bytes: u64,
    /// Such messages.
    pub rx_user_num: u64,
    /// Bytes of messages that came first.
    pub rx_sys_bytes: u64,
    /// Such messages.
    pub rx_sys_num: u64,
    /// Messages sent.
    pub tx_num: u64,
    /// Messages sent with their payload.
    pub tx_eager_num: u64,
    /// Bytes of messages sent with their payload.
    pub tx_eager_bytes: u64,
    /// Messages sent whose payload the receiver read.
    pub tx_rndv_num: u64,
    /// Bytes of messages sent whose payload the receiver read.
    pub tx_rndv_bytes: u64,
    /// Messages sent to peers of the first rail.
    pub tx_shm_num: u64,
    /// Messages received from them.
    pub rx_shm_num: u64,
    /// Payloads that were kept until their receive.
    pub rx_sysbuf_num: u64,
    /// Their bytes.
    pub rx_sysbuf_bytes: u64,
}
