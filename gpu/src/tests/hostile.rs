//! Checks that peers that send invalid messages get an error. No call panics or opens unexpected
//! memory, no descriptor leaks, and no data structure grows without bound.

use std::sync::Arc;

use fishplate_shm::extension::{Batch, Extension, Reader};

use super::*;
use crate::record::LinkRecord;

fn id(key: u64) -> AllocId {
    AllocId::from_key(key).unwrap()
}

/// Returns a handle with segments of these sizes.
fn segments(sizes: &[u64]) -> Handle {
    Handle::Segments(sizes.iter().map(|size| (junk(), *size)).collect())
}

/// Returns one packet of each kind, each with its number of descriptors.
fn packets(uuid: &Uuid) -> Vec<(Vec<u8>, usize)> {
    let binding = Binding { version: 3, alloc: id(5), offset: 64, len: 128 };
    vec![
        (wire::export(id(5), 4096, uuid, Some(&Handle::Legacy([7; LEGACY_HANDLE]))), 0),
        (wire::export(id(6), 4096, uuid, Some(&Handle::Descriptor(junk()))), 1),
        (wire::export(id(7), 4096, uuid, None), 0),
        (wire::export(id(8), 12288, uuid, Some(&segments(&[4096, 8192]))), 2),
        (wire::request(id(5)), 0),
        (wire::refuse(wire::Ask::Alloc(id(5))), 0),
        (wire::refuse(wire::Ask::Buffer(9, Wanted::Latest)), 0),
        (wire::publish(9, &binding), 0),
        (wire::query(9, Wanted::Version(3), true), 0),
        (wire::unpublish(9), 0),
        (wire::revoke(1, id(5)), 0),
        (wire::revoke_ack(1, id(5)), 0),
    ]
}

/// Handles a packet as the socket does, with this number of descriptors. Returns whether it was
/// accepted.
fn take(record: &mut LinkRecord, packet: &[u8], fds: usize) -> bool {
    take_with(record, packet, fds, junk().as_fd())
}

/// Handles a packet like `take`, with descriptors of this file.
fn take_with(record: &mut LinkRecord, packet: &[u8], fds: usize, file: BorrowedFd<'_>) -> bool {
    let Ok((kind, body)) = Reader::extension(packet) else { return false };
    let fds = (0..fds).map(|_| file.try_clone_to_owned().unwrap().into()).collect::<Vec<_>>();
    let mut fds = Batch::from(fds);
    record.take(kind, body, &mut fds).is_ok() && fds.next().is_none()
}

#[test]
fn b18_packets_with_a_flipped_bit_or_wrong_length_are_harmless() {
    let mut record = LinkRecord::default();
    let file = junk();
    for (packet, fds) in packets(&[1; 16]) {
        let home = packet == wire::export(id(7), 4096, &[1; 16], None);
        assert_eq!(take_with(&mut record, &packet, fds, file.as_fd()), !home, "{packet:?}");
        for len in 0..packet.len() {
            assert!(!take_with(&mut record, &packet[..len], fds, file.as_fd()), "cut at {len}");
            let mut cut = packet[..len].to_vec();
            if len >= 16 {
                // The length field matches the cut packet.
                cut[12..16].copy_from_slice(&(len as u32).to_ne_bytes());
                assert!(!take_with(&mut record, &cut, fds, file.as_fd()), "cut at {len}");
            }
        }
        let mut long = packet.clone();
        long.push(0);
        assert!(!take_with(&mut record, &long, fds, file.as_fd()));
        long[12..16].copy_from_slice(&(packet.len() as u32 + 1).to_ne_bytes());
        assert!(!take_with(&mut record, &long, fds, file.as_fd()));
        for bit in 0..packet.len() * 8 {
            let mut flipped = packet.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let taken = take_with(&mut record, &flipped, fds, file.as_fd());
            assert!(bit >= 128 || !taken || flipped[10] != packet[10], "bit {bit} of the head");
        }
        for wrong in (0..4).filter(|wrong| *wrong != fds) {
            assert!(!take_with(&mut record, &packet, wrong, file.as_fd()), "{wrong} descriptors");
        }
        // Unopened handles are kept, up to the limit.
        assert!(copies(file.as_fd()) <= 1 + record::MAX_DESCRIPTORS);
    }
}

