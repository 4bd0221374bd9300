//! The records of a lane. Nothing here blocks or allocates.
//!
//! The low half of a record's header is its kind. The high half is a value:
//!
//! | kind    | value               | payload                                                     |
//! |---------|---------------------|-------------------------------------------------------------|
//! | message | length in bytes     | a gap, its length in the kind's second byte; the message    |
//! | landed  | completion word     | none                                                        |
//! | write   | length of the chunk | key, offset, id and flags, completion word; the chunk       |
//! | read    | 0                   | key, offset, id, length                                     |
//! | reply   | length of the chunk | id, bytes sent before this chunk; the chunk                 |
//! | status  | error code or 0     | id                                                          |
//!
//! Payload fields are words of 64 bits. Each staged operation has an id below [`STAGED`], unique
//! within its direction. The id is free again after the operation's status or last reply.

use std::ptr;

use crate::lane::{CELL, PAYLOAD};

pub(crate) const MESSAGE: u32 = 1;
/// Shift of the gap's length in the kind.
pub(crate) const GAP_SHIFT: u32 = 8;
/// In bytes. The message then begins in the second cell.
pub(crate) const GAP_MAX: usize = CELL - PAYLOAD;
pub(crate) const LANDED: u32 = 2;
pub(crate) const WRITE: u32 = 3;
pub(crate) const READ: u32 = 4;
pub(crate) const REPLY: u32 = 5;
pub(crate) const STATUS: u32 = 6;

/// Maximum number of staged operations in flight in one direction.
pub(crate) const STAGED: usize = 32;

/// Flag of a write: this chunk is the last.
pub(crate) const LAST: u64 = 1 << 32;
/// Flag of a write: the completion word is valid.
pub(crate) const DATA: u64 = 1 << 33;

const CHUNK: usize = 4096;

/// The record of a chunk is no longer than that of the longest message.
pub(crate) fn chunk_len(max_message: usize) -> usize {
    CHUNK.min(max_message / CELL * CELL)
}

#[inline]
pub(crate) fn chunk_cells(len: usize) -> u64 {
    1 + len.div_ceil(CELL) as u64
}

#[inline(always)]
pub(crate) fn header(kind: u32, value: u32) -> u64 {
    u64::from(kind) | u64::from(value) << 32
}

pub(crate) type Words = [u64; 6];

/// Copies the payload fields out of a record, once.
pub(crate) unsafe fn load(record: *const u8) -> Words {
    let mut words = [0; 6];
    // SAFETY: the fields lie inside the cell, which the caller guarantees to be readable. The peer
    // may change them at any time, so this is a raw copy.
    unsafe {
        ptr::copy_nonoverlapping(record.add(PAYLOAD), words.as_mut_ptr().cast(), size_of::<Words>())
    };
    words
}

pub(crate) unsafe fn store(record: *mut u8, words: Words) {
    // SAFETY: the fields lie inside the cell, which the caller has reserved.
    unsafe {
        ptr::copy_nonoverlapping(words.as_ptr().cast(), record.add(PAYLOAD), size_of::<Words>())
    };
}

const _: () = assert!(PAYLOAD + size_of::<Words>() == CELL);
