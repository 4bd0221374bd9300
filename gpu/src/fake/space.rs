//! The address space shared by a process's devices. No address in it is the processor's.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::behaviour::MemoryKind;
use super::memory::FakeMemory;
use crate::{DeviceError, DevicePtr};

/// Beyond what x86-64 and AArch64 let a program address, also without the top byte.
const FOREIGN: u64 = 0x0A5A_0000_0000_0000;

/// Addresses between two ranges that belong to nobody.
const GAP: u64 = 512;

/// What lies at a range of addresses.
#[derive(Clone, Debug)]
pub(super) enum What {
    Own {
        kind: MemoryKind,
        memory: Arc<FakeMemory>,
        buffer: u64,
    },
    /// Opened so many times.
    Opened {
        memory: Arc<FakeMemory>,
        times: u32,
        buffer: u64,
    },
    /// Memory of the processor.
    Pinned {
        ptr: usize,
        buffer: u64,
    },
}

/// A range of addresses.
#[derive(Clone, Debug)]
pub(super) struct Range {
    pub size: u64,
    /// Never the same again.
    pub serial: u64,
    /// Of the process.
    pub ordinal: u32,
    /// Start of the reserved addresses that it lies among: they stay reserved when it is unmapped.
    pub reservation: Option<u64>,
    pub what: What,
}

impl Range {
    /// Where its bytes are for the processor.
    pub fn data(&self) -> *mut u8 {
        match &self.what {
            What::Own { memory, .. } | What::Opened { memory, .. } => memory.data(),
            What::Pinned { ptr, .. } => *ptr as *mut u8,
        }
    }

    pub fn memory(&self) -> Option<&FakeMemory> {
        match &self.what {
            What::Own { memory, .. } | What::Opened { memory, .. } => Some(memory),
            What::Pinned { .. } => None,
        }
    }
}

/// Who gives reserved addresses back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeper {
    /// Whoever reserved them.
    Caller,
    /// The call that frees what lies there.
    Free,
    /// The call that closes what lies there.
    Close,
}

/// A place within a range that cannot be mistaken for a later one at the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub base: u64,
    pub serial: u64,
    pub offset: u64,
}

#[derive(Debug)]
pub(super) struct Space {
    ranges: BTreeMap<u64, Range>,
    /// Addresses that were reserved, by the first: how many, and for whom.
    reservations: BTreeMap<u64, (u64, Keeper)>,
    next: u64,
    next_serial: u64,
    /// Whether addresses that were given back are given again, the last one first.
    pub recycle: bool,
    /// Ranges that were given back: first address, addresses.
    free: Vec<(u64, u64)>,
}

impl Space {
    /// The addresses of the process at that place, which no other process of the machine has.
    pub fn new(place: usize) -> Space {
        // Not a multiple of any large power of two.
        let next = FOREIGN + ((place as u64) << 40) + 0x1200;
        let (ranges, reservations) = (BTreeMap::new(), BTreeMap::new());
        Space { ranges, reservations, next, next_serial: 1, recycle: true, free: vec![] }
    }

    /// Takes addresses: from `into` bytes behind a multiple of `align` on.
    fn take(&mut self, size: u64, (align, into): (u64, u64)) -> DevicePtr {
        let fits = |&(base, len): &(u64, u64)| len == size && base % align == into;
        DevicePtr(match self.free.iter().rposition(fits).filter(|_| self.recycle) {
            Some(at) => self.free.remove(at).0,
            None => {
                let base = self.next.next_multiple_of(align) + into;
                self.next = base + size.next_multiple_of(GAP) + GAP;
                base
            }
        })
    }

    /// Reserves addresses, from a multiple of `align` on.
    pub fn reserve(&mut self, size: u64, align: u64, keeper: Keeper) -> DevicePtr {
        let base = self.take(size, (align, 0));
        self.reservations.insert(base.0, (size, keeper));
        base
    }

    /// Reserves addresses that were given back: whether they were.
    pub fn reserve_at(&mut self, base: DevicePtr, size: u64) -> bool {
        let end = base.0 + size;
        let free = self.free.iter().position(|&(at, len)| at <= base.0 && end <= at + len);
        let Some((at, len)) = free.map(|free| self.free.remove(free)) else { return false };
        self.free.extend([(at, base.0 - at), (end, at + len - end)].iter().filter(|(_, len)| *len > 0));
        self.reservations.insert(base.0, (size, Keeper::Caller));
        true
    }

    /// Frees what [`reserve`](Self::reserve) took. Returns whether all of it was, and was empty.
    pub fn release(&mut self, base: DevicePtr, size: u64) -> bool {
        let whole = self.reservations.get(&base.0).is_some_and(|&(reserved, _)| reserved == size);
        let fits = whole && self.ranges.range(base.0..base.0 + size).next().is_none();
        if fits {
            self.reservations.remove(&base.0);
            self.free.push((base.0, size));
        }
        fits
    }

