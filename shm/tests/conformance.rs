//! Runs the conformance suite of `Rail` on [`ShmRail`]. Covers two ends in one process, with each
//! kind of memory and each way to reach it, and a process that is its own peer.

use std::cell::RefCell;
use std::os::fd::{AsRawFd, OwnedFd};

use fishplate_core::mem::{Peer, Region, RegionKind};
use fishplate_shm::{Segment, ShmConfig, socket_pair};

#[path = "../../core/tests/conformance/mod.rs"]
mod conformance;
use conformance::{Fixture, Link};
mod support;
use support::{TestRail, meet, rail};

type Ends = Link<TestRail>;

/// Memory in segments, which the peer maps.
struct Mapped;
/// Memory in the common segment, which both ends map.
struct Common;
/// Private memory, which the kernel copies.
struct Private;
/// Private memory, which is staged through the lane.
struct Staged;
/// A rail that is its own peer, with private memory.
struct Own;
/// A rail that is its own peer, with memory in segments.
struct OwnMapped;

const MAPPED: &str = "a peer writes mapped memory without the target's check";
const COPIED: &str = "the kernel copies without asking the target";
const STAGED: &str = "bytes in the lane stay there for the target";

/// The peer numbers of the link: the origin knows the target as `TO`, the target knows the origin
/// as `FROM`.
const TO: Peer = Peer(5);
const FROM: Peer = Peer(2);

/// State of a test besides its link.
#[derive(Default)]
struct Aside {
    /// Clones of the sockets of the origin and the target, for [`corrupt`] and [`kill`].
    sockets: Option<[OwnedFd; 2]>,
    /// The unused part of the common segment.
    common: Option<Region>,
}

thread_local! {
    static ASIDE: RefCell<Aside> = RefCell::default();
}

/// Returns settings with one of the three smallest lane sizes, so that lanes fill and wrap.
fn config(seed: u64) -> ShmConfig {
    ShmConfig { lane_cells: 64 << (seed % 3), max_message: 1024, ..ShmConfig::default() }
}

/// Creates two connected ends. The handshake takes two threads. Afterwards this thread drives both
/// ends.
fn pair(config: &ShmConfig) -> Ends {
    let (mut origin, mut target) = (rail(config.clone()), rail(config.clone()));
    let sockets = socket_pair().unwrap();
    let clones = [&sockets.0, &sockets.1].map(|socket| socket.try_clone().unwrap());
    let [second, first] = meet(&origin, &target, sockets);
    origin.attach(TO, second).unwrap();
    let common = match config.common_len {
        0 => None,
        // SAFETY: the target stays attached until the test ends. If the target is killed, its
        // memory is no longer used.
        len => Some(unsafe { first.common_region(FROM, 0, len) }.unwrap()),
    };
    target.attach(FROM, first).unwrap();
    ASIDE.set(Aside { sockets: Some(clones), common });
    Link { rails: vec![origin, target], origin: 0, target: 1, to: TO, from: FROM }
}

fn own(seed: u64) -> Ends {
    let mut rail = rail(config(seed));
    rail.attach_self(FROM).unwrap();
    Link { rails: vec![rail], origin: 0, target: 0, to: FROM, from: FROM }
}

/// Returns memory in a segment that is never freed.
fn segment(len: usize) -> Region {
    let segment = Box::leak(Box::new(Segment::create(len + 64).unwrap()));
    // SAFETY: the segment is leaked, so it stays mapped. The tests access it only through raw
    // copies.
    unsafe { segment.region(64, len) }.unwrap()
}

/// Returns the next `len` bytes of the common segment.
fn common(len: usize) -> Region {
    ASIDE.with_borrow_mut(|aside| {
        let rest = aside.common.expect("a common segment");
        let RegionKind::Common { peer, offset } = rest.kind() else { panic!("{rest:?}") };
        let step = len.next_multiple_of(64);
        assert!(step <= rest.len(), "the common segment is used up");
        // SAFETY: both parts lie inside the region taken above, and do not overlap.
        let part = |skip: usize, len: usize| unsafe {
            let kind = RegionKind::Common { peer, offset: offset + skip as u64 };
            Region::new(rest.ptr().add(skip), len, kind)
        };
        aside.common = Some(part(step, rest.len() - step));
        part(0, len)
    })
}

/// Kills the target without a Bye: the origin only sees its socket close.
fn kill(link: &mut Ends) -> bool {
    let Some([_, socket]) = ASIDE.take().sockets else { return false };
    // SAFETY: the call takes only numbers, and the descriptor is ours.
    assert_eq!(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) }, 0);
    link.rails.truncate(1);
    true
}

/// Sends the target bytes over the control socket that are not a valid packet.
fn corrupt() -> bool {
    ASIDE.with_borrow(|aside| {
        let Some([socket, _]) = &aside.sockets else { return false };
        let bytes = [0xffu8; 64];
        // SAFETY: the bytes are readable, and the descriptor is ours.
        let sent = unsafe { libc::send(socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
        sent == bytes.len() as isize
    })
}

impl Fixture for Mapped {
    type Rail = TestRail;
    const REACHES_ON: Option<&'static str> = Some(MAPPED);

    fn link(seed: u64) -> Ends {
        pair(&config(seed))
    }

    fn memory(_: &mut Ends, len: usize) -> Region {
        segment(len)
    }

    fn kill_target(link: &mut Ends) -> bool {
        kill(link)
    }

    fn corrupt(_: &mut Ends) -> bool {
        corrupt()
    }
}

impl Fixture for Common {
    type Rail = TestRail;
    const REACHES_ON: Option<&'static str> = Some(MAPPED);

    fn link(seed: u64) -> Ends {
        pair(&ShmConfig { common_len: 1 << 16, ..config(seed) })
    }

    fn memory(_: &mut Ends, len: usize) -> Region {
        common(len)
    }

    fn kill_target(link: &mut Ends) -> bool {
        kill(link)
    }

    fn corrupt(_: &mut Ends) -> bool {
        corrupt()
    }
}

impl Fixture for Private {
    type Rail = TestRail;
    const REACHES_ON: Option<&'static str> = Some(COPIED);
    // If the kernel refuses copies, this fixture behaves like `Staged`.
    const LANDS_LATE: Option<&'static str> = Some(STAGED);

    fn link(seed: u64) -> Ends {
        pair(&config(seed))
    }

    fn kill_target(link: &mut Ends) -> bool {
        kill(link)
    }

    fn corrupt(_: &mut Ends) -> bool {
        corrupt()
    }
}

impl Fixture for Staged {
    type Rail = TestRail;
    const LANDS_LATE: Option<&'static str> = Some(STAGED);

    fn link(seed: u64) -> Ends {
        pair(&ShmConfig { force_staging: true, ..config(seed) })
    }

    fn kill_target(link: &mut Ends) -> bool {
        kill(link)
    }

    fn corrupt(_: &mut Ends) -> bool {
        corrupt()
    }
}

impl Fixture for Own {
    type Rail = TestRail;

    fn link(seed: u64) -> Ends {
        own(seed)
    }
}

impl Fixture for OwnMapped {
    type Rail = TestRail;

    fn link(seed: u64) -> Ends {
        own(seed)
    }

    fn memory(_: &mut Ends, len: usize) -> Region {
        segment(len)
    }
}

rail_conformance!(mapped, Mapped);
rail_conformance!(common_segment, Common);
rail_conformance!(private, Private);
rail_conformance!(staged, Staged);
rail_conformance!(own_private, Own);
rail_conformance!(own_mapped, OwnMapped);
