//! The counters of each rail, and the changes that an engine reports to its owner.

use fishplate_core::engine::{Config, Engine, Notice, RailChange, RailStats};
use fishplate_core::error::PeerError;
use fishplate_core::mem::RailId;
use fishplate_core::rail::sim::{Dials, Sim};

use super::closing::{cut_link, heal_link};
use super::support::fleet::{self, End, Node};
use super::support::scope::Scope;
use super::support::tap::{NOW, Tap, shared};
use super::support::{CX, failover};

type Fleet = Vec<Node<Tap<End, true>, 2>>;

/// The time of a pass of all nodes.
const PASS_NS: u64 = 10_000;

const CONFIG: Config = Config { batch: 2, ..Config::DEFAULT };

/// Two nodes on two rails. Only node 0 reports changes. A pass posts few numbers again.
fn pair() -> (&'static Sim<'static>, Fleet) {
    NOW.set(1);
    let dials = Dials { min_delay: 10, max_delay: 100, ..Dials::CALM };
    let (sim, control) = (fleet::fabric(2, 2, 1024, dials, 1), shared());
    let keep = |engine: &mut Engine<'static, Tap<End, true>, 2>| {
        engine.attach_failover(failover(&CONFIG, 2)).unwrap();
    };
    let wrap = |_, rail: u16, end: End| Tap::timed(end, rail.into(), &control);
    let mut fleet = fleet::prepared(sim, 2, CONFIG, 4096, wrap, keep);
    fleet[0].engine.report_rail_changes();
    (sim, fleet)
}

fn turn(fleet: &mut Fleet) {
    NOW.set(NOW.get() + PASS_NS);
    fleet.iter_mut().for_each(|node| _ = node.engine.progress());
    if NOW.get() % (1000 * PASS_NS) <= PASS_NS {
        fleet.iter_mut().for_each(|node| node.engine.check_peers());
    }
}

fn put(fleet: &mut Fleet) {
    let node = &mut fleet[0];
    for n in 0..8 {
        let (from, to) = (node.source.at(0), node.remotes[1].at(512 * n));
        node.engine.put(CX, from, 512, to, Notice::Silent).unwrap();
    }
}

fn counts(fleet: &Fleet, node: usize, rail: u8) -> RailStats {
    fleet[node].engine.rail_stats(RailId(rail)).unwrap()
}

#[test]
fn each_rail_counts_its_failures_and_the_time_until_all_is_posted_again() {
    let _scope = Scope::new();
    let (sim, mut fleet) = pair();
    assert_eq!(fleet[0].engine.rail_stats(RailId(2)), None);
    let (mut longest, mut reposted) = (0, 0);
    for round in 1..=2 {
        put(&mut fleet);
        turn(&mut fleet);
        cut_link(sim, 0, 1, 1);
        let (to, mut failed_ns, mut last_ns) = (fleet[0].peers[1], 0, 0);
        while fleet[0].engine.is_quiet(CX, to) != Ok(true) {
            let before = fleet[0].engine.stats().reposted;
            turn(&mut fleet);
            if failed_ns == 0 && fleet[0].engine.rail_error(to, RailId(1)) != Ok(None) {
                failed_ns = NOW.get();
            }
            if fleet[0].engine.stats().reposted != before {
                last_ns = NOW.get();
            }
            assert!(
                NOW.get() < 10_000_000_000,
                "{:?}",
                fleet
                    .iter()
                    .map(|n| n
                        .peers
                        .iter()
                        .map(|&p| (
                            n.engine.peer_error(p),
                            [0, 1].map(|r| n.engine.rail_error(p, RailId(r)))
                        ))
                        .collect::<Vec<_>>())
                    .collect::<Vec<_>>()
            );
        }
        assert!(last_ns > failed_ns, "nothing was lost");
        let RailStats { resumed_ns, resumed_max_ns, .. } = counts(&fleet, 0, 1);
        let took = last_ns - failed_ns;
        assert!(took < longest || round == 1, "{took}: the second failure costs less");
        longest = longest.max(took);
        assert_eq!((resumed_ns, resumed_max_ns), (took, longest), "round {round}");
        heal_link(sim, 0, 1, 1);
        [0, 1].into_iter().for_each(|rail| sim.set_dials(rail, Dials::CALM));
        while [0, 1].iter().any(|&node| counts(&fleet, node, 1).returned != round) {
            turn(&mut fleet);
            assert!(NOW.get() < 10_000_000_000, "no return");
        }
        for (node, stats) in [0, 1].map(|node| (node, fleet[node].engine.stats())) {
            let RailStats { failed, fenced, returned, reposted, .. } = counts(&fleet, node, 1);
            assert_eq!((failed, fenced, returned), (round, round, round), "node {node}");
            let all = (stats.rails_failed, stats.rails_returned, stats.reposted);
            assert_eq!(all, (failed, returned, reposted), "node {node}");
            assert_eq!(counts(&fleet, node, 0), RailStats::default(), "node {node}");
        }
        assert!(counts(&fleet, 0, 1).reposted > reposted);
        reposted = counts(&fleet, 0, 1).reposted;
    }
}

