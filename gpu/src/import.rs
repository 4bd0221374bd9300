//! The cache of opened peer allocations, keyed by the peer's incarnation and the allocation.
//! [`Imports::begin`] and [`Imports::end`] are hot: each only uses an index and a counter. The
//! other methods are slow paths: they allocate and call the driver.
//!
//! | state    | found by an import | may begin a transfer | closed when                          |
//! |----------|--------------------|----------------------|--------------------------------------|
//! | open     | yes                | yes                  | evicted, if it has no imports        |
//! | draining | no                 | no                   | the last transfer has ended          |
//! | closed   | no                 | no                   | already; removed after last release  |
//!
//! An import protects its mapping from eviction, but not from revocation. After a revocation no
//! transfer can begin. To give an address to other code, begin a transfer, and end it when that
//! code no longer uses the address.
//!
//! Memory of a dead peer is closed without being accessed.

mod fault;

use std::collections::BTreeMap;

use fishplate_core::mem::Peer;
use fishplate_shm::Nonce;

use super::error::AllocId;
use super::export::{enter_home, leave_home};
use super::wire::Offer;
use super::{Device, DeviceError, DevicePtr, Handle};

pub use fault::{Fault, ImportError};

/// The id of an imported allocation, valid until it was [released](Imports::release) as often as it
/// was returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ImportId {
    index: u32,
    generation: u32,
}

/// An imported range of a peer's allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Imported {
    /// Identifies the import in [`Imports::begin`], [`Imports::end`] and [`Imports::release`].
    pub id: ImportId,
    /// Address of the range in this process.
    pub ptr: DevicePtr,
    /// Size in bytes.
    pub len: u64,
}

/// Limits of opened memory. Memory in use is never closed to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImportLimits {
    /// Maximum number of opened allocations.
    pub mappings: usize,
    /// Maximum total size of the opened memory, in bytes.
    pub bytes: u64,
}

impl Default for ImportLimits {
    fn default() -> Self {
        ImportLimits { mappings: 1024, bytes: 1 << 40 }
    }
}

/// Counters of imports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImportStats {
    /// Number of allocations opened by the driver.
    pub opens: u64,
    /// Number of allocations closed by the driver.
    pub closes: u64,
    /// Number of cache hits.
    pub hits: u64,
    /// Number of evicted mappings.
    pub evictions: u64,
    /// Number of closes that failed in the driver. `closes` counts them too.
    pub close_errors: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Draining,
    Closed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    pub(crate) peer: Peer,
    pub(crate) incarnation: Nonce,
    pub(crate) alloc: AllocId,
    pub(crate) sequence: u64,
}

#[derive(Debug)]
struct Mapping {
    key: (Nonce, AllocId),
    peer: Peer,
    base: DevicePtr,
    size: u64,
    /// False for exports of this process.
    opened: bool,
    uses: u32,
    flights: u32,
    idle_since: u64,
    state: State,
    revoke: Option<u64>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    mapping: Option<Mapping>,
}

/// The cache of opened peer allocations.
#[derive(Debug)]
pub struct Imports {
    limits: ImportLimits,
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_key: BTreeMap<(Nonce, AllocId), u32>,
    draining: BTreeMap<(Nonce, AllocId), u32>,
    /// Least recently used first.
    idle: BTreeMap<u64, u32>,
    clock: u64,
    open: usize,
    bytes: u64,
    drained: bool,
    closed: Vec<Closed>,
    stats: ImportStats,
}

impl Imports {
    /// Creates an empty cache.
    pub fn new(limits: ImportLimits) -> Self {
        Imports {
            limits,
            slots: Vec::new(),
            free: Vec::new(),
            by_key: BTreeMap::new(),
            draining: BTreeMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            open: 0,
            bytes: 0,
            drained: false,
            closed: Vec::new(),
            stats: ImportStats::default(),
        }
    }

    /// Returns the counters.
    pub fn stats(&self) -> ImportStats {
        self.stats
    }

    /// Returns the number of opened allocations, and their size in bytes.
    pub fn mapped(&self) -> (usize, u64) {
        (self.open, self.bytes)
    }

    /// Begins a transfer, and returns the allocation's start. The mapping stays open until the
    /// transfer [ends](Imports::end). Hot.
    #[inline(always)]
    pub fn begin(&mut self, id: ImportId) -> Result<DevicePtr, Fault> {
        match self.mapping_mut(id) {
            Some(mapping) if mapping.state == State::Open && mapping.uses > 0 => {
                mapping.flights += 1;
                Ok(mapping.base)
            }
            Some(mapping) if mapping.uses > 0 => Err(Fault::Revoked),
            _ => Err(Fault::Stale),
        }
    }

