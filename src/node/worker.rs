//! Worker mode: a thread makes progress while the program computes.
//!
//! A lock protects the node with the peers, the *node behind*. The holder of the lock drives the
//! engine: the program inside its calls, and the thread at all other times. So no call waits for an
//! answer from the thread. All calls except `queue`, `grow_requests` and `wait_fd` behave as
//! without a worker.
//!
//! The program holds the *front*, a node without peers and memory. Hot paths need no extra check:
//! the front's engine refuses operations that name a peer, memory or an operation of the node
//! behind. A refused operation takes the cold path, and the cold path takes the lock.
//!
//! Only one thread at a time may sleep on the wait object that peers notify. The worker sleeps on
//! that wait object only while it holds [`SleepLock::taken`]. It also sleeps on an eventcount that
//! the program notifies.
//!
//! A call of the program that may sleep takes [`SleepLock::taken`] first. A worker that finds this
//! lock held waits for it until the call returns.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, mpsc};
use std::thread::{self, JoinHandle};

use fishplate_core::engine::protocol::MatchConfig;
use fishplate_core::error::OpError;
use fishplate_core::sync::event::{EventCount, Park};
use fishplate_core::sync::host::{Host, Woken};
use fishplate_core::sync::spin::{Idle, Policy, Turn, wait_until};
use fishplate_sys::{Errno, LinuxHost, affinity};

use super::builder::{Builder, Fabric, parks};
use super::home::NodeWaitObject;
use super::of_process::OfProcess;
use super::waits::EARLY;
use super::{Node, OpenError};
use crate::closer::without_signals;
use crate::storage::Limits;
use crate::worker::Options;

pub(super) enum Driver {
    Program,
    /// A worker. This node is the front, and the worker drives the node behind it.
    Worker(OfProcess<Worker>),
    /// A worker. This is the node behind the front.
    Turns(Arc<SleepLock>),
}

/// Limits the wait object to one sleeping thread at a time.
pub(super) struct SleepLock {
    host: LinuxHost,
    called: EventCount,
    wait_object: NodeWaitObject,
    taken: Mutex<()>,
}

impl SleepLock {
    /// Keeps the worker from sleeping on the wait object until the guard is dropped. The program
    /// calls this while it holds the node's lock.
    pub fn take(&self) -> MutexGuard<'_, ()> {
        self.call();
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self) {
        self.called.notify_with(&self.host, || {
            if let Some(sleep) = self.wait_object.elsewhere() {
                sleep.ring();
            }
        });
    }
}

struct Shared {
    node: Mutex<Node>,
    sleep_lock: Arc<SleepLock>,
    /// True while the program waits for the lock. Meanwhile the worker does not take the lock.
    wanted: AtomicBool,
    stop: AtomicBool,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Makes a call on the node behind. Wakes the worker if the call leaves work for it.
    ///
    /// # Errors
    /// [`OpError::Abandoned`]: the worker has panicked.
    pub fn call<T>(&self, work: impl FnOnce(&mut Node) -> T) -> Result<T, OpError> {
        let Shared { node, sleep_lock, wanted, .. } = &*self.shared;
        // Relaxed: a hint that publishes nothing.
        wanted.store(true, Ordering::Relaxed);
        let locked = node.lock();
        wanted.store(false, Ordering::Relaxed);
        let mut node = locked.map_err(|_| OpError::Abandoned)?;
        let result = work(&mut node);
        // A sleeping worker has made the device ring only for copies that began before its sleep.
        let due = node.peers.meeting || node.home.engine.has_due() || node.is_working();
        drop(node);
        if due {
            sleep_lock.call();
        }
        Ok(result)
    }

    /// Stops the thread, and returns the node for the program to drive.
    ///
    /// # Errors
    /// The same as [`call`](Self::call).
    pub fn stop(mut self) -> Result<Node, OpError> {
        self.join();
        let shared = self.shared.clone();
        drop(self);
        let node = Arc::into_inner(shared).ok_or(OpError::Abandoned)?.node;
        node.into_inner().map_err(|_| OpError::Abandoned)
    }

    fn join(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // Relaxed: the lock publishes all other data. The barriers of the wait object order this
        // store before the check for sleepers.
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.sleep_lock.call();
        // If the worker has panicked, the lock is poisoned, so later calls report the panic.
        _ = thread.join();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.join();
    }
}

