//! A GPU driver inside the process, for tests of everything over [`Device`](super::Device). It
//! needs no GPU and no driver.
//!
//! A [`FakeDriver`] is one machine with its devices. Its simulated processes ([`FakeProcess`]) are
//! threads of one real process, and see each other's memory only through handles, as real processes
//! do. Alternatively the machine has one process, the real one ([`FakeDriver::of_this_process`]),
//! and its handles open in other real processes of the same user. A process uses a [`FakeDevice`].
//!
//! [`Behaviour`] selects which driver is imitated and which faults it shows: reused addresses,
//! differing handles, a rejected second open, copies that finish late and out of order. All
//! randomness comes from one seed. Time passes by calls: each call takes a number of steps and none
//! sleeps. Queued work advances with each call, or by [`FakeDriver::advance`].
//!
//! The fake detects what a real driver would not: memory freed while it is open or in use, copies
//! through closed mappings or into freed memory, overlapping ranges. Freed memory is overwritten.
//! [`FakeDriver::violations`] lists what it found; a correct program leaves it empty. Its addresses
//! ([`DevicePtr`]) are not processor addresses: dereferencing one faults.
//!
//! A lock makes all calls thread-safe. The fake allocates freely, so do not measure with it.
//!
//! `behaviour` has settings and counters, `memory` the shared bytes, `space` their addresses,
//! `handle` their names, `world` the whole state. `calls`, `physical` and `queue` are the calls of
//! a process, `stream` and `step` execute queued work, and `device` implements the trait.

mod behaviour;
mod calls;
mod device;
mod handle;
mod memory;
mod physical;
mod queue;
mod space;
mod step;
mod stream;
#[cfg(test)]
mod tests;
mod world;

pub use behaviour::{Behaviour, Call, Calls, Counts, MemoryKind, Violation};
pub use device::FakeDevice;
pub use physical::FakePhysical;
pub use stream::StreamId;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{DeviceError, DevicePtr, Uuid};
use world::{Fault, State};

/// One machine with its devices. Clones share it.
#[derive(Clone)]
pub struct FakeDriver {
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for FakeDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeDriver").finish_non_exhaustive()
    }
}

impl FakeDriver {
    /// Creates a machine with simulated processes.
    pub fn new(behaviour: Behaviour, seed: u64) -> Self {
        FakeDriver { state: Arc::new(Mutex::new(State::new(behaviour, seed))) }
    }

    /// Creates a machine for this real process. Its handles open in other real processes of the
    /// same user that called this too. Their devices correspond by position, whatever the seeds.
    pub fn of_this_process(behaviour: Behaviour, seed: u64) -> FakeProcess {
        let driver = Self::new(behaviour, seed);
        let place = driver.state().enter_this_process();
        FakeProcess { driver, place }
    }

    /// Starts a process that sees every device, in the machine's order.
    pub fn process(&self) -> FakeProcess {
        let devices = self.state().behaviour.devices;
        self.process_seeing(&(0..devices).collect::<Vec<_>>())
    }

    /// Starts a process that sees only these devices of the machine, in this order.
    ///
    /// # Panics
    /// If the machine lacks one of them.
    pub fn process_seeing(&self, devices: &[u32]) -> FakeProcess {
        let place = self.state().enter(devices);
        FakeProcess { driver: self.clone(), place }
    }

    /// Changes the driver's behaviour. The number of devices stays.
    pub fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        let mut state = self.state();
        let devices = state.behaviour.devices;
        change(&mut state.behaviour);
        state.behaviour.devices = devices;
    }

    /// Returns the driver's behaviour.
    pub fn behaviour(&self) -> Behaviour {
        self.state().behaviour
    }

    /// Advances time by `steps` steps of all queued work.
    pub fn advance(&self, steps: u64) {
        self.state().advance(steps);
    }

    /// Advances time until no work is queued.
    pub fn drain(&self) {
        self.state().drain();
    }

    /// Loses a device: every later call that needs it fails, and its queued work is dropped.
    ///
    /// # Panics
    /// If the machine lacks it.
    pub fn lose(&self, device: u32) {
        self.state().lose(device);
    }

    /// Makes two devices unreachable for each other, for memory that is opened from now on.
    pub fn part(&self, a: u32, b: u32) {
        self.state().parted.push((a.min(b), a.max(b)));
    }

    /// Returns the violations so far.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations.clone()
    }

    /// Returns the number of steps that have passed.
    pub fn steps(&self) -> u64 {
        self.state().steps
    }

    /// Returns the counters of all processes together.
    pub fn counts(&self) -> Counts {
        self.state().total()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process of the machine. Clones share it. Its calls, in `calls`, resemble a driver's interface,
/// with kinds of memory and any number of streams. [`FakeDevice`] implements the trait over it.
#[derive(Clone, Debug)]
pub struct FakeProcess {
    driver: FakeDriver,
    place: usize,
}

impl FakeProcess {
    /// Returns its machine.
    pub fn driver(&self) -> &FakeDriver {
        &self.driver
    }

    /// Returns the number of devices that it sees.
    pub fn devices(&self) -> u32 {
        self.driver.state().processes[self.place].visible.len() as u32
    }

    /// Returns the identity of a device.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`].
    pub fn uuid(&self, ordinal: u32) -> Result<Uuid, DeviceError> {
        let state = self.driver.state();
        let device = state.machine_device(self.place, ordinal)?;
        Ok(state.devices[device as usize].uuid)
    }

    /// Makes a call of that kind fail, after `skip` more of them.
    pub fn fail(&self, call: Call, skip: u64, error: DeviceError) {
        self.driver.state().processes[self.place].faults.push(Fault { call, skip, error });
    }

    /// Kills the process, as a signal would. Memory that it exported stays until importers close
    /// it; using it is counted as touching orphans. Memory that it opened is closed, and its queued
    /// work is dropped.
    pub fn kill(&self) {
        self.driver.state().kill(self.place);
    }

    /// Returns its counters.
    pub fn counts(&self) -> Counts {
        self.driver.state().processes[self.place].counts
    }

    /// Writes as a NIC would. With [`Behaviour::must_flush`] the bytes become visible at the next
    /// flush.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`].
    pub fn remote_write(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver.state().remote_write(self.place, to, bytes)
    }

    /// Reads memory of this process for tests, without counting a call.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`].
    pub fn peek(&self, from: DevicePtr, len: usize) -> Result<Vec<u8>, DeviceError> {
        self.driver.state().peek(self.place, from, len)
    }

    /// Fills memory of this process for tests, without counting a call.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`].
    pub fn poke(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver.state().poke(self.place, to, bytes)
    }
}
