//! A sleeper and its notifiers, run as threads and under the model checker. Sleeps have no deadline
//! here, so a lost wake-up hangs, and the model checker reports a deadlock.

extern crate std;

use std::sync::Arc;

use super::*;
use crate::sync::{
    primitive::AtomicU64,
    testing::{LockHost, Mutex, model, rounds, thread},
};

const ROUNDS: u64 = rounds(1, 2_000);
const FOREVER: u64 = u64::MAX;

/// Counts published and consumed work. Relaxed on purpose: the scenarios must rely only on the
/// eventcount's barriers.
struct Scene {
    host: LockHost,
    work: [AtomicU64; 2],
    event: [EventCount; 2],
}

impl Scene {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            host: LockHost::new(),
            work: [AtomicU64::new(0), AtomicU64::new(0)],
            event: [EventCount::new(), EventCount::new()],
        })
    }

    fn done(&self, at: usize) -> u64 {
        self.work[at].load(Ordering::Relaxed)
    }

    fn publish(&self, at: usize, amount: u64) {
        self.work[at].fetch_add(amount, Ordering::Relaxed);
        self.event[at].notify(&self.host);
    }
}

#[test]
fn a_sleeper_finds_all_work_of_one_notifier() {
    model(|| {
        let scene = Scene::new();
        let notifier = thread::spawn({
            let scene = scene.clone();
            move || (0..ROUNDS).for_each(|_| scene.publish(0, 1))
        });
        for want in 1..=ROUNDS {
            while scene.done(0) < want {
                scene.event[0].park(&scene.host, FOREVER, || scene.done(0) >= want);
            }
        }
        notifier.join().unwrap();
    });
}

#[test]
fn a_sleeper_finds_the_work_of_two_notifiers() {
    model(|| {
        let scene = Scene::new();
        let notifiers = [(); 2].map(|()| {
            let scene = scene.clone();
            thread::spawn(move || (0..ROUNDS).for_each(|_| scene.publish(0, 1)))
        });
        while scene.done(0) < 2 * ROUNDS {
            scene.event[0].park(&scene.host, FOREVER, || scene.done(0) == 2 * ROUNDS);
        }
        notifiers.into_iter().for_each(|notifier| notifier.join().unwrap());
    });
}

#[test]
fn a_sleeper_on_two_eventcounts_finds_work_of_either() {
    model(|| {
        let scene = Scene::new();
        let notifier = thread::spawn({
            let scene = scene.clone();
            move || {
                for n in 0..ROUNDS {
                    scene.publish(1, 1);
                    if n % 2 == 1 {
                        scene.publish(0, 1);
                    }
                }
            }
        });
        let all = ROUNDS + ROUNDS / 2;
        let done = || scene.done(0) + scene.done(1);
        loop {
            let seen = done();
            if seen == all {
                break;
            }
            [&scene.event[0], &scene.event[1]].park(&scene.host, FOREVER, || done() != seen);
        }
        notifier.join().unwrap();
    });
}

/// The descriptor is modelled by a word of the host. It is readable if the word is not zero.
#[test]
fn a_sleeper_on_a_descriptor_finds_work_of_either_eventcount() {
    model(|| {
        let scene = Scene::new();
        let descriptor = Arc::new(AtomicU32::new(0));
        let notifier = thread::spawn({
            let (scene, descriptor) = (scene.clone(), descriptor.clone());
            move || {
                for n in 0..2 * ROUNDS {
                    let at = n as usize % 2;
                    scene.work[at].fetch_add(1, Ordering::Relaxed);
                    scene.event[at].notify_with(&scene.host, || {
                        descriptor.store(1, Ordering::Relaxed);
                        scene.host.wake(&descriptor);
                    });
                }
            }
        });
        let done = || scene.done(0) + scene.done(1);
        loop {
            let seen = done();
            if seen == 2 * ROUNDS {
                break;
            }
            let sleep = || scene.host.wait(&descriptor, 0, FOREVER);
            let events = [&scene.event[0], &scene.event[1]];
            if EventCount::park_elsewhere(events, &scene.host, || done() != seen, sleep).is_some() {
                descriptor.store(0, Ordering::Relaxed);
            }
        }
        notifier.join().unwrap();
    });
}

#[test]
fn two_threads_that_answer_each_other_never_both_sleep() {
    model(|| {
        let scene = Scene::new();
        let await_turn = |scene: &Scene, at: usize, turn: u64| {
            while scene.done(at) < turn {
                scene.event[at].park(&scene.host, FOREVER, || scene.done(at) >= turn);
            }
        };
        let other = thread::spawn({
            let scene = scene.clone();
            move || {
                for turn in 1..=ROUNDS {
                    await_turn(&scene, 0, turn);
                    scene.publish(1, 1);
                }
            }
        });
        for turn in 1..=ROUNDS {
            scene.publish(0, 1);
            await_turn(&scene, 1, turn);
        }
        other.join().unwrap();
    });
}