impl Builder {
    /// Opens the node.
    ///
    /// # Errors
    /// [`OpenError`] names what could not be opened, and why.
    pub fn open(mut self) -> Result<Node, OpenError> {
        match self.worker.take() {
            Some(options) => open(self, options),
            None => Ok(self.open_here()?.0),
        }
    }
}

fn open(builder: Builder, options: Options) -> Result<Node, OpenError> {
    // The front has no peers, so it needs no room for messages.
    let nothing = MatchConfig {
        eager: 0,
        credits: 0,
        headers: 1,
        seed: 0,
        shared_credits: 0,
        shared_headers: 0,
        shared_shorts: 0,
        pieces: 0,
    };
    let (mut front, _) = Builder::default()
        .limits(Limits { peers: 1, locals: 1, remotes: 1, operations: 1 })
        .receives(0)
        .matching(nothing)
        .fabric(Fabric::Off)
        .open_here()?;
    // The program cannot reach a queue of the node behind. So that node has only receives.
    let (mut node, wait_object) = builder.requests(0).open_here()?;
    let policies = parks(options.policy, wait_object.longest(!node.address.rails.is_empty()));
    front.encoded.clone_from(&node.encoded);
    front.rails.clone_from(&node.rails);
    // Makes `progress` take its cold path, which forwards to the node behind.
    front.peers.meeting = true;
    let (host, called) = (LinuxHost::shared(), EventCount::new());
    let sleep_lock = Arc::new(SleepLock { host, called, wait_object, taken: Mutex::new(()) });
    node.driver = Driver::Turns(sleep_lock.clone());
    let (wanted, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let shared = Arc::new(Shared { node: Mutex::new(node), sleep_lock, wanted, stop });

    let (ready, begun) = mpsc::channel();
    let theirs = shared.clone();
    let run = move || {
        let pinned = options.cpu.map_or(Ok(()), affinity::pin);
        if ready.send(pinned).is_ok() && pinned.is_ok() {
            Idler { shared: &theirs, locked_out: Cell::new(false), slept: Cell::new(false) }
                .run(policies);
        }
    };
    let thread = without_signals(|| thread::Builder::new().name("fishplate".into()).spawn(run));
    let thread = thread.map_err(|error| {
        OpenError::Worker(error.raw_os_error().map_or(Errno::EAGAIN, Errno::from_raw))
    })?;
    front.driver = Driver::Worker(OfProcess::new(Worker { shared, thread: Some(thread) }));
    match begun.recv() {
        Ok(Err(errno)) => Err(OpenError::Worker(errno)),
        _ => Ok(front),
    }
}

struct Idler<'a> {
    shared: &'a Shared,
    /// True if the program holds the lock or waits for it.
    locked_out: Cell<bool>,
    slept: Cell<bool>,
}

impl Idler<'_> {
    fn run(&self, policies: [Policy; 2]) {
        let Shared { node, sleep_lock, stop, .. } = self.shared;
        let host = &sleep_lock.host;
        let mut idles = policies.map(Idle::new);
        let mut late_ns = host.now_ns().saturating_add(EARLY);
        loop {
            let late = host.now_ns() >= late_ns;
            let (meeting, until_ns) = {
                let Ok(mut node) = node.lock() else { return };
                node.meet();
                node.publish_counters();
                node.home.engine.check_peers();
                (node.peers.meeting, node.slice_ns(u64::MAX))
            };
            let mut active = false;
            let turn = || {
                // Relaxed: the flag publishes no other data.
                if stop.load(Ordering::Relaxed) {
                    return Turn::Ready;
                }
                self.locked_out.set(true);
                // Relaxed: a hint that publishes nothing.
                if self.shared.wanted.load(Ordering::Relaxed) {
                    return Turn::Nothing;
                }
                let mut node = match node.try_lock() {
                    Ok(node) => node,
                    Err(TryLockError::WouldBlock) => return Turn::Nothing,
                    Err(TryLockError::Poisoned(_)) => return Turn::Ready,
                };
                self.locked_out.set(false);
                if self.slept.take() {
                    node.home.engine.check_peers();
                }
                let events = node.progress();
                active |= events != 0;
                if node.peers.meeting && !meeting {
                    return Turn::Ready;
                }
                match events != 0 || (node.home.engine.has_due() && !late) {
                    true => Turn::Busy,
                    false => Turn::Nothing,
                }
            };
            _ = wait_until(host, &mut idles[usize::from(late)], self, until_ns, turn);
            // Relaxed: the flag publishes no other data.
            if stop.load(Ordering::Relaxed) {
                return;
            }
            if active {
                late_ns = host.now_ns().saturating_add(EARLY);
            }
        }
    }
}

