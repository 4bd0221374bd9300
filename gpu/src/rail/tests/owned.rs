//! Tests the ways to free memory that the rail allocated and peers imported.

use super::*;
use crate::RevokeError;

/// A delay of copies, in steps, that is longer than every test.
const NEVER: u32 = 1_000_000;

/// Creates a pair. Its first end is still copying into memory of the second end.
fn copying() -> Pair {
    let mut pair =
        Pair::new(Behaviour::LATE, GpuConfig { timeout: Duration::from_secs(20), ..small() }, 8);
    pair.driver.behave(|behaviour| behaviour.late = NEVER);
    pair.write(0, 0, 4000, None, 0);
    pair
}

/// Polls both ends long enough for several turns.
fn polls(pair: &mut Pair) {
    (0..2000).for_each(|_| pair.poll());
}

#[test]
fn memory_given_back_is_freed_by_polls_once_the_peer_has_finished() {
    let mut pair = copying();
    let Memory { at, key, .. } = pair.memory[1];
    let frees = |pair: &Pair| process(&pair.rails[1]).counts().frees;
    let before = frees(&pair);
    assert_eq!(pair.rails[1].deregister(key), Ok(()));
    // SAFETY: this rail allocated the memory, and it is not registered any more.
    unsafe { pair.rails[1].give_back(at) };
    polls(&mut pair);
    assert_eq!(frees(&pair), before, "freed under a copy");
    pair.driver.behave(|behaviour| behaviour.late = 0);
    pair.driver.drain();
    pair.until("it is freed", |pair| frees(pair) > before);
    // Memory that no peer imported is freed at once.
    let other = pair.rails[1].alloc(64).unwrap();
    // SAFETY: this rail allocated the memory, and it is not registered.
    unsafe { pair.rails[1].give_back(other) };
    assert_eq!(frees(&pair), before + 2);
    pair.check();
}

/// To free or close memory, the driver waits for kernels, and a kernel may wait for a poll.
#[test]
fn polls_free_and_close_nothing_while_frees_are_deferred() {
    let mut pair = Pair::new(Behaviour::LATE, small(), 8);
    let calls = |pair: &Pair| {
        let counts = [0, 1].map(|end| process(&pair.rails[end]).counts());
        counts.map(|counts| counts.frees + counts.closes)
    };
    let before = calls(&pair);
    let other = pair.rails[1].alloc(64).unwrap();
    for end in [0, 1] {
        pair.rails[end].defer_frees(true);
        let Memory { at, key, .. } = pair.memory[end];
        assert_eq!(pair.rails[end].deregister(key), Ok(()));
        // SAFETY: this rail allocated the memory, and it is not registered any more.
        unsafe { pair.rails[end].give_back(at) };
    }
    // SAFETY: this rail allocated the memory, and it was never registered.
    unsafe { pair.rails[1].give_back(other) };
    polls(&mut pair);
    assert_eq!(calls(&pair), before);
    pair.rails[1].defer_frees(false);
    polls(&mut pair);
    // The second end has closed the first end's memory. It has freed its own memory that no peer
    // has open.
    assert_eq!(calls(&pair), [before[0], before[1] + 2]);
    pair.rails[0].defer_frees(false);
    pair.until("both are freed", |pair| calls(pair) == [before[0] + 2, before[1] + 3]);
    pair.check();
}

#[test]
fn revoke_all_counts_each_late_peer_once() {
    let mut pair = copying();
    memory(&mut pair.rails[1], 64);
    let soon = || Instant::now() + Duration::from_millis(5);
    let revoked = pair.rails[1].revoke_all(soon());
    assert!(
        matches!(revoked, Err(RevokeError::Deadline { peer: PEER, peers: 1, .. })),
        "{revoked:?}"
    );
    polls(&mut pair);
    // The peer now has one allocation open, and is copying into it.
    let (copied, _) = pair.rails[1].sharing.exports().find(pair.memory[1].at, 1).unwrap();
    let left = pair.rails[1].revoke_all(soon());
    assert_eq!(left, Err(RevokeError::Deadline { alloc: copied, peer: PEER, peers: 1 }));
    pair.driver.behave(|behaviour| behaviour.late = 0);
    pair.driver.drain();
    polls(&mut pair);
    assert_eq!(pair.rails[1].revoke_all(Instant::now()), Ok(()));
    pair.check();
}

/// A program may free its own registered memory after it has closed its node.
#[test]
fn revoke_all_waits_for_memory_that_the_program_allocated() {
    let mut pair = Pair::new(Behaviour::PLAIN, small(), 8);
    let [importer, owner] = &mut pair.rails;
    let at = process(owner).alloc(0, MemoryKind::Legacy, LEN as u64).unwrap();
    let (key, _) = owner.register(&device_region(at, LEN)).unwrap();
    importer.import(PEER, key, LEN as u64).unwrap();
    assert!(owner.revoke_all(Instant::now()).is_err(), "the peer has the memory open");
    polls(&mut pair);
    assert_eq!(pair.rails[1].revoke_all(Instant::now()), Ok(()));
    process(&pair.rails[1]).free(0, at).unwrap();
    pair.check();
}

#[test]
fn memory_of_an_unfinished_copy_is_leaked_when_the_rail_is_dropped() {
    for late in [0, NEVER] {
        let config = GpuConfig { timeout: Duration::from_millis(4), ..small() };
        let mut pair = Pair::new(Behaviour::LATE, config, 9);
        pair.driver.behave(|behaviour| behaviour.late = late);
        pair.write(0, 0, 4000, None, 0);
        let Pair { driver, rails: [copies, other], .. } = pair;
        let kept = process(&copies).clone();
        drop(copies);
        assert_eq!(kept.counts().kept, u64::from(late == NEVER));
        drop(other);
        driver.behave(|behaviour| behaviour.late = 0);
        driver.drain();
        assert_eq!(driver.violations(), []);
    }
}

#[test]
fn polls_with_device_less_peers_take_no_turns() {
    for device in [false, true] {
        let driver = FakeDriver::new(Behaviour::PLAIN, 1);
        let mut one = rail(&driver.process(), small());
        let mut other = rail(&driver.process(), small());
        if device {
            join(&mut one, PEER, &mut other, PEER);
        } else {
            let (x, y) = socket_pair().unwrap();
            let (ours, theirs) = (one.profile(), other.profile());
            let first =
                std::thread::spawn(move || Link::over(y, Role::First, theirs.profile(), soon()));
            let link = Link::over(x, Role::Second, ours.profile(), soon()).unwrap();
            first.join().unwrap().unwrap();
            one.attach(PEER, GpuLink::plain(link)).unwrap();
        }
        for _ in 0..300 {
            one.poll(8, &mut Seen::default());
        }
        assert_eq!(one.next_turn_ns > 0, device);
        one.detach(PEER);
        one.next_turn_ns = 0;
        for _ in 0..300 {
            one.poll(8, &mut Seen::default());
        }
        assert_eq!(one.next_turn_ns, 0);
    }
}
