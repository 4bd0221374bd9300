//! The records of a lane. Nothing here blocks or allocates.
//!
//! The low half of a record's header is its kind, the high half a value:
//!
//! | kind    | value               | payload                                                     |
//! |---------|---------------------|-------------------------------------------------------------|
//! | message | length in bytes     | the message, behind a gap as long as the kind's second byte |
//! | landed  | completion word     | none                                                        |
//! | write   | length of the chunk | key, offset, id and flags, completion word; the chunk       |
//! | read    | 0                   | key, offset, id, length                                     |
//! | reply   | length of the chunk | id, bytes sent before it; the chunk                         |
//! | status  | error code or 0     | id                                                          |
//!
//! Payload fields are words of 64 bits. Staged operations of one direction have an id below
//! [`STAGED`], which is free again once the operation has ended with a status or the last reply.

use std::ptr;

use crate::lane::{CELL, PAYLOAD};

/// A message for the sink, without a gap before it.
pub(crate) const MESSAGE: u32 = 1;
/// Position of the gap's length in the kind.
pub(crate) const GAP_SHIFT: u32 = 8;
/// Longest gap: the message begins in the second cell.
pub(crate) const GAP_MAX: usize = CELL - PAYLOAD;
/// A mapped or directly copied write is complete.
pub(crate) const LANDED: u32 = 2;
/// A part of a staged write.
pub(crate) const WRITE: u32 = 3;
/// A staged read.
pub(crate) const READ: u32 = 4;
/// A part of the data of a staged read.
pub(crate) const REPLY: u32 = 5;
/// The end of a staged operation.
pub(crate) const STATUS: u32 = 6;

/// Most staged operations in flight in one direction.
pub(crate) const STAGED: usize = 32;

/// Flag of a write: this is its last chunk.
pub(crate) const LAST: u64 = 1 << 32;
/// Flag of a write: it has a completion word.
pub(crate) const DATA: u64 = 1 << 33;

/// Longest chunk of a staged operation, in bytes.
const CHUNK: usize = 4096;

/// The chunk size for messages of at most `max_message` bytes: the record is no longer than theirs.
pub(crate) fn chunk_len(max_message: usize) -> usize {
    CHUNK.min(max_message / CELL * CELL)
}

/// Number of cells of a record with a chunk.
#[inline]
pub(crate) fn chunk_cells(len: usize) -> u64 {
    1 + len.div_ceil(CELL) as u64
}

/// A record's header.
#[inline(always)]
pub(crate) fn header(kind: u32, value: u32) -> u64 {
    u64::from(kind) | u64::from(value) << 32
}

/// Payload fields of one cell.
pub(crate) type Words = [u64; 6];

/// Copies the fields out, once.
///
/// # Safety
/// `record` is the first byte of a readable cell.
pub(crate) unsafe fn load(record: *const u8) -> Words {
    let mut words = [0; 6];
    // SAFETY: the fields are inside the cell. The peer may change them meanwhile, so this is a raw
    // copy.
    unsafe { ptr::copy_nonoverlapping(record.add(PAYLOAD), words.as_mut_ptr().cast(), size_of::<Words>()) };
    words
}

/// Stores the fields.
///
/// # Safety
/// `record` is the first byte of a reserved cell.
pub(crate) unsafe fn store(record: *mut u8, words: Words) {
    // SAFETY: the fields are inside the cell, which is reserved for us.
    unsafe { ptr::copy_nonoverlapping(words.as_ptr().cast(), record.add(PAYLOAD), size_of::<Words>()) };
}

const _: () = assert!(PAYLOAD + size_of::<Words>() == CELL);
