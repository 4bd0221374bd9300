//! Sends tagged messages by every protocol. Checks that each message is received once, whole and in
//! order.

use std::collections::HashMap;

use fishplate_core::engine::protocol::{Payload, Received, Request};
use fishplate_core::engine::{ContextId, Issued, Notice};
use fishplate_core::error::OpError;
use fishplate_core::op::{Completion, Outcome};

use super::rig::*;
use super::schedule::Fleet;
use super::support::*;

/// Places per region. A place holds one payload.
const PLACES: u64 = 16;
/// Size of a place in bytes.
const PLACE: u64 = 1024;
pub const SIZE: usize = (PLACES * PLACE) as usize;
/// The bit that marks the completion tags of these messages.
pub const TAG: u64 = 1 << 63;

const TAGS: u64 = 3;

#[derive(Default)]
struct Mailbox {
    /// Free places to send from, and free places to receive into.
    out: Vec<u64>,
    into: Vec<u64>,
    /// Open sends by completion tag: the target node, the place of the payload, and the length.
    sends: HashMap<u64, (usize, Option<u64>, u64)>,
    /// Open receives: source and tag, the number of earlier receives with the same source and tag,
    /// and the place.
    receives: Vec<(Request, (usize, u64), usize, u64)>,
    /// Number of posted receives by source and tag.
    posted: HashMap<(usize, u64), usize>,
    sent: u64,
}

pub struct Mail {
    contexts: u64,
    pace: u64,
    seed: u64,
    boxes: Vec<Mailbox>,
    /// Sent messages by source, target and tag, each as fill value and length.
    sent: HashMap<(usize, usize, u64), Vec<(u64, usize)>>,
    /// Number of received messages by source, target and tag.
    received: HashMap<(usize, usize, u64), usize>,
    /// The node that has died, if any. Messages from and to that node may have any outcome.
    dead: Option<usize>,
}

impl Mail {
    /// Creates the mail of a fleet. Uses source and target regions from offset `at` on. A node
    /// sends a message in one of `pace` turns.
    pub fn new(nodes: usize, contexts: u16, at: u64, pace: u64, seed: u64) -> Mail {
        let places = || (0..PLACES).map(|place| at + place * PLACE).collect();
        let mailbox = |_| Mailbox { out: places(), into: places(), ..Mailbox::default() };
        let (boxes, contexts) = ((0..nodes).map(mailbox).collect(), contexts.into());
        Mail {
            contexts,
            pace,
            seed,
            boxes,
            sent: HashMap::new(),
            received: HashMap::new(),
            dead: None,
        }
    }

    pub fn dies(&mut self, node: usize) {
        self.dead = Some(node);
        self.boxes[node].sends.clear();
    }

    /// Lets a node send, and post and check receives.
    pub fn turn<const RAILS: usize>(
        &mut self,
        fleet: &mut Fleet<RAILS>,
        me: usize,
        issues: bool,
        random: &mut Random,
    ) {
        if issues && random.below(self.pace) == 0 {
            self.send(fleet, me, random);
        }
        let from = random.below(fleet.len() as u64) as usize;
        let lo = random.below(self.contexts) << 8 | random.below(TAGS);
        let posted = self.boxes[me].posted.get(&(from, lo)).copied().unwrap_or(0);
        // Posts receives until they equal the sends.
        if self.dead != Some(from) && posted < self.sent.get(&(from, me, lo)).map_or(0, Vec::len) {
            self.receive(fleet, me, from, lo);
        }
        while let Some(status) = fleet[me].engine.next_recv() {
            let (mailbox, seed) = (&mut self.boxes[me], self.seed);
            let at =
                mailbox.receives.iter().position(|receive| receive.0 == status.request).unwrap();
            let (_, (from, lo), n, place) = mailbox.receives.remove(at);
            mailbox.into.push(place);
            if self.dead == Some(from) && status.outcome != Received::Ok {
                continue;
            }
            let (fill, len) = self.sent[&(from, me, lo)][n];
            check(&status, Received::Ok, lo, len as u64, len as u64);
            let got = read(&fleet[me].engine, fleet[me].target.at(place), len);
            assert!(got == pattern(fill, len), "seed {seed}: {from} to {me}, tag {lo:#x}");
            *self.received.entry((from, me, lo)).or_default() += 1;
        }
    }