#[test]
fn the_owner_learns_which_rails_have_failed_and_returned() {
    let _scope = Scope::new();
    let (sim, mut fleet) = pair();
    let peers = [fleet[0].peers[1], fleet[1].peers[0]];
    let changed = |fleet: &mut Fleet, what: &str| {
        let end = NOW.get() + 10_000_000_000;
        while !fleet[0].engine.has_call() {
            turn(fleet);
            assert!(NOW.get() < end, "not reported: {what}");
        }
        fleet[0].engine.end_call();
        let changes: Vec<_> = std::iter::from_fn(|| fleet[0].engine.next_rail_change()).collect();
        changes
    };
    let change = |rail, error| RailChange { peer: peers[0], rail: RailId(rail), error };
    for rail in [1, 0] {
        put(&mut fleet);
        cut_link(sim, 0, 1, rail.into());
        let failed = changed(&mut fleet, "a failure");
        let why = fleet[0].engine.rail_error(peers[0], RailId(rail)).unwrap();
        assert!(failed == [change(rail, why)] && why.is_some(), "{failed:?} {why:?}");
        heal_link(sim, 0, 1, rail.into());
        assert_eq!(changed(&mut fleet, "a return"), [change(rail, None)]);
        while counts(&fleet, 1, rail).returned == 0 {
            turn(&mut fleet);
        }
    }
    // Node 1 has not asked for reports. It takes the present state of the rails that have changed.
    assert!(!fleet[1].engine.has_call());
    let change = |rail| RailChange { peer: peers[1], rail: RailId(rail), error: None };
    assert_eq!(
        [(); 3].map(|()| fleet[1].engine.next_rail_change()),
        [Some(change(0)), Some(change(1)), None]
    );
    // The last rail is reported too, although the peer fails with it.
    let mut seen = vec![];
    put(&mut fleet);
    [1, 0].into_iter().for_each(|rail| cut_link(sim, 0, 1, rail));
    while seen.len() < 2 {
        seen.extend(changed(&mut fleet, "the last rail"));
    }
    seen.sort_by_key(|change| change.rail.0);
    let rails: Vec<_> = seen.iter().map(|change| (change.rail.0, change.error.is_some())).collect();
    assert_eq!(rails, [(0, true), (1, true)]);
    let failed = fleet[0].engine.peer_error(peers[0]);
    assert!(matches!(failed, Ok(Some(PeerError::Rail(_)))), "{failed:?}");
}

/// A change may be taken while the node has disabled the rail, and the peer has not agreed. If the
/// rail is enabled again, nothing else is reported.
#[test]
fn a_rail_that_the_peer_has_not_left_is_reported_as_in_use() {
    let _scope = Scope::new();
    let (sim, mut fleet) = pair();
    let (peer, rail) = (fleet[0].peers[1], RailId(1));
    put(&mut fleet);
    cut_link(sim, 0, 1, 1);
    while fleet[0].engine.rail_error(peer, rail) == Ok(None) {
        turn(&mut fleet);
    }
    heal_link(sim, 0, 1, 1);
    while fleet[0].engine.stats().rails_returned == 0 {
        turn(&mut fleet);
    }
    fleet[0].engine.disable_rail(peer, rail).unwrap();
    let change = RailChange { peer, rail, error: None };
    assert_eq!(fleet[0].engine.next_rail_change(), Some(change));
    fleet[0].engine.enable_rail(peer, rail).unwrap();
    (0..1000).for_each(|_| turn(&mut fleet));
    assert_eq!(fleet[0].engine.next_rail_change(), None);
    assert_eq!(fleet[0].engine.rail_error(peer, rail), Ok(None));
}
