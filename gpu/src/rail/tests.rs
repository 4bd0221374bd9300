//! Tests of the rail with the fake driver. Simulated processes in one real process are connected by
//! real sockets and segments. Every test checks that [`FakeDriver::violations`] is empty.

mod bounces;
mod direct;
mod endings;
mod hostile;
mod owned;
mod rings;
mod told;

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use fishplate_core::error::PeerError;
use fishplate_core::mem::{Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, RailKey, Remote};
use fishplate_core::sync::host::SpinHost;
use fishplate_shm::{Link, Role, socket_pair};

use super::*;
use crate::fake::{Behaviour, Call, FakeDevice, FakeDriver, FakeProcess, MemoryKind};
use crate::share::record;
use crate::testing::{Random, Seen, soon};

type FakeRail = GpuRail<FakeDevice, SpinHost>;

/// The peer number that each end of a [`Pair`] gives the other end.
const PEER: Peer = Peer(3);

/// Maximum number of polls while a test waits for an event.
const PATIENCE: u32 = 200_000;

fn small() -> GpuConfig {
    GpuConfig {
        ops: 32,
        chunk: 512,
        done_words: 16,
        relay_slots: 4,
        relay_chunk: 4096,
        timeout: Duration::from_millis(500),
        ..GpuConfig::default()
    }
}

fn shm() -> ShmConfig {
    ShmConfig { lane_cells: 64, max_message: 256, ..ShmConfig::default() }
}

#[derive(Clone, Copy, Debug)]
struct Memory {
    at: DevicePtr,
    key: RailKey,
    desc: u64,
}

impl Memory {
    fn local(&self, offset: usize, len: usize) -> Local {
        Local {
            ptr: NonNull::new((self.at.0 + offset as u64) as *mut u8).unwrap(),
            len,
            desc: self.desc,
        }
    }

    fn remote(&self, offset: usize) -> Remote {
        Remote { key: self.key, offset: offset as u64 }
    }
}

fn device_region(at: DevicePtr, len: usize) -> Region {
    let ptr = NonNull::new(at.0 as *mut u8).unwrap();
    // SAFETY: the fake driver keeps the memory valid until its process ends.
    unsafe { Region::new(ptr, len, RegionKind::Device { ordinal: 0 }) }
}

/// Allocates and registers device memory of a rail.
fn memory(rail: &mut FakeRail, len: usize) -> Memory {
    let at = rail.alloc(len as u64).unwrap();
    let (key, desc) = rail.register(&device_region(at, len)).unwrap();
    Memory { at, key, desc }
}

fn process(rail: &FakeRail) -> &FakeProcess {
    rail.device().process()
}

fn peek(rail: &FakeRail, memory: &Memory, offset: usize, len: usize) -> Vec<u8> {
    process(rail).peek(memory.at.at(offset as u64), len).unwrap()
}

fn poke(rail: &FakeRail, memory: &Memory, offset: usize, bytes: &[u8]) {
    process(rail).poke(memory.at.at(offset as u64), bytes).unwrap();
}

/// Creates a rail in a process. Its clock advances 0.1 ms per call.
fn rail(process: &FakeProcess, config: GpuConfig) -> FakeRail {
    GpuRail::new(process.device(0).unwrap(), SpinHost::new(100_000), shm(), config).unwrap()
}

/// Attaches two rails to each other, like two separate processes. Returns the active features of
/// both ends.
fn join(a: &mut FakeRail, b_at_a: Peer, b: &mut FakeRail, a_at_b: Peer) -> [(bool, bool); 2] {
    let (x, y) = socket_pair().unwrap();
    let meet = |profile: GpuProfile, socket, role| {
        let mut link = Link::over(socket, role, profile.profile(), soon()).unwrap();
        record(&mut link.line()).home = false;
        profile.agree(link, soon()).unwrap()
    };
    let profile = b.profile();
    let first = std::thread::spawn(move || meet(profile, y, Role::First));
    let link = meet(a.profile(), x, Role::Second);
    let other = first.join().unwrap();
    let active = [link.active(), other.active()];
    a.attach(b_at_a, link).unwrap();
    b.attach(a_at_b, other).unwrap();
    active
}

