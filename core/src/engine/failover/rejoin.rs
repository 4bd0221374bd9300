//! The message about a rail that returns.
//!
//! ```text
//! 128 bytes: kind u8 | rail u8 | stage u8 | asks u8 | word u32 | epoch u16 | serial u16
//!            | length u8 | 0 u8 | 0 u16 | address, 112 bytes
//! ```
//!
//! `rail` is the sender's number for the rail. `epoch` is the epoch that begins, or has begun, when
//! the rail returns. If `asks` is 1, the sender does not use the rail yet and requests the
//! receiver's stage. `serial` counts the messages about a rail: a message with an older serial is
//! ignored. The address has `length` bytes. From stage [`Proven`](Stage::Proven) on it is empty.

use crate::bytes::{Put, Reader, Writer};
use crate::error::Violation;
use crate::mem::Untrusted;
use crate::rail::REOPEN_MAX;

use super::super::joint::RAILS_MAX;
use super::super::wire::KIND_REJOIN;

const HEAD: usize = 16;
pub(super) const REJOIN: usize = HEAD + REOPEN_MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Offer,
    Attached,
    Proven,
    /// This message is itself a probe, sent on the rail that returns.
    Probe,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Rejoin {
    pub(super) rail: u8,
    pub(super) stage: Stage,
    pub(super) asks: bool,
    pub(super) word: u32,
    pub(super) epoch: u16,
    pub(super) serial: u16,
    pub(super) length: u8,
    pub(super) address: [u8; REOPEN_MAX],
}

impl Rejoin {
    pub(super) fn address(&self) -> &[u8] {
        &self.address[..self.length as usize]
    }

    pub(in super::super) fn sample([a, b, c]: [u64; 3]) -> Rejoin {
        let stage =
            [Stage::Offer, Stage::Attached, Stage::Proven, Stage::Probe][(a >> 32) as usize % 4];
        let named = matches!(stage, Stage::Offer | Stage::Attached);
        let length = if named { (a >> 40) as usize % (REOPEN_MAX + 1) } else { 0 };
        let mut address = [0; REOPEN_MAX];
        address[..length].fill(c as u8);
        let (rail, asks, length) = ((a >> 60) as u8, c & 256 != 0, length as u8);
        let (word, epoch, serial) = (a as u32, b as u16, (b >> 16) as u16);
        Rejoin { rail, stage, asks, word, epoch, serial, length, address }
    }

    pub(in super::super) fn encode(&self) -> [u8; REJOIN] {
        let mut bytes = [0; REJOIN];
        let mut out = Writer::new(&mut bytes);
        out.put(&[KIND_REJOIN, self.rail, self.stage as u8, self.asks as u8]).put_u32(self.word);
        out.put_u16(self.epoch)
            .put_u16(self.serial)
            .put(&[self.length, 0, 0, 0])
            .put(&self.address);
        bytes
    }

    pub(in super::super) fn decode(bytes: Untrusted<'_>) -> Option<Result<Rejoin, Violation>> {
        let mut raw = [0; REJOIN];
        bytes.copy_out(&mut raw);
        (raw[0] == KIND_REJOIN).then(|| Self::read(&raw, bytes.len()))
    }

    fn read(raw: &[u8; REJOIN], len: usize) -> Result<Rejoin, Violation> {
        let [_, rail, stage, asks, ..] = *raw;
        if len != REJOIN {
            return Err(Violation::Length);
        }
        let stage = match stage {
            0 => Stage::Offer,
            1 => Stage::Attached,
            2 => Stage::Proven,
            3 => Stage::Probe,
            _ => return Err(Violation::Kind),
        };
        let mut fields = Reader::new(&raw[4..]);
        let (word, epoch, serial) = (fields.u32()?, fields.u16()?, fields.u16()?);
        let ([length, zero], rest, address) = (fields.array()?, fields.u16()?, fields.array()?);
        if asks > 1 || zero != 0 || rest != 0 || rail as usize >= RAILS_MAX {
            return Err(Violation::Kind);
        }
        let named = matches!(stage, Stage::Offer | Stage::Attached);
        if length as usize > REOPEN_MAX || (length != 0 && !named) {
            return Err(Violation::Length);
        }
        Ok(Rejoin { rail, stage, asks: asks != 0, word, epoch, serial, length, address })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(stage: Stage) -> Rejoin {
        let mut address = [0; REOPEN_MAX];
        let length = if matches!(stage, Stage::Offer | Stage::Attached) { 5 } else { 0 };
        address[..length].copy_from_slice(&b"there"[..length]);
        let (word, epoch, serial) = (0x0403_0201, 0x0605, 0x0807);
        Rejoin { rail: 15, stage, asks: true, word, epoch, serial, length: length as u8, address }
    }

    #[test]
    fn a_message_has_the_bytes_of_its_description_and_comes_back() {
        for (n, stage) in (0..).zip([Stage::Offer, Stage::Attached, Stage::Proven, Stage::Probe]) {
            let message = sample(stage);
            let bytes = message.encode();
            let golden = [11, 15, n, 1, 1, 2, 3, 4, 5, 6, 7, 8, message.length, 0, 0, 0];
            assert_eq!((&bytes[..HEAD], &bytes[HEAD..]), (&golden[..], &message.address[..]));
            assert_eq!(Rejoin::decode(Untrusted::from_slice(&bytes)), Some(Ok(message)));
        }
        assert_eq!(Rejoin::decode(Untrusted::from_slice(&[9; REJOIN])), None);
    }

    #[test]
    fn a_message_that_is_cut_or_longer_or_impossible_is_refused() {
        let mut long = [0; REJOIN + 1];
        long[..REJOIN].copy_from_slice(&sample(Stage::Offer).encode());
        for cut in (1..=REJOIN + 1).filter(|&cut| cut != REJOIN) {
            let got = Rejoin::decode(Untrusted::from_slice(&long[..cut]));
            assert_eq!(got, Some(Err(Violation::Length)), "{cut} bytes");
        }
        let with = |stage, at: usize, value| {
            let mut bytes = sample(stage).encode();
            bytes[at] = value;
            Rejoin::decode(Untrusted::from_slice(&bytes)).unwrap().err()
        };
        for (at, value) in [(1, 16), (2, 4), (3, 2), (13, 1), (14, 1), (15, 1)] {
            assert_eq!(with(Stage::Offer, at, value), Some(Violation::Kind), "byte {at}");
        }
        assert_eq!(with(Stage::Attached, 12, REOPEN_MAX as u8 + 1), Some(Violation::Length));
        for stage in [Stage::Proven, Stage::Probe] {
            assert_eq!(with(stage, 12, 1), Some(Violation::Length), "no address belongs there");
        }
    }
}
