//! Tests queues in separate threads, with a worker in another thread.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{mem, thread};

use fishplate::worker::{self, Options, StartError, Wakes};
use fishplate_core::engine::ContextId;
use fishplate_core::engine::command::Reply;
use fishplate_core::engine::lane::CommandConsumer;
use fishplate_core::engine::worker::Worker;
use fishplate_core::queue::{Command, Queue, QueueStorage};
use fishplate_core::sync::event::{Channels, EventCount};
use fishplate_core::sync::spin::Policy;
use fishplate_sys::LinuxHost;

use crate::rig::{Hosted, NEVER, Places, create, leak, queue_of, scene, submit};
use crate::support::{Own, Random, seeds, word};

/// Runs `user` in one thread per queue, and a worker in another thread.
fn with_worker(seed: u64, queues: u8, user: impl Fn(usize, Hosted, Places) + Sync) {
    let Own { mut engine, peer, source, target, remote, .. } = scene(seed, queues.into());
    let at = Places { peer, source, target, remote };
    let (host, channels) = (&*leak(LinuxHost::private()), &*leak(Channels::new()));
    let (queues, mut consumers): (Vec<_>, Vec<_>) =
        (0..queues).map(|id| queue_of::<16>(host, channels, id)).unzip();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut worker = Worker::new(&mut engine, &mut consumers, Policy::BALANCED);
        let stopped = &stop;
        let running = scope.spawn(move || worker.run(host, &channels.send, None, stopped, NEVER));
        let users: Vec<_> = queues
            .into_iter()
            .enumerate()
            .map(|(i, queue)| {
                let user = &user;
                scope.spawn(move || user(i, queue, at))
            })
            .collect();
        let ends: Vec<_> = users.into_iter().map(|user| user.join()).collect();
        // Release: a worker that sees `stop` also sees all earlier submissions in its rings.
        stop.store(true, Ordering::Release);
        channels.send.notify(host);
        assert!(running.join().unwrap(), "seed {seed}");
        // Unwraps only now that the worker has stopped, so that a failure ends the test.
        ends.into_iter().for_each(|end| end.unwrap());
    });
    assert!(consumers.iter_mut().all(CommandConsumer::is_over));
}

#[test]
fn many_queues_feed_one_worker_and_get_their_own_events() {
    for seed in seeds(10) {
        let events = AtomicUsize::new(0);
        with_worker(seed, 4, |i, mut queue, at| {
            let mut random = Random(seed ^ (i as u64) << 32);
            let base = 4096 * i as u64;
            for round in 1..=50u64 {
                let fill =
                    Command::Fill { at: at.source.at(base), len: 64, pattern: round, width: 8 };
                let made = submit(&mut queue, fill);
                let put =
                    Command::Put { from: at.source.at(base), len: 64, to: at.remote.at(base) };
                let put = create(&mut queue, put).after(&made).unwrap();
                let put = queue.enqueue(put);
                match random.below(3) {
                    0 => assert_eq!(queue.wait(&put, NEVER), Ok(Reply::Done(0)), "seed {seed}"),
                    1 => {
                        let marker = submit(&mut queue, Command::Marker);
                        assert_eq!(queue.wait(&marker, NEVER), Ok(Reply::Done(0)), "seed {seed}");
                    }
                    _ => queue.finish(NEVER).unwrap(),
                }
                assert_eq!(put.reply(), Some(Reply::Done(0)), "seed {seed}");
                events.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert_eq!(events.into_inner(), 200, "seed {seed}");
    }
}

#[test]
fn commands_of_a_dropped_queue_are_still_executed() {
    for seed in seeds(10) {
        let kept = std::sync::Mutex::new(vec![]);
        with_worker(seed, 3, |i, mut queue, at| {
            let to = at.remote.at(4096 * i as u64);
            let events = (0..10)
                .map(|_| submit(&mut queue, Command::Put { from: at.source.at(0), len: 4000, to }));
            kept.lock().unwrap().extend(events);
        });
        let kept = kept.into_inner().unwrap();
        assert!(kept.iter().all(|event| event.reply() == Some(Reply::Done(0))), "seed {seed}");
    }
}

/// Returns the processors that the only running worker may use. Retries, because a stopped worker
/// may still be listed for a while.
fn cpus_of_the_worker() -> String {
    let late = Instant::now() + Duration::from_secs(20);
    loop {
        match &mut cpus_of_workers()[..] {
            [cpus] => return mem::take(cpus),
            listed => assert!(Instant::now() < late, "{listed:?}"),
        }
        thread::yield_now();
    }
}

fn cpus_of_workers() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
        .filter(|status| status.starts_with("Name:\tfishplate\n"))
        .filter_map(|status| {
            status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:\t").map(str::to_owned))
        })
        .collect()
}

#[test]
fn a_stopped_worker_thread_has_executed_all_submissions() {
    let cpu = fishplate_sys::affinity::allowed().unwrap().iter().next();
    let (host, channels, arrivals) = (LinuxHost::private(), <Channels>::new(), EventCount::new());
    let wakes = Wakes { host: &host, send: &channels.send, arrivals: Some(&arrivals) };
    for policy in [Policy::BALANCED, Policy::EFFICIENT] {
        let Own { engine, target, .. } = scene(1, 1);
        let mut room = QueueStorage::<16>::new();
        let (mut queue, consumer) =
            Queue::new(ContextId(0), &host, channels.queue(0), room.memory(), Policy::BALANCED)
                .unwrap();
        thread::scope(|scope| {
            let mut parts = (Box::new(engine), vec![consumer]);
            for round in 0..20 {
                let options = Options { cpu, policy };
                let running = worker::start(scope, parts, wakes, options, NEVER).unwrap();
                let at = target.at(8 * round);
                let fill = Command::Fill { at, len: 8, pattern: round + 1, width: 8 };
                let events: Vec<_> = (0..10)
                    .map(|_| {
                        let command = queue.create(fill).unwrap();
                        queue.submit(command)
                    })
                    .collect();
                let cpus = (round == 0).then(|| {
                    // The worker has executed a command, so the pinning is in effect.
                    queue.finish(NEVER).unwrap();
                    cpus_of_the_worker()
                });
                let stopped = running.stop().unwrap();
                assert!(cpus.is_none_or(|cpus| cpus == cpu.unwrap().to_string()));
                assert!(
                    stopped.finished
                        && events.iter().all(|event| event.reply() == Some(Reply::Done(0)))
                );
                assert_eq!(word(&stopped.parts.0, at), round + 1);
                parts = stopped.parts;
                queue.finish(NEVER).unwrap();
            }
        });
    }
    let options = Options { cpu: Some(1 << 20), ..Options::default() };
    let Own { engine, .. } = scene(1, 1);
    thread::scope(|scope| {
        let nowhere = worker::start(scope, (Box::new(engine), vec![]), wakes, options, NEVER);
        assert!(matches!(nowhere.unwrap().stop().err(), Some(StartError::Pin(_))));
    });
}
