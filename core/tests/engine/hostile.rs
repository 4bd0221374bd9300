//! Peers are not trusted: an invalid message is refused with an error that names the violation,
//! quarantines its sender, and has no other effect.

use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{OpError, PeerError, Violation, WaitError};
use fishplate_core::mem::{LocalAddr, Peer};
use fishplate_core::op::{Amo, AmoOp};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::{Order, Rail};

use super::order::{add, hold, set};
use super::support::tap::{Event, Shared, Tap, shared, tap};
use super::support::*;

type Network = Loopback<64>;

const SIZE: usize = 4096;

/// Returns a message in its wire encoding: kind, context, op, width, sequence, ack, region,
/// generation, then words.
pub(super) fn message(
    head: [u8; 4],
    seq: u32,
    ack: u32,
    region: (u16, u16),
    words: &[u64],
) -> Vec<u8> {
    let mut bytes = head.to_vec();
    bytes.extend(seq.to_le_bytes());
    bytes.extend(ack.to_le_bytes());
    bytes.extend(region.0.to_le_bytes());
    bytes.extend(region.1.to_le_bytes());
    for word in words {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// An engine with two peers, which are both the engine itself. The second peer is honest.
struct Bench {
    control: Shared,
    own: Own<Tap<Network>, 1>,
    honest: fishplate_core::mem::PeerId,
    through: fishplate_core::mem::RemoteId,
    canary: LocalAddr,
}

impl Bench {
    fn new(first_sequence: u64) -> Bench {
        let control = shared();
        let config = Config { window: 8, contexts: 2, first_sequence, ..Config::DEFAULT };
        let mut own = own(config, tap(Network::new(), &control), SIZE);
        // A deregistered region, for messages that name it.
        let gone = own.engine.register(region(64)).unwrap();
        own.engine.deregister(gone).unwrap();
        let honest = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(honest, 1).unwrap();
        let through = import(&mut own.engine, honest, own.target);
        let canary = own.source.at(0);
        Bench { control, own, honest, through, canary }
    }

    fn hear(&mut self, event: Event) {
        self.control.borrow_mut().inject.push_back(event);
        passes(&mut self.own.engine, 3);
    }

    fn check(&mut self, what: &str, want: Violation) {
        let why = PeerError::Protocol(want);
        let peer = self.own.peer;
        assert_eq!(self.own.engine.peer_error(peer), Ok(Some(why)), "{what}");
        let refused = self.own.engine.signal(CX, set(self.own.remote, 0, 1), Notice::Silent);
        assert_eq!(refused, Err(OpError::PeerFailed(why)), "{what}");
        let end = self.own.engine.quiet(CX, peer, &mut self.own.waiter, SOON);
        assert_eq!(end, Err(WaitError::PeerFailed(peer, why)), "{what}");
        assert!(
            read(&self.own.engine, self.canary, SIZE).iter().all(|&b| b == 0),
            "{what}: wrote elsewhere"
        );
        assert!(
            read(&self.own.engine, self.own.target.at(0), SIZE).iter().all(|&b| b == 0),
            "{what}: wrote"
        );
        assert_eq!(self.own.engine.peer_error(self.honest), Ok(None), "{what}");
        self.own.engine.signal(CX, add(self.through, 8, 1), Notice::Silent).unwrap();
        self.own.engine.quiet(CX, self.honest, &mut self.own.waiter, SOON).unwrap();
        assert_eq!(word(&self.own.engine, self.own.target.at(8)), 1, "{what}");
    }
}

#[test]
fn every_violation_is_named() {
    let size = SIZE as u64;
    // The target is region 1 of generation 0. Region 2 was deregistered, and the engine has 8
    // region slots.
    let target = (1, 0);
    let signal = |seq, region, offset| message([1, 0, 1, 8], seq, 0, region, &[offset, 7]);
    let amo = |op, width, offset| message([3, 0, op, width], 0, 0, target, &[offset, 7, 0, 0]);
    let data = |offset: u64, len: u32, region: (u16, u16), bytes: usize| {
        let tail = len as u64 | (region.0 as u64) << 32 | (region.1 as u64) << 48;
        let mut message = message([2, 0, 1, 8], 0, 0, target, &[0, 7, offset, tail]);
        message.resize(48 + bytes, 0xee);
        message
    };
    let cases: Vec<(&str, Vec<u8>, Violation)> = vec![
        ("nothing", vec![], Violation::Length),
        ("half a head", vec![1; 15], Violation::Length),
        ("a signal cut short", signal(0, target, 0)[..31].to_vec(), Violation::Length),
        ("a signal with more", [signal(0, target, 0), vec![0]].concat(), Violation::Length),
        ("an atomic cut short", amo(2, 8, 0)[..47].to_vec(), Violation::Length),
        ("less data than said", data(0, 9, target, 8), Violation::Length),
        ("more data than said", data(0, 7, target, 8), Violation::Length),
        ("endless data", data(0, u32::MAX, target, 8), Violation::Length),
        ("kind 0", message([0, 0, 1, 8], 0, 0, target, &[0, 7]), Violation::Kind),
        ("kind 8", message([8, 0, 1, 8], 0, 0, target, &[0, 7]), Violation::Kind),
        ("signal op 0", message([1, 0, 0, 8], 0, 0, target, &[0, 7]), Violation::Kind),
        ("signal op 3", message([1, 0, 3, 8], 0, 0, target, &[0, 7]), Violation::Kind),
        ("ack op 2", message([5, 0, 2, 0], 0, 0, (0, 0), &[]), Violation::Kind),
        ("atomic op 0", amo(0, 8, 0), Violation::Kind),
        ("atomic op 10", amo(10, 8, 0), Violation::Kind),
        ("width 3", amo(2, 3, 0), Violation::Kind),
        ("width 0", amo(2, 0, 0), Violation::Kind),
        ("width 16", amo(2, 16, 0), Violation::Kind),
        ("context 2 of 2", message([1, 2, 1, 8], 0, 0, target, &[0, 7]), Violation::Context),
        ("context 255", message([5, 255, 0, 0], 0, 0, (0, 0), &[]), Violation::Context),
        ("region that was given back", signal(0, (2, 0), 0), Violation::Region),
        ("its next life", signal(0, (2, 1), 0), Violation::Region),
        ("region out of the table", signal(0, (8, 0), 0), Violation::Region),
        ("region 65535", signal(0, (65535, 0), 0), Violation::Region),
        ("another generation", signal(0, (1, 1), 0), Violation::Region),
        ("behind the end", signal(0, target, size), Violation::Bounds),
        ("over the end", signal(0, target, size - 4), Violation::Bounds),
        ("far away", signal(0, target, u64::MAX - 7), Violation::Bounds),
        ("misaligned", signal(0, target, 4), Violation::Bounds),
        ("a misaligned atomic", amo(2, 4, 2), Violation::Bounds),
        ("an atomic over the end", amo(2, 8, size), Violation::Bounds),
        ("data over the end", data(size - 7, 8, target, 8), Violation::Bounds),
        ("data far away", data(u64::MAX, 8, target, 8), Violation::Bounds),
        ("data in no region", data(0, 8, (7, 0), 8), Violation::Region),
        ("beyond the window", signal(8, target, 0), Violation::Sequence),
        ("far beyond the window", signal((1 << 19) - 1, target, 0), Violation::Sequence),
        ("another epoch", signal(1 << 20, target, 0), Violation::Sequence),
        ("an ack of nothing", message([5, 0, 0, 0], 0, 1, (0, 0), &[]), Violation::Ack),
        ("an ack far ahead", message([5, 0, 0, 0], 0, (1 << 19) - 1, (0, 0), &[]), Violation::Ack),
        (
            "an ack of more than 20 bits",
            message([5, 0, 0, 0], 0, 1 << 20, (0, 0), &[]),
            Violation::Ack,
        ),
        (
            "asked for what cannot be",
            message([5, 0, 1, 0], 0, 0, (0, 0), &[9]),
            Violation::Sequence,
        ),
        ("asked for nothing", message([5, 0, 1, 0], 0, 0, (0, 0), &[]), Violation::Length),
        (
            "a word of another context",
            message([1, 1, 1, 8], 0, 0, target, &[0, 7]),
            Violation::Sequence,
        ),
        ("a hello", message([7, 0, 0, 0], 1, 0, (2, 0), &[]), Violation::Kind),
        (
            "a reply to nothing",
            message([4, 0, 0, 0], 0, 0, (0, 0), &[(1 << 32), 7]),
            Violation::Reply,
        ),
        ("a reply to token 0", message([4, 0, 0, 0], 0, 0, (0, 0), &[0, 7]), Violation::Reply),
        (
            "a reply to slot 4 billion",
            message([4, 0, 0, 0], 0, 0, (0, 0), &[u64::MAX, 7]),
            Violation::Reply,
        ),
    ];
    for (what, bytes, want) in cases {
        let mut bench = Bench::new(0);
        let from = bench.own.peer.peer();
        bench.hear(Event::Message(from, bytes));
        bench.check(what, want);
    }
    for (what, data, want) in [
        ("an epoch", 0x0010_0000u32, Violation::Sequence),
        ("the last epoch", 0x00f0_0000, Violation::Sequence),
        ("context 2 of 2", 0x0200_0000, Violation::Context),
        ("beyond the window", 8, Violation::Sequence),
        ("half the space away", (1 << 19) - 1, Violation::Sequence),
    ] {
        let mut bench = Bench::new(0);
        let from = bench.own.peer.peer();
        bench.hear(Event::Landed(from, data));
        bench.check(what, want);
    }
}

#[test]
fn a_reply_is_accepted_once_from_its_peer_for_a_fetch() {
    let inc = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    let reply = |token: u64| message([4, 0, 0, 0], 0, 0, (0, 0), &[token, 7]);
    // A token consists of generation and slot. The first operation has slot 0 of generation 1.
    for (what, signal_first) in [("to a signal", true), ("of another peer", false)] {
        let mut bench = Bench::new(0);
        let held =
            hold(&bench.control, |event| matches!(event, Event::Message(..) | Event::Landed(..)));
        if signal_first {
            bench.own.engine.signal(CX, set(bench.own.remote, 0, 0), Notice::Report(1)).unwrap();
        } else {
            bench
                .own
                .engine
                .fetch(CX, bench.through.at(0), Amo { op: AmoOp::Fetch, ..inc }, 1)
                .unwrap();
        }
        bench.own.engine.progress();
        let from = bench.own.peer.peer();
        bench.hear(Event::Message(from, reply(1 << 32)));
        bench.control.borrow_mut().edit = None;
        bench.control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
        bench.check(what, Violation::Reply);
    }
    let mut bench = Bench::new(0);
    bench.control.borrow_mut().edit = Some(Box::new(|_, event| match &event {
        Event::Message(_, bytes) if bytes[0] == 4 => vec![event.clone(), event],
        _ => vec![event],
    }));
    bench.own.engine.fetch(CX, bench.own.remote.at(0), Amo { op: AmoOp::Fetch, ..inc }, 1).unwrap();
    passes(&mut bench.own.engine, 10);
    bench.control.borrow_mut().edit = None;
    bench.check("twice", Violation::Reply);
}

#[test]
fn numbers_seen_before_change_nothing() {
    for first_sequence in STARTS {
        let control = shared();
        let config = Config { window: 8, first_sequence, ..Config::DEFAULT };
        let mut own = own(config, tap(Network::new(), &control), SIZE);
        let mut old: Vec<Event> = vec![];
        control.borrow_mut().edit = Some(Box::new(move |_, event| {
            let numbered = match &event {
                Event::Landed(..) => true,
                Event::Message(_, bytes) => bytes[0] <= 3 && bytes[0] != 2,
                _ => false,
            };
            let mut events = vec![event.clone()];
            if numbered {
                old.push(event.clone());
                events.extend(old.iter().rev().take(6).cloned());
            }
            events
        }));
        for n in 0..100 {
            own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
            own.engine.signal(CX, add(own.remote, 0, 1), Notice::Silent).unwrap();
            let amo = Amo { op: AmoOp::Add, width: 8, operand: 2, compare: 0 };
            own.engine.amo(CX, own.remote.at(8), amo, Notice::Silent).unwrap();
            if n % 4 == 0 {
                own.engine.quiet(CX, own.peer, &mut own.waiter, u64::MAX).unwrap();
            }
        }
        own.engine.quiet(CX, own.peer, &mut own.waiter, u64::MAX).unwrap();
        assert_eq!(
            (word(&own.engine, own.target.at(0)), word(&own.engine, own.target.at(8))),
            (100, 200)
        );
        assert!(own.engine.stats().duplicates > 500);
    }
}

#[test]
fn a_late_request_for_an_acknowledgement_is_harmless() {
    let control = shared();
    let config = Config { window: 256, ..Config::DEFAULT };
    let mut own = own(config, tap(Network::new(), &control), SIZE);
    let held = hold(
        &control,
        |event| matches!(event, Event::Message(_, bytes) if bytes[..3] == [5, 0, 1]),
    );
    own.engine.signal(CX, add(own.remote, 0, 1), Notice::Silent).unwrap();
    assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
    passes(&mut own.engine, 2);
    assert_eq!(held.borrow().len(), 1);
    control.borrow_mut().edit = None;
    // Uses more sequence numbers than half the range that a completion word can express.
    for n in 1..600_000u64 {
        own.engine.put(CX, own.source.at(0), 8, own.remote.at(64), Notice::Silent).unwrap();
        if n % 128 == 0 {
            own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        }
    }
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    control.borrow_mut().inject.extend(held.borrow_mut().drain(..));
    passes(&mut own.engine, 3);
    assert_eq!(own.engine.peer_error(own.peer), Ok(None));
    own.engine.signal(CX, add(own.remote, 0, 1), Notice::Silent).unwrap();
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(word(&own.engine, own.target.at(0)), 2);
}

#[test]
fn reports_about_unknown_peers_are_ignored() {
    let mut bench = Bench::new(0);
    for peer in [2, 3, 4, 100, 65535] {
        bench.hear(Event::Landed(Peer(peer), 0x0010_0000));
        bench.hear(Event::Landed(Peer(peer), 0));
        bench.hear(Event::Message(Peer(peer), vec![9; 16]));
        bench.hear(Event::Message(Peer(peer), vec![]));
        bench.hear(Event::Down(Peer(peer), PeerError::Died));
    }
    for peer in [bench.own.peer, bench.honest] {
        assert_eq!(bench.own.engine.peer_error(peer), Ok(None));
    }
    let fresh = bench.own.engine.reserve_peer().unwrap();
    bench.own.engine.connect_peer(fresh, 1).unwrap();
}

#[test]
fn messages_of_a_quarantined_peer_are_ignored() {
    let mut bench = Bench::new(0);
    let from = bench.own.peer.peer();
    bench.hear(Event::Message(from, vec![]));
    bench.hear(Event::Message(from, message([1, 0, 1, 8], 0, 0, (1, 0), &[0, 7])));
    bench.hear(Event::Landed(from, 0));
    bench.hear(Event::Landed(from, 0x0010_0000));
    bench.check("afterwards", Violation::Length);
}

#[test]
fn a_waiting_signal_does_not_write_a_deregistered_region() {
    let mut bench = Bench::new(0);
    let target = bench.own.target;
    let from = bench.own.peer.peer();
    // The signal with number 1 waits for number 0.
    bench.hear(Event::Message(from, message([1, 0, 1, 8], 1, 0, (1, 0), &[0, 7])));
    let memory = bench.own.engine.local_ptr(target.at(0), SIZE).unwrap();
    bench.own.engine.deregister(target).unwrap();
    bench.hear(Event::Landed(from, 0));
    assert_eq!(
        bench.own.engine.peer_error(bench.own.peer),
        Ok(Some(PeerError::Protocol(Violation::Region)))
    );
    // SAFETY: the memory was registered until now and is never freed.
    assert_eq!(unsafe { memory.cast::<u64>().read() }, 0);
}

#[test]
fn random_messages_are_refused() {
    for seed in seeds(3000) {
        let mut random = Random(seed);
        let control = shared();
        let config =
            Config { window: 8, first_sequence: STARTS[seed as usize % 4], ..Config::DEFAULT };
        let mut engine = engine(config, tap(Loopback::<4>::new(), &control));
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 1).unwrap();
        for _ in 0..20 {
            let event = match random.below(3) {
                0 => Event::Landed(peer.peer(), random.next() as u32),
                _ => {
                    let len = [0, 16, 32, 48, 52, 100][random.below(6) as usize];
                    let mut bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
                    if let Some(kind) = bytes.first_mut() {
                        *kind %= 8;
                    }
                    Event::Message(peer.peer(), bytes)
                }
            };
            control.borrow_mut().inject.push_back(event);
            engine.progress();
        }
        assert!(
            engine.rail(fishplate_core::mem::RailId(0)).unwrap().caps().order >= Order::Reports
        );
        let why = engine.peer_error(peer).unwrap();
        assert!(matches!(why, Some(PeerError::Protocol(_))), "seed {seed}: {why:?}");
    }
}

#[test]
fn numbers_repeated_while_they_wait_change_nothing() {
    for batch in [1, 2, 32] {
        for first_sequence in STARTS {
            let control = shared();
            let config = Config { window: 8, batch, first_sequence, ..Config::DEFAULT };
            let mut own = own(config, tap(Network::new(), &control), SIZE);
            let from = own.peer.peer();
            // The arrivals are forged and the engine is its own peer, so it must not answer them.
            control.borrow_mut().refuse =
                Some(Box::new(|_| Some(fishplate_core::error::PostError::Again)));
            let signal = |n: u32| {
                let seq = sequence(first_sequence.wrapping_add(n as u64), 8);
                Event::Message(
                    from,
                    message([1, 0, 2, 8], seq, first_sequence as u32, (1, 0), &[0, 1]),
                )
            };
            let all: Vec<Event> = (1..6).map(signal).collect();
            // Each signal arrives three times while number 0 is missing, and again in every pass
            // that applies signals.
            for _ in 0..3 {
                control.borrow_mut().inject.extend(all.iter().cloned());
                passes(&mut own.engine, 5);
            }
            passes(&mut own.engine, 20);
            assert_eq!(
                (word(&own.engine, own.target.at(0)), own.engine.stats().duplicates),
                (0, 10)
            );
            control.borrow_mut().inject.push_back(Event::Landed(from, sequence(first_sequence, 8)));
            own.engine.progress();
            for _ in 0..20 {
                control.borrow_mut().inject.extend(all.iter().cloned());
                passes(&mut own.engine, 1);
            }
            passes(&mut own.engine, 200);
            assert_eq!(
                word(&own.engine, own.target.at(0)),
                5,
                "from {first_sequence:#x}, batch {batch}"
            );
            // All slots of the window are free again.
            for n in 6..40 {
                control.borrow_mut().inject.push_back(signal(n));
                passes(&mut own.engine, 3);
                assert_eq!(
                    word(&own.engine, own.target.at(0)),
                    n as u64,
                    "from {first_sequence:#x}, batch {batch}"
                );
            }
        }
    }
}

#[test]
fn data_of_a_repeated_message_is_not_copied_again() {
    let control = shared();
    let mut own = own(Config { window: 8, ..Config::DEFAULT }, tap(Network::new(), &control), SIZE);
    let from = own.peer.peer();
    control.borrow_mut().refuse = Some(Box::new(|_| Some(fishplate_core::error::PostError::Again)));
    // A put-signal with eight bytes of data, and a write sent as a message.
    let mut with_signal = message([2, 0, 1, 8], 0, 0, (1, 0), &[0, 7, 64, 8 | 1 << 32]);
    with_signal.extend([0xaa; 8]);
    let mut alone = message([6, 0, 0, 0], 1, 0, (1, 0), &[72]);
    alone.extend([0xbb; 8]);
    for (bytes, at, byte) in [(with_signal, 64, 0xaa), (alone, 72, 0xbb)] {
        control.borrow_mut().inject.push_back(Event::Message(from, bytes.clone()));
        passes(&mut own.engine, 3);
        assert_eq!(read(&own.engine, own.target.at(at), 8), [byte; 8]);
        write(&own.engine, own.target.at(at), &[0x11; 8]);
        control.borrow_mut().inject.push_back(Event::Message(from, bytes));
        passes(&mut own.engine, 3);
        assert_eq!(read(&own.engine, own.target.at(at), 8), [0x11; 8], "copied again");
    }
    assert_eq!((own.engine.peer_error(own.peer), own.engine.stats().duplicates), (Ok(None), 2));
}
