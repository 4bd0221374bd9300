//! The one way in which device memory of this process is exported: by whole allocations, each once, whatever part of it is
//! registered. Slow path: allocates, and enters the driver; [`Exports::find`] does neither, nor waits.
//!
//! An allocation is known by a number of our own, [`AllocId`], which never comes again in this process. Addresses do: an entry
//! that covers an address is believed only if the driver's buffer id is still the one it was entered with. Otherwise the memory
//! was freed and taken again behind our back, and the entry is *superseded*: it is found no more, its versions are forgotten, and
//! its importers are told to close what they have open.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Allocation, Device, DeviceError, DevicePtr, Handle, Share};

/// Allocations that one process may export at once.
pub const MAX_EXPORTS: usize = 4096;

/// An exported allocation of a process. Never given twice in the life of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocId(NonZeroU64);

impl AllocId {
    /// As a number that travels in the key of a rail; never 0.
    pub fn key(self) -> u64 {
        self.0.get()
    }

    /// From a number that may come from anybody.
    pub fn from_key(key: u64) -> Option<Self> {
        NonZeroU64::new(key).map(AllocId)
    }

    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only the number's being unique matters. Over zero it gets in some centuries.
        AllocId(NonZeroU64::new(NEXT.fetch_add(1, Ordering::Relaxed)).unwrap_or(NonZeroU64::MAX))
    }
}

/// A registered range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The allocation that it lies in.
    pub alloc: AllocId,
    /// First byte, counted from that of the allocation.
    pub offset: u64,
    /// Size in bytes.
    pub len: u64,
    /// Grows with every range registered; the same while the range stays registered.
    pub version: u64,
}

/// Why memory was not exported, or not revoked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExportError {
    /// No bytes, or not all in one allocation: how many bytes there are from the first to the end of its allocation.
    BadRange {
        /// Bytes that there are.
        there: u64,
    },
    /// What the device says; [`DeviceError::NotExportable`] with what can be done about it.
    Device(DeviceError),
    /// So many allocations are exported already: the number.
    Full(usize),
    /// The allocation is being revoked.
    Revoking(AllocId),
    /// No such allocation is exported, or no longer.
    Unknown(AllocId),
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportError::BadRange { there } => {
                write!(f, "the range is not inside one allocation, which has {there} bytes from its start")
            }
            ExportError::Device(error) => error.fmt(f),
            ExportError::Full(max) => write!(f, "{max} allocations are exported already: revoke one"),
            ExportError::Revoking(alloc) => write!(f, "allocation {} is being revoked", alloc.key()),
            ExportError::Unknown(alloc) => write!(f, "allocation {} is not exported", alloc.key()),
        }
    }
}

impl std::error::Error for ExportError {}

impl From<DeviceError> for ExportError {
    fn from(error: DeviceError) -> Self {
        ExportError::Device(error)
    }
}

/// Allocations that this process exports, through whichever rail: where they are, for importers in the process itself.
static HOME: Mutex<BTreeMap<AllocId, (DevicePtr, u64)>> = Mutex::new(BTreeMap::new());

fn home() -> MutexGuard<'static, BTreeMap<AllocId, (DevicePtr, u64)>> {
    // No panic between lock and unlock leaves the map half changed.
    HOME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where an allocation is that this very process exports, and its size.
pub(crate) fn at_home(alloc: AllocId) -> Option<(DevicePtr, u64)> {
    home().get(&alloc).copied()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    Revoking,
    /// Freed behind our back; another may have its addresses.
    Superseded,
}

#[derive(Debug)]
struct Slice {
    version: u64,
    uses: u32,
}

#[derive(Debug)]
struct Entry {
    allocation: Allocation,
    handle: Arc<Handle>,
    /// By offset and length.
    slices: BTreeMap<(u64, u64), Slice>,
    state: State,
}

/// How often what was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportStats {
    /// Handles made by the driver.
    pub exports: u64,
    /// Registrations of ranges, sub-slices and repetitions included.
    pub registrations: u64,
    /// Entries whose memory was found to have been freed and taken again.
    pub superseded: u64,
}

