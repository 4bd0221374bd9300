//! Tests of transfers through bounce slots.

use fishplate_shm::Segment;

use super::*;

#[test]
fn row_15_without_peer_access_transfers_are_relayed_intact() {
    for seed in 1..8 {
        let mut pair = match seed % 2 {
            0 => Pair::apart(Behaviour::LATE, small(), seed),
            _ => Pair::new(Behaviour::LATE, GpuConfig { force_relay: true, ..small() }, seed),
        };
        let mut random = Random(seed + 5);
        for round in 0..40u64 {
            let len = [1, 4095, 4096, 4097, 20_000, 1 + random.below(30_000)][random.below(6)];
            let (from, to) = (random.below(LEN - len), random.below(LEN - len));
            let sent = bytes(seed * 1000 + round, len);
            if round % 2 == 1 {
                poke(&pair.rails[1], &pair.memory[1], to, &sent);
                assert_eq!(pair.read(from, to, len, round), Posted::Pending);
                pair.until("a read", |pair| pair.ended(round).is_some());
                assert!(
                    peek(&pair.rails[0], &pair.memory[0], from, len) == sent,
                    "seed {seed} {round}"
                );
            } else {
                poke(&pair.rails[0], &pair.memory[0], from, &sent);
                assert_eq!(pair.write(from, to, len, Some(round as u32), round), Posted::Pending);
                pair.until("a write", |pair| pair.seen[1].landed.contains(&(round as u32)));
                assert!(
                    peek(&pair.rails[1], &pair.memory[1], to, len) == sent,
                    "seed {seed} {round}"
                );
                pair.until("its end", |pair| pair.ended(round).is_some());
            }
            assert_eq!(pair.ended(round), Some(Ok(())));
        }
        assert_eq!(pair.rails[0].stats().direct, 0);
        assert_eq!(process(&pair.rails[0]).counts().opens, 0, "what is relayed is not opened");
        pair.check();
    }
}

/// Each end has more reads than slots. Each reply has more pieces than slots. One end also writes
/// between its reads.
#[test]
fn b15_both_ends_read_long_ranges_of_the_other_at_once() {
    for seed in 1..20 {
        let mut pair = Pair::apart(Behaviour::LATE, small(), seed);
        let half = LEN / 2;
        let sent = [0, 1].map(|end| bytes(seed + end, half));
        for (end, sent) in sent.iter().enumerate() {
            poke(&pair.rails[end], &pair.memory[end], 0, sent);
        }
        for cx in 0..12 {
            for end in [0, 1] {
                assert_eq!(pair.read_by(end, half, 0, half, cx), Posted::Pending);
            }
            pair.write(0, 0, 4096, Some(cx as u32), 100 + cx);
        }
        pair.until("all", |pair| {
            pair.seen.iter().map(|seen| seen.done.len()).sum::<usize>() == 3 * 12
        });
        assert!(pair.seen.iter().all(|seen| seen.done.iter().all(|(_, result)| *result == Ok(()))));
        for end in [0, 1] {
            let got = peek(&pair.rails[end], &pair.memory[end], half + 4096, half - 4096);
            assert!(got == sent[1 - end][4096..], "seed {seed}");
        }
        assert_eq!(pair.seen[1].landed, (0..12).collect::<Vec<u32>>());
        pair.check();
    }
}

#[test]
fn row_15_pieces_are_pipelined_up_to_the_number_of_slots() {
    let mut pair = Pair::apart(Behaviour { late: 40, ..Behaviour::LATE }, small(), 3);
    pair.write(0, 0, 60_000, Some(1), 1);
    let mut most = 0;
    for _ in 0..PATIENCE {
        let relay = pair.rails[0].shared(PEER).unwrap().relay.as_ref().unwrap();
        let full = relay.in_flight();
        most = most.max(full);
        assert!(full <= 4);
        if pair.ended(1).is_some() {
            break;
        }
        pair.poll();
    }
    assert_eq!(pair.ended(1), Some(Ok(())));
    assert!(most >= 2, "one piece at a time is no pipeline");
    pair.check();
}

