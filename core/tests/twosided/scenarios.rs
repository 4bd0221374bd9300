//! Tests for known errors and ambiguities of other message-passing libraries.

use std::collections::HashMap;

use fishplate_core::engine::protocol::{
    Cancelled, MatchConfig, Payload, Received, Request, Status,
};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{LocalAddr, PeerId};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::*;

/// An engine with four peers that send. All of them are the engine itself.
struct Many {
    own: Own1<Loopback<64>, 1>,
    sources: Vec<PeerId>,
}

impl Many {
    fn new(matching: MatchConfig) -> Many {
        let mut own = own1(Config::DEFAULT, matching, [Loopback::new()]);
        let mut sources = vec![own.me];
        for _ in 0..3 {
            let peer = own.engine.reserve_peer().unwrap();
            own.engine.connect_peer(peer, 1).unwrap();
            sources.push(peer);
        }
        Many { own, sources }
    }

    fn send(&mut self, from: usize, tag: Tag, bytes: &[u8]) {
        self.own
            .engine
            .send(CX, self.sources[from], tag, Payload::Bytes(bytes), Notice::Silent)
            .unwrap();
        passes(&mut self.own.engine, 2);
    }

    fn recv(&mut self, from: Option<usize>, tag: Tag, ignore: Tag) -> Request {
        let source = from.map(|from| self.sources[from]);
        let into: Option<(LocalAddr, usize)> = Some((self.own.into.at(0), 64));
        self.own.engine.recv(source, tag, ignore, into, 0).unwrap()
    }

    fn status(&mut self, request: Request) -> Status {
        self.own.finish(request)
    }

    fn source_of(&self, status: &Status) -> usize {
        let source = status.envelope.unwrap().source;
        self.sources.iter().position(|&peer| peer == source).unwrap()
    }
}

const ROOMY: MatchConfig = MatchConfig { credits: 32, ..SMALL };

#[test]
fn o1_the_oldest_receive_wins_between_directed_and_any_source() {
    for directed_first in [true, false] {
        let mut many = Many::new(ROOMY);
        let [first, second] = match directed_first {
            true => [many.recv(Some(1), tag(5), EXACT), many.recv(None, tag(5), EXACT)],
            false => [many.recv(None, tag(5), EXACT), many.recv(Some(1), tag(5), EXACT)],
        };
        many.send(1, tag(5), b"one");
        many.send(1, tag(5), b"two!");
        let (first, second) = (many.status(first), many.status(second));
        assert_eq!((first.envelope.unwrap().len, second.envelope.unwrap().len), (3, 4));
    }
}

#[test]
fn o2_a_directed_receive_with_ignored_bits_matches_only_its_source() {
    let mut many = Many::new(ROOMY);
    many.send(2, tag(0x1234), b"other");
    many.send(1, tag(0x1299), b"right");
    let request = many.recv(Some(1), tag(0x1200), tag(0xff));
    let status = many.status(request);
    assert_eq!((many.source_of(&status), status.envelope.unwrap().tag), (1, tag(0x1299)));
    let request = many.recv(None, tag(0x1200), tag(0xff));
    let status = many.status(request);
    assert_eq!(many.source_of(&status), 2);
}

#[test]
fn o3_a_64_bit_receive_ignores_the_third_word() {
    let mut many = Many::new(ROOMY);
    let wide = Tag::new(7, 9);
    many.send(0, wide, b"x");
    let exact = many.recv(None, Tag::new(7, 8), EXACT);
    let narrow = many.recv(None, tag(7), Tag::new(0, u32::MAX));
    assert_eq!(many.status(narrow).envelope.unwrap().tag, wide);
    assert_eq!(many.own.engine.test_recv(exact), Ok(None));
    assert_eq!(many.own.engine.cancel(exact), Ok(Cancelled::Removed));
}

#[test]
fn o4_truncation_reports_both_lengths_in_every_protocol() {
    // Also tests rendezvous and posted receives. There, other libraries overwrite the length.
    for (len, posted_first) in [(8, true), (8, false), (4000, true), (4000, false)] {
        let mut own = loopback(ROOMY);
        let early = posted_first.then(|| own.recv(1, EXACT, 0, 4));
        own.send_region(1, 0, len, false).unwrap();
        passes(&mut own.engine, 20);
        let request = early.unwrap_or_else(|| own.recv(1, EXACT, 0, 4));
        let status = own.finish(request);
        check(&status, Received::Truncated, 1, len as u64, 4);
        passes(&mut own.engine, 20);
        if let Some(end) = own.engine.next_completion() {
            assert_eq!((end.outcome, end.value), (Outcome::Done, 4));
        }
    }
}

