//! A libfabric provider inside the process, for tests: the tables behind the `fid`s, implemented
//! here, reached through the very calls that reach the real ones. No libfabric is needed, no
//! network and no hardware.
//!
//! A [`Fake`] is one network of endpoints. Its [`Persona`] says which provider it pretends to be,
//! and how it behaves: which modes it demands, what it orders, how often it refuses with
//! `-FI_EAGAIN`, whether completions come late, in any order and a few at a time. Everything random
//! comes from one seed. Time is calls: an operation moves when somebody reads a completion queue,
//! the right one if the persona has manual progress.
//!
//! It is strict where a real provider would corrupt something in silence: a context that is used
//! twice or written while the provider owns it, a buffer outside of its registration, a missing
//! descriptor, a queue that overruns, an object closed under what uses it. What it found is in
//! [`Fake::violations`]; a good program leaves that empty.
//!
//! A lock makes all of it safe to call from several threads. It allocates freely:
//! do not measure with it.
//!
//! `persona` describes, `info` answers `fi_getinfo`, `object` has the tables of everything that is
//! opened and closed, `post` takes operations, `queue` gives completions, `world` is the network
//! between.

mod info;
mod object;
mod persona;
mod post;
mod queue;
#[cfg(test)]
mod tests;
mod world;

pub use persona::{Dead, Persona};

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fishplate_sys::fabric::Library;

use world::{Fault, State, World};

/// Networks that can exist at once in a process.
pub const FAKES_MAX: usize = 64;

/// The networks that `fi_getinfo` finds: one entry point per place.
static WORLDS: [Mutex<Option<Arc<World>>>; FAKES_MAX] = [const { Mutex::new(None) }; FAKES_MAX];

/// How the NICs of a network reach memory of devices. Addresses are told apart by it alone.
pub trait Bus: fmt::Debug + Send + Sync {
    /// The device, by its owner's number for it, in whose memory these bytes lie.
    fn device_of(&self, at: u64, len: usize) -> Option<u32>;

    /// Writes as a NIC does: whoever must flush does not see it before.
    fn write(&self, at: u64, bytes: &[u8]);

    /// Reads as a NIC does.
    fn read(&self, at: u64, into: &mut [u8]);
}

/// A network of simulated endpoints. Those opened in it outlive it;
/// nothing new can be opened after.
#[derive(Debug)]
pub struct Fake {
    place: usize,
    world: Arc<World>,
}

impl Fake {
    /// A network of its own.
    ///
    /// # Panics
    /// If there are [`FAKES_MAX`] already.
    pub fn new(persona: Persona, seed: u64) -> Fake {
        for (place, slot) in WORLDS.iter().enumerate() {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            if slot.is_none() {
                let world = Arc::new(World::new(persona, seed));
                *slot = Some(Arc::clone(&world));
                return Fake { place, world };
            }
        }
        panic!("{FAKES_MAX} fake networks at once, and one more");
    }

    /// What to open fabrics with. It answers as long as this network is there.
    pub fn library(&self) -> Library {
        // SAFETY: the functions do what `fi_getinfo(3)` and others promise;
        // every table begins with its size.
        unsafe { Library::from_entries(info::entries(self.place)) }
    }

    /// Lets the operation after `skip` more end with an error: libfabric's code, the provider's,
    /// and what the provider has to say.
    pub fn fail(&self, skip: u32, code: i32, provider: i32, data: &[u8]) {
        self.state().faults.push(Fault { skip, code, provider, data: data.to_vec() });
    }

    /// Lets the provider refuse to close registrations from now on, or no longer.
    pub fn keep_registrations(&self, keep: bool) {
        self.state().keeps_registrations = keep;
    }

    /// Joins the NICs to devices, where the persona has `FI_HMEM`.
    pub fn join_devices(&self, bus: Arc<dyn Bus>) {
        self.state().bus = Some(bus);
    }

    /// Registrations open that are memory of devices, and how many of them were made by a
    /// descriptor.
    pub fn device_registrations(&self) -> (usize, usize) {
        let state = self.state();
        let of_devices = state.mrs.iter().filter(|mr| mr.device);
        (of_devices.clone().count(), of_devices.filter(|mr| mr.by_descriptor).count())
    }

    /// Ends an endpoint as if its process had died, by what `fi_getname` gave, or anything that
    /// ends with that. Its persona says what others see of that.
    pub fn kill(&self, address: &[u8]) {
        self.state().kill(address);
    }

    /// Pulls the cable of an interface: nothing gets in or out any more, and nobody is told.
    pub fn cut(&self, interface: &str) {
        self.state().cut.push(interface.to_owned());
    }

    /// Pulls the cable of an interface where that breaks connections: every operation on it ends
    /// with `FI_ECONNRESET`, those under way and those to come, or in silence where it was
    /// injected. Of the writes and messages some land nevertheless, within `late` reads of a queue,
    /// unless the endpoint that they go to is closed by then.
    pub fn pull(&self, interface: &str, late: u32) {
        self.state().pull(interface, late);
    }

    /// Puts the cable of an interface back.
    pub fn plug(&self, interface: &str) {
        self.state().pulled.retain(|(name, _)| name != interface);
    }

    /// What was done that must not be, in words.
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// Objects that are open: fabrics, domains, endpoints, queues, address vectors, registrations.
    pub fn open_objects(&self) -> usize {
        self.state().open
    }

    /// Operations accepted on an interface.
    pub fn posted_on(&self, interface: &str) -> u64 {
        self.state().by_interface.get(interface).copied().unwrap_or(0)
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.state().counts
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.world.state()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        *WORLDS[self.place].lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// What a network counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations accepted.
    pub posted: u64,
    /// Posts answered with `-FI_EAGAIN`.
    pub refused: u64,
    /// Operations that overtook an earlier one of the same endpoint to the same target.
    pub overtaken: u64,
    /// Completions given while older ones of the queue's endpoint were outstanding.
    pub early: u64,
    /// Completions of all kinds.
    pub completed: u64,
    /// Reads of completion queues.
    pub reads: u64,
    /// Posts with `FI_MORE`.
    pub held_back: u64,
    /// Posts with `FI_MORE` whose endpoint was then left alone until somebody read its queue.
    pub left_open: u64,
    /// Writes and messages that a pulled cable has left in the network.
    pub strays: u64,
    /// How many of them have landed.
    pub landed_late: u64,
}
