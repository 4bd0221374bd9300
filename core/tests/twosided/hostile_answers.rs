//! A receiver is not trusted either: an answer or a chunk that nothing waits for is refused, and
//! ends no operation.

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Notice, Signal};
use fishplate_core::error::{PeerError, PostError, Violation};
use fishplate_core::mem::PeerId;
use fishplate_core::op::{Amo, AmoOp, Fault, Outcome, SignalOp, Token};

use super::forge::{Bench, Network, message, request};
use super::rig::*;
use super::support::tap::{Event, Tap};
use super::support::*;

#[test]
fn unmatched_answers_are_refused() {
    // The engine has an open send. Its token names the first operation of the first generation.
    let token = 1u64 << 32;
    for (what, answer, want) in [
        ("more delivered than sent", message(19, 0, 0, 0, &[token, 5001]), Some(Violation::Reply)),
        (
            "a pull of more than was sent",
            message(20, 0, 0, 0, &[token, 1 << 32, 5001]),
            Some(Violation::Reply),
        ),
        (
            "a pull of nothing of it",
            message(20, 0, 0, 0, &[token, 1 << 32, 0]),
            Some(Violation::Reply),
        ),
        ("a plain end", message(19, 0, 0, 0, &[token, 5000]), None),
        ("an end that could not be taken", message(19, 1, 0, 0, &[token, 0]), None),
    ] {
        let mut bench = Bench::new();
        bench.control.borrow_mut().edit = None;
        let sent = pending(bench.own.send_region(1, 0, 5000, false));
        passes(&mut bench.own.engine, 3);
        bench.hear(answer.clone());
        passes(&mut bench.own.engine, 40);
        match want {
            Some(want) => bench.check(what, want),
            None => {
                let end = bench.own.engine.test(sent).unwrap().expect(what);
                let good =
                    if answer[2] == 0 { Outcome::Done } else { Outcome::Failed(Fault::Receiver) };
                assert_eq!(end.outcome, good, "{what}");
                bench.hear(answer);
                bench.own.engine.recv(None, tag(9), EXACT, None, 0).unwrap();
                assert_eq!(bench.violation(), Some(Violation::Reply), "{what} twice");
            }
        }
    }
}

fn send_of(own: &mut Own1<Tap<Network>, 1>, to: PeerId, len: usize) -> Token {
    let payload = Payload::Region(own.out.at(0), len);
    pending(own.engine.send(CX, to, tag(9), payload, Notice::Report(1)))
}

#[test]
fn answers_to_what_waits_for_none_of_this_peer_are_refused_and_end_nothing() {
    type Begin = fn(&mut Own1<Tap<Network>, 1>, PeerId) -> Token;
    let cases: [(&str, Begin); 4] = [
        ("a send to another peer", |own, honest| send_of(own, honest, 5000)),
        ("a put", |own, _| {
            let remote = import(&mut own.engine, own.me, own.into);
            pending(own.engine.put(CX, own.out.at(0), 300, remote.at(0), Notice::Report(1)))
        }),
        ("an atomic", |own, _| {
            let remote = import(&mut own.engine, own.me, own.into);
            let amo = Amo { op: AmoOp::Add, width: 8, operand: 0, compare: 0 };
            pending(own.engine.fetch(CX, remote.at(0), amo, 1))
        }),
        ("a send that is not posted yet", |own, _| {
            // The signals fill the window.
            let remote = import(&mut own.engine, own.me, own.into);
            for _ in 0..8 {
                let nothing = Signal { at: remote.at(0), op: SignalOp::Add, value: 0 };
                own.engine.signal(CX, nothing, Notice::Silent).unwrap();
            }
            send_of(own, own.me, 5000)
        }),
    ];
    for (what, begin) in cases {
        for kind in [19, 20] {
            let mut bench = Bench::new();
            // Drops all acknowledgements and answers.
            bench.control.borrow_mut().lose(&[4, 5]);
            let token = begin(&mut bench.own, bench.honest);
            passes(&mut bench.own.engine, 3);
            // Sends a Pull, or a Fin of zero bytes, a length that is valid for any operation.
            let words = [token.to_raw(), 0, 8];
            bench.hear(message(kind, 0, 0, 0, &words[..if kind == 19 { 2 } else { 3 }]));
            assert_eq!(bench.violation(), Some(Violation::Reply), "{what}: kind {kind}");
            assert_eq!(bench.own.engine.peer_error(bench.honest), Ok(None), "{what}");
            let end = bench.own.engine.test(token).unwrap();
            assert!(
                end.is_none_or(|end| end.outcome != Outcome::Done),
                "{what}: kind {kind}: {end:?}"
            );
        }
    }
}