    fn send<const RAILS: usize>(
        &mut self,
        fleet: &mut Fleet<RAILS>,
        me: usize,
        random: &mut Random,
    ) {
        let to = random.below(fleet.len() as u64) as usize;
        if self.dead == Some(to) {
            return;
        }
        let context = random.below(self.contexts);
        let lo = context << 8 | random.below(TAGS);
        let (kind, fill) = (random.below(5), random.next() >> 32);
        let len = random.below(if kind < 3 { 129 } else { PLACE }) as usize;
        let bytes = pattern(fill, len);
        let (node, mailbox) = (&mut fleet[me], &mut self.boxes[me]);
        let tag_done = TAG | mailbox.sent;
        let (cx, peer, report) =
            (ContextId(context as u8), node.peers[to], Notice::Report(tag_done));
        let (issued, place) = match kind {
            // The payload is a slice, which the engine copies if a block is free.
            0 => {
                (node.engine.send(cx, peer, tag(lo), Payload::Bytes(&bytes), Notice::Silent), None)
            }
            1 => (node.engine.send_sync(cx, peer, tag(lo), Payload::Bytes(&bytes), report), None),
            _ => {
                let Some(place) = mailbox.out.pop() else { return };
                let from = node.source.at(place);
                write(&node.engine, from, &bytes);
                let payload = Payload::Region(from, len);
                let issued = match kind {
                    4 => node.engine.send_sync(cx, peer, tag(lo), payload, report),
                    _ => node.engine.send(cx, peer, tag(lo), payload, report),
                };
                if issued == Err(OpError::Again) {
                    mailbox.out.push(place);
                }
                (issued, Some(place))
            }
        };
        match issued {
            Ok(Issued::Pending(_)) if kind != 0 => {
                mailbox.sends.insert(tag_done, (to, place, len as u64));
            }
            Ok(_) => assert!(place.is_none(), "a kept send is not over at once"),
            Err(OpError::Again) => return,
            Err(error) => panic!("seed {}: {error:?}", self.seed),
        }
        mailbox.sent += 1;
        self.sent.entry((me, to, lo)).or_default().push((fill, len));
    }

    fn receive<const RAILS: usize>(
        &mut self,
        fleet: &mut Fleet<RAILS>,
        me: usize,
        from: usize,
        lo: u64,
    ) {
        let (node, mailbox) = (&mut fleet[me], &mut self.boxes[me]);
        let Some(place) = mailbox.into.pop() else { return };
        let into = Some((node.target.at(place), PLACE as usize));
        match node.engine.recv(Some(node.peers[from]), tag(lo), EXACT, into, 0) {
            Ok(request) => {
                let count = mailbox.posted.entry((from, lo)).or_default();
                mailbox.receives.push((request, (from, lo), *count, place));
                *count += 1;
            }
            Err(error) => {
                assert_eq!(error, OpError::Again);
                mailbox.into.push(place);
            }
        }
    }

    pub fn completed(&mut self, me: usize, done: &Completion) {
        let seed = self.seed;
        let (to, place, len) =
            self.boxes[me].sends.remove(&done.tag).expect("a send completes once");
        let lost = self.dead == Some(to);
        assert!(lost || done.outcome == Outcome::Done, "seed {seed}: node {me}: {done:?}");
        assert!(done.value == 0 || done.value == len, "seed {seed}: {} of {len}", done.value);
        self.boxes[me].out.extend(place);
    }

    pub fn is_over(&self) -> bool {
        let received =
            |key, sent: &Vec<_>| self.received.get(key).copied().unwrap_or(0) == sent.len();
        let lost = |key: &(usize, usize, u64)| [Some(key.0), Some(key.1)].contains(&self.dead);
        self.boxes.iter().all(|mailbox| mailbox.sends.is_empty())
            && self.sent.iter().all(|(key, sent)| lost(key) || received(key, sent))
    }
}
