//! Buffers for chunks that are sent. Each is lent until its send has completed. They are allocated
//! on demand and kept.

use std::ptr::NonNull;

use fishplate::Node;
use fishplate::node::{Error, Memory};
use fishplate::shm::Segment;

use crate::chunk::CHUNK_MAX;
use crate::slab::Slab;

/// Buffers that are kept.
const KEPT: usize = 32;

/// This bit distinguishes the completion word of a buffer from the number of a transfer.
const LENT: u64 = 1 << 63;

/// Memory of the node for one chunk.
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

    /// The first of [`CHUNK_MAX`] bytes.
    pub fn start(&self) -> NonNull<u8> {
        self.segment.ptr()
    }
}

/// All buffers of an agent.
#[derive(Default)]
pub(crate) struct Buffers {
    free: Vec<Buffer>,
    /// With the peer's number.
    lent: Slab<(Buffer, u64)>,
}

impl Buffers {
    /// Takes a buffer. The caller lends it or gives it back.
    pub fn take(&mut self, node: &mut Node) -> Result<Buffer, Error> {
        self.free.pop().map_or_else(|| Buffer::new(node), Ok)
    }

    /// Records a send to a peer from a buffer. Returns the word to report it with.
    pub fn lend(&mut self, buffer: Buffer, peer: u64) -> u64 {
        self.lent.insert((buffer, peer)) | LENT
    }

    /// Takes a buffer back. `word`: of the send's completion, or of one that was refused. `None`:
    /// it is the word of something else. Returns the peer.
    pub fn end(&mut self, node: &mut Node, word: u64, unknown: bool) -> Option<u64> {
        if word & LENT == 0 {
            return None;
        }
        let (buffer, peer) = self.lent.remove(word & !LENT)?;
        match unknown {
            // It may still be read, so no other chunk is put there.
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
