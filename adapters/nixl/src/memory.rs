//! The registered memory of an agent, and the metadata loaded for its peers' memory.

use std::mem::MaybeUninit;

use fishplate::core::mem::copy_bytes;
use fishplate::node::{Memory, Remote};
use fishplate::{LocalAddr, Node, PeerId};

use crate::intro::Export;
use crate::status::Status;

pub(crate) struct Local {
    pub memory: Memory,
    /// Start of the region: the program's first byte rounded down to 8 bytes.
    pub base: usize,
    pub start: usize,
    pub len: usize,
    pub device: bool,
}

impl Local {
    pub fn at(&self, address: usize) -> LocalAddr {
        self.memory.at((address - self.base) as u64)
    }
}

pub(crate) struct Away {
    pub peer: u64,
    pub export: Export,
    /// Start of the region in the peer's address space.
    pub base: u64,
    pub import: Option<(PeerId, Remote)>,
}

/// Appends registered memory to `out`. The range lies in the region.
pub(crate) fn read(
    node: &mut Node,
    local: &Local,
    address: usize,
    len: usize,
    out: &mut Vec<u8>,
) -> Result<(), Status> {
    if !local.device {
        // SAFETY: the range lies in registered memory, which the program keeps valid.
        unsafe { append(out, address as *const u8, len) };
        return Ok(());
    }
    let end = out.len();
    out.resize(end + len, 0);
    Ok(node.read_device(local.at(address), &mut out[end..])?)
}

/// Copies bytes to registered memory. The range lies in the region.
pub(crate) fn write(
    node: &mut Node,
    local: &Local,
    address: usize,
    bytes: &[u8],
) -> Result<(), Status> {
    if local.device {
        return Ok(node.write_device(local.at(address), bytes)?);
    }
    // SAFETY: the range lies in registered memory, which the program keeps valid.
    unsafe { copy_bytes(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    Ok(())
}

/// Appends bytes that a peer may be writing at the same time.
///
/// # Safety
/// `from` is valid for reads of `len` bytes.
pub(crate) unsafe fn append(out: &mut Vec<u8>, from: *const u8, len: usize) {
    out.reserve(len);
    let room: &mut [MaybeUninit<u8>] = out.spare_capacity_mut();
    // SAFETY: `reserve` made room for `len` bytes, and the copy initializes them.
    unsafe {
        copy_bytes(from, room.as_mut_ptr().cast(), len);
        out.set_len(out.len() + len);
    }
}

pub(crate) fn contains((start, whole): (usize, usize), address: usize, len: usize) -> bool {
    let from = address.checked_sub(start);
    from.and_then(|from| from.checked_add(len)).is_some_and(|end| end <= whole)
}
