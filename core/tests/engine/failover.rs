//! Rails that fail while others remain: every operation is applied once and in order.

use fishplate_core::engine::{Config, Engine, Notice, Signal};
use fishplate_core::error::{AttachError, PeerError, Use};
use fishplate_core::mem::{Peer, PeerId, RailId};
use fishplate_core::op::Fault;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;
use fishplate_core::rail::{Fence, Rail};

use super::support::tap::{Event, Shared, Tap, shared};
use super::support::*;

type Kept = Own<Tap<Loopback<64>>, 3>;

/// Returns an engine that is its own peer over three rails, with failover.
fn own_kept(control: &Shared) -> Kept {
    let rails = std::array::from_fn(|rail| Tap::new(Loopback::new(), rail, control));
    let mut engine = engine(Config::DEFAULT, rails);
    engine.attach_failover(failover(&Config::DEFAULT, 4)).unwrap();
    let peer = engine.reserve_peer().unwrap();
    engine.connect_peer(peer, 0b111).unwrap();
    let source = engine.register(region(8192)).unwrap();
    let target = engine.register(region(8192)).unwrap();
    let remote = import(&mut engine, peer, target);
    Own { engine, peer, waiter: waiter(), source, target, remote }
}

#[test]
fn a_disabled_rail_is_not_used_and_the_last_one_stays() {
    let control = shared();
    let mut own = own_kept(&control);
    for rail in [1, 2] {
        assert_eq!(own.engine.disable_rail(own.peer, RailId(rail)), Ok(()));
        own.engine.put(CX, own.source.at(0), 300, own.remote.at(0), Notice::Silent).unwrap();
        own.engine.signal(CX, Signal::add(own.remote.at(4096), 1), Notice::Silent).unwrap();
        own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
        assert_eq!(
            own.engine.rail_error(own.peer, RailId(rail)),
            Ok(Some(Fault::Peer(PeerError::Removed)))
        );
        assert!(control.borrow().posts.iter().all(|post| post.rail != rail as usize));
        control.borrow_mut().posts.clear();
    }
    assert_eq!(own.engine.rail_error(own.peer, RailId(0)), Ok(None));
    assert_eq!(word(&own.engine, own.target.at(4096)), 2);
    passes(&mut own.engine, 20);
    assert_eq!(own.engine.stats().rails_failed, 2);
    assert_eq!(own.engine.disable_rail(own.peer, RailId(1)), Ok(()), "it is disabled");
    for rail in [0, 3, 16, 255] {
        let disabled = own.engine.disable_rail(own.peer, RailId(rail));
        assert!(matches!(disabled, Err(AttachError::Config(_))), "{rail}");
    }
    assert_eq!(own.engine.remove_peer(own.peer), Ok(()));
    // Each rail was detached from the peer once.
    assert_eq!(control.borrow().detached.len(), 3);
    assert_eq!(own.engine.disable_rail(own.peer, RailId(0)), Err(AttachError::UnknownPeer));
    assert_eq!(own.engine.rail_error(own.peer, RailId(0)), Err(AttachError::UnknownPeer));
}

#[test]
fn the_failure_of_a_rail_without_fencing_or_of_the_last_one_fails_the_peer() {
    for (fence, why) in [(Some(Fence::Unknown), RailId(1)), (None, RailId(0))] {
        let control = shared();
        let mut own = own_kept(&control);
        control.borrow_mut().fence = fence;
        own.engine.disable_rail(own.peer, RailId(1)).unwrap();
        own.engine.put(CX, own.source.at(0), 8, own.remote.at(0), Notice::Report(1)).unwrap();
        passes(&mut own.engine, 20);
        if fence.is_none() {
            own.engine.disable_rail(own.peer, RailId(2)).unwrap();
            passes(&mut own.engine, 20);
            assert_eq!(own.engine.peer_error(own.peer), Ok(None));
            control
                .borrow_mut()
                .inject
                .push_back(Event::Down(own.peer.peer(), PeerError::Rail(RailId(0))));
            passes(&mut own.engine, 20);
        }
        assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Rail(why))));
        let reasons =
            [0, 1, 2].map(|rail| own.engine.rail_error(own.peer, RailId(rail)).unwrap().is_some());
        assert_eq!(reasons, [fence.is_none(), true, fence.is_none()]);
    }
}

#[test]
fn a_fence_that_would_cost_another_peer_costs_the_one_whose_rail_has_failed() {
    for (rails, spared) in [(0b010, false), (0b101, true), (0b011, true)] {
        let control = shared();
        control.borrow_mut().fences_all = true;
        let mut own = own_kept(&control);
        let other = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(other, rails).unwrap();
        own.engine.disable_rail(own.peer, RailId(1)).unwrap();
        passes(&mut own.engine, 20);
        let why = (!spared).then_some(PeerError::Rail(RailId(1)));
        assert_eq!(own.engine.peer_error(own.peer), Ok(why), "rails {rails:b}");
        assert_eq!(own.engine.peer_error(other), Ok(None), "rails {rails:b}");
    }
}

