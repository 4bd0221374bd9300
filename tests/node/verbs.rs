//! Tests the operations of a node over shared memory and over libfabric's tcp.

use std::env;
use std::process::Command;
use std::time::{Duration, Instant};

use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::{AttachError, OpError};
use fishplate::core::op::{Amo, AmoOp, Outcome};
use fishplate::node::{Error, Fabric};
use fishplate::{Cmp, Issued, Limits, Notice, Signal};

use super::{SOON, Side, two, ways};

/// Returns bytes that depend on sender and index.
fn pattern(rank: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + rank * 7 + at / 251) as u8).collect()
}

#[test]
fn puts_gets_signals_and_atomics_are_ordered_from_bytes_and_memory() {
    for way in ways() {
        two(
            way,
            |builder| builder,
            |mut side| {
                let inbox = side.node.alloc(1 << 20).unwrap();
                let outbox = side.node.alloc(1 << 20).unwrap();
                let handle = side.node.handle(inbox).unwrap();
                let handle = side.exchange(&handle);
                let Side { node, peer, rank, .. } = &mut side;
                let there = node.import(*peer, handle).unwrap();
                for (round, len) in [0, 1, 8, 200, 5000, 300_000].into_iter().enumerate() {
                    let step = 2 * round as u64;
                    let ours = pattern(*rank, len);
                    let theirs = pattern(1 - *rank, len);
                    let mut got = vec![0; len];

                    node.put_signal(
                        &ours[..],
                        there.at(64),
                        Signal::set(there.at(0), step + 1),
                        Notice::Silent,
                    )
                    .unwrap();
                    node.wait(inbox.at(0), Cmp::Ge, step + 1, Some(*peer), SOON).unwrap();
                    node.read(inbox.at(64), &mut got).unwrap();
                    assert_eq!(got, theirs, "{way:?}, {len} bytes from a slice");

                    node.write(outbox.at(0), &ours).unwrap();
                    let signal = Signal::set(there.at(0), step + 2);
                    node.put_signal(outbox.slice(..len), there.at(500_000), signal, Notice::Silent)
                        .unwrap();
                    node.wait(inbox.at(0), Cmp::Ge, step + 2, Some(*peer), SOON).unwrap();
                    node.read(inbox.at(500_000), &mut got).unwrap();
                    assert_eq!(got, theirs, "{way:?}, {len} bytes from memory");

                    // Gets the sent data back from the peer.
                    node.quiet(*peer, SOON).unwrap();
                    node.get(outbox.slice(..len), there.at(64), Notice::Silent).unwrap();
                    node.quiet(*peer, SOON).unwrap();
                    node.read(outbox.at(0), &mut got).unwrap();
                    assert_eq!(got, ours, "{way:?}, {len} bytes read");
                }
                for n in 0..10 {
                    assert_eq!(node.fetch_add(there.at(8), 3, SOON).unwrap(), 3 * n);
                }
                let or = Amo { op: AmoOp::Or, width: 4, operand: 0xf0, compare: 0 };
                node.amo(there.at(16), or, Notice::Silent).unwrap();
                node.fence(*peer).unwrap();
                node.signal(Signal::add(there.at(24), 9), Notice::Silent).unwrap();
                assert_eq!(node.wait(inbox.at(24), Cmp::Eq, 9, None, SOON).unwrap(), 9);
                assert_eq!(
                    (node.load(inbox.at(8)).unwrap(), node.load(inbox.at(16)).unwrap()),
                    (30, 0xf0)
                );

                // A put that reports its completion.
                let issued =
                    node.put(outbox.slice(..4096), there.at(4096), Notice::Report(77)).unwrap();
                if let Issued::Pending(token) = issued {
                    node.quiet(*peer, SOON).unwrap();
                    let end = node.test(token).unwrap().expect("complete after a quiet");
                    assert_eq!((end.tag, end.outcome), (77, Outcome::Done));
                }
                assert_eq!(node.next_completion(), None);
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
            },
        );
    }
}

/// A stack overflow ends the process, so another process runs the test. There every thread has a
/// small stack.
#[test]
fn nodes_need_little_of_a_stack() {
    let kib = if cfg!(debug_assertions) { 512 } else { 256 };
    let (_, module) = module_path!().split_once("::").unwrap();
    let name = format!("{module}::puts_gets_signals_and_atomics_are_ordered_from_bytes_and_memory");
    let mut again = Command::new(env::current_exe().unwrap());
    again.args(["--exact", &name]).env("RUST_MIN_STACK", (kib << 10).to_string());
    let told = again.output().unwrap();
    let text = String::from_utf8_lossy(&told.stdout);
    assert!(told.status.success() && text.contains("1 passed"), "{}: {text}", told.status);
}

