//! Runs the conformance suite of `Rail` on [`GpuRail`] over host memory. Covers each path of device
//! memory and each way to report writes, and a rail that is its own peer. One fixture covers host
//! memory and messages.

use std::cell::RefCell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;

use fishplate_core::mem::{Peer, Region, RegionKind};
use fishplate_gpu::GpuConfig;
use fishplate_shm::{ShmConfig, socket_pair};

#[path = "../../core/tests/conformance/mod.rs"]
mod conformance;
use conformance::{Fixture, Link};
mod support;
use support::{TestGpuRail, gpu_rail, meet_gpu};

type Ends = Link<TestGpuRail>;

/// The processor copies short transfers, the device copies others, and done words report writes.
struct Usual;
/// The device copies everything, in pieces of 24 bytes over all streams.
struct InPieces;
/// Records in the lane report writes.
struct Records;
/// Bounce slots carry all transfers.
struct Relayed;
/// Bounce slots carry all transfers, and records report writes.
struct RelayedAlone;
/// A rail that is its own peer.
struct Own;
/// Memory that is not device memory.
struct HostMemory;

const MAPPED: &str = "a peer writes open memory without the target's check";
const LATE: &str = "bytes in a bounce slot stay there for the target";
const UNSEEN: &str = "the target checks relayed transfers";

/// The peer numbers that the two ends give each other.
const TO: Peer = Peer(5);
const FROM: Peer = Peer(2);

thread_local! {
    /// The sockets of the origin and the target, for `corrupt` and `kill`.
    static SOCKETS: RefCell<Option<[OwnedFd; 2]>> = RefCell::default();
}

fn rail(seed: u64, config: &GpuConfig) -> TestGpuRail {
    let shm = ShmConfig { lane_cells: 64 << (seed % 3), max_message: 1024, ..ShmConfig::default() };
    gpu_rail(shm, config.clone())
}

/// Creates two ends that have agreed. The handshake takes two threads. Afterwards this thread
/// drives both ends.
fn pair(seed: u64, config: GpuConfig) -> Ends {
    let (mut origin, mut target) = (rail(seed, &config), rail(seed, &config));
    let sockets = socket_pair().unwrap();
    SOCKETS.set(Some([&sockets.0, &sockets.1].map(|socket| socket.try_clone().unwrap())));
    let [second, first] = meet_gpu(&origin, &target, sockets);
    assert_eq!(second.active(), (config.done_channel, config.relay_slots > 0));
    origin.attach(TO, second).unwrap();
    target.attach(FROM, first).unwrap();
    Link { rails: vec![origin, target], origin: 0, target: 1, to: TO, from: FROM }
}

/// Allocates memory of the target's device.
fn memory(link: &mut Ends, len: usize) -> Region {
    let at = link.target().alloc(len as u64).unwrap();
    let ptr = NonNull::new(at.0 as *mut u8).unwrap();
    // SAFETY: the memory is freed with the device, which the tests keep or leak. It is accessed
    // only through raw copies.
    unsafe { Region::new(ptr, len, RegionKind::Device { ordinal: 0 }) }
}

/// Kills the target without a Bye. The target's memory stays mapped, as if a process died while a
/// peer has its memory open.
fn kill(link: &mut Ends) -> bool {
    let Some([_, socket]) = SOCKETS.take() else { return false };
    // SAFETY: the call takes no pointers, and the descriptor is ours.
    assert_eq!(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) }, 0);
    std::mem::forget(link.rails.pop());
    true
}

/// Sends the target bytes over the control socket that are not a valid packet.
fn corrupt() -> bool {
    SOCKETS.with_borrow(|sockets| {
        let Some([socket, _]) = sockets else { return false };
        let bytes = [0xffu8; 64];
        // SAFETY: the bytes are readable, and the descriptor is ours.
        let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
        sent == bytes.len() as isize
    })
}

macro_rules! fixture {
    ($name:ident, $config:expr, $reaches:expr, $late:expr, $unseen:expr) => {
        impl Fixture for $name {
            type Rail = TestGpuRail;
            const REACHES_ON: Option<&'static str> = $reaches;
            const LANDS_LATE: Option<&'static str> = $late;
            const IMPORTS_UNSEEN: Option<&'static str> = $unseen;

            fn link(seed: u64) -> Ends {
                pair(seed, $config)
            }

            fn memory(link: &mut Ends, len: usize) -> Region {
                memory(link, len)
            }

            fn kill_target(link: &mut Ends) -> bool {
                kill(link)
            }

            fn corrupt(_: &mut Ends) -> bool {
                corrupt()
            }
        }
    };
}

fn small() -> GpuConfig {
    GpuConfig { ops: 32, done_words: 16, relay_slots: 4, relay_chunk: 4096, ..GpuConfig::default() }
}

fixture!(Usual, GpuConfig { ..small() }, Some(MAPPED), None, None);
fixture!(InPieces, GpuConfig { mapped_store: 0, chunk: 24, ..small() }, Some(MAPPED), None, None);
fixture!(
    Records,
    GpuConfig { mapped_store: 0, done_channel: false, relay_slots: 0, ..small() },
    Some(MAPPED),
    None,
    None
);
fixture!(Relayed, GpuConfig { force_relay: true, ..small() }, None, Some(LATE), Some(UNSEEN));
fixture!(
    RelayedAlone,
    GpuConfig {
        force_relay: true,
        done_channel: false,
        relay_slots: 1,
        pin_regions: false,
        ..small()
    },
    None,
    Some(LATE),
    Some(UNSEEN)
);

impl Fixture for Own {
    type Rail = TestGpuRail;

    fn link(seed: u64) -> Ends {
        let mut rail = rail(seed, &GpuConfig { mapped_store: 16, ..small() });
        rail.attach_self(FROM).unwrap();
        Link { rails: vec![rail], origin: 0, target: 0, to: FROM, from: FROM }
    }

    fn memory(link: &mut Ends, len: usize) -> Region {
        memory(link, len)
    }
}

impl Fixture for HostMemory {
    type Rail = TestGpuRail;
    const REACHES_ON: Option<&'static str> = Some("the kernel copies without asking the target");
    const LANDS_LATE: Option<&'static str> = Some("bytes in the lane stay there for the target");

    fn link(seed: u64) -> Ends {
        pair(seed, small())
    }

    fn kill_target(link: &mut Ends) -> bool {
        kill(link)
    }

    fn corrupt(_: &mut Ends) -> bool {
        corrupt()
    }
}

rail_conformance!(usual, Usual);
rail_conformance!(in_pieces, InPieces);
rail_conformance!(records, Records);
rail_conformance!(relayed, Relayed);
rail_conformance!(relayed_alone, RelayedAlone);
rail_conformance!(own, Own);
rail_conformance!(host_memory, HostMemory);
