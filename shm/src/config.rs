//! The settings of a rail. They are fixed when the rail is created.

use std::time::Duration;

use fishplate_core::error::AttachError;

use crate::lane;

/// Selects the users that may run peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Users {
    /// Only the effective user of this process.
    Own,
    /// The listed user IDs.
    Listed(Vec<u32>),
}

/// The settings of a [`ShmRail`](crate::ShmRail).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmConfig {
    /// Maximum number of attached peers. Peer numbers are below this.
    pub max_peers: u16,
    /// Maximum number of regions that this rail registers, and of regions that it imports from each
    /// peer.
    pub max_regions: u16,
    /// Maximum number of segments that hold registered regions.
    pub max_segments: u16,
    /// Number of 64-byte cells in each lane: a power of two from 64 to 65536. Both ends must agree.
    pub lane_cells: u32,
    /// Maximum message length, in bytes: from 256 to three quarters of a lane. Both ends must
    /// agree.
    pub max_message: usize,
    /// Size of each pair's common segment, in bytes: a multiple of 4096, or 0 for none. Both ends
    /// must agree.
    pub common_len: usize,
    /// Whether this process is registered for expedited `membarrier(2)` and its own sleepers call
    /// it. Use the value of `sleeper_uses_membarrier` of `LinuxHost::shared()`.
    ///
    /// If either end does not use `membarrier`, the rail itself issues a full fence before it
    /// notifies. So the rail's host may omit that fence (`peer_uses_membarrier(true)`).
    pub membarrier: bool,
    /// Length, in bytes, of the shortest two-sided payload in private memory that the kernel always
    /// copies. Shorter payloads take the path that was faster recently: the kernel, or the lane
    /// while the sender makes progress. With 0 the kernel copies all payloads.
    pub read_from: usize,
    /// Whether private memory is staged through the lane even where the kernel could copy it
    /// directly.
    ///
    /// Set this if peers may block you on purpose. A copy by the kernel waits for the provider of
    /// the peer's pages. A process that serves its pages through `userfaultfd(2)`, or that maps a
    /// FUSE file, can block the copy.
    pub force_staging: bool,
    /// The number that identifies this process to peers: see
    /// [`Link::peer_id`](crate::Link::peer_id).
    pub id: u64,
    /// The users that may run peers.
    pub users: Users,
    /// How long an import waits until the peer has announced the segment. An import on behalf of a
    /// message never waits.
    pub timeout: Duration,
}

impl Default for ShmConfig {
    fn default() -> Self {
        ShmConfig {
            max_peers: 64,
            max_regions: 256,
            max_segments: 64,
            lane_cells: 1024,
            // Fits a tagged message with 8 KiB of payload and its header.
            max_message: (8 << 10) + 64,
            common_len: 0,
            membarrier: false,
            read_from: 2 << 20,
            force_staging: false,
            id: 0,
            users: Users::Own,
            timeout: Duration::from_secs(5),
        }
    }
}

impl ShmConfig {
    pub(crate) fn check(&self) -> Result<(), AttachError> {
        let cells = self.lane_cells;
        let sound = [
            (self.max_peers > 0, "max_peers"),
            (self.max_regions > 0, "max_regions"),
            (cells.is_power_of_two() && (64..=65536).contains(&cells), "lane_cells"),
            (
                self.max_message >= 256 && self.max_message <= lane::max_message(cells),
                "max_message",
            ),
            (
                self.common_len.is_multiple_of(4096) && self.common_len <= isize::MAX as usize,
                "common_len",
            ),
        ];
        match sound.iter().find(|(sound, _)| !sound) {
            Some((_, what)) => Err(AttachError::Config(what)),
            None => Ok(()),
        }
    }
}
