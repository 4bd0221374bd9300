//! Tests of transfers that the device copies itself.

use super::*;

#[test]
fn random_transfers_arrive_intact_on_a_slow_device() {
    for seed in 1..12 {
        // For every other seed, allocations have eight adjacent physical segments.
        let kind = if seed % 2 == 0 { MemoryKind::Segments } else { MemoryKind::Legacy };
        let (granule, segment) = (4096, LEN as u64 / 8);
        let behaviour =
            Behaviour { write_word: seed % 3 != 0, kind, granule, segment, ..Behaviour::LATE };
        let mut pair = Pair::new(behaviour, small(), seed);
        let mut random = Random(seed + 77);
        for round in 0..60u64 {
            let len = [0, 1, 511, 512, 513, 3000, 1 + random.below(8000)][random.below(7)];
            let (from, to) = (random.below(LEN - len), random.below(LEN - len));
            let sent = bytes(seed * 1000 + round, len);
            if round % 3 == 2 {
                poke(&pair.rails[1], &pair.memory[1], to, &sent);
                if pair.read(from, to, len, round) == Posted::Pending {
                    pair.until("a read", |pair| pair.ended(round).is_some());
                    assert_eq!(pair.ended(round), Some(Ok(())));
                }
                assert!(
                    peek(&pair.rails[0], &pair.memory[0], from, len) == sent,
                    "seed {seed} {round}"
                );
            } else {
                poke(&pair.rails[0], &pair.memory[0], from, &sent);
                let posted = pair.write(from, to, len, Some(round as u32), round);
                let landed = |pair: &Pair| pair.seen[1].landed.contains(&(round as u32));
                pair.until("a write", landed);
                // If the completion word has arrived, the bytes must have arrived.
                assert!(
                    peek(&pair.rails[1], &pair.memory[1], to, len) == sent,
                    "seed {seed} {round}"
                );
                if posted == Posted::Pending {
                    pair.until("its end", |pair| pair.ended(round).is_some());
                    assert_eq!(pair.ended(round), Some(Ok(())));
                }
            }
        }
        assert_eq!(pair.rails[0].stats().relayed, 0);
        let segments = if kind == MemoryKind::Segments { 8 } else { 1 };
        assert_eq!(process(&pair.rails[0]).counts().opens, segments);
        pair.check();
    }
}

#[test]
fn row_5_an_allocation_is_opened_once_before_the_first_transfer() {
    let mut pair = Pair::new(Behaviour::PLAIN, small(), 1);
    assert_eq!(process(&pair.rails[0]).counts().opens, 1);
    for n in 0..20 {
        pair.write(0, 0, 100, Some(n), n.into());
    }
    pair.until("writes", |pair| pair.seen[1].landed.len() == 20);
    assert_eq!(process(&pair.rails[0]).counts().opens, 1);
    pair.check();
}

