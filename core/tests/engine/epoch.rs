//! Tests that late traffic of one attachment of a peer has no effect in a later attachment.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

use fishplate_core::engine::{Config, Issued, Notice, Signal};
use fishplate_core::error::{AttachError, OpError, PeerError, Stuck, Violation, WaitError};
use fishplate_core::mem::{Peer, RailId, RemoteAddr};
use fishplate_core::op::{Amo, AmoOp, Fault, Outcome, SignalOp};
use fishplate_core::rail::Caps;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::support::tap::{Event, Shared, Tap, shared, tap};
use super::support::*;

/// Returns the settings of a simulated rail that may deliver traffic after its attachment has
/// ended.
fn dials(seed: u64) -> Dials {
    let late = Dials { late: true, ..Dials::WILD };
    match seed % 4 {
        0 => Dials { ordered: true, ..late },
        1 => Dials { max_delay: 400, ..late },
        2 => Dials { late: false, ..late },
        _ => late,
    }
}

fn lives<const RAILS: usize>(seed: u64) -> lives::Seen {
    let sim = fleet::fabric(2, RAILS as u16, 96, dials(seed), seed);
    let rails = [0, 1].map(|node| std::array::from_fn(|rail| sim.endpoint(node, rail as u16)));
    let config = Config {
        window: [1, 4, 16, 128][seed as usize % 4],
        eager: [0, 192][(seed / 4) as usize % 2],
        first_sequence: STARTS[(seed / 8) as usize % 4],
        ..Config::DEFAULT
    };
    lives::run::<_, RAILS>(seed, config, |_| (), rails, &|engine, me, peer| {
        for rail in 0..RAILS {
            let mut rail = engine.rail_mut(RailId(rail as u8)).unwrap();
            rail.attach(peer.peer(), 1 - me as u16).unwrap();
        }
    })
}

#[test]
fn traffic_before_a_reattachment_is_dropped() {
    let mut all = lives::Seen::default();
    for seed in seeds(200) {
        let seen = if seed % 3 == 0 { lives::<2>(seed) } else { lives::<1>(seed) };
        all.stale += seen.stale;
        all.renewed += seen.renewed;
        all.applied += seen.applied;
    }
    println!("{all:?}");
    assert!(all.stale > 100 && all.renewed > 20 && all.applied > 1000, "{all:?}");
}

/// Returns an engine that is its own peer. Its rail does not separate attachments.
fn meeting(config: Config, control: &Shared) -> Own<Tap<Loopback<64>>, 1> {
    control.borrow_mut().caps = Some(|caps| Caps { fresh: false, inject: 0, ..caps });
    let mut own = own(config, tap(Loopback::new(), control), 4096);
    meet(&mut own);
    own
}

fn meet(own: &mut Own<Tap<Loopback<64>>, 1>) {
    let peer = own.peer;
    pass_until(&mut own.engine, "it meets itself", |engine| engine.has_answered(peer) == Ok(true));
}

/// Removes the peer and attaches it again.
fn renew(own: &mut Own<Tap<Loopback<64>>, 1>) {
    own.engine.remove_peer(own.peer).unwrap();
    passes(&mut own.engine, 20);
    own.peer = own.engine.reserve_peer().unwrap();
    own.engine.connect_peer(own.peer, 1).unwrap();
    own.remote = import(&mut own.engine, own.peer, own.target);
    meet(own);
}

/// Records arriving writes and messages. If `holds` is true, withholds them from the engine.
fn listen(control: &Shared, holds: bool) -> Rc<RefCell<Vec<Event>>> {
    let heard = Rc::new(RefCell::new(vec![]));
    let notes = heard.clone();
    control.borrow_mut().edit = Some(Box::new(move |_, event| {
        let arrives = matches!(event, Event::Landed(..) | Event::Message(..));
        if arrives {
            notes.borrow_mut().push(event.clone());
        }
        if arrives && holds { vec![] } else { vec![event] }
    }));
    heard
}

