//! Exports device memory of this process. Each allocation is exported once, as a whole, even if
//! only parts of it are registered. All methods but [`Exports::find`] are slow paths: they allocate
//! and call the driver.
//!
//! In virtual memory, the physical segments that a range touches are exported together as one
//! allocation ([`run`](super::run)). A range inside an exported run shares that export. A range
//! that extends beyond the run gets a longer export in addition to the shorter one. So memory that
//! grows at its end keeps its registrations. A shorter export without registrations is *outgrown*:
//! lookups no longer find it, and importers are asked to close it.
//!
//! An [`AllocId`] identifies an allocation and is never reused in this process. Addresses are
//! reused, so an entry is valid only while the driver's buffer id at its address is unchanged.
//! Otherwise the memory was freed without a revocation, and the entry is *superseded*. Lookups no
//! longer find it, its versions are removed, and importers are asked to close it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{AllocId, ExportError};
use super::run::Run;
use super::{Allocation, Device, DeviceError, DevicePtr, Handle, Share};

/// Maximum number of allocations that one process exports.
pub const MAX_EXPORTS: usize = 4096;

/// A registered range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The allocation that contains the range.
    pub alloc: AllocId,
    /// Offset in the allocation, in bytes.
    pub offset: u64,
    /// Size in bytes.
    pub len: u64,
    /// The version of the registration. Increases with each new range, and is constant while the
    /// range stays registered.
    pub version: u64,
}

/// The exports of all rails of this process. Importers in the same process look them up in this
/// table.
struct Home {
    places: BTreeMap<AllocId, (DevicePtr, u64)>,
    users: BTreeMap<DevicePtr, u32>,
}

static HOME: Mutex<Home> = Mutex::new(Home { places: BTreeMap::new(), users: BTreeMap::new() });

fn home() -> MutexGuard<'static, Home> {
    // Ignores poisoning, because a panic under this lock does not leave the maps inconsistent.
    HOME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the start of an allocation of `size` bytes that this process exports, and counts an
/// importer. The address stays valid until the importer calls [`leave_home`].
pub(crate) fn enter_home(alloc: AllocId, size: u64) -> Option<DevicePtr> {
    let mut home = home();
    let (base, _) = home.places.get(&alloc).copied().filter(|(_, actual)| *actual == size)?;
    *home.users.entry(base).or_default() += 1;
    Some(base)
}

pub(crate) fn leave_home(base: DevicePtr) {
    let mut home = home();
    if let Some(users) = home.users.get_mut(&base) {
        *users -= 1;
        if *users == 0 {
            home.users.remove(&base);
        }
    }
}

pub(crate) fn is_used_at_home(base: DevicePtr) -> bool {
    home().users.contains_key(&base)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    Revoking,
    Superseded,
}

#[derive(Debug)]
struct Slice {
    version: u64,
    uses: u32,
}

#[derive(Debug)]
struct Entry {
    run: Run,
    handle: Arc<Handle>,
    slices: BTreeMap<(u64, u64), Slice>,
    state: State,
}

/// Counters of exports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportStats {
    /// Number of handles that the driver made.
    pub exports: u64,
    /// Number of successful calls of [`Exports::register`].
    pub registrations: u64,
    /// Number of superseded entries. Their memory had been freed and reused.
    pub superseded: u64,
    /// Number of outgrown entries, which lay inside longer entries and had no registrations.
    pub outgrown: u64,
}

/// The allocations that this process exports.
#[derive(Debug, Default)]
pub struct Exports {
    entries: BTreeMap<AllocId, Entry>,
    /// Live entries by start and size. Entries that overlap are the same memory.
    by_place: BTreeMap<(DevicePtr, u64), AllocId>,
    /// Upper bound of the sizes of live entries.
    longest: u64,
    superseded: Vec<AllocId>,
    stats: ExportStats,
}

impl Exports {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the counters.
    pub fn stats(&self) -> ExportStats {
        self.stats
    }

    /// Registers a range, and exports its allocation if needed. If the allocation is exported
    /// already, this makes one or two driver calls per physical segment.
    ///
    /// Ranges may overlap and be registered repeatedly. Each registration needs a deregistration.
    pub fn register<D: Device>(
        &mut self,
        device: &mut D,
        ptr: DevicePtr,
        len: u64,
    ) -> Result<Registration, ExportError> {
        let run = Run::of(device, ptr, len)?;
        let alloc = self.entry_of(device, run, ptr, len)?;
        let Some(entry) = self.entries.get_mut(&alloc) else {
            return Err(ExportError::Unknown(alloc));
        };
        let offset = ptr.0 - entry.run.whole().base.0;
        let slice = entry
            .slices
            .entry((offset, len))
            .or_insert_with(|| Slice { version: next_version(), uses: 0 });
        slice.uses += 1;
        self.stats.registrations += 1;
        Ok(Registration { alloc, offset, len, version: slice.version })
    }

