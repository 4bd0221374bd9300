//! Tests the revocation of memory that peers have open.

use super::*;

/// Creates a pair. The second end has imported an allocation of the first end.
fn shared() -> (FakeDriver, End<FakeDevice>, End<FakeDevice>, DevicePtr, Registration, Imported) {
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let base = a.alloc(4096);
    let at = a.register(base, 4096).unwrap();
    a.publish(PEER, 1, &at);
    let (_, imported) =
        b.sharing.prefetch(&mut b.links[..], PEER, 1, Wanted::Latest, soon()).unwrap();
    (driver, a, b, base, at, imported)
}

#[test]
fn a_revocation_is_acknowledged_after_the_last_transfer() {
    let (driver, mut a, mut b, base, at, imported) = shared();
    for _ in 0..3 {
        b.sharing.imports_mut().begin(imported.id).unwrap();
    }
    a.revoke(at.alloc).unwrap();
    a.revoke(at.alloc).unwrap();
    for _ in 0..3 {
        settle(&mut a, &mut b);
        assert_eq!(a.sharing.awaited(at.alloc).collect::<Vec<_>>(), [PEER]);
        assert_eq!(opened(b.process()), (1, 0));
        assert_eq!(b.sharing.imports_mut().begin(imported.id), Err(Fault::Revoked));
        b.sharing.imports_mut().end(imported.id);
    }
    // No call hands out the allocation any more.
    assert_eq!(a.register(base, 8), Err(ExportError::Revoking(at.alloc)));
    let mut other = End::new(driver.process().device(0).unwrap(), ImportLimits::default());
    link(&mut a, 1, &mut other, 0);
    assert_eq!(import_from(&mut other, &mut a, &at).unwrap_err().why, Fault::NotExported);
    settle(&mut a, &mut b);
    assert_eq!(a.sharing.awaited(at.alloc).count(), 0);
    assert_eq!(opened(b.process()), (1, 1));
    a.free(base);
    assert_eq!(b.query(PEER, 1, Wanted::Latest), Ok(None));
    b.sharing.release(imported.id);
    assert_eq!(b.sharing.imports_mut().begin(imported.id), Err(Fault::Stale));
    assert_eq!(driver.violations(), []);
}

#[test]
fn an_expired_deadline_names_the_peer_and_a_dead_peer_is_not_awaited() {
    let (driver, mut a, mut b, base, at, imported) = shared();
    let mut c = End::new(driver.process().device(0).unwrap(), ImportLimits::default());
    link(&mut a, 2, &mut c, 0);
    let theirs = import_from(&mut c, &mut a, &at).unwrap();
    b.sharing.imports_mut().begin(imported.id).unwrap();
    let deadline = |a: &mut End<FakeDevice>| {
        a.sharing.revoke_and_wait(&mut a.links[..], at.alloc, at_once()).unwrap_err()
    };
    assert_eq!(deadline(&mut a), RevokeError::Deadline { alloc: at.alloc, peer: PEER, peers: 2 });
    c.turn();
    assert_eq!(deadline(&mut a), RevokeError::Deadline { alloc: at.alloc, peer: PEER, peers: 1 });
    assert_eq!(c.sharing.imports_mut().begin(theirs.id), Err(Fault::Revoked));
    b.process().kill();
    drop(b);
    assert_eq!(a.sharing.revoke_and_wait(&mut a.links[..], at.alloc, soon()), Ok(()));
    a.free(base);
    let unknown = ExportError::Unknown(at.alloc);
    let again = a.sharing.revoke_and_wait(&mut a.links[..], at.alloc, soon());
    assert_eq!(again, Err(RevokeError::Export(unknown)));
    assert_eq!(driver.violations(), []);
}

#[test]
fn a_late_acknowledgement_of_an_earlier_revocation_is_ignored() {
    let (driver, mut a, mut b, _, at, imported) = shared();
    a.revoke(at.alloc).unwrap();
    b.turn();
    // The acknowledgement is in flight when the revocation is cancelled and the memory is imported
    // again.
    assert_eq!(opened(b.process()), (1, 1));
    a.sharing.call_off(at.alloc).unwrap();
    b.sharing.release(imported.id);
    let mut late = Vec::new();
    for _ in 0..3 {
        // Delays the acknowledgement until the second revocation has begun.
        a.line(PEER).pump();
        late.extend(record(&mut a.line(PEER)).acks.drain(..));
        a.turn();
        let Registration { alloc, offset, len, .. } = at;
        if b.sharing.try_import(&mut b.links[..], PEER, alloc, offset, len).unwrap().is_some() {
            break;
        }
    }
    assert_eq!((opened(b.process()), late.len()), ((2, 1), 1));
    a.revoke(at.alloc).unwrap();
    record(&mut a.line(PEER)).acks.extend(late);
    a.turn();
    assert_eq!(a.sharing.awaited(at.alloc).collect::<Vec<_>>(), [PEER]);
    settle(&mut a, &mut b);
    assert_eq!(a.sharing.awaited(at.alloc).count(), 0);
    assert_eq!(opened(b.process()), (2, 2));
    assert_eq!(driver.violations(), []);
}

