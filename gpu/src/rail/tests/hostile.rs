//! Tests with a peer that writes arbitrary values into the shared segments.

use fishplate_core::error::Violation;

use super::*;
use crate::relay::{Incoming, Outgoing, Piece, What};

/// Builds a piece from the key and the length of a region.
type Says = fn(RailKey, u64) -> What;

/// Lets the second end send an invalid piece to the first end.
fn say(pair: &mut Pair, what: What, offset: u64, len: u32) {
    let shared = pair.rails[1].shared(PEER).unwrap();
    let (mine, theirs) = (shared.mine, shared.theirs);
    // SAFETY: both segments stay mapped while the pair lives, and the rail itself has sent no
    // piece.
    let out = unsafe { Outgoing::new(mine.descriptors(), theirs.acks(), 4) };
    out.fill(0, &Piece { what, offset, len, failed: false });
}

#[test]
fn b13_sizes_out_of_bounds_are_refused_and_write_nothing_outside() {
    let len = LEN as u64;
    let cases: &[(Says, u64, u32, Violation)] = &[
        (|key, _| What::Write { key, last: true, data: Some(1) }, 1, 4097, Violation::Length),
        (|key, _| What::Write { key, last: true, data: Some(1) }, u64::MAX, 1, Violation::Bounds),
        (|key, len| What::Read { key, want: len + 1, id: 1 }, 0, 0, Violation::Bounds),
        (|key, _| What::Read { key, want: u64::MAX, id: 1 }, 8, 0, Violation::Bounds),
        (|key, _| What::Read { key, want: 0, id: 1 }, 0, 0, Violation::Length),
        (|_, _| What::Reply { id: 1 << 32, last: false }, 0, 8, Violation::Reply),
        (|_, _| What::Reply { id: u64::MAX, last: false }, 0, 8, Violation::Reply),
        (|_, _| What::Reply { id: 1 << 32, last: true }, 0, 8, Violation::Reply),
    ];
    let at_the_end: [(u64, u32); 3] = [(len - 8, 9), (len, 1), (len - 4095, 4096)];
    for round in 0..cases.len() + at_the_end.len() {
        let mut pair = Pair::apart(Behaviour::PLAIN, small(), 1);
        let key = pair.memory[0].key;
        let (what, offset, bytes, violation) = match cases.get(round) {
            Some(&(what, offset, bytes, violation)) => (what(key, len), offset, bytes, violation),
            None => {
                let (offset, bytes) = at_the_end[round - cases.len()];
                (What::Write { key, last: true, data: Some(1) }, offset, bytes, Violation::Bounds)
            }
        };
        poke(&pair.rails[0], &pair.memory[0], 0, &[0x5a; LEN]);
        let before = process(&pair.rails[0]).counts().calls;
        say(&mut pair, what, offset, bytes);
        pair.until("it is seen", |pair| !pair.seen[0].down.is_empty());
        assert_eq!(
            pair.seen[0].down,
            [(PEER, PeerError::Protocol(violation))],
            "{what:?} {offset} {bytes}"
        );
        assert_eq!(
            process(&pair.rails[0]).counts().calls.since(&before)[Call::Copy],
            0,
            "{what:?}"
        );
        assert_eq!(peek(&pair.rails[0], &pair.memory[0], 0, LEN), [0x5a; LEN]);
        assert!(pair.seen[0].landed.is_empty());
        assert_eq!(pair.driver.violations(), []);
    }
}

