//! Tests misuse by a program: each call must return an error that names the misuse.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{AttachError, OpError, PeerError};
use fishplate::core::op::{Fault, Outcome};
use fishplate::node::{ADDRESS_MAX, Error, Fabric};
use fishplate::shm::{HandshakeError, Listener, ShmConfig, ShmRail};
use fishplate::sys::LinuxHost;
use fishplate::{Cmp, Limits, Node, Notice, Signal};

use super::{SOON, Side, WORKER, Way, two};
use fishplate::config::Settings;

fn alone() -> Node {
    super::builder().fabric(Fabric::Off).connect_timeout(Duration::from_millis(50)).open().unwrap()
}

#[test]
fn invalid_addresses_are_refused() {
    let mut node = alone();
    let good = node.address().to_vec();
    assert!(good.len() <= ADDRESS_MAX);
    for bad in [&[][..], b"x", &good[..good.len() - 1], &[0; 2000]] {
        assert_eq!(node.connect(bad), Err(Error::BadAddress));
    }
    let settings = Settings { window: 64, ..Settings::DEFAULT };
    let other = super::builder().fabric(Fabric::Off).settings(settings).open().unwrap();
    let differs = Error::Differs { what: "window", theirs: 64, ours: 128 };
    assert_eq!(node.connect(other.address()), Err(differs));
    // An address on another host. No rail reaches that host.
    let mut elsewhere = alone().address().to_vec();
    elsewhere[22] ^= 1;
    assert_eq!(node.connect(&elsewhere), Err(Error::NoRail));
    // The refused addresses took no table entries.
    assert!(node.connect(&good).is_ok());
}

#[test]
fn an_import_from_a_failed_peer_says_why_it_failed() {
    let [mut a, mut b] = [alone(), alone()];
    let (at_a, at_b) = (a.connect(b.address()).unwrap(), b.connect(a.address()).unwrap());
    let memory = b.alloc(64).unwrap();
    let handle = b.handle(memory).unwrap();
    let end = Instant::now() + SOON;
    while !(a.reach(at_a).unwrap().shared_memory && b.reach(at_b).unwrap().shared_memory) {
        _ = (a.progress(), b.progress());
        assert!(Instant::now() < end);
    }
    _ = b.close(Duration::ZERO);
    while a.peer_error(at_a).unwrap().is_none() {
        assert!(Instant::now() < end);
    }
    let gone = a.peer_error(at_a).unwrap().unwrap();
    assert_eq!(a.import(at_a, &handle), Err(Error::Op(OpError::PeerFailed(gone))));
    a.disconnect(at_a).unwrap();
    assert_eq!(a.import(at_a, &handle), Err(Error::Attach(AttachError::UnknownPeer)));
}

#[test]
fn a_message_longer_than_the_buffer_is_cut_and_the_error_says_so() {
    let mut node = alone();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    node.send(me, 1, b"twelve bytes", Notice::Silent).unwrap();
    let mut short = [0; 4];
    let error = node.recv(Some(me), 1, Tag::ZERO, &mut short, SOON).unwrap_err();
    assert_eq!((error, &short), (Error::Truncated { len: 12, max: 4 }, b"twel"));
    assert_eq!(
        error.to_string(),
        "message truncated: it has 12 bytes, the buffer 4, and the rest is lost; pass a longer \
         buffer"
    );
}

#[test]
fn a_wait_for_a_signal_that_nobody_sends_says_so() {
    let mut node = alone();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let memory = node.alloc(64).unwrap();
    let error = node
        .wait(memory.at(0), Cmp::Eq, 1, Some(me), Duration::from_millis(20))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("deadline expired: no signal arrived from peer 0")
            && error.ends_with("; check that it sends to this word"),
        "{error}"
    );
}

