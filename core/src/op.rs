//! What an operation is: atomics, signals, comparisons, and how an operation ends.

use core::fmt;

use crate::error::{CompleteError, PeerError, PostError};
use crate::mem::RailId;

mod apply;
mod set;

pub(crate) use apply::look_at_signal;
pub use set::AmoSet;

/// An atomic memory operation on a word of 1, 2, 4 or 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amo {
    /// What to do.
    pub op: AmoOp,
    /// Width of the word, in bytes: 1, 2, 4 or 8.
    pub width: u8,
    /// The operand; its low `width` bytes count.
    pub operand: u64,
    /// What [`AmoOp::CompareSwap`] compares with; its low `width` bytes count.
    pub compare: u64,
}

/// What an atomic does. Each can also fetch the value from before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AmoOp {
    /// Stores the operand. With fetch: swap.
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
    /// Stores the operand and fetches.
    Swap = 7,
    /// Stores the operand if the word equals `compare`, and fetches.
    CompareSwap = 8,
    /// Fetches, changes nothing.
    Fetch = 9,
}

/// What a signal does to its 64-bit word. OpenSHMEM: `SHMEM_SIGNAL_SET`, `SHMEM_SIGNAL_ADD`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SignalOp {
    /// Stores the value.
    Set = 1,
    /// Adds the value, wrapping.
    Add = 2,
}

/// A comparison that a signal wait makes. OpenSHMEM: `SHMEM_CMP_EQ` and so on, unsigned.
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
    /// Compares `word` with `value`.
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

/// A local operation in flight. A stale or foreign token is an error, never "done".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub(crate) u64);

impl Token {
    /// Names no operation: the token of silent operations.
    pub const NONE: Token = Token(0);

    /// As a number, for languages without types.
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// The reverse. A number that was never given names no operation.
    pub const fn from_raw(raw: u64) -> Token {
        Token(raw)
    }
}

/// How an operation ended: done, failed and quiescent, or failed with unknown effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Applied at the target; the buffer may be reused.
    Done,
    /// Failed, and quiescent: nothing of it will land later, the buffer may be reused.
    Failed(Fault),
    /// Failed, and something of it may land later: the buffer must not be reused.
    Unknown(Fault),
}

/// What made an operation fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A rail completed it with an error.
    Rail(RailId, CompleteError),
    /// A rail refused a part of it permanently.
    Post(RailId, PostError),
    /// The peer was given up.
    Peer(PeerError),
    /// The receiver could not take the message.
    Receiver,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Done => f.write_str("done"),
            Outcome::Failed(fault) => write!(f, "failed, and is over: {fault}"),
            Outcome::Unknown(fault) => write!(f, "failed, and may still land: {fault}"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Rail(rail, CompleteError::Failed(code) | CompleteError::Unknown(code)) => {
                write!(f, "an error of rail {} (its provider's code {code})", rail.0)
            }
            Fault::Rail(rail, CompleteError::PeerDown) => write!(f, "the peer is down on rail {}", rail.0),
            Fault::Post(rail, error) => write!(f, "rail {} refused: {error}", rail.0),
            Fault::Peer(error) => write!(f, "the peer was given up: {error}"),
            Fault::Receiver => f.write_str("the receiver could not take the message"),
        }
    }
}

/// The completion of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The operation.
    pub token: Token,
    /// The word that the caller gave with [`Notice::Report`](crate::engine::Notice).
    pub tag: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// A fetching atomic's old value, or the length that a tagged receive took,
    /// in bytes; otherwise 0.
    pub value: u64,
    /// Position among all completions, of operations and receives.
    pub order: u64,
}
