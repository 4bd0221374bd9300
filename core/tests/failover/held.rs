//! A rail that delays what it carries, as TCP does after lost packets, holds up other rails little.

use std::cell::Cell;
use std::rc::Rc;

use fishplate_core::engine::{Config, ContextId, Engine, Notice, Signal};
use fishplate_core::error::PeerError;
use fishplate_core::mem::{Peer, RailId};
use fishplate_core::op::Fault;
use fishplate_core::rail::sim::{Dials, Sim};

use super::support::failover;
use super::support::fleet::{self, End, Node};
use super::support::scope::Scope;
use super::support::tap::{Event, NOW, Shared, Tap, shared};

/// The time of a poll of the fabric, and the delay of the late rail in polls.
pub(super) const POLL_NS: u64 = 10_000;
const DELAY: u32 = 25_000;

pub(super) type Fleet = [Node<Tap<End, true>, 2>];

/// Two nodes with two rails, and what each node's taps do. `set` changes that first.
pub(super) fn pair_with(
    sim: &'static Sim<'static>,
    set: impl Fn(usize, &Shared),
) -> (Vec<Node<Tap<End, true>, 2>>, [Shared; 2]) {
    let controls = [shared(), shared()];
    controls.iter().enumerate().for_each(|(node, control)| set(node, control));
    let keep = |engine: &mut Engine<'static, Tap<End, true>, 2>| {
        engine.attach_failover(failover(&Config::DEFAULT, 2)).unwrap();
    };
    let wrap =
        |node: u16, rail: u16, end: End| Tap::timed(end, rail.into(), &controls[node as usize]);
    (fleet::prepared::<_, 2>(sim, 2, Config::DEFAULT, 4096, wrap, keep), controls)
}

fn pair(sim: &'static Sim<'static>) -> (Vec<Node<Tap<End, true>, 2>>, [Shared; 2]) {
    pair_with(sim, |_, _| ())
}

/// Starts a put with a signal from node 0 to node 1.
pub(super) fn start(nodes: &mut Fleet) {
    let (from, to) = (nodes[0].source.at(0), nodes[0].remotes[1]);
    let (signal, notice) = (Signal::add(to.at(0), 1), Notice::Report(0));
    nodes[0].engine.put_signal(ContextId(0), from, 8, to.at(8), signal, notice).unwrap();
}

/// Lets the time of the fabric's polls pass, and checks the peers every 10 ms. Ends when `until`
/// holds, and returns the time that this took in milliseconds.
pub(super) fn wait(
    sim: &Sim<'static>,
    nodes: &mut Fleet,
    what: &str,
    mut until: impl FnMut(&mut Fleet) -> bool,
) -> u64 {
    let (begun, mut looked) = (sim.now(), sim.now());
    fleet::turn_until(nodes, what, |nodes| {
        NOW.set(1 + sim.now() * POLL_NS);
        if (sim.now() - looked) * POLL_NS >= 10_000_000 {
            looked = sim.now();
            nodes.iter_mut().for_each(|node| node.engine.check_peers());
        }
        until(nodes)
    });
    (sim.now() - begun) * POLL_NS / 1_000_000
}

pub(super) fn put(nodes: &mut Fleet, sim: &Sim<'static>) {
    start(nodes);
    wait(sim, nodes, "the put is done", |nodes| nodes[0].engine.next_completion().is_some());
}

#[test]
fn short_operations_leave_a_rail_that_holds_them_up() {
    for late in [0, 1] {
        let _scope = Scope::new();
        NOW.set(1);
        let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
        let (mut nodes, _) = pair(sim);
        sim.set_dials(late, Dials { min_delay: DELAY, max_delay: DELAY, ..Dials::CALM });
        let begun = sim.now();
        (0..100).for_each(|_| put(&mut nodes, sim));
        let delays = (sim.now() - begun) / u64::from(DELAY);
        println!("rail {late}: {delays} delays");
        assert!(delays < 20, "rail {late}: {delays} delays for 100 operations");
    }
}

#[test]
fn an_acknowledgement_that_a_rail_holds_back_is_sent_again() {
    for late in [0, 1] {
        let _scope = Scope::new();
        NOW.set(1);
        let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
        let (mut nodes, controls) = pair(sim);
        let held = Rc::new(Cell::new(0));
        let count = held.clone();
        // Node 0 receives no messages from this rail during the test.
        controls[0].borrow_mut().edit = Some(Box::new(move |rail, event| match event {
            Event::Message(..) if rail == late => {
                count.set(count.get() + 1);
                vec![]
            }
            _ => vec![event],
        }));
        (0..20).for_each(|_| put(&mut nodes, sim));
        assert!(held.get() > 0, "rail {late} held back nothing");
    }
}

