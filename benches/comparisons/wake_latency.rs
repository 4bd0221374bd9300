//! Measures how soon a sleeping receiver wakes up when 8 bytes arrive over TCP on the loopback
//! interface.
//!
//! Usage: wake-latency [ROUNDS]
//!
//! | figure      | the receiver sleeps in                                              |
//! |-------------|---------------------------------------------------------------------|
//! | socket      | `recv(2)` of a blocking socket                                      |
//! | libfabric   | `epoll(7)` on the descriptor of a completion queue (`FI_WAIT_FD`)   |
//! | node        | `Node::wait`                                                        |
//! | worker      | `Node::wait` of a node with a worker                                |
//! | node, quiet | `Node::wait`, and the sender calls `Node::quiet` at once            |
//!
//! A time lasts from before the sender's call until the receiver has the bytes. The sender sleeps
//! for 70 ms before each call, and for 5 ms after it. The kernel often wakes the receiver on the
//! sender's processor. Without that second sleep, the receiver then waits until the sender's
//! `quiet` sleeps, and the acknowledgement is sent within the measured time.
//!
//! A round takes 11 times of each figure, so that all figures see the same load. Prints the median
//! of all times.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::config::Settings;
use fishplate::node::{Builder, Fabric};
use fishplate::{Cmp, Node, Notice, Signal};
use fishplate_sys::fabric::av::AddressVector;
use fishplate_sys::fabric::cq::{CompletionQueue, EMPTY};
use fishplate_sys::fabric::domain::Domain;
use fishplate_sys::fabric::endpoint::{Buffer, Endpoint, Target};
use fishplate_sys::fabric::error::Code;
use fishplate_sys::fabric::mr::MemoryRegion;
use fishplate_sys::fabric::raw::*;
use fishplate_sys::fabric::{Ask, Library, fabric, negotiate};

const TIMES: usize = 11;

const BEFORE: Duration = Duration::from_millis(70);

const AFTER: Duration = Duration::from_millis(5);

const SOON: Duration = Duration::from_secs(20);

/// Runs `send` in another thread, and `receive` in this one. Returns the times of all calls of
/// `receive` but the first, which connects.
fn times<S: Send + 'static>(
    mut sender: S,
    send: impl Fn(&mut S, u64) + Send + 'static,
    after: impl Fn(&mut S) + Send + 'static,
    mut receive: impl FnMut(u64),
) -> Vec<Duration> {
    let (told, sent): (_, Receiver<Instant>) = channel();
    let thread = thread::spawn(move || {
        for n in 1..=TIMES as u64 + 1 {
            thread::sleep(BEFORE);
            let begun = Instant::now();
            send(&mut sender, n);
            told.send(begun).unwrap();
            after(&mut sender);
        }
        sender
    });
    let mut took = vec![];
    for n in 1..=TIMES as u64 + 1 {
        receive(n);
        let now = Instant::now();
        took.push(now - sent.recv().unwrap());
    }
    drop(thread.join().unwrap());
    took.split_off(1)
}

fn socket() -> Vec<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    sender.set_nodelay(true).unwrap();
    let (mut receiver, _) = listener.accept().unwrap();
    let send = |socket: &mut TcpStream, n: u64| socket.write_all(&n.to_ne_bytes()).unwrap();
    times(sender, send, |_| thread::sleep(AFTER), |_| receiver.read_exact(&mut [0; 8]).unwrap())
}

/// One end of bare libfabric.
struct End {
    endpoint: Endpoint,
    memory: MemoryRegion,
    ptr: NonNull<u8>,
    /// Address of the memory in a write to it.
    base: u64,
}

// SAFETY: the end moves to one thread as a whole. All objects of its domain are in it.
unsafe impl Send for End {}

fn ends() -> [End; 2] {
    // SAFETY: the linker's default library name for libfabric names a libfabric.
    let library = unsafe { Library::open(None) }.unwrap_or_else(|error| panic!("{error}"));
    let ask = Ask { interface: Some("lo"), ..Ask::new("tcp") };
    let offer = negotiate(library, &ask).unwrap_or_else(|error| panic!("{error}"));
    let access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    [1, 2].map(|key| {
        let fabric = Arc::new(fabric::Fabric::open(&offer.info).unwrap());
        let domain = Domain::open(fabric, &offer.info).unwrap();
        let cq = CompletionQueue::open(&domain, 64).unwrap();
        let av = AddressVector::open(&domain, FI_AV_TABLE, 4).unwrap();
        let ptr = NonNull::from(Box::leak(Box::new([0u8; 8]))).cast();
        // SAFETY: the memory is leaked, and nothing reads it.
        let memory = unsafe { MemoryRegion::register(&domain, ptr, 8, access, key) }.unwrap();
        let virt = offer.info.domain().mr_mode & FI_MR_VIRT_ADDR != 0;
        let base = if virt { ptr.as_ptr() as u64 } else { 0 };
        End { endpoint: Endpoint::open(&domain, &offer.info, cq, av).unwrap(), memory, ptr, base }
    })
}