/// Issues two of each operation that posts. Fetches and signals report their completion. A signal
/// completes when it is acknowledged.
fn one_of_each(own: &mut Own<Tap<Loopback<64>>, 1>) {
    let (e, remote, from) = (&mut own.engine, own.remote, own.source.at(0));
    let inc = Amo { op: AmoOp::Inc, width: 8, operand: 0, compare: 0 };
    for n in 0..2 {
        e.put(CX, from, 64, remote.at(1024 + 64 * n), Notice::Silent).unwrap();
        e.put_signal(CX, from, 300, remote.at(2048), signal(remote.at(0)), Notice::Silent).unwrap();
        e.put_signal(CX, from, 16, remote.at(512), signal(remote.at(8)), Notice::Silent).unwrap();
        e.signal(CX, signal(remote.at(16)), Notice::Report(100)).unwrap();
        e.amo(CX, remote.at(24), inc, Notice::Silent).unwrap();
        e.fetch(CX, remote.at(32), inc, n).unwrap();
        e.inject(CX, &[9; 100], remote.at(3072)).unwrap();
    }
}

fn signal(at: RemoteAddr) -> Signal {
    Signal { at, op: SignalOp::Add, value: 1 }
}

#[test]
fn traffic_of_an_earlier_attachment_has_no_effect() {
    for first_sequence in STARTS {
        let control = shared();
        // Both attachments use the same sequence numbers, so the engine expects exactly the numbers
        // of the old messages.
        let config = Config { window: 64, eager: 64, first_sequence, ..Config::DEFAULT };
        let mut own = meeting(config, &control);
        write(&own.engine, own.source.at(0), &[7; 4096]);
        let heard = listen(&control, false);
        one_of_each(&mut own);
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        while own.engine.next_completion().is_some() {}
        let old = std::mem::take(&mut *heard.borrow_mut());
        let kinds: BTreeSet<u8> = old
            .iter()
            .map(|event| if let Event::Message(_, bytes) = event { bytes[0] } else { 0 })
            .collect();
        assert_eq!(kinds, (0..=6).collect(), "a write and every message but a Hello");
        control.borrow_mut().edit = None;
        renew(&mut own);
        let zeroes = vec![0; 4096];
        write(&own.engine, own.target.at(0), &zeroes);
        let held = listen(&control, true);
        one_of_each(&mut own);
        assert_eq!(own.engine.is_quiet(CX, own.peer), Ok(false));
        passes(&mut own.engine, 50);
        // The rail has executed the plain writes. The engine gets no report of those.
        let before = (read(&own.engine, own.target.at(0), 4096), own.engine.stats());
        assert_eq!((before.1.stale, word(&own.engine, own.target.at(0))), (0, 0));
        for event in &old {
            control.borrow_mut().inject.push_back(event.clone());
        }
        passes(&mut own.engine, 100);
        let stats = own.engine.stats();
        assert_eq!(own.engine.peer_error(own.peer), Ok(None));
        assert_eq!(stats.stale, old.len() as u64, "from {first_sequence:#x}");
        assert_eq!((stats.arrived, stats.applied), (before.1.arrived, before.1.applied));
        assert!(
            read(&own.engine, own.target.at(0), 4096) == before.0,
            "from {first_sequence:#x}: wrote"
        );
        assert_eq!(own.engine.next_completion(), None, "an old acknowledgement or reply counted");
        control.borrow_mut().edit = None;
        let held = std::mem::take(&mut *held.borrow_mut());
        control.borrow_mut().inject.extend(held);
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        let mut ends = vec![];
        while let Some(end) = own.engine.next_completion() {
            assert_eq!(end.outcome, Outcome::Done);
            ends.push((end.tag, end.value));
        }
        ends.sort();
        assert_eq!(ends, [(0, 0), (1, 1), (100, 0), (100, 0)]);
        for at in [0, 8, 16, 24, 32] {
            assert_eq!(word(&own.engine, own.target.at(at)), 2, "word {at}");
        }
    }
}

