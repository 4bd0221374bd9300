//! Tests of failed peers, and of lost or slow devices. Memory must not be reused too early.

use super::*;

/// A delay of copies, in steps, that is longer than every test.
const NEVER: u32 = 1_000_000;

#[test]
fn b14_a_write_reported_as_failed_does_not_land_later() {
    for relay in [false, true] {
        for seed in 1..6 {
            let config =
                GpuConfig { force_relay: relay, timeout: Duration::from_secs(20), ..small() };
            let mut pair = Pair::new(Behaviour { late: 500, ..Behaviour::LATE }, config, seed);
            poke(&pair.rails[0], &pair.memory[0], 0, &[1; 8000]);
            for n in 0..6u64 {
                pair.write(0, n as usize * 8000, 8000, None, n);
            }
            pair.read(30_000, 0, 4000, 6);
            pair.poll();
            // Detaching waits for the copies in flight.
            pair.rails[0].detach(PEER);
            let mut seen = Seen::default();
            while pair.rails[0].poll(8, &mut seen) > 0 {}
            pair.seen[0].done.extend(seen.done);
            assert_eq!(pair.seen[0].done.len(), 7, "seed {seed}");
            let over = |n: u64, pair: &Pair| match pair.ended(n) {
                Some(Err(CompleteError::Unknown(_))) => {
                    panic!("seed {seed}: the device had time to finish")
                }
                result => result,
            };
            for n in 0..7 {
                over(n, &pair);
            }
            // Reuses the buffer at once: no finished operation may read or write the new bytes.
            poke(&pair.rails[0], &pair.memory[0], 0, &[2; 40_000]);
            pair.driver.drain();
            assert_eq!(peek(&pair.rails[0], &pair.memory[0], 0, 40_000), [2; 40_000]);
            let there = peek(&pair.rails[1], &pair.memory[1], 0, 48_000);
            assert!(there.iter().all(|&byte| byte < 2), "seed {seed}: a late write");
            pair.check();
        }
    }
}

#[test]
fn b14_an_unfinished_copy_keeps_its_memory() {
    for relay in [false, true] {
        let config = GpuConfig { force_relay: relay, timeout: Duration::from_millis(4), ..small() };
        let mut pair = Pair::new(Behaviour::LATE, config, 3);
        pair.driver.behave(|behaviour| behaviour.late = NEVER);
        let before = process(&pair.rails[0]).counts();
        for n in 0..3 {
            pair.write(0, 0, 300, Some(n), n.into());
        }
        pair.rails[0].detach(PEER);
        let mut seen = Seen::default();
        while pair.rails[0].poll(8, &mut seen) > 0 {}
        let unknown = Err(CompleteError::Unknown(libc::ETIMEDOUT));
        assert_eq!(
            seen.done,
            [(0, unknown), (1, unknown), (2, unknown)],
            "relay {relay}: in the order posted"
        );
        let counts = process(&pair.rails[0]).counts();
        assert_eq!(counts.closes, before.closes, "closed under a copy");
        assert_eq!(counts.unpins, before.unpins, "unpinned under a copy");
        assert_eq!(pair.driver.violations(), []);
        // After the device has finished, no operation is reported again.
        pair.driver.behave(|behaviour| behaviour.late = 0);
        pair.driver.drain();
        let mut seen = Seen::default();
        for _ in 0..100 {
            pair.rails[0].poll(8, &mut seen);
        }
        assert_eq!(seen.events, 0, "{seen:?}");
        assert_eq!(pair.driver.violations(), []);
    }
}