#[test]
fn row_6_steady_state_takes_at_most_three_driver_calls_and_no_packet() {
    let mut pair = Pair::new(Behaviour::LATE, small(), 1);
    pair.write(0, 0, 400, Some(0), 0);
    pair.until("the first", |pair| pair.ended(0).is_some() && pair.seen[1].landed.len() == 1);
    let before = [0, 1].map(|i| process(&pair.rails[i]).counts().calls);
    for n in 1..=500u32 {
        pair.write(0, 0, 400, Some(n), n.into());
    }
    pair.until("all", |pair| pair.seen[0].done.len() == 501 && pair.seen[1].landed.len() == 501);
    let calls = process(&pair.rails[0]).counts().calls.since(&before[0]);
    assert_eq!([calls[Call::Copy], calls[Call::WriteWord]], [500, 500]);
    // Transfers that queue up in a stream share a mark.
    assert!((1..500).contains(&calls[Call::Mark]), "{}", calls[Call::Mark]);
    for call in Call::ALL {
        let expected = matches!(call, Call::Copy | Call::Mark | Call::WriteWord | Call::Reached);
        assert!(expected || calls[call] == 0, "{call:?}");
    }
    assert_eq!(
        process(&pair.rails[1]).counts().calls.since(&before[1]).total(),
        0,
        "of the target"
    );
    // Checks that no packet waits in the socket, at either end.
    for rail in &mut pair.rails {
        use std::os::fd::AsRawFd;
        let line = rail.inner.line(PEER).unwrap();
        assert!(!line.has_notices());
        let mut poll = libc::pollfd { fd: line.fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one local structure.
        assert_eq!(unsafe { libc::poll(&mut poll, 1, 0) }, 0, "a packet was sent");
    }
    pair.check();
}

#[test]
fn row_16_a_transfer_is_cut_into_pieces_over_the_streams() {
    for (len, spread) in [(512usize, 1u64), (513, 2), (4 * 512, 4), (7 * 512 + 13, 4), (40_001, 4)]
    {
        let mut pair = Pair::new(Behaviour { write_word: true, ..Behaviour::LATE }, small(), 3);
        let sent = bytes(len as u64, len);
        poke(&pair.rails[0], &pair.memory[0], 5, &sent);
        let before = process(&pair.rails[0]).counts().calls;
        pair.write(5, 9, len, Some(1), 1);
        let calls = process(&pair.rails[0]).counts().calls.since(&before);
        assert_eq!(calls[Call::Copy], len.div_ceil(512) as u64, "{len}");
        assert_eq!(calls[Call::Mark], spread, "{len}");
        // After a single copy, the device stores the word. With several streams, the rail stores it
        // after all copies have finished.
        assert_eq!(calls[Call::WriteWord], u64::from(spread == 1), "{len}");
        pair.until("the write", |pair| pair.seen[1].landed.len() == 1);
        assert!(peek(&pair.rails[1], &pair.memory[1], 9, len) == sent, "{len}");
        pair.until("its end", |pair| pair.ended(1) == Some(Ok(())));
        pair.check();
    }
}

#[test]
fn a_post_refused_for_lack_of_room_changes_nothing() {
    // Limits the transfers by marks, operations or done words.
    let configs = [
        (Behaviour { marks: 3, ..Behaviour::LATE }, small()),
        (Behaviour::LATE, GpuConfig { ops: 3, ..small() }),
        (Behaviour::LATE, GpuConfig { done_words: 4, ..small() }),
    ];
    for (behaviour, config) in configs {
        let mut pair = Pair::new(behaviour, config, 9);
        poke(&pair.rails[0], &pair.memory[0], 0, &bytes(1, 4096));
        let (mut accepted, mut refused) = (vec![], 0);
        for n in 0..400u32 {
            let at = n as usize * 8;
            let (local, remote) = (pair.memory[0].local(at, 8), pair.memory[1].remote(at));
            let before = process(&pair.rails[0]).counts().calls;
            // SAFETY: the memory lives until the pair is dropped.
            match unsafe { pair.rails[0].post_write(PEER, local, remote, Some(n), n.into()) } {
                Ok(_) => accepted.push(n),
                Err(error) => {
                    assert_eq!(error, PostError::Again);
                    let calls = process(&pair.rails[0]).counts().calls.since(&before);
                    assert_eq!(calls.total(), 0, "a refused post called the driver");
                    refused += 1;
                    pair.poll();
                }
            }
        }
        assert!(refused > 0);
        pair.until("what was accepted", |pair| pair.seen[1].landed.len() == accepted.len());
        let mut landed = pair.seen[1].landed.clone();
        landed.sort_unstable();
        assert_eq!(landed, accepted);
        pair.until("ends", |pair| pair.seen[0].done.len() == accepted.len());
        for n in 0..400usize {
            let want = if accepted.contains(&(n as u32)) {
                &bytes(1, 4096)[n * 8..n * 8 + 8]
            } else {
                &[0; 8]
            };
            assert_eq!(peek(&pair.rails[1], &pair.memory[1], n * 8, 8), want, "{n}");
        }
        pair.check();
    }
}

#[test]
fn short_transfers_are_processor_stores_if_both_sides_are_mapped() {
    let behaviour = Behaviour { host_view: true, ..Behaviour::LATE };
    let mut pair = Pair::new(behaviour, GpuConfig { mapped_store: 64, ..small() }, 2);
    let before = process(&pair.rails[0]).counts().calls;
    for (n, len) in [1usize, 63, 64].into_iter().enumerate() {
        let sent = bytes(n as u64, len);
        poke(&pair.rails[0], &pair.memory[0], 0, &sent);
        assert_eq!(pair.write(0, 100, len, Some(n as u32), n as u64), Posted::Done);
        assert_eq!(peek(&pair.rails[1], &pair.memory[1], 100, len), sent);
        assert_eq!(pair.read(200, 100, len, 9), Posted::Done);
        assert_eq!(peek(&pair.rails[0], &pair.memory[0], 200, len), sent);
    }
    assert_eq!(process(&pair.rails[0]).counts().calls.since(&before).total(), 0);
    assert_eq!(pair.write(0, 0, 65, Some(3), 3), Posted::Pending);
    pair.until("words", |pair| pair.seen[1].landed.len() == 4);
    assert_eq!((pair.rails[0].stats().stored, pair.rails[0].stats().direct), (6, 1));
    pair.until("its end", |pair| pair.ended(3).is_some());
    pair.check();
}

#[test]
fn pinned_host_memory_is_transferred_by_one_device_copy() {
    let mut pair = Pair::new(Behaviour::LATE, small(), 4);
    let mut host = bytes(1, 4000);
    let ptr = NonNull::from(&mut host[..]).cast::<u8>();
    // SAFETY: the vector outlives the pair's use of it, and is accessed only through this pointer.
    let region = unsafe { Region::new(ptr, 4000, RegionKind::Private) };
    let (key, desc) = pair.rails[0].register(&region).unwrap();
    let local = Local { ptr, len: 4000, desc };
    // SAFETY: the memory outlives the pair's use of it.
    let posted =
        unsafe { pair.rails[0].post_write(PEER, local, pair.memory[1].remote(8), Some(1), 1) };
    assert_eq!(posted, Ok(Posted::Pending));
    pair.until("the write", |pair| pair.seen[1].landed.len() == 1);
    assert_eq!(peek(&pair.rails[1], &pair.memory[1], 8, 4000), bytes(1, 4000));
    poke(&pair.rails[1], &pair.memory[1], 8, &bytes(2, 4000));
    // SAFETY: the memory outlives the pair's use of it.
    let posted = unsafe { pair.rails[0].post_read(PEER, local, pair.memory[1].remote(8), 2) };
    assert_eq!(posted, Ok(Posted::Pending));
    // Deregistering waits for the copy in flight.
    pair.rails[0].deregister(key).unwrap();
    assert_eq!(host, bytes(2, 4000));
    assert_eq!(pair.rails[0].stats().relayed, 0);
    pair.check();
}

#[test]
fn device_bytes_pass_through_pinned_memory() {
    for behaviour in [Behaviour::LATE, Behaviour { host_view: true, ..Behaviour::LATE }] {
        let mut pair = Pair::new(behaviour, small(), 5);
        let rail = &mut pair.rails[0];
        let at = memory(rail, 300_000);
        let sent = bytes(3, 200_000);
        // SAFETY: the range is registered device memory.
        unsafe { rail.write_device(at.local(70, 200_000), Untrusted::from_slice(&sent)) }.unwrap();
        assert!(peek(rail, &at, 70, 200_000) == sent);
        let mut got = vec![0; 200_000];
        // SAFETY: the range is registered device memory.
        unsafe { rail.read_device(at.local(70, 200_000), &mut got) }.unwrap();
        assert!(got == sent);
        let outside = at.local(299_999, 2);
        // SAFETY: the rail refuses the call, so it accesses no memory.
        assert_eq!(unsafe { rail.read_device(outside, &mut got) }, Err(PostError::BadKey));
        pair.check();
    }
}

#[test]
fn an_unlimited_timeout_works() {
    let mut pair = Pair::new(Behaviour::LATE, GpuConfig { timeout: Duration::MAX, ..small() }, 1);
    assert_eq!(pair.write(0, 0, 100, Some(1), 1), Posted::Pending);
    pair.until("a write", |pair| pair.ended(1).is_some());
    let key = pair.memory[1].key;
    pair.rails[0].release(PEER, key);
    pair.rails[1].deregister(key).unwrap();
    pair.check();
}
