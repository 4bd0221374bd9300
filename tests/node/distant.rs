//! Tests peers on other hosts, which are attached at their first use or by their first message.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{OpError, PeerError, WaitError};
use fishplate::core::mem::RailId;
use fishplate::node::{Builder, Error, Fabric, Memory};
use fishplate::{Cmp, Limits, Node, Notice, PeerId, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::{SOON, WORKER, Way, builder, tcp, ways};

pub(super) const LIMITS: Limits = Limits { peers: 200, ..Limits::DEFAULT };

/// Returns a builder for nodes on all interfaces of a fake provider.
pub(super) fn on(provider: &Fake, name: &str) -> Builder {
    let name = name.split(';').next_back().unwrap();
    let providers = vec![if name == "ofi_rxm" { "verbs;ofi_rxm" } else { name }.to_owned()];
    let settings = Settings { providers, ..Settings::DEFAULT };
    builder()
        .library(provider.library())
        .settings(settings)
        .fabric(Fabric::Required)
        .shared_memory(false)
        .limits(LIMITS)
}

/// Runs a test over each provider: the fakes, and tcp with one and with two rails.
fn each(test: impl Fn(&str, &dyn Fn() -> Node)) {
    for (seed, (name, persona)) in Persona::all().into_iter().enumerate() {
        let provider = Fake::new(persona, seed as u64);
        test(name, &|| on(&provider, name).open().unwrap());
        assert_eq!(provider.violations(), Vec::<String>::new(), "{name}");
    }
    for rails in ways().into_iter().filter_map(|way| match way {
        Way::Tcp(ours, theirs) if ours == theirs => Some(ours),
        _ => None,
    }) {
        test("tcp itself", &|| tcp(rails).limits(LIMITS).open().unwrap());
    }
}

/// Connects two nodes to each other.
pub(super) fn connect(a: &mut Node, b: &mut Node) -> [PeerId; 2] {
    [a.connect(b.address()).unwrap(), b.connect(a.address()).unwrap()]
}

pub(super) fn is_attached(node: &Node, peer: PeerId) -> bool {
    node.eager_max(peer) != 0
}

/// Makes progress on all nodes until `done`.
pub(super) fn until<const N: usize>(
    nodes: [&mut Node; N],
    mut done: impl FnMut([&mut Node; N]) -> bool,
) {
    let mut nodes = nodes;
    let begun = Instant::now();
    loop {
        nodes.iter_mut().for_each(|node| _ = node.progress());
        if done(nodes.each_mut().map(|node| &mut **node)) {
            return;
        }
        assert!(begun.elapsed() < SOON, "not done");
    }
}

/// Sends a message from `a`, and waits until `b` has it.
pub(super) fn send(a: &mut Node, to: PeerId, tag: u64, b: &mut Node) {
    a.send(to, tag, b"first", Notice::Silent).unwrap();
    until([a, b], |[a, _]| a.quiet(to, Duration::ZERO).is_ok());
}

pub(super) fn has_message(node: &mut Node, from: PeerId, tag: u64) -> bool {
    let found = node.probe(None, tag, Tag::ZERO).unwrap();
    found.is_some_and(|found| {
        assert_eq!(found.source, from);
        let taken = node.recv(Some(from), tag, Tag::ZERO, &mut [0; 64], SOON).unwrap();
        taken.len == 5
    })
}

#[test]
fn the_first_message_of_a_peer_attaches_it() {
    each(|name, open| {
        let [mut a, mut b] = [open(), open()];
        let [to_b, to_a] = connect(&mut a, &mut b);
        for _ in 0..100 {
            a.progress();
            b.progress();
        }
        assert!(!is_attached(&a, to_b) && !is_attached(&b, to_a), "{name}: attached unused");
        assert!(a.reach(to_b).unwrap().fabric > 0);
        assert_eq!(a.rail_pairs(to_b).unwrap().len(), a.reach(to_b).unwrap().fabric);
        assert_eq!((a.peer_error(to_b), b.failed_peers()), (Ok(None), vec![]));
        send(&mut a, to_b, 7, &mut b);
        assert!(is_attached(&a, to_b) && is_attached(&b, to_a), "{name}");
        until([&mut a, &mut b], |[_, b]| has_message(b, to_a, 7));
        b.send(to_a, 8, b"reply", Notice::Silent).unwrap();
        until([&mut a, &mut b], |[a, _]| has_message(a, to_b, 8));
        assert_eq!((a.peer_error(to_b), b.peer_error(to_a)), (Ok(None), Ok(None)), "{name}");
        close_all([a, b]);
    });
}

/// Closes nodes at the same time. Each exists until the last is closed, because a provider may lose
/// the last message of a node that is dropped.
fn close_all<const N: usize>(nodes: [Node; N]) {
    let left = AtomicUsize::new(N);
    thread::scope(|scope| {
        for mut node in nodes {
            let left = &left;
            scope.spawn(move || {
                let closed = node.shutdown(SOON);
                left.fetch_sub(1, Ordering::Relaxed);
                closed.unwrap();
                while left.load(Ordering::Relaxed) != 0 {
                    node.progress();
                }
            });
        }
    });
}

#[test]
fn the_first_put_to_a_peer_attaches_both_sides() {
    each(|name, open| {
        let [mut a, mut b] = [open(), open()];
        let [to_b, to_a] = connect(&mut a, &mut b);
        let inbox = b.alloc(64).unwrap();
        let handle = b.handle(inbox).unwrap();
        let writer = thread::spawn(move || {
            let there = a.import(to_b, handle).unwrap();
            a.put_signal(b"some data", there.at(8), Signal::set(there.at(0), 1), Notice::Silent)
                .unwrap();
            a.quiet(to_b, SOON).unwrap();
            a.close(SOON).unwrap();
        });
        // A wait that names no peer attaches none by itself.
        assert_eq!(b.wait(inbox.at(0), Cmp::Eq, 1, None, SOON), Ok(1), "{name}");
        assert!(is_attached(&b, to_a), "{name}");
        while !writer.is_finished() {
            b.progress();
        }
        writer.join().unwrap();
        b.close(SOON).unwrap();
    });
}

#[test]
fn two_peers_that_talk_first_at_once_meet() {
    each(|_, open| {
        let [mut a, mut b] = [open(), open()];
        let [to_b, to_a] = connect(&mut a, &mut b);
        let left = AtomicUsize::new(2);
        thread::scope(|scope| {
            for (node, to) in [(&mut a, to_b), (&mut b, to_a)] {
                let left = &left;
                scope.spawn(move || {
                    node.send(to, 7, b"first", Notice::Silent).unwrap();
                    left.fetch_sub(1, Ordering::Relaxed);
                    while left.load(Ordering::Relaxed) != 0 {
                        node.progress();
                    }
                });
            }
        });
        until([&mut a, &mut b], |[_, b]| has_message(b, to_a, 7));
        until([&mut a, &mut b], |[a, _]| has_message(a, to_b, 7));
        close_all([a, b]);
    });
}

#[test]
fn an_address_whose_rails_cannot_be_joined_is_refused_at_once() {
    each(|name, open| {
        let [mut a, mut b] = [open(), open()];
        let address = b.address();
        // The longest message of the first rail, after its speed and two hashes.
        let mut damaged = address.clone();
        damaged[62..66].copy_from_slice(&127u32.to_le_bytes());
        let refused = a.connect(damaged).unwrap_err().to_string();
        assert!(refused.contains("max_message must be at least 128 bytes"), "{name}: {refused}");
        let to_b = a.connect(address).unwrap();
        b.connect(a.address()).unwrap();
        send(&mut a, to_b, 7, &mut b);
    });
}

/// Receives the next message of the first node at the second.
fn receive([a, b]: [&mut Node; 2], from: PeerId, tag: u64, into: Memory) -> Vec<u8> {
    let request = b.post_recv(Some(from), tag, Tag::ZERO, into.slice(..), 0).unwrap();
    let mut got = vec![];
    until([a, b], |[_, b]| {
        let Some(status) = b.test_recv(request).unwrap() else { return false };
        assert_eq!(status.outcome, Received::Ok);
        got.resize(status.delivered as usize, 0);
        b.read(into.at(0), &mut got).unwrap();
        true
    });
    got
}

/// A program with an event loop must not stop in a call.
#[test]
fn messages_to_a_peer_that_makes_no_progress_are_queued() {
    each(|name, open| {
        let [mut a, mut b] = [open(), open()];
        let [to_b, to_a] = connect(&mut a, &mut b);
        let memory = a.alloc(100_000).unwrap();
        a.write(memory.at(0), &[4; 100_000]).unwrap();
        let begun = Instant::now();
        a.send(to_b, 1, b"first", Notice::Silent).unwrap();
        a.send(to_b, 1, b"", Notice::Silent).unwrap();
        a.send(to_b, 3, &vec![3; 100_000], Notice::Silent).unwrap();
        a.send(to_b, 1, memory.slice(..), Notice::Silent).unwrap();
        a.send(to_b, 1, b"fifth", Notice::Silent).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5), "{name}");
        a.quiet(to_b, Duration::ZERO).unwrap_err();
        let into = b.alloc(100_000).unwrap();
        for (tag, bytes) in
            [(1, &b"first"[..]), (1, b""), (1, &[4; 100_000]), (1, b"fifth"), (3, &[3; 100_000])]
        {
            let got = receive([&mut a, &mut b], to_a, tag, into);
            assert!(got == bytes, "{name}: {tag}, {} of {} bytes", got.len(), bytes.len());
        }
        close_all([a, b]);
    });
}