#[test]
fn b18_extreme_numbers_are_refused() {
    let mut record = LinkRecord::default();
    let alloc = id(5);
    for (offset, len) in [(u64::MAX, 1), (1, u64::MAX), (0, 0), (1 << 63, 1), (i64::MAX as u64, 1)]
    {
        let binding = Binding { version: 1, alloc, offset, len };
        assert!(!take(&mut record, &wire::publish(1, &binding), 0), "{offset} {len}");
    }
    assert!(!take(
        &mut record,
        &wire::publish(1, &Binding { version: 0, alloc, offset: 0, len: 1 }),
        0
    ));
    for size in [0, 1 << 63, u64::MAX] {
        let handle = Handle::Legacy([0; LEGACY_HANDLE]);
        assert!(
            !take(&mut record, &wire::export(alloc, size, &[0; 16], Some(&handle)), 0),
            "{size}"
        );
    }
    let whole =
        |sizes: &[u64], said: u64| wire::export(alloc, said, &[0; 16], Some(&segments(sizes)));
    for (sizes, said) in [
        (&[4096, 4096][..], 4096),
        (&[4096, 4096], 12288),
        (&[4096, 0, 4096], 8192),
        (&[4096], 4096),
        (&[], 4096),
        (&[u64::MAX, 4097], 4096),
        (&[1 << 62, 1 << 62], 1 << 63),
        (&[1; MAX_SEGMENTS + 1], MAX_SEGMENTS as u64 + 1),
    ] {
        assert!(!take(&mut record, &whole(sizes, said), sizes.len()), "{} segments", sizes.len());
    }
    // The maximum number of segments is accepted.
    assert!(take(&mut record, &whole(&[1; MAX_SEGMENTS], MAX_SEGMENTS as u64), MAX_SEGMENTS));
    // A version must not change its location.
    let binding = Binding { version: 1, alloc, offset: 0, len: 1 };
    assert!(take(&mut record, &wire::publish(1, &binding), 0));
    assert!(take(&mut record, &wire::publish(1, &binding), 0));
    assert!(!take(&mut record, &wire::publish(1, &Binding { len: 2, ..binding }), 0));
}

#[test]
fn b18_state_that_a_peer_controls_is_bounded() {
    let mut record = LinkRecord::default();
    let handle = Handle::Legacy([0; LEGACY_HANDLE]);
    for key in 1..100_000 {
        assert!(take(&mut record, &wire::export(id(key), 1, &[0; 16], Some(&handle)), 0));
    }
    assert_eq!(
        (1..100_000).filter(|key| record.accept(id(*key)).is_some()).count(),
        record::MAX_OFFERS
    );
    // The number of kept descriptors is limited too, even with many descriptors per handle.
    let file = junk();
    let many = segments(&[1; 120]);
    for key in 1..20 {
        let packet = wire::export(id(key), 120, &[0; 16], Some(&many));
        assert!(take_with(&mut record, &packet, 120, file.as_fd()));
    }
    assert_eq!(copies(file.as_fd()) - 1, record::MAX_DESCRIPTORS / 120 * 120);
    assert!(record.accept(id(19)).is_some() && record.accept(id(1)).is_none());
    let ends = |what: &dyn Fn(u64) -> Vec<u8>| {
        let mut record = LinkRecord::default();
        (1..100_000).position(|n| !take(&mut record, &what(n), 0))
    };
    assert_eq!(ends(&|n| wire::request(id(n))), Some(MAX_EXPORTS));
    assert_eq!(ends(&|n| wire::revoke(n, id(n))), Some(MAX_EXPORTS));
    assert_eq!(ends(&|n| wire::revoke_ack(n, id(n))), Some(MAX_EXPORTS));
    assert_eq!(ends(&|n| wire::query(n, Wanted::Latest, true)), Some(1024));
    let publish = |n| wire::publish(n, &Binding { version: 1, alloc: id(1), offset: 0, len: 1 });
    assert_eq!(ends(&publish), Some(MAX_BUFFERS));
    // Answers without a request are ignored.
    assert!(take(&mut record, &wire::refuse(wire::Ask::Alloc(id(3))), 0));
    assert!(!record.refused(wire::Ask::Alloc(id(3))));
}

