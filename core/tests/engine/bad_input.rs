//! Invalid arguments are refused with an exact error, and change nothing.

use std::ptr::NonNull;
use std::rc::Rc;

use fishplate_core::engine::{
    Config, ContextId, Engine, EngineMemory, Joint, LocalSlot, Notice, Pairing, Parked, PeerSlot,
    PendingSlot, RemoteSlot, Stream, handle_len,
};
use fishplate_core::error::{AttachError, OpError, PeerError, Violation, WaitError};
use fishplate_core::mem::{PeerId, RailId, Region, RegionKind};
use fishplate_core::op::{Amo, AmoOp, Cmp};
use fishplate_core::rail::Rail;
use fishplate_core::rail::loopback::Loopback;

use super::order::set;
use super::support::tap::{Event, shared, tap};
use super::support::*;

type Network = Loopback<64>;
/// A small rail, because many of them are on the stack.
type Small = Loopback<4>;

#[test]
fn invalid_operations_are_refused_by_name() {
    for mapped in [false, true] {
        let rail = if mapped { Network::mapped() } else { Network::new() };
        let mut own = own(Config { contexts: 2, ..Config::DEFAULT }, [rail], 4096);
        let second = own.engine.reserve_peer().unwrap();
        own.engine.connect_peer(second, 1).unwrap();
        let other = import(&mut own.engine, second, own.target);
        let gone = own.engine.register(region(64)).unwrap();
        let released = import(&mut own.engine, second, gone);
        own.engine.release(released).unwrap();
        own.engine.deregister(gone).unwrap();
        let (from, to) = (own.source.at(0), own.remote.at(0));
        let (e, silent) = (&mut own.engine, Notice::Silent);
        let bounds = |offset, len| OpError::OutOfBounds { offset, len, size: 4096 };
        let amo = |width| Amo { op: AmoOp::Add, width, operand: 1, compare: 0 };
        let before = e.stats();
        for (offset, len) in
            [(4096u64, 1usize), (0, 4097), (u64::MAX, 1), (1, usize::MAX), (4090, 7)]
        {
            let want = Err(bounds(offset, len as u64));
            assert_eq!(e.put(CX, from.region.at(offset), len, to, silent), want, "{offset} {len}");
            if len <= 4096 {
                assert_eq!(e.put(CX, from, len, own.remote.at(offset), silent), want);
                assert_eq!(e.get(CX, from, len, own.remote.at(offset), silent), want);
                assert_eq!(
                    e.put_signal(
                        CX,
                        from,
                        len,
                        own.remote.at(offset),
                        set(own.remote, 0, 1),
                        silent
                    ),
                    want
                );
            }
            assert_eq!(e.get(CX, from.region.at(offset), len, to, silent), want);
        }
        assert_eq!(e.inject(CX, &[0; 8], own.remote.at(4089)), Err(bounds(4089, 8)));
        assert_eq!(e.put(CX, gone.at(0), 8, to, silent), Err(OpError::UnknownRegion));
        assert_eq!(e.get(CX, gone.at(0), 0, to, silent), Err(OpError::UnknownRegion));
        assert_eq!(e.put(CX, from, 8, released.at(0), silent), Err(OpError::UnknownRegion));
        assert_eq!(e.signal(CX, set(released, 0, 1), silent), Err(OpError::UnknownRegion));
        assert_eq!(e.fetch(CX, released.at(0), amo(8), 1), Err(OpError::UnknownRegion));
        assert_eq!(e.inject(CX, &[1], released.at(0)), Err(OpError::UnknownRegion));
        for context in [2, 3, 255].map(ContextId) {
            let want = OpError::UnknownContext;
            assert_eq!(e.put(context, from, 8, to, silent), Err(want));
            assert_eq!(
                e.put_signal(context, from, 8, to, set(own.remote, 0, 1), silent),
                Err(want)
            );
            assert_eq!(e.signal(context, set(own.remote, 0, 1), silent), Err(want));
            assert_eq!(e.get(context, from, 8, to, silent), Err(want));
            assert_eq!(e.inject(context, &[1], to), Err(want));
            assert_eq!(e.amo(context, to, amo(8), silent), Err(want));
            assert_eq!(e.fence(context, own.peer), Err(want));
            assert_eq!(e.is_quiet(context, own.peer), Err(want));
            assert_eq!(e.quiet(context, own.peer, &mut own.waiter, SOON), Err(WaitError::Op(want)));
            assert_eq!(e.quiet_all(context, &mut own.waiter, SOON), Err(WaitError::Op(want)));
        }
        for offset in [1, 4, 7, 4081] {
            let want = OpError::Misaligned { offset, width: 8 };
            assert_eq!(e.signal(CX, set(own.remote, offset, 1), silent), Err(want));
            assert_eq!(
                e.put_signal(CX, from, 8, to, set(own.remote, offset, 1), silent),
                Err(want)
            );
            assert_eq!(
                e.wait_signal(own.target.at(offset), Cmp::Eq, 0, None, &mut own.waiter, SOON),
                Err(WaitError::Op(want))
            );
        }
        for width in [2u8, 4, 8] {
            let offset = width as u64 / 2;
            assert_eq!(
                e.amo(CX, own.remote.at(offset), amo(width), silent),
                Err(OpError::Misaligned { offset, width })
            );
        }
        for width in [0, 3, 5, 6, 7, 9, 16, 255] {
            assert_eq!(e.amo(CX, to, amo(width), silent), Err(OpError::BadWidth(width)));
            assert_eq!(e.fetch(CX, to, amo(width), 1), Err(OpError::BadWidth(width)));
        }
        assert_eq!(e.signal(CX, set(own.remote, 4096, 1), silent), Err(bounds(4096, 8)));
        assert_eq!(e.amo(CX, own.remote.at(4096), amo(1), silent), Err(bounds(4096, 1)));
        assert_eq!(e.put_signal(CX, from, 8, to, set(other, 0, 1), silent), Err(OpError::TwoPeers));
        let end = e.wait_signal(gone.at(0), Cmp::Eq, 0, None, &mut own.waiter, SOON);
        assert_eq!(end, Err(WaitError::Op(OpError::UnknownRegion)));
        let end = e.wait_signal(own.target.at(4096), Cmp::Eq, 0, None, &mut own.waiter, SOON);
        assert_eq!(end, Err(WaitError::Op(bounds(4096, 8))));
        assert_eq!(e.stats(), before, "something was done");
        assert_eq!(e.is_quiet(CX, own.peer), Ok(true));
        // The last bytes of a region are valid targets.
        assert!(e.put(CX, from.region.at(4088), 8, own.remote.at(4088), silent).is_ok());
        assert!(e.put(CX, from.region.at(4096), 0, own.remote.at(4096), silent).is_ok());
        assert!(e.signal(CX, set(own.remote, 4088, 1), silent).is_ok());
    }
}

