//! Tests device memory through [`Node`], in one process, and with peers that cannot access it.
//! [`processes`] has the tests between real processes. By default, host memory replaces device
//! memory. `FISHPLATE_TEST_GPU=cuda` or `hip` uses the first device of that driver instead, as
//! `tests/cuda-fake.sh` does.

use std::env;
use std::thread;
use std::time::{Duration, Instant};

use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::OpError;
use fishplate::core::sync::spin::Policy;
use fishplate::gpu::DeviceError;
use fishplate::node::{Builder, Error, Fabric, Gpu};
use fishplate::{Cmp, Limits, Node, Notice, Signal};

use super::{SOON, Side, WORKER, Way, builder, two};

#[path = "gpu/apart.rs"]
mod apart;
#[path = "gpu/processes.rs"]
mod processes;

pub const LEN: usize = 300_000;

/// Lengths of data: some that the processor copies, some that the device copies, in one chunk or
/// more.
const SIZES: [usize; 7] = [1, 8, 1000, 4096, 4097, 65_536, LEN];

pub fn device() -> Gpu {
    match env::var("FISHPLATE_TEST_GPU").as_deref() {
        #[cfg(feature = "cuda")]
        Ok("cuda") => Gpu::Cuda(0),
        #[cfg(feature = "hip")]
        Ok("hip") => Gpu::Hip(0),
        Ok(other) => panic!("FISHPLATE_TEST_GPU={other}"),
        Err(_) => Gpu::StandIn,
    }
}

fn open() -> Node {
    builder().fabric(Fabric::Off).gpu(device()).open().unwrap()
}

pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ seed).wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect()
}

#[test]
fn the_end_of_a_copy_ends_a_sleep() {
    // The copies of a stand-in end at once, and those of a fake driver late in some modes.
    let late = env::var("FAKE_CUDA").is_ok_and(|modes| modes.contains("late"));
    let change = |builder: Builder| builder.gpu(device()).policy(Policy::EFFICIENT);
    two(Way::SharedMemory, change, |mut side| {
        let memory = side.node.alloc_device(LEN).unwrap();
        let inbox = side.node.alloc(64).unwrap();
        let handles = [memory, inbox].map(|memory| side.node.handle(memory).unwrap());
        let [theirs, word] = handles.map(|handle| {
            let handle = side.exchange(&handle);
            side.node.import(side.peer, handle).unwrap()
        });
        side.exchange(&[]);
        for n in 1..=10 {
            if side.rank == 0 {
                let Side { node, peer, receive, .. } = &mut side;
                node.put_signal(
                    memory.slice(..),
                    theirs.at(0),
                    Signal::set(word.at(0), n),
                    Notice::Silent,
                )
                .unwrap();
                match WORKER {
                    // The program makes no calls.
                    true => _ = receive.recv().unwrap(),
                    false => {
                        node.quiet(*peer, SOON).unwrap();
                        side.exchange(&[]);
                    }
                }
            } else {
                side.node.wait(inbox.at(0), Cmp::Eq, n, Some(side.peer), SOON).unwrap();
                match WORKER {
                    true => side.send.send(vec![]).unwrap(),
                    false => _ = side.exchange(&[]),
                }
            }
        }
        if side.rank == 0 && (late || device() == Gpu::StandIn) {
            let stats = side.node.gpu_stats().unwrap();
            assert_eq!(stats.rings > 0, late, "{stats:?}");
        }
        side.exchange(&[]);
        side.node.close(SOON).unwrap();
    });
}

#[test]
fn device_memory_of_a_closed_node_refuses_puts() {
    two(
        Way::SharedMemory,
        |builder| builder.gpu(device()),
        |mut side| {
            let device = side.node.alloc_device(4096).unwrap();
            let handle = side.node.handle(device).unwrap();
            let handle = side.exchange(&handle);
            let theirs = side.node.import(side.peer, handle).unwrap();
            side.exchange(&[]);
            if side.rank == 0 {
                // The other side makes progress while this side closes.
                assert_eq!(side.node.close(SOON), Ok(()));
                side.send.send(vec![]).unwrap();
            } else {
                // Sends nothing to the other side, because that side may have exited.
                while side.receive.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                    side.node.progress();
                }
                assert!(side.node.put(device.slice(..), theirs.at(0), Notice::Silent).is_err());
                side.node.close(SOON).unwrap();
            }
        },
    );
}

