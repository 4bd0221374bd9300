//! Reads of message payloads: tests which path is chosen, and that both paths deliver the whole
//! payload.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fishplate_core::error::CompleteError;
use fishplate_core::mem::{Region, RegionKind};
use fishplate_core::sync::host::Woken;

use super::*;
use crate::testing::{PEER, Random, Seen, meet};

const LEN: usize = 40_000;

/// A clock that advances by a fixed step with each reading, and on request.
struct Clock {
    now: AtomicU64,
    look: AtomicU64,
}

impl Host for &Clock {
    fn now_ns(&self) -> u64 {
        let look = self.look.load(Ordering::Relaxed);
        self.now.fetch_add(look, Ordering::Relaxed) + look
    }

    fn yield_now(&self) {}

    fn wait(&self, _: &AtomicU32, _: u32, _: u64) -> Woken {
        Woken::Called
    }

    fn wait_two(&self, _: [(&AtomicU32, u32); 2], _: u64) -> Woken {
        Woken::Called
    }

    fn wake(&self, _: &AtomicU32) -> u32 {
        0
    }
}

/// Two ends. The first end reads the memory of the second.
struct Ends<'c> {
    clock: &'c Clock,
    rails: [ShmRail<&'c Clock>; 2],
    memory: Vec<u8>,
    key: RailKey,
}

impl<'c> Ends<'c> {
    fn new(clock: &'c Clock, config: ShmConfig) -> Self {
        let mut rails = meet(config, || clock).map(|(mut rail, link)| {
            rail.attach(PEER, link).unwrap();
            rail
        });
        let mut memory = Random(0x5eed_fe7c).bytes(LEN);
        // SAFETY: the memory outlives the rails, and nothing writes to it.
        let region =
            unsafe { Region::new(NonNull::from(&mut *memory).cast(), LEN, RegionKind::Private) };
        let key = rails[1].register(&region).unwrap().0;
        assert_eq!(rails[0].import(PEER, key, LEN as u64), Ok(None));
        Ends { clock, rails, memory, key }
    }

    /// Returns whether the kernel permits copies between the two ends.
    fn direct(&mut self) -> bool {
        let direct = self.rails[0].attached(PEER).is_some_and(|attached| attached.cma);
        if !direct {
            println!("SKIPPED: the kernel refuses process_vm_readv here");
        }
        direct
    }

    /// Reads a payload and checks its bytes. A transfer through the lane takes `lane` nanoseconds.
    fn read(&mut self, len: usize, lane: u64) -> Posted {
        let mut back = vec![0; len];
        let into = Local { ptr: NonNull::from(&mut *back).cast(), len, desc: 0 };
        // SAFETY: `back` is not accessed until the completion has been reported.
        let posted =
            unsafe { self.rails[0].post_rendezvous_read(PEER, into, self.remote(), 7) }.unwrap();
        if posted == Posted::Pending {
            let look = self.clock.look.swap(0, Ordering::Relaxed);
            self.clock.now.fetch_add(lane, Ordering::Relaxed);
            assert_eq!(self.settle().done, [(7, Ok(()))]);
            self.clock.look.store(look, Ordering::Relaxed);
        }
        assert_eq!(back, self.memory[..len]);
        posted
    }

    fn remote(&self) -> Remote {
        Remote { key: self.key, offset: 0 }
    }

    fn settle(&mut self) -> Seen {
        let mut seen = Seen::default();
        for _ in 0..200 {
            self.rails[1].poll(32, &mut Seen::default());
            self.rails[0].poll(32, &mut seen);
        }
        seen
    }
}

fn clock(look: u64) -> Clock {
    Clock { now: AtomicU64::new(0), look: AtomicU64::new(look) }
}

#[test]
fn payloads_come_the_way_that_was_quicker() {
    let clock = clock(10_000);
    let mut ends = Ends::new(&clock, ShmConfig::default());
    if !ends.direct() {
        return;
    }
    // On the simulated clock, a kernel copy takes 20 us: it reads the clock twice. One reading is
    // for the liveness check.
    for (lane, want) in [(30_000, Posted::Done), (3_000, Posted::Pending), (30_000, Posted::Done)] {
        for _ in 0..600 {
            ends.read(LEN, lane);
        }
        let ways: Vec<_> = (0..600).map(|_| ends.read(LEN, lane)).collect();
        let other = ways.iter().filter(|way| **way != want).count();
        assert!(other < 40, "the lane takes {lane} ns: {other} of 600 the other way");
    }
}

#[test]
fn from_a_length_on_the_kernel_copies_and_reads_of_others_never_wait_for_the_peer() {
    let clock = clock(1000);
    let mut ends = Ends::new(&clock, ShmConfig { read_from: 30_000, ..ShmConfig::default() });
    if !ends.direct() {
        return;
    }
    for _ in 0..100 {
        assert_eq!(ends.read(30_000, 0), Posted::Done);
    }
    assert_eq!(ends.read(29_999, 0), Posted::Pending, "the first tries the lane");
    let mut back = vec![0; LEN];
    for len in [8, 29_999, LEN] {
        let into = Local { ptr: NonNull::from(&mut *back).cast(), len, desc: 0 };
        // SAFETY: `back` outlives the read, which completes before the call returns.
        let posted = unsafe { ends.rails[0].post_read(PEER, into, ends.remote(), 1) };
        assert_eq!(posted, Ok(Posted::Done), "{len} bytes");
    }
}

