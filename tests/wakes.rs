//! Tests wake-ups. A submission wakes the worker. A completion wakes only the queue of its command.
//! A thread that waits for another worker's queue sleeps until that queue's event completes. Sleeps
//! have no deadline here, so after a lost wake-up a test hangs until the time limit of [`until`].
#[path = "../core/tests/support/mod.rs"]
mod support;

use std::collections::HashMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, Once};
use std::thread;
use std::time::{Duration, Instant};

use fishplate::MatchStorage;
use fishplate_core::engine::command::{Event, Reply};
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::protocol::{MatchConfig, Received};
use fishplate_core::engine::tag::Tag;
use fishplate_core::engine::worker::Worker;
use fishplate_core::engine::{Config, ContextId};
use fishplate_core::mem::{LocalAddr, LocalId};
use fishplate_core::queue::{Command, Pending, Queue, QueueStorage};
use fishplate_core::rail::loopback::Loopback;
use fishplate_core::sync::event::{Channels, EventCount};
use fishplate_core::sync::host::{Host, Woken};
use fishplate_core::sync::spin::Policy;
use fishplate_sys::LinuxHost;

use support::{Own, Random, own, seeds};

const NEVER: u64 = u64::MAX;
const QUEUES: usize = 4;
const MATCHING: MatchConfig = MatchConfig {
    eager: 128,
    credits: 4,
    headers: 8,
    shared_credits: 0,
    shared_headers: 0,
    shared_shorts: 0,
    pieces: 0,
    seed: 5,
};
/// A policy that parks at once, until notified.
const SLEEPY: Policy = Policy { park_ns: u64::MAX, ..Policy::EFFICIENT };

/// A host that records the sleeping threads, and the word of each wake-up.
struct Counting {
    inner: LinuxHost,
    /// The words that threads sleep on, with the values at which they sleep.
    asleep: Mutex<Vec<[(usize, u32); 2]>>,
    wakes: Mutex<HashMap<usize, u64>>,
}

/// A sleep longer than any test, in place of an unlimited sleep.
const LONG_NS: u64 = 600_000_000_000;

fn address(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word) as usize
}

impl Counting {
    fn new() -> Self {
        panics_end_all();
        Counting { inner: LinuxHost::private(), asleep: Mutex::default(), wakes: Mutex::default() }
    }

    /// Waits until `threads` threads sleep or are about to sleep.
    fn until_asleep(&self, threads: usize) {
        // SAFETY: a sleeper's words stay in place until the sleeper has removed them from the list.
        let stands = |&(word, expected): &(usize, u32)| unsafe {
            (*(word as *const AtomicU32)).load(Ordering::SeqCst) == expected
        };
        until("that many sleep", || {
            let asleep = self.asleep.lock().unwrap();
            asleep.iter().filter(|words| words.iter().all(stands)).count() == threads
        });
    }

    fn sleeping(&self, words: [(&AtomicU32, u32); 2], sleep: impl FnOnce() -> Woken) -> Woken {
        let words = words.map(|(word, expected)| (address(word), expected));
        self.asleep.lock().unwrap().push(words);
        let woken = sleep();
        let mut asleep = self.asleep.lock().unwrap();
        let this = asleep.iter().position(|other| *other == words).unwrap();
        asleep.swap_remove(this);
        woken
    }

    fn wakes(&self, event: &EventCount) -> u64 {
        let word = std::ptr::from_ref(event) as usize;
        self.wakes.lock().unwrap().get(&word).copied().unwrap_or(0)
    }

    fn all_wakes(&self) -> u64 {
        self.wakes.lock().unwrap().values().sum()
    }
}

fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let began = Instant::now();
    while !ready() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
        thread::yield_now();
    }
}

/// Makes a panic exit the process. Otherwise sleeping threads would keep a failed test from ending.
fn panics_end_all() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            // Bypasses the test harness's capture, which would lose the message at exit.
            let _ = writeln!(std::io::stderr(), "{panic}");
            std::process::exit(101);
        }));
    });
}