/// While an import waits for the owner to announce the memory, the node serves its other peers.
#[test]
fn an_import_of_freed_memory_ends_at_its_deadline_and_holds_up_nobody() {
    const LIMIT: Duration = Duration::from_secs(3);
    let open = |limit| super::builder().fabric(Fabric::Off).connect_timeout(limit).open().unwrap();
    let (mut node, mut owner, mut other) = (open(LIMIT), open(SOON), open(SOON));
    let address = node.address();
    let owner_address = owner.address();
    let (theirs, its) = (node.connect(&owner_address), node.connect(other.address()));
    let (from_owner, from_other) = (owner.connect(&address), other.connect(&address));
    let memory = owner.alloc(64).unwrap();
    let handle = owner.handle(memory).unwrap();
    owner.free(memory).unwrap();
    let importing = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            owner.send(from_owner.unwrap(), 1, b"connected", Notice::Silent).unwrap();
            other.send(from_other.unwrap(), 1, b"connected", Notice::Silent).unwrap();
            while !importing.load(Ordering::Acquire) {
                owner.progress();
                other.progress();
            }
            other.send(from_other.unwrap(), 2, b"served", Notice::Silent).unwrap();
            other.quiet(from_other.unwrap(), LIMIT / 2).unwrap();
        });
        for peer in [theirs.unwrap(), its.unwrap()] {
            node.recv(Some(peer), 1, Tag::ZERO, &mut [0; 9], SOON).unwrap();
        }
        importing.store(true, Ordering::Release);
        let begun = Instant::now();
        let error = node.import(theirs.unwrap(), handle).unwrap_err();
        assert_eq!(error, Error::Attach(AttachError::Unheard));
        assert!((LIMIT..LIMIT + LIMIT / 2).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    });
}

#[test]
fn a_peer_that_never_connects_is_named_at_the_deadline() {
    let mut node = alone();
    let other = alone();
    let peer = node.connect(other.address()).unwrap();
    let memory = node.alloc(64).unwrap();
    let begun = Instant::now();
    assert_eq!(node.import(peer, [0; 64]), Err(Error::NotConnected(peer)));
    assert_eq!(node.send(peer, 1, b"x", Notice::Silent), Err(Error::NotConnected(peer)));
    assert!(begun.elapsed() >= Duration::from_millis(100));
    assert_eq!(node.peer_error(peer), Ok(None));
    // The error for an unknown peer differs from the error for an unconnected peer.
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    node.disconnect(me).unwrap();
    assert_eq!(node.send(me, 1, b"x", Notice::Silent), Err(OpError::UnknownPeer.into()));
    assert_eq!(
        node.post_recv(Some(me), 1, Tag::ZERO, memory.slice(..), 0),
        Err(OpError::UnknownPeer.into())
    );
    node.disconnect(peer).unwrap();
    assert!(node.peer_error(peer).is_err() && node.disconnect(peer).is_err());
}

/// In some rounds the node would dial, in others it waits for the peer to dial.
#[test]
fn a_peer_that_closes_before_it_connects_fails_long_before_the_deadline() {
    let open = || super::builder().fabric(Fabric::Off).connect_timeout(SOON * 10).open().unwrap();
    let mut node = open();
    let gone = Error::Op(OpError::PeerFailed(PeerError::Closed));
    for _ in 0..12 {
        let other = open();
        let peer = node.connect(other.address()).unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(50) {
            node.progress();
        }
        assert_eq!(node.peer_error(peer), Ok(None));
        drop(other);
        assert_eq!(node.import(peer, [0; 64]), Err(gone));
        assert_eq!(node.send(peer, 1, b"x", Notice::Silent), Err(gone));
        assert_eq!(node.quiet(peer, SOON), Err(gone));
        assert_eq!(node.peer_error(peer), Ok(Some(PeerError::Closed)));
        assert_eq!(node.failed_peers(), []);
        node.disconnect(peer).unwrap();
        assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    }
}

