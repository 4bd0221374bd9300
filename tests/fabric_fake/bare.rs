//! Tests an interface without an address, so that no endpoint can be opened on it. Peers join over
//! the other rails. The interface's rail joins once the interface has an address again.

use std::time::{Duration, Instant};

use fishplate_core::engine::{Config, Engine, Notice, Signal};
use fishplate_core::error::{AttachError, CompleteError, PeerError, PostError};
use fishplate_core::mem::{Peer, PeerId, RailId, Untrusted};
use fishplate_core::rail::{Fence, Posted, REOPEN_MAX, Rail, Sink};
use fishplate_sys::fabric::FabricRail;
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::{engine, failover, region, word};
use crate::fixture::{Checked, rail};
use crate::two::CX;

const INTERFACES: [&str; 2] = ["eth0", "eth1"];

type Node = Engine<'static, FabricRail, 2>;

fn network() -> Checked {
    Checked(Fake::new(Persona { interfaces: INTERFACES.to_vec(), ..Persona::tcp() }, 7))
}

fn rails(fake: &Fake, node: u64) -> [FabricRail; 2] {
    [0, 1].map(|at| rail(fake, "tcp", INTERFACES[at], 2 * node + at as u64))
}

fn connect(engine: &mut Node, addresses: &[Vec<u8>; 2]) -> Result<PeerId, AttachError> {
    let peer = engine.reserve_peer()?;
    for (at, address) in (0..).zip(addresses) {
        engine.rail_mut(RailId(at)).unwrap().attach(peer.peer(), address)?;
    }
    engine.connect_peer(peer, 0b11)?;
    Ok(peer)
}

fn until<const N: usize>(
    what: &str,
    all: &mut [Node; N],
    mut ready: impl FnMut(&mut [Node; N]) -> bool,
) {
    let end = Instant::now() + Duration::from_secs(20);
    while !ready(all) {
        for node in all.iter_mut() {
            node.progress();
            // `check_peers` is part of each wait function of an engine.
            node.check_peers();
        }
        assert!(Instant::now() < end, "{what}");
    }
}

#[test]
fn a_peer_joins_over_the_other_rail_and_this_one_joins_later() {
    // The seed selects the rail that carries the first message.
    (0..4).for_each(joins_over_the_other_rail);
}

fn joins_over_the_other_rail(seed: u64) {
    let network = network();
    let fake = &network.0;
    let rails = [0, 1, 2].map(|node| rails(fake, node));
    let addresses =
        rails.each_ref().map(|node| node.each_ref().map(|rail| rail.address().unwrap()));
    let mut nodes = rails.map(|rails| {
        let mut node = engine(Config { seed, ..Config::DEFAULT }, rails);
        node.attach_failover(failover(&Config::DEFAULT, 4)).unwrap();
        node
    });
    let to_b = connect(&mut nodes[0], &addresses[1]).unwrap();
    connect(&mut nodes[1], &addresses[0]).unwrap();
    until("a and b have met", &mut nodes, |nodes| nodes[0].has_failover(to_b) == Ok(true));
    // Fencing closes the endpoint. A new endpoint cannot be opened.
    fake.set_address("eth1", false);
    nodes[0].disable_rail(to_b, RailId(1)).unwrap();
    until("a has fenced b", &mut nodes, |nodes| {
        nodes[0].rail(RailId(1)).is_some_and(|rail| rail.is_fenced(to_b.peer()))
    });

    let to_c = connect(&mut nodes[0], &addresses[2]).expect("it joins over the other rail");
    connect(&mut nodes[2], &addresses[0]).unwrap();
    until("c knows", &mut nodes, |nodes| nodes[2].stats().rails_failed == 1);
    let source = nodes[0].register(region(4096)).unwrap();
    let target = nodes[2].register(region(4096)).unwrap();
    let mut handle = [0; 512];
    let len = nodes[2].export(target, &mut handle).unwrap();
    let remote = nodes[0].import(to_c, &handle[..len]).unwrap();
    for (value, both) in [(1, false), (2, true)] {
        if both {
            fake.set_address("eth1", true);
            until("the rail to c returns", &mut nodes, |nodes| {
                [0, 2].into_iter().all(|node| nodes[node].stats().rails_returned == 1)
            });
            assert_eq!(nodes[0].rail_error(to_c, RailId(1)), Ok(None));
        }
        let before = fake.posted_on("eth1");
        for _ in 0..32 {
            let (from, signal) = (source.at(0), Signal::set(remote.at(0), value));
            nodes[0].put_signal(CX, from, 1024, remote.at(64), signal, Notice::Silent).unwrap();
            until("a signal", &mut nodes, |nodes| nodes[0].is_quiet(CX, to_c) == Ok(true));
        }
        assert_eq!(word(&nodes[2], target.at(0)), value);
        assert_eq!(fake.posted_on("eth1") != before, both, "value {value}");
        assert_eq!(nodes[0].stats().rails_returned, both as u64);
    }
    assert_eq!((nodes[0].peer_error(to_c), nodes[0].peer_error(to_b)), (Ok(None), Ok(None)));
}