#[test]
fn messages_to_a_silent_peer_leave_room_for_others() {
    if WORKER {
        // A worker answers at once.
        return;
    }
    each(|name, open| {
        let (mut a, mut b, mut c) = (open(), open(), open());
        a.set_patience(Duration::from_millis(1)).unwrap();
        let [to_b, to_a] = connect(&mut a, &mut b);
        let [to_c, a_at_c] = connect(&mut a, &mut c);
        let share = LIMITS.locals / 8;
        for n in 0..share {
            a.send(to_b, 7, &[n as u8; 5], Notice::Silent).unwrap();
        }
        let full = a.send(to_b, 7, b"later", Notice::Silent);
        assert_eq!(full, Err(OpError::Again.into()), "{name}");
        send(&mut a, to_c, 8, &mut c);
        until([&mut a, &mut c], |[_, c]| has_message(c, a_at_c, 8));
        let into = b.alloc(64).unwrap();
        for n in 0..share {
            assert_eq!(receive([&mut a, &mut b], to_a, 7, into), [n as u8; 5], "{name}");
        }
        send(&mut a, to_b, 9, &mut b);
    });
}

#[test]
fn a_queued_message_to_a_peer_that_fails_is_reported() {
    if WORKER {
        // A worker answers at once.
        return;
    }
    let provider = Fake::new(Persona::tcp(), 71);
    let open = || on(&provider, "tcp").open().unwrap();
    let [mut a, mut b] = [open(), open()];
    let [to_b, _] = connect(&mut a, &mut b);
    a.send(to_b, 7, b"first", Notice::Silent).unwrap();
    let (lifeline, held) = UnixStream::pair().unwrap();
    a.watch(to_b, lifeline).unwrap();
    drop(held);
    let begun = Instant::now();
    while a.peer_error(to_b) == Ok(None) {
        // Only waits look at lifelines.
        _ = a.recv(None, 7, Tag::ZERO, &mut [0; 8], Duration::from_millis(20));
        assert!(begun.elapsed() < SOON);
    }
    let failed = Err(WaitError::PeerFailed(to_b, PeerError::Died).into());
    assert_eq!(a.quiet_all(SOON), failed);
    // The error is that of the peer, even if no memory is left.
    while a.alloc(4096).is_ok() {}
    let sent = a.send(to_b, 7, b"second", Notice::Silent);
    assert_eq!(sent, Err(OpError::PeerFailed(PeerError::Died).into()));
}