#[test]
fn b18_garbage_handles_are_errors_that_name_the_peer_and_the_allocation() {
    let seed = std::process::id().into();
    println!("seed {seed}");
    let mut random = Random(seed);
    let (driver, mut a, mut b) = pair(Behaviour { kind: MemoryKind::Virtual, ..Behaviour::PLAIN });
    let base = a.alloc(1 << 16);
    let at = a.register(base, 1 << 16).unwrap();
    let (_, good) = a.sharing.exports().handle(at.alloc).unwrap();
    let uuid = a.sharing.device().caps().uuid;
    let file = |path: &str| Handle::Descriptor(std::fs::File::open(path).unwrap().into());
    let unsealed = junk();
    let before = (copies(unsealed.as_fd()), copies(dup(&good).as_fd()));
    for round in 0..300 {
        let alloc = id(1_000_000 + round);
        let (handle, uuid, size) = match round % 7 {
            0 => (Handle::Legacy(random.bytes(LEGACY_HANDLE).try_into().unwrap()), uuid, 4096),
            1 => (file("/dev/null"), uuid, 4096),
            2 => (file("/dev/zero"), uuid, 4096),
            3 => (file("/proc/self/exe"), uuid, 4096),
            4 => (Handle::Descriptor(unsealed.try_clone().unwrap()), uuid, 1 << 16),
            5 => (Handle::Descriptor(dup(&good)), random.bytes(16).try_into().unwrap(), 1 << 16),
            _ => (Handle::Descriptor(dup(&good)), uuid, 1 + random.below(1 << 16) as u64 / 2),
        };
        let handle = Arc::new(handle);
        a.line(PEER).tell(wire::export(alloc, size, &uuid, Some(&handle)), Some(handle));
        settle(&mut a, &mut b);
        let error = b.import(PEER, alloc, 0, 1).unwrap_err();
        assert_eq!((error.peer, error.alloc), (PEER, Some(alloc)));
        assert!(matches!(error.why, Fault::Device(_) | Fault::Size { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with(&format!("peer 0, allocation {}: ", alloc.key())), "{text}");
    }
    assert_eq!((copies(unsealed.as_fd()), copies(dup(&good).as_fd())), before);
    assert_eq!(b.sharing.imports().mapped(), (0, 0));
    let (opens, closes) = opened(b.process());
    assert_eq!(opens, closes);
    // The link still works.
    import_from(&mut b, &mut a, &at).unwrap();
    assert_eq!(driver.violations(), []);
}

fn dup(handle: &Handle) -> OwnedFd {
    let Handle::Descriptor(fd) = handle else { panic!("not a descriptor") };
    fd.try_clone().unwrap()
}

#[test]
fn b18_a_peer_that_sends_random_messages_is_harmless() {
    let seed = std::process::id().into();
    println!("seed {seed}");
    let mut random = Random(seed);
    for _ in 0..100 {
        let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
        let base = b.alloc(4096);
        let at = b.register(base, 4096).unwrap();
        b.publish(PEER, 1, &at);
        let uuid = b.sharing.device().caps().uuid;
        let file = junk();
        let mut known = Vec::new();
        while a.line(PEER).ended().is_none() && known.len() < 200 {
            let all = packets(&uuid);
            let (mut packet, fds) = all[random.below(all.len())].clone();
            // Most words are small, so that they name existing objects.
            for word in packet[16..].chunks_exact_mut(8) {
                match random.below(4) {
                    0 => word.copy_from_slice(&(random.below(12) as u64).to_ne_bytes()),
                    1 if random.below(8) == 0 => word.copy_from_slice(&random.next().to_ne_bytes()),
                    _ => {}
                }
            }
            let handle = (fds > 0).then(|| Arc::new(Handle::Descriptor(file.try_clone().unwrap())));
            known.push(packet.clone());
            a.line(PEER).tell(packet, handle.map(|handle| handle as _));
            b.turn();
            for key in 1..12 {
                let _ = b
                    .sharing
                    .try_import(&mut b.links[..], PEER, id(key), 0, 1)
                    .map(|found| assert!(found.is_none()));
            }
            for buffer in 0..12 {
                let _ = b.query(PEER, buffer, Wanted::Latest);
            }
            // The work of this end continues.
            let again = b.register(base, 4096).unwrap();
            assert_eq!(again, at);
            a.line(PEER).pump();
        }
        assert_eq!(b.process().counts().opens, 0);
        assert!(copies(file.as_fd()) <= 1 + record::MAX_DESCRIPTORS);
        // The memory can be revoked, whatever the peer sent.
        a.links[0] = None;
        assert_eq!(b.sharing.revoke_and_wait(&mut b.links[..], at.alloc, soon()), Ok(()));
        b.free(base);
        assert_eq!(driver.violations(), []);
    }
}
