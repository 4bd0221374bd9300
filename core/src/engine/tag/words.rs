//! The argument and result types of the matcher. All are `Copy` and borrow nothing.

use core::fmt;
use core::ops::{BitAnd, BitOr, BitXor, Not};

/// A tag of up to 96 bits, or a mask over a tag. A mask is like libfabric's `ignore`: bits that are
/// 1 are not compared. PSM's `tagsel` is the inverse: `ignore = !tagsel`.
#[doc(alias = "psm2_mq_tag_t")]
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag {
    /// Bits 0 to 63: libfabric's tag; PSM's words 0 (low half) and 1.
    pub lo: u64,
    /// Bits 64 to 95: PSM's word 2.
    pub hi: u32,
}

impl Tag {
    /// No bit set. As a mask: every bit is compared.
    pub const ZERO: Tag = Tag { lo: 0, hi: 0 };
    /// Every bit set. As a mask: no bit is compared.
    pub const ALL: Tag = Tag { lo: u64::MAX, hi: u32::MAX };

    /// Creates a tag from bits 0 to 63 and bits 64 to 95.
    pub const fn new(lo: u64, hi: u32) -> Self {
        Tag { lo, hi }
    }

    /// Converts from PSM's three words; word 0 is the lowest.
    pub const fn from_words(words: [u32; 3]) -> Self {
        Tag { lo: words[0] as u64 | (words[1] as u64) << 32, hi: words[2] }
    }

    /// Converts to PSM's three words; word 0 is the lowest.
    pub const fn words(self) -> [u32; 3] {
        [self.lo as u32, (self.lo >> 32) as u32, self.hi]
    }

    /// Returns a tag with the lowest `bits` bits set, or all 96 if `bits` is larger.
    pub const fn low_bits(bits: u32) -> Self {
        match bits {
            0 => Tag::ZERO,
            1..=64 => Tag { lo: u64::MAX >> (64 - bits), hi: 0 },
            65..=95 => Tag { lo: u64::MAX, hi: u32::MAX >> (96 - bits) },
            _ => Tag::ALL,
        }
    }

    /// Returns the mask that compares exactly the bits set in `tagsel`: `!tagsel`.
    #[doc(alias = "tagsel")]
    #[doc(alias = "tag_mask")]
    pub const fn ignore_from_tagsel(tagsel: Tag) -> Self {
        Tag { lo: !tagsel.lo, hi: !tagsel.hi }
    }
}

impl From<[u32; 3]> for Tag {
    #[inline(always)]
    fn from(words: [u32; 3]) -> Self {
        Tag::from_words(words)
    }
}

impl From<u64> for Tag {
    fn from(lo: u64) -> Self {
        Tag { lo, hi: 0 }
    }
}

impl Not for Tag {
    type Output = Tag;
    fn not(self) -> Tag {
        Tag { lo: !self.lo, hi: !self.hi }
    }
}

impl BitAnd for Tag {
    type Output = Tag;
    fn bitand(self, other: Tag) -> Tag {
        Tag { lo: self.lo & other.lo, hi: self.hi & other.hi }
    }
}

impl BitOr for Tag {
    type Output = Tag;
    fn bitor(self, other: Tag) -> Tag {
        Tag { lo: self.lo | other.lo, hi: self.hi | other.hi }
    }
}

impl BitXor for Tag {
    type Output = Tag;
    fn bitxor(self, other: Tag) -> Tag {
        Tag { lo: self.lo ^ other.lo, hi: self.hi ^ other.hi }
    }
}

impl fmt::Debug for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}:{:016x}", self.hi, self.lo)
    }
}

/// The id of a posted receive. It becomes stale when the receive matches or is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiveId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl ReceiveId {
    pub(crate) const NONE: ReceiveId = ReceiveId { index: u32::MAX, generation: 0 };
}

/// The id of an unexpected message. It becomes stale when the message is received, taken or
/// discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnexpectedId {
    pub(crate) index: u32,
    pub(super) generation: u32,
}

impl UnexpectedId {
    /// Names no message, because no slot has this index.
    pub(crate) const NONE: UnexpectedId = UnexpectedId { index: u32::MAX, generation: 0 };
}

