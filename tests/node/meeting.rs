//! Tests connecting peers in any order, with any kind of wait, and repeatedly.

use std::thread;
use std::time::{Duration, Instant};

use fishplate::core::engine::tag::Tag;
use fishplate::node::Fabric;
use fishplate::{Cmp, Limits, Node, Notice, PeerId, Signal};
use fishplate_shm::{ShmConfig, ShmRail, connect};
use fishplate_sys::LinuxHost;

use super::SOON;
use super::lent::used;

fn open(limits: Limits) -> Node {
    super::builder().fabric(Fabric::Off).limits(limits).open().unwrap()
}

/// Opens two nodes. The first one dials the second.
fn pair(limits: [Limits; 2]) -> [Node; 2] {
    let mut nodes = limits.map(open);
    nodes.sort_by_key(|node| u64::from_le_bytes(node.address()[6..14].try_into().unwrap()));
    nodes
}

/// Connects a node that only calls `poll` to a node that waits in `quiet`. Runs twice, so that each
/// of the two nodes dials once.
fn met_by(poll: impl Fn(&mut Node, PeerId) -> bool) {
    for turned in [false, true] {
        let mut nodes = pair([Limits::DEFAULT; 2]);
        if turned {
            nodes.reverse();
        }
        let [mut a, mut b] = nodes;
        let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
        let other = thread::spawn(move || {
            let peer = b.connect(to_a).unwrap();
            b.send(peer, 1, b"x", Notice::Silent).unwrap();
            b.quiet(peer, SOON).unwrap();
            b
        });
        let peer = a.connect(to_b).unwrap();
        let begun = Instant::now();
        while !poll(&mut a, peer) {
            assert!(begun.elapsed() < SOON, "not connected, turned: {turned}");
            thread::yield_now();
        }
        while !other.is_finished() {
            a.progress();
        }
        other.join().unwrap();
    }
}

#[test]
fn a_program_that_only_polls_connects_its_peers() {
    met_by(|node, _| node.recv(None, 1, Tag::ZERO, &mut [0; 8], Duration::ZERO).is_ok());
    met_by(|node, _| node.probe(None, 1, Tag::ZERO).unwrap().is_some());
    met_by(|node, peer| node.probe(Some(peer), 1, Tag::ZERO).unwrap().is_some());
    met_by(|node, peer| node.mprobe(Some(peer), 1, Tag::ZERO).unwrap().is_some());
    met_by(|node, peer| {
        node.fence(peer).unwrap();
        node.quiet(peer, Duration::ZERO).unwrap();
        node.quiet_all(Duration::ZERO).unwrap();
        node.reach(peer).unwrap().shared_memory
    });
    // Acts like a program that computes between its calls, or waits at a barrier.
    met_by(|node, peer| {
        thread::sleep(Duration::from_millis(1));
        node.progress();
        node.reach(peer).unwrap().shared_memory
    });
}

#[test]
fn nodes_with_different_limits_connect() {
    let limits = Limits { peers: 3, locals: 2, remotes: 2, operations: 20 };
    for limits in [[Limits::DEFAULT, limits], [limits, Limits::DEFAULT]] {
        let mut nodes = pair(limits);
        both_talk(&mut nodes);
    }
}

/// Connects both nodes, and sends a signal each way.
fn both_talk([a, b]: &mut [Node; 2]) {
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let (b_at_a, a_at_b) = (a.connect(to_b).unwrap(), b.connect(to_a).unwrap());
    let deadline = Instant::now() + SOON;
    while !(a.reach(b_at_a).unwrap().shared_memory && b.reach(a_at_b).unwrap().shared_memory) {
        assert!(Instant::now() < deadline, "not connected");
        a.progress();
        b.progress();
    }
    let (inbox_a, inbox_b) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
    let at_b = a.import(b_at_a, b.handle(inbox_b).unwrap()).unwrap();
    let at_a = b.import(a_at_b, a.handle(inbox_a).unwrap()).unwrap();
    a.signal(Signal::set(at_b.at(0), 1), Notice::Silent).unwrap();
    b.signal(Signal::set(at_a.at(0), 1), Notice::Silent).unwrap();
    while a.load(inbox_a.at(0)).unwrap() + b.load(inbox_b.at(0)).unwrap() != 2 {
        assert!(Instant::now() < deadline, "{:?} {:?}", a.peer_error(b_at_a), b.peer_error(a_at_b));
        a.progress();
        b.progress();
    }
    for (node, peer, there, inbox) in [(a, b_at_a, at_b, inbox_a), (b, a_at_b, at_a, inbox_b)] {
        node.release(there).unwrap();
        node.free(inbox).unwrap();
        assert!(node.peer_error(peer).unwrap().is_none());
    }
}

