//! The borrowed memory and the configuration of a matcher.

use super::posted::PostedSlot;
use super::unexpected::UnexpectedSlot;

/// The memory that a matcher borrows. The lengths are its limits.
pub struct MatcherMemory<'m> {
    /// One slot per waiting receive, 64 bytes each.
    pub posted: &'m mut [PostedSlot],
    /// One slot per waiting or claimed message, 128 bytes each.
    pub unexpected: &'m mut [UnexpectedSlot],
    /// Heads of the hash chains: half for receives, half for messages. The length is at least 2;
    /// [`MatcherMemory::buckets`] recommends one. With fewer buckets, searches visit more entries.
    pub buckets: &'m mut [u32],
}

impl MatcherMemory<'_> {
    /// Returns the recommended length of `buckets` for this number of receives and messages.
    pub const fn buckets(posted: usize, unexpected: usize) -> usize {
        let most = if posted > unexpected { posted } else { unexpected };
        2 * if most < 1 { 1 } else { most }.next_power_of_two()
    }
}

/// The settings of a matcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatcherConfig {
    /// Width of tags, 1 to 96 bits. Wider tags and masks are rejected.
    pub tag_bits: u32,
    /// Salt of the hashes. Use a random number that peers do not know, so that they cannot choose
    /// tags that collide.
    pub seed: u64,
    /// The sequence number of the first receive and of the first message, below 2^63. `None`
    /// derives it from the seed, so that ids of one matcher are invalid in another.
    pub first_sequence: Option<u64>,
    /// Number of the youngest receives that are scanned linearly instead of hashed.
    pub unhashed: u32,
    /// Number of further receives that are hashed only once a message does not match the oldest
    /// receive. Receives that match in order are then never hashed. The first message out of order
    /// pays for hashing them.
    pub lazily: u32,
    /// If at most this many messages wait, a receive that does not match the oldest message scans
    /// the others linearly.
    pub walked: u32,
}

impl MatcherConfig {
    /// The defaults: 96 bits, seed 0.
    pub const DEFAULT: MatcherConfig = MatcherConfig {
        tag_bits: 96,
        seed: 0,
        first_sequence: None,
        unhashed: 4,
        lazily: 0,
        walked: 8,
    };
}

impl Default for MatcherConfig {
    fn default() -> Self {
        Self::DEFAULT
    }
}
