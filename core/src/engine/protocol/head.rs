//! The wire format of two-sided messages. Little-endian, no padding.
//!
//! ```text
//! head, 16 bytes: kind u8 | context u8 | op u8 | 0 u8 | word u32 | ack u32 | freed u32
//! Tagged      32 bytes and the payload: head, tag u64, tag u32, 0 u32;
//!             op 1 requests an early acknowledgement
//! Sync        40 bytes and the payload: the fields of Tagged, token u64
//! Rts         72 bytes and 16 for each key: the fields of Sync, length u64, offset u64,
//!             size of the region u64, region u16, generation u16, rails u32, keys;
//!             bit i of rails: a key of the sender's rail i follows, in the order of the bits;
//!             a message that is too short for all keys has those of the lowest rails;
//!             without keys, region is 65535, or 65534 if offset is an address in the
//!             sender's process
//! Fin         32 bytes: head, token u64, delivered u64; op 1: the receiver could not receive it,
//!             op 2: the receiver is closing and has refused it; of a Sync it keeps the payload
//! Pull        40 bytes: head, token u64, request u64, length u64
//! Chunk       32 bytes and the payload: head, request u64, offset u64
//! Room        32 bytes: head, credits u32, short u32, headers u64: all credits and headers of
//!             the stream; the total of short messages that it may send, modulo 2^32
//! Short       32 bytes and the payload: the fields of Tagged; needs no credit, but a grant by
//!             a Room
//! ```
//!
//! Tagged, Sync, Rts and Short messages have a number in the stream and wait for earlier numbers.
//! So messages match in the order sent. The other kinds have no number; their word only identifies
//! the attachment. A Fin, a Pull or a Chunk refers to an earlier message by its token or request. A
//! Room may arrive at any time.
//!
//! Between sides with failover, a Fin, a Pull or a Chunk has a number too. Its kind is then higher
//! by [`NUMBERED`]. `freed` is the total of credits returned to the sender over the life of the
//! stream. The total has 32 bits, so an old total that arrives late differs from a new total.

use crate::bytes::{Put, Reader, Writer};
use crate::error::Violation;
use crate::mem::Untrusted;
use crate::rail::RailKey;

use super::super::joint::{Pairing, RAILS_MAX};
use super::super::tag::Tag;

/// Length of the header that all kinds share, in bytes.
pub(crate) const HEAD: usize = 32;
/// Length of a Sync message before its payload, in bytes.
pub(crate) const SYNC: usize = 40;
pub(crate) const RTS: usize = 72;
/// Length of an Rts with a key for every rail, in bytes.
pub(crate) const LONGEST: usize = RTS + 16 * RAILS_MAX;

/// The lowest kind of a two-sided message. All lower kinds belong to one-sided operations.
pub(crate) const FIRST_KIND: u8 = 16;
pub(crate) const TAGGED: u8 = 16;
pub(crate) const SYNCHRONOUS: u8 = 17;
pub(crate) const REQUEST: u8 = 18;
pub(crate) const FIN: u8 = 19;
pub(crate) const PULL: u8 = 20;
pub(crate) const CHUNK: u8 = 21;
pub(crate) const ROOM: u8 = 22;
pub(crate) const SHORT: u8 = 26;

/// The `op` of a Fin: the message was received, could not be received, or was refused because the
/// receiver is closing.
pub(crate) const RECEIVED: u8 = 0;
pub(crate) const FAILED: u8 = 1;
pub(crate) const CLOSING: u8 = 2;

/// Added to the kinds from [`FIN`] to [`CHUNK`] if they have a number, between sides with failover.
pub(crate) const NUMBERED: u8 = 4;

/// The region number of a payload that the receiver cannot read and must pull in chunks.
pub(crate) const UNREADABLE: u16 = u16::MAX;
/// The region number of a payload without a region, if the offer has no keys. Only
/// [`Rail::read_address`](crate::rail::Rail::read_address) reads such a payload.
pub(crate) const ADDRESS: u16 = u16::MAX - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub kind: u8,
    pub context: u8,
    pub op: u8,
    pub word: u32,
    pub ack: u32,
    pub freed: u32,
    pub words: [u64; 2],
}

impl Head {
    #[inline(always)]
    pub(crate) fn tagged(kind: u8, context: u8, tag: Tag) -> Head {
        Head { kind, context, op: 0, word: 0, ack: 0, freed: 0, words: [tag.lo, tag.hi as u64] }
    }

    #[inline(always)]
    pub(crate) fn write(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        let mut out = Writer::new(&mut bytes);
        out.put(&[self.kind, self.context, self.op, 0]).put_u32(self.word).put_u32(self.ack);
        out.put_u32(self.freed).put_u64(self.words[0]).put_u64(self.words[1]);
        bytes
    }

