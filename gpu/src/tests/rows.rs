//! Tests of observable features. Each test covers one row of the capabilities in `gpu/TESTS.md`.

use super::*;

#[test]
fn row_1_an_allocation_is_exported_once() {
    let (driver, mut a, mut b) = pair(Behaviour { handles_differ: true, ..Behaviour::PLAIN });
    let base = a.alloc(10 << 20);
    a.process().poke(base.at(7 << 20), b"seven").unwrap();
    let whole = a.register(base, 10 << 20).unwrap();
    let parts: Vec<_> =
        (0..200).map(|i| a.register(base.at(i * 50_001), 50_000).unwrap()).collect();
    assert!(parts.iter().all(|part| part.alloc == whole.alloc));
    assert_eq!(a.process().counts().calls[Call::Export], 1);
    let imported: Vec<_> =
        parts.iter().map(|part| import_from(&mut b, &mut a, part).unwrap()).collect();
    assert_eq!(opened(b.process()), (1, 0));
    for (part, there) in parts.iter().zip(&imported) {
        assert_eq!(there.ptr.0 - imported[0].ptr.0, part.offset);
    }
    let seven =
        import_from(&mut b, &mut a, &Registration { offset: 7 << 20, len: 5, ..whole }).unwrap();
    assert_eq!(b.read(&seven, 5).unwrap(), b"seven");
    // A lookup by address makes no driver call.
    let calls = a.process().counts().calls;
    assert_eq!(a.sharing.exports().find(base.at(9 << 20), 100), Some((whole.alloc, 9 << 20)));
    assert_eq!(a.sharing.exports().find(base.at(9 << 20), 2 << 20), None);
    assert_eq!(a.sharing.exports().find(DevicePtr(base.0 - 1), 1), None);
    assert_eq!(a.process().counts().calls, calls);
    // Each registration needs its own deregistration.
    assert_eq!(a.register(base, 10 << 20).unwrap(), whole);
    assert!(a.sharing.deregister(&whole) && a.sharing.exports().holds(&whole));
    assert!(a.sharing.deregister(&whole) && !a.sharing.exports().holds(&whole));
    assert!(!a.sharing.deregister(&whole));
    // A range that exceeds its allocation is refused, and the error states the remaining size.
    assert_eq!(
        a.register(base.at(100), 10 << 20),
        Err(ExportError::BadRange { there: (10 << 20) - 100 })
    );
    assert_eq!(a.register(base, 0), Err(ExportError::BadRange { there: 10 << 20 }));
    assert_eq!(driver.violations(), []);
}

#[test]
fn row_2_one_handle_serves_all_peers_and_all_requests() {
    let driver = FakeDriver::new(Behaviour { kind: MemoryKind::Virtual, ..Behaviour::PLAIN }, 7);
    let end = || End::new(driver.process().device(0).unwrap(), ImportLimits::default());
    let (mut a, mut b, mut c) = (end(), end(), end());
    link(&mut a, 0, &mut b, 0);
    link(&mut a, 1, &mut c, 0);
    let base = a.alloc(1 << 20);
    let at = a.register(base, 1 << 20).unwrap();
    // One peer receives the version without a request. The other peer requests it.
    a.publish(PEER, 5, &at);
    b.turn();
    let token = b.query(PEER, 5, Wanted::Latest).unwrap().unwrap();
    b.open(PEER, &token).unwrap();
    import_from(&mut c, &mut a, &at).unwrap();
    assert_eq!(a.process().counts().calls[Call::Export], 1);
    assert_eq!([opened(b.process()), opened(c.process())], [(1, 0), (1, 0)]);
}

