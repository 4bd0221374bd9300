//! Tests closing with messages that no receive matches. Neither node waits for a receive that the
//! other can no longer post.

use fishplate_core::engine::protocol::{Payload, Received};
use fishplate_core::engine::{Config, Engine, Issued, Notice};
use fishplate_core::error::PeerError;
use fishplate_core::mem::PeerId;
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::Rail;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet::{self, End, Node, turn};
use super::support::*;

const CLOSED: Outcome = Outcome::Failed(Fault::Peer(PeerError::Closed));
const UNKNOWN: Outcome = Outcome::Unknown(Fault::Peer(PeerError::Closed));

/// Maximum number of turns for a close in these tests.
const TURNS: u32 = 5000;

/// The tags of the messages that each node sends: a long one and a synchronous one.
const LONG: u64 = 1;
const SYNCHRONOUS: u64 = 2;

/// Sends a long message and a short synchronous message, which no receive matches.
fn send_both<R: Rail, const RAILS: usize>(node: &mut Node<R, RAILS>, to: PeerId) {
    write(&node.engine, node.source.at(0), &pattern(0, 3000));
    let (e, at) = (&mut node.engine, node.source.at(0));
    e.send(CX, to, tag(LONG), Payload::Region(at, 3000), Notice::Report(LONG)).unwrap();
    let short = Payload::Region(at, 100);
    e.send_sync(CX, to, tag(SYNCHRONOUS), short, Notice::Report(SYNCHRONOUS)).unwrap();
}

/// Makes turns until each of these nodes has left the other. Returns the number of turns.
fn leave<R: Rail, const RAILS: usize>(nodes: &mut [Node<R, RAILS>], what: &str) -> u32 {
    for turns in 0..TURNS {
        let left = |node: &Node<R, RAILS>, peer: usize| node.engine.has_left(node.peers[peer]);
        if left(&nodes[0], 1) == Ok(true) && left(&nodes[1], 0) == Ok(true) {
            return turns;
        }
        turn(nodes);
    }
    panic!("{what}: the nodes wait for each other");
}

/// Takes the completions of a node, in the order of their tags.
fn ends<R: Rail, const RAILS: usize>(node: &mut Node<R, RAILS>) -> Vec<(u64, Outcome)> {
    let next = || node.engine.next_completion().map(|end| (end.tag, end.outcome));
    let mut ends: Vec<_> = std::iter::from_fn(next).collect();
    ends.sort_by_key(|end| end.0);
    ends
}

/// Both nodes send, and both close. The second node closes up to 300 turns after the first.
fn both_close<const RAILS: usize>(mut nodes: Vec<Node<End, RAILS>>, seed: u64) {
    let what = format!("seed {seed}");
    let mut random = Random(seed);
    let others = [nodes[0].peers[1], nodes[1].peers[0]];
    for (node, to) in nodes.iter_mut().zip(others) {
        send_both(node, to);
    }
    for (node, from) in others.into_iter().enumerate() {
        (0..random.below(300)).for_each(|_| turn(&mut nodes));
        nodes[node].engine.close_peer(from).unwrap();
    }
    leave(&mut nodes, &what);
    for (node, from) in nodes.iter_mut().zip(others) {
        assert_eq!(ends(node), [(LONG, CLOSED), (SYNCHRONOUS, UNKNOWN)], "{what}");
        assert_eq!(node.engine.peer_error(from), Ok(Some(PeerError::Closed)), "{what}");
        // The node has the short message, which is still received.
        let into = Some((node.target.at(0), 3000));
        let short = node.engine.recv(Some(from), tag(SYNCHRONOUS), EXACT, into, 0).unwrap();
        let status = node.engine.test_recv(short).unwrap().expect("it is here");
        check(&status, Received::Ok, SYNCHRONOUS, 100, 100);
        assert_eq!(read(&node.engine, node.target.at(0), 100), pattern(0, 100), "{what}");
    }
}

#[test]
fn nodes_that_close_do_not_wait_for_receives_of_each_other() {
    for seed in seeds(60) {
        let config = Config { window: [1, 4, 128][seed as usize % 3], ..Config::DEFAULT };
        match seed / 3 % 3 {
            0 => both_close(tagged_fleet::<1>(2, Dials::WILD, config, SMALL, seed), seed),
            1 => both_close(tagged_fleet::<2>(2, Dials::WILD, config, SMALL, seed), seed),
            _ => {
                let sim = fleet::fabric(2, 2, 256, Dials::WILD, seed);
                let attach = |engine: &mut Engine<'static, End, 2>| {
                    engine.attach_matching(SMALL, match_memory(SMALL, 2, 4)).unwrap();
                };
                let nodes = fleet::lasting(sim, 2, 2, false, config, SIZE, |_, end| end, attach);
                both_close(nodes, seed);
            }
        }
    }
}

