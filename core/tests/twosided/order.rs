//! Messages of one sender never overtake each other, whatever rails carry them. No message is lost
//! or delivered twice.

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received, Request};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Config, ContextId, Issued, Notice, RailPolicy};
use fishplate_core::error::{OpError, PostError};
use fishplate_core::op::Outcome;
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet::{self, Node};
use super::support::tap::{shared, tap};
use super::support::*;

/// Number of messages that each node sends in all, and bytes reserved for each message.
const MESSAGES: u64 = 24;
const ROOM: u64 = 640;
/// Number of a receiver's buffers, used in turn. There are more buffers than open receives, and
/// more than messages to one node.
const PLACES: u64 = 100;

#[derive(Clone, Copy)]
struct Sent {
    to: usize,
    context: u8,
    tag: u64,
    len: usize,
    sync: bool,
}

/// A receive, and the message that it matched: the sender, and the message's index in `sent`.
struct Posted {
    source: Option<usize>,
    tag: u64,
    any_tag: bool,
    request: Request,
    got: Option<(usize, u64)>,
}

impl Posted {
    fn accepts(&self, from: usize, tag: u64) -> bool {
        self.source.is_none_or(|source| source == from) && (self.any_tag || self.tag == tag)
    }
}

/// Lets all nodes send to all nodes over `RAILS` faulty rails.
fn traffic<const RAILS: usize>(seed: u64) {
    run(seed, |nodes, config, matching| {
        tagged_fleet::<RAILS>(nodes, Dials::WILD, config, matching, seed)
    });
}

