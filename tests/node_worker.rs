//! The tests of `Node` with workers, and tests of workers themselves.

#[path = "node/main.rs"]
mod node;

use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use fishplate::core::engine::protocol::Received;
use fishplate::core::engine::tag::Tag;
use fishplate::core::sync::spin::Policy;
use fishplate::node::{Builder, Fabric, Gpu, Memory, OpenError, Remote};
use fishplate::worker::Options;
use fishplate::{Cmp, Node, Notice, PeerId, Signal};
use node::{SOON, Side, Way, two, ways};

/// Length of a message that is too long for one piece on any rail.
const LONG: usize = 700_000;

fn same(builder: Builder) -> Builder {
    builder
}

fn with_device(builder: Builder) -> Builder {
    builder.gpu(Gpu::StandIn)
}

#[test]
fn a_peer_is_answered_while_the_program_sleeps() {
    for way in ways() {
        two(way, same, |mut side| {
            let memory = side.node.alloc(1 << 20).unwrap();
            let handle = side.node.handle(memory).unwrap();
            let handle = side.exchange(&handle);
            let Side { node, peer, rank, send, receive } = &mut side;
            let there = node.import(*peer, handle).unwrap();
            if *rank == 0 {
                receive.recv().unwrap();
                // These operations need progress at the other side. Its program makes no calls
                // while it waits for us.
                for n in 0..10 {
                    assert_eq!(node.fetch_add(there.at(8), 1, SOON), Ok(n));
                }
                node.send(*peer, 1, memory.slice(..LONG), Notice::Silent).unwrap();
                node.quiet(*peer, SOON).unwrap();
                send.send(vec![]).unwrap();
            } else {
                let request =
                    node.post_recv(Some(*peer), 1, Tag::ZERO, memory.slice(64..), 5).unwrap();
                send.send(vec![]).unwrap();
                // Waits without calling the node.
                receive.recv().unwrap();
                let status =
                    node.test_recv(request).unwrap().expect("it has been received meanwhile");
                assert_eq!((status.outcome, status.delivered), (Received::Ok, LONG as u64));
                assert_eq!(node.load(memory.at(8)), Ok(10));
            }
            side.exchange(&[]);
            side.node.close(SOON).unwrap();
        });
    }
}

#[test]
fn operations_of_a_sleeping_program_continue_and_its_peers_connect() {
    for way in ways() {
        let (begun, wait) = channel();
        let wait = Mutex::new(wait);
        two(way, same, |mut side| {
            let Side { node, peer, rank, send, receive } = &mut side;
            let memory = node.alloc(1 << 20).unwrap();
            if *rank == 0 {
                // `send` waits for the connection, but not until the peer has read the message.
                node.send(*peer, 1, memory.slice(..LONG), Notice::Silent).unwrap();
                begun.send(()).unwrap();
                // Waits without calling the node, until the peer has the message.
                receive.recv().unwrap();
            } else {
                let mut into = vec![1; LONG];
                wait.lock().unwrap().recv().unwrap();
                let received = node.recv(Some(*peer), 1, Tag::ZERO, &mut into, SOON);
                assert_eq!(received.unwrap().len, LONG as u64, "{way:?}");
                assert!(into.iter().all(|&byte| byte == 0));
                send.send(vec![]).unwrap();
            }
            side.exchange(&[]);
            side.node.close(SOON).unwrap();
        });
    }
}

/// Returns the processor time and the number of sleeps of all threads of this process.
fn used() -> (Duration, i64) {
    // SAFETY: all zeros are a valid `rusage`.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the call fills one structure, which is ours.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) }, 0);
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    (time(usage.ru_utime) + time(usage.ru_stime), usage.ru_nvcsw)
}

/// Runs itself again in a separate process, so that no other test uses processor time.
#[test]
fn an_idle_worker_uses_little_processor_time() {
    const ALONE: &str = "FISHPLATE_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let name = "an_idle_worker_uses_little_processor_time";
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let output = again.args(["--exact", name, "--nocapture"]).env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    idle(same);
    idle(with_device);
    for way in ways().into_iter().filter(|way| *way != Way::SharedMemory) {
        idle_over(way, same);
        idle_over(way, with_device);
        idle_over(way, |builder| with_device(builder).shared_memory(true));
    }
}

