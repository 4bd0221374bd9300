//! A sender is not trusted: an invalid message is refused with an error that names the violation,
//! quarantines its sender, and has no other effect. Misuse by the program is refused and changes
//! nothing.

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::tag::MatcherMemory;
use fishplate_core::engine::{Config, ContextId, Engine, Notice, Signal};
use fishplate_core::error::{AttachError, OpError, PeerError, PostError, Violation};
use fishplate_core::mem::PeerId;
use fishplate_core::op::{Amo, AmoOp, Fault, Outcome, SignalOp, Token};
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::tap::{Event, Shared, Tap, shared, tap};
use super::support::*;

type Network = Loopback<64>;

/// Returns a message of the protocol in its wire encoding: kind, context, op, sequence, ack, freed,
/// then words.
fn message(kind: u8, op: u8, seq: u32, freed: u32, words: &[u64]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, op, 0];
    bytes.extend(seq.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(freed.to_le_bytes());
    for word in words {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

fn tagged(seq: u32, tag: u64, payload: usize) -> Vec<u8> {
    let mut bytes = message(16, 0, seq, 0, &[tag, 0]);
    bytes.resize(32 + payload, 0xee);
    bytes
}

/// Returns a request to send. `last` contains the region, its generation, and a bitmask of rails. A
/// key follows for each rail in the mask.
fn request(
    seq: u32,
    token: u64,
    len: u64,
    offset: u64,
    size: u64,
    last: u64,
    keys: &[u64],
) -> Vec<u8> {
    let mut bytes = message(18, 0, seq, 0, &[1, 0, token, len, offset, size, last]);
    for key in keys {
        bytes.extend(key.to_le_bytes());
    }
    bytes
}

/// An engine with two peers, which are both the engine itself. The second peer is honest.
struct Bench {
    control: Shared,
    own: Own1<Tap<Network>, 1>,
    honest: PeerId,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(SMALL)
    }

    fn with(matching: MatchConfig) -> Bench {
        let control = shared();
        let config = Config { window: 8, ..Config::DEFAULT };
        let mut own = own1(config, matching, tap(Network::new(), &control));
        let honest = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(honest, 1).unwrap();
        // The bad peer's messages are forged, so the engine must not receive its own answers to
        // them.
        let me = own.me.peer();
        control.borrow_mut().edit = Some(Box::new(move |_, event| match event {
            Event::Message(from, mut bytes) if from == me && bytes.len() >= 12 => {
                let made_up = bytes[0] == 5 || bytes[0] >= 20;
                bytes[8] = if made_up { 0 } else { bytes[8] };
                vec![Event::Message(from, bytes)]
            }
            event => vec![event],
        }));
        Bench { control, own, honest }
    }

    fn hear(&mut self, bytes: Vec<u8>) {
        let from = self.own.me.peer();
        self.control.borrow_mut().inject.push_back(Event::Message(from, bytes));
        passes(&mut self.own.engine, 3);
    }

    fn check(&mut self, what: &str, want: Violation) {
        let why = PeerError::Protocol(want);
        let (me, honest) = (self.own.me, self.honest);
        assert_eq!(self.own.engine.peer_error(me), Ok(Some(why)), "{what}");
        assert_eq!(self.own.engine.peer_error(honest), Ok(None), "{what}");
        let refused = self.own.send(1, &[1]);
        assert_eq!(refused, Err(OpError::PeerFailed(why)), "{what}");
        assert!(self.own.bytes(0, SIZE).iter().all(|&b| b == 0), "{what}: wrote");
        // The honest peer still works. Sends by each protocol.
        for (n, len) in [(1, 8), (2, 5000)] {
            let into = Some((self.own.into.at(0), len));
            let receive = self.own.engine.recv(Some(honest), tag(n), EXACT, into, n).unwrap();
            let payload = Payload::Region(self.own.out.at(0), len);
            self.own.engine.send(CX, honest, tag(n), payload, Notice::Silent).unwrap();
            check(&self.own.finish(receive), Received::Ok, n, len as u64, len as u64);
        }
        self.own.engine.remove_peer(me).unwrap();
        passes(&mut self.own.engine, 5);
    }
}

#[test]
fn every_violation_is_named() {
    let none = 0xffff;
    let cases: Vec<(&str, Vec<u8>, Violation)> = vec![
        ("half a head", tagged(0, 1, 0)[..31].to_vec(), Violation::Length),
        ("kind 23", message(23, 0, 0, 0, &[0, 0]), Violation::Kind),
        (
            "more headers than can be counted",
            message(22, 0, 0, 0, &[0, 1 << 32]),
            Violation::Credit,
        ),
        ("room of op 1", message(22, 1, 0, 0, &[9, 9]), Violation::Kind),
        ("room and more", message(22, 0, 0, 0, &[9, 9, 9]), Violation::Length),
        ("a short message without a grant", message(26, 0, 0, 0, &[1, 0]), Violation::Credit),
        ("a short message of op 2", message(26, 2, 0, 0, &[1, 0]), Violation::Kind),
        ("a short message cut short", message(26, 0, 0, 0, &[1]), Violation::Length),
        ("kind 255", message(255, 0, 0, 0, &[0, 0]), Violation::Kind),
        ("a tagged message of op 2", message(16, 2, 0, 0, &[0, 0]), Violation::Kind),
        ("a tag of more than 96 bits", message(16, 0, 0, 0, &[0, 1 << 32]), Violation::Kind),
        ("a payload beyond the limit", tagged(0, 1, 129), Violation::Length),
        ("a number beyond the window", tagged(8, 1, 0), Violation::Sequence),
        ("a number that is too wide", tagged(1 << 20, 1, 0), Violation::Sequence),
        (
            "an acknowledgement of nothing",
            {
                let mut bytes = tagged(0, 1, 0);
                bytes[8] = 1;
                bytes
            },
            Violation::Ack,
        ),
        ("credits that were never used", message(16, 0, 0, 1, &[0, 0]), Violation::Credit),
        (
            "a context that is not there",
            {
                let mut bytes = tagged(0, 1, 0);
                bytes[1] = 7;
                bytes
            },
            Violation::Context,
        ),
        (
            "a synchronous message without a token",
            message(17, 0, 0, 0, &[1, 0, 0]),
            Violation::Kind,
        ),
        ("a synchronous message cut short", message(17, 0, 0, 0, &[1, 0]), Violation::Length),
        (
            "a request cut short",
            request(0, 1, 8, 0, 8, none, &[])[..71].to_vec(),
            Violation::Length,
        ),
        ("a request without a token", request(0, 0, 8, 0, 8, none, &[]), Violation::Bounds),
        ("a request beyond its region", request(0, 1, 8, 1, 8, none, &[]), Violation::Bounds),
        (
            "a request beyond all memory",
            request(0, 1, 8, 0, u64::MAX, none, &[]),
            Violation::Bounds,
        ),
        ("a request that wraps", request(0, 1, u64::MAX, 8, 64, none, &[]), Violation::Bounds),
        (
            "a request with keys it cannot have",
            request(0, 1, 8, 0, 8, none | 1 << 32, &[1, 2]),
            Violation::Kind,
        ),
        ("a request without its keys", request(0, 1, 8, 0, 8, 1 << 32, &[]), Violation::Length),
        (
            "a request with too many keys",
            request(0, 1, 8, 0, 8, 1 << 32, &[1, 2, 3, 4]),
            Violation::Length,
        ),
        (
            "a request with too few keys",
            request(0, 1, 8, 0, 8, 0b101 << 32, &[1, 2]),
            Violation::Length,
        ),
        (
            "a request on a rail that cannot be",
            request(0, 1, 8, 0, 8, 1 << 48, &[1, 2]),
            Violation::Kind,
        ),
        ("a request on no rail", request(0, 1, 8, 0, 8, 0, &[]), Violation::Kind),
        ("an end of nothing", message(19, 0, 0, 0, &[1 << 32, 0]), Violation::Reply),
        ("an end of nobody", message(19, 0, 0, 0, &[u64::MAX, 0]), Violation::Reply),
        ("an end with more", message(19, 0, 0, 0, &[1 << 32, 0, 0]), Violation::Length),
        ("an end of op 3", message(19, 3, 0, 0, &[1 << 32, 0]), Violation::Kind),
        ("a pull of nothing", message(20, 0, 0, 0, &[1 << 32, 1, 8]), Violation::Reply),
        ("a pull cut short", message(20, 0, 0, 0, &[1 << 32, 1]), Violation::Length),
        ("a chunk of nothing", message(21, 0, 0, 0, &[1 << 32, 0, 7]), Violation::Reply),
    ];
    for (what, bytes, want) in cases {
        let mut bench = Bench::new();
        bench.hear(bytes);
        bench.check(what, want);
    }
}

#[test]
fn a_sender_without_credits_is_stopped_at_the_bound() {
    for (what, make) in [
        ("payloads", Box::new(|n: u32| tagged(n, 1, 8)) as Box<dyn Fn(u32) -> Vec<u8>>),
        ("headers", Box::new(|n: u32| request(n, 1, 8, 0, 8, 0xffff, &[]))),
        ("early payloads", Box::new(|n: u32| tagged(n + 1, 1, 8))),
        ("early headers", Box::new(|n: u32| request(n + 1, 1, 8, 0, 8, 0xffff, &[]))),
    ] {
        let mut bench = Bench::new();
        for n in 0..SMALL.credits {
            bench.hear(make(n));
            assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(None), "{what} {n}");
        }
        bench.hear(make(SMALL.credits));
        bench.check(what, Violation::Credit);
        // The next peer can use all blocks of the bad peer.
        let next = bench.own.engine.reserve_peer().unwrap();
        bench.own.engine.connect_peer(next, 1).unwrap();
        for n in 0..SMALL.credits as u64 {
            let payload = Payload::Bytes(&[3; 8]);
            bench.own.engine.send(CX, next, tag(n), payload, Notice::Silent).unwrap();
        }
        passes(&mut bench.own.engine, 3);
        for n in 0..SMALL.credits as u64 {
            let into = Some((bench.own.into.at(0), 8));
            let receive = bench.own.engine.recv(Some(next), tag(n), EXACT, into, 0).unwrap();
            check(&bench.own.finish(receive), Received::Ok, n, 8, 8);
        }
    }
}

