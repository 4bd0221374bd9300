//! Tests for bugs of other implementations, which `gpu/TESTS.md` lists.

use super::*;
use crate::wire::Offer;

/// Returns the offer of an allocation, as a peer would send it.
fn offer(of: &mut End<FakeDevice>, base: DevicePtr, alloc: AllocId) -> Offer {
    let device = of.sharing.driver();
    let allocation = device.allocation(base).unwrap();
    let handle = device.export(&allocation).unwrap();
    Offer { alloc, size: allocation.size, uuid: device.caps().uuid, handle: Some(handle) }
}

#[test]
fn b1_a_mapping_that_is_replaced_is_closed() {
    const TIMES: u64 = 100_000;
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(4096);
    let alloc = AllocId::from_key(1).unwrap();
    let mut imports = Imports::new(ImportLimits::default());
    let allocation = a.sharing.driver().allocation(base).unwrap();
    let Handle::Legacy(bytes) = a.sharing.driver().export(&allocation).unwrap() else { panic!() };
    let device = b.sharing.driver();
    let uuid = device.caps().uuid;
    for _ in 0..TIMES {
        let offer = Offer { alloc, size: 4096, uuid, handle: Some(Handle::Legacy(bytes)) };
        let imported = imports.open(device, PEER, [1; 16], offer, 0, 4096).unwrap();
        imports.begin(imported.id).unwrap();
        imports.end(imported.id);
    }
    let stats = imports.stats();
    assert_eq!((stats.opens, stats.closes), (TIMES, TIMES - 1));
    assert_eq!(imports.mapped(), (1, 4096));
    imports.keep_only(|_| false);
    imports.sweep(device);
    assert_eq!(opened(device.process()), (TIMES, TIMES));
    assert_eq!(driver.violations(), []);
}

#[test]
fn b1_a_handle_offered_twice_is_kept_once() {
    let (_, mut a, mut b) = pair(Behaviour { kind: MemoryKind::Virtual, ..Behaviour::PLAIN });
    let base = a.alloc(1 << 16);
    let at = a.register(base, 1 << 16).unwrap();
    let imported = import_from(&mut b, &mut a, &at).unwrap();
    let (size, handle) = a.sharing.exports().handle(at.alloc).unwrap();
    let uuid = a.sharing.device().caps().uuid;
    let Handle::Descriptor(fd) = &*handle else { panic!("not a descriptor") };
    let before = copies(fd.as_fd());
    for _ in 0..2000 {
        let packet = wire::export(at.alloc, size, &uuid, Some(&handle));
        a.line(PEER).tell(packet, Some(handle.clone()));
        settle(&mut a, &mut b);
        assert_eq!(import_from(&mut b, &mut a, &at).unwrap(), imported);
    }
    // Each handle that was not needed was closed.
    assert_eq!(copies(fd.as_fd()), before + 1);
    assert_eq!(opened(b.process()), (1, 0));
}

#[test]
fn b11_state_of_an_earlier_incarnation_is_dropped() {
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(4096);
    a.process().poke(base, b"old").unwrap();
    let at = a.register(base, 4096).unwrap();
    let told = a.sharing.publish(&mut a.links[..], PEER, 1, Some(1), &at).unwrap();
    let (old, imported) =
        b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, soon()).unwrap();
    // The peer dies and restarts. The ids of the old process now identify other memory.
    a.process().kill();
    drop(a);
    let mut a = End::new(driver.process().device(0).unwrap(), ImportLimits::default());
    link(&mut a, 0, &mut b, 0);
    let base = a.alloc(4096);
    a.process().poke(base, b"new").unwrap();
    let mut at = a.register(base, 4096).unwrap();
    let again = a.sharing.publish(&mut a.links[..], PEER, 1, Some(1), &at).unwrap();
    assert_eq!(told.binding.version, again.binding.version);
    b.turn();
    let new = b.query(PEER, 1, Wanted::Version(1)).unwrap().unwrap();
    // Like the old process, the new process counts its allocation ids from the start.
    let base = a.alloc(4096);
    a.process().poke(base, b"new").unwrap();
    at.alloc = a.register(base, 4096).unwrap().alloc;
    let (size, handle) = a.sharing.exports().handle(at.alloc).unwrap();
    at.alloc = told.binding.alloc;
    let uuid = a.sharing.device().caps().uuid;
    a.line(PEER).tell(wire::export(at.alloc, size, &uuid, Some(&handle)), Some(handle));
    b.turn();

    let error = b.open(PEER, &old).unwrap_err();
    assert_eq!(error, ImportError { peer: PEER, alloc: Some(at.alloc), why: Fault::Incarnation });
    assert_eq!(b.sharing.imports_mut().begin(imported.id), Err(Fault::Revoked));
    assert_ne!(old, new);
    for there in [b.import(PEER, at.alloc, 0, 4096).unwrap(), b.open(PEER, &new).unwrap()] {
        assert_eq!(b.read(&there, 3).unwrap(), b"new");
    }
    let counts = b.process().counts();
    assert_eq!((counts.opens, counts.closes, counts.orphans_touched), (3, 1, 0));
}