#[test]
fn device_and_host_memory_of_any_kind_reach_each_other() {
    // Host memory is not pinned, so no processor or device can access both ends.
    let config = GpuConfig { pin_regions: false, ..small() };
    let mut pair = Pair::new(Behaviour::LATE, config, 4);
    let segment = Segment::create(20_000).unwrap();
    let mut private = vec![0u8; 20_000];
    // SAFETY: both buffers outlive the pair's use of them, and are accessed only between transfers.
    let regions = unsafe {
        let ptr = NonNull::from(&mut private[..]).cast();
        [segment.region(0, 20_000).unwrap(), Region::new(ptr, 20_000, RegionKind::Private)]
    };
    for (n, region) in regions.iter().enumerate() {
        let set = |sent: &[u8]| {
            // SAFETY: the memory is accessed only between transfers.
            unsafe { std::ptr::copy(sent.as_ptr(), region.ptr().as_ptr(), sent.len()) };
        };
        let get = || {
            let mut got = vec![0; 20_000];
            // SAFETY: the memory is accessed only between transfers.
            unsafe { std::ptr::copy(region.ptr().as_ptr(), got.as_mut_ptr(), got.len()) };
            got
        };
        let n = n as u64 * 10;
        // Transfers from local device memory to remote host memory, and back.
        let (key, _) = pair.rails[1].register(region).unwrap();
        pair.rails[0].import(PEER, key, 20_000).unwrap();
        let remote = Remote { key, offset: 0 };
        poke(&pair.rails[0], &pair.memory[0], 3, &bytes(n, 20_000));
        let local = pair.memory[0].local(3, 20_000);
        // SAFETY: the memory outlives the pair.
        unsafe { pair.rails[0].post_write(PEER, local, remote, Some(n as u32), n) }.unwrap();
        pair.until("a write", |pair| {
            pair.seen[1].landed.contains(&(n as u32)) && pair.ended(n).is_some()
        });
        assert!(get() == bytes(n, 20_000), "device to host");
        set(&bytes(n + 1, 20_000));
        // SAFETY: the memory outlives the pair.
        unsafe { pair.rails[0].post_read(PEER, local, remote, n + 1) }.unwrap();
        pair.until("a read", |pair| pair.ended(n + 1).is_some());
        assert!(
            peek(&pair.rails[0], &pair.memory[0], 3, 20_000) == bytes(n + 1, 20_000),
            "host to device"
        );
        pair.rails[0].release(PEER, key);
        pair.rails[1].deregister(key).unwrap();
        // Transfers from local host memory to remote device memory, and back.
        let (key, desc) = pair.rails[0].register(region).unwrap();
        let local = Local { ptr: region.ptr(), len: 20_000, desc };
        set(&bytes(n + 2, 20_000));
        let remote = pair.memory[1].remote(7);
        // SAFETY: the memory outlives the pair.
        unsafe { pair.rails[0].post_write(PEER, local, remote, Some(n as u32 + 2), n + 2) }
            .unwrap();
        pair.until("a write", |pair| pair.ended(n + 2).is_some());
        assert!(
            peek(&pair.rails[1], &pair.memory[1], 7, 20_000) == bytes(n + 2, 20_000),
            "host to device"
        );
        set(&bytes(n + 3, 20_000));
        // SAFETY: the memory outlives the pair.
        unsafe { pair.rails[0].post_read(PEER, local, remote, n + 3) }.unwrap();
        pair.until("a read", |pair| pair.ended(n + 3).is_some());
        assert!(get() == bytes(n + 2, 20_000), "device to host");
        pair.rails[0].deregister(key).unwrap();
    }
    assert!(pair.seen[0].done.iter().all(|(_, result)| result.is_ok()));
    assert_eq!(pair.rails[0].stats().relayed, 8);
    pair.check();
}

