//! Configuration of a rail, fixed when it is created.

use std::time::Duration;

use fishplate_core::error::AttachError;

use crate::lane;

/// Whose processes may be peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Users {
    /// Only those of our own effective user.
    Own,
    /// Those of the listed user ids.
    Listed(Vec<u32>),
}

/// The settings of a [`ShmRail`](crate::ShmRail).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmConfig {
    /// Peers that can be attached at once; they are numbered below this.
    pub max_peers: u16,
    /// Regions that can be registered here, and imported from each peer, at once.
    pub max_regions: u16,
    /// Segments that may hold registered regions at one time.
    pub max_segments: u16,
    /// Cells of 64 bytes in each lane: a power of two from 64 to 65536. Equal at both ends.
    pub lane_cells: u32,
    /// Longest message, in bytes: from 256 to three quarters of a lane. Equal at both ends.
    pub max_message: usize,
    /// Size of each pair's common segment, in bytes: a multiple of 4096, or 0 for none. Equal at
    /// both ends.
    pub common_len: usize,
    /// Whether this process is registered for `membarrier(2)` of other processes and its own
    /// sleepers call it. Use the value of `sleeper_uses_membarrier` of `LinuxHost::shared()`. If
    /// either end does not use it, the rail notifies with a full fence itself, so its host may omit
    /// that fence (`peer_uses_membarrier(true)`).
    pub membarrier: bool,
    /// Payloads of two-sided messages of at least this length, in bytes, are always copied by the
    /// kernel if they are in private memory. Shorter ones take the path that was faster recently:
    /// the kernel, or the lane while the sender makes progress. 0: always the kernel.
    pub read_from: usize,
    /// Stages private memory through the lane even where the kernel could copy it directly.
    ///
    /// Set this if peers may block you on purpose. A copy by the kernel waits for the provider of
    /// the peer's pages: a process that serves them through `userfaultfd(2)`, or maps a FUSE file,
    /// can block the copy and its caller.
    pub force_staging: bool,
    /// The number by which peers know this process: see [`Link::peer_id`](crate::Link::peer_id).
    pub id: u64,
    /// Whose processes may be peers.
    pub users: Users,
    /// How long an import waits for the announcement of its segment. An import on behalf of a
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
            // A tagged message with 8 KiB of payload and its header.
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
            (self.max_message >= 256 && self.max_message <= lane::max_message(cells), "max_message"),
            (self.common_len.is_multiple_of(4096) && self.common_len <= isize::MAX as usize, "common_len"),
        ];
        match sound.iter().find(|(sound, _)| !sound) {
            Some((_, what)) => Err(AttachError::Config(what)),
            None => Ok(()),
        }
    }
}
