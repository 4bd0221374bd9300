//! Tests closing with messages: sent messages are received, receives without a message fail, and
//! nothing hangs.

use std::collections::BTreeSet;

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Config, Engine, Issued, Notice};
use fishplate_core::error::{Missing, OpError, PeerError, Unfinished};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet::{self, End, Node, turn, turn_until};
use super::support::*;

const CLOSED: Outcome = Outcome::Failed(Fault::Peer(PeerError::Closed));
const UNKNOWN: Outcome = Outcome::Unknown(Fault::Peer(PeerError::Closed));

/// Node 0 sends, both nodes close at random times, and node 1 receives all messages that it can.
/// Returns the number of received messages and the number of failed sends.
fn chatter<const RAILS: usize>(seed: u64) -> (u64, u64) {
    let mut random = Random(seed);
    let config = Config { window: [1, 4, 128][seed as usize % 3], ..Config::DEFAULT };
    let dials = Dials { ordered: seed.is_multiple_of(4), ..Dials::WILD };
    let mut nodes = tagged_fleet::<RAILS>(2, dials, config, SMALL, seed);
    let closes = [0, 1].map(|_| random.below(600));
    // Node 1 stops receiving before it closes.
    let quits = random.below(closes[1] + 1);
    let (mut ended, mut taken, mut missed, mut closed, mut failed) =
        (BTreeSet::new(), BTreeSet::new(), vec![], vec![], 0);
    let (mut sent, mut posted) = (0, 0);
    let mut now = 0;
    loop {
        for (me, &at) in closes.iter().enumerate() {
            if now >= at {
                let peers = nodes[me].peers.clone();
                for peer in peers {
                    let closed = nodes[me].engine.close_peer(peer);
                    assert!(matches!(closed, Ok(()) | Err(OpError::PeerFailed(PeerError::Closed))));
                }
            }
        }
        let (a, b) = nodes.split_at_mut(1);
        let (a, b) = (&mut a[0], &mut b[0]);
        if random.below(4) == 0 && sent < 30 {
            let len = [8, 100, 600, 3000][random.below(4) as usize];
            let at = 2000 * sent;
            write(&a.engine, a.source.at(at), &pattern(at, len));
            let payload = Payload::Region(a.source.at(at), len);
            let (to, notice) = (a.peers[1], Notice::Report(sent));
            let issued = match random.below(3) {
                0 => a.engine.send(CX, to, tag(sent), payload, notice),
                // Without a credit, the payload is sent in chunks, because the receiver cannot read
                // a slice.
                1 => a.engine.send(CX, to, tag(sent), Payload::Bytes(&pattern(at, 100)), notice),
                _ => a.engine.send_sync(CX, to, tag(sent), payload, notice),
            };
            match issued {
                Ok(issued) => {
                    if let Issued::Done { .. } = issued {
                        ended.insert(sent);
                    }
                    sent += 1;
                }
                Err(OpError::Again | OpError::PeerFailed(PeerError::Closed)) => {}
                Err(error) => panic!("seed {seed}: {error:?}"),
            }
        }
        if now < quits && random.below(4) == 0 && posted < 20 {
            let from = [None, Some(b.peers[0])][random.below(2) as usize];
            let into = Some((b.target.at(3200 * posted), 3200));
            match b.engine.recv(from, EXACT, ANY, into, posted) {
                Ok(_) => posted += 1,
                Err(error) => {
                    assert_eq!(error, OpError::PeerFailed(PeerError::Closed), "seed {seed}")
                }
            }
        }
        turn(&mut nodes);
        now += 1;
        while let Some(end) = nodes[0].engine.next_completion() {
            match end.outcome {
                Outcome::Done => _ = ended.insert(end.tag),
                outcome => {
                    assert!([CLOSED, UNKNOWN].contains(&outcome), "seed {seed}: {end:?}");
                    closed.extend((outcome == CLOSED).then_some(end.tag));
                    failed += 1;
                }
            }
        }
        while let Some(status) = nodes[1].engine.next_recv() {
            match status.outcome {
                Received::Ok => {
                    let n = status.envelope.unwrap().tag.lo;
                    assert!(taken.insert(n), "seed {seed}: message {n} twice");
                    let got = read(
                        &nodes[1].engine,
                        nodes[1].target.at(3200 * status.word),
                        status.delivered as usize,
                    );
                    assert!(got == pattern(2000 * n, got.len()), "seed {seed}: message {n}");
                }
                outcome => {
                    assert_eq!(
                        outcome,
                        Received::Failed(Fault::Peer(PeerError::Closed)),
                        "seed {seed}"
                    );
                    missed.extend(status.envelope.map(|envelope| envelope.tag.lo));
                }
            }
        }
        for node in &nodes {
            for &peer in &node.peers {
                let error = node.engine.peer_error(peer).unwrap();
                assert!(matches!(error, None | Some(PeerError::Closed)), "seed {seed}: {error:?}");
            }
        }
        if nodes
            .iter()
            .all(|node| node.peers.iter().all(|&peer| node.engine.has_left(peer) == Ok(true)))
        {
            break;
        }
        assert!(now < 100_000, "seed {seed}: no end; closes {closes:?}, quits {quits}");
        // The receiver closes, in case the sender still waits for a receive.
        if now == 20_000 {
            let sender = nodes[1].peers[0];
            let _ = nodes[1].engine.close_peer(sender);
        }
    }
    assert_eq!(
        ended.len() as u64 + failed,
        sent,
        "seed {seed}: a send did not complete exactly once"
    );
    for n in missed {
        assert!(!ended.contains(&n), "seed {seed}: message {n} was sent, but its receive failed");
    }
    for n in closed {
        assert!(!taken.contains(&n), "seed {seed}: message {n} was received, but its send failed");
    }
    (taken.len() as u64, failed)
}