#[test]
fn a_send_whose_chunks_are_not_all_out_is_not_ended_by_its_receiver() {
    let mut bench = Bench::new();
    let sent = pending(bench.own.send_region(9, 0, 5000, false));
    passes(&mut bench.own.engine, 3);
    // No rail has room for chunks.
    bench.control.borrow_mut().refuse =
        Some(Box::new(|post| (post.bytes.first() == Some(&21)).then_some(PostError::Again)));
    bench.hear(message(20, 0, 0, 0, &[sent.to_raw(), 1 << 32, 5000]));
    assert_eq!(bench.violation(), None);
    bench.hear(message(19, 0, 0, 0, &[sent.to_raw(), 100]));
    assert_eq!(bench.violation(), Some(Violation::Reply));
    let end = bench.own.engine.test(sent).unwrap().expect("ended with its peer");
    assert_ne!(end.outcome, Outcome::Done);
}

#[test]
fn a_chunk_of_another_peer_than_the_sender_s_is_refused() {
    let mut bench = Bench::new();
    let into = Some((bench.own.into.at(0), 64));
    let receive = bench.own.engine.recv(Some(bench.honest), tag(1), EXACT, into, 0).unwrap();
    // Drops the request for chunks.
    bench.control.borrow_mut().lose(&[20]);
    let offer = Event::Message(bench.honest.peer(), request(0, 77, 64, 0, 64, 0xffff, &[]));
    bench.control.borrow_mut().inject.push_back(offer);
    passes(&mut bench.own.engine, 3);
    let mut chunk = message(21, 0, 0, 0, &[1 << 32, 0]);
    chunk.resize(32 + 8, 0xee);
    bench.hear(chunk);
    assert_eq!(bench.violation(), Some(Violation::Reply));
    assert_eq!(bench.own.engine.peer_error(bench.honest), Ok(None));
    assert_eq!(bench.own.engine.test_recv(receive), Ok(None));
    assert!(bench.own.bytes(0, SIZE).iter().all(|&b| b == 0));
}

#[test]
fn a_payload_that_went_in_its_message_is_not_pulled_as_well() {
    let mut bench = Bench::new();
    let sent = pending(bench.own.send_region(9, 0, 8, true));
    passes(&mut bench.own.engine, 3);
    let posts = bench.control.borrow().posts.len();
    bench.hear(message(20, 0, 0, 0, &[sent.to_raw(), 1 << 32, 8]));
    assert_eq!(bench.violation(), Some(Violation::Reply));
    let control = bench.control.borrow();
    assert!(control.posts[posts..].iter().all(|post| post.bytes.first() != Some(&21)));
}

#[test]
fn a_pull_of_more_than_was_sent_or_of_nothing_of_it_sends_no_chunk() {
    for len in [0, 5001] {
        let mut bench = Bench::new();
        // Drops all chunks, so that only the Pull can be refused.
        bench.control.borrow_mut().lose(&[21]);
        let sent = pending(bench.own.send_region(9, 0, 5000, false));
        passes(&mut bench.own.engine, 3);
        let posts = bench.control.borrow().posts.len();
        bench.hear(message(20, 0, 0, 0, &[sent.to_raw(), 1 << 32, len]));
        passes(&mut bench.own.engine, 40);
        assert_eq!(bench.violation(), Some(Violation::Reply), "{len}");
        let control = bench.control.borrow();
        assert!(control.posts[posts..].iter().all(|post| post.bytes.first() != Some(&21)), "{len}");
    }
}

