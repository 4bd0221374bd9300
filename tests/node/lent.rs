//! Tests device memory that is freed while peers have imported it. Some peers only make progress,
//! others make no calls. As in [`gpu`](super::gpu), host memory replaces device memory by default.

use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

use fishplate::PeerId;
use fishplate::core::error::AttachError;
use fishplate::gpu::DeviceError;
use fishplate::node::{Error, Fabric, Gpu, Memory, Node};
use fishplate_testing::fabric::{Fake, Persona};

use super::gpu::device;
use super::{SOON, WORKER, builder, fake};

const LEN: usize = 64 << 10;

/// Two connected nodes with devices, and their peer ids.
struct Two {
    nodes: [Node; 2],
    peers: [PeerId; 2],
}

impl Two {
    fn new() -> Two {
        let open = || builder().fabric(Fabric::Off).gpu(device()).open().unwrap();
        let mut nodes = [open(), open()];
        let [a, b] = &mut nodes;
        let peers = [a.connect(b.address()).unwrap(), b.connect(a.address()).unwrap()];
        let mut two = Two { nodes, peers };
        two.until("they do not connect", |two| {
            two.nodes.iter().zip(two.peers).all(|(node, peer)| node.reach(peer).unwrap().gpu)
        });
        two
    }

    /// Makes progress at both nodes until `reached` returns true. Makes no other calls.
    fn until(&mut self, what: &str, mut reached: impl FnMut(&mut Two) -> bool) {
        let end = Instant::now() + SOON;
        while !reached(self) {
            assert!(Instant::now() < end, "{what}");
            self.nodes.iter_mut().for_each(|node| _ = node.progress());
        }
    }

    /// Imports memory of the first node at the second.
    fn import(&mut self, memory: &[Memory]) {
        let [a, b] = &mut self.nodes;
        let handles: Vec<_> = memory.iter().map(|memory| a.handle(*memory).unwrap()).collect();
        std::thread::scope(|scope| {
            let imports = scope.spawn(|| {
                handles.iter().for_each(|handle| _ = b.import(self.peers[1], handle).unwrap())
            });
            while !imports.is_finished() {
                a.progress();
            }
            imports.join().unwrap();
        });
    }
}

/// Returns the mappings of the host memory that replaces device memory: address range and inode. An
/// inode is not reused soon. For a fake driver, `tests/cuda-fake.sh` checks leaks instead.
fn mapped() -> Vec<(Range<u64>, u64)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let of_memory = maps.lines().filter(|line| line.contains("memfd:"));
    let parsed = of_memory.map(|line| {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next().unwrap().split_once('-').unwrap();
        let bound = |hex| u64::from_str_radix(hex, 16).unwrap();
        (bound(start)..bound(end), fields.nth(3).unwrap().parse().unwrap())
    });
    parsed.collect()
}

/// Returns the inode of the file that backs `memory`.
fn file(node: &mut Node, memory: Memory) -> u64 {
    let at = node.device_ptr(memory.at(0)).unwrap().0;
    mapped().into_iter().find(|(range, _)| range.contains(&at)).unwrap().1
}

fn is_mapped(file: u64) -> bool {
    mapped().iter().any(|(_, other)| *other == file)
}

/// Returns the processor time of this thread.
pub(super) fn used() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills `time`, which is ours.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_node_closes_beside_a_peer_that_only_makes_progress() {
    for imports in [false, true] {
        let mut two = Two::new();
        let memory: Vec<_> = (0..3).map(|_| two.nodes[0].alloc_device(LEN).unwrap()).collect();
        if imports {
            two.import(&memory);
        }
        two.nodes[0].free(memory[0]).unwrap();
        let Two { nodes: [a, mut b], .. } = two;
        let closed = std::thread::scope(|scope| {
            let closes = scope.spawn(|| a.close(SOON));
            while !closes.is_finished() {
                b.progress();
            }
            closes.join().unwrap()
        });
        assert_eq!(closed, Ok(()), "imports: {imports}");
    }
}

#[test]
fn two_nodes_that_defer_frees_close_beside_each_other() {
    let mut two = Two::new();
    for _ in 0..2 {
        let memory = two.nodes[0].alloc_device(LEN).unwrap();
        two.import(&[memory]);
        two.nodes[0].defer_device_frees(true).unwrap();
        two.nodes.swap(0, 1);
        two.peers.swap(0, 1);
    }
    let Two { nodes: [a, b], .. } = two;
    let closed = std::thread::scope(|scope| {
        let closes = scope.spawn(|| a.close(SOON));
        [b.close(SOON), closes.join().unwrap()]
    });
    assert_eq!(closed, [Ok(()), Ok(())]);
}