#[test]
fn relayed_copies_that_end_after_a_detach_release_their_memory() {
    for (read, end) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let config = GpuConfig { timeout: Duration::from_millis(4), ..small() };
        let mut pair = Pair::apart(Behaviour::LATE, config, 3);
        let local = pair.memory[0].local(0, 300);
        let remote = pair.memory[1].remote(0);
        pair.driver
            .behave(|behaviour| behaviour.late = if (read, end) == (false, 0) { NEVER } else { 0 });
        // SAFETY: the memory outlives the pair.
        let posted = unsafe {
            match read {
                true => pair.rails[0].post_read(PEER, local, remote, 1),
                false => pair.rails[0].post_write(PEER, local, remote, None, 1),
            }
        };
        assert_eq!(posted, Ok(Posted::Pending));
        // The copies of `end` never finish, and the other copies finish at once.
        for _ in 0..PATIENCE {
            for at in [0, 1] {
                pair.driver.behave(|behaviour| behaviour.late = if at == end { NEVER } else { 0 });
                pair.rails[at].poll(8, &mut pair.seen[at]);
            }
            if pair.rails[end].streams.out() > 0 {
                break;
            }
        }
        assert_eq!(pair.rails[end].streams.out(), 1, "read {read} {end}");
        pair.rails[end].detach(PEER);
        pair.driver.behave(|behaviour| behaviour.late = 0);
        pair.driver.drain();
        for _ in 0..100 {
            pair.rails[end].poll(8, &mut pair.seen[end]);
        }
        assert_eq!(pair.rails[end].deregister(pair.memory[end].key), Ok(()), "read {read} {end}");
        assert!(pair.rails[end].ops.is_empty(), "read {read} {end}");
        let done =
            if end == 0 { &[(1, Err(CompleteError::Unknown(libc::ETIMEDOUT)))][..] } else { &[] };
        assert_eq!(pair.seen[end].done, done, "read {read} {end}");
        assert_eq!(pair.driver.violations(), []);
    }
}

#[test]
fn a_lost_device_completes_all_operations_as_unknown() {
    for relay in [false, true] {
        let config = GpuConfig { force_relay: relay, ..small() };
        let mut pair = Pair::new(Behaviour { late: 200, ..Behaviour::LATE }, config, 4);
        for n in 0..8u32 {
            pair.write(0, 0, 5000, Some(n), n.into());
        }
        pair.driver.lose(0);
        pair.until("ends", |pair| pair.seen[0].done.len() == 8);
        let unknown =
            pair.seen[0].done.iter().filter(|(_, r)| matches!(r, Err(CompleteError::Unknown(46))));
        assert!(unknown.count() >= 1);
        assert!(pair.seen[0].done.iter().all(|(_, result)| result.is_err()), "{:?}", pair.seen[0]);
        let (local, remote) = (pair.memory[0].local(0, 10), pair.memory[1].remote(0));
        // SAFETY: the rail refuses the post, so it accesses no memory.
        let posted = unsafe { pair.rails[0].post_write(PEER, local, remote, None, 9) };
        assert_eq!(posted, Err(PostError::Provider(46)));
        // Messages still arrive.
        pair.rails[0].post_message(PEER, b"still here", Untrusted::from_slice(&[]), 0).unwrap();
        pair.until("a message", |pair| pair.seen[1].messages.len() == 1);
        assert!(pair.seen[1].landed.is_empty());
    }
}

#[test]
fn memory_of_an_unknown_outcome_stays_in_use_at_both_ends() {
    for relay in [false, true] {
        let config = GpuConfig { force_relay: relay, timeout: Duration::from_millis(4), ..small() };
        let mut host = Box::new([0u64; 512]);
        let mut pair = Pair::new(Behaviour { late: NEVER, ..Behaviour::LATE }, config, 5);
        let local = pair.memory[0].local(0, LEN);
        // SAFETY: `host` is freed after the rails, and after the device has finished.
        let host =
            unsafe { Region::new(NonNull::from(&mut *host).cast(), 4096, RegionKind::Private) };
        let (pinned, _) = pair.rails[0].register(&host).unwrap();
        let counts = process(&pair.rails[0]).counts();
        assert!(!pair.rails[0].touches(local));
        pair.write(0, 0, 300, None, 0);
        // The driver fails one query, so the outcome is unknown.
        process(&pair.rails[0]).fail(Call::Reached, 0, DeviceError::Driver(999));
        if relay {
            while pair.rails[0].streams.out() > 0 {
                pair.rails[0].poll(8, &mut pair.seen[0]);
            }
        } else {
            pair.until("a completion", |pair| pair.ended(0).is_some());
            assert_eq!(pair.ended(0), Some(Err(CompleteError::Unknown(999))));
        }
        assert!(pair.rails[0].touches(local), "relay {relay}");
        for key in [pair.memory[0].key, pinned] {
            assert_eq!(pair.rails[0].deregister(key), Err(AttachError::Kept(libc::EBUSY)));
        }
        // The memory stays open in this process, so the peer cannot free it either.
        pair.rails[0].release(PEER, pair.memory[1].key);
        pair.rails[0].detach(PEER);
        let Pair { driver, rails, .. } = pair;
        let kept = process(&rails[0]).clone();
        drop(rails);
        // Both staging buffers are unpinned, and the region is not.
        assert_eq!(
            (kept.counts().closes, kept.counts().unpins),
            (counts.closes, counts.unpins + 2)
        );
        driver.behave(|behaviour| behaviour.late = 0);
        driver.drain();
        assert_eq!(driver.violations(), [], "relay {relay}");
    }
}