fn libfabric() -> Vec<Duration> {
    let [mut sender, mut receiver] = ends();
    let peer = sender.endpoint.insert(&receiver.endpoint.name().unwrap()).unwrap();
    let to = Target { peer, addr: receiver.base, key: receiver.memory.key() };
    // SAFETY: the call has no memory arguments.
    let set = unsafe { libc::epoll_create1(0) };
    let wait = receiver.endpoint.wait().expect("tcp has FI_WAIT_FD");
    // SAFETY: the queue is open, and this thread is the only one that uses it.
    unsafe { wait.join(set) }.unwrap();
    let send = move |end: &mut End, _| {
        let from = Buffer { ptr: end.ptr.as_ptr(), len: 8, desc: end.memory.desc() };
        // SAFETY: the source is leaked.
        while unsafe { end.endpoint.inject_write(from, to, Some(7)) } == Err(Code::EAGAIN) {
            _ = end.endpoint.completions(&mut [EMPTY; 8]);
        }
    };
    let after = |end: &mut End| {
        thread::sleep(AFTER);
        _ = end.endpoint.completions(&mut [EMPTY; 8]);
    };
    let receive = |_| {
        while receiver.endpoint.completions(&mut [EMPTY; 1]).is_err() {
            // SAFETY: as above. The events have room for one.
            unsafe {
                if wait.may_sleep() {
                    let mut event = libc::epoll_event { events: 0, u64: 0 };
                    libc::epoll_wait(set, &mut event, 1, 10);
                }
            }
        }
    };
    times(sender, send, after, receive)
}

fn node(change: impl Fn(Builder) -> Builder, after: Duration) -> Vec<Duration> {
    let open = || {
        let (providers, interfaces) = (vec!["tcp".into()], vec!["lo".into()]);
        let settings = Settings { providers, interfaces, ..Settings::DEFAULT };
        let builder = Node::builder().settings(settings).fabric(Fabric::Required);
        change(builder.shared_memory(false)).open().unwrap_or_else(|error| panic!("{error}"))
    };
    let (mut sender, mut receiver) = (open(), open());
    let peer = sender.connect(receiver.address()).unwrap();
    let from = receiver.connect(sender.address()).unwrap();
    let inbox = receiver.alloc(64).unwrap();
    let handle = receiver.handle(inbox).unwrap();
    let importer = thread::spawn(move || {
        let there = sender.import(peer, handle).unwrap();
        (sender, there)
    });
    while !importer.is_finished() {
        receiver.progress();
    }
    let (sender, there) = importer.join().unwrap();
    let send = move |node: &mut Node, n| {
        node.signal(Signal::set(there.at(0), n), Notice::Silent).unwrap();
    };
    let after = move |node: &mut Node| {
        thread::sleep(after);
        // Fails after the last call, because the receiver has ended.
        _ = node.quiet(peer, 2 * BEFORE);
    };
    times(sender, send, after, |n| {
        receiver.wait(inbox.at(0), Cmp::Eq, n, Some(from), SOON).unwrap();
    })
}

type Measure = fn() -> Vec<Duration>;

fn main() {
    let rounds = std::env::args().nth(1).map_or(5, |n| n.parse().expect("a number of rounds"));
    let figures: [(&str, Measure); 5] = [
        ("socket", socket),
        ("libfabric", libfabric),
        ("node", || node(|builder| builder, AFTER)),
        ("worker", || node(|builder| builder.worker(Default::default()), AFTER)),
        ("node, quiet", || node(|builder| builder, Duration::ZERO)),
    ];
    let mut took = [const { vec![] }; 5];
    for _ in 0..rounds {
        for ((_, measure), took) in figures.iter().zip(&mut took) {
            took.extend(measure());
        }
    }
    for ((name, _), mut took) in figures.into_iter().zip(took) {
        took.sort();
        let at = |part: usize| took[took.len() * part / 4].as_secs_f64() * 1e6;
        println!("{name:11} {:4.0} us, quartiles {:.0} and {:.0} us", at(2), at(1), at(3));
    }
}