    /// Returns the live entry for a range: the entry that holds the same registration, else the
    /// longest entry around the range, else a new entry.
    fn entry_of<D: Device>(
        &mut self,
        device: &mut D,
        run: Run,
        ptr: DevicePtr,
        len: u64,
    ) -> Result<AllocId, ExportError> {
        let (mut around, mut revoking, mut inside) = (Vec::new(), None, Vec::new());
        for alloc in self.across(&run) {
            let Some(entry) = self.entries.get(&alloc) else { continue };
            // The driver reports only live memory. If an entry disagrees with the driver, the
            // entry's memory was freed and its addresses were reused.
            if !entry.run.agrees(&run) {
                self.supersede(alloc);
            } else if entry.state != State::Live {
                revoking = revoking.or(entry.run.contains(&run).then_some(alloc));
            } else if entry.run.contains(&run) {
                let whole = entry.run.whole();
                let rank = (entry.slices.contains_key(&(ptr.0 - whole.base.0, len)), whole.size);
                around.push((rank, alloc));
            } else if run.contains(&entry.run) {
                inside.push(alloc);
            }
        }
        around.sort_unstable();
        while let Some((_, alloc)) = around.pop() {
            let known = self.entries.get(&alloc).map(|entry| &entry.run);
            // Another part of the allocation may have been freed. So check that all segments
            // still exist.
            if known.is_some_and(|known| *known == run) || self.is_there(device, alloc)? {
                return Ok(alloc);
            }
            self.supersede(alloc);
        }
        if let Some(alloc) = revoking {
            return Err(ExportError::Revoking(alloc));
        }
        if self.entries.len() >= MAX_EXPORTS {
            return Err(ExportError::Full(MAX_EXPORTS));
        }
        let whole = *run.whole();
        if let Share::Never(why) = whole.share {
            return Err(DeviceError::NotExportable(why).into());
        }
        let handle = Arc::new(run.export(device)?);
        self.stats.exports += 1;
        let alloc = AllocId::next();
        let entry = Entry { run, handle, slices: BTreeMap::new(), state: State::Live };
        self.entries.insert(alloc, entry);
        self.by_place.insert((whole.base, whole.size), alloc);
        self.longest = self.longest.max(whole.size);
        home().places.insert(alloc, (whole.base, whole.size));
        for shorter in inside {
            self.outgrow(shorter);
        }
        Ok(alloc)
    }

    fn across(&self, run: &Run) -> Vec<AllocId> {
        let whole = run.whole();
        let all = self.near(whole.base.0, whole.size);
        all.filter(|alloc| self.entries.get(alloc).is_some_and(|entry| entry.run.overlaps(run)))
            .collect()
    }

    /// Returns the entries that may overlap a range, in descending order of address.
    fn near(&self, base: u64, len: u64) -> impl Iterator<Item = AllocId> {
        let first = DevicePtr(base.saturating_sub(self.longest));
        let behind = DevicePtr(base.saturating_add(len));
        self.by_place.range((first, 0)..(behind, 0)).rev().map(|(_, &alloc)| alloc)
    }

    fn supersede(&mut self, alloc: AllocId) {
        self.stats.superseded += u64::from(self.drop_live(alloc));
    }

    fn outgrow(&mut self, alloc: AllocId) {
        let idle = |entry: &&Entry| entry.state == State::Live && entry.slices.is_empty();
        if self.entries.get(&alloc).filter(idle).is_some() {
            self.stats.outgrown += u64::from(self.drop_live(alloc));
        }
    }

    fn drop_live(&mut self, alloc: AllocId) -> bool {
        let Some(entry) = self.entries.get_mut(&alloc) else { return false };
        let whole = entry.run.whole();
        self.by_place.remove(&(whole.base, whole.size));
        entry.state = State::Superseded;
        home().places.remove(&alloc);
        self.superseded.push(alloc);
        true
    }

    /// Returns the entries superseded or outgrown since the last call. The caller must revoke them.
    pub(crate) fn take_superseded(&mut self) -> Vec<AllocId> {
        std::mem::take(&mut self.superseded)
    }

    /// Deregisters a range. The allocation stays exported until it is revoked or outgrown. Returns
    /// whether the range was registered.
    pub fn deregister(&mut self, registration: &Registration) -> bool {
        let Some(entry) = self.entries.get_mut(&registration.alloc) else { return false };
        let range = (registration.offset, registration.len);
        let Some(slice) =
            entry.slices.get_mut(&range).filter(|slice| slice.version == registration.version)
        else {
            return false;
        };
        slice.uses -= 1;
        if slice.uses > 0 {
            return true;
        }
        entry.slices.remove(&range);
        if entry.slices.is_empty() && self.is_inside_another(registration.alloc) {
            self.outgrow(registration.alloc);
        }
        true
    }