#[test]
fn memory_of_an_abandoned_staged_copy_stays_until_the_device_has_finished() {
    let config = GpuConfig { timeout: Duration::from_millis(4), ..small() };
    let mut pair = Pair::new(Behaviour { late: NEVER, ..Behaviour::LATE }, config, 7);
    let local = pair.memory[0].local(0, 64);
    // SAFETY: the range is registered device memory.
    let placed = unsafe { pair.rails[0].write_device(local, Untrusted::from_slice(&[1; 64])) };
    assert_eq!(placed, Err(PostError::Provider(libc::ETIMEDOUT)));
    assert!(pair.rails[0].touches(local));
    pair.driver.behave(|behaviour| behaviour.late = 0);
    pair.driver.drain();
    assert!(!pair.rails[0].touches(local));
    assert_eq!(pair.rails[0].deregister(pair.memory[0].key), Ok(()));
    pair.check();
}

#[test]
fn a_copy_that_nobody_waits_for_is_given_up_in_time() {
    let config = GpuConfig { timeout: Duration::from_millis(4), ..small() };
    for fetches in [false, true] {
        let mut pair = Pair::new(Behaviour { late: NEVER, ..Behaviour::LATE }, config.clone(), 8);
        let local = pair.memory[0].local(0, 64);
        let (mut copy, mut bytes, begun) = (0, [1; 64], Instant::now());
        let error = loop {
            // SAFETY: the range is registered device memory.
            let done = unsafe {
                match fetches {
                    true => pair.rails[0].fetch_device(local, &mut bytes, &mut copy),
                    false => pair.rails[0].place_device(
                        local,
                        Untrusted::from_slice(&[1; 64]),
                        &mut copy,
                    ),
                }
            };
            match done {
                Err(PostError::Again) => {
                    assert!(begun.elapsed() < Duration::from_secs(20), "{fetches}")
                }
                done => break done,
            }
        };
        assert_eq!((error, copy), (Err(PostError::Provider(libc::ETIMEDOUT)), 0), "{fetches}");
        assert!(pair.rails[0].touches(local), "{fetches}");
        pair.driver.behave(|behaviour| behaviour.late = 0);
        pair.driver.drain();
        assert!(!pair.rails[0].touches(local), "{fetches}");
        assert_eq!(pair.rails[0].deregister(pair.memory[0].key), Ok(()), "{fetches}");
        pair.check();
    }
}

#[test]
fn the_death_of_a_peer_completes_its_operations_and_its_memory_is_not_accessed() {
    for relay in [false, true] {
        for seed in 1..6 {
            let config = GpuConfig { force_relay: relay, ..small() };
            let mut pair = Pair::new(Behaviour { late: 100, ..Behaviour::LATE }, config, seed);
            for n in 0..10u32 {
                pair.write(0, 0, 9000, Some(n), n.into());
            }
            pair.poll();
            let Pair { driver, rails, memory, mut seen } = pair;
            let [mut origin, target] = rails;
            process(&target).kill();
            drop(target);
            origin.check_peers(&mut seen[0]);
            for _ in 0..PATIENCE {
                if seen[0].done.len() == 10 {
                    break;
                }
                origin.poll(8, &mut seen[0]);
            }
            assert_eq!((seen[0].done.len(), seen[0].down.len()), (10, 1), "seed {seed}: {seen:?}");
            let (local, remote) = (memory[0].local(0, 10), memory[1].remote(0));
            // SAFETY: the rail refuses the post, so it accesses no memory.
            let posted = unsafe { origin.post_write(PEER, local, remote, None, 99) };
            assert_eq!(posted, Err(PostError::PeerDown));
            let touched = process(&origin).counts().orphans_touched;
            origin.detach(PEER);
            let counts = process(&origin).counts();
            assert_eq!((counts.opens, counts.orphans_touched), (counts.closes, touched));
            drop(origin);
            driver.drain();
            assert_eq!(driver.violations(), []);
        }
    }
}

