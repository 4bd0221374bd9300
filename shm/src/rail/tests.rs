use std::ptr::NonNull;

use fishplate_core::error::{CompleteError, PeerError, PostError, Violation};
use fishplate_core::mem::{Peer, Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote};
use fishplate_core::sync::host::SpinHost;

use super::*;
use crate::testing::{PEER, Random, Seen, TestRail, couple, couple_at, met, settle, soon};
use crate::{HandshakeError, Link, Segment};

fn tiny() -> ShmConfig {
    ShmConfig { lane_cells: 64, max_message: 1024, ..ShmConfig::default() }
}

fn staging() -> ShmConfig {
    ShmConfig { force_staging: true, ..tiny() }
}

fn local(bytes: &[u8]) -> Local {
    Local { ptr: NonNull::from(bytes).cast(), len: bytes.len(), desc: 0 }
}

fn local_mut(bytes: &mut [u8]) -> Local {
    Local { ptr: NonNull::from(&mut *bytes).cast(), len: bytes.len(), desc: 0 }
}

fn private(bytes: &mut [u8]) -> Region {
    // SAFETY: each test keeps the bytes alive, and reads them only while no rail is polled.
    unsafe { Region::new(NonNull::from(&mut *bytes).cast(), bytes.len(), RegionKind::Private) }
}

fn send(rail: &mut TestRail, bytes: &[u8]) -> Result<Posted, PostError> {
    let (head, body) = bytes.split_at(bytes.len() / 3);
    rail.post_message(PEER, head, Untrusted::from_slice(body), 0)
}

fn write(
    rail: &mut TestRail,
    from: &[u8],
    key: RailKey,
    offset: u64,
    cx: u64,
) -> Result<Posted, PostError> {
    // SAFETY: callers keep `from` alive and unchanged until the post completes.
    unsafe { rail.post_write(PEER, local(from), Remote { key, offset }, Some(cx as u32), cx) }
}

fn read(
    rail: &mut TestRail,
    into: &mut [u8],
    key: RailKey,
    offset: u64,
    cx: u64,
) -> Result<Posted, PostError> {
    // SAFETY: callers keep `into` alive, and do not access it, until the post completes.
    unsafe { rail.post_read(PEER, local_mut(into), Remote { key, offset }, cx) }
}

#[test]
fn messages_of_every_length_arrive_whole_and_in_order_also_across_the_wrap_of_positions() {
    for start in [0, u64::MAX - 7, (1 << 63) - 5] {
        let mut rails = couple_at(ShmConfig { max_message: 2048, ..tiny() }, start);
        let mut random = Random(0x5eed ^ start | 1);
        let mut seen = [Seen::default(), Seen::default()];
        let mut sent = [Vec::new(), Vec::new()];
        for len in (0..2048).chain(0..200) {
            for (rail, sent) in rails.iter_mut().zip(&mut sent) {
                let bytes = random.bytes(len);
                assert_eq!(send(rail, &bytes), Ok(Posted::Done));
                sent.push(bytes);
            }
            if len % 2 == 0 || len > 500 {
                settle(&mut rails, &mut seen);
            }
        }
        settle(&mut rails, &mut seen);
        let [to_first, to_second] = seen;
        let [by_first, by_second] = sent;
        assert!(to_first.messages == by_second && to_second.messages == by_first);
    }
}

