//! Tagged messages while rails fail: each is received once, whole and in order, by every protocol;
//! and the ends shut down in good order.

use std::collections::HashMap;

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received, Request};
use fishplate_core::engine::{Config, ContextId, Issued, Notice, RailPolicy};
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::op::Outcome;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::cuts::{LATE, Plan};
use super::support::fleet::{End, Node};
use super::support::*;

/// Places in the regions, each for one payload.
const PLACES: u64 = 16;
const PLACE: u64 = SIZE as u64 / PLACES;

const TAGS: u64 = 3;

/// Turns after which nothing lands late any more.
const SETTLE: u64 = LATE as u64 / 2;
const CONTEXTS: u16 = 2;

/// One node.
#[derive(Default)]
struct End1 {
    /// Free places to send from, and to receive into.
    out: Vec<u64>,
    into: Vec<u64>,
    /// By completion tag: the place that it was sent from, and its length if the receiver reports
    /// it.
    sends: HashMap<u64, (Option<u64>, u64)>,
    /// Open receives: source and tag, how many of these came before, and the place.
    receives: Vec<(Request, (usize, u64), usize, u64)>,
    /// How many were posted, by source and tag.
    posted: HashMap<(usize, u64), usize>,
    sent: u64,
}

/// Sent messages by source, target and tag: the fill value and the length.
type Sent = HashMap<(usize, usize, u64), Vec<(u64, usize)>>;

fn send<const RAILS: usize>(
    nodes: &mut [Node<End, RAILS>],
    ends: &mut [End1],
    sent: &mut Sent,
    me: usize,
    random: &mut Random,
) {
    let to = random.below(nodes.len() as u64) as usize;
    let context = random.below(CONTEXTS.into());
    let lo = context << 8 | random.below(TAGS);
    let (kind, fill) = (random.below(5), random.next() >> 32);
    let len = match kind {
        0..=2 => random.below(129),
        _ => random.below(PLACE),
    } as usize;
    let bytes = pattern(fill, len);
    let (node, end) = (&mut nodes[me], &mut ends[me]);
    let n = end.sent;
    let (cx, peer) = (ContextId(context as u8), node.peers[to]);
    let (issued, place) = match kind {
        // From a slice: copied, if a block is free.
        0 => (node.engine.send(cx, peer, tag(lo), Payload::Bytes(&bytes), Notice::Silent), None),
        1 => (node.engine.send_sync(cx, peer, tag(lo), Payload::Bytes(&bytes), Notice::Report(n)), None),
        _ => {
            let Some(place) = end.out.pop() else { return };
            let from = node.source.at(place * PLACE);
            write(&node.engine, from, &bytes);
            let payload = Payload::Region(from, len);
            let issued = match kind {
                4 => node.engine.send_sync(cx, peer, tag(lo), payload, Notice::Report(n)),
                _ => node.engine.send(cx, peer, tag(lo), payload, Notice::Report(n)),
            };
            if issued == Err(OpError::Again) {
                end.out.push(place);
            }
            (issued, Some(place))
        }
    };
    match issued {
        Ok(Issued::Pending(_)) if kind != 0 => {
            end.sends.insert(n, (place, len as u64));
        }
        Ok(_) => assert!(place.is_none(), "a kept send is not over at once"),
        Err(OpError::Again) => return,
        Err(error) => panic!("{error:?}"),
    }
    end.sent += 1;
    sent.entry((me, to, lo)).or_default().push((fill, len));
}

fn receive<const RAILS: usize>(node: &mut Node<End, RAILS>, end: &mut End1, from: usize, lo: u64) {
    let Some(place) = end.into.pop() else { return };
    let into = Some((node.target.at(place * PLACE), PLACE as usize));
    match node.engine.recv(Some(node.peers[from]), tag(lo), EXACT, into, 0) {
        Ok(request) => {
            let count = end.posted.entry((from, lo)).or_default();
            end.receives.push((request, (from, lo), *count, place));
            *count += 1;
        }
        Err(error) => {
            assert_eq!(error, OpError::Again);
            end.into.push(place);
        }
    }
}

