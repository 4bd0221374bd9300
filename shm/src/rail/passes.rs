//! The limits of one pass. Covers staged operations that are longer than a pass, several operations
//! at once, and an owner that sleeps when a pass reports no work.

use std::ptr::NonNull;

use fishplate_core::mem::{Region, RegionKind, Untrusted};
use fishplate_core::rail::{Local, Posted, Rail, RailKey, Remote};
use fishplate_core::sync::event::EventCount;
use fishplate_core::sync::host::SpinHost;
use fishplate_core::sync::primitive::{AtomicU32, Ordering};

use crate::testing::{PEER, Random, Seen, TestRail, couple};
use crate::{ShmConfig, WaitObject};

/// Returns a configuration. Its lanes hold more than one pass sends, even if the consumer delays
/// freeing a quarter of a lane.
fn wide() -> ShmConfig {
    ShmConfig { lane_cells: 1 << 16, force_staging: true, ..ShmConfig::default() }
}

fn lend(bytes: &mut [u8]) -> Local {
    Local { ptr: NonNull::from(&mut *bytes).cast(), len: bytes.len(), desc: 0 }
}

/// Registers the bytes at `from` and imports them at `to`.
fn share(from: &mut TestRail, to: &mut TestRail, bytes: &mut [u8]) -> RailKey {
    // SAFETY: each test keeps the bytes alive, and reads them only while no rail is polled.
    let region =
        unsafe { Region::new(NonNull::from(&mut *bytes).cast(), bytes.len(), RegionKind::Private) };
    let key = from.register(&region).unwrap().0;
    assert_eq!(to.import(PEER, key, bytes.len() as u64), Ok(None));
    key
}

fn asleep(wait_object: &WaitObject) -> bool {
    let word: *const EventCount = &**wait_object;
    // SAFETY: the word is the first of the eventcount, which stays mapped while the wait object
    // exists. It is an atomic.
    unsafe { &*word.cast::<AtomicU32>() }.load(Ordering::Relaxed) != 0
}

/// Polls until `done` returns true. The owner of `sleeper` sleeps whenever a pass finds no work.
fn runs_to_its_end(
    [sleeper, other]: &mut [TestRail; 2],
    seen: &mut [Seen; 2],
    done: impl Fn(&[Seen; 2]) -> bool,
) {
    let host = SpinHost::new(1);
    let wait_object = sleeper.wait_object();
    while !done(seen) {
        let Some(_armed) =
            wait_object.prepare(&host).recheck(|| sleeper.poll(32, &mut seen[0]) > 0)
        else {
            continue;
        };
        while other.poll(32, &mut seen[1]) > 0 {}
        assert!(
            done(seen) || !asleep(&wait_object),
            "asleep with something still to send, and room for it"
        );
    }
}

#[test]
fn an_end_that_owes_more_replies_than_one_pass_sends_does_not_fall_asleep() {
    let [mut a, mut b] = couple(wide());
    let mut memory = Random(5).bytes(300_000);
    let key = share(&mut a, &mut b, &mut memory);
    let mut back = vec![0; memory.len()];
    // SAFETY: `back` outlives the post, and the test reads it only after the completion.
    let post = unsafe { b.post_read(PEER, lend(&mut back), Remote { key, offset: 0 }, 1) };
    assert_eq!(post, Ok(Posted::Pending));
    let mut seen = [Seen::default(), Seen::default()];
    runs_to_its_end(&mut [a, b], &mut seen, |[_, b]| b.done == [(1, Ok(()))]);
    assert!(back == memory);
}

#[test]
fn a_long_write_keeps_no_pass_and_its_origin_does_not_fall_asleep() {
    let [mut a, mut b] = couple(wide());
    let mut memory = vec![0; 2_000_000];
    let key = share(&mut b, &mut a, &mut memory);
    let mut data = Random(6).bytes(memory.len());
    let before = a.attached(PEER).unwrap().out.position();
    // SAFETY: `data` outlives the post, and nothing writes to it.
    let post =
        unsafe { a.post_write(PEER, lend(&mut data), Remote { key, offset: 0 }, Some(2), 1) };
    assert_eq!(post, Ok(Posted::Pending));
    let mut seen = [Seen::default(), Seen::default()];
    let cells = a.attached(PEER).unwrap().out.position() - before;
    assert!(cells <= 1100, "{cells} cells in one post");
    let before = a.attached(PEER).unwrap().out.position();
    a.poll(32, &mut seen[0]);
    let cells = a.attached(PEER).unwrap().out.position() - before;
    assert!((1..=1100).contains(&cells), "{cells} cells in one pass");
    runs_to_its_end(&mut [a, b], &mut seen, |[a, _]| a.done == [(1, Ok(()))]);
    assert_eq!(seen[1].landed, [2]);
    assert!(memory == data);
}

#[test]
fn reads_that_are_posted_again_and_again_hold_up_no_other() {
    let config = ShmConfig { force_staging: true, ..ShmConfig::default() };
    let [mut a, mut b] = couple(config);
    let mut memory = vec![7; 16 * 4096];
    let key = share(&mut b, &mut a, &mut memory);
    let mut target = vec![0; 64];
    let other = share(&mut b, &mut a, &mut target);
    let mut back = [vec![0; memory.len()], vec![0; memory.len()]];
    let mut seen = [Seen::default(), Seen::default()];
    let [first, second] = back.each_mut().map(|bytes| lend(bytes));
    let remote = Remote { key, offset: 0 };
    // SAFETY: `back` outlives the rails, and nothing reads it before the completion.
    assert_eq!(unsafe { a.post_read(PEER, first, remote, 0) }, Ok(Posted::Pending));
    // SAFETY: `back` outlives the rails, and nothing reads it before the completion.
    assert_eq!(unsafe { a.post_read(PEER, second, remote, 1) }, Ok(Posted::Pending));
    let write = unsafe {
        // SAFETY: the post sends all 64 bytes before it returns, so they need not outlive it.
        a.post_write(PEER, lend(&mut [1; 64]), Remote { key: other, offset: 0 }, None, 2)
    };
    assert_eq!(write, Ok(Posted::Pending));
    let mut ends = [0; 3];
    for _ in 0..100 {
        b.poll(32, &mut seen[1]);
        a.poll(32, &mut seen[0]);
        for (cx, result) in seen[0].done.drain(..) {
            assert_eq!(result, Ok(()));
            ends[cx as usize] += 1;
            if cx == 0 {
                // SAFETY: `back` outlives the rails, and nothing reads it before the completion.
                assert_eq!(unsafe { a.post_read(PEER, first, remote, 0) }, Ok(Posted::Pending));
            }
        }
    }
    assert!(ends[0] > 10 && ends[1..] == [1, 1], "{ends:?}");
}

#[test]
fn a_sleeper_is_rung_at_once_or_where_that_takes_a_fence_by_the_next_flush() {
    let host = SpinHost::new(1);
    for membarrier in [false, true] {
        let [mut a, b] = couple(ShmConfig { membarrier, ..ShmConfig::default() });
        let wait_object = b.wait_object();
        for message in [true, false] {
            let _announced = wait_object.prepare(&host);
            match message {
                true => drop(a.post_message(PEER, &[1; 8], Untrusted::from_slice(&[]), 0).unwrap()),
                false => a.land(PEER, 1).unwrap(),
            }
            assert_eq!(
                asleep(&wait_object),
                !(membarrier && message),
                "membarrier {membarrier}, message {message}"
            );
            a.flush();
            assert!(!asleep(&wait_object), "membarrier {membarrier}, message {message}");
        }
    }
}