#[test]
fn sends_complete_as_received_or_closed_whenever_either_end_closes() {
    let mut all = (0, 0);
    for seed in seeds(600) {
        let (taken, failed) = if seed % 3 == 0 { chatter::<2>(seed) } else { chatter::<1>(seed) };
        all = (all.0 + taken, all.1 + failed);
    }
    println!("{all:?}");
    assert!(all.0 > 0 && all.1 > 0, "{all:?}");
}

#[test]
fn an_unread_payload_keeps_its_send_open() {
    let mut nodes = tagged_fleet::<1>(2, Dials::CALM, Config::DEFAULT, SMALL, 1);
    let (to, from) = (nodes[0].peers[1], nodes[1].peers[0]);
    write(&nodes[0].engine, nodes[0].source.at(0), &pattern(0, 3000));
    let payload = Payload::Region(nodes[0].source.at(0), 3000);
    nodes[0].engine.send(CX, to, tag(1), payload, Notice::Report(7)).unwrap();
    for _ in 0..100 {
        turn(&mut nodes);
    }
    let mut waiter = waiter();
    let myself = nodes[0].peers[0];
    nodes[0].engine.close_peer(myself).unwrap();
    let late = nodes[0].engine.shutdown(&mut waiter, 50_000).unwrap_err();
    assert_eq!(late, Unfinished { peer: to, peers: 1, missing: Missing::Operations });
    assert_eq!(nodes[1].engine.peer_error(from), Ok(None));
    let into = Some((nodes[1].target.at(0), 3000));
    nodes[1].engine.recv(Some(from), tag(1), EXACT, into, 0).unwrap();
    turn_until(&mut nodes, "both have left", |nodes| {
        nodes[0].engine.has_left(to) == Ok(true) && nodes[1].engine.has_left(from) == Ok(true)
    });
    assert_eq!(nodes[1].engine.next_recv().map(|status| status.outcome), Some(Received::Ok));
    assert_eq!(read(&nodes[1].engine, nodes[1].target.at(0), 3000), pattern(0, 3000));
    assert_eq!(nodes[0].engine.next_completion().map(|end| end.outcome), Some(Outcome::Done));
}

#[test]
fn messages_before_a_bye_are_received_and_others_fail() {
    let mut nodes = tagged_fleet::<1>(2, Dials::WILD, Config::DEFAULT, SMALL, 3);
    let (to, from) = (nodes[0].peers[1], nodes[1].peers[0]);
    nodes[0].engine.send(CX, to, tag(1), Payload::Bytes(b"first"), Notice::Silent).unwrap();
    let into = Some((nodes[1].target.at(0), 64));
    let never = nodes[1].engine.recv(Some(from), tag(2), EXACT, into, 2).unwrap();
    // Node 1 also sends a message that no receive matches.
    nodes[1]
        .engine
        .send_sync(CX, from, tag(3), Payload::Bytes(b"lost"), Notice::Report(3))
        .unwrap();
    nodes[0].engine.close_peer(to).unwrap();
    turn_until(&mut nodes, "both have left", |nodes| {
        nodes[0].engine.has_left(to) == Ok(true) && nodes[1].engine.has_left(from) == Ok(true)
    });
    let (target, engine) = (nodes[1].target.at(0), &mut nodes[1].engine);
    let status = engine.test_recv(never).unwrap().unwrap();
    assert_eq!(status.outcome, Received::Failed(Fault::Peer(PeerError::Closed)));
    // Node 0 has the message, and could still receive it.
    assert_eq!(engine.next_completion().map(|end| (end.tag, end.outcome)), Some((3, UNKNOWN)));
    let first = engine.recv(Some(from), tag(1), EXACT, into, 1).unwrap();
    assert_eq!(engine.test_recv(first).unwrap().unwrap().outcome, Received::Ok);
    assert_eq!(read(engine, target, 5), b"first");
    let more = nodes[1].engine.recv(Some(from), tag(9), EXACT, into, 1);
    assert_eq!(more, Err(OpError::PeerFailed(PeerError::Closed)));
}

/// What node 0 keeps sending while node 1 closes.
#[derive(Clone, Copy, Debug)]
enum Flood {
    Long,
    Synchronous,
}

