//! What two-sided messages look like on the wire. Little-endian, no padding.
//!
//! ```text
//! head, 16 bytes: kind u8 | context u8 | op u8 | 0 u8 | word u32 | ack u32 | freed u32
//! Tagged      32 bytes and the payload: head, tag u64, tag u32, 0 u32; op 1: an acknowledgement is wanted soon
//! Sync        40 bytes and the payload: as Tagged, then token u64
//! Rts         72 bytes and 16 for each key: as Sync, then length u64, offset u64, size of the region u64, region u16,
//!             generation u16, keys u32
//! Fin         32 bytes: head, token u64, delivered u64; op 1: the receiver could not take it
//! Pull        40 bytes: head, token u64, request u64, length u64
//! Chunk       32 bytes and the payload: head, request u64, offset u64
//! ```
//!
//! The first three have a number in the stream and wait for their turn, so that messages match in the order sent. The others
//! answer one of them, by a token or a request that it named, and have none: their word says the
//! attachment alone. `freed` counts the sender's credits that came
//! back, over the life of the stream: the last 32 bits, so that a late one is told from a new one.

use crate::error::Violation;
use crate::mem::Untrusted;
use crate::rail::RailKey;

use super::super::tag::Tag;

/// Bytes of the part that all of them have.
pub(crate) const HEAD: usize = 32;
/// Bytes of a synchronous message before its payload.
pub(crate) const SYNC: usize = 40;
/// Bytes of a request to send before its keys.
pub(crate) const RTS: usize = 72;
/// Keys that a request to send carries at most: what a message of 256 bytes has room for.
pub(crate) const KEYS: usize = 11;
/// Bytes of the longest head.
pub(crate) const LONGEST: usize = RTS + 16 * KEYS;

/// The lowest of these kinds; all below belong to one-sided operations.
pub(crate) const FIRST_KIND: u8 = 16;
pub(crate) const TAGGED: u8 = 16;
pub(crate) const SYNCHRONOUS: u8 = 17;
pub(crate) const REQUEST: u8 = 18;
pub(crate) const FIN: u8 = 19;
pub(crate) const PULL: u8 = 20;
pub(crate) const CHUNK: u8 = 21;

/// A region that no receiver can read: the payload has to be pulled in messages.
pub(crate) const UNREADABLE: u16 = u16::MAX;

/// The first 32 bytes.
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
    /// The head of a message that carries a tag.
    #[inline(always)]
    pub(crate) fn tagged(kind: u8, context: u8, tag: Tag) -> Head {
        Head { kind, context, op: 0, word: 0, ack: 0, freed: 0, words: [tag.lo, tag.hi as u64] }
    }

    /// Four words, as they travel.
    #[inline(always)]
    pub(crate) fn write(&self) -> [u8; HEAD] {
        let first =
            self.kind as u64 | (self.context as u64) << 8 | (self.op as u64) << 16 | (self.word as u64) << 32;
        let second = self.ack as u64 | (self.freed as u64) << 32;
        let mut out = [0; HEAD];
        for (word, at) in [first, second, self.words[0], self.words[1]].iter().zip(out.chunks_exact_mut(8)) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// Copies the head out, and returns it with the rest of the message.
    #[inline(always)]
    pub(crate) fn read(bytes: Untrusted<'_>) -> Result<(Head, Untrusted<'_>), Violation> {
        let (head, rest) = bytes.split_at(HEAD).ok_or(Violation::Length)?;
        // SAFETY: `head` is 32 readable bytes. One copy, of which everything below is taken.
        let raw: [u8; HEAD] = unsafe { head.as_ptr().cast::<[u8; HEAD]>().read_unaligned() };
        let (first, second) = (word(&raw, 0), word(&raw, 8));
        let head = Head {
            kind: first as u8,
            context: (first >> 8) as u8,
            op: (first >> 16) as u8,
            word: (first >> 32) as u32,
            ack: second as u32,
            freed: (second >> 32) as u32,
            words: [word(&raw, 16), word(&raw, 24)],
        };
        Ok((head, rest))
    }

    /// The tag that it carries, if it is of a kind that carries one.
    #[inline(always)]
    pub(crate) fn tag(&self) -> Result<Tag, Violation> {
        if self.words[1] >> 32 != 0 {
            return Err(Violation::Kind);
        }
        Ok(Tag { lo: self.words[0], hi: self.words[1] as u32 })
    }
}

#[inline(always)]
fn word<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(out)
}

/// What follows the head of a request to send: where the payload lies at the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer<const RAILS: usize> {
    /// Names the send to the sender. Never 0.
    pub token: u64,
    /// Bytes.
    pub len: u64,
    /// From the start of the region, in bytes.
    pub offset: u64,
    /// Bytes of the region.
    pub size: u64,
    /// The region at the sender, or [`UNREADABLE`].
    pub region: u16,
    pub generation: u16,
    /// The region's keys, of as many rails as fit.
    pub keys: [RailKey; RAILS],
}