#[test]
fn freed_memory_returns_to_the_device_by_progress_alone() {
    for imports in [false, true] {
        let mut two = Two::new();
        let memory: Vec<_> = (0..20).map(|_| two.nodes[0].alloc_device(LEN).unwrap()).collect();
        let files: Vec<_> = match device() {
            Gpu::StandIn => memory.iter().map(|memory| file(&mut two.nodes[0], *memory)).collect(),
            _ => vec![],
        };
        if imports {
            two.import(&memory);
        }
        for memory in memory {
            two.nodes[0].free(memory).unwrap();
        }
        match device() {
            Gpu::StandIn => {
                two.until("it is not freed", |_| !files.iter().any(|&file| is_mapped(file)))
            }
            _ => {
                let end = Instant::now() + Duration::from_millis(50);
                two.until("", |_| Instant::now() > end);
            }
        }
        // Drops both nodes together. The report of the fake driver shows memory that is still
        // allocated.
    }
}

#[test]
fn freed_memory_stays_while_frees_are_deferred() {
    let mut two = Two::new();
    let memory = two.nodes[0].alloc_device(LEN).unwrap();
    let file = (device() == Gpu::StandIn).then(|| file(&mut two.nodes[0], memory));
    two.import(&[memory]);
    two.nodes[0].defer_device_frees(true).unwrap();
    two.nodes[0].free(memory).unwrap();
    let end = Instant::now() + Duration::from_millis(20);
    two.until("", |_| Instant::now() > end);
    assert!(file.is_none_or(is_mapped), "freed in spite of that");
    two.nodes[0].defer_device_frees(false).unwrap();
    two.until("it is not freed", |_| file.is_none_or(|file| !is_mapped(file)));
}

#[test]
fn freeing_stays_cheap_beside_a_peer_that_makes_no_call() {
    if WORKER {
        println!("SKIPPED a peer that makes no call: its worker does");
        return;
    }
    // Other load slows only some attempts. A growing cost slows all of them.
    let dear: Vec<_> =
        (0..5).map(|_| cost_of_freeing()).take_while(|[first, last]| *last >= 4 * *first).collect();
    assert!(dear.len() < 5, "60 blocks first, and beside 320 that were freed: {dear:?}");
}

/// Returns the cost of freeing 60 blocks, twice: at first, and after 320 other blocks were freed.
fn cost_of_freeing() -> [Duration; 2] {
    let mut two = Two::new();
    let node = &mut two.nodes[0];
    let mut some = |count| {
        let before = used();
        for _ in 0..count {
            let memory = node.alloc_device(4096).unwrap();
            node.free(memory).unwrap();
        }
        used() - before
    };
    some(20);
    let first = some(60);
    some(240);
    [first, some(60)]
}

#[test]
fn device_memory_that_a_provider_keeps_survives_the_node() {
    if device() != Gpu::StandIn {
        println!("SKIPPED kept memory: of the stand-in alone the maps tell that it stays");
        return;
    }
    let provider = Fake::new(Persona::cxi().with_devices(), 1);
    let mut node = fake(&provider, &["cxi0"]).gpu(device()).open().unwrap();
    let [kept, freed] = [(); 2].map(|()| {
        let memory = node.alloc_device(LEN).unwrap();
        (memory, file(&mut node, memory))
    });
    node.free(freed.0).unwrap();
    provider.keep_registrations(true);
    assert!(matches!(node.free(kept.0), Err(Error::Attach(AttachError::Kept(_)))));
    assert_eq!((is_mapped(kept.1), is_mapped(freed.1)), (true, false));
    drop(node);
    assert!(is_mapped(kept.1));
}

#[test]
fn a_failed_allocation_names_the_reason() {
    let mut node = builder().fabric(Fabric::Off).gpu(device()).open().unwrap();
    assert_eq!(node.alloc_device(0), Err(Error::Attach(AttachError::BadRange)));
    assert_eq!(node.alloc_device(0), node.alloc(0));
    assert_eq!(node.alloc_device(1 << 50), Err(Error::Device(DeviceError::Exhausted)));
    let said = node.alloc_device(1 << 50).unwrap_err().to_string();
    assert!(said.contains("out of memory"), "{said}");
    node.alloc_device(1).unwrap();
}