impl Park for Idler<'_> {
    fn park<H: Host + ?Sized>(
        &self,
        host: &H,
        timeout_ns: u64,
        work: impl FnOnce() -> bool,
    ) -> Option<Woken> {
        let Shared { node, sleep_lock, .. } = self.shared;
        if self.locked_out.get() {
            drop(node.lock());
            return Some(Woken::Called);
        }
        let _taken = sleep_lock.taken.lock().unwrap_or_else(PoisonError::into_inner);
        // A program that holds the node's lock may wait for `taken`. So the code below never waits
        // for the node's lock.
        let SleepLock { called, wait_object, .. } = &**sleep_lock;
        let look = || wait_object.look(timeout_ns, || work() || self.locked_out.get());
        let woken = match wait_object.elsewhere() {
            None => {
                let mut longest_ns = None;
                EventCount::prepare_two(called, wait_object.event(), host)
                    .recheck(|| {
                        longest_ns = look();
                        longest_ns.is_none()
                    })
                    .zip(longest_ns)
                    .map(|(armed, longest_ns)| armed.commit(host, longest_ns))
            }
            Some(sleep) => sleep.park([called, wait_object.event()], host, || {
                let timeout_ns = look()?;
                let _node = node.try_lock().ok()?;
                // SAFETY: this thread holds the lock, as every user of the rails must.
                unsafe { sleep.advised(timeout_ns) }
            }),
        };
        self.slept.set(woken.is_some());
        woken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Notice;
    use crate::config::Settings;
    use crate::node::{Error, Gpu};
    use fishplate_core::engine::tag::Tag;
    use std::os::unix::thread::JoinHandleExt;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::time::{Duration, Instant};

    fn opened() -> Node {
        Node::builder().fabric(Fabric::Off).worker(Options::default()).open().unwrap()
    }

    #[test]
    fn every_call_reports_a_panicked_worker() {
        let mut node = opened();
        let Driver::Worker(worker) = &node.driver else { panic!("it has a worker") };
        let panicked = catch_unwind(AssertUnwindSafe(|| worker.call(|_| panic!("as planned"))));
        assert!(panicked.is_err());
        assert_eq!(node.alloc(64), Err(Error::Op(OpError::Abandoned)));
        assert_eq!(node.quiet_all(Duration::from_secs(20)), Err(Error::Op(OpError::Abandoned)));
        assert_eq!((node.progress(), node.next_completion()), (0, None));
        assert_eq!(node.close(Duration::from_secs(20)), Err(Error::Op(OpError::Abandoned)));
    }

    #[test]
    fn requests_do_not_limit_the_receives_of_a_node_with_a_worker() {
        let builder = Node::builder().fabric(Fabric::Off).requests(2).receives(16);
        let mut node = builder.worker(Options::default()).open().unwrap();
        let memory = node.alloc(64).unwrap();
        assert!(node.queue().is_none());
        for n in 0..16 {
            node.post_recv(None, n, Tag::ZERO, memory.slice(..), n).unwrap();
        }
    }

    #[test]
    fn a_sleeping_worker_finishes_the_work_of_a_call() {
        is_called(&opened());
    }

    /// Returns a builder for nodes that sleep on descriptors.
    fn network() -> Option<Builder> {
        let settings = Settings {
            providers: vec!["tcp".into()],
            interfaces: vec!["lo".into()],
            ..Settings::DEFAULT
        };
        let builder = Node::builder().settings(settings).fabric(Fabric::Required);
        match builder.clone().open() {
            Ok(_) => Some(builder),
            Err(error) => {
                println!("SKIPPED a worker over tcp: {error}");
                None
            }
        }
    }

    #[test]
    fn a_worker_sleeping_on_descriptors_finishes_the_work_of_a_call() {
        let Some(builder) = network() else { return };
        is_called(&builder.worker(Options::default()).open().unwrap());
    }

    /// Returns the processor time that the worker has used.
    fn used(node: &Node) -> Duration {
        let Driver::Worker(worker) = &node.driver else { panic!("it has a worker") };
        let thread = worker.thread.as_ref().unwrap();
        let mut clock = 0;
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the thread has not been joined, so its id is valid. `clock` and `time` are
        // writable for the results.
        unsafe {
            assert_eq!(libc::pthread_getcpuclockid(thread.as_pthread_t(), &mut clock), 0);
            assert_eq!(libc::clock_gettime(clock, &mut time), 0);
        }
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }

    #[test]
    fn a_worker_sleeps_again_after_a_peer_of_this_host_notified_it_or_left() {
        let Some(builder) = network() else { return };
        let mut node = builder.clone().worker(Options::default()).open().unwrap();
        let mut peer = builder.open().unwrap();
        let there = peer.connect(node.address()).unwrap();
        node.connect(peer.address()).unwrap();
        let memory = node.alloc(64).unwrap();
        let word = peer.import(there, node.handle(memory).unwrap()).unwrap().at(0);
        let (before, begun) = (used(&node), Instant::now());
        for n in 0..20 {
            assert_eq!(peer.fetch_add(word, 1, Duration::from_secs(20)), Ok(n));
            thread::sleep(Duration::from_millis(25));
        }
        let (rung, took) = (used(&node) - before, begun.elapsed());
        assert!(rung * 5 < took * 2, "used {rung:?} of {took:?}, notified every 25 ms");
        drop(peer);
        thread::sleep(Duration::from_millis(100));
        let (before, begun) = (used(&node), Instant::now());
        thread::sleep(Duration::from_millis(300));
        let (left, took) = (used(&node) - before, begun.elapsed());
        assert!(left * 5 < took * 2, "used {left:?} of {took:?} after its peer had left");
    }

    #[test]
    fn a_sleeping_worker_is_called_to_copies_of_its_device() {
        let builder = Node::builder().fabric(Fabric::Off).gpu(Gpu::StandIn);
        let mut node = builder.worker(Options::default()).open().unwrap();
        let own = node.address().to_vec();
        let me = node.connect(own).unwrap();
        let memory = node.alloc_device(1 << 16).unwrap();
        let there = node.import(me, node.handle(memory).unwrap()).unwrap();
        let (from, to) = (memory.slice(..1 << 15), there.at(1 << 15));
        let begin = |node: &mut Node| {
            node.put(from, to, Notice::Silent).unwrap();
            assert!(node.is_working());
        };
        is_called_to(&node, begin, Node::is_working);
    }

    fn is_called(node: &Node) {
        // The worker clears the flag when no peer is left to connect.
        is_called_to(node, |node| node.peers.meeting = true, |node| node.peers.meeting);
    }

    fn is_called_to(node: &Node, begin: impl Fn(&mut Node), is_left: impl Fn(&Node) -> bool) {
        let Driver::Worker(worker) = &node.driver else { panic!("it has a worker") };
        let round = |_| {
            thread::sleep(Duration::from_millis(2));
            let begun = Instant::now();
            worker.call(&begin).unwrap();
            while is_left(&worker.shared.node.lock().unwrap()) {
                thread::sleep(Duration::from_micros(50));
            }
            begun.elapsed()
        };
        let median = |_| {
            let mut took: Vec<_> = (0..21).map(round).collect();
            took.sort();
            took[10]
        };
        // Other load on the machine delays some attempts. A worker that is not woken is late in all
        // attempts.
        let late = (0..10).map(median).take_while(|took| *took >= Duration::from_millis(2));
        assert!(late.count() < 10);
    }

    #[test]
    fn the_front_refuses_names_of_the_node_behind() {
        let mut node = opened();
        let own = node.address().to_vec();
        let me = node.connect(own).unwrap();
        let memory = node.alloc(64).unwrap();
        let there = node.import(me, node.handle(memory).unwrap()).unwrap();
        let home = &mut *node.home;
        let engine = &mut home.engine;
        let context = super::super::home::CONTEXT;
        assert_eq!(engine.inject(context, &[], there.at(0)), Err(OpError::UnknownRegion));
        assert_eq!(engine.local_ptr(memory.at(0), 0), Err(OpError::UnknownRegion));
        assert_eq!(engine.fence(context, me), Err(OpError::UnknownPeer));
        assert!(engine.quiet(context, me, &mut home.waiter, 0).is_err());
        node.close(Duration::from_secs(20)).unwrap();
    }
}