    /// The size of what was reserved from a place on, and who gives it back.
    pub fn reserved(&self, base: DevicePtr) -> Option<(u64, Keeper)> {
        self.reservations.get(&base.0).copied()
    }

    /// The reservation that an address is of: its first address and its size.
    pub fn reservation(&self, ptr: DevicePtr) -> Option<(DevicePtr, u64)> {
        let (&first, &(size, _)) = self.reservations.range(..=ptr.0).next_back()?;
        (ptr.0 - first < size).then_some((DevicePtr(first), size))
    }

    /// Where the reservation begins that some addresses are of, if nothing lies at them.
    pub fn vacant(&self, base: DevicePtr, size: u64) -> Option<u64> {
        let (first, len) = self.reservation(base)?;
        let inside = (base.0 - first.0).checked_add(size).is_some_and(|end| end <= len);
        let before = self.ranges.range(..base.0.saturating_add(size)).next_back();
        let vacant = before.is_none_or(|(at, range)| at + range.size <= base.0);
        (inside && vacant).then_some(first.0)
    }

    /// The first of what lies at reserved addresses.
    pub fn first_in(&self, reservation: DevicePtr) -> Option<DevicePtr> {
        let (size, _) = self.reserved(reservation)?;
        self.ranges.range(reservation.0..reservation.0 + size).next().map(|(&base, _)| DevicePtr(base))
    }

    /// Puts something at addresses of its own.
    pub fn map(&mut self, size: u64, place: (u64, u64), ordinal: u32, what: What) -> DevicePtr {
        let base = self.take(size, place);
        self.map_at(base, size, None, ordinal, what);
        base
    }

    /// Puts something at addresses that were taken.
    pub fn map_at(&mut self, base: DevicePtr, size: u64, reservation: Option<u64>, ordinal: u32, what: What) {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.ranges.insert(base.0, Range { size, serial, ordinal, reservation, what });
    }

    pub fn unmap(&mut self, base: DevicePtr) -> Option<Range> {
        let range = self.ranges.remove(&base.0)?;
        if range.reservation.is_none() {
            self.free.push((base.0, range.size));
        }
        Some(range)
    }

    pub fn at(&self, base: DevicePtr) -> Option<&Range> {
        self.ranges.get(&base.0)
    }

    pub fn at_mut(&mut self, base: DevicePtr) -> Option<&mut Range> {
        self.ranges.get_mut(&base.0)
    }

    pub fn all(&self) -> impl Iterator<Item = (DevicePtr, &Range)> {
        self.ranges.iter().map(|(&base, range)| (DevicePtr(base), range))
    }

    /// The range that `len` bytes at `ptr` lie in.
    pub fn find(&self, ptr: DevicePtr, len: u64) -> Result<(DevicePtr, &Range), DeviceError> {
        let found = self.ranges.range(..=ptr.0).next_back();
        let inside = found.filter(|(base, range)| {
            let offset = ptr.0 - **base;
            offset < range.size && len <= range.size - offset
        });
        inside.map(|(&base, range)| (DevicePtr(base), range)).ok_or(DeviceError::NotDeviceMemory)
    }

    pub fn place(&self, ptr: DevicePtr, len: u64) -> Result<Place, DeviceError> {
        let (base, range) = self.find(ptr, len)?;
        Ok(Place { base: base.0, serial: range.serial, offset: ptr.0 - base.0 })
    }

    /// The places of `len` bytes at `ptr`, with what lies in each: more than one where ranges lie
    /// side by side in one reservation.
    pub fn places(&self, ptr: DevicePtr, len: u64) -> Result<Vec<(Place, u64)>, DeviceError> {
        let (mut at, mut left, mut places) = (ptr, len, vec![]);
        let reservation = self.find(ptr, 0)?.1.reservation;
        loop {
            let (base, range) = self.find(at, 0)?;
            if !places.is_empty() && (reservation.is_none() || range.reservation != reservation) {
                return Err(DeviceError::NotDeviceMemory);
            }
            let place = Place { base: base.0, serial: range.serial, offset: at.0 - base.0 };
            let here = left.min(range.size - place.offset);
            places.push((place, here));
            left -= here;
            at = at.at(here);
            if left == 0 {
                return Ok(places);
            }
        }
    }

    /// The range of a place, if it is still the same.
    pub fn range(&self, place: Place) -> Option<&Range> {
        self.ranges.get(&place.base).filter(|range| range.serial == place.serial)
    }
}
