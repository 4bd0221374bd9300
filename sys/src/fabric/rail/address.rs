//! The address of a rail: a 16-byte header, then the provider's address.
//!
//! ```text
//! 0 "fpfa" | 4 version u16 | 6 notify u8 | 7 0 | 8 signature u32 | 12 format u32 | 16 address
//! ```
//! All fields are little-endian. Both sides must have the same version, notification and address
//! format.

use alloc::vec::Vec;

use fishplate_core::bytes::{Put, Reader};
use fishplate_core::error::AttachError;

use crate::fabric::persona::Notify;

const MAGIC: [u8; 4] = *b"fpfa";

/// Version of the protocol between rails, including the message headers.
pub(super) const VERSION: u16 = 1;

const HEAD: usize = 16;

/// Maximum length of a provider's address, in bytes.
const LONGEST: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Address<'a> {
    pub notify: Notify,
    /// Random 32-bit signature of the rail.
    pub number: u32,
    /// The libfabric format of `provider` (`FI_SOCKADDR_IN`, ...).
    pub format: u32,
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
        bytes.put(&MAGIC).put_u16(VERSION).put(&[code(self.notify), 0]);
        bytes.put_u32(self.number).put_u32(self.format).put(self.provider);
        bytes
    }

    pub fn decode(bytes: &'a [u8]) -> Result<Self, AttachError> {
        let mut fields = Reader::new(bytes);
        let (magic, theirs, notify) = (fields.array()?, fields.u16()?, fields.array()?);
        let (number, format, provider) = (fields.u32()?, fields.u32()?, fields.rest());
        if magic != MAGIC || provider.is_empty() || provider.len() > LONGEST {
            return Err(AttachError::BadHandle);
        }
        if theirs != VERSION {
            return Err(AttachError::Version { theirs, ours: VERSION });
        }
        let notify = match notify {
            [1, 0] => Notify::Word,
            [2, 0] => Notify::Source,
            [3, 0] => Notify::Message,
            _ => return Err(AttachError::BadHandle),
        };
        Ok(Address { notify, number, format, provider })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_the_bytes_of_its_description_and_none_less() {
        let address =
            Address { notify: Notify::Source, number: 0x0403_0201, format: 7, provider: b"there" };
        let golden = *b"fpfa\x01\x00\x02\x00\x01\x02\x03\x04\x07\x00\x00\x00there";
        assert_eq!(address.encode(), golden);
        assert_eq!(Address::decode(&golden), Ok(address));
        for cut in 0..=HEAD {
            assert_eq!(
                Address::decode(&golden[..cut]),
                Err(AttachError::BadHandle),
                "cut to {cut}"
            );
        }
        let with = |at: usize, value: u8| {
            let mut bytes = golden;
            bytes[at] = value;
            Address::decode(&bytes).err()
        };
        assert_eq!(with(0, 0), Some(AttachError::BadHandle));
        assert_eq!(with(4, 9), Some(AttachError::Version { theirs: 9, ours: VERSION }));
        assert_eq!(with(6, 4), Some(AttachError::BadHandle));
        assert_eq!(with(7, 1), Some(AttachError::BadHandle));
        assert_eq!(
            Address::decode(&[&golden[..], &[0; LONGEST]].concat()),
            Err(AttachError::BadHandle)
        );
    }
}
