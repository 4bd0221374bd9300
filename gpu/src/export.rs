//! The one way in which device memory of this process is exported: by whole allocations, each once,
//! whatever part of it is registered. Slow path: allocates, and enters the driver;
//! [`Exports::find`] does neither, nor waits.
//!
//! Of virtual memory the physical segments that a range touches are exported together, as one
//! allocation of ours ([`run`](super::run)). A range inside what is exported shares it. A range
//! that goes beyond it has a longer export beside the shorter one: memory that grows at its end
//! keeps what was registered before. A shorter one of which nothing is registered any more is
//! *outgrown*: it is found no more, and its importers are told to close it.
//!
//! An allocation is known by a number of our own, [`AllocId`], which never comes again in this
//! process. Addresses do: an entry that covers an address is believed only if the driver's buffer
//! id is still the one it was entered with. Otherwise the memory was freed and taken again behind
//! our back, and the entry is *superseded*: it is found no more, its versions are forgotten, and
//! its importers are told to close what they have open.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{AllocId, ExportError};
use super::run::Run;
use super::{Allocation, Device, DeviceError, DevicePtr, Handle, Share};

/// Allocations that one process may export at once.
pub const MAX_EXPORTS: usize = 4096;

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

/// What this process exports, through whichever rail, for importers in the process itself.
struct Home {
    /// First byte and size of each allocation.
    places: BTreeMap<AllocId, (DevicePtr, u64)>,
    /// How many of those importers use the memory that begins there.
    users: BTreeMap<DevicePtr, u32>,
}

static HOME: Mutex<Home> = Mutex::new(Home { places: BTreeMap::new(), users: BTreeMap::new() });

fn home() -> MutexGuard<'static, Home> {
    // No panic between lock and unlock leaves the maps half changed.
    HOME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where an allocation of `size` bytes begins that this very process exports. It stays until the
/// importer [leaves](leave_home).
pub(crate) fn enter_home(alloc: AllocId, size: u64) -> Option<DevicePtr> {
    let mut home = home();
    let (base, _) = home.places.get(&alloc).copied().filter(|(_, actual)| *actual == size)?;
    *home.users.entry(base).or_default() += 1;
    Some(base)
}

/// An importer is done with what begins there.
pub(crate) fn leave_home(base: DevicePtr) {
    let mut home = home();
    if let Some(users) = home.users.get_mut(&base) {
        *users -= 1;
        if *users == 0 {
            home.users.remove(&base);
        }
    }
}

/// Whether importers in this process use what begins there.
pub(crate) fn is_used_at_home(base: DevicePtr) -> bool {
    home().users.contains_key(&base)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    Revoking,
    /// Freed behind our back, so that another may have its addresses; or outgrown.
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
    /// Entries that lay inside longer ones, with nothing registered.
    pub outgrown: u64,
}

/// The allocations that this process exports.
#[derive(Debug, Default)]
pub struct Exports {
    entries: BTreeMap<AllocId, Entry>,
    /// Those not superseded, by first byte and size. Where they overlap they are the same memory.
    by_place: BTreeMap<(DevicePtr, u64), AllocId>,
    /// No size among them was ever greater.
    longest: u64,
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

    /// Registers a range, and exports its allocation unless that was done. When it was: one driver
    /// call or two, and of virtual memory for each physical segment of it.
    ///
    /// Ranges may overlap, and be registered again: as often as it was, it is to be taken back.
    pub fn register<D: Device>(
        &mut self,
        device: &mut D,
        ptr: DevicePtr,
        len: u64,
    ) -> Result<Registration, ExportError> {
        let run = Run::of(device, ptr, len)?;
        let alloc = self.entry_of(device, run, ptr, len)?;
        let Some(entry) = self.entries.get_mut(&alloc) else { return Err(ExportError::Unknown(alloc)) };
        let offset = ptr.0 - entry.run.whole().base.0;
        let slice =
            entry.slices.entry((offset, len)).or_insert_with(|| Slice { version: next_version(), uses: 0 });
        slice.uses += 1;
        self.stats.registrations += 1;
        Ok(Registration { alloc, offset, len, version: slice.version })
    }

    /// The live entry that a range is to be registered in, made if there is none: the one that it
    /// is registered in already, else the longest.
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
            // Nothing that exists lies there but what the driver has told, so what differs is gone:
            // its addresses were given again.
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
            // What lies beside the range may be gone.
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

    /// Entries that are where some memory is, but for those that were superseded.
    fn across(&self, run: &Run) -> Vec<AllocId> {
        let whole = run.whole();
        let all = self.near(whole.base.0, whole.size);
        all.filter(|alloc| self.entries.get(alloc).is_some_and(|entry| entry.run.overlaps(run))).collect()
    }

    /// Entries that may be where some bytes are, the last one first.
    fn near(&self, base: u64, len: u64) -> impl Iterator<Item = AllocId> {
        let first = DevicePtr(base.saturating_sub(self.longest));
        let behind = DevicePtr(base.saturating_add(len));
        self.by_place.range((first, 0)..(behind, 0)).rev().map(|(_, &alloc)| alloc)
    }

    fn supersede(&mut self, alloc: AllocId) {
        self.stats.superseded += u64::from(self.drop_live(alloc));
    }

    /// Lets go of an entry that lies inside a longer one, if nothing is registered in it.
    fn outgrow(&mut self, alloc: AllocId) {
        let idle = |entry: &&Entry| entry.state == State::Live && entry.slices.is_empty();
        if self.entries.get(&alloc).filter(idle).is_some() {
            self.stats.outgrown += u64::from(self.drop_live(alloc));
        }
    }