#[test]
fn o5_a_probe_is_correct_and_leaves_the_message() {
    let mut many = Many::new(ROOMY);
    assert_eq!(many.own.engine.probe(None, tag(1), ANY), Ok(None));
    many.send(3, Tag::new(1, 2), b"hello");
    for _ in 0..3 {
        let found = many.own.engine.probe(None, tag(0), ANY).unwrap().unwrap();
        assert_eq!((found.source, found.tag, found.len), (many.sources[3], Tag::new(1, 2), 5));
    }
    assert_eq!(many.own.engine.probe(Some(many.sources[2]), tag(0), ANY), Ok(None));
    let request = many.recv(Some(3), tag(0), ANY);
    check(&many.status(request), Received::Ok, 1, 5, 5);
    assert_eq!(many.own.engine.probe(None, tag(0), ANY), Ok(None));
}

#[test]
fn o6_claimed_messages_are_received_in_any_order() {
    let mut many = Many::new(ROOMY);
    for n in 0..4u8 {
        many.send(0, tag(1), &vec![n; 1 + n as usize]);
    }
    let claimed: Vec<_> =
        (0..3).map(|_| many.own.engine.mprobe(None, tag(1), EXACT).unwrap().unwrap()).collect();
    let request = many.recv(None, tag(1), EXACT);
    assert_eq!(many.status(request).envelope.unwrap().len, 4);
    for n in [2, 0] {
        let request =
            many.own.engine.mrecv(claimed[n], Some((many.own.into.at(0), 64)), 0).unwrap();
        assert_eq!(many.status(request).envelope.unwrap().len, 1 + n as u64);
        let again = many.own.engine.mrecv(claimed[n], None, 0);
        assert_eq!(again, Err(OpError::StaleToken));
    }
    many.own.engine.discard(claimed[1]).unwrap();
    assert_eq!(many.own.engine.discard(claimed[1]), Err(OpError::StaleToken));
    assert_eq!(many.own.engine.next_recv(), None, "a discarded message has no status");
}

#[test]
fn o7_a_synchronous_send_to_oneself_completes_with_its_match() {
    for len in [0, 8, 4000] {
        for claim in [false, true] {
            let mut own = loopback(ROOMY);
            let token = pending(own.send_region(1, 0, len, true));
            for _ in 0..1000 {
                own.engine.progress();
                assert_eq!(own.engine.test(token), Ok(None));
            }
            match claim {
                true => {
                    let message = own.engine.mprobe(None, tag(1), EXACT).unwrap().unwrap();
                    passes(&mut own.engine, 100);
                    // A claim does not count as a match.
                    assert_eq!(own.engine.test(token), Ok(None));
                    own.engine.discard(message).unwrap();
                }
                false => {
                    let request = own.recv(1, EXACT, 0, len);
                    check(&own.finish(request), Received::Ok, 1, len as u64, len as u64);
                }
            }
            passes(&mut own.engine, 20);
            let end = own.engine.test(token).unwrap().expect("matched");
            assert_eq!(
                (end.outcome, end.value),
                (Outcome::Done, if claim { 0 } else { len as u64 })
            );
        }
    }
}

#[test]
fn o8_the_status_distinguishes_cancelled_from_matched() {
    let mut many = Many::new(ROOMY);
    let matched = many.recv(None, tag(1), EXACT);
    let open = many.recv(None, tag(2), EXACT);
    many.send(0, tag(1), b"");
    assert_eq!(many.own.engine.cancel(matched), Ok(Cancelled::AlreadyMatched));
    assert_eq!(many.own.engine.cancel(open), Ok(Cancelled::Removed));
    let ends: Vec<_> = std::iter::from_fn(|| many.own.engine.next_recv()).collect();
    assert_eq!(
        ends.iter().map(|end| end.outcome).collect::<Vec<_>>(),
        [Received::Ok, Received::Cancelled]
    );
    assert_eq!((ends[1].envelope, ends[1].delivered), (None, 0));
    // A later message stays unexpected until another receive.
    many.send(0, tag(2), b"late");
    assert!(many.own.engine.probe(None, tag(2), EXACT).unwrap().is_some());
}

#[test]
fn o9_directed_receives_are_cancelled_at_any_position() {
    let mut many = Many::new(ROOMY);
    let requests: Vec<_> = (0..12)
        .map(|n| many.recv((n % 3 != 0).then_some(n % 4), tag(n as u64 % 2), EXACT))
        .collect();
    let mut random = Random(3);
    let mut left = requests.clone();
    while !left.is_empty() {
        let request = left.swap_remove(random.below(left.len() as u64) as usize);
        assert_eq!(many.own.engine.cancel(request), Ok(Cancelled::Removed));
        assert_eq!(
            many.own.engine.test_recv(request).unwrap().unwrap().outcome,
            Received::Cancelled
        );
    }
    for n in 0..2 {
        many.send(1, tag(n), b"x");
    }
    assert_eq!(many.own.engine.matching_stats().matching.unexpected, 2);
}

