//! Transfers: lists of descriptors, as NIXL passes them and as they are kept.

use fishplate::node::{Memory, Remote};

use crate::status::Status;

/// A descriptor as NIXL passes it: a basic descriptor, then the metadata of its region.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Desc {
    pub(crate) address: usize,
    pub(crate) len: usize,
    device: u64,
    metadata: *const Metadata,
}

/// The metadata of a region, which the C++ half allocates.
#[repr(C)]
pub struct Metadata {
    table: usize,
    private: bool,
    number: u64,
}

static_assertions::const_assert_eq!(size_of::<Desc>(), 32);
static_assertions::const_assert_eq!(std::mem::offset_of!(Metadata, number), 16);

impl Desc {
    /// The number of its region, if that is of this process (`private`), or of a peer.
    pub(crate) fn region(&self, private: bool) -> Option<u64> {
        // SAFETY: null, or metadata of ours, which lives until NIXL unloads it.
        let metadata = unsafe { self.metadata.as_ref() }.filter(|metadata| metadata.private == private);
        metadata.map(|metadata| metadata.number)
    }
}

/// Bytes that lie in one piece at both ends.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) here: usize,
    pub(crate) there: usize,
    pub(crate) len: usize,
    /// Positions in the lists of regions.
    pub(crate) local: u32,
    pub(crate) remote: u32,
}

/// Regions of one end, each once.
#[derive(Default)]
pub(crate) struct Regions {
    pub(crate) numbers: Vec<u64>,
    pub(crate) last: usize,
}

impl Regions {
    pub fn position(&mut self, number: u64) -> usize {
        if self.numbers.get(self.last) != Some(&number) {
            let known = self.numbers.iter().position(|known| *known == number);
            self.last = known.unwrap_or_else(|| {
                self.numbers.push(number);
                self.numbers.len() - 1
            });
        }
        self.last
    }
}

/// A transfer that may be posted any number of times.
pub(crate) struct Transfer {
    pub(crate) write: bool,
    /// `None`: the agent itself.
    pub(crate) peer: Option<u64>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) locals: Vec<u64>,
    pub(crate) remotes: Vec<u64>,
    /// The regions of the current post, in the order of their lists.
    pub(crate) here: Vec<(Memory, usize)>,
    pub(crate) there: Vec<(Remote, u64)>,
    /// The first piece that is not posted.
    pub(crate) next: usize,
    /// Operations that have not completed.
    pub(crate) outstanding: u32,
    /// How often it was posted, and chunks of this post that the peer has not answered.
    pub(crate) post: u32,
    pub(crate) waits: u32,
    /// A notification to be sent.
    pub(crate) note: Option<Vec<u8>>,
    /// Why it has failed. It ends once nothing is outstanding.
    pub(crate) fault: Option<Status>,
    pub(crate) active: bool,
    pub(crate) released: bool,
}
