//! Memory in use cannot be deregistered or released. The error of the call names the use. The call
//! succeeds once that use has ended.

use fishplate_core::engine::protocol::Payload;
use fishplate_core::engine::{Config, Notice};
use fishplate_core::error::{AttachError, OpError, Use};
use fishplate_core::mem::{LocalId, RailId, Region, RegionKind};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::rail::sim::Dials;

use super::rig::*;
use super::support::*;

const TIGHT: Config = Config { window: 4, ..Config::DEFAULT };

fn in_use(by: Use) -> Result<(), AttachError> {
    Err(AttachError::InUse(by))
}

/// A length above the eager limit.
const LONG: usize = 5000;

fn mapped() -> Own1<Loopback<64>, 1> {
    own1(Config::DEFAULT, SMALL, [Loopback::mapped()])
}

#[test]
fn puts_waiting_for_the_window_keep_source_and_target() {
    let mut own = own1(TIGHT, SMALL, [Loopback::<64>::new()]);
    let (me, out, into) = (own.me, own.out, own.into);
    let remote = import(&mut own.engine, me, into);
    for _ in 0..8 {
        own.engine.put(CX, out.at(0), LONG, remote.at(0), Notice::Silent).unwrap();
    }
    assert_eq!(own.engine.deregister(out), in_use(Use::Operations));
    assert_eq!(own.engine.release(remote), in_use(Use::Operations));
    pass_until(&mut own.engine, "quiet", |engine| engine.is_quiet(CX, me).unwrap());
    assert_eq!(own.engine.release(remote), Ok(()));
    assert_eq!(own.engine.deregister(out), Ok(()));
    assert_eq!(own.engine.deregister(out), Err(AttachError::UnknownRegion));
}

#[test]
fn waiting_eager_puts_and_atomics_keep_their_memory() {
    let mut own = own1(TIGHT, SMALL, [Loopback::<64>::new().with_native_atomics()]);
    let (me, out, into) = (own.me, own.out, own.into);
    let words = own.engine.register(region(64).with_native_atomics()).unwrap();
    let [first, second] = [into, words].map(|region| import(&mut own.engine, me, region));
    for _ in 0..6 {
        own.engine.put(CX, out.at(0), LONG, first.at(0), Notice::Silent).unwrap();
    }
    let add = fishplate_core::op::Amo {
        op: fishplate_core::op::AmoOp::Add,
        width: 8,
        operand: 1,
        compare: 0,
    };
    own.engine.amo(CX, second.at(0), add, Notice::Silent).unwrap();
    assert_eq!(own.engine.release(second), in_use(Use::Operations));
    let signal = fishplate_core::engine::Signal {
        at: first.at(0),
        op: fishplate_core::op::SignalOp::Set,
        value: 1,
    };
    own.engine.put_signal(CX, into.at(64), 8, first.at(64), signal, Notice::Silent).unwrap();
    assert_eq!(
        own.engine.deregister(into),
        in_use(Use::Operations),
        "the payload of the signal lies there"
    );
    pass_until(&mut own.engine, "quiet", |engine| engine.is_quiet(CX, me).unwrap());
    assert_eq!(own.engine.release(second), Ok(()));
    assert_eq!(own.engine.deregister(into), Ok(()));
}

#[test]
fn a_post_that_has_no_slot_keeps_its_source() {
    let mut fleet = tagged_fleet::<1>(2, Dials::CALM, Config::DEFAULT, SMALL, 1);
    let node = &mut fleet[0];
    let other = node.engine.register(region(64)).unwrap();
    node.engine.put(CX, node.source.at(0), LONG, node.remotes[1].at(0), Notice::Silent).unwrap();
    assert_eq!(node.engine.deregister(node.source), in_use(Use::Posts(RailId(0))));
    assert_eq!(node.engine.deregister(other), Ok(()), "nothing is under way there");
    fleet::turn_until(&mut fleet, "quiet", |fleet| {
        fleet[0].engine.is_quiet(CX, fleet[0].peers[1]).unwrap()
    });
    let node = &mut fleet[0];
    assert_eq!(node.engine.deregister(node.source), Ok(()));
}

#[test]
fn a_posted_receive_keeps_its_buffer_until_it_is_cancelled() {
    let mut own = loopback(SMALL);
    let request = own.recv(1, EXACT, 0, 64);
    assert_eq!(own.engine.deregister(own.into), in_use(Use::Receives));
    own.engine.cancel(request).unwrap();
    assert_eq!(own.engine.deregister(own.into), Ok(()), "its status is yet to be taken");
    own.engine.test_recv(request).unwrap().expect("ended");
    // A receive with a buffer of zero bytes writes nothing.
    own.engine.recv(None, tag(1), EXACT, Some((own.out.at(0), 0)), 1).unwrap();
    assert_eq!(own.engine.deregister(own.out), Ok(()));
}