#[test]
fn a_dead_peer_is_lost_whichever_rail_reports_it() {
    let control = shared();
    let mut own = own_kept(&control);
    control.borrow_mut().inject.push_back(Event::Down(own.peer.peer(), PeerError::Died));
    passes(&mut own.engine, 1);
    assert_eq!(own.engine.peer_error(own.peer), Ok(Some(PeerError::Died)));
}

#[test]
fn memory_that_may_be_posted_again_stays_in_use() {
    let control = shared();
    let mut own = own_kept(&control);
    let bytes = own.engine.register(region(64)).unwrap();
    own.engine.put(CX, bytes.at(0), 64, own.remote.at(0), Notice::Silent).unwrap();
    // The rails have copied the bytes, but no acknowledgement has arrived.
    assert_eq!(own.engine.deregister(bytes), Err(AttachError::InUse(Use::Operations)));
    assert_eq!(own.engine.release(own.remote), Err(AttachError::InUse(Use::Operations)));
    own.engine.quiet(CX, own.peer, &mut own.waiter, SOON).unwrap();
    assert_eq!(own.engine.deregister(bytes), Ok(()));
    assert_eq!(own.engine.release(own.remote), Ok(()));
}

#[test]
fn failover_is_attached_once_before_peers_connect_and_with_enough_memory() {
    let control = shared();
    let mut own = own_kept(&control);
    let attach = |engine: &mut Engine<'static, _, 3>, peers| {
        matches!(
            engine.attach_failover(failover(&Config::DEFAULT, peers)),
            Err(AttachError::Config(_) | AttachError::Memory { .. })
        )
    };
    assert!(attach(&mut own.engine, 4));
    let rails = || std::array::from_fn(|rail| Tap::new(Loopback::<64>::new(), rail, &control));
    let mut early = engine(Config::DEFAULT, rails());
    assert!(attach(&mut early, 3));
    let peer = early.reserve_peer().unwrap();
    early.connect_peer(peer, 0b1).unwrap();
    assert!(attach(&mut early, 4));
}

#[test]
fn failover_messages_of_an_earlier_attachment_are_dropped() {
    const TOLD: u8 = 9;
    let control = shared();
    let sim = fleet::fabric(2, 2, 64, Dials::CALM, 1);
    let rails = |node: u16| -> [_; 2] {
        std::array::from_fn(|rail| {
            let mut end = sim.endpoint(node, rail as u16);
            end.attach(Peer(0), 1 - node).unwrap();
            Tap::new(end, rail, &control)
        })
    };
    let config = Config { seed: 7, ..Config::DEFAULT };
    let mut nodes = [0, 1].map(|node| {
        let mut engine = engine::<_, 2>(Config { seed: node as u64, ..config }, rails(node));
        engine.attach_failover(failover(&config, 4)).unwrap();
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 0b11).unwrap();
        (engine, peer)
    });
    let met = |nodes: &mut [(Engine<'static, _, 2>, PeerId); 2]| {
        for _ in 0..100 {
            nodes.iter_mut().for_each(|(engine, _)| _ = engine.progress());
        }
        assert!(nodes.iter().all(|(engine, peer)| engine.has_answered(*peer) == Ok(true)));
    };
    met(&mut nodes);
    nodes[0].0.disable_rail(nodes[0].1, RailId(1)).unwrap();
    met(&mut nodes);
    let told: Vec<_> = control
        .borrow()
        .posts
        .iter()
        .filter(|post| post.bytes.first() == Some(&TOLD))
        .cloned()
        .collect();
    assert!(told.len() >= 3, "each told the other, and the first that it has heard");
    for (node, (engine, peer)) in (0..).zip(&mut nodes) {
        assert_eq!(engine.stats().rails_failed, 1);
        engine.remove_peer(*peer).unwrap();
        *peer = engine.reserve_peer().unwrap();
        for rail in [0, 1] {
            // SAFETY: `setup` only attaches a peer, and posts nothing.
            let rail = unsafe { engine.rail_unchecked(RailId(rail)) }.unwrap();
            rail.setup().attach(Peer(0), 1 - node).unwrap();
        }
        engine.connect_peer(*peer, 0b11).unwrap();
    }
    met(&mut nodes);
    let before: Vec<_> = nodes.iter().map(|(engine, _)| engine.stats().stale).collect();
    // The rail of the engine that polls first delivers the old message again.
    for told in &told {
        control.borrow_mut().inject.push_back(Event::Message(Peer(0), told.bytes.clone()));
        nodes.iter_mut().for_each(|(engine, _)| _ = engine.progress());
    }
    met(&mut nodes);
    let stale: u64 = nodes.iter().map(|(engine, _)| engine.stats().stale).sum();
    assert_eq!(stale, before.iter().sum::<u64>() + told.len() as u64);
    for (engine, peer) in &nodes {
        assert_eq!(
            (engine.rail_error(*peer, RailId(1)), engine.stats().rails_failed),
            (Ok(None), 1)
        );
    }
}
