//! Operations: atomics, signals, comparisons, and outcomes.

use core::fmt;

use crate::error::{CompleteError, PeerError, PostError};
use crate::mem::RailId;

mod apply;
mod set;

pub use apply::{look_at_signal, set_signal};
pub use set::AmoSet;

/// An atomic memory operation on a word of 1, 2, 4 or 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amo {
    /// The operation.
    pub op: AmoOp,
    /// Width of the word, in bytes: 1, 2, 4 or 8.
    pub width: u8,
    /// The operand. Only its low `width` bytes are used.
    pub operand: u64,
    /// The comparand of [`AmoOp::CompareSwap`]. Only its low `width` bytes are used.
    pub compare: u64,
}

/// The kind of an atomic. Each kind can also fetch the old value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AmoOp {
    /// Stores the operand. With fetch this is a swap.
    Set = 1,
    /// Adds the operand, wrapping.
    Add = 2,
    /// Adds one, wrapping.
    Inc = 3,
    /// Bitwise and.
    And = 4,
    /// Bitwise or.
    Or = 5,
    /// Bitwise exclusive or.
    Xor = 6,
    /// Stores the operand and fetches the old value.
    Swap = 7,
    /// Stores the operand if the word equals `compare`, and fetches the old value.
    CompareSwap = 8,
    /// Fetches the value and changes nothing.
    Fetch = 9,
}

/// The change that a signal makes to its 64-bit word. OpenSHMEM: `SHMEM_SIGNAL_SET`,
/// `SHMEM_SIGNAL_ADD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SignalOp {
    /// Stores the value.
    Set = 1,
    /// Adds the value, wrapping.
    Add = 2,
}

/// The comparison of a signal wait. OpenSHMEM: `SHMEM_CMP_EQ` and so on, unsigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cmp {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Greater or equal.
    Ge,
    /// Greater.
    Gt,
    /// Less or equal.
    Le,
    /// Less.
    Lt,
}

impl Cmp {
    /// Returns whether the comparison of `word` with `value` holds.
    #[inline(always)]
    pub fn holds(self, word: u64, value: u64) -> bool {
        match self {
            Cmp::Eq => word == value,
            Cmp::Ne => word != value,
            Cmp::Ge => word >= value,
            Cmp::Gt => word > value,
            Cmp::Le => word <= value,
            Cmp::Lt => word < value,
        }
    }
}

/// Identifies an operation of this engine until its completion is taken. A stale or unknown token
/// is an error, never "done".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub(crate) u64);

impl Token {
    /// Names no operation. A silent operation may return this token.
    pub const NONE: Token = Token(0);

    /// Returns the token as a number, for C and other languages.
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// Converts a number back to a token. A number that `to_raw` never returned names no operation.
    pub const fn from_raw(raw: u64) -> Token {
        Token(raw)
    }
}

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The operation is applied at the target, and the buffer may be reused.
    Done,
    /// The operation failed, and no part of it will land later. The buffer may be reused.
    Failed(Fault),
    /// The operation failed, but parts of it may still land. Do not reuse the buffer.
    Unknown(Fault),
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A rail completed the operation with an error.
    Rail(RailId, CompleteError),
    /// A rail permanently refused a part of the operation.
    Post(RailId, PostError),
    /// The peer failed.
    Peer(PeerError),
    /// The receiver could not receive the message.
    Receiver,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => f.write_str("done"),
            Outcome::Failed(fault) => write!(f, "failed, and the buffer may be reused: {fault}"),
            Outcome::Unknown(fault) => {
                write!(f, "failed, and may still take effect; do not reuse the buffer: {fault}")
            }
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Rail(rail, CompleteError::Failed(code) | CompleteError::Unknown(code)) => {
                write!(f, "rail {} reported an error (provider's code {code})", rail.0)
            }
            Fault::Rail(rail, CompleteError::PeerDown) => {
                write!(f, "the peer is down on rail {}", rail.0)
            }
            Fault::Post(rail, error) => write!(f, "rail {} refused the post: {error}", rail.0),
            Fault::Peer(error) => write!(f, "the peer failed: {error}"),
            Fault::Receiver => f.write_str("the receiver could not take the message"),
        }
    }
}

/// The completion of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The completed operation.
    pub token: Token,
    /// The word that was passed with [`Notice::Report`](crate::engine::Notice).
    pub tag: u64,
    /// The outcome.
    pub outcome: Outcome,
    /// The old value of a fetching atomic. For a synchronous or rendezvous send, the number of
    /// bytes that the receiver took. Otherwise 0.
    pub value: u64,
    /// Position among all completions of operations and receives.
    pub order: u64,
}
