//! The state of a simulated machine and of its processes, under the driver's lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::behaviour::{Behaviour, Call, Counts, Violation};
use super::memory::Owner;
use super::space::{Place, Space, What};
use super::stream::Stream;
use crate::{DeviceError, DevicePtr, Uuid};

const UNAVAILABLE: i32 = 46;

const DEINITIALIZED: i32 = 4;

static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Debug)]
pub(super) struct Fault {
    pub call: Call,
    pub skip: u64,
    pub error: DeviceError,
}

#[derive(Debug)]
pub(super) struct Gpu {
    pub uuid: Uuid,
    pub used: u64,
    pub lost: bool,
}

#[derive(Debug)]
pub(super) struct Process {
    pub owner: Owner,
    /// Whether this is the real process, which may open memory of other real processes.
    pub real: bool,
    pub dead: bool,
    /// The machine's devices that the process sees, by ordinal.
    pub visible: Vec<u32>,
    pub space: Space,
    pub next_buffer: u64,
    pub counts: Counts,
    pub faults: Vec<Fault>,
    pub streams: Vec<Stream>,
    pub unflushed: Vec<(Place, Vec<u8>)>,
    pub next_work: u64,
}

impl Process {
    pub fn buffer(&mut self) -> u64 {
        self.next_buffer += 1;
        self.next_buffer
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub behaviour: Behaviour,
    pub devices: Vec<Gpu>,
    pub processes: Vec<Process>,
    /// Indices of devices that cannot reach each other, the lower first.
    pub parted: Vec<(u32, u32)>,
    pub violations: Vec<Violation>,
    pub steps: u64,
    pub pending: u64,
    machine: u64,
    random: u64,
}

impl State {
    pub fn new(behaviour: Behaviour, seed: u64) -> State {
        State {
            behaviour,
            devices: vec![],
            processes: vec![],
            parted: vec![],
            violations: vec![],
            steps: 0,
            pending: 0,
            // Relaxed: the id only needs to be unique.
            machine: NEXT.fetch_add(1, Ordering::Relaxed),
            random: seed | 1 << 63,
        }
        .with_devices()
    }

    fn with_devices(mut self) -> State {
        self.devices = (0..self.behaviour.devices)
            .map(|device| {
                let mut uuid = *b"fakegpu.........";
                uuid[8..12].copy_from_slice(&(self.machine as u32).to_le_bytes());
                uuid[12..].copy_from_slice(&device.to_le_bytes());
                Gpu { uuid, used: 0, lost: false }
            })
            .collect();
        self
    }

    pub fn enter(&mut self, visible: &[u32]) -> usize {
        assert!(
            visible.iter().all(|&device| (device as usize) < self.devices.len()),
            "no such device"
        );
        // Relaxed: the id only needs to be unique. No real process ID is this large.
        let pid = (1 << 32) + NEXT.fetch_add(1, Ordering::Relaxed);
        self.join(Owner { pid, start: 0 }, false, visible.to_vec())
    }

    pub fn enter_this_process(&mut self) -> usize {
        self.machine = 0;
        for (at, gpu) in self.devices.iter_mut().enumerate() {
            gpu.uuid = *b"fakegpu.real....";
            gpu.uuid[12..].copy_from_slice(&(at as u32).to_le_bytes());
        }
        let pid = u64::from(std::process::id());
        let owner = Owner { pid, start: start_time(pid).unwrap_or(0) };
        let visible = (0..self.devices.len() as u32).collect();
        self.join(owner, true, visible)
    }

    fn join(&mut self, owner: Owner, real: bool, visible: Vec<u32>) -> usize {
        let place = self.processes.len();
        self.processes.push(Process {
            owner,
            real,
            dead: false,
            visible,
            space: Space::new(place),
            // The first buffer id differs between processes, so that tests do not rely on equal
            // ids.
            next_buffer: 1000 * place as u64,
            counts: Counts::default(),
            faults: vec![],
            streams: vec![],
            unflushed: vec![],
            next_work: 0,
        });
        place
    }

    /// Unique among all processes that can open the allocation.
    pub fn id(&self) -> u64 {
        // Relaxed: the id only needs to be unique.
        (u64::from(std::process::id()) << 32) + NEXT.fetch_add(1, Ordering::Relaxed)
    }

    pub fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    pub fn total(&self) -> Counts {
        self.processes.iter().fold(Counts::default(), |sum, process| sum.with(&process.counts))
    }

    pub fn machine_device(&self, place: usize, ordinal: u32) -> Result<u32, DeviceError> {
        let visible = &self.processes[place].visible;
        visible.get(ordinal as usize).copied().ok_or(DeviceError::NoDevice(visible.len() as u32))
    }

    pub fn device_of(&self, uuid: &Uuid) -> Option<u32> {
        self.devices.iter().position(|gpu| gpu.uuid == *uuid).map(|at| at as u32)
    }

    pub fn reach(&self, a: u32, b: u32) -> bool {
        !self.parted.contains(&(a.min(b), a.max(b)))
    }

