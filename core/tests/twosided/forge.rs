//! Messages in their wire encoding, and an engine that receives forged ones beside an honest peer.

use fishplate_core::engine::protocol::{MatchConfig, Payload, Received};
use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{OpError, PeerError, Violation};
use fishplate_core::mem::PeerId;
use fishplate_core::rail::loopback::Loopback;

use super::rig::*;
use super::support::tap::{Event, Shared, Tap, shared, tap};
use super::support::*;

pub type Network = Loopback<64>;

/// Returns a message in its wire encoding: kind, op, sequence number, and the bytes from offset 12
/// on. It acknowledges nothing.
pub fn forged(kind: u8, op: u8, seq: u32, rest: &[&[u8]]) -> Vec<u8> {
    [&[kind, 0, op, 0][..], &seq.to_le_bytes(), &[0; 4], &rest.concat()].concat()
}

/// Returns a message of the two-sided protocol: after the head come the returned credits and words.
pub fn message(kind: u8, op: u8, seq: u32, freed: u32, words: &[u64]) -> Vec<u8> {
    let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    forged(kind, op, seq, &[&freed.to_le_bytes(), &words])
}

pub fn tagged(seq: u32, tag: u64, payload: usize) -> Vec<u8> {
    let mut bytes = message(16, 0, seq, 0, &[tag, 0]);
    bytes.resize(32 + payload, 0xee);
    bytes
}

/// Returns a request to send. `last` contains the region, its generation, and a bitmask of rails. A
/// key follows for each rail in the mask.
pub fn request(
    seq: u32,
    token: u64,
    len: u64,
    offset: u64,
    size: u64,
    last: u64,
    keys: &[u64],
) -> Vec<u8> {
    let mut bytes = message(18, 0, seq, 0, &[1, 0, token, len, offset, size, last]);
    for key in keys {
        bytes.extend(key.to_le_bytes());
    }
    bytes
}

/// An engine with two peers, which are both the engine itself. The second peer is honest.
pub struct Bench {
    pub control: Shared,
    pub own: Own1<Tap<Network>, 1>,
    pub honest: PeerId,
}

impl Bench {
    pub fn new() -> Bench {
        Bench::with(SMALL)
    }

    pub fn with(matching: MatchConfig) -> Bench {
        let control = shared();
        let config = Config { window: 8, ..Config::DEFAULT };
        let mut own = own1(config, matching, tap(Network::new(), &control));
        let honest = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(honest, 1).unwrap();
        // The bad peer's messages are forged, so the engine must not receive its own answers to
        // them.
        let me = own.me.peer();
        control.borrow_mut().edit = Some(Box::new(move |_, event| match event {
            Event::Message(from, mut bytes) if from == me && bytes.len() >= 12 => {
                let made_up = bytes[0] == 5 || bytes[0] >= 20;
                bytes[8] = if made_up { 0 } else { bytes[8] };
                vec![Event::Message(from, bytes)]
            }
            event => vec![event],
        }));
        Bench { control, own, honest }
    }

    pub fn hear(&mut self, bytes: Vec<u8>) {
        let from = self.own.me.peer();
        self.control.borrow_mut().inject.push_back(Event::Message(from, bytes));
        passes(&mut self.own.engine, 3);
    }

    pub fn check(&mut self, what: &str, want: Violation) {
        let why = PeerError::Protocol(want);
        let (me, honest) = (self.own.me, self.honest);
        assert_eq!(self.own.engine.peer_error(me), Ok(Some(why)), "{what}");
        assert_eq!(self.own.engine.peer_error(honest), Ok(None), "{what}");
        let refused = self.own.send(1, &[1]);
        assert_eq!(refused, Err(OpError::PeerFailed(why)), "{what}");
        assert!(self.own.bytes(0, SIZE).iter().all(|&b| b == 0), "{what}: wrote");
        // The honest peer still works. Sends by each protocol.
        for (n, len) in [(1, 8), (2, 5000)] {
            let into = Some((self.own.into.at(0), len));
            let receive = self.own.engine.recv(Some(honest), tag(n), EXACT, into, n).unwrap();
            let payload = Payload::Region(self.own.out.at(0), len);
            self.own.engine.send(CX, honest, tag(n), payload, Notice::Silent).unwrap();
            check(&self.own.finish(receive), Received::Ok, n, len as u64, len as u64);
        }
        self.own.engine.remove_peer(me).unwrap();
        passes(&mut self.own.engine, 5);
    }

    /// Returns the violation for which the engine has failed the bad peer.
    pub fn violation(&self) -> Option<Violation> {
        self.own.engine.peer_error(self.own.me).unwrap().map(|why| match why {
            PeerError::Protocol(violation) => violation,
            why => panic!("{why:?}"),
        })
    }
}