#[test]
fn a_node_without_a_device_reaches_device_memory_through_host_memory() {
    two(
        Way::SharedMemory,
        |builder| builder,
        |mut side| {
            assert_eq!(side.node.alloc_device(64), Err(Error::NoGpu));
            side.exchange(&[]);
        },
    );
    let mut plain = builder().fabric(Fabric::Off).open().unwrap();
    let mut gpu = open();
    let there = plain.connect(gpu.address()).unwrap();
    let here = gpu.connect(plain.address()).unwrap();
    let (inbox, outbox, device) =
        (plain.alloc(64).unwrap(), gpu.alloc(64).unwrap(), gpu.alloc_device(LEN));
    let device = device.unwrap();
    let handles =
        [plain.handle(inbox).unwrap(), gpu.handle(outbox).unwrap(), gpu.handle(device).unwrap()];
    // Both nodes wait until they are connected, so one of them needs its own thread.
    let (sent, received) = thread::scope(|scope| {
        let plain_side = scope.spawn(|| {
            let theirs = plain.import(there, &handles[1]).unwrap();
            let carried = plain.import(there, &handles[2]).unwrap();
            assert!(plain.is_carried(carried) && !plain.is_carried(theirs));
            plain.signal(Signal::set(theirs.at(0), 7), Notice::Silent).unwrap();
            for len in [64, LEN] {
                let mut got = vec![0; len];
                plain.recv(Some(there), len as u64, Tag::ZERO, &mut got, SOON).unwrap();
                assert!(got == pattern(2, len), "{len} bytes from the device");
                plain.send(there, len as u64, &got[..], Notice::Silent).unwrap();
            }
            let heard = plain.wait(inbox.at(0), Cmp::Eq, 9, Some(there), SOON);
            let mut got = [0; 56];
            plain.read(inbox.at(8), &mut got).unwrap();
            assert_eq!(got[..], pattern(2, 64)[8..]);
            assert_eq!(plain.peer_error(there), Ok(None));
            heard
        });
        let theirs = gpu.import(here, &handles[0]).unwrap();
        assert!(!gpu.reach(here).unwrap().gpu && gpu.reach(here).unwrap().shared_memory);
        let received = gpu.wait(outbox.at(0), Cmp::Eq, 7, Some(here), SOON);
        // The peer must not be notified of later allocations either.
        gpu.alloc_device(64).unwrap();
        gpu.write_device(device.at(0), &pattern(2, LEN)).unwrap();
        gpu.put(device.slice(8..64), theirs.at(8), Notice::Silent).unwrap();
        let outcomes = [64, LEN].map(|len| {
            let tag = len as u64;
            gpu.send(here, tag, device.slice(..len), Notice::Silent).unwrap();
            let request =
                gpu.post_recv(Some(here), tag, Tag::ZERO, device.slice(..len), 0).unwrap();
            gpu.wait_recv(request, SOON).unwrap().outcome
        });
        assert_eq!(outcomes, [Received::Ok; 2]);
        gpu.signal(Signal::set(theirs.at(0), 9), Notice::Silent).unwrap();
        gpu.quiet(here, SOON).unwrap();
        (plain_side.join().unwrap(), received)
    });
    assert_eq!((sent, received), (Ok(9), Ok(7)));
}

#[test]
fn device_ptr_works_for_device_memory_only() {
    let mut node = open();
    let (device, host) = (node.alloc_device(4096).unwrap(), node.alloc(4096).unwrap());
    let start = node.device_ptr(device.at(0)).unwrap();
    let beyond = OpError::OutOfBounds { offset: 4097, len: 0, size: 4096 };
    assert_eq!(node.device_ptr(device.at(4000)), Ok(start.at(4000)));
    assert_eq!(node.device_ptr(device.at(4097)), Err(Error::Op(beyond)));
    assert_eq!(node.device_ptr(host.at(0)), Err(Error::Device(DeviceError::NotDeviceMemory)));
    // Memory registered by its address is the same memory. SAFETY: the range lies inside an
    // allocation that outlives the registration.
    let part = unsafe { node.register_device(start.at(1024), 1024) }.unwrap();
    assert_eq!(node.device_ptr(part.at(8)), Ok(start.at(1032)));
    node.write_device(part.at(8), &[7; 16]).unwrap();
    node.write_device(part.at(0), &[]).unwrap();
    let mut seen = [0; 16];
    node.read_device(device.at(1032), &mut seen).unwrap();
    assert_eq!(seen, [7; 16]);
    node.free(part).unwrap();
    node.free(device).unwrap();
    assert_eq!(node.device_ptr(part.at(8)), Err(Error::Op(OpError::UnknownRegion)));
    let mut plain = builder().fabric(Fabric::Off).open().unwrap();
    let host = plain.alloc(64).unwrap();
    assert!(plain.device_ptr(host.at(0)).is_err());
}