#[test]
fn a_rendezvous_payload_is_kept_until_it_was_read() {
    for rail in [Loopback::<64>::new(), Loopback::mapped()] {
        let mut own = own1(Config::DEFAULT, SMALL, [rail]);
        own.send_region(1, 0, LONG, false).unwrap();
        passes(&mut own.engine, 5);
        assert_eq!(own.engine.deregister(own.out), in_use(Use::Operations));
        let request = own.recv(1, EXACT, 0, LONG);
        own.finish(request);
        passes(&mut own.engine, 5);
        assert!(own.engine.next_completion().is_some());
        // The engine itself imported the region, to read the payload. Such an import does not
        // prevent deregistration.
        assert_eq!(own.engine.deregister(own.out), Ok(()));
    }
}

#[test]
fn an_own_import_that_is_mapped_keeps_the_region_that_it_maps() {
    let mut own = mapped();
    let (me, into) = (own.me, own.into);
    let mut handle = [0; 512];
    let len = own.engine.export(into, &mut handle).unwrap();
    // Changes the region index in the handle. The engine must not trust that index.
    handle[4] = 200;
    let remote = own.engine.import(me, &handle[..len]).unwrap();
    assert_eq!(own.engine.deregister(into), in_use(Use::Import));
    own.engine.put(CX, own.out.at(0), 8, remote.at(0), Notice::Silent).unwrap();
    own.engine.release(remote).unwrap();
    let refused = own.engine.put(CX, own.out.at(0), 8, remote.at(0), Notice::Silent);
    assert_eq!(refused, Err(OpError::UnknownRegion));
}

#[test]
fn a_failed_peer_releases_the_memory_of_its_operations() {
    let mut own = own1(TIGHT, SMALL, [Loopback::<64>::new()]);
    let (me, out, into) = (own.me, own.out, own.into);
    let remote = import(&mut own.engine, me, into);
    for _ in 0..8 {
        own.engine.put(CX, out.at(0), LONG, remote.at(0), Notice::Silent).unwrap();
    }
    own.send_region(1, 0, LONG, false).unwrap();
    own.engine.remove_peer(me).unwrap();
    passes(&mut own.engine, 5);
    assert_eq!(own.engine.deregister(out), Ok(()));
}

/// Reads the payload of a region by rendezvous through every peer.
fn read_by_all<R: Rail>(
    own: &mut Own1<R, 1>,
    peers: &[fishplate_core::mem::PeerId],
    from: LocalId,
) {
    for &peer in peers {
        let request =
            own.engine.recv(Some(peer), tag(1), EXACT, Some((own.into.at(0), LONG)), 1).unwrap();
        own.engine
            .send(CX, peer, tag(1), Payload::Region(from.at(0), LONG), Notice::Silent)
            .unwrap();
        let status = own.finish(request);
        check(&status, fishplate_core::engine::protocol::Received::Ok, 1, LONG as u64, LONG as u64);
    }
}

#[test]
fn the_engine_s_own_imports_make_room_for_those_of_the_user() {
    // Every peer is this engine. Its tables hold 16 imports. One import exists from the start.
    let mut own = loopback(SMALL);
    let mut peers = vec![own.me];
    while let Ok(peer) = own.engine.reserve_peer() {
        own.engine.connect_peer(peer, 1).unwrap();
        peers.push(peer);
    }
    let regions: Vec<_> = (0..5).map(|_| own.engine.register(region(LONG)).unwrap()).collect();
    let imported = own.engine.matching_stats().read;
    for _ in 0..2 {
        for &from in &regions {
            read_by_all(&mut own, &peers, from);
        }
    }
    assert_eq!(own.engine.matching_stats().read - imported, 40);
    assert_eq!(
        own.engine.matching_stats().pulled,
        0,
        "all were read, each by an import of its own"
    );
    let remotes: Vec<_> = (0..15).map(|_| import(&mut own.engine, peers[0], regions[0])).collect();
    let mut handle = [0; 512];
    let len = own.engine.export(regions[0], &mut handle).unwrap();
    let full = own.engine.import(peers[0], &handle[..len]);
    assert_eq!(full, Err(AttachError::Full("memory.remotes")), "the user's own imports stay");
    // The import table is full, so payloads arrive in chunks.
    read_by_all(&mut own, &peers[..1], regions[1]);
    assert!(own.engine.matching_stats().pulled > 0);
    for remote in remotes {
        own.engine.release(remote).unwrap();
    }
}

#[test]
fn a_peer_with_regions_in_the_common_segment_is_not_removed() {
    let mut own = mapped();
    let plain = region(64);
    let kind = RegionKind::Common { peer: own.me.peer(), offset: 0 };
    // SAFETY: the memory belongs to `plain`, which is leaked and accessed only through the engine.
    let common = own.engine.register(unsafe { Region::new(plain.ptr(), 64, kind) }).unwrap();
    assert_eq!(own.engine.remove_peer(own.me), in_use(Use::Common));
    assert_eq!(own.engine.peer_error(own.me), Ok(None), "nothing has changed");
    own.engine.deregister(common).unwrap();
    assert_eq!(own.engine.remove_peer(own.me), Ok(()));
}
