//! B18: a peer writes arbitrary values into all memory that it can write. The victim may report the
//! violation. It must not access any memory except registered memory and the memory of its own
//! posts.

use std::ptr::NonNull;

use fishplate_core::error::{CompleteError, PeerError, PostError, Violation};
use fishplate_core::mem::{Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, Remote};
use fishplate_core::sync::event::Park;
use fishplate_core::sync::primitive::{AtomicU64, Ordering};

use crate::ShmConfig;
use crate::lane::CELL;
use crate::record;
use crate::segment::PAGE;
use crate::testing::{PEER, Random, Seen, TestRail, couple};

const CANARY: u8 = 0xc5;
const EDGE: usize = 4096;

/// Memory with canaries on both sides of a part that is registered or used by posts.
struct Guarded {
    bytes: Vec<u8>,
    len: usize,
}

impl Guarded {
    fn new(len: usize) -> Self {
        Guarded { bytes: vec![CANARY; EDGE + len + EDGE], len }
    }

    fn ptr(&mut self) -> NonNull<u8> {
        NonNull::from(&mut self.bytes[EDGE..EDGE + self.len]).cast()
    }

    fn is_whole(&self) -> bool {
        let (head, rest) = self.bytes.split_at(EDGE);
        head.iter().chain(&rest[self.len..]).all(|byte| *byte == CANARY)
    }
}

fn rounds() -> u64 {
    std::env::var("FISHPLATE_HOSTILE").ok().and_then(|text| text.parse().ok()).unwrap_or(6000)
}

/// Performs one random attack: an invalid write, or a valid action at the wrong time.
fn harm(hostile: &mut TestRail, random: &mut Random, key: u64) {
    let attached = hostile.attached(PEER).unwrap();
    let (segment, len) = attached.outgoing().raw();
    let word = |offset: usize| {
        assert!(offset + 8 <= len && offset.is_multiple_of(8));
        // SAFETY: `offset` lies inside the hostile end's own segment, which is mapped writable.
        // Both sides access the word as an atomic.
        unsafe { &*segment.add(offset).cast::<AtomicU64>() }
    };
    match random.below(8) {
        // Overwrites any word of the segment: header, cursor, stamp or record.
        0 => word(random.below(len / 8) * 8).store(random.next(), Ordering::Relaxed),
        1 => {
            word(random.below(len / 8) * 8).fetch_xor(1 << random.below(64), Ordering::Relaxed);
        }
        // Moves the cursor by a small or large error.
        2 => {
            attached
                .outgoing()
                .cursor()
                .fetch_add(random.next() >> random.below(64), Ordering::Relaxed);
        }
        // Publishes a record with a valid stamp and arbitrary contents, in plausible fields.
        3..=6 => {
            let cells = 1 + random.below(20) as u64;
            let Ok(place) = attached.out.reserve(cells) else { return };
            let mut words = [0; 6].map(|_| random.next() >> random.below(64));
            if random.below(4) > 0 {
                words[0] = key ^ u64::from(random.below(20) == 0) << random.below(64);
            }
            if random.below(2) == 0 {
                words[1] %= 70_000;
                words[2] = random.below(40) as u64 | random.next() & (record::LAST | record::DATA);
            }
            if random.below(4) == 0 {
                words[0] = random.below(40) as u64;
            }
            let value = random.next() as u32 >> random.below(32);
            let header = record::header(random.below(9) as u32, value)
                ^ u64::from(random.below(30) == 0) << 8;
            // SAFETY: `reserve` returned room for these cells.
            unsafe {
                record::store(place, words);
                attached.out.publish(cells, header);
            }
        }
        // Flips a bit of a record that was already sent.
        _ => {
            let at = PAGE
                + (attached.out.position().wrapping_sub(1 + random.below(4) as u64) % 64) as usize
                    * CELL;
            word(at + random.below(8) * 8).fetch_xor(1 << random.below(64), Ordering::Relaxed);
        }
    }
}