#[test]
fn a_peer_that_leaves_during_the_agreement_is_connected_again() {
    // Makes 16 passes after a short pause, so that the node also checks for connecting peers.
    let look = |node: &mut Node| {
        thread::sleep(Duration::from_micros(60));
        (0..16).for_each(|_| _ = node.progress());
    };
    for looks in 0..12 {
        let mut nodes = [open(), open()];
        // A node's id follows the magic and the version in its address. The node with the smaller
        // id dials.
        nodes.sort_by_key(|node| u64::from_le_bytes(node.address()[6..14].try_into().unwrap()));
        let [mut dials, mut waits] = nodes;
        // An unconnected peer makes `waits` accept every handshake.
        let silent = builder().fabric(Fabric::Off).open().unwrap();
        waits.connect(silent.address()).unwrap();
        let mut there = dials.connect(waits.address()).unwrap();
        for at in 0..looks {
            look(if at % 2 == 0 { &mut waits } else { &mut dials });
        }
        let here = waits.connect(dials.address()).unwrap();
        waits.disconnect(here).unwrap();
        let here = waits.connect(dials.address()).unwrap();
        let end = Instant::now() + SOON;
        while !(dials.reach(there).unwrap().gpu && waits.reach(here).unwrap().gpu) {
            assert!(Instant::now() < end, "{looks}: they do not connect");
            look(&mut dials);
            look(&mut waits);
            // The peer had connected before it left, so this node sees the peer's Bye.
            if dials.peer_error(there).unwrap().is_some() {
                dials.disconnect(there).unwrap();
                there = dials.connect(waits.address()).unwrap();
            }
        }
        let device = waits.alloc_device(64).unwrap();
        dials.import(there, waits.handle(device).unwrap()).unwrap();
    }
}

#[test]
fn a_peer_without_room_for_the_link_is_dialled_again() {
    let limits = Limits { peers: 1, ..Limits::DEFAULT };
    let open = || builder().fabric(Fabric::Off).gpu(device()).limits(limits).open().unwrap();
    let mut nodes = [open(), open(), open(), open()];
    nodes.sort_by_key(|node| u64::from_le_bytes(node.address()[6..14].try_into().unwrap()));
    // The nodes with smaller ids dial. The last node keeps one connection for a peer that it has
    // not connected yet.
    let [silent, mut first, mut dials, mut waits] = nodes;
    let nobody = waits.connect(silent.address()).unwrap();
    let there = dials.connect(waits.address()).unwrap();
    first.connect(waits.address()).unwrap();
    for node in [&mut first, &mut dials] {
        let end = Instant::now() + Duration::from_millis(50);
        while Instant::now() < end {
            node.progress();
            waits.progress();
        }
    }
    waits.disconnect(nobody).unwrap();
    let here = waits.connect(dials.address()).unwrap();
    let end = Instant::now() + SOON;
    while !(dials.reach(there).unwrap().gpu && waits.reach(here).unwrap().gpu) {
        assert!(Instant::now() < end, "they do not connect");
        dials.progress();
        waits.progress();
    }
}

#[test]
fn messages_arrive_from_memory_not_yet_announced() {
    // A socket's buffer holds a few hundred announcements, so not all fit.
    let limits = Limits { locals: 1000, ..Limits::DEFAULT };
    for on_device in [true, false] {
        let mut a = builder().fabric(Fabric::Off).gpu(device()).limits(limits).open().unwrap();
        let mut b = open();
        let (b_at_a, a_at_b) = (a.connect(b.address()).unwrap(), b.connect(a.address()).unwrap());
        let end = Instant::now() + SOON;
        while !(a.reach(b_at_a).unwrap().gpu && b.reach(a_at_b).unwrap().gpu) {
            assert!(Instant::now() < end, "they do not connect");
            a.progress();
            b.progress();
        }
        let into = b.alloc_device(LEN).unwrap();
        for _ in 0..900 {
            if on_device { a.alloc_device(64) } else { a.alloc(64) }.unwrap();
        }
        let from = if on_device { a.alloc_device(LEN) } else { a.alloc(LEN) }.unwrap();
        match on_device {
            true => a.write_device(from.at(0), &pattern(3, LEN)).unwrap(),
            false => a.write(from.at(0), &pattern(3, LEN)).unwrap(),
        }
        let request = b.post_recv(Some(a_at_b), 1, Tag::ZERO, into.slice(..), 0).unwrap();
        a.send(b_at_a, 1, from.slice(..), Notice::Silent).unwrap();
        let status = loop {
            // `peer_error` sends more announcements, as a wait does.
            assert_eq!(a.peer_error(b_at_a), Ok(None));
            b.progress();
            if let Some(status) = b.test_recv(request).unwrap() {
                break status;
            }
            assert!(
                Instant::now() < end,
                "not received: {on_device} {:?} {:?} {:?}",
                b.stats(),
                b.peer_error(a_at_b),
                a.stats()
            );
        };
        assert_eq!(status.outcome, Received::Ok);
        let mut got = vec![0; LEN];
        b.read_device(into.at(0), &mut got).unwrap();
        assert!(got == pattern(3, LEN));
    }
}

