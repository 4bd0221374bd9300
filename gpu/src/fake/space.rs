//! The address space that a process's devices share. The processor cannot access any of its
//! addresses.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::behaviour::MemoryKind;
use super::memory::FakeMemory;
use crate::{DeviceError, DevicePtr};

/// The first address. It lies outside the address spaces of programs on x86-64 and AArch64, even if
/// the top byte is ignored.
const FOREIGN: u64 = 0x0A5A_0000_0000_0000;

/// Minimum number of unmapped addresses between two reservations.
const GAP: u64 = 512;

#[derive(Clone, Debug)]
pub(super) enum What {
    Own {
        kind: MemoryKind,
        memory: Arc<FakeMemory>,
        buffer: u64,
    },
    /// `times` counts its opens.
    Opened {
        memory: Arc<FakeMemory>,
        times: u32,
        buffer: u64,
    },
    Pinned {
        ptr: usize,
        buffer: u64,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Range {
    pub size: u64,
    /// Never reused, unlike the addresses.
    pub serial: u64,
    pub ordinal: u32,
    /// Start of the reservation that contains the range. The reservation outlives the range.
    pub reservation: Option<u64>,
    pub what: What,
}

impl Range {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeper {
    Caller,
    Free,
    Close,
}

/// The serial number distinguishes the range from a later one at the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub base: u64,
    pub serial: u64,
    pub offset: u64,
}

#[derive(Debug)]
pub(super) struct Space {
    ranges: BTreeMap<u64, Range>,
    /// The size of each reservation and the call that releases it, by start address.
    reservations: BTreeMap<u64, (u64, Keeper)>,
    next: u64,
    next_serial: u64,
    pub recycle: bool,
    free: Vec<(u64, u64)>,
}

impl Space {
    /// Creates the address space of the process with index `place`. The spaces of a machine are
    /// disjoint.
    pub fn new(place: usize) -> Space {
        // Not a multiple of a large power of two, so that tests do not rely on a large alignment.
        let next = FOREIGN + ((place as u64) << 40) + 0x1200;
        let (ranges, reservations) = (BTreeMap::new(), BTreeMap::new());
        Space { ranges, reservations, next, next_serial: 1, recycle: true, free: vec![] }
    }

    /// Takes `size` addresses that begin `into` bytes after a multiple of `align`.
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

    pub fn reserve(&mut self, size: u64, align: u64, keeper: Keeper) -> DevicePtr {
        let base = self.take(size, (align, 0));
        self.reservations.insert(base.0, (size, keeper));
        base
    }

    pub fn reserve_at(&mut self, base: DevicePtr, size: u64) -> bool {
        let end = base.0 + size;
        let free = self.free.iter().position(|&(at, len)| at <= base.0 && end <= at + len);
        let Some((at, len)) = free.map(|free| self.free.remove(free)) else { return false };
        self.free
            .extend([(at, base.0 - at), (end, at + len - end)].iter().filter(|(_, len)| *len > 0));
        self.reservations.insert(base.0, (size, Keeper::Caller));
        true
    }

    /// Releases a reservation. Returns false unless the range is a whole reservation without
    /// memory.
    pub fn release(&mut self, base: DevicePtr, size: u64) -> bool {
        let whole = self.reservations.get(&base.0).is_some_and(|&(reserved, _)| reserved == size);
        let fits = whole && self.ranges.range(base.0..base.0 + size).next().is_none();
        if fits {
            self.reservations.remove(&base.0);
            self.free.push((base.0, size));
        }
        fits
    }

    pub fn reserved(&self, base: DevicePtr) -> Option<(u64, Keeper)> {
        self.reservations.get(&base.0).copied()
    }

    pub fn reservation(&self, ptr: DevicePtr) -> Option<(DevicePtr, u64)> {
        let (&first, &(size, _)) = self.reservations.range(..=ptr.0).next_back()?;
        (ptr.0 - first < size).then_some((DevicePtr(first), size))
    }

    /// Returns the start of the reservation that contains these addresses, if they are all
    /// unmapped.
    pub fn vacant(&self, base: DevicePtr, size: u64) -> Option<u64> {
        let (first, len) = self.reservation(base)?;
        let inside = (base.0 - first.0).checked_add(size).is_some_and(|end| end <= len);
        let before = self.ranges.range(..base.0.saturating_add(size)).next_back();
        let vacant = before.is_none_or(|(at, range)| at + range.size <= base.0);
        (inside && vacant).then_some(first.0)
    }

    pub fn first_in(&self, reservation: DevicePtr) -> Option<DevicePtr> {
        let (size, _) = self.reserved(reservation)?;
        self.ranges
            .range(reservation.0..reservation.0 + size)
            .next()
            .map(|(&base, _)| DevicePtr(base))
    }

    pub fn map(&mut self, size: u64, place: (u64, u64), ordinal: u32, what: What) -> DevicePtr {
        let base = self.take(size, place);
        self.map_at(base, size, None, ordinal, what);
        base
    }

    pub fn map_at(
        &mut self,
        base: DevicePtr,
        size: u64,
        reservation: Option<u64>,
        ordinal: u32,
        what: What,
    ) {
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

    /// Returns the locations of `len` bytes at `ptr`, with the number of bytes in each. There are
    /// several locations if the bytes cross adjacent ranges of one reservation.
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

    pub fn range(&self, place: Place) -> Option<&Range> {
        self.ranges.get(&place.base).filter(|range| range.serial == place.serial)
    }
}
