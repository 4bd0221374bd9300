//! The settings of a rail with device memory.

use std::time::Duration;

use fishplate_core::error::AttachError;
use fishplate_shm::extension::PAGE;

use crate::ImportLimits;
use crate::pair::Layout;

/// The settings of a [`GpuRail`](crate::GpuRail), fixed when it is created.
/// [`done_channel`](Self::done_channel), [`done_words`](Self::done_words),
/// [`relay_slots`](Self::relay_slots) and [`relay_chunk`](Self::relay_chunk) should be equal at
/// both ends of a link. If the sizes differ, records report writes, and bounce slots are not used.
/// If only [`done_channel`](Self::done_channel) differs, records report writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuConfig {
    /// Maximum number of writes and reads of device memory in flight.
    pub ops: u16,
    /// Maximum number of registered regions of device memory, and of imported regions per peer.
    pub max_regions: u16,
    /// Size of the pieces of a transfer, in bytes. The last piece may be shorter.
    pub chunk: u64,
    /// Maximum number of streams for one transfer.
    pub spread: u8,
    /// Whether done words report writes.
    pub done_channel: bool,
    /// Number of done words per direction of a link: a power of two.
    pub done_words: u32,
    /// Number of bounce slots per direction of a link: a power of two, or 0 for none.
    pub relay_slots: u32,
    /// Size of a bounce slot in bytes: a multiple of 4096.
    pub relay_chunk: u32,
    /// Whether all transfers use bounce slots, as if no device could reach another.
    pub force_relay: bool,
    /// Maximum length, in bytes, of a transfer that the processor copies. Both ends of the transfer
    /// must be mapped.
    pub mapped_store: u64,
    /// Whether host regions are pinned, so that the device can access them.
    pub pin_regions: bool,
    /// Limits of opened peer memory.
    pub imports: ImportLimits,
    /// How long an import waits for its handle, and how long a detach waits for the device.
    pub timeout: Duration,
    /// Maximum time that the owner sleeps while there may be events that do not wake it.
    pub longest_nap: Duration,
}

impl Default for GpuConfig {
    fn default() -> Self {
        GpuConfig {
            ops: 256,
            max_regions: 256,
            chunk: 16 << 20,
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
