//! A queue's thread and its worker's thread, run as threads and under the model checker. Events
//! show how commands completed. No slot is lost, whichever side leaves first.

extern crate std;

use core::sync::atomic::AtomicUsize;
use std::{boxed::Box, vec::Vec};

use super::*;
use crate::engine::worker::{Worker, stop_worker};
use crate::engine::{Config, Engine, Tables};
use crate::rail::loopback::Loopback;
use crate::sync::event::Channels;
use crate::sync::pool::Reclaim;
use crate::sync::primitive::AtomicBool;
use crate::sync::testing::{model, rounds, thread};

/// The memory that the two sides share. Dropping the scene frees it.
struct Scene {
    room: *mut QueueStorage<'static, 4>,
    ended: Box<AtomicUsize>,
}

impl Scene {
    fn new() -> Self {
        Scene { room: Box::into_raw(Box::new(QueueStorage::new())), ended: Box::default() }
    }

    fn memory(&mut self) -> QueueMemory<'static> {
        // SAFETY: the memory is lent once per scene, and the scene outlives every user of it.
        unsafe { &mut *self.room }.memory()
    }

    /// Creates a pool that counts how often its slab is freed.
    fn pool(
        &self,
        (header, slots): (&'static mut pool::Header, &'static mut [Slot<Entry<'static>>]),
    ) -> Pool<'static, Entry<'static>> {
        fn count(ended: *mut ()) {
            // SAFETY: the counter belongs to a scene, which outlives its pool.
            unsafe { &*ended.cast::<AtomicUsize>() }
                .fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        }
        let ended = (&raw const *self.ended).cast_mut().cast();
        Pool::new(header, slots, Some(Reclaim::new(count, ended))).unwrap()
    }

    fn ended_once(&self) {
        assert_eq!(
            self.ended.load(core::sync::atomic::Ordering::Relaxed),
            1,
            "times that the slab ended"
        );
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box, and nothing uses it any more.
        drop(unsafe { Box::from_raw(self.room) });
    }
}

#[test]
fn an_event_shows_how_its_command_ended() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let mut scene = Scene::new();
            let QueueMemory { pool, lane, .. } = scene.memory();
            let (mut pool, listeners) = (scene.pool(pool), &lane.listeners);
            let [ours, theirs] =
                pool.create(Entry::new(Command::Marker, listeners)).unwrap().share_twice();
            let event = Event(ours);
            let worker = thread::spawn(move || {
                // SAFETY: this thread acts as the worker, and completes the command once.
                unsafe { theirs.finish(Reply::Done(7)) };
            });
            let reply = loop {
                if let Some(reply) = event.reply() {
                    break reply;
                }
                thread::yield_now();
            };
            assert_eq!(reply, Reply::Done(7));
            drop(event);
            worker.join().unwrap();
            pool.close();
            scene.ended_once();
        }
    });
}

#[test]
fn whichever_end_leaves_first_no_slot_is_lost() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let mut scene = Scene::new();
            let QueueMemory { pool, submissions, completions, lane, .. } = scene.memory();
            let mut pool = scene.pool(pool);
            let to_worker = ring::split(submissions.0, submissions.1).unwrap();
            let from_worker = ring::split(completions.0, completions.1).unwrap();
            let [mut queue, mut consumer] = Side::both(lane, to_worker, from_worker);
            let listeners = &queue.lane.listeners;
            let mut events = Vec::new();
            for _ in 0..2 {
                let [ours, theirs] =
                    pool.create(Entry::new(Command::Marker, listeners)).unwrap().share_twice();
                events.push(Event(ours));
                queue.push(Posted::new(theirs, true));
            }
            let worker = thread::spawn(move || {
                // One command completes and is sent back. The other stays in the ring.
                if let Some(posted) = consumer.pop() {
                    // SAFETY: the command was just popped, and each command is popped once.
                    let entry = unsafe { posted.open() };
                    // SAFETY: this thread acts as the worker, and completes the command once.
                    unsafe { entry.finish(Reply::Done(0)) };
                    consumer.push(Posted::new(entry, true));
                }
            });
            drop(queue);
            worker.join().unwrap();
            let replies: Vec<_> = events.iter().map(Event::reply).collect();
            assert_eq!(replies, [Some(Reply::Done(0)), Some(Reply::Abandoned)]);
            pool.close();
            drop(events);
            scene.ended_once();
        }
    });
}

#[test]
fn a_worker_does_not_stop_before_what_was_submitted_before_it_was_told_to() {
    model(|| {
        for _ in 0..rounds(1, 200) {
            let mut scene = Scene::new();
            let shared = Box::into_raw(Box::new((
                Channels::<1>::new(),
                SpinHost::new(1),
                AtomicBool::new(false),
            )));
            // SAFETY: the box is freed below, once both sides are gone.
            let (channels, host, stop): &'static _ = unsafe { &*shared };
            let channel = channels.queue(0);
            let (mut queue, consumer) =
                Queue::new(ContextId(0), host, channel, scene.memory(), Policy::EFFICIENT).unwrap();
            let worker = thread::spawn(move || {
                let config = Config { window: 8, ..Config::DEFAULT };
                let mut tables = Box::new(Tables::<1, 1, 8, 1, 1>::new());
                let mut engine =
                    Box::new(Engine::new(config, [Loopback::<4>::new()], tables.memory()).unwrap());
                let mut consumers = [consumer];
                let mut worker = Worker::new(&mut engine, &mut consumers, Policy::EFFICIENT);
                // The worker takes no turns, so a command never completes.
                assert!(!worker.may_stop(stop));
            });
            let marker = queue.create(Command::Marker).unwrap();
            let event = queue.enqueue(marker);
            stop_worker(stop);
            worker.join().unwrap();
            drop(queue);
            assert_eq!(event.reply(), Some(Reply::Abandoned));
            drop(event);
            // SAFETY: the pointer came from a box, and nothing uses it any more.
            drop(unsafe { Box::from_raw(shared) });
        }
    });
}
