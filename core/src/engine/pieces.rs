//! The messages of gets that no rail can execute, and the limits of data in pieces. A [`Get`] has a
//! number. [`Got`]s answer it, each with one piece of the data, or with none if the memory is gone.
//! A Got has a number only between sides with failover. Otherwise its word only identifies the
//! attachment.
//!
//! ```text
//! Get   56 bytes: kind u8 | context u8 | 0 u16 | word u32 | ack u32 | region u16 |
//!       generation u16 | offset u64 | token u64 | length u64 | into u64 | piece u32 | 0 u32
//! Got   32 bytes and the payload: kind u8 | context u8 | last u8 | 0 u8 | word u32 | ack u32 |
//!       0 u32 | token u64 | into u64
//! ```

use crate::bytes::{Put, Reader, Writer};
use crate::error::Violation;
use crate::mem::{RailId, Untrusted};

use super::window::{Action, Parked};
use super::wire::{KIND_GET, KIND_GOT, NO_TOKEN, Place};

pub(super) const COPIER: RailId = RailId(0);

/// Longest piece, in bytes. Pieces are staged on the stack.
pub(super) const LONGEST: usize = 8192;

/// Number of bits of a parked get that hold the longest piece, below the offset `into`.
pub(super) const PIECE_BITS: u32 = 16;

/// Maximum number of unanswered gets of a stream, between sides with failover.
pub(super) const GETS: usize = 4;

#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub at: Place,
    pub token: u64,
    pub left: u64,
    pub into: u64,
    pub piece: u16,
}

impl Answer {
    /// Zeros.
    pub const NONE: Answer = Answer {
        at: Place { region: 0, generation: 0, offset: 0 },
        token: 0,
        left: 0,
        into: 0,
        piece: 0,
    };

    pub(super) fn of(at: Place, token: u64, left: u64, into: u64) -> Answer {
        Answer { at, token, left, into: into >> PIECE_BITS, piece: into as u16 }
    }

    pub(super) fn parked(&self) -> Parked {
        let Answer { at, token, left, into, piece } = *self;
        Parked {
            at,
            what: Action::Get { token, left, into: into << PIECE_BITS | u64::from(piece) },
        }
    }
}

const GET: usize = 56;

const GOT: usize = 32;

/// A request for `len` bytes of registered memory, in pieces of at most `piece` bytes. The bytes
/// belong `into` bytes after the start of the buffer of the operation with this token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Get {
    pub context: u8,
    pub word: u32,
    pub ack: u32,
    pub at: Place,
    pub token: u64,
    pub len: u64,
    pub into: u64,
    pub piece: u32,
}

/// The head of a message with a piece of requested data. Without a piece, the owner has
/// deregistered the memory, and the get fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Got {
    pub context: u8,
    pub last: bool,
    pub word: u32,
    pub ack: u32,
    pub token: u64,
    pub into: u64,
}

impl Get {
    pub(super) fn encode(&self) -> [u8; GET] {
        let mut bytes = [0; GET];
        let mut out = Writer::new(&mut bytes);
        out.put(&[KIND_GET, self.context, 0, 0]).put_u32(self.word).put_u32(self.ack);
        out.put_u16(self.at.region).put_u16(self.at.generation).put_u64(self.at.offset);
        out.put_u64(self.token).put_u64(self.len).put_u64(self.into).put_u32(self.piece).put_u32(0);
        bytes
    }

    pub(super) fn decode(bytes: Untrusted<'_>) -> Option<Result<Get, Violation>> {
        let mut raw = [0; GET];
        let len = bytes.copy_out(&mut raw);
        (raw[0] == KIND_GET).then(|| Self::read(&raw[..len], bytes.len()))
    }

    fn read(raw: &[u8], len: usize) -> Result<Get, Violation> {
        if len != GET {
            return Err(Violation::Length);
        }
        let mut fields = Reader::new(raw);
        let (first, word, ack) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let at = Place { region: fields.u16()?, generation: fields.u16()?, offset: fields.u64()? };
        let (token, len, into) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (piece, zero) = (fields.u32()?, fields.u32()?);
        if first >> 16 != 0 || zero != 0 || token == NO_TOKEN || len == 0 || piece == 0 {
            return Err(Violation::Kind);
        }
        Ok(Get { context: (first >> 8) as u8, word, ack, at, token, len, into, piece })
    }
}

impl Got {
    pub(super) fn encode(&self) -> [u8; GOT] {
        let mut bytes = [0; GOT];
        let mut out = Writer::new(&mut bytes);
        out.put(&[KIND_GOT, self.context, self.last as u8, 0]).put_u32(self.word).put_u32(self.ack);
        out.put_u32(0).put_u64(self.token).put_u64(self.into);
        bytes
    }

