//! Registered memory and its keys. Slow path, except [`Regions::find`], which does not allocate or
//! block.
//!
//! | bits of a key | what                                                          |
//! |---------------|---------------------------------------------------------------|
//! | 60..64        | kind: 1 private, 2 shared, 3 common                           |
//! | 48..60        | generation of the slot: keys of an earlier region are refused |
//! | 32..48        | slot in this table                                            |
//! | 0..32         | shared: the segment's number; common: pair id; private: 0     |
//!
//! The base of a key is an offset from the start of the segment. For private memory it is an
//! address. Free slots are used in rotation, so a key repeats only after 4096 registrations in
//! *each* slot that is free.

use std::ptr::NonNull;

use fishplate_core::error::AttachError;
use fishplate_core::mem::Peer;

use crate::segment::Segment;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Private,
    /// In the owner's segment with this number.
    Shared(u32),
    /// In the common segment of the pair with this id.
    Common(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) kind: KeyKind,
    pub(crate) generation: u16,
    pub(crate) slot: u16,
}

const GENERATIONS: u16 = 1 << 12;

impl Key {
    pub(crate) fn encode(self) -> u64 {
        let (kind, low) = match self.kind {
            KeyKind::Private => (1, 0),
            KeyKind::Shared(segment) => (2, segment),
            KeyKind::Common(pair) => (3, pair),
        };
        kind << 60 | u64::from(self.generation) << 48 | u64::from(self.slot) << 32 | u64::from(low)
    }

    /// Decodes an untrusted key.
    pub(crate) fn decode(key: u64) -> Option<Self> {
        let low = key as u32;
        let kind = match key >> 60 {
            1 if low == 0 => KeyKind::Private,
            2 => KeyKind::Shared(low),
            3 => KeyKind::Common(low),
            _ => return None,
        };
        Some(Key { kind, generation: (key >> 48) as u16 % GENERATIONS, slot: (key >> 32) as u16 })
    }
}

/// Keeps the memory mapped.
#[derive(Debug)]
pub(crate) enum Owner {
    User,
    Segment(Segment),
    /// Maps the common segment. The second value is the pair id.
    Peer(Peer, u32),
}

#[derive(Debug)]
struct Registered {
    ptr: NonNull<u8>,
    len: u64,
    owner: Owner,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u16,
    region: Option<Registered>,
}

#[derive(Debug)]
pub(crate) struct Regions {
    slots: Vec<Slot>,
    next: usize,
}

// SAFETY: the table stores addresses and never accesses the memory, so it is not tied to a thread.
unsafe impl Send for Regions {}

impl Regions {
    pub(crate) fn new(max: u16) -> Self {
        Regions { slots: (0..max).map(|_| Slot::default()).collect(), next: 0 }
    }

    pub(crate) fn insert(
        &mut self,
        ptr: NonNull<u8>,
        len: u64,
        owner: Owner,
    ) -> Result<u64, AttachError> {
        let n = self.slots.len();
        let free = (0..n).map(|i| (self.next + i) % n).find(|&i| self.slots[i].region.is_none());
        let slot = free.ok_or(AttachError::Full("ShmConfig::max_regions"))?;
        self.next = (slot + 1) % n;
        let kind = match &owner {
            Owner::User => KeyKind::Private,
            Owner::Segment(segment) => KeyKind::Shared(segment.number()),
            Owner::Peer(_, pair) => KeyKind::Common(*pair),
        };
        let entry = &mut self.slots[slot];
        entry.generation = (entry.generation + 1) % GENERATIONS;
        entry.region = Some(Registered { ptr, len, owner });
        Ok(Key { kind, generation: entry.generation, slot: slot as u16 }.encode())
    }

    /// `None` if `peer` may not access the region.
    pub(crate) fn find(&self, key: u64, peer: Peer) -> Option<(NonNull<u8>, u64)> {
        let Key { kind, generation, slot } = Key::decode(key)?;
        let entry = self.slots.get(usize::from(slot))?;
        let region = entry.region.as_ref().filter(|_| entry.generation == generation)?;
        let meant = match (&region.owner, kind) {
            (Owner::User, KeyKind::Private) => true,
            (Owner::Segment(segment), KeyKind::Shared(number)) => segment.number() == number,
            (Owner::Peer(owner, pair), KeyKind::Common(number)) => {
                *owner == peer && *pair == number
            }
            _ => false,
        };
        meant.then_some((region.ptr, region.len))
    }

    pub(crate) fn remove(&mut self, key: u64) -> Option<Owner> {
        let Key { generation, slot, .. } = Key::decode(key)?;
        let entry =
            self.slots.get_mut(usize::from(slot)).filter(|entry| entry.generation == generation)?;
        Some(entry.region.take()?.owner)
    }

    pub(crate) fn remove_common(&mut self, peer: Peer) {
        for entry in &mut self.slots {
            if matches!(&entry.region, Some(Registered { owner: Owner::Peer(owner, _), .. })
                if *owner == peer)
            {
                entry.region = None;
            }
        }
    }

    pub(crate) fn segments(&self) -> Vec<&Segment> {
        let mut found: Vec<&Segment> = Vec::new();
        for region in self.slots.iter().filter_map(|slot| slot.region.as_ref()) {
            if let Owner::Segment(segment) = &region.owner
                && found.iter().all(|known| known.number() != segment.number())
            {
                found.push(segment);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests;
