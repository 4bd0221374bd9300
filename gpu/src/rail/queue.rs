//! The work queued on the device, and its completions. Copies in one stream complete in order, so
//! only the oldest mark of each stream is polled. Does not allocate or wait.

use std::collections::VecDeque;

use fishplate_core::error::CompleteError;
use fishplate_core::mem::Peer;

use crate::{Device, DeviceError, ImportId, Mark};

/// Returns the driver's code of an error, or a substitute for errors without a code.
pub(super) fn code(error: DeviceError) -> i32 {
    match error {
        DeviceError::Lost(code) | DeviceError::Driver(code) => code,
        DeviceError::Exhausted => libc::ENOMEM,
        _ => libc::EIO,
    }
}

/// The purpose of queued work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// An operation, by its index.
    Op(u32),
    /// A copy into one of our bounce slots. `life` is the attachment of the peer.
    Filling { peer: Peer, life: u32, number: u64 },
    /// A copy out of a peer's bounce slot. `life` is the attachment of the peer.
    Emptying { peer: Peer, life: u32, number: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    /// The mark, or `None` if the device had no free mark, so that setting it must be retried.
    mark: Option<Mark>,
    owner: Owner,
}

/// The outcome of queued work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The work is complete and visible.
    Reached,
    /// The outcome is unknown: the work may still take effect.
    Unknown(i32),
}

/// The streams of the device.
#[derive(Debug)]
pub(super) struct Streams {
    streams: Box<[VecDeque<Queued>]>,
    /// Number of outstanding marks.
    out: u32,
    most: u32,
    first: usize,
}

impl Streams {
    pub(super) fn new(streams: u8, marks: u32, room: usize) -> Self {
        let most = marks.min(u32::try_from(room).unwrap_or(u32::MAX));
        let streams = (0..streams.max(1)).map(|_| VecDeque::with_capacity(most as usize)).collect();
        Streams { streams, out: 0, most, first: 0 }
    }

    pub(super) fn count(&self) -> u8 {
        self.streams.len() as u8
    }

    /// Returns the number of available marks.
    pub(super) fn room(&self) -> u32 {
        self.most - self.out
    }

    /// Returns the number of queued items that have not completed.
    pub(super) fn out(&self) -> u32 {
        self.out
    }

    /// Returns a stream with few outstanding marks.
    pub(super) fn idle(&self) -> u8 {
        let lens = self.streams.iter().map(VecDeque::len).enumerate();
        lens.min_by_key(|&(_, len)| len).map_or(0, |(i, _)| i as u8)
    }

    /// Marks the end of the work queued on a stream. Call it only if [`room`](Streams::room) is not
    /// 0.
    pub(super) fn mark<D: Device>(&mut self, device: &mut D, stream: u8, owner: Owner) {
        // If the device has no free mark, a later mark suffices, because it also follows this work.
        let mark = device.mark(stream).ok();
        self.out += 1;
        self.streams[usize::from(stream)].push_back(Queued { mark, owner });
    }

    /// Returns the next completion, if there is one. An error means that the device is lost.
    pub(super) fn next<D: Device>(&mut self, device: &mut D) -> Result<Option<(Owner, End)>, i32> {
        if self.out == 0 {
            return Ok(None);
        }
        let n = self.streams.len();
        for i in 0..n {
            let stream = (self.first + i) % n;
            let Some(queued) = self.streams[stream].front_mut() else { continue };
            let mark = match queued.mark {
                Some(mark) => mark,
                None => match device.mark(stream as u8) {
                    Ok(mark) => {
                        queued.mark = Some(mark);
                        mark
                    }
                    Err(DeviceError::Exhausted) => continue,
                    Err(DeviceError::Lost(code)) => return Err(code),
                    Err(error) => return Ok(Some(self.over(stream, End::Unknown(code(error))))),
                },
            };
            match device.reached(mark) {
                Ok(false) => {}
                Ok(true) => {
                    // The next call starts with the next stream, so that no stream starves.
                    self.first = (stream + 1) % n;
                    return Ok(Some(self.over(stream, End::Reached)));
                }
                Err(DeviceError::Lost(code)) => return Err(code),
                Err(error) => return Ok(Some(self.over(stream, End::Unknown(code(error))))),
            }
        }
        Ok(None)
    }

    fn over(&mut self, stream: usize, end: End) -> (Owner, End) {
        self.out -= 1;
        match self.streams[stream].pop_front() {
            Some(queued) => (queued.owner, end),
            None => (Owner::Op(u32::MAX), end),
        }
    }

