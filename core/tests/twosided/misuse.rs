//! Misuse of tagged messages by the program is refused and changes nothing.

use fishplate_core::engine::protocol::{MatchConfig, Payload};
use fishplate_core::engine::tag::MatcherMemory;
use fishplate_core::engine::{Config, ContextId, Engine, Notice};
use fishplate_core::error::{AttachError, OpError};

use super::forge::Network;
use super::rig::*;
use super::support::*;

#[test]
fn misuse_is_refused_with_nothing_changed() {
    let mut own = loopback(SMALL);
    let (out, into, me) = (own.out, own.into, own.me);
    let gone = own.engine.register(region(64)).unwrap();
    own.engine.deregister(gone).unwrap();
    let stranger = own.engine.reserve_peer().unwrap();
    let engine = &mut own.engine;
    let before = (engine.stats(), engine.matching_stats());
    let mut send = |context, to, payload| {
        engine.send(context, to, tag(1), payload, Notice::Silent).unwrap_err()
    };
    let eight = Payload::Region(out.at(0), 8);
    assert_eq!(send(ContextId(1), me, eight), OpError::UnknownContext);
    assert_eq!(send(CX, stranger, eight), OpError::UnknownPeer);
    assert_eq!(send(CX, me, Payload::Region(gone.at(0), 8)), OpError::UnknownRegion);
    let beyond = OpError::OutOfBounds { offset: SIZE as u64 - 4, len: 8, size: SIZE as u64 };
    assert_eq!(send(CX, me, Payload::Region(out.at(SIZE as u64 - 4), 8)), beyond);
    assert_eq!(send(CX, me, Payload::Bytes(&[0; 129])), OpError::TooLong { len: 129, max: 128 });
    let mut recv = |source, into| engine.recv(source, tag(1), EXACT, into, 0).unwrap_err();
    assert_eq!(recv(Some(stranger), None), OpError::UnknownPeer);
    assert_eq!(recv(None, Some((gone.at(0), 8))), OpError::UnknownRegion);
    assert_eq!(recv(None, Some((into.at(SIZE as u64 - 4), 8))), beyond);
    assert_eq!(engine.probe(Some(stranger), tag(1), EXACT), Err(OpError::UnknownPeer));
    assert_eq!((engine.stats().posted, engine.matching_stats()), (before.0.posted, before.1));
    // Posts receives until all slots are in use. The next receive returns `Again`, until the status
    // of a cancelled receive is taken.
    let all: Vec<_> =
        (0..RECEIVES).map(|_| engine.recv(None, tag(1), EXACT, None, 0).unwrap()).collect();
    assert_eq!(engine.recv(None, tag(1), EXACT, None, 0), Err(OpError::Again));
    engine.cancel(all[3]).unwrap();
    assert_eq!(
        engine.recv(None, tag(1), EXACT, None, 0),
        Err(OpError::Again),
        "its status was not taken"
    );
    engine.test_recv(all[3]).unwrap().unwrap();
    engine.recv(None, tag(1), EXACT, None, 0).unwrap();
}

#[test]
fn an_engine_without_matching_refuses_by_name() {
    let mut own = own(Config::DEFAULT, [Network::new()], SIZE);
    let payload = Payload::Bytes(&[]);
    let sent = own.engine.send(CX, own.peer, tag(1), payload, Notice::Silent);
    assert_eq!(sent, Err(OpError::NoMatching));
    assert_eq!(own.engine.recv(None, tag(1), EXACT, None, 0), Err(OpError::NoMatching));
    assert_eq!((own.engine.next_recv(), own.engine.eager_max(own.peer)), (None, 0));
}

#[test]
fn memory_that_is_too_small_is_refused_by_name() {
    let attach =
        |change: &dyn Fn(&mut fishplate_core::engine::protocol::MatchMemory<'static, 1>)| {
            let mut engine: Engine<'static, Network, 1> = engine(Config::DEFAULT, [Network::new()]);
            let mut lent = match_memory(SMALL, 4, 4);
            change(&mut lent);
            let first = engine.attach_matching(SMALL, lent);
            let again = engine.attach_matching(SMALL, match_memory(SMALL, 4, 4));
            (first, again)
        };
    let (good, twice) = attach(&|_| {});
    assert_eq!((good, twice), (Ok(()), Err(AttachError::Config("matching: already attached"))));
    let refused =
        |change: &dyn Fn(&mut fishplate_core::engine::protocol::MatchMemory<'static, 1>)| {
            let (first, again) = attach(change);
            assert!(matches!(first, Err(AttachError::Memory { .. })), "{first:?}");
            assert_eq!(again, Ok(()), "nothing was attached");
        };
    refused(&|lent| lent.accounts = &mut []);
    refused(&|lent| lent.blocks = &mut []);
    refused(&|lent| lent.block_bytes = &mut []);
    refused(&|lent| lent.headers = &mut []);
    refused(&|lent| lent.outgoing_bytes = &mut []);
    refused(&|lent| {
        lent.matcher = MatcherMemory { posted: &mut [], unexpected: &mut [], buckets: &mut [] };
    });
    let mut engine: Engine<'static, Network, 1> = engine(Config::DEFAULT, [Network::new()]);
    let none = MatchConfig { headers: 0, ..SMALL };
    assert!(matches!(
        engine.attach_matching(none, match_memory(SMALL, 4, 4)),
        Err(AttachError::Config(_))
    ));
}
