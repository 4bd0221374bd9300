//! Helpers of the unit tests: links between two ends in one process, a recording sink, and seeded
//! random numbers.

use std::time::{Duration, Instant};

use fishplate_core::error::{CompleteError, PeerError};
use fishplate_core::mem::{Peer, Untrusted};
use fishplate_core::rail::Sink;
use fishplate_core::sync::host::SpinHost;
use fishplate_shm::{Link, Role, ShmConfig, ShmRail, socket_pair};

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

/// Creates the two ends of a link.
pub(crate) fn met(config: ShmConfig) -> [Link; 2] {
    let rail = || ShmRail::new(SpinHost::new(1), config.clone()).unwrap();
    let [ours, theirs] = [rail().profile(), rail().profile()];
    let (x, y) = socket_pair().unwrap();
    let first = std::thread::spawn(move || Link::over(y, Role::First, &theirs, soon()).unwrap());
    let second = Link::over(x, Role::Second, &ours, soon()).unwrap();
    [second, first.join().unwrap()]
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