    #[inline(always)]
    pub(crate) fn read(bytes: Untrusted<'_>) -> Result<(Head, Untrusted<'_>), Violation> {
        let (head, rest) = bytes.split_at(HEAD).ok_or(Violation::Length)?;
        // SAFETY: `split_at` returned `head` with 32 readable bytes. They are copied once, and
        // everything below uses the copy.
        let raw: [u8; HEAD] = unsafe { head.as_ptr().cast::<[u8; HEAD]>().read_unaligned() };
        let mut fields = Reader::new(&raw);
        let (first, second) = (fields.u64()?, fields.u64()?);
        let head = Head {
            kind: first as u8,
            context: (first >> 8) as u8,
            op: (first >> 16) as u8,
            word: (first >> 32) as u32,
            ack: second as u32,
            freed: (second >> 32) as u32,
            words: [fields.u64()?, fields.u64()?],
        };
        Ok((head, rest))
    }

    #[inline(always)]
    pub(crate) fn tag(&self) -> Result<Tag, Violation> {
        if self.words[1] >> 32 != 0 {
            return Err(Violation::Kind);
        }
        Ok(Tag { lo: self.words[0], hi: self.words[1] as u32 })
    }
}

/// The body of an Rts: describes where the payload is at the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer<const RAILS: usize> {
    /// Identifies the send at the sender. Never 0.
    pub token: u64,
    pub len: u64,
    pub offset: u64,
    pub size: u64,
    /// The number of the region at the sender, or [`UNREADABLE`] or [`ADDRESS`].
    pub region: u16,
    pub generation: u16,
    /// The rails that join the two sides, by our numbers. On the wire they have the sender's
    /// numbers. In an offer that was read, 0 unless there is a key for each of them.
    pub rails: u16,
    /// Valid for the rails in `rails`, stale for others.
    pub keys: [RailKey; RAILS],
}

impl<const RAILS: usize> Offer<RAILS> {
    pub(crate) const NONE: Self = Offer {
        token: 0,
        len: 0,
        offset: 0,
        size: 0,
        region: UNREADABLE,
        generation: 0,
        rails: 0,
        keys: [RailKey { key: 0, base: 0 }; RAILS],
    };

    pub(crate) fn address(&self) -> Option<u64> {
        (self.region == ADDRESS && self.rails == 0).then_some(self.offset)
    }

    /// Returns whether the offer names a region at the sender, with or without keys.
    pub(crate) fn names_region(&self) -> bool {
        self.region != UNREADABLE && self.address().is_none()
    }

    pub(crate) fn write(&self, out: &mut [u8; LONGEST]) -> usize {
        let mut rest = Writer::new(&mut out[HEAD..]);
        rest.put_u64(self.token).put_u64(self.len).put_u64(self.offset).put_u64(self.size);
        rest.put_u16(self.region).put_u16(self.generation).put_u32(self.rails.into());
        let mut rails = self.rails;
        while let Some(key) = self.keys.get(rails.trailing_zeros() as usize)
            && rails != 0
        {
            rest.put_u64(key.key).put_u64(key.base);
            rails &= rails - 1;
        }
        HEAD + rest.len()
    }

    /// Copies the body of a peer's message here, and checks it. `ours` is the bitmask of our rails
    /// that reach the peer. If the key of one of them is missing, rails cannot read the payload,
    /// but the offer still names its region.
    pub(crate) fn read(
        &mut self,
        rest: Untrusted<'_>,
        pairing: &Pairing,
        ours: u16,
    ) -> Result<(), Violation> {
        let (body, keys) = rest.split_at(RTS - HEAD).ok_or(Violation::Length)?;
        let mut raw = [0u8; RTS - HEAD];
        body.copy_out(&mut raw);
        let mut fields = Reader::new(&raw);
        let [token, len, offset, size] =
            [fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?];
        let (region, generation, theirs) = (fields.u16()?, fields.u16()?, fields.u32()?);
        let known = match theirs {
            0 => region == UNREADABLE || region == ADDRESS,
            _ => theirs >> RAILS_MAX == 0 && region != UNREADABLE,
        };
        if !known {
            return Err(Violation::Kind);
        }
        if keys.len() != 16 * theirs.count_ones() as usize {
            return Err(Violation::Length);
        }
        match offset.checked_add(len) {
            Some(end) if end <= size && size <= i64::MAX as u64 && token != 0 => {}
            _ => return Err(Violation::Bounds),
        }
        (self.token, self.len, self.offset, self.size) = (token, len, offset, size);
        (self.region, self.generation, self.rails) = (region, generation, 0);
        if theirs != 0 {
            self.read_keys(keys, theirs, pairing, ours);
        }
        Ok(())
    }