#[test]
fn invalid_peers_are_refused_by_name() {
    let mut own = own(Config::DEFAULT, [Network::new(), Network::new()], 4096);
    // A peer id of another engine, which has more peers.
    let mut more =
        Engine::new(Config::DEFAULT, [Network::new()], memory(&Config::DEFAULT, 9, 8)).unwrap();
    let foreign = (0..9).map(|_| more.reserve_peer().unwrap()).last().unwrap();
    {
        let unknown = foreign;
        assert_eq!(own.engine.connect_peer(unknown, 1), Err(AttachError::UnknownPeer));
        assert_eq!(own.engine.remove_peer(unknown), Err(AttachError::UnknownPeer));
        assert_eq!(own.engine.peer_error(unknown), Err(AttachError::UnknownPeer));
        assert_eq!(own.engine.fence(CX, unknown), Err(OpError::UnknownPeer));
        assert_eq!(own.engine.is_quiet(CX, unknown), Err(OpError::UnknownPeer));
        assert_eq!(
            own.engine.quiet(CX, unknown, &mut own.waiter, SOON),
            Err(OpError::UnknownPeer.into())
        );
        assert_eq!(own.engine.import(unknown, &[0; 64]), Err(AttachError::UnknownPeer));
        let end = own.engine.wait_signal(
            own.target.at(0),
            Cmp::Eq,
            1,
            Some(unknown),
            &mut own.waiter,
            SOON,
        );
        assert_eq!(end, Err(OpError::UnknownPeer.into()));
    }
    let reserved = own.engine.reserve_peer().unwrap();
    let mut handle = [0; 512];
    let len = own.engine.export(own.target, &mut handle).unwrap();
    assert_eq!(
        own.engine.import(reserved, &handle[..len]),
        Err(AttachError::UnknownPeer),
        "not connected"
    );
    assert_eq!(own.engine.fence(CX, reserved), Err(OpError::UnknownPeer));
    for rails in [0, 0b100, 0b111, u16::MAX] {
        assert!(
            matches!(own.engine.connect_peer(reserved, rails), Err(AttachError::Config(_))),
            "{rails:#b}"
        );
    }
    own.engine.connect_peer(reserved, 0b10).unwrap();
    assert_eq!(own.engine.connect_peer(reserved, 0b10), Err(AttachError::UnknownPeer), "twice");
    assert_eq!(
        (own.engine.reserve_peer().is_ok(), own.engine.reserve_peer().is_ok()),
        (true, true)
    );
    assert_eq!(own.engine.reserve_peer(), Err(AttachError::Full("memory.peers")));
}