/// Checks that a worker over a network sleeps on descriptors. `FISHPLATE_IDLE_SECONDS` sets the
/// duration (default 1).
fn idle_over(way: Way, change: fn(Builder) -> Builder) {
    let seconds =
        std::env::var("FISHPLATE_IDLE_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    two(way, change, |mut side| {
        let memory = side.node.alloc(64).unwrap();
        let handle = side.node.handle(memory).unwrap();
        let handle = side.exchange(&handle);
        let Side { node, peer, rank, send, receive } = &mut side;
        let there = node.import(*peer, handle).unwrap();
        node.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
        node.wait(memory.at(0), Cmp::Eq, 1, Some(*peer), SOON).unwrap();
        node.quiet(*peer, SOON).unwrap();
        send.send(vec![]).unwrap();
        receive.recv().unwrap();
        if *rank == 0 {
            thread::sleep(Duration::from_millis(10));
            let name = format!("two idle workers over {way:?}");
            rested(&name, || thread::sleep(Duration::from_secs(seconds.unwrap_or(1))));
            send.send(vec![]).unwrap();
        } else {
            receive.recv().unwrap();
        }
        side.exchange(&[]);
        side.node.close(SOON).unwrap();
    });
}

fn idle(change: impl Fn(Builder) -> Builder) {
    let Pair { nodes: [mut a, mut b], peers: [_, me], inboxes: [_, memory], theirs: [there, _] } =
        pair(change);
    a.signal(Signal::set(there.at(0), 1), Notice::Silent).unwrap();
    b.wait(memory.at(0), Cmp::Eq, 1, Some(me), SOON).unwrap();
    thread::sleep(Duration::from_millis(10));
    rested("two idle workers", || thread::sleep(Duration::from_secs(1)));
    // The worker also sleeps while its program waits.
    rested("a wait and two workers", || {
        assert!(b.wait(memory.at(0), Cmp::Eq, 2, Some(me), Duration::from_secs(1)).is_err());
    });
}

/// Runs `meanwhile`. Fails if two workers use more processor time than a loop that polls and sleeps
/// for 10 ms in turn.
fn rested(who: &str, meanwhile: impl FnOnce()) {
    let (before, begun) = (used(), Instant::now());
    meanwhile();
    let (now, took) = (used(), begun.elapsed());
    let (time, sleeps) = (now.0 - before.0, now.1 - before.1);
    println!("{who} used {time:?} of {took:?}, and slept {sleeps} times");
    assert!(
        sleeps as u128 * 1000 < 240 * took.as_millis(),
        "{who} slept {sleeps} times in {took:?}"
    );
    // A poll costs up to 0.1 ms on a loaded machine. A worker without sleeps would use all of the
    // time.
    assert!(time < took / 5, "{who} used {time:?} of {took:?}");
}

/// Two nodes of this process. Each has a worker, and has imported the other's memory.
struct Pair {
    nodes: [Node; 2],
    peers: [PeerId; 2],
    inboxes: [Memory; 2],
    theirs: [Remote; 2],
}

fn pair(change: impl Fn(Builder) -> Builder) -> Pair {
    let mut nodes = [(); 2].map(|()| change(node::builder().fabric(Fabric::Off)).open().unwrap());
    let [a, b] = &mut nodes;
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let peers = [a.connect(to_b).unwrap(), b.connect(to_a).unwrap()];
    let inboxes = [a.alloc(64).unwrap(), b.alloc(64).unwrap()];
    let at_b = a.import(peers[0], b.handle(inboxes[1]).unwrap()).unwrap();
    let at_a = b.import(peers[1], a.handle(inboxes[0]).unwrap()).unwrap();
    Pair { nodes, peers, inboxes, theirs: [at_b, at_a] }
}

/// Fails unless the median time of `rounds` rounds is below the limit in one of several attempts.
/// Other load delays some attempts. A defect delays all attempts.
#[track_caller]
fn takes_less_than(limit: Duration, rounds: usize, mut round: impl FnMut(usize) -> Duration) {
    let mut attempt = || {
        let mut times: Vec<_> = (0..rounds).map(&mut round).collect();
        times.sort();
        times[rounds / 2]
    };
    let took: Vec<_> = (0..10).map(|_| attempt()).take_while(|took| *took >= limit).collect();
    assert!(took.len() < 10, "{took:?}, not less than {limit:?}");
}

/// Waits until an idle worker is probably asleep.
fn let_it_sleep() {
    thread::sleep(Duration::from_millis(2));
}