impl Host for Counting {
    fn now_ns(&self) -> u64 {
        self.inner.now_ns()
    }

    fn yield_now(&self) {
        self.inner.yield_now();
    }

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) -> Woken {
        self.sleeping([(word, expected); 2], || {
            self.inner.wait(word, expected, timeout_ns.min(LONG_NS))
        })
    }

    fn wait_two(&self, words: [(&AtomicU32, u32); 2], timeout_ns: u64) -> Woken {
        self.sleeping(words, || self.inner.wait_two(words, timeout_ns.min(LONG_NS)))
    }

    fn wake(&self, word: &AtomicU32) -> u32 {
        *self.wakes.lock().unwrap().entry(address(word)).or_default() += 1;
        self.inner.wake(word)
    }
}

fn leak<T>(value: T) -> &'static mut T {
    Box::leak(Box::new(value))
}

type Hosted = Queue<'static, Counting>;
type Rails = Loopback<64>;

/// An engine, and the queues and channels of its worker.
struct Site {
    own: Own<Rails, 1>,
    channels: &'static Channels<QUEUES>,
    /// The rail's wait object. No test notifies it, because a loopback reports in the pass that
    /// posts or in the next pass.
    arrivals: &'static EventCount,
    queues: Vec<Hosted>,
    consumers: Vec<CommandConsumer<'static>>,
}

fn site(host: &'static Counting, queues: usize) -> Site {
    let config = Config { contexts: queues as u16, window: 16, ..Config::default() };
    let mut own = own(config, [Loopback::new()], 1 << 16);
    let storage = leak(MatchStorage::new(&MATCHING, queues * 4, 64, 4));
    own.engine.attach_matching(MATCHING, storage.memory()).unwrap();
    let channels = &*leak(Channels::new());
    let (queues, consumers) = (0..queues)
        .map(|id| {
            let memory = leak(QueueStorage::<16>::new()).memory();
            Queue::new(ContextId(id as u8), host, channels.queue(id), memory, SLEEPY).unwrap()
        })
        .unzip();
    Site { own, channels, arrivals: leak(EventCount::new()), queues, consumers }
}