#[test]
fn a_claimed_message_does_not_delay_a_close() {
    let mut nodes = tagged_fleet::<1>(2, Dials::CALM, Config::DEFAULT, SMALL, 1);
    let others = [nodes[0].peers[1], nodes[1].peers[0]];
    for (node, to) in nodes.iter_mut().zip(others) {
        send_both(node, to);
    }
    (0..100).for_each(|_| turn(&mut nodes));
    let claimed = [0, 1].map(|node: usize| {
        let (engine, from) = (&mut nodes[node].engine, others[node]);
        [LONG, SYNCHRONOUS].map(|n| engine.mprobe(Some(from), tag(n), EXACT).unwrap().unwrap())
    });
    for (node, from) in nodes.iter_mut().zip(others) {
        node.engine.close_peer(from).unwrap();
    }
    leave(&mut nodes, "claimed");
    for (node, [long, short]) in nodes.iter_mut().zip(claimed) {
        assert_eq!(ends(node), [(LONG, CLOSED), (SYNCHRONOUS, UNKNOWN)]);
        let into = Some((node.target.at(0), 3000));
        let gone = node.engine.mrecv(long, into, 7).unwrap();
        let status = node.engine.test_recv(gone).unwrap().expect("it has failed");
        check(&status, Received::Failed(Fault::Peer(PeerError::Closed)), LONG, 3000, 0);
        let short = node.engine.mrecv(short, into, 0).unwrap();
        let status = node.engine.test_recv(short).unwrap().expect("it is here");
        check(&status, Received::Ok, SYNCHRONOUS, 100, 100);
    }
}

/// The room of refused messages is free again, because the peer takes it for free.
#[test]
fn a_node_that_waits_for_its_own_send_refuses_as_many_messages_as_the_peer_sends() {
    let mut nodes = tagged_fleet::<1>(2, Dials::WILD, Config::DEFAULT, SMALL, 5);
    let (to, from) = (nodes[0].peers[1], nodes[1].peers[0]);
    send_both(&mut nodes[1], from);
    nodes[1].engine.close_peer(from).unwrap();
    let (mut sent, mut refused) = (0, 0);
    for turns in 0.. {
        assert!(turns < 20_000, "node 1 no longer refuses: {refused} of {sent}");
        let Node { engine, source, .. } = &mut nodes[0];
        let payload = Payload::Region(source.at(0), 3000);
        sent += engine.send(CX, to, tag(sent), payload, Notice::Report(0)).is_ok() as u64;
        turn(&mut nodes);
        let ends = ends(&mut nodes[0]);
        assert!(ends.iter().all(|end| end.1 == CLOSED), "{ends:?}");
        refused += ends.len();
        if refused >= 10 * SMALL.headers as usize {
            break;
        }
    }
    assert_eq!(nodes[0].engine.peer_error(to), Ok(None));
    let requests = [LONG, SYNCHRONOUS].map(|n| {
        let Node { engine, target, .. } = &mut nodes[0];
        let into = Some((target.at(0), 3000));
        engine.recv(Some(to), tag(n), EXACT, into, n).unwrap()
    });
    leave(&mut nodes, "received");
    for request in requests {
        let status = nodes[0].engine.test_recv(request).unwrap().map(|status| status.outcome);
        assert_eq!(status, Some(Received::Ok));
    }
    assert_eq!(ends(&mut nodes[1]), [(LONG, Outcome::Done), (SYNCHRONOUS, Outcome::Done)]);
}

#[test]
fn an_engine_that_closes_does_not_wait_to_receive_its_own_messages() {
    let mut own = loopback(SMALL);
    own.send_region(1, 0, 3000, false).unwrap();
    own.send_region(2, 3000, 100, true).unwrap();
    assert!(matches!(own.send(3, &[3; 8]), Ok(Issued::Done { .. })));
    assert_eq!(own.engine.shutdown(&mut waiter(), 100_000), Ok(()));
    let next = || own.engine.next_completion().map(|end| (end.tag, end.outcome));
    let ends: Vec<_> = std::iter::from_fn(next).collect();
    assert_eq!(ends, [(1, CLOSED), (2, UNKNOWN)]);
    for (n, at, len) in [(2, 3000, 100), (3, 4000, 8)] {
        let request = own.recv(n, EXACT, at, 3000);
        check(&own.finish(request), Received::Ok, n, len, len);
    }
}