#[test]
fn the_body_of_a_long_message_begins_with_a_cell_and_the_longest_always_fits() {
    /// A sink that records the address and contents of each message.
    struct Places(Vec<(usize, Vec<u8>)>);

    impl Sink for Places {
        fn done(&mut self, _: u64, _: Result<(), CompleteError>) {}

        fn landed(&mut self, _: Peer, _: u32) {}

        fn message(&mut self, _: Peer, bytes: Untrusted<'_>) {
            let mut copy = vec![0; bytes.len()];
            bytes.copy_out(&mut copy);
            self.0.push((bytes.as_ptr() as usize, copy));
        }

        fn peer_down(&mut self, _: Peer, why: PeerError) {
            panic!("{why}");
        }
    }

    let longest = lane::max_message(64);
    let [mut a, mut b] = couple(ShmConfig { max_message: longest, ..tiny() });
    let bytes = Random(0x5eed_a119).bytes(longest);
    let mut places = Places(Vec::new());
    for head in 0..=100 {
        for body in [0, 1, 64, 65, 80, 81, 1000, longest - head] {
            let (front, back) = bytes[..head + body].split_at(head);
            let posted = a.post_message(PEER, front, Untrusted::from_slice(back), 0);
            assert_eq!(
                posted,
                Ok(Posted::Done),
                "{head} and {body} bytes, the lane empty but for what is held back"
            );
            b.poll(32, &mut places);
            let (at, came) = places.0.pop().unwrap();
            assert_eq!(came, bytes[..head + body], "{head} and {body} bytes");
            if body > 64 && head <= 48 {
                assert_eq!((at + head) % 64, 0, "{head} and {body} bytes");
            }
        }
    }
}

#[test]
fn a_full_lane_says_again_changes_nothing_and_goes_on() {
    let [mut a, mut b] = couple(tiny());
    let mut sent = 0u32;
    while send(&mut a, &sent.to_ne_bytes()).is_ok() {
        sent += 1;
    }
    assert_eq!(sent, 63, "one cell stays free");
    assert_eq!(send(&mut a, &[0; 1024]), Err(PostError::Again));
    let mut seen = Seen::default();
    assert_eq!(b.poll(10, &mut seen), 10);
    assert_eq!(seen.events, 10, "a pass is bounded");
    while b.poll(32, &mut seen) > 0 {}
    assert_eq!(send(&mut a, &sent.to_ne_bytes()), Ok(Posted::Done));
    b.poll(32, &mut seen);
    let want: Vec<Vec<u8>> = (0..=sent).map(|n| n.to_ne_bytes().to_vec()).collect();
    assert_eq!(seen.messages, want);
    assert_eq!(send(&mut a, &[0; 1025]), Err(PostError::TooLong { len: 1025, max: 1024 }));
}

#[test]
fn a_segment_is_imported_as_a_pointer_announced_before_or_after_attaching() {
    let [(mut a, to_b), (mut b, to_a)] = met(tiny());
    let early = Segment::create(8192).unwrap();
    let late = Segment::create(4096).unwrap();
    // SAFETY: the segments outlive the rails.
    let regions = unsafe { [early.region(4096, 100).unwrap(), late.region(8, 64).unwrap()] };
    let (first, _) = a.register(&regions[0]).unwrap();
    a.attach(PEER, to_b).unwrap();
    b.attach(PEER, to_a).unwrap();
    let (second, _) = a.register(&regions[1]).unwrap();
    let mut seen = Seen::default();
    for (key, region) in [(first, regions[0]), (second, regions[1])] {
        let len = region.len() as u64;
        let mapped = b.import(PEER, key, len).unwrap().expect("mapped");
        assert_ne!(mapped, region.ptr(), "a mapping of its own");
        // SAFETY: the import maps both bytes, and nothing else writes to them.
        unsafe {
            mapped.write(0x5a);
            assert_eq!(region.ptr().read(), 0x5a);
        }
        assert_eq!(write(&mut b, b"put", key, len - 3, 7), Ok(Posted::Done));
        // SAFETY: the segment maps the byte, and nothing else writes to it.
        assert_eq!(unsafe { region.ptr().add(region.len() - 1).read() }, b't');
        assert_eq!(write(&mut b, b"put", key, len - 2, 7), Err(PostError::BadKey));
        assert_eq!(write(&mut b, b"put", key, u64::MAX, 7), Err(PostError::BadKey));
        let mut back = [0; 3];
        assert_eq!(read(&mut b, &mut back, key, len - 3, 8), Ok(Posted::Done));
        assert_eq!(&back, b"put");
        assert_eq!(b.import(PEER, key, len), Ok(Some(mapped)), "a second import shares the first");
        b.release(PEER, key);
        assert_eq!(write(&mut b, b"put", key, 0, 9), Ok(Posted::Done));
        b.release(PEER, key);
        assert_eq!(write(&mut b, b"put", key, 0, 9), Err(PostError::BadKey));
    }
    a.poll(32, &mut seen);
    assert_eq!(seen.landed, [7, 9, 7, 9]);
    let beyond = RailKey { key: first.key, base: 8000 };
    assert_eq!(b.import(PEER, beyond, 200), Err(AttachError::BadRange));
    let foreign = RailKey { key: 7 << 60, base: 0 };
    assert_eq!(b.import(PEER, foreign, 1), Err(AttachError::BadHandle));
}

