//! Peers that fail, leave and reconnect during traffic of every kind. Each receive completes once,
//! with a sent message or as failed. Nothing lands after the completion. Finally all slots, blocks
//! and credits are free again.

use std::collections::HashMap;

use fishplate_core::engine::protocol::{Claimed, MatchConfig, Payload, Received, Request, Status};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{OpError, PeerError};
use fishplate_core::mem::{LocalAddr, LocalId, PeerId, Region};
use fishplate_core::rail::faulty::{Faults, Faulty};
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::tap::{Event, Shared, Tap, shared};
use super::support::veil::{Veiled, device_region, peek, poke};
use super::support::*;

type Network = Veiled<Tap<Faulty<Loopback<32>, 16>>>;

/// Length of each receive buffer and of the longest message, in bytes.
const ROOM: usize = 700;
const PEERS: usize = 3;
const UNTOUCHED: u8 = 0xee;
/// Number of blocks for payloads that wait at their sender. [`own1`] provides that many.
const OUTGOING: u64 = 4;

/// True if the buffer at this place is in device memory. Every second buffer is.
fn in_device(place: u64) -> bool {
    !(place / ROOM as u64).is_multiple_of(2)
}

struct Churn {
    random: Random,
    control: Shared,
    matching: MatchConfig,
    own: Own1<Network, 2>,
    peers: Vec<PeerId>,
    /// Device memory, as large as the region that receives use in host memory.
    device: (LocalId, Region),
    /// Open receives, with the place and size of their buffers.
    open: HashMap<Request, (u64, usize)>,
    free: Vec<u64>,
    claimed: Vec<Claimed>,
    what: String,
}

impl Churn {
    fn new(seed: u64) -> Churn {
        let mut random = Random(seed);
        let control = shared();
        // The receiver either reads payloads or gets them in chunks.
        let unreadable = random.below(2) == 0;
        let rails = std::array::from_fn(|n| {
            let inner = Faulty::new(Loopback::new(), Faults::DISORDER, seed + 1000 * n as u64);
            Veiled::new(Tap::new(inner, n, &control))
        });
        let config = Config {
            window: [8, 32][random.below(2) as usize],
            batch: [1, 2, 32][random.below(3) as usize],
            first_sequence: STARTS[random.below(4) as usize],
            ..Config::DEFAULT
        };
        let matching = MatchConfig {
            shared_credits: [0, 9, 100][random.below(3) as usize],
            shared_headers: [0, 9, 100][random.below(3) as usize],
            shared_shorts: [0, 9, 100][random.below(3) as usize],
            ..SMALL
        };
        let mut own = own1(config, matching, rails);
        control.borrow_mut().unreadable = unreadable;
        let mut peers = vec![own.me];
        for _ in 1..PEERS {
            let peer = own.engine.reserve_peer().unwrap();
            own.engine.connect_peer(peer, 3).unwrap();
            peers.push(peer);
        }
        write(&own.engine, own.out.at(0), &pattern(0, SIZE));
        write(&own.engine, own.into.at(0), &vec![UNTOUCHED; SIZE]);
        let memory = device_region(SIZE);
        poke(&memory, 0, &[UNTOUCHED; SIZE]);
        let device = (own.engine.register(memory).unwrap(), memory);
        let free = (0..RECEIVES as u64).map(|n| n * ROOM as u64).collect();
        let what = format!("seed {seed}");
        Churn {
            random,
            control,
            matching,
            own,
            peers,
            device,
            open: HashMap::new(),
            free,
            claimed: vec![],
            what,
        }
    }

    fn some_peer(&mut self) -> PeerId {
        self.peers[self.random.below(PEERS as u64) as usize]
    }

    /// Sends a message. Its tag contains the offset of its bytes.
    fn send(&mut self) {
        let to = self.some_peer();
        let len = [0, 8, 100, 128, 129, 300, 650][self.random.below(7) as usize];
        let at = self.random.below((SIZE - ROOM) as u64);
        let tag = Tag::new(self.random.below(3), at as u32);
        let bytes = pattern(at, len);
        let slice = len <= self.own.engine.eager_max(to) && self.random.below(3) == 0;
        let payload =
            if slice { Payload::Bytes(&bytes) } else { Payload::Region(self.own.out.at(at), len) };
        let engine = &mut self.own.engine;
        let sent = match self.random.below(4) {
            0 => engine.send_sync(CX, to, tag, payload, Notice::Report(at)),
            _ => engine.send(CX, to, tag, payload, Notice::Silent),
        };
        let lost = matches!(sent, Err(OpError::Again | OpError::PeerFailed(_)));
        assert!(sent.is_ok() || lost, "{}: {sent:?}", self.what);
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        match in_device(at) {
            false => self.own.bytes(at, len),
            true => peek(&self.device.1, at as usize, len),
        }
    }