#[test]
fn b18_whatever_a_peer_writes_it_is_an_error_and_nothing_else() {
    let seed = std::env::var("FISHPLATE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or(0x0b18_5eed);
    println!("FISHPLATE_SEED={seed}");
    let mut random = Random(seed);
    let config = ShmConfig {
        lane_cells: 64,
        max_message: 1024,
        force_staging: true,
        ..ShmConfig::default()
    };
    let mut quarantined = 0;
    let mut reasons = std::collections::HashSet::new();
    let mut left = rounds();
    while left > 0 {
        let mut registered = Guarded::new(60_000);
        let mut lent = Guarded::new(9000);
        let [mut victim, mut hostile] = couple(config.clone());
        // SAFETY: `registered` outlives the rail, and the test reads it only between polls.
        let region = unsafe { Region::new(registered.ptr(), registered.len, RegionKind::Private) };
        let (key, _) = victim.register(&region).unwrap();
        let mut theirs = Guarded::new(60_000);
        // SAFETY: `theirs` outlives the rail, and the test reads it only between polls.
        let region = unsafe { Region::new(theirs.ptr(), theirs.len, RegionKind::Private) };
        let (their_key, _) = hostile.register(&region).unwrap();
        victim.import(PEER, their_key, 60_000).unwrap();
        hostile.import(PEER, key, 60_000).unwrap();
        let mut seen = Seen::default();
        let mut posted = 0;
        while left > 0 {
            left -= 1;
            harm(&mut hostile, &mut random, key.key);
            let local = Local { ptr: lent.ptr(), len: random.below(lent.len), desc: 0 };
            let remote = Remote { key: their_key, offset: random.below(1000) as u64 };
            let post = match random.below(4) {
                // SAFETY: `lent` outlives the rail, and nothing reads it.
                0 => unsafe { victim.post_read(PEER, local, remote, left) },
                // SAFETY: `lent` outlives the rail, and nothing writes to it.
                1 => unsafe { victim.post_write(PEER, local, remote, Some(1), left) },
                _ => victim.post_message(PEER, &[1; 32], Untrusted::from_slice(&[2; 100]), left),
            };
            posted += u32::from(post == Ok(Posted::Pending));
            assert!(victim.poll(32, &mut seen) <= 32);
            if random.below(3) == 0 {
                hostile.poll(random.below(32) as u32, &mut Seen::default());
            }
            if let [(peer, why)] = seen.down[..] {
                let PeerError::Protocol(violation) = why else { panic!("{why:?}") };
                assert_eq!(peer, PEER);
                reasons.insert(format!("{violation:?}"));
                quarantined += 1;
                break;
            }
        }
        assert!(seen.down.len() <= 1);
        if !seen.down.is_empty() {
            assert_eq!(
                victim.post_message(PEER, &[], Untrusted::from_slice(&[]), 0),
                Err(PostError::PeerDown)
            );
            let before = seen.messages.len() + seen.landed.len();
            while victim.poll(3, &mut seen) > 0 {}
            harm(&mut hostile, &mut random, key.key);
            assert_eq!(victim.poll(32, &mut seen), 0, "not heard again");
            assert_eq!(seen.messages.len() + seen.landed.len(), before);
            assert_eq!(seen.done.len(), posted as usize, "every post ends once");
        }
        assert!(registered.is_whole() && lent.is_whole(), "written outside");
    }
    println!("{quarantined} times quarantined, for {reasons:?}");
    assert!(reasons.len() >= 5, "{reasons:?}");
}

/// Publishes a record with arbitrary contents.
fn forge(hostile: &mut TestRail, cells: u64, header: u64, words: record::Words) {
    let attached = hostile.attached(PEER).unwrap();
    let place = attached.out.reserve(cells).unwrap();
    // SAFETY: `reserve` returned room for these cells.
    unsafe {
        record::store(place, words);
        attached.out.publish(cells, header);
    }
}

/// Tests each check separately, because with random values another check usually fails first.
#[test]
fn b18_every_violation_is_found_by_its_name() {
    use crate::record::{DATA, LANDED, LAST, MESSAGE, READ, REPLY, STATUS, WRITE, header};
    use Violation::{Bounds, Kind, Length, Reply, Sequence};

    // The victim has a read of 2000 bytes in flight with id 0, and a partly sent write with id 1.
    // It has registered 4096 bytes, and its chunks have 1024 bytes.
    const END: u64 = 4096;
    type Forged = fn(u64) -> Vec<(u64, u64, record::Words)>;
    let cases: [(&str, Violation, Forged); 28] = [
        ("no kind", Kind, |_| vec![(1, header(0, 0), [0; 6])]),
        ("a kind too many", Kind, |_| vec![(1, header(7, 0), [0; 6])]),
        ("a reserved bit", Kind, |_| vec![(1, header(LANDED | 1 << 8, 0), [0; 6])]),
        ("a gap too long", Kind, |_| vec![(2, header(MESSAGE | 49 << 8, 8), [0; 6])]),
        ("a gap of another kind", Kind, |_| vec![(2, header(MESSAGE | 1 << 16, 8), [0; 6])]),
        ("a message too long behind a gap", Length, |_| {
            vec![(20, header(MESSAGE | 16 << 8, 1025), [0; 6])]
        }),
        ("a message too long", Length, |_| vec![(20, header(MESSAGE, 1025), [0; 6])]),
        ("a message beyond the lane", Length, |_| vec![(1, header(MESSAGE, u32::MAX), [0; 6])]),
        ("a chunk too long", Length, |k| vec![(33, header(WRITE, 2000), [k, 0, 3, 0, 0, 0])]),
        ("a chunk beyond the lane", Length, |k| {
            vec![(1, header(WRITE, u32::MAX), [k, 0, 3, 0, 0, 0])]
        }),
        ("a write past the end", Bounds, |k| vec![(2, header(WRITE, 8), [k, END - 7, 3, 0, 0, 0])]),
        ("a write around the end", Bounds, |k| {
            vec![(2, header(WRITE, 8), [k, u64::MAX - 3, 3, 0, 0, 0])]
        }),
        ("a write with no number", Sequence, |k| vec![(2, header(WRITE, 8), [k, 0, 32, 0, 0, 0])]),
        ("a flag that is none", Sequence, |k| {
            vec![(2, header(WRITE, 8), [k, 0, DATA << 1, 0, 0, 0])]
        }),
        ("a word too wide", Kind, |k| {
            vec![(2, header(WRITE, 8), [k, 0, LAST | DATA, 1 << 32, 0, 0])]
        }),
        ("a read past the end", Bounds, |k| vec![(1, header(READ, 0), [k, END - 7, 3, 8, 0, 0])]),
        ("a read of everything", Bounds, |k| vec![(1, header(READ, 0), [k, 8, 3, u64::MAX, 0, 0])]),
        ("a read with a value", Kind, |k| vec![(1, header(READ, 1), [k, 0, 3, 8, 0, 0])]),
        ("a read with no number", Sequence, |k| vec![(1, header(READ, 0), [k, 0, 32, 8, 0, 0])]),
        ("a number used twice", Sequence, |k| vec![(1, header(READ, 0), [k, 0, 3, 8, 0, 0]); 2]),
        ("a reply to nothing", Reply, |_| vec![(2, header(REPLY, 8), [5, 0, 0, 0, 0, 0])]),
        ("a reply to a write", Reply, |_| vec![(2, header(REPLY, 8), [1, 0, 0, 0, 0, 0])]),
        ("a short reply", Length, |_| vec![(9, header(REPLY, 500), [0, 0, 0, 0, 0, 0])]),
        ("a reply too far on", Length, |_| vec![(17, header(REPLY, 976), [0, 1024, 0, 0, 0, 0])]),
        ("a reply too long", Length, |_| vec![(33, header(REPLY, 2000), [0, 0, 0, 0, 0, 0])]),
        ("a status of nothing", Reply, |_| vec![(1, header(STATUS, 0), [5, 0, 0, 0, 0, 0])]),
        ("a read ended well without data", Reply, |_| vec![(1, header(STATUS, 0), [0; 6])]),
        ("a write ended before it was sent", Reply, |_| {
            vec![(1, header(STATUS, 0), [1, 0, 0, 0, 0, 0])]
        }),
    ];
    let config = ShmConfig {
        lane_cells: 64,
        max_message: 1024,
        force_staging: true,
        ..ShmConfig::default()
    };
    for (name, violation, records) in cases {
        let (mut registered, mut lent, mut theirs) =
            (Guarded::new(4096), Guarded::new(9000), Guarded::new(9000));
        let [mut victim, mut hostile] = couple(config.clone());
        // SAFETY: both buffers outlive the rails, and the test reads them only between polls.
        let [ours, other] = unsafe {
            [(&mut registered, 4096), (&mut theirs, 9000)]
                .map(|(memory, len)| Region::new(memory.ptr(), len, RegionKind::Private))
        };
        let (key, _) = victim.register(&ours).unwrap();
        let (their_key, _) = hostile.register(&other).unwrap();
        victim.import(PEER, their_key, 9000).unwrap();
        let remote = Remote { key: their_key, offset: 0 };
        // SAFETY: `lent` outlives the rail, and the test reads it only after both posts have
        // completed.
        let posts = unsafe {
            let local = |ptr, len| Local { ptr, len, desc: 0 };
            [
                victim.post_read(PEER, local(lent.ptr(), 2000), remote, 0),
                victim.post_write(PEER, local(lent.ptr(), 9000), remote, None, 1),
            ]
        };
        assert_eq!(posts, [Ok(Posted::Pending); 2]);
        for (cells, header, words) in records(key.key) {
            forge(&mut hostile, cells, header, words);
        }
        let mut seen = Seen::default();
        while victim.poll(32, &mut seen) > 0 {}
        assert_eq!(seen.down, [(PEER, PeerError::Protocol(violation))], "{name}");
        let down = Err(CompleteError::PeerDown);
        assert_eq!(seen.done, [(0, down), (1, down)], "{name}");
        assert!(seen.landed.is_empty() && seen.messages.is_empty(), "{name}");
        assert!(registered.is_whole() && lent.is_whole(), "{name}: written outside");
    }
}

#[test]
fn b18_a_cursor_found_wrong_while_sending_is_reported_in_the_same_pass() {
    let config = ShmConfig {
        lane_cells: 64,
        max_message: 1024,
        force_staging: true,
        ..ShmConfig::default()
    };
    let (mut lent, mut theirs) = (Guarded::new(9000), Guarded::new(9000));
    let [mut victim, mut hostile] = couple(config);
    // SAFETY: `theirs` outlives the rails, and nothing reads it.
    let region = unsafe { Region::new(theirs.ptr(), 9000, RegionKind::Private) };
    let (key, _) = hostile.register(&region).unwrap();
    victim.import(PEER, key, 9000).unwrap();
    let local = Local { ptr: lent.ptr(), len: 9000, desc: 0 };
    // SAFETY: `lent` outlives the rails, and nothing writes to it.
    let post = unsafe { victim.post_write(PEER, local, Remote { key, offset: 0 }, None, 1) };
    assert_eq!(post, Ok(Posted::Pending));
    hostile.attached(PEER).unwrap().outgoing().cursor().store(1 << 40, Ordering::Relaxed);
    let mut seen = Seen::default();
    assert_eq!(victim.poll(32, &mut seen), 2, "an owner that hears of nothing goes to sleep");
    assert_eq!(seen.down, [(PEER, PeerError::Protocol(Violation::Counter))]);
    assert_eq!(seen.done, [(1, Err(CompleteError::PeerDown))]);
}

#[test]
fn b18_a_doorbell_full_of_anything_costs_a_wake_up_at_most() {
    let mut random = Random(0xd00b);
    let [mut a, mut b] = couple(ShmConfig::default());
    let wait_object = a.wait_object();
    let page: *const fishplate_core::sync::event::EventCount = &*wait_object;
    for _ in 0..1000 {
        // SAFETY: the page stays mapped writable while `wait_object` exists. Both sides access the
        // word as an atomic.
        unsafe { &*page.cast::<AtomicU64>().add(random.below(512)) }
            .store(random.next(), Ordering::Relaxed);
        b.post_message(PEER, b"ring", Untrusted::from_slice(&[]), 0).unwrap();
        b.flush();
        b.notify(PEER);
        let host = fishplate_core::sync::host::SpinHost::new(1);
        let mut seen = Seen::default();
        let found = wait_object.park(&host, 1000, || a.poll(32, &mut seen) > 0);
        assert_eq!((found, seen.messages.len()), (None, 1));
    }
}

#[test]
fn b18_garbage_on_the_socket_is_an_error_and_no_descriptor_is_kept() {
    use crate::packet::{PacketKind, Writer};
    use crate::{Link, Role, ShmRail, socket_pair};
    use fishplate_core::sync::host::SpinHost;
    use std::os::fd::{AsFd, AsRawFd};

    let announce = |number: u32, len: u64| {
        let mut packet = Writer::new(PacketKind::Announce);
        packet.put(number.to_ne_bytes()).put(len.to_ne_bytes());
        packet.finish()
    };
    let unsealed = crate::segment::create(4096).unwrap();
    let sealed = crate::Segment::create(4096).unwrap();
    let blob = Writer::new(PacketKind::Blob).finish();
    let kind = PeerError::Protocol(Violation::Kind);
    let region = PeerError::Protocol(Violation::Region);
    /// Packets, each with a flag that adds a descriptor.
    type Packets = Vec<(Vec<u8>, bool)>;
    let cases: [(&str, Packets, bool, PeerError); 9] = [
        ("noise", vec![(vec![0xee; 100], false)], false, kind),
        ("short", vec![(vec![1], false)], false, kind),
        ("a handshake packet", vec![(Writer::new(PacketKind::Ready).finish(), false)], false, kind),
        ("no descriptor", vec![(announce(1, 4096), false)], false, kind),
        ("a descriptor too many", vec![(blob.clone(), true)], false, kind),
        ("unsealed", vec![(announce(1, 4096), true)], true, region),
        ("wrong size", vec![(announce(1, 8192), true)], false, region),
        ("too many segments", (0..6).map(|n| (announce(n, 4096), true)).collect(), false, kind),
        ("too many blobs", vec![(blob, false); 20], false, kind),
    ];
    for (name, packets, open, why) in cases {
        let config = ShmConfig { max_segments: 4, ..ShmConfig::default() };
        let rail = || ShmRail::new(SpinHost::new(1), config.clone()).unwrap();
        let (mut victim, hostile) = (rail(), rail());
        let (x, y) = socket_pair().unwrap();
        let raw = crate::socket::Socket::new(y.try_clone().unwrap());
        let theirs = hostile.profile();
        let deadline = crate::testing::soon();
        let first =
            std::thread::spawn(move || Link::over(y, Role::First, &theirs, deadline).unwrap());
        let link = Link::over(x, Role::Second, &victim.profile(), deadline).unwrap();
        victim.attach(PEER, link).unwrap();
        let _link = first.join().unwrap();
        let fd = if open { unsealed.as_fd() } else { sealed.fd() };
        assert!(fd.as_raw_fd() >= 0);
        for (packet, with_fd) in &packets {
            let fds = if *with_fd { &[fd][..] } else { &[] };
            raw.try_send(packet, fds).unwrap();
        }
        let mut seen = Seen::default();
        victim.check_peers(&mut seen);
        assert_eq!(seen.down, [(PEER, why)], "{name}");
    }
}