/// Lets all nodes that `make` creates send to all nodes. The nodes' limits must not exceed the
/// given ones.
fn run<R: Rail, const RAILS: usize>(
    seed: u64,
    make: impl FnOnce(u16, Config, MatchConfig) -> Vec<Node<R, RAILS>>,
) {
    let mut random = Random(seed);
    let policies = [RailPolicy::LeastOutstanding, RailPolicy::RoundRobin, RailPolicy::Fixed];
    let config = Config {
        window: [8, 16, 64][random.below(3) as usize],
        contexts: 2,
        first_sequence: STARTS[random.below(4) as usize],
        policy: policies[random.below(3) as usize],
        stripe_threshold: 256,
        stripe_chunk: 100,
        ..Config::DEFAULT
    };
    let matching = MatchConfig {
        credits: [0, 1, 3, 16][random.below(4) as usize],
        headers: [1, 2, 16][random.below(3) as usize],
        shared_credits: [0, 5, 50][random.below(3) as usize],
        shared_headers: [0, 5, 50][random.below(3) as usize],
        shared_shorts: [0, 5, 50][random.below(3) as usize],
        ..SMALL
    };
    let nodes = 2 + random.below(2) as usize;
    let mut fleet = make(nodes as u16, config, matching);
    let mut plans: Vec<Vec<Sent>> = vec![];
    for _ in 0..nodes {
        plans.push(
            (0..MESSAGES)
                .map(|_| Sent {
                    to: random.below(nodes as u64) as usize,
                    context: random.below(2) as u8,
                    tag: random.below(3),
                    len: 8 + [0, 8, 120, 121, 300, 600][random.below(6) as usize],
                    sync: random.below(6) == 0,
                })
                .collect(),
        );
    }
    // Posts receives of every kind, no more than the messages to come. Finally cancels unmatched
    // receives, and posts receives for any message.
    let mut sent = vec![0usize; nodes];
    let mut open: Vec<usize> = vec![0; nodes];
    let mut places: Vec<u64> = vec![0; nodes];
    let mut posted: Vec<Vec<Posted>> = (0..nodes).map(|_| vec![]).collect();
    let expected: Vec<usize> = (0..nodes)
        .map(|me| plans.iter().flatten().filter(|message| message.to == me).count())
        .collect();
    let hold = random.below(300);
    for turn in 0..400_000u64 {
        for me in 0..nodes {
            if let Some(&message) = plans[me].get(sent[me])
                && random.below(3) == 0
                && post(&mut fleet[me], message, sent[me] as u64)
            {
                sent[me] += 1;
            }
            while let Some(end) = fleet[me].engine.next_completion() {
                assert_eq!(end.outcome, Outcome::Done, "seed {seed}");
            }
            // The receiver pauses at first and from time to time.
            if turn < hold || turn % 512 < hold {
                continue;
            }
            let got = posted[me].iter().filter(|receive| receive.got.is_some()).count();
            if got + open[me] < expected[me].max(1) && open[me] < 40 && random.below(3) == 0 {
                let late = turn > 2000;
                let source =
                    (random.below(2) == 0 && !late).then(|| random.below(nodes as u64) as usize);
                let (lo, any_tag) = (random.below(3), random.below(2) == 0 || late);
                let place = places[me] % PLACES * ROOM;
                places[me] += 1;
                let node = &mut fleet[me];
                let from = source.map(|source| node.peers[source]);
                let into = Some((node.target.at(place), ROOM as usize));
                let ignore = if any_tag { ANY } else { EXACT };
                let request = node.engine.recv(from, tag(lo), ignore, into, place).unwrap();
                posted[me].push(Posted { source, tag: lo, any_tag, request, got: None });
                open[me] += 1;
            }
            if turn > 2000 && turn % 500 == 0 {
                // Cancels receives that no message can match any more.
                for receive in posted[me].iter_mut().filter(|receive| receive.got.is_none()) {
                    let _ = fleet[me].engine.cancel(receive.request);
                }
            }
            while let Some(status) = fleet[me].engine.next_recv() {
                open[me] -= 1;
                let at = posted[me]
                    .iter()
                    .position(|receive| receive.request == status.request)
                    .unwrap();
                if status.outcome == Received::Cancelled {
                    posted[me].remove(at);
                    continue;
                }
                assert_eq!(status.outcome, Received::Ok, "seed {seed}");
                let envelope = status.envelope.unwrap();
                let from =
                    fleet[me].peers.iter().position(|&peer| peer == envelope.source).unwrap();
                let bytes = read(
                    &fleet[me].engine,
                    fleet[me].target.at(status.word),
                    envelope.len as usize,
                );
                let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                let message = plans[from][number as usize];
                assert_eq!((message.to, message.len as u64), (me, envelope.len), "seed {seed}");
                assert_eq!(envelope.tag.lo, message.tag, "seed {seed}");
                assert_eq!(
                    bytes[8..],
                    pattern(number * ROOM + 8, message.len)[..message.len - 8],
                    "seed {seed}"
                );
                let receive = &mut posted[me][at];
                assert!(
                    receive.accepts(from, message.tag),
                    "seed {seed}: matched what it does not accept"
                );
                receive.got = Some((from, number));
            }
        }
        fleet::turn(&mut fleet);
        let done = (0..nodes).all(|me| {
            posted[me].iter().filter(|receive| receive.got.is_some()).count() == expected[me]
                && sent[me] == plans[me].len()
        });
        if done {
            break;
        }
        assert!(turn < 399_999, "seed {seed}: nothing comes any more");
    }
    // All acknowledgements and credits must arrive at the senders too.
    let peers: Vec<_> = fleet[0].peers.clone();
    fleet::turn_until(&mut fleet, &format!("seed {seed}: quiet"), |fleet| {
        fleet.iter_mut().all(|node| {
            while node.engine.next_completion().is_some() {}
            (0..2).all(|context| {
                peers.iter().all(|&peer| node.engine.is_quiet(ContextId(context), peer) == Ok(true))
            })
        })
    });
    for (me, receives) in posted.iter().enumerate() {
        let peak = fleet[me].engine.matching_stats().matching.unexpected_peak as usize;
        assert!(peak <= matching.unexpected(2 * nodes), "seed {seed}: {peak} unexpected at once");
        for (later, r2) in receives.iter().enumerate() {
            let Some((from2, n2)) = r2.got else { continue };
            for r1 in &receives[..later] {
                let Some((from1, n1)) = r1.got else { continue };
                let (m1, m2) = (plans[from1][n1 as usize], plans[from2][n2 as usize]);
                assert!((from1, n1) != (from2, n2), "seed {seed}: given out twice");
                let crossed = from1 == from2
                    && m1.context == m2.context
                    && n1 > n2
                    && r1.accepts(from2, m2.tag)
                    && r2.accepts(from1, m1.tag);
                assert!(!crossed, "seed {seed}: {n1} overtook {n2} of node {from1}");
            }
        }
    }
    for node in &fleet {
        for &peer in &node.peers {
            assert_eq!(node.engine.peer_error(peer), Ok(None), "seed {seed}");
        }
    }
}