#[test]
fn deregistering_a_region_fails_transfers_relayed_to_it() {
    let mut pair = Pair::apart(Behaviour::LATE, small(), 5);
    pair.write(0, 0, 40_000, Some(1), 1);
    let key = pair.memory[1].key;
    pair.rails[1].deregister(key).unwrap();
    pair.read(0, 0, 100, 2);
    pair.until("ends", |pair| pair.seen[0].done.len() == 2);
    let failed = Some(Err(CompleteError::Failed(libc::EFAULT)));
    assert_eq!((pair.ended(1), pair.ended(2)), (failed, failed));
    assert!(pair.seen[1].landed.is_empty(), "a write of which pieces failed has not landed");
    assert!(pair.seen.iter().all(|seen| seen.down.is_empty()));
    pair.check();
}

#[test]
fn a_relayed_write_with_a_failed_piece_is_not_reported() {
    for (end, skip) in [(0usize, 0u64), (0, 2), (1, 0), (1, 2), (1, 4)] {
        let mut pair = Pair::apart(Behaviour::LATE, small(), 5);
        process(&pair.rails[end]).fail(Call::Copy, skip, DeviceError::Driver(717));
        pair.write(0, 0, 5 * 4096, Some(1), 1);
        pair.write(0, 0, 4096, Some(2), 2);
        pair.until("ends", |pair| pair.seen[0].done.len() == 2);
        assert!(
            matches!(pair.ended(1), Some(Err(CompleteError::Failed(_)))),
            "{end} {skip}: {:?}",
            pair.seen
        );
        assert!(!pair.seen[1].landed.contains(&1), "{end} {skip}");
        if end == 1 {
            assert_eq!((pair.ended(2), &pair.seen[1].landed[..]), (Some(Ok(())), &[2][..]));
        }
        pair.check();
    }
}

/// A failed piece of one write must not count for the next write.
#[test]
fn a_relayed_write_that_is_broken_off_does_not_fail_the_next() {
    for skip in 1..5 {
        let mut pair = Pair::apart(Behaviour::LATE, small(), skip);
        process(&pair.rails[0]).fail(Call::Copy, skip, DeviceError::Driver(717));
        process(&pair.rails[1]).fail(Call::Copy, 0, DeviceError::Driver(717));
        pair.write(0, 0, 5 * 4096, Some(1), 1);
        pair.write(0, 0, 3 * 4096, Some(2), 2);
        pair.until("ends", |pair| pair.seen[0].done.len() == 2);
        assert!(
            matches!(pair.ended(1), Some(Err(CompleteError::Failed(_)))),
            "{skip}: {:?}",
            pair.seen
        );
        assert_eq!((pair.ended(2), &pair.seen[1].landed[..]), (Some(Ok(())), &[2][..]), "{skip}");
        assert!(pair.seen.iter().all(|seen| seen.down.is_empty()));
        pair.check();
    }
}

