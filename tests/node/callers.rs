//! Peers of other hosts are attached when they are used, or when they call.

use std::time::Instant;

use fishplate::config::Settings;
use fishplate::core::error::{AttachError, OpError};
use fishplate::core::op::Cmp;
use fishplate::node::{Error, Memory, Remote};
use fishplate::{Limits, Node, Notice, PeerId, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::{SOON, builder, fake};

/// Returns nodes with one rail each.
fn nodes(provider: &Fake, count: usize) -> Vec<Node> {
    let limits = Limits { peers: 80, ..Limits::DEFAULT };
    (0..count).map(|_| fake(provider, &["cxi0"]).limits(limits).open().unwrap()).collect()
}

/// Sends a signal to each of these words, and waits until all have arrived.
fn signal(from: &mut Node, to: &mut Node, words: &[(Memory, Remote)]) {
    for (_, there) in words {
        from.signal(Signal::add(there.at(0), 1), Notice::Silent).unwrap();
    }
    let deadline = Instant::now() + SOON;
    while words.iter().any(|(word, _)| to.load(word.at(0)).unwrap() == 0) {
        assert!(Instant::now() < deadline, "nothing arrives");
        from.progress();
        to.progress();
    }
}

fn word(node: &mut Node) -> (Memory, Vec<u8>) {
    let word = node.alloc(64).unwrap();
    (word, node.handle(word).unwrap())
}

#[test]
fn a_peer_that_calls_first_is_attached_by_any_kind_of_call() {
    type Call = fn(&mut Node, PeerId, Memory) -> bool;
    let calls: [Call; 6] = [
        |node, _, word| node.wait(word.at(0), Cmp::Eq, 1, None, std::time::Duration::ZERO).is_ok(),
        |node, peer, word| node.wait(word.at(0), Cmp::Eq, 1, Some(peer), std::time::Duration::ZERO).is_ok(),
        |node, _, word| {
            node.progress();
            node.load(word.at(0)) == Ok(1)
        },
        |node, _, word| node.probe(None, 1, 0.into()).is_ok() && node.load(word.at(0)) == Ok(1),
        |node, peer, word| node.probe(Some(peer), 1, 0.into()).is_ok() && node.load(word.at(0)) == Ok(1),
        |node, _, word| {
            node.quiet_all(SOON).is_ok() && node.progress() < 99 && node.load(word.at(0)) == Ok(1)
        },
    ];
    for (at, call) in calls.into_iter().enumerate() {
        for caller_connects_first in [false, true] {
            let provider = Fake::new(Persona::cxi(), at as u64);
            let [mut a, mut b]: [Node; 2] = nodes(&provider, 2).try_into().ok().unwrap();
            let ((word, handle), to_a) = (word(&mut b), a.address());
            let connect = |b: &mut Node| b.connect(&to_a).unwrap();
            let early = (!caller_connects_first).then(|| connect(&mut b));
            let to_b = a.connect(b.address()).unwrap();
            let there = a.import(to_b, handle).unwrap();
            a.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
            if caller_connects_first {
                // The call arrives before its peer is known here.
                (0..100).for_each(|_| _ = (a.progress(), b.progress()));
            }
            let peer = early.unwrap_or_else(|| connect(&mut b));
            let deadline = Instant::now() + SOON;
            while !call(&mut b, peer, word) {
                assert!(Instant::now() < deadline, "call {at}: {:?}", a.stats());
                a.progress();
            }
            assert_eq!((a.peer_error(to_b), b.peer_error(peer)), (Ok(None), Ok(None)));
            assert_eq!(provider.violations(), [] as [String; 0]);
        }
    }
}

#[test]
fn more_callers_than_a_rail_remembers_are_all_attached() {
    const CALLERS: usize = 70;
    let provider = Fake::new(Persona::cxi(), 7);
    let mut callers = nodes(&provider, CALLERS);
    let mut node = nodes(&provider, 1).pop().unwrap();
    let (word, handle) = word(&mut node);
    for caller in &mut callers {
        let to = caller.connect(node.address()).unwrap();
        let there = caller.import(to, &handle).unwrap();
        caller.signal(Signal::add(there.at(0), 1), Notice::Silent).unwrap();
    }
    for _ in 0..10 {
        callers.iter_mut().for_each(|caller| _ = caller.progress());
        node.progress();
    }
    callers.iter().for_each(|caller| _ = node.connect(caller.address()).unwrap());
    let deadline = Instant::now() + SOON;
    while node.load(word.at(0)) != Ok(CALLERS as u64) {
        assert!(Instant::now() < deadline, "{:?} of {CALLERS}", node.load(word.at(0)));
        callers.iter_mut().for_each(|caller| _ = caller.progress());
        node.progress();
    }
    assert_eq!(node.failed_peers(), []);
}

#[test]
fn a_peer_that_is_only_connected_answers_questions_and_is_removed() {
    let provider = Fake::new(Persona::cxi(), 8);
    let [mut a, mut b, c]: [Node; 3] = nodes(&provider, 3).try_into().ok().unwrap();
    for _ in 0..3 {
        let peer = a.connect(b.address()).unwrap();
        assert_eq!(a.connect(b.address()), Ok(peer), "the same address is the same peer");
        let other = a.connect(c.address()).unwrap();
        assert_ne!(other, peer);
        assert_eq!((a.reach(peer).unwrap().fabric, a.rail_pairs(peer).unwrap().len()), (1, 1));
        assert_eq!((a.rail_errors(peer), a.failed_peers()), (Ok(vec![]), vec![]));
        assert_eq!((a.fence(peer), a.quiet(peer, SOON)), (Ok(()), Ok(())));
        assert_eq!(a.quiet_all(SOON), Ok(()));
        assert_eq!(a.eager_max(peer), 0);
        a.disconnect(peer).unwrap();
        assert_eq!(a.reach(peer), Err(Error::Attach(AttachError::UnknownPeer)));
        assert_eq!(a.fence(peer), Err(OpError::UnknownPeer));
        // The peer calls, and is connected anew.
        let (word, handle) = word(&mut a);
        let to_a = b.connect(a.address()).unwrap();
        let there = b.import(to_a, handle).unwrap();
        (0..50).for_each(|_| _ = (a.progress(), b.progress()));
        let again = a.connect(b.address()).unwrap();
        signal(&mut b, &mut a, &[(word, there)]);
        assert_eq!(a.peer_error(again), Ok(None));
        b.disconnect(to_a).unwrap();
        a.disconnect(again).unwrap();
        a.disconnect(other).unwrap();
        a.free(word).unwrap();
    }
    a.connect(b.address()).unwrap();
    a.close(SOON).unwrap();
}

#[test]
fn what_is_wrong_with_an_address_is_said_when_it_is_connected() {
    let provider = Fake::new(Persona::cxi(), 9);
    let limits = Limits { peers: 1, ..Limits::DEFAULT };
    let mut a = fake(&provider, &["cxi0"]).limits(limits).open().unwrap();
    let own = a.address();
    assert!(matches!(a.connect(&own), Err(Error::Attach(AttachError::Config(_)))), "itself");
    let [b, c]: [Node; 2] = nodes(&provider, 2).try_into().ok().unwrap();
    let address = b.address();
    let rail = address.windows(4).position(|word| word == b"fpfa").unwrap();
    // The magic, the version, the kind of notification and the format of the rail's address.
    for at in [rail, rail + 4, rail + 6, rail + 12] {
        let mut bad = address.clone();
        bad[at] ^= 3;
        assert!(matches!(a.connect(&bad), Err(Error::Attach(_))), "byte {at}");
    }
    // The length of a message, and the hash of the provider's name.
    let mut bad = address.clone();
    bad[rail - 6..rail - 2].fill(0);
    assert!(matches!(a.connect(&bad), Err(Error::Attach(AttachError::Config(_)))));
    bad = address.clone();
    bad[rail - 14] ^= 1;
    assert_eq!(a.connect(&bad), Err(Error::NoRail));
    let peer = a.connect(&address).unwrap();
    assert!(matches!(a.connect(c.address()), Err(Error::Full { limit: "peers", value: 1 })));
    a.disconnect(peer).unwrap();
    a.connect(c.address()).unwrap();
}

/// A rail that was fenced has a new address, which only attached peers learn. So a node with
/// failover attaches a peer as soon as it is connected.
#[test]
fn a_node_with_new_endpoints_is_reached_by_peers_that_know_its_old_address() {
    let interfaces = ["eth0", "eth1"];
    let persona = Persona { interfaces: interfaces.to_vec(), ..Persona::tcp() };
    for calls_first in [false, true] {
        let provider = Fake::new(persona.clone(), 3);
        let open = || {
            let settings = Settings {
                providers: vec!["tcp".into()],
                interfaces: interfaces.map(String::from).into(),
                ..Default::default()
            };
            builder().library(provider.library()).settings(settings).shared_memory(false).open().unwrap()
        };
        let [mut a, mut b, mut c] = [open(), open(), open()];
        let old = a.address();
        let (to_b, to_c) = (a.connect(b.address()).unwrap(), a.connect(c.address()).unwrap());
        let at_b = b.connect(&old).unwrap();
        let at_c = c.connect(&old).unwrap();
        let (at_word_c, handle_c) = word(&mut c);
        let there = a.import(to_c, handle_c).unwrap();
        signal(&mut a, &mut c, &[(at_word_c, there)]);
        // Each rail gets a new endpoint.
        for rail in [0, 1].map(|at| a.rails()[at].id) {
            a.disable_rail(to_c, rail).unwrap();
            let step = |a: &mut Node, b: &mut Node, c: &mut Node| {
                a.progress();
                b.progress();
                c.progress();
            };
            let deadline = Instant::now() + SOON;
            while c.rail_errors(at_c).unwrap().is_empty() {
                assert!(Instant::now() < deadline, "not told");
                step(&mut a, &mut b, &mut c);
            }
            a.enable_rail(to_c, rail).unwrap();
            while !(a.rail_errors(to_c).unwrap().is_empty() && c.rail_errors(at_c).unwrap().is_empty()) {
                assert!(Instant::now() < deadline, "it did not return");
                step(&mut a, &mut b, &mut c);
            }
        }
        assert_ne!(a.address(), old);
        let ((word_a, handle_a), (word_b, handle_b)) = (word(&mut a), word(&mut b));
        if calls_first {
            let there = b.import(at_b, handle_a).unwrap();
            signal(&mut b, &mut a, &[(word_a, there)]);
        } else {
            let there = a.import(to_b, handle_b).unwrap();
            signal(&mut a, &mut b, &[(word_b, there)]);
        }
        assert_eq!((a.peer_error(to_b), b.peer_error(at_b)), (Ok(None), Ok(None)));
    }
}