#[test]
fn a_short_message_is_bounded_by_its_grant_and_its_block() {
    // The third payload uses more than half of the credits, so the receiver grants 2 of the 8
    // shared blocks. The second message after that grant brings 2 more.
    let granted = SMALL.credits - 1;
    for (what, before, payloads, want) in [
        ("before a grant", granted - 1, &[8][..], Violation::Credit),
        ("after the last grant", granted, &[64, 0, 9, 9, 9, 9, 9, 9, 9], Violation::Credit),
        ("longer than a block", granted, &[64, 65], Violation::Length),
    ] {
        let mut bench = Bench::with(MatchConfig { shared_shorts: 8, ..SMALL });
        for n in 0..before {
            bench.hear(tagged(n, 1, 8));
        }
        for (&len, n) in payloads.iter().zip(before..) {
            assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(None), "{what} {n}");
            let mut bytes = message(26, 0, n, 0, &[1, 0]);
            bytes.resize(32 + len, 0xee);
            bench.hear(bytes);
        }
        bench.check(what, want);
    }
}

#[test]
fn a_repeated_message_takes_no_room() {
    let payload = |n: u32| tagged(n, 1, 8);
    let header = |n: u32| request(n, 1, 8, 0, 8, 0xffff, &[]);
    for (what, make) in [("payloads", &payload as &dyn Fn(u32) -> Vec<u8>), ("headers", &header)] {
        for first in [0, 1] {
            let mut bench = Bench::new();
            for n in first..first + SMALL.credits {
                bench.hear(make(n));
            }
            for n in first..first + SMALL.credits {
                bench.hear(make(n));
                assert_eq!(
                    bench.own.engine.peer_error(bench.own.me),
                    Ok(None),
                    "{what} from {first}: {n} again"
                );
            }
            assert_eq!(bench.own.engine.stats().duplicates, u64::from(SMALL.credits), "{what}");
        }
    }
}

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
                assert_eq!(
                    bench.own.engine.peer_error(bench.own.me),
                    Ok(Some(PeerError::Protocol(Violation::Reply))),
                    "{what} twice"
                );
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
            bench.control.borrow_mut().edit = Some(Box::new(|_, event| match &event {
                Event::Message(_, bytes) if [4, 5].contains(&bytes[0]) => vec![],
                _ => vec![event],
            }));
            let token = begin(&mut bench.own, bench.honest);
            passes(&mut bench.own.engine, 3);
            // Sends a Pull, or a Fin of zero bytes, a length that is valid for any operation.
            let words = [token.to_raw(), 0, 8];
            bench.hear(message(kind, 0, 0, 0, &words[..if kind == 19 { 2 } else { 3 }]));
            let why = PeerError::Protocol(Violation::Reply);
            assert_eq!(
                bench.own.engine.peer_error(bench.own.me),
                Ok(Some(why)),
                "{what}: kind {kind}"
            );
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
    assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(None));
    bench.hear(message(19, 0, 0, 0, &[sent.to_raw(), 100]));
    let why = PeerError::Protocol(Violation::Reply);
    assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)));
    let end = bench.own.engine.test(sent).unwrap().expect("ended with its peer");
    assert_ne!(end.outcome, Outcome::Done);
}