    /// Begins a call: counts it, advances time, and applies an injected error.
    pub fn begin(&mut self, place: usize, ordinal: u32, call: Call) -> Result<u32, DeviceError> {
        self.processes[place].counts.calls.add(call);
        self.advance((self.behaviour.cost)(call));
        self.processes[place].space.recycle = self.behaviour.recycle;
        let device = self.machine_device(place, ordinal)?;
        if self.processes[place].dead {
            return Err(DeviceError::Lost(DEINITIALIZED));
        }
        if self.devices[device as usize].lost {
            return Err(DeviceError::Lost(UNAVAILABLE));
        }
        let faults = &mut self.processes[place].faults;
        let mut due = None;
        for (at, fault) in faults.iter_mut().enumerate().filter(|(_, fault)| fault.call == call) {
            match fault.skip {
                0 => due = due.or(Some(at)),
                _ => fault.skip -= 1,
            }
        }
        match due {
            Some(at) => Err(faults.remove(at).error),
            None => Ok(device),
        }
    }

    pub fn lose(&mut self, device: u32) {
        self.devices[device as usize].lost = true;
        for process in &mut self.processes {
            for stream in &mut process.streams {
                if process.visible[stream.ordinal as usize] == device {
                    self.pending -= stream.drop_queue();
                }
            }
        }
    }

    pub fn kill(&mut self, place: usize) {
        let process = &mut self.processes[place];
        process.dead = true;
        for stream in &mut process.streams {
            self.pending -= stream.drop_queue();
        }
        process.unflushed.clear();
        for (_, range) in process.space.all() {
            match &range.what {
                What::Own { memory, .. } => {
                    memory.orphan();
                    let device = process.visible[range.ordinal as usize];
                    self.devices[device as usize].used -= memory.size();
                }
                What::Opened { memory, times, .. } => {
                    (0..*times).for_each(|_| memory.closed());
                    process.counts.closed_by_death += u64::from(*times);
                }
                What::Pinned { .. } => {}
            }
        }
        process.space = Space::new(place);
        let counts = &mut process.counts;
        (counts.frees, counts.unpins, counts.marks_back) =
            (counts.allocs, counts.pins, counts.marks);
        counts.releases = counts.reserves;
    }

    pub fn remote_write(
        &mut self,
        place: usize,
        to: DevicePtr,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let process = &mut self.processes[place];
        let mut rest = bytes;
        for (at, len) in process.space.places(to, bytes.len() as u64)? {
            let (these, behind) = rest.split_at(len as usize);
            process.unflushed.push((at, these.to_vec()));
            rest = behind;
        }
        if !self.behaviour.must_flush {
            self.flush(place);
        }
        Ok(())
    }

    pub fn flush(&mut self, place: usize) {
        let process = &mut self.processes[place];
        for (at, bytes) in process.unflushed.drain(..) {
            if let Some(range) = process.space.range(at) {
                // SAFETY: the bytes lay inside the range when they were written, and the range has
                // not been replaced.
                unsafe {
                    let to = range.data().add(at.offset as usize);
                    to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
                }
            }
        }
    }

    pub fn peek(&self, place: usize, from: DevicePtr, len: usize) -> Result<Vec<u8>, DeviceError> {
        let space = &self.processes[place].space;
        let mut bytes = vec![0; len];
        let mut at = 0;
        for (place, len) in space.places(from, len as u64)? {
            let range = space.range(place).ok_or(DeviceError::NotDeviceMemory)?;
            let into = &mut bytes[at..at + len as usize];
            // SAFETY: `places` returned this location for `len` bytes of the range, and `into` is
            // as long.
            unsafe {
                let from = range.data().add(place.offset as usize);
                into.as_mut_ptr().copy_from_nonoverlapping(from, into.len());
            }
            at += len as usize;
        }
        Ok(bytes)
    }

    pub fn poke(&self, place: usize, to: DevicePtr, bytes: &[u8]) -> Result<(), DeviceError> {
        let space = &self.processes[place].space;
        let mut at = 0;
        for (place, len) in space.places(to, bytes.len() as u64)? {
            let range = space.range(place).ok_or(DeviceError::NotDeviceMemory)?;
            let these = &bytes[at..at + len as usize];
            // SAFETY: `places` returned this location for `len` bytes of the range, and `these` is
            // as long.
            unsafe {
                let to = range.data().add(place.offset as usize);
                to.copy_from_nonoverlapping(these.as_ptr(), these.len());
            }
            at += len as usize;
        }
        Ok(())
    }

    pub fn memory_of(&self, owner: Owner, id: u64) -> Option<Arc<super::memory::FakeMemory>> {
        let process =
            self.processes.iter().find(|process| process.owner == owner && !process.dead)?;
        process.space.all().find_map(|(_, range)| match &range.what {
            What::Own { memory, .. } if memory.id() == id => Some(Arc::clone(memory)),
            _ => None,
        })
    }
}

/// In clock ticks since boot.
pub(super) fn start_time(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain any character. The start time is field 22, and the field
    // after the name is number 3.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}
