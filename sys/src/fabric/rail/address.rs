//! What a rail tells another of itself: 16 bytes and the provider's own address.
//!
//! ```text
//! 0  "fpfa"     4  version u16     6  way of notifying u8     7  0     8  number u32     12  format u32     16  address
//! ```
//! Numbers are little-endian. Both ends must speak one version, notify in the same way, and write addresses in one format.

use alloc::vec::Vec;

use fishplate_core::error::AttachError;

use crate::fabric::persona::Notify;

/// What addresses begin with.
const MAGIC: [u8; 4] = *b"fpfa";

/// What is spoken between rails, the head of messages included.
pub(super) const VERSION: u16 = 1;

/// Bytes before the provider's address.
const HEAD: usize = 16;

/// Longest address of a provider that is believed, in bytes.
const LONGEST: usize = 1024;

/// A rail's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address<'a> {
    /// How writes are notified.
    pub notify: Notify,
    /// The number that the rail puts into what it sends.
    pub number: u32,
    /// The format of `provider`.
    pub format: u32,
    /// As the provider writes it.
    pub provider: &'a [u8],
}

fn code(notify: Notify) -> u8 {
    match notify {
        Notify::Word => 1,
        Notify::Source => 2,
        Notify::Message => 3,
    }
}

impl<'a> Address<'a> {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.provider.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&[code(self.notify), 0]);
        bytes.extend_from_slice(&self.number.to_le_bytes());
        bytes.extend_from_slice(&self.format.to_le_bytes());
        bytes.extend_from_slice(self.provider);
        bytes
    }

    pub fn decode(bytes: &'a [u8]) -> Result<Self, AttachError> {
        let (head, provider) = bytes.split_at_checked(HEAD).ok_or(AttachError::BadHandle)?;
        if head[..4] != MAGIC || provider.is_empty() || provider.len() > LONGEST {
            return Err(AttachError::BadHandle);
        }
        let theirs = u16::from_le_bytes([head[4], head[5]]);
        if theirs != VERSION {
            return Err(AttachError::Version { theirs, ours: VERSION });
        }
        let notify = match head[6..8] {
            [1, 0] => Notify::Word,
            [2, 0] => Notify::Source,
            [3, 0] => Notify::Message,
            _ => return Err(AttachError::BadHandle),
        };
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        Ok(Address { notify, number: word(8), format: word(12), provider })
    }
}
