//! The address space that the devices of a process share. No address in it is one of the processor's.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::behaviour::Kind;
use super::memory::Memory;
use crate::gpu::{DeviceError, DevicePtr};

/// Beyond what x86-64 and AArch64 let a program address, also without the top byte.
const FOREIGN: u64 = 0x0A5A_0000_0000_0000;

/// Addresses between two ranges that belong to nobody.
const GAP: u64 = 512;

/// What lies at a range of addresses.
#[derive(Clone, Debug)]
pub(super) enum What {
    Own {
        kind: Kind,
        memory: Arc<Memory>,
        buffer: u64,
    },
    /// Opened so many times.
    Opened {
        memory: Arc<Memory>,
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
    /// Its addresses were reserved, and stay so when it is unmapped.
    pub reserved: bool,
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

    pub fn memory(&self) -> Option<&Memory> {
        match &self.what {
            What::Own { memory, .. } | What::Opened { memory, .. } => Some(memory),
            What::Pinned { .. } => None,
        }
    }
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
        Space { ranges: BTreeMap::new(), next, next_serial: 1, recycle: true, free: vec![] }
    }

    /// Takes addresses: from `into` bytes behind a multiple of `align` on.
    pub fn reserve(&mut self, size: u64, (align, into): (u64, u64)) -> DevicePtr {
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

    /// Gives back what [`reserve`](Self::reserve) took.
    pub fn release(&mut self, base: DevicePtr, size: u64) {
        self.free.push((base.0, size));
    }

    /// Puts something at addresses of its own.
    pub fn map(&mut self, size: u64, place: (u64, u64), ordinal: u32, what: What) -> DevicePtr {
        let base = self.reserve(size, place);
        self.map_at(base, size, false, ordinal, what);
        base
    }

    /// Puts something at addresses that were reserved.
    pub fn map_at(&mut self, base: DevicePtr, size: u64, reserved: bool, ordinal: u32, what: What) {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.ranges.insert(base.0, Range { size, serial, ordinal, reserved, what });
    }

    pub fn unmap(&mut self, base: DevicePtr) -> Option<Range> {
        let range = self.ranges.remove(&base.0)?;
        if !range.reserved {
            self.release(base, range.size);
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

    /// The range of a place, if it is still the same.
    pub fn range(&self, place: Place) -> Option<&Range> {
        self.ranges.get(&place.base).filter(|range| range.serial == place.serial)
    }
}
