//! Tests the events that make a node's descriptor readable, for event loops.

use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use fishplate::core::engine::tag::Tag;
use fishplate::core::op::Outcome;
use fishplate::node::{Builder, Gpu};
use fishplate::{Cmp, Issued, Node, Notice, Signal};

use super::gpu::device;
use super::{SOON, Side, WORKER, Way, two, ways};

/// Runs an event loop until `done` returns true. Returns the number of waits, and the number of
/// waits that the descriptor ended.
fn turn(node: &mut Node, mut done: impl FnMut(&mut Node) -> bool) -> [u32; 2] {
    let (fd, begun, mut waits) = (node.wait_fd().unwrap().as_raw_fd(), Instant::now(), [0; 2]);
    while !done(node) {
        assert!(begun.elapsed() < SOON * 3, "{waits:?}");
        let Some(timeout) = node.arm() else { continue };
        if done(node) {
            break;
        }
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one structure, and the count is 1.
        let ready = unsafe { libc::poll(&mut poll, 1, timeout.as_millis() as libc::c_int + 1) };
        waits[0] += 1;
        waits[1] += ready as u32;
    }
    waits
}

fn holds(node: &mut Node, at: fishplate::LocalAddr, value: u64) -> bool {
    matches!(node.load(at), Ok(now) if Cmp::Ge.holds(now, value))
}

fn connected(side: &mut Side) -> (fishplate::node::Memory, fishplate::node::Remote) {
    let inbox = side.node.alloc(64).unwrap();
    let handle = side.node.handle(inbox).unwrap();
    let handle = side.exchange(&handle);
    let there = side.node.import(side.peer, handle).unwrap();
    side.exchange(&[]);
    (inbox, there)
}

/// Delay before a sender sends: longer than one wait of the event loop.
const LATE: Duration = Duration::from_millis(70);
const ROUNDS: u64 = 10;

/// Returns the ways, each without a device and with one.
fn all_ways() -> impl Iterator<Item = (Way, Option<Gpu>)> {
    ways().into_iter().flat_map(|way| [(way, None), (way, Some(device()))])
}

fn opened(builder: Builder, gpu: Option<Gpu>) -> Builder {
    match gpu {
        Some(gpu) => builder.wait_fd().gpu(gpu),
        None => builder.wait_fd(),
    }
}

#[test]
fn signals_and_messages_end_a_wait() {
    if WORKER {
        return;
    }
    for (way, gpu) in all_ways() {
        let all = Mutex::new(vec![]);
        two(
            way,
            |builder| opened(builder, gpu),
            |mut side| {
                let (inbox, there) = connected(&mut side);
                let mut ended = 0;
                for n in 1..=ROUNDS {
                    if n % 2 == side.rank as u64 {
                        thread::sleep(LATE);
                        side.node.signal(Signal::set(there.at(0), n), Notice::Silent).unwrap();
                        side.node.send(side.peer, n, b"ping", Notice::Silent).unwrap();
                        side.node.quiet(side.peer, SOON).unwrap();
                        continue;
                    }
                    // An idle node waits for the full timeout, and its descriptor does not become
                    // readable.
                    let begun = Instant::now();
                    let idle = turn(&mut side.node, |_| begun.elapsed() > LATE / 2);
                    assert!(idle[0] < 60, "{way:?}: {idle:?}");
                    ended += turn(&mut side.node, |node| holds(node, inbox.at(0), n))[1];
                    let mut bytes = [0; 8];
                    let mut got = None;
                    let peer = side.peer;
                    turn(&mut side.node, |node| {
                        got = got.or(node
                            .recv(Some(peer), n, Tag::ZERO, &mut bytes, Duration::ZERO)
                            .ok());
                        got.is_some()
                    });
                    assert_eq!((got.unwrap().len, &bytes[..4]), (4, &b"ping"[..]));
                }
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
                all.lock().unwrap().push(ended);
            },
        );
        let ended = all.into_inner().unwrap();
        println!("{way:?}: {ended:?} waits ended by the descriptor");
        assert!(ended.iter().all(|&ended| ended > 0), "{way:?}: {ended:?}");
    }
}

#[test]
fn completions_end_a_wait() {
    if WORKER {
        return;
    }
    for (way, gpu) in all_ways() {
        two(
            way,
            |builder| opened(builder, gpu),
            |mut side| {
                let (_, there) = connected(&mut side);
                side.node
                    .put_signal(
                        &[7; 4096],
                        there.at(8),
                        Signal::set(there.at(0), 1),
                        Notice::Report(5),
                    )
                    .unwrap_err();
                let issued =
                    side.node.signal(Signal::set(there.at(0), 1), Notice::Report(5)).unwrap();
                // Over shared memory the operation may complete at once. Then it reports nothing.
                if let Issued::Done { .. } = issued {
                    side.exchange(&[]);
                    return side.node.close(SOON).unwrap();
                }
                let mut completion = None;
                turn(&mut side.node, |node| {
                    completion = completion.or_else(|| node.next_completion());
                    completion.is_some()
                });
                assert_eq!(completion.unwrap().outcome, Outcome::Done);
                side.exchange(&[]);
                side.node.close(SOON).unwrap();
            },
        );
    }
}

#[test]
fn the_death_of_a_peer_ends_a_wait() {
    if WORKER {
        return;
    }
    // Over libfabric an idle node detects the loss only after about a second.
    two(
        Way::SharedMemory,
        |builder| builder.wait_fd(),
        |mut side| {
            connected(&mut side);
            if side.rank == 1 {
                // This side ends without a Bye, like a killed process.
                thread::sleep(LATE);
                return drop(side.node);
            }
            let peer = side.peer;
            turn(&mut side.node, |node| !matches!(node.peer_error(peer), Ok(None)));
        },
    );
}

#[test]
fn a_node_without_one_says_so() {
    let mut node = super::builder().fabric(fishplate::node::Fabric::Off).open().unwrap();
    assert!(node.wait_fd().is_none() && node.arm().is_none());
    let mut node = Node::builder().wait_fd().fabric(fishplate::node::Fabric::Off).open().unwrap();
    assert!(node.wait_fd().is_some() && node.arm().is_some());
}
