//! Tests how the target learns that a write has landed: by a done word or by a record. Both ends
//! agree on one of the two.

use super::*;
use crate::pair;

fn with(done: bool, words: u32, slots: u32) -> GpuConfig {
    GpuConfig { done_channel: done, done_words: words, relay_slots: slots, ..small() }
}

#[test]
fn b4_a_feature_off_at_one_end_is_off_at_both() {
    let cases = [
        (with(true, 16, 4), with(true, 16, 4), (true, true)),
        (with(true, 16, 4), with(false, 16, 4), (false, true)),
        (with(false, 16, 4), with(true, 16, 4), (false, true)),
        (with(true, 16, 4), with(true, 32, 4), (false, false)),
        (with(true, 16, 0), with(true, 16, 4), (false, false)),
        (with(false, 16, 0), with(false, 16, 0), (false, false)),
    ];
    for (ours, theirs, want) in cases {
        let driver = FakeDriver::new(Behaviour::LATE, 1);
        let processes = [driver.process(), driver.process()];
        let mut rails = [rail(&processes[0], ours.clone()), rail(&processes[1], theirs.clone())];
        let [a, b] = &mut rails;
        assert_eq!(join(a, PEER, b, PEER), [want; 2], "{ours:?} and {theirs:?}");
        drop(rails);
        let mut pair = Pair::of(driver, processes, [ours, theirs]);
        for n in 0..40u32 {
            pair.write(0, 0, 600, Some(n), n.into());
        }
        pair.until("all are reported", |pair| {
            pair.seen[1].landed.len() == 40 && pair.seen[0].done.len() == 40
        });
        let told = pair.rails[0].stats().told;
        assert_eq!(told, if want.0 { (40, 0) } else { (0, 40) });
        pair.check();
    }
}

#[test]
fn b4_an_unmappable_segment_turns_features_off_at_both_ends() {
    let driver = FakeDriver::new(Behaviour::PLAIN, 1);
    let rails = [rail(&driver.process(), small()), rail(&driver.process(), small())];
    let (x, y) = socket_pair().unwrap();
    let profiles = [rails[0].profile(), rails[1].profile()];
    let [one, two] = profiles;
    let first = std::thread::spawn(move || {
        let link = Link::over(y, Role::First, one.profile(), soon()).unwrap();
        one.agree(link, soon()).unwrap().active()
    });
    let mut link = Link::over(x, Role::Second, two.profile(), soon()).unwrap();
    // This end's segment is shorter than announced. This end can map the peer's segment, but the
    // peer cannot map this end's segment.
    let agreed = pair::agree_cut_short(&mut link, two.layout, soon()).unwrap();
    assert_eq!((agreed.done, agreed.relay), (false, false));
    assert!(agreed.segments.is_none());
    assert_eq!(first.join().unwrap(), (false, false));
}

#[test]
fn b8_a_failed_write_does_not_report_another_as_landed() {
    for word in [false, true] {
        let mut pair = Pair::new(Behaviour { write_word: word, ..Behaviour::LATE }, small(), 6);
        // The driver rejects the second piece of the first write.
        process(&pair.rails[0]).fail(Call::Copy, 1, DeviceError::Driver(700));
        pair.write(0, 0, 1024, Some(10), 0);
        for n in 1..30u32 {
            pair.write(0, 0, 300, Some(10 + n), n.into());
        }
        pair.until("ends", |pair| pair.seen[0].done.len() == 30 && pair.seen[1].landed.len() == 29);
        assert_eq!(
            pair.ended(0),
            Some(Err(CompleteError::Failed(700))),
            "quiescent: nothing of it is queued"
        );
        assert!((1..30).all(|n| pair.ended(n) == Some(Ok(()))));
        for _ in 0..100 {
            pair.poll();
        }
        let mut landed = pair.seen[1].landed.clone();
        landed.sort_unstable();
        assert_eq!(landed, (11..40).collect::<Vec<u32>>());
        assert_eq!(pair.rails[1].stats().failures_heard, 1);
        pair.check();
    }
}

#[test]
fn b17_a_missing_word_delays_no_other_write() {
    let driver = FakeDriver::new(Behaviour::LATE, 8);
    let mut target = rail(&driver.process(), small());
    let into = memory(&mut target, 4096);
    let mut origins: Vec<FakeRail> = (0..2).map(|_| rail(&driver.process(), small())).collect();
    for (n, origin) in origins.iter_mut().enumerate() {
        join(origin, PEER, &mut target, Peer(n as u16));
        origin.import(PEER, into.key, 4096).unwrap();
    }
    // The first origin takes tickets and dies before it stores their words.
    if let Some((sender, _)) = &mut origins[0].shared(PEER).unwrap().done {
        for _ in 0..3 {
            sender.reserve().unwrap();
            sender.take();
        }
    }
    let from = memory(&mut origins[0], 64);
    // SAFETY: the memory outlives the rail.
    unsafe { origins[0].post_write(PEER, from.local(0, 64), into.remote(0), Some(7), 1) }.unwrap();
    let from = memory(&mut origins[1], 64);
    let mut seen = [Seen::default(), Seen::default(), Seen::default()];
    for n in 0..100u64 {
        loop {
            // SAFETY: the memory outlives the rail.
            match unsafe {
                origins[1].post_write(PEER, from.local(0, 64), into.remote(64), Some(n as u32), n)
            } {
                Ok(_) => break,
                Err(error) => assert_eq!(error, PostError::Again),
            }
            target.poll(8, &mut seen[2]);
            origins[1].poll(8, &mut seen[1]);
        }
    }
    for _ in 0..PATIENCE {
        if seen[2].landed.len() == 101 {
            break;
        }
        target.poll(8, &mut seen[2]);
        origins[0].poll(8, &mut seen[0]);
        origins[1].poll(8, &mut seen[1]);
    }
    assert_eq!(
        seen[2].landed.len(),
        101,
        "the word after three missing ones, and all of another peer"
    );
    drop(origins.remove(0));
    target.check_peers(&mut seen[2]);
    assert_eq!(seen[2].down, [(Peer(0), PeerError::Closed)]);
    target.detach(Peer(0));
    drop((origins, target));
    driver.drain();
    assert_eq!(driver.violations(), []);
}