#[test]
fn a_segment_is_withdrawn_with_its_last_region_and_waiting_for_it_ends() {
    let config = ShmConfig { timeout: std::time::Duration::from_millis(20), ..tiny() };
    let [mut a, mut b] = couple(config);
    let segment = Segment::create(4096).unwrap();
    // SAFETY: the segment outlives the rails.
    let region = unsafe { segment.region(0, 64) }.unwrap();
    let keys = [a.register(&region).unwrap().0, a.register(&region).unwrap().0];
    assert!(b.import(PEER, keys[0], 64).unwrap().is_some());
    b.release(PEER, keys[0]);
    a.deregister(keys[0]).unwrap();
    assert!(b.import(PEER, keys[1], 64).unwrap().is_some(), "another region still lies in it");
    b.release(PEER, keys[1]);
    a.deregister(keys[1]).unwrap();
    assert_eq!(b.import(PEER, keys[1], 64), Err(AttachError::Unheard));
    let (again, _) = a.register(&region).unwrap();
    assert!(b.import(PEER, again, 64).unwrap().is_some());
}

#[test]
fn the_common_segment_is_one_memory_for_both_and_only_for_them() {
    let config = ShmConfig { common_len: 8192, ..tiny() };
    let mut ends = met(config.clone()).map(|(mut rail, link)| {
        let (_, len) = link.common().unwrap();
        assert_eq!(len, 8192);
        // SAFETY: the region is used only while the rail exists.
        let region = unsafe { link.common_region(PEER, 4096, 128) }.unwrap();
        // SAFETY: the call fails, so it returns no region to use.
        let beyond = unsafe { link.common_region(PEER, 8192, 1) };
        assert_eq!(beyond.map(|_| ()), Err(crate::SegmentError::Range));
        assert_eq!(
            rail.register(&region).map(|_| ()),
            Err(AttachError::UnknownPeer),
            "not attached yet"
        );
        rail.attach(PEER, link).unwrap();
        let key = rail.register(&region).unwrap().0;
        (rail, key, region.ptr())
    });
    let [(a, key, ptr), (b, _, twin)] = &mut ends;
    assert_eq!(b.import(PEER, *key, 128), Ok(Some(*twin)));
    assert_eq!(b.import(PEER, RailKey { base: 8190, ..*key }, 128), Err(AttachError::BadHandle));
    assert_eq!(write(b, b"x", *key, 0, 1), Ok(Posted::Done));
    // SAFETY: the common segment maps the byte, and nothing writes to it.
    assert_eq!(unsafe { ptr.read() }, b'x');
    let [mut c, _d] = couple(config);
    assert_eq!(c.import(PEER, *key, 128), Err(AttachError::BadHandle), "the key of another pair");
    a.detach(PEER);
    assert!(a.regions.find(key.key, PEER).is_none(), "what is unmapped is not registered");
}