/// Node 0 sends as much as it can, and node 1 posts receives all the time. Node 1 closes at turn
/// 500. Checks that the close ends soon, and that both ends agree about each message. Returns the
/// number of messages received and refused.
fn flooded<const RAILS: usize>(mut nodes: Vec<Node<End, RAILS>>, flood: Flood) -> [usize; 2] {
    let (to, from) = (nodes[0].peers[1], nodes[1].peers[0]);
    let (mut sent, mut posted, mut outcomes) = (0, 0, vec![]);
    let (mut taken, mut missed, mut left) = (vec![], vec![], 0);
    for now in 0.. {
        assert!(now < 10_000, "{flood:?}: node 1 does not leave");
        if now == 500 {
            nodes[1].engine.close_peer(from).unwrap();
        }
        for _ in 0..4 {
            let payload = |at, len| Payload::Region(at, len);
            let (node, notice) = (&mut nodes[0], Notice::Report(sent));
            let issued = match flood {
                Flood::Long => {
                    let payload = payload(node.source.at(0), 3000);
                    node.engine.send(CX, to, tag(sent), payload, notice)
                }
                Flood::Synchronous => {
                    let payload = payload(node.source.at(0), 100);
                    node.engine.send_sync(CX, to, tag(sent), payload, notice)
                }
            };
            sent += issued.is_ok() as u64;
            let into = Some((nodes[1].target.at(0), 3000));
            let source = [None, Some(from)][posted as usize % 2];
            posted += nodes[1].engine.recv(source, EXACT, ANY, into, posted).is_ok() as u64;
        }
        turn(&mut nodes);
        while let Some(end) = nodes[0].engine.next_completion() {
            outcomes.push((end.tag, end.outcome));
        }
        while let Some(status) = nodes[1].engine.next_recv() {
            let list = if status.outcome == Received::Ok { &mut taken } else { &mut missed };
            list.extend(status.envelope.map(|envelope| envelope.tag.lo));
            if status.outcome != Received::Ok {
                assert_eq!(status.outcome, Received::Failed(Fault::Peer(PeerError::Closed)));
            }
        }
        left += (nodes[1].engine.has_left(from) == Ok(true)) as u32;
        if left > 1000 && outcomes.len() as u64 == sent {
            break;
        }
    }
    for node in &nodes {
        for &peer in &node.peers {
            let error = node.engine.peer_error(peer).unwrap();
            assert!(matches!(error, None | Some(PeerError::Closed)), "{error:?}");
        }
    }
    for (n, outcome) in outcomes {
        match outcome {
            Outcome::Done => assert!(taken.contains(&n), "message {n} is not received"),
            CLOSED => assert!(!taken.contains(&n), "message {n} is received"),
            UNKNOWN => assert!(matches!(flood, Flood::Synchronous), "message {n}"),
            outcome => panic!("message {n}: {outcome:?}"),
        }
    }
    [taken.len(), missed.len()]
}

#[test]
fn a_close_ends_while_the_peer_keeps_sending() {
    let mut totals = [0; 2];
    for seed in seeds(36) {
        let config = Config { window: [1, 4, 128][seed as usize % 3], ..Config::DEFAULT };
        let flood = [Flood::Long, Flood::Synchronous][seed as usize / 3 % 2];
        let got = match seed as usize / 6 % 3 {
            0 => flooded(tagged_fleet::<1>(2, Dials::WILD, config, SMALL, seed), flood),
            1 => flooded(tagged_fleet::<2>(2, Dials::CALM, config, SMALL, seed), flood),
            _ => {
                let sim = fleet::fabric(2, 2, 256, Dials::WILD, seed);
                let attach = |engine: &mut Engine<'static, End, 2>| {
                    engine.attach_matching(SMALL, match_memory(SMALL, 2, 4)).unwrap();
                };
                let nodes = fleet::lasting(sim, 2, 2, false, config, SIZE, |_, end| end, attach);
                flooded(nodes, flood)
            }
        };
        totals = [totals[0] + got[0], totals[1] + got[1]];
    }
    println!("{totals:?}");
    assert!(totals.iter().all(|&count| count > 0), "{totals:?}");
}

#[test]
fn an_engine_receives_its_own_messages_while_it_closes() {
    let mut own = loopback(SMALL);
    own.send_region(1, 0, 3000, false).unwrap();
    own.send_region(2, 3000, 100, true).unwrap();
    let requests = [(1, 0), (2, 3000)].map(|(lo, at)| own.recv(lo, EXACT, at, 3000));
    own.engine.close_peer(own.me).unwrap();
    for request in requests {
        assert_eq!(own.finish(request).outcome, Received::Ok);
    }
    assert_eq!(own.bytes(0, 3000), pattern(0, 3000));
    assert_eq!(own.engine.shutdown(&mut waiter(), SOON), Ok(()));
    for _ in requests {
        assert_eq!(own.engine.next_completion().map(|end| end.outcome), Some(Outcome::Done));
    }
}