/// The allocations that this process exports.
#[derive(Debug, Default)]
pub struct Exports {
    entries: BTreeMap<AllocId, Entry>,
    /// The live ones, by first byte. They do not overlap.
    by_base: BTreeMap<DevicePtr, AllocId>,
    superseded: Vec<AllocId>,
    stats: ExportStats,
}

impl Exports {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// How often what was done.
    pub fn stats(&self) -> ExportStats {
        self.stats
    }

    /// Registers a range, and exports its allocation unless that was done. One driver call or two when it was.
    ///
    /// Ranges may overlap, and be registered again: as often as it was, it is to be taken back.
    pub fn register<D: Device>(
        &mut self,
        device: &mut D,
        ptr: DevicePtr,
        len: u64,
    ) -> Result<Registration, ExportError> {
        let allocation = device.allocation(ptr)?;
        let offset = ptr.0 - allocation.base.0;
        let there = allocation.size.saturating_sub(offset);
        if len == 0 || len > there {
            return Err(ExportError::BadRange { there });
        }
        let alloc = self.entry_of(device, &allocation)?;
        let Some(entry) = self.entries.get_mut(&alloc) else { return Err(ExportError::Unknown(alloc)) };
        let slice =
            entry.slices.entry((offset, len)).or_insert_with(|| Slice { version: next_version(), uses: 0 });
        slice.uses += 1;
        self.stats.registrations += 1;
        Ok(Registration { alloc, offset, len, version: slice.version })
    }

    /// The live entry of an allocation, made if there is none.
    fn entry_of<D: Device>(
        &mut self,
        device: &mut D,
        allocation: &Allocation,
    ) -> Result<AllocId, ExportError> {
        let end = allocation.base.at(allocation.size);
        // Nothing that exists overlaps the allocation, so what does is gone: the driver has given its addresses again.
        while let Some((&base, &alloc)) = self.by_base.range(..end).next_back() {
            let Some(entry) = self.entries.get(&alloc) else { break };
            let known = &entry.allocation;
            if base.0.saturating_add(known.size) <= allocation.base.0 {
                break;
            }
            if (known.buffer, known.base, known.size) == (allocation.buffer, allocation.base, allocation.size)
            {
                return if entry.state == State::Live {
                    Ok(alloc)
                } else {
                    Err(ExportError::Revoking(alloc))
                };
            }
            self.supersede(alloc);
        }
        if self.entries.len() >= MAX_EXPORTS {
            return Err(ExportError::Full(MAX_EXPORTS));
        }
        if let Share::Never(why) = allocation.share {
            return Err(DeviceError::NotExportable(why).into());
        }
        let handle = Arc::new(device.export(allocation)?);
        self.stats.exports += 1;
        let alloc = AllocId::next();
        let entry = Entry { allocation: *allocation, handle, slices: BTreeMap::new(), state: State::Live };
        self.entries.insert(alloc, entry);
        self.by_base.insert(allocation.base, alloc);
        home().insert(alloc, (allocation.base, allocation.size));
        Ok(alloc)
    }

    fn supersede(&mut self, alloc: AllocId) {
        if let Some(entry) = self.entries.get_mut(&alloc) {
            self.by_base.remove(&entry.allocation.base);
            entry.state = State::Superseded;
            home().remove(&alloc);
            self.superseded.push(alloc);
            self.stats.superseded += 1;
        }
    }

    /// Entries that were superseded since this was last asked. Their importers are to be told.
    pub(crate) fn take_superseded(&mut self) -> Vec<AllocId> {
        std::mem::take(&mut self.superseded)
    }

    /// Takes a registration back. The allocation stays exported until it is revoked. Whether it was registered.
    pub fn deregister(&mut self, registration: &Registration) -> bool {
        let Some(entry) = self.entries.get_mut(&registration.alloc) else { return false };
        let range = (registration.offset, registration.len);
        let Some(slice) = entry.slices.get_mut(&range).filter(|slice| slice.version == registration.version)
        else {
            return false;
        };
        slice.uses -= 1;
        if slice.uses == 0 {
            entry.slices.remove(&range);
        }
        true
    }