#[test]
fn b15_three_ranks_sending_in_a_circle_all_finish() {
    for relay in [false, true] {
        let config = GpuConfig { force_relay: relay, timeout: Duration::from_secs(20), ..small() };
        let driver = FakeDriver::new(Behaviour::LATE, 6);
        let mut rails: Vec<FakeRail> =
            (0..3).map(|_| rail(&driver.process(), config.clone())).collect();
        // Each rank attaches the next rank as peer 1 and the previous rank as peer 2.
        for i in 0..3 {
            let [mut a, mut b] = [i, (i + 1) % 3]
                .map(|i| std::mem::replace(&mut rails[i], rail(&driver.process(), config.clone())));
            join(&mut a, Peer(1), &mut b, Peer(2));
            (rails[i], rails[(i + 1) % 3]) = (a, b);
        }
        let memory: Vec<[Memory; 2]> =
            rails.iter_mut().map(|rail| [memory(rail, 50_000), memory(rail, 50_000)]).collect();
        let keys: Vec<RailKey> = memory.iter().map(|[into, _]| into.key).collect();
        let ranks: Vec<_> = rails
            .into_iter()
            .enumerate()
            .map(|(i, mut rail)| {
                let (next, from) = (keys[(i + 1) % 3], memory[i][1]);
                std::thread::spawn(move || {
                    // No handle has been exchanged yet, so each import waits for the next rank.
                    rail.import(Peer(1), next, 50_000).unwrap();
                    let mut seen = Seen::default();
                    for n in 0..20u32 {
                        let remote = Remote { key: next, offset: 0 };
                        loop {
                            // SAFETY: the memory outlives the rail.
                            let posted = unsafe {
                                rail.post_write(
                                    Peer(1),
                                    from.local(0, 50_000),
                                    remote,
                                    Some(n),
                                    n.into(),
                                )
                            };
                            match posted {
                                Ok(_) => break,
                                Err(error) => assert_eq!(error, PostError::Again),
                            }
                            rail.poll(8, &mut seen);
                        }
                    }
                    let end = soon();
                    while seen.landed.len() < 20 || seen.done.len() < 20 {
                        assert!(Instant::now() < end, "rank {i}: {seen:?}");
                        rail.poll(8, &mut seen);
                        rail.check_peers(&mut seen);
                    }
                    assert!(seen.done.iter().all(|(_, result)| result.is_ok()), "{seen:?}");
                    // The other ranks may still need answers from this rank.
                    for _ in 0..2000 {
                        rail.poll(8, &mut seen);
                    }
                    rail
                })
            })
            .collect();
        // Drops no rail before all ranks are done.
        let rails: Vec<FakeRail> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert_eq!(driver.violations(), []);
        drop(rails);
    }
}

#[test]
fn a_peer_that_empties_no_slots_blocks_no_other() {
    let driver = FakeDriver::new(Behaviour::LATE, 2);
    let config = GpuConfig { force_relay: true, ..small() };
    let mut origin = rail(&driver.process(), config.clone());
    let from = memory(&mut origin, 60_000);
    let mut targets: Vec<(FakeRail, Memory)> = (0..2u16)
        .map(|n| {
            let mut target = rail(&driver.process(), config.clone());
            join(&mut origin, Peer(n), &mut target, PEER);
            let into = memory(&mut target, 60_000);
            origin.import(Peer(n), into.key, 60_000).unwrap();
            (target, into)
        })
        .collect();
    let (mut seen, mut there) = (Seen::default(), Seen::default());
    for n in [0u16, 1] {
        let remote = targets[usize::from(n)].1.remote(0);
        // SAFETY: the memory outlives the rails.
        unsafe {
            origin.post_write(Peer(n), from.local(0, 60_000), remote, Some(n.into()), n.into())
        }
        .unwrap();
    }
    for _ in 0..PATIENCE {
        origin.poll(8, &mut seen);
        // The first target is never polled.
        targets[1].0.poll(8, &mut there);
        if !seen.done.is_empty() {
            break;
        }
    }
    assert_eq!((seen.done, there.landed), (vec![(1, Ok(()))], vec![1]));
    drop((origin, targets));
    driver.drain();
    assert_eq!(driver.violations(), []);
}