#[test]
fn o10_completions_are_reported_in_completion_order() {
    let mut own = loopback(ROOMY);
    // The long message matches first and completes later.
    let long = own.recv(1, EXACT, 0, 5000);
    let short = own.recv(2, EXACT, 6000, 8);
    own.send_region(1, 0, 5000, false).unwrap();
    own.send(2, &[1; 8]).unwrap();
    pass_until(&mut own.engine, "both", |e| {
        e.peek_recv().is_some_and(|first| first.request == short) && e.stats().passes > 20
    });
    assert_eq!(own.engine.peek_recv(), own.engine.peek_recv(), "a look changes nothing");
    assert_eq!(own.engine.next_recv().unwrap().request, short);
    assert_eq!(own.engine.next_recv().unwrap().request, long);
    assert_eq!(own.engine.next_recv(), None);
}

#[test]
fn o11_a_receiver_may_wait_for_the_thousandth_message_first() {
    // The receiver has room for 4 payloads. The other payloads stay with their sender.
    let matching = MatchConfig { headers: 1000, ..SMALL };
    let mut own = own1(Config::DEFAULT, matching, [Loopback::<64>::new()]);
    let mut tokens = HashMap::new();
    for n in 0..200u64 {
        write(&own.engine, own.out.at(n * 16), &n.to_le_bytes());
        let payload = Payload::Region(own.out.at(n * 16), 8);
        loop {
            match own.engine.send(CX, own.me, tag(n), payload, Notice::Report(n)) {
                Ok(Issued::Pending(token)) => {
                    tokens.insert(n, token);
                    break;
                }
                Ok(Issued::Done { .. }) => break,
                Err(OpError::Again) => drop(own.engine.progress()),
                Err(error) => panic!("{error:?}"),
            }
        }
    }
    passes(&mut own.engine, 200);
    assert!(tokens.len() >= 196 && own.engine.matching_stats().credits_exhausted >= 196);
    for n in (0..200u64).rev() {
        let request = own.recv(n, EXACT, 0, 8);
        check(&own.finish(request), Received::Ok, n, 8, 8);
        assert_eq!(own.bytes(0, 8), n.to_le_bytes());
    }
    passes(&mut own.engine, 200);
    let mut ended = 0;
    while let Some(end) = own.engine.next_completion() {
        assert_eq!(end.outcome, Outcome::Done);
        ended += 1;
    }
    assert_eq!(ended, tokens.len());
}

#[test]
fn o12_a_failed_peer_ends_only_receives_that_name_it() {
    let mut many = Many::new(ROOMY);
    let directed = many.recv(Some(1), tag(1), EXACT);
    let anybody = many.recv(None, tag(1), EXACT);
    let other = many.recv(Some(2), tag(3), EXACT);
    // The failing source has sent a complete message, and a message with its payload still at the
    // sender.
    many.send(1, tag(7), b"here");
    let payload = Payload::Region(many.own.out.at(0), 4000);
    let gone = many.sources[1];
    pending(many.own.engine.send(CX, gone, tag(8), payload, Notice::Report(1)));
    passes(&mut many.own.engine, 20);
    fail(&mut many, 1);
    let why = PeerError::Protocol(fishplate_core::error::Violation::Ack);
    let end = many.own.engine.test_recv(directed).unwrap().expect("ended with its peer");
    assert_eq!((end.outcome, end.envelope), (Received::Failed(Fault::Peer(why)), None));
    assert_eq!(many.own.engine.test_recv(anybody), Ok(None));
    assert_eq!(many.own.engine.test_recv(other), Ok(None));
    // The complete message can be received. The other cannot.
    let request = many.recv(Some(1), tag(7), EXACT);
    check(&many.status(request), Received::Ok, 7, 4, 4);
    let request = many.recv(None, tag(8), EXACT);
    assert!(matches!(many.status(request).outcome, Received::Failed(Fault::Peer(_))));
    let refused = many.own.engine.recv(Some(gone), tag(9), EXACT, None, 0);
    assert_eq!(refused, Err(OpError::PeerFailed(why)));
    // The other sources continue.
    many.send(2, tag(1), b"anybody");
    many.send(2, tag(3), b"two");
    check(&many.status(anybody), Received::Ok, 1, 7, 7);
    check(&many.status(other), Received::Ok, 3, 3, 3);
    many.own.engine.remove_peer(gone).unwrap();
    assert_eq!(many.own.engine.recv(Some(gone), tag(9), EXACT, None, 0), Err(OpError::UnknownPeer));
}

