//! Rails that refuse posts. If an answer is permanently refused while a pass handles a receive, the
//! peer fails, and each receive that waits for the peer completes once. A permanently refused
//! message has no effect. A temporarily refused message delays no other messages.

use std::cell::RefCell;
use std::rc::Rc;

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{OpError, PeerError, PostError, WaitError};
use fishplate_core::mem::RailId;
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::tap::{Event, Post, Verb, shared, tap};
use super::support::*;

const FIN: u8 = 19;
const PULL: u8 = 20;
const CHUNK: u8 = 21;

/// Sends three messages that match at once. The receiver answers each with a message of `kind`, and
/// the rail refuses the second answer. Returns the outcomes of the receives.
fn refused(kind: u8, len: usize, sync: bool) -> Vec<Received> {
    let control = shared();
    let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
    control.borrow_mut().unreadable = true;
    let mut answers = 0;
    control.borrow_mut().refuse = Some(Box::new(move |post: &Post| {
        let answer = post.verb == Verb::Message && post.bytes[0] == kind;
        answers += u32::from(answer);
        (answer && answers == 2).then_some(PostError::Provider(-5))
    }));
    for n in 0..3 {
        own.recv(n, EXACT, 2048 + n * 600, len);
    }
    for n in 0..3 {
        own.send_region(n, n * 600, len, sync).unwrap();
    }
    for _ in 0..200 {
        own.engine.progress();
    }
    let ended: Vec<_> = std::iter::from_fn(|| own.engine.next_recv()).collect();
    assert_eq!(own.engine.peer_error(own.me), Ok(Some(PeerError::Rail(RailId(0)))));
    let mut words: Vec<_> = ended.iter().map(|status| status.word).collect();
    words.sort_unstable();
    assert_eq!(words, [0, 1, 2]);
    ended.into_iter().map(|status| status.outcome).collect()
}

#[test]
fn a_refused_pull_fails_each_receive_of_that_peer_once() {
    let failed = Received::Failed(Fault::Peer(PeerError::Rail(RailId(0))));
    assert_eq!(refused(PULL, 600, false), [failed; 3]);
}

#[test]
fn a_refused_fin_keeps_received_messages() {
    assert_eq!(refused(FIN, 100, true), [Received::Ok; 3]);
}

#[test]
fn a_permanently_refused_message_costs_no_credit() {
    let control = shared();
    let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
    let refuse = |post: &Post| (post.verb == Verb::Message).then_some(PostError::Provider(-5));
    for sync in [false, true] {
        control.borrow_mut().refuse = Some(Box::new(refuse));
        for n in 0..u64::from(SMALL.credits) {
            let token = pending(own.send_region(n, 0, 8, sync));
            let end = own.engine.test(token).unwrap().expect("over at once");
            assert_eq!(
                end.outcome,
                Outcome::Failed(Fault::Post(RailId(0), PostError::Provider(-5)))
            );
        }
        control.borrow_mut().refuse = Some(Box::new(|_| None));
        for n in 0..u64::from(SMALL.credits) {
            own.send(n, &[1; 8]).unwrap();
        }
        passes(&mut own.engine, 5);
        for n in 0..u64::from(SMALL.credits) {
            let request = own.recv(n, EXACT, 0, 8);
            check(&own.finish(request), Received::Ok, n, 8, 8);
        }
        passes(&mut own.engine, 40);
        assert_eq!(own.engine.matching_stats().rendezvous, 0, "sync {sync}: its credits are gone");
    }
}

#[test]
fn permanently_refused_bytes_are_an_error_and_not_retried() {
    for (error, want) in [
        (PostError::Provider(-5), OpError::Rail(RailId(0), PostError::Provider(-5))),
        (PostError::PeerDown, OpError::PeerFailed(PeerError::Rail(RailId(0)))),
    ] {
        let control = shared();
        let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
        control.borrow_mut().refuse =
            Some(Box::new(move |post: &Post| (post.verb == Verb::Message).then_some(error)));
        assert_eq!(own.send(1, &[1; 8]), Err(want));
        control.borrow_mut().refuse = Some(Box::new(|_| None));
        match error {
            PostError::PeerDown => assert_eq!(own.send(1, &[1; 8]), Err(want)),
            _ => drop(own.send(1, &[1; 8]).unwrap()),
        }
    }
}

