//! Several links fail at once. A fence on these rails closes the whole endpoint. Two nodes stay
//! connected if two rails between them work, or if one rail works that neither node must close.

use std::cell::Cell;
use std::rc::Rc;

use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::Fault;
use fishplate_core::rail::Rail;
use fishplate_core::rail::sim::schedule::Link;
use fishplate_core::rail::sim::{Dials, Sim};

use super::run::{Closing, Totals, run_in};
use super::schedule::Fleet;
use super::support::fleet::{End, Node};
use super::support::scope::Scope;
use super::support::tap::{Event, NOW, Tap, shared};
use super::support::{CX, Random, failover, fleet, read, seeds, write};

/// The kind of a request to leave a rail.
pub const LEAVE: u8 = 12;

fn link(a: u16, b: u16, rail: u16) -> Link {
    Link { a, b, rail }
}

fn two_pairs() -> Closing {
    Closing { nodes: 4, rails: 2, cuts: vec![link(0, 1, 0), link(2, 3, 1)] }
}

fn three_pairs() -> Closing {
    Closing { nodes: 4, rails: 3, cuts: vec![link(0, 1, 0), link(2, 3, 1), link(1, 2, 0)] }
}

/// Returns a fleet of a size drawn from the seed. The links fail and return at random.
fn drawn(seed: u64) -> Closing {
    let mut random = Random(!seed);
    Closing { nodes: 2 + random.below(3) as u16, rails: 2 + random.below(3) as u16, cuts: vec![] }
}

fn run_all(count: u64, closing: impl Fn(u64) -> Closing) {
    let mut totals = Totals::default();
    seeds(count).into_iter().for_each(|seed| run_in(seed, Some(&closing(seed)), &mut totals));
    println!("{totals:?}");
}

#[test]
fn two_pairs_that_lose_different_rails_at_once_stay_connected() {
    run_all(50, |_| two_pairs());
}

#[test]
fn three_pairs_that_lose_rails_at_once_stay_connected() {
    run_all(50, |_| three_pairs());
}

#[test]
fn schedules_with_several_cuts_at_once() {
    run_all(100, drawn);
}

/// In these runs a node asks its peer to leave a rail while another rail between the two is cut,
/// undetected. In the first run, only one of the two nodes uses a third rail.
#[test]
fn no_rail_is_left_for_one_that_does_not_work() {
    run_in(2408, Some(&drawn(2408)), &mut Totals::default());
    run_in(2693, Some(&three_pairs()), &mut Totals::default());
}

/// In this run both ends of a rail close their endpoints, one before the other. The traffic of the
/// first end arrives at the other end twice, the second time very late.
#[test]
fn late_arrivals_from_a_closed_endpoint_are_dropped() {
    run_in(1357, Some(&drawn(1357)), &mut Totals::default());
}

/// Creates nodes on two rails. `wrap` wraps the endpoint of each node and rail.
fn nodes<R: Rail>(
    count: u16,
    wrap: impl FnMut(u16, u16, End) -> R,
) -> (&'static Sim<'static>, Vec<Node<R, 2>>) {
    let sim = fleet::fabric(count, 2, 256, Dials::CALM, 1);
    let keep = |engine: &mut Engine<'static, R, 2>| {
        engine.attach_failover(failover(&Config::DEFAULT, count.into())).unwrap();
    };
    (sim, fleet::prepared(sim, count, Config::DEFAULT, 4096, wrap, keep))
}

/// Cuts the link from node 0 to node 1 on rail 0 while puts are in flight, and completes the puts.
/// Only the first `awake` nodes make passes.
fn cut<R: Rail>(sim: &Sim<'_>, fleet: &mut [Node<R, 2>], awake: usize) {
    for n in 0..8 {
        let node = &mut fleet[0];
        let (from, to) = (node.source.at(0), node.remotes[1].at(512 * n));
        node.engine.put(CX, from, 512, to, Notice::Silent).unwrap();
    }
    fleet[0].engine.progress();
    cut_link(sim, 0, 1, 0);
    for _ in 0..1 << 20 {
        fleet[..awake].iter_mut().for_each(|node| _ = node.engine.progress());
        let to = fleet[0].peers[1];
        if fleet[0].engine.is_quiet(CX, to) == Ok(true) {
            assert_ne!(fleet[0].engine.stats().reposted, 0);
            return;
        }
    }
    panic!("the puts do not complete; {:?}", fleet[0].engine.stats());
}

/// Heals the link. All rails return.
fn heal<R: Rail>(sim: &Sim<'_>, fleet: &mut [Node<R, 2>]) {
    heal_link(sim, 0, 1, 0);
    fleet::turn_until(fleet, "all rails are back", |fleet| {
        fleet.iter().all(|node| {
            node.peers.iter().all(|&peer| {
                [0, 1].iter().all(|&rail| node.engine.rail_error(peer, RailId(rail)) == Ok(None))
            })
        })
    });
}