#[test]
fn b13_a_reply_that_does_not_match_its_read_writes_nothing() {
    // No reply is marked as the last, so even the correct range is invalid.
    for (offset, len) in
        [(0u64, 101u32), (1, 100), (100, 1), (u64::MAX, 1), (0, 0), (0, 4096), (0, 100)]
    {
        let mut pair = Pair::apart(Behaviour::PLAIN, small(), 1);
        poke(&pair.rails[0], &pair.memory[0], 0, &[0x5a; LEN]);
        assert_eq!(pair.read(500, 0, 100, 1), Posted::Pending);
        let id = pair.rails[0].ops.id(0);
        let before = process(&pair.rails[0]).counts().calls;
        say(&mut pair, What::Reply { id, last: false }, offset, len);
        for _ in 0..PATIENCE {
            let Pair { rails, seen, .. } = &mut pair;
            rails[0].poll(8, &mut seen[0]);
            if !seen[0].done.is_empty() {
                break;
            }
        }
        let bounds = PeerError::Protocol(Violation::Bounds);
        assert_eq!(pair.seen[0].down, [(PEER, bounds)], "{len} bytes at {offset}");
        assert_eq!(pair.ended(1), Some(Err(CompleteError::PeerDown)));
        assert_eq!(process(&pair.rails[0]).counts().calls.since(&before)[Call::Copy], 0);
        assert_eq!(peek(&pair.rails[0], &pair.memory[0], 0, LEN), [0x5a; LEN]);
    }
    // Sends more reply bytes than requested. The second reply belongs to no read.
    let mut pair = Pair::apart(Behaviour::PLAIN, small(), 1);
    pair.read(500, 0, 100, 1);
    let id = pair.rails[0].ops.id(0);
    say(&mut pair, What::Reply { id, last: false }, 0, 60);
    for _ in 0..100 {
        let Pair { rails, seen, .. } = &mut pair;
        rails[0].poll(8, &mut seen[0]);
    }
    assert!(pair.seen[0].down.is_empty());
    let shared = pair.rails[1].shared(PEER).unwrap();
    let (mine, theirs) = (shared.mine, shared.theirs);
    // SAFETY: both segments stay mapped while the pair lives, and the rail itself has sent no
    // piece.
    let out = unsafe { Outgoing::new(mine.descriptors(), theirs.acks(), 4) };
    out.fill(
        1,
        &Piece { what: What::Reply { id, last: false }, offset: 0, len: 60, failed: false },
    );
    for _ in 0..100 {
        let Pair { rails, seen, .. } = &mut pair;
        rails[0].poll(8, &mut seen[0]);
    }
    assert_eq!(pair.seen[0].down, [(PEER, PeerError::Protocol(Violation::Bounds))]);
}

#[test]
fn b13_bounds_are_those_of_the_region_and_not_of_its_allocation() {
    for relay in [false, true] {
        let config = GpuConfig { force_relay: relay, ..small() };
        let mut pair = Pair::new(Behaviour::PLAIN, config, 1);
        // Registers a region in the middle of an allocation.
        let base = pair.rails[1].alloc(10_000).unwrap();
        let (key, _) = pair.rails[1].register(&device_region(base.at(1000), 2000)).unwrap();
        if !relay {
            assert_eq!(pair.rails[0].import(PEER, key, 2001), Err(AttachError::BadRange));
        }
        pair.rails[0].import(PEER, key, 2000).unwrap();
        for (offset, len) in
            [(0u64, 2001usize), (1999, 2), (2001, 0), (u64::MAX, 1), (u64::MAX - 3, 8)]
        {
            let (local, remote) = (pair.memory[0].local(0, len), Remote { key, offset });
            // SAFETY: this end or the target refuses the post, so it accesses only registered
            // memory.
            let posted = unsafe { pair.rails[0].post_write(PEER, local, remote, Some(1), 1) };
            match relay {
                // The target checks a relayed transfer.
                true if posted.is_ok() => {}
                _ => assert_eq!(posted, Err(PostError::BadKey), "{offset} {len}"),
            }
        }
    }
}

#[test]
fn b18_flipped_bits_in_shared_segments_fail_at_most_the_link() {
    for seed in 1..16u64 {
        let config = GpuConfig { force_relay: seed % 2 == 0, ..small() };
        let mut pair = Pair::new(Behaviour::LATE, config, seed);
        let mut random = Random(seed);
        let before = peek(&pair.rails[0], &pair.memory[0], 0, 64);
        for n in 0..400u64 {
            let (local, remote) = (pair.memory[0].local(64, 700), pair.memory[1].remote(64));
            // SAFETY: the memory outlives the pair.
            let _ = unsafe { pair.rails[0].post_write(PEER, local, remote, Some(n as u32), n) };
            let Some(shared) = pair.rails[1].shared(PEER) else { break };
            // Picks any word of either segment, except in the bounce slots, which hold arbitrary
            // bytes anyway.
            let record = if random.below(2) == 0 { shared.mine } else { shared.theirs };
            let at = random.below(record.bounce_at(0) as usize) & !7;
            // SAFETY: the word lies inside the segment and is aligned. Both ends access it as an
            // atomic.
            let word = unsafe {
                fishplate_core::sync::primitive::AtomicU64::from_ptr(
                    record.ptr().as_ptr().add(at).cast(),
                )
            };
            word.fetch_xor(
                1 << random.below(64),
                fishplate_core::sync::primitive::Ordering::Relaxed,
            );
            pair.poll();
        }
        assert_eq!(peek(&pair.rails[0], &pair.memory[0], 0, 64), before);
        let Pair { driver, rails, .. } = pair;
        drop(rails);
        driver.drain();
        assert_eq!(driver.violations(), [], "seed {seed}");
    }
}