#[test]
fn private_memory_is_copied_by_the_kernel_within_its_import() {
    let [mut a, mut b] = couple(tiny());
    let mut memory = vec![1u8; 100_000];
    let (key, _) = a.register(&private(&mut memory[100..99_900])).unwrap();
    assert_eq!(b.import(PEER, key, 99_800), Ok(None));
    let Some(attached) = b.attached(PEER) else { panic!() };
    if !attached.cma {
        println!("SKIPPED: the kernel refuses process_vm_readv here");
        return;
    }
    let data = Random(9).bytes(99_800);
    assert_eq!(write(&mut b, &data, key, 0, 5), Ok(Posted::Done));
    let mut back = vec![0; 50_000];
    assert_eq!(read(&mut b, &mut back, key, 1000, 6), Ok(Posted::Done));
    assert_eq!(back, data[1000..51_000]);
    assert_eq!(write(&mut b, &data, key, 1, 5), Err(PostError::BadKey));
    let mut seen = Seen::default();
    a.poll(32, &mut seen);
    assert_eq!(seen.landed, [5]);
    assert!(memory[..100].iter().chain(&memory[99_900..]).all(|byte| *byte == 1));
    assert_eq!(memory[100..99_900], data);
}

#[test]
fn a_direct_copy_into_nothing_ends_as_failed() {
    let [mut a, mut b] = couple(tiny());
    let mut memory = vec![1u8; 64];
    let (key, _) = a.register(&private(&mut memory)).unwrap();
    let nowhere = RailKey { base: 4096, ..key };
    assert_eq!(b.import(PEER, nowhere, 64), Ok(None));
    if !b.attached(PEER).is_some_and(|attached| attached.cma) {
        println!("SKIPPED: the kernel refuses process_vm_readv here");
        return;
    }
    assert_eq!(write(&mut b, &[7; 64], nowhere, 0, 11), Ok(Posted::Pending));
    let mut seen = [Seen::default(), Seen::default()];
    settle(&mut [b, a], &mut seen);
    assert_eq!(seen[0].done, [(11, Err(CompleteError::Failed(libc::EFAULT)))]);
    assert!(seen[1].landed.is_empty(), "no word without its data");
}

#[test]
fn an_address_is_read_only_while_the_peer_is_attached_to_us() {
    let data = Random(3).bytes(9000);
    let from = data.as_ptr().expose_provenance() as u64;
    let reads = |rail: &mut TestRail| {
        let mut back = vec![0; data.len()];
        // SAFETY: `back` is writable, and is not used during the call.
        let whole = unsafe { rail.read_address(PEER, local_mut(&mut back), from) };
        assert!(!whole || back == data);
        whole
    };
    if !couple(tiny())[0].attached(PEER).is_some_and(|attached| attached.cma) {
        println!("SKIPPED: the kernel refuses process_vm_readv here");
        return;
    }
    let leaves: [fn(&mut TestRail); 2] =
        [|rail| rail.detach(PEER), |rail| rail.attached(PEER).unwrap().fail(PeerError::Died)];
    for (case, leave) in leaves.into_iter().enumerate() {
        let [mut ours, mut theirs] = couple(tiny());
        assert!(reads(&mut ours), "case {case}");
        leave(&mut theirs);
        assert!(!reads(&mut ours), "case {case}");
    }
    // The peer's rail is gone, but its process is not.
    let [mut ours, theirs] = couple(tiny());
    assert!(reads(&mut ours));
    drop(theirs);
    assert!(!reads(&mut ours));
}