#[test]
fn a_peer_that_calls_before_it_is_connected_is_heard_later() {
    each(|_, open| {
        let [mut a, mut b] = [open(), open()];
        let to_b = a.connect(b.address()).unwrap();
        let to_a = a.address();
        let to_a = thread::scope(|scope| {
            let sends = scope.spawn(|| a.send(to_b, 7, b"first", Notice::Silent).unwrap());
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(30) {
                b.progress();
            }
            let to_a = b.connect(to_a).unwrap();
            while !sends.is_finished() {
                b.progress();
            }
            to_a
        });
        until([&mut a, &mut b], |[_, b]| has_message(b, to_a, 7));
        close_all([a, b]);
    });
}

#[test]
fn each_of_fifty_callers_at_once_is_heard() {
    let provider = Fake::new(Persona::efa(), 9);
    let open = || {
        let limits = Limits { locals: 4, remotes: 4, operations: 16, ..LIMITS };
        on(&provider, "efa").limits(limits).connect_timeout(2 * SOON).open().unwrap()
    };
    let mut hub = open();
    let nodes: Vec<_> = (0..50).map(|_| open()).collect();
    let known: Vec<_> = nodes.iter().map(|node| hub.connect(node.address()).unwrap()).collect();
    let (address, done) = (hub.address(), AtomicBool::new(false));
    let mut heard = vec![];
    thread::scope(|scope| {
        for mut node in nodes {
            let (address, done) = (&address, &done);
            scope.spawn(move || {
                let hub = node.connect(address).unwrap();
                node.send(hub, 7, b"first", Notice::Silent).unwrap();
                let begun = Instant::now();
                while !done.load(Ordering::Relaxed) && begun.elapsed() < SOON {
                    node.progress();
                    thread::sleep(Duration::from_micros(100));
                }
            });
        }
        // All of them call before the first is answered.
        thread::sleep(Duration::from_millis(200));
        while heard.len() < known.len() {
            let got = hub.recv(None, 7, Tag::ZERO, &mut [0; 8], SOON).unwrap();
            heard.push(got.source);
        }
        assert_eq!(hub.failed_peers(), vec![]);
        done.store(true, Ordering::Relaxed);
    });
    heard.sort_by_key(|peer| peer.to_raw());
    assert_eq!(heard, known);
}

