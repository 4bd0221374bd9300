//! The messages of failover. The first one, [`Told`], reports which numbers have arrived, and asks
//! the peer to fence rails. A side sends it while it fences rails, and afterwards.
//!
//! ```text
//! 128 bytes: kind u8 | context u8 | last u8 | asks u8 | word u32 | ack u32 | freed u32 | from u64
//!            | rails u16 | heard u16 | failed u16 | left u16 | epochs 16 x u16 | words 8 x u64
//! ```
//!
//! Bit n of the words is set if the number `from + n` has arrived. All numbers below the cursor
//! `ack` have arrived. If `last` is 1, no number beyond the words has arrived. The bitmasks use the
//! sender's rail numbers:
//!
//! - `rails`: rails that the sender has fenced.
//! - `heard`: rails about which the receiver's report is complete.
//! - `failed`: rails that the receiver must fence.
//! - `left`: rails of `rails` and `failed` that work, but are given up so that an endpoint can be
//!   closed (see `leave`). The sender no longer uses such a rail in `rails`. The receiver may stop
//!   using such a rail in `failed`.
//!
//! If `asks` is 1, the sender requests a report in return, because the receiver has not confirmed
//! all of `rails` yet. `epochs` has the epoch of each rail. What the message reports about a rail
//! is valid in that epoch only.
//!
//! Every rail accepts a message of this length. libfabric's `tcp` cannot inject it, so a completion
//! reports a failed post.
//!
//! The other message, [`Asks`], requests the reply to a fetching atomic again. The request carries
//! the 64-bit number of the atomic: when it arrives, the truncated number in a word may already
//! stand for a later one.
//!
//! ```text
//! 32 bytes: kind u8 | context u8 | 0 u16 | word u32 | ack u32 | 0 u32 | token u64 | number u64
//! ```

use crate::bytes::{Put, Reader, Writer};
use crate::error::Violation;
use crate::mem::Untrusted;
use crate::sync::seq::Seq;

use super::super::joint::RAILS_MAX;
use super::super::wire::{KIND_ASKS, KIND_TOLD};

pub(in super::super) const WORDS: usize = 8;
const HEAD: usize = 64;
pub(in super::super) const TOLD: usize = HEAD + 8 * WORDS;

const ASKS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Told {
    pub context: u8,
    pub last: bool,
    pub asks: bool,
    pub word: u32,
    pub ack: u32,
    pub freed: u32,
    pub from: Seq,
    pub rails: u16,
    pub heard: u16,
    pub failed: u16,
    pub left: u16,
    pub epochs: [u16; RAILS_MAX],
    pub words: [u64; WORDS],
}

impl Told {
    pub(in super::super) fn encode(&self) -> [u8; TOLD] {
        let mut bytes = [0; TOLD];
        let mut out = Writer::new(&mut bytes);
        out.put(&[KIND_TOLD, self.context, self.last as u8, self.asks as u8]);
        out.put_u32(self.word).put_u32(self.ack).put_u32(self.freed).put_u64(self.from.0);
        out.put_u16(self.rails).put_u16(self.heard).put_u16(self.failed).put_u16(self.left);
        for &epoch in &self.epochs {
            out.put_u16(epoch);
        }
        for &word in &self.words {
            out.put_u64(word);
        }
        bytes
    }

    pub(in super::super) fn decode(bytes: Untrusted<'_>) -> Option<Result<Told, Violation>> {
        let mut raw = [0; TOLD];
        bytes.copy_out(&mut raw);
        (raw[0] == KIND_TOLD).then(|| Self::read(&raw, bytes.len()))
    }

    fn read(raw: &[u8; TOLD], len: usize) -> Result<Told, Violation> {
        if len != TOLD {
            return Err(Violation::Length);
        }
        let mut fields = Reader::new(raw);
        let first = fields.u32()?;
        let (word, ack, freed, from) =
            (fields.u32()?, fields.u32()?, fields.u32()?, Seq(fields.u64()?));
        let (rails, heard, failed, left) =
            (fields.u16()?, fields.u16()?, fields.u16()?, fields.u16()?);
        if first & 0xfefe_0000 != 0 {
            return Err(Violation::Kind);
        }
        let (mut epochs, mut words) = ([0; RAILS_MAX], [0; WORDS]);
        for epoch in &mut epochs {
            *epoch = fields.u16()?;
        }
        for word in &mut words {
            *word = fields.u64()?;
        }
        let (context, last, asks) = ((first >> 8) as u8, first >> 16 & 1 != 0, first >> 24 != 0);
        Ok(Told {
            context,
            last,
            asks,
            word,
            ack,
            freed,
            from,
            rails,
            heard,
            failed,
            left,
            epochs,
            words,
        })
    }

