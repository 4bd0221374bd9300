//! Tests how long fences of closing endpoints wait, and which nodes let each other leave. The tests
//! set the time.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use fishplate_core::engine::{Config, Engine, Notice};
use fishplate_core::error::PostError;
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::rail::Rail;
use fishplate_core::rail::sim::{Dials, Sim};

use super::closing::{LEAVE, cut_link, heal_link};
use super::support::fleet::{self, End, Node};
use super::support::scope::Scope;
use super::support::tap::{Event, NOW, Shared, Tap, shared};
use super::support::{CX, failover};

type Fleet<const RAILS: usize> = Vec<Node<Tap<End, true>, RAILS>>;

/// Connects nodes over rails with a clock.
fn timed<const RAILS: usize>(controls: &[Shared]) -> (&'static Sim<'static>, Fleet<RAILS>) {
    let count = controls.len() as u16;
    let sim = fleet::fabric(count, RAILS as u16, 1024, Dials::CALM, 1);
    let keep = |engine: &mut Engine<'static, Tap<End, true>, RAILS>| {
        engine.attach_failover(failover(&Config::DEFAULT, count.into())).unwrap();
    };
    let wrap = |node: u16, rail: u16, end: End| {
        Tap::timed(end.with_closing_fence(), rail.into(), &controls[node as usize])
    };
    (sim, fleet::prepared(sim, count, Config::DEFAULT, 4096, wrap, keep))
}

fn passes<R: Rail, const RAILS: usize>(fleet: &mut [Node<R, RAILS>], who: &[usize], count: usize) {
    for _ in 0..count {
        who.iter().for_each(|&node| _ = fleet[node].engine.progress());
    }
}

#[test]
fn two_nodes_that_close_the_same_rail_for_others_get_it_back() {
    for (offset, first) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 1)] {
        let _scope = Scope::new();
        NOW.set(1);
        let controls: Vec<_> = (0..5).map(|_| shared()).collect();
        let (sim, mut fleet) = timed::<2>(&controls);
        for node in [0, 1u16] {
            // Drops the requests from all other nodes, so that only nodes 0 and 1 agree in time.
            controls[node as usize].borrow_mut().edit =
                Some(Box::new(move |_, event| match event {
                    Event::Message(from, bytes) if bytes[0] == LEAVE && from != Peer(1 - node) => {
                        vec![]
                    }
                    event => vec![event],
                }));
        }
        for node in [first, 1 - first] {
            let lost = fleet[node].peers[node + 2];
            fleet[node].engine.disable_rail(lost, RailId(0)).unwrap();
            passes(&mut fleet, &[0, 1, 2, 3], offset);
        }
        passes(&mut fleet, &[0, 1, 2, 3], 500);
        // Once both nodes are dead, the endpoints need not be closed.
        sim.kill(2);
        sim.kill(3);
        for _ in 0..300 {
            NOW.set(NOW.get() + 10_000_000);
            passes(&mut fleet, &[0, 1], 5);
            for node in [0, 1] {
                fleet[node].engine.check_peers();
            }
        }
        for node in [0, 1] {
            let other = fleet[node].peers[1 - node];
            let error = fleet[node].engine.rail_error(other, RailId(0));
            assert_eq!(error, Ok(None), "node {node}, passes between: {offset}, first: {first}");
        }
    }
}

