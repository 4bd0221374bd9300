//! A peer is not trusted when a rail returns. The engine checks the peer's messages about a rail
//! against the rail's epoch, and does not attach an invalid address.

use fishplate_core::engine::Config;
use fishplate_core::error::{PeerError, Violation};
use fishplate_core::mem::RailId;
use fishplate_core::rail::loopback::Loopback;

use super::support::tap::{Event, Shared, Tap, shared};
use super::support::*;

const OFFER: u8 = 0;
const ATTACHED: u8 = 1;
const PROVEN: u8 = 2;
const PROBE: u8 = 3;

/// An engine with three rails. It is its own peer over two of them.
struct Bench {
    control: Shared,
    own: Own<Tap<Loopback<64>>, 3>,
}

impl Bench {
    fn new(keeps: bool) -> Bench {
        let control = shared();
        let rails = std::array::from_fn(|rail| Tap::new(Loopback::new(), rail, &control));
        let mut engine = engine(Config::DEFAULT, rails);
        if keeps {
            engine.attach_failover(failover(&Config::DEFAULT, 4)).unwrap();
        }
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 0b11).unwrap();
        let source = engine.register(region(64)).unwrap();
        let target = engine.register(region(64)).unwrap();
        let remote = import(&mut engine, peer, target);
        Bench { control, own: Own { engine, peer, waiter: waiter(), source, target, remote } }
    }

    /// Returns a bench with rail 1 fenced at both ends.
    fn fenced() -> Bench {
        let mut bench = Bench::new(true);
        bench.own.engine.disable_rail(bench.own.peer, RailId(1)).unwrap();
        passes(&mut bench.own.engine, 200);
        assert_eq!(bench.own.engine.stats().rails_returned, 0);
        bench
    }

    fn hear(&mut self, bytes: Vec<u8>) {
        self.control.borrow_mut().inject.push_back(Event::Message(self.own.peer.peer(), bytes));
        passes(&mut self.own.engine, 3);
    }

    fn error(&self) -> Option<PeerError> {
        self.own.engine.peer_error(self.own.peer).unwrap()
    }

    fn is_used(&self) -> bool {
        self.own.engine.rail_error(self.own.peer, RailId(1)) == Ok(None)
    }
}

fn rejoin(rail: u8, stage: u8, epoch: u16, serial: u16, address: &[u8]) -> Vec<u8> {
    let mut bytes = vec![11, rail, stage, 1, 0, 0, 0, 0];
    bytes.extend(epoch.to_le_bytes());
    bytes.extend(serial.to_le_bytes());
    bytes.extend([address.len() as u8, 0, 0, 0]);
    bytes.extend(address);
    bytes.resize(128, 0);
    bytes
}