    /// Returns `None` if another message reports the number.
    pub(super) fn says(&self, seq: Seq, cursor: Seq) -> Option<bool> {
        if seq.is_before(cursor) {
            return Some(true);
        }
        if seq.is_before(self.from) {
            return None;
        }
        let n = seq.since(self.from);
        match self.words.get((n / 64) as usize) {
            Some(word) => Some(word >> (n % 64) & 1 != 0),
            None => self.last.then_some(false),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Asks {
    pub context: u8,
    pub word: u32,
    pub ack: u32,
    pub token: u64,
    pub number: Seq,
}

impl Asks {
    pub(in super::super) fn encode(&self) -> [u8; ASKS] {
        let mut bytes = [0; ASKS];
        let mut out = Writer::new(&mut bytes);
        out.put(&[KIND_ASKS, self.context, 0, 0]).put_u32(self.word).put_u32(self.ack).put_u32(0);
        out.put_u64(self.token).put_u64(self.number.0);
        bytes
    }

    pub(in super::super) fn decode(bytes: Untrusted<'_>) -> Option<Result<Asks, Violation>> {
        let mut raw = [0; ASKS];
        let len = bytes.copy_out(&mut raw);
        (raw[0] == KIND_ASKS).then(|| Self::read(&raw[..len], bytes.len()))
    }

    fn read(raw: &[u8], len: usize) -> Result<Asks, Violation> {
        let mut fields = Reader::new(raw);
        let (first, word, ack, zero) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
        if first >> 16 != 0 || zero != 0 {
            return Err(Violation::Kind);
        }
        if len != ASKS {
            return Err(Violation::Length);
        }
        let (token, number) = (fields.u64()?, Seq(fields.u64()?));
        Ok(Asks { context: (first >> 8) as u8, word, ack, token, number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Told = Told {
        context: 9,
        last: true,
        asks: true,
        word: 0x0403_0201,
        ack: 0x0807_0605,
        freed: 0x0c0b_0a09,
        from: Seq(0x1817_1615_1413_1211),
        rails: 0x2221,
        heard: 0x2423,
        failed: 0x2625,
        left: 0x2827,
        epochs: [0x5251, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x5453],
        words: [0x31, 0x41, 0, 0, 0, 0, 0, 0],
    };
    const QUESTION: Asks =
        Asks { context: 9, word: 0x0403_0201, ack: 0x0807_0605, token: 0x11, number: Seq(0x21) };

    #[test]
    fn messages_have_the_bytes_of_their_description_and_come_back() {
        let out = SAMPLE.encode();
        let word = |low| [low, 0, 0, 0, 0, 0, 0, 0];
        let head = [
            9, 9, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16,
            0x17, 0x18, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28,
        ];
        assert_eq!(out[..32], head);
        assert_eq!(
            (&out[32..34], &out[34..62], &out[62..HEAD]),
            (&[0x51, 0x52][..], &[0; 28][..], &[0x53, 0x54][..])
        );
        assert_eq!(out[HEAD..HEAD + 16], *[word(0x31), word(0x41)].as_flattened());
        assert_eq!(out[HEAD + 16..], [0; 48]);
        assert_eq!(Told::decode(Untrusted::from_slice(&out)), Some(Ok(SAMPLE)));
        let bytes = QUESTION.encode();
        assert_eq!(bytes[..16], [10, 9, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]);
        assert_eq!(bytes[16..], *[word(0x11), word(0x21)].as_flattened());
        assert_eq!(Asks::decode(Untrusted::from_slice(&bytes)), Some(Ok(QUESTION)));
        assert_eq!(Told::decode(Untrusted::from_slice(&bytes)), None);
        assert_eq!(Asks::decode(Untrusted::from_slice(&out)), None);
    }

    #[test]
    fn every_message_that_is_cut_or_longer_or_says_what_nobody_says_is_refused() {
        let mut out = [0; TOLD + 8];
        out[..TOLD].copy_from_slice(&SAMPLE.encode());
        let told = |bytes: &[u8]| Told::decode(Untrusted::from_slice(bytes));
        for cut in (1..=TOLD + 8).filter(|&cut| cut != TOLD) {
            assert_eq!(told(&out[..cut]), Some(Err(Violation::Length)), "{cut} bytes");
        }
        for at in [2, 3] {
            let mut bad = out;
            bad[at] ^= 0x82;
            assert_eq!(told(&bad[..TOLD]), Some(Err(Violation::Kind)), "byte {at}");
        }
        let bytes = QUESTION.encode();
        for cut in 1..ASKS {
            assert_eq!(
                Asks::decode(Untrusted::from_slice(&bytes[..cut])),
                Some(Err(Violation::Length))
            );
        }
        for at in [2, 3, 12, 15] {
            let mut bad = bytes;
            bad[at] ^= 0x82;
            assert_eq!(
                Asks::decode(Untrusted::from_slice(&bad)),
                Some(Err(Violation::Kind)),
                "byte {at}"
            );
        }
    }

    #[test]
    fn what_is_told_covers_all_before_the_cursor_and_the_last_one_all_behind() {
        let mut words = [0; WORDS];
        (words[0], words[WORDS - 1]) = (0x31, 1 << 63);
        let told = Told { from: Seq(100), last: false, words, ..SAMPLE };
        let says = |told: Told, seq| told.says(Seq(seq), Seq(98));
        assert_eq!([97, 98, 99].map(|seq| says(told, seq)), [Some(true), None, None]);
        assert_eq!(
            [100, 101, 104].map(|seq| says(told, seq)),
            [Some(true), Some(false), Some(true)]
        );
        let end = 100 + 64 * WORDS as u64;
        assert_eq!(
            [end - 2, end - 1, end].map(|seq| says(told, seq)),
            [Some(false), Some(true), None]
        );
        assert_eq!(says(Told { last: true, ..told }, end), Some(false));
    }
}
