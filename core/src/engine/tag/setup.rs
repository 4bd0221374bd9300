//! The borrowed memory and the configuration of a matcher.

use super::posted::PostedSlot;
use super::unexpected::UnexpectedSlot;

/// The memory of a matcher, borrowed for its life. Lengths are the limits.
pub struct MatcherMemory<'m> {
    /// One per receive that waits: 64 bytes each.
    pub posted: &'m mut [PostedSlot],
    /// One per message that waits or is claimed: 128 bytes each.
    pub unexpected: &'m mut [UnexpectedSlot],
    /// Heads of hash chains, half for receives and half for messages: at least 2, ideally
    /// [`MatcherMemory::buckets`]. With fewer, searches visit more entries.
    pub buckets: &'m mut [u32],
}

impl MatcherMemory<'_> {
    /// Returns a good length of `buckets` for this number of receives and messages.
    pub const fn buckets(posted: usize, unexpected: usize) -> usize {
        let most = if posted > unexpected { posted } else { unexpected };
        2 * if most < 1 { 1 } else { most }.next_power_of_two()
    }
}

/// The settings of a matcher, with defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatcherConfig {
    /// Width of tags, 1 to 96 bits. Wider tags and masks are refused.
    pub tag_bits: u32,
    /// Salts the hashes, so that peers cannot choose tags that collide. A random number, unknown to
    /// peers.
    pub seed: u64,
    /// The number of the first receive and of the first message, below 2^63. By default it is
    /// derived from the seed, so that ids of one matcher are invalid in another. Tests begin just
    /// before 32 bits wrap.
    pub first_sequence: Option<u64>,
    /// Number of youngest receives that are scanned linearly, not hashed.
    pub unhashed: u32,
    /// Number of further receives that are hashed only once a message does not match the oldest
    /// receive. A window of receives that match in order is never hashed; the first message out of
    /// order pays for it.
    pub lazily: u32,
    /// Up to this many messages, a receive that does not match the oldest scans the rest linearly.
    pub walked: u32,
}

impl MatcherConfig {
    /// The defaults: 96 bits, seed 0.
    pub const DEFAULT: MatcherConfig =
        MatcherConfig { tag_bits: 96, seed: 0, first_sequence: None, unhashed: 4, lazily: 0, walked: 8 };
}

impl Default for MatcherConfig {
    fn default() -> Self {
        Self::DEFAULT
    }
}