#[test]
fn a_node_that_others_leave_keeps_its_endpoint() {
    let _scope = Scope::new();
    let (sim, mut fleet) = nodes(3, |_, _, end| end.with_closing_fence());
    cut(sim, &mut fleet, 3);
    heal(sim, &mut fleet);
    // If node 2 had closed its endpoint, it would also have lost its rail to itself.
    assert_eq!([0, 1, 2].map(|node: usize| fleet[node].engine.stats().rails_failed), [3, 3, 2]);
}

#[test]
fn an_endpoint_is_closed_although_a_peer_does_not_answer() {
    let _scope = Scope::new();
    let (sim, mut fleet) = nodes(3, |_, _, end| end.with_closing_fence());
    cut(sim, &mut fleet, 2);
    heal(sim, &mut fleet);
}

#[test]
fn a_silent_peer_delays_the_close_by_a_time_and_not_by_turns() {
    let _scope = Scope::new();
    let control = shared();
    let (sim, mut fleet) =
        nodes(3, |_, rail, end| Tap::timed(end.with_closing_fence(), rail.into(), &control));
    let one = fleet[0].peers[1];
    cut_link(sim, 0, 1, 0);
    fleet[0].engine.disable_rail(one, RailId(0)).unwrap();
    let closed = |fleet: &mut [Node<_, 2>]| {
        passes(fleet, 2, 50);
        fleet[0].engine.check_peers();
        !control.borrow().fences.is_empty()
    };
    // Node 2 makes no passes, so it does not leave rail 0.
    assert!(!(0..200).any(|_| closed(&mut fleet)), "closed without a pause");
    // A pause of this process does not count as silence of the peer.
    NOW.set(NOW.get() + 1_000_000_000);
    assert!(!closed(&mut fleet), "closed after a pause of this process");
    let waited = (0..100).position(|_| {
        NOW.set(NOW.get() + 1_000_000);
        closed(&mut fleet)
    });
    assert!(waited.is_some_and(|ms| (50..90).contains(&ms)), "closed after {waited:?} ms");
}

fn passes<R: Rail>(fleet: &mut [Node<R, 2>], awake: usize, count: usize) {
    for _ in 0..count {
        fleet[..awake].iter_mut().for_each(|node| _ = node.engine.progress());
    }
}

pub fn heal_link(sim: &Sim<'_>, a: u16, b: u16, rail: u16) {
    sim.heal(a, b, rail).unwrap();
    sim.heal(b, a, rail).unwrap();
}

pub fn cut_link(sim: &Sim<'_>, a: u16, b: u16, rail: u16) {
    sim.cut(a, b, rail, 0).unwrap();
    sim.cut(b, a, rail, 0).unwrap();
}

#[test]
fn a_peer_that_has_left_a_rail_stays_connected_while_the_endpoint_cannot_be_closed() {
    let _scope = Scope::new();
    let (sim, mut fleet) = nodes(4, |_, _, end| end.with_closing_fence());
    // Node 3 makes no passes, so it does not leave rail 0.
    cut_link(sim, 0, 1, 0);
    let [_, _, two, three] = fleet[0].peers[..] else { panic!("four peers") };
    let one = fleet[0].peers[1];
    fleet[0].engine.disable_rail(one, RailId(0)).unwrap();
    for _ in 0..10_000 {
        passes(&mut fleet, 3, 1);
        if fleet[0].engine.rail_error(two, RailId(0)) != Ok(None) {
            break;
        }
    }
    assert_ne!(fleet[0].engine.rail_error(two, RailId(0)), Ok(None), "node 2 has not left rail 0");
    // Now rail 0 is the last rail to node 3.
    fleet[0].engine.disable_rail(three, RailId(1)).unwrap();
    passes(&mut fleet, 3, 20_000);
    assert_eq!(fleet[0].engine.peer_error(two), Ok(None));
    assert_eq!(fleet[2].engine.peer_error(fleet[2].peers[0]), Ok(None));
}

#[test]
fn no_peer_leaves_a_rail_for_a_fence_that_is_no_longer_needed() {
    let _scope = Scope::new();
    let (sim, mut fleet) = nodes(4, |_, _, end| end.with_closing_fence());
    let peers = fleet[0].peers.clone();
    // Rail 0 becomes the last rail to node 3, so it cannot be closed for node 1.
    cut_link(sim, 0, 3, 1);
    fleet[0].engine.disable_rail(peers[3], RailId(1)).unwrap();
    fleet[0].engine.enable_rail(peers[3], RailId(1)).unwrap();
    passes(&mut fleet, 4, 5000);
    let errors = |fleet: &[Node<_, 2>], peer: usize| {
        [0, 1].map(|rail| fleet[0].engine.rail_error(peers[peer], RailId(rail)).unwrap().is_some())
    };
    assert_eq!([2, 3].map(|peer| errors(&fleet, peer)), [[false; 2], [false, true]]);
    cut_link(sim, 0, 1, 0);
    fleet[0].engine.disable_rail(peers[1], RailId(0)).unwrap();
    passes(&mut fleet, 4, 1000);
    for _ in 0..200 {
        fleet[0].engine.check_peers();
        passes(&mut fleet, 4, 10);
    }
    assert!(fleet[0].engine.peer_error(peers[1]).unwrap().is_some(), "node 1 is still awaited");
    for to in [0, 2, 0, 2] {
        let node = &mut fleet[0];
        node.engine
            .put(CX, node.source.at(0), 512, node.remotes[to].at(0), Notice::Silent)
            .unwrap();
        fleet::turn_until(&mut fleet, "the put completes", |fleet| {
            fleet[0].engine.is_quiet(CX, peers[to]) == Ok(true)
        });
        passes(&mut fleet, 4, 1000);
    }
    assert_eq!(errors(&fleet, 2), [false; 2], "node 2 has left a rail");
}