#[test]
fn no_rail_is_blamed_for_a_peer_that_makes_no_progress() {
    let _scope = Scope::new();
    NOW.set(1);
    let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
    let (mut nodes, controls) = pair(sim);
    start(&mut nodes);
    // Node 1 computes for a second.
    for _ in 0..1000 {
        NOW.set(NOW.get() + 1_000_000);
        nodes[0].engine.progress();
        nodes[0].engine.check_peers();
    }
    fleet::turn_until(&mut nodes, "the operation is done", |nodes| {
        nodes[0].engine.next_completion().is_some()
    });
    controls[0].borrow_mut().posts.clear();
    (0..50).for_each(|_| put(&mut nodes, sim));
    let of = |rail| controls[0].borrow().posts.iter().filter(|post| post.rail == rail).count();
    assert!(of(0) > 20 && of(1) > 20, "{} and {} posts", of(0), of(1));
}

/// Makes passes in 10 ms.
fn passes(nodes: &mut Fleet) {
    NOW.set(NOW.get() + 10_000_000);
    for node in nodes {
        (0..8).for_each(|_| _ = node.engine.progress());
    }
}

/// Makes passes in 10 ms, and lets the rails check their peers.
pub(super) fn tick(nodes: &mut Fleet) {
    passes(nodes);
    nodes.iter_mut().for_each(|node| node.engine.check_peers());
}

#[test]
fn a_peer_that_is_silent_on_all_rails_is_not_lost() {
    for rails in [0b11, 0b01] {
        let _scope = Scope::new();
        NOW.set(1);
        let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
        let (mut nodes, controls) = pair(sim);
        (0..20).for_each(|_| put(&mut nodes, sim));
        start(&mut nodes);
        controls[0].borrow_mut().silent = Some((rails, Peer(1)));
        // Node 1 is stopped for 30 s.
        (0..3000).for_each(|_| tick(&mut nodes[..1]));
        // Soon after it continues, its rails are no longer silent.
        (0..20).for_each(|_| tick(&mut nodes));
        controls[0].borrow_mut().silent = None;
        (0..1000).for_each(|_| tick(&mut nodes));
        let peer = nodes[0].peers[1];
        assert_eq!(nodes[0].engine.peer_error(peer), Ok(None), "{rails}");
        assert_eq!(nodes[0].engine.stats().rails_failed, 0, "{rails}");
        assert!(nodes[0].engine.next_completion().is_some(), "{rails}");
    }
}

/// Nothing is in flight but what the rail reports as silent, for example a read. The rail carries
/// nothing to the peer. The program may never check its peers.
#[test]
fn a_rail_on_which_a_peer_is_silent_while_it_answers_fails() {
    for (rail, checks) in [(0, true), (1, true), (0, false), (1, false)] {
        let _scope = Scope::new();
        NOW.set(1);
        let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
        let (mut nodes, controls) = pair(sim);
        (0..20).for_each(|_| put(&mut nodes, sim));
        controls[0].borrow_mut().silent = Some((1 << rail, Peer(1)));
        controls[1].borrow_mut().edit = Some(Box::new(move |at, event| match event {
            Event::Message(Peer(0), _) if at == usize::from(rail) => vec![],
            event => vec![event],
        }));
        let (peer, mut ticks) = (nodes[0].peers[1], 0);
        while nodes[0].engine.rail_error(peer, RailId(rail)) == Ok(None) {
            match checks {
                true => tick(&mut nodes),
                false => passes(&mut nodes),
            }
            ticks += 1;
            assert!(ticks < 500, "rail {rail} is in use after 5 s");
        }
        let why = Some(Fault::Peer(PeerError::Silent));
        assert_eq!(nodes[0].engine.rail_error(peer, RailId(rail)), Ok(why));
        assert!(ticks > 50, "rail {rail} failed within {ticks} ticks");
        controls[0].borrow_mut().silent = None;
        controls[1].borrow_mut().edit = None;
        (0..1000).for_each(|_| tick(&mut nodes));
        assert_eq!(nodes[0].engine.peer_error(peer), Ok(None));
        assert_eq!(nodes[0].engine.stats().rails_returned, 1, "rail {rail}");
    }
}

#[test]
fn a_peer_with_one_rail_left_fails_when_it_is_silent_there() {
    let _scope = Scope::new();
    NOW.set(1);
    let sim = fleet::fabric(2, 2, 1024, Dials::CALM, 1);
    let (mut nodes, controls) = pair(sim);
    (0..20).for_each(|_| put(&mut nodes, sim));
    let peer = nodes[0].peers[1];
    nodes[0].engine.disable_rail(peer, RailId(0)).unwrap();
    (0..100).for_each(|_| tick(&mut nodes));
    assert_eq!(nodes[0].engine.stats().rails_failed, 1);
    controls[0].borrow_mut().silent = Some((0b10, Peer(1)));
    tick(&mut nodes);
    assert_eq!(nodes[0].engine.peer_error(peer), Ok(Some(PeerError::Silent)));
}