#[test]
fn staged_writes_and_reads_longer_than_the_lane_arrive_both_ways_at_once() {
    let mut rails = couple(staging());
    let mut seen = [Seen::default(), Seen::default()];
    let mut random = Random(77);
    const LEN: usize = 50_000;
    let mut memory = [random.bytes(LEN), random.bytes(LEN)];
    let data = [random.bytes(LEN), random.bytes(LEN)];
    let old = [memory[0][..999].to_vec(), memory[1][..999].to_vec()];
    let mut back = [vec![0; 999], vec![0; 999]];
    let mut keys = [RailKey::default(); 2];
    for i in 0..2 {
        keys[i] = rails[i].register(&private(&mut memory[i])).unwrap().0;
    }
    for i in 0..2 {
        let key = keys[1 - i];
        assert_eq!(rails[i].import(PEER, key, LEN as u64), Ok(None));
        assert_eq!(read(&mut rails[i], &mut back[i], key, 0, 1), Ok(Posted::Pending));
        assert_eq!(write(&mut rails[i], &data[i][1000..], key, 1000, 2), Ok(Posted::Pending));
        assert_eq!(
            send(&mut rails[i], b"late"),
            Err(PostError::Again),
            "nothing overtakes a write half sent"
        );
    }
    settle(&mut rails, &mut seen);
    for i in 0..2 {
        assert_eq!(back[i], old[1 - i]);
        assert_eq!(memory[i][1000..], data[1 - i][1000..]);
        assert_eq!(seen[i].landed, [2]);
        let mut done = std::mem::take(&mut seen[i].done);
        done.sort_by_key(|(cx, _)| *cx);
        assert_eq!(done, [(1, Ok(())), (2, Ok(()))]);
        assert_eq!(send(&mut rails[i], b"late"), Ok(Posted::Done));
    }
    assert_eq!(write(&mut rails[0], &[], keys[1], 5, 3), Ok(Posted::Pending), "also without data");
    assert_eq!(read(&mut rails[0], &mut [], keys[1], 5, 4), Ok(Posted::Pending));
    settle(&mut rails, &mut seen);
    assert_eq!(seen[0].done.len(), 2);
    assert_eq!(seen[1].landed, [2, 3]);
}

#[test]
fn staged_operations_are_bounded_and_refusals_change_nothing() {
    let mut rails = couple(staging());
    let mut seen = [Seen::default(), Seen::default()];
    let mut memory = vec![0u8; 4096];
    let (key, _) = rails[1].register(&private(&mut memory)).unwrap();
    rails[0].import(PEER, key, 4096).unwrap();
    let depth = rails[0].caps().depth as usize;
    let mut back = vec![[1u8; 8]; depth + 1];
    for (cx, into) in back.iter_mut().enumerate() {
        let want = if cx < depth { Ok(Posted::Pending) } else { Err(PostError::Again) };
        assert_eq!(read(&mut rails[0], into, key, 0, cx as u64), want);
    }
    // The lane is full, so writes and reads find no room. A refused post changes nothing.
    settle(&mut rails, &mut seen);
    assert_eq!(seen[0].done.len(), depth);
    while send(&mut rails[0], &[0; 40]).is_ok() {}
    assert_eq!(write(&mut rails[0], &[9; 8], key, 0, 70), Err(PostError::Again));
    assert_eq!(read(&mut rails[0], &mut [0; 8], key, 0, 70), Err(PostError::Again));
    settle(&mut rails, &mut seen);
    assert_eq!(seen[0].done.len(), depth);
    assert_eq!(memory[0], 0);
    // SAFETY: the bytes outlive the call.
    let copied = unsafe { rails[0].copy_to(PEER, &[(local(&[1]), Remote { key, offset: 0 })]) };
    assert_eq!(copied, None, "not at once");
}

#[test]
fn a_region_taken_back_fails_what_names_it_and_touches_nothing() {
    let mut rails = couple(staging());
    let mut seen = [Seen::default(), Seen::default()];
    let mut memory = vec![3u8; 9000];
    let (key, _) = rails[1].register(&private(&mut memory)).unwrap();
    rails[0].import(PEER, key, 9000).unwrap();
    let mut back = vec![4u8; 9000];
    assert_eq!(read(&mut rails[0], &mut back, key, 0, 1), Ok(Posted::Pending));
    // The first chunks of the reply are in flight.
    rails[1].poll(32, &mut seen[1]);
    rails[1].deregister(key).unwrap();
    assert_eq!(write(&mut rails[0], &[5; 9000], key, 0, 2), Ok(Posted::Pending));
    settle(&mut rails, &mut seen);
    let mut done = seen[0].done.clone();
    done.sort_by_key(|(cx, _)| *cx);
    let failed = Err(CompleteError::Failed(libc::EFAULT));
    assert_eq!(done, [(1, failed), (2, failed)]);
    assert!(seen[1].landed.is_empty() && memory.iter().all(|byte| *byte == 3));
    let (next, _) = rails[1].register(&private(&mut memory)).unwrap();
    assert_ne!(next.key, key.key);
    assert!(seen.iter().all(|seen| seen.down.is_empty()), "no violation: it was under way");
}

