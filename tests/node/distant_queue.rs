//! Tests matched queues whose peers on other hosts are attached by the queue's own calls.

use std::time::Instant;

use fishplate::core::psm::Buffer;
use fishplate_testing::fabric::{Fake, Persona};

use super::distant::{connect, is_attached, on, until};
use super::{SOON, WORKER};

#[test]
fn a_queue_attaches_the_peers_that_its_calls_name() {
    let provider = Fake::new(Persona::tcp(), 31);
    let open = || Box::new(on(&provider, "tcp").requests(16).open().unwrap());
    if WORKER {
        // A node with a worker has no queue.
        return;
    }
    let (mut a, mut b) = (open(), open());
    let [to_b, to_a] = connect(&mut a, &mut b);
    let all = [u32::MAX; 3];
    assert!(b.queue().unwrap().iprobe2(None, [1, 2, 3], all).is_err());
    assert!(!is_attached(&a, to_b) && !is_attached(&b, to_a));
    let mut sent = Some(a.queue().unwrap().isend2(to_b, 0, [1, 2, 3], Buffer::Nothing, 1).unwrap());
    assert!(is_attached(&a, to_b) && !is_attached(&b, to_a));
    let mut got =
        Some(b.queue().unwrap().irecv2(Some(to_a), [1, 2, 3], all, Buffer::Nothing, 2).unwrap());
    assert!(is_attached(&b, to_a));
    until([&mut a, &mut b], |[a, b]| {
        sent = sent.filter(|req| a.queue().unwrap().test2(&mut Some(*req)).is_err());
        got = got.filter(|req| b.queue().unwrap().test2(&mut Some(*req)).is_err());
        sent.is_none() && got.is_none()
    });
}

#[test]
fn a_program_that_keeps_its_queue_meets_peers_by_passes() {
    if WORKER {
        // A node with a worker has no queue.
        return;
    }
    let provider = Fake::new(Persona::tcp(), 32);
    let open = || Box::new(on(&provider, "tcp").requests(16).open().unwrap());
    for (connects_late, peeks) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut a, mut b) = (open(), open());
        let to_b = a.connect(b.address()).unwrap();
        if !connects_late {
            b.connect(a.address()).unwrap();
        }
        let address = a.address();
        let mut ours = a.queue().unwrap();
        ours.isend2(to_b, 0, [1, 2, 3], Buffer::Nothing, 1).unwrap();
        if connects_late {
            for _ in 0..1000 {
                ours.poll();
                b.progress();
            }
            b.connect(&address).unwrap();
        }
        let mut theirs = b.queue().unwrap();
        theirs.irecv2(None, [1, 2, 3], [u32::MAX; 3], Buffer::Nothing, 2).unwrap();
        let begun = Instant::now();
        while ours.oldest().is_none() || theirs.oldest().is_none() {
            for queue in [&mut ours, &mut theirs] {
                // A peek makes a pass only if no request has completed.
                if !peeks || queue.ipeek2().is_ok() {
                    queue.poll();
                }
            }
            assert!(begun.elapsed() < SOON, "late {connects_late}, peeks {peeks}");
        }
    }
}

#[test]
fn a_queue_whose_every_peek_finds_a_request_meets_peers() {
    if WORKER {
        return;
    }
    let provider = Fake::new(Persona::tcp(), 33);
    let open = || Box::new(on(&provider, "tcp").requests(16).open().unwrap());
    let (mut a, mut b) = (open(), open());
    let [_, to_a] = connect(&mut a, &mut b);
    let me = a.connect(a.address()).unwrap();
    let (mut ours, mut theirs) = (a.queue().unwrap(), b.queue().unwrap());
    let (tag, all) = ([4, 5, 6], [u32::MAX; 3]);
    theirs.isend2(to_a, 0, [1, 2, 3], Buffer::Nothing, 1).unwrap();
    let begun = Instant::now();
    while theirs.oldest().is_none() {
        theirs.poll();
        ours.irecv2(Some(me), tag, all, Buffer::Nothing, 2).unwrap();
        ours.isend2(me, 0, tag, Buffer::Nothing, 3).unwrap();
        for _ in 0..2 {
            let (found, _) = ours.ipeek2().unwrap();
            ours.test2(&mut Some(found)).unwrap();
        }
        assert!(begun.elapsed() < SOON, "not met");
    }
}