#[test]
fn the_highest_ticket_does_not_stop_later_requests() {
    let _scope = Scope::new();
    let controls = [shared(), shared(), shared()];
    let (sim, mut fleet) = nodes(3, |node, rail, end| {
        Tap::new(end.with_closing_fence(), rail.into(), &controls[node as usize])
    });
    // Forges the first request that node 0 receives: changes its ticket to the highest one.
    let forged = Rc::new(Cell::new(false));
    let seen = forged.clone();
    controls[0].borrow_mut().edit = Some(Box::new(move |_, event| match event {
        Event::Message(peer, mut bytes)
            if bytes[0] == LEAVE && peer != Peer(0) && !seen.replace(true) =>
        {
            bytes[16..].fill(0xff);
            vec![Event::Message(peer, bytes)]
        }
        event => vec![event],
    }));
    let to = fleet[1].peers[2];
    fleet[1].engine.disable_rail(to, RailId(1)).unwrap();
    fleet::turn_until(&mut fleet, "the request arrives", |_| forged.get());
    fleet[1].engine.enable_rail(to, RailId(1)).unwrap();
    heal(sim, &mut fleet);
    cut(sim, &mut fleet, 3);
    heal(sim, &mut fleet);
}

#[test]
fn what_was_sent_on_a_rail_that_is_left_does_not_land_late() {
    for seed in 1..=20 {
        let _scope = Scope::new();
        let sim = fleet::fabric(3, 2, 256, Dials::CALM, seed);
        let mut fleet: Fleet<2> =
            fleet::lasting(sim, 3, 2, true, Config::DEFAULT, 4096, |_, end| end, |_| ());
        sim.set_dials(0, Dials { min_delay: 300, max_delay: 300, ..Dials::CALM });
        let to = fleet[0].peers[2];
        for value in [1, 2] {
            let node = &mut fleet[0];
            write(&node.engine, node.source.at(0), &[value; 1024]);
            for n in 0..8 {
                let (from, to) = (node.source.at(128 * n), node.remotes[2].at(128 * n));
                node.engine.put(CX, from, 128, to, Notice::Silent).unwrap();
            }
            node.engine.progress();
            if value == 1 {
                node.engine.disable_rail(node.peers[1], RailId(0)).unwrap();
            }
            fleet::turn_until(&mut fleet, "the puts complete", |fleet| {
                fleet[0].engine.is_quiet(CX, to) == Ok(true)
            });
        }
        (0..500).for_each(|_| fleet::turn(&mut fleet));
        assert_ne!(fleet[2].engine.stats().rails_failed, 0);
        assert_eq!(read(&fleet[2].engine, fleet[2].target.at(0), 1024), [2; 1024], "seed {seed}");
    }
}

#[test]
fn a_rail_that_is_disabled_while_a_peer_leaves_it_is_still_drained() {
    let _scope = Scope::new();
    let (sim, mut fleet) = nodes(3, |_, _, end| end.with_closing_fence());
    sim.set_dials(0, Dials { min_delay: 300, max_delay: 300, ..Dials::CALM });
    let peers = fleet[0].peers.clone();
    for n in 0..8 {
        let node = &mut fleet[0];
        let (from, to) = (node.source.at(128 * n), node.remotes[2].at(128 * n));
        node.engine.put(CX, from, 128, to, Notice::Silent).unwrap();
    }
    fleet[0].engine.progress();
    fleet[0].engine.disable_rail(peers[1], RailId(0)).unwrap();
    fleet::turn_until(&mut fleet, "node 2 leaves rail 0", |fleet| {
        fleet[0].engine.rail_error(peers[2], RailId(0)) != Ok(None)
    });
    fleet[0].engine.disable_rail(peers[2], RailId(0)).unwrap();
    assert_eq!(
        fleet[0].engine.rail_error(peers[2], RailId(0)),
        Ok(Some(Fault::Peer(PeerError::Removed)))
    );
    fleet::turn_until(&mut fleet, "the puts complete", |fleet| {
        fleet[0].engine.is_quiet(CX, peers[2]) == Ok(true)
    });
    passes(&mut fleet, 3, 10_000);
    assert_ne!(
        fleet[0].engine.rail_error(peers[2], RailId(0)),
        Ok(None),
        "a disabled rail has returned"
    );
    for peer in [1, 2] {
        fleet[0].engine.enable_rail(peers[peer], RailId(0)).unwrap();
    }
    heal(sim, &mut fleet);
    // Nodes 1 and 2 have kept their endpoints: node 2 lost its rail to node 0 only.
    assert_eq!(fleet[2].engine.stats().rails_failed, 1);
}