#[test]
fn where_the_kernel_does_not_copy_all_come_through_the_lane() {
    let clock = clock(1000);
    let mut ends = Ends::new(&clock, ShmConfig { force_staging: true, ..ShmConfig::default() });
    for _ in 0..100 {
        assert_eq!(ends.read(LEN, 0), Posted::Pending);
    }
    assert_eq!(clock.now.load(Ordering::Relaxed), 0, "nothing is to be measured");
}

#[test]
fn a_payload_whose_memory_was_taken_back_ends_as_failed_and_the_next_comes() {
    let clock = clock(1000);
    let mut ends = Ends::new(&clock, ShmConfig::default());
    if !ends.direct() {
        return;
    }
    let mut back = vec![0; LEN];
    let into = Local { ptr: NonNull::from(&mut *back).cast(), len: LEN, desc: 0 };
    // SAFETY: `back` is not accessed until the completion has been reported.
    let posted = unsafe { ends.rails[0].post_rendezvous_read(PEER, into, ends.remote(), 7) };
    assert_eq!(posted, Ok(Posted::Pending));
    ends.rails[1].deregister(ends.key).unwrap();
    assert_eq!(ends.settle().done, [(7, Err(CompleteError::Failed(libc::EFAULT)))]);
    // SAFETY: the memory outlives the rails, and nothing writes to it.
    let region =
        unsafe { Region::new(NonNull::from(&mut *ends.memory).cast(), LEN, RegionKind::Private) };
    ends.key = ends.rails[1].register(&region).unwrap().0;
    assert_eq!(ends.rails[0].import(PEER, ends.key, LEN as u64), Ok(None));
    // The pause between two payloads does not count as transfer time.
    let ways: Vec<_> = (0..600)
        .map(|_| {
            clock.now.fetch_add(1_000_000, Ordering::Relaxed);
            ends.read(LEN, 300)
        })
        .collect();
    let kernel = ways.iter().filter(|way| **way == Posted::Done).count();
    assert!(kernel < 40, "{kernel} of 600 by the kernel, which takes longer");
}

#[test]
fn a_link_that_was_cut_is_found_out_before_its_process_can_be_another() {
    let clock = clock(0);
    let mut ends = Ends::new(&clock, ShmConfig::default());
    if !ends.direct() {
        return;
    }
    let key = ends.key;
    let Ends { rails: [mut reader, other], memory, .. } = ends;
    let mut back = vec![0; LEN];
    let mut read = |reader: &mut ShmRail<_>| {
        let into = Local { ptr: NonNull::from(&mut *back).cast(), len: LEN, desc: 0 };
        // SAFETY: `back` outlives the read, which completes before the call returns. `memory`
        // outlives the rails.
        unsafe { reader.post_read(PEER, into, Remote { key, offset: 0 }, 1) }
    };
    assert_eq!(read(&mut reader), Ok(Posted::Done));
    drop(other);
    clock.now.store(999_999, Ordering::Relaxed);
    assert_eq!(read(&mut reader), Ok(Posted::Done), "its process is known to be the same");
    clock.now.store(1_000_000, Ordering::Relaxed);
    assert_eq!(read(&mut reader), Ok(Posted::Pending), "only its lane is left");
    clock.now.store(1_000_001, Ordering::Relaxed);
    assert_eq!(read(&mut reader), Ok(Posted::Pending), "nor is it taken for alive afterwards");
    let mut seen = Seen::default();
    reader.check_peers(&mut seen);
    assert_eq!(seen.down, [(PEER, PeerError::Closed)]);
    assert_eq!(seen.done, [(1, Err(CompleteError::PeerDown)); 2]);
    drop(memory);
}

#[test]
fn a_copy_that_ends_after_the_owner_was_last_known_is_checked_again() {
    let clock = clock(0);
    let mut ends = Ends::new(&clock, ShmConfig::default());
    if !ends.direct() {
        return;
    }
    let address = ends.memory.as_ptr().expose_provenance() as u64;
    let mut back = vec![0; LEN];
    let into = Local { ptr: NonNull::from(&mut *back).cast(), len: LEN, desc: 0 };
    // SAFETY: `back` is writable, and is not used meanwhile.
    let reads = |ends: &mut Ends<'_>| unsafe { ends.rails[0].read_address(PEER, into, address) };
    assert!(reads(&mut ends));
    // The peer's process is gone, or executes another program, and has cleared nothing.
    let remote = ends.rails[1].attached(PEER).and_then(|attached| attached.remote.as_ref());
    let socket = remote.map(|remote| remote.control.fd().as_raw_fd()).unwrap();
    // SAFETY: the call takes only numbers.
    assert_eq!(unsafe { libc::shutdown(socket, libc::SHUT_RDWR) }, 0);
    // The first reading of the clock is within the time that the last answer is trusted for.
    clock.look.store(600_000, Ordering::Relaxed);
    assert!(!reads(&mut ends));
}