fn submit(queue: &mut Hosted, command: Command, after: &[&Event<'static>]) -> Event<'static> {
    let command = queue.create(command).unwrap();
    let command = after.iter().try_fold(command, |command, event| command.after(event)).unwrap();
    queue.submit(command)
}

fn fill(at: LocalAddr, pattern: u64) -> Command {
    Command::Fill { at, len: 8, pattern, width: 8 }
}

#[test]
fn a_worker_and_a_thread_sleep_until_another_worker_s_event() {
    for _ in 0..100 {
        let host = &*leak(Counting::new());
        let (mut first, mut second) = (site(host, 1), site(host, 2));
        let stop = AtomicBool::new(false);
        let target = second.own.target;
        let made = submit(&mut first.queues[0], Command::Marker, &[]);
        thread::scope(|scope| {
            let Site { own: Own { engine, .. }, channels, arrivals, queues, consumers } =
                &mut second;
            let mut worker = Worker::new(engine, consumers, SLEEPY);
            let (channels, arrivals) = (*channels, *arrivals);
            let running = scope.spawn({
                let stop = &stop;
                move || {
                    let finished = worker.run(host, &channels.send, Some(arrivals), stop, NEVER);
                    (finished, worker.counts())
                }
            });
            let mut queues = queues.drain(..);
            let (mut waits, mut after) = (queues.next().unwrap(), queues.next().unwrap());
            // One thread waits for the event `made`. The running worker has a command that depends
            // on `made`, and a marker behind that command.
            let made_here = made.clone();
            let waiting = scope.spawn(move || (waits.wait(&made_here, NEVER), waits.counts()));
            let filled = submit(&mut after, fill(target.at(0), 5), &[&made]);
            let behind = submit(&mut after, Command::Marker, &[]);
            host.until_asleep(2);
            assert!(!filled.is_done() && !behind.is_done());
            // So far nothing has woken the waiting thread. Now the first worker executes the
            // command of `made`.
            let before = host.all_wakes();
            assert_eq!(host.wakes(&channels.recv[0]), 0);
            Worker::new(&mut first.own.engine, &mut first.consumers, SLEEPY).turn(host);
            let (waited, counts) = waiting.join().unwrap();
            assert_eq!((waited, counts.deadline_wakes), (Ok(Reply::Done(0)), 0));
            assert_eq!(after.finish(NEVER), Ok(()));
            assert_eq!(filled.reply(), Some(Reply::Done(0)));
            assert!(behind.is_done());
            // One wake-up for the thread, one for the worker, and possibly one for this thread.
            assert_eq!(host.wakes(&channels.recv[0]), 1);
            assert!((2..=3).contains(&(host.all_wakes() - before)), "{:?}", host.wakes.lock());
            stop.store(true, Ordering::Release);
            channels.send.notify(host);
            let (finished, counts) = running.join().unwrap();
            assert!(finished && counts.deadline_wakes == 0 && counts.parks > 0, "{counts:?}");
        });
    }
}

#[test]
fn a_submission_wakes_only_the_worker_and_a_completion_only_its_queue() {
    let host = &*leak(Counting::new());
    let mut site = site(host, 3);
    let stop = AtomicBool::new(false);
    let (target, peer) = (site.own.target, site.own.peer);
    thread::scope(|scope| {
        let Site { own: Own { engine, .. }, channels, arrivals, queues, consumers } = &mut site;
        let (channels, arrivals) = (*channels, *arrivals);
        let mut worker = Worker::new(engine, consumers, SLEEPY);
        let running = scope.spawn({
            let stop = &stop;
            move || {
                let finished = worker.run(host, &channels.send, Some(arrivals), stop, NEVER);
                (finished, worker.counts())
            }
        });
        let mut queues = queues.drain(..);
        let (mut busy, mut waits, mut idle) =
            (queues.next().unwrap(), queues.next().unwrap(), queues.next().unwrap());
        // Starts a thread that sleeps until the end of this test.
        let tag = Tag::new(7, 0);
        let recv = Command::Recv { source: None, tag, ignore: Tag::ZERO, into: None };
        let waiting = scope.spawn(move || {
            let event = submit(&mut waits, recv, &[]);
            let Ok(Reply::Received(status)) = waits.wait(&event, NEVER) else {
                panic!("{event:?}")
            };
            (status.outcome, waits.counts())
        });
        host.until_asleep(2);
        assert_eq!(host.wakes(&channels.recv[1]), 0);
        for round in 0..200u64 {
            let before = [host.wakes(&channels.send), host.wakes(&channels.recv[0])];
            let event = submit(&mut busy, fill(target.at(0), round), &[]);
            assert_eq!(host.wakes(&channels.send), before[0] + 1, "the worker slept");
            assert_eq!(busy.wait(&event, NEVER), Ok(Reply::Done(0)));
            host.until_asleep(2);
            assert!(host.wakes(&channels.recv[0]) <= before[1] + 1);
        }
        // None of these was notified: the sleeper on the receive, the idle queue, the rail's wait
        // object.
        assert_eq!([1, 2].map(|queue| host.wakes(&channels.recv[queue])), [0, 0]);
        assert_eq!(host.wakes(arrivals), 0);
        let send = Command::Send { to: peer, tag, from: None, sync: false };
        let sent = submit(&mut idle, send, &[]);
        assert!(matches!(idle.wait(&sent, NEVER), Ok(Reply::Done(_))));
        let (outcome, counts) = waiting.join().unwrap();
        assert_eq!(outcome, Received::Ok);
        assert_eq!((counts.spurious, counts.deadline_wakes), (0, 0), "{counts:?}");
        assert_eq!(host.wakes(&channels.recv[1]), 1);
        stop.store(true, Ordering::Release);
        channels.send.notify(host);
        let (finished, counts) = running.join().unwrap();
        assert!(finished && counts.deadline_wakes == 0 && counts.spurious <= 1, "{counts:?}");
    });
}

#[test]
fn a_worker_sleeps_while_a_marker_waits_for_the_engine() {
    let host = &*leak(Counting::new());
    let mut site = site(host, 2);
    let stop = AtomicBool::new(false);
    let peer = site.own.peer;
    thread::scope(|scope| {
        let Site { own: Own { engine, .. }, channels, arrivals, queues, consumers } = &mut site;
        let (channels, arrivals) = (*channels, *arrivals);
        let mut worker = Worker::new(engine, consumers, SLEEPY);
        let running = scope.spawn({
            let stop = &stop;
            move || worker.run(host, &channels.send, Some(arrivals), stop, NEVER)
        });
        let tag = Tag::new(7, 0);
        submit(
            &mut queues[0],
            Command::Recv { source: None, tag, ignore: Tag::ZERO, into: None },
            &[],
        );
        let marker = submit(&mut queues[0], Command::Marker, &[]);
        host.until_asleep(1);
        let sent =
            submit(&mut queues[1], Command::Send { to: peer, tag, from: None, sync: false }, &[]);
        assert_eq!(queues[0].wait(&marker, NEVER), Ok(Reply::Done(0)));
        assert!(matches!(queues[1].wait(&sent, NEVER), Ok(Reply::Done(_))));
        stop.store(true, Ordering::Release);
        channels.send.notify(host);
        assert!(running.join().unwrap());
    });
}

/// Runs `user` together with a sleeping worker. The worker sleeps again before it is stopped.
fn beside_a_sleeping_worker(
    contexts: usize,
    user: impl FnOnce(&'static Counting, &mut Vec<Hosted>, LocalId),
) {
    let host = &*leak(Counting::new());
    let mut site = site(host, contexts);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let Site { own: Own { engine, target, .. }, channels, arrivals, queues, consumers } =
            &mut site;
        let (channels, arrivals) = (*channels, *arrivals);
        let mut worker = Worker::new(engine, consumers, SLEEPY);
        let running = scope.spawn({
            let stop = &stop;
            move || {
                let finished = worker.run(host, &channels.send, Some(arrivals), stop, NEVER);
                (finished, worker.counts())
            }
        });
        host.until_asleep(1);
        user(host, queues, *target);
        stop.store(true, Ordering::Release);
        channels.send.notify(host);
        let (finished, counts) = running.join().unwrap();
        assert!(finished && counts.deadline_wakes == 0, "{counts:?}");
    });
}

#[test]
fn unannounced_commands_of_a_dropped_queue_are_executed_at_once() {
    beside_a_sleeping_worker(1, |_, queues, target| {
        let mut queue = queues.pop().unwrap();
        let command = queue.create(fill(target.at(0), 9)).unwrap();
        let event = queue.enqueue(command);
        drop(queue);
        until("a command of a dropped queue", || event.is_done());
        assert_eq!(event.reply(), Some(Reply::Done(0)));
    });
}

#[test]
fn pending_counts_entries_that_are_not_taken() {
    let host = &*leak(Counting::new());
    let Site { own: Own { mut engine, target, .. }, mut queues, mut consumers, .. } = site(host, 1);
    let queue = &mut queues[0];
    for lap in 0..10 {
        assert_eq!(queue.pending(), Pending { send: 0, recv: 0 });
        let events: Vec<_> = (0..5).map(|_| submit(queue, fill(target.at(0), lap), &[])).collect();
        assert_eq!(queue.pending(), Pending { send: 5, recv: 0 });
        let mut worker = Worker::new(&mut engine, &mut consumers, SLEEPY);
        assert_eq!(worker.pending(), Pending { send: 5, recv: 0 });
        worker.turn(host);
        assert!(events.iter().all(Event::is_done));
        assert_eq!(worker.pending(), Pending { send: 0, recv: 5 });
        assert_eq!(queue.pending(), Pending { send: 0, recv: 5 });
        queue.finish(NEVER).unwrap();
    }
}

/// Commands depend on events of both workers' queues. Every command depends only on earlier
/// commands, so no cycle exists and all complete.
#[test]
fn commands_that_depend_on_each_other_over_two_workers_all_complete() {
    for seed in seeds(20) {
        let host = &*leak(Counting::new());
        let mut sites = [site(host, 2), site(host, 2)];
        let stop = AtomicBool::new(false);
        let submitted = Mutex::new(Vec::<Event<'static>>::new());
        thread::scope(|scope| {
            let mut users = vec![];
            let mut workers = vec![];
            for (at, site) in sites.iter_mut().enumerate() {
                let Site { own, channels, arrivals, queues, consumers } = site;
                let Own { engine, target, .. } = own;
                let (stop, channels, arrivals) = (&stop, *channels, *arrivals);
                let mut worker = Worker::new(engine, consumers, SLEEPY);
                workers.push((
                    channels,
                    scope.spawn(move || {
                        let finished =
                            worker.run(host, &channels.send, Some(arrivals), stop, NEVER);
                        (finished, worker.counts())
                    }),
                ));
                for (i, mut queue) in queues.drain(..).enumerate() {
                    let (submitted, target): (_, LocalId) = (&submitted, *target);
                    let mut random = Random(seed ^ ((at * 2 + i) as u64) << 32);
                    users.push(scope.spawn(move || {
                        for round in 0..100u64 {
                            let after: Vec<_> = {
                                let recent = submitted.lock().unwrap();
                                let latest = recent.len().saturating_sub(6);
                                let some = recent[latest..].iter().filter(|_| random.below(3) == 0);
                                some.take(4).cloned().collect()
                            };
                            let command = loop {
                                match queue.create(fill(target.at(64 * i as u64), round)) {
                                    Ok(command) => break command,
                                    // Waits until other commands complete, so that a slot is free.
                                    Err(_) => queue.finish(NEVER).unwrap(),
                                }
                            };
                            let command = after
                                .iter()
                                .try_fold(command, |command, event| command.after(event));
                            let event = queue.submit(command.unwrap());
                            let mut recent = submitted.lock().unwrap();
                            recent.push(event.clone());
                            // Drop old events, so that slots do not run out.
                            let old = recent.len().saturating_sub(8);
                            let old: Vec<_> = recent.drain(..old).collect();
                            drop((recent, after));
                            match random.below(4) {
                                0 => assert_eq!(
                                    queue.wait(&event, NEVER),
                                    Ok(Reply::Done(0)),
                                    "seed {seed}"
                                ),
                                1 => old.iter().for_each(|event| {
                                    assert_eq!(
                                        queue.wait(event, NEVER),
                                        Ok(Reply::Done(0)),
                                        "seed {seed}"
                                    )
                                }),
                                _ => {}
                            }
                        }
                        queue.finish(NEVER).unwrap();
                        queue.counts()
                    }));
                }
            }
            let all = users.iter().map(|user| || user.is_finished());
            let all: Vec<_> = all.collect();
            until("all commands end", || all.iter().all(|finished| finished()));
            drop(all);
            for user in users {
                assert_eq!(user.join().unwrap().deadline_wakes, 0, "seed {seed}");
            }
            stop.store(true, Ordering::Release);
            for (channels, worker) in workers {
                channels.send.notify(host);
                let (finished, counts) = worker.join().unwrap();
                assert!(finished && counts.deadline_wakes == 0, "seed {seed}: {counts:?}");
            }
        });
    }
}
