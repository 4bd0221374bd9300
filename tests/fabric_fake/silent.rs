//! A peer that makes no progress for some time, with engines that survive the loss of a rail.

use std::time::{Duration, Instant};

use fishplate_core::engine::Config;
use fishplate_core::error::PeerError;
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::Fault;
use fishplate_sys::fabric::raw::FI_PROGRESS_MANUAL;
use fishplate_sys::fabric::{Ask, FabricConfig, FabricRail, negotiate};
use fishplate_testing::fabric::{Fake, Persona};

use crate::behaviour::{failover, fleet};
use crate::fixture::Checked;
use crate::two::Two;

const DEADLINE: Duration = Duration::from_millis(100);

/// Two engines that two rails join over tcp, with a short deadline.
fn two(failover_is_on: bool) -> Two<2> {
    // A peer that does not poll completes nothing.
    let fake = Fake::new(Persona { progress: FI_PROGRESS_MANUAL, ..Persona::tcp() }, 7);
    let open = |node: u64, rail: usize| {
        let ask = Ask { interface: Some(["eth0", "eth1"][rail]), ..Ask::new("tcp") };
        let (deadline, seed) = (Some(DEADLINE), Some(node << 8 | rail as u64));
        let config = FabricConfig { deadline, seed, inject: false, ..FabricConfig::default() };
        FabricRail::open(&negotiate(fake.library(), &ask).unwrap(), config).unwrap()
    };
    let mut rails = [1, 2].map(|node| [0, 1].map(|rail| open(node, rail)));
    let addresses = rails.each_ref().map(|node| node.each_ref().map(|r| r.address().unwrap()));
    for (own, node) in rails.iter_mut().enumerate() {
        for (at, rail) in node.iter_mut().enumerate() {
            rail.attach_self(Peer(own as u16)).unwrap();
            rail.attach(Peer(1 - own as u16), &addresses[1 - own][at]).unwrap();
        }
    }
    let (rails, config) = (rails.into(), Config::DEFAULT);
    let nodes = fleet::join_prepared(
        rails,
        config,
        1 << 20,
        fleet::alike,
        |_| None,
        |engine| {
            if failover_is_on {
                engine.attach_failover(failover(&config, 2)).unwrap();
            }
        },
    );
    Two { nodes, fake: Checked(fake) }
}

/// Node 1 is stopped while both rails have posts to it. Returns the time after which it fails.
fn stop(two: &mut Two<2>, limit: Duration) -> Option<Duration> {
    (0..8).for_each(|_| two.put(0, 4096, 0));
    let (peer, begun) = (two.nodes[0].peers[1], Instant::now());
    while begun.elapsed() < limit {
        (0..100).for_each(|_| _ = two.nodes[0].engine.progress());
        two.nodes[0].engine.check_peers();
        if two.nodes[0].engine.peer_error(peer) != Ok(None) {
            return Some(begun.elapsed());
        }
    }
    None
}

#[test]
fn a_peer_that_stops_for_three_deadlines_is_not_lost() {
    let mut two = two(true);
    two.put(0, 64, 0);
    two.quiet();
    assert_eq!(stop(&mut two, 3 * DEADLINE), None);
    two.quiet();
    let stats = two.nodes[0].engine.stats();
    assert_eq!((stats.rails_failed, stats.reposted), (0, 0));
}

#[test]
fn a_peer_that_does_not_continue_is_lost_and_the_reason_is_the_deadline() {
    for failover_is_on in [true, false] {
        let mut two = two(failover_is_on);
        two.put(0, 64, 0);
        two.quiet();
        let failed = stop(&mut two, 100 * DEADLINE).expect("the peer fails");
        let engine = &two.nodes[0].engine;
        let peer = two.nodes[0].peers[1];
        assert_eq!(engine.peer_error(peer), Ok(Some(PeerError::Silent)));
        if failover_is_on {
            assert!(failed >= 6 * DEADLINE, "{failed:?}");
            let why = Ok(Some(Fault::Peer(PeerError::Silent)));
            assert_eq!([0, 1].map(|rail| engine.rail_error(peer, RailId(rail))), [why; 2]);
        }
    }
}