#[test]
fn a_wait_is_woken_through_the_wait_object_of_its_worker() {
    let Pair { nodes: [mut a, mut b], peers, inboxes, theirs } = pair(same);
    let (ask, asked) = channel();
    let other = thread::spawn(move || {
        for round in asked {
            thread::sleep(Duration::from_millis(6));
            let now = Instant::now();
            SIGNALLED.lock().unwrap().replace(now);
            b.signal(Signal::set(theirs[1].at(0), round), Notice::Silent).unwrap();
        }
    });
    static SIGNALLED: Mutex<Option<Instant>> = Mutex::new(None);
    let mut rounds = 0;
    takes_less_than(Duration::from_millis(2), 41, |round| {
        // Starts each round at a different phase of the worker's sleep.
        thread::sleep(Duration::from_micros(2000 + round as u64 * 617 % 8000));
        rounds += 1;
        ask.send(rounds).unwrap();
        a.wait(inboxes[0].at(0), Cmp::Eq, rounds, Some(peers[0]), SOON).unwrap();
        let now = Instant::now();
        thread::sleep(Duration::from_millis(1));
        now - SIGNALLED.lock().unwrap().take().unwrap()
    });
    drop(ask);
    other.join().unwrap();
}

#[test]
fn calls_do_not_wait_for_a_sleeping_worker() {
    let Pair { nodes: [mut a, _b], peers, inboxes, .. } = pair(same);
    takes_less_than(Duration::from_millis(2), 21, |_| {
        let_it_sleep();
        let begun = Instant::now();
        let timeout = Duration::from_micros(100);
        assert!(a.wait(inboxes[0].at(0), Cmp::Eq, 1, Some(peers[0]), timeout).is_err());
        begun.elapsed()
    });
    takes_less_than(Duration::from_millis(3), 21, |_| {
        let node = node::builder().fabric(Fabric::Off).open().unwrap();
        let_it_sleep();
        let begun = Instant::now();
        drop(node);
        begun.elapsed()
    });
}

#[test]
fn workers_connect_peers_by_themselves() {
    let [mut a, mut b] = [(); 2].map(|()| node::builder().fabric(Fabric::Off).open().unwrap());
    let (to_a, to_b) = (a.address().to_vec(), b.address().to_vec());
    let_it_sleep();
    let peers = [a.connect(to_b).unwrap(), b.connect(to_a).unwrap()];
    let deadline = Instant::now() + SOON;
    // `reach` itself makes no progress.
    while !(a.reach(peers[0]).unwrap().shared_memory && b.reach(peers[1]).unwrap().shared_memory) {
        assert!(Instant::now() < deadline, "not connected");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_node_with_a_worker_is_dropped_and_closed_with_work_in_flight() {
    for closes in [false, true] {
        two(
            ways()[0],
            |builder| builder.patience(Duration::ZERO),
            |mut side| {
                let memory = side.node.alloc(1 << 20).unwrap();
                let handle = side.node.handle(memory).unwrap();
                let handle = side.exchange(&handle);
                let there = side.node.import(side.peer, handle).unwrap();
                side.exchange(&[]);
                for tag in 0..50 {
                    _ = side.node.send(side.peer, tag, memory.slice(..100_000), Notice::Silent);
                    _ = side.node.put(memory.slice(..), there.at(0), Notice::Silent);
                    _ = side.node.post_recv(None, 1000 + tag, Tag::ZERO, memory.slice(..), 0);
                }
                match closes {
                    // No receive matches the sends, so the close cannot complete.
                    true => _ = side.node.close(Duration::from_millis(100)),
                    false => drop(side.node),
                }
            },
        );
    }
}

#[test]
fn a_worker_that_spins_leaves_the_node_to_its_program() {
    for policy in [Policy::EXCLUSIVE, Policy::LOW_LATENCY] {
        let worker = Options { cpu: None, policy };
        let mut node = Node::builder().fabric(Fabric::Off).worker(worker).open().unwrap();
        let begun = Instant::now();
        for _ in 0..1000 {
            let memory = node.alloc(4096).unwrap();
            node.free(memory).unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        node.close(SOON).unwrap();
    }
}

#[test]
fn a_processor_that_does_not_exist_is_an_error() {
    let worker = Options { cpu: Some(1023), ..Options::default() };
    let opened = Node::builder().fabric(Fabric::Off).worker(worker).open();
    assert!(matches!(opened, Err(OpenError::Worker(_))));
    let worker = Options { cpu: Some(0), ..Options::default() };
    Node::builder().fabric(Fabric::Off).worker(worker).open().unwrap();
}
