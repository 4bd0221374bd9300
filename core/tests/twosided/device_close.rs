//! Tests closing while a device still copies messages that matched after the close began. A device
//! may take any time, so the close does not wait for it.

use fishplate_core::engine::protocol::{Payload, Received, Request};
use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{PeerId, RailId, Region};
use fishplate_core::op::{Fault, Outcome};
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::fleet::{self, End, Node, turn};
use super::support::veil::{Veiled, device_region, peek};
use super::support::*;

const CLOSED: Fault = Fault::Peer(PeerError::Closed);

/// A close without a device takes a little more than 1024 passes.
const TURNS: u32 = 3000;

/// The tags of the messages from node 0, and the offsets of their receives. Only the receive of
/// `STORED` is posted late, when its message has arrived.
const EAGER: u64 = 1;
const STORED: u64 = 2;
const SYNCHRONOUS: u64 = 3;
const LONG: u64 = 4;

/// Length of each message that travels with its payload, in bytes.
const LEN: usize = 100;

type Nodes<const RAILS: usize> = Vec<Node<Veiled<End>, RAILS>>;

/// Two nodes. Node 1 closes, and waits only for its own send of tag 0 to match. Then messages of
/// node 0 match at node 1, whose device is full.
struct Copying<const RAILS: usize> {
    nodes: Nodes<RAILS>,
    into: Region,
    requests: [Request; 4],
}

fn copying<const RAILS: usize>(lasting: bool, seed: u64) -> Copying<RAILS> {
    let sim = fleet::fabric(2, RAILS as u16, 256, Dials::WILD, seed);
    let attach = |engine: &mut Engine<'static, Veiled<End>, RAILS>| {
        engine.attach_matching(SMALL, match_memory(SMALL, 2, 8)).unwrap();
    };
    let config = Config::DEFAULT;
    let mut nodes: Nodes<RAILS> = match lasting {
        true => {
            let wrap = |_, end| Veiled::new(end);
            fleet::lasting(sim, 2, RAILS as u16, false, config, SIZE, wrap, attach)
        }
        false => fleet::prepared(sim, 2, config, SIZE, |_, _, end| Veiled::new(end), attach),
    };
    let (to, from) = (nodes[0].peers[1], nodes[1].peers[0]);
    let into = device_region(SIZE);
    let device = nodes[1].engine.register(into).unwrap();
    let at = |tag: u64| Some((device.at(4096 * tag), 4096));
    let recv = |nodes: &mut Nodes<RAILS>, n: u64| {
        nodes[1].engine.recv(Some(from), tag(n), EXACT, at(n), n).unwrap()
    };
    let early = [EAGER, SYNCHRONOUS, LONG].map(|n| recv(&mut nodes, n));
    send(&mut nodes[1], from, 0, 3000, false);
    nodes[1].engine.close_peer(from).unwrap();
    (0..100).for_each(|_| turn(&mut nodes));
    fill(&mut nodes, u32::MAX);
    send(&mut nodes[0], to, EAGER, LEN, false);
    send(&mut nodes[0], to, STORED, LEN, false);
    send(&mut nodes[0], to, SYNCHRONOUS, LEN, true);
    send(&mut nodes[0], to, LONG, 3000, false);
    (0..200).for_each(|_| turn(&mut nodes));
    let stored = recv(&mut nodes, STORED);
    (0..100).for_each(|_| turn(&mut nodes));
    let [eager, synchronous, long] = early;
    let requests = [eager, stored, synchronous, long];
    // The device could receive no message yet. The long message is refused at both ends.
    let status = nodes[1].engine.test_recv(long).unwrap().expect("it is refused");
    check(&status, Received::Failed(CLOSED), LONG, 3000, 0);
    for request in &requests[..3] {
        assert_eq!(nodes[1].engine.test_recv(*request), Ok(None), "seed {seed}");
    }
    assert_eq!(nodes[1].engine.has_left(from), Ok(false), "seed {seed}");
    Copying { nodes, into, requests }
}

/// Sends the pattern of `n`.
fn send<const RAILS: usize>(
    node: &mut Node<Veiled<End>, RAILS>,
    to: PeerId,
    n: u64,
    len: usize,
    synchronous: bool,
) {
    let at = node.source.at(4096 * n);
    write(&node.engine, at, &pattern(n, len));
    // An eager send may be done at once, and then reports nothing.
    let notice = if n >= SYNCHRONOUS { Notice::Report(n) } else { Notice::Silent };
    let payload = Payload::Region(at, len);
    let engine = &mut node.engine;
    match synchronous {
        true => engine.send_sync(CX, to, tag(n), payload, notice).unwrap(),
        false => engine.send(CX, to, tag(n), payload, notice).unwrap(),
    };
}

/// Lets the next `full` copies of node 1 find no room.
fn fill<const RAILS: usize>(nodes: &mut Nodes<RAILS>, full: u32) {
    nodes[1].engine.rail_mut(RailId(0)).unwrap().full = full;
}

