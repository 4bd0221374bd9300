//! Queues that end under load, in memory that is freed at once: run under AddressSanitizer by tests/sanitize.sh.

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
    let mut engine = Engine::new(Config::DEFAULT, [Loopback::<16>::new()], tables.memory()).unwrap();
    // SAFETY: `words` outlives the engine, and is touched through it alone.
    let region = unsafe { Region::new(core::ptr::NonNull::from(&mut words).cast(), 16, RegionKind::Private) };
    let region = engine.register(region).unwrap();
    let host = SpinHost::new(1);
    let mut random = Random::new("queues destroyed under load");
    let (mut done, mut abandoned) = (0, 0);
    for round in 0..10_000u64 {
        let channels = <Channels>::new();
        let mut room = Box::new(Room::<8>::new());
        let (mut queue, desk) =
            Queue::new(ContextId(0), &host, channels.queue(0), room.memory(), Policy::BALANCED).unwrap();
        let mut desks = [desk];
        let events: Vec<_> = (0..random.within(0..9))
            .map(|at| {
                let at = region.at(at as u64 % 2 * 8);
                let command = queue.create(FillCommand { at, len: 8, pattern: round, width: 8 }).unwrap();
                let event = queue.submit(command);
                // One that comes after it, and is dropped before it was submitted.
                let marker = queue.create(MarkerCommand);
                drop(marker.map(|marker| marker.after(&event)));
                event
            })
            .collect();
        let mut worker = Worker::new(&mut engine, &mut desks, Policy::BALANCED);
        if random.within(0..2) == 0 {
            worker.turn(&host);
        }
        let kept: Vec<_> = events.iter().filter(|_| random.within(0..2) == 0).cloned().collect();
        if random.within(0..2) == 0 {
            drop(queue);
            drop(desks);
        } else {
            drop(desks);
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