#[test]
fn a_chunk_of_another_peer_than_the_sender_s_is_refused() {
    let mut bench = Bench::new();
    let into = Some((bench.own.into.at(0), 64));
    let receive = bench.own.engine.recv(Some(bench.honest), tag(1), EXACT, into, 0).unwrap();
    // Drops the request for chunks.
    bench.control.borrow_mut().edit = Some(Box::new(|_, event| match &event {
        Event::Message(_, bytes) if bytes[0] == 20 => vec![],
        _ => vec![event],
    }));
    let offer = Event::Message(bench.honest.peer(), request(0, 77, 64, 0, 64, 0xffff, &[]));
    bench.control.borrow_mut().inject.push_back(offer);
    passes(&mut bench.own.engine, 3);
    let mut chunk = message(21, 0, 0, 0, &[1 << 32, 0]);
    chunk.resize(32 + 8, 0xee);
    bench.hear(chunk);
    let why = PeerError::Protocol(Violation::Reply);
    assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)));
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
    let why = PeerError::Protocol(Violation::Reply);
    assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)));
    let control = bench.control.borrow();
    assert!(control.posts[posts..].iter().all(|post| post.bytes.first() != Some(&21)));
}

#[test]
fn a_pull_of_more_than_was_sent_or_of_nothing_of_it_sends_no_chunk() {
    for len in [0, 5001] {
        let mut bench = Bench::new();
        // Drops all chunks, so that only the Pull can be refused.
        bench.control.borrow_mut().edit = Some(Box::new(|_, event| match &event {
            Event::Message(_, bytes) if bytes[0] == 21 => vec![],
            _ => vec![event],
        }));
        let sent = pending(bench.own.send_region(9, 0, 5000, false));
        passes(&mut bench.own.engine, 3);
        let posts = bench.control.borrow().posts.len();
        bench.hear(message(20, 0, 0, 0, &[sent.to_raw(), 1 << 32, len]));
        passes(&mut bench.own.engine, 40);
        let why = PeerError::Protocol(Violation::Reply);
        assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)), "{len}");
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
        bench.control.borrow_mut().edit = Some(Box::new(|_, event| match &event {
            Event::Message(_, bytes) if bytes[0] == 20 => vec![],
            _ => vec![event],
        }));
        bench.hear(request(0, 77, 100, 0, 100, 0xffff, &[]));
        let name = 1u64 << 32;
        let mut chunk = message(21, 0, 0, 0, &[name, offset]);
        chunk.resize(32 + len, 0xee);
        bench.hear(chunk);
        let why = PeerError::Protocol(Violation::Bounds);
        assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)), "{what}");
        let status = bench.own.engine.test_recv(receive).unwrap().expect("ended");
        assert_eq!(
            (status.outcome, status.delivered),
            (Received::Failed(Fault::Peer(why)), 0),
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
    bench.control.borrow_mut().edit = Some(Box::new(|_, event| match &event {
        Event::Message(_, bytes) if bytes[0] == 20 => vec![],
        _ => vec![event],
    }));
    bench.hear(request(0, 77, 64, 0, 64, 0xffff, &[]));
    let mut chunk = message(21, 0, 0, 0, &[1 << 32, 0]);
    chunk.resize(32 + 40, 0xee);
    bench.hear(chunk.clone());
    assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(None));
    bench.hear(chunk);
    let why = PeerError::Protocol(Violation::Bounds);
    assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)));
    let status = bench.own.engine.test_recv(receive).unwrap().expect("ended");
    assert_eq!(status.outcome, Received::Failed(Fault::Peer(why)));
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
        let why = PeerError::Protocol(Violation::Reply);
        assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)), "kind {kind}");
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
    let why = PeerError::Protocol(Violation::Reply);
    assert_eq!(bench.own.engine.peer_error(bench.own.me), Ok(Some(why)));
    let status = bench.own.engine.test_recv(receive).unwrap().expect("ended");
    assert_eq!(status.outcome, Received::Failed(Fault::Peer(why)));
}