#[test]
fn a_peer_that_refuses_for_good_is_reported_and_not_dialled_again() {
    let mut node = alone();
    // A node's id follows magic and version in its address. The node with the smaller id dials.
    let mut address = node.address().to_vec();
    address[6..14].copy_from_slice(&[u8::MAX; 8]);
    // A socket id that no other run of the tests uses.
    let door = u64::MAX / 2 - u64::from(std::process::id());
    address[14..22].copy_from_slice(&door.to_le_bytes());
    let listener = Listener::bind(format!("@fishplate-{door:016x}")).unwrap();
    let other = ShmConfig { lane_cells: 512, ..ShmConfig::default() };
    let profile = ShmRail::new(LinuxHost::shared(), other).unwrap().profile();
    let peer = node.connect(&address).unwrap();
    let begun = Instant::now();
    let refused = loop {
        node.progress();
        let _ = listener.accept(&profile, Instant::now());
        match node.peer_error(peer) {
            Ok(None) => assert!(begun.elapsed() < SOON),
            refused => break refused,
        }
    };
    let mismatch = |error| matches!(error, Error::Handshake(HandshakeError::Mismatch { .. }));
    assert!(mismatch(refused.unwrap_err()));
    assert!(mismatch(node.send(peer, 1, b"x", Notice::Silent).unwrap_err()));
    assert!(mismatch(node.import(peer, [0; 64]).unwrap_err()));
    node.disconnect(peer).unwrap();
    node.close(SOON).unwrap();
}

#[test]
fn a_full_table_names_its_limit() {
    let limits = Limits { peers: 1, locals: 2, remotes: 1, ..Limits::DEFAULT };
    let mut node = super::builder().fabric(Fabric::Off).limits(limits).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let mut other = own.clone();
    other[6] ^= 1;
    assert_eq!(node.connect(&other), Err(Error::Full { limit: "peers", value: 1 }));
    let memory = node.alloc(64).unwrap();
    node.alloc(64).unwrap();
    assert_eq!(node.alloc(64), Err(Error::Full { limit: "locals", value: 2 }));
    let handle = node.handle(memory).unwrap();
    let there = node.import(me, &handle).unwrap();
    assert_eq!(node.import(me, &handle), Err(Error::Full { limit: "remotes", value: 1 }));
    let told = node.import(me, &handle).unwrap_err().to_string();
    assert!(told.contains("Limits::remotes") && told.contains("Builder::limits"), "{told}");
    // A receive into a byte slice needs a region too.
    let received = node.recv(None, 1, Tag::ZERO, &mut [0; 8], Duration::ZERO);
    assert_eq!(received, Err(Error::Full { limit: "locals", value: 2 }));
    node.release(there).unwrap();
    node.import(me, &handle).unwrap();
}

#[test]
fn a_put_of_bytes_with_a_wrong_signal_writes_nothing() {
    two(
        Way::SharedMemory,
        |builder| builder,
        |mut side| {
            let memory = side.node.alloc(64).unwrap();
            let handle = side.node.handle(memory).unwrap();
            let theirs = side.exchange(&handle);
            let target = side.node.import(side.peer, theirs).unwrap();
            let own = side.node.address().to_vec();
            let me = side.node.connect(&own).unwrap();
            let other = side.node.import(me, &handle).unwrap();
            for (signal, error) in [
                (other.at(8), OpError::TwoPeers),
                (target.at(12), OpError::Misaligned { offset: 12, width: 8 }),
                (target.at(64), OpError::OutOfBounds { offset: 64, len: 8, size: 64 }),
            ] {
                let signal = Signal::set(signal, 1);
                let put = side.node.put_signal(b"12345678", target.at(0), signal, Notice::Silent);
                assert_eq!(put, Err(error));
            }
            side.node.quiet(side.peer, SOON).unwrap();
            side.exchange(&[]);
            assert_eq!([0, 8].map(|at| side.node.load(memory.at(at))), [Ok(0), Ok(0)]);
        },
    );
}