    fn is_inside_another(&self, alloc: AllocId) -> bool {
        let Some(entry) = self.entries.get(&alloc) else { return false };
        let around = |other: &Entry| other.state == State::Live && other.run.contains(&entry.run);
        let all = self.across(&entry.run);
        all.into_iter().any(|other| other != alloc && self.entries.get(&other).is_some_and(around))
    }

    /// Returns whether a range is registered, is not superseded, and is not being revoked.
    pub fn holds(&self, registration: &Registration) -> bool {
        let entry =
            self.entries.get(&registration.alloc).filter(|entry| entry.state == State::Live);
        entry
            .and_then(|entry| entry.slices.get(&(registration.offset, registration.len)))
            .is_some_and(|slice| slice.version == registration.version)
    }

    pub(crate) fn idle(&self, most: usize) -> Vec<AllocId> {
        let idle = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.state == State::Live && entry.slices.is_empty());
        idle.map(|(&alloc, _)| alloc).take(most).collect()
    }

    /// Returns the exported allocation that contains a range, and the offset of the range. Makes no
    /// driver call, so memory that was freed without a revocation is still found.
    pub fn find(&self, ptr: DevicePtr, len: u64) -> Option<(AllocId, u64)> {
        self.near(ptr.0, 1).find_map(|alloc| {
            let whole = self.entries.get(&alloc)?.run.whole();
            let offset = ptr.0.checked_sub(whole.base.0)?;
            (offset.checked_add(len)? <= whole.size).then_some((alloc, offset))
        })
    }

    /// Returns an exported allocation as it was at export. For several segments it describes the
    /// whole run, with the buffer id of the first segment.
    pub fn allocation(&self, alloc: AllocId) -> Option<Allocation> {
        self.entries.get(&alloc).map(|entry| *entry.run.whole())
    }

    /// Checks with the driver that an allocation is unchanged, and supersedes it if not. Makes one
    /// or two driver calls per segment.
    pub fn verify<D: Device>(&mut self, device: &mut D, alloc: AllocId) -> Result<(), ExportError> {
        if !self.is_there(device, alloc)? {
            self.supersede(alloc);
            return Err(ExportError::Unknown(alloc));
        }
        Ok(())
    }

    fn is_there<D: Device>(&self, device: &D, alloc: AllocId) -> Result<bool, ExportError> {
        let entry = self.entries.get(&alloc).filter(|entry| entry.state == State::Live);
        Ok(entry.ok_or(ExportError::Unknown(alloc))?.run.is_there(device)?)
    }

    pub(crate) fn handle(&self, alloc: AllocId) -> Option<(u64, Arc<Handle>)> {
        let entry = self.entries.get(&alloc).filter(|entry| entry.state == State::Live)?;
        Some((entry.run.whole().size, Arc::clone(&entry.handle)))
    }

    /// Returns whether the entry was live.
    pub(crate) fn retire(&mut self, alloc: AllocId) -> Result<bool, ExportError> {
        let entry = self.entries.get_mut(&alloc).ok_or(ExportError::Unknown(alloc))?;
        let live = entry.state == State::Live;
        if live {
            entry.state = State::Revoking;
            home().places.remove(&alloc);
        }
        Ok(live)
    }

    pub(crate) fn resume(&mut self, alloc: AllocId) -> Result<(), ExportError> {
        let entry = self.entries.get_mut(&alloc).filter(|entry| entry.state == State::Revoking);
        let entry = entry.ok_or(ExportError::Unknown(alloc))?;
        entry.state = State::Live;
        let whole = entry.run.whole();
        home().places.insert(alloc, (whole.base, whole.size));
        Ok(())
    }

    pub(crate) fn remove(&mut self, alloc: AllocId) {
        if let Some(entry) = self.entries.remove(&alloc) {
            let whole = entry.run.whole();
            if self.by_place.get(&(whole.base, whole.size)) == Some(&alloc) {
                self.by_place.remove(&(whole.base, whole.size));
            }
            home().places.remove(&alloc);
        }
    }

    /// Returns all allocations, including allocations that importers have not closed yet.
    pub(crate) fn all(&self) -> Vec<AllocId> {
        self.entries.keys().copied().collect()
    }

    pub(crate) fn withdraw(&self) {
        let mut home = home();
        for alloc in self.entries.keys() {
            home.places.remove(alloc);
        }
    }

    /// Returns the number of allocations. Counts an allocation until all importers have closed it.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether no allocation is exported.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        self.withdraw();
    }
}

fn next_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: the versions only need to be unique and increasing.
    NEXT.fetch_add(1, Ordering::Relaxed)
}