#[test]
fn unrequested_chunks_are_refused_and_the_receive_fails() {
    for (what, offset, len) in
        [("beyond", 64, 1), ("across the end", 60, 8), ("far", u64::MAX - 3, 8), ("empty", 0, 0)]
    {
        let mut bench = Bench::new();
        let into = Some((bench.own.into.at(0), 64));
        let receive = bench.own.engine.recv(Some(bench.own.me), tag(1), EXACT, into, 0).unwrap();
        // The sender's region cannot be read, so the engine pulls the payload. The sender answers
        // with this chunk.
        bench.control.borrow_mut().lose(&[20]);
        bench.hear(request(0, 77, 100, 0, 100, 0xffff, &[]));
        let name = 1u64 << 32;
        let mut chunk = message(21, 0, 0, 0, &[name, offset]);
        chunk.resize(32 + len, 0xee);
        bench.hear(chunk);
        assert_eq!(bench.violation(), Some(Violation::Bounds), "{what}");
        let status = bench.own.engine.test_recv(receive).unwrap().expect("ended");
        assert_eq!(
            (status.outcome, status.delivered),
            (Received::Failed(Fault::Peer(PeerError::Protocol(Violation::Bounds))), 0),
            "{what}"
        );
        assert!(bench.own.bytes(0, SIZE).iter().all(|&b| b == 0), "{what}");
    }
}

#[test]
fn a_chunk_that_comes_twice_is_refused() {
    let mut bench = Bench::new();
    let into = Some((bench.own.into.at(0), 64));
    let receive = bench.own.engine.recv(Some(bench.own.me), tag(1), EXACT, into, 0).unwrap();
    // Drops the request for chunks.
    bench.control.borrow_mut().lose(&[20]);
    bench.hear(request(0, 77, 64, 0, 64, 0xffff, &[]));
    let mut chunk = message(21, 0, 0, 0, &[1 << 32, 0]);
    chunk.resize(32 + 40, 0xee);
    bench.hear(chunk.clone());
    assert_eq!(bench.violation(), None);
    bench.hear(chunk);
    assert_eq!(bench.violation(), Some(Violation::Bounds));
    let status = bench.own.engine.test_recv(receive).unwrap().expect("ended");
    assert_eq!(
        status.outcome,
        Received::Failed(Fault::Peer(PeerError::Protocol(Violation::Bounds)))
    );
}

#[test]
fn an_answer_to_a_send_to_a_peer_that_has_failed_is_refused() {
    for kind in [19, 20] {
        let mut bench = Bench::new();
        bench.control.borrow_mut().edit = None;
        let sent = send_of(&mut bench.own, bench.honest, 5000);
        passes(&mut bench.own.engine, 3);
        let invalid = Event::Message(bench.honest.peer(), message(255, 0, 0, 0, &[]));
        bench.control.borrow_mut().inject.push_back(invalid);
        passes(&mut bench.own.engine, 3);
        assert!(bench.own.engine.peer_error(bench.honest).unwrap().is_some());
        // The completion is not taken yet, so the token still names the send.
        let words = [sent.to_raw(), 0, 8];
        bench.hear(message(kind, 0, 0, 0, &words[..if kind == 19 { 2 } else { 3 }]));
        assert_eq!(bench.violation(), Some(Violation::Reply), "kind {kind}");
        let end = bench.own.engine.test(sent).unwrap().expect("ended with its peer");
        assert_ne!(end.outcome, Outcome::Done);
    }
}

#[test]
fn an_unreadable_payload_is_pulled_or_fails() {
    let mut bench = Bench::new();
    let into = Some((bench.own.into.at(0), 64));
    let receive = bench.own.engine.recv(Some(bench.own.me), tag(1), EXACT, into, 0).unwrap();
    // The keys name no memory, so the import is refused. Then the engine pulls, but the token names
    // no send.
    bench.hear(request(0, 77, 64, 0, 64, 5 | 1 << 32, &[0xdead_beef, 0]));
    assert_eq!(bench.violation(), Some(Violation::Reply));
    let status = bench.own.engine.test_recv(receive).unwrap().expect("ended");
    assert_eq!(
        status.outcome,
        Received::Failed(Fault::Peer(PeerError::Protocol(Violation::Reply)))
    );
}
