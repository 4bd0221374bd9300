//! Several queues at once, and queues that are dropped under load. Their memory is freed at once,
//! so AddressSanitizer detects late uses (tests/sanitize.sh).

#![cfg(not(fishplate_loom))]

extern crate std;

use std::{boxed::Box, vec::Vec};

use super::*;
use crate::engine::{Config, Engine, Tables, worker::Worker};
use crate::mem::{Region, RegionKind};
use crate::rail::loopback::Loopback;
use crate::sync::event::Channels;
use crate::sync::testing::Random;

#[test]
fn queues_destroyed_under_load_leave_nothing_behind() {
    let (mut words, mut tables) = ([0u64; 2], Tables::<1, 1, 128, 4, 16>::new());
    let mut engine =
        Engine::new(Config::DEFAULT, [Loopback::<16>::new()], tables.memory()).unwrap();
    // SAFETY: `words` outlives the engine, and only the engine accesses it.
    let region = unsafe {
        Region::new(core::ptr::NonNull::from(&mut words).cast(), 16, RegionKind::Private)
    };
    let region = engine.register(region).unwrap();
    let host = SpinHost::new(1);
    let mut random = Random::new("queues destroyed under load");
    let (mut done, mut abandoned) = (0, 0);
    for round in 0..10_000u64 {
        let channels = <Channels>::new();
        let mut room = Box::new(QueueStorage::<8>::new());
        let (mut queue, consumer) =
            Queue::new(ContextId(0), &host, channels.queue(0), room.memory(), Policy::BALANCED)
                .unwrap();
        let mut consumers = [consumer];
        let events: Vec<_> = (0..random.within(0..9))
            .map(|at| {
                let at = region.at(at as u64 % 2 * 8);
                let command =
                    queue.create(Command::Fill { at, len: 8, pattern: round, width: 8 }).unwrap();
                let event = queue.submit(command);
                // A dependent command is dropped before it is submitted.
                let marker = queue.create(Command::Marker);
                drop(marker.map(|marker| marker.after(&event)));
                event
            })
            .collect();
        let mut worker = Worker::new(&mut engine, &mut consumers, Policy::BALANCED);
        if random.within(0..2) == 0 {
            worker.turn(&host);
        }
        let kept: Vec<_> = events.iter().filter(|_| random.within(0..2) == 0).cloned().collect();
        if random.within(0..2) == 0 {
            drop(queue);
            drop(consumers);
        } else {
            drop(consumers);
            drop(queue);
        }
        drop(events);
        for event in kept {
            match event.reply() {
                Some(Reply::Done(0)) => done += 1,
                Some(Reply::Abandoned) => abandoned += 1,
                other => panic!("round {round}: {other:?}"),
            }
        }
    }
    assert!(done > 5_000 && abandoned > 5_000, "{done} done, {abandoned} abandoned");
}

#[test]
fn a_busy_queue_holds_up_no_other_by_more_than_a_batch() {
    const BATCH: usize = 4;
    let mut tables = Tables::<1, 1, 128, 4, 16>::new();
    let config = Config { batch: BATCH as u32, ..Config::DEFAULT };
    let mut engine = Engine::new(config, [Loopback::<16>::new()], tables.memory()).unwrap();
    let (host, channels) = (SpinHost::new(1), Channels::<2>::new());
    let (mut rooms, mut queues, mut consumers) =
        ([QueueStorage::<64>::new(), QueueStorage::new()], Vec::new(), Vec::new());
    for (id, room) in rooms.iter_mut().enumerate() {
        let channel = channels.queue(id);
        let made = Queue::new(ContextId(0), &host, channel, room.memory(), Policy::BALANCED);
        let (queue, consumer) = made.unwrap();
        queues.push(queue);
        consumers.push(consumer);
    }
    let submit = |queue: &mut Queue<'_, _>, count| {
        for _ in 0..count {
            let marker = queue.create(Command::Marker).unwrap();
            queue.submit(marker);
        }
    };
    submit(&mut queues[0], 64);
    let mut worker = Worker::new(&mut engine, &mut consumers, Policy::BALANCED);
    for turn in 1..=64 / BATCH {
        submit(&mut queues[1], 1);
        worker.turn(&host);
        let done = queues.iter_mut().map(|queue| queue.pending().recv).collect::<Vec<_>>();
        assert_eq!(done, [turn * BATCH, turn]);
    }
    assert!(queues.iter_mut().all(|queue| queue.finish(u64::MAX).is_ok()));
}
