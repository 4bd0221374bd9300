//! Tests settings at their limits, and waits that expire while a message arrives.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::core::engine::tag::Tag;
use fishplate::core::error::OpError;
use fishplate::core::op::Outcome;
use fishplate::node::{Error, Fabric, OpenError};
use fishplate::{Cmp, Issued, Job, Limits, Node, Notice, Signal};
use fishplate_testing::fabric::{Fake, Persona};

use super::{SOON, Side, WORKER, Way, fake, two};

#[test]
fn settings_out_of_range_are_errors_and_unlimited_times_work() {
    let settings = Settings { max_rails: 0, ..Settings::DEFAULT };
    let opened = super::builder().settings(settings).open();
    assert!(matches!(opened, Err(OpenError::Setting(bad)) if bad.field == "max_rails"));
    let mut node = super::builder()
        .fabric(Fabric::Off)
        .connect_timeout(Duration::MAX)
        .patience(Duration::MAX)
        .open()
        .unwrap();
    let own = node.address().to_vec();
    let me = node.connect(&own).unwrap();
    let memory = node.alloc(64).unwrap();
    let handle = node.handle(memory).unwrap();
    let there = node.import(me, handle).unwrap();
    node.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
    node.wait(memory.at(0), Cmp::Eq, 1, Some(me), Duration::MAX).unwrap();
    node.quiet(me, Duration::MAX).unwrap();
    let mut job = Job::join("127.0.0.1:0", 1, Duration::MAX).unwrap();
    assert_eq!(job.allgather(b"alone").unwrap(), [b"alone"]);
    node.close(Duration::MAX).unwrap();
}

#[test]
fn named_rails_that_do_not_exist_are_an_error() {
    let fake = Fake::new(Persona::cxi(), 1);
    let named = |providers: &[&str], interfaces: &[&str]| {
        let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let settings = Settings {
            providers: own(providers),
            interfaces: own(interfaces),
            ..Settings::DEFAULT
        };
        super::builder().library(fake.library()).settings(settings).open()
    };
    for (providers, interfaces) in [(&["cxi"][..], &["cxi9"][..]), (&["efa"], &[])] {
        assert!(matches!(named(providers, interfaces), Err(OpenError::Rails(_))), "{providers:?}");
    }
    assert!(named(&["cxi"], &["cxi0"]).is_ok());
}

#[test]
fn nodes_connect_over_a_provider_inside_the_process() {
    let provider = Fake::new(Persona::cxi(), 5);
    let open = |interfaces: &[&str]| fake(&provider, interfaces).open().unwrap();
    let (mut a, mut b) = (open(&["cxi0"]), open(&["cxi1", "cxi2"]));
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let (b_at_a, a_at_b) = (a.connect(to_b).unwrap(), b.connect(to_a).unwrap());
    assert_eq!((a.reach(b_at_a).unwrap().fabric, b.reach(a_at_b).unwrap().fabric), (1, 1));
    let (source, inbox) = (a.alloc(4096).unwrap(), b.alloc(4096).unwrap());
    let there = a.import(b_at_a, b.handle(inbox).unwrap()).unwrap();
    a.write(source.at(0), &[9; 3000]).unwrap();
    let signal = Signal::set(there.at(0), 1);
    a.put_signal(source.slice(..3000), there.at(64), signal, Notice::Silent).unwrap();
    while b.load(inbox.at(0)).unwrap() == 0 {
        a.progress();
        b.progress();
    }
    let mut got = [0; 3000];
    b.read(inbox.at(64), &mut got).unwrap();
    assert_eq!(got, [9; 3000]);
}