#[test]
fn b16_an_end_that_leaves_during_traffic_blocks_no_other_and_frees_nothing_in_use() {
    for round in 0..12u64 {
        let behaviour = Behaviour { write_word: round % 2 == 0, ..Behaviour::LATE };
        let config = GpuConfig { force_relay: round % 3 == 0, ..small() };
        let Pair { driver, rails, memory, .. } = Pair::new(behaviour, config, round);
        let [mut a, mut b] = rails;
        // One end detaches after a varying number of polls, whatever the other end is doing.
        let leaving = std::thread::spawn(move || {
            let mut seen = Seen::default();
            for _ in 0..(round * 37 % 400) {
                b.poll(8, &mut seen);
            }
            b.detach(PEER);
            let leaver = process(&b).clone();
            drop(b);
            leaver
        });
        let (mut seen, mut posted, mut pending) = (Seen::default(), 0u64, 0usize);
        let end = soon();
        while seen.down.is_empty() {
            assert!(Instant::now() < end, "round {round}: {seen:?}");
            let (local, remote) = (memory[0].local(0, 3000), memory[1].remote(0));
            // SAFETY: the memory lives until the rail is dropped.
            match unsafe { a.post_write(PEER, local, remote, Some(posted as u32), posted) } {
                Ok(result) => {
                    posted += 1;
                    pending += usize::from(result == Posted::Pending);
                }
                Err(PostError::Again | PostError::PeerDown | PostError::BadKey) => {}
                Err(error) => panic!("round {round}: {error:?}"),
            }
            a.poll(8, &mut seen);
            a.check_peers(&mut seen);
        }
        let leaver = leaving.join().unwrap();
        a.detach(PEER);
        while a.poll(8, &mut seen) > 0 {}
        assert_eq!(seen.done.len(), pending, "round {round}: every post completes once");
        let stayer = process(&a).clone();
        drop(a);
        driver.drain();
        assert_eq!(driver.violations(), [], "round {round}");
        for counts in [leaver.counts(), stayer.counts()] {
            assert_eq!(
                (counts.opens, counts.pins),
                (counts.closes, counts.unpins),
                "round {round}"
            );
        }
    }
}

#[test]
fn b6_b7_a_stale_operation_id_is_rejected_even_when_generations_wrap() {
    use crate::rail::queue::{Op, OpKind, Ops};
    let op = Op {
        cx: 0,
        peer: PEER,
        life: 1,
        kind: OpKind::Direct,
        import: None,
        local: None,
        parts: 0,
        unposted: false,
        error: None,
        data: None,
        ticket: None,
        word_queued: false,
        reported: false,
    };
    for start in [1, u32::MAX - 2] {
        let mut ops = Ops::new(2);
        ops.begin_at(start);
        let mut old = vec![];
        for _ in 0..8 {
            let index = ops.insert(op).unwrap();
            let id = ops.id(index);
            assert!(id >> 32 != 0, "generation 0 is reserved");
            assert_eq!(ops.find(id), Some(index));
            assert!(!old.contains(&id));
            assert!(ops.remove(index).is_some());
            old.push(id);
            for &id in &old {
                assert_eq!(ops.find(id), None, "{id:#x}");
            }
            let again = ops.insert(op).unwrap();
            assert!(ops.id(again) >> 32 != 0);
            assert!(old.iter().all(|&id| ops.find(id).is_none()));
            ops.remove(again);
        }
        for id in [0, 2, 1 << 32 | 2, u64::MAX] {
            assert_eq!(ops.find(id), None);
        }
    }
}

#[test]
fn a_copy_from_the_device_that_is_continued_with_more_bytes_begins_anew() {
    let mut pair = Pair::new(Behaviour::LATE, small(), 8);
    poke(&pair.rails[0], &pair.memory[0], 0, &[7; 4000]);
    let (mut copy, mut bytes) = (0, [0; 4000]);
    let mut fetch = |pair: &mut Pair, len: usize| {
        let local = pair.memory[0].local(0, len);
        // SAFETY: the memory outlives the pair.
        unsafe { pair.rails[0].fetch_device(local, &mut bytes[..len], &mut copy) }
    };
    assert_eq!(fetch(&mut pair, 80), Err(PostError::Again));
    let begun = Instant::now();
    while let Err(error) = fetch(&mut pair, 4000) {
        assert_eq!(error, PostError::Again);
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    assert_eq!(bytes, [7; 4000]);
    pair.check();
}