#[test]
fn a_node_closes_at_once_if_its_peers_are_only_connected() {
    each(|name, open| {
        let [mut a, mut b] = [open(), open()];
        let [to_b, _] = connect(&mut a, &mut b);
        let begun = Instant::now();
        b.close(SOON).unwrap();
        assert!(begun.elapsed() < SOON / 2, "{name}");
        assert_eq!((a.peer_error(to_b), a.failed_peers()), (Ok(None), vec![]));
        a.close(SOON).unwrap();
    });
}

#[test]
fn a_peer_that_calls_a_node_that_closes_is_told() {
    if WORKER {
        // A worker answers a closing node at once.
        return;
    }
    each(|name, open| {
        let [mut a, mut b, mut c] = [open(), open(), open()];
        let [to_b, _] = connect(&mut a, &mut b);
        let [b_at_c, c_at_b] = connect(&mut c, &mut b);
        send(&mut c, b_at_c, 7, &mut b);
        until([&mut c, &mut b], |[_, b]| has_message(b, c_at_b, 7));
        // `b` closes, and waits for `c`, which makes no progress.
        let closing = thread::spawn(move || b.close(SOON));
        thread::sleep(Duration::from_millis(20));
        let sent = a.send(to_b, 7, b"first", Notice::Silent);
        println!("{name}: {sent:?}");
        until([&mut a], |[a]| a.peer_error(to_b) != Ok(None));
        assert_eq!(a.peer_error(to_b), Ok(Some(PeerError::Closed)), "{name}");
        assert!(!closing.is_finished(), "{name}");
        until([&mut a, &mut c], |_| closing.is_finished());
        closing.join().unwrap().unwrap();
        close_all([a, c]);
    });
}

#[test]
fn a_peer_that_calls_a_node_that_was_shut_down_is_told() {
    each(|name, open| {
        let [mut a, mut b] = [open(), open()];
        let [to_b, _] = connect(&mut a, &mut b);
        b.shutdown(SOON).unwrap();
        let told = thread::spawn(move || {
            // May end before the peer has answered.
            _ = a.send(to_b, 7, b"late", Notice::Silent);
            until([&mut a], |[a]| a.peer_error(to_b) != Ok(None));
            a
        });
        until([&mut b], |_| told.is_finished());
        let mut a = told.join().unwrap();
        assert_eq!(a.peer_error(to_b), Ok(Some(PeerError::Closed)), "{name}");
    });
}