#[test]
fn a_post_beyond_a_registered_region_is_a_violation() {
    let mut rails = couple(staging());
    let mut seen = [Seen::default(), Seen::default()];
    let mut memory = [3u8; 128];
    let (key, _) = rails[1].register(&private(&mut memory[..64])).unwrap();
    rails[0].import(PEER, key, 128).unwrap();
    assert_eq!(write(&mut rails[0], &[5; 65], key, 0, 2), Ok(Posted::Pending));
    settle(&mut rails, &mut seen);
    assert_eq!(seen[1].down, [(PEER, PeerError::Protocol(Violation::Bounds))]);
    assert!(memory.iter().all(|byte| *byte == 3));
    assert_eq!(send(&mut rails[1], b"x"), Err(PostError::PeerDown));
    rails[1].detach(PEER);
    rails[0].check_peers(&mut seen[0]);
    assert_eq!(seen[0].down, [(PEER, PeerError::Closed)]);
    assert_eq!(seen[0].done, [(2, Err(CompleteError::PeerDown))]);
}

#[test]
fn detaching_ends_what_is_posted_once_and_says_good_bye() {
    let mut rails = couple(staging());
    let mut seen = [Seen::default(), Seen::default()];
    let mut memory = vec![3u8; 9000];
    let (key, _) = rails[1].register(&private(&mut memory)).unwrap();
    rails[0].import(PEER, key, 9000).unwrap();
    let mut back = vec![4u8; 9000];
    assert_eq!(read(&mut rails[0], &mut back, key, 0, 1), Ok(Posted::Pending));
    assert_eq!(write(&mut rails[0], &[5; 9000], key, 0, 2), Ok(Posted::Pending));
    rails[0].detach(PEER);
    rails[0].detach(PEER);
    assert_eq!(send(&mut rails[0], b"x"), Err(PostError::PeerDown));
    assert_eq!(rails[0].poll(1, &mut seen[0]), 1);
    settle(&mut rails, &mut seen);
    let down = Err(CompleteError::PeerDown);
    assert_eq!(seen[0].done, [(1, down), (2, down)]);
    rails[1].check_peers(&mut seen[1]);
    rails[1].check_peers(&mut seen[1]);
    assert_eq!(seen[1].down, [(PEER, PeerError::Closed)], "once");
}

#[test]
fn what_was_sent_before_leaving_is_delivered_before_the_end() {
    let [mut a, mut b] = couple(tiny());
    for n in 0..20u8 {
        send(&mut a, &[n; 200]).unwrap();
        a.flush();
        if n == 9 {
            let mut seen = Seen::default();
            while b.poll(32, &mut seen) > 0 {}
            assert_eq!(seen.messages.len(), 10);
        }
    }
    drop(a);
    let mut seen = Seen::default();
    b.check_peers(&mut seen);
    assert_eq!(seen.messages.len(), 10);
    assert_eq!(seen.down, [(PEER, PeerError::Closed)]);
}

