//! A simulated GPU driver for tests of code that uses [`Device`](super::Device).
//!
//! A [`FakeDriver`] is one machine with its devices. Its simulated processes ([`FakeProcess`]) all
//! run in one real process. Like real processes, they access each other's memory only through
//! handles. Alternatively, the machine has only this real process
//! ([`FakeDriver::of_this_process`]). Then other real processes of the same user can open its
//! handles. A process uses a [`FakeDevice`].
//!
//! [`Behaviour`] selects the driver to imitate and its quirks: reused addresses, differing handles,
//! a rejected second open, copies that finish late and out of order. All randomness comes from one
//! seed. Time advances in steps: each call takes a number of steps, and no call sleeps. Queued work
//! advances with each call, or by [`FakeDriver::advance`].
//!
//! The fake detects misuse that a real driver does not report, and overwrites freed memory.
//! [`FakeDriver::violations`] lists the misuse, and is empty for a correct program. Device
//! addresses ([`DevicePtr`]) are not processor addresses, so dereferencing one faults.
//!
//! A lock makes all calls thread-safe. The fake allocates freely, so do not measure with it.

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

/// A simulated machine. Clones share it.
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
    /// Creates a machine without processes.
    pub fn new(behaviour: Behaviour, seed: u64) -> Self {
        FakeDriver { state: Arc::new(Mutex::new(State::new(behaviour, seed))) }
    }

    /// Creates a machine for this real process. Other real processes of the same user that call
    /// this can open its handles. Device n is the same device in all of them, whatever their seeds.
    pub fn of_this_process(behaviour: Behaviour, seed: u64) -> FakeProcess {
        let driver = Self::new(behaviour, seed);
        let place = driver.state().enter_this_process();
        FakeProcess { driver, place }
    }

    /// Starts a process that sees all devices, in the machine's order.
    pub fn process(&self) -> FakeProcess {
        let devices = self.state().behaviour.devices;
        self.process_seeing(&(0..devices).collect::<Vec<_>>())
    }

    /// Starts a process that sees only these devices of the machine, in this order.
    ///
    /// # Panics
    /// Panics if the machine lacks one of them.
    pub fn process_seeing(&self, devices: &[u32]) -> FakeProcess {
        let place = self.state().enter(devices);
        FakeProcess { driver: self.clone(), place }
    }

    /// Changes the driver's behaviour. The number of devices cannot change.
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

    /// Advances time by `steps` steps, and executes queued work.
    pub fn advance(&self, steps: u64) {
        self.state().advance(steps);
    }

    /// Advances time until no work is queued.
    pub fn drain(&self) {
        self.state().drain();
    }

    /// Simulates the loss of a device: every later call that needs it fails, and its queued work is
    /// dropped.
    ///
    /// # Panics
    /// Panics if the machine lacks the device.
    pub fn lose(&self, device: u32) {
        self.state().lose(device);
    }

    /// Removes access between two devices. Memory that is already open is not affected.
    pub fn part(&self, a: u32, b: u32) {
        self.state().parted.push((a.min(b), a.max(b)));
    }

    /// Returns the violations found so far.
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

/// A process of a machine. Clones share it. The methods resemble the calls of a driver, with
/// several kinds of memory and any number of streams.
#[derive(Clone, Debug)]
pub struct FakeProcess {
    driver: FakeDriver,
    place: usize,
}

impl FakeProcess {
    /// Returns the machine of the process.
    pub fn driver(&self) -> &FakeDriver {
        &self.driver
    }

    /// Returns the number of devices that the process sees.
    pub fn devices(&self) -> u32 {
        self.driver.state().processes[self.place].visible.len() as u32
    }

    /// Returns the UUID of a device.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`] if the process does not see the device.
    pub fn uuid(&self, ordinal: u32) -> Result<Uuid, DeviceError> {
        let state = self.driver.state();
        let device = state.machine_device(self.place, ordinal)?;
        Ok(state.devices[device as usize].uuid)
    }

    /// Makes one call of this kind fail with `error`, after `skip` further calls of that kind.
    pub fn fail(&self, call: Call, skip: u64, error: DeviceError) {
        self.driver.state().processes[self.place].faults.push(Fault { call, skip, error });
    }

    /// Kills the process, as a signal would. Memory that it exported stays mapped until importers
    /// close it, and later work on it is counted in [`Counts::orphans_touched`]. Memory that the
    /// process opened is closed, and its queued work is dropped.
    pub fn kill(&self) {
        self.driver.state().kill(self.place);
    }

    /// Returns the counters of the process.
    pub fn counts(&self) -> Counts {
        self.driver.state().processes[self.place].counts
    }

    /// Writes to memory as a NIC does. With [`Behaviour::must_flush`] the bytes become visible at
    /// the next flush.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] for an address outside of device memory.
    pub fn remote_write(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver.state().remote_write(self.place, to, bytes)
    }

    /// Reads memory of this process for tests, without counting a call.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] for an address outside of device memory.
    pub fn peek(&self, from: DevicePtr, len: usize) -> Result<Vec<u8>, DeviceError> {
        self.driver.state().peek(self.place, from, len)
    }

    /// Writes memory of this process for tests, without counting a call.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`] for an address outside of device memory.
    pub fn poke(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver.state().poke(self.place, to, bytes)
    }
}