#[test]
fn row_3_lookup_of_the_latest_and_of_a_given_version() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(1 << 20);
    let at: Vec<_> = (0..6).map(|i| a.register(base.at(i * 1000), 1000).unwrap()).collect();
    let versions: Vec<_> = at.iter().map(|at| a.publish(PEER, 9, at).binding.version).collect();
    assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
    b.turn();
    let find = |b: &mut End<FakeDevice>, wanted| {
        b.sharing.look_up(&mut b.links[..], PEER, 9, wanted).map(|token| token.binding().offset)
    };
    assert_eq!(find(&mut b, Wanted::Latest), Some(5000));
    for (i, version) in versions.iter().enumerate() {
        // The first two of six versions are no longer kept.
        let want = (i >= 2).then_some(i as u64 * 1000);
        assert_eq!(find(&mut b, Wanted::Version(*version)), want);
    }
    assert_eq!(find(&mut b, Wanted::Version(versions[5] + 1)), None);
    // The caller's own versions must increase, or repeat the latest location.
    let last = versions[5];
    let mut publish = |version, at| a.sharing.publish(&mut a.links[..], PEER, 9, Some(version), at);
    let refused = Err(TellError::Publish(PublishError::Version { last }));
    assert_eq!(publish(last - 1, &at[0]), refused);
    assert_eq!(publish(last, &at[0]), refused, "a version does not change its meaning");
    assert!(!publish(last, &at[5]).unwrap().told);
    assert_eq!(publish(last + 100, &at[0]).unwrap().binding.version, last + 100);
    assert!(a.publish(PEER, 9, &at[1]).binding.version > last + 100);
}

#[test]
fn row_3_a_buffer_whose_latest_version_was_revoked_is_not_found() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    let at = [0, 1].map(|_| {
        let base = a.alloc(4096);
        a.register(base, 4096).unwrap()
    });
    let versions = at.map(|at| a.publish(PEER, 1, &at).binding.version);
    a.revoke(at[1].alloc).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(b.query(PEER, 1, Wanted::Latest), Ok(None), "not where it was before");
    let older = b.query(PEER, 1, Wanted::Version(versions[0])).unwrap().unwrap();
    assert_eq!(older.binding().alloc, at[0].alloc);
    // Publishing the buffer again creates a new version.
    let again = a.publish(PEER, 1, &at[0]);
    assert!(again.told && again.binding.version > versions[1]);
    b.turn();
    assert_eq!(b.query(PEER, 1, Wanted::Latest).unwrap().unwrap().binding(), again.binding);
    assert!(a.sharing.unpublish(&mut a.links[..], 1));
    b.turn();
    assert_eq!(b.query(PEER, 1, Wanted::Version(again.binding.version)), Ok(None));
}

#[test]
fn row_4_wait_returns_the_version_or_expires_and_query_does_not_wait() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(4096);
    let at = a.register(base, 4096).unwrap();
    assert_eq!(b.query(PEER, 1, Wanted::Latest), Ok(None));
    assert_eq!(b.query(PEER, 1, Wanted::Version(77)), Ok(None));
    let error = b.sharing.wait(&mut b.links[..], PEER, 2, Wanted::Latest, at_once()).unwrap_err();
    assert_eq!(error, ImportError { peer: PEER, alloc: None, why: Fault::Deadline });
    settle(&mut a, &mut b);
    // The version was requested before it existed. Publishing it to another peer answers the
    // request.
    let version = a.publish(PEER, 1, &at).binding.version;
    b.turn();
    assert_eq!(b.query(PEER, 1, Wanted::Latest).unwrap().unwrap().binding().version, version);
    let waiter = std::thread::spawn(move || {
        let token = b.sharing.wait(&mut b.links[..], PEER, 3, Wanted::Latest, soon()).unwrap();
        (b, token)
    });
    // The request and the publication may cross.
    std::thread::yield_now();
    let version = a.publish(PEER, 3, &at).binding.version;
    a.turn();
    let (mut b, token) = waiter.join().unwrap();
    assert_eq!(token.binding().version, version);
    // A version that is no longer kept is reported as gone at once.
    let parts: Vec<_> =
        (0..VERSIONS_KEPT as u64 + 1).map(|i| a.register(base.at(i * 8), 8).unwrap()).collect();
    let first = a.publish(PEER, 4, &parts[0]).binding.version;
    for at in &parts[1..] {
        a.publish(PEER, 4, at);
    }
    settle(&mut a, &mut b);
    assert_eq!(b.query(PEER, 4, Wanted::Version(first)), Ok(None));
    a.turn();
    let gone = b.query(PEER, 4, Wanted::Version(first)).unwrap_err();
    assert_eq!(gone, ImportError { peer: PEER, alloc: None, why: Fault::Gone });
}