#[test]
fn a_peer_that_is_connected_again_hears_calls_from_before() {
    each(|name, open| {
        let [mut a, mut b] = [open(), open()];
        let [to_b, to_a] = connect(&mut a, &mut b);
        b.disconnect(to_a).unwrap();
        let address = a.address();
        let again = thread::scope(|scope| {
            let sends = scope.spawn(|| a.send(to_b, 7, b"first", Notice::Silent).unwrap());
            // The call finds no peer.
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(5) {
                b.progress();
            }
            let again = b.connect(&address).unwrap();
            while !sends.is_finished() {
                b.progress();
            }
            again
        });
        assert_ne!(again, to_a);
        until([&mut a, &mut b], |[_, b]| has_message(b, again, 7));
        // This side forgets an attached peer, and the other side learns of it.
        b.disconnect(again).unwrap();
        let third = b.connect(a.address()).unwrap();
        until([&mut a, &mut b], |[a, _]| a.peer_error(to_b) != Ok(None));
        assert_eq!(a.peer_error(to_b), Ok(Some(PeerError::Reattached)), "{name}");
        a.disconnect(to_b).unwrap();
        let to_b = a.connect(b.address()).unwrap();
        send(&mut a, to_b, 9, &mut b);
        until([&mut a, &mut b], |[_, b]| has_message(b, third, 9));
        close_all([a, b]);
    });
}

#[test]
fn a_stranger_attaches_nothing_and_disturbs_no_wait() {
    each(|name, open| {
        let [mut a, mut b, mut stranger] = [open(), open(), open()];
        let [to_b, to_a] = connect(&mut a, &mut b);
        let unknown = stranger.connect(b.address()).unwrap();
        // Attaches the peer, and calls it.
        assert!(stranger.probe(Some(unknown), 7, Tag::ZERO).unwrap().is_none());
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(20) {
            stranger.progress();
            b.progress();
        }
        assert!(!is_attached(&b, to_a), "{name}");
        let short = b.recv(None, 7, Tag::ZERO, &mut [0; 8], Duration::from_millis(5));
        assert!(matches!(short, Err(Error::Wait(_))), "{name}");
        send(&mut a, to_b, 7, &mut b);
        until([&mut a, &mut b], |[_, b]| has_message(b, to_a, 7));
        assert_eq!((b.failed_peers(), stranger.peer_error(unknown)), (vec![], Ok(None)), "{name}");
        close_all([a, b]);
    });
}

#[test]
fn settings_that_differ_are_reported_by_connect() {
    let provider = Fake::new(Persona::cxi(), 5);
    let open = |name: &str| super::fake(&provider, &[name]).open().unwrap();
    let (mut a, b) = (open("cxi0"), open("cxi1"));
    let mut other = super::builder().fabric(Fabric::Off).shared_memory(false).open().unwrap();
    assert_eq!(other.connect(b.address()), Err(Error::NoRail));
    let mut address = b.address();
    // Another format of the provider's address, and a length that the provider does not have.
    let at = 50 + 18 + 12;
    address[at] ^= 1;
    assert!(matches!(a.connect(&address), Err(Error::Attach(_))));
    let peer = a.connect(b.address()).unwrap();
    assert_eq!(a.connect(b.address()), Ok(peer));
    // Another node with the signature of a connected one.
    let mut address = b.address();
    address[6] ^= 1;
    assert!(matches!(a.connect(&address), Err(Error::Attach(_))));
    a.disconnect(peer).unwrap();
    a.connect(&address).unwrap();
}

#[test]
fn a_peer_is_attached_after_a_rail_was_fenced_and_has_another_address() {
    for caller in [false, true] {
        let provider = Fake::new(Persona::tcp(), 21);
        let open = || on(&provider, "tcp").open().unwrap();
        let (mut a, mut b, mut c) = (open(), open(), open());
        let [b_at_a, a_at_b] = connect(&mut a, &mut b);
        let [c_at_a, a_at_c] = connect(&mut a, &mut c);
        send(&mut a, b_at_a, 7, &mut b);
        until([&mut a, &mut b], |[_, b]| has_message(b, a_at_b, 7));
        // Both nodes open another endpoint. `c` has the address of the old one.
        let old = a.address();
        a.disable_rail(b_at_a, RailId(1)).unwrap();
        until([&mut a, &mut b], |[a, _]| a.address() != old);
        match caller {
            true => send(&mut c, a_at_c, 8, &mut a),
            false => send(&mut a, c_at_a, 8, &mut c),
        }
        until([&mut a, &mut c], |[a, c]| match caller {
            true => has_message(a, c_at_a, 8),
            false => has_message(c, a_at_c, 8),
        });
        assert_eq!((a.peer_error(c_at_a), c.peer_error(a_at_c)), (Ok(None), Ok(None)));
    }
}