/// Returns a Hello message in its wire encoding.
fn hello(mine: u32, yours: u32, bond: u8) -> Vec<u8> {
    let mut bytes = vec![7, 0, bond, 0];
    for word in [mine, yours, 12] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

/// Returns the fields of a Hello: mine, yours and bond.
fn said(bytes: &[u8]) -> Option<(u32, u32, u8)> {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    (bytes[0] == 7).then(|| (word(4), word(8), bytes[2]))
}

fn hellos(control: &Shared) -> Vec<(u32, u32, u8)> {
    control.borrow().posts.iter().filter_map(|post| said(&post.bytes)).collect()
}

/// Returns a connected engine and its epoch.
fn met() -> (Shared, Own<Tap<Loopback<64>>, 1>, u32) {
    let control = shared();
    let own = meeting(Config { seed: 77, ..Config::DEFAULT }, &control);
    let epoch = hellos(&control)[0].0;
    control.borrow_mut().posts.clear();
    // Drops the engine's answers to forged Hellos, which would arrive at the engine itself.
    control.borrow_mut().lose(&[7]);
    (control, own, epoch)
}

#[test]
fn hellos_without_proof_change_nothing() {
    let (control, mut own, epoch) = met();
    let mut random = Random(5);
    for n in 0..5000u32 {
        // Forges Hellos of unknown, earlier and later attachments, and Hellos with the right epoch
        // in the wrong field.
        let other = random.next() as u32 | 1;
        let bytes = match n % 4 {
            0 => hello(other, 0, 0),
            1 => hello(epoch.wrapping_sub(1 + n % 100), epoch.wrapping_sub(1), (n % 3) as u8),
            2 => hello(other, other, 1),
            _ => hello(epoch, 0, 1),
        };
        control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), bytes));
        if n % 7 == 0 {
            passes(&mut own.engine, 1);
        }
        if n % 100 == 0 {
            own.engine
                .put_signal(
                    CX,
                    own.source.at(0),
                    8,
                    own.remote.at(64),
                    signal(own.remote.at(0)),
                    Notice::Silent,
                )
                .unwrap();
        }
    }
    // A late Hello with the previous epoch of the connected peer.
    control
        .borrow_mut()
        .inject
        .push_back(Event::Message(own.peer.peer(), hello(epoch - 1, epoch, 1)));
    passes(&mut own.engine, 50);
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(own.engine.peer_error(own.peer), Ok(None));
    assert_eq!(word(&own.engine, own.target.at(0)), 50);
    let answers = hellos(&control);
    assert!(answers.len() <= 5000, "{}", answers.len());
    // The engine answers any other Hello only with a question: is the sender alive?
    assert!(
        answers
            .iter()
            .all(|&(mine, yours, bond)| mine == epoch && bond == if yours == epoch { 1 } else { 2 })
    );
}

#[test]
fn invalid_hellos_fail_their_peer() {
    let (_, _, epoch) = met();
    let mut long = hello(5, 0, 0);
    long.push(0);
    let mut other_version = hello(5, 0, 0);
    other_version[12] = 1;
    for (what, bytes, want) in [
        ("epoch 0", hello(0, epoch, 0), Violation::Kind),
        ("a bond of 3", hello(5, epoch, 3), Violation::Kind),
        ("another version", other_version, Violation::Kind),
        ("cut short", hello(5, 0, 0)[..15].to_vec(), Violation::Length),
        ("with more", long, Violation::Length),
    ] {
        let (control, mut own, _) = met();
        control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), bytes));
        passes(&mut own.engine, 5);
        let why = PeerError::Protocol(want);
        assert_eq!(own.engine.peer_error(own.peer), Ok(Some(why)), "{what}");
    }
}

#[test]
fn a_hello_over_rails_that_keep_attachments_apart_fails_its_peer() {
    for (mine, yours) in [(5, 0), (5, 5)] {
        let control = shared();
        let mut own = own(Config::DEFAULT, tap(Loopback::<64>::new(), &control), 4096);
        let message = Event::Message(own.peer.peer(), hello(mine, yours, 0));
        control.borrow_mut().inject.push_back(message);
        passes(&mut own.engine, 3);
        let why = PeerError::Protocol(Violation::Kind);
        assert_eq!(own.engine.peer_error(own.peer), Ok(Some(why)));
        assert_eq!(hellos(&control), []);
    }
}