#[test]
fn invalid_regions_and_handles_are_refused_by_name() {
    let mut own = own(Config::DEFAULT, [Network::new(), Network::new()], 4096);
    let words = Box::leak(Box::new([0u64; 8]));
    let at = NonNull::new(words.as_mut_ptr().cast::<u8>()).unwrap();
    // SAFETY: the valid descriptions are of leaked memory. The engine refuses the others before any
    // access.
    let (empty, odd, endless) = unsafe {
        let odd = NonNull::new(at.as_ptr().add(4)).unwrap();
        let private = RegionKind::Private;
        (
            Region::new(at, 0, private),
            Region::new(odd, 8, private),
            Region::new(at, usize::MAX, private),
        )
    };
    assert_eq!(own.engine.register(empty), Err(AttachError::BadRange));
    assert_eq!(own.engine.register(endless), Err(AttachError::BadRange));
    assert_eq!(own.engine.register(odd), Err(AttachError::Misaligned));
    let gone = own.engine.register(region(8)).unwrap();
    own.engine.deregister(gone).unwrap();
    assert_eq!(own.engine.deregister(gone), Err(AttachError::UnknownRegion));
    assert_eq!(own.engine.export(gone, &mut [0; 512]), Err(AttachError::UnknownRegion));
    let again = own.engine.register(region(8)).unwrap();
    assert_ne!(again, gone);
    assert_eq!(own.engine.local_ptr(gone.at(0), 1), Err(OpError::UnknownRegion));
    while own.engine.register(region(8)).is_ok() {}
    assert_eq!(own.engine.register(region(8)), Err(AttachError::Full("memory.locals")));
    let mut handle = [0; 512];
    let len = own.engine.export(own.target, &mut handle).unwrap();
    assert_eq!(len, handle_len(2));
    for cut in 0..len {
        assert_eq!(own.engine.import(own.peer, &handle[..cut]), Err(AttachError::BadHandle));
    }
    let short = own.engine.export(own.target, &mut handle[..len - 1]).unwrap_err();
    assert_eq!(
        short.to_string(),
        format!(
            "buffer too short: {} bytes given, the handle has {len}; pass HANDLE_MAX bytes",
            len - 1
        )
    );
    // The two engines have different numbers of rails. A handle needs a key for each joint.
    let mut one = super::support::own(Config::DEFAULT, [Network::new()], 4096);
    let len = one.engine.export(one.target, &mut handle).unwrap();
    assert_eq!(own.engine.import(own.peer, &handle[..len]), Err(AttachError::BadHandle), "e17");
    let len = own.engine.export(own.target, &mut handle).unwrap();
    assert!(one.engine.import(one.peer, &handle[..len]).is_ok(), "its first rail is ours");
    for count in [0, 3, 16, 17, 255] {
        let mut wrong = handle;
        wrong[16] = count;
        let got = own.engine.import(own.peer, &wrong[..len]);
        assert_eq!(got, Err(AttachError::BadHandle), "{count} rails");
    }
    // Handles with another length or key than the registration.
    for at in [8, 24, 40] {
        let mut wrong = handle;
        wrong[at] ^= 0x80;
        wrong[at + 1] ^= 0x80;
        assert_eq!(own.engine.import(own.peer, &wrong), Err(AttachError::BadHandle), "byte {at}");
    }
    let remote = own.engine.import(own.peer, &handle).unwrap();
    own.engine.release(remote).unwrap();
    assert_eq!(own.engine.release(remote), Err(AttachError::UnknownRegion));
    while own.engine.import(own.peer, &handle).is_ok() {}
    assert_eq!(own.engine.import(own.peer, &handle), Err(AttachError::Full("memory.remotes")));
}