#[test]
fn random_messages_are_refused() {
    for seed in seeds(if cfg!(debug_assertions) { 2000 } else { 20_000 }) {
        let mut random = Random(seed);
        let mut bench = Bench::new();
        let into = Some((bench.own.into.at(0), 64));
        for n in 0..3 {
            bench.own.engine.recv(None, tag(n), ANY, into, 0).unwrap();
        }
        for _ in 0..30 {
            let len = [0, 16, 31, 32, 40, 64, 72, 88, 200][random.below(9) as usize];
            let mut bytes: Vec<u8> = (0..len)
                .map(|_| if random.below(3) == 0 { random.next() as u8 } else { 0 })
                .collect();
            if let Some(kind) = bytes.first_mut() {
                *kind = 16 + random.below(6) as u8;
            }
            bench.hear(bytes);
            if bench.own.engine.peer_error(bench.own.me) != Ok(None) {
                break;
            }
        }
        let (me, honest) = (bench.own.me, bench.honest);
        assert_eq!(bench.own.engine.peer_error(honest), Ok(None), "seed {seed}");
        bench.own.engine.remove_peer(me).unwrap();
        while bench.own.engine.next_recv().is_some() {}
        let payload = Payload::Bytes(&[1; 8]);
        bench.own.engine.send(CX, honest, tag(77), payload, Notice::Silent).unwrap();
        pass_until(&mut bench.own.engine, &format!("seed {seed}"), |e| {
            e.next_recv().is_some() || e.probe(None, tag(77), EXACT).unwrap().is_some()
        });
    }
}