    /// Whether a range is registered: it was not taken back, nor superseded or revoked.
    pub fn holds(&self, registration: &Registration) -> bool {
        let entry = self.entries.get(&registration.alloc).filter(|entry| entry.state == State::Live);
        entry
            .and_then(|entry| entry.slices.get(&(registration.offset, registration.len)))
            .is_some_and(|slice| slice.version == registration.version)
    }

    /// Allocations that may be had but of which no range is registered, so many at most, the oldest first.
    pub(crate) fn idle(&self, most: usize) -> Vec<AllocId> {
        let idle =
            self.entries.iter().filter(|(_, entry)| entry.state == State::Live && entry.slices.is_empty());
        idle.map(|(&alloc, _)| alloc).take(most).collect()
    }

    /// Which exported allocation a range lies in, and where. No driver call: what was freed without being revoked is found still.
    pub fn find(&self, ptr: DevicePtr, len: u64) -> Option<(AllocId, u64)> {
        let (base, alloc) = self.by_base.range(..=ptr).next_back()?;
        let offset = ptr.0 - base.0;
        let size = self.entries.get(alloc)?.allocation.size;
        (offset.checked_add(len)? <= size).then_some((*alloc, offset))
    }

    /// What an exported allocation is, as it was when it was entered.
    pub fn allocation(&self, alloc: AllocId) -> Option<Allocation> {
        self.entries.get(&alloc).map(|entry| entry.allocation)
    }

    /// Asks the driver whether an allocation still is what it was; if not it is superseded. One or two driver calls.
    pub fn verify<D: Device>(&mut self, device: &mut D, alloc: AllocId) -> Result<(), ExportError> {
        let entry = self.entries.get(&alloc).filter(|entry| entry.state == State::Live);
        let known = entry.ok_or(ExportError::Unknown(alloc))?.allocation;
        match device.allocation(known.base) {
            Ok(now) if now.buffer == known.buffer => Ok(()),
            Ok(_) | Err(DeviceError::NotDeviceMemory) => {
                self.supersede(alloc);
                Err(ExportError::Unknown(alloc))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What a peer needs to open an allocation, if it may.
    pub(crate) fn handle(&self, alloc: AllocId) -> Option<(u64, Arc<Handle>)> {
        let entry = self.entries.get(&alloc).filter(|entry| entry.state == State::Live)?;
        Some((entry.allocation.size, Arc::clone(&entry.handle)))
    }

    /// Stops giving an allocation to anybody. Whether it was given until now.
    pub(crate) fn retire(&mut self, alloc: AllocId) -> Result<bool, ExportError> {
        let entry = self.entries.get_mut(&alloc).ok_or(ExportError::Unknown(alloc))?;
        let live = entry.state == State::Live;
        if live {
            entry.state = State::Revoking;
            home().remove(&alloc);
        }
        Ok(live)
    }

    /// Gives an allocation again that was to be revoked.
    pub(crate) fn resume(&mut self, alloc: AllocId) -> Result<(), ExportError> {
        let entry = self.entries.get_mut(&alloc).filter(|entry| entry.state == State::Revoking);
        let entry = entry.ok_or(ExportError::Unknown(alloc))?;
        entry.state = State::Live;
        home().insert(alloc, (entry.allocation.base, entry.allocation.size));
        Ok(())
    }

    /// Forgets an allocation that nobody has open.
    pub(crate) fn remove(&mut self, alloc: AllocId) {
        if let Some(entry) = self.entries.remove(&alloc) {
            if self.by_base.get(&entry.allocation.base) == Some(&alloc) {
                self.by_base.remove(&entry.allocation.base);
            }
            home().remove(&alloc);
        }
    }

    /// Allocations that are known, those included whose importers have not all closed them.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is exported.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        let mut home = home();
        for alloc in self.entries.keys() {
            home.remove(alloc);
        }
    }
}

fn next_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only the number's being unique and growing matters.
    NEXT.fetch_add(1, Ordering::Relaxed)
}