    /// Ends a transfer that has no queued work left. Hot.
    #[inline(always)]
    pub fn end(&mut self, id: ImportId) {
        let Some(mapping) = self.mapping_mut(id) else { return };
        mapping.flights = mapping.flights.saturating_sub(1);
        if mapping.flights == 0 && mapping.state == State::Draining {
            self.drained = true;
        }
    }

    /// Returns whether a transfer can begin.
    pub fn is_open(&self, id: ImportId) -> bool {
        let slot =
            self.slots.get(id.index as usize).filter(|slot| slot.generation == id.generation);
        slot.and_then(|slot| slot.mapping.as_ref())
            .is_some_and(|mapping| mapping.state == State::Open)
    }

    #[inline(always)]
    fn mapping_mut(&mut self, id: ImportId) -> Option<&mut Mapping> {
        self.slots
            .get_mut(id.index as usize)
            .filter(|slot| slot.generation == id.generation)?
            .mapping
            .as_mut()
    }

    pub(crate) fn find(
        &mut self,
        incarnation: Nonce,
        alloc: AllocId,
        offset: u64,
        len: u64,
    ) -> Option<Result<Imported, Fault>> {
        let index = *self.by_key.get(&(incarnation, alloc))?;
        let slot = &mut self.slots[index as usize];
        let mapping = slot.mapping.as_mut()?;
        if let Err(fault) = within(offset, len, mapping.size) {
            return Some(Err(fault));
        }
        if mapping.uses == u32::MAX {
            return Some(Err(Fault::Full));
        }
        if mapping.uses == 0 {
            self.idle.remove(&mapping.idle_since);
        }
        mapping.uses += 1;
        self.stats.hits += 1;
        let id = ImportId { index, generation: slot.generation };
        Some(Ok(Imported { id, ptr: mapping.base.at(offset), len }))
    }

