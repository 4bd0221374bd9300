//! Rails that deliver nothing for a second, although the peer answers over another rail.

use fishplate_core::error::PeerError;
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::Fault;
use fishplate_core::rail::Caps;
use fishplate_core::rail::sim::{Dials, Sim};

use super::held::{Fleet, POLL_NS, pair_with, put, start, tick, wait};
use super::support::fleet::{self, End, Node};
use super::support::scope::Scope;
use super::support::tap::{Event, NOW, Shared, Tap};

const SILENT: Option<Fault> = Some(Fault::Peer(PeerError::Silent));

fn pair(
    set: impl Fn(usize, &Shared),
) -> (&'static Sim<'static>, Vec<Node<Tap<End, true>, 2>>, [Shared; 2]) {
    NOW.set(1);
    let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
    let (nodes, controls) = pair_with(sim, set);
    (sim, nodes, controls)
}

fn why(nodes: &Fleet, node: usize, rail: u8) -> Option<Fault> {
    let peer = nodes[node].peers[1 - node];
    assert_eq!(nodes[node].engine.peer_error(peer), Ok(None));
    nodes[node].engine.rail_error(peer, RailId(rail)).unwrap()
}

fn signals(nodes: &Fleet) -> u64 {
    let word = super::support::read(&nodes[1].engine, nodes[1].target.at(0), 8);
    u64::from_le_bytes(word.try_into().unwrap())
}

/// The kind of the messages by which a rail returns. The test that the rail works is not repeated.
const REJOIN: u8 = 11;

/// Node 1 gets no numbers over this rail.
fn lose(controls: &[Shared; 2], rail: usize) {
    controls[1].borrow_mut().edit = Some(Box::new(move |at, event| match event {
        Event::Message(Peer(0), bytes) if at == rail && bytes[0] != REJOIN => vec![],
        Event::Landed(Peer(0), _) if at == rail => vec![],
        event => vec![event],
    }));
}

#[test]
fn a_rail_that_delivers_nothing_is_given_up_and_returns() {
    for rail in [0, 1] {
        let _scope = Scope::new();
        let (sim, mut nodes, controls) = pair(|_, _| ());
        (0..20).for_each(|_| put(&mut nodes, sim));
        lose(&controls, rail.into());
        (0..2).for_each(|_| start(&mut nodes));
        let (mut ended, mut is_given_up) = (0, false);
        let took = wait(sim, &mut nodes, "both puts are done", |nodes| {
            ended += u32::from(nodes[0].engine.next_completion().is_some());
            is_given_up |= why(nodes, 0, rail) == SILENT;
            ended == 2
        });
        assert!(is_given_up && (500..1000).contains(&took), "rail {rail}: {took} ms");
        controls[1].borrow_mut().edit = None;
        wait(sim, &mut nodes, "the rail is back", |nodes| {
            [0, 1].iter().all(|&node| why(nodes, node, rail).is_none())
        });
        (0..20).for_each(|_| put(&mut nodes, sim));
        assert_eq!(signals(&nodes), 42, "rail {rail}");
        let failed = nodes.iter().map(|node| node.engine.stats().rails_failed);
        assert_eq!(failed.collect::<Vec<_>>(), [1, 1], "rail {rail}");
    }
}

/// The fence would be refused at one end, or would cut off another peer: here a node is its own
/// peer too. What the rail delays arrives in the end.
#[test]
fn a_rail_is_not_given_up_if_that_could_cost_a_peer() {
    for (node, all) in [(0, false), (1, false), (0, true), (1, true)] {
        let _scope = Scope::new();
        let (sim, mut nodes, _) = pair(|at, control| {
            let mut control = control.borrow_mut();
            control.fences_all = at == node && all;
            if at == node && !all {
                control.caps = Some(|caps| Caps { fences: false, ..caps });
            }
        });
        (0..20).for_each(|_| put(&mut nodes, sim));
        let delay = (1_500_000_000 / POLL_NS) as u32;
        sim.set_dials(1, Dials { min_delay: delay, max_delay: delay, ..Dials::CALM });
        start(&mut nodes);
        start(&mut nodes);
        let (mut ended, mut asked) = (0, false);
        wait(sim, &mut nodes, "both puts are done", |nodes| {
            ended += u32::from(nodes[0].engine.next_completion().is_some());
            asked |= why(nodes, 0, 1) == SILENT;
            ended == 2
        });
        // Only an end that could fence the rail alone asks the other one.
        assert_eq!(asked, node == 1, "node {node}, {all}");
        sim.set_dials(1, Dials::CALM);
        wait(sim, &mut nodes, "the rail is used again", |nodes| why(nodes, 0, 1).is_none());
        assert_eq!(signals(&nodes), 22, "node {node}, {all}");
        assert!(nodes.iter().all(|node| node.engine.stats().rails_failed == 0), "{node}, {all}");
    }
}

#[test]
fn a_rail_that_is_given_up_can_be_disabled() {
    let _scope = Scope::new();
    let (sim, mut nodes, controls) = pair(|_, _| ());
    (0..20).for_each(|_| put(&mut nodes, sim));
    lose(&controls, 1);
    start(&mut nodes);
    start(&mut nodes);
    wait(sim, &mut nodes, "the rail is given up", |nodes| why(nodes, 0, 1) == SILENT);
    let peer = nodes[0].peers[1];
    nodes[0].engine.disable_rail(peer, RailId(1)).unwrap();
    controls[1].borrow_mut().edit = None;
    let mut ended = 0;
    wait(sim, &mut nodes, "both puts are done", |nodes| {
        ended += u32::from(nodes[0].engine.next_completion().is_some());
        ended == 2
    });
    (0..500).for_each(|_| tick(&mut nodes));
    assert_eq!(why(&nodes, 0, 1), Some(Fault::Peer(PeerError::Removed)));
    assert!(why(&nodes, 1, 1).is_some());
    nodes[0].engine.enable_rail(peer, RailId(1)).unwrap();
    (0..500).for_each(|_| tick(&mut nodes));
    assert_eq!((why(&nodes, 0, 1), why(&nodes, 1, 1)), (None, None));
    assert_eq!(signals(&nodes), 22);
}
