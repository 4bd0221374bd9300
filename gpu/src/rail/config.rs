//! Settings of a rail with a device.

use std::time::Duration;

use fishplate_core::error::AttachError;
use fishplate_shm::extension::PAGE;

use crate::ImportLimits;
use crate::pair::Layout;

/// Settings of a [`GpuRail`](crate::GpuRail), fixed once it is open. If some that are best equal
/// differ between the ends of a link, writes are reported by records, and nothing is relayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuConfig {
    /// Most writes and reads of device memory in flight.
    pub ops: u16,
    /// Most registered regions of device memory, and most imported regions per peer.
    pub max_regions: u16,
    /// Size of a transfer's pieces, in bytes; the last one may be shorter.
    pub chunk: u64,
    /// Most streams that one transfer is spread over.
    pub spread: u8,
    /// Whether done words report writes. Best equal at both ends.
    pub done_channel: bool,
    /// Done words per direction of a link: a power of two. Best equal at both ends.
    pub done_words: u32,
    /// Bounce slots per direction of a link: a power of two, or 0 for none. Best equal at both
    /// ends.
    pub relay_slots: u32,
    /// Bytes of a bounce slot: a multiple of 4096. Best equal at both ends.
    pub relay_chunk: u32,
    /// Sends everything through bounce slots, as if no device could reach another.
    pub force_relay: bool,
    /// Longest transfer that the processor copies itself, where it has mappings of both memories,
    /// in bytes.
    pub mapped_store: u64,
    /// Whether host regions are pinned, so that the device can copy to and from them.
    pub pin_regions: bool,
    /// Limits of open peer memory.
    pub imports: ImportLimits,
    /// How long an import waits for its handle, and a detach for the device.
    pub timeout: Duration,
    /// The longest nap of the owner while events may come that do not notify.
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