#[test]
fn b12_memory_reallocated_at_the_same_address_is_new_memory() {
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(1 << 20);
    let old = a.register(base, 1 << 20).unwrap();
    let first = a.publish(PEER, 1, &old);
    let (token, was) =
        b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, soon()).unwrap();
    // Frees the memory without a revocation.
    a.free(base);
    assert_eq!(a.alloc(1 << 20), base);
    a.process().poke(base, b"fresh").unwrap();
    let new = a.register(base, 1 << 20).unwrap();
    assert_ne!(new.alloc, old.alloc);
    assert_eq!(a.process().counts().calls[Call::Export], 2);
    assert!(!a.sharing.exports().holds(&old));
    let second = a.publish(PEER, 1, &new);
    assert!(second.told && second.binding.version > first.binding.version);
    // The stale mapping is closed without being used.
    settle(&mut a, &mut b);
    assert_eq!(opened(b.process()), (1, 1));
    assert_eq!(b.sharing.imports_mut().begin(was.id), Err(Fault::Revoked));
    let now = b.query(PEER, 1, Wanted::Latest).unwrap().unwrap();
    let there = b.open(PEER, &now).unwrap();
    assert_eq!(b.read(&there, 5).unwrap(), b"fresh");
    assert_eq!(b.query(PEER, 1, Wanted::Version(token.binding().version)), Ok(None));
    assert_eq!(driver.violations(), [fake::Violation::FreedWhileOpen]);
    assert_eq!(a.sharing.exports().len(), 1);
}

#[test]
fn b12_memory_across_several_old_ranges_supersedes_all_of_them() {
    let (_, mut a, mut b) = pair(Behaviour { recycle: true, ..Behaviour::PLAIN });
    let base = a.alloc(1 << 20);
    let at = a.register(base.at(4096), 4096).unwrap();
    a.publish(PEER, 1, &at);
    settle(&mut a, &mut b);
    a.free(base);
    assert_eq!(a.alloc(1 << 20), base);
    // `verify` detects the change before another registration does.
    assert_eq!(a.sharing.verify(&mut a.links[..], &at), Err(ExportError::Unknown(at.alloc)));
    settle(&mut a, &mut b);
    assert_eq!(b.query(PEER, 1, Wanted::Latest), Ok(None));
    let new = a.register(base, 1 << 20).unwrap();
    assert!(a.publish(PEER, 1, &new).told);
    assert_eq!(a.sharing.verify(&mut a.links[..], &new), Ok(()));
}