#[test]
fn a_listener_is_notified_of_everything_that_it_waits_for() {
    model(|| {
        struct Elsewhere {
            host: LockHost,
            work: AtomicU64,
            listeners: Listeners<'static, 2>,
        }
        let elsewhere = Arc::new(Elsewhere {
            host: LockHost::new(),
            work: AtomicU64::new(0),
            listeners: Listeners::new(),
        });
        let listener = thread::spawn({
            let elsewhere = elsewhere.clone();
            move || {
                let Elsewhere { host, work, listeners } = &*elsewhere;
                let owned = Arc::new(EventCount::new());
                // SAFETY: the `Arc` returns to the test, which drops it once no thread notifies the
                // eventcount.
                let event: &'static EventCount = unsafe { &*Arc::as_ptr(&owned) };
                for want in 1..=ALL {
                    let done = || work.load(Ordering::Relaxed) >= want;
                    while !done() {
                        let listening = listeners.listen(event);
                        assert_ne!(listening, Listening::Full);
                        if listening == Listening::Standing {
                            // Like a worker, checks again if a notifier has removed its listener
                            // meanwhile.
                            event.park(host, FOREVER, || {
                                listeners.listen(event) != Listening::Standing || done()
                            });
                        }
                    }
                }
                owned
            }
        });
        let Elsewhere { host, work, listeners } = &*elsewhere;
        for _ in 0..ALL {
            work.fetch_add(1, Ordering::Relaxed);
            host.notifier_barrier();
            listeners.notify(host);
        }
        drop(listener.join().unwrap());
    });
    const ALL: u64 = rounds(2, 2_000);
}

/// A host without a notifier's barrier, as `membarrier` allows. Only edge `event.listen` orders the
/// registration of a listener before its use.
struct Asymmetric(LockHost);

impl Host for Asymmetric {
    fn now_ns(&self) -> u64 {
        self.0.now_ns()
    }

    fn yield_now(&self) {
        self.0.yield_now();
    }

    fn wait(&self, word: &AtomicU32, expected: u32, timeout_ns: u64) -> Woken {
        self.0.wait(word, expected, timeout_ns)
    }

    fn wait_two(&self, words: [(&AtomicU32, u32); 2], timeout_ns: u64) -> Woken {
        self.0.wait_two(words, timeout_ns)
    }

    fn wake(&self, word: &AtomicU32) -> u32 {
        self.0.wake(word)
    }

    fn notifier_barrier(&self) {}
}

#[test]
fn a_listener_is_seen_as_its_thread_made_it() {
    model(|| {
        let listeners = Arc::new(Listeners::<'static, 2>::new());
        let listener = thread::spawn({
            let listeners = listeners.clone();
            move || {
                let owned = Arc::new(EventCount::new());
                // SAFETY: the `Arc` returns to the test, which drops it once no thread notifies the
                // eventcount.
                let event: &'static EventCount = unsafe { &*Arc::as_ptr(&owned) };
                assert_eq!(listeners.listen(event), Listening::New);
                owned
            }
        });
        let host = Asymmetric(LockHost::new());
        // Wait until a thread listens.
        while listeners.is_empty() {
            thread::yield_now();
        }
        assert_eq!(listeners.notify(&host), 0);
        drop(listener.join().unwrap());
    });
}

/// Models how a node's worker passes the wait object to its program. `node` is the lock of the
/// node: the worker and the program both drive the node. `bell` is the lock of the wait object: its
/// holder may sleep on `event[1]`, and a peer notifies this eventcount. `work[0]` is 1 while the
/// program holds `node`, and 2 when the program has finished.
#[test]
fn a_program_takes_the_bell_from_its_worker_and_neither_misses_it() {
    model(|| {
        let scene = Scene::new();
        let locks = Arc::new([Mutex::new(()), Mutex::new(())]);
        let worker = thread::spawn({
            let (scene, locks) = (scene.clone(), locks.clone());
            move || {
                let [node, bell] = &*locks;
                loop {
                    drop(node.lock().unwrap());
                    if scene.done(0) == 2 {
                        break;
                    }
                    let _taken = bell.lock().unwrap();
                    [&scene.event[0], &scene.event[1]]
                        .park(&scene.host, FOREVER, || scene.done(0) != 0);
                }
            }
        });
        let peer = thread::spawn({
            let scene = scene.clone();
            move || scene.publish(1, 1)
        });
        let [node, bell] = &*locks;
        let held = node.lock().unwrap();
        scene.publish(0, 1);
        let taken = bell.lock().unwrap();
        while scene.done(1) == 0 {
            scene.event[1].park(&scene.host, FOREVER, || scene.done(1) != 0);
        }
        drop(taken);
        scene.publish(0, 1);
        drop(held);
        worker.join().unwrap();
        peer.join().unwrap();
    });
}
