//! What is queued on the device, and what becomes of it. Copies of one stream end in order, so of
//! each stream only the oldest mark is asked after. Nothing here allocates or waits.

use std::collections::VecDeque;

use fishplate_core::error::CompleteError;
use fishplate_core::mem::Peer;

use crate::{Device, DeviceError, ImportId, Mark};

/// Code of an error that has none of its own.
pub(super) fn code(error: DeviceError) -> i32 {
    match error {
        DeviceError::Lost(code) | DeviceError::Driver(code) => code,
        DeviceError::Exhausted => libc::ENOMEM,
        _ => libc::EIO,
    }
}

/// Whom the end of something queued is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// An operation.
    Op(u32),
    /// A piece on its way into a bounce slot of ours. `life`: which attachment of the peer.
    Filling { peer: Peer, life: u32, number: u64 },
    /// A piece on its way out of a slot of the peer.
    Emptying { peer: Peer, life: u32, number: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    /// `None`: the device had none to give; it is asked again.
    mark: Option<Mark>,
    owner: Owner,
}

/// How something queued has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It is done, and visible.
    Reached,
    /// The device does not say: something of it may still happen.
    Unknown(i32),
}

/// The streams of the device.
#[derive(Debug)]
pub(super) struct Streams {
    streams: Box<[VecDeque<Queued>]>,
    /// Marks that are out.
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

    /// Marks that can be set now.
    pub(super) fn room(&self) -> u32 {
        self.most - self.out
    }

    /// What is queued and has not been found to have ended.
    pub(super) fn out(&self) -> u32 {
        self.out
    }

    /// The stream with the fewest marks out, or near it.
    pub(super) fn idle(&self) -> u8 {
        let lens = self.streams.iter().map(VecDeque::len).enumerate();
        lens.min_by_key(|&(_, len)| len).map_or(0, |(i, _)| i as u8)
    }

    /// Marks the end of what was queued on a stream. There must be [room](Streams::room).
    pub(super) fn mark<D: Device>(&mut self, device: &mut D, stream: u8, owner: Owner) {
        // Without a mark now, there will be one: later, and no earlier than needed.
        let mark = device.mark(stream).ok();
        self.out += 1;
        self.streams[usize::from(stream)].push_back(Queued { mark, owner });
    }

    /// The next end, if there is one. An error is the loss of the device.
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
                    // The next call begins with the stream behind, so that none starves.
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

    /// Takes one out whatever became of it: the device is lost.
    pub(super) fn abandon(&mut self) -> Option<Owner> {
        let stream = self.streams.iter().position(|stream| !stream.is_empty())?;
        Some(self.over(stream, End::Reached).0)
    }
}

/// What an operation is, beside copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Copied by the device.
    Direct,
    /// Written through bounce slots.
    Written,
    /// Read through bounce slots: bytes that have not come, and the size of the read.
    Read { left: u64, len: u64, into: Place },
}

/// Memory of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// For the processor.
    Host(*mut u8),
    /// For the device.
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

/// An operation under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) cx: u64,
    pub(super) peer: Peer,
    pub(super) life: u32,
    pub(super) kind: Kind,
    /// What keeps the peer's memory open.
    pub(super) import: Option<ImportId>,
    /// The registration that it reads or fills, if any: its place in the table.
    pub(super) local: Option<u32>,
    /// Parts of it that have not ended: marks, pieces.
    pub(super) parts: u32,
    /// Whether parts are still to come.
    pub(super) unposted: bool,
    pub(super) error: Option<CompleteError>,
    pub(super) data: Option<u32>,
    /// The ticket whose word tells the target.
    pub(super) ticket: Option<u64>,
    /// Whether the device stores that word itself.
    pub(super) word_queued: bool,
    /// The end was reported; parts of it may still be under way.
    pub(super) reported: bool,
}

/// The operations.
#[derive(Debug)]
pub(super) struct Ops {
    slots: Box<[(u32, Option<Op>)]>,
    free: Vec<u32>,
}

// SAFETY: operations' addresses belong to no thread: they are lent until the operation ends.
unsafe impl Send for Ops {}

impl Ops {
    pub(super) fn new(count: u16) -> Self {
        Ops {
            slots: vec![(1, None); count.into()].into_boxed_slice(),
            free: (0..u32::from(count)).rev().collect(),
        }
    }

    /// Has every generation begin there.
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

    /// What names an operation to a peer.
    pub(super) fn id(&self, index: u32) -> u64 {
        u64::from(self.slots[index as usize].0) << 32 | u64::from(index)
    }

    /// The operation that a peer names, if it is there.
    pub(super) fn find(&self, id: u64) -> Option<u32> {
        let (generation, op) = self.slots.get(id as u32 as usize)?;
        (u64::from(*generation) == id >> 32 && op.is_some()).then_some(id as u32)
    }

    /// Whether a peer names an operation that has ended.
    pub(super) fn was(&self, id: u64) -> bool {
        let Some(&(generation, _)) = self.slots.get(id as u32 as usize) else { return false };
        let age = generation.wrapping_sub((id >> 32) as u32);
        id >> 32 != 0 && age != 0 && age <= u32::MAX / 2
    }

    /// Those of a peer.
    pub(super) fn of(&self, peer: Peer) -> impl Iterator<Item = u32> {
        let theirs = move |op: &Op| op.peer == peer;
        let slots = self.slots.iter().enumerate();
        slots.filter(move |(_, (_, op))| op.as_ref().is_some_and(theirs)).map(|(i, _)| i as u32)
    }
}
