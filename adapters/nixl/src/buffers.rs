//! Send buffers for chunks. A buffer is lent to a send until the send completes. Buffers are
//! allocated on demand and reused.

use std::ptr::NonNull;

use fishplate::Node;
use fishplate::node::{Error, Memory};
use fishplate::shm::Segment;

use crate::chunk::CHUNK_MAX;
use crate::slab::Slab;

const KEPT: usize = 32;

/// Numbers of a [`Slab`] do not have this bit.
const LENT: u64 = 1 << 63;

pub(crate) struct Buffer {
    memory: Memory,
    segment: Segment,
}

impl Buffer {
    fn new(node: &mut Node) -> Result<Buffer, Error> {
        let memory = node.alloc(CHUNK_MAX)?;
        Ok(Buffer { memory, segment: node.segment(memory)? })
    }

    pub fn memory(&self) -> Memory {
        self.memory
    }

    pub fn start(&self) -> NonNull<u8> {
        self.segment.ptr()
    }
}

#[derive(Default)]
pub(crate) struct Buffers {
    free: Vec<Buffer>,
    lent: Slab<(Buffer, u64)>,
}

impl Buffers {
    /// Pass the buffer to `lend` or `give_back`.
    pub fn take(&mut self, node: &mut Node) -> Result<Buffer, Error> {
        self.free.pop().map_or_else(|| Buffer::new(node), Ok)
    }

    /// Returns the completion word of the send.
    pub fn lend(&mut self, buffer: Buffer, peer: u64) -> u64 {
        self.lent.insert((buffer, peer)) | LENT
    }

    /// Releases the buffer of a completed or refused send, and returns its peer. Returns `None` if
    /// `word` is not the word of a buffer.
    pub fn end(&mut self, node: &mut Node, word: u64, unknown: bool) -> Option<u64> {
        if word & LENT == 0 {
            return None;
        }
        let (buffer, peer) = self.lent.remove(word & !LENT)?;
        match unknown {
            // If the outcome is unknown, the rail may still read the buffer, so it is not reused.
            true => drop(node.free(buffer.memory)),
            false => self.give_back(node, buffer),
        }
        Some(peer)
    }

    pub fn give_back(&mut self, node: &mut Node, buffer: Buffer) {
        match self.free.len() < KEPT {
            true => self.free.push(buffer),
            false => drop(node.free(buffer.memory)),
        }
    }
}
