//! A GPU driver inside the process, for tests of everything that stands on
//! [`Device`](super::Device): no GPU and no driver is needed.
//!
//! A [`FakeDriver`] is one machine with its devices. Simulated processes of it ([`FakeProcess`])
//! may live in threads of one real process, and see each other's memory through handles only, as
//! real ones do; or the machine has one process, which is the real one
//! ([`FakeDriver::of_this_process`]), and handles are good in other real processes of the same
//! user. What a process uses is a [`FakeDevice`].
//!
//! [`Behaviour`] says which driver is imitated, and how badly it behaves: addresses that come back,
//! handles that differ, a second open that is refused, copies that end late and out of order.
//! Everything random comes from one seed. Time is calls: each call takes a number of steps, no call
//! sleeps, and what is queued moves when somebody calls, or by [`FakeDriver::advance`].
//!
//! The fake is strict where a real driver would corrupt something in silence: memory that is freed
//! while it is open or in use, copies through mappings that are closed or whose memory was freed,
//! ranges that overlap. Freed memory is overwritten. What it found is in
//! [`FakeDriver::violations`]; a good program leaves that empty. An address that it gives
//! ([`DevicePtr`]) is none of the processor's: an access through it faults.
//!
//! A lock makes all of it safe to call from several threads. It allocates freely:
//! do not measure with it.
//!
//! `behaviour` says what can be chosen and what is counted, `memory` holds bytes that processes
//! share, `space` maps them to addresses, `handle` names them, `world` has the state of all,
//! `calls`, `physical` and `queue` are the calls of a process, `stream` carries out what is queued,
//! `device` puts the trait over it.

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

/// One machine with its devices. Clones are handles to the same.
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
    /// A machine whose processes are simulated.
    pub fn new(behaviour: Behaviour, seed: u64) -> Self {
        FakeDriver { state: Arc::new(Mutex::new(State::new(behaviour, seed))) }
    }

    /// A machine as this real process sees it. Its handles open in other real processes of the same
    /// user that called this too: what they have in common are the devices, one after the other,
    /// whatever the seeds.
    pub fn of_this_process(behaviour: Behaviour, seed: u64) -> FakeProcess {
        let driver = Self::new(behaviour, seed);
        let place = driver.state().enter_this_process();
        FakeProcess { driver, place }
    }

    /// A new process, which sees every device, in the machine's order.
    pub fn process(&self) -> FakeProcess {
        let devices = self.state().behaviour.devices;
        self.process_seeing(&(0..devices).collect::<Vec<_>>())
    }

    /// A new process, which sees those devices of the machine alone, numbered as they are listed.
    ///
    /// # Panics
    /// If the machine does not have one of them.
    pub fn process_seeing(&self, devices: &[u32]) -> FakeProcess {
        let place = self.state().enter(devices);
        FakeProcess { driver: self.clone(), place }
    }

    /// Changes how the driver behaves from now on. The number of devices stays.
    pub fn behave(&self, change: impl FnOnce(&mut Behaviour)) {
        let mut state = self.state();
        let devices = state.behaviour.devices;
        change(&mut state.behaviour);
        state.behaviour.devices = devices;
    }

    /// How the driver behaves now.
    pub fn behaviour(&self) -> Behaviour {
        self.state().behaviour
    }

    /// Lets time pass: `steps` steps of everything that is queued.
    pub fn advance(&self, steps: u64) {
        self.state().advance(steps);
    }

    /// Lets time pass until nothing is queued any more.
    pub fn drain(&self) {
        self.state().drain();
    }

    /// Loses a device of the machine:
    /// every call that needs it fails from now on, and what is queued is dropped as it is.
    ///
    /// # Panics
    /// If the machine does not have it.
    pub fn lose(&self, device: u32) {
        self.state().lose(device);
    }

    /// Takes the way between two devices of the machine away, for what is opened from now on.
    pub fn part(&self, a: u32, b: u32) {
        self.state().parted.push((a.min(b), a.max(b)));
    }

    /// What was done that must not be.
    pub fn violations(&self) -> Vec<Violation> {
        self.state().violations.clone()
    }

    /// Steps that have passed.
    pub fn steps(&self) -> u64 {
        self.state().steps
    }

    /// What all processes together did.
    pub fn counts(&self) -> Counts {
        self.state().total()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process of the machine. Clones are handles to the same. Its calls are in `calls`: a driver's
/// own interface, which knows kinds of memory and any number of streams; [`FakeDevice`] is the
/// trait over it.
#[derive(Clone, Debug)]
pub struct FakeProcess {
    driver: FakeDriver,
    place: usize,
}

impl FakeProcess {
    /// The machine that it is on.
    pub fn driver(&self) -> &FakeDriver {
        &self.driver
    }

    /// How many devices it sees.
    pub fn devices(&self) -> u32 {
        self.driver.state().processes[self.place].visible.len() as u32
    }

    /// Which device that is.
    ///
    /// # Errors
    /// [`DeviceError::NoDevice`].
    pub fn uuid(&self, ordinal: u32) -> Result<Uuid, DeviceError> {
        let state = self.driver.state();
        let device = state.machine_device(self.place, ordinal)?;
        Ok(state.devices[device as usize].uuid)
    }

    /// Lets the call of that kind after `skip` more of them fail.
    pub fn fail(&self, call: Call, skip: u64, error: DeviceError) {
        self.driver.state().processes[self.place].faults.push(Fault { call, skip, error });
    }

    /// Ends the process as a signal would. What it exported stays until it is closed, as orphans:
    /// touching them is counted. What it opened is closed, and its queues are dropped as they are.
    pub fn kill(&self) {
        self.driver.state().kill(self.place);
    }

    /// What it did.
    pub fn counts(&self) -> Counts {
        self.driver.state().processes[self.place].counts
    }

    /// What a device that is no GPU (a NIC) writes into memory of this process. With
    /// [`Behaviour::must_flush`] it is not there before the next flush of this process.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`].
    pub fn remote_write(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver.state().remote_write(self.place, to, bytes)
    }

    /// What is in memory of this process, without a call being counted: for tests to look at.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`].
    pub fn peek(&self, from: DevicePtr, len: usize) -> Result<Vec<u8>, DeviceError> {
        self.driver.state().peek(self.place, from, len)
    }

    /// Fills memory of this process, without a call being counted: for tests to begin with.
    ///
    /// # Errors
    /// [`DeviceError::NotDeviceMemory`].
    pub fn poke(&self, to: DevicePtr, bytes: &[u8]) -> Result<(), DeviceError> {
        self.driver.state().poke(self.place, to, bytes)
    }
}