#[test]
fn row_5_memory_is_opened_once_before_the_first_transfer() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(1 << 20);
    a.process().poke(base.at(100), b"data").unwrap();
    let at = a.register(base.at(100), 1000).unwrap();
    a.publish(PEER, 1, &at);
    let (token, imported) =
        b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, at_once()).unwrap();
    assert_eq!(opened(b.process()), (1, 0));
    for _ in 0..100 {
        let again = b.open(PEER, &token).unwrap();
        assert_eq!(again, imported);
        assert_eq!(b.read(&again, 4).unwrap(), b"data");
        b.sharing.release(again.id);
    }
    assert_eq!(opened(b.process()), (1, 0));
}

#[test]
fn row_6_steady_state_sends_no_packet_and_calls_no_driver() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(1 << 20);
    let at = a.register(base, 1 << 20).unwrap();
    assert!(a.publish(PEER, 1, &at).told);
    let (token, first) =
        b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, soon()).unwrap();
    settle(&mut a, &mut b);
    let calls = [a.process(), b.process()].map(|process| process.counts().calls);
    for _ in 0..1000 {
        assert!(!a.publish(PEER, 1, &at).told);
        let now = b.sharing.look_up(&mut b.links[..], PEER, 1, Wanted::Latest).unwrap();
        assert_eq!(now, token);
        let imported = b.open(PEER, &now).unwrap();
        assert_eq!(imported, first);
        b.sharing.imports_mut().begin(imported.id).unwrap();
        b.sharing.imports_mut().end(imported.id);
        b.sharing.release(imported.id);
    }
    assert_eq!([a.process(), b.process()].map(|process| process.counts().calls), calls);
    for end in [&mut a, &mut b] {
        let mut poll =
            libc::pollfd { fd: end.line(PEER).fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one local structure.
        assert_eq!(unsafe { libc::poll(&mut poll, 1, 0) }, 0, "a packet was sent");
    }
}

#[test]
fn row_7_within_one_process_imports_use_the_address_without_a_driver_call() {
    let driver = FakeDriver::new(Behaviour::PLAIN, 7);
    let process = driver.process();
    let end = |ordinal| End::new(process.device(ordinal).unwrap(), ImportLimits::default());
    for (one, two) in [(0, 0), (0, 1)] {
        let (mut a, mut b) = (end(one), end(two));
        link(&mut a, 0, &mut b, 0);
        record(&mut a.line(PEER)).home = true;
        record(&mut b.line(PEER)).home = true;
        let base = a.alloc(1 << 20);
        let at = a.register(base.at(12), 100).unwrap();
        a.publish(PEER, 1, &at);
        let (_, imported) =
            b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, soon()).unwrap();
        assert_eq!(imported.ptr, base.at(12));
        let id = imported.id;
        assert_eq!(b.sharing.imports_mut().begin(id), Ok(base));
        // The memory can be revoked like any other.
        a.revoke(at.alloc).unwrap();
        settle(&mut a, &mut b);
        assert_eq!(a.sharing.awaited(at.alloc).collect::<Vec<_>>(), [PEER]);
        b.sharing.imports_mut().end(id);
        settle(&mut a, &mut b);
        assert_eq!(a.sharing.awaited(at.alloc).count(), 0);
        assert_eq!(b.sharing.imports_mut().begin(id), Err(Fault::Revoked));
        assert_eq!(import_from(&mut b, &mut a, &at).unwrap_err().why, Fault::NotExported);
        a.free(base);
    }
    assert_eq!(opened(&process), (0, 0));
    assert_eq!(driver.violations(), []);
}

#[test]
fn row_7_the_handshake_detects_a_link_to_the_same_process() {
    let [mut one, mut two] = met(ShmConfig::default());
    assert!(record(&mut one.line()).home && record(&mut two.line()).home);
    // With host memory too, an import in the same process maps nothing.
    let end = || End::new(HostDevice::new(), ImportLimits::default());
    let (mut a, mut b) = (end(), end());
    a.links[0] = Some(one);
    b.links[0] = Some(two);
    let base = a.sharing.driver().alloc(5000).unwrap();
    let at = a.register(base.at(100), 4000).unwrap();
    let imported = import_from(&mut b, &mut a, &at).unwrap();
    assert_eq!(imported.ptr, base.at(100));
    assert_eq!(b.sharing.device().held(), (0, 0));
    // If the ends do not know that they are one process, the device detects it.
    for end in [&mut a, &mut b] {
        record(&mut end.line(PEER)).home = false;
    }
    let other = a.sharing.driver().alloc(4096).unwrap();
    let at = a.register(other, 4096).unwrap();
    let error = import_from(&mut b, &mut a, &at).unwrap_err();
    assert_eq!(error.why, Fault::Device(DeviceError::SameProcess));
}