    fn addr(&self, at: u64) -> LocalAddr {
        let region = if in_device(at) { self.device.0 } else { self.own.into };
        region.at(at)
    }

    fn place(&mut self) -> Option<(u64, usize)> {
        let nth = self.random.below(self.free.len().max(1) as u64) as usize;
        let at = (!self.free.is_empty()).then(|| self.free.swap_remove(nth))?;
        assert!(
            self.bytes(at, ROOM).iter().all(|byte| *byte == UNTOUCHED),
            "{}: something landed after the completion",
            self.what
        );
        Some((at, [0, 64, ROOM][self.random.below(3) as usize]))
    }

    fn recv(&mut self) {
        let Some((at, room)) = self.place() else { return };
        let source = (self.random.below(2) == 0).then(|| self.some_peer());
        let ignore = if self.random.below(2) == 0 { ANY } else { Tag::new(0, u32::MAX) };
        let (tag, into) = (tag(self.random.below(3)), Some((self.addr(at), room)));
        match self.own.engine.recv(source, tag, ignore, into, at) {
            Ok(request) => assert_eq!(self.open.insert(request, (at, room)), None),
            Err(OpError::PeerFailed(_) | OpError::Again) => self.free.push(at),
            Err(error) => panic!("{}: {error:?}", self.what),
        }
    }

    fn claim(&mut self) {
        if let Ok(Some(message)) = self.own.engine.mprobe(None, tag(0), ANY) {
            self.claimed.push(message);
        }
    }

    fn receive_claimed(&mut self) {
        if self.claimed.is_empty() {
            return;
        }
        let message =
            self.claimed.swap_remove(self.random.below(self.claimed.len() as u64) as usize);
        let there = self.peers.contains(&message.envelope.source);
        let Some((at, room)) = self.place() else { return self.claimed.push(message) };
        let into = Some((self.addr(at), room));
        match self.own.engine.mrecv(message, into, at) {
            Ok(request) => {
                assert!(there, "{}: from a removed peer", self.what);
                assert_eq!(self.open.insert(request, (at, room)), None);
            }
            Err(OpError::StaleToken) => {
                assert!(!there, "{}: its sender is there", self.what);
                self.free.push(at);
            }
            Err(OpError::Again) => {
                self.claimed.push(message);
                self.free.push(at);
            }
            Err(error) => panic!("{}: {error:?}", self.what),
        }
    }

    fn cancel(&mut self) {
        let nth = self.random.below(self.open.len().max(1) as u64) as usize;
        let mut requests: Vec<_> =
            self.open.iter().map(|(request, (at, _))| (*at, *request)).collect();
        requests.sort_unstable_by_key(|(at, _)| *at);
        if let Some((_, request)) = requests.get(nth) {
            self.own.engine.cancel(*request).unwrap();
        }
    }

    fn fail(&mut self) {
        let peer = self.some_peer();
        let down = Event::Down(peer.peer(), PeerError::Died);
        self.control.borrow_mut().inject.push_back(down);
        if self.random.below(2) == 0 {
            self.own.engine.progress();
        }
    }

    fn replace(&mut self) {
        let nth = self.random.below(PEERS as u64) as usize;
        self.own.engine.remove_peer(self.peers[nth]).unwrap();
        // Messages to the removed peer must not reach the next peer in its slot.
        self.control.borrow_mut().inject.clear();
        let peer = self.own.engine.reserve_peer().unwrap();
        self.own.engine.connect_peer(peer, 3).unwrap();
        self.peers[nth] = peer;
    }

    fn take(&mut self) {
        while self.own.engine.next_completion().is_some() {}
        while let Some(status) = self.own.engine.next_recv() {
            self.ended(&status);
        }
    }