#[test]
fn misuse_is_refused_with_nothing_changed() {
    let mut own = loopback(SMALL);
    let (out, into, me) = (own.out, own.into, own.me);
    let gone = own.engine.register(region(64)).unwrap();
    own.engine.deregister(gone).unwrap();
    let stranger = own.engine.reserve_peer().unwrap();
    let engine = &mut own.engine;
    let before = (engine.stats(), engine.matching_stats());
    let mut send = |context, to, payload| {
        engine.send(context, to, tag(1), payload, Notice::Silent).unwrap_err()
    };
    let eight = Payload::Region(out.at(0), 8);
    assert_eq!(send(ContextId(1), me, eight), OpError::UnknownContext);
    assert_eq!(send(CX, stranger, eight), OpError::UnknownPeer);
    assert_eq!(send(CX, me, Payload::Region(gone.at(0), 8)), OpError::UnknownRegion);
    let beyond = OpError::OutOfBounds { offset: SIZE as u64 - 4, len: 8, size: SIZE as u64 };
    assert_eq!(send(CX, me, Payload::Region(out.at(SIZE as u64 - 4), 8)), beyond);
    assert_eq!(send(CX, me, Payload::Bytes(&[0; 129])), OpError::TooLong { len: 129, max: 128 });
    let mut recv = |source, into| engine.recv(source, tag(1), EXACT, into, 0).unwrap_err();
    assert_eq!(recv(Some(stranger), None), OpError::UnknownPeer);
    assert_eq!(recv(None, Some((gone.at(0), 8))), OpError::UnknownRegion);
    assert_eq!(recv(None, Some((into.at(SIZE as u64 - 4), 8))), beyond);
    assert_eq!(engine.probe(Some(stranger), tag(1), EXACT), Err(OpError::UnknownPeer));
    assert_eq!((engine.stats().posted, engine.matching_stats()), (before.0.posted, before.1));
    // Posts receives until all slots are in use. The next receive returns `Again`, until the status
    // of a cancelled receive is taken.
    let all: Vec<_> =
        (0..RECEIVES).map(|_| engine.recv(None, tag(1), EXACT, None, 0).unwrap()).collect();
    assert_eq!(engine.recv(None, tag(1), EXACT, None, 0), Err(OpError::Again));
    engine.cancel(all[3]).unwrap();
    assert_eq!(
        engine.recv(None, tag(1), EXACT, None, 0),
        Err(OpError::Again),
        "its status was not taken"
    );
    engine.test_recv(all[3]).unwrap().unwrap();
    engine.recv(None, tag(1), EXACT, None, 0).unwrap();
}

