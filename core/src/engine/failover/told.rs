//! The messages of failover: the one in which an end that has fenced rails says what has arrived.
//!
//! ```text
//! 32 bytes: kind u8 | context u8 | last u8 | asks u8 | word u32 | ack u32 | freed u32 | from u64
//!           | rails u16 | words u16 | heard u16 | 0 u16; then as many words of 64 bits
//! ```
//!
//! Bit n of the words says that the number `from + n` has arrived, all below the cursor among them.
//! Where `last` is 1, nothing beyond them has. `rails` are those that the sender has fenced, as it
//! counts them, by bit, and so are `heard`, of which the receiver has told it all. Where `asks` is
//! 1, the sender does not know yet that the receiver has heard of all of `rails`, and wants to.
//!
//! The other message asks for the reply to a fetching atomic again, by the whole of its number: it
//! may be so late that the sequence in a word means another one.
//!
//! ```text
//! 32 bytes: kind u8 | context u8 | 0 u16 | word u32 | ack u32 | 0 u32 | token u64 | number u64
//! ```

use crate::bytes::{Put, Reader, Writer};
use crate::error::Violation;
use crate::mem::Untrusted;
use crate::sync::seq::Seq;

use super::super::wire::{KIND_ASKS, KIND_TOLD};

/// Words of a message, at most: with them it is as long as every rail takes.
pub(in super::super) const WORDS: usize = 12;
const HEAD: usize = 32;
pub(in super::super) const LONGEST: usize = HEAD + 8 * WORDS;

/// A message, decoded.
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
    /// How many words there are, and they.
    pub count: u16,
    pub words: [u64; WORDS],
}

impl Told {
    /// Writes the message; returns its length in bytes.
    pub(in super::super) fn encode(&self, out: &mut [u8; LONGEST]) -> usize {
        let mut out = Writer::new(out);
        out.put(&[KIND_TOLD, self.context, self.last as u8, self.asks as u8]);
        out.put_u32(self.word).put_u32(self.ack).put_u32(self.freed).put_u64(self.from.0);
        out.put_u16(self.rails).put_u16(self.count).put_u16(self.heard).put_u16(0);
        for &word in &self.words[..self.count as usize] {
            out.put_u64(word);
        }
        HEAD + 8 * self.count as usize
    }

    /// Copies a message out and checks its form. `None`: it is another one.
    pub(in super::super) fn decode(bytes: Untrusted<'_>) -> Option<Result<Told, Violation>> {
        let mut raw = [0; LONGEST];
        let len = bytes.copy_out(&mut raw);
        (raw[0] == KIND_TOLD).then(|| Self::read(&raw[..len], bytes.len()))
    }

    fn read(raw: &[u8], len: usize) -> Result<Told, Violation> {
        let mut fields = Reader::new(raw);
        let first = fields.u32()?;
        let (word, ack, freed, from) = (fields.u32()?, fields.u32()?, fields.u32()?, Seq(fields.u64()?));
        let (rails, count, heard, zero) = (fields.u16()?, fields.u16()?, fields.u16()?, fields.u16()?);
        if first & 0xfefe_0000 != 0 || zero != 0 {
            return Err(Violation::Kind);
        }
        if count as usize > WORDS || len != HEAD + 8 * count as usize {
            return Err(Violation::Length);
        }
        let mut words = [0; WORDS];
        for word in &mut words[..count as usize] {
            *word = fields.u64()?;
        }
        let (context, last, asks) = ((first >> 8) as u8, first >> 16 & 1 != 0, first >> 24 != 0);
        Ok(Told { context, last, asks, word, ack, freed, from, rails, heard, count, words })
    }

    /// Whether a number has arrived; `None`: another message says so.
    pub(super) fn says(&self, seq: Seq, cursor: Seq) -> Option<bool> {
        if seq.is_before(cursor) {
            return Some(true);
        }
        if seq.is_before(self.from) {
            return None;
        }
        let n = seq.since(self.from);
        match self.words[..self.count as usize].get((n / 64) as usize) {
            Some(word) => Some(word >> (n % 64) & 1 != 0),
            None => self.last.then_some(false),
        }
    }
}

/// A question for a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Asks {
    pub context: u8,
    pub word: u32,
    pub ack: u32,
    pub token: u64,
    pub number: Seq,
}

impl Asks {
    pub(in super::super) fn encode(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        let mut out = Writer::new(&mut bytes);
        out.put(&[KIND_ASKS, self.context, 0, 0]).put_u32(self.word).put_u32(self.ack).put_u32(0);
        out.put_u64(self.token).put_u64(self.number.0);
        bytes
    }