fn run<const RAILS: usize>(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9));
    let nodes = 1 + random.below(3) as u16;
    let config = Config {
        contexts: CONTEXTS,
        window: [1, 2, 4, 16, 64][random.below(5) as usize],
        stripe_threshold: [64, 1 << 20][random.below(2) as usize],
        stripe_chunk: 100,
        policy: [RailPolicy::LeastOutstanding, RailPolicy::RoundRobin][random.below(2) as usize],
        ack_age: [0, 4, 1000][random.below(3) as usize],
        first_sequence: STARTS[random.below(4) as usize].wrapping_sub(random.below(40)),
        seed,
        ..Config::DEFAULT
    };
    let matching = MatchConfig { credits: 1 + random.below(6) as u32, ..SMALL };
    let dials = if random.below(8) == 0 { Dials::CALM } else { Dials::WILD };
    let sim = fleet::fabric(nodes, RAILS as u16, 256, dials, seed);
    let mut fleet = fleet::lasting::<RAILS>(sim, nodes, config, SIZE, |engine| {
        let streams = (nodes * CONTEXTS) as usize;
        engine.attach_matching(matching, match_memory(matching, streams, 8)).unwrap();
    });
    let plan = Plan::new(sim, nodes, RAILS as u16, [100, 800][random.below(2) as usize], seed);
    let places = || (0..PLACES).collect();
    let mut ends: Vec<_> =
        fleet.iter().map(|_| End1 { out: places(), into: places(), ..End1::default() }).collect();
    let mut sent = Sent::new();
    let (mut received, mut closing) = (0, 0);
    let while_closing = random.below(4) == 0;
    for turn in 0.. {
        assert!(turn < 40_000, "seed {seed}: not complete; {:?}", fleet[0].engine.stats());
        match while_closing {
            false if closing == 0 => plan.turn(turn, &mut fleet),
            true if closing != 0 && turn >= closing + SETTLE => {
                plan.turn(turn - closing - SETTLE, &mut fleet)
            }
            _ => {}
        }
        for me in 0..fleet.len() {
            if turn < 150 && random.below(2) == 0 {
                send(&mut fleet, &mut ends, &mut sent, me, &mut random);
            }
            // Receives keep up with the sends in the long run.
            let wanted = |from: usize, lo: u64| sent.get(&(from, me, lo)).map_or(0, Vec::len);
            let (from, lo) = (
                random.below(nodes.into()) as usize,
                random.below(CONTEXTS.into()) << 8 | random.below(TAGS),
            );
            let posted = ends[me].posted.get(&(from, lo)).copied().unwrap_or(0);
            if posted < wanted(from, lo) {
                receive(&mut fleet[me], &mut ends[me], from, lo);
            }
            let (node, end) = (&mut fleet[me], &mut ends[me]);
            node.engine.progress();
            while let Some(done) = node.engine.next_completion() {
                let (place, len) = end.sends.remove(&done.tag).expect("once");
                assert_eq!(done.outcome, Outcome::Done, "seed {seed}: node {me}");
                assert!(done.value == 0 || done.value == len, "seed {seed}: {} of {len}", done.value);
                end.out.extend(place);
            }
            while let Some(status) = node.engine.next_recv() {
                let at = end.receives.iter().position(|receive| receive.0 == status.request).unwrap();
                let (_, (from, lo), n, place) = end.receives.remove(at);
                let (fill, len) = sent[&(from, me, lo)][n];
                check(&status, Received::Ok, lo, len as u64, len as u64);
                let got = read(&node.engine, node.target.at(place * PLACE), len);
                assert!(got == pattern(fill, len), "seed {seed}: {from} to {me}, tag {lo:#x}");
                end.into.push(place);
                received += 1;
            }
        }
        let idle = turn >= 150
            && sent.values().map(Vec::len).sum::<usize>() == received
            && ends.iter().all(|end| end.sends.is_empty());
        if idle && closing == 0 {
            let peers: Vec<_> = fleet[0].peers.clone();
            assert!(peers.iter().all(|&peer| fleet[0].engine.peer_error(peer) == Ok(None)), "seed {seed}");
            closing = turn;
        }
        if closing != 0 && turn == closing + SETTLE {
            for node in &mut fleet {
                for &peer in &node.peers {
                    match node.engine.close_peer(peer) {
                        Ok(()) | Err(OpError::PeerFailed(PeerError::Closed)) => {}
                        Err(error) => panic!("seed {seed}: {error:?}"),
                    }
                }
            }
        }
        if closing != 0
            && fleet.iter().all(|n| n.peers.iter().all(|&peer| n.engine.has_left(peer) == Ok(true)))
        {
            break;
        }
    }
    for node in &fleet {
        for &peer in &node.peers {
            assert_eq!(node.engine.peer_error(peer), Ok(Some(PeerError::Closed)), "seed {seed}");
        }
    }
}

#[test]
fn messages_are_received_once_and_in_order_while_rails_fail() {
    for seed in seeds(1000) {
        match seed % 3 {
            0 => run::<2>(seed),
            1 => run::<3>(seed),
            _ => run::<4>(seed),
        }
    }
}
