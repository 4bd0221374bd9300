//! Defines the messages that move short descriptors in chunks. Little-endian, without padding.
//!
//! ```text
//! chunk: transfer u64, post u32, first u32, ranges u32, note u32, status i32
//!        then for each range: region u64, address u64, len u32; the note; data
//! ```
//!
//! | kind | from | ranges | data | answered by |
//! |---|---|---|---|---|
//! | *write* | initiator | where the data goes | of all ranges, in order | *done* |
//! | *read* | initiator | what to read | none | *data* |
//! | *data* | target | none; `ranges` is the number of ranges read | of these ranges, in order | |
//! | *done* | target | none; `ranges` is the number of chunks done | none | |
//!
//! `transfer` is the initiator's number of the transfer, and `post` counts its posts; answers
//! repeat both. `first` is the index of the first range in the transfer. `note` is the length of
//! the notification in the chunk, or [`NO_NOTE`]. `status` in an answer is 0 or an error.

use fishplate::core::bytes::{Put, Reader};

use crate::intro::Refused;

/// Tag of all messages between agents. The low bits are a [`Kind`].
pub(crate) const TAG: u64 = 0x4650_6e78;

pub(crate) const CHUNK_MAX: usize = 128 << 10;

/// Length of the fields before the ranges, and length of one range.
pub(crate) const HEAD: usize = 28;
pub(crate) const RANGE: usize = 20;

pub(crate) const NOTE_WITHIN: usize = 1024;

pub(crate) const NO_NOTE: u32 = u32::MAX;

/// Message kinds: the low bits of the tag. Only kinds below 4 can carry a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Note = 0,
    Write = 1,
    Read = 5,
    Data = 6,
    Done = 7,
}

impl Kind {
    pub fn of(tag: u64) -> Option<Kind> {
        [Kind::Note, Kind::Write, Kind::Read, Kind::Data, Kind::Done]
            .into_iter()
            .find(|kind| *kind as u64 == tag & 7)
    }

    pub fn may_notify(self) -> bool {
        (self as u64) < 4
    }

    pub fn is_answer(self) -> bool {
        matches!(self, Kind::Data | Kind::Done)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub transfer: u64,
    pub post: u32,
    pub first: u32,
    pub ranges: u32,
    pub note: u32,
    pub status: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub region: u64,
    pub address: u64,
    pub len: u32,
}

impl Head {
    pub fn encode(&self, out: &mut Vec<u8>) {
        let Head { transfer, post, first, ranges, note, status } = *self;
        out.put_u64(transfer).put_u32(post).put_u32(first);
        out.put_u32(ranges).put_u32(note).put_u32(status as u32);
    }

    pub fn decode(bytes: &[u8]) -> Result<Head, Refused> {
        let mut fields = Reader::new(bytes);
        Ok(Head {
            transfer: fields.u64()?,
            post: fields.u32()?,
            first: fields.u32()?,
            ranges: fields.u32()?,
            note: fields.u32()?,
            status: fields.u32()? as i32,
        })
    }

    pub fn note_len(&self) -> usize {
        if self.note == NO_NOTE { 0 } else { self.note as usize }
    }

    /// Returns the offset of the data in a chunk of `len` bytes. Rejects a chunk that is too short
    /// for its ranges and notification.
    pub fn before_data(&self, len: usize) -> Result<usize, Refused> {
        let ranges = (self.ranges as usize).checked_mul(RANGE);
        let before = ranges.and_then(|ranges| ranges.checked_add(HEAD + self.note_len()));
        before.filter(|before| *before <= len).ok_or(Refused::Malformed)
    }
}

impl Range {
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u64(self.region).put_u64(self.address).put_u32(self.len);
    }

    pub fn decode_all(bytes: &[u8]) -> Result<(Vec<Range>, usize), Refused> {
        let (mut found, mut sum) = (Vec::with_capacity(bytes.len() / RANGE), 0usize);
        for bytes in bytes.chunks(RANGE) {
            let mut fields = Reader::new(bytes);
            let range = Range { region: fields.u64()?, address: fields.u64()?, len: fields.u32()? };
            sum = sum.checked_add(range.len as usize).ok_or(Refused::Malformed)?;
            found.push(range);
        }
        Ok((found, sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_comes_back_and_wrong_lengths_are_refused() {
        let head = Head { transfer: 7, post: 8, first: 9, ranges: 2, note: 3, status: -4 };
        let range = Range { region: 1, address: u64::MAX, len: u32::MAX };
        let mut bytes = vec![];
        head.encode(&mut bytes);
        assert_eq!((Head::decode(&bytes), bytes.len()), (Ok(head), HEAD));
        assert_eq!(Head::decode(&bytes[..HEAD - 1]), Err(Refused::Malformed));
        let before = HEAD + 2 * RANGE + 3;
        assert_eq!(head.before_data(before), Ok(before));
        assert_eq!(head.before_data(before - 1), Err(Refused::Malformed));
        for wrong in [Head { ranges: u32::MAX, ..head }, Head { note: u32::MAX - 1, ..head }] {
            assert_eq!(wrong.before_data(CHUNK_MAX), Err(Refused::Malformed));
        }
        assert_eq!(Head { note: NO_NOTE, ..head }.before_data(CHUNK_MAX), Ok(before - 3));
        let mut two = vec![];
        range.encode(&mut two);
        range.encode(&mut two);
        assert_eq!(Range::decode_all(&two), Ok((vec![range; 2], 2 * u32::MAX as usize)));
        assert_eq!(Range::decode_all(&two[..RANGE + 1]), Err(Refused::Malformed));
        for kind in [Kind::Note, Kind::Write, Kind::Read, Kind::Data, Kind::Done] {
            assert_eq!(Kind::of(0x78 | kind as u64), Some(kind));
        }
        assert_eq!([2, 3, 4].map(Kind::of), [None; 3]);
    }
}
