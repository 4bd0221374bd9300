//! A sender is not trusted: an invalid message is refused with an error that names the violation,
//! quarantines its sender, and has no other effect.

use fishplate_core::engine::Notice;
use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::error::Violation;

use super::forge::{Bench, message, request, tagged};
use super::rig::*;
use super::support::*;

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
            assert_eq!(bench.violation(), None, "{what} {n}");
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
            assert_eq!(bench.violation(), None, "{what} {n}");
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
                assert_eq!(bench.violation(), None, "{what} from {first}: {n} again");
            }
            assert_eq!(bench.own.engine.stats().duplicates, u64::from(SMALL.credits), "{what}");
        }
    }
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
            if bench.violation().is_some() {
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