    /// Opens and imports an allocation. On an error no memory was opened, but mappings may have
    /// been evicted.
    pub(crate) fn open<D: Device>(
        &mut self,
        device: &mut D,
        peer: Peer,
        incarnation: Nonce,
        offer: Offer,
        offset: u64,
        len: u64,
    ) -> Result<Imported, Fault> {
        let &Offer { alloc, size, uuid, ref handle } = &offer;
        within(offset, len, size)?;
        let key = (incarnation, alloc);
        // Keeps at most one mapping per key, even if the caller has not called `find`.
        if let Some(&index) = self.by_key.get(&key) {
            self.retire(index, None);
            self.sweep(device);
        }
        if self.draining.contains_key(&key) {
            return Err(Fault::Busy);
        }
        // Also rejects memory of this process that belongs to another kind of device.
        if !device.reaches(&uuid) {
            return Err(Fault::Device(DeviceError::NoPeerAccess));
        }
        let (base, opened) = match handle {
            Some(handle) => {
                self.make_room(device, size)?;
                // SAFETY: the peer keeps exported memory until we acknowledge its revocation, which
                // we do after the close. If the peer breaks this rule, only bytes that belong to it
                // are affected. The device rejects invalid handles.
                let base = unsafe { device.open(handle, size) }.map_err(Fault::Device)?;
                self.stats.opens += 1;
                if let Err(why) = verify(device, base, handle, size) {
                    self.stats.closes += 1;
                    // SAFETY: the memory was just opened, and nothing uses it yet.
                    self.stats.close_errors += u64::from(unsafe { device.close(base) }.is_err());
                    return Err(why);
                }
                self.open += 1;
                self.bytes += size;
                (base, true)
            }
            None => (enter_home(alloc, size).ok_or(Fault::NotExported)?, false),
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.mapping = Some(Mapping {
            key,
            peer,
            base,
            size,
            opened,
            uses: 1,
            flights: 0,
            idle_since: 0,
            state: State::Open,
            revoke: None,
        });
        self.by_key.insert(key, index);
        Ok(Imported {
            id: ImportId { index, generation: slot.generation },
            ptr: base.at(offset),
            len,
        })
    }

    /// Releases an import. The mapping stays cached until its room is needed.
    pub fn release(&mut self, id: ImportId) {
        let clock = self.clock + 1;
        let Some(mapping) = self.mapping_mut(id).filter(|mapping| mapping.uses > 0) else { return };
        mapping.uses -= 1;
        if mapping.uses > 0 {
            return;
        }
        match mapping.state {
            // Memory that this process exports needs no cache.
            State::Open if !mapping.opened => self.retire(id.index, None),
            State::Open => {
                mapping.idle_since = clock;
                self.clock = clock;
                self.idle.insert(clock, id.index);
            }
            State::Draining => {}
            State::Closed => self.vacate(id.index),
        }
    }

    fn make_room<D: Device>(&mut self, device: &mut D, size: u64) -> Result<(), Fault> {
        let fits = |imports: &Self| {
            imports.open < imports.limits.mappings
                && imports
                    .bytes
                    .checked_add(size)
                    .is_some_and(|bytes| bytes <= imports.limits.bytes)
        };
        if size > self.limits.bytes {
            return Err(Fault::Full);
        }
        // A transfer may outlive its import, so some mappings without imports cannot be evicted.
        let mut after = 0;
        while !fits(self) {
            let next = self.idle.range(after..).map(|(&since, &index)| (since, index)).find(
                |&(_, index)| {
                    self.slots[index as usize]
                        .mapping
                        .as_ref()
                        .is_some_and(|mapping| mapping.flights == 0 && mapping.opened)
                },
            );
            let Some((since, index)) = next else { return Err(Fault::Full) };
            after = since;
            self.retire(index, None);
            self.sweep(device);
            self.stats.evictions += 1;
        }
        Ok(())
    }

    fn retire(&mut self, index: u32, revoke: Option<u64>) {
        let Some(mapping) = &mut self.slots[index as usize].mapping else { return };
        if mapping.state == State::Open {
            mapping.state = State::Draining;
            mapping.revoke = revoke;
            self.by_key.remove(&mapping.key);
            self.draining.insert(mapping.key, index);
            if mapping.uses == 0 {
                self.idle.remove(&mapping.idle_since);
            }
            self.drained |= mapping.flights == 0;
        }
    }

    /// Handles the owner's revocation of an allocation. Returns whether this process has the
    /// allocation open. If it is open, a later [`sweep`](Imports::sweep) schedules the
    /// acknowledgement.
    pub(crate) fn revoke(&mut self, incarnation: Nonce, alloc: AllocId, sequence: u64) -> bool {
        if let Some(&index) = self.by_key.get(&(incarnation, alloc)) {
            self.retire(index, Some(sequence));
            return true;
        }
        // The mapping may be draining already, for another reason or an earlier revocation.
        let draining = self.draining.get(&(incarnation, alloc)).copied();
        let mapping = draining.and_then(|index| self.slots[index as usize].mapping.as_mut());
        mapping.map(|mapping| mapping.revoke = Some(sequence)).is_some()
    }

    pub(crate) fn keep_only(&mut self, alive: impl Fn(&Nonce) -> bool) {
        let gone: Vec<u32> = self
            .by_key
            .iter()
            .filter(|((incarnation, _), _)| !alive(incarnation))
            .map(|(_, &index)| index)
            .collect();
        for index in gone {
            self.retire(index, None);
        }
    }

    pub(crate) fn take_closed(&mut self) -> Vec<Closed> {
        std::mem::take(&mut self.closed)
    }

    pub(crate) fn sweep<D: Device>(&mut self, device: &mut D) {
        if !std::mem::take(&mut self.drained) {
            return;
        }
        let draining: Vec<_> = self.draining.iter().map(|(&key, &index)| (key, index)).collect();
        for (key, index) in draining {
            let slot = &mut self.slots[index as usize];
            let Some(mapping) = slot.mapping.as_mut().filter(|mapping| mapping.flights == 0) else {
                continue;
            };
            mapping.state = State::Closed;
            self.draining.remove(&key);
            if mapping.opened {
                // SAFETY: no transfer of this mapping is in flight, and none can begin in this
                // state.
                self.stats.close_errors +=
                    u64::from(unsafe { device.close(mapping.base) }.is_err());
                self.stats.closes += 1;
                self.open -= 1;
                self.bytes -= mapping.size;
            } else {
                leave_home(mapping.base);
            }
            if let Some(sequence) = mapping.revoke {
                let (incarnation, alloc) = key;
                self.closed.push(Closed { peer: mapping.peer, incarnation, alloc, sequence });
            }
            if mapping.uses == 0 {
                self.vacate(index);
            }
        }
    }

    fn vacate(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.mapping = None;
        // A slot is retired before its ids repeat.
        if let Some(generation) = slot.generation.checked_add(1) {
            slot.generation = generation;
            self.free.push(index);
        }
    }
}

/// Checks that the opened memory has the announced size, segment by segment. Some drivers do not
/// check the size.
fn verify<D: Device>(device: &D, base: DevicePtr, handle: &Handle, size: u64) -> Result<(), Fault> {
    let one = |at: DevicePtr, told: u64| {
        let opened = device.allocation(at).map_err(Fault::Device)?;
        match opened.base == at && opened.size == told {
            true => Ok(()),
            false => Err(Fault::Size { told, actual: opened.size }),
        }
    };
    let Handle::Segments(segments) = handle else { return one(base, size) };
    let mut at = base;
    for (_, told) in segments {
        one(at, *told)?;
        at = at.at(*told);
    }
    Ok(())
}

fn within(offset: u64, len: u64, size: u64) -> Result<(), Fault> {
    match offset.checked_add(len) {
        Some(end) if len > 0 && end <= size => Ok(()),
        _ => Err(Fault::OutOfBounds { offset, len, size }),
    }
}