/// Two processes, each with a region that the other process has imported.
struct Pair {
    driver: FakeDriver,
    rails: [FakeRail; 2],
    memory: [Memory; 2],
    seen: [Seen; 2],
}

const LEN: usize = 1 << 16;

impl Pair {
    fn new(behaviour: Behaviour, config: GpuConfig, seed: u64) -> Self {
        let driver = FakeDriver::new(behaviour, seed);
        let processes = [driver.process(), driver.process()];
        Self::of(driver, processes, [config.clone(), config])
    }

    /// Creates a pair on two devices that cannot reach each other.
    fn apart(behaviour: Behaviour, config: GpuConfig, seed: u64) -> Self {
        let driver = FakeDriver::new(behaviour, seed);
        driver.part(0, 1);
        let processes = [driver.process_seeing(&[0]), driver.process_seeing(&[1])];
        Self::of(driver, processes, [config.clone(), config])
    }

    fn of(driver: FakeDriver, processes: [FakeProcess; 2], configs: [GpuConfig; 2]) -> Self {
        let [mut a, mut b] = [0, 1].map(|i| rail(&processes[i], configs[i].clone()));
        join(&mut a, PEER, &mut b, PEER);
        let memory = [memory(&mut a, LEN), memory(&mut b, LEN)];
        a.import(PEER, memory[1].key, LEN as u64).unwrap();
        b.import(PEER, memory[0].key, LEN as u64).unwrap();
        Pair { driver, rails: [a, b], memory, seen: [Seen::default(), Seen::default()] }
    }

    fn poll(&mut self) {
        for (rail, seen) in self.rails.iter_mut().zip(&mut self.seen) {
            rail.poll(8, seen);
        }
    }

    fn until(&mut self, what: &str, mut ready: impl FnMut(&Self) -> bool) {
        for _ in 0..PATIENCE {
            if ready(self) {
                return;
            }
            self.poll();
        }
        panic!("{what}: {:?}", self.seen);
    }

    /// Posts a write from the first end's memory to the second end's memory. Polls until there is
    /// room.
    fn write(&mut self, from: usize, to: usize, len: usize, data: Option<u32>, cx: u64) -> Posted {
        let (local, remote) = (self.memory[0].local(from, len), self.memory[1].remote(to));
        for _ in 0..PATIENCE {
            // SAFETY: the memory outlives the pair.
            match unsafe { self.rails[0].post_write(PEER, local, remote, data, cx) } {
                Ok(posted) => return posted,
                Err(PostError::Again) => self.poll(),
                Err(error) => panic!("{error:?}"),
            }
        }
        panic!("no room came");
    }

    fn read(&mut self, into: usize, from: usize, len: usize, cx: u64) -> Posted {
        self.read_by(0, into, from, len, cx)
    }

    fn read_by(&mut self, end: usize, into: usize, from: usize, len: usize, cx: u64) -> Posted {
        let (local, remote) =
            (self.memory[end].local(into, len), self.memory[1 - end].remote(from));
        for _ in 0..PATIENCE {
            // SAFETY: the memory outlives the pair.
            match unsafe { self.rails[end].post_read(PEER, local, remote, cx) } {
                Ok(posted) => return posted,
                Err(PostError::Again) => self.poll(),
                Err(error) => panic!("{error:?}"),
            }
        }
        panic!("no room came");
    }

    fn ended(&self, cx: u64) -> Option<Result<(), CompleteError>> {
        self.seen[0].done.iter().find(|(done, _)| *done == cx).map(|(_, result)| *result)
    }

    /// Checks that the device work of both ends has finished, and that there were no violations.
    fn check(self) {
        let Pair { driver, rails, .. } = self;
        let processes = [0, 1].map(|i| process(&rails[i]).clone());
        drop(rails);
        driver.drain();
        assert_eq!(driver.violations(), [], "violations");
        for process in processes {
            let counts = process.counts();
            assert_eq!((counts.opens, counts.pins), (counts.closes, counts.unpins), "{counts:?}");
        }
    }
}

/// Returns pseudo-random bytes, equal for equal seeds.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    Random(seed | 1 << 40).bytes(len)
}
