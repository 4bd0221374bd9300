//! Both ends disable rails at the same time. As long as one rail works, the two stay connected.

use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::rail::sim::schedule::{Nodes, Schedule, Scope as Faults};
use fishplate_core::rail::sim::{Dials, Sim};

use super::closing::cut_link;
use super::schedule::{Ends, Fleet, all_return};
use super::support::fleet::{self, End};
use super::support::scope::Scope;
use super::support::tap::{Event, NOW, Tap, shared};
use super::support::{CX, Random, failover, read, seeds, write};

/// Two nodes that `count` rails join.
fn two(count: u16, closes: bool, dials: Dials, seed: u64) -> (&'static Sim<'static>, Fleet<4>) {
    let sim = fleet::fabric(2, count, 1024, dials, seed);
    let config = Config { seed, ..Config::DEFAULT };
    (sim, fleet::lasting(sim, 2, count, closes, config, 4096, |_, end| end, |_| {}))
}

/// Puts from each node to the other, and waits until the data is there.
fn put(fleet: &mut Fleet<4>, value: u8, what: &str) {
    for (me, node) in fleet.iter_mut().enumerate() {
        let (from, to) = (node.source.at(0), node.remotes[1 - me].at(0));
        write(&node.engine, from, &[value; 512]);
        node.engine.put(CX, from, 512, to, Notice::Report(1)).unwrap();
    }
    let mut ends = [None; 2];
    fleet::turn_until(fleet, what, |fleet| {
        for (node, end) in fleet.iter_mut().zip(&mut ends) {
            *end = end.or_else(|| node.engine.next_completion());
        }
        ends.iter().all(Option::is_some)
    });
    for node in fleet.iter() {
        assert_eq!(read(&node.engine, node.target.at(0), 512), [value; 512], "{what}");
    }
}

fn is_up(fleet: &Fleet<4>, what: &str) {
    for (me, node) in fleet.iter().enumerate() {
        assert_eq!(node.engine.peer_error(node.peers[1 - me]), Ok(None), "{what}, node {me}");
    }
}

/// Which of the fabric's rails a node uses to the other one.
fn used(fleet: &mut Fleet<4>, count: u16, me: u16) -> Vec<u16> {
    let ends = Ends(fleet, count);
    (0..count).filter(|&rail| ends.uses(me, 1 - me, rail)).collect()
}

#[test]
fn two_ends_that_disable_different_rails_at_once_keep_one() {
    for (count, closes, apart) in [2, 3, 4]
        .into_iter()
        .flat_map(|n| [false, true].map(|closes| (n, closes)))
        .flat_map(|(n, closes)| [0, 1, 2, 3, 5, 8, 20, 300].map(|apart| (n, closes, apart)))
    {
        let _scope = Scope::new();
        let what = format!("{count} rails, {closes}, {apart} turns apart");
        let (sim, mut fleet) = two(count, closes, Dials::CALM, 1);
        put(&mut fleet, 1, &what);
        // Each node disables as many as it may, the one from the first on, the other from the last.
        let half = count / 2;
        for rail in 0..half {
            assert!(Ends(&mut fleet, count).disable(0, 1, rail), "{what}");
        }
        (0..apart).for_each(|_| fleet::turn(&mut fleet));
        let mut disabled = 0;
        for rail in half..count {
            disabled += u16::from(Ends(&mut fleet, count).disable(1, 0, rail));
        }
        assert!(apart != 0 || disabled == count - half, "{what}: {disabled} disabled");
        put(&mut fleet, 2, &what);
        (0..20_000).for_each(|_| fleet::turn(&mut fleet));
        is_up(&fleet, &what);
        let [zero, one] = [0, 1].map(|me| used(&mut fleet, count, me));
        assert!(zero == one && !zero.is_empty() && zero.len() < count.into(), "{zero:?} {one:?}");
        put(&mut fleet, 3, &what);
        for (by, rail) in (0..2).flat_map(|by| (0..count).map(move |rail| (by, rail))) {
            Ends(&mut fleet, count).enable(by, 1 - by, rail);
        }
        let faults = Faults { nodes: 2, rails: count, own: true, closes, stalls: false };
        let schedule = Schedule::given(sim, faults, &[], true, &mut []);
        all_return(&schedule, &mut fleet, count, None, 1);
        put(&mut fleet, 4, &what);
    }
}

/// The rail that remains is cut, in one or both directions, before the other end has agreed.
#[test]
fn a_rail_that_is_disabled_is_used_again_if_the_last_other_one_fails_first() {
    for (closes, ways) in [false, true].into_iter().flat_map(|c| [1, 2, 3].map(|ways| (c, ways))) {
        let _scope = Scope::new();
        let what = format!("{closes}, ways {ways}");
        let (sim, mut fleet) = two(2, closes, Dials::CALM, 1);
        put(&mut fleet, 1, &what);
        for (from, to) in [(0, 1), (1, 0)] {
            if ways >> from & 1 != 0 {
                sim.cut(from, to, 1, 0).unwrap();
            }
        }
        assert!(Ends(&mut fleet, 2).disable(0, 1, 0), "{what}");
        put(&mut fleet, 2, &what);
        is_up(&fleet, &what);
        let peer = fleet[0].peers[1];
        assert_eq!(fleet[0].engine.rail_error(peer, RailId(0)), Ok(None), "{what}");
        assert_ne!(fleet[0].engine.rail_error(peer, RailId(1)), Ok(None), "{what}");
    }
}