impl<const RAILS: usize> Offer<RAILS> {
    /// Keys that travel.
    pub(crate) const TRAVELLING: usize = if RAILS < KEYS { RAILS } else { KEYS };

    /// Writes all after the head; returns the length of the message so far, the head included.
    pub(crate) fn write(&self, out: &mut [u8; LONGEST]) -> usize {
        let keys = if self.region == UNREADABLE { 0 } else { Self::TRAVELLING };
        let last = self.region as u64 | (self.generation as u64) << 16 | (keys as u64) << 32;
        for (value, at) in
            [self.token, self.len, self.offset, self.size, last].iter().zip(out[HEAD..].chunks_exact_mut(8))
        {
            at.copy_from_slice(&value.to_le_bytes());
        }
        for (key, at) in self.keys[..keys].iter().zip(out[RTS..].chunks_exact_mut(16)) {
            at[..8].copy_from_slice(&key.key.to_le_bytes());
            at[8..].copy_from_slice(&key.base.to_le_bytes());
        }
        RTS + 16 * keys
    }

    /// Copies out and checks what follows the head.
    pub(crate) fn read(rest: Untrusted<'_>) -> Result<Self, Violation> {
        let mut raw = [0u8; LONGEST - HEAD];
        let len = rest.copy_out(&mut raw);
        if len < RTS - HEAD {
            return Err(Violation::Length);
        }
        let last = word(&raw, 32);
        let (region, count) = (last as u16, (last >> 32) as usize);
        let want = if region == UNREADABLE { 0 } else { Self::TRAVELLING };
        if count != want {
            return Err(Violation::Kind);
        }
        if rest.len() != RTS - HEAD + 16 * want {
            return Err(Violation::Length);
        }
        let mut keys = [RailKey::default(); RAILS];
        for (key, at) in keys[..want].iter_mut().zip(raw[RTS - HEAD..].chunks_exact(16)) {
            let mut halves = [0u8; 16];
            halves.copy_from_slice(at);
            *key = RailKey { key: word(&halves, 0), base: word(&halves, 8) };
        }
        let offer = Offer {
            token: word(&raw, 0),
            len: word(&raw, 8),
            offset: word(&raw, 16),
            size: word(&raw, 24),
            region,
            generation: (last >> 16) as u16,
            keys,
        };
        // What does not lie inside its region is nobody's memory.
        match offer.offset.checked_add(offer.len) {
            Some(end) if end <= offer.size && offer.size <= i64::MAX as u64 && offer.token != 0 => Ok(offer),
            _ => Err(Violation::Bounds),
        }
    }
}

/// One 64-bit word that follows the head, and the rest.
pub(crate) fn trailing(rest: Untrusted<'_>) -> Result<(u64, Untrusted<'_>), Violation> {
    let (front, rest) = rest.split_at(8).ok_or(Violation::Length)?;
    let mut raw = [0u8; 8];
    front.copy_out(&mut raw);
    Ok((u64::from_le_bytes(raw), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_comes_back_and_one_cut_short_is_refused() {
        let tag = Tag { lo: u64::MAX - 3, hi: 0x8765_4321 };
        let head = Head { op: 1, word: 0xf_ffff, ack: 7, freed: u32::MAX, ..Head::tagged(TAGGED, 200, tag) };
        let bytes = head.write();
        let (back, rest) = Head::read(Untrusted::from_slice(&bytes)).unwrap();
        assert_eq!((back, back.tag(), rest.len()), (head, Ok(tag), 0));
        for cut in 0..HEAD {
            assert_eq!(Head::read(Untrusted::from_slice(&bytes[..cut])).err(), Some(Violation::Length));
        }
        let wide = Head { words: [0, 1 << 32], ..head };
        assert_eq!(wide.tag(), Err(Violation::Kind));
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
            keys,
        };
        let mut out = [0; LONGEST];
        let len = offer.write(&mut out);
        assert_eq!(len, RTS + 48);
        let read = |bytes: &[u8]| Offer::<3>::read(Untrusted::from_slice(bytes));
        assert_eq!(read(&out[HEAD..len]), Ok(offer));
        for cut in HEAD..len {
            assert_eq!(read(&out[HEAD..cut]).err(), Some(Violation::Length), "cut to {cut}");
        }
        assert_eq!(read(&out[HEAD..len + 1]).err(), Some(Violation::Length));
        for bad in
            [Offer { len: u64::MAX, ..offer }, Offer { offset: 6, ..offer }, Offer { token: 0, ..offer }]
        {
            bad.write(&mut out);
            assert_eq!(read(&out[HEAD..len]).err(), Some(Violation::Bounds));
        }
        let kept = Offer { region: UNREADABLE, keys: [RailKey::default(); 3], ..offer };
        let len = kept.write(&mut out);
        assert_eq!((len, read(&out[HEAD..len])), (RTS, Ok(kept)));
        out[HEAD + 36] = 1;
        assert_eq!(read(&out[HEAD..len]).err(), Some(Violation::Kind));
    }
}