/// Returns a `Told` of the peer: it has fenced `rails`, and asks us to fence `failed`, in this
/// epoch.
fn told(rails: u16, failed: u16, epoch: u16) -> Vec<u8> {
    let mut bytes = vec![9, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    bytes.extend(0u64.to_le_bytes());
    [rails, 0, failed, 0].iter().for_each(|mask| bytes.extend(mask.to_le_bytes()));
    (0..16).for_each(|_| bytes.extend(epoch.to_le_bytes()));
    bytes.resize(128, 0);
    bytes
}

/// Returns the peer's request to leave a rail.
fn leave(rail: u8, over: u8, epoch: u16) -> Vec<u8> {
    let mut bytes = vec![12, rail, over, 0, 0, 0, 0, 0];
    bytes.extend(epoch.to_le_bytes());
    bytes.extend([0; 6]);
    bytes.extend(u64::MAX.to_le_bytes());
    bytes
}

#[test]
fn what_cannot_be_said_of_a_rail_fails_the_peer() {
    let cases = [
        ("a rail that does not lead there", rejoin(2, OFFER, 1, 1, &[]), Violation::Kind),
        ("the next epoch of a rail in use", rejoin(1, OFFER, 1, 1, &[]), Violation::Sequence),
        ("an epoch far ahead", rejoin(1, ATTACHED, 9, 1, &[]), Violation::Sequence),
        ("a probe of an epoch to come", rejoin(1, PROBE, 1, 0, &[]), Violation::Sequence),
        ("an address that is too long", rejoin(1, OFFER, 0, 1, &[1; 113]), Violation::Length),
        ("a stage that does not exist", rejoin(1, 4, 0, 1, &[]), Violation::Kind),
        ("an epoch that has not begun, of a failure", told(0, 0b10, 1), Violation::Sequence),
        ("an epoch that has not begun, of a fence", told(0b10, 0, 1), Violation::Sequence),
        ("an epoch that has not begun, of a rail to leave", leave(1, 0, 1), Violation::Sequence),
        ("a rail to leave that does not lead there", leave(2, 0, 0), Violation::Kind),
        ("a request over a rail that does not lead there", leave(1, 2, 0), Violation::Kind),
    ];
    for (what, bytes, why) in cases {
        let mut bench = Bench::new(true);
        bench.hear(bytes);
        assert_eq!(bench.error(), Some(PeerError::Protocol(why)), "{what}");
        assert_eq!(bench.own.engine.stats().rails_failed, 0, "{what}");
    }
    for bytes in [rejoin(1, OFFER, 1, 1, &[]), told(0b10, 0, 0), leave(1, 0, 0)] {
        let mut bench = Bench::new(false);
        bench.hear(bytes);
        assert_eq!(bench.error(), Some(PeerError::Protocol(Violation::Kind)), "without failover");
    }
}

#[test]
fn what_belongs_to_an_earlier_epoch_is_dropped_and_counted() {
    for bytes in [
        rejoin(1, PROVEN, u16::MAX, 1, &[]),
        rejoin(1, OFFER, 0x8001, 1, &[]),
        told(0b10, 0, u16::MAX),
        told(0, 0b11, 0x8001),
        leave(1, 0, u16::MAX),
    ] {
        let mut bench = Bench::new(true);
        bench.hear(bytes);
        let stats = bench.own.engine.stats();
        assert_eq!((bench.error(), stats.stale, stats.rails_failed), (None, 1, 0));
        assert!(bench.is_used());
    }
}

#[test]
fn a_rail_is_not_used_on_a_peer_s_word_alone() {
    // Rail 1 is disabled here, so it stays unused whatever the peer sends.
    let mut bench = Bench::fenced();
    for (serial, stage) in (1..).zip([OFFER, ATTACHED, PROVEN, ATTACHED]) {
        bench.hear(rejoin(1, stage, 1, serial, &[]));
        passes(&mut bench.own.engine, 100);
        assert_eq!((bench.error(), bench.is_used()), (None, false));
    }
    // The rail may return, but the peer reports later stages before the return begins.
    bench.control.borrow_mut().lose(&[11]);
    bench.own.engine.enable_rail(bench.own.peer, RailId(1)).unwrap();
    for (serial, stage, address) in
        [(9, PROVEN, &[][..]), (10, OFFER, b"nowhere"), (11, ATTACHED, b"x")]
    {
        bench.hear(rejoin(1, stage, 1, serial, address));
        passes(&mut bench.own.engine, 100);
        assert_eq!((bench.error(), bench.is_used()), (None, false), "stage {stage}");
    }
    bench.own.engine.enable_rail(bench.own.peer, RailId(1)).unwrap();
    bench.hear(rejoin(1, ATTACHED, 1, 12, &[]));
    passes(&mut bench.own.engine, 100);
    bench.hear(rejoin(1, PROVEN, 1, 13, &[]));
    passes(&mut bench.own.engine, 100);
    assert!(!bench.is_used(), "no probe has come");
    // A repeated message changes nothing.
    bench.hear(rejoin(1, PROVEN, 1, 13, &[]));
    bench.hear(rejoin(1, OFFER, 1, 12, &[]));
    bench.hear(rejoin(1, PROBE, 1, 0, &[]));
    assert_eq!((bench.error(), bench.is_used()), (None, true));
    assert_eq!(bench.own.engine.stats().rails_returned, 1);
    // Only the next failure begins the next epoch.
    bench.hear(rejoin(1, OFFER, 2, 14, &[]));
    assert_eq!(bench.error(), Some(PeerError::Protocol(Violation::Sequence)));
}