#[test]
fn a_message_that_arrives_as_its_wait_expires_is_received_once() {
    const MESSAGES: u64 = 3000;
    for len in [8, 20_000] {
        two(
            Way::SharedMemory,
            |builder| builder,
            |mut side| {
                let peer = side.peer;
                if side.rank == 0 {
                    for n in 0..MESSAGES {
                        let mut bytes = vec![0; len];
                        bytes[..8].copy_from_slice(&n.to_le_bytes());
                        side.node.send(peer, 1, &bytes[..], Notice::Silent).unwrap();
                    }
                    side.node.quiet(peer, SOON).unwrap();
                } else {
                    let (mut next, mut late, mut into) = (0u64, 0u64, vec![0; len]);
                    while next < MESSAGES {
                        // Timeouts of 0 to 3 us: from one poll to a typical arrival time.
                        let timeout = Duration::from_nanos(next % 4 * 1000);
                        match side.node.recv(Some(peer), 1, Tag::ZERO, &mut into, timeout) {
                            Ok(message) => {
                                let n = u64::from_le_bytes(into[..8].try_into().unwrap());
                                assert_eq!(
                                    (n, message.len),
                                    (next, len as u64),
                                    "lost, after {late} waits"
                                );
                                next += 1;
                            }
                            Err(Error::Wait(_)) => late += 1,
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
            },
        );
    }
}

#[test]
fn registered_program_memory_works_and_its_bounds_are_checked() {
    two(
        Way::SharedMemory,
        |builder| {
            builder.limits(Limits { operations: 4, ..Limits::DEFAULT }).patience(Duration::ZERO)
        },
        |mut side| {
            let words: &'static mut [u64] = Box::leak(vec![0; 512].into());
            // SAFETY: the memory is leaked, and only the node accesses it.
            let memory =
                unsafe { side.node.register(NonNull::from(&mut words[0]).cast(), 4096) }.unwrap();
            let beyond = OpError::OutOfBounds { offset: 4090, len: 8, size: 4096 };
            assert_eq!(side.node.write(memory.at(4090), &[0; 8]), Err(beyond.into()));
            let page = side.node.alloc(100).unwrap();
            let beyond = OpError::OutOfBounds { offset: 96, len: 8, size: 100 };
            assert_eq!(side.node.store(page.at(96), 1), Err(beyond.into()));

            let handle = side.node.handle(memory).unwrap();
            let handle = side.exchange(&handle);
            let there = side.node.import(side.peer, handle).unwrap();
            side.exchange(&[]);
            if side.rank == 0 {
                // The other side makes no progress, so every wait expires, until no operation slot
                // is free.
                side.receive.recv().unwrap();
                let mut begun = 0;
                for _ in 0..8 {
                    match side.node.fetch_add(there.at(0), 1, Duration::ZERO) {
                        Err(Error::Wait(_)) => begun += 1,
                        // With a worker, the peer makes progress.
                        Ok(_) if WORKER => begun += 1,
                        other => assert_eq!(other, Err(OpError::Again.into())),
                    }
                }
                assert!(begun == 4 || WORKER);
                side.send.send(vec![]).unwrap();
                // The expired operations are executed now, and every slot becomes free.
                let deadline = Instant::now() + SOON;
                let before = loop {
                    match side.node.fetch_add(there.at(0), 1, SOON) {
                        Err(Error::Op(OpError::Again)) if Instant::now() < deadline => {
                            _ = side.node.progress()
                        }
                        other => break other,
                    }
                };
                assert_eq!(before, Ok(begun));
            } else {
                side.send.send(vec![]).unwrap();
                side.receive.recv().unwrap();
            }
            side.exchange(&[]);
            side.node.close(SOON).unwrap();
        },
    );
}

#[test]
fn imported_memory_of_a_peer_on_this_host_is_mapped_and_its_bounds_are_checked() {
    two(
        Way::SharedMemory,
        |builder| builder,
        |mut side| {
            let ours = side.node.alloc(100).unwrap();
            let handle = side.node.handle(ours).unwrap();
            let handle = side.exchange(&handle);
            let theirs = side.node.import(side.peer, handle).unwrap();
            let number = 17 + side.rank as u64;
            let there = side.node.remote_ptr(theirs.at(8), 8).unwrap();
            // SAFETY: the address is aligned and in mapped memory of the peer, which accesses this
            // word only by atomics.
            unsafe { there.cast::<AtomicU64>().as_ref() }.store(number, Ordering::Release);
            side.exchange(&[]);
            assert_eq!(side.node.load(ours.at(8)), Ok(35 - number));
            assert!(side.node.remote_ptr(theirs.at(93), 8).is_none());
            assert!(side.node.remote_ptr(theirs.at(u64::MAX), 8).is_none());
            side.node.release(theirs).unwrap();
            assert!(side.node.remote_ptr(theirs.at(8), 8).is_none());
            assert!(side.node.gpu_stats().is_none());
            side.exchange(&[]);
            side.node.close(SOON).unwrap();
        },
    );
}

#[test]
fn cached_message_memory_is_freed_for_the_program() {
    let limits = Limits { locals: 8, ..Limits::default() };
    let mut node = super::builder().fabric(Fabric::Off).limits(limits).open().unwrap();
    let own = node.address().to_vec();
    let me = node.connect(own).unwrap();
    let bytes = vec![7; 100_000];
    for tag in 0..7u64 {
        node.send(me, tag, &bytes[..], Notice::Silent).unwrap();
    }
    for tag in 0..7u64 {
        let mut got = vec![0; bytes.len()];
        node.recv(Some(me), tag, Tag::ZERO, &mut got, SOON).unwrap();
        assert!(got == bytes);
    }
    node.quiet(me, SOON).unwrap();
    for count in 0..8 {
        assert!(node.alloc(64).is_ok(), "{count}");
    }
    assert_eq!(node.alloc(64), Err(Error::Full { limit: "locals", value: 8 }));
}

#[test]
fn any_context_word_of_the_program_is_returned() {
    two(
        Way::SharedMemory,
        |builder| builder,
        |mut side| {
            let memory = side.node.alloc(1 << 20).unwrap();
            let request =
                side.node.post_recv(None, 1, Tag::ZERO, memory.slice(..), u64::MAX).unwrap();
            // The node sends a copy of the bytes, and reports no completion.
            side.node.send(side.peer, 1, &[1; 200_000][..], Notice::Silent).unwrap();
            let sent = side
                .node
                .send(side.peer, 2, memory.slice(..100_000), Notice::Report(u64::MAX))
                .unwrap();
            let mut into = vec![0; 100_000];
            side.node.recv(None, 2, Tag::ZERO, &mut into, SOON).unwrap();
            side.node.quiet(side.peer, SOON).unwrap();
            let ends: Vec<_> = std::iter::from_fn(|| side.node.next_completion()).collect();
            match sent {
                Issued::Pending(token) => {
                    assert_eq!(ends.len(), 1);
                    assert_eq!(
                        (ends[0].token, ends[0].tag, ends[0].outcome),
                        (token, u64::MAX, Outcome::Done)
                    );
                }
                Issued::Done { .. } => assert_eq!(ends.len(), 0),
            }
            let status = loop {
                side.node.progress();
                if let Some(status) = side.node.next_recv() {
                    break status;
                }
            };
            assert_eq!((status.request, status.word), (request, u64::MAX));
            side.exchange(&[]);
            side.node.close(SOON).unwrap();
        },
    );
}

#[test]
fn close_reports_operations_lost_with_a_dead_peer() {
    two(
        Way::SharedMemory,
        |builder| builder.patience(Duration::ZERO),
        |mut side| {
            let memory = side.node.alloc(1 << 20).unwrap();
            let handle = side.node.handle(memory).unwrap();
            let handle = side.exchange(&handle);
            side.node.import(side.peer, handle).unwrap();
            side.exchange(&[]);
            if side.rank == 0 {
                // The other side reads none of the messages.
                side.receive.recv().unwrap();
                for tag in 0..20 {
                    side.node
                        .send(side.peer, tag, memory.slice(..200_000), Notice::Silent)
                        .unwrap();
                }
                side.send.send(vec![]).unwrap();
                let waited = side.node.wait(memory.at(0), Cmp::Eq, 1, Some(side.peer), SOON);
                assert!(waited.is_err() && side.node.peer_error(side.peer).unwrap().is_some());
                let closed = side.node.close(SOON);
                assert!(matches!(closed, Err(Error::Wait(_))), "{closed:?}");
            } else {
                side.send.send(vec![]).unwrap();
                side.receive.recv().unwrap();
            }
        },
    );
}

#[test]
fn a_peer_that_dialled_again_is_connected_by_its_last_link() {
    let open = || super::builder().fabric(Fabric::Off).open().unwrap();
    let silent = open();
    let id = |node: &Node| u64::from_le_bytes(node.address()[6..14].try_into().unwrap());
    let mut nodes = [open(), open()];
    for first in [0, 1] {
        let [x, y] = &mut nodes;
        let (x, y) = if first == 0 { (x, y) } else { (y, x) };
        // An unconnected peer makes this node accept connections.
        let nobody = y.connect(silent.address()).unwrap();
        let drive = |x: &mut Node, y: &mut Node, peer| {
            let deadline = Instant::now() + SOON;
            while !x.reach(peer).unwrap().shared_memory {
                assert!(Instant::now() < deadline, "not connected");
                x.progress();
                y.progress();
            }
        };
        let mut at_x = x.connect(y.address()).unwrap();
        // The node with the smaller id dials, even if the other has not connected.
        if id(x) < id(y) {
            drive(x, y, at_x);
            x.disconnect(at_x).unwrap();
            at_x = x.connect(y.address()).unwrap();
            drive(x, y, at_x);
        }
        let at_y = y.connect(x.address()).unwrap();
        drive(y, x, at_y);
        drive(x, y, at_x);
        let (memory, inbox) = (x.alloc(64).unwrap(), y.alloc(64).unwrap());
        let there = x.import(at_x, y.handle(inbox).unwrap()).unwrap();
        x.write(memory.at(0), &[7; 8]).unwrap();
        x.put_signal(memory.slice(..8), there.at(8), Signal::set(there.at(0), 1), Notice::Silent)
            .unwrap();
        while y.load(inbox.at(0)).unwrap() == 0 {
            assert_eq!(y.peer_error(at_y), Ok(None));
            x.progress();
            y.progress();
        }
        x.disconnect(at_x).unwrap();
        y.disconnect(at_y).unwrap();
        y.disconnect(nobody).unwrap();
    }
}

#[test]
fn a_call_waiting_for_room_detects_the_death_of_its_peer() {
    for copied in [false, true] {
        two(
            Way::SharedMemory,
            |builder| {
                let limits = Limits { operations: 4, locals: 4, ..Limits::DEFAULT };
                builder.limits(limits).patience(Duration::from_secs(3600))
            },
            |mut side| {
                let memory = side.node.alloc(1 << 20).unwrap();
                let handle = side.node.handle(memory).unwrap();
                let handle = side.exchange(&handle);
                side.node.import(side.peer, handle).unwrap();
                side.exchange(&[]);
                let Side { mut node, peer, rank, receive, send } = side;
                if rank == 1 {
                    // This side exits without a Bye once the other side has no more room to send.
                    receive.recv().unwrap();
                    std::thread::sleep(Duration::from_millis(100));
                    return;
                }
                let mut begun = Instant::now();
                let failed = (0..)
                    .find_map(|tag| {
                        if tag == 3 {
                            send.send(vec![]).unwrap();
                            begun = Instant::now();
                        }
                        match copied {
                            true => node.send(peer, tag, &[1; 200_000][..], Notice::Silent).err(),
                            false => {
                                node.send(peer, tag, memory.slice(..200_000), Notice::Silent).err()
                            }
                        }
                    })
                    .unwrap();
                assert!(matches!(failed, Error::Op(OpError::PeerFailed(_))), "{failed}");
                assert!(begun.elapsed() < Duration::from_secs(60), "the patience is an hour");
            },
        );
    }
}