#[test]
fn b13_sizes_are_checked_at_every_use() {
    for kind in [MemoryKind::Legacy, MemoryKind::Virtual] {
        let (driver, mut a, mut b) = pair(Behaviour { kind, ..Behaviour::PLAIN });
        let size = 1 << 16;
        let base = a.alloc(size);
        let at = a.register(base, size).unwrap();
        // Requests ranges that are too long: while the handle is requested, and when the memory is
        // open.
        for (offset, len) in
            [(0, size + 1), (size, 1), (size - 7, 8), (u64::MAX, 2), (1, u64::MAX), (0, 0)]
        {
            for _ in 0..2 {
                let wrong = Registration { offset, len, ..at };
                let error = import_from(&mut b, &mut a, &wrong).unwrap_err();
                let why = Fault::OutOfBounds { offset, len, size };
                assert_eq!(error, ImportError { peer: PEER, alloc: Some(at.alloc), why });
            }
        }
        assert_eq!(opened(b.process()), (0, 0));
        let there = import_from(&mut b, &mut a, &at).unwrap();
        let error = import_from(&mut b, &mut a, &Registration { offset: 1, ..at }).unwrap_err();
        assert_eq!(error.why, Fault::OutOfBounds { offset: 1, len: size, size });
        b.sharing.release(there.id);
        a.revoke(at.alloc).unwrap();
        settle(&mut a, &mut b);

        // Lets the peer announce a wrong size.
        let (_, handle) = {
            let at = a.register(base, size).unwrap();
            a.sharing.exports().handle(at.alloc).unwrap()
        };
        let uuid = a.sharing.device().caps().uuid;
        for (n, told) in [1, size - 1, size + 1, 1 << 40].into_iter().enumerate() {
            let alloc = AllocId::from_key(1000 + n as u64).unwrap();
            a.line(PEER)
                .tell(wire::export(alloc, told, &uuid, Some(&handle)), Some(handle.clone()));
            b.turn();
            let error = b.import(PEER, alloc, told - 1, 1).unwrap_err();
            assert_eq!((error.peer, error.alloc), (PEER, Some(alloc)));
            match error.why {
                Fault::Size { told: said, actual } => assert_eq!((said, actual), (told, size)),
                Fault::Device(DeviceError::BadHandle) => assert_eq!(kind, MemoryKind::Virtual),
                why => panic!("{why}"),
            }
        }
        let (opens, closes) = opened(b.process());
        assert_eq!(opens, closes);
        assert_eq!(b.sharing.imports().mapped(), (0, 0));
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn b19_memory_has_no_guessable_name() {
    let names = || {
        let shm = std::fs::read_dir("/dev/shm").unwrap().map(|entry| entry.unwrap().file_name());
        shm.filter(|name| name.to_string_lossy().contains("fishplate")).collect::<Vec<_>>()
    };
    let before = names();
    let mut device = HostDevice::new();
    let base = device.alloc(1 << 16).unwrap();
    let allocation = device.allocation(base).unwrap();
    let Handle::Descriptor(fd) = device.export(&allocation).unwrap() else {
        panic!("not a descriptor")
    };
    let path = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
    assert_eq!(path.to_str(), Some("/memfd:fishplate (deleted)"));
    assert_eq!(names(), before);
    // The memory is sealed, so no process can truncate it while it is mapped. SAFETY: the call
    // takes no pointers, and the descriptor is ours.
    assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), 0) }, -1);
}

#[test]
fn b23_unread_messages_and_unused_state_stay_bounded() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(1 << 20);
    // While the receiver reads nothing, the sender eventually gets an error, and queues no more
    // packets.
    let mut refused = 0;
    let mut last = None;
    for i in 0..20_000u64 {
        let at = a.register(base.at(i * 8), 8).unwrap();
        match a.sharing.publish(&mut a.links[..], PEER, 1, None, &at) {
            Ok(published) => last = Some(published.binding),
            Err(error) => {
                let why = ImportError { peer: PEER, alloc: Some(at.alloc), why: Fault::Again };
                assert_eq!(error, TellError::Peer(why));
                refused += 1;
            }
        }
        a.sharing.deregister(&at);
    }
    assert!(refused > 10_000, "{refused}");
    for _ in 0..100 {
        settle(&mut a, &mut b);
    }
    let token = b.query(PEER, 1, Wanted::Latest).unwrap().unwrap();
    assert_eq!(Some(token.binding()), last);
    // When the receiver reads, both ends keep only a few versions.
    let mut versions = Vec::new();
    for i in 0..10_000u64 {
        let at = a.register(base.at(i * 8), 8).unwrap();
        versions.push(a.publish(PEER, 2, &at).binding.version);
        a.sharing.deregister(&at);
        b.turn();
    }
    let known =
        |version: &&u64| record(&mut b.line(PEER)).find(2, Wanted::Version(**version)).is_some();
    assert_eq!(versions.iter().filter(known).count(), VERSIONS_KEPT);
    // Without answers, only a few requests are outstanding, and the peer keeps a limited number of
    // them.
    for version in 0..5000 {
        assert_eq!(b.query(PEER, 77, Wanted::Version(u64::MAX - version)), Ok(None));
        a.turn();
    }
    assert!(
        record(&mut a.line(PEER)).queries.len() <= 32,
        "{}",
        record(&mut a.line(PEER)).queries.len()
    );
    // The number of publications is limited, and the error names the limit.
    let at = a.register(base, 8).unwrap();
    let mut full = None;
    for buffer in 100..100 + MAX_BUFFERS as u64 {
        match a.sharing.publish(&mut a.links[..], PEER, buffer, None, &at) {
            Ok(_) => {}
            Err(error) => full = full.or(Some((buffer, error))),
        }
        settle(&mut a, &mut b);
    }
    let (buffer, error) = full.unwrap();
    assert_eq!(
        (buffer, error),
        (100 + MAX_BUFFERS as u64 - 2, TellError::Publish(PublishError::Full(MAX_BUFFERS)))
    );
    assert!(a.line(PEER).ended().is_none() && b.line(PEER).ended().is_none());
}