    fn read_keys(&mut self, keys: Untrusted<'_>, theirs: u32, pairing: &Pairing, ours: u16) {
        let mut raw = [[0u8; 16]; RAILS_MAX];
        keys.copy_out(raw.as_flattened_mut());
        let key = |rail: usize| {
            let before = (theirs & ((1 << rail) - 1)).count_ones() as usize;
            let mut fields = Reader::new(raw.get(before)?);
            let key = RailKey { key: fields.u64().ok()?, base: fields.u64().ok()? };
            (theirs >> rail & 1 != 0).then_some(key)
        };
        match pairing.in_our_order(ours, key) {
            Some(keys) if ours != 0 => (self.rails, self.keys) = (ours, keys),
            _ if self.region == ADDRESS => self.region = UNREADABLE,
            _ => {}
        }
    }
}

pub(crate) fn trailing(rest: Untrusted<'_>) -> Result<(u64, Untrusted<'_>), Violation> {
    let (front, rest) = rest.split_at(8).ok_or(Violation::Length)?;
    let mut raw = [0u8; 8];
    front.copy_out(&mut raw);
    Ok((u64::from_le_bytes(raw), rest))
}

#[cfg(test)]
mod tests {
    use super::super::super::joint::Joint;
    use super::*;
    use crate::mem::RailId;

    extern crate std;

    #[test]
    fn a_head_comes_back_and_one_cut_short_is_refused() {
        let tag = Tag { lo: u64::MAX - 3, hi: 0x8765_4321 };
        let head = Head {
            op: 1,
            word: 0xf_ffff,
            ack: 7,
            freed: u32::MAX,
            ..Head::tagged(TAGGED, 200, tag)
        };
        let bytes = head.write();
        let (back, rest) = Head::read(Untrusted::from_slice(&bytes)).unwrap();
        assert_eq!((back, back.tag(), rest.len()), (head, Ok(tag), 0));
        for cut in 0..HEAD {
            assert_eq!(
                Head::read(Untrusted::from_slice(&bytes[..cut])).err(),
                Some(Violation::Length)
            );
        }
        let wide = Head { words: [0, 1 << 32], ..head };
        assert_eq!(wide.tag(), Err(Violation::Kind));
    }

    #[test]
    fn heads_and_offers_have_the_bytes_of_their_description() {
        let tag = Tag { lo: 0x0807_0605_0403_0201, hi: 0x0c0b_0a09 };
        let head = Head {
            op: 1,
            word: 0xa4a3_a2a1,
            ack: 0xb4b3_b2b1,
            freed: 5,
            ..Head::tagged(SYNCHRONOUS, 9, tag)
        };
        let golden = [
            17, 9, 1, 0, 0xa1, 0xa2, 0xa3, 0xa4, 0xb1, 0xb2, 0xb3, 0xb4, 5, 0, 0, 0, 1, 2, 3, 4, 5,
            6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0,
        ];
        assert_eq!(head.write(), golden);
        let keys = [RailKey { key: 0x61, base: 0x0802 }; 1];
        let offer = Offer {
            token: 9,
            len: 0x0201,
            offset: 3,
            size: 0x0403,
            region: 0x1211,
            generation: 0x1413,
            rails: 1,
            keys,
        };
        let mut out = [0; LONGEST];
        let len = offer.write(&mut out);
        let word = |low, high| [low, high, 0, 0, 0, 0, 0, 0];
        let golden = [word(9, 0), word(1, 2), word(3, 0), word(3, 4)];
        let last = [[0x11, 0x12, 0x13, 0x14, 1, 0, 0, 0], word(0x61, 0), word(2, 8)];
        assert_eq!(out[HEAD..len], *[golden.as_flattened(), last.as_flattened()].concat());
    }