    fn ended(&mut self, status: &Status) {
        let what = format!("{}: {status:?}", self.what);
        let (at, room) =
            self.open.remove(&status.request).unwrap_or_else(|| panic!("{what}: twice"));
        assert_eq!(status.word, at, "{what}");
        match (status.outcome, status.envelope) {
            (Received::Ok | Received::Truncated, Some(message)) => {
                let want = (message.len as usize).min(room);
                assert_eq!(status.outcome == Received::Ok, want == message.len as usize, "{what}");
                assert_eq!(status.delivered, want as u64, "{what}");
                assert!(self.bytes(at, want) == pattern(message.tag.hi.into(), want), "{what}");
            }
            (Received::Cancelled, None) | (Received::Failed(_), _) => {
                assert_eq!(status.delivered, 0, "{what}")
            }
            _ => panic!("{what}"),
        }
        match in_device(at) {
            false => write(&self.own.engine, self.own.into.at(at), &[UNTOUCHED; ROOM]),
            true => poke(&self.device.1, at as usize, &[UNTOUCHED; ROOM]),
        }
        self.free.push(at);
    }

    /// Replaces every peer, then checks that no receive is open and that all slots, blocks and
    /// credits are free.
    fn finish(&mut self) {
        for _ in 0..PEERS {
            let peer = self.peers.remove(0);
            self.own.engine.remove_peer(peer).unwrap();
            let peer = self.own.engine.reserve_peer().unwrap();
            self.own.engine.connect_peer(peer, 3).unwrap();
            self.peers.push(peer);
        }
        self.control.borrow_mut().inject.clear();
        for request in self.open.keys() {
            self.own.engine.cancel(*request).unwrap();
        }
        passes(&mut self.own.engine, 300);
        self.take();
        assert!(self.open.is_empty(), "{}: {} receives never complete", self.what, self.open.len());
        for message in std::mem::take(&mut self.claimed) {
            assert_eq!(
                self.own.engine.mrecv(message, None, 0),
                Err(OpError::StaleToken),
                "{}",
                self.what
            );
        }
        // Uses all blocks of the senders, except the block that is reserved for devices.
        let (peer, bytes) = (self.peers[0], pattern(0, 64));
        for n in 0..OUTGOING - 1 {
            let sent =
                self.own.engine.send_sync(CX, peer, tag(n), Payload::Bytes(&bytes), Notice::Silent);
            assert!(sent.is_ok(), "{}: no block for slice {n}", self.what);
        }
        for n in 0..OUTGOING - 1 {
            let into = Some((self.own.into.at(0), 64));
            let request = self.own.engine.recv(Some(peer), tag(n), EXACT, into, n).unwrap();
            check(&self.own.finish(request), Received::Ok, n, 64, 64);
        }
        // Each stream has its own credits and header room. The first stream also gets all of the
        // shared room.
        let MatchConfig { credits, headers, shared_credits, shared_headers, .. } = self.matching;
        let most = |nth: usize| match nth {
            0 => u64::from(grown(credits, shared_credits) + grown(headers, shared_headers)),
            _ => u64::from(credits + headers),
        };
        for (nth, &peer) in self.peers.iter().enumerate() {
            for n in 0..most(nth) {
                let payload = Payload::Region(self.own.out.at(n * 128), 120);
                let issued = (0..2000).find_map(|_| {
                    self.own.engine.progress();
                    self.own.engine.send(CX, peer, tag(n), payload, Notice::Silent).ok()
                });
                assert!(issued.is_some(), "{}: no room for message {n}", self.what);
            }
        }
        passes(&mut self.own.engine, 300);
        for (nth, &peer) in self.peers.iter().enumerate() {
            for n in (0..most(nth)).rev() {
                let into = Some((self.own.into.at(0), 128));
                let request = self.own.engine.recv(Some(peer), tag(n), EXACT, into, n).unwrap();
                check(&self.own.finish(request), Received::Ok, n, 120, 120);
                assert!(
                    self.own.bytes(0, 120) == pattern(n * 128, 120),
                    "{}: message {n}",
                    self.what
                );
            }
            assert_eq!(self.own.engine.peer_error(peer), Ok(None), "{}", self.what);
        }
    }
}

#[test]
fn peers_that_come_and_go_during_traffic_leave_nothing_behind() {
    for seed in seeds(if cfg!(debug_assertions) { 60 } else { 2000 }) {
        let mut churn = Churn::new(seed);
        let rare = [20, 100, 400][churn.random.below(3) as usize];
        for _ in 0..1500 {
            match churn.random.below(12) {
                0..4 => churn.send(),
                4..8 => churn.recv(),
                8 => churn.claim(),
                9 => churn.receive_claimed(),
                10 => churn.take(),
                _ if churn.random.below(4) == 0 => churn.cancel(),
                _ => {}
            }
            match churn.random.below(2 * rare) {
                0 => churn.fail(),
                1 => churn.replace(),
                _ => {}
            }
            let turns = churn.random.below(3) as u32;
            passes(&mut churn.own.engine, turns);
        }
        churn.finish();
    }
}