#[test]
fn peers_that_removed_each_other_connect_again() {
    let mut nodes = pair([Limits { peers: 1, ..Limits::DEFAULT }; 2]);
    let stranger = open(Limits::DEFAULT);
    for round in 0..24 {
        both_talk(&mut nodes);
        let [a, b] = &mut nodes;
        let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
        let (b_at_a, a_at_b) = (a.connect(&to_b).unwrap(), b.connect(&to_a).unwrap());
        let few = |node: &mut Node| (0..100).for_each(|_| _ = node.progress());
        match round % 6 {
            // One node disconnects after the other, with or without a pause.
            0 => {
                a.disconnect(b_at_a).unwrap();
                b.disconnect(a_at_b).unwrap();
            }
            1 => {
                b.disconnect(a_at_b).unwrap();
                few(a);
                a.disconnect(b_at_a).unwrap();
            }
            // One node connects and disconnects again before the other has connected.
            2 | 3 => {
                let [(one, other, to), (two, first, _)] = match round % 6 {
                    2 => [(&mut *a, b_at_a, &to_b), (&mut *b, a_at_b, &to_a)],
                    _ => [(&mut *b, a_at_b, &to_a), (&mut *a, b_at_a, &to_b)],
                };
                one.disconnect(other).unwrap();
                for _ in 0..3 {
                    let again = one.connect(to).unwrap();
                    few(one);
                    few(two);
                    one.disconnect(again).unwrap();
                }
                one.connect(to).unwrap();
                two.disconnect(first).unwrap();
            }
            // The other node also polls for another peer, and so answers early.
            _ => {
                let [(one, other, to), (two, first, _)] = match round % 6 {
                    4 => [(&mut *a, b_at_a, &to_b), (&mut *b, a_at_b, &to_a)],
                    _ => [(&mut *b, a_at_b, &to_a), (&mut *a, b_at_a, &to_b)],
                };
                two.disconnect(first).unwrap();
                let somebody = two.connect(stranger.address()).unwrap();
                for _ in 0..2 {
                    let now = one.connect(to).unwrap_or(other);
                    one.disconnect(now).unwrap();
                    one.connect(to).unwrap();
                    let until = Instant::now() + Duration::from_millis(5);
                    while Instant::now() < until {
                        one.progress();
                        two.progress();
                    }
                }
                // Connects again before the peer notices the disconnect.
                let now = one.connect(to).unwrap();
                one.disconnect(now).unwrap();
                one.connect(to).unwrap();
                few(one);
                two.disconnect(somebody).unwrap();
            }
        }
    }
}

#[test]
fn a_program_that_never_waits_detects_a_dead_peer() {
    let mut nodes = pair([Limits::DEFAULT; 2]);
    both_talk(&mut nodes);
    let [mut a, b] = nodes;
    let peer = a.connect(b.address()).unwrap();
    assert_eq!(a.peer_error(peer), Ok(None));
    drop(b);
    let deadline = Instant::now() + SOON;
    while a.peer_error(peer).unwrap().is_none() {
        assert!(Instant::now() < deadline, "never detected");
        a.progress();
    }
}

#[test]
fn many_absent_peers_delay_no_other() {
    const MANY: u64 = 2000;
    let mut node = open(Limits { peers: MANY as u16 + 1, ..Limits::DEFAULT });
    let mut address = node.address().to_vec();
    let before = used();
    for n in 0..MANY {
        address[6..14].copy_from_slice(&n.to_le_bytes());
        address[14..22].copy_from_slice(&n.to_le_bytes());
        node.connect(&address).unwrap();
    }
    for _ in 0..10_000 {
        node.progress();
    }
    // Without pauses between dials, the node would use at least 13 s of processor time.
    let used = used() - before;
    assert!(used < Duration::from_secs(6), "{used:?}");
    // A peer that answers is connected despite the silent peers.
    let mut other = open(Limits::DEFAULT);
    let (to_node, to_other) = (node.address().to_vec(), other.address().to_vec());
    let peer = node.connect(to_other).unwrap();
    other.connect(to_node).unwrap();
    let deadline = Instant::now() + SOON;
    while !node.reach(peer).unwrap().shared_memory {
        assert!(Instant::now() < deadline, "not connected");
        node.progress();
        other.progress();
    }
}

#[test]
fn a_program_that_only_waits_connects_its_peer() {
    let [mut a, mut b] = pair([Limits::DEFAULT; 2]);
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let inbox = a.alloc(64).unwrap();
    let handle = a.handle(inbox).unwrap();
    let other = thread::spawn(move || {
        thread::sleep(Duration::from_millis(30));
        let peer = b.connect(to_a).unwrap();
        let there = b.import(peer, handle).unwrap();
        b.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
        b.close(SOON).unwrap();
    });
    let peer = a.connect(to_b).unwrap();
    a.wait(inbox.at(0), Cmp::Eq, 1, Some(peer), SOON).unwrap();
    a.close(SOON).unwrap();
    other.join().unwrap();
}

/// Every process of the host can list the names of abstract sockets.
#[test]
fn knowing_the_socket_names_of_two_nodes_does_not_allow_posing_as_one() {
    let [mut a, mut b] = pair([Limits::DEFAULT; 2]);
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let door = |address: &[u8]| u64::from_le_bytes(address[14..22].try_into().unwrap());
    let host = LinuxHost::shared().peer_uses_membarrier(true);
    let config = ShmConfig {
        id: door(&to_a),
        membarrier: host.sleeper_uses_membarrier(),
        ..ShmConfig::default()
    };
    let profile = ShmRail::new(host, config).unwrap().profile();
    let name = format!("@fishplate-{:016x}", door(&to_b));
    thread::scope(|scope| {
        // A stranger dials first, and waits for the outcome of the handshake.
        let stranger = scope.spawn(|| connect(&name, &profile, Instant::now() + SOON));
        let peer = b.connect(&to_a).unwrap();
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {
            b.progress();
            assert!(!b.reach(peer).unwrap().shared_memory, "the stranger is taken for the peer");
        }
        let answers = scope.spawn(move || {
            let there = a.connect(&to_b).unwrap();
            a.send(there, 1, b"x", Notice::Silent).unwrap();
            a.quiet(there, SOON).unwrap();
            a
        });
        let received = b.recv(Some(peer), 1, Tag::ZERO, &mut [0; 8], SOON);
        assert!(received.is_ok(), "{received:?}");
        while !answers.is_finished() {
            b.progress();
        }
        answers.join().unwrap();
        drop(b);
        _ = stranger.join().unwrap();
    });
}