    #[test]
    fn an_offer_comes_back_and_a_bad_one_is_refused() {
        let keys = [1u64, 2, 3].map(|k| RailKey { key: k, base: !k });
        let offer = Offer::<3> {
            token: 9,
            len: 1 << 40,
            offset: 5,
            size: (1 << 40) + 5,
            region: 3,
            generation: 7,
            rails: 0b111,
            keys,
        };
        let mut out = [0; LONGEST];
        let len = offer.write(&mut out);
        assert_eq!(len, RTS + 48);
        let read = |bytes: &[u8]| {
            let mut read = Offer::<3>::NONE;
            read.read(Untrusted::from_slice(bytes), &Pairing::ALIKE, 0b111).map(|()| read)
        };
        assert_eq!(read(&out[HEAD..len]), Ok(offer));
        for cut in HEAD..len {
            assert_eq!(read(&out[HEAD..cut]).err(), Some(Violation::Length), "cut to {cut}");
        }
        assert_eq!(read(&out[HEAD..len + 1]).err(), Some(Violation::Length));
        for bad in [
            Offer { len: u64::MAX, ..offer },
            Offer { offset: 6, ..offer },
            Offer { token: 0, ..offer },
        ] {
            bad.write(&mut out);
            assert_eq!(read(&out[HEAD..len]).err(), Some(Violation::Bounds));
        }
        let kept = Offer { rails: 0, keys: [RailKey::default(); 3], region: UNREADABLE, ..offer };
        let len = kept.write(&mut out);
        assert_eq!((len, read(&out[HEAD..len])), (RTS, Ok(kept)));
        let told = Offer { region: ADDRESS, ..kept };
        let mut other = [0; LONGEST];
        let len = told.write(&mut other);
        assert_eq!((len, read(&other[HEAD..len]), told.address()), (RTS, Ok(told), Some(5)));
        assert_eq!((kept.address(), Offer { rails: 1, ..told }.address()), (None, None));
        out[HEAD + 36] = 1;
        assert_eq!(read(&out[HEAD..len]).err(), Some(Violation::Kind));
    }

    #[test]
    fn the_keys_of_an_earlier_offer_are_not_written_again() {
        let keys = [1u64, 2, 3].map(|k| RailKey { key: k, base: !k });
        let first = Offer::<3> { token: 9, region: 3, rails: 0b111, keys, ..Offer::NONE };
        let mut slot = Offer::<3>::NONE;
        let mut read = |offer: Offer<3>, ours| {
            let (mut out, mut again) = ([0; LONGEST], [0; LONGEST]);
            let len = offer.write(&mut out);
            slot.read(Untrusted::from_slice(&out[HEAD..len]), &Pairing::ALIKE, ours).unwrap();
            (slot.region, slot.rails, slot.write(&mut again))
        };
        assert_eq!(read(first, 0b111), (3, 0b111, RTS + 48));
        let address = Offer { region: ADDRESS, rails: 0, ..first };
        assert_eq!(read(address, 0b111), (ADDRESS, 0, RTS));
        assert_eq!(read(first, 0b101), (3, 0b101, RTS + 32));
        // The key of our rail 1 is missing.
        assert_eq!(read(Offer { rails: 0b101, ..first }, 0b111), (3, 0, RTS));
        let clashes = Offer { rails: 0b101, region: ADDRESS, ..first };
        assert_eq!(read(clashes, 0b111), (UNREADABLE, 0, RTS));
    }

    #[test]
    fn an_offer_goes_between_ends_with_other_numbers_of_rails() {
        let key = |rail: usize| RailKey { key: rail as u64, base: !rail as u64 };
        let offer = Offer::<16> {
            token: 1,
            len: 8,
            size: 8,
            region: 3,
            rails: 1 << 15 | 1 << 4,
            keys: core::array::from_fn(key),
            ..Offer::NONE
        };
        let mut out = [0; LONGEST];
        let len = offer.write(&mut out);
        assert_eq!(len, RTS + 32);
        // Our rails 1 and 0 lead to the peer's rails 4 and 15.
        let joint = |ours, theirs| Joint { ours: RailId(ours), theirs, max_message: 256 };
        let (pairing, ours) = Pairing::of(&[joint(1, 4), joint(0, 15)], 2).unwrap();
        let read = |bytes: &[u8], pairing, ours| {
            let mut read = Offer::<2>::NONE;
            read.read(Untrusted::from_slice(bytes), pairing, ours).map(|()| read)
        };
        let got = read(&out[HEAD..len], &pairing, ours).unwrap();
        assert_eq!((got.region, got.rails, got.keys), (3, 0b11, [key(15), key(4)]));
        let alone = read(&out[HEAD..len], &pairing, 0b10).unwrap();
        assert_eq!((alone.region, alone.keys), (3, [RailKey::default(), key(4)]));
        // The offer has no key for the peer's rail 14, so rails cannot read the payload.
        let (other, ours) = Pairing::of(&[joint(1, 4), joint(0, 14)], 2).unwrap();
        let apart = read(&out[HEAD..len], &other, ours).unwrap();
        assert_eq!((apart.region, apart.rails), (3, 0));
        // The mask must match the length of the message, and may only name rails that can exist.
        for (mask, wrong) in [
            (1u32 << 15, Violation::Length),
            (0b111, Violation::Length),
            (u32::MAX, Violation::Kind),
            (1 << 16 | 1, Violation::Kind),
            (0, Violation::Kind),
        ] {
            out[RTS - 4..RTS].copy_from_slice(&mask.to_le_bytes());
            assert_eq!(read(&out[HEAD..len], &pairing, 0b11), Err(wrong), "{mask:#b}");
        }
    }
}