#[test]
fn a_cancelled_revocation_does_not_open_memory_twice() {
    let (driver, mut a, mut b, _, at, imported) = shared();
    b.sharing.imports_mut().begin(imported.id).unwrap();
    a.revoke(at.alloc).unwrap();
    settle(&mut a, &mut b);
    a.sharing.call_off(at.alloc).unwrap();
    assert_eq!(import_from(&mut b, &mut a, &at).unwrap_err().why, Fault::Busy);
    b.sharing.imports_mut().end(imported.id);
    settle(&mut a, &mut b);
    let again = import_from(&mut b, &mut a, &at).unwrap();
    assert!(b.sharing.imports().is_open(again.id) && !b.sharing.imports().is_open(imported.id));
    assert_eq!(opened(b.process()), (2, 1));
    // After the cancelled revocation, publishing sends the version again.
    assert!(a.publish(PEER, 1, &at).told);
    assert_eq!(driver.violations(), []);
}

#[test]
fn the_death_of_a_peer_closes_its_mappings_without_access() {
    let (driver, mut a, mut b) = pair(Behaviour::PLAIN);
    let at: Vec<_> = (0..10)
        .map(|_| {
            let base = a.alloc(4096);
            a.register(base, 4096).unwrap()
        })
        .collect();
    let there: Vec<_> = at.iter().map(|at| import_from(&mut b, &mut a, at).unwrap()).collect();
    b.sharing.imports_mut().begin(there[4].id).unwrap();
    a.process().kill();
    drop(a);
    b.turn();
    assert_eq!(
        opened(b.process()),
        (10, 9),
        "a mapping with a copy in flight stays until the copy has finished"
    );
    for there in &there {
        assert_eq!(b.sharing.imports_mut().begin(there.id), Err(Fault::Revoked));
    }
    b.sharing.imports_mut().end(there[4].id);
    b.turn();
    assert_eq!(opened(b.process()), (10, 10));
    let gone = ImportError { peer: PEER, alloc: Some(at[0].alloc), why: Fault::PeerGone };
    assert_eq!(b.import(PEER, at[0].alloc, 0, 8), Err(gone));
    assert_eq!(b.query(PEER, 1, Wanted::Latest).unwrap_err().why, Fault::PeerGone);
    let base = b.alloc(4096);
    let own = b.register(base, 8).unwrap();
    let published = b.sharing.publish(&mut b.links[..], PEER, 1, None, &own);
    let why = ImportError { peer: PEER, alloc: Some(own.alloc), why: Fault::PeerGone };
    assert_eq!(published, Err(TellError::Peer(why)));
    b.links[0] = None;
    assert_eq!(b.import(PEER, at[0].alloc, 0, 8), Err(gone));
    assert_eq!(b.process().counts().orphans_touched, 0);
    assert_eq!(driver.violations(), []);
}

#[test]
fn three_processes_waiting_in_a_circle_are_all_served() {
    let driver = FakeDriver::new(Behaviour::PLAIN, 7);
    let end = || End::new(driver.process().device(0).unwrap(), ImportLimits::default());
    let mut ends = [end(), end(), end()];
    let [a, b, c] = &mut ends;
    // Each process links the next process as peer 0, and the previous process as peer 1.
    link(a, 0, b, 1);
    link(b, 0, c, 1);
    link(c, 0, a, 1);
    let at: Vec<_> = ends
        .iter_mut()
        .map(|end| {
            let base = end.alloc(4096);
            end.register(base, 4096).unwrap()
        })
        .collect();
    let wanted = [at[1], at[2], at[0]];
    let threads: Vec<_> = ends
        .into_iter()
        .zip(wanted)
        .map(|(mut end, at)| {
            std::thread::spawn(move || {
                end.sharing.import(&mut end.links[..], PEER, at.alloc, 0, 4096, soon()).unwrap();
                // Serves the previous process until it has left.
                while end.links[1].as_mut().is_some_and(|link| link.line().ended().is_none()) {
                    end.links[0] = None;
                    end.turn();
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_refusal_that_nobody_awaits_is_not_used_later() {
    let (_, mut a, mut b, _, at, imported) = shared();
    b.sharing.release(imported.id);
    a.revoke(at.alloc).unwrap();
    // Delays the acknowledgement, so that the revocation can be cancelled.
    b.turn();
    let error = b.import(PEER, at.alloc, 0, 8).unwrap_err();
    assert_eq!(error.why, Fault::Deadline);
    a.line(PEER).pump();
    record(&mut a.line(PEER)).acks.clear();
    a.turn();
    b.turn();
    a.sharing.call_off(at.alloc).unwrap();
    assert!(import_from(&mut b, &mut a, &at).is_ok());
}