#[test]
fn a_process_is_its_own_peer() {
    let mut rail = ShmRail::new(SpinHost::new(1), tiny()).unwrap();
    rail.attach_self(PEER).unwrap();
    assert_eq!(
        rail.attach_self(PEER),
        Err(AttachError::Full("ShmConfig::max_peers, or the peer is attached already"))
    );
    let mut memory = vec![0u8; 64];
    let region = private(&mut memory);
    let (key, _) = rail.register(&region).unwrap();
    assert_eq!(rail.import(PEER, key, 65), Err(AttachError::BadRange));
    assert_eq!(rail.import(PEER, key, 64), Ok(Some(region.ptr())));
    assert_eq!(write(&mut rail, b"self", key, 60, 4), Ok(Posted::Done));
    let mut seen = Seen::default();
    for n in 0..1000u32 {
        assert_eq!(send(&mut rail, &n.to_ne_bytes()), Ok(Posted::Done));
        rail.notify(PEER);
        rail.check_peers(&mut seen);
        rail.poll(32, &mut seen);
    }
    assert_eq!(seen.landed, [4]);
    assert_eq!(seen.messages.len(), 1000);
    assert_eq!(&memory[60..], b"self");
    assert!(seen.down.is_empty());
}

#[test]
fn blobs_are_exchanged_in_order_before_and_after_attaching() {
    let [(mut a, mut to_b), (mut b, mut to_a)] = met(tiny());
    let other = std::thread::spawn(move || {
        let big = vec![7; crate::MAX_BLOB];
        assert_eq!(to_a.exchange(&big, soon()).unwrap(), b"one");
        b.attach(PEER, to_a).unwrap();
        assert_eq!(b.exchange(PEER, b"", soon()).unwrap(), b"two");
        b
    });
    assert_eq!(to_b.exchange(b"one", soon()).unwrap(), vec![7; crate::MAX_BLOB]);
    let long = vec![0; crate::MAX_BLOB + 1];
    assert_eq!(
        to_b.exchange(&long, soon()),
        Err(HandshakeError::TooLong { len: long.len(), max: crate::MAX_BLOB })
    );
    a.attach(PEER, to_b).unwrap();
    assert_eq!(a.exchange(PEER, b"two", soon()).unwrap(), b"");
    assert_eq!(a.exchange(Peer(0), b"", soon()), Err(HandshakeError::UnknownPeer));
    drop(other.join().unwrap());
    assert_eq!(a.exchange(PEER, b"", soon()), Err(HandshakeError::HungUp));
}

#[test]
fn several_peers_share_a_pass_and_none_starves() {
    let mut hub = ShmRail::new(SpinHost::new(1), tiny()).unwrap();
    let mut spokes: Vec<TestRail> = (0..5)
        .map(|n| {
            let mut spoke = ShmRail::new(SpinHost::new(1), tiny()).unwrap();
            let (x, y) = crate::socket_pair().unwrap();
            let (hubs, theirs) = (hub.profile(), spoke.profile());
            let first = std::thread::spawn(move || {
                Link::over(x, crate::Role::First, &hubs, soon()).unwrap()
            });
            let link = Link::over(y, crate::Role::Second, &theirs, soon()).unwrap();
            hub.attach(Peer(n), first.join().unwrap()).unwrap();
            spoke.attach(PEER, link).unwrap();
            spoke
        })
        .collect();
    #[derive(Default)]
    struct Count([u32; 5]);
    impl Sink for Count {
        fn done(&mut self, _: u64, _: Result<(), CompleteError>) {}
        fn landed(&mut self, _: Peer, _: u32) {}
        fn message(&mut self, peer: Peer, _: Untrusted<'_>) {
            self.0[usize::from(peer.0)] += 1;
        }
        fn peer_down(&mut self, _: Peer, _: PeerError) {}
    }
    let mut count = Count::default();
    for _ in 0..100 {
        for spoke in &mut spokes {
            while send(spoke, b"flood").is_ok() {}
        }
        assert_eq!(hub.poll(32, &mut count), 32);
    }
    assert!(count.0.iter().all(|n| *n >= 320), "{:?}", count.0);
}

#[test]
fn a_link_belongs_to_the_rail_whose_profile_made_it() {
    let [(_a, to_b), (_b, _)] = met(tiny());
    let mut other = ShmRail::new(SpinHost::new(1), tiny()).unwrap();
    assert!(matches!(other.attach(PEER, to_b), Err(AttachError::Config(_))));
}