#[test]
fn what_arrives_before_its_peer_is_connected_does_not_fail_it() {
    let control = shared();
    let mut own = meeting(Config::DEFAULT, &control);
    let early = own.engine.reserve_peer().unwrap();
    let from = early.peer();
    // The last event is a write with the epoch of an earlier attachment.
    let words = [0, 5 << 19].map(|word| Event::Landed(from, word));
    for event in [Event::Message(from, hello(5, 0, 0))].into_iter().chain(words) {
        control.borrow_mut().inject.push_back(event.clone());
        passes(&mut own.engine, 3);
        assert_eq!(own.engine.peer_error(early), Err(AttachError::UnknownPeer), "{event:?}");
    }
    own.engine.connect_peer(early, 1).unwrap();
    pass_until(&mut own.engine, "it meets itself", |engine| engine.has_answered(early) == Ok(true));
}

#[test]
fn a_reattached_peer_fails_and_operations_to_it_are_unknown() {
    let (control, mut own, epoch) = met();
    let held = listen(&control, true);
    let token = pending(own.engine.signal(CX, signal(own.remote.at(0)), Notice::Report(1)));
    passes(&mut own.engine, 3);
    assert!(!held.borrow().is_empty());
    control.borrow_mut().edit = None;
    control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), hello(epoch + 1, 0, 0)));
    passes(&mut own.engine, 3);
    assert_eq!(own.engine.peer_error(own.peer), Ok(None), "it may be old");
    assert!(hellos(&control).contains(&(epoch, epoch + 1, 2)), "asked whether it lives");
    control
        .borrow_mut()
        .inject
        .push_back(Event::Message(own.peer.peer(), hello(epoch + 1, epoch, 0)));
    passes(&mut own.engine, 3);
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Reattached)));
    let end = own.engine.test(token).unwrap().unwrap();
    assert!(matches!(end.outcome, Outcome::Unknown(Fault::Peer(PeerError::Reattached))), "{end:?}");
}

#[test]
fn operations_queue_until_the_peer_has_answered() {
    let sim = fleet::fabric(2, 1, 64, Dials::WILD, 3);
    let mut nodes = [0u16, 1].map(|me| {
        let mut end = sim.endpoint(me, 0);
        end.attach(Peer(0), 1 - me).unwrap();
        let mut engine = engine(Config::DEFAULT, [end]);
        let memory = engine.register(region(4096)).unwrap();
        let peer = engine.reserve_peer().unwrap();
        (engine, memory, peer)
    });
    let [(a, from, to), (b, target, back)] = &mut nodes;
    let mut handle = [0; 512];
    let len = b.export(*target, &mut handle).unwrap();
    a.connect_peer(*to, 1).unwrap();
    let remote = a.import(*to, &handle[..len]).unwrap();
    write(a, from.at(0), &[7; 256]);
    // The other engine has not connected yet. It receives everything after it connects.
    for n in 0..10 {
        let issued = a.put_signal(
            CX,
            from.at(0),
            256,
            remote.at(1024),
            signal(remote.at(0)),
            Notice::Silent,
        );
        assert!(matches!(issued, Ok(Issued::Pending(_))), "{n}: {issued:?}");
        a.progress();
        b.progress();
    }
    assert_eq!(a.inject(CX, &[1; 8], remote.at(64)), Err(OpError::Again));
    assert_eq!((a.has_answered(*to), a.peer_error(*to)), (Ok(false), Ok(None)));
    let mut waiter = waiter();
    let end = a.quiet(CX, *to, &mut waiter, 20_000).unwrap_err();
    let WaitError::Deadline(stuck) = end else { panic!("{end:?}") };
    assert_eq!(stuck, Stuck { peer: Some(*to), unanswered: true, ..Stuck::default() });
    assert!(stuck.to_string().contains("peer 0, which has not answered"), "{stuck}");
    assert_eq!(a.stats().posted, 0);
    b.connect_peer(*back, 1).unwrap();
    for turn in 0.. {
        a.progress();
        b.progress();
        if word(b, target.at(0)) == 10 && a.is_quiet(CX, *to) == Ok(true) {
            break;
        }
        assert!(turn < 100_000, "{:?} {:?}", a.stats(), b.stats());
    }
    assert_eq!(read(b, target.at(1024), 256), [7; 256]);
    assert_eq!((a.has_answered(*to), b.has_answered(*back)), (Ok(true), Ok(true)));
}

