//! Streams, and the work queued on them.

use std::collections::VecDeque;
use std::ffi::c_void;

use super::space::Place;

/// Identifies a stream of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(pub(super) u32);

#[derive(Clone, Copy, Debug)]
pub(super) enum Verb {
    /// A copy of bytes. If `backwards` is true, it proceeds from the end to the start.
    Copy {
        to: Place,
        from: Place,
        len: u64,
        piece: u64,
        moved: u64,
        backwards: bool,
    },
    Word {
        at: Place,
        value: u64,
    },
    /// Waits until another stream has finished work.
    Wait {
        stream: StreamId,
        mark: u64,
    },
    Call {
        function: unsafe extern "C" fn(*mut c_void),
        data: usize,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub number: u64,
    pub wait: u64,
    pub verb: Verb,
}

impl Work {
    pub fn uses(&self, base: u64, serial: u64) -> bool {
        let is = |place: &Place| place.base == base && place.serial == serial;
        match &self.verb {
            Verb::Copy { to, from, .. } => is(to) || is(from),
            Verb::Word { at, .. } => is(at),
            Verb::Wait { .. } | Verb::Call { .. } => false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    pub ordinal: u32,
    pub open: bool,
    pub queue: VecDeque<Work>,
    pub queued: u64,
    pub done: u64,
}

impl Stream {
    pub fn drop_queue(&mut self) -> u64 {
        let dropped = self.queue.len() as u64;
        self.queue.clear();
        dropped
    }
}