#[test]
fn memory_deregistered_during_a_relayed_read_is_not_read_again() {
    for seed in 1..101 {
        let config = GpuConfig { pin_regions: false, ..small() };
        let mut pair = Pair::apart(Behaviour::LATE, config, seed);
        let mut private = vec![1u8; 60_000];
        // SAFETY: `private` outlives the pair, and is accessed only between polls.
        let region = unsafe {
            Region::new(NonNull::from(&mut private[..]).cast(), 60_000, RegionKind::Private)
        };
        let device = pair.memory[1];
        poke(&pair.rails[1], &device, 0, &[1; 60_000]);
        let key = match seed % 2 {
            0 => pair.rails[1].register(&region).unwrap().0,
            _ => device.key,
        };
        pair.rails[0].import(PEER, key, if seed % 2 == 0 { 60_000 } else { LEN as u64 }).unwrap();
        let local = pair.memory[0].local(0, 60_000);
        // SAFETY: the memory outlives the pair.
        let post = unsafe { pair.rails[0].post_read(PEER, local, Remote { key, offset: 0 }, 1) };
        assert_eq!(post, Ok(Posted::Pending));
        while pair.rails[1].shared(PEER).unwrap().relay.as_ref().unwrap().in_flight() == 0 {
            pair.poll();
        }
        let mut random = Random(seed);
        for _ in 0..random.below(12) {
            let end = random.below(2);
            pair.rails[end].poll(8, &mut pair.seen[end]);
        }
        pair.rails[1].deregister(key).unwrap();
        for _ in 0..random.below(20) {
            pair.rails[1].poll(8, &mut pair.seen[1]);
        }
        poke(&pair.rails[1], &device, 0, &[2; 60_000]);
        // SAFETY: the memory is accessed only between polls.
        unsafe { region.ptr().as_ptr().write_bytes(2, 60_000) };
        pair.until("its end", |pair| pair.ended(1).is_some());
        assert_eq!(pair.ended(1), Some(Err(CompleteError::Failed(libc::EFAULT))), "seed {seed}");
        (0..1000).for_each(|_| pair.poll());
        assert!(
            !peek(&pair.rails[0], &pair.memory[0], 0, 60_000).contains(&2),
            "seed {seed}: what is over"
        );
        let other = memory(&mut pair.rails[1], 4096);
        pair.rails[0].import(PEER, other.key, 4096).unwrap();
        // SAFETY: the memory outlives the pair.
        let post = unsafe {
            pair.rails[0].post_write(
                PEER,
                pair.memory[0].local(0, 100),
                other.remote(0),
                Some(9),
                9,
            )
        };
        assert_eq!(post, Ok(Posted::Pending), "seed {seed}: {:?}", pair.seen);
        pair.until("a write", |pair| pair.seen[1].landed == [9] && pair.ended(9) == Some(Ok(())));
        assert!(pair.seen.iter().all(|seen| seen.down.is_empty()));
        pair.check();
    }
}

#[test]
fn a_piece_whose_copy_has_an_unknown_outcome_fails_its_transfer_at_both_ends() {
    for (end, len, skip) in [(0, 4096, 0), (0, 20_000, 2), (1, 4096, 0), (1, 20_000, 2)] {
        let mut pair = Pair::apart(Behaviour::LATE, small(), 8);
        let process = process(&pair.rails[end]).clone();
        let start = |pair: &mut Pair, cx: u64| match end {
            0 => pair.write(0, 0, len, Some(cx as u32), cx),
            _ => pair.read(0, 0, len, cx),
        };
        start(&mut pair, 1);
        process.fail(Call::Reached, skip, DeviceError::Driver(999));
        pair.until("its end", |pair| pair.ended(1).is_some());
        let expected =
            if end == 0 { CompleteError::Unknown(999) } else { CompleteError::Failed(libc::EIO) };
        assert_eq!(pair.ended(1), Some(Err(expected)), "{end} {len}");
        // The copy may still change its bounce slot, so other transfers through that slot fail too.
        for cx in 2..6 {
            start(&mut pair, cx);
            pair.until("an end", |pair| pair.ended(cx).is_some());
        }
        let failed = (2..6)
            .filter(|cx| pair.ended(*cx) == Some(Err(CompleteError::Failed(libc::EIO))))
            .count();
        assert_eq!(failed, if len == 4096 { 1 } else { 4 }, "{end} {len}: {:?}", pair.seen);
        for _ in 0..1000 {
            pair.poll();
        }
        let good = (2..6).filter(|cx| pair.ended(*cx) == Some(Ok(())));
        assert_eq!(
            pair.seen[1].landed.len(),
            if end == 0 { good.count() } else { 0 },
            "{:?}",
            pair.seen
        );
        assert!(pair.seen.iter().all(|seen| seen.down.is_empty()));
    }
}