#[test]
fn bad_input_is_refused_with_its_reason() {
    use crate::{Fault, Unshared};
    let mut pair = Pair::new(Behaviour::PLAIN, small(), 1);
    let [rail, other] = &mut pair.rails;
    // Refuses a device that does not exist.
    let at = rail.alloc(4096).unwrap();
    let ptr = NonNull::new(at.0 as *mut u8).unwrap();
    // SAFETY: the rail refuses the region, so it accesses no memory.
    let region = unsafe { Region::new(ptr, 4096, RegionKind::Device { ordinal: 7 }) };
    assert_eq!(rail.register(&region), Err(AttachError::Unsupported));
    assert_eq!(rail.why(), Some(Refused::Export(ExportError::Device(DeviceError::NoDevice(1)))));
    // Tries unexportable memory, with its remedy, an unmapped address, and a range that is too
    // long.
    for (kind, why) in
        [(MemoryKind::Pool, Unshared::Pool), (MemoryKind::Managed, Unshared::Managed)]
    {
        let at = rail.sharing.driver().alloc_as(kind, 4096).unwrap();
        assert_eq!(rail.register(&device_region(at, 4096)), Err(AttachError::Unsupported));
        let told = rail.why().unwrap();
        assert_eq!(told, Refused::Export(ExportError::Device(DeviceError::NotExportable(why))));
    }
    let nothing = device_region(DevicePtr(64), 4096);
    assert_eq!(rail.register(&nothing), Err(AttachError::Unsupported));
    assert_eq!(rail.register(&device_region(at, 4097)), Err(AttachError::BadRange));
    // Keys that the peer never registered give an error within the configured time.
    let RailKey { key, base } = pair.memory[1].key;
    for (key, base, len, want) in [
        (key + 1000, base, 8, AttachError::Unheard),
        (key & !0xffff_ffff, base, 8, AttachError::BadHandle),
        (key, base, 0, AttachError::BadRange),
        (key, u64::MAX, 8, AttachError::BadRange),
        (key, base, 8, AttachError::BadHandle),
        (key ^ 1 << 40, base, 8, AttachError::Unheard),
    ] {
        let refused = rail.import(PEER, RailKey { key, base }, len);
        assert_eq!(refused, Err(want), "{key:#x} {base:#x} {len}");
    }
    match rail.why() {
        Some(Refused::Import(error)) => {
            assert_eq!((error.peer, error.why), (PEER, Fault::Deadline))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(rail.import(Peer(9), pair.memory[1].key, 8), Err(AttachError::UnknownPeer));
    // A second import shares the first. An extra release is ignored. After the last release the key
    // is unknown.
    rail.import(PEER, pair.memory[1].key, LEN as u64).unwrap();
    for _ in 0..3 {
        rail.release(PEER, pair.memory[1].key);
    }
    let (local, remote) = (pair.memory[0].local(0, 8), pair.memory[1].remote(0));
    // SAFETY: the rail refuses the post, so it accesses no memory.
    assert_eq!(unsafe { rail.post_write(PEER, local, remote, None, 1) }, Err(PostError::BadKey));
    rail.deregister(pair.memory[0].key).unwrap();
    rail.deregister(pair.memory[0].key).unwrap();
    other.deregister(RailKey { key: u64::MAX, base: 0 }).unwrap();
    assert!(pair.seen.iter().all(|seen| seen.down.is_empty()));
    assert_eq!(pair.driver.violations(), []);
}

#[test]
fn imports_from_oneself_and_from_a_plain_peer_are_checked() {
    let (driver, own) = (FakeDriver::new(Behaviour::PLAIN, 1), Peer(1));
    let mut rail = rail(&driver.process(), small());
    rail.attach_self(own).unwrap();
    let Memory { key, .. } = memory(&mut rail, 64);
    assert_eq!(rail.import(own, key, 65), Err(AttachError::BadRange));
    assert_eq!(
        rail.import(own, RailKey { key: key.key + 1, ..key }, 64),
        Err(AttachError::UnknownRegion)
    );
    rail.import(own, key, 64).unwrap();

    // Attaches a peer that has no device.
    let mut plain = ShmRail::new(SpinHost::new(100_000), shm()).unwrap();
    let (x, y) = socket_pair().unwrap();
    let profile = plain.profile();
    let first = std::thread::spawn(move || Link::over(y, Role::First, &profile, soon()).unwrap());
    let link = Link::over(x, Role::Second, rail.profile().profile(), soon()).unwrap();
    rail.attach(PEER, GpuLink::plain(link)).unwrap();
    plain.attach(PEER, first.join().unwrap()).unwrap();
    assert_eq!(rail.import(PEER, key, 64), Err(AttachError::Unsupported));
    assert_eq!(driver.violations(), []);
}

/// Returns the second end's bounce slots, so that the test can use them instead of the rail.
fn slots(pair: &mut Pair) -> (Outgoing, Incoming) {
    let shared = pair.rails[1].shared(PEER).unwrap();
    let (mine, theirs) = (shared.mine, shared.theirs);
    // SAFETY: both segments stay mapped while the pair lives, and the second rail is not polled.
    unsafe {
        let out = Outgoing::new(mine.descriptors(), theirs.acks(), 4);
        (out, Incoming::new(theirs.descriptors(), mine.acks(), 4))
    }
}

fn poll_first(pair: &mut Pair) {
    let Pair { rails, seen, .. } = pair;
    for _ in 0..100 {
        rails[0].poll(8, &mut seen[0]);
    }
}

#[test]
fn a_read_that_is_refused_after_its_reply_is_a_violation() {
    let mut pair = Pair::apart(Behaviour::PLAIN, small(), 1);
    pair.read(500, 0, 100, 1);
    let id = pair.rails[0].ops.id(0);
    let (out, acks) = slots(&mut pair);
    out.fill(
        0,
        &Piece { what: What::Reply { id, last: true }, offset: 0, len: 100, failed: false },
    );
    poll_first(&mut pair);
    acks.answer(0, 5);
    poll_first(&mut pair);
    assert_eq!(pair.seen[0].down, [(PEER, PeerError::Protocol(Violation::Reply))]);
}

#[test]
fn a_failed_piece_does_not_hide_that_the_copy_of_another_is_unknown() {
    let mut pair = Pair::apart(Behaviour { late: 100_000, ..Behaviour::LATE }, small(), 1);
    pair.read(0, 0, 8192, 1);
    let id = pair.rails[0].ops.id(0);
    let (out, acks) = slots(&mut pair);
    acks.answer(0, 0);
    out.fill(
        0,
        &Piece { what: What::Reply { id, last: false }, offset: 0, len: 4096, failed: false },
    );
    out.fill(
        1,
        &Piece { what: What::Reply { id, last: true }, offset: 4096, len: 4096, failed: true },
    );
    poll_first(&mut pair);
    pair.driver.lose(0);
    poll_first(&mut pair);
    assert!(matches!(pair.ended(1), Some(Err(CompleteError::Unknown(_)))), "{:?}", pair.ended(1));
}

#[test]
fn an_end_whose_slots_are_not_pinned_refuses_reads_of_its_device() {
    let mut pair = Pair::apart(Behaviour::PLAIN, small(), 1);
    pair.rails[1].shared(PEER).unwrap().mine_at = None;
    pair.read(0, 0, 100, 1);
    pair.until("the read ends", |pair| pair.ended(1).is_some());
    assert_eq!(pair.ended(1), Some(Err(CompleteError::Failed(libc::EFAULT))));
}

#[test]
fn an_end_that_copies_for_a_peer_sleeps_in_naps() {
    let config = GpuConfig { done_channel: false, ..small() };
    let mut pair = Pair::apart(Behaviour { late: 100_000, ..Behaviour::LATE }, config, 1);
    pair.read(0, 0, 4096, 1);
    for _ in 0..50 {
        pair.poll();
    }
    assert_eq!(pair.rails[1].streams.out(), 1);
    let asleep = |pair: &mut Pair| {
        let (rail, seen) = (&mut pair.rails[1], &mut pair.seen[1]);
        rail.wait_object().look(u64::MAX, || rail.poll(8, seen) != 0)
    };
    assert_eq!(asleep(&mut pair), Some(20_000));
    pair.driver.behave(|behaviour| behaviour.late = 0);
    pair.until("the read ends", |pair| pair.ended(1).is_some());
    assert_eq!(asleep(&mut pair), Some(u64::MAX));
}
