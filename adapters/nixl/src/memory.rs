//! Registered memory of an agent, and what it has loaded of its peers'.

use fishplate::PeerId;
use fishplate::node::{Memory, Remote};

use crate::intro::Export;

/// Memory of the program.
pub(crate) struct Local {
    pub memory: Memory,
    /// Where the region starts: the program's first byte, or up to 7 before.
    pub base: usize,
    /// What the program has registered.
    pub start: usize,
    pub len: usize,
}

/// Memory of a peer.
pub(crate) struct Away {
    pub peer: u64,
    pub export: Export,
    /// Where the region starts there.
    pub base: u64,
    /// Its import, from this attachment of the peer.
    pub import: Option<(PeerId, Remote)>,
}

/// Whether `len` bytes at an address lie in a range of this start and length.
pub(crate) fn contains((start, whole): (usize, usize), address: usize, len: usize) -> bool {
    let from = address.checked_sub(start);
    from.and_then(|from| from.checked_add(len)).is_some_and(|end| end <= whole)
}