/// Returns the time until node 0 fails node 1, in milliseconds. To fence node 1 on rail 1, node 0
/// would have to close its endpoint. Node 0 cannot close it, because rail 1 is its last rail to
/// node 2. With `leaves`, node 0 has left rail 2 to node 1.
fn given_up_after(leaves: bool) -> u64 {
    let _scope = Scope::new();
    NOW.set(1);
    let controls: Vec<_> = (0..4).map(|_| shared()).collect();
    let (sim, mut fleet) = timed::<3>(&controls);
    let (peers, other) = (fleet[0].peers.clone(), fleet[1].peers[3]);
    let put_all = |fleet: &mut Fleet<3>| {
        for n in 0..8 {
            let node = &mut fleet[0];
            let (from, to) = (node.source.at(0), node.remotes[1].at(512 * n));
            node.engine.put(CX, from, 512, to, Notice::Silent).unwrap();
        }
    };
    for rail in [0, 2] {
        fleet[0].engine.disable_rail(peers[2], RailId(rail)).unwrap();
    }
    passes(&mut fleet, &[0, 1, 2, 3], 500);
    for rail in [0, 2] {
        // This rail may return, so the fence of rail 1 waits for that.
        fleet[0].engine.enable_rail(peers[2], RailId(rail)).unwrap();
    }
    passes(&mut fleet, &[0, 1, 3], 200);
    if leaves {
        // Drops the traffic from node 0 to node 1 on rail 2, so node 0 needs the fence of rail 2.
        controls[1].borrow_mut().edit = Some(Box::new(|rail, event| match event {
            Event::Landed(Peer(0), _) | Event::Message(Peer(0), _) if rail == 2 => vec![],
            event => vec![event],
        }));
        put_all(&mut fleet);
        passes(&mut fleet, &[0, 1, 3], 200);
        // Node 2 makes no passes. So node 1 asks node 0 to leave rail 2, but does not close its
        // endpoint.
        fleet[1].engine.disable_rail(other, RailId(2)).unwrap();
        passes(&mut fleet, &[0, 1, 3], 4000);
        assert_ne!(
            fleet[0].engine.rail_error(peers[1], RailId(2)),
            Ok(None),
            "node 0 has not left"
        );
        assert_ne!(fleet[0].engine.is_quiet(CX, peers[1]), Ok(true));
    }
    let wait = |fleet: &mut Fleet<3>, ms: u64| {
        for at in (0..ms).step_by(5) {
            if fleet[0].engine.peer_error(peers[1]) != Ok(None) {
                return at;
            }
            NOW.set(NOW.get() + 5_000_000);
            passes(fleet, &[0], 5);
        }
        ms
    };
    assert_eq!(wait(&mut fleet, 900), 900, "given up before its endpoint was to be closed");
    sim.cut(0, 1, 1, 0).unwrap();
    put_all(&mut fleet);
    passes(&mut fleet, &[0, 1, 3], 2000);
    assert_ne!(fleet[0].engine.rail_error(peers[1], RailId(1)), Ok(None), "the cut is unnoticed");
    wait(&mut fleet, 3000)
}

#[test]
fn the_fence_of_one_rail_does_not_shorten_the_patience_with_another() {
    let [alone, both] = [false, true].map(given_up_after);
    assert!((900..1100).contains(&alone) && (900..1100).contains(&both), "{alone} ms, {both} ms");
}

#[test]
fn every_peer_is_asked_to_leave_though_a_rail_has_room_for_one_request() {
    let _scope = Scope::new();
    NOW.set(1);
    let controls: Vec<_> = (0..6).map(|_| shared()).collect();
    let (_, mut fleet) = timed::<2>(&controls);
    let pass = Rc::new(Cell::new(0));
    let (now, mut last) = (pass.clone(), 0);
    controls[0].borrow_mut().refuse = Some(Box::new(move |post| {
        let again = post.bytes.first() == Some(&LEAVE)
            && std::mem::replace(&mut last, now.get()) == now.get();
        again.then_some(PostError::Again)
    }));
    let lost = fleet[0].peers[1];
    fleet[0].engine.disable_rail(lost, RailId(0)).unwrap();
    for n in 1..1000 {
        pass.set(n);
        passes(&mut fleet, &[0, 1], 1);
    }
    let control = controls[0].borrow();
    let asked = control.posts.iter().filter(|post| post.bytes.first() == Some(&LEAVE));
    let asked: BTreeSet<u16> = asked.map(|post| post.peer.0).collect();
    assert!((2..6).all(|peer| asked.contains(&peer)), "asked: {asked:?}");
}

