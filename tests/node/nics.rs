//! Tests device memory over libfabric, between nodes without shared memory. By default host memory
//! replaces device memory, and any provider works. `FISHPLATE_TEST_GPU` selects a GPU. Then the
//! provider needs `FI_HMEM`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::op::Outcome;
use fishplate::node::{Error, Memory, Remote};
use fishplate::{Cmp, Issued, Notice, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::gpu::{LEN, device, pattern};
use super::{Builder, SOON, Side, Way, fake, two, ways};

/// Lengths of data: some that a provider injects, some that are striped over all rails.
const SIZES: [usize; 6] = [1, 8, 1000, 4097, 65_536, LEN];

/// Creates a fake network with NICs that access device memory.
fn network(seed: u64) -> Fake {
    let provider = Fake::new(Persona::cxi().with_devices(), seed);
    #[cfg(all(feature = "cuda", feature = "hip"))]
    if std::env::var_os("FISHPLATE_TEST_GPU").is_some() {
        provider.join_devices(std::sync::Arc::new(gpus::Reached::new()));
    }
    provider
}

/// Runs a program over rails of a fake network. Without a GPU, also runs it over libfabric's tcp.
fn over_nics(change: impl Fn(Builder) -> Builder + Sync, program: impl Fn(Side) + Sync) {
    for (seed, rails) in [(1, 1), (2, 4)] {
        println!("{rails} simulated rails, seed {seed}");
        let provider = network(seed);
        let interfaces = &["cxi0", "cxi1", "cxi2", "cxi3"][..rails];
        two(Way::SharedMemory, |_| change(fake(&provider, interfaces)), &program);
        assert_eq!(provider.device_registrations(), (0, 0));
    }
    if std::env::var_os("FISHPLATE_TEST_GPU").is_none() {
        for way in ways().into_iter().filter(|way| *way != Way::SharedMemory) {
            println!("{way:?}");
            two(way, &change, &program);
        }
    }
}

/// The memory of one side, and its imports of the other side's memory.
struct Memories {
    device: Memory,
    host: Memory,
    their_device: Remote,
    their_host: Remote,
}

impl Memories {
    fn new(side: &mut Side) -> Memories {
        let (device, host) = (side.node.alloc_device(LEN).unwrap(), side.node.alloc(LEN).unwrap());
        let [their_device, their_host] = [device, host].map(|memory| {
            let handle = side.node.handle(memory).unwrap();
            let theirs = side.exchange(&handle);
            side.node.import(side.peer, theirs).unwrap()
        });
        Memories { device, host, their_device, their_host }
    }
}

fn seen(side: &mut Side, memory: Memory, len: usize) -> Vec<u8> {
    let mut seen = vec![0; len];
    side.node.read_device(memory.at(0), &mut seen).unwrap();
    seen
}

#[test]
fn puts_and_gets_reach_device_memory_on_another_host() {
    over_nics(
        |builder| builder.gpu(device()),
        |mut side| {
            let Memories { device, host, their_device, their_host } = Memories::new(&mut side);
            assert!(!side.node.reach(side.peer).unwrap().gpu);
            assert!(side.node.rails().iter().all(|rail| rail.device));
            let from = side.node.alloc_device(LEN).unwrap();
            for (round, len) in (1..).zip(SIZES) {
                // Puts from this device to the peer's device, with a signal in host memory.
                side.node.write_device(from.at(0), &pattern(side.rank + round, len)).unwrap();
                let told = Signal::set(their_host.at(0), round as u64);
                side.node
                    .put_signal(from.slice(..len), their_device.at(0), told, Notice::Silent)
                    .unwrap();
                side.node.wait(host.at(0), Cmp::Eq, round as u64, Some(side.peer), SOON).unwrap();
                assert!(
                    seen(&mut side, device, len) == pattern(1 - side.rank + round, len),
                    "{len} bytes put"
                );
                // Clears the source, and gets the data back into it.
                side.node.quiet(side.peer, SOON).unwrap();
                side.node.write_device(from.at(0), &vec![0; len]).unwrap();
                side.node.get(from.slice(..len), their_device.at(0), Notice::Silent).unwrap();
                side.node.quiet(side.peer, SOON).unwrap();
                assert!(
                    seen(&mut side, from, len) == pattern(side.rank + round, len),
                    "{len} bytes got"
                );
                side.exchange(&[]);
            }
            // Signals and atomics on words in the device.
            side.node.write_device(device.at(0), &[0; 16]).unwrap();
            side.exchange(&[]);
            for n in 1..=20 {
                let (word, count) = (Signal::set(their_device.at(0), n), their_device.at(8));
                side.node
                    .put_signal(from.slice(..64), their_device.at(64), word, Notice::Silent)
                    .unwrap();
                assert_eq!(side.node.fetch_add(count, 2, SOON), Ok(2 * (n - 1)));
                assert_eq!(side.node.wait(device.at(0), Cmp::Ge, n, Some(side.peer), SOON), Ok(n));
                side.exchange(&[]);
            }
        },
    );
}

#[test]
fn messages_reach_device_memory_on_another_host() {
    over_nics(
        |builder| builder.gpu(device()),
        |mut side| {
            let Memories { device, .. } = Memories::new(&mut side);
            let from = side.node.alloc_device(LEN).unwrap();
            for (round, len) in (0..).zip(SIZES) {
                side.node.write_device(from.at(0), &pattern(side.rank + round, len)).unwrap();
                let tag = round as u64;
                let into = device.slice(..len);
                let request =
                    side.node.post_recv(Some(side.peer), tag, Tag::ZERO, into, 0).unwrap();
                side.node.send(side.peer, tag, from.slice(..len), Notice::Silent).unwrap();
                let status = side.node.wait_recv(request, SOON).unwrap();
                assert_eq!((status.outcome, status.delivered), (Received::Ok, len as u64));
                assert!(
                    seen(&mut side, device, len) == pattern(1 - side.rank + round, len),
                    "{len} bytes"
                );
                side.node.quiet(side.peer, SOON).unwrap();
                side.exchange(&[]);
            }
        },
    );
}

#[test]
fn a_put_to_freed_device_memory_fails() {
    over_nics(
        |builder| builder.gpu(device()),
        |mut side| {
            let Memories { device, their_device, .. } = Memories::new(&mut side);
            if side.rank == 0 {
                side.node.free(device).unwrap();
                side.exchange(&[]);
                side.exchange(&[]);
            } else {
                side.exchange(&[]);
                let end = Instant::now() + SOON;
                let issued = side.node.put(device.slice(..), their_device.at(0), Notice::Report(0));
                let outcome = issued.map(|issued| {
                    let Issued::Pending(token) = issued else { return Outcome::Done };
                    loop {
                        side.node.progress();
                        if let Some(completion) = side.node.test(token).unwrap() {
                            break completion.outcome;
                        }
                        assert!(Instant::now() < end, "it does not complete");
                    }
                });
                assert!(!matches!(outcome, Ok(Outcome::Done)), "{outcome:?}");
                side.exchange(&[]);
            }
        },
    );
}

#[test]
fn a_node_without_a_device_accesses_device_memory_of_a_peer() {
    // Alternates between nodes with and without a device.
    let turn = AtomicBool::new(false);
    over_nics(
        |builder| {
            if turn.fetch_xor(true, Ordering::Relaxed) { builder } else { builder.gpu(device()) }
        },
        |mut side| match side.node.alloc_device(LEN) {
            Ok(device) => {
                side.node.write_device(device.at(0), &pattern(1, LEN)).unwrap();
                let handle = side.node.handle(device).unwrap();
                side.exchange(&handle);
                side.exchange(&[]);
                assert!(seen(&mut side, device, LEN) == pattern(2, LEN), "put into the device");
            }
            Err(error) => {
                assert_eq!(error, Error::NoGpu);
                let handle = side.exchange(&[]);
                let theirs = side.node.import(side.peer, handle).unwrap();
                let host = side.node.alloc(LEN).unwrap();
                side.node.get(host.slice(..), theirs.at(0), Notice::Silent).unwrap();
                side.node.quiet(side.peer, SOON).unwrap();
                let mut got = vec![0; LEN];
                side.node.read(host.at(0), &mut got).unwrap();
                assert!(got == pattern(1, LEN), "got from the device");
                side.node.write(host.at(0), &pattern(2, LEN)).unwrap();
                side.node.put(host.slice(..), theirs.at(0), Notice::Silent).unwrap();
                side.node.quiet(side.peer, SOON).unwrap();
                side.exchange(&[]);
            }
        },
    );
}

#[cfg(all(feature = "cuda", feature = "hip"))]
mod gpus {
    use std::ffi::c_int;
    use std::path::Path;
    use std::sync::atomic::{AtomicI64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use fishplate::core::mem::Untrusted;
    use fishplate::gpu::cuda::{Api, CudaConfig, CudaDevice};
    use fishplate::gpu::{Device, DevicePtr, GpuDirect};
    use fishplate::node::Gpu;
    use fishplate::topology::{self, LinkState, Machine, Nic, PciAddress, PciPath};
    use fishplate::{Node, Notice, PeerId};
    use fishplate_sys::fabric::raw::{FI_HMEM_CUDA, FI_HMEM_ROCR};
    use fishplate_testing::fabric::{Bus, Fake, Persona};

    use super::super::gpu::device;
    use super::super::{SOON, fake};
    use super::network;

    fn api() -> Api {
        if matches!(device(), Gpu::Hip(_)) { Api::Hip } else { Api::Cuda }
    }

    /// Describes a machine with two root complexes and two NICs below each. The GPU is below root
    /// complex `near`.
    fn machine(gpu: PciAddress, near: usize) -> Machine {
        let path = |root: usize, address: PciAddress| {
            PciPath::parse(Path::new(&format!("/sys/devices/pci{root:04x}:00/{address}")))
        };
        let nic = |at: usize| Nic {
            name: format!("cxi{at}"),
            interface: Some(format!("cxi{at}")),
            verbs: None,
            path: path(at / 2, PciAddress { domain: 7, bus: at as u8, device: 0, function: 0 }),
            node: None,
            mbit: None,
            link: LinkState::Up,
        };
        let gpu = topology::Gpu { address: gpu, path: path(near, gpu), node: None, vendor: 0x10de };
        Machine { nics: (0..4).map(nic).collect(), gpus: vec![gpu], ..Machine::default() }
    }

    #[test]
    fn a_node_with_a_gpu_uses_near_nics_unless_some_are_named() {
        if std::env::var_os("FISHPLATE_TEST_GPU").is_none() {
            println!("SKIPPED NICs near a GPU: FISHPLATE_TEST_GPU runs it (tests/cuda-fake.sh)");
            return;
        }
        let (domain, bus, slot) = api().devices().unwrap()[0].pci;
        let address = PciAddress { domain, bus: bus as u8, device: slot as u8, function: 0 };
        let provider = network(3);
        let used = |machine, named: &[&str]| -> Vec<String> {
            let node = fake(&provider, named).gpu(device()).machine(machine).open().unwrap();
            node.rails()
                .iter()
                .filter(|rail| rail.id.0 > 0)
                .map(|rail| rail.interface.clone())
                .collect()
        };
        assert_eq!(used(machine(address, 0), &[]), ["cxi0", "cxi1"]);
        assert_eq!(used(machine(address, 1), &[]), ["cxi2", "cxi3"]);
        assert_eq!(used(machine(address, 1), &["cxi0", "cxi3"]), ["cxi0", "cxi3"]);
        // The machine does not list the GPU, so all NICs are equally far from it.
        let elsewhere = PciAddress { domain: 9, ..address };
        assert_eq!(used(machine(elsewhere, 1), &[]).len(), 4);
    }

    /// The second NIC refuses to register device memory.
    #[test]
    fn device_memory_uses_the_nic_that_accepts_it() {
        if std::env::var_os("FISHPLATE_TEST_GPU").is_none() {
            println!(
                "SKIPPED a NIC that refuses a GPU: FISHPLATE_TEST_GPU runs it (tests/cuda-fake.sh)"
            );
            return;
        }
        const LEN: usize = 1 << 16;
        let provider = Fake::new(Persona::cxi().with_devices(), 1);
        let reached = Arc::new(Reached::new());
        provider.join_devices(reached.clone());
        let open = || fake(&provider, &["cxi0", "cxi1"]).gpu(device()).open().unwrap();
        let [mut a, mut b] = [open(), open()];
        let there = a.connect(b.address()).unwrap();
        let back = b.connect(a.address()).unwrap();
        let deadline = Instant::now() + SOON;
        while a.reach(there).unwrap().fabric != 2 || b.reach(back).unwrap().fabric != 2 {
            _ = (a.progress(), b.progress());
            assert!(Instant::now() < deadline);
        }
        let host = b.alloc(2 * LEN).unwrap();
        let remote = a.import(there, b.handle(host).unwrap()).unwrap();
        reached.answers.store(1, Ordering::Relaxed);
        let memory = a.alloc_device(LEN).unwrap();
        reached.answers.store(i64::MAX, Ordering::Relaxed);
        let refused: Vec<_> = a.rails().iter().filter_map(|rail| a.last_error(rail.id)).collect();
        assert_eq!(refused.len(), 1, "one NIC has refused: {refused:?}");
        // Puts in both directions: short and striped.
        let pattern: Vec<u8> = (0..LEN).map(|at| ((at * 7) >> 3) as u8 | 1).collect();
        a.write_device(memory.at(0), &pattern).unwrap();
        for (n, len) in [512, LEN, 512, 4096, 512, 512, 512].into_iter().enumerate() {
            // Puts are unordered, so each has a separate target range.
            let at = if len == LEN { LEN } else { n * 8192 };
            a.put(memory.slice(..len), remote.at(at as u64), Notice::Silent).unwrap();
        }
        ended(&mut a, &mut b, there);
        let mut got = vec![0; 512];
        b.read(host.at(6 * 8192), &mut got).unwrap();
        assert!(got == pattern[..512]);
        let imported = b.import(back, a.handle(memory).unwrap()).unwrap();
        b.write(host.at(0), &vec![9; LEN]).unwrap();
        for len in [512, LEN, 512, 512, 512] {
            b.put(host.slice(..len), imported.at(0), Notice::Silent).unwrap();
        }
        ended(&mut b, &mut a, back);
        let mut got = vec![0; LEN];
        a.read_device(memory.at(0), &mut got).unwrap();
        assert!(got == vec![9; LEN]);
        assert!(provider.violations().is_empty(), "{:?}", provider.violations());
    }

    /// Drives both nodes until everything that `node` has sent is applied at the peer.
    fn ended(node: &mut Node, other: &mut Node, peer: PeerId) {
        let deadline = Instant::now() + SOON;
        loop {
            other.progress();
            match node.quiet(peer, Duration::ZERO) {
                Ok(()) => return,
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        }
    }

    /// The first device, as seen by the NICs of a network.
    #[derive(Debug)]
    pub struct Reached {
        handles: Mutex<Handles>,
        /// Number of further `device_of` queries that find the device.
        answers: AtomicI64,
    }

    struct Handles {
        device: CudaDevice,
        direct: GpuDirect<CudaDevice>,
    }

    impl std::fmt::Debug for Handles {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            self.device.fmt(f)
        }
    }

    impl Reached {
        pub fn new() -> Reached {
            let open = || CudaDevice::open(api(), 0, CudaConfig::default()).unwrap();
            let direct = GpuDirect::new(open(), Duration::from_secs(5));
            let handles = Mutex::new(Handles { device: open(), direct });
            Reached { handles, answers: AtomicI64::new(i64::MAX) }
        }
    }

    impl Bus for Reached {
        fn interface(&self) -> c_int {
            if api() == Api::Hip { FI_HMEM_ROCR } else { FI_HMEM_CUDA }
        }

        fn device_of(&self, at: u64, len: usize) -> Option<u32> {
            let memory = self.handles.lock().unwrap().device.allocation(DevicePtr(at)).ok()?;
            let inside = at + len as u64 <= memory.base.0 + memory.size;
            (inside && self.answers.fetch_sub(1, Ordering::Relaxed) > 0).then_some(0)
        }

        fn write(&self, at: u64, bytes: &[u8]) {
            // SAFETY: the NIC writes only where `device_of` has found device memory.
            unsafe {
                self.handles
                    .lock()
                    .unwrap()
                    .direct
                    .write_device(DevicePtr(at), Untrusted::from_slice(bytes))
            }
            .unwrap();
        }

        fn read(&self, at: u64, into: &mut [u8]) {
            // SAFETY: the NIC reads only where `device_of` has found device memory.
            unsafe { self.handles.lock().unwrap().direct.read_device(DevicePtr(at), into) }
                .unwrap();
        }
    }
}