#[test]
fn an_end_that_reattaches_alone_connects_once_the_other_does_too() {
    for (seed, dials) in [(1, Dials::CALM), (2, Dials::WILD), (3, dials(3)), (4, dials(1))] {
        let (_, mut nodes) = fleet::plain::<1>(2, dials, Config::DEFAULT, 4096, seed);
        for round in 1..=6u64 {
            let (alone, other) = ((round % 2) as usize, 1 - (round % 2) as usize);
            let again = |node: &mut fleet::Node<fleet::End, 1>, peer: usize| {
                node.engine.remove_peer(node.peers[peer]).unwrap();
                let fresh = node.engine.reserve_peer().unwrap();
                node.engine.rail_mut(RailId(0)).unwrap().attach(fresh.peer(), peer as u16).unwrap();
                node.engine.connect_peer(fresh, 1).unwrap();
                node.peers[peer] = fresh;
            };
            again(&mut nodes[alone], other);
            fleet::turn_until(&mut nodes, "the other end hears of it", |nodes| {
                let peer = nodes[other].peers[alone];
                nodes[other].engine.peer_error(peer) == Ok(Some(PeerError::Reattached))
            });
            again(&mut nodes[other], alone);
            let mut handle = [0; 512];
            for (at, to) in [(alone, other), (other, alone)] {
                let len = nodes[to].engine.export(nodes[to].target, &mut handle).unwrap();
                let peer = nodes[at].peers[to];
                nodes[at].remotes[to] = nodes[at].engine.import(peer, &handle[..len]).unwrap();
                let word = nodes[at].remotes[to].at(8 * at as u64);
                nodes[at].engine.signal(CX, signal(word), Notice::Silent).unwrap();
            }
            fleet::turn_until(&mut nodes, "both get through", |nodes| {
                (0..2).all(|at| {
                    word(&nodes[1 - at].engine, nodes[1 - at].target.at(8 * at as u64)) == round
                })
            });
            let errors = [0, 1].map(|at| nodes[at].engine.peer_error(nodes[at].peers[1 - at]));
            assert_eq!(errors, [Ok(None); 2], "seed {seed}, round {round}");
        }
    }
}

#[test]
fn a_word_of_an_unknown_sender_is_no_answer() {
    let control = shared();
    control.borrow_mut().caps = Some(|caps| Caps { fresh: false, ..caps });
    control.borrow_mut().edit = Some(Box::new(|_, _| vec![]));
    let mut own =
        own(Config { window: 8, ..Config::DEFAULT }, tap(Loopback::<64>::new(), &control), 4096);
    passes(&mut own.engine, 5);
    let epoch = hellos(&control)[0].0;
    let word = (epoch << 9) & 0xff_ffff;
    control.borrow_mut().edit = None;
    control.borrow_mut().inject.push_back(Event::Landed(own.peer.peer(), word));
    passes(&mut own.engine, 1);
    assert_eq!((own.engine.has_answered(own.peer), own.engine.stats().stale), (Ok(false), 1));
    // Once the sender has proved that it is alive, the same write counts as its first write.
    control.borrow_mut().inject.push_back(Event::Message(own.peer.peer(), hello(5, epoch, 0)));
    control.borrow_mut().inject.push_back(Event::Landed(own.peer.peer(), word));
    passes(&mut own.engine, 1);
    assert_eq!((own.engine.has_answered(own.peer), own.engine.stats().arrived), (Ok(true), 1));
}