#[test]
fn memory_that_is_freed_foreign_or_too_short_is_an_error() {
    let mut node = alone();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let memory = node.alloc(4096).unwrap();
    let there = node.import(me, node.handle(memory).unwrap()).unwrap();
    let mut bytes = [0; 16];
    assert!(node.read(memory.at(4081), &mut bytes).is_err());
    assert!(node.write(memory.at(u64::MAX), &bytes).is_err());
    assert_eq!(node.load(memory.at(4)), Err(OpError::Misaligned { offset: 4, width: 8 }.into()));
    assert!(node.put(memory.slice(..5000), there.at(0), Notice::Silent).is_err());
    assert!(node.put(&bytes, there.at(4090), Notice::Silent).is_err());
    assert_eq!(node.put(&bytes, there.at(0), Notice::Report(1)), Err(OpError::Unreported));
    assert!(node.signal(Signal::set(there.at(3), 1), Notice::Silent).is_err());
    assert!(node.wait(memory.at(8192), Cmp::Eq, 1, None, SOON).is_err());
    // The memory is in use, because this process has imported it.
    assert!(matches!(node.free(memory), Err(Error::Attach(AttachError::InUse(_)))));
    node.release(there).unwrap();
    assert!(node.release(there).is_err());
    node.free(memory).unwrap();
    assert_eq!(node.free(memory), Err(AttachError::UnknownRegion.into()));
    assert!(node.read(memory.at(0), &mut bytes).is_err() && node.handle(memory).is_err());
    assert!(node.put(&bytes, there.at(0), Notice::Silent).is_err());
    assert!(node.post_recv(None, 1, Tag::ZERO, memory.slice(..), 0).is_err());
    assert!(node.alloc(0).is_err());
}

#[test]
fn a_closing_node_is_not_reported_dead_and_its_last_message_arrives() {
    for way in super::ways() {
        for first in [0, 1] {
            two(
                way,
                |builder| builder,
                |mut side| {
                    let memory = side.node.alloc(1 << 20).unwrap();
                    let handle = side.node.handle(memory).unwrap();
                    let handle = side.exchange(&handle);
                    let there = side.node.import(side.peer, handle).unwrap();
                    // The first side to leave frees its memory.
                    side.exchange(&[]);
                    if side.rank == first {
                        // Puts without a quiet, and sends the last message right before it exits.
                        for _ in 0..10 {
                            side.node
                                .put(memory.slice(64..90_000), there.at(64), Notice::Silent)
                                .unwrap();
                        }
                        side.node.signal(Signal::set(there.at(0), 9), Notice::Silent).unwrap();
                        side.node.close(SOON).unwrap();
                    } else {
                        side.node.wait(memory.at(0), Cmp::Eq, 9, Some(side.peer), SOON).unwrap();
                        let closed = |node: &mut Node| loop {
                            node.progress();
                            if let Some(why) = node.peer_error(side.peer).unwrap() {
                                break why;
                            }
                        };
                        assert_eq!(closed(&mut side.node), PeerError::Closed, "{way:?}");
                        assert!(
                            side.node.signal(Signal::set(there.at(0), 1), Notice::Silent).is_err()
                        );
                        side.node.close(SOON).unwrap();
                    }
                },
            );
        }
    }
}