#[test]
fn b24_offsets_count_from_the_start_of_the_allocation() {
    for kind in [MemoryKind::Legacy, MemoryKind::Virtual] {
        for handles_differ in [false, true] {
            let (driver, mut a, mut b) =
                pair(Behaviour { kind, handles_differ, ..Behaviour::PLAIN });
            // Moves the next allocation to an address that is not a multiple of 1 MiB.
            a.alloc(4096 + 512);
            let base = a.alloc(5 << 20);
            assert_ne!(base.0 % (1 << 20), 0);
            for offset in [0, 24, (1 << 20) - 8, 1 << 20, (3 << 20) + 4104, (5 << 20) - 8] {
                a.process().poke(base.at(offset), &offset.to_ne_bytes()).unwrap();
                let at = a.register(base.at(offset), 8).unwrap();
                assert_eq!(at.offset, offset);
                a.publish(PEER, offset, &at);
                let (_, there) = b
                    .sharing
                    .prefetch(&mut b.links[..], PEER, offset, Wanted::Latest, soon())
                    .unwrap();
                assert_eq!(b.read(&there, 8).unwrap(), offset.to_ne_bytes());
            }
            assert_eq!(opened(b.process()), (1, 0));
            assert_eq!(driver.violations(), []);
        }
    }
}

#[test]
fn a_failed_open_leaves_nothing_and_may_be_retried() {
    for kind in [MemoryKind::Legacy, MemoryKind::Virtual] {
        let (_, mut a, mut b) = pair(Behaviour { kind, ..Behaviour::PLAIN });
        let base = a.alloc(1 << 16);
        let at = a.register(base, 1 << 16).unwrap();
        let (_, handle) = a.sharing.exports().handle(at.alloc).unwrap();
        let count = || match &*handle {
            Handle::Descriptor(fd) => copies(fd.as_fd()),
            _ => 0,
        };
        let before = count();
        for _ in 0..100 {
            b.process().fail(Call::Open, 0, DeviceError::Exhausted);
            let error = import_from(&mut b, &mut a, &at).unwrap_err();
            assert_eq!(error.why, Fault::Device(DeviceError::Exhausted));
            assert_eq!(b.sharing.imports().mapped(), (0, 0));
        }
        assert_eq!(count(), before);
        let there = import_from(&mut b, &mut a, &at).unwrap();
        assert!(b.sharing.imports().is_open(there.id));
        assert_eq!(opened(b.process()), (1, 0));
    }
}

#[test]
fn eviction_takes_the_least_recently_used_unused_import() {
    let driver = FakeDriver::new(Behaviour::PLAIN, 7);
    let limits = ImportLimits { mappings: 3, bytes: 10_000 };
    let mut a = End::new(driver.process().device(0).unwrap(), limits);
    let mut b = End::new(driver.process().device(0).unwrap(), limits);
    link(&mut a, 0, &mut b, 0);
    let at: Vec<_> = (0..5)
        .map(|_| {
            let base = a.alloc(3000);
            a.register(base, 3000).unwrap()
        })
        .collect();
    let there: Vec<_> = at[..3].iter().map(|at| import_from(&mut b, &mut a, at).unwrap()).collect();
    let error = import_from(&mut b, &mut a, &at[3]).unwrap_err();
    assert_eq!(error.why, Fault::Full, "all are in use");
    assert_eq!(opened(b.process()), (3, 0));
    // Releases the second import with a transfer in flight, then the third, then the first.
    b.sharing.imports_mut().begin(there[1].id).unwrap();
    for i in [1, 2, 0] {
        b.sharing.release(there[i].id);
    }
    let fourth = import_from(&mut b, &mut a, &at[3]).unwrap();
    assert_eq!(b.sharing.imports_mut().begin(there[2].id), Err(Fault::Stale));
    assert_eq!([0, 1].map(|i| b.sharing.imports().is_open(there[i].id)), [true, true]);
    let fifth = import_from(&mut b, &mut a, &at[4]).unwrap();
    assert_eq!([0, 1].map(|i| b.sharing.imports().is_open(there[i].id)), [false, true]);
    assert_eq!(opened(b.process()), (5, 2));
    assert_eq!(b.sharing.imports().stats().evictions, 2);
    // No mapping is left to evict.
    assert_eq!(import_from(&mut b, &mut a, &at[0]).unwrap_err().why, Fault::Full);
    b.sharing.imports_mut().end(there[1].id);
    let again = import_from(&mut b, &mut a, &at[0]).unwrap();
    assert_eq!(opened(b.process()), (6, 3));
    // Imports more bytes than the limit.
    let base = a.alloc(20_000);
    let large = a.register(base, 20_000).unwrap();
    b.sharing.release(again.id);
    assert_eq!(import_from(&mut b, &mut a, &large).unwrap_err().why, Fault::Full);
    assert!(b.sharing.imports().is_open(again.id), "and nothing was evicted for it");
    for imported in [fourth, fifth] {
        b.sharing.release(imported.id);
        b.sharing.release(imported.id);
    }
    drop(b.sharing);
    assert_eq!(driver.counts().opens, driver.counts().closes);
    assert_eq!(driver.violations(), []);
}