impl<const RAILS: usize> Copying<RAILS> {
    /// Receives the message that node 1 waits for, so that nothing delays the close.
    fn release(&mut self) {
        let Node { engine, peers, target, .. } = &mut self.nodes[0];
        engine.recv(Some(peers[1]), tag(0), EXACT, Some((target.at(0), 3000)), 0).unwrap();
    }

    fn leave(&mut self, what: &str) {
        let left = |nodes: &Nodes<RAILS>| {
            nodes[0].engine.has_left(nodes[0].peers[1]) == Ok(true)
                && nodes[1].engine.has_left(nodes[1].peers[0]) == Ok(true)
        };
        let ended = (0..TURNS).any(|_| {
            turn(&mut self.nodes);
            left(&self.nodes)
        });
        assert!(ended, "{what}: the close waits for the device");
        for (node, peer) in [(0, 1), (1, 0)] {
            let Node { engine, peers, .. } = &self.nodes[node];
            assert_eq!(engine.peer_error(peers[peer]), Ok(Some(PeerError::Closed)), "{what}");
        }
    }

    /// Checks that the device now gets each message, once.
    fn copied(&mut self, what: &str) {
        fill(&mut self.nodes, 0);
        (0..20).for_each(|_| turn(&mut self.nodes));
        for (request, n) in self.requests[..3].iter().zip([EAGER, STORED, SYNCHRONOUS]) {
            let status = self.nodes[1].engine.test_recv(*request).unwrap().expect(what);
            check(&status, Received::Ok, n, LEN as u64, LEN as u64);
            assert_eq!(peek(&self.into, 4096 * n as usize, LEN), pattern(n, LEN), "{what}");
        }
        assert_eq!(self.nodes[1].engine.next_recv(), None, "{what}");
        let placed: u32 = (0..RAILS)
            .map(|rail| self.nodes[1].engine.rail_mut(RailId(rail as u8)).unwrap().placed)
            .sum();
        assert_eq!(placed, 3, "{what}");
    }

    /// Takes the outcomes of node 0's sends, in the order of their tags.
    fn outcomes(&mut self) -> Vec<(u64, Outcome)> {
        let engine = &mut self.nodes[0].engine;
        let next = || engine.next_completion().map(|end| (end.tag, end.outcome));
        let mut ends: Vec<_> = std::iter::from_fn(next).collect();
        ends.sort_by_key(|end| end.0);
        ends
    }
}

fn ends(synchronous: Outcome) -> [(u64, Outcome); 2] {
    [(SYNCHRONOUS, synchronous), (LONG, Outcome::Failed(CLOSED))]
}

fn copies_after_the_close<const RAILS: usize>(lasting: bool, seed: u64) {
    let what = format!("seed {seed}");
    let mut copying = copying::<RAILS>(lasting, seed);
    copying.release();
    copying.leave(&what);
    // The peer has the message, and receives it later.
    assert_eq!(copying.outcomes(), ends(Outcome::Unknown(CLOSED)), "{what}");
    copying.copied(&what);
}

fn copies_before_the_close<const RAILS: usize>(lasting: bool, seed: u64) {
    let what = format!("seed {seed}");
    let mut copying = copying::<RAILS>(lasting, seed);
    // The first retries find no room either.
    fill(&mut copying.nodes, seed as u32 % 5);
    (0..20).for_each(|_| turn(&mut copying.nodes));
    copying.copied(&what);
    copying.release();
    copying.leave(&what);
    assert_eq!(copying.outcomes(), ends(Outcome::Done), "{what}");
}

#[test]
fn a_close_does_not_wait_for_a_device() {
    for seed in seeds(30) {
        match seed % 3 {
            0 => copies_after_the_close::<1>(false, seed),
            1 => copies_after_the_close::<2>(false, seed),
            _ => copies_after_the_close::<2>(true, seed),
        }
    }
}

#[test]
fn a_send_whose_payload_is_copied_before_the_close_ends_is_done() {
    for seed in seeds(30) {
        match seed % 3 {
            0 => copies_before_the_close::<1>(false, seed),
            1 => copies_before_the_close::<2>(false, seed),
            _ => copies_before_the_close::<2>(true, seed),
        }
    }
}

#[test]
fn a_copy_that_goes_on_after_the_close_ends_with_the_removal_of_the_peer() {
    let mut copying = copying::<1>(false, 1);
    copying.release();
    copying.leave("removal");
    let Copying { nodes, into, requests } = &mut copying;
    let from = nodes[1].peers[0];
    nodes[1].engine.remove_peer(from).unwrap();
    for request in &requests[..3] {
        let status = nodes[1].engine.test_recv(*request).unwrap().expect("it has failed");
        assert_eq!(status.outcome, Received::Failed(Fault::Peer(PeerError::Removed)));
    }
    fill(nodes, 0);
    (0..20).for_each(|_| _ = nodes[1].engine.progress());
    assert_eq!(peek(into, 0, SIZE), [0; SIZE], "the device was written after the end");
}