    /// Finds an entry no more. Whether it was there.
    fn drop_live(&mut self, alloc: AllocId) -> bool {
        let Some(entry) = self.entries.get_mut(&alloc) else { return false };
        let whole = entry.run.whole();
        self.by_place.remove(&(whole.base, whole.size));
        entry.state = State::Superseded;
        home().places.remove(&alloc);
        self.superseded.push(alloc);
        true
    }

    /// Entries superseded or outgrown since the last call. Their importers are to be told.
    pub(crate) fn take_superseded(&mut self) -> Vec<AllocId> {
        std::mem::take(&mut self.superseded)
    }

    /// Takes a registration back. The allocation stays exported until it is revoked, or outgrown.
    /// Whether it was registered.
    pub fn deregister(&mut self, registration: &Registration) -> bool {
        let Some(entry) = self.entries.get_mut(&registration.alloc) else { return false };
        let range = (registration.offset, registration.len);
        let Some(slice) = entry.slices.get_mut(&range).filter(|slice| slice.version == registration.version)
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

    /// Whether there is a longer live entry around an entry.
    fn is_inside_another(&self, alloc: AllocId) -> bool {
        let Some(entry) = self.entries.get(&alloc) else { return false };
        let around = |other: &Entry| other.state == State::Live && other.run.contains(&entry.run);
        let all = self.across(&entry.run);
        all.into_iter().any(|other| other != alloc && self.entries.get(&other).is_some_and(around))
    }

    /// Whether a range is registered: it was not taken back, nor superseded or revoked.
    pub fn holds(&self, registration: &Registration) -> bool {
        let entry = self.entries.get(&registration.alloc).filter(|entry| entry.state == State::Live);
        entry
            .and_then(|entry| entry.slices.get(&(registration.offset, registration.len)))
            .is_some_and(|slice| slice.version == registration.version)
    }

    /// Up to this many allocations that may be imported and have no registered range, oldest first.
    pub(crate) fn idle(&self, most: usize) -> Vec<AllocId> {
        let idle =
            self.entries.iter().filter(|(_, entry)| entry.state == State::Live && entry.slices.is_empty());
        idle.map(|(&alloc, _)| alloc).take(most).collect()
    }

    /// Which exported allocation a range lies in, and where. No driver call:
    /// what was freed without being revoked is found still.
    pub fn find(&self, ptr: DevicePtr, len: u64) -> Option<(AllocId, u64)> {
        self.near(ptr.0, 1).find_map(|alloc| {
            let whole = self.entries.get(&alloc)?.run.whole();
            let offset = ptr.0.checked_sub(whole.base.0)?;
            (offset.checked_add(len)? <= whole.size).then_some((alloc, offset))
        })
    }

    /// What an exported allocation is, as it was when it was entered. Of several segments: all of
    /// them, with the buffer id of the first.
    pub fn allocation(&self, alloc: AllocId) -> Option<Allocation> {
        self.entries.get(&alloc).map(|entry| *entry.run.whole())
    }

    /// Asks the driver whether an allocation still is what it was; if not it is superseded. One or
    /// two driver calls for each segment.
    pub fn verify<D: Device>(&mut self, device: &mut D, alloc: AllocId) -> Result<(), ExportError> {
        if !self.is_there(device, alloc)? {
            self.supersede(alloc);
            return Err(ExportError::Unknown(alloc));
        }
        Ok(())
    }

    /// Whether the driver still has all of a live entry.
    fn is_there<D: Device>(&self, device: &D, alloc: AllocId) -> Result<bool, ExportError> {
        let entry = self.entries.get(&alloc).filter(|entry| entry.state == State::Live);
        Ok(entry.ok_or(ExportError::Unknown(alloc))?.run.is_there(device)?)
    }

    /// What a peer needs to open an allocation, if it may.
    pub(crate) fn handle(&self, alloc: AllocId) -> Option<(u64, Arc<Handle>)> {
        let entry = self.entries.get(&alloc).filter(|entry| entry.state == State::Live)?;
        Some((entry.run.whole().size, Arc::clone(&entry.handle)))
    }

    /// Stops giving an allocation to anybody. Whether it was given until now.
    pub(crate) fn retire(&mut self, alloc: AllocId) -> Result<bool, ExportError> {
        let entry = self.entries.get_mut(&alloc).ok_or(ExportError::Unknown(alloc))?;
        let live = entry.state == State::Live;
        if live {
            entry.state = State::Revoking;
            home().places.remove(&alloc);
        }
        Ok(live)
    }

    /// Gives an allocation again that was to be revoked.
    pub(crate) fn resume(&mut self, alloc: AllocId) -> Result<(), ExportError> {
        let entry = self.entries.get_mut(&alloc).filter(|entry| entry.state == State::Revoking);
        let entry = entry.ok_or(ExportError::Unknown(alloc))?;
        entry.state = State::Live;
        let whole = entry.run.whole();
        home().places.insert(alloc, (whole.base, whole.size));
        Ok(())
    }

    /// Forgets an allocation that nobody has open.
    pub(crate) fn remove(&mut self, alloc: AllocId) {
        if let Some(entry) = self.entries.remove(&alloc) {
            let whole = entry.run.whole();
            if self.by_place.get(&(whole.base, whole.size)) == Some(&alloc) {
                self.by_place.remove(&(whole.base, whole.size));
            }
            home().places.remove(&alloc);
        }
    }

    /// Importers in this process find none of it any more.
    pub(crate) fn withdraw(&self) {
        let mut home = home();
        for alloc in self.entries.keys() {
            home.places.remove(alloc);
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
        self.withdraw();
    }
}

fn next_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only the number's being unique and growing matters.
    NEXT.fetch_add(1, Ordering::Relaxed)
}
