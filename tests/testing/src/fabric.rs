//! A fake libfabric provider inside the process, for tests. The fake implements the function tables
//! of the `fid`s, and is called through the same wrappers as real providers. It needs no libfabric,
//! network or hardware.
//!
//! A [`Fake`] is one network of endpoints. Its [`Persona`] selects the imitated provider and its
//! behaviour: required modes, ordering, the rate of `-FI_EAGAIN`, and completions that come late,
//! reordered or a few at a time. All randomness comes from one seed.
//!
//! The fake detects errors that a real provider might not detect: a context that is used twice or
//! written while the provider owns it, a buffer outside its registration, a missing descriptor, an
//! overrun queue, an object closed while in use. [`Fake::violations`] lists these errors. A correct
//! program causes none.
//!
//! A lock makes all calls thread-safe. The fake allocates in many calls, so measurements over it
//! mean nothing.
//!
//! `persona` describes providers, `info` implements `fi_getinfo`, `object` the objects that
//! programs open and close, `post` operations, `queue` completions, and `world` the network.

mod info;
mod object;
mod persona;
mod post;
mod queue;
#[cfg(test)]
mod tests;
mod world;

pub use persona::{Dead, Persona};

use std::ffi::c_int;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fishplate_sys::fabric::Library;
use fishplate_sys::fabric::raw::FI_HMEM_CUDA;

use world::{Fault, State, World};

/// Maximum number of networks in a process.
pub const FAKES_MAX: usize = 64;

/// Each network has its own `fi_getinfo`.
static WORLDS: [Mutex<Option<Arc<World>>>; FAKES_MAX] = [const { Mutex::new(None) }; FAKES_MAX];

/// The path between a network's NICs and device memory. Also distinguishes device memory from host
/// memory.
pub trait Bus: fmt::Debug + Send + Sync {
    /// Returns the devices' interface, a value of `fi_mr_attr::iface`: CUDA by default.
    fn interface(&self) -> c_int {
        FI_HMEM_CUDA
    }

    /// Returns the number of the device that contains this address range, or `None` for host
    /// memory.
    fn device_of(&self, at: u64, len: usize) -> Option<u32>;

    /// Writes to device memory as a NIC does. The device's owner may see the data only after a
    /// flush.
    fn write(&self, at: u64, bytes: &[u8]);

    /// Reads device memory as a NIC does.
    fn read(&self, at: u64, into: &mut [u8]);
}

/// A network of simulated endpoints. After the network is dropped, open endpoints continue to work,
/// but no object can be opened.
#[derive(Debug)]
pub struct Fake {
    place: usize,
    world: Arc<World>,
}

impl Fake {
    /// Creates a network.
    ///
    /// # Panics
    /// If [`FAKES_MAX`] networks exist already.
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

    /// Returns a library to open fabrics with. After this network is dropped, the library can open
    /// no fabric.
    pub fn library(&self) -> Library {
        // SAFETY: the functions behave as libfabric's manual pages require, and every table begins
        // with its size.
        unsafe { Library::from_entries(info::entries(self.place)) }
    }

    /// Makes one operation fail after `skip` other operations. `code` is libfabric's error code,
    /// `provider` the provider's, and `data` the error data.
    pub fn fail(&self, skip: u32, code: i32, provider: i32, data: &[u8]) {
        self.state().faults.push(Fault { skip, code, provider, data: data.to_vec() });
    }

    /// Sets whether the provider refuses to close registrations.
    pub fn keep_registrations(&self, keep: bool) {
        self.state().keeps_registrations = keep;
    }

    /// Sets whether the provider refuses to register memory.
    pub fn refuse_registrations(&self, refuse: bool) {
        self.state().refuses_registrations = refuse;
    }

    /// Connects the NICs to device memory through `bus`. Requires a persona with `FI_HMEM`.
    pub fn join_devices(&self, bus: Arc<dyn Bus>) {
        self.state().bus = Some(bus);
    }

    /// Returns the number of open registrations of device memory, and how many of them use a dmabuf
    /// descriptor.
    pub fn device_registrations(&self) -> (usize, usize) {
        let state = self.state();
        let of_devices = state.mrs.iter().filter(|mr| mr.device);
        (of_devices.clone().count(), of_devices.filter(|mr| mr.by_descriptor).count())
    }

    /// Kills an endpoint, as if its process had died. `address` ends with the endpoint's
    /// `fi_getname` address. [`Persona::dead`] determines what other endpoints see.
    pub fn kill(&self, address: &[u8]) {
        self.state().kill(address);
    }

    /// Cuts the cable of an interface. Operations on it make no more progress, and no error is
    /// reported.
    pub fn cut(&self, interface: &str) {
        self.state().cut.push(interface.to_owned());
    }

    /// Pulls the cable of an interface, and so breaks its connections. Every operation on the
    /// interface, in flight or later, fails with `FI_ECONNRESET`, or silently if it was injected.
    /// Some writes and messages in flight still land, within `late` reads of a completion queue,
    /// unless their target endpoint closes first.
    pub fn pull(&self, interface: &str, late: u32) {
        self.state().pull(interface, late);
    }

    /// Plugs the cable of an interface in again.
    pub fn plug(&self, interface: &str) {
        self.state().pulled.retain(|(name, _)| name != interface);
    }

    /// Removes or restores the address of an interface. Without an address no new endpoint can be
    /// opened on the interface. Open endpoints stay open.
    pub fn set_address(&self, interface: &str, has: bool) {
        let bare = &mut self.state().bare;
        bare.retain(|name| name != interface);
        if !has {
            bare.push(interface.to_owned());
        }
    }

    /// Describes the violations of libfabric's rules so far.
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// Returns the number of open objects: fabrics, domains, endpoints, queues, address vectors,
    /// registrations.
    pub fn open_objects(&self) -> usize {
        self.state().open
    }

    /// Returns the number of operations accepted on an interface.
    pub fn posted_on(&self, interface: &str) -> u64 {
        self.state().by_interface.get(interface).copied().unwrap_or(0)
    }

    /// Returns the counters.
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

/// Counters of a network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations accepted.
    pub posted: u64,
    /// Posts answered with `-FI_EAGAIN`.
    pub refused: u64,
    /// Operations that overtook an earlier operation from the same endpoint to the same target.
    pub overtaken: u64,
    /// Completions reported while older operations of the queue's endpoint were outstanding.
    pub early: u64,
    /// Completions of all kinds.
    pub completed: u64,
    /// Reads of completion queues.
    pub reads: u64,
    /// Posts with `FI_MORE`.
    pub held_back: u64,
    /// Posts with `FI_MORE` without another post before the next read of the queue.
    pub left_open: u64,
    /// Writes and messages that were still in the network after their origin saw the error of a
    /// pulled cable.
    pub strays: u64,
    /// Number of [`strays`](Self::strays) that have landed.
    pub landed_late: u64,
    /// Domains damaged by [`Persona::frees_reads_twice`].
    pub damaged: u64,
}
