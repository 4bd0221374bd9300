//! Tagged messages in the presence of a peer with damaged, repeated, lost and forged traffic.
//! Nothing panics and no other peer is affected. No byte of a payload is sent after its send has
//! completed. Half of the runs use failover.

use std::collections::VecDeque;

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received, Request};
use fishplate_core::engine::{Config, Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::mem::{Peer, PeerId, RailId};
use fishplate_core::op::Outcome;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::damage::damage;
use super::support::fleet::{self, Node};
use super::support::tap::{Tap, shared};
use super::support::*;

/// The byte that fills the memory of completed sends.
const GONE: u8 = 0x5e;

/// Length of each place in the regions, and maximum number of messages in flight to each peer.
const PLACE: u64 = 2048;
const MOST: usize = 4;

/// The traffic from one node to another. It uses its own part of both regions, from place `first`
/// on.
struct Pair {
    to: PeerId,
    from: PeerId,
    first: u64,
    /// Free places to send from, and the payloads sent so far, in order.
    free: Vec<u64>,
    sent: Vec<Vec<u8>>,
    /// Completion tags of open sends, with their places.
    open: Vec<(u64, u64)>,
    receives: VecDeque<(Request, u64)>,
    posted: usize,
    received: usize,
}

type Nodes = Vec<Node<Tap<fleet::End>, 2>>;

impl Pair {
    fn new(nodes: &Nodes, me: usize, to: usize, first: u64) -> Pair {
        Pair {
            to: nodes[me].peers[to],
            from: nodes[to].peers[me],
            first,
            free: (0..MOST as u64).collect(),
            sent: vec![],
            open: vec![],
            receives: VecDeque::new(),
            posted: 0,
            received: 0,
        }
    }

    fn send(&mut self, node: &mut Node<Tap<fleet::End>, 2>, random: &mut Random) {
        let Some(place) = self.free.pop() else { return };
        let most = [129, PLACE][random.below(2) as usize];
        let len = random.below(most) as usize;
        let bytes: Vec<u8> =
            pattern(random.next() >> 32, len).iter().map(|byte| byte & 0x3f).collect();
        let at = node.source.at((self.first + place) * PLACE);
        write(&node.engine, at, &bytes);
        let n = self.first << 32 | self.sent.len() as u64;
        let payload = Payload::Region(at, len);
        let issued = match random.below(3) {
            0 => node.engine.send_sync(CX, self.to, tag(self.first), payload, Notice::Report(n)),
            _ => node.engine.send(CX, self.to, tag(self.first), payload, Notice::Report(n)),
        };
        match issued {
            Ok(Issued::Pending(_)) => self.open.push((n, place)),
            Ok(Issued::Done { .. }) => self.free.push(place),
            Err(OpError::Again) => return self.free.push(place),
            Err(_) => return,
        }
        self.sent.push(bytes);
    }

    fn receive(&mut self, node: &mut Node<Tap<fleet::End>, 2>) {
        if self.receives.len() == MOST {
            return;
        }
        let place = (self.posted % MOST) as u64;
        let into = Some((node.target.at((self.first + place) * PLACE), PLACE as usize));
        if let Ok(request) = node.engine.recv(Some(self.from), tag(self.first), EXACT, into, 0) {
            self.receives.push_back((request, place));
            self.posted += 1;
        }
    }

    /// Takes the oldest receive if it is complete. If the sender is `honest`, checks the contents.
    fn take(&mut self, node: &mut Node<Tap<fleet::End>, 2>, honest: bool, what: &str) {
        let Some(&(request, place)) = self.receives.front() else { return };
        let Some(status) = node.engine.test_recv(request).unwrap() else { return };
        self.receives.pop_front();
        if honest {
            let sent = &self.sent[self.received];
            check(&status, Received::Ok, self.first, sent.len() as u64, sent.len() as u64);
            let got = read(&node.engine, node.target.at((self.first + place) * PLACE), sent.len());
            assert!(got == *sent, "{what}: message {}", self.received);
        }
        self.received += 1;
    }
}

/// Damages the traffic from one node to another, on a faulty fabric of three nodes. Returns the
/// number of operations that were posted again.
fn run(seed: u64) -> u64 {
    let what = format!("seed {seed}");
    let controls = [(); 3].map(|()| shared());
    let control = &controls[0];
    let mut random = Random(seed);
    let config = Config {
        window: [4, 8, 64][random.below(3) as usize],
        first_sequence: STARTS[seed as usize % 4],
        ..Config::DEFAULT
    };
    let matching = MatchConfig { credits: 1 + random.below(4) as u32, ..SMALL };
    let keeps = seed.is_multiple_of(2);
    let sim = fleet::fabric(3, 2, 256, Dials::WILD, seed);
    let wrap = |node: u16, rail: u16, end| Tap::new(end, rail as usize, &controls[node as usize]);
    let mut nodes = fleet::prepared::<_, 2>(sim, 3, config, SIZE, wrap, |engine| {
        if keeps {
            engine.attach_failover(failover(&config, 3)).unwrap();
        }
        engine.attach_matching(matching, match_memory(matching, 3, 8)).unwrap();
    });
    // Rail 0 between two nodes may fail. The nodes then continue without it.
    let mut fails = vec![];
    for ends in [(0, 1), (1, 0), (0, 2), (2, 0)] {
        if keeps && random.below(2) == 0 {
            fails.push((random.below(150), ends));
        }
    }
    // Fills the memory of completed sends with a byte. No message contains that byte eight times in
    // a row.
    control.borrow_mut().refuse = Some(Box::new(move |post| {
        let gone = post.bytes.windows(8).any(|bytes| bytes == [GONE; 8]);
        assert!(!gone, "seed {seed}: a payload goes out whose send has ended");
        None
    }));
    control.borrow_mut().edit = Some(damage(Peer(1), 2 + seed % 30, config.first_sequence, seed));
    let mut pairs: Vec<_> = [(0, 1, 0), (1, 0, 4), (0, 2, 8), (2, 0, 12)]
        .into_iter()
        .map(|(me, to, first)| (me, to, Pair::new(&nodes, me, to, first)))
        .collect();
    for turn in 0..30_000 {
        for &(_, (me, to)) in fails.iter().filter(|fails| fails.0 == turn) {
            let peer = nodes[me].peers[to];
            // The call is refused if the rail or the peer has already failed.
            let _ = nodes[me].engine.disable_rail(peer, RailId(0));
        }
        // For 48 of 64 turns receivers cannot read payloads, so they pull them.
        controls.iter().for_each(|control| control.borrow_mut().unreadable = turn % 64 < 48);
        for (me, to, pair) in &mut pairs {
            let honest = *me != 1 && *to != 1;
            if turn < 150 && random.below(3) == 0 {
                pair.send(&mut nodes[*me], &mut random);
            }
            if random.below(3) == 0 && (!honest || pair.posted < pair.sent.len()) {
                pair.receive(&mut nodes[*to]);
            }
            pair.take(&mut nodes[*to], honest, &what);
        }
        for (at, node) in nodes.iter_mut().enumerate() {
            node.engine.progress();
            while let Some(end) = node.engine.next_completion() {
                let pair =
                    pairs.iter_mut().find(|(me, _, pair)| *me == at && pair.first == end.tag >> 32);
                let (_, to, pair) = pair.expect("one of these");
                let open = pair.open.iter().position(|&(n, _)| n == end.tag).expect("once");
                let (_, place) = pair.open.remove(open);
                assert!(
                    end.outcome == Outcome::Done || at == 1 || *to == 1,
                    "{what}: {:?}",
                    end.outcome
                );
                write(
                    &node.engine,
                    node.source.at((pair.first + place) * PLACE),
                    &[GONE; PLACE as usize],
                );
                pair.free.push(place);
            }
        }
        let over = |(me, to, pair): &(usize, usize, Pair)| {
            *me == 1 || *to == 1 || pair.received == pair.sent.len() && pair.open.is_empty()
        };
        if turn >= 400 && pairs.iter().all(over) {
            let (third, victim) = (nodes[0].peers[2], nodes[2].peers[0]);
            assert_eq!(nodes[0].engine.peer_error(third), Ok(None), "{what}");
            assert_eq!(nodes[2].engine.peer_error(victim), Ok(None), "{what}");
            return nodes.iter().map(|node| node.engine.stats().reposted).sum();
        }
    }
    panic!("{what}: not complete; {:?}", nodes[0].engine.stats());
}

#[test]
fn damaged_repeated_and_lost_traffic_never_panics_or_reaches_others() {
    let seeds = seeds(1000);
    let reposted: u64 = seeds.iter().map(|&seed| run(seed)).sum();
    assert!(reposted > 0 || seeds.len() < 100);
}