#[test]
fn a_peer_that_returns_at_our_own_address_is_refused() {
    let network = network();
    let [mut a, _] = rails(&network.0, 0);
    let [b, _] = rails(&network.0, 1);
    let theirs = b.address().unwrap();
    a.attach(Peer(0), &theirs).unwrap();
    assert_eq!(a.fence(Peer(0)), Fence::Fenced);
    let end = Instant::now() + Duration::from_secs(20);
    while a.reopen(Peer(0), &mut [0; REOPEN_MAX]).is_none() {
        assert!(Instant::now() < end, "it opens again");
    }
    // An address of a rail: 16 bytes with the rail's random id, then the provider's address.
    let own = [&theirs[..16], &a.address().unwrap()[16..]].concat();
    assert_eq!(a.rejoin(Peer(0), &own), Err(AttachError::BadHandle));
    assert!(a.is_fenced(Peer(0)), "nothing has changed");
    a.rejoin(Peer(0), &theirs).unwrap();
}

#[test]
fn a_peer_that_has_left_is_fenced_without_closing_the_endpoint() {
    let network = network();
    let [[mut a, _], [mut b, _], [mut c, _]] = [0, 1, 2].map(|node| rails(&network.0, node));
    let addresses = [&a, &b, &c].map(|rail| rail.address().unwrap());
    a.attach(Peer(1), &addresses[1]).unwrap();
    a.attach(Peer(2), &addresses[2]).unwrap();
    b.attach(Peer(0), &addresses[0]).unwrap();
    b.attach(Peer(2), &addresses[2]).unwrap();
    c.attach(Peer(1), &addresses[1]).unwrap();
    // A message to `a` is in flight when `a` closes its endpoint.
    let long = [7; 200];
    assert_eq!(post(&mut b, 0, &long), Posted::Pending);
    assert_eq!(a.fence(Peer(2)), Fence::Fenced);
    assert_eq!(b.fence_left(Peer(0)), Fence::Pending);
    let mut seen = Seen::default();
    let end = Instant::now() + Duration::from_secs(20);
    while b.fence_left(Peer(0)) != Fence::Fenced {
        b.poll(8, &mut seen);
        assert!(Instant::now() < end, "the post completes");
    }
    assert!(b.is_fenced(Peer(0)) && !b.is_fenced(Peer(2)));
    assert_eq!(b.fence_left(Peer(0)), Fence::Fenced);
    assert_eq!(b.address().unwrap(), addresses[1], "its endpoint is still open");
    post(&mut b, 2, &[5]);
    while seen.messages == 0 {
        b.poll(8, &mut seen);
        c.poll(8, &mut seen);
        assert!(Instant::now() < end, "the other peer hears from it");
    }
    // Both attach each other again. `b` attaches `a` at the address of a new endpoint.
    while b.reopen(Peer(0), &mut [0; REOPEN_MAX]).is_none() {
        b.poll(8, &mut seen);
        assert!(Instant::now() < end, "it opens again");
    }
    b.rejoin(Peer(0), &a.address().unwrap()).unwrap();
    a.rejoin(Peer(1), &addresses[1]).unwrap();
    post(&mut b, 0, &[6]);
    while seen.messages == 1 {
        b.poll(8, &mut seen);
        a.poll(8, &mut seen);
        assert!(Instant::now() < end, "the peer hears from it again");
    }
}

/// Posts a message once the rail has room.
fn post(rail: &mut FabricRail, peer: u16, bytes: &[u8]) -> Posted {
    loop {
        match rail.post_message(Peer(peer), bytes, Untrusted::from_slice(&[]), 1) {
            Err(PostError::Again) => {}
            posted => return posted.unwrap(),
        }
    }
}

#[derive(Default)]
struct Seen {
    messages: u32,
}

impl Sink for Seen {
    fn done(&mut self, _: u64, _: Result<(), CompleteError>) {}
    fn landed(&mut self, _: Peer, _: u32) {}
    fn message(&mut self, _: Peer, _: Untrusted<'_>) {
        self.messages += 1;
    }
    fn peer_down(&mut self, _: Peer, _: PeerError) {}
}