#[test]
fn messages_match_by_source_and_tag_from_slices_and_memory_short_and_long() {
    for way in ways() {
        two(
            way,
            |builder| builder,
            |mut side| {
                let Side { node, peer, rank, .. } = &mut side;
                let (peer, rank) = (*peer, *rank);
                let lengths = [0, 1, 100, 8192, 8193, 300_000];
                for (tag, len) in lengths.into_iter().enumerate() {
                    node.send(peer, tag as u64, &pattern(rank, len)[..], Notice::Silent).unwrap();
                }
                // Receives in reverse order.
                for (tag, len) in lengths.into_iter().enumerate().rev() {
                    let mut got = vec![0; len];
                    let message =
                        node.recv(Some(peer), tag as u64, Tag::ZERO, &mut got, SOON).unwrap();
                    assert_eq!((message.source, message.len), (peer, len as u64), "{way:?}");
                    assert_eq!(got, pattern(1 - rank, len), "{way:?}, {len} bytes");
                }
                let memory = node.alloc(1 << 20).unwrap();
                let into = node.alloc(1 << 20).unwrap();
                node.write(memory.at(0), &pattern(rank, 700_000)).unwrap();
                let request = node.post_recv(None, 0, Tag::ALL, into.slice(..), 5).unwrap();
                node.send(peer, 99, memory.slice(..700_000), Notice::Silent).unwrap();
                let status = node.wait_recv(request, SOON).unwrap();
                assert_eq!(
                    (status.word, status.outcome, status.delivered),
                    (5, Received::Ok, 700_000)
                );
                let mut got = vec![0; 700_000];
                node.read(into.at(0), &mut got).unwrap();
                assert_eq!(got, pattern(1 - rank, 700_000), "{way:?}");

                // No message has arrived, so the wait expires. It does not take a later message.
                let begun = Instant::now();
                let mut text = [0; 8];
                let waited =
                    node.recv(Some(peer), 1000, Tag::ZERO, &mut text, Duration::from_millis(30));
                assert!(waited.is_err() && begun.elapsed() >= Duration::from_millis(30));
                assert!(node.probe(Some(peer), 1000, Tag::ZERO).unwrap().is_none());
                side.exchange(&[]);
                let node = &mut side.node;
                node.send(peer, 1000, b"at last", Notice::Silent).unwrap();
                let message = node.recv(Some(peer), 1000, Tag::ZERO, &mut text, SOON).unwrap();
                assert_eq!(&text[..message.len as usize], b"at last");
                assert!(node.next_recv().is_none() && node.next_completion().is_none());
                node.quiet(peer, SOON).unwrap();
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
            },
        );
    }
}

#[test]
fn thousands_of_messages_are_received_in_reverse() {
    const COUNT: u64 = 3000;
    for way in ways() {
        two(
            way,
            |builder| builder,
            |mut side| {
                let peer = side.peer;
                if side.rank == 0 {
                    for n in 0..COUNT {
                        side.node.send(peer, n, &n.to_le_bytes(), Notice::Silent).unwrap();
                    }
                }
                side.exchange(&[]);
                if side.rank == 1 {
                    for n in (0..COUNT).rev() {
                        let mut got = [0; 8];
                        side.node.recv(Some(peer), n, Tag::ZERO, &mut got, SOON).unwrap();
                        assert_eq!(u64::from_le_bytes(got), n, "{way:?}");
                    }
                }
                side.node.quiet(peer, SOON).unwrap();
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
            },
        );
    }
}

#[test]
fn a_wait_sleeps() {
    for way in ways() {
        two(
            way,
            |builder| builder,
            |mut side| {
                let inbox = side.node.alloc(64).unwrap();
                let handle = side.node.handle(inbox).unwrap();
                let handle = side.exchange(&handle);
                let there = side.node.import(side.peer, handle).unwrap();
                side.exchange(&[]);
                let used = || {
                    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                    // SAFETY: the call fills one structure, which is ours.
                    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
                    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
                };
                if side.rank == 0 {
                    let before = used();
                    side.node.wait(inbox.at(0), Cmp::Eq, 1, Some(side.peer), SOON).unwrap();
                    let used = used() - before;
                    assert!(
                        used < Duration::from_millis(400),
                        "{way:?}: waited one second, and used {used:?}"
                    );
                } else {
                    std::thread::sleep(Duration::from_secs(1));
                    side.node.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
                    side.node.quiet(side.peer, SOON).unwrap();
                }
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
            },
        );
    }
}

