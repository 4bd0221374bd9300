//! Sizes and switches of a rail with a device, fixed when it is made.

use std::time::Duration;

use fishplate_core::error::AttachError;
use fishplate_shm::extension::PAGE;

use crate::ImportLimits;
use crate::pair::Layout;

/// How a [`GpuRail`](crate::GpuRail) is made. What is marked * should be the same at both ends of a
/// link; where it is not, writes are told by records through the lane, and nothing is relayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuConfig {
    /// Writes and reads of device memory under way at once.
    pub ops: u16,
    /// Regions of device memory that can be registered, and imported from each peer, at once.
    pub max_regions: u16,
    /// Size of the pieces that a transfer is cut into, in bytes; the last one is shorter.
    pub chunk: u64,
    /// Streams that one transfer is spread over, at most.
    pub spread: u8,
    /// * Whether writes are told by done words.
    pub done_channel: bool,
    /// * Done words of each direction of a link: a power of two.
    pub done_words: u32,
    /// * Bounce slots of each direction of a link: a power of two, or 0 for none.
    pub relay_slots: u32,
    /// * Bytes of each: a multiple of 4096.
    pub relay_chunk: u32,
    /// Takes everything through bounce slots, as if no device could reach another.
    pub force_relay: bool,
    /// Longest transfer that the processor makes
    /// where the device lets it see both memories, in bytes.
    pub mapped_store: u64,
    /// Whether host memory's regions are pinned, so that the device copies to and from them itself.
    pub pin_regions: bool,
    /// How much memory of peers may be open at once.
    pub imports: ImportLimits,
    /// How long an import waits for its allocation, and a detach for the device.
    pub timeout: Duration,
    /// The longest that the owner sleeps while something may come that rings no bell.
    pub longest_nap: Duration,
}

impl Default for GpuConfig {
    fn default() -> Self {
        GpuConfig {
            ops: 256,
            max_regions: 256,
            chunk: 1 << 20,
            spread: 4,
            done_channel: true,
            done_words: 256,
            relay_slots: 8,
            relay_chunk: 256 << 10,
            force_relay: false,
            mapped_store: 4096,
            pin_regions: true,
            imports: ImportLimits::default(),
            timeout: Duration::from_secs(5),
            longest_nap: Duration::from_millis(10),
        }
    }
}

impl GpuConfig {
    pub(super) fn check(&self) -> Result<(), AttachError> {
        let power = |n: u32, most: u32| n.is_power_of_two() && n <= most;
        let sound = [
            (self.ops > 0, "ops"),
            (self.max_regions > 0, "max_regions"),
            (self.chunk > 0 && self.chunk <= 1 << 30, "chunk"),
            (self.spread > 0, "spread"),
            (power(self.done_words, 1 << 16), "done_words"),
            (self.relay_slots == 0 || power(self.relay_slots, 1 << 10), "relay_slots"),
            (
                self.relay_chunk > 0
                    && self.relay_chunk <= 1 << 26
                    && (self.relay_chunk as usize).is_multiple_of(PAGE),
                "relay_chunk",
            ),
        ];
        match sound.iter().find(|(sound, _)| !sound) {
            Some((_, what)) => Err(AttachError::Config(what)),
            None => Ok(()),
        }
    }

    pub(super) fn layout(&self) -> Layout {
        Layout { words: self.done_words, slots: self.relay_slots, chunk: self.relay_chunk }
    }
}