#[test]
fn an_unanswered_close_names_the_peer_and_can_be_continued() {
    for way in super::ways() {
        two(
            way,
            |builder| builder,
            |mut side| {
                let memory = side.node.alloc(64).unwrap();
                let handle = side.node.handle(memory).unwrap();
                let handle = side.exchange(&handle);
                let there = side.node.import(side.peer, handle).unwrap();
                side.node.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
                side.node.wait(memory.at(0), Cmp::Eq, 1, Some(side.peer), SOON).unwrap();
                side.node.quiet(side.peer, SOON).unwrap();
                side.exchange(&[]);
                let Side { mut node, peer, rank, send, receive } = side;
                if rank == 0 {
                    // The other side makes no progress during `shutdown`.
                    receive.recv().unwrap();
                    let closed = node.shutdown(Duration::from_millis(100));
                    // A worker answers even if its program makes no calls.
                    assert!(
                        WORKER && closed.is_ok()
                            || matches!(closed, Err(Error::Unfinished(left))
                                if left.peer == peer && left.peers == 1),
                        "{way:?}: {closed:?}"
                    );
                    send.send(vec![]).unwrap();
                } else {
                    send.send(vec![]).unwrap();
                    receive.recv().unwrap();
                }
                node.close(SOON).unwrap();
            },
        );
    }
    let mut node = alone();
    let other = alone();
    node.connect(other.address()).unwrap();
    let begun = Instant::now();
    node.close(Duration::from_secs(3600)).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_close_ends_while_the_peer_keeps_sending_long_messages() {
    const CLOSED: Fault = Fault::Peer(PeerError::Closed);
    let node = || super::builder().fabric(Fabric::Off).patience(Duration::ZERO).open().unwrap();
    let (mut a, mut b) = (node(), node());
    let addresses = [&a, &b].map(|node| node.address().to_vec());
    let (from, to) = (a.connect(&addresses[1]).unwrap(), b.connect(&addresses[0]).unwrap());
    let [into, out] = [&mut a, &mut b].map(|node| node.alloc(100_000).unwrap());
    while !a.reach(from).unwrap().shared_memory || !b.reach(to).unwrap().shared_memory {
        a.progress();
        b.progress();
    }
    // The close cannot end before `b` receives this message.
    a.send(from, 2, into.slice(..), Notice::Silent).unwrap();
    let (begun, mut got, mut sent, mut ended, mut left) = (Instant::now(), 0, 0, 0, false);
    while !left || ended < sent {
        assert!(begun.elapsed() < SOON, "left: {left}, {ended} of {sent} sends have ended");
        while !left && a.post_recv(Some(from), 1, Tag::ZERO, into.slice(..), 0).is_ok() {}
        while b.send(to, 1, out.slice(..), Notice::Report(0)).is_ok() {
            sent += 1;
        }
        b.progress();
        a.progress();
        while let Some(status) = a.next_recv() {
            let failed = status.outcome == Received::Failed(CLOSED);
            assert!(failed || status.outcome == Received::Ok, "{status:?}");
            got += 1;
            match got {
                50 => assert!(a.shutdown(Duration::ZERO).is_err()),
                100 => _ = b.post_recv(Some(to), 2, Tag::ZERO, out.slice(..), 0).unwrap(),
                _ => {}
            }
        }
        left = a.peer_error(from).unwrap() == Some(PeerError::Closed);
        while let Some(end) = b.next_completion() {
            let failed = end.outcome == Outcome::Failed(CLOSED);
            assert!(failed || end.outcome == Outcome::Done, "{end:?}");
            ended += 1;
        }
    }
}

#[test]
fn a_node_can_be_dropped_with_everything_in_flight() {
    for drop_first in [0, 1] {
        two(
            Way::SharedMemory,
            |builder| builder.patience(Duration::ZERO),
            |mut side| {
                let memory = side.node.alloc(1 << 20).unwrap();
                let handle = side.node.handle(memory).unwrap();
                let handle = side.exchange(&handle);
                let there = side.node.import(side.peer, handle).unwrap();
                for tag in 0..2000 {
                    let sent =
                        side.node.send(side.peer, tag, memory.slice(..100_000), Notice::Silent);
                    let put = side.node.put(memory.slice(..), there.at(0), Notice::Silent);
                    let Err(refusal) = sent.and(put.map_err(Error::Op)) else { continue };
                    // With a worker, the node may already know that the other side is gone.
                    let gone = WORKER && matches!(refusal, Error::Op(OpError::PeerFailed(_)));
                    assert!(gone || refusal == OpError::Again.into(), "{refusal}");
                    break;
                }
                side.node.post_recv(None, 7, Tag::ALL, memory.slice(..), 0).unwrap();
                if side.rank != drop_first {
                    // The other side exits without a Bye.
                    let waited = side.node.wait(memory.at(0), Cmp::Eq, 99, Some(side.peer), SOON);
                    assert!(matches!(waited, Err(Error::Wait(_))), "{waited:?}");
                    assert!(side.node.peer_error(side.peer).unwrap().is_some());
                }
            },
        );
    }
}