    pub(super) fn decode(bytes: Untrusted<'_>) -> Option<Result<(Got, Untrusted<'_>), Violation>> {
        let mut raw = [0; GOT];
        bytes.copy_out(&mut raw);
        (raw[0] == KIND_GOT).then(|| {
            let (_, rest) = bytes.split_at(GOT).ok_or(Violation::Length)?;
            Ok((Self::read(&raw)?, rest))
        })
    }

    fn read(raw: &[u8; GOT]) -> Result<Got, Violation> {
        let mut fields = Reader::new(raw);
        let (first, word, ack, zero) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
        if first >> 17 != 0 || zero != 0 {
            return Err(Violation::Kind);
        }
        let (token, into) = (fields.u64()?, fields.u64()?);
        Ok(Got { context: (first >> 8) as u8, last: first >> 16 != 0, word, ack, token, into })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    const PLACE: Place =
        Place { region: 0x0201, generation: 0x0403, offset: 0x0c0b_0a09_0807_0605 };

    const SAMPLE_GET: Get = Get {
        context: 9,
        word: 0xa4a3_a2a1,
        ack: 0xb4b3_b2b1,
        at: PLACE,
        token: 0x11,
        len: 0x22,
        into: 0x33,
        piece: 0x4443_4241,
    };

    const SAMPLE_GOT: Got = Got {
        context: 9,
        last: true,
        word: 0xa4a3_a2a1,
        ack: 0xb4b3_b2b1,
        token: 0x11,
        into: 0x33,
    };

    #[test]
    fn messages_have_the_bytes_of_their_description() {
        let word = |value: u8| [value, 0, 0, 0, 0, 0, 0, 0];
        let front = [0xa1, 0xa2, 0xa3, 0xa4, 0xb1, 0xb2, 0xb3, 0xb4];
        let last = [0x41, 0x42, 0x43, 0x44, 0, 0, 0, 0];
        let place = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        let golden =
            [&[13, 9, 0, 0][..], &front, &place, &word(0x11), &word(0x22), &word(0x33), &last];
        assert_eq!(SAMPLE_GET.encode()[..], golden.concat());
        let golden = [&[14, 9, 1, 0][..], &front, &[0; 4], &word(0x11), &word(0x33)];
        assert_eq!(SAMPLE_GOT.encode()[..], golden.concat());
    }

    #[test]
    fn messages_come_back_and_bad_ones_are_refused() {
        let get = SAMPLE_GET.encode();
        assert_eq!(Get::decode(Untrusted::from_slice(&get)), Some(Ok(SAMPLE_GET)));
        for cut in 1..GET {
            let decoded = Get::decode(Untrusted::from_slice(&get[..cut]));
            assert_eq!(decoded, Some(Err(Violation::Length)), "cut to {cut}");
        }
        let long = [&get[..], &[0]].concat();
        assert_eq!(Get::decode(Untrusted::from_slice(&long)), Some(Err(Violation::Length)));
        let none = [
            Get { token: 0, ..SAMPLE_GET },
            Get { len: 0, ..SAMPLE_GET },
            Get { piece: 0, ..SAMPLE_GET },
        ];
        for bad in none {
            let decoded = Get::decode(Untrusted::from_slice(&bad.encode()));
            assert_eq!(decoded, Some(Err(Violation::Kind)), "{bad:?}");
        }
        let got = [&SAMPLE_GOT.encode()[..], b"piece"].concat();
        let decode = |bytes: &[u8]| {
            Got::decode(Untrusted::from_slice(bytes))
                .map(|got| got.map(|(got, rest)| (got, rest.len())))
        };
        assert_eq!(decode(&got), Some(Ok((SAMPLE_GOT, 5))));
        for cut in 1..GOT {
            assert_eq!(decode(&got[..cut]), Some(Err(Violation::Length)), "cut to {cut}");
        }
        for (at, bytes) in [(2, &get[..]), (3, &get), (52, &get), (2, &got), (3, &got), (12, &got)]
        {
            let mut bad = bytes.to_vec();
            bad[at] ^= 0x82;
            let refused = Get::decode(Untrusted::from_slice(&bad)).map(|get| get.map(drop));
            let refused = refused.or_else(|| decode(&bad).map(|got| got.map(drop)));
            assert_eq!(refused, Some(Err(Violation::Kind)), "byte {at}");
        }
        assert!(Get::decode(Untrusted::from_slice(&got)).is_none() && decode(&get).is_none());
    }
}