/// Fails a source: delivers its acknowledgement of a number that was never sent.
fn fail(many: &mut Many, source: usize) {
    use fishplate_core::mem::Untrusted;
    use fishplate_core::rail::Rail;
    // SAFETY: the test only posts one message, which completes at once and so uses no context word.
    let rail = unsafe { many.own.engine.rail_unchecked(fishplate_core::mem::RailId(0)) }.unwrap();
    let mut ack = [0u8; 16];
    ack[0] = 5;
    ack[8..12].copy_from_slice(&0x4000_0000u32.to_le_bytes());
    let peer = many.sources[source].peer();
    rail.post_message(peer, &ack, Untrusted::from_slice(&[]), 0).unwrap();
    passes(&mut many.own.engine, 3);
}

#[test]
fn o13_an_empty_message_needs_no_buffer_and_matches_in_order() {
    let mut own = loopback(ROOMY);
    let empty = own.engine.recv(None, tag(1), EXACT, None, 11).unwrap();
    own.send(1, &[]).unwrap();
    check(&own.finish(empty), Received::Ok, 1, 0, 0);
    // A message that matches a receive without a buffer is truncated to zero bytes.
    let none = own.engine.recv(None, tag(1), EXACT, None, 12).unwrap();
    own.send(1, &[1, 2, 3]).unwrap();
    check(&own.finish(none), Received::Truncated, 1, 3, 0);
    own.send_region(2, 0, 3000, false).unwrap();
    passes(&mut own.engine, 10);
    let none = own.engine.recv(None, tag(2), EXACT, None, 13).unwrap();
    check(&own.finish(none), Received::Truncated, 2, 3000, 0);
    passes(&mut own.engine, 10);
    assert_eq!(own.engine.next_completion().unwrap().value, 0);
}

#[test]
fn o14_any_tag_with_the_sign_bit_compared_matches_no_internal_messages() {
    let mut many = Many::new(ROOMY);
    many.send(0, tag(1 << 31 | 5), b"internal");
    many.send(0, tag(5), b"user");
    let request = many.recv(None, tag(0), tag(0x7fff_ffff));
    assert_eq!(many.status(request).envelope.unwrap().tag, tag(5));
    let request = many.recv(None, tag(1 << 31), tag(0x7fff_ffff));
    assert_eq!(many.status(request).envelope.unwrap().tag, tag(1 << 31 | 5));
}

#[test]
fn o15_masks_that_ignore_protocol_bits_keep_order_between_sources() {
    let mut many = Many::new(ROOMY);
    let hidden = Tag::new(0b11 << 60, 0);
    let requests: Vec<_> = (0..8).map(|n| many.recv(Some(n % 4), tag(42), hidden)).collect();
    for n in 0..8usize {
        let bits = (n as u64 % 4) << 60;
        many.send(3 - n % 4, tag(42 | bits), &vec![0; n]);
    }
    for (n, request) in requests.into_iter().enumerate() {
        let status = many.status(request);
        assert_eq!(many.source_of(&status), n % 4);
        let round = n / 4;
        assert_eq!(status.envelope.unwrap().len as usize, 4 * round + 3 - n % 4);
    }
}

#[test]
fn o16_a_flood_does_not_make_later_searches_slower() {
    let matching = MatchConfig { credits: 600, ..SMALL };
    let mut own =
        own1(Config { window: 256, ..Config::DEFAULT }, matching, [Loopback::<64>::new()]);
    let cost = |own: &mut Own1<Loopback<64>, 1>| {
        let before = own.engine.matching_stats().matching;
        for n in 0..10 {
            let request = own.recv(n, EXACT, 0, 8);
            own.send(n, &[1; 8]).unwrap();
            own.finish(request);
        }
        let after = own.engine.matching_stats().matching;
        (after.searches - before.searches, after.probes - before.probes)
    };
    let before = cost(&mut own);
    for n in 0..500 {
        while own.send(n, &[2; 8]) == Err(OpError::Again) {
            own.engine.progress();
        }
    }
    passes(&mut own.engine, 100);
    for n in (0..500).rev() {
        let request = own.recv(n, EXACT, 0, 8);
        check(&own.finish(request), Received::Ok, n, 8, 8);
    }
    assert_eq!(cost(&mut own), before);
    assert!(own.engine.matching_stats().matching.unexpected_peak >= 500);
}