    /// Removes one item of a lost device's queued work. Returns the owner of the item.
    pub(super) fn abandon(&mut self) -> Option<Owner> {
        let stream = self.streams.iter().position(|stream| !stream.is_empty())?;
        Some(self.over(stream, End::Reached).0)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpKind {
    /// A transfer that the device copies.
    Direct,
    /// A write through bounce slots.
    Written,
    /// A read through bounce slots. `left` bytes of `len` are missing.
    Read { left: u64, len: u64, into: Place },
}

/// The local memory of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A host address.
    Host(*mut u8),
    /// A device address.
    Device(crate::DevicePtr),
}

impl Place {
    pub(super) fn at(self, offset: u64) -> Self {
        match self {
            Place::Host(ptr) => Place::Host(ptr.wrapping_add(offset as usize)),
            Place::Device(ptr) => Place::Device(ptr.at(offset)),
        }
    }
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) cx: u64,
    pub(super) peer: Peer,
    pub(super) life: u32,
    pub(super) kind: OpKind,
    /// The import that keeps the peer's memory open.
    pub(super) import: Option<ImportId>,
    /// The slot of the local registration, if there is one.
    pub(super) local: Option<u32>,
    /// Number of incomplete parts: marks and pieces.
    pub(super) parts: u32,
    /// Whether some parts have not been posted yet.
    pub(super) unposted: bool,
    pub(super) error: Option<CompleteError>,
    pub(super) data: Option<u32>,
    /// The ticket of the done word that reports the write.
    pub(super) ticket: Option<u64>,
    /// Whether the device stores the done word.
    pub(super) word_queued: bool,
    /// Whether the completion was reported. Parts may still be in flight.
    pub(super) reported: bool,
}

#[derive(Debug)]
pub(super) struct Ops {
    slots: Box<[(u32, Option<Op>)]>,
    free: Vec<u32>,
}

// SAFETY: the pointers refer to memory of operations, which is not tied to a thread and stays valid
// until its operation completes.
unsafe impl Send for Ops {}

impl Ops {
    pub(super) fn new(count: u16) -> Self {
        Ops {
            slots: vec![(1, None); count.into()].into_boxed_slice(),
            free: (0..u32::from(count)).rev().collect(),
        }
    }

    /// Sets the initial generation of all slots.
    #[cfg(test)]
    pub(super) fn begin_at(&mut self, generation: u32) {
        for (known, _) in &mut self.slots {
            *known = generation;
        }
    }

    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Op> {
        self.slots.iter().filter_map(|(_, op)| op.as_ref())
    }

    pub(super) fn insert(&mut self, op: Op) -> Option<u32> {
        let index = self.free.pop()?;
        self.slots[index as usize].1 = Some(op);
        Some(index)
    }

    #[inline(always)]
    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Op> {
        self.slots.get_mut(index as usize)?.1.as_mut()
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<Op> {
        let (generation, slot) = self.slots.get_mut(index as usize)?;
        let op = slot.take()?;
        *generation = generation.wrapping_add(1).max(1);
        self.free.push(index);
        Some(op)
    }

    /// Returns the id of an operation in messages to a peer.
    pub(super) fn id(&self, index: u32) -> u64 {
        u64::from(self.slots[index as usize].0) << 32 | u64::from(index)
    }

    /// Returns the index of the operation with this id.
    pub(super) fn find(&self, id: u64) -> Option<u32> {
        let (generation, op) = self.slots.get(id as u32 as usize)?;
        (u64::from(*generation) == id >> 32 && op.is_some()).then_some(id as u32)
    }

    /// Returns whether an id belongs to an operation that has completed.
    pub(super) fn was(&self, id: u64) -> bool {
        let Some(&(generation, _)) = self.slots.get(id as u32 as usize) else { return false };
        let age = generation.wrapping_sub((id >> 32) as u32);
        id >> 32 != 0 && age != 0 && age <= u32::MAX / 2
    }

    /// Returns the indexes of a peer's operations.
    pub(super) fn of(&self, peer: Peer) -> impl Iterator<Item = u32> {
        let theirs = move |op: &Op| op.peer == peer;
        let slots = self.slots.iter().enumerate();
        slots.filter(move |(_, (_, op))| op.as_ref().is_some_and(theirs)).map(|(i, _)| i as u32)
    }
}