#[test]
fn unsupported_device_operations_are_refused() {
    let mut node = open();
    let address = node.address().to_vec();
    let me = node.connect(&address).unwrap();
    let device = node.alloc_device(64).unwrap();
    let there = node.import(me, node.handle(device).unwrap()).unwrap();
    let refused = Err(OpError::DeviceMemory);
    assert_eq!(node.put(b"bytes", there.at(0), Notice::Silent).map(drop), refused);
    let refused = Error::Op(OpError::DeviceMemory);
    assert_eq!(node.write(device.at(0), b"x"), Err(refused));
    assert_eq!(node.load(device.at(0)), Err(refused));
    let beyond = Error::Op(OpError::OutOfBounds { offset: 60, len: 8, size: 64 });
    assert_eq!(node.write_device(device.at(60), &[0; 8]), Err(beyond));
    let host = node.alloc(64).unwrap();
    assert!(matches!(node.read_device(host.at(0), &mut [0; 8]), Err(Error::Device(_))));
    node.free(device).unwrap();
    assert!(matches!(node.read_device(device.at(0), &mut [0; 8]), Err(Error::Op(_))));
    node.close(SOON).unwrap();
}

/// Addresses of one device are invalid for another device.
#[test]
fn devices_of_two_kinds_in_one_process_do_not_reach_each_other() {
    if device() == Gpu::StandIn {
        println!("SKIPPED devices of two kinds: FISHPLATE_TEST_GPU runs it (tests/cuda-fake.sh)");
        return;
    }
    let mut nodes =
        [Gpu::StandIn, device()].map(|gpu| builder().fabric(Fabric::Off).gpu(gpu).open().unwrap());
    let addresses = nodes.each_ref().map(|node| node.address().to_vec());
    let peers = [0, 1].map(|at| nodes[at].connect(&addresses[1 - at]).unwrap());
    let deadline = Instant::now() + SOON;
    while !(0..2).all(|at| nodes[at].reach(peers[at]).unwrap().gpu) {
        nodes.iter_mut().for_each(|node| _ = node.progress());
        assert!(Instant::now() < deadline);
    }
    let memory = nodes.each_mut().map(|node| node.alloc_device(1 << 20).unwrap());
    let handles = [0, 1].map(|at| nodes[at].handle(memory[at]).unwrap());
    for at in 0..2 {
        match nodes[at].import(peers[at], &handles[1 - at]) {
            Err(_) => {}
            // Both nodes can access this memory, so test it.
            Ok(there) => {
                let written = [at as u8 + 1; 4096];
                nodes[at].write_device(memory[at].at(0), &written).unwrap();
                let token = nodes[at].put(memory[at].slice(..4096), there.at(0), Notice::Silent);
                assert!(token.is_ok(), "{token:?}");
                for _ in 0..1000 {
                    nodes.iter_mut().for_each(|node| _ = node.progress());
                }
                nodes[at].quiet(peers[at], SOON).unwrap();
                let mut read = [0; 4096];
                nodes[1 - at].read_device(memory[1 - at].at(0), &mut read).unwrap();
                assert_eq!(read, written, "from node {at}");
            }
        }
    }
}

#[test]
fn a_missing_device_is_named_in_the_error() {
    let devices: &[Gpu] = &[
        #[cfg(feature = "cuda")]
        Gpu::Cuda(1000),
        #[cfg(feature = "hip")]
        Gpu::Hip(1000),
    ];
    for gpu in devices {
        match builder().fabric(Fabric::Off).gpu(*gpu).open() {
            Ok(_) => panic!("there are not so many"),
            Err(error) => {
                let said = error.to_string();
                assert!(said.starts_with(&format!("cannot open the GPU {gpu}: no ")), "{said}");
                assert!(matches!(error, fishplate::node::OpenError::Gpu(..)));
            }
        }
    }
}

#[test]
fn device_memory_that_travels_is_counted() {
    let mut node = open();
    let address = node.address().to_vec();
    let me = node.connect(address).unwrap();
    let [from, to] = [(); 2].map(|()| node.alloc_device(LEN).unwrap());
    let handle = node.handle(to).unwrap();
    let there = node.import(me, handle).unwrap();
    node.put(from.slice(..), there.at(0), Notice::Silent).unwrap();
    node.quiet(me, SOON).unwrap();
    let stats = node.gpu_stats().unwrap();
    assert!(stats.direct + stats.stored == 1 && stats.relayed == 0, "{stats:?}");
    node.close(SOON).unwrap();
}