    /// As [`Told::decode`].
    pub(in super::super) fn decode(bytes: Untrusted<'_>) -> Option<Result<Asks, Violation>> {
        let mut raw = [0; HEAD];
        let len = bytes.copy_out(&mut raw);
        (raw[0] == KIND_ASKS).then(|| Self::read(&raw[..len], bytes.len()))
    }

    fn read(raw: &[u8], len: usize) -> Result<Asks, Violation> {
        let mut fields = Reader::new(raw);
        let (first, word, ack, zero) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
        if first >> 16 != 0 || zero != 0 {
            return Err(Violation::Kind);
        }
        if len != HEAD {
            return Err(Violation::Length);
        }
        let (token, number) = (fields.u64()?, Seq(fields.u64()?));
        Ok(Asks { context: (first >> 8) as u8, word, ack, token, number })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLD: Told = Told {
        context: 9,
        last: true,
        asks: true,
        word: 0x0403_0201,
        ack: 0x0807_0605,
        freed: 0x0c0b_0a09,
        from: Seq(0x1817_1615_1413_1211),
        rails: 0x2221,
        heard: 0x2423,
        count: 2,
        words: [0x31, 0x41, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    };
    const ASKS: Asks =
        Asks { context: 9, word: 0x0403_0201, ack: 0x0807_0605, token: 0x11, number: Seq(0x21) };

    #[test]
    fn messages_have_the_bytes_of_their_description_and_come_back() {
        let mut out = [0; LONGEST];
        let len = TOLD.encode(&mut out);
        let word = |low| [low, 0, 0, 0, 0, 0, 0, 0];
        let head = [
            9, 9, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17,
            0x18, 0x21, 0x22, 2, 0, 0x23, 0x24, 0, 0,
        ];
        assert_eq!((&out[..HEAD], &out[HEAD..len]), (&head[..], [word(0x31), word(0x41)].as_flattened()));
        assert_eq!(Told::decode(Untrusted::from_slice(&out[..len])), Some(Ok(TOLD)));
        let bytes = ASKS.encode();
        assert_eq!(bytes[..16], [10, 9, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]);
        assert_eq!(bytes[16..], *[word(0x11), word(0x21)].as_flattened());
        assert_eq!(Asks::decode(Untrusted::from_slice(&bytes)), Some(Ok(ASKS)));
        assert_eq!(Told::decode(Untrusted::from_slice(&bytes)), None);
        assert_eq!(Asks::decode(Untrusted::from_slice(&out[..len])), None);
    }

    #[test]
    fn every_message_that_is_cut_or_longer_or_says_what_nobody_says_is_refused() {
        let mut out = [0; LONGEST + 8];
        let len = TOLD.encode((&mut out[..LONGEST]).try_into().unwrap());
        let told = |bytes: &[u8]| Told::decode(Untrusted::from_slice(bytes));
        for cut in (1..=LONGEST + 8).filter(|&cut| cut != len) {
            assert_eq!(told(&out[..cut]), Some(Err(Violation::Length)), "{cut} bytes");
        }
        for at in [2, 3, 30, 31] {
            let mut bad = out;
            bad[at] ^= 0x82;
            assert_eq!(told(&bad[..len]), Some(Err(Violation::Kind)), "byte {at}");
        }
        out[26] = WORDS as u8 + 1;
        assert_eq!(told(&out), Some(Err(Violation::Length)), "more words than there may be");
        let bytes = ASKS.encode();
        for cut in 1..HEAD {
            assert_eq!(Asks::decode(Untrusted::from_slice(&bytes[..cut])), Some(Err(Violation::Length)));
        }
        for at in [2, 3, 12, 15] {
            let mut bad = bytes;
            bad[at] ^= 0x82;
            assert_eq!(Asks::decode(Untrusted::from_slice(&bad)), Some(Err(Violation::Kind)), "byte {at}");
        }
    }

    #[test]
    fn what_is_told_covers_all_before_the_cursor_and_the_last_one_all_behind() {
        let told = Told { from: Seq(100), last: false, count: 1, ..TOLD };
        let says = |told: Told, seq| told.says(Seq(seq), Seq(98));
        assert_eq!([97, 98, 99].map(|seq| says(told, seq)), [Some(true), None, None]);
        assert_eq!([100, 101, 104].map(|seq| says(told, seq)), [Some(true), Some(false), Some(true)]);
        assert_eq!([163, 164].map(|seq| says(told, seq)), [Some(false), None]);
        assert_eq!(says(Told { last: true, ..told }, 164), Some(false));
    }
}