#[test]
fn an_offer_belongs_to_one_allocation() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(4096);
    let alloc = AllocId::from_key(9).unwrap();
    let offer = offer(&mut a, base, alloc);
    let mut imports = Imports::new(ImportLimits::default());
    let device = b.sharing.driver();
    let one = imports.open(device, PEER, [1; 16], offer, 0, 1).unwrap();
    assert!(imports.find([1; 16], AllocId::from_key(10).unwrap(), 0, 1).is_none());
    assert!(imports.find([2; 16], alloc, 0, 1).is_none());
    assert_eq!(imports.find([1; 16], alloc, 8, 8).unwrap().unwrap().ptr, one.ptr.at(8));
    imports.keep_only(|_| false);
    imports.sweep(device);
}

#[test]
fn b23_exports_without_registrations_make_room() {
    let (driver, mut a, mut b) =
        pair(Behaviour { recycle: false, memory: 1 << 40, ..Behaviour::PLAIN });
    let mut first = None;
    for n in 0..MAX_EXPORTS as u64 + 100 {
        let base = a.alloc(64);
        let at = a.register(base, 64).unwrap();
        if n < 2 {
            // The first export stays registered and is open at the peer. The second is open at the
            // peer, but no longer registered.
            import_from(&mut b, &mut a, &at).unwrap();
        }
        if n == 0 {
            first = Some(at);
        } else {
            a.sharing.deregister(&at);
        }
        b.turn();
    }
    assert!(a.sharing.exports().len() <= MAX_EXPORTS);
    assert!(a.sharing.exports().holds(&first.unwrap()));
    settle(&mut a, &mut b);
    assert_eq!(opened(b.process()), (2, 1), "the second was revoked");
    // Now all exports are in use, so a further export is an error.
    let mut error = None;
    for _ in 0..MAX_EXPORTS {
        let base = a.alloc(64);
        if let Err(full) = a.register(base, 64) {
            error = Some(full);
            break;
        }
    }
    assert_eq!(error, Some(ExportError::Full(MAX_EXPORTS)));
    assert_eq!(driver.violations(), []);
}

#[test]
fn b18_devices_are_identified_by_uuid_and_not_by_ordinal() {
    let driver = FakeDriver::new(Behaviour::PLAIN, 7);
    let end = |devices: &[u32]| {
        End::new(driver.process_seeing(devices).device(0).unwrap(), ImportLimits::default())
    };
    // Uses the same ordinal for different devices, and devices that the other process does not see.
    for (theirs, ours) in [(&[1, 0][..], &[0, 1][..]), (&[1], &[0])] {
        let (mut a, mut b) = (end(theirs), end(ours));
        link(&mut a, 0, &mut b, 0);
        let base = a.alloc(4096);
        a.process().poke(base, b"there").unwrap();
        let at = a.register(base, 4096).unwrap();
        let there = import_from(&mut b, &mut a, &at).unwrap();
        assert_eq!(b.read(&there, 5).unwrap(), b"there");
    }
    driver.part(0, 1);
    let (mut a, mut b) = (end(&[1]), end(&[0]));
    link(&mut a, 0, &mut b, 0);
    let base = a.alloc(4096);
    let at = a.register(base, 4096).unwrap();
    let error = import_from(&mut b, &mut a, &at).unwrap_err();
    let why = Fault::Device(DeviceError::NoPeerAccess);
    assert_eq!(error, ImportError { peer: PEER, alloc: Some(at.alloc), why });
    assert_eq!(opened(b.process()), (0, 0));
}
