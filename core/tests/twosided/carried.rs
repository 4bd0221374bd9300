//! Tests how messages carry acknowledgements and credits back, and how these are counted.

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet::{self, End, Node};
use super::support::*;

/// Number of passes after which an acknowledgement is sent as a separate message.
const AGE: u32 = 40;
const CONFIG: Config = Config { ack_age: AGE, ..Config::DEFAULT };
const MATCHING: MatchConfig = MatchConfig { credits: 64, ..SMALL };

fn pair() -> Vec<Node<End, 1>> {
    tagged_fleet::<1>(2, Dials::CALM, CONFIG, MATCHING, 1)
}

fn send(nodes: &mut [Node<End, 1>], from: usize, lo: u64) {
    let to = nodes[from].peers[1 - from];
    let issued = nodes[from].engine.send(CX, to, tag(lo), Payload::Bytes(&[7; 8]), Notice::Silent);
    assert!(matches!(issued, Ok(Issued::Done { .. })), "{issued:?}: not at once");
}

fn receive(nodes: &mut [Node<End, 1>], at: usize, lo: u64) {
    let (from, into) = (nodes[at].peers[1 - at], nodes[at].target.at(0));
    let request = nodes[at].engine.recv(Some(from), tag(lo), EXACT, Some((into, 8)), 0).unwrap();
    let mut status = None;
    fleet::turn_until(nodes, "a receive", |nodes| {
        status = nodes[at].engine.test_recv(request).unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().outcome, Received::Ok);
}

fn turns(nodes: &mut [Node<End, 1>], count: u32) {
    (0..count).for_each(|_| fleet::turn(nodes));
}

#[test]
fn a_message_back_carries_the_acknowledgement_and_restarts_its_timer() {
    let mut nodes = pair();
    for lo in 0..10 {
        // Posts a write, which takes a number but no credit.
        let Node { engine, source, remotes, .. } = &mut nodes[0];
        engine.put(CX, source.at(0), 8, remotes[1].at(64), Notice::Silent).unwrap();
        // The acknowledgement is nearly due.
        turns(&mut nodes, AGE / 2 + 4);
        send(&mut nodes, 1, lo);
        receive(&mut nodes, 0, lo);
    }
    assert_eq!(nodes[1].engine.stats().acks_alone, 0);
    // The acknowledgement that the last message carried is not sent again.
    turns(&mut nodes, 3 * AGE);
    assert_eq!(nodes[1].engine.stats().acks_alone, 0);
}

#[test]
fn a_message_back_returns_credits_when_nothing_else_is_owed() {
    let mut nodes = pair();
    send(&mut nodes, 0, 1);
    turns(&mut nodes, 5);
    // The first message has arrived and waits for its receive. A message back acknowledges the
    // first message, and returns no credit.
    send(&mut nodes, 1, 2);
    receive(&mut nodes, 1, 1);
    send(&mut nodes, 1, 3);
    turns(&mut nodes, 3 * AGE);
    assert_eq!(nodes[1].engine.stats().acks_alone, 0);
    // All credits are available, so none of these messages waits for one.
    for lo in 0..u64::from(MATCHING.credits) {
        send(&mut nodes, 0, 100 + lo);
    }
    assert_eq!(nodes[0].engine.matching_stats().credits_exhausted, 0);
}

#[test]
fn messages_stay_counted_when_their_peer_is_removed() {
    let mut nodes = pair();
    for lo in 0..3 {
        send(&mut nodes, 0, lo);
        receive(&mut nodes, 1, lo);
    }
    turns(&mut nodes, 3 * AGE);
    let engine = &mut nodes[0].engine;
    let before = (engine.stats().posted, engine.matching_stats().eager);
    assert_eq!(before, (3, 3));
    let peer = nodes[0].peers[1];
    let engine = &mut nodes[0].engine;
    engine.remove_peer(peer).unwrap();
    assert_eq!((engine.stats().posted, engine.matching_stats().eager), before);
}