#[test]
fn a_node_reaches_itself() {
    let mut node = super::builder().fabric(fishplate::node::Fabric::Off).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    assert_eq!(node.connect(&own).unwrap(), me, "known already");
    assert!(node.reach(me).unwrap().shared_memory);
    let memory = node.alloc(100_000).unwrap();
    let there = node.import(me, node.handle(memory).unwrap()).unwrap();
    node.put_signal(b"to myself", there.at(8), Signal::set(there.at(0), 1), Notice::Silent)
        .unwrap();
    node.wait(memory.at(0), Cmp::Eq, 1, Some(me), SOON).unwrap();
    let mut text = [0; 9];
    node.read(memory.at(8), &mut text).unwrap();
    assert_eq!(&text, b"to myself");
    node.send(me, 4, &pattern(0, 50_000)[..], Notice::Silent).unwrap();
    let mut got = vec![0; 50_000];
    node.recv(None, 4, Tag::ZERO, &mut got, SOON).unwrap();
    assert_eq!(got, pattern(0, 50_000));
    node.close(SOON).unwrap();
}

#[test]
fn the_completion_of_a_fetch_is_taken_once() {
    for way in ways() {
        two(
            way,
            |builder| builder,
            |mut side| {
                let inbox = side.node.alloc(64).unwrap();
                let handle = side.node.handle(inbox).unwrap();
                let handle = side.exchange(&handle);
                let there = side.node.import(side.peer, handle).unwrap();
                for before in 0..3 {
                    let add = Amo { op: AmoOp::Add, width: 8, operand: 1, compare: 0 };
                    let value = match side.node.start_fetch(there.at(0), add).unwrap() {
                        Issued::Done { value } => value,
                        Issued::Pending(token) => {
                            let end = side.node.wait_completion(token, SOON).unwrap();
                            assert_eq!(end.outcome, Outcome::Done);
                            let again = side.node.wait_completion(token, SOON);
                            assert_eq!(again, Err(Error::Op(OpError::StaleToken)));
                            end.value
                        }
                    };
                    assert_eq!(value, before, "{way:?}");
                }
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
            },
        );
    }
}

#[test]
fn memory_in_use_is_not_freed_and_keeps_its_pages() {
    let mut node = super::builder().fabric(Fabric::Off).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let memory = node.alloc(4096).unwrap();
    node.write(memory.at(8), b"kept").unwrap();
    let request = node.post_recv(Some(me), 1, Tag::ZERO, memory.slice(..), 0).unwrap();
    assert!(matches!(node.free(memory), Err(Error::Attach(AttachError::InUse(_)))));
    assert!(node.segment(memory).is_ok());
    let mut kept = [0; 4];
    node.read(memory.at(8), &mut kept).unwrap();
    assert_eq!(kept, *b"kept");
    node.cancel(request).unwrap();
    node.free(memory).unwrap();
    assert_eq!(node.segment(memory).map(drop), Err(Error::Attach(AttachError::UnknownRegion)));
}

#[test]
fn pages_stay_mapped_while_their_segment_lives() {
    let mut node = super::builder().fabric(Fabric::Off).open().unwrap();
    let memories = [node.alloc(4096).unwrap(), node.alloc(4096).unwrap()];
    let segments = memories.map(|memory| node.segment(memory).unwrap());
    for memory in memories {
        node.write(memory.at(8), b"kept").unwrap();
    }
    node.free(memories[0]).unwrap();
    assert_eq!(node.segment(memories[0]).map(drop), Err(Error::Attach(AttachError::UnknownRegion)));
    node.close(SOON).unwrap();
    for segment in segments {
        // SAFETY: the segment is mapped and long enough, and nothing writes these bytes.
        assert_eq!(unsafe { segment.ptr().add(8).cast::<[u8; 4]>().read() }, *b"kept");
    }
}

#[test]
fn patience_changes_while_a_node_is_open() {
    let limits = Limits { locals: 1, ..Limits::DEFAULT };
    let hour = Duration::from_secs(3600);
    let mut node =
        super::builder().fabric(Fabric::Off).limits(limits).patience(hour).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let long = vec![0; 1 << 20];
    node.send(me, 1, &long, Notice::Silent).unwrap();
    for patience in [Duration::ZERO, Duration::from_millis(200)] {
        node.set_patience(patience).unwrap();
        let begun = Instant::now();
        // The first message still uses the only region, so the send waits for `patience`.
        assert!(node.send(me, 1, &long[..], Notice::Silent).is_err());
        assert!((patience..hour / 60).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    }
}
