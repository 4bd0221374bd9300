//! The sizes and limits of the protocol.

/// The sizes and limits of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatchConfig {
    /// Longest payload that travels in its message, in bytes. A rail may lower it.
    pub eager: u32,
    /// Unexpected payloads that the receiver keeps per stream. 0 keeps none.
    pub credits: u32,
    /// Unexpected headers that the receiver keeps per stream, while their payloads stay at the
    /// sender.
    pub headers: u32,
    /// Additional credits, shared by all streams and assigned on demand.
    pub shared_credits: u32,
    /// Additional headers, shared by all streams and assigned on demand.
    pub shared_headers: u32,
    /// Unexpected payloads of up to 64 bytes that the receiver keeps beyond the credits, shared by
    /// all streams and assigned on demand.
    pub shared_shorts: u32,
    /// Number of pieces per stream, 0 to 64, that can wait here until a device has copied them.
    /// Applies to device memory that no rail reaches. Puts and gets each have this number, so a
    /// stream needs twice the number of blocks. With 0, peers cannot put to such memory here, and
    /// gets into it are refused.
    pub pieces: u8,
    /// Salts the hashes, because peers choose the tags. Use a random number.
    pub seed: u64,
}

impl MatchConfig {
    /// The defaults for 64 streams.
    pub const DEFAULT: MatchConfig = MatchConfig::for_streams(64);

    /// Returns the defaults for this number of streams (peers times contexts). With more streams,
    /// each begins with less room: 16 credits and 64 headers with 64 streams, 1 and 4 with a
    /// thousand.
    pub const fn for_streams(streams: usize) -> MatchConfig {
        const fn share(of: usize, streams: usize, least: u32) -> u32 {
            match of / if streams == 0 { 1 } else { streams } {
                64.. => 64,
                each if each as u32 > least => each as u32,
                _ => least,
            }
        }
        MatchConfig {
            eager: 8192,
            credits: share(1024, streams, 1),
            headers: share(4096, streams, 2),
            shared_credits: 4096,
            shared_headers: 16384,
            shared_shorts: 0,
            pieces: 0,
            seed: 0x5eed,
        }
    }

    /// Returns a reasonable value of [`pieces`](Self::pieces) for an engine with a device and this
    /// number of streams.
    pub const fn pieces_for(streams: usize) -> u8 {
        match 1024 / if streams == 0 { 1 } else { streams } {
            0 => 1,
            16.. => 16,
            each => each as u8,
        }
    }

    /// Returns the size of one block, in bytes.
    pub const fn block(&self) -> usize {
        (self.eager as usize).next_multiple_of(64)
    }

    /// Returns the limits that peers must know.
    pub const fn limits(&self) -> MatchLimits {
        MatchLimits { eager: self.eager, credits: self.credits, headers: self.headers }
    }

    const fn payloads(&self, streams: usize) -> usize {
        streams * self.credits as usize + self.shared_credits as usize
    }

    /// Returns the number of blocks, without the short ones, of an engine with this number of
    /// streams.
    pub const fn blocks(&self, streams: usize) -> usize {
        self.payloads(streams) + streams * 2 * self.pieces as usize
    }

    /// Returns the number of headers that can wait in an engine with this number of streams.
    pub const fn waiting(&self, streams: usize) -> usize {
        streams * self.headers as usize + self.shared_headers as usize
    }

    /// Returns the number of messages that can wait in an engine with this number of streams.
    pub const fn unexpected(&self, streams: usize) -> usize {
        self.payloads(streams) + self.shared_shorts as usize + self.waiting(streams)
    }
}

/// The limits of a [`MatchConfig`] that the other side must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatchLimits {
    /// The value of [`MatchConfig::eager`].
    pub eager: u32,
    /// The value of [`MatchConfig::credits`].
    pub credits: u32,
    /// The value of [`MatchConfig::headers`].
    pub headers: u32,
}

impl MatchLimits {
    pub(crate) const ALIKE: MatchLimits =
        MatchLimits { eager: u32::MAX, credits: u32::MAX, headers: u32::MAX };
}

impl Default for MatchConfig {
    fn default() -> Self {
        Self::DEFAULT
    }
}