/// Both ends disable and enable rails at random, and links are cut that both use.
#[test]
fn ends_that_disable_and_enable_at_random_stay_connected() {
    let (mut disabled, mut cut) = (0, 0);
    let seeds = seeds(200);
    for &seed in &seeds {
        let _scope = Scope::new();
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9));
        let (count, closes) = (2 + random.below(3) as u16, random.below(2) == 0);
        let dials = if random.below(2) == 0 { Dials::WILD } else { Dials::CALM };
        let (sim, mut fleet) = two(count, closes, dials, seed);
        let what = format!("seed {seed}");
        let mut broken = None;
        for round in 0..40 {
            for _ in 0..random.below(6) {
                let (by, rail) = (random.below(2) as u16, random.below(count.into()) as u16);
                let mut ends = Ends(&mut fleet, count);
                match random.below(2) {
                    0 => ends.enable(by, 1 - by, rail),
                    _ => disabled += u64::from(ends.disable(by, 1 - by, rail)),
                }
                (0..random.below(4)).for_each(|_| fleet::turn(&mut fleet));
            }
            let [zero, one] = [0, 1].map(|me| used(&mut fleet, count, me));
            let both: Vec<_> = zero.into_iter().filter(|rail| one.contains(rail)).collect();
            if let Some(rail) = broken.take() {
                sim.heal(0, 1, rail).unwrap();
                sim.heal(1, 0, rail).unwrap();
            } else if both.len() > 2 && random.below(2) == 0 {
                let rail = both[random.below(both.len() as u64) as usize];
                sim.cut(0, 1, rail, 0).unwrap();
                sim.cut(1, 0, rail, 0).unwrap();
                (broken, cut) = (Some(rail), cut + 1);
            }
            put(&mut fleet, round, &what);
            is_up(&fleet, &what);
        }
        if let Some(rail) = broken {
            sim.heal(0, 1, rail).unwrap();
            sim.heal(1, 0, rail).unwrap();
        }
        for (by, rail) in (0..2).flat_map(|by| (0..count).map(move |rail| (by, rail))) {
            Ends(&mut fleet, count).enable(by, 1 - by, rail);
        }
        let faults = Faults { nodes: 2, rails: count, own: true, closes, stalls: false };
        let schedule = Schedule::given(sim, faults, &[], true, &mut []);
        all_return(&schedule, &mut fleet, count, None, seed);
        put(&mut fleet, 99, &what);
    }
    println!("{} seeds: {disabled} disabled, {cut} cut", seeds.len());
    assert!(seeds.len() < 100 || disabled >= 1000 && cut >= 100, "{disabled} disabled, {cut} cut");
}

/// Node 0 disables rail 0 to node 1, and then must close its endpoint on rail 1 for node 2. While
/// node 1 may have left rail 0, rail 1 must stay open to it.
#[test]
fn an_endpoint_stays_open_to_a_peer_that_may_have_left_the_other_rail() {
    for apart in 0..200 {
        let _scope = Scope::new();
        let what = format!("{apart} turns apart");
        let dials = Dials { min_delay: 40, max_delay: 40, ..Dials::CALM };
        let sim = fleet::fabric(3, 2, 1024, dials, 1);
        let mut fleet: Fleet<4> =
            fleet::lasting(sim, 3, 2, true, Config::DEFAULT, 4096, |_, end| end, |_| {});
        let one = fleet[0].peers[1];
        for _ in 0..8 {
            let node = &mut fleet[0];
            let (from, to) = (node.source.at(0), node.remotes[2].at(0));
            node.engine.put(CX, from, 512, to, Notice::Silent).unwrap();
        }
        cut_link(sim, 0, 2, 1);
        (0..apart).for_each(|_| fleet::turn(&mut fleet));
        if fleet[0].engine.disable_rail(one, RailId(0)).is_err() {
            // Node 1 has left rail 1 already.
            assert_ne!(apart, 0);
            break;
        }
        (0..3000).for_each(|_| fleet::turn(&mut fleet));
        assert_eq!(fleet[0].engine.peer_error(one), Ok(None), "{what}");
        assert_eq!(fleet[1].engine.peer_error(fleet[1].peers[0]), Ok(None), "{what}");
    }
}

/// Node 0 disables rail 0 to node 2, which may have left that rail when it stops. If rail 0 fails
/// between nodes 0 and 1, node 0 closes its endpoint: rail 1 still leads to node 2.
#[test]
fn a_peer_that_may_have_left_a_rail_does_not_keep_its_endpoint_open() {
    for apart in 0..60 {
        let _scope = Scope::new();
        NOW.set(1);
        let sim = fleet::fabric(3, 2, 1024, Dials::CALM, 1);
        let controls = [shared(), shared(), shared()];
        let keep = |engine: &mut Engine<'static, Tap<End, true>, 2>| {
            engine.attach_failover(failover(&Config::DEFAULT, 3)).unwrap();
        };
        let wrap = |node: u16, rail: u16, end: End| {
            Tap::timed(end.with_closing_fence(), rail.into(), &controls[node as usize])
        };
        let mut nodes = fleet::prepared::<_, 2>(sim, 3, Config::DEFAULT, 4096, wrap, keep);
        let [one, two] = [nodes[0].peers[1], nodes[0].peers[2]];
        nodes[0].engine.disable_rail(two, RailId(0)).unwrap();
        for turn in 0..apart {
            nodes[turn % 3].engine.progress();
        }
        // Node 2 stops.
        controls[0].borrow_mut().inject.push_back(Event::Down(Peer(1), PeerError::Lost));
        for _ in 0..300 {
            NOW.set(NOW.get() + 10_000_000);
            for node in &mut nodes[..2] {
                (0..8).for_each(|_| _ = node.engine.progress());
                node.engine.check_peers();
            }
        }
        assert_eq!(nodes[0].engine.peer_error(one), Ok(None), "{apart} passes apart");
    }
}