fn post<R: Rail, const RAILS: usize>(
    node: &mut Node<R, RAILS>,
    message: Sent,
    number: u64,
) -> bool {
    let at = number * ROOM;
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.extend(&pattern(at + 8, message.len)[..message.len - 8]);
    write(&node.engine, node.source.at(at), &bytes);
    let region = Payload::Region(node.source.at(at), message.len);
    let slice =
        message.len <= node.engine.eager_max(node.peers[message.to]) && number.is_multiple_of(3);
    let payload = if slice { Payload::Bytes(&bytes) } else { region };
    let (context, to) = (ContextId(message.context), node.peers[message.to]);
    let issued = match message.sync {
        true => {
            node.engine.send_sync(context, to, tag(message.tag), payload, Notice::Report(number))
        }
        false => node.engine.send(context, to, tag(message.tag), payload, Notice::Report(number)),
    };
    match issued {
        Ok(Issued::Done { .. }) => {
            assert!(!message.sync);
            // The buffer of a completed send may be changed at once.
            write(&node.engine, node.source.at(at), &vec![0xff; message.len]);
            true
        }
        Ok(Issued::Pending(_)) => true,
        Err(OpError::Again) => false,
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn messages_match_in_the_order_sent_over_four_faulty_rails() {
    for seed in seeds(if cfg!(debug_assertions) { 60 } else { 2000 }) {
        traffic::<4>(seed);
    }
}

#[test]
fn messages_match_in_the_order_sent_over_one_two_and_three_faulty_rails() {
    for seed in seeds(if cfg!(debug_assertions) { 20 } else { 300 }) {
        traffic::<1>(seed);
        traffic::<2>(seed);
        traffic::<3>(seed);
    }
}

#[test]
fn messages_match_in_the_order_sent_between_different_ends() {
    for seed in seeds(if cfg!(debug_assertions) { 60 } else { 1000 }) {
        run(seed, |nodes, config, matching| {
            let takes = |node: usize| {
                let mut random = Random(seed ^ node as u64);
                MatchConfig {
                    eager: 24 + random.below(matching.eager as u64) as u32,
                    credits: random.below(matching.credits as u64 + 1) as u32,
                    headers: 1 + random.below(matching.headers as u64) as u32,
                    ..matching
                }
            };
            let limits: Vec<_> = (0..nodes as usize).map(|node| takes(node).limits()).collect();
            let mut fleet = fleet::mixed::<4>(nodes, config, SIZE, seed, |node| Some(limits[node]));
            for (node, matching) in fleet.iter_mut().zip((0..).map(takes)) {
                let streams = nodes as usize * config.contexts as usize;
                node.engine.attach_matching(matching, match_memory(matching, streams, 4)).unwrap();
            }
            fleet
        });
    }
}

#[test]
fn payloads_are_read_over_rails_numbered_differently() {
    let config = Config { stripe_threshold: 256, stripe_chunk: 100, ..Config::DEFAULT };
    let mut fleet = tagged_fleet::<3>(3, Dials::WILD, config, SMALL, 7);
    let pairs = [(0, 1), (1, 0), (1, 2), (2, 0), (2, 2)];
    for (from, to) in pairs {
        let payload = Payload::Region(fleet[from].source.at(0), 2000);
        let (peer, source) = (fleet[from].peers[to], fleet[to].peers[from]);
        fleet[from].engine.send(CX, peer, tag(1), payload, Notice::Silent).unwrap();
        let into = Some((fleet[to].target.at(0), 2000));
        let request = fleet[to].engine.recv(Some(source), tag(1), EXACT, into, 0).unwrap();
        fleet::turn_until(&mut fleet, "a long message", |fleet| {
            fleet[to]
                .engine
                .test_recv(request)
                .unwrap()
                .is_some_and(|status| status.outcome == Received::Ok)
        });
    }
    let stats: Vec<_> = fleet.iter().map(|node| node.engine.matching_stats()).collect();
    assert_eq!(stats.iter().map(|stats| stats.read).sum::<u64>(), pairs.len() as u64);
    assert!(stats.iter().all(|stats| stats.pulled == 0), "a key of another rail: {stats:?}");
}

/// The rail is briefly full: the first message waits, and later inline bytes must wait behind it.
#[test]
fn bytes_do_not_overtake_a_message_that_waits_for_room() {
    for len in [8, 100] {
        let control = shared();
        let mut own = own1(Config::DEFAULT, SMALL, tap(Loopback::<64>::new(), &control));
        control.borrow_mut().refuse = Some(Box::new(|_| Some(PostError::Again)));
        let payload = Payload::Region(own.out.at(0), len);
        own.engine.send(CX, own.me, tag(1), payload, Notice::Silent).unwrap();
        control.borrow_mut().refuse = None;
        let bytes = vec![7; len];
        let behind = own.engine.send(CX, own.me, tag(2), Payload::Bytes(&bytes), Notice::Silent);
        assert_eq!(behind, Err(OpError::Again), "{len} bytes");
        let any = Tag { lo: !0, hi: !0 };
        let into = Some((own.into.at(0), 200));
        let first = own.engine.recv(Some(own.me), Tag::ZERO, any, into, 0).unwrap();
        assert_eq!(
            own.finish(first).envelope.map(|envelope| envelope.tag),
            Some(tag(1)),
            "{len} bytes"
        );
    }
}
