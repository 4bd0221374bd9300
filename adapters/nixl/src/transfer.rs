//! Transfers, and the descriptors that NIXL passes for them.

use fishplate::node::{Memory, Remote};

use crate::status::Status;

/// A descriptor in NIXL's layout: address, length and device, then the metadata of its region.
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

#[cfg(test)]
impl Metadata {
    pub fn new(private: bool, number: u64) -> Metadata {
        Metadata { table: 0, private, number }
    }
}

impl Desc {
    #[cfg(test)]
    pub fn new(address: usize, len: usize, metadata: &Metadata) -> Desc {
        Desc { address, len, device: 0, metadata }
    }

    /// Returns the number of the region. The region must be local if `private` is true, and remote
    /// otherwise.
    pub(crate) fn region(&self, private: bool) -> Option<u64> {
        // SAFETY: the pointer is null, or points to metadata that the C++ half allocated and keeps
        // until NIXL unloads it.
        let metadata =
            unsafe { self.metadata.as_ref() }.filter(|metadata| metadata.private == private);
        metadata.map(|metadata| metadata.number)
    }
}

/// A range that is contiguous on both sides.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    pub(crate) here: usize,
    pub(crate) there: usize,
    pub(crate) len: usize,
    /// Indexes of the regions in `Transfer::locals` and `Transfer::remotes`.
    pub(crate) local: u32,
    pub(crate) remote: u32,
}

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

/// May be posted any number of times.
#[derive(Default)]
pub(crate) struct Transfer {
    pub(crate) write: bool,
    /// `None` for a transfer within the agent.
    pub(crate) peer: Option<u64>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) device: bool,
    pub(crate) locals: Vec<u64>,
    pub(crate) remotes: Vec<u64>,
    /// The imported or registered regions of the current post, in the order of `locals` and
    /// `remotes`.
    pub(crate) here: Vec<(Memory, usize)>,
    pub(crate) there: Vec<(Remote, u64)>,
    pub(crate) next: usize,
    pub(crate) cut: usize,
    /// True if the last step copied the maximum of one step, and more is left to copy.
    pub(crate) copies: bool,
    pub(crate) outstanding: u32,
    /// Number of posts, and number of unanswered chunks of the current post.
    pub(crate) post: u32,
    pub(crate) waits: u32,
    pub(crate) note: Option<Vec<u8>>,
    /// The reason why the transfer failed. The transfer completes once no operation is in flight.
    pub(crate) fault: Option<Status>,
    pub(crate) active: bool,
    pub(crate) released: bool,
}
