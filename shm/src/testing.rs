//! Helpers of the unit tests: two ends in one process, a recording sink, seeded random numbers.

use std::time::{Duration, Instant};

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::{Rail, Sink};
use fishplate_core::sync::host::{Host, SpinHost};

use crate::{Link, Role, ShmConfig, ShmRail, socket_pair};

/// The peer number that each end of a [`couple`] gives the other end.
pub(crate) const PEER: Peer = Peer(3);

/// Returns a deadline for events that must happen.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// The reports of a rail.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) messages: Vec<Vec<u8>>,
    pub(crate) landed: Vec<u32>,
    pub(crate) done: Vec<(u64, Result<(), CompleteError>)>,
    pub(crate) down: Vec<(Peer, PeerError)>,
    pub(crate) events: u32,
}

impl Sink for Seen {
    fn done(&mut self, cx: u64, result: Result<(), CompleteError>) {
        self.events += 1;
        self.done.push((cx, result));
    }

    fn landed(&mut self, _: Peer, data: u32) {
        self.events += 1;
        self.landed.push(data);
    }

    fn message(&mut self, _: Peer, bytes: Untrusted<'_>) {
        self.events += 1;
        let mut copy = vec![0; bytes.len()];
        bytes.copy_out(&mut copy);
        self.messages.push(copy);
    }

    fn peer_down(&mut self, peer: Peer, why: PeerError) {
        self.events += 1;
        self.down.push((peer, why));
    }
}

/// A rail over [`SpinHost`].
pub(crate) type TestRail = ShmRail<SpinHost>;

/// Creates two rails, each with a link to the other that is not attached yet.
pub(crate) fn met(config: ShmConfig) -> [(TestRail, Link); 2] {
    meet(config, || SpinHost::new(1))
}

/// Creates two rails like [`met`], over the hosts that `host` returns.
pub(crate) fn meet<H: Host>(config: ShmConfig, host: impl Fn() -> H) -> [(ShmRail<H>, Link); 2] {
    let rail = || ShmRail::new(host(), config.clone()).unwrap();
    let (a, b) = (rail(), rail());
    let (x, y) = socket_pair().unwrap();
    let theirs = b.profile();
    let first = std::thread::spawn(move || Link::over(y, Role::First, &theirs, soon()).unwrap());
    let second = Link::over(x, Role::Second, &a.profile(), soon()).unwrap();
    [(a, second), (b, first.join().unwrap())]
}

/// Creates two rails attached to each other, with their lanes at position `start`.
pub(crate) fn couple_at(config: ShmConfig, start: u64) -> [TestRail; 2] {
    met(config).map(|(mut rail, link)| {
        rail.attach_at(PEER, link, start).unwrap();
        rail
    })
}

/// Creates two rails attached to each other.
pub(crate) fn couple(config: ShmConfig) -> [TestRail; 2] {
    couple_at(config, 0)
}

/// Polls both rails until neither has anything to report.
pub(crate) fn settle(rails: &mut [TestRail; 2], seen: &mut [Seen; 2]) {
    let mut quiet = 0;
    while quiet < 3 {
        let [a, b] = rails;
        let events = a.poll(32, &mut seen[0]) + b.poll(32, &mut seen[1]);
        quiet = if events == 0 { quiet + 1 } else { 0 };
    }
}

/// A random generator (xorshift). Equal seeds give equal numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}