#[test]
fn row_14_a_dropped_handle_is_requested_again() {
    let (_, mut a, mut b) = pair(Behaviour::PLAIN);
    // Publishes more handles than are kept unopened.
    let all: Vec<_> = (0..3 * record::MAX_OFFERS as u64)
        .map(|buffer| {
            let base = a.alloc(4096);
            let at = a.register(base, 4096).unwrap();
            a.publish(PEER, buffer, &at);
            a.turn();
            b.turn();
            at
        })
        .collect();
    for (buffer, at) in all.iter().enumerate() {
        let token = b.query(PEER, buffer as u64, Wanted::Latest).unwrap().unwrap();
        assert_eq!(token.binding().alloc, at.alloc);
        import_from(&mut b, &mut a, at).unwrap();
    }
    assert_eq!(opened(b.process()), (all.len() as u64, 0));
    assert_eq!(a.process().counts().calls[Call::Export], all.len() as u64);
}

/// Publishes, reads and revokes one buffer, and then frees everything.
fn round_trip<D: Device>(mut a: End<D>, mut b: End<D>) {
    link(&mut a, 0, &mut b, 0);
    let base = a.sharing.driver().alloc(3 << 20).unwrap();
    let at = a.register(base.at((2 << 20) + 24), 1000).unwrap();
    a.publish(PEER, 1, &at);
    let (_, imported) =
        b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, soon()).unwrap();
    assert_eq!(imported.len, 1000);
    let caps = b.sharing.device().caps();
    assert_eq!(caps.uuid, a.sharing.device().caps().uuid);
    a.revoke(at.alloc).unwrap();
    settle(&mut a, &mut b);
    assert_eq!(a.sharing.awaited(at.alloc).count(), 0);
    assert!(a.sharing.exports().is_empty());
    let stats = b.sharing.imports().stats();
    assert_eq!((stats.opens, stats.closes, b.sharing.imports().mapped()), (1, 1, (0, 0)));
    // SAFETY: no peer has the memory open.
    unsafe { a.sharing.driver().free(base) }.unwrap();
}

#[test]
fn row_19_every_kind_of_handle_works() {
    for kind in [MemoryKind::Legacy, MemoryKind::Virtual, MemoryKind::Segments] {
        for handles_differ in [false, true] {
            let driver = FakeDriver::new(Behaviour { kind, handles_differ, ..Behaviour::PLAIN }, 7);
            let end = || End::new(driver.process().device(0).unwrap(), ImportLimits::default());
            round_trip(end(), end());
            assert_eq!(driver.violations(), []);
            assert_eq!(driver.counts().held(), 0);
        }
    }
    // The integration test `two_ends_share_memory` covers host memory between two processes.
}

#[test]
fn unexportable_memory_names_reason_and_remedy() {
    let (_, mut a, _b) = pair(Behaviour::PLAIN);
    for (kind, why, what) in [
        (MemoryKind::Pool, Unshared::Pool, "allocate with cuMemAlloc"),
        (MemoryKind::Managed, Unshared::Managed, "allocate with cuMemAlloc"),
        (MemoryKind::VirtualUnshared, Unshared::NoHandleType, "request POSIX descriptors"),
    ] {
        let base = a.sharing.driver().alloc_as(kind, 1 << 16).unwrap();
        let error = a.register(base, 100).unwrap_err();
        assert_eq!(error, ExportError::Device(DeviceError::NotExportable(why)));
        assert!(error.to_string().contains(what), "{error}");
    }
    assert_eq!(a.register(DevicePtr(1), 1), Err(ExportError::Device(DeviceError::NotDeviceMemory)));
    assert!(a.sharing.exports().is_empty());
    // Makes only the export itself fail.
    let base = a.alloc(4096);
    a.process().fail(Call::Export, 0, DeviceError::NotExportable(Unshared::NoHandleType));
    assert!(a.register(base, 4096).is_err());
    assert!(a.register(base, 4096).is_ok());
}