#[test]
fn an_engine_without_matching_refuses_by_name() {
    let mut own = own(Config::DEFAULT, [Network::new()], SIZE);
    let payload = Payload::Bytes(&[]);
    let sent = own.engine.send(CX, own.peer, tag(1), payload, Notice::Silent);
    assert_eq!(sent, Err(OpError::NoMatching));
    assert_eq!(own.engine.recv(None, tag(1), EXACT, None, 0), Err(OpError::NoMatching));
    assert_eq!((own.engine.next_recv(), own.engine.eager_max(own.peer)), (None, 0));
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    let attach =
        |change: &dyn Fn(&mut fishplate_core::engine::protocol::MatchMemory<'static, 1>)| {
            let mut engine: Engine<'static, Network, 1> = engine(Config::DEFAULT, [Network::new()]);
            let mut lent = match_memory(SMALL, 4, 4);
            change(&mut lent);
            let first = engine.attach_matching(SMALL, lent);
            let again = engine.attach_matching(SMALL, match_memory(SMALL, 4, 4));
            (first, again)
        };
    let (good, twice) = attach(&|_| {});
    assert_eq!((good, twice), (Ok(()), Err(AttachError::Config("matching: already attached"))));
    let refused =
        |change: &dyn Fn(&mut fishplate_core::engine::protocol::MatchMemory<'static, 1>)| {
            let (first, again) = attach(change);
            assert!(matches!(first, Err(AttachError::Memory { .. })), "{first:?}");
            assert_eq!(again, Ok(()), "nothing was attached");
        };
    refused(&|lent| lent.accounts = &mut []);
    refused(&|lent| lent.blocks = &mut []);
    refused(&|lent| lent.block_bytes = &mut []);
    refused(&|lent| lent.headers = &mut []);
    refused(&|lent| lent.outgoing_bytes = &mut []);
    refused(&|lent| {
        lent.matcher = MatcherMemory { posted: &mut [], unexpected: &mut [], buckets: &mut [] };
    });
    let mut engine: Engine<'static, Network, 1> = engine(Config::DEFAULT, [Network::new()]);
    let none = MatchConfig { headers: 0, ..SMALL };
    assert!(matches!(
        engine.attach_matching(none, match_memory(SMALL, 4, 4)),
        Err(AttachError::Config(_))
    ));
}
