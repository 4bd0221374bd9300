//! Keys of 128 bits that hold a source and a tag, masks over keys, and the hash of a key.

use super::words::Tag;

/// A source and a tag, or a mask over their bits. A mask bit of 1 is compared, as in PSM's
/// `tagsel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// The tag's bits 0 to 63.
    pub lo: u64,
    /// The tag's bits 64 to 95, and above them the source.
    pub hi: u64,
}

impl Key {
    pub(super) const ZERO: Key = Key { lo: 0, hi: 0 };

    #[inline(always)]
    pub(super) const fn new(source: u32, tag: Tag) -> Self {
        Key { lo: tag.lo, hi: tag.hi as u64 | (source as u64) << 32 }
    }

    #[inline(always)]
    pub(super) const fn mask(exact_source: bool, ignore: Tag) -> Self {
        let source = if exact_source { u32::MAX } else { 0 };
        Key::new(source, Tag { lo: !ignore.lo, hi: !ignore.hi })
    }

    #[inline(always)]
    pub(super) const fn tag(self) -> Tag {
        Tag { lo: self.lo, hi: self.hi as u32 }
    }

    #[inline(always)]
    pub(super) const fn source(self) -> u32 {
        (self.hi >> 32) as u32
    }

    #[inline(always)]
    pub(super) const fn under(self, mask: Key) -> Self {
        Key { lo: self.lo & mask.lo, hi: self.hi & mask.hi }
    }

    #[inline(always)]
    pub(super) const fn agrees(self, other: Key, mask: Key) -> bool {
        ((self.lo ^ other.lo) & mask.lo) | ((self.hi ^ other.hi) & mask.hi) == 0
    }

    /// Multiplies 64 by 64 bits, folds both halves, and multiplies again to break up sequences.
    /// Peers choose the keys. The salt is secret, so that peers cannot choose keys that collide.
    #[inline(always)]
    pub(super) const fn hash(self, salt: Key) -> u32 {
        let product = (self.lo ^ salt.lo) as u128 * (self.hi ^ salt.hi) as u128;
        let folded = product as u64 ^ (product >> 64) as u64;
        (folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::mix;

    #[test]
    fn a_mask_compares_what_is_not_ignored() {
        let mask = Key::mask(false, Tag::new(0xff, 1));
        let key = Key::new(7, Tag::new(0x1234, 2));
        assert!(key.agrees(Key::new(8, Tag::new(0x12ff, 3)), mask));
        assert!(!key.agrees(Key::new(7, Tag::new(0x1334, 2)), mask));
        assert!(!key.agrees(Key::new(7, Tag::new(0x1234, 4)), mask));
        assert!(!key.agrees(Key::new(8, Tag::new(0x1234, 2)), Key::mask(true, Tag::new(0xff, 1))));
        assert_eq!((key.source(), key.tag()), (7, Tag::new(0x1234, 2)));
    }

    #[test]
    fn keys_that_count_up_in_any_field_spread_evenly() {
        for field in 0..4 {
            for seed in 0..8 {
                let salt = Key { lo: mix(seed), hi: mix(!seed) };
                let mut buckets = [0u8; 1024];
                for n in 0..1024u64 {
                    let key = match field {
                        0 => Key::new(0, Tag::new(n, 0)),
                        1 => Key::new(0, Tag::new(n << 40, 0)),
                        2 => Key::new(0, Tag::new(5, n as u32)),
                        _ => Key::new(n as u32, Tag::new(5, 0)),
                    };
                    buckets[key.hash(salt) as usize % 1024] += 1;
                }
                // Random keys leave 1/e of the buckets empty. With probability 0.999 no bucket has
                // more than 8.
                let (empty, most) =
                    (buckets.iter().filter(|n| **n == 0).count(), buckets.iter().max());
                assert!(
                    empty < 480 && *most.unwrap() <= 16,
                    "field {field} seed {seed}: {empty} {most:?}"
                );
            }
        }
    }
}