/// A reserved shape: which bits a receive compares, and whether it names a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ShapeId(pub(super) u8);

/// A message, as passed to [`arrive`](super::Matcher::arrive).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// The sender.
    pub source: u32,
    /// The full tag.
    pub tag: Tag,
    /// The message's length at the sender, in bytes.
    pub len: u64,
    /// The caller's cookie, for example the location of the payload.
    pub cookie: u64,
}

/// The result of posting a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Post {
    /// The receive waits for a message.
    Waiting(ReceiveId),
    /// The receive matched this message, the oldest that it accepts. The matcher keeps neither.
    Matched(Arrived),
}

/// The result of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Arrive {
    /// The message matched this receive, the oldest that accepts it. The matcher keeps neither.
    Matched {
        /// The receive. Its id is now stale.
        receive: ReceiveId,
        /// The receive's context.
        context: u64,
    },
    /// No receive accepts the message, so the message waits.
    Stored(UnexpectedId),
}

/// The result of a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Cancel {
    /// The receive was removed and will not match. The value is its context.
    Removed(u64),
    /// The receive has already matched. Nothing changed. This is reported until a later receive
    /// reuses the slot.
    AlreadyMatched,
    /// The id names no receive: it was cancelled before, has matched long ago, or belongs to
    /// another matcher. Nothing changed.
    Stale,
}

/// Why the matcher rejected a call. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TagError {
    /// The table is full. Its size was set at setup.
    Full,
    /// The tag or the mask has bits beyond the configured width.
    TooWide,
    /// The id is stale, or belongs to another matcher.
    Stale,
    /// The message was not claimed by [`mprobe`](super::Matcher::mprobe).
    NotClaimed,
}

impl fmt::Display for TagError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TagError::Full => {
                "the matcher is full; receive messages, cancel receives or set up more slots"
            }
            TagError::TooWide => "the tag or the mask has bits beyond the width chosen at setup",
            TagError::Stale => "stale id: it names no receive or message of this matcher",
            TagError::NotClaimed => "the message is not claimed; claim it with mprobe first",
        })
    }
}

impl core::error::Error for TagError {}

/// Counters since setup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MatchStats {
    /// Number of searches: one per arrival while receives wait, and one per post or probe while
    /// messages wait.
    pub searches: u64,
    /// Look-ups in hash tables, of all searches. A search makes at most one per shape in use.
    pub probes: u64,
    /// Maximum number of look-ups in one search.
    pub most_probes: u32,
    /// Maximum number of entries that one search visited without a match. They are entries of the
    /// same bucket with another key, entries not indexed, and receives beyond the limit of shapes.
    /// Groups of equal keys are never scanned.
    pub longest_walk: u32,
    /// Messages that found their receive posted.
    pub expected: u64,
    /// Bytes of expected messages.
    pub expected_bytes: u64,
    /// Messages that were stored, because no posted receive accepted them.
    pub unexpected: u64,
    /// Bytes of unexpected messages.
    pub unexpected_bytes: u64,
    /// Maximum number of messages stored at one time, including claimed ones.
    pub unexpected_peak: u32,
    /// Receives posted beyond the limit of shapes. Each makes the searches of arrivals longer.
    pub overflowed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_widths() {
        let tag = Tag::from_words([1, 2, 3]);
        assert_eq!((tag, tag.words()), (Tag::new(0x2_0000_0001, 3), [1, 2, 3]));
        assert_eq!(Tag::low_bits(0), Tag::ZERO);
        assert_eq!(Tag::low_bits(1), Tag::new(1, 0));
        assert_eq!(Tag::low_bits(64), Tag::new(u64::MAX, 0));
        assert_eq!(Tag::low_bits(65), Tag::new(u64::MAX, 1));
        assert_eq!(Tag::low_bits(95), Tag::new(u64::MAX, u32::MAX >> 1));
        assert_eq!(Tag::low_bits(96), Tag::ALL);
        assert_eq!(Tag::ignore_from_tagsel(Tag::new(1, 2)), !Tag::new(1, 2));
    }
}
