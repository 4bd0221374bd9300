//! What a rail has counted, its last error, and the size of its memory. Reading them has no effect.

use alloc::string::String;

use super::fence::Return;
use super::pool::Slot;
use super::{FabricRail, peers};
use crate::fabric::cq::CqError;
use crate::fabric::error::Code;

/// Counts of rejected, dropped and failed operations of a rail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FabricStats {
    /// Number of posts that the provider rejected with `FI_EAGAIN`.
    pub refused: u64,
    /// Number of dropped arrivals from senders that are neither attached nor
    /// [expected](FabricRail::expect).
    pub strangers: u64,
    /// Number of error completions.
    pub errors: u64,
    /// The last error of a completion or a post: libfabric's code and the provider's code.
    /// [`FabricRail::last_error`] returns the messages.
    pub last_error: (i32, i32),
    /// Number of registrations that the provider did not close. It may still use their memory.
    pub kept: u32,
    /// Number of contexts that the provider still holds after their completion was reported as
    /// unknown.
    pub orphans: u32,
    /// Number of domains that the rail has replaced after fences, because the provider [frees reads
    /// twice](super::super::persona::Persona::frees_reads_twice).
    pub replaced: u32,
}

impl FabricRail {
    /// Returns the rail's counters.
    pub fn stats(&self) -> FabricStats {
        self.stats
    }

    /// Returns the last error of a completion, post or registration, with libfabric's and the
    /// provider's messages. Slow path: allocates.
    #[doc(alias = "fi_cq_strerror")]
    pub fn last_error(&self) -> Option<String> {
        let CqError { code, provider, .. } = self.last_error;
        if code == Code(0) {
            return None;
        }
        let mut text = alloc::format!("{}: {code}", self.offer.info.library().describe(code));
        let words = self.endpoint.describe(&self.last_error);
        if provider != 0 || self.last_error.has_data() {
            text += &alloc::format!("; {} says {provider}: {words}", self.offer.info.provider());
        }
        Some(text + code.remedy())
    }

    #[cold]
    pub(super) fn note_error(&mut self, code: Code) {
        self.stats.last_error = (code.0, 0);
        self.last_error = CqError::of_call(code);
    }

    /// Returns the number of bytes that the rail has allocated, and how many of these are per peer.
    pub fn memory(&self) -> (usize, usize) {
        let per_peer = size_of::<peers::PeerSlot>() + size_of::<Return>() + 4 * 24;
        let peers = per_peer * self.peers.slots.len();
        let pool = self.pool.len() * size_of::<Slot>();
        let imports = self.imports.bytes();
        let expected = self.expected.bytes();
        (size_of::<Self>() + self.slab.len + pool + imports + peers + expected, per_peer)
    }
}
