//! The layout of a Hello, the message with which two sides agree on epochs.
//!
//! ```text
//! Hello  16 bytes: kind u8 | again u8 | bond u8 | keeps u8 | mine u32 | yours u32 | version u32
//! ```

use crate::error::Violation;
use crate::mem::Untrusted;

use super::super::wire::{HEAD_MAX, KIND_HELLO, VERSION, get32};

/// The attachment of the receiver that the sender of a Hello is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bond {
    None,
    Yours,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// The epoch that the sender expects in incoming words.
    pub mine: u32,
    /// The epoch that the receiver expects, or 0 if the sender does not know it.
    pub yours: u32,
    pub bond: Bond,
    /// Whether the sender keeps what failover needs.
    pub keeps: bool,
    /// Whether earlier Hellos, or their answers, may have been lost. If so, the receiver answers
    /// this Hello in any case.
    pub again: bool,
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..4].copy_from_slice(&[
            KIND_HELLO,
            self.again as u8,
            self.bond as u8,
            self.keeps as u8,
        ]);
        out[4..8].copy_from_slice(&self.mine.to_le_bytes());
        out[8..12].copy_from_slice(&self.yours.to_le_bytes());
        out[12..].copy_from_slice(&VERSION.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: Untrusted<'_>) -> Option<Result<Hello, Violation>> {
        let mut head = [0u8; HEAD_MAX];
        let len = bytes.copy_out(&mut head);
        if head[0] != KIND_HELLO {
            return None;
        }
        if len != 16 || bytes.len() != 16 {
            return Some(Err(Violation::Length));
        }
        let [_, again @ 0..=1, bond @ 0..=2, keeps @ 0..=1] = head[..4] else {
            return Some(Err(Violation::Kind));
        };
        let (again, keeps) = (again != 0, keeps != 0);
        let bond = [Bond::None, Bond::Yours, Bond::Other][bond as usize];
        if get32(&head, 12) != VERSION {
            return Some(Err(Violation::Kind));
        }
        Some(Ok(Hello { mine: get32(&head, 4), yours: get32(&head, 8), bond, keeps, again }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::wire::KIND_ACK;
    use super::*;

    #[test]
    fn a_hello_has_the_bytes_of_its_description() {
        let hello = Hello {
            mine: 0x0403_0201,
            yours: 0x0807_0605,
            bond: Bond::Other,
            keeps: true,
            again: true,
        };
        assert_eq!(hello.encode(), [7, 1, 2, 1, 1, 2, 3, 4, 5, 6, 7, 8, VERSION as u8, 0, 0, 0]);
    }

    #[test]
    fn a_hello_comes_back_and_a_bad_one_is_refused() {
        for (bond, keeps, again) in
            [(Bond::None, false, true), (Bond::Yours, true, false), (Bond::Other, true, true)]
        {
            let hello = Hello { mine: 1, yours: u32::MAX, bond, keeps, again };
            let bytes = hello.encode();
            assert_eq!(Hello::decode(Untrusted::from_slice(&bytes)), Some(Ok(hello)));
            for cut in 1..16 {
                let got = Hello::decode(Untrusted::from_slice(&bytes[..cut]));
                assert_eq!(got, Some(Err(Violation::Length)), "cut to {cut}");
            }
            for at in [1, 2, 3, 12, 15] {
                let mut bad = bytes;
                bad[at] ^= 0x83;
                let got = Hello::decode(Untrusted::from_slice(&bad));
                assert_eq!(got, Some(Err(Violation::Kind)), "byte {at}");
            }
            let mut other = bytes;
            other[0] = KIND_ACK;
            assert_eq!(Hello::decode(Untrusted::from_slice(&other)), None);
        }
    }
}