/// Node 0 must close its endpoint on rail 1 for node 2. It waits until rail 0 to node 3 returns,
/// because rail 1 is the last one to node 3. Meanwhile it leaves rail 0 for node 1, which must
/// close its endpoint for node 4. If it refused, node 1 would close the endpoint without it.
#[test]
fn a_node_whose_request_waits_for_a_rail_leaves_other_rails() {
    let _scope = Scope::new();
    NOW.set(1);
    let controls: Vec<_> = (0..5).map(|_| shared()).collect();
    let (sim, mut fleet) = timed::<2>(&controls);
    let all = [0, 1, 2, 3, 4];
    let error = |fleet: &Fleet<2>, peer: usize, rail| {
        fleet[0].engine.rail_error(fleet[0].peers[peer], RailId(rail)).unwrap()
    };
    cut_link(sim, 0, 3, 0);
    passes(&mut fleet, &all, 5000);
    assert_eq!([1, 2, 3].map(|peer| error(&fleet, peer, 0).is_some()), [false, false, true]);
    cut_link(sim, 0, 2, 1);
    passes(&mut fleet, &all, 5000);
    assert!(error(&fleet, 2, 1).is_some());
    // The second request of node 1 is certainly later than that of node 0.
    for _ in 0..2 {
        let closed = fleet[1].engine.stats().rails_failed;
        cut_link(sim, 1, 4, 0);
        passes(&mut fleet, &all, 500);
        // Without node 0, only the rail to node 4 has failed.
        assert!(fleet[1].engine.stats().rails_failed > closed + 1, "the endpoint is not closed");
        heal_link(sim, 1, 4, 0);
        fleet::turn_until(&mut fleet, "rail 0 is back", |fleet| {
            fleet[1].engine.rail_error(fleet[1].peers[4], RailId(0)) == Ok(None)
        });
    }
    heal_link(sim, 0, 3, 0);
    heal_link(sim, 0, 2, 1);
    fleet::turn_until(&mut fleet, "all rails are back", |fleet| {
        NOW.set(NOW.get() + 1000);
        all.iter().all(|&node| {
            let Node { engine, peers, .. } = &fleet[node];
            peers.iter().all(|&peer| {
                assert_eq!(engine.peer_error(peer), Ok(None));
                [0, 1].iter().all(|&rail| engine.rail_error(peer, RailId(rail)) == Ok(None))
            })
        })
    });
}

/// A rail may have to close its endpoint although the peer has left it.
#[test]
fn a_node_that_cannot_part_from_a_peer_closes_its_endpoint_at_once() {
    let _scope = Scope::new();
    NOW.set(1);
    let controls = [shared(), shared()];
    let (_, mut fleet) = timed::<2>(&controls);
    controls[1].borrow_mut().must_close = true;
    let peers = [fleet[0].peers[1], fleet[1].peers[0]];
    fleet[0].engine.disable_rail(peers[0], RailId(0)).unwrap();
    let fenced = |fleet: &Fleet<2>| fleet[1].engine.rail_stats(RailId(0)).unwrap().fenced;
    let mut ms = 0;
    while fenced(&fleet) == 0 {
        ms += 1;
        assert!(ms < 500, "not fenced");
        NOW.set(1 + ms * 1_000_000);
        passes(&mut fleet, &[0, 1], 20);
    }
    assert!(controls[1].borrow().fences.contains(&(0, Peer(0))));
    fleet[0].engine.enable_rail(peers[0], RailId(0)).unwrap();
    let in_use = |fleet: &Fleet<2>| {
        [0, 1].map(|node| fleet[node].engine.rail_error(peers[node], RailId(0)) == Ok(None))
    };
    while in_use(&fleet) != [true; 2] {
        ms += 1;
        assert!(ms < 5000, "it does not return");
        NOW.set(1 + ms * 1_000_000);
        passes(&mut fleet, &[0, 1], 20);
    }
}
