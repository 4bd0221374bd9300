//! The work queued on the device, and its completions. Copies in one stream complete in order. So
//! only the oldest mark of each stream is polled, and one mark may stand for several copies.
//! Nothing here waits, and only creation allocates.

use std::collections::VecDeque;

use fishplate_core::error::CompleteError;
use fishplate_core::mem::Peer;

use crate::{Bell, Device, DeviceError, ImportId, Mark};

pub(super) fn code(error: DeviceError) -> i32 {
    match error {
        DeviceError::Lost(code) | DeviceError::Driver(code) => code,
        DeviceError::Exhausted => libc::ENOMEM,
        _ => libc::EIO,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Op(u32),
    Filling(Bounced),
    Emptying(Bounced),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounced {
    pub peer: Peer,
    /// The peer may be detached before the copy ends.
    pub life: u32,
    /// Determines the slot.
    pub number: u64,
    /// `None` if the piece belongs to an operation of the peer.
    pub op: Option<u32>,
    /// The registration of our memory, if the piece belongs to an operation of the peer.
    pub local: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Reached,
    /// The work may still take effect.
    Unknown(i32),
}

/// Two, so that the device has a mark ahead while we handle the other. Later work shares a mark,
/// because each mark costs driver calls.
const MARKS: usize = 2;

#[derive(Debug)]
struct Stream {
    queued: VecDeque<Owner>,
    /// Sequence number of the oldest queued work.
    front: u64,
    /// Work before this sequence number is over, with this outcome.
    over: (u64, End),
    marks: VecDeque<Outstanding>,
}

#[derive(Debug)]
struct Outstanding {
    mark: Mark,
    /// Sequence number of the first work queued after the mark.
    behind: u64,
    /// Whether the device will ring when it reaches the mark.
    rings: bool,
}

impl Stream {
    fn back(&self) -> u64 {
        self.front + self.queued.len() as u64
    }

    fn mark<D: Device>(&mut self, device: &mut D, stream: u8) -> Result<(), DeviceError> {
        let marked = self.marks.back().map_or(self.over.0, |last| last.behind);
        if marked < self.back() && self.marks.len() < MARKS {
            let mark = device.mark(stream)?;
            self.marks.push_back(Outstanding { mark, behind: self.back(), rings: false });
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct Streams {
    streams: Box<[Stream]>,
    out: u32,
    most: u32,
    first: usize,
}

impl Streams {
    pub(super) fn new(streams: u8, marks: u32, room: usize) -> Self {
        let most = marks.min(u32::try_from(room).unwrap_or(u32::MAX));
        let stream = || Stream {
            queued: VecDeque::with_capacity(most as usize),
            front: 0,
            over: (0, End::Reached),
            marks: VecDeque::with_capacity(MARKS),
        };
        Streams { streams: (0..streams.max(1)).map(|_| stream()).collect(), out: 0, most, first: 0 }
    }

    pub(super) fn count(&self) -> u8 {
        self.streams.len() as u8
    }

    pub(super) fn room(&self) -> u32 {
        self.most - self.out
    }

    pub(super) fn out(&self) -> u32 {
        self.out
    }

    pub(super) fn idle(&self) -> u8 {
        let lens = self.streams.iter().map(|stream| stream.queued.len()).enumerate();
        lens.min_by_key(|&(_, len)| len).map_or(0, |(i, _)| i as u8)
    }

    /// Adds the owner of the work queued last on a stream. Call it only if [`room`](Streams::room)
    /// is not 0.
    pub(super) fn add<D: Device>(&mut self, device: &mut D, stream: u8, owner: Owner) {
        let known = &mut self.streams[usize::from(stream)];
        known.queued.push_back(owner);
        self.out += 1;
        // If the device has no free mark, a later mark suffices, because it also follows this work.
        _ = known.mark(device, stream);
    }

    /// Returns the next completion, if there is one. An error means that the device is lost.
    pub(super) fn next<D: Device>(&mut self, device: &mut D) -> Result<Option<(Owner, End)>, i32> {
        if self.out == 0 {
            return Ok(None);
        }
        let n = self.streams.len();
        for i in 0..n {
            let at = (self.first + i) % n;
            let stream = &mut self.streams[at];
            if stream.queued.is_empty() {
                continue;
            }
            if stream.front == stream.over.0 {
                let marked = stream.mark(device, at as u8);
                let reached = match (stream.marks.front(), marked) {
                    (Some(oldest), _) => device.reached(oldest.mark),
                    (None, Ok(()) | Err(DeviceError::Exhausted)) => continue,
                    (None, Err(error)) => Err(error),
                };
                let end = match reached {
                    Ok(false) => continue,
                    Ok(true) => End::Reached,
                    Err(DeviceError::Lost(code)) => return Err(code),
                    Err(error) => End::Unknown(code(error)),
                };
                let behind =
                    stream.marks.pop_front().map_or(stream.front + 1, |oldest| oldest.behind);
                stream.over = (behind, end);
            }
            // The next call starts with the next stream, so that no stream starves.
            self.first = (at + 1) % n;
            let end = stream.over.1;
            return Ok(self.take(at).map(|owner| (owner, end)));
        }
        Ok(None)
    }

    /// Makes the next completion of each stream ring the bell. Returns whether all of them will
    /// ring. Adds the number of marks newly made to ring to `count`.
    pub(super) fn ring<D: Device>(&mut self, device: &mut D, bell: &Bell, count: &mut u64) -> bool {
        let mut all = true;
        for (at, stream) in (0u8..).zip(&mut self.streams) {
            if stream.queued.is_empty() {
                continue;
            }
            all &= stream.front == stream.over.0
                && match stream.marks.front_mut() {
                    Some(oldest) if oldest.rings => true,
                    Some(oldest) => {
                        oldest.rings = device.ring(at, oldest.mark, bell).is_ok();
                        *count += u64::from(oldest.rings);
                        oldest.rings
                    }
                    None => false,
                };
        }
        all
    }

    fn take(&mut self, stream: usize) -> Option<Owner> {
        let stream = &mut self.streams[stream];
        let owner = stream.queued.pop_front()?;
        stream.front += 1;
        stream.over.0 = stream.over.0.max(stream.front);
        self.out -= 1;
        Some(owner)
    }

    pub(super) fn abandon(&mut self) -> Option<Owner> {
        let stream = self.streams.iter().position(|stream| !stream.queued.is_empty())?;
        self.take(stream)
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Host(*mut u8),
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

#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub(super) cx: u64,
    pub(super) peer: Peer,
    pub(super) life: u32,
    pub(super) kind: OpKind,
    /// Keeps the peer's memory open.
    pub(super) import: Option<ImportId>,
    pub(super) local: Option<u32>,
    /// Incomplete marks and pieces.
    pub(super) parts: u32,
    pub(super) unposted: bool,
    pub(super) error: Option<CompleteError>,
    pub(super) data: Option<u32>,
    pub(super) ticket: Option<u64>,
    pub(super) word_queued: bool,
    /// Parts may still be in flight.
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

    pub(super) fn id(&self, index: u32) -> u64 {
        u64::from(self.slots[index as usize].0) << 32 | u64::from(index)
    }

    pub(super) fn find(&self, id: u64) -> Option<u32> {
        let (generation, op) = self.slots.get(id as u32 as usize)?;
        (u64::from(*generation) == id >> 32 && op.is_some()).then_some(id as u32)
    }

    pub(super) fn was(&self, id: u64) -> bool {
        let Some(&(generation, _)) = self.slots.get(id as u32 as usize) else { return false };
        let age = generation.wrapping_sub((id >> 32) as u32);
        id >> 32 != 0 && age != 0 && age <= u32::MAX / 2
    }

    pub(super) fn of(&self, peer: Peer) -> impl Iterator<Item = u32> {
        let theirs = move |op: &Op| op.peer == peer;
        let slots = self.slots.iter().enumerate();
        slots.filter(move |(_, (_, op))| op.as_ref().is_some_and(theirs)).map(|(i, _)| i as u32)
    }
}