#[test]
fn configurations_out_of_range_are_refused_by_name() {
    let ok = Config::DEFAULT;
    let refused = |config: Config, memory: EngineMemory<'static, 1>| match Engine::new(
        config,
        [Network::new()],
        memory,
    )
    .map(|_| ())
    {
        Err(AttachError::Config(what)) => what.to_string(),
        Err(AttachError::Memory { what, len, least }) => format!("{what}: {len} of {least}"),
        other => panic!("{config:?}: {other:?}"),
    };
    let with = |config: Config| refused(config, memory(&ok, 2, 4));
    assert_eq!(with(Config { contexts: 0, ..ok }), "contexts: must be 1 to 256");
    assert_eq!(with(Config { contexts: 257, ..ok }), "contexts: must be 1 to 256");
    for window in [0, 3, 100, 1 << 20, 1 << 31] {
        assert_eq!(with(Config { window, ..ok }), "window: must be a power of two up to 2^19");
    }
    assert_eq!(with(Config { batch: 0, ..ok }), "batch: must be at least 1");
    for stripe_chunk in [0, (1 << 31) + 1] {
        assert_eq!(with(Config { stripe_chunk, ..ok }), "stripe_chunk: must be 1 byte to 2 GiB");
    }
    let short = |cut: fn(&mut EngineMemory<'static, 1>)| {
        let mut tables = memory(&ok, 2, 4);
        cut(&mut tables);
        refused(ok, tables)
    };
    assert_eq!(short(|m| m.peers = &mut []), "memory.peers: must have 1 to 65535 entries");
    assert_eq!(
        short(|m| m.streams = std::mem::take(&mut m.streams).split_at_mut(1).0),
        "memory.streams (peers x contexts): 1 of 2"
    );
    assert_eq!(
        short(|m| m.parked = std::mem::take(&mut m.parked).split_at_mut(255).0),
        "memory.parked (peers x contexts x window): 255 of 256"
    );
    assert_eq!(
        short(|m| m.bitmap = std::mem::take(&mut m.bitmap).split_at_mut(7).0),
        "memory.bitmap (Config::bitmap_words): 7 of 8"
    );
    assert_eq!(short(|m| m.pending = &mut []), "memory.pending: must have 1 to 2^30 - 1 entries");
    assert!(Engine::<Small, 0>::new(ok, [], memory(&ok, 1, 1)).is_err());
    assert!(Engine::<Small, 17>::new(ok, [const { Small::new() }; 17], memory(&ok, 1, 1)).is_err());
    assert!(Engine::<Small, 16>::new(ok, [const { Small::new() }; 16], memory(&ok, 1, 1)).is_ok());
    assert!(
        Engine::new(
            Config { contexts: 256, window: 1, ..ok },
            [Network::new()],
            memory(&Config { contexts: 256, window: 1, ..ok }, 1, 1)
        )
        .is_ok()
    );
}

#[test]
fn the_rails_of_a_refused_engine_are_dropped() {
    let (control, ok) = (shared(), Config::DEFAULT);
    let rails = tap(Small::new(), &control);
    assert!(Engine::new(Config { batch: 0, ..ok }, rails, memory(&ok, 1, 1)).is_err());
    assert_eq!(Rc::strong_count(&control), 1);
}

