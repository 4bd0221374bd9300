//! The registered memory of an agent, and the metadata loaded for its peers' memory.

use fishplate::PeerId;
use fishplate::node::{Memory, Remote};

use crate::intro::Export;

/// Registered memory of the program.
pub(crate) struct Local {
    pub memory: Memory,
    /// Start of the region: the program's first byte rounded down to 8 bytes.
    pub base: usize,
    /// The range that the program registered.
    pub start: usize,
    pub len: usize,
}

/// Memory of a peer.
pub(crate) struct Away {
    pub peer: u64,
    pub export: Export,
    /// Start of the region in the peer's address space.
    pub base: u64,
    /// The imported region, and the attachment of the peer for which it was imported.
    pub import: Option<(PeerId, Remote)>,
}

/// True if `len` bytes at `address` lie in the given range of start and length.
pub(crate) fn contains((start, whole): (usize, usize), address: usize, len: usize) -> bool {
    let from = address.checked_sub(start);
    from.and_then(|from| from.checked_add(len)).is_some_and(|end| end <= whole)
}