#[test]
fn chunks_to_a_blocked_peer_delay_no_others() {
    const LEN: usize = 3000;
    let control = shared();
    let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
    control.borrow_mut().unreadable = true;
    let other = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(other, 1).unwrap();
    let full = own.me.peer();
    control.borrow_mut().refuse = Some(Box::new(move |post: &Post| {
        (post.verb == Verb::Message && post.bytes[0] == CHUNK && post.peer == full)
            .then_some(PostError::Again)
    }));
    let stuck = own.recv(0, EXACT, 0, LEN);
    own.send_region(0, 0, LEN, false).unwrap();
    passes(&mut own.engine, 10);
    for n in 1..4 {
        let into = Some((own.into.at(n * 4096), LEN));
        let request = own.engine.recv(Some(other), tag(n), EXACT, into, n).unwrap();
        write(&own.engine, own.out.at(n * 4096), &pattern(n, LEN));
        let payload = Payload::Region(own.out.at(n * 4096), LEN);
        own.engine.send(CX, other, tag(n), payload, Notice::Silent).unwrap();
        check(&own.finish(request), Received::Ok, n, LEN as u64, LEN as u64);
        assert_eq!(own.bytes(n * 4096, LEN), pattern(n, LEN));
    }
    assert_eq!(own.engine.test_recv(stuck), Ok(None));
    control.borrow_mut().refuse = Some(Box::new(|_| None));
    check(&own.finish(stuck), Received::Ok, 0, LEN as u64, LEN as u64);
    assert_eq!(own.bytes(0, LEN), pattern(0, LEN));
}

#[test]
fn a_refused_send_is_not_counted() {
    let mut own = loopback(MatchConfig { credits: 0, headers: 1, ..SMALL });
    own.send_region(1, 0, 8, false).unwrap();
    let before = own.engine.matching_stats();
    assert_eq!(own.send_region(2, 0, 8, false), Err(OpError::Again));
    assert_eq!(own.engine.matching_stats(), before);
    assert_eq!((before.rendezvous, before.credits_exhausted), (1, 1));
}

#[test]
fn a_pulled_send_of_a_lost_peer_completes_with_its_post() {
    let control = shared();
    let rail =
        Faulty::<_, 16>::new(Loopback::<64>::new(), Faults { hold: 1000, ..Faults::NONE }, 1);
    let mut own = own1(Config::DEFAULT, SMALL, tap(rail, &control));
    control.borrow_mut().unreadable = true;
    // Withholds completions. The request arrives and is answered, but no chunk is sent.
    let late = Rc::new(RefCell::new(vec![]));
    let ends = late.clone();
    control.borrow_mut().edit = Some(Box::new(move |_, event| match event {
        Event::Done(..) => {
            ends.borrow_mut().push(event);
            vec![]
        }
        event => vec![event],
    }));
    control.borrow_mut().refuse = Some(Box::new(|post: &Post| {
        (post.verb == Verb::Message && post.bytes[0] == CHUNK).then_some(PostError::Again)
    }));
    let receive = own.recv(1, EXACT, 0, 3000);
    let token = pending(own.send_region(1, 0, 3000, false));
    own.engine.count_failure(token).unwrap();
    passes(&mut own.engine, 10);
    assert!(control.borrow().posts.iter().any(|post| post.bytes.first() == Some(&PULL)));
    control.borrow_mut().inject.push_back(Event::Down(own.me.peer(), PeerError::Died));
    passes(&mut own.engine, 10);
    let lost = Fault::Peer(PeerError::Died);
    assert_eq!(own.engine.test_recv(receive).unwrap().unwrap().outcome, Received::Failed(lost));
    assert_eq!(own.engine.test(token), Ok(None), "its post is not over");
    control.borrow_mut().inject.extend(late.borrow_mut().drain(..));
    passes(&mut own.engine, 10);
    assert_eq!(own.engine.test(token).unwrap().unwrap().outcome, Outcome::Failed(lost));
    // Only a counted failure is reported here.
    let failed = Err(WaitError::PeerFailed(own.me, PeerError::Died));
    assert_eq!(own.engine.quiet_all(CX, &mut waiter(), SOON), failed);
}