#[test]
fn rails_are_joined_once_and_before_the_peer_is_used() {
    let mut engine: Engine<'_, Network, 2> =
        engine(Config::DEFAULT, [Network::new(), Network::new()]);
    // The extra registration makes the keys of one region differ between rails. SAFETY: it
    // registers another region, which is never freed.
    unsafe { engine.rail_unchecked(RailId(1)) }.unwrap().register(&region(64)).unwrap();
    let target = engine.register(region(64)).unwrap();
    let mut handle = [0; 512];
    let len = engine.export(target, &mut handle).unwrap();
    let joint = |ours, theirs| Joint { ours: RailId(ours), theirs, max_message: 256 };
    let (alike, crossed) = ([joint(0, 0), joint(1, 1)], [joint(0, 1), joint(1, 0)]);
    let peer = engine.reserve_peer().unwrap();
    let short = Joint { max_message: 127, ..joint(0, 0) };
    let wrong: [&[Joint]; 6] = [
        &[],
        &[joint(2, 0)],
        &[joint(0, 16)],
        &[joint(0, 0), joint(0, 1)],
        &[joint(0, 0), joint(1, 0)],
        &[short],
    ];
    for joints in wrong {
        let refused = engine.join_peer(peer, joints, None);
        assert!(matches!(refused, Err(AttachError::Config(_))), "{joints:?}: {refused:?}");
    }
    engine.join_peer(peer, &alike, None).unwrap();
    engine.import(peer, &handle[..len]).expect("what was refused changed nothing");
    // The joints of a connected peer are in use, so they cannot change.
    assert_eq!(engine.join_peer(peer, &crossed, None), Err(AttachError::UnknownPeer));
    engine.import(peer, &handle[..len]).expect("the refused joints changed nothing");
    let other = engine.reserve_peer().unwrap();
    engine.join_peer(other, &crossed, None).unwrap();
    assert!(engine.import(other, &handle[..len]).is_err(), "keys of the other rail");
    engine.remove_peer(other).unwrap();
    assert_eq!(engine.join_peer(other, &alike, None), Err(AttachError::UnknownPeer));
    let crossed = other;
    // The next peer in this slot starts with the default joints again: rail 0 to rail 0, and so on.
    let next: PeerId = engine.reserve_peer().unwrap();
    assert_eq!(next.peer(), crossed.peer());
    engine.connect_peer(next, 3).unwrap();
    engine.import(next, &handle[..len]).expect("counted alike");
}

#[test]
fn memory_left_by_an_earlier_engine_is_no_context() {
    const PEERS: usize = 2;
    let two = Config { contexts: 2, window: 8, ..Config::DEFAULT };
    let one = Config { contexts: 1, ..two };
    let (mut peers, mut pairings) = ([PeerSlot::EMPTY; PEERS], [Pairing::ALIKE; PEERS]);
    let (mut streams, mut parked) = ([Stream::EMPTY; 2 * PEERS], [Parked::EMPTY; 2 * PEERS * 8]);
    let mut bitmap = vec![0; two.bitmap_words(2 * PEERS)];
    let (mut locals, mut remotes) = ([LocalSlot::EMPTY; 2], [RemoteSlot::EMPTY; 2]);
    let mut pending = [PendingSlot::EMPTY; 8];
    for config in [two, one] {
        let control = shared();
        let memory = EngineMemory {
            peers: &mut peers,
            pairings: &mut pairings,
            streams: &mut streams,
            parked: &mut parked,
            bitmap: &mut bitmap,
            locals: &mut locals,
            remotes: &mut remotes,
            pending: &mut pending,
        };
        let mut engine = Engine::new(config, tap(Network::new(), &control), memory).unwrap();
        let peer = engine.reserve_peer().unwrap();
        engine.connect_peer(peer, 1).unwrap();
        // A write in context 1. Only the engine with two contexts has that context.
        let next = u32::from(2 - config.contexts);
        control.borrow_mut().inject.push_back(Event::Landed(peer.peer(), 1 << 24 | next));
        engine.progress();
        let want = (config.contexts == 1).then_some(PeerError::Protocol(Violation::Context));
        assert_eq!(engine.peer_error(peer), Ok(want), "{} contexts", config.contexts);
    }
}
